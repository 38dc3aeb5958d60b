"""The parametric minimum cut: kernels that walk the time-cost curve of a project network exactly.

This is the project crashing problem of Kelley (1961) and Fulkerson (1961): every arc has a duration
with a convex, piecewise-linear cost, and the least cost is sought for every total time T. Perseus
(SOSP'24) solves it for pipelines with the cuts of Phillips and Dessouky (1977), a fixed step at a
time. Here the walk is exact, as a primal-dual maximum flow:

* The `event` times are the potentials. The gap `event[head] - event[tail]` of an arc is the time it
  is given.
* The `flow` of an arc is the price of its time, between the slopes of its cost curve on either side
  of its gap. The flow from source to sink is the price of T: minus the slope of the frontier.
* At a given T the flow is raised to the maximum over the tight arcs (Dinic 1970). Then a minimum
  cut separates source from sink: its forward arcs are the computations to speed up, its backward
  arcs those to slow down.
* Events behind the cut move earlier until an arc reaches the next vertex of its curve or becomes
  tight. The cut grows by such arcs until it meets the sink: one search of shortest distances
  (Dijkstra), which ends at the next T at which the slope of the frontier changes. The flow is kept
  from one T to the next.

All numbers are 64-bit integers (time in ticks, flow in units of power), so no tolerance is needed.
One breakpoint costs O(arcs * log(nodes)) for the search plus its augmentations.

Cost curves are stored back to back: `vertex_time[k]` falls from `first[arc]` (slowest) to
`last[arc]` (fastest) and `vertex_slope[k]` is the cost of a tick between vertex k - 1 and k, 0 at
`first`. An arc may be given more time than its slowest vertex at no further saving, so a precedence
constraint is an arc with one vertex, its lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import inner_kernel, kernel
from perseus_planner.solver.network import UNLIMITED, Integers, Network, State

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers

_MOST_STEPS = 4096  #: that one call of the kernel records


class Step(NamedTuple):
    """A part of the walk along the frontier."""

    times: list[int]  #: where the walk began and arrived, falling, ticks
    powers: list[int]  #: minus the slope of the frontier just below each, power units
    state: State  #: optimal at the last time


def slowest_state(network: Network) -> State:
    """Return the slow end of the frontier: earliest event times with every arc at its slowest
    vertex, and no flow.

    The times are longest paths in topological order; nodes on a cycle, or behind one, would keep
    the time 0.
    """
    waiting = np.bincount(network.head, minlength=len(network.start) - 1)
    event, ready = np.zeros_like(waiting), np.zeros_like(waiting)
    ready[0] = network.source
    _earliest(network, waiting, ready, event)
    return State(event, np.zeros(len(network.head), dtype=np.int64))


@kernel
def _earliest(network: Network, waiting: Integers, ready: Integers, event: Integers) -> None:
    """Fill `event` with the earliest times of the slow end.

    Args:
        network: the network.
        waiting: (nodes,) how many arcs lead to each node; changed.
        ready: (nodes,) begins with the source; changed.
        event: (nodes,) zeros at first.
    """
    taken, reached = 0, 1
    while taken < reached:
        node = ready[taken]
        taken += 1
        for i in range(network.start[node], network.start[node + 1]):
            arc = network.residual[i]
            if arc >= 0:
                head = network.head[arc]
                end = event[node] + network.vertex_time[network.first[arc]]
                event[head] = max(event[head], end)
                waiting[head] -= 1
                if waiting[head] == 0:
                    ready[reached] = head
                    reached += 1


@inner_kernel
def _update_residuals(
    network: Network,
    state: State,
    arcs: Integers,
    level: Integers,
    length: Integers,
    capacity: Integers,
) -> None:
    """Set how far both residual arcs of `arcs` are from being usable (ticks), and their capacity
    where that is 0.

    `level` holds the vertex of each arc's curve at or below its gap; the search for it begins at
    its old value.
    """
    # Local names: an array taken out of a tuple inside the loop costs more than the loop's own
    # work.
    event, flow, tail, head, first, last = (
        state.event,
        state.flow,
        network.tail,
        network.head,
        network.first,
        network.last,
    )
    time, slope, raising, lowering = (
        network.vertex_time,
        network.vertex_slope,
        network.raising,
        network.lowering,
    )
    for arc in arcs:
        gap = event[head[arc]] - event[tail[arc]]
        k = level[arc]
        while k > first[arc] and gap >= time[k - 1]:
            k -= 1
        while k < last[arc] and gap < time[k]:
            k += 1
        level[arc] = k
        up, down = raising[arc], lowering[arc]
        capacity[up] = UNLIMITED if k == last[arc] else slope[k + 1] - flow[arc]
        length[up] = gap - time[k] if gap > time[k] or capacity[up] > 0 else gap - time[k + 1]
        capacity[down] = flow[arc] - slope[k]
        if flow[arc] == 0:
            length[down] = UNLIMITED
        else:
            length[down] = 0 if gap == time[k] and capacity[down] > 0 else time[k - 1] - gap


@inner_kernel
def _layers(
    start: Integers,
    other: Integers,
    source: int,
    sink: int,
    length: Integers,
    layer: Integers,
    queue: Integers,
) -> int:
    """Fill `layer` with the breadth-first layers of the tight residual network up to the sink.

    Returns the number of nodes reached, which `queue` holds: all reachable ones, unless the sink is
    the last of them.
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
    network: Network,
    state: State,
    path: Integers,
    level: Integers,
    length: Integers,
    capacity: Integers,
    arcs: Integers,
) -> tuple[int, int]:
    """Send what fits along the tight `path`; `arcs` is scratch space.

    Returns how much that was (UNLIMITED if there is no bound; nothing is sent then), and the first
    step of the path that is no longer usable.
    """
    least = UNLIMITED
    for i in path:
        least = min(least, capacity[i])
    if least == UNLIMITED:
        return least, 0
    residual, flow = network.residual, state.flow
    for step in range(len(path)):
        arc = residual[path[step]]
        arcs[step] = arc if arc >= 0 else ~arc
        flow[arcs[step]] += least if arc >= 0 else -least
    _update_residuals(network, state, arcs[: len(path)], level, length, capacity)
    step = 0
    while length[path[step]] == 0:
        step += 1
    return least, step


