"""`planner doctor` shows what can be read and set, and changes nothing without
--measure-latency.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
import yaml
from commands import done, loaded, refusal, refused
from fake_nvml import UUIDS, StandIn
from gpu_owners import LOCKS_AND_WAITS, files, guardians, kill, owner
from waiting import LONG_S

from perseus_planner.gpu import inspection, open_gpu
from perseus_planner.gpu.inspection import measure_latency, watch_energy
from perseus_planner.profiles.measurement import ClockChange

SET = "nvmlDeviceSetGpuLockedClocks"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch energy counters for a shorter time, in tests of something else."""
    monkeypatch.setattr(inspection, "_WATCH_S", 0.1)


def rows(text: str) -> dict[str, str]:
    """Return the rows of one GPU by name; the last of several rows with one name."""
    lines = [line.strip().partition("  ") for line in text.splitlines() if line.startswith("  ")]
    return {name: said.strip() for name, _, said in lines}


def nothing_works(command: str) -> str:
    """Return what the command prints where neither measuring nor setting works."""
    code, stdout, stderr = refusal(command)
    assert (code, stderr) == (1, "")
    return stdout


def verdict(text: str) -> list[str]:
    """Return the last lines, on what works."""
    return [line.strip() for line in text.partition("What works here:\n")[2].splitlines()]


def clock_change(text: str) -> dict[str, float]:
    (line,) = [line for line in text.splitlines() if line.startswith("clock_change: ")]
    return yaml.safe_load(line)["clock_change"]


def settings(command: str) -> dict[str, str]:
    (found,) = loaded(command)["gpus"]
    return {each["name"]: each["result"] for each in found["inspection"]["settings"]}


def test_nothing_is_changed_and_no_folder_made(nvml: StandIn, state: Path, short):
    text = done("doctor")
    assert nvml.settings() == []
    assert not state.exists()
    assert [line.split(": ")[0] for line in text.splitlines() if line.startswith("nvml:")] == [
        f"nvml:{uuid}" for uuid in UUIDS
    ]


def test_what_can_be_read_is_said(nvml: StandIn):
    nvml.set("energy_step_ms", 100)
    nvml.set("persistence", 0)
    text = done("doctor nvml:0")
    assert text.startswith(f"nvml:{UUIDS[0]}: NVIDIA H100 80GB HBM3, driver 570.86.15\n")
    said = rows(text)
    assert said["clocks that can be locked"] == "119 from 1980 to 210 MHz"
    assert said["power limits"] == "100 to 700 W"
    assert said["temperature"] == "40 degrees Celsius"
    assert said["throttled now by"] == "nothing"
    assert said["lease"] == "free"
    assert said["warning"].startswith("persistence mode is off")
    assert re.match(r"every \d+(\.\d+)? (ms|s), by ", said["counter steps"])


def test_what_cannot_be_read_says_why_and_hides_nothing_else(nvml: StandIn, short):
    nvml.fail("nvmlDeviceGetTemperatureV", 3)
    nvml.fail("nvmlDeviceGetTemperature", 3)
    nvml.fail("nvmlDeviceGetSupportedMemoryClocks", 3)
    said = rows(done("doctor nvml:0"))
    assert said["temperature"].startswith("cannot be read: nvml:GPU-11111111")
    assert said["clocks that can be locked"].startswith("cannot be read: nvml:GPU-11111111")
    assert said["power"] == "456 W"


def test_the_step_of_a_simulated_counter_is_found_in_virtual_time():
    with open_gpu("simulated:a100-sxm?step=0.25") as gpu:
        seen = watch_energy(gpu)
        assert seen.step_s == pytest.approx(0.25, abs=0.005)
        assert seen.counter_w == pytest.approx(seen.sensor_w, rel=0.02)
        assert seen.step_j == pytest.approx(seen.counter_w * seen.step_s, rel=0.02)
        assert seen.problem is None


def test_a_stuck_counter_is_said(nvml: StandIn, short):
    nvml.set("idle_w", 0)
    nvml.set("w_per_mhz", 0)
    text = nothing_works("doctor nvml:0")
    said = rows(text)
    assert said["counter"].startswith(
        "it did not move in 0.1 s: the counter is stuck; load the driver again "
    )
    assert verdict(text)[1] == "observe     does not work, for the reasons above"
    assert "counter steps" not in said


