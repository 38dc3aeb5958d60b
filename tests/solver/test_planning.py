"""Plans for which changing a clock costs time are chosen by their replay with that cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from strategies import deadline_s, drawn, pipelines, shares, smooth_profile

from perseus_planner import schedules
from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import ClockChange, Profile
from perseus_planner.schedules import Schedule
from perseus_planner.solver.frontier import Frontier, solve
from perseus_planner.solver.planner import Planner

pytestmark = pytest.mark.usefixtures("little_effort")
CHANGES = st.builds(
    ClockChange, st.sampled_from((0.0, 1e-4, 3e-3, 0.05)), st.sampled_from((0.0, 1e-3, 0.2))
)


def effective_j(plan: Plan, frontier: Frontier) -> float:
    return plan.energy_j - frontier.dag.waiting_w * plan.time_s


def costly(
    stages: int, microbatches: int, change: ClockChange | None, gpus_per_stage: int = 1
) -> Frontier:
    profile = replace(smooth_profile(stages), clock_change=change, gpus_per_stage=gpus_per_stage)
    return solve(profile, schedules.one_f_one_b(stages, microbatches))


@drawn(4, 40, problem=pipelines(3, 4), share=shares(), change=CHANGES)
def test_plans_include_the_cost_of_changes_and_meet_the_deadline(
    problem: tuple[Profile, Schedule], share: float, change: ClockChange
):
    profile, schedule = problem
    frontier = solve(replace(profile, clock_change=change), schedule)
    at_s = deadline_s(frontier, share)
    try:
        plan = frontier.plan_until(at_s, on_time=None)
    except InfeasibleDeadline as error:
        at_s = error.least_time_s
        plan = frontier.plan_until(at_s, on_time=None)
    timeline = replay(plan)
    assert (plan.time_s, plan.energy_j) == (timeline.time_s, timeline.energy_j)
    assert plan.time_s <= at_s
    scale_j = plan.baseline_energy_j + abs(effective_j(plan, frontier))
    assert plan.energy_j >= plan.bound_j - 1e-9 * scale_j


def test_changes_at_no_cost_change_nothing():
    free, costing = costly(3, 12, None), costly(3, 12, ClockChange(0.0))
    for slowdown in (1.0, 1.05):
        plans = [
            each.plan_until(slowdown * each.baseline_time_s, on_time=None)
            for each in (free, costing)
        ]
        assert plans[1].energy_j <= plans[0].energy_j + 1e-9 * plans[0].energy_j
        assert plans[1].time_s <= slowdown * free.baseline_time_s


def test_the_dearer_a_change_the_fewer_pay():
    most, spent = [], []
    for call_s in (0.0, 0.005, 0.05, 10.0):
        frontier = costly(3, 12, ClockChange(call_s))
        plan = frontier.plan_until(1.05 * frontier.baseline_time_s, on_time=None)
        assert effective_j(plan, frontier) <= effective_j(
            frontier.plan_until(1.05 * frontier.baseline_time_s, max_changes=0, on_time=None),
            frontier,
        )
        most.append(max(plan.changes))
        spent.append(effective_j(plan, frontier))
    assert most[0] > most[-1] == 0
    assert spent[0] < spent[-1]


def test_a_group_of_gpus_changes_its_clock_one_gpu_after_the_other():
    alone, group = (costly(3, 12, ClockChange(0.01), gpus) for gpus in (1, 8))
    deadline = 1.05 * alone.baseline_time_s
    assert effective_j(alone.plan_until(deadline, on_time=None), alone) < effective_j(
        group.plan_until(deadline, on_time=None), group
    )


def test_a_deadline_that_only_free_changes_meet_is_refused_with_the_least_time():
    """The fastest clocks of the two kinds are not the same, so that a rank must change its clock
    all the time.
    """
    fast, slow = Measurement(1400, 1.0, 100.0), Measurement(1000, 1.5, 90.0)
    swapped = Measurement(1400, 1.5, 90.0), Measurement(1000, 1.0, 100.0)
    profile = Profile(
        {(0, "F"): (fast, slow), (0, "B"): swapped}, 10.0, clock_change=ClockChange(0.25, 0.25)
    )
    frontier = solve(profile, schedules.one_f_one_b(1, 2))
    assert frontier.min_time_s == 4.0
    with pytest.raises(InfeasibleDeadline) as caught:
        frontier.plan_until(4.0, on_time=None)
    # Each computation runs half of its time at the clock of the one before, at two thirds of its
    # speed.
    assert math.isclose(caught.value.least_time_s, 4 * (0.5 + (1 - 0.5 / 1.5)))
    assert (
        frontier.plan_until(caught.value.least_time_s, on_time=None).time_s
        == caught.value.least_time_s
    )


def test_a_plan_with_the_cost_of_changes_loads_as_it_was(tmp_path):
    frontier = costly(2, 6, ClockChange(0.004, 0.001, 2), gpus_per_stage=2)
    plan = frontier.plan_until(1.03 * frontier.baseline_time_s, on_time=None)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert max(plan.changes) > 0
    frontier.save(tmp_path / "frontier.npz")
    again = Frontier.load(tmp_path / "frontier.npz")
    assert again.plan_until(1.03 * frontier.baseline_time_s, on_time=None) == plan


@drawn(4, 25, problem=pipelines(3, 5), share=shares(), change=CHANGES, most=st.integers(0, 5))
def test_a_switch_budget_holds_where_changes_cost_time(
    problem: tuple[Profile, Schedule], share: float, change: ClockChange, most: int
):
    profile, schedule = problem
    frontier = solve(replace(profile, clock_change=change), schedule)
    at_s = deadline_s(frontier, share)
    try:
        plan = frontier.plan_until(at_s, max_changes=most, on_time=None)
    except InfeasibleBudget as error:
        at_s = error.least_time_s
        if at_s == math.inf:
            return
        plan = frontier.plan_until(at_s, max_changes=most, on_time=None)
    assert max(plan.changes) <= most
    assert plan.time_s <= at_s


def test_plans_that_changes_delay_by_other_times_each_are_made_again_until_one_is_on_time(
    monkeypatch: pytest.MonkeyPatch,
):
    frontier = costly(3, 4, ClockChange(0.001))
    at_s = 1.05 * frontier.baseline_time_s
    plan = frontier.plan_until(at_s, on_time=None)
    delays_s = iter(at_s * part for part in (0.002, 0.003, 0.0035, 0.0))

    def delayed(_: Planner, aim_s: float, *_rest: object) -> dict[tuple[None, bool], Plan]:
        return {(None, False): replace(plan, time_s=aim_s + next(delays_s))}

    monkeypatch.setattr(Planner, "_candidates", delayed)
    again = Planner(frontier).plan(at_s, None)
    assert 0.999 * at_s < again.time_s <= at_s
