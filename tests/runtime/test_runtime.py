"""Training under a plan as a whole: real engines, real ranks, a clock controller, and emulated
GPUs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import Results, results_of

pytest.importorskip("torch")

FIRST, SECOND = 1, 2  #: by which plan an iteration ran


def warnings_of(everyone: Results) -> list[str]:
    """Return the warnings of the whole job."""
    return [text for each in everyone for text in each["warnings"]]


def check_followed(everyone: Results, *names: str) -> None:
    """Check that each computation ran in its turn and at its clock, with the results of a plain
    training.
    """
    for name in names:
        for result in (rank[name] for rank in everyone):
            assert result["equal"]
            assert result["orders"] == [result["plan"]] * 3
            assert set(result["as planned"]) == {True}
            assert (result["after"], result["problem"], result["warnings"]) == (None, None, [])


@pytest.mark.parametrize(
    ("count", "names"),
    [(2, ["1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"]), (4, ["1f1b", "interleaved-zb"])],
)
def test_torch_runs_every_computation_at_its_clock_and_results_stay_the_same(
    count: int, names: list[str], tmp_path: Path
):
    check_followed(results_of("runtime_runs:torch_schedules", count, tmp_path, *names), *names)


@pytest.mark.soak  # runtime/test_engines.py has its adapter
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_runs_every_computation_at_its_clock_and_results_stay_the_same(tmp_path: Path):
    everyone = results_of("runtime_runs:deepspeed_engine", 2, tmp_path, imports=["deepspeed.pipe"])
    check_followed(everyone, "1f1b")


@pytest.mark.soak  # runtime/test_megatron.py has its adapter
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_runs_every_computation_at_its_clock_and_results_stay_the_same(tmp_path: Path):
    check_followed(results_of("megatron_programs:planned", 2, tmp_path), "interleaved-1f1b")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run a job with all kinds of changes except plans for each pipeline."""
    return results_of("runtime_runs:changes", 2, tmp_path_factory.mktemp("changes"))


def test_other_numbers_of_microbatches_run_without_clocks_with_one_warning_in_the_whole_job(
    changed: Results,
):
    without = "it ran without clocks, because the iteration before was not as planned"
    for rank in changed:
        assert rank["deviations"] == [
            "6 microbatches, and the plan has 4", without, "2 microbatches, and the plan has "
            "4", without
        ]  # fmt: skip
    (text,) = [text for text in warnings_of(changed) if "microbatches" in text]
    assert (
        "ran 6 microbatches, and the plan has 4; clocks are reset in these iterations, and set "
        "again after an iteration that runs as planned" in text
    )


def test_all_ranks_take_a_new_plan_at_one_iteration(changed: Results):
    first, second = (rank["switch"]["ran"] for rank in changed)
    assert first == second
    assert first == [FIRST] * first.count(FIRST) + [SECOND] * first.count(SECOND)
    before = 8  # iterations that ran before these
    assert changed[1]["switch"]["since"] == before + first.count(FIRST)


def test_a_rank_that_hears_of_a_new_plan_late_takes_it_then(changed: Results):
    late, others = (rank["late"]["ran"] for rank in changed)
    pairs = list(zip(late, others, strict=True))
    may_follow = [(FIRST, FIRST), (FIRST, SECOND), (SECOND, SECOND)]
    assert [may_follow.index(pair) for pair in pairs] == sorted(
        may_follow.index(pair) for pair in pairs
    )
    assert pairs.count((FIRST, SECOND)) >= 2
    assert len(warnings_of(changed)) == 1  # that of the microbatches


def test_an_exception_of_the_training_reaches_its_caller_with_clocks_reset(changed: Results):
    assert [rank["locked"] for rank in changed] == [None, None]
    assert [rank["deviates by raising"] for rank in changed] == [False, False]


def test_pipelines_run_by_plans_of_their_own_and_change_them_together(tmp_path: Path):
    everyone = results_of("runtime_runs:pipelines", 4, tmp_path)
    assert [rank["pipeline"] for rank in everyone] == [0, 1, 0, 1]
    # Of the plans that the pipelines changed to; rank 0 knows those of all.
    assert [rank["clocks"] for rank in everyone] == [[1057.5, 907.5, 1057.5, 907.5], [], [], []]
    assert all(rank["ran"] == everyone[0]["ran"] == sorted(rank["ran"]) for rank in everyone)
    assert [rank["locked"] for rank in everyone] == [None] * 4
    assert warnings_of(everyone) == []


def test_a_dry_run_does_all_but_set_clocks(tmp_path: Path):
    everyone = results_of("runtime_runs:dry_run", 2, tmp_path)
    for rank in everyone:
        assert (rank["plan"], rank["as planned"], rank["problem"], rank["warnings"]) == (
            True,
            True,
            None,
            [],
        )
        assert rank["set"] == 0
