"""Prove that a frontier is optimal at a point, from its event times and its flow alone, by weak
duality.

Event times that respect all dependencies give durations, whose cost on the lower hulls of the
measurements is at least the optimum. Any flow that is conserved, with each computation at the
measured point that is cheapest at the price of its flow, gives a value that is at most the optimum.
If both are equal, both are the optimum. Durations, hulls and the flow's value are computed here
from the measurements, independently of the solver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perseus_planner import Frontier
from perseus_planner.profiles.measurement import OperatingPoint
from perseus_planner.solver.mincut import walk
from perseus_planner.solver.network import State

POINTS = 9


def worst_certificate(frontier: Frontier, points: int = POINTS) -> float:
    """Return the largest relative distance between the bound and its two certificates, at `points`
    times.

    Raises:
        AssertionError: If event times or flow are infeasible.
    """
    slowest, fastest = int(frontier.times[0]), int(frontier.times[-1])
    ticks = [slowest - (slowest - fastest) * part // (points - 1) for part in range(points)]
    _check_arcs(frontier)
    steps = walk(frontier.scaled.network, ticks)
    return max(_certificate(frontier, step.times[-1], step.state) for step in steps)


def is_convex(frontier: Frontier) -> bool:
    """Return whether times strictly fall and the price of the next second strictly rises along
    the breakpoints.
    """
    return bool(np.all(np.diff(frontier.times) < 0) and np.all(np.diff(frontier.powers) > 0))


def _check_arcs(frontier: Frontier) -> None:
    """Check that every arc is a computation, a wait of the schedule, or from the source or to
    the sink.
    """
    network, dag = frontier.scaled.network, frontier.dag
    rank = {place: k for k, place in enumerate(dag.order)}
    allowed = {(2 * k, 2 * k + 1) for k in rank.values()}
    allowed |= {
        (2 * rank[other] + 1, 2 * rank[place])
        for place in rank
        for other in dag.predecessors[place]
    }
    for tail, head in zip(network.tail.tolist(), network.head.tolist(), strict=True):
        assert (tail, head) in allowed or tail == network.source or head == network.sink, (
            "an arc that is not a dependency"
        )


def _certificate(frontier: Frontier, time: int, state: State) -> float:
    dag, tick_s = frontier.dag, frontier.scaled.tick_s
    event, time_s = state.event, time * tick_s
    rank = {place: k for k, place in enumerate(dag.order)}
    waits = [(rank[other], rank[place]) for place in rank for other in dag.predecessors[place]]
    before, after = np.array(waits).T
    assert np.all(event[2 * after] >= event[2 * before + 1]), (
        "a computation starts before one that it waits for"
    )
    assert event[: 2 * len(rank)].min() >= 0, "a computation starts before the iteration"
    assert event[: 2 * len(rank)].max() <= time, "a computation ends after the iteration"
    price_w = _prices(frontier, state)
    primal, dual = [], []
    for key, options in dag.points.items():
        members = np.array(
            [rank[place] for place, of_place in enumerate(dag.iteration.keys) if of_place == key]
        )
        given_s = (event[2 * members + 1] - event[2 * members]) * tick_s
        hull_s, hull_j = _hull(options)
        assert np.all(given_s >= hull_s[0] - tick_s), (
            "a computation is faster than its fastest measurement"
        )
        primal.append(np.interp(given_s, hull_s, hull_j).sum())
        cost_j = np.array([o.effective_j for o in options]) + np.outer(
            price_w[members], [o.time_s for o in options]
        )
        dual.append(cost_j.min(axis=1).sum())
    total_w = price_w[-1]
    blocked_j = dag.waiting_w * time_s
    bound_j = frontier.bound_j(min(max(time_s, frontier.min_time_s), frontier.max_time_s))
    above_j, below_j = math.fsum(primal) + blocked_j, math.fsum(dual) - total_w * time_s + blocked_j
    return float(max(abs(above_j - bound_j), abs(below_j - bound_j)) / bound_j)


def _prices(frontier: Frontier, state: State) -> np.ndarray:
    """(computations + 1,) watts: the flow through each computation, and in all."""
    network, flow = frontier.scaled.network, state.flow
    assert np.all(flow >= 0), "a flow below 0"
    nodes = len(state.event)
    inflow, outflow = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    np.add.at(inflow, network.head, flow)
    np.add.at(outflow, network.tail, flow)
    inner = np.setdiff1d(np.arange(nodes), [network.source, network.sink])
    assert np.array_equal(inflow[inner], outflow[inner]), "a flow that is not conserved"
    through = np.append(flow[: len(frontier.dag.computations)], inflow[network.sink])
    return through * frontier.scaled.power_unit_w


def _hull(options: Sequence[OperatingPoint]) -> tuple[list[float], list[float]]:
    """Seconds and effective joules of the lower hull's vertices: those that no line between two
    others is below.
    """
    hull: list[OperatingPoint] = []
    for option in options:
        while len(hull) > 1 and _slope_w(hull[-2], hull[-1]) >= _slope_w(hull[-2], option):
            hull.pop()
        hull.append(option)
    return [option.time_s for option in hull], [option.effective_j for option in hull]


def _slope_w(a: OperatingPoint, b: OperatingPoint) -> float:
    return (b.effective_j - a.effective_j) / (b.time_s - a.time_s)
