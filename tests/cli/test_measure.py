"""`planner measure` prints the time and the energy of a command, and ends as the command does."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import refusal, refused
from fake_nvml import CUDA_SOURCE, UUIDS, StandIn, compiled

GPU = "emulated:a100-sxm/0"
MEASURE = [sys.executable, "-m", "perseus_planner", "measure", "--gpu", GPU]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))


def measured(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `planner measure` in a process of its own, since the command writes to its standard
    output.
    """
    return subprocess.run([*MEASURE, *arguments], capture_output=True, text=True, timeout=300)


def test_the_energy_of_a_command_is_printed_beside_its_output(tmp_path: Path):
    table = tmp_path / "power.csv"
    code = "import sys, time; time.sleep(0.3); print('trained'); sys.exit(7)"
    result = measured(
        "--tokens", "100", "--every", "20ms", "--csv", str(table), "--", sys.executable, "-c", code
    )
    assert (result.returncode, result.stdout) == (7, "trained\n")
    head, row, line, per_token, wrote = filter(None, result.stderr.splitlines())
    assert head.split("  ")[0] == "GPU"
    assert row.startswith(f"{GPU}  simulated a100-sxm")
    assert line.endswith("W on average (simulated)")
    assert per_token.endswith(" tokens/J")
    assert wrote == f"Wrote {table}"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 5
    assert {row["gpu"] for row in rows} == {GPU}
    times_s = [float(row["time_s"]) for row in rows]
    assert times_s == sorted(times_s)


def test_json_is_alone_on_stdout():
    result = measured("--json", "--samples", "4", "--", "sh", "-c", "echo trained; kill -TERM $$")
    found = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (128 + signal.SIGTERM, "trained\n")
    assert found["status"] == 128 + signal.SIGTERM
    assert found["energy_j"] == pytest.approx(found["average_w"] * found["time_s"])
    assert found["energy_per_sample_j"] == found["energy_j"] / 4
    assert found["samples_per_j"] * found["energy_per_sample_j"] == pytest.approx(1)
    assert [gpu["source"] for gpu in found["gpus"]] == ["counter"]


def test_signals_are_passed_on():
    code = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
