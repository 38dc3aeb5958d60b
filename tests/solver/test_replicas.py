"""Pipelines that end every iteration together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed, pipelines, smooth_profile

from perseus_planner import schedules
from perseus_planner.base.errors import InfeasibleDeadline, UsageError
from perseus_planner.profiles.groups import slowed
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Schedule
from perseus_planner.solver.frontier import Frontier, solve
from perseus_planner.solver.replicas import Replicas

Problem = tuple[Profile, Schedule]


@pytest.fixture(scope="module")
def mixed() -> Replicas:
    """Three pipelines as profiled, and one whose stage 1 throttles."""
    profile, schedule = smooth_profile(3), schedules.one_f_one_b(3, 6)
    return Replicas((solve(profile, schedule), solve(slowed(profile, {1: 1.15}), schedule)), (3, 1))


@fixed
@given(
    problems=st.lists(pipelines(3, 4), min_size=1, max_size=3),
    share=st.floats(0, 1),
    seed=st.integers(1, 5),
)
def test_all_are_planned_to_one_deadline(problems: list[Problem], share: float, seed: int):
    frontiers = tuple(solve(*problem) for problem in problems)
    replicas = Replicas(frontiers, tuple((seed + i) % 4 + 1 for i in range(len(frontiers))))
    deadline_s = max(
        replicas.min_time_s, replicas.min_time_s * (1 - share) + replicas.max_time_s * share
    )
    plans = replicas.plans_for(deadline_s, on_time=None)
    time_s, energy_j = replicas.time_and_energy(plans)
    assert time_s == max(plan.time_s for plan in plans) <= deadline_s
    by_hand_j = 0.0
    for frontier, plan, count in zip(frontiers, plans, replicas.counts, strict=True):
        assert plan == frontier.plan_until(deadline_s, on_time=None)
        ranks = len(frontier.schedule.ranks)
        waiting_j = frontier.profile.blocking_power_w * ranks * (time_s - plan.time_s)
        by_hand_j += count * (plan.energy_j + waiting_j)
    scale_j = abs(by_hand_j) + replicas.baseline_energy_j + 1e-9
    assert math.isclose(energy_j, by_hand_j, rel_tol=0, abs_tol=1e-10 * scale_j)
    assert energy_j >= replicas.bound_j(time_s) - 1e-10 * scale_j


def test_the_slowest_pipeline_sets_the_time_and_the_others_save(mixed: Replicas):
    sound, throttled = mixed.frontiers
    assert mixed.min_time_s == throttled.min_time_s > sound.min_time_s
    assert mixed.baseline_time_s == throttled.baseline_time_s
    plans = mixed.plans_for(mixed.baseline_time_s, on_time=None)
    assert plans[0].energy_j < sound.plan_until(sound.baseline_time_s, on_time=None).energy_j
    time_s, energy_j = mixed.time_and_energy(plans)
    assert time_s <= mixed.baseline_time_s
    assert energy_j < mixed.baseline_energy_j


def test_the_least_energy_of_all_is_at_no_other_time(mixed: Replicas):
    best_s = mixed.least_energy_time_s
    span_s = mixed.max_time_s - mixed.min_time_s
    times_s = [mixed.min_time_s + span_s * part / 200 for part in range(221)]
    assert min(map(mixed.bound_j, times_s)) >= mixed.bound_j(best_s) * (1 - 1e-12)


def test_a_deadline_that_one_pipeline_cannot_meet_names_the_time_of_all(mixed: Replicas):
    with pytest.raises(InfeasibleDeadline) as caught:
        mixed.plans_for(mixed.frontiers[0].min_time_s, on_time=None)
    assert caught.value.least_time_s == mixed.min_time_s


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (0, 1), (1, 1.5), (True, 1)])
def test_counts_that_fit_no_pipelines_are_refused(mixed: Replicas, counts: tuple[int, ...]):
    with pytest.raises(UsageError, match="replicas: "):
        Replicas(mixed.frontiers, counts)


def test_no_pipelines_are_refused():
    with pytest.raises(UsageError, match="replicas: 0 counts for 0 kinds"):
        Replicas(())


def test_each_counts_once_where_no_count_is_given(mixed: Replicas):
    frontier: Frontier = mixed.frontiers[0]
    assert Replicas((frontier,)).baseline_energy_j == frontier.baseline_energy_j
