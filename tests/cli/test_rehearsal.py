"""`planner doctor --rehearse` finds, on every rank, what would spoil a profile or let it hang."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import done, refusal, refused
from fake_nvml import StandIn
from launching import Ended, ended, ranks, torchrun

from perseus_planner.profiler import rehearsal, row_meter
from perseus_planner.profiler.rehearsal import LoadRun, RankRehearsal

torch = pytest.importorskip("torch")

GPU = "simulated:a100-sxm"
FAILED = "Verdict: no profile can be made here yet,"
OBSERVED = "Verdict: a profile can be made with --observe;"


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


def rehearsed(folder: Path, count: int, broken: str, *arguments: str) -> list[Ended]:
    """Rehearse on ranks of which rank 1 has something wrong; only rank 0 prints."""
    everyone = ranks("rehearse", count, folder, broken, *arguments)
    assert len({each.code for each in everyone}) == 1, [each.stderr for each in everyone]
    assert {each.stdout for each in everyone[1:]} == {""}
    return everyone


def failed(folder: Path, count: int, broken: str) -> str:
    first, *_ = rehearsed(folder, count, broken)
    assert first.code == 1
    return first.stdout


def problems(text: str) -> list[str]:
    return [
        line.strip() for line in text.partition("Problems:\n")[2].partition("\n\n")[0].splitlines()
    ]


def verdict(text: str) -> str:
    return text.rstrip().splitlines()[-1]


def test_ranks_without_a_problem_pass(tmp_path: Path):
    first, *_ = rehearsed(tmp_path, 2, "", "--json")
    result = json.loads(first.stdout)
    assert (first.code, result["has_passed"], result["is_stuck"]) == (0, True, False)
    for number, rank in enumerate(result["ranks"]):
        assert (rank["rank"], rank["node"], rank["name"]) == (
            number,
            socket.gethostname(),
            "simulated a100-sxm",
        )
        remarks = [
            text for text in rank["remarks"] if not text.startswith("DCGM runs")
        ]  # which it may do here
        assert (rank["locks"], rank["problems"], remarks) == (True, [], [])
        assert [(run["precision"], run["locked_mhz"]) for run in rank["runs"]] == [
            ("fp32", 1410),
            ("bf16", 1410),
            ("bf16", 705),
        ]
        assert rank["runs"][1]["power_w"] > 1.5 * rank["runs"][2]["power_w"]
        assert rank["runs"][0]["time_s"] > rank["runs"][1]["time_s"] > 0
        assert rank["counter_step_s"] == pytest.approx(0.1, rel=0.05)
        assert [(each["sender"], each["time_s"] > 0) for each in rank["received"]] == [
            (1 - number, True)
        ]


def test_a_lock_that_does_nothing_on_one_rank_is_found(tmp_path: Path):
    text = failed(tmp_path, 2, "locks")
    (problem,) = problems(text)
    assert problem.startswith(
        "rank 1: simulated:a100-sxm: its SM clock was locked at 705 MHz, and under load ran at 13"
    )
    assert (
        "so the lock has no effect; see whether Slurm (--gpu-freq), DCGM or a host sets the clock"
        in problem
    )
    assert verdict(text) == f"{FAILED} for problems on 1 of 2 ranks."


def test_a_neighbour_that_never_answers_is_found_and_nobody_hangs(tmp_path: Path):
    text = failed(tmp_path, 3, "messages")
    assert problems(text) == [
        "ranks 0, 1: the message from rank 1 to rank 0 has not arrived within 5 s; see with "
        "NCCL_DEBUG=INFO whether their GPUs can reach each other",
        "rank 2: messages with rank 1 were not tried, as another one hangs there",
    ]
    assert verdict(text) == f"{FAILED} for problems on 3 of 3 ranks."


@pytest.mark.parametrize(
    ("broken", "problem"),
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
def test_a_rank_without_an_energy_counter_is_found(broken: str, problem: str, tmp_path: Path):
    (found,) = problems(failed(tmp_path, 2, broken))
    assert found.startswith("rank 1: simulated a100-sxm")
    assert problem in found


def test_the_pairs_are_those_of_neighbouring_stages(tmp_path: Path):
    first, *_ = rehearsed(tmp_path, 4, "", "--json", "--stages", "2", "--no-locks")
    received = [
        [each["sender"] for each in rank["received"]] for rank in json.loads(first.stdout)["ranks"]
    ]
    assert received == [[2], [3], [0], [1]]


@pytest.mark.soak  # other tests have the exit code of each rank
def test_torchrun_ends_with_a_failure(tmp_path: Path):
    command = ("-m", "perseus_planner", "doctor", "--rehearse", f"{GPU}?fault=not-supported:energy")
    result = ended(torchrun(2, tmp_path, *command))
    assert result.code == 1
    (problem,) = problems(result.stdout)
    assert problem.startswith("ranks 0, 1: simulated a100-sxm does not support energy")
    assert result.stdout.count(f"{FAILED} for problems on 2 of 2 ranks.") == 1


def test_where_nothing_may_be_set_the_gpu_is_only_observed():
    text = done(f"doctor --rehearse '{GPU}?fault=not-permitted'")
    assert "  - -> 13" in text
    assert (
        "rank 0: clocks were only observed: simulated a100-sxm does not let this process set "
        "anything" in text
    )
    assert verdict(text) == f"{OBSERVED} clocks cannot be set on 1 of 1 rank."


def test_nothing_is_set_without_locks():
    text = done(f"doctor --rehearse --no-locks '{GPU}?fault=not-permitted'")
    assert "only observed" not in text
    assert verdict(text) == f"{OBSERVED} setting clocks was not tried."


def test_nothing_is_set_in_a_dry_run_which_runs_the_load(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rehearsal, "_WINDOW_S", 0.1)
    monkeypatch.setattr(row_meter, "_MAX_WINDOWS", 3)
    monkeypatch.setattr(row_meter, "_MAX_REJECTED", 0)
    monkeypatch.setattr(rehearsal, "_SIZES", {"cpu": 64})
    nvml.set("energy_step_ms", 5)
    nvml.set("persistence", 0)
    text = done("doctor --rehearse dry-run:nvml:0")
    assert nvml.settings() == []
    assert "the load is a matrix product of 64 x 64" in text
    assert "  - -> 1980 MHz  " in text
    assert (
        "rank 0: persistence mode is off: locked clocks are lost when the driver unloads between "
        "jobs" in text
    )
    assert verdict(text) == f"{OBSERVED} setting clocks was not tried."


def test_an_error_of_torch_is_a_problem_of_the_rank(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn, "Linear", fail)
    code, stdout, _ = refusal(f"doctor --rehearse {GPU}")
    assert code == 1
    assert problems(stdout) == [
        "rank 0: torch could not run a matrix product: OutOfMemoryError: CUDA out of memory; see "
        "whether a script of torch alone can"
    ]


def test_clocks_that_slurm_sets_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_GPU_FREQ", "medium")
    text = done(f"doctor --rehearse --no-locks {GPU}")
    assert (
        "  rank 0: Slurm sets the clocks of this job (--gpu-freq medium); submit it without "
        "--gpu-freq\n" in text
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


def test_gpus_that_are_shared_or_slow_are_found_among_all_ranks():
    def rank(number: int, gpu: str, time_s: float) -> RankRehearsal:
        return RankRehearsal(
            number, "a", gpu, "A100", runs=(LoadRun("bf16", None, 1400.0, time_s, 300.0, ()),)
        )

    first, second, third = rehearsal._compared(
        [rank(0, "nvml:0", 0.010), rank(1, "nvml:0", 0.0105), rank(2, "nvml:1", 0.012)]
    )
    shared = (
        "another rank on a uses the same GPU, nvml:0; name the back-end alone, such as nvml, and "
        "each rank uses the GPU that it computes on"
    )
    assert (first.problems, second.problems, third.problems) == ((shared,), (shared,), ())
    assert (first.remarks, second.remarks) == ((), ())
    assert third.remarks == (
        "its matrix product took 12 ms, and 10.5 ms on most ranks; see whether something else "
        "runs on this GPU, or cool it",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--rehearse nvml:0 nvml:1", "--rehearse takes one GPU, and no --measure-latency; "),
        ("--rehearse --measure-latency", "--rehearse takes one GPU, and no --measure-latency; "),
        ("--no-locks", "--no-locks and --stages are about a rehearsal; add --rehearse"),
        ("--stages 2", "--no-locks and --stages are about a rehearsal; add --rehearse"),
    ],
)
def test_options_that_do_not_fit_are_refused(command: str, message: str):
    assert refused(f"doctor {command}").startswith(message)


def test_stages_that_do_not_fit_the_ranks_are_refused(tmp_path: Path):
    everyone = ranks("rehearse", 3, tmp_path, "", "--stages", "2")
    assert [each.code for each in everyone] == [2, 2, 2]
    assert "3 ranks cannot hold 2 stages evenly; give --stages a divisor of this number" in "".join(
        each.stderr for each in everyone
    )
