"""Search small problems for their best choice of operating points, by labels.

A *label* is a choice of points for the first computations in topological order: what they cost, and
when each computation that waits for one of them can start. What follows depends on nothing else, so
a label that costs no more than another, and lets everything start no later, makes the other one
superfluous (dynamic programming with dominance, as for shortest paths with resources: Desrochers
and Soumis 1988). A label is also superfluous if no completion of it can cost less than the best
plan known. By weak duality, any flow through the network bounds that: each computation to come
costs at least its cheapest point at the price of its time, and each start of a computation that
waits is worth the flow into it. Flows that are optimal for deadlines around the one that is asked
for bound labels that are early or late, so the largest of several bounds counts.

Where more labels are left than may be kept, those of the least bounds stay (beam search: Lowerre
1976), and the result is a good plan instead of the best one. Then the search is repeated from the
other end of the iteration, with other flows, and for parts of the problem: points next to those of
the best plan, and computations that run at about the same time, while all others keep theirs.

Limits are numbers of labels, never times, and all sums are in a fixed order: equal input, equal
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.mincut import slowest_tree, walk
from perseus_planner.solver.network import scaled_network
from perseus_planner.solver.point_problem import compute_ends

if TYPE_CHECKING:
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Floats, Integers
    from perseus_planner.solver.point_problem import PointProblem

MOST_NODES = 64  #: of a problem that is searched: the time grows with their number
# Chosen with the proved optima of `python benchmarks/run.py --only 45`.
_LABELS = 800  #: that are kept after each computation
_PART_LABELS = 400  #: in the search of a part of the problem
_WINDOW = 16  #: computations that are chosen together, at about the same time
_AROUND = (0.98, 1.0, 1.02)  #: deadlines of the flows, as multiples of the one that is asked for
_ROUNDS = 4  #: of the searches of parts at most
_COMPARED = 32  #: labels with which all others are compared after each computation
_CANDIDATES = 3  #: labels that are compared at most, for each one that may be kept
_WORTH = 1e-6  #: a plan is better if it costs so much less, as a part of what all points cost
_ROUNDING = 1e-10  #: part of a deadline, more than the rounding errors of a sum of durations

Waits = list[list[tuple[int, float]]]


class _Prices(NamedTuple):
    """Flows through the network that are optimal for some deadlines."""

    node_w: Floats  #: (flows, n) through each node
    wait_w: dict[tuple[int, int], Floats]  #: (before, after) -> (flows,) through each wait
    first_w: Floats  #: (flows, n) from the source to each node
    last_w: Floats  #: (flows, n) from each node to the sink

    def only(self, flow: int) -> _Prices:
        """Return one of the flows alone."""
        one = slice(flow, flow + 1)
        waits_w = {wait: each_w[one] for wait, each_w in self.wait_w.items()}
        return _Prices(self.node_w[one], waits_w, self.first_w[one], self.last_w[one])

    def backwards(self) -> _Prices:
        """Return the flows from the sink to the source."""
        waits_w = {(after, before): each_w for (before, after), each_w in self.wait_w.items()}
        return self._replace(wait_w=waits_w, first_w=self.last_w, last_w=self.first_w)


class _Order(NamedTuple):
    """What is chosen first, and what waits for what: forwards in time, or backwards."""

    nodes: range  #: topological
    before: Waits
    after: Waits


class _Labels(NamedTuple):
    """The labels after a computation."""

    cost_j: Floats  #: (labels,) of the points chosen so far
    #: node that waits -> (labels,) its earliest start
    start_s: dict[int, Floats]

    def take(self, some: Integers) -> _Labels:
        start_s = {node: each_s[some] for node, each_s in self.start_s.items()}
        return _Labels(self.cost_j[some], start_s)


class _Found(NamedTuple):
    chosen: Integers | None  #: (n,) points that cost less than what was known, if any were found
    is_best: bool  #: whether no others cost less


class LabelSearch:
    """A small problem with what its searches have in common.

    Args:
        dag: the iteration.
        problem: `point_problem(dag)`.
        deadline_s: seconds without the overhead; at least what the fastest points take.
        effort: part of the labels that may be kept.
    """

    def __init__(
        self, dag: PipelineDag, problem: PointProblem, deadline_s: float, effort: float = 1.0
    ) -> None:
        self._problem = problem
        self._deadline_s = deadline_s
        self._effort = effort
        self._prices = _prices(dag, deadline_s)
        count = len(problem.member)
        before = _waits(problem.before_start, problem.before, problem.before_lag_s)
        after = _waits(problem.after_start, problem.after, problem.after_lag_s)
        self._forwards = _Order(range(count), before, after)
        self._backwards = _Order(range(count - 1, -1, -1), after, before)
        starts = problem.point_start.tolist()
        of_class = [np.arange(first, stop) for first, stop in pairwise(starts)]
        self._points = [of_class[member] for member in problem.member.tolist()]
        # A gain counts against what all points cost at most, so that rounding errors are none.
        dearest_j = [float(np.abs(problem.cost_j[points]).max()) for points in self._points]
        self._worth_j = _WORTH * sum(dearest_j)

    def improve(self, chosen: Integers) -> Integers:
        """Return the best points found, which cost no more than `chosen`, (n,), a plan in time."""
        best = chosen
        labels = max(1, round(self._effort * _LABELS))
        # One flow ranks labels otherwise than the largest bound of several: which is better
        # differs from problem to problem.
        nominal = self._prices.only(int(np.argmin(np.abs(np.array(_AROUND) - 1.0))))
        for prices in (nominal, self._prices):
            for order in (self._forwards, self._backwards):
                outcome = self._search(order, prices, self._points, best, labels)
                best = best if outcome.chosen is None else outcome.chosen
                if outcome.is_best:
                    return best
        part_labels = max(1, round(self._effort * _PART_LABELS))
        for _ in range(_ROUNDS):
            before = best
            for order, free in self._parts(best):
                # A computation that may choose nothing keeps its point.
                points = [
                    own_points[near] if near.any() else best[k : k + 1]
                    for k, (own_points, near) in enumerate(zip(self._points, free, strict=True))
                ]
                outcome = self._search(order, nominal, points, best, part_labels)
                best = best if outcome.chosen is None else outcome.chosen
            if best is before:
                break
        return best

    def _parts(self, chosen: Integers) -> Iterator[tuple[_Order, list[Integers]]]:
        """Yield parts of the problem around a plan: the direction of the search, and which points
        of each computation it may choose; none where the computation keeps its point.
        """
        near = [
            np.abs(node_points - k) <= 1
            for node_points, k in zip(self._points, chosen.tolist(), strict=True)
        ]
        yield self._forwards, near
        yield self._backwards, near
        end_s = np.empty(len(chosen))
        compute_ends(self._problem, chosen, end_s)
        # Windows overlap by half: what runs side by side is in one of them together.
        in_time = np.argsort(end_s, kind="stable")
        for first in range(0, len(chosen) - _WINDOW // 2, _WINDOW // 2):
            window = set(in_time[first : first + _WINDOW].tolist())
            yield (
                self._forwards,
                [
                    np.full(len(node_points), k in window)
                    for k, node_points in enumerate(self._points)
                ],
            )

    def _search(
        self,
        order: _Order,
        prices: _Prices,
        points: Sequence[Integers],
        known: Integers,
        most: int,
    ) -> _Found:
        """Return points that cost less than those of the `known` plan.

        Args:
            order: the direction.
            prices: the flows of the bound.
            points: those that each node may have.
            known: (n,) the best plan so far.
            most: labels that may be kept.
        """
        problem = self._problem
        prices = prices if order is self._forwards else prices.backwards()
        time_s = [problem.time_s[node_points] for node_points in points]
        cost_j = [problem.cost_j[node_points] for node_points in points]
        earliest_s, latest_s = self._limits(order, time_s)
        # The least that each node costs, at the price of its time.
        least_j = np.array(
            [
                np.min(cost + node_w[:, None] * time, axis=1)
                for cost, time, node_w in zip(cost_j, time_s, prices.node_w.T, strict=True)
            ]
        )
        # What flows to the sink from a node pays for a time of at most the deadline.
        least_j -= prices.last_w.T * self._deadline_s
        to_come_j = least_j.sum(axis=0)
        known_j = float(problem.cost_j[known].sum()) - self._worth_j
        labels = _Labels(np.zeros(1), {})
        into_w: dict[int, Floats] = {}  # node that waits -> flow from what has been chosen
        came: list[tuple[Integers, Integers]] = []
        is_best = True
        for k in order.nodes:
            # Each label with each point that is in time.
            start_s = labels.start_s.pop(k, np.full(len(labels.cost_j), earliest_s[k]))
            into_w.pop(k, None)
            ends_s = start_s[:, None] + time_s[k]
            parent, point = np.nonzero(ends_s <= latest_s[k])
            labels = labels.take(parent)
            labels.cost_j[:] += cost_j[k][point]
            end_s = ends_s[parent, point]
            for other, lag_s in order.after[k]:
                before_s = labels.start_s.get(other, earliest_s[other])
                labels.start_s[other] = np.maximum(before_s, end_s + lag_s)
                into_w[other] = into_w.get(other, 0.0) + prices.wait_w[k, other]
            # Those that may become better than the known plan, most promising ones first.
            to_come_j = to_come_j - least_j[k]
            bound_j = _bounds_j(labels, into_w, to_come_j)
            some = np.flatnonzero(bound_j < known_j)
            some = some[np.argsort(bound_j[some], kind="stable")]
            is_best = is_best and len(some) <= _CANDIDATES * most
            some = some[: _CANDIDATES * most]
            some = some[_undominated(labels.take(some))]
            is_best = is_best and len(some) <= most
            some = some[:most]
            if not len(some):
                return _Found(None, is_best)
            labels = labels.take(some)
            # For the way back: the label that each came from, and the point that it chose.
            came.append((parent[some], point[some]))
        chosen = known.copy()
        label = int(np.argmin(labels.cost_j))  # the cheapest complete one
        for k, own_point in _way_back(order, came, label):
            chosen[k] = points[k][own_point]
        # What fits exactly may miss by a rounding error.
        if compute_ends(problem, chosen, np.empty(len(chosen))) > self._deadline_s:
            return _Found(None, is_best=False)
        return _Found(chosen, is_best)

    def _limits(self, order: _Order, time_s: Sequence[Floats]) -> tuple[list[float], list[float]]:
        """Return the earliest start and the latest end of each node, seconds."""
        fastest_s = [float(own_s.min()) for own_s in time_s]
        earliest_s = [0.0] * len(time_s)
        latest_s = [0.0] * len(time_s)
        for k in order.nodes:
            ends = (earliest_s[i] + fastest_s[i] + lag_s for i, lag_s in order.before[k])
            earliest_s[k] = max(ends, default=0.0)
        last_s = self._deadline_s * (1 + _ROUNDING)
        for k in reversed(order.nodes):
            starts = (latest_s[i] - fastest_s[i] - lag_s for i, lag_s in order.after[k])
            latest_s[k] = min(starts, default=last_s)
        return earliest_s, latest_s


def _way_back(
    order: _Order, came: Sequence[tuple[Integers, Integers]], label: int
) -> Iterator[tuple[int, int]]:
    """Yield each node, last one first, and which of its points a complete label has chosen.

    Args:
        order: the direction of the search.
        came: for each node, (labels,) the label before that each came from, and its point.
        label: the label after the last node.
    """
    for k, (parent, point) in zip(reversed(order.nodes), reversed(came), strict=True):
        yield k, int(point[label])
        label = int(parent[label])


def _bounds_j(labels: _Labels, into_w: dict[int, Floats], to_come_j: Floats) -> Floats:
    """Return the least that a completion of each label costs, joules."""
    most_j: Floats = np.full(len(labels.cost_j), -np.inf)
    for flow, rest_j in enumerate(to_come_j.tolist()):
        bound_j = labels.cost_j + rest_j
        for node, start_s in labels.start_s.items():
            bound_j += into_w[node][flow] * start_s
        np.maximum(most_j, bound_j, out=most_j)
    return most_j


def _undominated(labels: _Labels) -> Integers:
    """Return the labels that none of the first ones makes superfluous, nor an equal one; in
    order.
    """
    values = np.array([labels.cost_j, *labels.start_s.values()])
    if len(values) == 1:
        return np.array([np.argmin(labels.cost_j)] if len(labels.cost_j) else [], dtype=np.int64)
    # Of those that let everything start at equal times, the cheapest one.
    order = np.lexsort(values)
    is_kept = np.ones(len(order), dtype=np.bool_)
    equal = (values[1:, order[1:]] == values[1:, order[:-1]]).all(axis=0)
    is_kept[order[1:][equal]] = False
    some = np.flatnonzero(is_kept)
    values = values[:, some]
    is_kept = np.ones(len(some), dtype=np.bool_)
    # Most are beaten by one of the most promising, so only these are compared with all: the time
    # stays linear.
    for i in range(min(_COMPARED, len(some))):
        if is_kept[i]:
            is_kept &= (values < values[:, i : i + 1]).any(axis=0)
            is_kept[i] = True
    return some[is_kept]


def _prices(dag: PipelineDag, deadline_s: float) -> _Prices:
    """Return the flows of the relaxed problem's optima for deadlines around this one."""
    scaled = scaled_network(dag)
    count = len(dag.order)
    network = scaled.network
    tree = slowest_tree(scaled.network)
    slowest = int(tree.event[network.sink])
    targets = [min(slowest, int(part * deadline_s / scaled.tick_s)) for part in _AROUND]
    flows = {}
    falling = sorted(set(targets), reverse=True)
    for target, step in zip(
        (slowest, *falling), walk(network, [slowest, *falling], tree), strict=False
    ):
        flows[target] = step.state.flow * scaled.power_unit_w
    # The walk ends where nothing is faster: the flow there is that of all shorter times.
    fastest_w = flows[min(flows)]
    flow_w = np.array([flows.get(target, fastest_w) for target in targets])
    heads = network.head.tolist()
    tails = network.tail.tolist()
    # Node 2k starts, and node 2k + 1 ends, the k-th in the order: half of a number is k.
    waits = {
        (tails[arc] // 2, heads[arc] // 2): flow_w[:, arc]
        for arc in range(count, len(heads))
        if tails[arc] != network.source and heads[arc] != network.sink
    }
    # What enters at each node, and what leaves from it.
    first_w, last_w = np.zeros((2, len(flow_w), count))
    first = network.tail == network.source
    last = network.head == network.sink
    first_w[:, network.head[first] // 2] = flow_w[:, first]
    last_w[:, network.tail[last] // 2] = flow_w[:, last]
    return _Prices(flow_w[:, :count], waits, first_w, last_w)


def _waits(start: Integers, others: Integers, lags_s: Floats) -> Waits:
    """Return the neighbours of each node, with the least seconds between."""
    other = others.tolist()
    lag_s = lags_s.tolist()
    return [list(zip(other[a:b], lag_s[a:b], strict=True)) for a, b in pairwise(start.tolist())]
