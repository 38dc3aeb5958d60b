"""On real ranks: what newer releases of torch have brought to schedules is followed as it runs, by
hooks of modules and gradients, or refused before training.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import Results, by_themselves, results_of

from perseus_planner import Profile
from perseus_planner.runs.run import Run
from perseus_planner.views.run import summarize_run

pytest.importorskip("torch")

from batch_world import profile_of
from torch_programs import DOCUMENTS, HAS_SPLIT, LENGTH, OPTIONS

# Warnings on import of an engine are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

SUPPORT = Path(__file__).parents[1] / "support"
GPU = "emulated:a100-sxm?call=0"
RANKS = 2
TRUTH = [[LENGTH, sum(length**2 for length in lengths)] for lengths in DOCUMENTS]

Launched = Callable[..., Results]


class Folders(dict[str, Path]):
    """The folder of each program, made when it is asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __missing__(self, program: str) -> Path:
        self[program] = folder = self._factory.mktemp(program)
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


@pytest.fixture(scope="module")
def launched(folders: Folders) -> Launched:
    """Return what the ranks of a program print, which are launched once."""

    @cache
    def ran(program: str, ranks: int = RANKS) -> Results:
        folder: Path = folders[program]
        profile_of(RANKS).save(folder / "profile.yaml")
        two_each = profile_of(2 * RANKS)
        rows = two_each.measurements
        split = {(s, kind): rows[s, "B"] for s in range(2 * RANKS) for kind in "IW"}
        replace(two_each, measurements={**rows, **split}).save(folder / "stages.yaml")
        return results_of(f"torch_programs:{program}", ranks, folder)

    return ran


def check_followed(ranks: list[dict[str, Any]]) -> None:
    """Compare what modules and gradients say that ran with what the hook saw."""
    for rank in ranks:
        for iteration in rank["iterations"]:
            assert iteration["computations"] == rank["order"]
        forwards = {f"{s}F{m}" for s in rank["stages"] for m in range(rank["microbatches"])}
        ran = [each for each, _ in rank["ran"]]
        count = len(rank["iterations"])
        assert count == 2
        assert sorted(ran) == sorted(
            count * [*forwards, *(each.replace("F", "B") for each in forwards)]
        )
        for each, inside in rank["ran"]:
            assert inside is not None, f"{each} ran outside of computations"
            # The first stage of a zero-bubble schedule runs all of its backward as W.
            alike = inside.replace("I", "B").replace("W", "B")
            assert alike == each


needs_split = pytest.mark.skipif(
    not HAS_SPLIT, reason="this torch splits batches itself; they come split from 2.14 on"
)


def test_the_truth_is_unequal() -> None:
    assert TRUTH == [[12, 144], [12, 72], [12, 48], [12, 36]]


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    "call", ["whole", pytest.param("split", marks=needs_split)], ids=lambda call: f"{call} batches"
)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_work_is_that_of_each_microbatch(name: str, call: str, launched: Launched) -> None:
    for rank in launched("batches"):
        said = rank[f"{name} {call}"]
        assert said["rows"] == ([TRUTH] * 3 if said["is_first"] else [])
        assert said["warnings"] == []
        assert said["equal"]


@needs_split
def test_work_is_known_of_a_step_that_leaves_gradients_unfinished(launched: Launched) -> None:
    for rank in launched("batches"):
        said = rank["unfinished"]
        assert said["rows"] == ([TRUTH] * 3 if said["is_first"] else [])
        assert said["warnings"] == []


def test_a_parameter_of_step_that_is_not_known_is_refused_by_its_name(launched: Launched) -> None:
    first, second = (rank["named"] for rank in launched("own_parameters"))
    assert first["equal"]
    assert first["rows"] == [None] * 3
    assert first["warnings"] == [
        "planner, rank 0: WithCurriculum.step has a parameter curriculum, of which the planner "
        "does not know what it does to the batch; leave it out, or say the work of each batch by "
        "runtime.batch(work=...); such iterations run at full clocks"
    ]
    assert second["warnings"] == []


def test_an_argument_that_a_schedule_takes_for_itself_is_not_taken_for_the_models(
    launched: Launched,
) -> None:
    first, _ = launched("own_parameters")
    assert first["not given"]["rows"] == [TRUTH] * 3
    assert first["unnamed"]["rows"] == [TRUTH[::-1]] * 3
    assert first["unnamed"]["equal"]


@pytest.mark.parametrize("name", ["default", "forwards", "backwards", "never run"])
def test_functions_that_run_computations_are_followed(name: str, launched: Launched) -> None:
    check_followed([rank[name] for rank in launched("functions")])


