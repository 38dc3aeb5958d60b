"""Search for the best clock segments: by annealing, or by trying everything if there is little
to try.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import inner_kernel, kernel
from perseus_planner.solver.segments import (
    SegmentProblem,
    SegmentState,
    change_ranks,
    change_segment,
    load_state,
    max_changes,
    replay,
    restore,
    set_clock,
)

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers

_DEARER = 8.0  #: the price of being late at the end of a search, as a multiple of the first price


class Goal(NamedTuple):
    """The goal of a search: the least effective energy within these limits."""

    deadline_s: float
    budget: int  #: most changes of each rank
    price_w: float  #: price of a second beyond the deadline when a search begins
    floor_j: float  #: plans that cost less count only if no other meets the deadline


class Heat(NamedTuple):
    """The number of tries of a search, and its first and last temperature, which falls
    exponentially with progress.
    """

    tries: int
    first_j: float
    last_j: float


@inner_kernel
def _vary(
    problem: SegmentProblem, state: SegmentState, library: Integers
) -> tuple[float, int, int]:
    """Make one or two random changes; return the effective energy added, and the first and last
    rank changed.
    """
    sign = 1 if np.random.random() < 0.5 else -1
    turns = 2 if np.random.random() < 0.4 else 1
    first, last, added_j, ranks = 0, 0, 0.0, len(problem.usable_count)
    if np.random.random() < 0.6:
        for turn in range(turns):
            low, high = 0, len(state.clock)
            if turn > 0 and np.random.random() < 0.5:  # on the same rank
                low, high = problem.rank_start[first], problem.rank_start[first + 1]
            i = np.random.randint(low, high)
            rank = problem.rank[i]
            first, last = (min(first, rank), max(last, rank)) if turn > 0 else (rank, rank)
            added_j += change_segment(problem, state, i, sign)
            sign = -sign
        return added_j, first, last
    last = ranks - 1
    if np.random.random() < 0.5:
        first = np.random.randint(ranks)
        last = min(ranks - 1, first + np.random.randint(ranks))
    for _ in range(turns):
        added_j += change_ranks(problem, state, first, last, sign, library)
        sign = -sign
    return added_j, first, last


def anneal(
    problem: SegmentProblem, start: Integers, goal: Goal, heat: Heat, library: Integers
) -> Integers:
    """Return the best clocks found by simulated annealing (Kirkpatrick et al. 1983), which may be
    those of `start`.

    The search accepts plans beyond the deadline at a price, but they count only until one within it
    is found. `start` and the result are within budget. If the result costs less than
    `start`, the difference is larger than rounding errors of sums.

    Args:
        problem: the problem.
        start: (m,) clocks.
        goal: the limits.
        heat: effort and temperatures.
        library: (plans, m) clocks of plans, parts of which may be taken; at least one plan.
    """
    (now, cost_j), (trial, _), best = (
        load_state(problem, start),
        load_state(problem, start),
        start.copy(),
    )
    time_s = max(replay(problem, now), replay(problem, trial))
    _anneal(problem, now, trial, best, time_s, cost_j, goal, heat, library)
    return best


@kernel
def _anneal(
    problem: SegmentProblem,
    now: SegmentState,
    trial: SegmentState,
    best: Integers,
    time_s: float,
    cost_j: float,
    goal: Goal,
    heat: Heat,
    library: Integers,
) -> None:
    """Do as `anneal` does, with two equal states of the start, whose clocks are `best`, its
    makespan and energy.
    """
    np.random.seed(1)
    node, rank_start, scale_j = problem.node, problem.rank_start, 0.0
    for i in range(len(best)):
        scale_j += abs(problem.cost_j[problem.member[i], best[i]])
    margin_j = 1e-10 * scale_j
    best_s, best_j = time_s, cost_j
    stale = len(now.end_s)  # the first node whose end in `trial` differs from `now`
    for attempt in range(heat.tries):
        heat_j = heat.first_j * (heat.last_j / heat.first_j) ** (attempt / heat.tries)
        price_w = goal.price_w * _DEARER ** (attempt / heat.tries)
        worth_j = cost_j + price_w * max(0.0, time_s - goal.deadline_s)
        added_j, first, last = _vary(problem, trial, library)
        most_j = worth_j - heat_j * np.log(1.0 - np.random.random())
        good = trial.touched[0] < len(now.end_s) and cost_j + added_j <= most_j
        if good and max_changes(rank_start, trial.clock, first, last) <= goal.budget:
            trial.touched[0] = touched = min(trial.touched[0], stale)
            trial_s = replay(problem, trial)
            trial_j = cost_j + added_j + price_w * max(0.0, trial_s - goal.deadline_s)
            good = trial_j <= most_j
            stale = len(now.end_s) if good else touched
        else:
            good = False
            trial.touched[0] = len(now.end_s)
        begin, end = rank_start[first], rank_start[last + 1]
        if not good:
            restore(node, now, trial, begin, end)
            continue
        restore(node, trial, now, begin, end)
        cost_j, time_s = cost_j + added_j, trial_s
        late = time_s > goal.deadline_s
        better = time_s < best_s if late else best_s > goal.deadline_s or cost_j < best_j - margin_j
        if better and (late or best_s > goal.deadline_s or cost_j >= goal.floor_j - margin_j):
            best_s, best_j = time_s, cost_j
            for i in range(len(best)):
                best[i] = now.clock[i]


def try_all_clocks(problem: SegmentProblem, goal: Goal) -> tuple[Integers, float, float]:
    """Return the best clocks, their makespan (seconds) and effective energy (joules), by trying
    every combination.

    If none meets the deadline, the energy is infinite, and the clocks are the fastest within
    budget.
    """
    start = np.isfinite(problem.time_s).argmax(axis=1)[problem.member]
    best = start.copy()
    return best, *_try_all(problem, load_state(problem, start)[0], start, best, goal)


@kernel
def _try_all(
    problem: SegmentProblem, state: SegmentState, start: Integers, best: Integers, goal: Goal
) -> tuple[float, float]:
    """Count up from the first clocks, `start`; put the best ones in `best`, and return their
    makespan and energy.
    """
    best_s, best_j, i = np.inf, np.inf, 0
    while i < len(start):
        if (
            max_changes(problem.rank_start, state.clock, 0, len(problem.usable_count) - 1)
            <= goal.budget
        ):
            time_s, cost_j = replay(problem, state), 0.0
            for i in range(len(start)):
                cost_j += problem.cost_j[problem.member[i], state.clock[i]]
            in_time = time_s <= goal.deadline_s
            if cost_j < best_j if in_time else best_j == np.inf and time_s < best_s:
                best_s, best_j = time_s, cost_j if in_time else np.inf
                for i in range(len(best)):
                    best[i] = start[i]
        i = 0
        while i < len(start) and not _next_clock(problem, start, i):
            start[i] = -1
            _next_clock(problem, start, i)
            set_clock(problem, state, i, start[i])
            i += 1
        if i < len(start):
            set_clock(problem, state, i, start[i])
    return best_s, best_j


@inner_kernel
def _next_clock(problem: SegmentProblem, clock: Integers, i: int) -> bool:
    """Set `clock[i]` to its next measured clock; return False if there is none."""
    times_s = problem.time_s[problem.member[i]]
    for c in range(clock[i] + 1, len(times_s)):
        if times_s[c] < np.inf:
            clock[i] = c
            return True
    return False


def head_pace_tail(problem: SegmentProblem, deadline_s: float, head: int, tail: int) -> Integers:
    """Return a plan in which each rank runs its first and last computations fast, and the others at
    one clock.

    That clock is the cheapest one in time, chosen rank by rank from the last one, so that two
    changes are enough. All of a rank is fast where no clock is in time, or where it has no more
    than `head` + `tail` computations.
    """
    node, member = problem.node, problem.member
    ranks = list(pairwise(problem.rank_start.tolist()))
    fastest = [problem.time_s[member[first:stop]].sum(axis=0).argmin() for first, stop in ranks]
    state, _ = load_state(problem, np.repeat(fastest, np.diff(problem.rank_start)))

    def set_all(first: int, stop: int, clock: int) -> None:
        state.clock[first:stop] = clock
        state.duration_s[node[first:stop]] = problem.time_s[member[first:stop], clock]
        state.touched[0] = min(state.touched[0], node[first:stop].min())

    for fast, (begin, end) in zip(reversed(fastest), reversed(ranks), strict=True):
        first, stop = begin + head, end - tail
        if first >= stop:
            continue
        cost_j = problem.cost_j[member[first:stop]].sum(axis=0)
        for clock in np.argsort(cost_j, kind="stable"):
            if clock == fast or cost_j[clock] == np.inf:
                break
            set_all(first, stop, clock)
            if replay(problem, state) <= deadline_s:
                break
            set_all(first, stop, fast)
    return state.clock


def fastest_segments(problem: SegmentProblem, segments: int) -> Integers:
    """Return clocks in at most so many segments per rank with the least sum of durations, by
    dynamic programming.

    If that few segments are impossible, some of the clocks are not measured ones.
    """
    clocks = problem.time_s.shape[1]
    chosen = list[int]()
    for first, stop in pairwise(problem.rank_start.tolist()):
        least_s = np.full(
            (segments + 1, clocks), np.inf
        )  # [segments so far, clock of the last one]
        least_s[0] = 0.0
        came = np.zeros(
            (stop - first, segments + 1, clocks), dtype=np.int64
        )  # 1 + the clock before a segment's begin
        for i, time_s in enumerate(problem.time_s[problem.member[first:stop]]):
            before, before_s = least_s[:-1].argmin(axis=1), least_s[:-1].min(axis=1)
            begins = before_s[:, None] < least_s[1:]
            came[i, 1:] = np.where(begins, before[:, None] + 1, 0)
            least_s[1:] = np.where(begins, before_s[:, None], least_s[1:]) + time_s
            least_s[0] = np.inf
        segment = int(least_s[1:].min(axis=1).argmin()) + 1
        clock = int(least_s[segment].argmin())
        backwards = list[int]()
        for i in range(stop - first - 1, -1, -1):
            backwards.append(clock)
            if came[i, segment, clock]:
                segment, clock = segment - 1, int(came[i, segment, clock]) - 1
        chosen += reversed(backwards)
    return np.array(chosen, dtype=np.int64)
