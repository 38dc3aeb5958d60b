"""Searches among clocks in runs: annealing, and every choice where there are few."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from perseus_planner.solver.run_moves import change_many, change_one
from perseus_planner.solver.runs import (
    RunProblem,
    State,
    changes,
    least_dwell_s,
    loaded,
    most_changes,
    put,
    replayed,
    restore,
)

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers

_DEARER = 8.0  #: how many times dearer it is to be late in the end than at first


class Goal(NamedTuple):
    """What is searched for: the least effective energy within these limits."""

    deadline_s: float
    budget: int  #: changes of each rank
    dwell_s: float  #: for how long a clock is held at least
    price_w: float  #: what a second beyond the deadline counts for when a search begins
    floor_j: float  #: plans that cost less do not count where another one is in time


class Heat(NamedTuple):
    """How long a search goes on, and how much worse a plan it goes on from: falling evenly, as a power of progress."""

    tries: int
    first_j: float
    last_j: float


@njit(cache=True)
def _keeps_within(problem: RunProblem, clock: Integers, first_rank: int, last_rank: int, budget: int) -> bool:
    most = 0
    for rank in range(first_rank, last_rank + 1):
        most = max(most, changes(problem, clock, rank))
    return most <= budget


@njit(cache=True)
def _vary(problem: RunProblem, state: State, library: Integers) -> tuple[float, int, int]:
    """One or two random changes, often in opposite directions; the effective energy added, first and last rank."""
    sign = 1 if np.random.random() < 0.5 else -1
    twice = np.random.random() < 0.4
    if np.random.random() < 0.6:
        i = np.random.randint(len(state.clock))
        first = last = problem.rank[i]
        added_j = change_one(problem, state, i, sign)
        if twice:
            own = np.random.random() < 0.5
            begin, end = problem.rank_start[first], problem.rank_start[first + 1]
            i = np.random.randint(begin, end) if own else np.random.randint(len(state.clock))
            first, last = min(first, problem.rank[i]), max(last, problem.rank[i])
            added_j += change_one(problem, state, i, -sign)
        return added_j, first, last
    ranks = len(problem.usable_count)
    first, last = 0, ranks - 1
    if np.random.random() < 0.5:
        first = np.random.randint(ranks)
        last = min(ranks - 1, first + np.random.randint(ranks))
    added_j = change_many(problem, state, first, last, sign, library)
    if twice:
        added_j += change_many(problem, state, first, last, -sign, library)
    return added_j, first, last


@njit(cache=True)
def anneal(problem: RunProblem, start: Integers, goal: Goal, heat: Heat, library: Integers) -> Integers:
    """The best clocks found by simulated annealing (Kirkpatrick et al. 1983) from `start`, which may be the best.

    A plan beyond the deadline is gone on from at a price, but counts only as long as there is none within. `start` and
    the result keep to budget and dwell. A result that costs less than `start` does so by more than sums are off by.

    Args:
        problem: the problem.
        start: (m,) clocks.
        goal: the limits.
        heat: effort and temperatures.
        library: (plans, m) clocks of plans from which parts may be taken; at least one plan.
    """
    np.random.seed(1)
    now, cost_j = loaded(problem, start)
    time_s, scale_j = replayed(problem, now), 0.0
    for i in range(len(start)):
        scale_j += abs(problem.cost_j[problem.member[i], start[i]])
    margin_j = 1e-10 * scale_j
    trial = State(now.clock.copy(), now.duration_s.copy(), now.end_s.copy(), now.touched.copy())
    best, best_s, best_j = start.copy(), time_s, cost_j
    stale = len(now.end_s)  # the first operation whose end in `trial` is not that of `now`
    for attempt in range(heat.tries):
        heat_j = heat.first_j * (heat.last_j / heat.first_j) ** (attempt / heat.tries)
        price_w = goal.price_w * _DEARER ** (attempt / heat.tries)
        worth_j = cost_j + price_w * max(0.0, time_s - goal.deadline_s)
        added_j, first, last = _vary(problem, trial, library)
        most_j = worth_j - heat_j * np.log(1.0 - np.random.random())
        good = trial.touched[0] < len(now.end_s) and cost_j + added_j <= most_j
        if good and _keeps_within(problem, trial.clock, first, last, goal.budget):
            trial.touched[0] = touched = min(trial.touched[0], stale)
            trial_s = replayed(problem, trial)
            trial_j = cost_j + added_j + price_w * max(0.0, trial_s - goal.deadline_s)
            good = trial_j <= most_j
            good = good and (goal.dwell_s <= 0.0 or least_dwell_s(problem, trial, trial_s) >= goal.dwell_s)
            stale = len(now.end_s) if good else touched
        else:
            good = False
            trial.touched[0] = len(now.end_s)
        begin, end = problem.rank_start[first], problem.rank_start[last + 1]
        if not good:
            restore(problem, now, trial, begin, end)
            continue
        restore(problem, trial, now, begin, end)
        cost_j, time_s = cost_j + added_j, trial_s
        late = time_s > goal.deadline_s
        better = time_s < best_s if late else best_s > goal.deadline_s or cost_j < best_j - margin_j
        if better and (late or best_s > goal.deadline_s or cost_j >= goal.floor_j - margin_j):
            best[:], best_s, best_j = now.clock, time_s, cost_j
    return best


@njit(cache=True)
def cheapest_within(problem: RunProblem, start: Integers, goal: Goal) -> tuple[Integers, float, float]:
    """The best of all choices of clocks, by trying each; its makespan, seconds, and effective energy, joules.

    Where none is within the deadline, energy is infinite, and the clocks are the fastest of those that keep to budget
    and dwell.

    Args:
        problem: the problem.
        start: (m,) any measured clock of each; changed in place.
        goal: the limits.
    """
    for i in range(len(start)):
        start[i] = -1
        _advance(problem, start, i)
    state, _ = loaded(problem, start)
    best, best_s, best_j = start.copy(), np.inf, np.inf
    while True:
        if most_changes(problem, state.clock) <= goal.budget:
            time_s, cost_j = replayed(problem, state), 0.0
            for i in range(len(start)):
                cost_j += problem.cost_j[problem.member[i], state.clock[i]]
            in_time = time_s <= goal.deadline_s
            if (cost_j < best_j if in_time else best_j == np.inf and time_s < best_s) and (
                goal.dwell_s <= 0.0 or least_dwell_s(problem, state, time_s) >= goal.dwell_s
            ):
                best[:], best_s, best_j = state.clock, time_s, cost_j if in_time else np.inf
        i = 0
        while i < len(start) and not _advance(problem, start, i):
            start[i] = -1
            _advance(problem, start, i)
            put(problem, state, i, start[i])
            i += 1
        if i == len(start):
            return best, best_s, best_j
        put(problem, state, i, start[i])


@njit(cache=True)
def _advance(problem: RunProblem, clock: Integers, i: int) -> bool:
    """The next measured clock at place i; False where there is none."""
    times_s = problem.time_s[problem.member[i]]
    for c in range(clock[i] + 1, len(times_s)):
        if times_s[c] < np.inf:
            clock[i] = c
            return True
    return False


@njit(cache=True)
def fastest_runs(problem: RunProblem, runs: int) -> Integers:
    """Clocks in at most so many runs per rank with the least sum of durations, by dynamic programming along programs.

    Where so few runs cannot be, some of the clocks are not measured ones.
    """
    clocks = problem.time_s.shape[1]
    clock = np.zeros(len(problem.node), dtype=np.int64)
    for rank in range(len(problem.usable_count)):
        first, count = problem.rank_start[rank], problem.rank_start[rank + 1] - problem.rank_start[rank]
        least_s = np.full((runs + 1, clocks), np.inf)  # [runs so far, clock of the last one]
        least_s[0] = 0.0
        came = np.zeros((count, runs + 1, clocks), dtype=np.int64)  # 1 + the clock before, where a run begins
        for i in range(count):
            for run in range(runs, 0, -1):
                before = np.argmin(least_s[run - 1])
                for c in range(clocks):
                    if least_s[run - 1, before] < least_s[run, c]:
                        least_s[run, c], came[i, run, c] = least_s[run - 1, before], before + 1
                    least_s[run, c] += problem.time_s[problem.member[first + i], c]
            least_s[0] = np.inf
        run = 1 + int(np.argmin(np.array([least_s[r].min() for r in range(1, runs + 1)])))
        c = int(np.argmin(least_s[run]))
        for i in range(count - 1, -1, -1):
            clock[first + i] = c
            if came[i, run, c]:
                run, c = run - 1, came[i, run, c] - 1
    return clock
