"""The parametric minimum cut: kernels that walk the time-cost curve of a project network exactly.

This is the project crashing problem of Kelley (1961) and Fulkerson (1961): every arc has a duration with a convex,
piecewise-linear cost, and the least cost is sought for every total time T. Perseus (SOSP'24) solves it for pipelines
with the cuts of Phillips and Dessouky (1977), a fixed step at a time. Here the walk is exact, as a primal-dual maximum
flow:

* The `event` times are the potentials. The gap `event[head] - event[tail]` of an arc is the time it is given.
* The `flow` of an arc is the price of its time, between the slopes of its cost curve on either side of its gap. The
  flow from source to sink is the price of T: minus the slope of the frontier.
* At a given T the flow is raised to the maximum over the tight arcs (Dinic 1970). Then a minimum cut separates source
  from sink: its forward arcs are the computations to speed up, its backward arcs those to slow down.
* Events behind the cut move earlier until an arc reaches the next vertex of its curve or becomes tight. The cut grows
  by such arcs until it meets the sink: one search of shortest distances (Dijkstra), which ends at the next T at which
  the slope of the frontier changes. The flow is kept from one T to the next.

All numbers are 64-bit integers (time in ticks, flow in units of power), so no tolerance is needed. One
breakpoint costs O(arcs * log(nodes)) for the search plus its augmentations.

Cost curves are stored back to back: `vertex_time[k]` falls from `first[arc]` (slowest) to `last[arc]` (fastest) and
`vertex_slope[k]` is the cost of a tick between vertex k - 1 and k, 0 at `first`. An arc may be given more time than
its slowest vertex at no further saving, so a precedence constraint is an arc with one vertex, its lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from perseus_planner.solver.kernels import inner_kernel, kernel
from perseus_planner.solver.network import UNLIMITED, Integers, Network, State


class Step(NamedTuple):
    """A part of the walk along the frontier."""

    times: list[int]  #: where the walk began and arrived, falling, ticks
    powers: list[int]  #: minus the slope of the frontier just below each, power units
    state: State  #: optimal at the last time


def slowest_state(network: Network) -> State:
    """Return the slow end of the frontier: earliest event times with every arc at its slowest vertex, and no flow.

    The times are longest paths in topological order; nodes on a cycle, or behind one, would keep the time 0.
    """
    start, residual, head = network.start.tolist(), network.residual.tolist(), network.head.tolist()
    length = network.vertex_time[network.first].tolist()
    waiting = np.bincount(network.head, minlength=len(start) - 1).tolist()
    event, ready = [0] * len(waiting), [network.source]
    while ready:
        node = ready.pop()
        for arc in residual[start[node] : start[node + 1]]:
            if arc >= 0:
                event[head[arc]] = max(event[head[arc]], event[node] + length[arc])
                waiting[head[arc]] -= 1
                if waiting[head[arc]] == 0:
                    ready.append(head[arc])
    return State(np.array(event, dtype=np.int64), np.zeros(len(head), dtype=np.int64))


@inner_kernel
def _measure(network: Network, state: State, arcs: Integers, level: Integers, length: Integers, room: Integers) -> None:
    """Set how far both residual arcs of `arcs` are from being usable (ticks), and their capacity where that is 0.

    `level` holds the vertex of each arc's curve at or below its gap; the search for it begins at its old value.
    """
    # Local names: an array taken out of a tuple inside the loop costs more than the loop's own work.
    event, flow, tail, head, first, last = (
        state.event,
        state.flow,
        network.tail,
        network.head,
        network.first,
        network.last,
    )
    time, slope, raising, lowering = network.vertex_time, network.vertex_slope, network.raising, network.lowering
    for arc in arcs:
        gap = event[head[arc]] - event[tail[arc]]
        k = level[arc]
        while k > first[arc] and gap >= time[k - 1]:
            k -= 1
        while k < last[arc] and gap < time[k]:
            k += 1
        level[arc] = k
        up, down = raising[arc], lowering[arc]
        room[up] = UNLIMITED if k == last[arc] else slope[k + 1] - flow[arc]
        length[up] = gap - time[k] if gap > time[k] or room[up] > 0 else gap - time[k + 1]
        room[down] = flow[arc] - slope[k]
        if flow[arc] == 0:
            length[down] = UNLIMITED
        else:
            length[down] = 0 if gap == time[k] and room[down] > 0 else time[k - 1] - gap


@inner_kernel
def _layers(
    start: Integers, other: Integers, source: int, sink: int, length: Integers, layer: Integers, queue: Integers
) -> int:
    """Fill `layer` with the breadth-first layers of the tight residual network up to the sink.

    Returns the number of nodes reached, which `queue` holds: all reachable ones, unless the sink is the last of them.
    """
    layer[:] = -1
    layer[source] = 0
    queue[0] = source
    taken, reached = 0, 1
    while taken < reached:
        node = queue[taken]
        taken += 1
        for i in range(start[node], start[node + 1]):
            if length[i] == 0 and layer[other[i]] < 0:
                layer[other[i]] = layer[node] + 1
                queue[reached] = other[i]
                reached += 1
                if other[i] == sink:
                    return reached
    return reached


@inner_kernel
def _augment(
    network: Network, state: State, path: Integers, level: Integers, length: Integers, room: Integers
) -> tuple[int, int]:
    """Send what fits along the tight `path`.

    Returns how much that was (UNLIMITED if there is no bound; nothing is sent then), and the first step of the path
    that is no longer usable.
    """
    least = UNLIMITED
    for i in path:
        least = min(least, room[i])
    if least == UNLIMITED:
        return least, 0
    arcs = network.residual[path]
    for step in range(len(path)):
        if arcs[step] >= 0:
            state.flow[arcs[step]] += least
        else:
            arcs[step] = ~arcs[step]
            state.flow[arcs[step]] -= least
    _measure(network, state, arcs, level, length, room)
    step = 0
    while length[path[step]] == 0:
        step += 1
    return least, step


@inner_kernel
def _blocking_flow(
    network: Network, state: State, level: Integers, length: Integers, room: Integers, layer: Integers
) -> int:
    """Saturate every shortest path of the layered network; return the flow added, or UNLIMITED without a bound."""
    start, other = network.start, network.other
    following = start[:-1].copy()
    path, nodes = layer.copy(), layer.copy()
    steps, node, added = 0, network.source, 0
    while True:
        if node == network.sink:
            sent, steps = _augment(network, state, path[:steps], level, length, room)
            if sent == UNLIMITED:
                return UNLIMITED
            added += sent
            node = nodes[steps]
        i = following[node]
        if i == start[node + 1]:
            if steps == 0:
                return added
            steps -= 1
            node = nodes[steps]
            following[node] += 1
        elif length[i] == 0 and layer[other[i]] == layer[node] + 1:
            path[steps], nodes[steps] = i, node
            steps += 1
            node = other[i]
        else:
            following[node] += 1


@inner_kernel
def _distances(
    start: Integers,
    other: Integers,
    source: int,
    sink: int,
    length: Integers,
    queue: Integers,
    distance: Integers,
    came_by: Integers,
) -> int:
    """Grow the cut from the source until it meets the sink (Dijkstra); return how far events can move, ticks.

    Fills `distance` with how far the cut had moved when it took in each node, and `came_by` with the residual arc by
    which it did. Both are undefined for nodes whose distance is more than the result.
    """
    distance[:] = UNLIMITED
    distance[source] = 0
    queue[0] = source  # nodes as far as the last one taken from the heap: most nodes need no heap
    taken, reached = 0, 1
    far = [(np.int64(0), np.int64(0))]
    far.pop()
    while True:
        if taken < reached:
            node = queue[taken]
            taken += 1
        else:
            beyond, node = heappop(far)
            if beyond > distance[node]:  # it was taken earlier, when it was nearer
                continue
        if node == sink:
            return distance[node]  # type: ignore[no-any-return]
        for i in range(start[node], start[node + 1]):
            beyond = distance[node] + length[i]
            if beyond < distance[other[i]]:
                distance[other[i]], came_by[other[i]] = beyond, i
                if length[i] == 0:
                    queue[reached] = other[i]
                    reached += 1
                else:
                    heappush(far, (beyond, other[i]))


@inner_kernel
def _move(network: Network, state: State, distance: Integers, step: int) -> Integers:
    """Move the events behind the cut `step` ticks earlier; return the arcs whose gap has changed."""
    for node in range(len(distance)):
        distance[node] = min(distance[node], step)
        state.event[node] -= distance[node]
    tail, head = network.tail, network.head
    changed, count = tail.copy(), 0
    for arc in range(len(tail)):
        if distance[tail[arc]] != distance[head[arc]]:
            changed[count] = arc
            count += 1
    return changed[:count]


@inner_kernel
def _path(network: Network, came_by: Integers, path: Integers) -> Integers:
    """Return the residual arcs from source to sink that the search came by, in the end of `path`."""
    node, begin = network.sink, len(path)
    while node != network.source:
        begin -= 1
        path[begin] = came_by[node]
        arc = network.residual[came_by[node]]
        node = network.tail[arc] if arc >= 0 else network.head[~arc]
    return path[begin:]


@kernel
def advance(network: Network, state: State, time: int, power: int, target: int) -> tuple[list[int], list[int]]:
    """Move `state` along the frontier from total time `time` down to `target`, or to its fast end.

    Args:
        network: the network.
        state: optimal at `time`; changed in place, and optimal at the last time returned.
        time: total time of `state`, ticks.
        power: flow from source to sink in `state`, power units.
        target: where to stop, ticks.

    Returns:
        The times at which the walk arrived (falling, ticks), and the power just below each: the frontier's slope
        between one time and the next is minus that power. Below a time with UNLIMITED power nothing is feasible.
    """
    level, arcs, length, room = network.first.copy(), network.first.copy(), network.other.copy(), network.other.copy()
    queue, layer, path = state.event.copy(), state.event.copy(), state.event.copy()
    distance, came_by = state.event.copy(), state.event.copy()
    times, powers = [time], [power]
    start, other, source, sink = network.start, network.other, network.source, network.sink
    for arc in range(len(level)):
        arcs[arc] = arc
    _measure(network, state, arcs, level, length, room)
    while True:
        step = _distances(start, other, source, sink, length, queue, distance, came_by)
        if step == 0:  # the flow is not yet the maximum
            added = 0
            while added < UNLIMITED and queue[_layers(start, other, source, sink, length, layer, queue) - 1] == sink:
                added = _blocking_flow(network, state, level, length, room, layer)
                power += added
        else:
            powers[-1] = power
            if time <= target:
                return times, powers
            step = min(step, time - target)
            meets = step == distance[sink]
            _measure(network, state, _move(network, state, distance, step), level, length, room)
            time -= step
            times.append(time)
            powers.append(power)
            added = _augment(network, state, _path(network, came_by, path), level, length, room)[0] if meets else 0
            power += added
        if added == UNLIMITED:
            powers[-1] = UNLIMITED
            return times, powers


def walk(network: Network, targets: Iterable[int], state: State | None = None) -> Iterator[Step]:
    """Yield the walk from the slow end to each of the target times in turn, in ticks; they must fall.

    It ends at the fast end, whose power is UNLIMITED. The arrays of a state change on the way to the next one; the
    first one is `state`, the `slowest_state`.
    """
    state = slowest_state(network) if state is None else state
    time, power = int(state.event[network.sink]), 0
    for target in targets:
        times, powers = advance(network, state, time, power, target)
        yield Step(times, powers, state)
        time, power = times[-1], powers[-1]
        if power == UNLIMITED:
            break
