"""Find plans within a switch budget: a limit on clock changes per GPU and iteration, and a least
time between them.

The ranks of a pipeline run in lockstep, so a good plan with few changes has phases: for a time all
ranks keep one pace, each at the clock that suits it best there, and then another pace. Mixing two
paces costs what the straight line between them says. The begin and end of an iteration, where the
pipeline fills and drains, are phases too.

1. *No change.* For every possible pace, each rank takes its cheapest clock that keeps it, for the
   whole iteration. Annealing (`segment_search.py`) starts from the best of these plans that meets
   the deadline.
2. *Two changes.* A slower pace and a faster one, one after the other, share an iteration as the
   deadline allows. And all ranks may be fast while the pipeline fills and drains, and keep one
   clock each between. Both are searched.
3. *More changes.* The levels, a fixed series of numbers of changes, are annealed in turn, each from
   the plan of the level before; it may take parts of the plans of all paces and of the plan without
   a budget. So a larger budget never gives a worse plan.

If there are few combinations of clocks, all of them are tried instead. Everything is seeded: equal
input, equal plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget
from perseus_planner.solver.segment_search import (
    Goal,
    Heat,
    anneal,
    fastest_segments,
    head_pace_tail,
    try_all_clocks,
)
from perseus_planner.solver.segments import (
    SegmentProblem,
    load_state,
    max_changes_of,
    replay,
    segment_problem,
)

if TYPE_CHECKING:
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Integers
    from perseus_planner.solver.point_problem import PointProblem

_FEW = (
    2**15
)  #: combinations up to which all are tried, so that the smallest problems are solved exactly
_EFFORT = (
    75_000_000,
    5_000,
    60_000,
)  #: for each level: tries times operations, least tries, most tries
_HEAT = (
    3e-3,
    3e-5,
)  #: first and last temperature, as a part of the distance to the plan without a budget
_HEAT_OF_TIME = (
    1e-3,
    1e-6,
)  #: likewise as a part of the iteration time, when the search is for the fastest plan
_NEAR = 0.12  #: distance from the deadline of the paces whose parts may be taken, as a part of it
_ENDS = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    11,
    14,
)  #: computations that a rank runs fast at the begin, and at the end
_PAIRS = 16  #: pairs of paces that are tried one after the other
_HALVINGS = 12  #: steps to find how two paces share an iteration
#: first price of a second beyond the deadline, times what the paces around it save per second
_PRICE = 1.0
_MOST_FAST_SEGMENTS = (
    16  #: in the fastest plan that a search begins with if none meets the deadline
)


class _Candidate(NamedTuple):
    """A plan; the better one of two is the smaller one."""

    late_s: float  #: seconds beyond the deadline
    cost_j: float
    time_s: float
    clock: Integers


def clocks_within_budget(
    dag: PipelineDag,
    points: PointProblem,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    max_changes: int,
) -> list[int]:
    """Return the clock of each computation of `dag.computations`, MHz, in the best plan found
    within a switch budget.

    Args:
        dag: the iteration.
        points: its operating points, from `point_problem`.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget.
        max_changes: how often each rank may change its clock in an iteration, including the change
            back to its first clock.

    Returns:
        With equal other arguments, a larger budget never gives a larger effective energy. If
        `unlimited_mhz` is within the budget, the result is that, or one clock per rank if that
        costs less.

    Raises:
        InfeasibleBudget: If no plan found within the budget meets the deadline; names the least
            time found.
    """
    problem, clocks, unlimited = _lay_out(dag, points, unlimited_mhz)
    search = _search(problem, deadline_s, max_changes, unlimited)
    chosen = search.unlimited
    if not search.unlimited_fits:
        *_, best = _candidates_by_level(problem, search, _levels(search.goal.budget))
        if best is None or best.late_s > 0.0:
            raise InfeasibleBudget(deadline_s, max_changes, None if best is None else best.time_s)
        chosen = best.clock
    return [clocks[i] for i in chosen.tolist()]


def clocks_by_budget(
    dag: PipelineDag,
    points: PointProblem,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    levels: Sequence[int],
) -> dict[int, list[int]]:
    """Return `clocks_within_budget` for several numbers of changes, each searched from the one
    before.

    Args:
        dag: the iteration.
        points: its operating points, from `point_problem`.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget.
        levels: numbers of changes, rising.

    Returns:
        Number of changes -> clocks, MHz. Numbers within which no plan was found are left out.
    """
    problem, clocks, unlimited = _lay_out(dag, points, unlimited_mhz)
    search = _search(problem, deadline_s, levels[-1], unlimited)
    candidates = zip(levels, _candidates_by_level(problem, search, levels), strict=True)
    chosen = {
        level: candidate.clock
        for level, candidate in candidates
        if candidate is not None and candidate.late_s == 0.0
    }
    return {level: [clocks[i] for i in clock.tolist()] for level, clock in chosen.items()}


def _lay_out(
    dag: PipelineDag, points: PointProblem, unlimited_mhz: Sequence[int]
) -> tuple[SegmentProblem, list[int], Integers]:
    """Return the problem, its clocks in MHz, and the plan without a budget."""
    problem, clocks = segment_problem(dag, points, unlimited_mhz)
    column = {clock: i for i, clock in enumerate(clocks)}
    return problem, clocks, np.array([column[clock] for clock in unlimited_mhz], dtype=np.int64)


class _Search(NamedTuple):
    """The goal of a search, and the plans that are known before it."""

    goal: Goal
    unlimited: Integers  #: the best plan known without a budget
    unlimited_fits: bool  #: whether that plan is within the budget
    paces: list[_Candidate]


def _search(
    problem: SegmentProblem,
    deadline_s: float,
    budget: int,
    unlimited: Integers,
) -> _Search:
    most = min(budget, len(unlimited))
    paces, unlimited_j = _constant_paces(problem, deadline_s), load_state(problem, unlimited)[1]
    steady = min(paces, key=_order, default=None)
    # If few clocks fit a deadline, one clock per rank may be better than the rounded plan.
    if steady is not None and steady.late_s == 0.0 and steady.cost_j < unlimited_j:
        unlimited, unlimited_j = steady.clock, steady.cost_j
    goal = Goal(deadline_s, most, 0.0, unlimited_j)
    return _Search(goal, unlimited, max_changes_of(problem, unlimited) <= most, paces)


def _candidates_by_level(
    problem: SegmentProblem, search: _Search, levels: Sequence[int]
) -> Iterator[_Candidate | None]:
    """Yield the best plan found for each number of changes in turn."""
    measured = np.isfinite(problem.time_s).sum(axis=1)[problem.member]
    if math.prod(measured.tolist()) <= _FEW:
        yield from (_try_all(problem, search.goal._replace(budget=level)) for level in levels)
        return
    ends = _fast_ends(problem, search.goal.deadline_s) if levels[-1] >= 2 else []
    constant = sum(level < 2 for level in levels)
    others = chain([None] * constant, _search_levels(problem, search, levels[constant:], ends))
    for candidates in zip(_search_levels(problem, search, levels, []), others, strict=True):
        yield min(
            (candidate for candidate in candidates if candidate is not None),
            key=_order,
            default=None,
        )


def _try_all(problem: SegmentProblem, goal: Goal) -> _Candidate | None:
    clock, time_s, cost_j = try_all_clocks(problem, goal)
    return (
        _Candidate(max(0.0, time_s - goal.deadline_s), cost_j, time_s, clock)
        if time_s < math.inf
        else None
    )


def _search_levels(
    problem: SegmentProblem, search: _Search, levels: Sequence[int], known: Sequence[_Candidate]
) -> Iterator[_Candidate | None]:
    """Yield the best plan found for each number of changes; `known` plans take the place of
    mixtures of two paces.
    """
    goal, unlimited, _, paces = search
    goal = goal._replace(price_w=_PRICE * _saving_per_second_w(problem, paces, goal.deadline_s))
    unlimited_j = load_state(problem, unlimited)[1]
    near = [pace.clock for pace in paces if abs(pace.time_s / goal.deadline_s - 1) <= _NEAR]
    models = np.array(near or [unlimited])
    mixed = np.concatenate([models, np.repeat(unlimited[None], (len(models) + 1) // 2, axis=0)])
    best = min(paces, key=_order, default=None)
    mixtures: list[_Candidate] | None = None
    for level in levels:
        at_level = goal._replace(budget=level)
        starts = [] if best is None else [best]
        if level >= 2 and mixtures is None:
            mixtures = list(known) or _mixtures(problem, paces, goal.deadline_s)
            starts += mixtures
        if best is None or best.late_s > 0.0:
            clock = fastest_segments(problem, min(max(level, 1), _MOST_FAST_SEGMENTS))
            starts.append(_candidate(problem, clock, goal.deadline_s))
        starts = [start for start in starts if start.cost_j < math.inf]
        if not starts:
            yield best
            continue
        # A plan that costs less than the one without a budget counts only if no other meets the
        # deadline.
        best = min(
            [start for start in starts if start.cost_j >= goal.floor_j] or starts, key=_order
        )
        if best.late_s > 0.0:
            best = min(starts, key=_order)
        library = models if level == 0 else mixed
        if best.late_s > 0.0:
            best = _speed_up(problem, best, at_level, library)
        best = _improve(problem, best, at_level, unlimited_j, library)
        yield best


def _levels(budget: int) -> list[int]:
    """Return the numbers of changes that are searched one after the other: 0, 2, 3, 4, 6, 8, 12,
    16 and so on.
    """
    levels, power = [0], 2
    while power <= budget:
        levels += [level for level in (power, power * 3 // 2) if level <= budget]
        power *= 2
    return levels


def _order(plan: _Candidate) -> tuple[float, float]:
    return (plan.late_s, plan.cost_j if plan.late_s == 0.0 else plan.time_s)


def _candidate(problem: SegmentProblem, clock: Integers, deadline_s: float) -> _Candidate:
    state, cost_j = load_state(problem, clock)
    time_s = replay(problem, state)
    return _Candidate(max(0.0, time_s - deadline_s), cost_j, time_s, clock)


def _constant_paces(problem: SegmentProblem, deadline_s: float) -> list[_Candidate]:
    """Return the Pareto front of the plans with one clock per rank, fastest first."""
    by_rank = [problem.member[i:j] for i, j in pairwise(problem.rank_start.tolist())]
    load_s = np.array([problem.time_s[member].sum(axis=0) for member in by_rank])
    cost_j = np.array([problem.cost_j[member].sum(axis=0) for member in by_rank])
    if not np.isfinite(load_s).any(axis=1).all():
        return []
    busiest_s = load_s.min(axis=1).max()
    limits_s = np.unique(load_s[np.isfinite(load_s) & (load_s >= busiest_s)])
    clocks = [np.where(load_s <= limit_s, cost_j, np.inf).argmin(axis=1) for limit_s in limits_s]
    clocks.append(load_s.argmin(axis=1))
    plans = sorted(
        (_candidate(problem, clock[problem.rank], deadline_s) for clock in clocks),
        key=lambda p: p[2:0:-1],
    )
    kept: list[_Candidate] = []
    for plan in plans:
        if not kept or plan.cost_j < kept[-1].cost_j:
            kept.append(plan)
    return kept


def _saving_per_second_w(
    problem: SegmentProblem, paces: list[_Candidate], deadline_s: float
) -> float:
    """Return what a second more of deadline saves: between the paces around it, else from
    fastest to cheapest clock.
    """
    fast_count = sum(pace.time_s <= deadline_s for pace in paces)
    slopes_w = [
        (a.cost_j - b.cost_j) / (b.time_s - a.time_s)
        for a in paces[:fast_count]
        for b in paces[fast_count:]
    ]
    if slopes_w:
        return float(np.median(slopes_w))
    finite = np.isfinite(problem.time_s[problem.member])
    spread_j = np.ptp(problem.cost_j[problem.member][finite])
    spread_s = np.ptp(problem.time_s[problem.member][finite])
    return float(max(spread_j, 1e-9) / max(spread_s, 1e-9)) * len(problem.usable_count)


def _fast_ends(problem: SegmentProblem, deadline_s: float) -> list[_Candidate]:
    """Return plans in which each rank begins and ends fast, and keeps one clock between, for
    heads and tails.
    """
    clocks = (head_pace_tail(problem, deadline_s, head, tail) for head in _ENDS for tail in _ENDS)
    return [_candidate(problem, clock, deadline_s) for clock in clocks]


def _mixtures(
    problem: SegmentProblem, paces: list[_Candidate], deadline_s: float
) -> list[_Candidate]:
    """Return plans of two paces, one until some moment and the other after it, in either order."""
    fast_count, promising = sum(pace.time_s <= deadline_s for pace in paces), []
    for fast in paces[:fast_count]:
        for slow in paces[fast_count:]:
            part = (deadline_s - fast.time_s) / (slow.time_s - fast.time_s)
            promising.append((fast.cost_j + part * (slow.cost_j - fast.cost_j), fast, slow))
    promising.sort(key=lambda entry: entry[0])
    pairs = [pair for _, fast, slow in promising[:_PAIRS] for pair in ((fast, slow), (slow, fast))]
    return [_mixed(problem, first, second, deadline_s) for first, second in pairs]


def _mixed(
    problem: SegmentProblem, first: _Candidate, second: _Candidate, deadline_s: float
) -> _Candidate:
    """Return as much of the slower plan as fits, with one moment of change for all ranks."""
    best = first if first.late_s == 0.0 else second
    fits, misses = (1.0, 0.0) if best is first else (0.0, 1.0)
    for _ in range(_HALVINGS):
        moment = (fits + misses) / 2
        clock = np.where(problem.wave < moment, first.clock, second.clock)
        mixed = _candidate(problem, clock, deadline_s)
        if mixed.late_s == 0.0:
            fits, best = moment, mixed
        else:
            misses = moment
    return best


def _tries(problem: SegmentProblem) -> int:
    work, least, most = _EFFORT
    return min(max(work // len(problem.fixed_s), least), most)


def _speed_up(
    problem: SegmentProblem, start: _Candidate, goal: Goal, library: Integers
) -> _Candidate:
    """Search for the fastest plan, whatever it costs, and return the better one of it and
    `start`.
    """
    free = problem._replace(cost_j=np.where(np.isfinite(problem.cost_j), 0.0, np.inf))
    heat = Heat(_tries(problem), *(start.time_s * part for part in _HEAT_OF_TIME))
    fast = anneal(free, start.clock, goal._replace(price_w=1.0, floor_j=-math.inf), heat, library)
    return min(start, _candidate(problem, fast, goal.deadline_s), key=_order)


def _improve(
    problem: SegmentProblem, start: _Candidate, goal: Goal, unlimited_j: float, library: Integers
) -> _Candidate:
    """Anneal one level; the result is at least as good as `start`."""
    gap_j = start.cost_j - unlimited_j
    if gap_j <= 0.0 and goal.floor_j > -math.inf:
        return start
    heat = Heat(
        _tries(problem),
        *(max(abs(gap_j), 1e-12 * abs(start.cost_j), 1e-300) * part for part in _HEAT),
    )
    better = _candidate(problem, anneal(problem, start.clock, goal, heat, library), goal.deadline_s)
    return min(start, better, key=_order)
