"""Minimum cuts along the frontier: certificates at sampled times, and the flows of networkx."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import networkx as nx
import numpy as np
import pytest
from oracles import INFINITE, flow_range
from strategies import drawn, graphs, jobs, pipelines, problems, smooth_profile
from validators import Point, arc_cost, check_cut, check_state, critical_arcs, gaps, points_at

from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver import mincut
from perseus_planner.solver.frontier import Frontier, solve, solve_dag
from perseus_planner.solver.network import UNLIMITED

#: Of two kinds: least and largest flows are what they are, whichever function of networkx finds
#: them.
FLOW_FUNCTIONS = (nx.algorithms.flow.preflow_push, nx.algorithms.flow.boykov_kolmogorov)


def sampled(frontier: Frontier, count: int) -> Iterator[Point]:
    """States at both ends, and at some points of the frontier and times between two of them."""
    rng, points = Random(0), frontier.times.tolist()
    between = [rng.randint(fast, slow) for slow, fast in pairwise(points)]
    inner = points[1:-1] + between
    times = {points[0], points[-1], *rng.sample(inner, min(count, len(inner)))}
    return points_at(frontier, sorted(times, reverse=True))


def power_below(frontier: Frontier, time: int) -> int:
    """The slope of the frontier just below `time`."""
    return int(frontier.powers[np.flatnonzero(frontier.times >= time)[-1]])


def power_above(frontier: Frontier, time: int) -> int:
    """The slope of the frontier just above `time`."""
    above = np.flatnonzero(frontier.times > time)
    return int(frontier.powers[above[-1]]) if len(above) else 0


def test_a_walk_of_more_steps_than_one_call_records_is_the_same(monkeypatch: pytest.MonkeyPatch):
    profile = smooth_profile(3)
    whole = solve(profile, "1f1b", microbatches=6)
    monkeypatch.setattr(mincut, "_MOST_STEPS", 2)
    parted = solve(profile, "1f1b", microbatches=6)
    assert len(whole.times) > 100
    assert whole.times.tolist() == parted.times.tolist()
    assert whole.powers.tolist() == parted.powers.tolist()
    assert [each.tolist() for each in whole.guides] == [each.tolist() for each in parted.guides]


def check_states(frontier: Frontier, count: int) -> None:
    """Where the walk stops, the flow is the largest one."""
    for at in sampled(frontier, count):
        check_state(frontier.scaled.network, at)
        check_cut(frontier.scaled.network, at)
        assert at.power == power_below(frontier, at.time)


@drawn(20, 200, dag=graphs(30, max_options=8))
def test_states_of_any_graph_prove_themselves_optimal(dag: PipelineDag):
    check_states(solve_dag(dag), 6)


@drawn(6, 60, problem=pipelines(5, 12, 12))
def test_states_of_a_pipeline_prove_themselves_optimal(problem: tuple[Profile, Schedule]):
    check_states(solve(*problem), 6)


@drawn(10, 100, dag=jobs(4, 6, 8))
def test_states_of_a_job_of_any_schedule_prove_themselves_optimal(dag: PipelineDag):
    check_states(solve_dag(dag), 6)


@drawn(10, 100, dag=problems(12))
def test_guides_reach_from_the_slow_end_to_the_fast_one(dag: PipelineDag):
    frontier, tick_s = solve_dag(dag), solve_dag(dag).scaled.tick_s
    guides = frontier.guides
    assert guides.time_s[0] == frontier.times[0] * tick_s
    assert guides.time_s[-1] == frontier.times[-1] * tick_s
    assert (np.diff(guides.time_s) <= 0).all()
    for time_s, end_s in zip(guides.time_s, guides.end_s, strict=True):
        assert end_s.max() == pytest.approx(time_s)


@drawn(10, 100, dag=problems(12))
def test_event_times_cost_exactly_the_sum_of_the_slopes(dag: PipelineDag):
    frontier = solve_dag(dag)
    network, times, powers = (
        frontier.scaled.network,
        frontier.times.tolist(),
        frontier.powers.tolist(),
    )
    states = (at.state for at in points_at(frontier, times))
    costs = [
        sum(arc_cost(network, *arc) for arc in enumerate(gaps(network, state))) for state in states
    ]
    assert costs[0] == 0
    wanted = [
        power * (slow - fast)
        for power, (slow, fast) in zip(powers[:-1], pairwise(times), strict=True)
    ]
    assert [after - before for before, after in pairwise(costs)] == wanted


@pytest.mark.parametrize("flow_func", FLOW_FUNCTIONS, ids=lambda function: function.__name__)
@drawn(6, 60, dag=graphs(20, least=3))
def test_networkx_finds_the_same_cuts_in_any_graph(flow_func, dag: PipelineDag):
    check_against_networkx(solve_dag(dag), 3, flow_func)


@pytest.mark.parametrize("flow_func", FLOW_FUNCTIONS, ids=lambda function: function.__name__)
@drawn(3, 30, dag=jobs())
def test_networkx_finds_the_same_cuts_in_a_job(flow_func, dag: PipelineDag):
    check_against_networkx(solve_dag(dag), 3, flow_func)


def check_against_networkx(frontier: Frontier, count: int, flow_func) -> None:
    """The critical network's least and largest flow are the frontier's slopes above and below,
    to the last unit.
    """
    network = frontier.scaled.network
    for at in sampled(frontier, count):
        least, largest = flow_range(
            critical_arcs(network, at.state), network.source, network.sink, flow_func
        )
        assert least == power_above(frontier, at.time)
        below = power_below(frontier, at.time)
        assert largest == (INFINITE if below == UNLIMITED else below)
