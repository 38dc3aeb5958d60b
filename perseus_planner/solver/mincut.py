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
from perseus_planner.solver.network import UNLIMITED, Network, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.solver.network import Integers

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
    _grow_tree(network, tree, waiting, ready)
    return tree


@kernel("tree", "waiting", "ready")
def _grow_tree(network: Network, tree: Tree, waiting: Integers, ready: Integers) -> None:
    """Fill the tree of the slow end.

    Args:
        network: the network.
        tree: changed in place.
        waiting: (nodes,) how many arcs lead to each node; changes.
        ready: (nodes,) begins with the source; changes.
    """
    raise NotImplementedError


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


@kernel("tree", "flow", "walker", "times", "powers")
def _advance(
    network: Network,
    tree: Tree,
    flow: Integers,
    walker: _Walker,
    target: int,
    times: Integers,
    powers: Integers,
    most_times: int,
) -> int:
    """Move tree and flow along the frontier from `times[0]` down to `target`, to its fast end, or
    until `times` is full.

    `times` gets the total times at which the walk arrives, falling, and `powers`, whose first one
    is the flow so far, the power just below each: the frontier's slope between one time and the
    next is minus that power. Below a time with UNLIMITED power nothing is feasible. Returns how
    many times there are, at most `most_times`.
    """
    raise NotImplementedError


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
        # A full record means that the kernel stopped half-way: it goes on from there.
        while count == _MOST_STEPS:
            # The kernel reads where it stands from the first entry.
            part[:, 0] = times[-1], powers[-1]
            count = _advance(network, tree, flow, walker, target, part[0], part[1], _MOST_STEPS)
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
        # In the middle of a round the source's side is not up to date: each piece of it lags by
        # what the sink's side moved since it was taken in.
        sizes = np.diff(walker.piece[:pieces], append=reached)
        event[walker.side[:reached]] += moved - np.repeat(walker.piece_moved[:pieces], sizes)
    event -= event[network.source]
    return event
