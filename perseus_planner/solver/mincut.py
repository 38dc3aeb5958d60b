"""The parametric minimum cut: kernels that walk the time-cost curve of a project network exactly.

This is the project crashing problem of Kelley (1961) and Fulkerson (1961): every arc has a duration
with a convex, piecewise-linear cost, and the least cost is sought for every total time T. Perseus
(SOSP'24) solves it for pipelines with the cuts of Phillips and Dessouky (1977), a fixed step at a
time. Here the walk is exact, as a parametric network simplex:

* The `event` times are the potentials. The gap `event[head] - event[tail]` of an arc is the time it
  is given.
* The `flow` of an arc is the price of its time, between the slopes of its cost curve on either side
  of its gap. The flow from source to sink is the price of T: minus the slope of the frontier.
* A spanning tree joins all nodes. The gap of an arc in the tree is the time of a vertex of its
  curve, and its flow is anything between the slopes there. The flow of any other arc is a slope of
  its curve, and its gap is anything along that segment. So the tree says all event times, and the
  flow from source to sink says all flows.
* The flow rises along the tree's path from source to sink until an arc of it is at the end of its
  slopes. That arc leaves the tree, which falls into two parts, and these are the sides of a minimum
  cut: its forward arcs are the computations to speed up, its backward arcs those to slow down.
* The sink's side moves earlier until an arc across the cut reaches a vertex, which joins the two
  parts again. If the path from that arc to the sink has a full arc too, what is before that one
  joins the source's side, and the sink's side moves on. So one step of the flow looks once at each
  node that the source's side takes in, and at the arcs across in a heap; the rest of the sink's
  side moves rigidly, and nothing there is looked at.

The arc that leaves is the full one nearest to the source. So each arc of the tree has room for flow
away from the source (a strongly feasible tree, Cunningham 1976): the source's side only grows until
the flow rises, and the walk cannot go around in circles.

All numbers are 64-bit integers (time in ticks, flow in units of power), so no tolerance is needed.

Cost curves are stored back to back: `vertex_time[k]` falls from `first[arc]` (slowest) to
`last[arc]` (fastest) and `vertex_slope[k]` is the cost of a tick between vertex k - 1 and k, 0 at
`first`. An arc may be given more time than its slowest vertex at no further saving, so a precedence
constraint is an arc with one vertex, its lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import kernel
from perseus_planner.solver.network import UNLIMITED, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.solver.network import Integers, Network

    Indices = NDArray[np.int32]  # half as large as `Integers`, since caches are small

_MOST_STEPS = 4096  #: that one call of the kernel records


class Step(NamedTuple):
    """A part of the walk along the frontier."""

    times: list[int]  #: where the walk began and arrived, falling, ticks
    powers: list[int]  #: minus the slope of the frontier just below each, power units
    state: State  #: optimal at the last time


class Tree(NamedTuple):
    """A spanning tree of a network, and the event times that it says."""

    event: Integers  #: (nodes,) ticks; the source's time need not be 0
    #: (nodes,) the residual arc to each node from the next one on the way to the root, which is the
    #: sink; any for the sink
    parent: Indices
    #: (2 * arcs,) for each residual arc, twice the node at its far end, and 1 if it is in the tree
    far: Indices


def slowest_tree(network: Network) -> Tree:
    """Return the tree of the slow end of the frontier: earliest event times with every arc at its
    slowest vertex, and no flow.

    The times are longest paths in topological order; nodes on a cycle, or behind one, would keep
    the time 0.
    """
    waiting = np.bincount(network.head, minlength=len(network.start) - 1)
    event = np.zeros_like(waiting)
    ready = np.zeros_like(waiting)
    tree = Tree(event, np.zeros(len(event), np.int32), (2 * network.other).astype(np.int32))
    ready[0] = network.source
    _grow_tree(
        network.source,
        network.sink,
        network.tail,
        network.head,
        network.first,
        network.vertex_time,
        network.start,
        network.residual,
        network.raising,
        network.lowering,
        *tree,
        waiting,
        ready,
    )
    return tree


@kernel
def _grow_tree(
    source: int,
    sink: int,
    tail: Integers,
    head: Integers,
    first: Integers,
    vertex_time: Integers,
    start: Integers,
    residual: Integers,
    raising: Integers,
    lowering: Integers,
    event: Integers,
    parent: Indices,
    far: Indices,
    waiting: Integers,
    ready: Integers,
) -> None:
    """Fill the tree of the slow end.

    Arguments are fields of the network and of the tree, and two arrays that change: `waiting`,
    (nodes,) how many arcs lead to each node, and `ready`, (nodes,), which begins with the source.
    """
    taken = 0
    reached = 1
    while taken < reached:
        node = ready[taken]
        taken += 1
        for i in range(start[node], start[node + 1]):
            arc = residual[i]
            if arc >= 0:
                end = event[node] + vertex_time[first[arc]]
                if end >= event[head[arc]]:
                    event[head[arc]] = end
                    parent[head[arc]] = i
                waiting[head[arc]] -= 1
                if waiting[head[arc]] == 0:
                    ready[reached] = head[arc]
                    reached += 1
    for node in range(len(event)):
        if node != source:
            arc = residual[parent[node]]
            far[raising[arc]] |= 1
            far[lowering[arc]] |= 1
    # The root is the source so far: turn the path from there to the sink.
    node = sink
    turned = 0
    while node != source:
        arc = residual[parent[node]]
        parent[node] = turned
        turned = lowering[arc]
        node = tail[arc]
    parent[source] = turned


class _Walker(NamedTuple):
    """What the walk changes beside the tree and the flow."""

    level: Integers  #: (arcs,) vertex of each arc in the tree; of others, the end of its segment
    #: (nodes,) the round in which the source's side last took in each node
    taken_in: Indices
    side: Indices  #: (nodes,) the nodes of the source's side, in the order it took them in
    #: (nodes,) where each piece that it took in begins there, and how far the sink's side had moved
    piece: Integers
    piece_moved: Integers
    across: Indices  #: (2 * arcs,) scratch space: residual arcs that may be across the cut
    #: (2 * arcs,) a binary heap: how far the sink's side moves until each such arc is at a vertex
    heap_moved: Integers
    heap_arc: Indices  #: (2 * arcs,) the residual arcs there
    #: (6,) number of the round; whether a part of it is left, and then: nodes in `side`, arcs in
    #: the heap, how far the sink's side has moved, and pieces
    kept: Integers


@kernel
def _advance(
    source: int,
    sink: int,
    tail: Integers,
    head: Integers,
    first: Integers,
    last: Integers,
    vertex_time: Integers,
    vertex_slope: Integers,
    start: Integers,
    residual: Integers,
    raising: Integers,
    lowering: Integers,
    event: Integers,
    parent: Indices,
    far: Indices,
    flow: Integers,
    level: Integers,
    taken_in: Indices,
    side: Indices,
    piece: Integers,
    piece_moved: Integers,
    across: Indices,
    heap_moved: Integers,
    heap_arc: Indices,
    kept: Integers,
    target: int,
    times: Integers,
    powers: Integers,
) -> int:
    """Move tree and flow along the frontier from `times[0]` down to `target`, to its fast end, or
    until `times` is full.

    `times` gets the total times at which the walk arrives, falling, and `powers`, whose first one
    is the flow so far, the power just below each: the frontier's slope between one time and the
    next is minus that power. Below a time with UNLIMITED power nothing is feasible. The other
    arguments are fields of the network, the tree, and the walker. Returns how many times there are.
    """
    time = times[0]
    power = powers[0]
    count = 1
    mark = kept[0]
    is_within = kept[1]
    reached = kept[2]
    waiting = kept[3]
    moved = kept[4]
    pieces = kept[5]
    begin = time + moved  # the time at which this round began
    while True:
        leaving = -1
        entry = source
        if is_within == 0:
            # Raise the flow along the tree: first see by how much, and which arc is full then.
            least = UNLIMITED
            node = source
            while node != sink:
                arc = residual[parent[node]]
                room = UNLIMITED
                if arc >= 0:
                    room = flow[arc] - vertex_slope[level[arc]]
                elif level[~arc] < last[~arc]:
                    room = vertex_slope[level[~arc] + 1] - flow[~arc]
                if room < least:
                    least = room
                    leaving = parent[node]
                node = tail[arc] if arc >= 0 else head[~arc]
            if least == UNLIMITED:
                powers[count - 1] = UNLIMITED
                kept[1] = 0
                kept[4] = 0
                return count
            node = source
            while node != sink:
                arc = residual[parent[node]]
                if arc >= 0:
                    flow[arc] -= least
                    node = tail[arc]
                else:
                    flow[~arc] += least
                    node = head[~arc]
            power += least
            powers[count - 1] = power
            mark = mark + 1
            reached = 0
            waiting = 0
            moved = 0
            pieces = 0
            begin = time
        while True:
            if leaving >= 0:
                # The full arc leaves the tree, and what is before it joins the source's side.
                arc = residual[leaving]
                if arc < 0:
                    arc = ~arc
                    level[arc] += 1
                far[raising[arc]] ^= 1
                far[lowering[arc]] ^= 1
                piece[pieces] = reached
                piece_moved[pieces] = moved
                pieces += 1
                looked = reached
                listed = 0
                side[reached] = entry
                taken_in[entry] = mark
                reached += 1
                while looked < reached:
                    node = side[looked]
                    looked += 1
                    for i in range(start[node], start[node + 1]):
                        other = far[i] >> 1
                        if taken_in[other] != mark:
                            if far[i] & 1:
                                taken_in[other] = mark
                                parent[other] = i
                                side[reached] = other
                                reached += 1
                            else:
                                across[listed] = i
                                listed += 1
                for place in range(listed):
                    i = across[place]
                    if taken_in[far[i] >> 1] == mark:
                        continue
                    # How far the sink's side moves until this arc is at a vertex.
                    arc = residual[i]
                    if arc >= 0:
                        further = event[head[arc]] - event[tail[arc]] - vertex_time[level[arc]]
                    else:
                        arc = ~arc
                        if level[arc] == first[arc]:
                            continue  # it may have any time, at no saving
                        further = vertex_time[level[arc] - 1] - event[head[arc]] + event[tail[arc]]
                    further += moved
                    child = waiting
                    waiting += 1
                    while child > 0 and heap_moved[(child - 1) // 2] > further:
                        above = (child - 1) // 2
                        heap_moved[child], heap_arc[child] = heap_moved[above], heap_arc[above]
                        child = above
                    heap_moved[child] = further
                    heap_arc[child] = i
            # Arcs in the heap are no longer across the cut if the source's side took in both ends.
            while taken_in[far[heap_arc[0]] >> 1] == mark:
                waiting -= 1
                further = heap_moved[waiting]
                i = heap_arc[waiting]
                above = 0
                child = 1
                while child < waiting:
                    if child + 1 < waiting and heap_moved[child + 1] < heap_moved[child]:
                        child += 1
                    if further <= heap_moved[child]:
                        break
                    heap_moved[above], heap_arc[above] = heap_moved[child], heap_arc[child]
                    above = child
                    child = 2 * child + 1
                heap_moved[above] = further
                heap_arc[above] = i
            if heap_moved[0] > moved:
                # One time for each round is enough: the power is the same.
                is_first = count == 1 or times[count - 1] == begin
                if time <= target or (is_first and count == len(times)):
                    kept[0] = mark
                    kept[1] = 1
                    kept[2] = reached
                    kept[3] = waiting
                    kept[4] = moved
                    kept[5] = pieces
                    return count
                is_short = begin - heap_moved[0] < target
                moved = begin - target if is_short else heap_moved[0]
                time = begin - moved
                if is_first:
                    count += 1
                times[count - 1] = time
                powers[count - 1] = power
                if is_short:
                    leaving = -1
                    continue
            # The nearest arc enters the tree: from `node` on the source's side to `entry`.
            entering = heap_arc[0]
            arc = residual[entering]
            if arc >= 0:
                node = tail[arc]
                entry = head[arc]
            else:
                arc = ~arc
                node = head[arc]
                entry = tail[arc]
                level[arc] -= 1
            far[raising[arc]] ^= 1
            far[lowering[arc]] ^= 1
            # The first full arc from there to the sink, if there is one, leaves.
            leaving = -1
            above = entry
            while above != sink and leaving < 0:
                i = parent[above]
                arc = residual[i]
                if arc >= 0:
                    is_full = flow[arc] == vertex_slope[level[arc]]
                    above = tail[arc]
                else:
                    arc = ~arc
                    is_full = level[arc] < last[arc] and flow[arc] == vertex_slope[level[arc] + 1]
                    above = head[arc]
                if is_full:
                    leaving = i
            if leaving < 0:
                break
            parent[entry] = entering
        is_within = 0
        # Nodes that were taken in late moved with the sink's side before. The sink stays where it
        # is, so all others move the other way.
        piece[pieces] = reached
        for number in range(pieces):
            later = moved - piece_moved[number]
            if later > 0:
                for place in range(piece[number], piece[number + 1]):
                    event[side[place]] += later
        moved = 0
        # The source's side has the source as its root: turn the path from there to the arc.
        turned = entering
        while True:
            arc = residual[turned]
            turned = lowering[arc] if arc >= 0 else raising[~arc]
            old = parent[node]
            parent[node] = turned
            if node == source:
                break
            turned = old
            arc = residual[old]
            node = tail[arc] if arc >= 0 else head[~arc]


def walk(network: Network, targets: Iterable[int], tree: Tree | None = None) -> Iterator[Step]:
    """Yield the walk from the slow end to each of the target times in turn, in ticks; they must
    fall.

    It ends at the fast end, whose power is UNLIMITED. The flow of a state changes on the way to the
    next one, as the `tree` does, which is the `slowest_tree`.
    """
    tree = slowest_tree(network) if tree is None else tree
    nodes = len(tree.event)
    arcs = len(network.head)
    flow = np.zeros(arcs, np.int64)
    walker = _Walker(
        level=network.first.copy(),
        taken_in=np.zeros(nodes, np.int32),
        side=np.zeros(nodes, np.int32),
        piece=np.zeros(nodes + 1, np.int64),
        piece_moved=np.zeros(nodes + 1, np.int64),
        across=np.zeros(2 * arcs, np.int32),
        heap_moved=np.zeros(2 * arcs, np.int64),
        heap_arc=np.zeros(2 * arcs, np.int32),
        kept=np.zeros(6, np.int64),
    )
    part = np.empty((2, _MOST_STEPS), np.int64)
    time = int(tree.event[network.sink])
    power = 0
    for target in targets:
        times = [time]
        powers = [power]
        count = _MOST_STEPS
        while count == _MOST_STEPS:
            part[:, 0] = times[-1], powers[-1]
            count = _advance(
                network.source,
                network.sink,
                network.tail,
                network.head,
                network.first,
                network.last,
                network.vertex_time,
                network.vertex_slope,
                network.start,
                network.residual,
                network.raising,
                network.lowering,
                *tree,
                flow,
                walker.level,
                walker.taken_in,
                walker.side,
                walker.piece,
                walker.piece_moved,
                walker.across,
                walker.heap_moved,
                walker.heap_arc,
                walker.kept,
                target,
                part[0],
                part[1],
            )
            times[-1:], powers[-1:] = part[:, :count].tolist()
        yield Step(times, powers, State(_events(network, tree, walker), flow))
        time = times[-1]
        power = powers[-1]
        if power == UNLIMITED:
            break


def _events(network: Network, tree: Tree, walker: _Walker) -> Integers:
    """Return the event times where the walk is, from that of the source, ticks."""
    event = tree.event.copy()
    _, is_within, reached, _, moved, pieces = walker.kept.tolist()
    if is_within:
        sizes = np.diff(walker.piece[:pieces], append=reached)
        event[walker.side[:reached]] += moved - np.repeat(walker.piece_moved[:pieces], sizes)
    event -= event[network.source]
    return event
