"""Lay out an iteration as the project network that the solver walks, in whole numbers, with their
units.

This module holds data only; the kernels that walk it are in `mincut`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.measurement import OperatingPoint, lower_hull

if TYPE_CHECKING:
    from perseus_planner.profiles.keys import Key
    from perseus_planner.schedules.dag import PipelineDag

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: vertex times, ticks, slowest first; and the slope from the next slower vertex to each, watts
_Hull = tuple[list[int], list[Fraction]]

UNLIMITED = 2**62  #: more than any flow or time, which are at most 2**60
_TIME_BITS = 60  #: all durations together are at most 2**60 ticks, and so is any time
_POWER_BITS = 60  #: all slopes together are at most 2**60 units, and so is any flow
_ENERGY_BITS = 62
#: nodes up to which slopes are exact; more have coarse ones, as the walk would take minutes
_MOST_EXACT = 4096
_COARSE = 5  #: a coarse unit of power is at most the mean slope / 2**5
#: closer than any clock measures, relative: a slope between such times would drown all others
_SAME_TIME = 2.0**-30


class Network(NamedTuple):
    """A project network: arcs with convex costs, from `source` to `sink`. It never changes.

    Each arc has two residual arcs, one from its tail (raises its flow) and one from its head
    (lowers it), kept node by node: those that leave node v are `start[v]` to `start[v + 1]`.
    """

    source: int
    sink: int
    tail: Integers  #: (arcs,) node
    head: Integers  #: (arcs,) node
    first: Integers  #: (arcs,) index of the slowest vertex of the arc's curve
    last: Integers  #: (arcs,) index of the fastest vertex
    vertex_time: Integers  #: (vertices,) ticks
    vertex_slope: Integers  #: (vertices,) power units
    start: Integers  #: (nodes + 1,)
    #: (2 * arcs,) `arc` where it leaves the tail, `~arc` where it leaves the head
    residual: Integers
    other: Integers  #: (2 * arcs,) the node at its far end
    raising: Integers  #: (arcs,) where the residual arc from the tail stands
    lowering: Integers  #: (arcs,) where the one from the head stands


class State(NamedTuple):
    """An optimal pair of event times and flow for one total time. The kernels move it along the
    frontier.
    """

    event: Integers  #: (nodes,) ticks
    flow: Integers  #: (arcs,) power units


class Guides(NamedTuple):
    """Relaxed solutions along the frontier, from its slow end to its fast one: what plans near
    them are made from.
    """

    time_s: Floats  #: (guides,) replayed iteration time, falling
    end_s: NDArray[np.floating]  #: (guides, n) when each node of `dag.order` ends
    price_w: NDArray[np.float32]  #: (guides, n) price of each node's time


@dataclass(frozen=True)
class ScaledNetwork:
    """A network and its units, which are powers of two so that scaling is exact.

    Node 2k is the start and 2k + 1 the end of the k-th node of `dag.order`, whose arc is arc k.
    """

    network: Network  #: the network that `mincut` solves
    tick_s: float  #: seconds of a tick
    power_unit_w: float  #: watts of a unit of slope and flow


def scaled_network(dag: PipelineDag) -> ScaledNetwork:
    """Make an arc of every computation, along the lower hull of its points, and of every wait, as
    long as its lag.

    Raises:
        ProfileError: If the measurements are so large or small that floats cannot hold their sums
            or units.
    """
    members = [dag.keys[place] for place in dag.order]
    try:
        hulls, tick_s, power_unit_w = _hulls_and_units(dag, members)
    except (OverflowError, ZeroDivisionError) as error:
        raise ProfileError(
            "measurements: are too large or too small to plan with; give seconds and joules"
        ) from error

    tail, head, lags = _ends(dag, tick_s)
    # The vertices of all curves, one curve after the other. The first is a wait without a lag.
    times = [0]
    slopes = [0]
    spans: dict[Key, tuple[int, int]] = {}
    for key, (hull_times, hull_slopes) in hulls.items():
        spans[key] = (len(times), len(times) + len(hull_times) - 1)
        times += hull_times
        slopes += [round(slope / Fraction(power_unit_w)) for slope in hull_slopes]
    # A wait is an arc of one vertex, its lag; equal lags share it.
    waits = {0: 0}
    for ticks in sorted(set(lags) - {0}):
        waits[ticks] = len(times)
        times.append(ticks)
        slopes.append(0)
    # In the order of `_ends`: nodes, waits, and the arcs of source and sink.
    first = [spans[key][0] for key in members] + [waits[ticks] for ticks in lags]
    last = [spans[key][1] for key in members] + [waits[ticks] for ticks in lags]

    source = 2 * len(members)
    network = make_network(
        source,
        source + 1,
        ends=(_integers(tail), _integers(head)),
        span=(_integers(first), _integers(last)),
        curves=(_integers(times), _integers(slopes)),
    )
    return ScaledNetwork(network, tick_s, power_unit_w)


def _hulls_and_units(
    dag: PipelineDag, members: Sequence[Key]
) -> tuple[dict[Key, _Hull], float, float]:
    """Return the curve of each key, the seconds of a tick and the watts of a unit of slope.

    Args:
        dag: The iteration.
        members: The key of each node of `dag.order`.

    Raises:
        OverflowError, ZeroDivisionError: If floats cannot hold a sum or a unit.
    """
    longest_s = [dag.points[key][-1].time_s for key in members]
    # No path is longer than all that there is, so no event time overflows.
    all_s = math.fsum([*longest_s, *map(math.fsum, dag.iteration.lags_s)])
    tick_s = _power_of_two(all_s, _TIME_BITS)
    hulls = {key: _hull(dag.points[key], tick_s) for key in dict.fromkeys(members)}
    # Nor does a flow: a cut carries at most the steepest slope of every arc.
    steepest_w = math.fsum(float(hulls[key][1][-1]) for key in members)
    power_unit_w = _power_of_two(steepest_w, _POWER_BITS) if steepest_w else 1.0
    # Coarse slopes from below keep every bound a bound, and the walk has fewer steps.
    if len(members) > _MOST_EXACT:
        power_unit_w = max(power_unit_w, _coarse_unit_w(hulls, Counter(members)))
        hulls = {key: _below(hull, Fraction(power_unit_w)) for key, hull in hulls.items()}
    # An overflow of this sum is refused here, not later.
    math.fsum(dag.points[key][0].energy_j for key in members)
    return hulls, tick_s, power_unit_w


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)


def _coarse_unit_w(
    hulls: Mapping[Key, _Hull],
    counts: Mapping[Key, int],
) -> float:
    """Return the largest power of two that is at most 2**-_COARSE of the mean slope of all
    curves, watts.
    """
    cost = Fraction(0)
    span = 0
    for key, (times, slopes) in hulls.items():
        cost += counts[key] * sum(
            w * (a - b) for w, (a, b) in zip(slopes[1:], pairwise(times), strict=True)
        )
        span += counts[key] * (times[0] - times[-1])
    mean_w = float(cost / max(span, 1))
    return math.ldexp(1.0, math.frexp(mean_w)[1] - 1 - _COARSE) if mean_w else 0.0


def _below(hull: _Hull, unit_w: Fraction) -> _Hull:
    """Return the highest convex curve below a hull whose slopes are whole multiples of `unit_w`,
    watts.

    It consists of the lines that touch the hull and have such slopes. So the least cost on it is a
    lower bound of the least cost on the hull, and they differ by the square of the unit, not by the
    unit.

    An example: a hull from 4 ticks to 0 whose slope is 1.5 units costs 6 at its end. The lines of
    slope 1 from its slow end and of slope 2 through its fast end meet at 2 ticks. So the lower
    curve costs 2 there, and not 3, and as much as the hull at both ends.

    ```
    ticks        4    2    0     vertices                  slopes
    hull         0    3    6     4 and 0                   -, 1.5
    lower curve  0    2    6     4, 2 (added) and 0        -, 1, 2
    ```
    """
    times, slopes = hull
    steep = [slope / unit_w for slope in slopes]
    lower_times = list[int]()
    lower_slopes = list[Fraction]()
    line = 0
    # The hull's cost here, and where it was touched last
    cost = Fraction(0)
    touched = (Fraction(0), times[0])
    for vertex, time in enumerate(times):
        if vertex:
            cost += steep[vertex] * (times[vertex - 1] - time)
        flattest = math.ceil(steep[vertex])
        steepest = math.floor(steep[vertex + 1]) if vertex + 1 < len(times) else None
        if steepest is not None and flattest > steepest:
            continue  # no such line touches the hull here: the slopes lie between two multiples
        # The line so far meets the first one that touches here, which adds a vertex.
        if flattest > line:
            meeting = cost - touched[0] + flattest * time - line * touched[1]
            lower_times.append(round(meeting / (flattest - line)))
            lower_slopes.append(line * unit_w)
        # Several of these lines touch at this vertex, so the lower curve has it as well.
        if steepest != flattest:
            lower_times.append(time)
            lower_slopes.append(flattest * unit_w)
        touched = (cost, time)
        line = steepest or 0
    return lower_times, lower_slopes


def _power_of_two(total: float, bits: int) -> float:
    """Return the least power of two that `total` is at most 2**bits multiples of."""
    mantissa, exponent = math.frexp(total)
    return math.ldexp(1.0, exponent - bits - (mantissa == 0.5))


def _hull(front: Sequence[OperatingPoint], tick_s: float) -> _Hull:
    """Return vertex times (ticks, slowest first), and the exact slope (watts) from the next
    slower vertex to each.
    """
    # Hulls are found in whole numbers, so that slopes are exact and convex.
    largest = max(abs(point.effective_j) for point in front)
    quantum_j = _power_of_two(largest, _ENERGY_BITS) if largest else 1.0
    points: dict[int, int] = {}
    time_s = 0.0
    ticks = 0
    for point in front:
        # Points closer than that share a tick; all others are at least one apart, however they
        # round.
        if point.time_s > time_s * (1 + _SAME_TIME):
            time_s = point.time_s
            ticks = max(ticks + 1, round(point.time_s / tick_s))
        # Of equal times the last point is the cheapest.
        points[ticks] = round(point.effective_j / quantum_j)
    hull = lower_hull(points.items())[::-1]
    watts = Fraction(quantum_j) / Fraction(tick_s)
    slopes = [Fraction(y - y0, x0 - x) * watts for (x0, y0), (x, y) in pairwise(hull)]
    return [x for x, _ in hull], [Fraction(0), *slopes]


def _ends(dag: PipelineDag, tick_s: float) -> tuple[list[int], list[int], list[int]]:
    """Return tail, head and lag (ticks) of every arc: nodes, then waits, then arcs from the
    source and to the sink.
    """
    rank = {place: k for k, place in enumerate(dag.order)}
    count = len(rank)
    tail = [2 * k for k in range(count)]
    head = [2 * k + 1 for k in range(count)]
    lags = []
    with_successor = set()
    # A wait leads from the end of one node to the start of another.
    for place, waits in enumerate(dag.iteration.waits):
        for other, lag_s in waits:
            tail.append(2 * rank[other] + 1)
            head.append(2 * rank[place])
            lags.append(round(lag_s / tick_s))
            with_successor.add(other)
    # The source starts what waits for nothing, and what nobody waits for leads to the sink.
    for place, before in enumerate(dag.predecessors):
        if not before:
            tail.append(2 * count)
            head.append(2 * rank[place])
        if place not in with_successor:
            tail.append(2 * rank[place] + 1)
            head.append(2 * count + 1)
    return tail, head, lags + [0] * (len(tail) - count - len(lags))


def make_network(
    source: int,
    sink: int,
    ends: tuple[Integers, Integers],
    span: tuple[Integers, Integers],
    curves: tuple[Integers, Integers],
) -> Network:
    """Make a network from its arcs, and index the residual arcs by node.

    Args:
        source: node without incoming arcs.
        sink: node without outgoing arcs.
        ends: `tail` and `head`.
        span: `first` and `last`.
        curves: `vertex_time` and `vertex_slope`.
    """
    tail, head = ends
    arcs = np.arange(len(tail), dtype=np.int64)
    node = np.concatenate([tail, head])
    order = np.argsort(node, kind="stable")
    start = np.zeros(int(node.max()) + 2, dtype=np.int64)
    np.cumsum(np.bincount(node), out=start[1:])
    place = np.empty_like(order)
    # The inverse of the order: where each residual arc went.
    place[order] = np.arange(len(order))
    residual = np.concatenate([arcs, ~arcs])[order]
    other = np.concatenate([head, tail])[order]
    return Network(
        source,
        sink,
        tail,
        head,
        *span,
        *curves,
        start,
        residual,
        other,
        place[: len(arcs)],
        place[len(arcs) :],
    )
