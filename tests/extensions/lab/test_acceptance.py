"""`planner doctor --acceptance` tries all of the planner on a node, and sets nothing with
--read-only.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from commands import refused
from fake_nvml import StandIn
from launching import Ended, by_themselves, ended, ranks, started, torchrun
from short_load import shorten_load
from waiting import LONG_S

from perseus_planner.base.checks import CheckResult, run_check
from perseus_planner.base.errors import GpuError, RankError
from perseus_planner.extensions.lab.acceptance.command import page
from perseus_planner.extensions.lab.acceptance.ranks import Layout, Rank, Trained
from perseus_planner.extensions.lab.acceptance.steps import (
    CHECKS,
    Acceptance,
    _Trainings,
    _trainings,
    alike,
    mark_error_s,
    throughput_problem,
)

pytest.importorskip("torch")

COMMAND = ("-m", "perseus_planner", "doctor", "--acceptance")
GPU = "emulated:a100-sxm?slower=20000"
NAMES = ["node", "clocks", "latency", "neighbours", "training", "profile", "plan", "deaths"]
Start = Callable[[int, Path], Ended]
CPU_S = 60.0  #: of the steps of four ranks together


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder of the test; no rank of the machine's."""
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "state"


def written(folder: Path, result: Ended) -> dict[str, Any]:
    """Return what an acceptance has written, which is said on the page as well."""
    assert (folder / "acceptance.json").exists(), result.stderr
    report: dict[str, Any] = json.loads((folder / "acceptance.json").read_text())
    assert [check["name"] for check in report["checks"]] == NAMES
    text = (folder / "acceptance.html").read_text()
    rows = re.findall(r"<tr><th[^>]* scope=row>([^<]+)</th>", text)
    assert [name for name in rows if name in NAMES] == NAMES
    return report


def launched(count: int, folder: Path) -> Ended:
    """Accept a node of emulated GPUs with torchrun."""
    return ended(torchrun(count, folder, *COMMAND, GPU))


def forked(count: int, folder: Path) -> Ended:
    """The same on ranks that are started by themselves, one of which holds the store, and need
    not import torch again; what rank 0 prints is all that they print.
    """
    first, *others = ranks("command", count, folder, str(folder), *COMMAND[2:], GPU)
    said = [(each.code, each.stdout, each.stderr) for each in others]
    assert said == [(first.code, "", "")] * len(others)
    return first


def accepted(folder: Path, count: int, start: Start = launched) -> dict[str, dict[str, Any]]:
    """Accept a node of emulated GPUs; return the checks by their names."""
    result = start(count, folder)
    report = written(folder / "acceptance", result)
    checks = {check["name"]: check for check in report["checks"]}
    assert result.code == 0, result.stdout
    assert (report["origin"], report["ranks"], report["has_passed"]) == ("simulated", count, True)
    assert {check["result"] for check in checks.values()} == {"passed"}
    assert checks["node"]["text"].startswith(f"{count} x simulated a100-sxm")
    assert result.stdout.count("simulated a100-sxm") == 2, "equal GPUs are one block"
    assert all(
        time["locked_mhz"] for rank in checks["clocks"]["values"]["ranks"] for time in rank["runs"]
    )
    assert checks["latency"]["values"]["at once"]["gpus"] == count
    assert checks["neighbours"]["text"].startswith("all neighbours wait for each other's messages")
    assert report["layout"] == f"2 x {count // 2} (pipeline x data parallel)"
    assert set(checks["profile"]["values"]["beside"]) == {"0 F", "0 B", "1 F", "1 B"}
    rows = checks["plan"]["values"]["rows"]
    assert [row["name"] for row in rows] == ["full clocks", "by the plan"]
    assert all(row[key] > 0 for row in rows for key in ("time_s", "energy_j", "planned_s"))
    assert checks["deaths"]["values"]["clocks_mhz"] == [1410] * count
    assert not list((folder / "acceptance").glob("progress-*"))
    return checks


