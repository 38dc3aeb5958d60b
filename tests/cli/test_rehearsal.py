"""`planner doctor --rehearse` finds, on every rank, what would spoil a profile or let it hang."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import refused
from fake_nvml import StandIn
from launching import ended, ranks, torchrun
from short_load import shorten_load

from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.profiler import rehearsal
from perseus_planner.profiler.rehearsal import RankRehearsal, rehearse_gpu

torch = pytest.importorskip("torch")

GPU = "simulated:a100-sxm"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a state folder of the test, and no rank or job of the machine."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    for name in ("RANK", "WORLD_SIZE", "SLURM_GPU_FREQ"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: others would wait for the cores of other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rehearsed(gpu: str = GPU, *, locks: bool = True) -> RankRehearsal:
    return rehearse_gpu(0, gpu, torch.device("cpu"), locks)


def test_a_gpu_without_a_problem_is_measured_at_two_clocks():
    rank = rehearsed()
    assert (rank.name, rank.locks, rank.problems) == ("simulated a100-sxm", True, [])
    # DCGM may run here.
    assert [text for text in rank.remarks if not text.startswith("DCGM runs")] == []
    assert [run.locked_mhz for run in rank.runs] == [1410, 705]
    assert rank.runs[0].power_w > 1.5 * rank.runs[1].power_w
    assert rank.runs[1].time_s > rank.runs[0].time_s > 0
    assert rank.counter_step_s == pytest.approx(0.1, rel=0.05)


def test_a_lock_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SimulatedGpu, "set_clock_mhz", lambda *_: None)
    (problem,) = rehearsed().problems
    assert problem.startswith(
        "simulated:a100-sxm: its SM clock was locked at 705 MHz, and under load ran at 1410 MHz, "
    )
    assert (
        "so the lock has no effect; see whether Slurm (--gpu-freq), DCGM or a host sets the clock"
        in problem
    )


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (
            "not-supported:energy",
            "does not support energy, as its fault says; open it without not-supported:energy",
        ),
        (
            "counter-stuck@0s",
            "its energy counter has stood at 0 J for 5 s, so energy cannot be measured; ",
        ),
    ],
)
def test_a_gpu_without_an_energy_counter_is_found(fault: str, problem: str):
    (found,) = rehearsed(f"{GPU}?fault={fault}").problems
    assert found.startswith("simulated a100-sxm")
    assert problem in found


@pytest.mark.needs("lab")
def test_ranks_are_rehearsed_by_three_checks_of_an_acceptance(tmp_path: Path):
    command = ("doctor", "--rehearse", "--json", "emulated:a100-sxm?slower=20000")
    result, other = ranks("command", 2, tmp_path, str(tmp_path), *command)
    report = json.loads(result.stdout)
    assert (result.code, report["has_passed"]) == (0, True)
    assert (other.code, other.stdout, other.stderr) == (0, "", "")
    assert [(check["name"], check["result"]) for check in report["checks"]] == [
        ("node", "passed"),
        ("clocks", "passed"),
        ("neighbours", "passed"),
    ]
    assert report["checks"][2]["text"].endswith(
        "both ways, with CUDA_DEVICE_MAX_CONNECTIONS 1 and 32"
    )
    assert json.loads((tmp_path / "acceptance/acceptance.json").read_text())["checks"]


@pytest.mark.soak  # other tests have the problems
def test_torchrun_ends_with_a_failure(tmp_path: Path):
    gpu = "emulated:a100-sxm?slower=20000&fault=not-supported:energy"
    result = ended(torchrun(2, tmp_path, "-m", "perseus_planner", "doctor", "--rehearse", gpu))
    assert result.code == 1
    assert "1. node: failed: " in result.stdout
    assert "does not support energy, as its fault says" in result.stdout
    assert "2. clocks: not checked: it needs what 'node' finds" in result.stdout


def test_where_nothing_may_be_set_the_gpu_is_only_observed():
    rank = rehearsed(f"{GPU}?fault=not-permitted")
    assert (rank.locks, rank.problems) == (False, [])
    assert {run.locked_mhz for run in rank.runs} == {None}
    assert rank.remarks[-1].startswith(
        "clocks were only observed: simulated a100-sxm does not let this process set anything"
    )


def test_nothing_is_set_without_locks():
    rank = rehearsed(f"{GPU}?fault=not-permitted", locks=False)
    assert (rank.locks, rank.problems, len(rank.runs)) == (None, [], 1)
    assert not any("only observed" in text for text in rank.remarks)


def test_nothing_is_set_in_a_dry_run_which_runs_the_load(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch
):
    shorten_load(monkeypatch)
    nvml.set("energy_step_ms", 5)
    nvml.set("persistence", 0)
    rank = rehearsed("dry-run:nvml:0")
    assert nvml.settings() == []
    assert (rank.size, rank.locks, rank.problems) == (64, None, [])
    assert [run.achieved_mhz for run in rank.runs] == [1980]
    assert any(
        text.startswith("persistence mode is off: locked clocks are lost") for text in rank.remarks
    )


def test_an_error_of_torch_is_a_problem_of_the_rank(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn, "Linear", fail)
    assert rehearsed().problems == [
        "torch could not run a matrix product: OutOfMemoryError: CUDA out of memory; see whether a "
        "script of torch alone can"
    ]


def test_clocks_that_slurm_sets_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_GPU_FREQ", "medium")
    assert next(iter(rehearsal.surroundings())) == (
        "Slurm sets the clocks of this job (--gpu-freq medium); submit it without --gpu-freq"
    )


def test_dcgm_on_the_node_is_named(tmp_path: Path):
    program = tmp_path / "nv-hostengine"
    program.symlink_to(shutil.which("sleep") or "/bin/sleep")
    with subprocess.Popen([str(program), "600"]) as process:
        try:
            while Path(f"/proc/{process.pid}/comm").read_text() != "nv-hostengine\n":
                pass  # it is named a little after `Popen` has returned
            (remark,) = [text for text in rehearsal.surroundings() if text.startswith("DCGM")]
        finally:
            process.kill()
    assert remark == (
        "DCGM runs on this node; see with `dcgmi config --get` that it sets no clocks or power "
        "limits, as it would set them again"
    )


@pytest.mark.parametrize(
    "options",
    [
        "--rehearse nvml:0 nvml:1",
        "--rehearse --measure-latency",
        "--rehearse --acceptance",
        "--acceptance nvml:0 nvml:1",
    ],
)
def test_options_that_do_not_fit_are_refused(options: str):
    assert refused(f"doctor {options}").startswith(
        "--acceptance and --rehearse take one GPU, and no other option than --read-only, "
    )
