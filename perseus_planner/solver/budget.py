"""Find plans within a switch budget: a limit on clock changes per GPU and iteration.

The ranks of a pipeline run in lockstep, so a good plan with few changes has phases: for a time all
ranks keep one pace, each at the clock that suits it best there, and then another pace. Mixing two
paces costs what the straight line between them says. The begin and end of an iteration, where the
pipeline fills and drains, are phases too.

1. *No change.* For every possible pace, each rank takes its cheapest clock that keeps it, for the
   whole iteration. A local search over the clocks of single ranks, and of two at a time, follows.
   Annealing (`clock_search.py`) starts from the best of these plans that meets the deadline.
2. *Two changes.* A slower pace and a faster one, one after the other, share an iteration as the
   deadline allows. And all ranks may be fast while the pipeline fills and drains, and keep one
   clock each between. The best plan of either sort is annealed.
3. *More changes.* The levels, a fixed series of numbers of changes, are annealed in turn, each from
   the plan of the level before; it may take parts of the plans of all paces and of the plan without
   a budget. So a larger budget never gives a worse plan.

If there are few combinations of clocks, all of them are tried instead. Everything is seeded: equal
input, equal plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget
from perseus_planner.solver.clock_problem import (
    ClockProblem,
    clock_problem_of,
    load_state,
    replay,
    with_waves,
)
from perseus_planner.solver.clock_search import Goal, Heat, anneal, max_changes

if TYPE_CHECKING:
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Floats, Integers

#: combinations up to which all are tried, so that the smallest problems are solved exactly
_FEW = 2**15
#: for each level: tries times operations, least tries, most tries
_EFFORT = (150_000_000, 5_000, 120_000)
#: how often a small problem is annealed from one start: times operations, and at most. Every
#: second time it is three times as hot.
_REPEATS = (300, 4)
#: first temperature: the distance to the plan without a budget over so many computations, and at
#: least that part of it
_HEAT = (3.0, 3e-3)
_COOLING = 0.01  #: last temperature, as a part of the first one
#: first temperature as a part of the iteration time, when the search is for the fastest plan
_HEAT_OF_TIME = 1e-3
_NEAR = 0.12  #: distance from the deadline of the paces whose parts may be taken, as a part of it
#: computations that a rank runs fast at the begin, and at the end
_ENDS = (0, 1, 2, 3, 4, 6, 8, 11, 14)
#: moves of a local search over one clock for each rank, at most; by hand, it ends far earlier
_EXCHANGES = 200
_REACHES = (64, 8, 4, 2, 1)  #: how many clocks away the next one of a rank may be in such a move
_REPLAYED = 20_000_000  #: moves times operations that are looked at for one of them
_BATCH = 256  #: moves that are replayed together
_PAIRS = 16  #: pairs of paces that are tried one after the other
_HALVINGS = 12  #: steps to find how two paces share an iteration
#: in the fastest plan that a search begins with if none meets the deadline
_MOST_FAST_SEGMENTS = 16


class _Plan(NamedTuple):
    """The better one of two plans is the smaller one by `_order`."""

    late_s: float  #: seconds beyond the deadline
    cost_j: float
    time_s: float
    clock: Integers


def clocks_within_budget(
    dag: PipelineDag,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    most_changes: int,
) -> list[int]:
    """Return the clock of each computation of `dag.computations`, MHz, in the best plan found
    within a switch budget.

    Args:
        dag: the iteration.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget.
        most_changes: how often each rank may change its clock in an iteration, including the change
            back to its first clock.

    Returns:
        With equal other arguments, a larger budget never gives a larger effective energy. If
        `unlimited_mhz` is within the budget, the result is that, or one clock per rank if that
        costs less.

    Raises:
        InfeasibleBudget: If no plan found within the budget meets the deadline; names the least
            time found.
    """
    search = _Search(dag, deadline_s, unlimited_mhz)
    best: _Plan | None = search.unlimited
    # A plan that keeps the budget by itself needs no search.
    if search.changes_of(search.unlimited.clock) > most_changes:
        *_, best = search.by_level(budget_levels(most_changes))
    if best is None or best.late_s > 0.0:
        raise InfeasibleBudget(deadline_s, most_changes, None if best is None else best.time_s)
    return search.mhz(best.clock)


def budget_levels(most_changes: int) -> list[int]:
    """Return the numbers of changes that are searched in turn for a budget: 0, 2, 3, 4, 6, 8, 12,
    16 and so on, as many as it allows.

    The series does not depend on the budget: a larger one goes through the plans of every smaller
    one, and so is never worse.
    """
    levels = [0, *(k << power for power in range(most_changes.bit_length()) for k in (2, 3))]
    return [level for level in levels if level <= most_changes]


def clocks_by_budget(
    dag: PipelineDag,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    levels: Sequence[int],
    effort: float = 1.0,
) -> dict[int, list[int]]:
    """Return `clocks_within_budget` for several numbers of changes, each searched from the one
    before.

    Args:
        dag: the iteration.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget.
        levels: numbers of changes, rising.
        effort: how long to search, as a share of what `clocks_within_budget` takes.

    Returns:
        Number of changes -> clocks, MHz. Numbers within which no plan was found are left out.
    """
    search = _Search(dag, deadline_s, unlimited_mhz, effort)
    plans = zip(levels, search.by_level(levels), strict=True)
    return {
        level: search.mhz(plan.clock)
        for level, plan in plans
        if plan is not None and plan.late_s == 0.0
    }


class _Search:
    """What is known before a search."""

    def __init__(
        self,
        dag: PipelineDag,
        deadline_s: float,
        unlimited_mhz: Sequence[int],
        effort: float = 1.0,
    ) -> None:
        problem, self._clocks = clock_problem_of(dag)
        self._effort = effort
        column = {clock: i for i, clock in enumerate(self._clocks)}
        unlimited = np.array([column[clock] for clock in unlimited_mhz], dtype=np.int64)
        # The unlimited plan tells what runs at the same time on different ranks.
        self.problem = with_waves(problem, unlimited)
        self.deadline_s = deadline_s
        self._ranks = list(pairwise(problem.rank_start.tolist()))
        # (ranks, clocks) of all that a rank runs
        self._load_s, self._load_j = (
            np.array([table[problem.member[a:b]].sum(axis=0) for a, b in self._ranks])
            for table in (problem.time_s, problem.cost_j)
        )
        self.unlimited = self.plan(unlimited)
        self.paces = self._constant_paces()
        self.paces = _front([*self.paces, *map(self._exchanged, self._starts())])
        # If few clocks fit a deadline, one clock per rank may be better than the rounded plan.
        steady = min(self.paces, key=_order, default=self.unlimited)
        if steady.late_s == 0.0 and steady.cost_j < self.unlimited.cost_j:
            self.unlimited = steady

    def mhz(self, clock: Integers) -> list[int]:
        return [self._clocks[i] for i in clock.tolist()]

    def changes_of(self, clock: Integers) -> int:
        return max_changes(self.problem.rank_start, clock, 0, len(self._ranks) - 1, 0)

    def plan(self, clock: Integers) -> _Plan:
        state, cost_j = load_state(self.problem, clock)
        time_s = replay(self.problem, state)
        return _Plan(max(0.0, time_s - self.deadline_s), cost_j, time_s, clock)

    def by_level(self, levels: Sequence[int]) -> Iterator[_Plan | None]:
        """Yield the best plan found for each number of changes in turn, if there is any."""
        # How many clocks each computation has: their product is the number of plans.
        measured = np.isfinite(self.problem.time_s).sum(axis=1)[self.problem.member].tolist()
        if math.prod(measured) <= _FEW:
            yield from self._tried(levels, measured)
            return
        price_w = self._saving_per_second_w()
        floor_j = self.unlimited.cost_j
        # Parts of plans about as fast as the deadline are what a search may take over.
        near = [p.clock for p in self.paces if abs(p.time_s / self.deadline_s - 1) <= _NEAR]
        models = np.array(near or [self.unlimited.clock])
        # About a third of the library is the plan without a budget.
        mixed = np.array([*models, *[self.unlimited.clock] * ((len(models) + 1) // 2)])
        sorts = [self.paces]
        best: _Plan | None = None
        for level, before in zip(levels, [-1, *levels[:-1]], strict=False):
            goal = Goal(self.deadline_s, level, price_w, floor_j)
            # Two changes allow two more sorts of plans. Later levels have the best of them as their
            # start.
            if before < 2 <= level:
                sorts += [self._mixtures(), self._fast_ends()]
            starts = [start for start in map(self._best, sorts) if start is not None]
            sorts = []
            # No start is in time: the fastest plan of so few segments is tried as one.
            if not starts or min(start.late_s for start in starts) > 0.0:
                segments = min(max(level, 1), _MOST_FAST_SEGMENTS)
                starts.append(self.plan(self._fastest_segments(segments)))
                # Too few segments for the measured clocks: the plan has an infinite cost.
                starts = [start for start in starts if start.cost_j < math.inf]
            # Parts of the unlimited plan bring changes, of which level 0 has none.
            library = models if level == 0 else mixed
            best = self._best([self._improved(start, goal, library) for start in starts])
            sorts = [] if best is None else [[best]]
            yield best

    def _best(self, plans: Sequence[_Plan]) -> _Plan | None:
        """Return the best of these plans.

        One that costs less than the one without a budget counts only if no other meets the
        deadline.
        """
        dear = [p for p in plans if p.late_s == 0.0 and p.cost_j >= self.unlimited.cost_j]
        return min(dear or plans, key=_order, default=None)

    def _improved(self, start: _Plan, goal: Goal, library: Integers) -> _Plan:
        """Anneal one level; the result is at least as good as `start`."""
        problem = self.problem
        work, least, most = _EFFORT
        # A replay takes as long as there are operations, so large problems get fewer tries.
        tries = math.ceil(self._effort * min(max(work // len(problem.fixed_s), least), most))
        if start.late_s > 0.0:  # search for the fastest plan first, whatever it costs
            free = problem._replace(cost_j=np.where(np.isfinite(problem.cost_j), 0.0, np.inf))
            # Costs are 0 and the price is 1, so what is minimized here is seconds.
            heat = Heat(
                tries, _HEAT_OF_TIME * start.time_s, _HEAT_OF_TIME * _COOLING * start.time_s
            )
            fast = anneal(
                free, start.clock, goal._replace(price_w=1.0, floor_j=-math.inf), heat, library
            )
            start = min(start, self.plan(fast), key=_order)
        gap_j = start.cost_j - goal.floor_j
        # What costs less than the floor does not count, so nothing better is to be found.
        if gap_j <= 0.0:
            return start
        first_j = gap_j * max(_HEAT[0] / len(problem.member), _HEAT[1])
        repeats = min(max(_REPEATS[0] // len(problem.fixed_s), 1), _REPEATS[1])
        repeats = math.ceil(self._effort * repeats)
        # Seeds differ, and every second search is hotter, so that it leaves other valleys.
        heats = [
            Heat(tries, hot_j, hot_j * _COOLING, seed=seed)
            for seed, hot_j in zip(
                range(1, 1 + repeats), cycle((first_j, 3 * first_j)), strict=False
            )
        ]
        clocks = [anneal(problem, start.clock, goal, heat, library) for heat in heats]
        return min(start, *map(self.plan, clocks), key=_order)

    def _tried(self, levels: Sequence[int], measured: Sequence[int]) -> Iterator[_Plan | None]:
        """Yield the best plan for each number of changes by trying every combination.

        One that is late has an infinite cost.
        """
        problem = self.problem
        count = math.prod(measured)
        finite = [np.flatnonzero(np.isfinite(problem.time_s[c])) for c in problem.member]
        radix = np.array(measured)[:, None]
        later = np.cumprod([1, *measured[:0:-1]])[::-1, None]  # choices of what comes after each
        # The digits of each combination's number, of mixed radix: the last computation counts
        # fastest.
        choice = np.arange(count) // later % radix
        clock = np.array([options[chosen] for options, chosen in zip(finite, choice, strict=True)])
        time_s = _replayed_all_s(problem, problem.time_s[problem.member[:, None], clock])
        # The same order of summation as in `load_state`, so that equal plans cost the same.
        cost_j = np.cumsum(problem.cost_j[problem.member[:, None], clock], axis=0)[-1]
        cost_j[time_s > self.deadline_s] = math.inf
        # Iterations repeat: the first computation follows the last one of its rank.
        changes = np.max(
            [(clock[a:b] != np.roll(clock[a:b], 1, axis=0)).sum(axis=0) for a, b in self._ranks],
            axis=0,
        )
        for level in levels:
            within = np.flatnonzero(changes <= level)
            order = np.lexsort((time_s[within], cost_j[within]))
            yield self.plan(clock[:, within[order[0]]].copy()) if len(within) else None

    def _constant_paces(self) -> list[_Plan]:
        """Return the Pareto front of the plans with one clock per rank, fastest first."""
        load_s = self._load_s
        load_j = self._load_j
        # A rank without a clock that all it runs were measured at cannot keep one.
        if not np.isfinite(load_s).any(axis=1).all():
            return []
        # No pace is faster than the busiest rank at its fastest; between two loads nothing changes.
        busiest_s = load_s.min(axis=1).max()
        limits_s = np.unique(load_s[np.isfinite(load_s) & (load_s >= busiest_s)])
        clocks = [
            np.where(load_s <= limit_s, load_j, np.inf).argmin(axis=1) for limit_s in limits_s
        ]
        clocks.append(load_s.argmin(axis=1))
        return _front([self.plan(clock[self.problem.rank]) for clock in clocks])

    def _starts(self) -> list[_Plan]:
        """Return where local searches start: of the plans of one pace that meet the deadline, the
        cheapest and the fastest; none if none meets it.
        """
        in_time = [plan for plan in self.paces if plan.late_s == 0.0]
        return [in_time[-1], *in_time[:1]] if len(in_time) > 1 else in_time

    def _exchanged(self, start: _Plan) -> _Plan:
        """Return the plan after a local search over the one clock of each rank: while it saves
        energy, one rank gets another clock, or one a slower and another a faster one.

        The best of all these moves is taken each time.
        """
        options = [
            _undominated(load_s, load_j)
            for load_s, load_j in zip(self._load_s, self._load_j, strict=True)
        ]
        rank_start = self.problem.rank_start[:-1]
        clocks = start.clock[rank_start]
        # A pace may be at a clock that another clock beats.
        chosen = [
            max(np.searchsorted(load_s[rank_options], load_s[clock], side="right") - 1, 0)
            for rank_options, load_s, clock in zip(options, self._load_s, clocks, strict=True)
        ]
        best = start
        for _ in range(_EXCHANGES):
            moves = self._exchanges(options, chosen)
            exchanged = self._cheapest_in_time(options, chosen, moves)
            if exchanged is None:
                break
            chosen = exchanged
            clock = np.array(
                [rank_options[i] for rank_options, i in zip(options, chosen, strict=True)]
            )
            best = min(best, self.plan(clock[self.problem.rank]), key=_order)
        return best

    def _exchanges(
        self, options: Sequence[Integers], chosen: Sequence[int]
    ) -> list[tuple[float, tuple[tuple[int, int], ...]]]:
        """Return the (joules added, ((rank, option), ...)) of all moves that save energy, or the
        shortest ones if these are too many to be replayed; the best ones first.
        """
        ranks = range(len(options))
        # Joules that each option adds to those of the rank's present one.
        added_j = [
            load_j[clocks] - load_j[clocks[i]]
            for clocks, i, load_j in zip(options, chosen, self._load_j, strict=True)
        ]
        most = _REPLAYED // len(self.problem.fixed_s)
        moves = list[tuple[float, tuple[tuple[int, int], ...]]]()
        # Pairs grow with the square of the reach, so it shrinks until all can be replayed.
        for reach in _REACHES:
            near = [
                range(max(0, i - reach), min(len(clocks), i + reach + 1))
                for clocks, i in zip(options, chosen, strict=True)
            ]
            # One rank alone saves only by a slower option: no faster one is cheaper.
            moves = [
                (float(added_j[rank][i]), ((rank, i),))
                for rank in ranks
                for i in near[rank]
                if i > chosen[rank]
            ]
            # One slower and another faster, if both together save.
            moves += [
                (float(added_j[slow][i] + added_j[fast][k]), ((slow, i), (fast, k)))
                for slow in ranks
                for i in near[slow]
                if i > chosen[slow]
                for fast in ranks
                if fast != slow
                for k in near[fast]
                if k < chosen[fast] and added_j[slow][i] + added_j[fast][k] < 0.0
            ]
            if len(moves) <= most:
                break
        return sorted(moves)[:most]

    def _cheapest_in_time(
        self,
        options: Sequence[Integers],
        chosen: Sequence[int],
        moves: Sequence[tuple[float, tuple[tuple[int, int], ...]]],
    ) -> list[int] | None:
        """Return the options of each rank after the first of the moves that meets the deadline."""
        problem = self.problem
        # The moves that save most come first, so the first one in time is the answer.
        for first in range(0, len(moves), _BATCH):
            batch = moves[first : first + _BATCH]
            tried = np.repeat(np.array(chosen, dtype=np.int64)[:, None], len(batch), axis=1)
            for column, (_, changes) in enumerate(batch):
                for rank, option in changes:
                    tried[rank, column] = option
            clock = np.array(
                [
                    rank_options[numbers]
                    for rank_options, numbers in zip(options, tried, strict=True)
                ]
            )
            duration_s = problem.time_s[problem.member[:, None], clock[problem.rank]]
            in_time = np.flatnonzero(_replayed_all_s(problem, duration_s) <= self.deadline_s)
            if len(in_time):
                exchanged: list[int] = tried[:, in_time[0]].tolist()
                return exchanged
        return None

    def _around(self) -> list[tuple[_Plan, _Plan]]:
        """Return all pairs of a pace that meets the deadline and one that does not."""
        in_time = [plan for plan in self.paces if plan.late_s == 0.0]
        late = [plan for plan in self.paces if plan.late_s > 0.0]
        return [(fast, slow) for fast in in_time for slow in late]

    def _saving_per_second_w(self) -> float:
        """Return what a second more of deadline saves: between the paces around it, else from
        fastest to cheapest clock.
        """
        slopes_w = [(a.cost_j - b.cost_j) / (b.time_s - a.time_s) for a, b in self._around()]
        if slopes_w:
            return float(np.median(slopes_w))
        # Without paces on both sides: how steep all rows are together, once for each rank.
        finite = np.isfinite(self.problem.time_s)
        spread_j = max(np.ptp(self.problem.cost_j[finite]), 1e-9)
        spread_s = max(np.ptp(self.problem.time_s[finite]), 1e-9)
        return float(spread_j / spread_s) * len(self._ranks)

    def _fast_ends(self) -> list[_Plan]:
        """Return plans in which each rank begins and ends fast, and keeps one clock between."""
        return [self.plan(self._head_pace_tail(a, b)) for a in _ENDS for b in _ENDS]

    def _head_pace_tail(self, head: int, tail: int) -> Integers:
        """Return a plan in which each rank runs its first and last computations fast, and the
        others at one clock.

        That clock is the cheapest one in time, chosen rank by rank from the last one, so that two
        changes are enough. All of a rank is fast where no clock is in time, or where it has no more
        than `head` + `tail` computations.
        """
        problem = self.problem
        fastest = self._load_s.argmin(axis=1)
        state, _ = load_state(problem, fastest[problem.rank])
        for fast, (begin, end) in zip(fastest[::-1], reversed(self._ranks), strict=True):
            inner = slice(begin + head, end - tail)
            node = problem.node[inner]
            member = problem.member[inner]
            if not len(node):
                continue
            # Cheapest first: the first clock in time is taken, and the fast one in any case.
            for clock in np.argsort(problem.cost_j[member].sum(axis=0), kind="stable"):
                state.clock[inner] = clock
                state.duration_s[node] = problem.time_s[member, clock]
                # The replay goes on from the first node that changed.
                state.touched[0] = min(state.touched[0], node.min())
                if clock == fast or replay(problem, state) <= self.deadline_s:
                    break
        return state.clock

    def _mixtures(self) -> list[_Plan]:
        """Return plans of two paces, one until some moment and the other after it, in either
        order.
        """

        def promise_j(pair: tuple[_Plan, _Plan]) -> float:
            fast, slow = pair
            part = (self.deadline_s - fast.time_s) / (slow.time_s - fast.time_s)
            return fast.cost_j + part * (slow.cost_j - fast.cost_j)

        pairs = sorted(self._around(), key=promise_j)[:_PAIRS]
        return [self._mixed(*both) for pair in pairs for both in (pair, pair[::-1])]

    def _mixed(self, first: _Plan, second: _Plan) -> _Plan:
        """Return as much of the slower plan as fits, with one moment of change for all ranks."""
        best = first if first.late_s == 0.0 else second
        # Waves are from 0 to 1, so a moment of 1 is all of the first plan, and 0 all of the second.
        fits, misses = (1.0, 0.0) if best is first else (0.0, 1.0)
        for _ in range(_HALVINGS):
            moment = (fits + misses) / 2
            mixed = self.plan(np.where(self.problem.wave < moment, first.clock, second.clock))
            if mixed.late_s == 0.0:
                fits = moment
                best = mixed
            else:
                misses = moment
        return best

    def _fastest_segments(self, segments: int) -> Integers:
        """Return clocks in at most so many segments per rank with the least sum of durations, by
        dynamic programming.

        If that few segments are impossible, some of the clocks are not measured ones.
        """
        clocks = self.problem.time_s.shape[1]
        chosen = list[int]()
        for first, stop in self._ranks:
            # (segments so far, clock of the last one) -> the least seconds
            least_s = np.full((segments + 1, clocks), np.inf)
            least_s[0] = 0.0
            # 1 + the clock before, where a segment begins with this computation; else 0
            came = np.zeros((stop - first, segments + 1, clocks), dtype=np.int64)
            for i, time_s in enumerate(self.problem.time_s[self.problem.member[first:stop]]):
                before = least_s[:-1].argmin(axis=1)
                before_s = least_s[:-1].min(axis=1)
                # A segment begins where the best plan of one segment less beats going on at this
                # clock.
                begins = before_s[:, None] < least_s[1:]
                came[i, 1:] = np.where(begins, before[:, None] + 1, 0)
                least_s[1:] = np.where(begins, before_s[:, None], least_s[1:]) + time_s
                # Only before the first computation there may be no segment.
                least_s[0] = np.inf
            # Back from the best end, along the clocks that it came from.
            segment = int(least_s[1:].min(axis=1).argmin()) + 1
            clock = int(least_s[segment].argmin())
            backwards = list[int]()
            for i in range(stop - first - 1, -1, -1):
                backwards.append(clock)
                if came[i, segment, clock]:
                    clock = int(came[i, segment, clock]) - 1
                    segment -= 1
            chosen += reversed(backwards)
        return np.array(chosen, dtype=np.int64)


def _replayed_all_s(problem: ClockProblem, computed_s: Floats) -> Floats:
    """Return the (plans,) seconds of an iteration, of the (m, plans) durations of computations."""
    duration_s = np.tile(problem.fixed_s[:, None], computed_s.shape[1])
    duration_s[problem.node] = computed_s
    end_s = np.zeros_like(duration_s)
    # Nodes are in topological order, so one pass for all plans at once is enough.
    for k, own_s in enumerate(duration_s):
        for i in range(problem.before_start[k], problem.before_start[k + 1]):
            end_s[k] = np.maximum(end_s[k], end_s[problem.before[i]] + problem.before_lag_s[i])
        end_s[k] += own_s
    latest_s: Floats = end_s.max(axis=0)
    return latest_s


def _undominated(load_s: Floats, load_j: Floats) -> Integers:
    """Return the clocks that no other beats in both, the fastest first."""
    kept = list[int]()
    for clock in np.lexsort((load_j, load_s)).tolist():
        if load_s[clock] < math.inf and (not kept or load_j[clock] < load_j[kept[-1]]):
            kept.append(clock)
    return np.array(kept, dtype=np.int64)


def _front(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the plans that no other one beats in time and energy, the fastest first."""
    kept: list[_Plan] = []
    for plan in sorted(plans, key=lambda p: (p.time_s, p.cost_j)):
        if not kept or plan.cost_j < kept[-1].cost_j:
            kept.append(plan)
    return kept


def _order(plan: _Plan) -> tuple[float, float]:
    return (plan.late_s, plan.cost_j if plan.late_s == 0.0 else plan.time_s)
