"""Certificates: what can be checked of a frontier or a plan without solving anything again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from oracles import Flow, end_times_s, nodes, rank_waiting_w

from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import Frontier
from perseus_planner.solver.mincut import walk
from perseus_planner.solver.network import UNLIMITED, Network, State


class Point(NamedTuple):
    """A time on a frontier, ticks, the flow there, power units, and an optimal state."""

    time: int
    power: int
    state: State


def points_at(frontier: Frontier, times: Iterable[int]) -> Iterator[Point]:
    """The frontier at `times`, ticks, which must fall."""
    for step in walk(frontier.scaled.network, times):
        yield Point(step.times[-1], step.powers[-1], State(*(array.copy() for array in step.state)))


def curve(network: Network, arc: int) -> tuple[list[int], list[int]]:
    """Vertex times of an arc, slowest first, and the slope from the vertex before to each, 0 at
    the first one.
    """
    where = slice(int(network.first[arc]), int(network.last[arc]) + 1)
    return network.vertex_time[where].tolist(), network.vertex_slope[where].tolist()


def gaps(network: Network, state: State) -> list[int]:
    """The time that each arc is given, ticks."""
    return (state.event[network.head] - state.event[network.tail]).tolist()


def arc_cost(network: Network, arc: int, gap: int) -> int:
    """What it costs to run an arc in `gap` ticks rather than at its slowest vertex, ticks times
    power units.
    """
    times, slopes = curve(network, arc)
    assert gap >= times[-1], "an arc has less time than its fastest vertex"
    return sum(
        slope * max(0, slower - max(faster, gap))
        for slower, faster, slope in zip(times, times[1:], slopes[1:], strict=False)
    )


def critical_arcs(network: Network, state: State) -> list[Flow]:
    """Every arc with the bounds that complementary slackness sets on its flow: the slopes on
    either side of its gap.
    """
    arcs: list[Flow] = []
    for arc, gap in enumerate(gaps(network, state)):
        times, slopes = curve(network, arc)
        lower = next(
            (slope for slope, faster in zip(slopes, times, strict=True) if faster <= gap), None
        )
        assert lower is not None, "an arc has less time than its fastest vertex"
        upper = next(
            (slope for slope, faster in zip(slopes, times, strict=True) if faster < gap), None
        )
        arcs.append((int(network.tail[arc]), int(network.head[arc]), lower, upper))
    return arcs


def check_state(network: Network, at: Point) -> None:
    """Event times and flow are feasible, and each proves the other optimal."""
    assert at.state.event[network.source] == 0
    assert at.state.event[network.sink] == at.time
    surplus: Counter[int] = Counter()
    for (tail, head, lower, upper), flow in zip(
        critical_arcs(network, at.state), at.state.flow.tolist(), strict=True
    ):
        assert lower <= flow
        assert upper is None or flow <= upper
        surplus[head] += flow
        surplus[tail] -= flow
    assert all(surplus[node] == 0 for node in surplus if node not in (network.source, network.sink))
    assert surplus[network.sink] == -surplus[network.source]
    assert at.power in (surplus[network.sink], UNLIMITED)


def check_cut(network: Network, at: Point) -> None:
    """No flow is larger at this time: a cut is worth as much, or, at the fast end, a path has no
    bound.
    """
    arcs, flows = critical_arcs(network, at.state), at.state.flow.tolist()
    if at.power == UNLIMITED:
        without_bound = [(tail, head) for tail, head, _, upper in arcs if upper is None]
        assert network.sink in _reached(network.source, without_bound), (
            "a faster iteration is possible"
        )
        return
    usable = [
        (arc[0], arc[1])
        for arc, flow in zip(arcs, flows, strict=True)
        if arc[3] is None or flow < arc[3]
    ]
    usable += [(arc[1], arc[0]) for arc, flow in zip(arcs, flows, strict=True) if flow > arc[2]]
    near = _reached(network.source, usable)
    assert network.sink not in near, "more can flow"
    forward = sum(upper for tail, head, _, upper in arcs if tail in near and head not in near)
    backward = sum(lower for tail, head, lower, _ in arcs if tail not in near and head in near)
    assert forward - backward == at.power, "the cut is not worth the flow"


def check_frontier(frontier: Frontier) -> None:
    """The curve is convex and falls in effective energy, from the slow end to the fast one."""
    assert np.all(np.diff(frontier.times) < 0)
    assert np.all(np.diff(frontier.powers) >= 0)
    assert frontier.powers[-1] == UNLIMITED
    assert frontier.powers[0] >= 0
    assert np.all(np.diff(frontier.times_s) <= 0)
    assert (frontier.times_s[0], frontier.times_s[-1]) == (frontier.max_time_s, frontier.min_time_s)


def check_plan(plan: Plan, frontier: Frontier) -> None:
    """Every computation has a measured clock, the deadline is met, and time, energy and bound
    are what they say.
    """
    dag, profile, iteration = frontier.dag, frontier.profile, frontier.dag.iteration
    assert list(plan.clocks) == [str(computation) for computation in dag.computations]
    points = []
    for place, computation in enumerate(dag.computations):
        kind = iteration.kinds[place] if iteration.kinds else computation.kind
        mode = iteration.modes[place] if iteration.modes else "own"
        rows = profile.measurements[computation.stage, kind, mode]
        measured = {m.clock_mhz: m for m in rows}
        points.append(measured[plan.clocks[str(computation)]])
        assert plan.measurement(computation) == points[-1]
    time_s = max(end_times_s(dag, [point.time_s for point in points])) + profile.overhead_s
    assert plan.time_s == time_s <= plan.deadline_s
    energy_j, scale_j = _energy_j(dag, points, time_s)
    assert math.isclose(plan.energy_j, energy_j, rel_tol=0, abs_tol=1e-14 * scale_j)
    assert plan.bound_j == frontier.bound_j(plan.time_s)
    assert plan.energy_j >= plan.bound_j - 1e-12 * scale_j
    assert (plan.baseline_time_s, plan.baseline_energy_j) == (
        frontier.baseline_time_s,
        frontier.baseline_energy_j,
    )
    assert plan.iteration == iteration
    assert plan.profile_digest == profile.digest
    for name in ("blocking_power_w", "gpu", "origin", "gpus_per_stage", "overhead_s"):
        assert getattr(plan, name) == getattr(profile, name)


def _energy_j(dag: PipelineDag, points: list[Measurement], time_s: float) -> tuple[float, float]:
    """Joules of an iteration, rank by rank, and what rounding errors of it are measured by."""
    parts_j = []
    for rank, power_w in enumerate(rank_waiting_w(dag)):
        chosen = zip(nodes(dag), points, strict=False)  # operations come last and have no point
        spent = [(point.time_s, point.energy_j) for node, point in chosen if node.rank == rank]
        for operation in dag.iteration.operations:
            if operation.rank == rank:
                drawn_j = (
                    power_w * operation.time_s if operation.energy_j is None else operation.energy_j
                )
                spent.append((operation.time_s, drawn_j))
        busy_s = math.fsum(each_s for each_s, _ in spent)
        parts_j += [math.fsum(each_j for _, each_j in spent), power_w * time_s, -power_w * busy_s]
    return math.fsum(parts_j), math.fsum(map(abs, parts_j))


def check_replay(plan: Plan) -> None:
    """A replay of the plan takes the time and the energy that the plan says, and nothing starts
    before it may.
    """
    timeline, iteration = replay(plan), plan.iteration
    assert timeline.time_s == plan.time_s
    assert timeline.energy_j == plan.energy_j
    assert list(timeline.spans) == [*plan.clocks, *map(str, iteration.operations)]
    spans = list(timeline.spans.values())
    lags_s = iteration.lags_s or [[0.0] * len(before) for before in iteration.predecessors]
    for span, before, lag_s in zip(spans, iteration.predecessors, lags_s, strict=True):
        ready_s = [spans[other].end_s + lag for other, lag in zip(before, lag_s, strict=True)]
        assert span.start_s == max(ready_s, default=0.0)


def _reached(source: int, edges: list[tuple[int, int]]) -> set[int]:
    following: dict[int, list[int]] = {}
    for tail, head in edges:
        following.setdefault(tail, []).append(head)
    reached, ahead = {source}, [source]
    while ahead:
        for node in following.get(ahead.pop(), ()):
            if node not in reached:
                reached.add(node)
                ahead.append(node)
    return reached


def same(one: Frontier, other: Frontier) -> bool:
    """Whether both are the same curve of the same iteration."""
    curves = zip((one.times, one.powers), (other.times, other.powers), strict=True)
    return one.dag == other.dag and all(np.array_equal(a, b) for a, b in curves)
