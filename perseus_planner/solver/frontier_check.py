"""Check the numbers of a frontier file before compiled code uses them, whose indices and loops rely on them.

A file may come from anyone, and its digest has no key. The graph in it is checked where it is made, in `Iteration`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.errors import FrontierError
from perseus_planner.solver.network import UNLIMITED, Integers, Network, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.solver.network import Checkpoint

_MOST = 2**60  #: no time or flow is larger
_HALF_BITS = 31  #: flows are summed in two halves, so that no sum overflows


def check_frontier(network: Network, times: Integers, powers: Integers, checkpoints: Sequence[Checkpoint]) -> None:
    """Check that the curve is convex, and each checkpoint an optimal state of `network` on it.

    Raises:
        FrontierError: If they are not; names the first field that is wrong.
    """
    for name, values in (("times", times), ("powers", powers)):
        _check(values.dtype == np.int64 and values.ndim == 1 and len(values) == len(times) > 0, name, "is not a list")
    _check(_within(times, _MOST) and bool((times[1:] < times[:-1]).all()), "times", "do not fall")
    rising = _within(powers[:-1], _MOST) and powers[-1] == UNLIMITED and bool((powers[1:] >= powers[:-1]).all())
    _check(rising, "powers", "do not rise")
    ends = [times[0] + 1, *(point.time for point in checkpoints)]
    falling = len(ends) > 1 and ends[1] == times[0] and all(after < before for before, after in pairwise(ends))
    _check(falling and ends[-1] >= times[-1], "checkpoints", "do not fall from the first of the times")
    for point in checkpoints:
        place = int(np.searchsorted(-times, -point.time, side="right")) - 1  # the last time that is not below
        above = place if times[place] > point.time else max(place - 1, 0)
        _check(int(powers[above]) * (place > 0) <= point.power <= int(powers[place]), "checkpoints", "are not on it")
        _check_state(network, point)


def _check_state(network: Network, point: Checkpoint) -> None:
    """Check that a state is feasible, and that its flow prices each arc as its curve does."""
    nodes, arcs = len(network.start) - 1, len(network.tail)
    for name, values, count in zip(("events", "flows"), point.state, (nodes, arcs), strict=True):
        shaped = values.dtype == np.int64 and values.shape == (count,)
        _check(shaped and _within(values, _MOST), name, "are not of this graph")
    event, flow = point.state
    spans = event[network.source] == 0 and event[network.sink] == point.time
    _check(bool(spans), "events", "do not last as long as their checkpoint")
    gap = event[network.head] - event[network.tail]
    _check(bool((gap >= network.vertex_time[network.last]).all()), "events", "are too close")
    least, most = _prices(network, gap)
    _check(bool(((least <= flow) & (flow <= most)).all()), "flows", "are not the prices of these times")
    net = _net_flow(network, State(event, flow))
    net[network.source] += point.power
    net[network.sink] -= point.power
    _check(not any(net), "flows", "are not kept from node to node")


def _prices(network: Network, gap: Integers) -> tuple[Integers, Integers]:
    """Return the least and the most flow of each arc whose end points are `gap` apart."""
    time, slope, first, last = network.vertex_time, network.vertex_slope, network.first, network.last
    level = first.copy()  # the vertex at or below the gap
    while (behind := (level < last) & (gap < time[level])).any():
        level[behind] += 1
    faster = np.where(level < last, slope[np.minimum(level + 1, last)], UNLIMITED)
    return slope[level], np.where(gap > time[level], slope[level], faster)


def _net_flow(network: Network, state: State) -> list[int]:
    """Return what flows into each node less what flows out of it."""
    low, high = (np.zeros(len(state.event), np.int64) for _ in range(2))
    for total, part in ((low, state.flow & (2**_HALF_BITS - 1)), (high, state.flow >> _HALF_BITS)):
        np.add.at(total, network.head, part)
        np.subtract.at(total, network.tail, part)
    return [(above << _HALF_BITS) + below for above, below in zip(high.tolist(), low.tolist(), strict=True)]


def _within(values: Integers, most: int) -> bool:
    return bool(((values >= 0) & (values <= most)).all())


def _check(is_right: bool, field: str, problem: str) -> None:
    if not is_right:
        raise FrontierError(f"{field}: {problem}")
