"""Policies choose the right clocks, beside stragglers and before they learn of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed, pipelines, smooth_profile

from perseus_planner.base.errors import InfeasibleDeadline, UsageError
from perseus_planner.extensions.lab import baselines
from perseus_planner.extensions.lab.policies import make_policy
from perseus_planner.extensions.lab.replay import Cluster, simulate
from perseus_planner.extensions.lab.stragglers import UNDISTURBED, Condition, Straggler
from perseus_planner.plans.replay import all_maximum
from perseus_planner.profiles.groups import slowed
from perseus_planner.schedules import one_f_one_b
from perseus_planner.solver.frontier import Frontier, solve


@pytest.fixture(scope="module")
def smooth() -> Frontier:
    return solve(smooth_profile(3, step_mhz=60), one_f_one_b(3, 4))


def test_baselines_run_the_clocks_of_their_rules(smooth: Frontier):
    deadline_s = 1.1 * smooth.baseline_time_s
    expected = {
        "max": all_maximum(smooth.dag),
        "one-clock": baselines.one_clock(smooth.dag, deadline_s),
        "per-stage": baselines.one_per_stage(smooth.dag, deadline_s),
        "envpipe": baselines.envpipe(smooth.dag),
        "planner-fixed": smooth.plan_until(deadline_s).clocks,
    }
    cluster = Cluster(smooth, 2, 5)
    for name, clocks in expected.items():
        outcome, plan = simulate(cluster, name, 1.1), smooth.plan_of(clocks)
        assert math.isclose(outcome.time_s, 5 * plan.time_s, rel_tol=1e-12), name
        assert math.isclose(outcome.energy_j, 2 * 5 * plan.energy_j, rel_tol=1e-12), name


@pytest.mark.parametrize("slowdown", [1.05, 1.1, 1.2, 1.3, 1.5, 3.0])
def test_beside_a_lasting_straggler_others_wait_as_the_published_formula_says(
    smooth: Frontier, slowdown: float
):
    """Perseus, Table 4: a plan beside a straggler of T' costs its own energy and (T' - T) * GPUs
    * blocking power.
    """
    cluster = Cluster(smooth, 5, 20, [Straggler(0, math.inf, slowdown, 3)], 0.0)
    kept = smooth.plan_for(smooth.baseline_time_s)
    straggler_s = slowdown * kept.time_s
    others = {"planner-fixed": kept, "planner": smooth.plan_beside_straggler(straggler_s)}
    for name, plan in others.items():
        outcome = simulate(cluster, name)
        waiting_j = (straggler_s - plan.time_s) * 3 * 83.64
        expected_j = 20 * (4 * (plan.energy_j + waiting_j) + slowdown * kept.energy_j)
        assert math.isclose(outcome.time_s, 20 * straggler_s, rel_tol=1e-12)
        assert math.isclose(outcome.energy_j, expected_j, rel_tol=1e-12)


@fixed
@given(problem=pipelines(3, 4, 4), data=st.data())
def test_beside_lasting_stragglers_the_planner_is_never_slower_nor_dearer_than_maximum(
    problem: Any, data: Any
):
    frontier = solve(*problem)
    pipeline, stage = st.integers(0, 2), st.none() | st.integers(0, frontier.schedule.stages - 1)
    lasting = st.builds(
        Straggler, st.just(0.0), st.just(math.inf), st.floats(1, 3), pipeline, stage
    )
    cluster = Cluster(frontier, 3, 5, data.draw(st.lists(lasting, max_size=4)), 0.0)
    ours, maximum = simulate(cluster, "planner"), simulate(cluster, "max")
    assert ours.time_s <= maximum.time_s * (1 + 1e-12)
    assert ours.energy_j <= maximum.energy_j * (1 + 1e-9)


def test_a_pipeline_with_a_slow_stage_is_solved_again_and_the_others_wait_for_it(smooth: Frontier):
    cluster = Cluster(smooth, 4, 10, [Straggler(0, math.inf, 1.3, 2, stage=1)], 0.0)
    again = solve(slowed(smooth.profile, {1: 1.3}), smooth.schedule)
    plan = again.plan_for(again.baseline_time_s)
    beside = smooth.plan_beside_straggler(plan.time_s)
    outcome = simulate(cluster, "planner")
    assert math.isclose(outcome.time_s, 10 * plan.time_s, rel_tol=1e-12)
    expected_j = 10 * (
        plan.energy_j + 3 * (beside.energy_j + (plan.time_s - beside.time_s) * 3 * 83.64)
    )
    assert math.isclose(outcome.energy_j, expected_j, rel_tol=1e-12)
    assert outcome.energy_j < simulate(cluster, "planner-fixed").energy_j


def test_a_slow_stage_within_the_target_slows_no_pipeline(smooth: Frontier):
    cluster = Cluster(smooth, 4, 10, [Straggler(0, math.inf, 1.05, 2, stage=1)], 0.0)
    outcome = simulate(cluster, "planner", 1.2)
    assert outcome.time_s <= 10 * 1.2 * smooth.baseline_time_s
    assert outcome.time_s > 10 * 1.19 * smooth.baseline_time_s


def test_until_the_delay_is_over_plans_stay(smooth: Frontier):
    kept = smooth.plan_for(smooth.baseline_time_s)
    straggler_s = 1.2 * kept.time_s
    beside = smooth.plan_beside_straggler(straggler_s)
    before_j = kept.energy_j + (straggler_s - kept.time_s) * 3 * 83.64
    after_j = beside.energy_j + (straggler_s - beside.time_s) * 3 * 83.64
    for delay, late in ((0.0, 0), (0.5, 1), (1.0, 1), (1.5, 2), (7.2, 8), (100.0, 10)):
        cluster = Cluster(smooth, 2, 10, [Straggler(0, math.inf, 1.2, 0)], delay * straggler_s)
        expected_j = late * before_j + (10 - late) * after_j + 10 * 1.2 * kept.energy_j
        assert math.isclose(simulate(cluster, "planner").energy_j, expected_j, rel_tol=1e-12), delay


def test_after_a_straggler_the_others_stay_slow_for_the_delay(smooth: Frontier):
    kept = smooth.plan_for(smooth.baseline_time_s)
    straggler_s = 1.2 * kept.time_s
    beside = smooth.plan_beside_straggler(straggler_s)
    stragglers = [Straggler(0, 3.5 * straggler_s, 1.2, 0)]  # four iterations begin in it
    outcome = simulate(Cluster(smooth, 2, 10, stragglers, 1.4 * straggler_s), "planner")
    # Two iterations at the old plans, two at the new ones; gone then, which is known after one
    # more.
    expected_s = 4 * straggler_s + beside.time_s + 5 * kept.time_s
    assert math.isclose(outcome.time_s, expected_s, rel_tol=1e-12)
    assert simulate(Cluster(smooth, 2, 10, stragglers, 1e6), "planner").time_s == simulate(
        Cluster(smooth, 2, 10, stragglers), "planner-fixed"
    ).time_s  # fmt: skip


@pytest.mark.parametrize("name", ["one-clock", "per-stage"])
def test_a_reacting_baseline_follows_its_rule_for_the_straggler_s_time(smooth: Frontier, name: str):
    rule = {"one-clock": baselines.one_clock, "per-stage": baselines.one_per_stage}[name]
    replays = Cluster(smooth, 2, 1).replays
    policy = make_policy(name, smooth, 1.0, replays)
    kept = tuple(rule(smooth.dag, smooth.baseline_time_s).values())
    for slowdown in (1.31, 1.05, 1.3, 1.1, 1.5, 1.02, 1.2, 1.0001, 2.5, 1.31):
        straggling = Condition(slowdown, ())
        clocks = policy(frozenset({UNDISTURBED, straggling}))
        assert clocks[straggling] == kept
        straggler_s = replays.replay(kept, straggling).time_s
        expected = rule(smooth.dag, straggler_s) if straggler_s > smooth.baseline_time_s else rule(
            smooth.dag, smooth.baseline_time_s
        )  # fmt: skip
        assert clocks[UNDISTURBED] == tuple(expected.values()), slowdown
    slow_stage = Condition(1.0, ((0, 1.4),))
    assert policy(frozenset({UNDISTURBED, slow_stage}))[slow_stage] == kept


def test_unknown_policies_and_infeasible_targets_are_refused(smooth: Frontier):
    with pytest.raises(
        UsageError, match="policy 'zeus' is unknown; choose from max, one-clock, per-stage"
    ):
        simulate(Cluster(smooth, 2, 5), "zeus")
    with pytest.raises(InfeasibleDeadline):
        simulate(Cluster(smooth, 2, 5), "planner", 0.5)
