"""Plans of the batch: clocks for the very microbatches of one iteration, whose work is known before
it runs.

Where sequences differ in length, so do microbatches, and each iteration has another slowest
pipeline. The work of a microbatch is one number or a few, such as its tokens and the sum of its
squared lengths; the seconds of each (stage, kind) are affine in it (`Law`). Time and energy of a
computation scale alike, so an iteration is laid out once, and each batch only scales it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import COUNT, FINITE
from perseus_planner.profiles.keys import AnyKey, ByKey, Key
from perseus_planner.profiles.measurement import ClockChange, lower_hull, nearest_clock
from perseus_planner.solver.clock_problem import (
    ClockProblem,
    ClockState,
    change_cost,
    clock_problem_of,
    load_state,
    replay,
    replay_changes,
)
from perseus_planner.solver.kernels import kernel
from perseus_planner.solver.mincut import walk
from perseus_planner.solver.network import scaled_network
from perseus_planner.solver.point_problem import PointProblem, compute_ends, point_problem
from perseus_planner.solver.rounding import STIFFNESS, Guide, improve, point_step_s, try_all_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import OperatingPoint
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Floats, Integers, Network, ScaledNetwork

_LARGE = 256  #: nodes above which a walk takes long
_VERTICES = 8, 4  #: of a hull at most; for that many nodes, and for more
_FEW = 2**12  #: combinations of points up to which all are tried
_TIME_BITS = 60  #: all durations together are at most 2**60 ticks


class ScaledDag:
    """An iteration whose nodes can be scaled.

    Args:
        dag: the iteration, as measured.

    Raises:
        ProfileError: If the measurements cannot be scaled.
    """

    def __init__(self, dag: PipelineDag) -> None:
        # Few points, as a walk takes longer with each vertex of a hull.
        self._base = scaled_network(_thinned(dag, _VERTICES[len(dag.order) > _LARGE]))
        base = self._base.network
        count = len(dag.order)
        # Nodes have vertices of their own, though the base shares those of a class.
        spans = [np.arange(a, b + 1) for a, b in zip(base.first, base.last, strict=True)][:count]
        #: (vertices,) the vertex of the base, first those of each node, then all of the base, of
        #: which waits have theirs
        self._vertex = np.concatenate([*spans, np.arange(len(base.vertex_time))])
        start = np.cumsum([0, *map(len, spans)])
        #: (vertices of nodes,) the node of each
        self._vertex_node = np.repeat(np.arange(count), np.diff(start))
        # What is no node, such as a wait, keeps the vertices of the base, behind those of the
        # nodes.
        first = base.first + start[-1]
        last = base.last + start[-1]
        first[:count], last[:count] = start[:-1], start[1:] - 1
        self._network = base._replace(
            first=first, last=last, vertex_slope=base.vertex_slope[self._vertex]
        )
        self._follows = np.arange(len(self._vertex)) < start[-1]  # behind a slower vertex
        self._follows[first] = False
        # Checked once here, as scaling does not change the order of slopes.
        _check_slopes(self._network, self._follows)
        problem = point_problem(dag)
        # In the discrete problem too, each node has its own copy of the points of its class.
        sizes = np.diff(problem.point_start)[problem.member]
        point_start = np.cumsum([0, *sizes])
        point = np.arange(point_start[-1]) + np.repeat(
            problem.point_start[problem.member] - point_start[:-1], sizes
        )
        self._point_node = np.repeat(np.arange(count), sizes)
        #: every node is a class of its own
        self.points = problem._replace(
            member=np.arange(count),
            point_start=point_start,
            time_s=problem.time_s[point],
            cost_j=problem.cost_j[point],
            gain_w=problem.gain_w[point],
            loss_w=problem.loss_w[point],
            kind=problem.kind[problem.member],
        )
        self._is_small = math.prod(sizes.tolist()) <= _FEW
        clocks = [row.clock_mhz for key in dag.points for row in dag.points[key]]
        self.point_mhz = np.array(clocks)[point]  #: (points,)

    def scaled_points(self, scale: Floats) -> PointProblem:
        """Return the discrete problem of nodes that take `scale` times as long: (n,)."""
        factor = scale[self._point_node]
        return self.points._replace(
            time_s=self.points.time_s * factor, cost_j=self.points.cost_j * factor
        )

    def choose(
        self, problem: PointProblem, scale: Floats, deadline_s: float, tries: int
    ) -> Integers:
        """Return the point of each node in the best plan found.

        Args:
            problem: that of `scaled_points` for the scale.
            scale: (n,) of each node.
            deadline_s: seconds; at least what the fastest points take.
            tries: how many plans to make.

        Returns:
            (n,) indices of points; they meet the deadline if the fastest ones do.
        """
        # Points go from fast to slow, so these are the cheapest, and nothing is to be chosen if
        # they fit.
        chosen = problem.point_start[1:] - 1
        end_s = np.empty(len(scale))
        if compute_ends(problem, chosen, end_s) <= deadline_s:
            return chosen  # the slowest of each
        # Few combinations are all tried, which is exact.
        if self._is_small:
            return try_all_points(problem, deadline_s)
        # The relaxed optimum says when each node should end and what its time is worth.
        guide = self._relaxed(scale, deadline_s)
        # From the fastest points, which are in time if any are.
        chosen = problem.point_start[:-1].copy()
        improve(problem, deadline_s, guide, chosen, np.inf, tries, point_step_s(problem), True)
        return chosen

    def _relaxed(self, scale: Floats, deadline_s: float) -> Guide:
        """Return the relaxed optimum at a deadline: when each node ends, and the price of its
        time.
        """
        scaled = self._scaled(scale)
        # One deadline is asked for, so the walk has one step.
        step = next(walk(scaled.network, [int(deadline_s / scaled.tick_s)]))
        event = step.state.event
        flow = step.state.flow
        # Event 2k is the begin of node k, and 2k + 1 its end.
        end_s = np.asarray(event[1 : 2 * len(scale) : 2] * scaled.tick_s, dtype=np.float64)
        price_w = np.asarray(flow[: len(scale)] * scaled.power_unit_w, dtype=np.float64)
        return Guide(end_s, price_w, np.array(STIFFNESS))

    def _scaled(self, scale: Floats) -> ScaledNetwork:
        """Return the network with moved vertices, and the ticks in which its times still fit."""
        base = self._base
        network = self._network
        ticks = base.network.vertex_time[self._vertex].astype(np.float64)
        ticks[: len(self._vertex_node)] *= scale[self._vertex_node]
        # No path is longer than all nodes at their slowest, so sums of durations stay within 64
        # bits.
        longest = float(ticks[network.first].sum())
        fits = math.ldexp(1.0, min(0, _TIME_BITS - math.frexp(longest)[1]))
        # Rounded once, so that the network is one of integers and its cuts are exact.
        time = np.rint(ticks * fits).astype(np.int64)
        # Rounding may make neighbours equal, and a slope between equal times is not defined.
        falls = time[:-1] > time[1:]
        if not falls[self._follows[1:]].all():  # else the kernels would walk out of their arrays
            raise AssertionError("a scaled curve does not fall: please report this")
        return replace(base, network=network._replace(vertex_time=time), tick_s=base.tick_s / fits)


def _check_slopes(network: Network, follows: NDArray[np.bool_]) -> None:
    """Check what the kernels take for granted: slopes are 0 at the slow end, and rise."""
    slope = network.vertex_slope
    if slope[network.first].any() or not (slope[1:] > slope[:-1])[follows[1:]].all():
        raise AssertionError("a scaled curve is not convex: please report this")


def _thinned(dag: PipelineDag, vertices: int) -> PipelineDag:
    """Return the iteration with few of its operating points, those whose hull is the closest.

    A walk on all of them takes twice as long, and saves less than a tenth of a point more.
    """
    used = {
        key: {point.clock_mhz for point in _few(points, vertices)}
        for key, points in dag.points.items()
    }
    measurements = {
        key: tuple(m for m in rows if m.clock_mhz in used[key]) if key in used else rows
        for key, rows in dag.profile.measurements.items()
    }
    return dag.with_profile(replace(dag.profile, measurements=measurements))


def _few(points: tuple[OperatingPoint, ...], most: int) -> list[OperatingPoint]:
    """Return the ends of the lower hull, and the vertices that are the furthest from what is
    kept.
    """
    # Points above the hull are never best at any price of time.
    hull = lower_hull([(point.time_s, point.effective_j) for point in points])
    kept = [0, len(hull) - 1]
    # The vertex furthest below what is kept is the one whose loss would cost the most energy.
    while len(kept) < min(most, len(hull)):
        below: list[tuple[float, int]] = []
        for a, b in pairwise(sorted(kept)):
            (x0, y0), (x1, y1) = hull[a], hull[b]
            below += [
                (y0 + (y1 - y0) * (hull[i][0] - x0) / (x1 - x0) - hull[i][1], i)
                for i in range(a + 1, b)
            ]
        kept.append(max(below)[1])
    vertices = {hull[i] for i in kept}
    return [point for point in points if (point.time_s, point.effective_j) in vertices]


_EFFORT = 2**14  #: computations that are dispatched in all plans that are tried
_RANDOM_ORDERS = 40  #: of microbatches that are tried
_MARGIN = 0.02 / 3  #: which is enough for errors of 1 to 2 %
_ROOM = 0.8  #: by how much longer lower clocks are planned, of the jitter
#: by how much longer lower clocks are planned, in standard errors of the law of their stage and
#: kind; with more, less is saved, and iterations are no shorter (benchmark 32)
_ROOM_OF_LAW = 0.6
#: of the computations that lose time by a change, whose clock is raised in a round; by hand: with
#: all at once plans save a hundredth less, and one by one takes twice as long
_AT_ONCE = 0.1
#: rooms of plans that are compared with a static plan, the least first, as multiples of `_ROOM`; by
#: hand, as each costs a plan
_WARIER = 1.0, 2.0, 4.5
#: of jitter and errors of laws, under which a plan is compared with a static one; by hand
_DRAWS = 32
#: by which a static plan may be longer than the target, and batches still are alike: what `planner
#: plan` takes as no slower
_NO_SLOWER = 1e-3
_ROUNDING = 1e-9  #: relative
#: by how much ranks may be late without catching up, of the jitter, and at most of an iteration
_TOLERATED = 0.3
_MOST_TOLERATED = 0.0035
_LEAST_SCALE = 1 / 64  #: of a computation's measured times: less work than that counts as so much


@dataclass(frozen=True)
class Law:
    """The seconds of a (stage, kind) at full clocks, as they follow from the work of a
    microbatch: `fixed_s + sum(per_work_s[k] * work[k])`.

    Raises:
        UsageError: If a number is not finite.
    """

    fixed_s: float  #: seconds without any work; may be negative, as fitted lines are
    per_work_s: tuple[float, ...]  #: seconds of a unit of each feature of work
    #: standard error of the seconds that it says, as a share of them, of what it was fitted to
    error: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixed_s", FINITE.check(self.fixed_s, "law, fixed_s"))
        slopes_s = tuple(FINITE.check(each, "law, per_work_s") for each in self.per_work_s)
        object.__setattr__(self, "per_work_s", slopes_s)
        object.__setattr__(self, "error", FINITE.check(self.error, "law, error"))

    def full_s(self, work: Sequence[float]) -> float:
        """Return the seconds of a computation at full clocks whose microbatch has this work."""
        parts_s = (slope_s * each for slope_s, each in zip(self.per_work_s, work, strict=True))
        return self.fixed_s + sum(parts_s)


def margin_of(error: float) -> float:
    """Return by which share plans aim earlier if the work of microbatches is off by `error`, the
    standard deviation of its logarithm.

    Ranks that catch up mend most of it. Fitted to drawn errors of 1 to 5 %, on the trace and on
    drawn lengths: more margin costs more energy than it saves time.
    """
    return max(error / 3, min(2 * error / 3, _MARGIN))


class RankTimes(NamedTuple):
    """When the computations of a rank run in a plan, seconds from the start of the iteration."""

    start_s: float  #: its first computation starts
    end_s: float  #: its last one ends
    #: each of its computations must end, so that all that follow can still end in time at their
    #: planned clocks
    latest_end_s: tuple[float, ...]


@dataclass(frozen=True)
class BatchPlan:
    """The clocks of one iteration of one pipeline."""

    #: for each rank, the clock of each of its computations in program order, MHz.
    clocks_mhz: tuple[tuple[int, ...], ...]
    time_s: float  #: replayed iteration time, seconds
    #: over all GPUs of the pipeline until the target, or its own end if that is later, waiting
    #: included, joules
    energy_j: float
    _starts: _Starts = field(compare=False, repr=False)
    #: whether it is the static plan, which is as good where batches are alike
    is_static: bool = False

    def times(self, rank: int) -> RankTimes:
        """Return when the computations of a rank run, and must end at the latest.

        A rank that is late catches up: before a computation, it takes the slowest clock, the
        planned one or a faster one, with which it still ends by its latest end; or the fastest.
        """
        starts = self._starts
        first, stop = starts.rank_start[rank : rank + 2].tolist()
        latest_s = tuple(starts.latest_end_s[first:stop].tolist())
        return RankTimes(float(starts.start_s[first]), float(starts.end_s[stop - 1]), latest_s)


class _Starts(NamedTuple):
    """What `BatchPlan.times` and a replay are made of."""

    rank_start: Integers  #: (ranks + 1,) where the program of each rank begins
    start_s: Floats  #: (m,) of each computation
    end_s: Floats  #: (m,)
    latest_end_s: Floats  #: (m,)
    scale: Floats  #: (m,)
    member: Integers  #: (m,) class
    column: Integers  #: (m,) of the planned clock
    time_s: Floats  #: (classes, clocks) infinite if not measured

    @property
    def latest_start_s(self) -> Floats:
        """(m, clocks) of each computation at each clock."""
        taken_s: Floats = self.scale[:, None] * self.time_s[self.member]
        return self.latest_end_s[:, None] - taken_s


class BatchReplay(NamedTuple):
    """An iteration of a plan, as it came in truth."""

    time_s: float  #: iteration time, seconds
    effective_j: float  #: energy less what the GPUs would draw if they waited all that time, joules
    changes: tuple[int, ...]  #: of the clock of each rank


class _Static(NamedTuple):
    """A static plan, and what it is compared by."""

    column: Integers  #: (m,) of its clocks
    warier: tuple[BatchPlanner, ...]  #: planners that leave more room, the least first
    factors: Floats  #: (draws, m) how many times as long each computation takes
    #: (draws,) how long it takes, of the time at full clocks that the work says
    ratio: Floats


class BatchPlanner:
    """Makes the plans of one pipeline, a new one for each batch.

    It is built once for an iteration with its number of microbatches. Equal input gives equal
    plans, bit by bit, on every rank. A computation takes a 64th of its measured time at least,
    however little its work is. Plans are for the work as it is said: where that may be off by a few
    percent, aim at a target that is earlier by `margin_of`, and catch up. Where computations differ
    besides, each by itself, plans leave room for that at lower clocks, and for what the law of
    each stage and kind may be wrong by; and clocks are asked for so early that they are in force in
    time, if the profile tells what a change costs.

    Args:
        dag: an iteration, with the cost of each (stage, kind) at each clock, and their jitter.
        laws: for each (stage, kind) of it, its seconds at full clocks.
        max_changes: how often each GPU may change its clock in an iteration, including the change
            to the first clock; None for any number.
        static_mhz: the clocks of a static plan for microbatches that are alike, rank by rank in
            program order; a clock that was not measured counts as the next higher one. Where a
            batch is so much alike that this plan is in time, no plan is later, nor needs more
            energy, in replays of both. None if there is none; one that cannot be merged to
            `max_changes` counts as none.

    Raises:
        ProfileError: If the measurements cannot be scaled.
        UsageError: If a law is missing, laws have different numbers of features, `max_changes` is
            not a number of changes, or `static_mhz` has not one clock for each computation.
    """

    def __init__(
        self,
        dag: PipelineDag,
        laws: Mapping[AnyKey, Law],
        *,
        max_changes: int | None = None,
        static_mhz: Sequence[int] | None = None,
        _room: float = 1.0,
    ) -> None:
        self.dag = dag
        profile = dag.profile
        self._most = None if max_changes is None else COUNT.check(max_changes, "max_changes")
        self._set_laws(ByKey(laws))
        self._problem, clocks = clock_problem_of(self.dag)
        # Lower clocks are planned with room for jitter, but what a plan promises is told without
        # it.
        with_room = self.dag.with_profile(_with_room(profile, self._errors, _room))
        self._roomy, _ = clock_problem_of(with_room)
        self._clocks_mhz = tuple(clocks)
        keys = self.dag.iteration.keys
        tables = {
            key: {m.clock_mhz: m.time_s for m in profile.measurements[key]}
            for key in dict.fromkeys(keys)
        }
        # All classes share one list of clocks, so a class that lacks one runs at its nearest.
        column = {clock: i for i, clock in enumerate(clocks)}
        number = dict(zip(keys, self._problem.member.tolist(), strict=True))
        nearest = np.zeros(self._problem.time_s.shape, dtype=np.int64)
        for key, table in tables.items():
            nearest[number[key]] = [column[nearest_clock(table, clock)] for clock in clocks]
        # From the request of a clock until it is in force: all calls of a change, then settling.
        change = profile.clock_change or ClockChange(0.0)
        calls = change.calls_per_change(profile.gpus_per_stage)
        self._latency_s = calls * change.call_s + change.settle_s
        self._nearest = nearest  # (classes, clocks): the column that a class runs at
        self._one_s, self._one_j = (
            np.take_along_axis(table, nearest, axis=1)
            for table in (self._problem.time_s, self._problem.cost_j)
        )
        self._one_roomy_s = np.take_along_axis(self._roomy.time_s, nearest, axis=1)
        self._scaled = ScaledDag(with_room)
        columns = {0: 0} | column  # clock 0 is that of fixed operations
        self._column_of_point = np.array([columns[mhz] for mhz in self._scaled.point_mhz.tolist()])
        # The work is a multiple of what was measured, so all scales count from full clocks.
        self._full_s = self._one_s[self._problem.member, 0]  # (m,) as measured, at full clocks
        # Operations without a clock cost the same in every plan, so they are added at the end.
        self._operations_j = float(
            sum(
                self.dag.points[key][0].effective_j
                for key in self.dag.keys[len(self.dag.computations) :]
            )
        )
        self._change = change
        self._static: _Static | None = None
        if static_mhz is not None:
            self._set_static(laws, max_changes, static_mhz)

    def full_clocks_s(
        self, work: NDArray[np.float64], factor: NDArray[np.float64] | None = None
    ) -> float:
        """Return the seconds of this pipeline's iteration with all clocks at maximum.

        Args:
            work: (microbatches, features) of each microbatch, 0 or more.
            factor: (microbatches,) how many times as long the computations of each take in truth;
                None for 1.

        Raises:
            UsageError: If `work` is not like that.
        """
        seconds = self.computation_s(work)
        if factor is not None:
            seconds *= factor[self._microbatch]
        makespan_s = replay(self._problem, self._state(seconds))
        return makespan_s + self.dag.profile.overhead_s

    def replay(
        self,
        plan: BatchPlan,
        factor: NDArray[np.float64],
        change: ClockChange,
        *,
        is_catching_up: bool,
    ) -> BatchReplay:
        """Run one of many equal iterations of a plan whose computations take longer or shorter in
        truth than their work says.

        Args:
            plan: of this planner.
            factor: (computations,) how many times as long each takes, rank by rank in program
                order.
            change: what a clock change costs.
            is_catching_up: whether ranks that are late take faster clocks, as `BatchPlan.times`
                says, when a computation starts and when the one before it ends. A rank takes its
                first computation to be in time.
        """
        starts = plan._starts
        base = self._problem
        dag = self.dag
        # What a computation takes in truth is what its work says, times the error of that.
        scale = (starts.scale * factor)[:, None]
        # Each computation is a class of its own, as its error is its own.
        problem = base._replace(
            time_s=scale * self._one_s[base.member],
            cost_j=scale * self._one_j[base.member],
            member=np.arange(len(base.member)),
        )
        cost = change_cost(dag.iteration, change, dag.profile.gpus_per_stage)
        # Without latest starts in the cost, the replay never takes a faster clock.
        if is_catching_up:
            first_s = starts.start_s[problem.rank_start[:-1]]
            cost = cost._replace(latest_start_s=starts.latest_start_s, first_start_s=first_s)
        state, _ = load_state(problem, starts.column)
        makespan_s = replay(problem, state)
        # What a rank waits after its last computation counts from the iteration's end, so it is run
        # once first.
        cost.tail_s[:] = makespan_s - state.end_s[problem.node[problem.rank_start[1:] - 1]]
        makespan_s, spent_j = replay_changes(problem, state, cost)
        calls = cost.numbers[5] - cost.call_start
        return BatchReplay(
            makespan_s + dag.profile.overhead_s,
            spent_j + self._operations_j,
            tuple(calls.tolist()),
        )

    def computation_s(self, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of each computation at full clocks, rank by rank in program order:
        (computations,).

        Args:
            work: as `full_clocks_s` takes it.

        Raises:
            UsageError: If `work` is not like that.
        """
        seconds: Floats = self._scales(work) * self._full_s
        return seconds

    def microbatch_s(self, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of all computations of each microbatch at full clocks:
        (microbatches,).

        Args:
            work: as `full_clocks_s` takes it.

        Raises:
            UsageError: If `work` is not like that.
        """
        seconds = np.bincount(self._microbatch, self.computation_s(work))
        return np.asarray(seconds, dtype=np.float64)

    def plan_of(
        self, work: NDArray[np.float64], clocks_mhz: Sequence[int] | None, target_s: float
    ) -> BatchPlan:
        """Return the replayed plan of one clock for each computation.

        Args:
            work: as `full_clocks_s` takes it.
            clocks_mhz: measured clocks, rank by rank in program order; None for all at maximum.
            target_s: when the iteration of the slowest pipeline ends, seconds.

        Raises:
            UsageError: If `work` is not like that.
        """
        number = {clock: i for i, clock in enumerate(self._clocks_mhz)}
        column = (
            self._nearest[self._problem.member, 0]
            if clocks_mhz is None
            else np.array([number[clock] for clock in clocks_mhz])
        )
        return self._plan_of(self._scales(work), column, target_s)

    def best_order(self, work: NDArray[np.float64]) -> tuple[int, ...]:
        """Return the order of the microbatches in which the iteration is shortest at full clocks,
        of those that were tried: as they are, longest first, shortest first, and random ones.

        The first number is the microbatch to run first. Another order changes the order in which
        gradients are summed, and so the last bits of a training run.

        Args:
            work: as `full_clocks_s` takes it.

        Raises:
            UsageError: If `work` is not like that.
        """
        longest_first = np.argsort(-self.microbatch_s(work), kind="stable")
        as_is = np.arange(len(work))
        # A fixed seed, as equal input gives equal plans on every rank.
        rng = np.random.default_rng(0)
        random = [rng.permutation(as_is) for _ in range(_RANDOM_ORDERS)]
        orders = np.array([as_is, longest_first, longest_first[::-1], *random])
        makespan_s = self._replay_all(np.array([self.computation_s(work[o]) for o in orders]))
        return tuple(orders[int(np.argmin(makespan_s))].tolist())

    def one_clock(self, work: NDArray[np.float64], target_s: float) -> BatchPlan:
        """Return the plan of least energy that keeps one clock on all GPUs of the pipeline and
        ends by `target_s`.

        Where a computation was not measured at that clock, it takes the next lower one that was.
        If nothing is that fast, all clocks are at their maximum.

        Args:
            work: as `full_clocks_s` takes it.
            target_s: when the iteration of the slowest pipeline ends, seconds.

        Raises:
            UsageError: If an argument is out of range.
        """
        scale = self._scales(work)
        problem = self._problem
        # Costs of one clock for all follow from the work of each class alone, without a replay.
        of_class = np.bincount(problem.member, scale, len(self._one_j))
        cost_j = (of_class[:, None] * self._one_j).sum(axis=0)
        # Time is that of the roomy rows, so that jitter does not make the chosen clock late.
        makespan_s = self._replay_all((scale[:, None] * self._one_roomy_s[problem.member]).T)
        # What is late costs infinitely much, so the least cost is the best clock in time.
        cost_j[makespan_s + self.dag.profile.overhead_s > target_s] = np.inf
        best = int(np.argmin(cost_j)) if np.isfinite(cost_j).any() else 0
        return self._plan_of(scale, self._nearest[problem.member, best], target_s)

    def plan(
        self, work: NDArray[np.float64], target_s: float, *, effort: int | None = None
    ) -> BatchPlan:
        """Return the plan of least energy that was found and ends by `target_s`.

        A target below `full_clocks_s` counts as that. Where the batch is alike and there is a
        static plan, see `static_mhz` above.

        Args:
            work: as `full_clocks_s` takes it.
            target_s: when the iteration of the slowest pipeline ends, seconds.
            effort: how many plans to try; None for fewer of larger iterations.

        Raises:
            UsageError: If an argument is out of range.
        """
        best = self._plan(work, target_s, effort)
        if self._static is None:
            return best
        until_s = max(target_s, self.full_clocks_s(work))
        warier = (each._plan(work, target_s, effort) for each in self._static.warier)
        beside = self._beside_static(chain([best], warier), self._scales(work), until_s)
        return best if beside is None else beside

    def _plan(self, work: NDArray[np.float64], target_s: float, effort: int | None) -> BatchPlan:
        """Return what `plan` does, without a look at the static plan."""
        scale = self._scales(work)
        overhead_s = self.dag.profile.overhead_s
        nodes = len(self.dag.order)
        # Larger iterations are tried less often, so that a plan takes about as long for all of
        # them.
        tries = max(1, _EFFORT // nodes) if effort is None else COUNT.check(effort, "effort")
        # Nothing can be faster than full clocks, so an earlier target is not tried.
        full_s = replay(self._problem, self._state(scale * self._full_s))
        deadline_s = max(full_s, target_s - overhead_s)
        # Nodes without a clock keep their measured time, whatever the batch.
        node_scale = np.ones(nodes)
        node_scale[self._problem.node] = scale
        points = self._scaled.scaled_points(node_scale)
        chosen = self._scaled.choose(points, node_scale, deadline_s, tries)
        column = self._column_of_point[chosen[self._problem.node]]
        # Both plans are compared up to the same time, as a plan that ends early waits until then.
        until_s = max(target_s, full_s + overhead_s)
        one = self.one_clock(work, until_s)
        # Within a budget of changes a plan may not exist, and one clock always fits the budget.
        if self._most is not None and not self._merge(scale, column, deadline_s, self._most):
            return one
        if self._latency_s > 0.0:
            self._raise_before_changes(scale, column, deadline_s)
        plan = self._plan_of(scale, column, until_s)
        # The search and the merging are heuristics, so one clock for all may still be cheaper.
        return plan if plan.time_s <= until_s and plan.energy_j < one.energy_j else one

    def _set_static(
        self, laws: Mapping[AnyKey, Law], max_changes: int | None, static_mhz: Sequence[int]
    ) -> None:
        """Take a static plan, and lay out what it is compared by."""
        rows = self.dag.profile.measurements
        number = {clock: i for i, clock in enumerate(self._clocks_mhz)}
        keys = self.dag.iteration.keys
        if len(static_mhz) != len(keys):
            raise UsageError(
                f"static_mhz: has {len(static_mhz)} clocks; give one for each of {len(keys)} "
                "computations"
            )
        column = np.array(
            [
                number[
                    min(
                        (m.clock_mhz for m in rows[key] if m.clock_mhz >= mhz),
                        default=rows[key][0].clock_mhz,
                    )
                ]
                for key, mhz in zip(keys, static_mhz, strict=True)
            ]
        )
        # At a deadline of 0 merging only raises clocks, so the plan stays as much in time as it is.
        if self._most is not None and not self._merge(np.ones(len(keys)), column, 0.0, self._most):
            return
        # Plans that leave more room for the same jitter, as a plan of the batch that is late often
        # can be on time for less than the static plan.
        warier = tuple(
            BatchPlanner(self.dag, laws, max_changes=max_changes, _room=room)
            for room in _WARIER[1:]
        )
        # A fixed seed, as equal input gives equal plans on every rank.
        rng = np.random.default_rng(0)
        jitter = self.dag.profile.jitter * rng.normal(size=(_DRAWS, len(keys)))
        of_law = {key: rng.normal(size=_DRAWS) for key in dict.fromkeys(keys)}
        shared = np.array([self._errors[key] * of_law[key] for key in keys]).T
        factors = np.exp(jitter + shared)
        plain = np.ones(len(keys))
        static = self._plan_of(plain, column, 0.0)
        full_s = self._plan_of(plain, self._nearest[self._problem.member, 0], 0.0).time_s
        came = self._replayed(static, factors, is_catching_up=False)
        ratio = np.array([each.time_s for each in came]) / full_s
        self._static = _Static(column, warier, factors, ratio)

    def _beside_static(
        self, plans: Iterable[BatchPlan], scale: Floats, until_s: float
    ) -> BatchPlan | None:
        """Return the first plan that is no later than the static plan under any draw, nor needs
        more energy; if there is none, the static plan. Return None where batches are not alike.
        """
        assert self._static is not None
        factors = self._static.factors
        ratio = self._static.ratio
        static = self._plan_of(scale, self._static.column, until_s)
        if static.time_s > until_s * (1.0 + _NO_SLOWER):
            return None
        # The other pipelines keep the static plan's time for this target, so that is the limit.
        limits_s = (ratio * until_s * (1.0 + _ROUNDING)).tolist()
        static_j = None
        for plan in plans:
            came = list[BatchReplay]()
            # Of many pipelines the slowest decides, so one late draw is enough to refuse a plan.
            for each, limit_s in zip(
                self._replayed(plan, factors, is_catching_up=True), limits_s, strict=True
            ):
                if each.time_s > limit_s:
                    break
                came.append(each)
            else:
                if static_j is None:
                    as_static = self._replayed(static, factors, is_catching_up=False)
                    static_j = sum(each.effective_j for each in as_static)
                if sum(each.effective_j for each in came) <= static_j:
                    return plan
        return replace(static, is_static=True)

    def _replayed(
        self, plan: BatchPlan, factors: Floats, *, is_catching_up: bool
    ) -> Iterator[BatchReplay]:
        """Replay a plan under one draw after the other."""
        for factor in factors:
            yield self.replay(plan, factor, self._change, is_catching_up=is_catching_up)

    def _merge(self, scale: Floats, column: Integers, deadline_s: float, most: int) -> bool:
        """Merge the clocks of neighbours upward until no rank has more than `most` segments; then
        lower what has room again. Return False if the classes of a rank have too few clocks in
        common for that.
        """
        scratch = np.empty((2, len(column) + 1), dtype=np.int64)
        cost_j = np.empty(len(column) + 1)
        # Merged clocks must hold in time with jitter, as the plan they come from.
        problem = self._roomy
        if not _merge(problem, scale, most, column, scratch[0], scratch[1], cost_j):
            return False
        # Merging only raises clocks, which leaves time that lower clocks can use again.
        state = self._state(scale * problem.time_s[problem.member, column], column)
        _lower(problem, scale, deadline_s, state)
        return True

    def _raise_before_changes(self, scale: Floats, column: Integers, deadline_s: float) -> None:
        """Raise clocks that a rank leaves for a faster one, until the iteration is in time though
        the faster one comes into force late; no rank changes its clock more often than before.
        """
        problem = self._roomy
        time_s = problem.time_s[problem.member]
        latest_s = np.empty(len(problem.fixed_s))
        hair_s = _ROUNDING * deadline_s
        # Each round raises a clock, so rounds end.
        has_raised = True
        while has_raised:
            has_raised = False
            taken_s = scale * time_s[np.arange(len(column)), column]
            state = self._state(taken_s, column)
            replay(problem, state)
            # Delays change how long ranks wait, of which the losses are made: so they are added
            # twice.
            for _ in range(2):
                lost_s = self._lost_s(scale, column, state)
                state = self._state(taken_s + lost_s, column)
                makespan_s = replay(problem, state)
            if makespan_s <= deadline_s + hair_s:
                return
            _latest_ends(problem, state, deadline_s, latest_s)
            is_late = (state.end_s > latest_s + hair_s)[problem.node]
            # What loses most first and not all at once, as others may be in time then.
            late = [i for i in np.argsort(-lost_s, kind="stable").tolist() if is_late[i]]
            at_once = 1 + int(_AT_ONCE * np.count_nonzero(lost_s))
            for i in late:
                if at_once > 0 and lost_s[i] > 0.0 and self._raise_segment(time_s, column, i):
                    has_raised = True
                    at_once -= 1

    def _lost_s(self, scale: Floats, column: Integers, state: ClockState) -> Floats:
        """Return what each computation of a replayed state takes longer as it begins at the slower
        clock of the one before it, unless the rank waits long enough between them: (m,).
        """
        problem = self._roomy
        time_s = problem.time_s[problem.member]
        row = np.arange(len(column))
        end_s = state.end_s[problem.node]
        waited_s = end_s - state.duration_s[problem.node] - np.roll(end_s, 1)
        waited_s[problem.rank_start[:-1]] = np.inf  # an iteration begins at full clocks
        slower_s = scale * time_s[row, np.roll(column, 1)]  # infinite if not measured
        share = np.maximum(1.0 - scale * time_s[row, column] / slower_s, 0.0)
        left_s = np.maximum(self._latency_s - waited_s, 0.0)
        lost_s: Floats = share * np.minimum(left_s, slower_s)
        return lost_s

    def _raise_segment(self, time_s: Floats, column: Integers, stop: int) -> bool:
        """Raise the segment of one clock that ends before computation `stop` to its next faster
        clock, at most that of `stop`; return whether there is one.
        """
        problem = self._roomy
        first = int(problem.rank_start[problem.rank[stop]])
        now = int(column[stop - 1])
        begin = stop - 1
        while begin > first and column[begin - 1] == now:
            begin -= 1
        now_s = time_s[begin:stop, now]
        for faster in range(now - 1, int(column[stop]) - 1, -1):
            faster_s = time_s[begin:stop, faster]
            if (faster_s <= now_s).all() and (faster_s < now_s).any():
                column[begin:stop] = faster
                return True
        return False

    def _set_laws(self, laws: Mapping[Key, Law]) -> None:
        keys = self.dag.iteration.keys
        missing = next((key for key in keys if key not in laws), None)
        if missing is not None:
            raise UsageError(
                f"laws: have none for {missing.kind} of stage {missing.stage}; give one for each "
                "stage and kind of the schedule"
            )
        features = {len(laws[key].per_work_s) for key in keys}
        if len(features) > 1:
            raise UsageError(
                f"laws: have {min(features)} and {max(features)} numbers for a microbatch; give "
                "all as many"
            )
        self._features = features.pop()
        self._errors = {key: laws[key].error for key in keys}
        self._fixed_s = np.array([laws[key].fixed_s for key in keys])
        self._per_work_s = np.array([laws[key].per_work_s for key in keys])
        self._microbatch = np.array([c.microbatch for c in self.dag.computations])

    def _scales(self, work: NDArray[np.float64]) -> Floats:
        """Return how many times as long as measured each computation takes: (m,)."""
        shape = self.dag.schedule.microbatches, self._features
        work = np.asarray(work, dtype=np.float64)
        if work.shape != shape:
            raise UsageError(
                f"work: has the shape {work.shape}; give {shape[0]} microbatches with {shape[1]} "
                "numbers each"
            )
        # Summed feature by feature: a matrix product may add in another order on another processor.
        scale: Floats = self._fixed_s.copy()
        for feature in range(self._features):
            scale += self._per_work_s[:, feature] * work[self._microbatch, feature]
        scale /= self._full_s
        if not np.isfinite(scale).all():
            raise UsageError("work: is too large to plan with; give it in larger units")
        # A law may be negative for little work, and no computation takes no time.
        np.maximum(scale, _LEAST_SCALE, out=scale)
        return scale

    def _replay_all(self, computation_s: Floats) -> Floats:
        """Return the makespan of each row of durations, seconds: (rows, m)."""
        state = self._state(computation_s[0])
        makespan_s = np.empty(len(computation_s))
        rows = np.ascontiguousarray(computation_s)
        _makespans(self._problem, state, rows, len(rows), makespan_s)
        return makespan_s

    def _state(self, computation_s: Floats, column: Integers | None = None) -> ClockState:
        """Return a state of computations that take so long, not yet replayed; its clocks are those
        columns.
        """
        duration_s = self._problem.fixed_s.copy()
        duration_s[self._problem.node] = computation_s
        clock = self._problem.member if column is None else column
        return ClockState(clock, duration_s, np.empty_like(duration_s), np.zeros(1, dtype=np.int64))

    def _plan_of(self, scale: Floats, column: Integers, target_s: float) -> BatchPlan:
        """Return the replayed plan of one clock, given as its column, for each computation."""
        problem = self._problem
        overhead_s = self.dag.profile.overhead_s
        # The promised time is that of the measured rows, without the room for jitter.
        state = self._state(scale * problem.time_s[problem.member, column])
        time_s = replay(problem, state) + overhead_s
        # A plan that is late by itself has its latest ends count from its own end.
        until_s = max(time_s, target_s)
        latest_s = np.empty_like(state.end_s)
        # Ranks may be late by this much without catching up, as jitter alone makes them late.
        tolerated_s = until_s * min(_TOLERATED * self.dag.profile.jitter, _MOST_TOLERATED)
        # The overhead is no computation, so what is replayed has to end that much earlier.
        _latest_ends(problem, state, until_s + tolerated_s - overhead_s, latest_s)
        # Summed one after the other, so that every rank finds the same bits.
        effective_j = float((scale * problem.cost_j[problem.member, column]).cumsum()[-1])
        clocks_mhz = [self._clocks_mhz[i] for i in column.tolist()]
        return BatchPlan(
            tuple(tuple(clocks_mhz[a:b]) for a, b in pairwise(problem.rank_start.tolist())),
            time_s,
            effective_j + self._operations_j + self.dag.waiting_w * until_s,
            _Starts(
                problem.rank_start,
                state.end_s[problem.node] - state.duration_s[problem.node],
                state.end_s[problem.node],
                latest_s[problem.node],
                scale,
                problem.member,
                column,
                problem.time_s,
            ),
        )


def _with_room(profile: Profile, errors: Mapping[Key, float], times: float) -> Profile:
    """Return a profile whose computations take longer, but for the clocks that are as fast as the
    highest.
    """
    measurements = {}
    for key, rows in profile.measurements.items():
        room = times * _ROOM * profile.jitter + _ROOM_OF_LAW * errors.get(key, 0.0)
        measurements[key] = tuple(
            replace(m, time_s=m.time_s + min(room * m.time_s, max(m.time_s - rows[0].time_s, 0.0)))
            for m in rows
        )
    return replace(profile, measurements=measurements)


@kernel("latest_s")
def _latest_ends(
    problem: ClockProblem, state: ClockState, deadline_s: float, latest_s: Floats
) -> None:
    """Fill `latest_s` with the latest end of each node after which all others still end by
    `deadline_s`.
    """
    raise NotImplementedError


@kernel("state", "makespan_s")
def _makespans(
    problem: ClockProblem, state: ClockState, computation_s: Floats, rows: int, makespan_s: Floats
) -> None:
    """Fill `makespan_s`, (rows,), with that of each row of `computation_s`: (rows, m)."""
    raise NotImplementedError


@kernel("column", "begin", "raised", "added_j")
def _merge(
    problem: ClockProblem,
    scale: Floats,
    most_segments: int,
    column: Integers,
    begin: Integers,
    raised: Integers,
    added_j: Floats,
) -> bool:
    """Merge neighbouring segments of one clock, those first that cost least, until no rank has
    more than `most_segments`; return whether that was possible.

    `begin`, `raised` and `added_j` are scratch space: where each segment of a rank begins, and the
    clock and cost of it with the one before.
    """
    raise NotImplementedError


@kernel("state")
def _lower(problem: ClockProblem, scale: Floats, deadline_s: float, state: ClockState) -> None:
    """Lower the clock of one segment after the other, as long as that saves and all is in time."""
    raise NotImplementedError
