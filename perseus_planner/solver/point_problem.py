"""The discrete problem of a plan, laid out in arrays for kernels: which operating point each
computation takes. And a tighter bound for it than the relaxed one: what the distance between
operating points costs where two ranks are in step.

For any plan, and any flow that is optimal for the relaxed problem, weak duality gives the plan's
distance from the relaxed bound as a sum of parts that are never negative:

* for each node, how much its point costs above the best one at the node's price, time included;
* for each wait, the flow through it times the time by which the next node starts later than it
  must.

Where two nodes that end are followed by the same two nodes, these start together: a *meeting* of
two ranks. In 1F1B two neighbours meet once for each microbatch, and each runs two computations from
one meeting to the next. So both pairs take equally long, or the shorter one waits, at the price of
its flow. The cheapest such four points, of all that there are, cost something if no pair of one
rank is as long as a cheap pair of the other one. These costs are summed over disjoint fours: ranks
in disjoint pairs, all their microbatches. This is Lagrangian decomposition (Guignard and Kim 1987)
with the multipliers of the relaxed problem. Alike stages meet at no cost, so there the bound is
hardly tighter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import kernel

if TYPE_CHECKING:
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.schedules.iteration import Iteration
    from perseus_planner.solver.network import Floats, Integers


class PointProblem(NamedTuple):
    """The discrete problem: n nodes in topological order; all nodes of a class have the same
    points.
    """

    member: Integers  #: (n,) class of each node
    point_start: Integers  #: (classes + 1,) where the points of each class begin, fastest first
    time_s: Floats  #: (points,)
    cost_j: Floats  #: (points,) effective energy, falling within a class
    gain_w: Floats  #: (points,) the most that any slower point saves per second
    loss_w: Floats  #: (points,) the least that any faster point costs per second
    kind: Integers  #: (classes,) number of the kind of each class
    before_start: Integers  #: (n + 1,) where the predecessors of each node begin in `before`
    before: Integers  #: the predecessors of all nodes
    before_lag_s: Floats  #: aligned with `before`: least seconds from their end to the node's start
    after_start: Integers  #: (n + 1,) where the successors of each node begin in `after`
    after: Integers  #: the successors of all nodes
    after_lag_s: Floats  #: aligned with `after`: least seconds from the node's end to their start


def point_problem(dag: PipelineDag) -> PointProblem:
    """Lay out the nodes of `dag` for the kernels, in `dag.order`."""
    keys = list(dag.points)
    number = {key: i for i, key in enumerate(keys)}
    member = [number[dag.keys[place]] for place in dag.order]
    start = np.cumsum([0, *(len(dag.points[key]) for key in keys)])
    time_s = np.array([point.time_s for key in keys for point in dag.points[key]])
    cost_j = np.array([point.effective_j for key in keys for point in dag.points[key]])
    gain_w = np.zeros_like(time_s)
    loss_w = np.full_like(time_s, np.inf)
    # The best slope to any slower point, and to any faster one: where dispatching may stop.
    for first, stop in pairwise(start.tolist()):
        for i in range(first, stop):
            gain_w[i] = max(
                (cost_j[i] - cost_j[i + 1 : stop]) / (time_s[i + 1 : stop] - time_s[i]), default=0.0
            )
            loss_w[i] = min(
                (cost_j[first:i] - cost_j[i]) / (time_s[i] - time_s[first:i]), default=np.inf
            )
    # Rounding changes all classes of a kind together.
    kinds = list(dict.fromkeys(key.name for key in keys))
    kind = np.array([kinds.index(key.name) for key in keys])
    return PointProblem(
        np.array(member), start, time_s, cost_j, gain_w, loss_w, kind, *lay_out_waits(dag.iteration)
    )


@lru_cache(maxsize=1)
def lay_out_waits(
    iteration: Iteration,
) -> tuple[Integers, Integers, Floats, Integers, Integers, Floats]:
    """Return what each node of `iteration.order` waits for, and what waits for it, as the last six
    fields of `PointProblem`.
    """
    rank = {place: k for k, place in enumerate(iteration.order)}
    before = [
        [(rank[other], lag_s) for other, lag_s in iteration.waits[place]]
        for place in iteration.order
    ]
    after: list[list[tuple[int, float]]] = [[] for _ in before]
    for k, others in enumerate(before):
        for other, lag_s in others:
            after[other].append((k, lag_s))
    return *_flat(before), *_flat(after)


def _flat(lists: Sequence[Sequence[tuple[int, float]]]) -> tuple[Integers, Integers, Floats]:
    start = np.cumsum([0, *(len(entries) for entries in lists)], dtype=np.int64)
    entries = [entry for entries in lists for entry in entries]
    return (
        start,
        np.array([k for k, _ in entries], dtype=np.int64),
        np.array([lag_s for _, lag_s in entries]),
    )


@kernel("end_s")
def compute_ends(problem: PointProblem, chosen: Integers, end_s: Floats) -> float:
    """Fill `end_s` with the end of each node under the `chosen` points; return the makespan,
    seconds.
    """
    raise NotImplementedError


PRICE_ROUNDING = 2.0**-22  #: relative; more than three times the rounding error of a 32-bit price


class Window(NamedTuple):
    """Four nodes of two ranks between two meetings."""

    first: tuple[int, int]  #: the nodes of one rank, in order
    second: tuple[int, int]  #: those of the other one
    ranks: tuple[int, int]  #: the lower one first
    lags_s: tuple[float, float]  #: least seconds between both nodes of each rank
    loose_s: float  #: by how much the lengths of both may differ without a wait, because of lags


class _Meeting(NamedTuple):
    ending: frozenset[int]
    starting: frozenset[int]
    spread_s: float  #: the longest lag less the shortest one


def point_bound_gain_j(problem: PointProblem, windows: Sequence[Window], price_w: Floats) -> float:
    """Return how much more than the relaxed bound any plan of operating points costs at least,
    joules.

    Args:
        problem: the problem.
        windows: those of `find_windows`.
        price_w: (n,) the flow through each node in an optimum of the relaxed problem; may be
            rounded to 32 bits.
    """
    gains_j: dict[tuple[int, int], float] = defaultdict(float)
    if windows:
        nodes = np.array([(*window.first, *window.second) for window in windows])
        lags_s = np.array([(*window.lags_s, window.loose_s) for window in windows])
        # Microbatches often have equal prices: one example stands for all windows of its kind.
        alike = np.hstack([problem.member[nodes], price_w[nodes], lags_s])
        _, example, kind = np.unique(alike, axis=0, return_index=True, return_inverse=True)
        least_j = [_least_j(problem, windows[i], price_w) for i in example.tolist()]
        for window, i in zip(windows, kind.ravel().tolist(), strict=True):
            gains_j[window.ranks] += least_j[i]
    return _best_of_disjoint(gains_j)


def find_windows(problem: PointProblem, rank_of: Sequence[int]) -> list[Window]:
    """Return all windows between meetings of neighbouring ranks; each node is in one at most for
    each pair of ranks.

    Args:
        problem: the problem.
        rank_of: (n,) the rank of each node.
    """
    before = _neighbours(problem.before_start, problem.before, problem.before_lag_s)
    after = _neighbours(problem.after_start, problem.after, problem.after_lag_s)
    starting_of: dict[int, _Meeting] = {}
    ending_of: dict[int, _Meeting] = {}
    for k, waits in enumerate(before):
        ending = frozenset(waits)
        if k in starting_of or len(ending) != 2:
            continue
        starting = frozenset(after[min(ending)])
        # A meeting: both ends lead to just these starts, and these wait for nothing else.
        if all(after[i].keys() == starting for i in ending) and all(
            before[i].keys() == ending for i in starting
        ):
            each_s = [lag_s for i in starting for lag_s in before[i].values()]
            meeting = _Meeting(ending, starting, max(each_s) - min(each_s))
            starting_of |= dict.fromkeys(starting, meeting)
            ending_of |= dict.fromkeys(ending, meeting)
    # Used: the lower of the two ranks, node
    windows = list[Window]()
    used = set[tuple[int, int]]()
    for meeting in dict.fromkeys(starting_of.values()):
        # Two computations in a row on one rank, from this meeting to a later one, with no third
        # party between them but at a meeting.
        pairs = [
            (i, j)
            for i in sorted(meeting.starting)
            for j in after[i]
            if rank_of[i] == rank_of[j]
            and j in ending_of
            and (i in ending_of or len(after[i]) == 1)
        ]
        # Neighbouring ranks from the same meeting to the same meeting, and no node twice.
        for first, second in combinations(pairs, 2):
            low, high = sorted((rank_of[first[0]], rank_of[second[0]]))
            nodes = {(low, node) for node in (*first, *second)}
            if high == low + 1 and ending_of[first[1]] is ending_of[second[1]] and not nodes & used:
                used |= nodes
                between = (ending_of[i].spread_s for i, _ in (first, second) if i in ending_of)
                loose_s = meeting.spread_s + ending_of[first[1]].spread_s + 2 * sum(between)
                lags_s = (after[first[0]][first[1]], after[second[0]][second[1]])
                windows.append(Window(first, second, (low, high), lags_s, loose_s))
    return windows


def _neighbours(start: Integers, others: Integers, lags_s: Floats) -> list[dict[int, float]]:
    bounds = start.tolist()
    other = others.tolist()
    lag_s = lags_s.tolist()
    return [dict(zip(other[a:b], lag_s[a:b], strict=True)) for a, b in pairwise(bounds)]


def _least_j(problem: PointProblem, window: Window, price_w: Floats) -> float:
    """Return the least cost of a window's four points, and of the shorter pair's wait, above the
    best, joules.
    """
    length_s, cost_j = _pairs(problem, window.first, price_w, window.lags_s[0])
    other_s, other_j = _pairs(problem, window.second, price_w, window.lags_s[1])
    # Which of its two nodes waits is open, so the smaller flow counts, and the bound stays one.
    wait_w = float(price_w[list(window.first)].min())
    other_wait_w = float(price_w[list(window.second)].min())
    least_j = np.inf
    # Cheap pairs first: what costs more alone than these do together needs no look.
    for most_j in (0.0, np.inf):
        mine = cost_j <= min(most_j, least_j)
        others = other_j <= min(most_j, least_j)
        longer_s = np.subtract.outer(length_s[mine], other_s[others])
        # The shorter pair waits for the longer one, but for what lags let pass, at the price of its
        # flow.
        wait_j = np.maximum(
            other_wait_w * (longer_s - window.loose_s), wait_w * (-longer_s - window.loose_s)
        )
        least_j = min(
            least_j,
            float((np.add.outer(cost_j[mine], other_j[others]) + np.maximum(wait_j, 0.0)).min()),
        )
    # Prices are 32-bit numbers: the bound gives away what their rounding may have added.
    rounding_j = PRICE_ROUNDING * max(map(float, price_w[[*window.first, *window.second]]))
    return max(least_j - rounding_j * float(max(length_s.max(), other_s.max())), 0.0)


def _pairs(
    problem: PointProblem, nodes: tuple[int, int], price_w: Floats, lag_s: float
) -> tuple[Floats, Floats]:
    """Return the length of each choice of two points, with the lag, and how much it costs above
    the best, J.
    """
    times_s = []
    costs_j = []
    for k in nodes:
        points = slice(*problem.point_start[problem.member[k] : problem.member[k] + 2])
        cost_j = problem.cost_j[points] + price_w[k] * problem.time_s[points]
        times_s.append(problem.time_s[points])
        costs_j.append(cost_j - cost_j.min())
    return (np.add.outer(*times_s) + lag_s).ravel(), np.add.outer(*costs_j).ravel()


def _best_of_disjoint(gains_j: dict[tuple[int, int], float]) -> float:
    """Return the largest sum of gains of neighbouring ranks (rank, rank + 1) that have no rank
    in common.
    """
    best = {-1: 0.0, 0: 0.0}  # of the ranks up to each
    for rank in range(1, 1 + max((high for _, high in gains_j), default=0)):
        # Either this rank is in no pair with the one before it, or both are out of all others.
        best[rank] = max(best[rank - 1], best[rank - 2] + gains_j.get((rank - 1, rank), 0.0))
    return max(best.values())
