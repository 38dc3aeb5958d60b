"""Training under a plan, whole: real engines, real ranks, a clock controller, and emulated GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import Said, said_by

pytest.importorskip("torch")

FIRST, SECOND, WITHOUT = 1, 2, 0  #: by which plan an iteration ran


def heard(everyone: Said) -> list[str]:
    """What the whole job was warned of."""
    return [text for each in everyone for text in each["heard"]]


def check_followed(everyone: Said, *names: str) -> None:
    """Each computation ran in its turn and at its clock, and the results are those without a runtime."""
    for name in names:
        for said in (rank[name] for rank in everyone):
            assert said["equal"]
            assert said["orders"] == [said["plan"]] * 3
            assert set(said["as planned"]) == {True}
            assert (said["after"], said["problem"], said["heard"]) == (None, None, [])


@pytest.mark.parametrize(
    ("count", "names"), [(2, ["1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"]), (4, ["1f1b", "interleaved-zb"])]
)
def test_torch_runs_every_computation_at_its_clock_and_results_stay_the_same(
    count: int, names: list[str], tmp_path: Path
):
    check_followed(said_by("runtime_programs:torch_schedules", count, tmp_path, *names), *names)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_runs_every_computation_at_its_clock_and_results_stay_the_same(tmp_path: Path):
    everyone = said_by("runtime_programs:deepspeed_engine", 2, tmp_path, imports=["deepspeed.pipe"])
    check_followed(everyone, "1f1b")


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_runs_every_computation_at_its_clock_and_results_stay_the_same(tmp_path: Path):
    check_followed(said_by("megatron_programs:planned", 2, tmp_path), "interleaved-1f1b")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """A job in which much changes, but for plans by pipeline."""
    return said_by("runtime_programs:changes", 2, tmp_path_factory.mktemp("changes"))


def test_other_numbers_of_microbatches_run_without_clocks_and_are_told_once_in_the_whole_job(changed: Said):
    without = "it ran without clocks, because the iteration before was not as planned"
    for rank in changed:
        assert rank["deviations"] == [
            "6 microbatches, and the plan has 4", without, "2 microbatches, and the plan has 4", without
        ]  # fmt: skip
    (text,) = [text for text in heard(changed) if "microbatches" in text]
    assert "ran 6 microbatches, and the plan has 4; clocks are reset in such iterations, and set again" in text


def test_all_ranks_take_a_new_plan_at_one_iteration_although_one_hears_of_it_late(changed: Said):
    first, second = (rank["switch"]["ran"] for rank in changed)
    assert first == second
    assert first == [FIRST] * first.count(FIRST) + [SECOND] * first.count(SECOND)
    assert first.count(FIRST) >= 5  # for as long as one did not look
    before = 8  # iterations that ran before these
    assert changed[1]["switch"]["since"] == before + first.count(FIRST)


def test_a_rank_that_does_not_hear_what_was_decided_runs_by_no_plan_until_it_does(changed: Said):
    late, others = (rank["late"]["ran"] for rank in changed)
    pairs = list(zip(late, others, strict=True))
    may_follow = [(FIRST, FIRST), (WITHOUT, FIRST), (WITHOUT, SECOND), (SECOND, SECOND)]
    assert [may_follow.index(pair) for pair in pairs] == sorted(may_follow.index(pair) for pair in pairs)
    assert (WITHOUT, SECOND) in pairs
    (text,) = [text for text in heard(changed) if "had learned which plan" in text]
    assert text.endswith("it runs at the GPU's default clocks until then")
    assert len(heard(changed)) == 2  # with that of the microbatches


def test_an_exception_of_the_training_reaches_its_caller_with_clocks_reset(changed: Said):
    assert [rank["locked"] for rank in changed] == [None, None]


def test_pipelines_run_by_plans_of_their_own_and_change_them_together(tmp_path: Path):
    everyone = said_by("runtime_programs:pipelines", 4, tmp_path)
    assert [rank["pipeline"] for rank in everyone] == [0, 1, 0, 1]
    assert all(rank["ran"] == everyone[0]["ran"] == sorted(rank["ran"]) for rank in everyone)
    assert [rank["locked"] for rank in everyone] == [None] * 4
    assert heard(everyone) == []


def test_a_dry_run_does_all_but_set_clocks(tmp_path: Path):
    everyone = said_by("runtime_programs:dry_run", 2, tmp_path)
    for rank in everyone:
        assert (rank["plan"], rank["as planned"], rank["problem"], rank["heard"]) == (True, True, None, [])