@inner_kernel
def _blocking_flow(
    network: Network,
    state: State,
    level: Integers,
    length: Integers,
    capacity: Integers,
    layer: Integers,
    arcs: Integers,
    scratch: Integers,
) -> int:
    """Saturate every shortest path of the layered network; return the flow added, or UNLIMITED
    without a bound.
    """
    start, other = network.start, network.other
    following, path, nodes = scratch[0], scratch[1], scratch[2]
    for node in range(len(following)):
        following[node] = start[node]
    steps, node, added = 0, network.source, 0
    while True:
        if node == network.sink:
            sent, steps = _augment(network, state, path[:steps], level, length, capacity, arcs)
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
def _push(
    heap_distance: Integers, heap_node: Integers, count: int, further: int, node: int
) -> None:
    """Add a node to a binary heap of `count` nodes: the nearest one is the first; of equally near
    ones, that of the lowest number. Numba's `heapq` takes longer to compile.
    """
    place = count
    while place > 0:
        above = (place - 1) // 2
        if heap_distance[above] < further or (
            heap_distance[above] == further and heap_node[above] <= node
        ):
            break
        heap_distance[place], heap_node[place] = heap_distance[above], heap_node[above]
        place = above
    heap_distance[place], heap_node[place] = further, node


@inner_kernel
def _pop(heap_distance: Integers, heap_node: Integers, count: int) -> None:
    """Take away the first node of the heap, which leaves `count` nodes."""
    last, node, place, child = heap_distance[count], heap_node[count], 0, 1
    while child < count:
        if child + 1 < count and (
            heap_distance[child + 1] < heap_distance[child]
            or (
                heap_distance[child + 1] == heap_distance[child]
                and heap_node[child + 1] < heap_node[child]
            )
        ):
            child += 1
        if last < heap_distance[child] or (
            last == heap_distance[child] and node < heap_node[child]
        ):
            break
        heap_distance[place], heap_node[place] = heap_distance[child], heap_node[child]
        place, child = child, 2 * child + 1
    heap_distance[place], heap_node[place] = last, node


@inner_kernel
def _distances(
    start: Integers,
    other: Integers,
    source: int,
    sink: int,
    length: Integers,
    queue: Integers,
    distance: Integers,
    arrival: Integers,
    heap: Integers,
) -> int:
    """Grow the cut from the source until it meets the sink (Dijkstra); return how far events can
    move, ticks.

    Fills `distance` with how far the cut had moved when it took in each node, and `arrival` with
    the residual arc by which it did. Both are undefined for nodes whose distance is more than the
    result.
    """
    distance[:] = UNLIMITED
    distance[source] = 0
    queue[0] = source  # nodes as far as the last one taken from the heap: most nodes need no heap
    taken, reached, waiting = 0, 1, 0
    heap_distance, heap_node = heap[0], heap[1]  # a binary heap of distances, and the nodes there
    while True:
        if taken < reached:
            node = queue[taken]
            taken += 1
        else:
            further, node = heap_distance[0], heap_node[0]
            waiting -= 1
            _pop(heap_distance, heap_node, waiting)
            if further > distance[node]:  # it was taken earlier, when it was nearer
                continue
        if node == sink:
            return distance[node]  # type: ignore[no-any-return]
        for i in range(start[node], start[node + 1]):
            further = distance[node] + length[i]
            if further < distance[other[i]]:
                distance[other[i]], arrival[other[i]] = further, i
                if length[i] == 0:
                    queue[reached] = other[i]
                    reached += 1
                else:
                    _push(heap_distance, heap_node, waiting, further, other[i])
                    waiting += 1


