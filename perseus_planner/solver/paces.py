"""Plans in which each rank keeps one clock for the whole iteration: for every pace the cheapest
clocks that keep it, and a local search over the clocks of one rank, and of two at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.budget_problem import (
    by_worth,
    pareto_front,
    replay_each_s,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.solver.budget_problem import BudgetPlan, BudgetProblem
    from perseus_planner.solver.network import Floats, Integers

#: exchanges of a local search, at most; by hand, it ends far earlier
_EXCHANGES = 200
_REACHES = (64, 8, 4, 2, 1)  #: how many clocks away the next one of a rank may be in an exchange
_REPLAYED = 20_000_000  #: exchanges times operations that are looked at for one of them
_BATCH = 256  #: exchanges that are replayed together


class _RankOption(NamedTuple):
    """An option for one rank: the number of a clock among those that no other of its clocks
    beats, the fastest first.
    """

    rank: int
    option: int


class _Exchange(NamedTuple):
    """One rank gets another clock, or two do; the one that saves most is the smallest."""

    added_j: float
    options: tuple[_RankOption, ...]  #: of the ranks that get another clock


def find_paces(problem: BudgetProblem) -> list[BudgetPlan]:
    """Return the Pareto front of the plans found with one clock for each rank, the fastest first;
    none if some rank has no clock that all it runs were measured at.
    """
    paces = _constant_paces(problem)
    in_time = [plan for plan in paces if plan.late_s == 0.0]
    # Of those in time, local searches start from the cheapest one and from the fastest one.
    starts = [in_time[-1], in_time[0]] if len(in_time) > 1 else in_time
    return pareto_front([*paces, *(_exchanged(problem, start) for start in starts)])


def around_deadline(paces: Sequence[BudgetPlan]) -> list[tuple[BudgetPlan, BudgetPlan]]:
    """Return all pairs of a pace that meets the deadline and one that does not."""
    in_time = [plan for plan in paces if plan.late_s == 0.0]
    late = [plan for plan in paces if plan.late_s > 0.0]
    return [(fast, slow) for fast in in_time for slow in late]


def _constant_paces(problem: BudgetProblem) -> list[BudgetPlan]:
    """Return the Pareto front of the plans in which each rank takes its cheapest clock that keeps
    a pace, for every pace.
    """
    load_s = problem.load_s
    load_j = problem.load_j
    if not np.isfinite(load_s).any(axis=1).all():
        return []
    # No pace is faster than the busiest rank at its fastest; between two loads nothing changes.
    busiest_s = load_s.min(axis=1).max()
    limits_s = np.unique(load_s[np.isfinite(load_s) & (load_s >= busiest_s)])
    clocks = [np.where(load_s <= limit_s, load_j, np.inf).argmin(axis=1) for limit_s in limits_s]
    # Beside them all ranks at their fastest.
    clocks.append(load_s.argmin(axis=1))
    return pareto_front([problem.steady_plan(clock) for clock in clocks])


def _exchanged(problem: BudgetProblem, start: BudgetPlan) -> BudgetPlan:
    """Return the plan after a local search over the one clock of each rank: while it saves
    energy, one rank gets another clock, or one a slower and another a faster one.

    The best of all these exchanges is taken each time.
    """
    options = [
        _undominated(load_s, load_j)
        for load_s, load_j in zip(problem.load_s, problem.load_j, strict=True)
    ]
    start_clocks = start.clock[problem.clocks.rank_start[:-1]]
    # A pace may be at a clock that another clock beats.
    chosen = [
        max(int(np.searchsorted(load_s[rank_options], load_s[clock], side="right")) - 1, 0)
        for rank_options, load_s, clock in zip(options, problem.load_s, start_clocks, strict=True)
    ]
    best = start
    for _ in range(_EXCHANGES):
        saving = _saving_exchanges(problem, options, chosen)
        exchanged = _first_in_time(problem, options, chosen, saving)
        if exchanged is None:
            break
        chosen = exchanged
        clock = np.array([clocks[i] for clocks, i in zip(options, chosen, strict=True)])
        best = min(best, problem.steady_plan(clock), key=by_worth)
    return best


def _saving_exchanges(
    problem: BudgetProblem, options: Sequence[Integers], chosen: Sequence[int]
) -> list[_Exchange]:
    """Return all exchanges that save energy, or the shortest ones if these are too many to be
    replayed; the best ones first.
    """
    # Joules that each option adds to those of the rank's present one.
    added_j: list[list[float]] = [
        (load_j[clocks] - load_j[clocks[i]]).tolist()
        for clocks, i, load_j in zip(options, chosen, problem.load_j, strict=True)
    ]
    most = _REPLAYED // len(problem.clocks.fixed_s)
    saving: list[_Exchange] = []
    # Pairs grow with the square of the reach, so it shrinks until all can be replayed.
    for reach in _REACHES:
        slower = [
            _RankOption(rank, option)
            for rank, now in enumerate(chosen)
            for option in range(now + 1, min(len(options[rank]), now + reach + 1))
        ]
        faster = [
            _RankOption(rank, option)
            for rank, now in enumerate(chosen)
            for option in range(max(0, now - reach), now)
        ]
        # One rank alone saves only by a slower option: no faster one is cheaper.
        saving = [_Exchange(added_j[slow.rank][slow.option], (slow,)) for slow in slower]
        # One slower and another faster, if both together save.
        for slow in slower:
            slower_j = added_j[slow.rank][slow.option]
            saving += [
                _Exchange(slower_j + added_j[fast.rank][fast.option], (slow, fast))
                for fast in faster
                if fast.rank != slow.rank and slower_j + added_j[fast.rank][fast.option] < 0.0
            ]
        if len(saving) <= most:
            break
    return sorted(saving)[:most]


def _first_in_time(
    problem: BudgetProblem,
    options: Sequence[Integers],
    chosen: Sequence[int],
    exchanges: Sequence[_Exchange],
) -> list[int] | None:
    """Return the option of each rank after the first exchange that meets the deadline, None if
    none does.
    """
    clocks = problem.clocks
    for first in range(0, len(exchanges), _BATCH):
        batch = exchanges[first : first + _BATCH]
        # (ranks, exchanges) the option of each rank
        tried = np.repeat(np.array(chosen, dtype=np.int64)[:, None], len(batch), axis=1)
        for column, exchange in enumerate(batch):
            for rank, option in exchange.options:
                tried[rank, column] = option
        clock = np.array([of_rank[i] for of_rank, i in zip(options, tried, strict=True)])
        duration_s = clocks.time_s[clocks.member[:, None], clock[clocks.rank]]
        in_time = np.flatnonzero(replay_each_s(clocks, duration_s) <= problem.deadline_s)
        if len(in_time):
            exchanged: list[int] = tried[:, in_time[0]].tolist()
            return exchanged
    return None


def _undominated(load_s: Floats, load_j: Floats) -> Integers:
    """Return the clocks that no other beats in both, the fastest first."""
    kept = list[int]()
    for clock in np.lexsort((load_j, load_s)).tolist():
        if load_s[clock] < math.inf and (not kept or load_j[clock] < load_j[kept[-1]]):
            kept.append(clock)
    return np.array(kept, dtype=np.int64)
