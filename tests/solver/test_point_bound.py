"""The bound for operating points: never below the relaxed one, never above the best of all
choices.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from oracles import all_choices, nodes, waiting_w
from strategies import drawn, few_and_many, furnished, graph, problems, shares, soaks

from perseus_planner import Profile, schedules, solve
from perseus_planner.base.errors import InfeasibleDeadline
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import Transfer
from perseus_planner.solver.frontier import Frontier, solve_dag
from perseus_planner.solver.point_problem import find_windows, point_problem

_MOST_CHOICES = 300_000


def unlike(rng: Random, stages: int, clocks: int) -> Profile:
    """Stages whose operating points are far apart, and at other times each."""
    points = {}
    for stage in range(stages):
        for kind, time_s in (("F", 1.0), ("B", 2.0)):
            longer, less = rng.uniform(1.05, 1.5), rng.uniform(0.5, 0.95)
            time_s *= rng.uniform(0.8, 1.2)
            points[stage, kind] = tuple(
                Measurement(1400 - 100 * i, time_s * longer**i, 300 * time_s * less**i)
                for i in range(clocks)
            )
    return Profile(points, 50.0)


def check_against_all_choices(dag: PipelineDag, rng: Random) -> float:
    """Compare at some times; return the largest part of the way to the best choice that the
    bound goes.
    """
    frontier, (times_s, costs_j) = solve_dag(dag), all_choices(dag)
    possible = [
        time_s
        for time_s in times_s[:: max(1, len(times_s) // 1000)]
        if time_s >= frontier.min_time_s
    ]
    closed = [0.0]
    for deadline_s in rng.sample(possible, min(len(possible), 6)):
        best_j = float(costs_j[times_s <= deadline_s].min()) + waiting_w(dag) * deadline_s
        relaxed_j, bound_j = frontier.bound_j(deadline_s), frontier.point_bound_j(deadline_s)
        rounding_j = 1e-9 * (
            abs(best_j) + math.fsum(max(map(abs, node.effective_j)) for node in nodes(dag))
        )
        assert relaxed_j <= bound_j <= best_j + rounding_j
        if best_j - relaxed_j > 1e3 * rounding_j:
            closed.append((bound_j - relaxed_j) / (best_j - relaxed_j))
    return max(closed)


@pytest.mark.parametrize("shape", [(2, 4, 2), *soaks((2, 3, 3), (3, 3, 2))], ids=str)
def test_in_1f1b_with_unlike_stages_it_is_tighter_and_below_the_best_choice(
    shape: tuple[int, int, int],
):
    stages, microbatches, clocks = shape
    rng, closed = Random(f"{stages} {microbatches}"), []
    for number in range(12):
        lag_s = 0.0 if number % 2 else rng.choice((0.01, 0.1))
        transfer = Transfer(lag_s, 2 * lag_s)
        schedule = schedules.one_f_one_b(stages, microbatches)
        dag = PipelineDag.from_schedule(unlike(rng, stages, clocks), schedule, transfer=transfer)
        closed.append(check_against_all_choices(dag, rng))
    assert sum(part > 0.05 for part in closed) >= 4


@few_and_many("count", 6, 60)
def test_with_anything_a_job_may_have_it_is_below_the_best_choice(count: int):
    rng, checked = Random(3), 0
    while checked < count:
        ranks = rng.randint(2, 3)
        makers = (schedules.one_f_one_b, schedules.gpipe, schedules.zb_h1)
        dag = furnished(rng.getrandbits(32), rng.choice(makers)(ranks, rng.randint(2, 4)), 3)
        if math.prod(len(node.time_s) for node in nodes(dag)) <= _MOST_CHOICES:
            check_against_all_choices(dag, rng)
            checked += 1


@few_and_many("count", 10, 100)
def test_of_any_graph_it_is_below_the_best_choice(count: int):
    rng = Random(4)
    for _ in range(count):
        check_against_all_choices(graph(rng.getrandbits(32), rng.randint(2, 7), 4), rng)


@drawn(5, 25, dag=problems(12), share=shares())
def test_it_is_between_the_relaxed_bound_and_a_plan(dag: PipelineDag, share: float):
    frontier = solve_dag(dag)
    deadline_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
    plan = frontier.plan_until(max(deadline_s, frontier.min_time_s), on_time=None)
    at_s = max(plan.time_s, frontier.min_time_s)
    assert frontier.bound_j(at_s) <= frontier.point_bound_j(at_s)
    scale_j = math.fsum(max(map(abs, node.effective_j)) for node in nodes(dag))
    assert frontier.point_bound_j(at_s) <= plan.energy_j + 1e-9 * (abs(plan.energy_j) + scale_j)


def in_step() -> Frontier:
    """Between meetings the first stage computes for 3, 4 or 5 s, the second for 3.5 s, or a
    little less for much.
    """
    first = (Measurement(1400, 1.0, 300.0), Measurement(1000, 2.0, 200.0))
    profile = Profile(
        {
            (0, "F"): first,
            (0, "B"): tuple(Measurement(m.clock_mhz, m.time_s + 1.0, m.energy_j) for m in first),
            (1, "F"): (Measurement(1400, 1.5, 300.0),),
            (1, "B"): (Measurement(1400, 1.9, 900.0), Measurement(1000, 2.0, 300.0)),
        },
        blocking_power_w=0.0,
    )
    return solve(profile, "1f1b", microbatches=50)


def test_what_no_pair_of_points_can_use_counts_in_every_microbatch():
    frontier = in_step()
    deadline_s = 1.0 + 50 * 3.5 + 2.0
    gain_j = frontier.point_bound_j(deadline_s) - frontier.bound_j(deadline_s)
    # The first rank could save 50 J in the half second that it waits, if a clock between both were
    # measured.
    assert gain_j == pytest.approx(49 * 50.0, abs=100.0)
    plan = frontier.plan_until(deadline_s, on_time=None)
    assert plan.energy_j == pytest.approx(frontier.point_bound_j(deadline_s), abs=200.0)


def test_neighbours_meet_once_for_each_microbatch_between_warm_up_and_end():
    dag = PipelineDag.from_schedule(unlike(Random(0), 4, 2), schedules.one_f_one_b(4, 8))
    windows = find_windows(
        point_problem(dag), [dag.iteration.rank_of[place] for place in dag.order]
    )
    assert Counter(window.ranks for window in windows) == {(0, 1): 4, (1, 2): 5, (2, 3): 6}
    for window in windows:
        assert {dag.computations[dag.order[k]].stage for k in window.first} in [
            {rank} for rank in window.ranks
        ]


def test_a_time_that_is_too_short_is_refused():
    frontier = in_step()
    with pytest.raises(InfeasibleDeadline):
        frontier.point_bound_j(0.99 * frontier.min_time_s)
