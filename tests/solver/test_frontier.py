"""The frontier against a linear programme, and what must hold of any frontier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import all_choices, effective_j, nodes, rank_waiting_w, relaxed_j, waiting_w
from strategies import (
    deadline_s,
    drawn,
    few_and_many,
    fixed,
    furnished,
    graphs,
    jobs,
    pipelines,
    problems,
    shares,
)
from validators import check_frontier

from perseus_planner import schedules
from perseus_planner.base.errors import InfeasibleDeadline, ProfileError, UsageError
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.schedules.pipeline import FixedOperation, Transfer
from perseus_planner.solver.frontier import Frontier, solve, solve_dag


def scale_j(frontier: Frontier) -> float:
    """What errors of energies are measured by: those that an energy is the sum and difference
    of.
    """
    power_w = rank_waiting_w(frontier.dag)
    each = [
        (abs(node.effective_j[0]), 2 * power_w[node.rank] * node.time_s[0])
        for node in nodes(frontier.dag)
    ]
    return math.fsum(part for parts in each for part in parts) + max(power_w) * frontier.max_time_s


def check_bound(frontier: Frontier, share: float) -> None:
    at_s = deadline_s(frontier, share)
    assert abs(frontier.bound_j(at_s) - relaxed_j(frontier.dag, at_s)) <= 1e-9 * scale_j(frontier)


@drawn(30, 300, dag=graphs(12), share=shares())
def test_the_bound_of_any_small_graph_is_that_of_a_linear_programme(dag: PipelineDag, share: float):
    check_bound(solve_dag(dag), share)


@drawn(30, 300, dag=graphs(45, least=15, max_options=12), share=shares())
def test_the_bound_of_any_larger_graph_is_that_of_a_linear_programme(
    dag: PipelineDag, share: float
):
    check_bound(solve_dag(dag), share)


@drawn(6, 60, problem=pipelines(4, 8, 10), share=shares())
def test_the_bound_of_a_pipeline_is_that_of_a_linear_programme(
    problem: tuple[Profile, Schedule], share: float
):
    check_bound(solve(*problem), share)


@drawn(20, 200, dag=jobs(max_options=8), share=shares())
def test_the_bound_of_a_job_of_any_schedule_is_that_of_a_linear_programme(
    dag: PipelineDag, share: float
):
    check_bound(solve_dag(dag), share)


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gpipe(5, 7),
        schedules.one_f_one_b(6, 9),
        schedules.interleaved_1f1b(4, 3, 8),
        schedules.interleaved_1f1b(3, 2, 7, 4),
        schedules.zb_h1(5, 8),
        schedules.interleaved_zero_bubble(3, 2, 8),
        schedules.zbv(4, 6),
        schedules.dualpipe_v(3, 9),
    ],
    ids=str,
)
@few_and_many("seeds", 1, 3)
def test_the_bound_of_larger_jobs_is_that_of_a_linear_programme(schedule: Schedule, seeds: int):
    for seed in range(seeds):
        frontier = solve_dag(furnished(seed, schedule, 5))
        for share in (0.0, 0.01, 0.3, 0.7, 1.0):
            check_bound(frontier, share)


@drawn(10, 100, dag=graphs(6, max_options=4))
def test_no_choice_of_clocks_is_below_the_bound_or_faster_than_the_least_time(dag: PipelineDag):
    frontier = solve_dag(dag)
    times_s, costs_j = all_choices(dag)
    assert frontier.min_time_s == times_s.min()
    blocked_w = waiting_w(dag)
    for time_s, cost_j in list(zip(times_s.tolist(), costs_j.tolist(), strict=True))[:200]:
        energy_j = cost_j + blocked_w * time_s
        assert energy_j >= frontier.bound_j(time_s) - 1e-12 * scale_j(frontier)


@drawn(20, 200, dag=problems(30, 8))
def test_a_frontier_is_a_convex_curve_between_its_ends(dag: PipelineDag):
    frontier = solve_dag(dag)
    check_frontier(frontier)
    energies_j = [frontier.bound_j(time_s) for time_s in frontier.times_s.tolist()]
    assert energies_j == frontier.energies_j.tolist()
    slowest_j = math.fsum(min(each) for each in effective_j(dag))
    full_j = slowest_j + waiting_w(dag) * frontier.max_time_s
    assert math.isclose(energies_j[0], full_j, rel_tol=0, abs_tol=1e-12 * scale_j(frontier))


def test_every_point_is_a_change_of_slope():
    frontier = solve(two_clocks(4, 83.64), schedules.one_f_one_b(4, 6))
    assert np.all(np.diff(frontier.powers) > 0)


@fixed
@given(dag=problems(20), near=st.floats(0, 1.5), far=st.floats(0, 1.5))
def test_a_later_deadline_never_costs_effective_energy(dag: PipelineDag, near: float, far: float):
    frontier = solve_dag(dag)
    blocked_w = waiting_w(dag)

    def effective(share: float) -> float:
        at_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
        return frontier.bound_j(at_s) - blocked_w * at_s

    less, more = effective(max(near, far)), effective(min(near, far))
    assert less <= more + 1e-12 * scale_j(frontier)


def scaled(dag: PipelineDag, times: float = 1.0, joules: float = 1.0) -> PipelineDag:
    profile, iteration = dag.profile, dag.iteration
    points = {
        key: tuple(
            Measurement(m.clock_mhz, times * m.time_s, joules * m.energy_j) for m in measured
        )
        for key, measured in profile.measurements.items()
    }
    power_w = profile.blocking_power_w
    power_w = (
        tuple(w * joules / times for w in power_w)
        if isinstance(power_w, tuple)
        else power_w * joules / times
    )
    operations = tuple(
        each._replace(
            time_s=times * each.time_s,
            energy_j=None if each.energy_j is None else joules * each.energy_j,
        )
        for each in iteration.operations
    )
    lags_s = tuple(tuple(times * lag_s for lag_s in each) for each in iteration.lags_s)
    return PipelineDag(
        replace(
            profile,
            measurements=points,
            blocking_power_w=power_w,
            overhead_s=times * profile.overhead_s,
        ),
        replace(iteration, operations=operations, lags_s=lags_s),
    )


@settings(fixed, max_examples=60)
@given(dag=problems(20), power=st.integers(-20, 20))
def test_all_joules_scaled_by_a_power_of_two_scale_the_frontier_exactly(
    dag: PipelineDag, power: int
):
    frontier, other = solve_dag(dag), solve_dag(scaled(dag, joules=2.0**power))
    assert np.array_equal(other.times_s, frontier.times_s)
    assert np.array_equal(other.energies_j, 2.0**power * frontier.energies_j)


@settings(fixed, max_examples=60)
@given(
    dag=problems(20),
    times=st.floats(1e-3, 1e3),
    joules=st.floats(1e-3, 1e3),
    share=st.floats(0.01, 1),
)
def test_all_times_or_joules_scaled_scale_the_frontier(
    dag: PipelineDag, times: float, joules: float, share: float
):
    frontier, other = solve_dag(dag), solve_dag(scaled(dag, times, joules))
    at_s = deadline_s(frontier, share)
    assert math.isclose(other.min_time_s, times * frontier.min_time_s, rel_tol=1e-12)
    assert math.isclose(other.max_time_s, times * frontier.max_time_s, rel_tol=1e-12)
    wanted_j = joules * frontier.bound_j(at_s)
    assert abs(other.bound_j(deadline_s(other, share)) - wanted_j) <= 1e-11 * joules * scale_j(
        frontier
    )


@settings(fixed, max_examples=60)
@given(dag=jobs())
def test_the_named_times_are_in_order_and_the_least_energy_is_the_least(dag: PipelineDag):
    frontier = solve_dag(dag)
    assert frontier.min_time_s <= frontier.least_energy_time_s <= frontier.max_time_s
    assert frontier.min_time_s <= frontier.baseline_time_s
    margin_j = 1e-12 * scale_j(frontier)
    assert frontier.bound_j(frontier.baseline_time_s) <= frontier.baseline_energy_j + margin_j
    least_j = frontier.bound_j(frontier.least_energy_time_s)
    for share in np.linspace(0, 2, 21).tolist():
        at_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
        assert frontier.bound_j(at_s) >= least_j - margin_j


def two_clocks(stages: int, power_w: float) -> Profile:
    """Forwards of 1 s and 100 J or 1.5 s and 80 J, backwards of 2 s and 300 J or 3 s and 220 J."""
    forward = (Measurement(1410, 1.0, 100.0), Measurement(855, 1.5, 80.0))
    backward = (Measurement(1410, 2.0, 300.0), Measurement(855, 3.0, 220.0))
    points = {
        (stage, kind): options
        for stage in range(stages)
        for kind, options in (("F", forward), ("B", backward))
    }
    return Profile(points, power_w)


def test_one_stage_and_one_microbatch_slow_the_better_bargain_first():
    frontier = solve(two_clocks(1, 10.0), schedules.one_f_one_b(1, 1))
    assert (frontier.min_time_s, frontier.max_time_s) == (3.0, 4.5)
    # a second of the backward saves 80 J, one of the forward 40 J
    for at_s, energy_j in (
        (3.0, 400.0),
        (3.5, 360.0),
        (4.0, 320.0),
        (4.25, 310.0),
        (4.5, 300.0),
        (5.0, 305.0),
    ):
        assert math.isclose(frontier.bound_j(at_s), energy_j, rel_tol=1e-14)
    assert frontier.least_energy_time_s == 4.5


def test_a_graph_need_not_run_everything_that_was_profiled():
    points = {
        (0, "F"): (Measurement(1410, 1e-4, 0.01), Measurement(855, 3e-4, 0.0)),
        (0, "B"): (Measurement(1410, 1.0, 5000.0), Measurement(855, 2.0, 1.0)),
    }
    frontier = solve_dag(
        PipelineDag(
            Profile(points, 0.0), Iteration(Schedule("any", ((Computation(0, "F", 0),),)), ((),))
        )
    )
    assert (frontier.min_time_s, frontier.max_time_s) == (1e-4, 3e-4)
    assert math.isclose(frontier.bound_j(2e-4), 0.005, rel_tol=1e-12)


@pytest.mark.parametrize("hair", [1e-7, 1e-9, 1e-11, 1e-12, 1e-13, 1e-14])
def test_a_clock_that_is_faster_by_a_hair_does_not_blur_the_bound(hair: float):
    def profile(faster: bool) -> Profile:
        points = {}
        for number, key in enumerate((stage, kind) for stage in range(4) for kind in "FB"):
            odd = 1 + 0.0137 * number
            slow = [
                (1395, 0.05 * odd, 20.03),
                (1200, 0.0611, 16.07 / odd),
                (855, 0.083 * odd, 12.91),
            ]
            fast = [(1410, 0.05 * odd * (1 - hair), 20.41)] * faster
            points[key] = tuple(Measurement(*point) for point in (*fast, *slow))
        return Profile(points, 80.0)

    schedule = schedules.one_f_one_b(4, 16)
    more, fewer = solve(profile(True), schedule), solve(profile(False), schedule)
    for ratio in (1.01, 1.1, 1.3):
        at_s = fewer.min_time_s * ratio
        assert math.isclose(more.bound_j(at_s), fewer.bound_j(at_s), rel_tol=max(hair, 1e-9))


@pytest.mark.parametrize("unit_s", [1e-12, 1e6])
@pytest.mark.parametrize("unit_j", [1e-12, 1e9])
def test_any_unit_will_do(unit_s: float, unit_j: float):
    plain = PipelineDag.from_schedule(two_clocks(2, 80.0), schedules.one_f_one_b(2, 3))
    frontier = solve_dag(scaled(plain, unit_s, unit_j))
    usual = solve(two_clocks(2, 80.0), schedules.one_f_one_b(2, 3))
    at_s = 1.2 * usual.min_time_s
    assert math.isclose(
        frontier.bound_j(at_s * unit_s), usual.bound_j(at_s) * unit_j, rel_tol=1e-12
    )


@pytest.mark.parametrize(("time_s", "energy_j"), [(1e308, 1.0), (1e-310, 1.0), (1.0, 1e308)])
def test_numbers_that_floats_cannot_sum_are_refused(time_s: float, energy_j: float):
    options = (Measurement(1410, time_s, energy_j), Measurement(855, 1.5 * time_s, 0.5 * energy_j))
    profile = Profile({(0, kind): options for kind in "FB"}, 0.0)
    with pytest.raises(ProfileError, match="too large or too small to plan with"):
        solve(profile, schedules.one_f_one_b(1, 2))


def test_operations_and_lags_that_floats_cannot_sum_are_refused():
    for beside in (
        {"transfer": Transfer(1e308)},
        {"operations": [FixedOperation("load", "start", 1e308)]},
        {"operations": [FixedOperation("load", "start", 1.0, 1.7e308)]},
    ):
        with pytest.raises(ProfileError, match="too large or too small to plan with"):
            solve(two_clocks(3, 80.0), schedules.one_f_one_b(3, 2), **beside)


def test_an_infeasible_deadline_names_a_time_that_is_feasible():
    points = {
        key: (Measurement(1410, t, 1.0),)
        for key, t in {(0, "F"): 0.0512345678, (0, "B"): 0.1 / 3}.items()
    }
    frontier = solve(Profile(points, 80.0), schedules.one_f_one_b(1, 7))
    for ask in (frontier.bound_j, frontier.plan_for):
        with pytest.raises(InfeasibleDeadline) as caught:
            ask(0.1)
        assert (caught.value.deadline_s, caught.value.least_time_s) == (0.1, frontier.min_time_s)
        named = str(caught.value).split("the fastest takes ")[1].split(" s;")[0]
        assert frontier.plan_until(float(named)).time_s == frontier.min_time_s
        assert float(named) < frontier.min_time_s * (1 + 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0, -1.0, "3", None, True])
@pytest.mark.parametrize(
    "ask", [Frontier.bound_j, Frontier.plan_for, Frontier.plan_beside_straggler]
)
def test_an_invalid_time_is_refused(ask: Callable[[Frontier, object], object], bad: object):
    frontier = solve(two_clocks(1, 80.0), schedules.one_f_one_b(1, 1))
    with pytest.raises(UsageError, match="is not a time"):
        ask(frontier, bad)


def test_progress_is_reported_until_it_is_complete():
    told: list[tuple[int, int]] = []
    solve(
        two_clocks(3, 80.0), schedules.one_f_one_b(3, 5), progress=lambda *parts: told.append(parts)
    )
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1][0] == told[-1][1]
