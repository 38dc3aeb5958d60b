"""`planner measure` prints the time and the energy of a command, and ends as the command does."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import refused

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