signal.pause()
"""
    command = [*MEASURE, "--", sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(300) == 5


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    table = tmp_path / "power.csv"
    assert refused(f"measure --gpu {GPU} --csv {table} -- nowhere-to-be-found") == (
        "nowhere-to-be-found: cannot be run: No such file or directory; write the command after "
        "`--`"
    )
    assert not table.exists()
    assert refused("measure --gpu simulated:a100-sxm -- true") == (
        "--gpu simulated:a100-sxm: has a time of its own, in which commands take none; use "
        "emulated:a100-sxm/0"
    )


COUNTER, SENSOR = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"
LOST = 15  #: NVML_ERROR_GPU_IS_LOST
NOT_SUPPORTED = 3


def counter_goes_back(nvml: StandIn) -> None:
    nvml.set("energy_mj", 1, gpu=1)


def gpu_is_lost(nvml: StandIn) -> None:
    nvml.fail("*", LOST, gpu=1)


def all_are_lost(nvml: StandIn) -> None:
    nvml.fail("*", LOST)


def sensor_fails(nvml: StandIn) -> None:
    nvml.fail(SENSOR, NOT_SUPPORTED)
    nvml.fail("nvmlDeviceGetFieldValues", NOT_SUPPORTED)


UNKNOWN = {counter_goes_back: "went back", gpu_is_lost: "has fallen off", all_are_lost: "fallen"}
FAULTS = (*UNKNOWN, sensor_fails)
ENDS = {"exit 0": 0, "exit 5": 5, "exit 130": 130, "kill -KILL $$": 128 + signal.SIGKILL}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_status_is_that_of_the_command_whatever_fails(
    nvml: StandIn, tmp_path: Path, fault: Callable[[StandIn], None], end: str
):
    nvml.add("* power_w 300", "* energy_step_ms 10")
    table = tmp_path / "power.csv"
    with begun(tmp_path, end, "--json", "--csv", str(table)) as process:
        fault(nvml)
        stdout, stderr = let_end(process, tmp_path)
    assert process.returncode == ENDS[end], stderr
    found = json.loads(stdout)
    assert found["status"] == ENDS[end]
    assert table.exists()
    if fault in UNKNOWN:
        assert found["energy_j"] is None
        assert UNKNOWN[fault] in found["unknown"][0]
    else:
        assert found["energy_j"] >= 0
        assert found["unknown"] == []
    known = {"all_are_lost": 0, "sensor_fails": 2}.get(fault.__name__, 1)
    assert len(found["gpus"]) == known


def begun(folder: Path, end: str, *options: str) -> subprocess.Popen[str]:
    """Measure a command that has begun, and ends so when it is let."""
    os.mkfifo(folder / "go")
    measure = [sys.executable, "-m", "perseus_planner", "measure", *options]
    code = f"echo begun >&2; read line < {folder}/go; {end}"
    process = subprocess.Popen(
        [*measure, "--", "sh", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    return process


def let_end(process: subprocess.Popen[str], folder: Path) -> tuple[str, str]:
    (folder / "go").write_text("on\n")
    return process.communicate(timeout=300)


def test_a_lost_gpu_leaves_the_others(nvml: StandIn, tmp_path: Path):
    nvml.add("* power_w 300", "* energy_step_ms 10")
    with begun(tmp_path, "exit 0", "--tokens", "10") as process:
        gpu_is_lost(nvml)
        _, stderr = let_end(process, tmp_path)
    assert process.returncode == 0
    _head, row, line = filter(None, stderr.splitlines())
    assert row.startswith(f"nvml:{UUIDS[0]}")
    assert "energy unknown: nvml:" in line
    assert "has fallen off" in line


def test_an_energy_that_no_gpu_draws_is_said(nvml: StandIn, tmp_path: Path):
    nvml.add("* power_w 300", "* energy_step_ms 10")
    with begun(tmp_path, "sleep 0.5; exit 5") as process:  # longer than an update of the counter
        nvml.set("energy_mj", 4_000_000_000, gpu=0)
        _, stderr = let_end(process, tmp_path)
    assert process.returncode == 5
    assert f"nvml:{UUIDS[0]}: the energy cannot be right, " in stderr
    assert " for one GPU, which draws 1050 W at most" in stderr


@pytest.mark.parametrize("into", ["stdout", "stderr"])
def test_a_full_disk_does_not_change_the_status(into: str):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    options = ["--json"] if into == "stdout" else []
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, into: full}
        result = subprocess.run(
            [*MEASURE, *options, "--", "sh", "-c", "exit 5"], **streams, timeout=300, check=False
        )
    assert result.returncode == 5
    if into == "stdout":
        assert result.stderr == b"Error: the output cannot be written\n"


def test_samples_that_cannot_be_written_are_said(tmp_path: Path):
    """The folder goes away while the command runs."""
    folder = tmp_path / "samples"
    folder.mkdir()
    with begun(tmp_path, "exit 5", "--gpu", GPU, "--csv", str(folder / "power.csv")) as process:
        for part in folder.iterdir():
            part.unlink()
        folder.rmdir()
        _, stderr = let_end(process, tmp_path)
    assert process.returncode == 5
    assert f"{folder}/power.csv: cannot be written: No such file or directory" in stderr
    assert "W on average (simulated)" in stderr


def test_a_gpu_without_sensor_does_not_block_a_node(nvml: StandIn):
    nvml.add("* power_w 300", "* energy_step_ms 10")
    for function in (COUNTER, SENSOR, "nvmlDeviceGetFieldValues"):
        nvml.fail(function, NOT_SUPPORTED, gpu=1)
    code, _, stderr = refusal("measure -- true")
    assert code == 0
    assert f"not measured: nvml:{UUIDS[1]}: cannot read its power" in stderr
    assert stderr.rstrip().endswith("name the GPUs to measure with --gpu")
    assert "energy unknown" not in stderr
    assert refused("measure --gpu nvml:1 -- true").startswith(f"nvml:{UUIDS[1]}: cannot read its")


def test_mig_is_said(nvml: StandIn):
    nvml.add("* power_w 300", "* energy_step_ms 10", "1 mig 1")
    code, _, stderr = refusal("measure -- true")
    assert code == 0
    assert stderr.splitlines()[-1] == (
        f"nvml:{UUIDS[1]}: MIG is on, so this is the energy of the whole GPU, which all its "
        "instances share"
    )


def test_cuda_is_what_cuda_shows(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvml.add("* power_w 300", "* energy_step_ms 10")
    library = compiled(tmp_path / "cuda", source=CUDA_SOURCE)
    paths = f"{library.parent}:{os.environ['LD_LIBRARY_PATH']}"
    monkeypatch.setenv("LD_LIBRARY_PATH", paths)
    monkeypatch.setenv("FAKE_CUDA_UUIDS", UUIDS[1].removeprefix("GPU-").replace("-", ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    def gpus(*options: str) -> tuple[list[str], str]:
        measure = [sys.executable, "-m", "perseus_planner", "measure", *options]
        result = subprocess.run(
            [*measure, "--json", "--", "true"], capture_output=True, text=True, check=True
        )
        found = json.loads(result.stdout)
        return [gpu["gpu"] for gpu in found["gpus"]], " ".join(found["notes"])

    assert gpus("--gpu", "cuda") == ([f"nvml:{UUIDS[1]}"], "")
    listed, notes = gpus()
    assert listed == [f"nvml:{uuid}" for uuid in UUIDS]
    assert "`--gpu cuda` measures these alone" in notes
