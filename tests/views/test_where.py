"""Where the energy goes: its parts add up to the plan's energy, and its words say what the
numbers say.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import timed, write_run
from strategies import drawn, jobs, smooth_profile

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.plans.replay import replay
from perseus_planner.runs.run import Run
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.solver.frontier import solve_dag
from perseus_planner.views.energy import energy_of_plan
from perseus_planner.views.plan import summarize_plan
from perseus_planner.views.report import make_report
from perseus_planner.views.savings import EnergyRates, IterationSize
from perseus_planner.views.sources import Sources


def profile_of(factors: list[float]) -> Profile:
    """Return a profile of stages that are alike but for their times and energies, which are
    multiplied.
    """
    profile = smooth_profile(len(factors), step_mhz=150)
    rows = {
        key: tuple(
            replace(
                row,
                time_s=row.time_s * factors[key.stage],
                energy_j=row.energy_j * factors[key.stage],
            )
            for row in profile.measurements[0, key.kind]
        )
        for key in profile.measurements
    }
    return replace(profile, measurements=rows)


def frontier_of(*factors: float) -> Frontier:
    return solve(profile_of([*factors]), schedules.one_f_one_b(len(factors), 8))


def where(**sources):
    return make_report(Sources(**sources), EnergyRates(), IterationSize()).where


@drawn(2, 15, jobs().map(solve_dag), anew=True)
def test_ranks_and_phases_add_up_to_the_energy_of_the_plan(frontier: Frontier):
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    found = energy_of_plan("plan", plan)
    size_j = math.fsum(abs(rank.computing_j) + abs(rank.waiting_j) for rank in found.ranks)
    assert found.computing_j + found.waiting_j == pytest.approx(plan.energy_j, abs=1e-9 * size_j)
    for part in ("computing_j", "waiting_j"):
        of_phases = math.fsum(getattr(phase, part) for phase in found.phases)
        assert of_phases == pytest.approx(getattr(found, part), abs=1e-9 * size_j)
    for rank, summary in zip(found.ranks, summarize_plan(plan).per_rank, strict=True):
        assert rank.energy_j == pytest.approx(summary.energy_j, abs=1e-9 * size_j)


def test_phases_are_those_of_1f1b():
    plan = frontier_of(1.0, 1.0, 1.0).plan_for(1e9)
    spans, found = replay(plan).spans, energy_of_plan("plan", plan)
    first = "0F0 0F1 0F2 1F0 1F1 2F0"  # before the first backward of each rank
    for phase, names in ((0, first), (2, "0B5 0B6 0B7 1B6 1B7 2B7")):
        ran = [spans[name] for name in names.split()]
        computing_j = math.fsum(span.power_w * (span.end_s - span.start_s) for span in ran)
        assert found.phases[phase].computing_j == pytest.approx(computing_j)


def test_the_first_sentence_says_what_is_saved_and_why():
    frontier = frontier_of(1.0, 1.0, 1.2, 1.0)
    plan = frontier.plan_for(1.02 * frontier.baseline_time_s)
    found = where(frontier=frontier, plans={"plan.yaml": plan})
    first, why, before, bottleneck, phases = found.sentences
    share = 100 * plan.saving_j / plan.baseline_energy_j
    assert first.endswith(
        f": {share:.1f} % less energy than all clocks at maximum, and 2.0 % longer."
    )
    assert why.startswith("Per pipeline, computing takes ")
    assert "ranks run at lower clocks; waiting takes" in why
    assert before.startswith("With all clocks at maximum, ")
    assert bottleneck.startswith("Rank 2 is the bottleneck: it computes for ")
    assert (
        "20.0 % longer than the others on average; with equal work on all ranks, an iteration "
        "would be " in bottleneck
    )
    assert re.fullmatch(r"Of the plan's saving, \d+ % is in the steady state, .*", phases)
    assert found.bottleneck is not None
    balanced = solve(profile_of([1.05] * 4), schedules.one_f_one_b(4, 8))
    assert found.bottleneck.balanced_time_s == pytest.approx(balanced.baseline_time_s)


def test_of_two_ranks_the_busier_one_is_compared_with_the_other():
    frontier = frontier_of(1.0, 1.3)
    plan = frontier.plan_for(frontier.baseline_time_s)
    found = where(frontier=frontier, plans={"plan.yaml": plan})
    assert found.bottleneck is not None
    assert found.bottleneck.excess_share == pytest.approx(0.3)
    assert any("30.0 % longer than the others on average" in text for text in found.sentences)


def test_a_report_names_the_layers_to_move_and_the_layout_to_type():
    profile = profile_of([1.0, 1.0, 1.0, 1.55])
    layout = {"layout": "Et*4|t*4|t*4|t*4L"}
    frontier = solve(replace(profile, conditions=layout), schedules.one_f_one_b(4, 8))
    found = where(frontier=frontier)
    (move,) = [each for each in found.sentences if "Move" in each]
    moved = solve(profile_of([1.0, 1.25, 1.25, 1.05]), schedules.one_f_one_b(4, 8))
    shorter = 100 * (1 - moved.baseline_time_s / frontier.baseline_time_s)
    assert move == (
        f"Move 2 layers from stage 3 to stages 1, 2: an iteration would be {shorter:.1f} % "
        "shorter at full clocks, if memory allows; the layout is then Et*4|(t*5|)*2ttL, now "
        "Et*4|(t*4|)*2t*4L."
    )
    alike = solve(replace(profile_of([1.0] * 4), conditions=layout), schedules.one_f_one_b(4, 8))
    assert any(
        each.startswith("No move of a layer of its layout, ")
        for each in where(frontier=alike).sentences
    )


def test_equal_ranks_have_no_bottleneck_and_a_few_share_one():
    frontier = frontier_of(1.0, 1.0, 1.0, 1.0)
    plans = {"plan.yaml": frontier.plan_for(frontier.baseline_time_s)}
    assert "No rank is the bottleneck" in where(frontier=frontier, plans=plans).sentences[3]
    frontier = frontier_of(1.1, 1.0, 1.1, 1.0)
    plans = {"plan.yaml": frontier.plan_for(frontier.baseline_time_s)}
    assert (
        "Ranks 0 and 1 more are the bottleneck"
        in where(frontier=frontier, plans=plans).sentences[3]
    )


def test_a_report_with_a_run_leads_with_the_run(tmp_path: Path):
    frontier = frontier_of(1.0, 1.1)
    plan = frontier.plan_for(1.02 * frontier.baseline_time_s)
    write_run(tmp_path, plan, pipelines=2)
    report = make_report(
        Sources(frontier=frontier, plans={"plan.yaml": plan}, runs={"run": Run.load(tmp_path)}),
        EnergyRates(),
        IterationSize(),
    )
    assert report.savings[0].is_run
    job, pipeline, *_ = report.where.sentences
    assert job.startswith("The run in the folder run (2 pipelines together) takes ")
    assert pipeline.startswith("Per pipeline, computing takes ")
    run = report.where.iterations[-1]
    planned = energy_of_plan("plan", plan)
    assert (run.kind, run.phases) == ("run", ())
    for ran, rank in zip(run.ranks, planned.ranks, strict=True):
        assert ran.energy_j == pytest.approx(rank.energy_j, rel=1e-3)
        assert ran.waiting_j == pytest.approx(rank.waiting_j, rel=2e-2)


def joules(text: str) -> float:
    """Return the joules that a sentence names as less; negative if it names them as more."""
    value, kilo, way = text
    return float(value) * (1e3 if kilo else 1.0) * (1 if way == "less" else -1)


@pytest.mark.parametrize("late", [1.0, 1.6])
def test_the_parts_of_a_saving_add_up_to_it(tmp_path: Path, late: float):
    """Also if iterations take longer than planned, and the first one longer still."""
    frontier = frontier_of(1.0, 1.0, 1.2, 1.0)
    plan = frontier.plan_for(1.02 * frontier.baseline_time_s)

    def times(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
        usual = timed(plan, rank, number, begin_ns)
        longer = late if number else late + 0.3
        return replace(usual, end_ns=begin_ns + round(longer * (usual.end_ns - begin_ns)))

    write_run(tmp_path, plan, 6, times=times)
    runs = {"run": Run.load(tmp_path)}
    plans = {"plan.yaml": plan}
    for given in ({"plans": plans}, {"plans": plans, "runs": runs}):
        report = make_report(Sources(frontier=frontier, **given), EnergyRates(), IterationSize())
        sentence = report.where.sentences[1]
        parts = re.findall(r"takes ([\d.]+) (k?)J (less|more)", sentence)
        assert len(parts) == 2, sentence
        saved_j = report.savings[0].saved_j
        assert sum(map(joules, parts)) == pytest.approx(saved_j, rel=0.02)


def test_a_run_late_by_other_things_is_not_told_as_the_price_of_its_plan(tmp_path: Path):
    frontier = frontier_of(1.0, 1.1)
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)

    def times(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
        usual = timed(plan, rank, number, begin_ns)
        return replace(usual, end_ns=begin_ns + round(1.6 * (usual.end_ns - begin_ns)))

    write_run(tmp_path, plan, 6, times=times)
    found = where(frontier=frontier, runs={"run": Run.load(tmp_path)})
    assert (
        " less energy than all clocks at maximum would have taken in as much time. An "
        in (found.sentences[0])
    )
    assert found.sentences[0].endswith(
        ", 60 % longer than planned; the plan takes as long as all clocks at maximum."
    )


def test_a_plan_alone_says_what_it_saves(tmp_path: Path):
    frontier = frontier_of(1.0, 1.0)
    plan = frontier.plan_for(frontier.baseline_time_s)
    found = where(plans={"plan.yaml": plan})
    assert [each.kind for each in found.iterations] == ["plan"]
    assert len(found.sentences) == 1
    assert where(profile=smooth_profile(2)).iterations == ()
