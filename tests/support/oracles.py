"""Other ways to the same answers: a linear programme, networkx flows, and trying every choice of
clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from scipy.optimize import linprog

from perseus_planner.schedules.dag import PipelineDag

Flow = tuple[
    Any, Any, int, int | None
]  #: tail, head, lower and upper bound of the flow (None: no bound)

INFINITE = math.inf


class Node(NamedTuple):
    """A computation or a fixed operation, with what it may be run at and what it waits for.

    Attributes:
        rank: whose GPUs it keeps.
        time_s: of each measured point, in the order of the profile; one of an operation.
        effective_j: energy less what the rank would draw meanwhile if it waited, likewise.
        waits: the places of those before it, each with a lag in seconds.
    """

    rank: int
    time_s: list[float]
    effective_j: list[float]
    waits: list[tuple[int, float]]


def rank_waiting_w(dag: PipelineDag) -> list[float]:
    """What each rank draws while it waits, watts."""
    power_w = dag.profile.blocking_power_w
    first_stages = [rank[0].stage for rank in dag.iteration.schedule.ranks]
    return [power_w[stage] if isinstance(power_w, tuple) else power_w for stage in first_stages]


def waiting_w(dag: PipelineDag) -> float:
    """What all ranks together draw while they wait, watts."""
    return math.fsum(rank_waiting_w(dag))


def nodes(dag: PipelineDag) -> list[Node]:
    """Everything an iteration runs, by its place."""
    iteration, power_w = dag.iteration, rank_waiting_w(dag)
    own = [
        (rank, computation)
        for rank, program in enumerate(iteration.schedule.ranks)
        for computation in program
    ]
    found: list[tuple[int, list[float], list[float]]] = []
    for place, (rank, computation) in enumerate(own):
        kind = iteration.kinds[place] if iteration.kinds else computation.kind
        mode = iteration.modes[place] if iteration.modes else "own"
        points = dag.profile.measurements[computation.stage, kind, mode]
        effective = [point.energy_j - power_w[rank] * point.time_s for point in points]
        found.append((rank, [point.time_s for point in points], effective))
    for _, _, _, rank, time_s, energy_j in iteration.operations:
        found.append(
            (rank, [time_s], [0.0 if energy_j is None else energy_j - power_w[rank] * time_s])
        )
    without = [[0.0] * len(before) for before in iteration.predecessors]
    lags_s = iteration.lags_s or without
    waits = [
        list(zip(*each, strict=True)) for each in zip(iteration.predecessors, lags_s, strict=True)
    ]
    return [Node(*each, waited) for each, waited in zip(found, waits, strict=True)]


def end_times_s(dag: PipelineDag, durations_s: Sequence[float]) -> list[float]:
    """When each node ends, by relaxing every wait until nothing moves (Bellman-Ford).

    Args:
        dag: the iteration.
        durations_s: seconds of its computations; those of its operations are their own.
    """
    each_s = [*durations_s, *(operation.time_s for operation in dag.iteration.operations)]
    end_s, waits = list(each_s), [node.waits for node in nodes(dag)]
    moved = True
    while moved:
        moved = False
        for place, before in enumerate(waits):
            earliest_s = (
                max((end_s[other] + lag_s for other, lag_s in before), default=0.0) + each_s[place]
            )
            if end_s[place] < earliest_s:
                end_s[place], moved = earliest_s, True
    return end_s


def effective_j(dag: PipelineDag) -> list[list[float]]:
    """Energy less blocking energy of every measured point of every node, joules."""
    return [node.effective_j for node in nodes(dag)]


def relaxed_j(dag: PipelineDag, deadline_s: float) -> float:
    """The least energy of an iteration of `deadline_s` by linear programming over all measured
    points, joules.

    Variables: by how much each node starts later than it could at the fastest durations, and a
    weight for each of its measured points. Such delays, and times and energies above the least in
    units of their largest, keep the programme well scaled, and feasible down to the least time.
    """
    each = nodes(dag)
    fastest_s = [min(node.time_s) for node in each]
    end_s = end_times_s(dag, fastest_s[: len(dag.computations)])
    extra_s = [np.array(node.time_s) - min(node.time_s) for node in each]
    extra_j = [np.array(node.effective_j) - min(node.effective_j) for node in each]
    unit_s = max(float(extra.max()) for extra in extra_s) or 1.0
    unit_j = max(float(extra.max()) for extra in extra_j) or 1.0

    count, points = len(each), sum(len(node.time_s) for node in each)
    stops = np.cumsum([len(node.time_s) for node in each])
    weights = np.split(np.arange(count, count + points), stops[:-1])
    costs = np.zeros(count + points)
    one_choice, no_later, room = np.zeros((count, len(costs))), [], []
    for place, node in enumerate(each):
        costs[weights[place]] = extra_j[place] / unit_j
        one_choice[place, weights[place]] = 1
        start_s = end_s[place] - fastest_s[place]
        before = [(other, start_s - lag_s) for other, lag_s in node.waits]
        for other, until_s in [*before, (None, deadline_s - dag.profile.overhead_s)]:
            row = np.zeros(len(costs))
            late = place if other is None else other
            row[late], row[weights[late]] = 1, extra_s[late] / unit_s
            if other is not None:
                row[place] = -1
            no_later.append(row)
            room.append(max(0.0, until_s - end_s[late]) / unit_s)
    tolerances = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solution = linprog(
        costs,
        np.array(no_later),
        room,
        one_choice,
        np.ones(count),
        (0, None),
        method="highs",
        options=tolerances,
    )
    assert solution.status == 0, solution.message
    least_j = math.fsum(min(node.effective_j) for node in each)
    return least_j + solution.fun * unit_j + waiting_w(dag) * deadline_s


def all_choices(dag: PipelineDag) -> tuple[np.ndarray, np.ndarray]:
    """Iteration time (s) and effective energy (J) of every choice of measured clocks there is."""
    return every_choice(dag)[1:]


def every_choice(dag: PipelineDag) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every choice of measured clocks, one a column, with its iteration time (s) and effective
    energy (J).
    """
    each = nodes(dag)
    sizes = [len(node.time_s) for node in each]
    number, blocks = np.arange(math.prod(sizes)), np.cumprod([1, *sizes[:-1]])
    choice = [
        number // block % size for block, size in zip(blocks, sizes, strict=True)
    ]  # digits of mixed radix
    times_s = [np.array(node.time_s)[row] for node, row in zip(each, choice, strict=True)]
    costs_j = [np.array(node.effective_j)[row] for node, row in zip(each, choice, strict=True)]
    end_s: dict[int, np.ndarray] = {}
    while len(end_s) < len(each):
        for place, (*_, waits) in enumerate(each):
            if all(other in end_s for other, _ in waits):
                ready_s = (
                    np.max([end_s[other] + lag_s for other, lag_s in waits], axis=0)
                    if waits
                    else 0.0
                )
                end_s[place] = times_s[place] + ready_s
    time_s = np.max(list(end_s.values()), axis=0) + dag.profile.overhead_s
    return np.stack(choice)[: len(dag.computations)], time_s, np.sum(costs_j, axis=0)


def flow_range(
    arcs: Sequence[Flow], source: Any, sink: Any, flow_func: Callable[..., Any]
) -> tuple[float, float]:
    """The least and the largest flow from source to sink within lower and upper bounds, by
    networkx.

    Lower bounds become demands of a circulation (Ford and Fulkerson 1962); from the flow that meets
    them, what more can be sent, and what can be sent back, are maximum flows of the residual
    network. The largest may be infinite."""
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
        residual.add_edge(
            tail, head, **({} if upper is None else {"capacity": upper - lower - sent})
        )
        residual.add_edge(head, tail, capacity=sent)
    back = nx.maximum_flow_value(residual, sink, source, flow_func=flow_func)
    try:
        more = nx.maximum_flow_value(residual, source, sink, flow_func=flow_func)
    except nx.NetworkXUnbounded:
        more = INFINITE
    return flow[sink][source] - back, flow[sink][source] + more