@inner_kernel
def _move_events(
    network: Network, state: State, distance: Integers, step: int, changed: Integers
) -> int:
    """Move the events behind the cut `step` ticks earlier; return how many arcs have `changed`
    their gap.
    """
    for node in range(len(distance)):
        distance[node] = min(distance[node], step)
        state.event[node] -= distance[node]
    tail, head = network.tail, network.head
    count = 0
    for arc in range(len(tail)):
        if distance[tail[arc]] != distance[head[arc]]:
            changed[count] = arc
            count += 1
    return count


@inner_kernel
def _path_to_sink(network: Network, arrival: Integers, path: Integers) -> int:
    """Put the residual arcs that the search came by to the sink in the end of `path`; return
    where they begin.
    """
    node, begin = network.sink, len(path)
    while node != network.source:
        begin -= 1
        path[begin] = arrival[node]
        arc = network.residual[arrival[node]]
        node = network.tail[arc] if arc >= 0 else network.head[~arc]
    return begin


@kernel
def _advance(
    network: Network,
    state: State,
    node_scratch: Integers,
    arc_scratch: Integers,
    residual_scratch: Integers,
    target: int,
    times: Integers,
    powers: Integers,
) -> int:
    """Move `state` along the frontier from `times[0]` down to `target`, to its fast end, or until
    `times` is full.

    `times` gets the total times at which the walk arrives, falling, and `powers`, whose first one
    is the flow of `state`, the power just below each: the frontier's slope between one time and the
    next is minus that power. Below a time with UNLIMITED power nothing is feasible. The scratch
    spaces have 8 rows of nodes, 2 of arcs and 4 of residual arcs. Returns how many times there are.
    """
    queue, layer, path, distance, arrival = (
        node_scratch[0],
        node_scratch[1],
        node_scratch[2],
        node_scratch[3],
        node_scratch[4],
    )
    level, arcs = arc_scratch[0], arc_scratch[1]
    length, capacity, heap = residual_scratch[0], residual_scratch[1], residual_scratch[2:]
    start, other, source, sink = network.start, network.other, network.source, network.sink
    time, power, count = times[0], powers[0], 1
    for arc in range(len(arcs)):
        level[arc], arcs[arc] = network.first[arc], arc
    _update_residuals(network, state, arcs, level, length, capacity)
    while True:
        step = _distances(start, other, source, sink, length, queue, distance, arrival, heap)
        if step == 0:  # the flow is not yet the maximum
            added = 0
            while (
                added < UNLIMITED
                and queue[_layers(start, other, source, sink, length, layer, queue) - 1] == sink
            ):
                added = _blocking_flow(
                    network, state, level, length, capacity, layer, arcs, node_scratch[5:]
                )
                power += added
        else:
            powers[count - 1] = power
            if time <= target or count == len(times):
                return count
            step = min(step, time - target)
            reaches_sink = step == distance[sink]
            changed = _move_events(network, state, distance, step, arcs)
            _update_residuals(network, state, arcs[:changed], level, length, capacity)
            time -= step
            times[count], powers[count] = time, power
            count += 1
            added = 0
            if reaches_sink:
                begin = _path_to_sink(network, arrival, path)
                added = _augment(network, state, path[begin:], level, length, capacity, arcs)[0]
            power += added
        if added == UNLIMITED:
            powers[count - 1] = UNLIMITED
            return count


def walk(network: Network, targets: Iterable[int], state: State | None = None) -> Iterator[Step]:
    """Yield the walk from the slow end to each of the target times in turn, in ticks; they must
    fall.

    It ends at the fast end, whose power is UNLIMITED. The arrays of a state change on the way to
    the next one; the first one is `state`, the `slowest_state`.
    """
    state = slowest_state(network) if state is None else state
    nodes, arcs = len(state.event), len(state.flow)
    node_scratch, arc_scratch, residual_scratch = (
        np.empty(shape, np.int64) for shape in ((8, nodes), (2, arcs), (4, 2 * arcs))
    )
    part = np.empty((2, _MOST_STEPS), np.int64)
    time, power = int(state.event[network.sink]), 0
    for target in targets:
        times, powers, count = [time], [power], _MOST_STEPS
        while count == _MOST_STEPS:
            part[:, 0] = times[-1], powers[-1]
            count = _advance(
                network,
                state,
                node_scratch,
                arc_scratch,
                residual_scratch,
                target,
                part[0],
                part[1],
            )
            times[-1:], powers[-1:] = part[:, :count].tolist()
        yield Step(times, powers, state)
        time, power = times[-1], powers[-1]
        if power == UNLIMITED:
            break
