"""Other ways to the same answers: a linear programme, networkx flows, and trying every choice of clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import numpy as np
from scipy.optimize import linprog

from perseus_planner.dag import PipelineDag

Flow = tuple[Any, Any, int, int | None]  #: tail, head, lower and upper bound of the flow (None: no bound)

INFINITE = math.inf


def end_times_s(dag: PipelineDag, durations_s: Sequence[float]) -> list[float]:
    """When each computation ends, by relaxing every wait until nothing moves (Bellman-Ford)."""
    end_s = list(durations_s)
    moved = True
    while moved:
        moved = False
        for place, before in enumerate(dag.predecessors):
            earliest_s = max((end_s[other] for other in before), default=0.0) + durations_s[place]
            if end_s[place] < earliest_s:
                end_s[place], moved = earliest_s, True
    return end_s


def effective_j(dag: PipelineDag) -> list[list[float]]:
    """Energy less blocking energy of every measured point of every computation, joules."""
    power_w = dag.profile.blocking_power_w
    return [[m.energy_j - power_w * m.time_s for m in dag.profile.measurements[c[:2]]] for c in dag.computations]


def relaxed_j(dag: PipelineDag, deadline_s: float) -> float:
    """The least energy of an iteration of `deadline_s` by linear programming over all measured points, joules.

    Variables: by how much each computation starts later than it could at the fastest durations, and a weight for each
    of its measured points. Such delays, and times and energies above the least in units of their largest, keep the
    programme well scaled, and feasible down to the least time.
    """
    points = [dag.profile.measurements[c[:2]] for c in dag.computations]
    cost_j = effective_j(dag)
    fastest_s = [min(m.time_s for m in each) for each in points]
    end_s = end_times_s(dag, fastest_s)
    extra_s = [np.array([m.time_s for m in each]) - least for each, least in zip(points, fastest_s, strict=True)]
    extra_j = [np.array(each) - min(each) for each in cost_j]
    unit_s = max(float(each.max()) for each in extra_s) or 1.0
    unit_j = max(float(each.max()) for each in extra_j) or 1.0

    count = len(points)
    weights = np.split(np.arange(count, count + sum(map(len, points))), np.cumsum([len(each) for each in points])[:-1])
    costs = np.zeros(count + sum(map(len, points)))
    one_choice, no_later, room = np.zeros((count, len(costs))), [], []
    for place, before in enumerate(dag.predecessors):
        costs[weights[place]] = extra_j[place] / unit_j
        one_choice[place, weights[place]] = 1
        start_s = end_s[place] - fastest_s[place]
        for other, until_s in [*((other, start_s) for other in before), (None, deadline_s)]:
            row = np.zeros(len(costs))
            late = place if other is None else other
            row[late], row[weights[late]] = 1, extra_s[late] / unit_s
            if other is not None:
                row[place] = -1
            no_later.append(row)
            room.append(max(0.0, until_s - end_s[late]) / unit_s)
    tolerances = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solution = linprog(
        costs, np.array(no_later), room, one_choice, np.ones(count), (0, None), method="highs", options=tolerances
    )
    assert solution.status == 0, solution.message
    least_j = math.fsum(min(each) for each in cost_j)
    return least_j + solution.fun * unit_j + dag.profile.blocking_power_w * dag.profile.stages * deadline_s


def all_choices(dag: PipelineDag) -> tuple[np.ndarray, np.ndarray]:
    """Iteration time (s) and effective energy (J) of every choice of measured clocks there is."""
    return every_choice(dag)[1:]


def every_choice(dag: PipelineDag) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every choice of measured clocks, one a column, with its iteration time (s) and effective energy (J)."""
    points = [dag.profile.measurements[key] for key in dag.iteration.keys]
    choice = np.stack([grid.ravel() for grid in np.meshgrid(*(np.arange(len(each)) for each in points))])
    times_s = [np.array([m.time_s for m in each])[row] for each, row in zip(points, choice, strict=True)]
    costs_j = [np.array(each)[row] for each, row in zip(effective_j(dag), choice, strict=True)]
    end_s: dict[int, np.ndarray] = {}
    while len(end_s) < len(points):
        for place, before in enumerate(dag.predecessors):
            if all(other in end_s for other in before):
                end_s[place] = times_s[place] + (np.max([end_s[other] for other in before], axis=0) if before else 0.0)
    return choice, np.max(list(end_s.values()), axis=0), np.sum(costs_j, axis=0)


def flow_range(arcs: Sequence[Flow], source: Any, sink: Any, flow_func: Callable[..., Any]) -> tuple[float, float]:
    """The least and the largest flow from source to sink within lower and upper bounds, by networkx.

    Lower bounds become demands of a circulation (Ford and Fulkerson 1962); from the flow that meets them, what more can
    be sent, and what can be sent back, are maximum flows of the residual network. The largest may be infinite.
    """
    graph = nx.DiGraph()
    graph.add_edge(sink, source)  # without a capacity: unlimited
    graph.add_nodes_from(["supply", "demand"])
    for tail, head, lower, upper in arcs:
        graph.add_edge(tail, head, **({} if upper is None else {"capacity": upper - lower}))
        for edge in (("supply", head), (tail, "demand")):
            if not graph.has_edge(*edge):
                graph.add_edge(*edge, capacity=0)
            graph.edges[edge]["capacity"] += lower
    value, flow = nx.maximum_flow(graph, "supply", "demand", flow_func=flow_func)
    assert value == sum(lower for _, _, lower, _ in arcs), "no flow is within the bounds"

    residual = nx.DiGraph()
    residual.add_nodes_from([source, sink])
    for tail, head, lower, upper in arcs:
        sent = flow[tail][head]
        residual.add_edge(tail, head, **({} if upper is None else {"capacity": upper - lower - sent}))
        residual.add_edge(head, tail, capacity=sent)
    back = nx.maximum_flow_value(residual, sink, source, flow_func=flow_func)
    try:
        more = nx.maximum_flow_value(residual, source, sink, flow_func=flow_func)
    except nx.NetworkXUnbounded:
        more = INFINITE
    return flow[sink][source] - back, flow[sink][source] + more