def test_two_ranks_with_emulated_gpus_are_accepted(tmp_path: Path):
    accepted(tmp_path, 2, forked)


@pytest.mark.newest
@pytest.mark.soak  # two pipelines, and the time that the steps take
def test_four_ranks_with_emulated_gpus_are_accepted(tmp_path: Path):
    accepted(tmp_path, 4)
    logs = "".join(path.read_text() for path in tmp_path.glob("acceptance/rank-*.log"))
    assert sum(map(float, re.findall(r"took ([0-9.]+) s", logs))) <= CPU_S


@pytest.mark.soak
def test_eight_ranks_with_emulated_gpus_are_accepted(tmp_path: Path):
    accepted(tmp_path, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it is imported
def test_what_looks_at_a_node_sets_nothing_and_leases_nothing(
    nvml: StandIn, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shorten_load(monkeypatch)
    nvml.set("energy_step_ms", 5)
    acceptance = Acceptance(Rank("dry-run:nvml:0", read_only=True, folder=tmp_path))
    trains = ("training", "profile")  # as the whole command does below
    checks = [check for check in CHECKS if check.name not in trains]
    results = {check.name: run_check(check, acceptance).result for check in checks}
    assert results == dict.fromkeys(results, "not checked") | {"node": "passed", "clocks": "passed"}
    assert nvml.settings() == []
    assert not list(state.rglob("*.json")), "a lease leaves a record"


@pytest.mark.parametrize(
    ("plain", "by_plan", "said"),
    [
        ([(1.0, 2.0), (1.0, 2.5)], (1.0, 2.0), "equal trainings differ, even without the runtime"),
        ([(1.0, 2.0), (1.0, 2.0)], (1.0, 2.5), "the losses with the runtime are others"),
    ],
)
def test_the_runtime_is_not_blamed_for_a_training_that_is_never_the_same(
    plain: list[tuple[float, ...]], by_plan: tuple[float, ...], said: str
):
    runs = [Trained(1.0, None, losses) for losses in (*plain, by_plan)]
    found = [_Trainings(runs[:-1], runs[-1:])]
    acceptance = Mock(**{"rank.everywhere.return_value": found})
    with pytest.raises(RankError, match=said):
        _trainings(acceptance, Path(), {}, in_turn=True)


@pytest.mark.soak
def test_read_only_sets_nothing_and_leases_nothing(nvml: StandIn, state: Path, tmp_path: Path):
    nvml.set("energy_step_ms", 5)
    command = started([*COMMAND, "--read-only", "nvml:0", "--into", "read"], tmp_path)
    report = written(tmp_path / "read", ended(command))
    assert nvml.settings() == []
    assert not list(state.rglob("*.json")), "a lease leaves a record"
    results = {check["name"]: (check["result"], check["text"]) for check in report["checks"]}
    assert report["read_only"]
    assert report["layout"] == (
        "1 x 1 (pipeline x data parallel), with 2 virtual stages on each rank"
    )
    for name in ("latency", "plan", "deaths"):
        assert results[name] == ("not checked", "--read-only sets nothing")
    assert results["neighbours"] == (
        "not checked",
        "one rank has no neighbours; start one for each GPU with torchrun",
    )
    assert "locks: not checked" in results["clocks"][1]
    assert "clocks: not checked" in results["profile"][1]
    assert {results[name][0] for name in ("node", "clocks", "training", "profile")} == {"passed"}


def fail(_: Rank) -> None:
    raise GpuError("the GPU is lost; reboot")


def die(_: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_: Rank) -> None:
    Event().wait()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it is imported
@pytest.mark.parametrize(
    ("step", "limit_s", "problem"),
    [
        (fail, LONG_S, "rank 0: the GPU is lost; reboot"),
        (die, LONG_S, "rank 0: its process ended with status -9; what it said is in its log in "),
        (hang, 2.0, "rank 0: did not end within 2 s; its stacks are in its log in "),
    ],
)
def test_a_step_that_fails_dies_or_hangs_ends_with_a_sentence(
    step: Callable[[Rank], None], limit_s: float, problem: str, tmp_path: Path
):
    this = Rank(GPU, read_only=False, folder=tmp_path)
    with pytest.raises(RankError) as caught:
        this.everywhere(step, limit_s=limit_s)
    assert str(caught.value).startswith(problem)
    assert ("hang" in (tmp_path / "rank-0.log").read_text()) == (step is hang)
    assert this.everywhere(lambda rank: rank.size) == [1], "the next step goes on"


def test_what_a_failed_check_says_is_on_the_page_escaped():
    failed = CheckResult("clocks", "failed", "it ran at <b>1980</b> MHz; see Slurm")
    report = {
        **{"planner": "0", "gpu": "H100", "ranks": 8, "layout": "2 x 4", "origin": "measured"},
        "checks": (failed,),
    }
    text = page(report)
    assert "does not work on 8 x H100 (measured) yet: clocks failed." in text
    assert "it ran at &lt;b&gt;1980&lt;/b&gt; MHz; see Slurm" in text


def test_equal_ranks_are_said_once():
    assert alike(["H100"] * 8) == "8 x H100"
    assert alike(["H100", "A100", "H100"]) == "2 x H100; 1 x A100"
    assert alike(["H100"]) == "H100"


@pytest.mark.parametrize(
    ("marks", "error_s"),
    [
        ([1.0, 2.0, 3.0], 0.0),  # between kernels
        ([1.0, 1.3, 3.0], 0.3),  # inside one
        ([1.0, 2.9, 9.0], 0.1),  # what is after the last kernel does not count
        ([9.0], None),
    ],
)
def test_a_mark_inside_a_kernel_is_off_by_its_distance_from_the_nearest_end(
    marks: list[float], error_s: float | None
):
    assert mark_error_s(marks, [(1.0, 2.0), (2.0, 3.0)]) == pytest.approx(error_s)


def test_pipelines_fill_the_ranks():
    texts = [str(Layout.of(size)).partition(" (")[0] for size in (1, 2, 3, 8)]
    assert texts == ["1 x 1", "2 x 1", "1 x 3", "2 x 4"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--read-only", "--read-only and --into are about an acceptance or a rehearsal; add"),
        ("--acceptance simulated:a100-sxm", "GPU 'simulated:a100-sxm' has a time of its own; "),
    ],
)
def test_options_that_do_not_fit_are_refused(command: str, message: str):
    assert refused(f"doctor {command}").startswith(message)


def test_throughput_is_compared_where_equal_trainings_are_equally_fast():
    # Of an H200 in a virtual machine whose processors other machines used too.
    unsteady, planned = (0.298, 0.300, 0.338), (0.358, 0.326, 0.354)
    assert "0.338 s without the runtime" in throughput_problem(unsteady, planned)
    assert throughput_problem(unsteady, (0.301, 0.299, 0.340)) == ""
    for plain, slower in (((0.298, 0.300, 0.299), planned), (unsteady, (0.35, 0.36, 0.37))):
        with pytest.raises(RankError, match="more than 2%"):
            throughput_problem(plain, slower)


LEAVES = """
from pathlib import Path
from perseus_planner.extensions.lab.acceptance import ranks

ranks._IMPORTED = ()  # what steps need, which takes seconds
rank = ranks.Rank("cuda", True, Path())
if rank.rank:
    ranks._POLL_S = 1.5  # looks late for the value of rank 0, which needs nothing more by then
rank.leave()
"""


def test_the_rank_that_holds_the_store_ends_last(tmp_path: Path):
    """Started one by one, as srun does: rank 0 holds the store then, and not a launcher."""
    for result in by_themselves(2, tmp_path, "-c", LEAVES):
        assert result.code == 0, result.stderr
