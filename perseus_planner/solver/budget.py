"""Plans with a switch budget: at most so many clock changes per GPU and iteration, no clock held too short.

The ranks of a pipeline run in lockstep, so a good plan of few changes is one of phases: for a time all ranks keep to
one pace, each at the clock that suits it best there, and then to another. A pace between two is worth what the straight
line between them says. Beginning and end of an iteration, where the pipeline fills and drains, are phases too.

1. *No change.* For every pace there is, each rank takes its cheapest clock that keeps to it, for the whole iteration.
   Annealing (`run_search.py`) starts from the best of these that is within the deadline.
2. *Two changes.* A slower pace and a faster one, one after the other, share an iteration as the deadline allows.
3. *More changes.* Each number of a fixed row is annealed from the plan of the number before, and may take parts of the
   plans of all paces and of the plan without a budget. So a larger budget never gives a worse plan.

All choices are tried instead where they are few. Everything is seeded: equal input, equal plan.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.errors import InfeasibleBudget
from perseus_planner.solver.run_search import Goal, Heat, anneal, cheapest_within, fastest_runs
from perseus_planner.solver.runs import RunProblem, least_dwell_s, loaded, most_changes, replayed, run_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.choices import Choices
    from perseus_planner.solver.network import Integers

_FEW = 2**15  #: choices in all that are tried one by one instead, so that the smallest problems are solved exactly
_EFFORT = (75_000_000, 5_000, 60_000)  #: of each level: tries times operations, least tries, most tries
_HEAT = (3e-3, 3e-5)  #: of the distance to the plan without a budget: how much worse a plan is gone on from
_HEAT_OF_TIME = (1e-3, 1e-6)  #: likewise, of the iteration time, where the fastest plan is searched for
_NEAR = 0.12  #: how far from the deadline the paces are that parts are taken from, as a part of it
_PAIRS = 16  #: pairs of these that are tried one after the other
_HALVINGS = 12  #: to find how they share an iteration
_PRICE = 1.0  #: at first, of a second beyond the deadline, times what the paces around it save per second
_MOST_FAST_RUNS = 16  #: of the fastest plan that a search begins with where none is within the deadline


class _Found(NamedTuple):
    """A plan; the better one is the smaller one."""

    late_s: float  #: beyond the deadline
    cost_j: float
    time_s: float
    clock: Integers


def clocks_within_budget(
    dag: PipelineDag,
    choices: Choices,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    max_changes: int | None,
    min_dwell_s: float,
) -> list[int]:
    """The clock of each computation, MHz, by its place in `dag.computations`: the best found within a switch budget.

    Args:
        dag: the iteration.
        choices: the same, as `choices_of` lays it out.
        deadline_s: of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan within the deadline without a budget.
        max_changes: as `within_budget` takes it.
        min_dwell_s: likewise.

    Raises:
        InfeasibleBudget: no plan found within the budget meets the deadline; names the least time found.
    """
    problem, clocks, unlimited = _laid_out(dag, choices, unlimited_mhz)
    return [clocks[i] for i in within_budget(problem, deadline_s, max_changes, min_dwell_s, unlimited).tolist()]


def clocks_by_budget(
    dag: PipelineDag,
    choices: Choices,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    levels: Sequence[int],
    min_dwell_s: float,
) -> dict[int, list[int]]:
    """`clocks_within_budget` for each of several numbers of changes, each searched from the one before.

    Args:
        dag: the iteration.
        choices: likewise, as all but `levels`.
        deadline_s: of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan within the deadline without a budget.
        levels: numbers of changes, rising.
        min_dwell_s: for how long a clock must be held at least, seconds.

    Returns:
        number of changes -> clocks, MHz; those within which no plan was found are left out.
    """
    problem, clocks, unlimited = _laid_out(dag, choices, unlimited_mhz)
    search = _search(problem, deadline_s, levels[-1], min_dwell_s, unlimited)
    found = zip(levels, _at_levels(problem, search, levels), strict=True)
    chosen = {level: each.clock for level, each in found if each is not None and each.late_s == 0.0}
    return {level: [clocks[i] for i in clock.tolist()] for level, clock in chosen.items()}


def within_budget(
    problem: RunProblem, deadline_s: float, budget: int | None, dwell_s: float, unlimited: Integers
) -> Integers:
    """The best clocks found that keep to a switch budget.

    Args:
        problem: the problem.
        deadline_s: seconds.
        budget: how often each rank may change its clock in an iteration, the way back to its beginning included; None:
            any number.
        dwell_s: for how long a clock must be held at least, seconds; a single one is held for ever.
        unlimited: (m,) the clock at each place of the programs in a plan within the deadline without such limits.

    Returns:
        (m,) the clock at each place. With equal other arguments a larger budget never gives a larger effective energy;
        one that `unlimited` keeps to gives `unlimited`, or one clock per rank where that costs less.

    Raises:
        InfeasibleBudget: no plan found within them meets the deadline; names the least time found.
    """
    search = _search(problem, deadline_s, budget, dwell_s, unlimited)
    if search.unlimited_fits:
        return search.unlimited
    *_, best = _at_levels(problem, search, _levels(search.goal.budget))
    if best is None or best.late_s > 0.0:
        raise InfeasibleBudget(deadline_s, budget, dwell_s, None if best is None else best.time_s)
    return best.clock


def _laid_out(
    dag: PipelineDag, choices: Choices, unlimited_mhz: Sequence[int]
) -> tuple[RunProblem, list[int], Integers]:
    """The problem, its clocks in MHz, and the plan without a budget."""
    problem, clocks = run_problem(dag, choices, unlimited_mhz)
    column = {clock: i for i, clock in enumerate(clocks)}
    return problem, clocks, np.array([column[clock] for clock in unlimited_mhz], dtype=np.int64)


class _Search(NamedTuple):
    """What is searched for, and what is known before."""

    goal: Goal
    unlimited: Integers  #: the best plan known without a budget
    unlimited_fits: bool  #: whether it keeps to the budget all the same
    paces: list[_Found]


def _search(problem: RunProblem, deadline_s: float, budget: int | None, dwell_s: float, unlimited: Integers) -> _Search:
    most = len(unlimited) if budget is None else min(budget, len(unlimited))
    paces, unlimited_j = _paces(problem, deadline_s), loaded(problem, unlimited)[1]
    steady = min(paces, key=_rank, default=None)
    holds = _held(problem, unlimited, dwell_s)
    # where few clocks fit a deadline, one clock per rank may be better than what a plan is rounded to
    if holds and steady is not None and steady.late_s == 0.0 and steady.cost_j < unlimited_j:
        unlimited, unlimited_j = steady.clock, steady.cost_j
    goal = Goal(deadline_s, most, dwell_s, 0.0, unlimited_j if holds else -math.inf)
    return _Search(goal, unlimited, holds and most_changes(problem, unlimited) <= most, paces)


def _at_levels(problem: RunProblem, search: _Search, levels: Sequence[int]) -> Iterator[_Found | None]:
    """The best plan found for each number of changes, in turn."""
    measured = np.isfinite(problem.time_s).sum(axis=1)[problem.member]
    if math.prod(measured.tolist()) > _FEW:
        return _searched(problem, search, levels)
    return (_best_of_all(problem, search.goal._replace(budget=level)) for level in levels)


def _best_of_all(problem: RunProblem, goal: Goal) -> _Found | None:
    clock, time_s, cost_j = cheapest_within(problem, np.zeros(len(problem.node), dtype=np.int64), goal)
    return _Found(max(0.0, time_s - goal.deadline_s), cost_j, time_s, clock) if time_s < math.inf else None


def _searched(problem: RunProblem, search: _Search, levels: Sequence[int]) -> Iterator[_Found | None]:
    goal, unlimited, _, paces = search
    goal = goal._replace(price_w=_PRICE * _worth_w(problem, paces, goal.deadline_s))
    unlimited_j = loaded(problem, unlimited)[1]
    near = [pace.clock for pace in paces if abs(pace.time_s / goal.deadline_s - 1) <= _NEAR]
    models = np.array(near or [unlimited])
    mixed = np.concatenate([models, np.repeat(unlimited[None], (len(models) + 1) // 2, axis=0)])
    best = min(paces, key=_rank, default=None)
    mixtures: list[_Found] | None = None
    for level in levels:
        at_level = goal._replace(budget=level)
        starts = [] if best is None else [best]
        if level >= 2 and mixtures is None:
            mixtures = _mixtures(problem, paces, goal.deadline_s)
            starts += mixtures
        if best is None or best.late_s > 0.0:
            clock = fastest_runs(problem, min(max(level, 1), _MOST_FAST_RUNS))
            starts.append(_found(problem, clock, goal.deadline_s))
        starts = [start for start in starts if start.cost_j < math.inf and _held(problem, start.clock, goal.dwell_s)]
        if not starts:
            yield best
            continue
        # a plan that costs less than the one without a budget counts only where there is no other in time
        best = min([start for start in starts if start.cost_j >= goal.floor_j] or starts, key=_rank)
        if best.late_s > 0.0:
            best = min(starts, key=_rank)
        library = models if level == 0 else mixed
        if best.late_s > 0.0:
            best = _hurried(problem, best, at_level, library)
        best = _improved(problem, best, at_level, unlimited_j, library)
        yield best


def _levels(budget: int) -> list[int]:
    """The numbers of changes that are searched one after the other: 0, 2, 3, 4, 6, 8, 12, 16 and so on."""
    levels, power = [0], 2
    while power <= budget:
        levels += [level for level in (power, power * 3 // 2) if level <= budget]
        power *= 2
    return levels


def _rank(found: _Found) -> tuple[float, float]:
    return (found.late_s, found.cost_j if found.late_s == 0.0 else found.time_s)


def _found(problem: RunProblem, clock: Integers, deadline_s: float) -> _Found:
    state, cost_j = loaded(problem, clock)
    time_s = replayed(problem, state)
    return _Found(max(0.0, time_s - deadline_s), cost_j, time_s, clock)


def _held(problem: RunProblem, clock: Integers, dwell_s: float) -> bool:
    """Whether each clock is held for `dwell_s` seconds."""
    state, _ = loaded(problem, clock)
    return bool(dwell_s <= 0.0 or least_dwell_s(problem, state, replayed(problem, state)) >= dwell_s)


def _paces(problem: RunProblem, deadline_s: float) -> list[_Found]:
    """Plans of one clock per rank that no other one of them beats, fastest first."""
    by_rank = [problem.member[i:j] for i, j in pairwise(problem.rank_start.tolist())]
    load_s = np.array([problem.time_s[member].sum(axis=0) for member in by_rank])
    cost_j = np.array([problem.cost_j[member].sum(axis=0) for member in by_rank])
    if not np.isfinite(load_s).any(axis=1).all():
        return []
    busiest_s = load_s.min(axis=1).max()
    limits_s = np.unique(load_s[np.isfinite(load_s) & (load_s >= busiest_s)])
    clocks = [np.where(load_s <= limit_s, cost_j, np.inf).argmin(axis=1) for limit_s in limits_s]
    clocks.append(load_s.argmin(axis=1))
    plans = sorted((_found(problem, clock[problem.rank], deadline_s) for clock in clocks), key=lambda p: p[2:0:-1])
    kept: list[_Found] = []
    for plan in plans:
        if not kept or plan.cost_j < kept[-1].cost_j:
            kept.append(plan)
    return kept


def _worth_w(problem: RunProblem, paces: list[_Found], deadline_s: float) -> float:
    """What a second of the deadline saves at most, watts: at the paces around it, else from fastest to cheapest."""
    at = sum(pace.time_s <= deadline_s for pace in paces)
    slopes_w = [(a.cost_j - b.cost_j) / (b.time_s - a.time_s) for a in paces[:at] for b in paces[at:]]
    if slopes_w:
        return float(np.median(slopes_w))
    finite = np.isfinite(problem.time_s[problem.member])
    spread_j = np.ptp(problem.cost_j[problem.member][finite])
    spread_s = np.ptp(problem.time_s[problem.member][finite])
    return float(max(spread_j, 1e-9) / max(spread_s, 1e-9)) * len(problem.usable_count)


def _mixtures(problem: RunProblem, paces: list[_Found], deadline_s: float) -> list[_Found]:
    """Plans of two paces, the one until some moment, the other from then on; either one first."""
    at, promising = sum(pace.time_s <= deadline_s for pace in paces), []
    for fast in paces[:at]:
        for slow in paces[at:]:
            part = (deadline_s - fast.time_s) / (slow.time_s - fast.time_s)
            promising.append((fast.cost_j + part * (slow.cost_j - fast.cost_j), fast, slow))
    promising.sort(key=lambda entry: entry[0])
    pairs = [pair for _, fast, slow in promising[:_PAIRS] for pair in ((fast, slow), (slow, fast))]
    return [_mixed(problem, first, second, deadline_s) for first, second in pairs]


def _mixed(problem: RunProblem, first: _Found, second: _Found, deadline_s: float) -> _Found:
    """As much of the slower one as fits, with one moment of change for all ranks."""
    best = first if first.late_s == 0.0 else second
    fits, misses = (1.0, 0.0) if best is first else (0.0, 1.0)
    for _ in range(_HALVINGS):
        moment = (fits + misses) / 2
        clock = np.where(problem.wave < moment, first.clock, second.clock)
        mixed = _found(problem, clock, deadline_s)
        if mixed.late_s == 0.0:
            fits, best = moment, mixed
        else:
            misses = moment
    return best


def _tries(problem: RunProblem) -> int:
    work, least, most = _EFFORT
    return min(max(work // len(problem.fixed_s), least), most)


def _hurried(problem: RunProblem, start: _Found, goal: Goal, library: Integers) -> _Found:
    """A plan nearer to the deadline: the search for the fastest one, whatever it costs."""
    free = problem._replace(cost_j=np.where(np.isfinite(problem.cost_j), 0.0, np.inf))
    heat = Heat(_tries(problem), *(start.time_s * part for part in _HEAT_OF_TIME))
    fast = anneal(free, start.clock, goal._replace(price_w=1.0, floor_j=-math.inf), heat, library)
    return min(start, _found(problem, fast, goal.deadline_s), key=_rank)


def _improved(problem: RunProblem, start: _Found, goal: Goal, unlimited_j: float, library: Integers) -> _Found:
    """The result of one level, at least as good as `start`."""
    gap_j = start.cost_j - unlimited_j
    if gap_j <= 0.0 and goal.floor_j > -math.inf:
        return start
    heat = Heat(_tries(problem), *(max(abs(gap_j), 1e-12 * abs(start.cost_j), 1e-300) * part for part in _HEAT))
    better = _found(problem, anneal(problem, start.clock, goal, heat, library), goal.deadline_s)
    return min(start, better, key=_rank)
