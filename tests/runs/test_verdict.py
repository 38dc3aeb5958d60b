"""Iterations that take another time than was planned are told why; each cause is injected here."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_run
from strategies import smooth_profile

from perseus_planner import Plan, Run, schedules, solve
from perseus_planner.base.prefixes import si
from perseus_planner.runs import Account, IterationRecord
from perseus_planner.runs.verdict import (
    FAR_OFF,
    far_off_plan,
    of_another_machine,
    verdict_of,
    why_no_saving,
)
from perseus_planner.views.report import make_report, page, report_text
from perseus_planner.views.run import run_text, summarize_run, time_and_saving
from perseus_planner.views.savings import EnergyRates, IterationSize
from perseus_planner.views.sources import Sources

RANKS, WINDOWS = 4, 10


def ran(time_s: float = 1.0, busy_s: float = 0.6, **more: float) -> Account:
    """Return a rank in 10 iterations that were planned to take 1 s, 0.6 s of them computing."""
    sums = {"gpu_s": time_s, "planned_s": 1.0, "busy_s": busy_s, "planned_busy_s": 0.6}
    return Account(
        windows=WINDOWS,
        as_planned=WINDOWS,
        changes_asked=40,
        **{name: WINDOWS * each for name, each in sums.items()},
        **more,
    )


def ranks(time_s: float, odd: Account | None = None) -> dict[int, Account]:
    """Return ranks that wait for `odd`, which is rank 3."""
    return {rank: odd if odd and rank == 3 else ran(time_s) for rank in range(RANKS)}


@pytest.mark.parametrize(
    ("given", "cause", "those", "text"),
    [
        (
            ranks(1.1, ran(1.1, 0.672)),
            "one rank",
            (3,),
            "10 % slower than planned: rank 3 computes 12 % longer, the others wait",
        ),
        (
            ranks(1.1, ran(1.1, 0.672, changes_late=30, changes_overtaken=2, off_clock_s=0.9)),
            "late clocks",
            (3,),
            "10 % slower than planned: clocks come late on rank 3, where 32 of 40 changes were "
            "late or overtaken, so it computes 12 % longer",
        ),
        (
            ranks(1.1, ran(1.1, 0.672, changes_late=30, off_clock_s=0.1)),
            "one rank",  # late changes that do not explain it
            (3,),
            "10 % slower than planned: rank 3 computes 12 % longer, the others wait",
        ),
        (
            ranks(1.1),
            "waiting",
            (),
            "10 % slower than planned: no rank computes much longer, but all wait 0.1 s longer "
            "an iteration on average, for transfers, data or the host",
        ),
        (
            {rank: ran(1.4, 0.636 + 0.02 * rank) for rank in range(RANKS)},
            "waiting",
            (),
            "40 % slower than planned: ranks compute 6 to 16 % longer, which is less than half of "
            "it, and all wait 0.334 s longer an iteration on average, for transfers, data or the "
            "host",
        ),
        (
            {rank: ran(1.4, 0.588 + 0.04 * rank) for rank in range(RANKS)},
            "waiting",
            (),
            "40 % slower than planned: ranks compute 2 % shorter to 18 % longer, which is less "
            "than half of it, and all wait 0.352 s longer an iteration on average, for transfers, "
            "data or the host",
        ),
        (
            {rank: ran(1.1, 0.66) for rank in range(RANKS)},
            "all ranks",
            (0, 1, 2, 3),
            "10 % slower than planned: all ranks compute 10 % longer",
        ),
        (
            {rank: ran(1.1, 0.66 + 0.02 * rank) for rank in range(RANKS)},
            "all ranks",
            (0, 1, 2, 3),
            "10 % slower than planned: all ranks compute 10 to 20 % longer",
        ),
        (
            {rank: ran(1.1, 0.66, overloaded=WINDOWS) for rank in range(RANKS)},
            "all ranks",
            (0, 1, 2, 3),
            "10 % slower than planned: all ranks compute 10 % longer, while hosts have more to run "
            "than CPUs",
        ),
        (
            {rank: ran(0.95, 0.57) for rank in range(RANKS)},
            "all ranks",
            (0, 1, 2, 3),
            "5 % faster than planned: all ranks compute 5 % shorter",
        ),
    ],
)
def test_each_cause_is_told_from_the_others(
    given: dict[int, Account], cause: str, those: tuple[int, ...], text: str
):
    verdict = verdict_of(given)
    assert verdict is not None
    assert (verdict.cause, verdict.ranks, verdict.text) == (cause, those, text)
    assert str(verdict).startswith(f"{text}. Next: ")
    assert "`planner " in verdict.next_step


def test_the_command_that_is_next_can_be_typed_as_it_stands():
    folder = Path("my runs/run")
    at_folder = verdict_of(ranks(1.1), run=folder)
    assert at_folder is not None
    command = at_folder.next_step.split("`")[1]
    assert shlex.split(command) == ["planner", "show", str(folder), "--perfetto", "run.json"]
    at_service = verdict_of(ranks(1.1))
    assert at_service is not None
    assert at_service.next_step == (
        "see where with `planner show run --perfetto run.json`, run being the folder of "
        'record="run"'
    )


def test_the_service_is_not_said_to_be_missing_where_it_tells_the_verdict():
    slow = ranks(1.1, ran(1.1, 0.672))
    at_service = verdict_of(slow)
    at_folder = verdict_of(slow, run=Path("run"))
    assert at_service is not None
    assert at_folder is not None
    assert at_service.cause == "one rank"
    assert at_service.next_step == "look at the GPU with `planner doctor` on that node"
    assert at_folder.next_step.startswith(f"{at_service.next_step}; with a service, a report of ")


def test_there_is_none_below_two_percent_or_where_not_everything_ran_as_planned():
    assert verdict_of(ranks(1.0199)) is None
    assert verdict_of(ranks(1.02)) is not None
    assert verdict_of(ranks(0.9801)) is None
    assert verdict_of({}) is None
    assert verdict_of(ranks(1.5, replace(ran(1.5), as_planned=WINDOWS - 1))) is None
    assert verdict_of(ranks(1.5, Account())) is None


@pytest.mark.parametrize(
    ("factors", "overloaded", "gpu", "is_another"),
    [
        ((1.0,) * 4, 0, "A100", False),
        ((1.9,) * 4, 0, "A100", False),
        ((2.1,) * 4, 0, "A100", True),
        ((0.4,) * 4, 0, None, True),
        ((2.1,) * 4, WINDOWS, "A100", False),  # on a host that others use
        ((2.1, 2.1, 2.1, 4.0), 0, "A100", False),  # not one factor
        ((1.0,) * 4, 0, "NVIDIA A100-SXM4-40GB", False),  # which says more
        ((1.0,) * 4, 0, "NVIDIA A800-SXM4-40GB", True),
    ],
)
def test_a_plan_is_of_another_machine_by_its_gpu_or_by_one_factor_on_idle_hosts(
    factors: tuple[float, ...], overloaded: int, gpu: str | None, is_another: bool
):
    given = {
        rank: ran(3.0, 0.6 * factor, overloaded=overloaded) for rank, factor in enumerate(factors)
    }
    said = of_another_machine(given, "A100", [gpu] * RANKS)
    assert (said is not None) == is_another


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [
        (1.0, None),
        (FAR_OFF, None),
        (1 / FAR_OFF, None),
        (1.51 * FAR_OFF, "3"),
        (0.0062, "0.0062"),
        (510.0, "510"),
    ],
)
def test_no_saving_is_stated_while_times_are_far_off_the_plan(ratio: float, factor: str | None):
    """By whatever cause, here waiting that no rank computes for, on hosts that others use."""
    given = ranks(ratio, ran(ratio, 0.6, overloaded=WINDOWS))
    said = far_off_plan(given)
    assert (said is None) == (factor is None)
    assert why_no_saving(given, "A100", [None]) == said
    if factor is not None:
        assert said == (
            f"Times are {factor} times the plan's, so no saving is stated; if the plan is of "
            "another model or batch, profile what you train, as `planner profile --help` says, "
            "and plan again"
        )


def test_what_is_not_known_is_not_far_off():
    for account in (Account(), replace(ran(99.0), as_planned=WINDOWS - 1)):
        assert far_off_plan({0: account}) is None
    assert far_off_plan({}) is None
    assert far_off_plan({0: Account(), 1: ran(99.0)}) is not None


def changed(run: Run, change: Callable[[IterationRecord], dict[str, Any]]) -> Run:
    """Return the run with other values in each row, recorded on an idle host."""
    return replace(
        run,
        ranks=tuple(
            replace(
                rank,
                iterations=tuple(
                    replace(row, host_load=0.1, **change(row)) for row in rank.iterations
                ),
            )
            for rank in run.ranks
        ),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    return frontier.plan_for(frontier.baseline_time_s)


def shown(plan: Plan, run: Run) -> tuple[str, str, str]:
    made = make_report(
        Sources(plans={"plan.yaml": plan}, runs={"run": run}), EnergyRates(), IterationSize()
    )
    return run_text(summarize_run(run)), report_text(made), page(made)


def test_a_run_of_another_machine_is_told_so_and_saves_nothing(plan: Plan, tmp_path: Path):
    write_run(tmp_path, plan, 4)
    run = Run.load(tmp_path)
    text, told, html = shown(plan, run)
    assert "another machine" not in text + told + html
    assert "Where the energy goes" in html
    assert (
        "Every iteration ran in the planned order. They took the planned time, up to 2 %." in text
    )
    for said in shown(plan, changed(run, lambda row: {"busy_s": 1000 * row.busy_s})):
        assert "This plan is for another machine: all ranks compute 1000 times as long" in said
        assert (
            "saved"
            not in said.replace("no saving", "").partition("<script")[0].partition("<style")[0]
        )


@pytest.mark.parametrize("factor", [0.006, 7.0])
def test_a_run_of_another_model_saves_nothing_that_is_said(
    factor: float, plan: Plan, tmp_path: Path
):
    """One rank is busier than planned and the others are not: it is not another machine."""
    write_run(tmp_path, plan, 4)
    run = Run.load(tmp_path)

    def shrunk(row: IterationRecord) -> dict[str, Any]:
        return {
            "begin_s": factor * row.begin_s,
            "end_s": factor * row.end_s,
            "next_s": None if row.next_s is None else factor * row.next_s,
            "busy_s": factor * row.busy_s * (1 + row.pipeline_rank),
            "energy_j": None if row.energy_j is None else factor * row.energy_j,
        }

    for said in shown(plan, changed(run, shrunk)):
        assert f"Times are {factor:.2g} times the plan's, so no saving is stated;" in said.replace(
            "&#39;", "'"
        ).replace("&#x27;", "'")
        visible = said.partition("<script")[0].partition("<style")[0]
        assert "saved" not in visible
        assert "foresees" not in visible


def test_show_and_report_give_one_time_and_one_saving(plan: Plan, tmp_path: Path):
    """The first iteration takes twice as long, and counts in neither."""
    write_run(tmp_path, plan, 6)

    def late(row: IterationRecord) -> dict[str, Any]:
        end_s = row.begin_s + (2.0 if row.iteration == 0 else 1.033) * row.time_s
        return {"end_s": end_s, "next_s": None}

    run = changed(Run.load(tmp_path), late)
    text, told, html = shown(plan, run)
    time = si(1.033 * plan.time_s, "s", 3)
    saved = f"{100 * run.total.saved_share:.1f}"
    assert text.startswith(f"An iteration takes {time}, 3.3 % longer than planned. The run saved ")
    assert "3.3 % slower than planned" in text
    for said in (text.partition("Details")[0], told, html):
        assert time in said.replace("\u00a0", " ")
        assert saved in said


def test_of_several_plans_the_one_time_names_its_plan(plan: Plan, tmp_path: Path):
    write_run(tmp_path, plan, 4)
    summary = summarize_run(Run.load(tmp_path))
    said = time_and_saving(summary)
    assert said.startswith(f"An iteration takes {si(plan.time_s, 's', 3)}, as planned. ")
    earlier = replace(summary.current, version=0, name="0", time_s=2 * plan.time_s)
    both = replace(summary, plans=(earlier, *summary.plans))
    assert time_and_saving(both) == said.replace("as planned. ", "as planned, by plan 1. ")


def test_the_order_and_the_time_are_two_statements(plan: Plan, tmp_path: Path):
    write_run(tmp_path, plan, 4)
    run = Run.load(tmp_path)
    late = changed(run, lambda row: {"end_s": row.begin_s + 1.1 * row.time_s, "next_s": None})
    for said in shown(plan, late):
        assert "10 % slower than planned: no rank computes much longer" in said
    text, _, _ = shown(plan, late)
    assert "Every iteration ran in the planned order.\n" in text