def test_a_counter_that_is_not_there_is_said(nvml: StandIn, short):
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", 3)
    nvml.set("field_83", "error 3")
    nvml.set("field_191", "error 3")
    content = json.loads(nothing_works("doctor nvml:0 --json"))["gpus"][0]["inspection"]
    assert content["energy"]["step_s"] is None
    assert "cannot read its energy counter" in content["energy"]["problem"]


def test_who_holds_a_gpu_and_who_left_it_is_said(nvml: StandIn, state: Path, short):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]) as process:
        assert f"process {process.pid} of " in rows(done("doctor nvml:0"))["lease"]
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
        said = rows(done("doctor nvml:0"))
    assert said["lease"] == "free"
    assert f"process {process.pid} of " in said["stale lease"]
    assert said["stale lease"].endswith("died; run `planner reset`")
    assert nvml.locked_mhz(0) == (1500, 1500), "doctor only reports"


def test_latency_is_measured_and_all_is_reset(
    nvml: StandIn, state: Path, short, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inspection, "_ROUNDS", 1)
    nvml.set(f"latency_us_{SET}", 50_000)  # so long that a busy machine adds little
    text = done("doctor --measure-latency")
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert files(state) == []
    change = clock_change(text)
    assert ClockChange(**change).gpus_per_node == 2, (
        "the stand-in's calls queue behind one lock, as the driver's do"
    )
    assert change["call_s"] >= 0.05
    assert "they run one after another" in text
    assert {setting.high for setting in nvml.settings() if setting.function == SET} >= {1980, 210}


def test_one_gpu_alone_does_not_tell_how_many_share_a_lock(nvml: StandIn, short):
    content = loaded("doctor nvml:0 --measure-latency")
    assert set(content["clock_change"]) == {"call_s", "settle_s"}
    assert content["parallel"] is None
    assert content["gpus"][0]["latency"]["calls"] == 32


def test_gpus_of_machines_of_their_own_do_not_wait_for_each_other():
    content = loaded("doctor simulated:a100-sxm simulated:h100-sxm --measure-latency")
    assert content["parallel"]["queue"] is False
    assert content["clock_change"]["gpus_per_node"] == 1
    assert content["clock_change"]["call_s"] == pytest.approx(0.0045, rel=0.5)


def test_a_clock_that_is_not_reached_is_said(nvml: StandIn, short):
    nvml.set("clock_mhz", 200)  # below every lock, as on an idle GPU
    text = done("doctor nvml:0 --measure-latency")
    assert "the clock was not reached within 0.5 s" in rows(text)["changing the clock"]
    assert set(clock_change(text)) == {"call_s"}


def test_a_lock_without_effect_on_a_gpu_that_works_is_said(nvml: StandIn, state: Path, short):
    nvml.set("clock_mhz", 1980)
    said = rows(done("doctor nvml:0 --measure-latency"))["setting the clock"]
    assert said.startswith(
        f"failed: nvml:{UUIDS[0]}: its SM clock was locked at 1545 MHz, and runs at 1980 MHz 0.5 s "
    )
    assert "the lock has no effect" in said
    assert nvml.locked_mhz(0) is None
    assert files(state) == []


def test_latency_of_a_simulated_gpu_is_that_of_its_model():
    with open_gpu("simulated:a100-sxm") as gpu:
        seen = measure_latency(gpu)
        assert seen.settled == seen.waited == seen.calls == 32
        assert 0.001 < seen.call_p50_s < seen.call_p99_s <= seen.call_max_s < 0.05
        assert gpu.now_s() < 2.0


@pytest.mark.parametrize(
    ("function", "code", "clock", "limit"),
    [
        (SET, 4, "not permitted", "permitted"),
        (SET, 3, "not supported", "permitted"),
        (SET, 999, "failed", "permitted"),
        ("nvmlDeviceResetGpuLockedClocks", 4, "not permitted", "not tried"),
        ("nvmlDeviceResetGpuLockedClocks", 3, "not supported", "permitted"),
        ("nvmlDeviceSetPowerManagementLimit", 4, "permitted", "not permitted"),
    ],
)
def test_what_may_not_be_set_is_said(
    nvml: StandIn, state: Path, short, function: str, code: int, clock, limit
):
    assert settings("doctor nvml:0") == {"clock": "not tried", "power limit": "not tried"}
    nvml.fail(function, code)
    assert settings("doctor nvml:0 --measure-latency") == {
        "clock": clock,
        "power limit": limit,
    }
    assert nvml.locked_mhz(0) is None
    assert files(state) == []


