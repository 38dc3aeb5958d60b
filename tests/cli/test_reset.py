"""`planner reset` resets what dead processes left set, or the GPUs that are named."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from commands import done, loaded, refusal, refused
from fake_nvml import UUIDS, StandIn
from gpu_owners import LOCKS_AND_WAITS, files, guardians, kill, owner
from launching import ended, started
from waiting import eventually

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.records import read_records

NAME = "NVIDIA H100 80GB HBM3"
FIRST, SECOND = (f"nvml:{uuid}" for uuid in UUIDS)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def dead(nvml: StandIn, state: Path):
    """Leave two GPUs set by a process that is killed with its guardian; return its description."""
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
    return str(read_records()[0][0].owner)


def lock(*texts: str) -> None:
    for text in texts:
        with open_gpu(text) as gpu:
            gpu.set_clock_mhz(1500)
            gpu.set_power_limit_w(300.0)


def test_what_a_dead_process_left_is_reset_once(nvml: StandIn, state: Path, dead: str):
    assert nvml.locked_mhz(0) == (1500, 1500)
    assert done("reset") == (
        f"Reset {FIRST} ({NAME}), left set by {dead}\nReset {SECOND} ({NAME}), left set by {dead}\n"
    )
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert [nvml.limit_w(index) for index in range(2)] == [700.0, 700.0]
    assert files(state) == []
    assert done("reset") == "Nothing to reset: no dead process has left a GPU set.\n"


def test_who_holds_gpus_and_is_stopped_is_named(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        assert done("reset") == "Nothing to reset: no dead process has left a GPU set.\n"
        psutil.Process(process.pid).suspend()
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        said = refused("reset")
        number = process.pid
        assert said == "; ".join(
            f"GPU {gpu} ({NAME}): held by process {number}, stopped; let it go on with `kill "
            f"-CONT {number}`, or end it with `kill -KILL {number}`, and its guardian resets the "
            "GPU"
            for gpu in (FIRST, SECOND)
        )
        assert nvml.locked_mhz(0) == (1500, 1500)


def test_the_next_command_of_any_kind_resets_what_a_dead_process_left(
    nvml: StandIn, state: Path, dead: str
):
    said = ended(
        started(["-m", "perseus_planner", "solve", "absent.yaml", "-o", "f.npz"], state.parent)
    ).stderr
    assert said.splitlines()[:2] == [
        f"planner: GPU {each} ({NAME}), left set by {dead}, is reset" for each in (FIRST, SECOND)
    ]
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert files(state) == []


def test_the_next_command_leaves_what_a_living_process_sets(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS):
        assert (
            "is reset"
            not in ended(started(["-m", "perseus_planner", "show", "absent"], state.parent)).stderr
        )
        assert nvml.locked_mhz(0) == (1500, 1500)


def test_json_has_one_object_per_gpu(nvml: StandIn, dead: str):
    content = loaded("reset")
    assert content["gpus"][1] == {"gpu": SECOND, "name": NAME, "left_by": dead, "problem": None}
    assert loaded("reset") == {"gpus": [], "invalid_records": [], "files": []}


def test_named_gpus_are_reset_and_no_others(nvml: StandIn):
    lock("nvml:0", "nvml:1")
    assert done("reset nvml:1") == f"Reset {SECOND} ({NAME})\n"
    assert [nvml.locked_mhz(index) for index in range(2)] == [(1500, 1500), None]
    assert nvml.limit_w(1) == 300.0, "an operator may have set it"


def test_the_power_limit_goes_to_its_default_where_asked(nvml: StandIn):
    lock("nvml:0", "nvml:1")
    done("reset --all --power-limit")
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert [nvml.limit_w(index) for index in range(2)] == [700.0, 700.0]


def test_a_named_gpu_that_a_dead_process_left_loses_its_record(
    nvml: StandIn, state: Path, dead: str
):
    assert done("reset nvml:0") == f"Reset {FIRST} ({NAME}), left set by {dead}\n"
    assert nvml.limit_w(0) == 700.0
    assert files(state) == [f"{UUIDS[1]}.{os.geteuid()}.json"]


def test_a_gpu_that_a_living_process_sets_is_reset_only_by_force(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]) as process:
        (record,) = read_records()[0]
        expected = (
            f"Error: GPU {FIRST} ({NAME}): leased to {record.owner} since {record.since}; wait "
            "for that process to end, end it, or choose another GPU, or reset it with --force\n"
        )
        assert refusal("reset nvml:0") == (2, "", expected)
        assert refusal("reset --all") == (2, f"Reset {SECOND} ({NAME})\n", expected)
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert done("reset --force nvml:0") == f"Reset {FIRST} ({NAME})\n"
        assert nvml.locked_mhz(0) is None
        assert files(state) == [f"{UUIDS[0]}.{os.geteuid()}.json"], (
            "its guardian and others still need it"
        )
        assert process.poll() is None


def test_a_gpu_that_cannot_be_reset_is_said_and_the_others_are_reset(
    nvml: StandIn, state: Path, dead: str
):
    nvml.fail("nvmlDeviceResetGpuLockedClocks", 4, gpu=0)
    code, stdout, stderr = refusal("reset")
    assert (code, stdout) == (2, f"Reset {SECOND} ({NAME}), left set by {dead}\n")
    assert stderr.startswith(f"Error: {FIRST}: cannot reset its SM clock: ")
    assert files(state) == [f"{UUIDS[0]}.{os.geteuid()}.json"]


def test_a_gpu_whose_library_cannot_reset_is_not_said_to_be_reset(
    nvml: StandIn, state: Path, dead: str
):
    nvml.fail("nvmlDeviceResetGpuLockedClocks", 3)
    for command in ("reset", "reset nvml:0", "reset --all --power-limit"):
        code, stdout, stderr = refusal(command)
        assert (code, stdout) == (2, "")
        assert (
            f"{FIRST}: cannot reset its SM clock: NVML returns 'Not Supported' (error 3)" in stderr
        )
    assert len(files(state)) == 2, "the records stay"
    assert nvml.locked_mhz(0) == (1500, 1500)
    nvml.heal()
    assert "Reset" in done("reset")
    assert files(state) == []


def test_a_power_limit_that_cannot_be_reset_is_not_said_to_be(nvml: StandIn):
    nvml.fail("nvmlDeviceGetPowerManagementDefaultLimit", 3)
    assert refusal("reset nvml:0 --power-limit")[:2] == (2, "")


def test_a_file_that_is_no_record_is_said(nvml: StandIn, state: Path):
    state.mkdir()
    (state / "GPU-x.0.json").write_text("{}")
    assert (
        done("reset")
        .splitlines()[1]
        .startswith(f"{state}/GPU-x.0.json: is not a record of the planner (")
    )


def test_a_simulated_gpu_leaves_no_trace(state: Path):
    assert done("reset simulated:a100-sxm") == "Reset simulated:a100-sxm (simulated a100-sxm)\n"
    assert not state.exists()


def test_all_of_none_is_nothing(nvml: StandIn):
    nvml.set("gpus", 0)
    assert done("reset --all") == "Nothing to reset: NVML shows no GPU on this node.\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reset --all nvml:0", "--all: resets every GPU; do not name GPUs as well"),
        ("reset --force", "--force: name the GPUs to reset, or give --all"),
        ("reset --power-limit", "--power-limit: name the GPUs to reset, or give --all"),
    ],
)
def test_options_that_contradict_are_refused(command: str, message: str):
    assert refused(command) == message


def test_a_gpu_that_is_not_there_is_refused(nvml: StandIn):
    assert refused("reset nvml:7").startswith("nvml:7: NVML shows no such GPU; choose one of: 0 ")


def test_without_a_driver_all_is_refused(nvml: StandIn):
    nvml.fail("nvmlInitWithFlags", 9)
    assert refused("reset --all").startswith("NVML")