@pytest.mark.parametrize("name", ["in_turn", "at_once", "hidden"])
def test_a_function_for_pairs_runs_each_as_one_computation(name: str, launched: Launched) -> None:
    pairs = 0
    for rank in (ranks[name] for ranks in launched("functions")):
        assert rank["order"] == rank["generated"]
        for iteration in rank["iterations"]:
            assert iteration["computations"] == rank["order"]
        assert len(rank["iterations"]) == 2
        stages = rank["stages"]
        both = {f"{s}{kind}{m}" for s in stages for m in range(6) for kind in "FB"}
        assert sorted(each for each, _ in rank["ran"]) == sorted(2 * [*both])
        for each, inside in rank["ran"]:
            assert inside is not None, f"{each} ran outside of computations"
            assert re.search(rf"\b{each}\b", inside.replace("I", "B").replace("W", "B")), inside
        pairs += sum(each.startswith("(") for each in rank["order"])
    assert pairs > 6


def test_pairs_are_not_profiled_as_two_computations(launched: Launched) -> None:
    for rank in launched("functions"):
        assert rank["profiling"].endswith(
            "runs forwards and backwards as overlapped pairs, which cannot be repeated alone; "
            "train without a plan, which learns the rows of pairs"
        )


def test_planner_run_follows_a_training_whose_computations_overlap(tmp_path: Path) -> None:
    command = ("-m", "perseus_planner", "run", "--gpu", GPU, "--", sys.executable)
    ranks = by_themselves(RANKS, tmp_path, *command, str(SUPPORT / "overlapping.py"))
    assert [rank.code for rank in ranks] == [0] * RANKS, ranks
    assert ranks[0].stdout.endswith("trained 12\n")
    said = [line for line in ranks[0].stderr.splitlines() if line.startswith("planner:")]
    # What the autopilot does next is no warning.
    assert not [line for line in said if not line.startswith("planner: autopilot: ")], said


def test_a_function_registered_while_training_is_followed_from_the_next_step(
    launched: Launched,
) -> None:
    for rank in launched("registered_later"):
        first, then = rank["orders"]
        assert rank["iterations"] == [first, then, then]
        assert first != then
    assert sum(rank["losses"] for rank in launched("registered_later")) > 0


def test_backwards_without_autograd_are_followed_where_gradients_are_off(
    launched: Launched,
) -> None:
    ranks = launched("without_autograd")
    check_followed([rank["training"] for rank in ranks])
    assert [rank["evaluations"] for rank in ranks] == [0, 0]
    for rank in ranks:
        assert re.search(
            r"stage \d ran without gradients inside the block of profile_pipeline, so that its "
            "backward cannot be repeated; profile it where autograd computes it",
            rank["profiling"],
        )


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zb", "dualpipe-v"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_schedules_is_followed(option: str, schedule: str, launched: Launched) -> None:
    ranks = launched("options")
    if f"{option} {schedule}" not in ranks[0]:
        pytest.skip(f"this torch has no {option}")
    check_followed([rank[f"{option} {schedule}"] for rank in ranks])


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_a_schedule_from_a_file_is_followed(schedule: str, form: str, launched: Launched) -> None:
    check_followed([rank[f"{schedule} {form}"] for rank in launched("files")])


def test_torch_refuses_1f1b_with_fewer_microbatches_than_stages(launched: Launched) -> None:
    for rank in launched("few_microbatches"):
        assert "Number of microbatches (1) must be greater than" in rank["refused"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_gradients_of_sharded_stages_are_reduced_outside_of_computations(
    name: str, launched: Launched
) -> None:
    """In torch 2.13 as in 2.15: a row of a profile holds no reduction."""
    for rank in launched("sharded", 2 * RANKS):
        reduced = rank[name]["reduce_scatter"]
        assert reduced
        assert set(reduced) == {""}
        assert {"F", "B"} <= set(rank[name]["all_gather"])


def test_a_plan_profiled_with_another_torch_is_said_where_stages_are_sharded(
    launched: Launched, folders: Folders
) -> None:
    ranks = launched("sharded", 2 * RANKS)
    version = ranks[0]["torch"]
    clause = (
        f"its sharded stages were profiled with torch 2.9.1+cu130 and train with torch {version}, "
        "which gathers weights and reduces gradients at other moments"
    )
    said = [text for rank in ranks for text in rank["warnings"]]
    assert len(said) == 1
    assert said[0].endswith(f": the plan may not fit: {clause}; profile again")
    assert [text for rank in ranks for text in rank["of the same torch"]] == []

    profile = Profile.load(folders["sharded"] / "sharded.yaml")
    assert profile.conditions["sharded"] == "by fully_shard"
    assert profile.conditions["torch"] == version
    run = Run.load(folders["sharded"] / "run")
    assert {rank.iterations[-1].sharded_torch for rank in run.ranks} == {version}
    verdict = summarize_run(run).verdict
    assert verdict is not None
    assert verdict.text.endswith(f"; {clause}")
    assert verdict.next_step.startswith("profile where you train, with the torch that trains")