def test_a_gpu_that_is_held_is_not_measured(nvml: StandIn, short):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]):
        said = rows(done("doctor nvml:0 --measure-latency"))
        assert nvml.locked_mhz(0) == (1500, 1500)
    assert said["setting the clock"].startswith("failed: GPU nvml:GPU-11111111")


def test_a_lost_gpu_hides_no_other(nvml: StandIn, short):
    nvml.fail("*", 15, gpu=0)
    text = done("doctor")
    assert text.startswith(f"nvml:{UUIDS[1]}: ")
    assert "\nnvml:0: " in text
    assert verdict(text)[1] == "observe     works on 1 of 2 GPUs"


def test_only_lost_gpus_are_a_failure(nvml: StandIn):
    nvml.fail("*", 15)
    assert verdict(nothing_works("doctor"))[1] == "observe     does not work, for the reasons above"


def test_all_gpus_are_looked_at_at_once(nvml: StandIn, monkeypatch: pytest.MonkeyPatch):
    both = threading.Barrier(2, timeout=LONG_S)

    def watch(_: object) -> inspection.EnergyWatch:
        both.wait()
        return inspection.EnergyWatch(1.0, step_s=0.1)

    monkeypatch.setattr(inspection, "watch_energy", watch)
    assert verdict(done("doctor"))[1] == "observe     works on 2 of 2 GPUs"


def test_the_verdict_says_what_works(nvml: StandIn, short):
    assert verdict(done("doctor nvml:0")) == [
        "plan        works, with or without GPUs",
        "observe     works on 1 of 1 GPU",
        "profile     works on 1 of 1 GPU, where setting clocks is permitted",
        "set clocks  not tried; `planner doctor nvml:0 --measure-latency` tries it",
    ]
    assert verdict(done("doctor --measure-latency"))[1:] == [
        "observe     works on 2 of 2 GPUs",
        "profile     works on 2 of 2 GPUs",
        "set clocks  works on 2 of 2 GPUs",
    ]
    nvml.fail(SET, 4, gpu=1)
    assert verdict(done("doctor --measure-latency"))[2:] == [
        "profile     works on 1 of 2 GPUs",
        "set clocks  works on 1 of 2 GPUs",
    ]


def test_no_gpu_is_an_answer(nvml: StandIn):
    nvml.set("gpus", 0)
    remark = (
        "No GPU: NVML shows none on this node; `planner profile --gpu simulated:a100-sxm` "
        "works without one"
    )
    text = nothing_works("doctor")
    assert text.startswith(f"{remark}\n")
    assert verdict(text)[1:] == ["observe     no GPU", "profile     no GPU", "set clocks  no GPU"]
    assert json.loads(nothing_works("doctor --json")) == {
        "verdict": {"gpus": 0, "observe": 0, "set_clocks": 0, "profile": 0, "mig": 0},
        "gpus": [],
        "parallel": None,
        "clock_change": {},
        "remarks": [remark],
        "files": [],
    }


def test_no_driver_is_an_answer(nvml: StandIn):
    nvml.fail("nvmlInitWithFlags", 9)
    assert nothing_works("doctor").startswith("No GPU: NVML")


def test_a_gpu_that_is_not_there_is_refused(nvml: StandIn):
    assert refused("doctor nvml:7").startswith("nvml:7: NVML shows no such GPU")


def test_privilege_is_read_from_the_kernel(nvml: StandIn, short, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspection, "_has_sys_admin", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    said = rows(done("doctor nvml:0"))["setting the clock"]
    assert "root without CAP_SYS_ADMIN" in said
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "setting needs root" in rows(done("doctor nvml:0"))["setting the clock"]


def test_the_summary_says_mig(nvml: StandIn, short: None):
    nvml.set("mig", 1, gpu=1)
    assert verdict(done("doctor"))[-1] == (
        "MIG         is on on 1 of 2 GPUs: energy and clock are those of the whole GPU; turn it "
        "off to plan"
    )
