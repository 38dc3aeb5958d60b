"""Search for the best clocks of an iteration within a limit on clock changes, by annealing.

A clock segment is a stretch of a rank's program at one clock. The next iteration follows this one,
so a segment can go around from the end of the program to its begin; a rank changes its clock as
often as it has segments, and never if it has one.

Moves are of one segment, its borders and clock, or of the same part of many ranks at once: the
ranks of a pipeline run in lockstep, so slowing one of them alone often costs time and saves little;
it pays if many do the same at the same time. `ClockProblem.wave` tells which computations of
different ranks belong together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.clock_problem import (
    ChangeCost,
    ClockProblem,
    ClockState,
    load_state,
    replay,
    replay_changes,
)
from perseus_planner.solver.kernels import inner_kernel, kernel

if TYPE_CHECKING:
    from perseus_planner.solver.network import Floats, Integers

_MODES = 0.25  #: part of the moves that are of modes, where they are chosen
_TOGETHER = 0.4  #: part of the moves that are of many ranks at once
_DEARER = 8.0  #: the price of being late at the end of a search, as a multiple of the first price


class Goal(NamedTuple):
    """The goal of a search: the least effective energy within these limits."""

    deadline_s: float
    budget: int  #: most changes of each rank
    price_w: float  #: price of a second beyond the deadline when a search begins
    floor_j: float = -np.inf  #: plans that cost less count only if no other meets the deadline
    waiting_w: float = 0.0  #: what all ranks draw in a second more of the iteration


class Heat(NamedTuple):
    """The effort of a search: its first and last temperature, which falls exponentially."""

    tries: int
    first_j: float
    last_j: float
    slack_j: float = 0.0  #: how much a plan may cost too much by its clocks and still be replayed
    seed: int = 1


@kernel
def max_changes(
    rank_start: Integers, clock: Integers, first_rank: int, last_rank: int, mode_bits: int
) -> int:
    """Return the most changes of the clock in an iteration of any of these ranks, including the
    change back.
    """
    most = 0
    for rank in range(first_rank, last_rank + 1):
        first = rank_start[rank]
        stop = rank_start[rank + 1]
        count = 0
        for i in range(first, stop):
            before = clock[i - 1 if i > first else stop - 1]
            count += clock[i] >> mode_bits != before >> mode_bits
        most = max(most, count)
    return most


@inner_kernel
def _random_count(mean: float) -> int:
    """Draw a whole number of at least 1, on average a bit less than 1 + `mean`."""
    return 1 + int(-np.log(1.0 - np.random.random()) * mean)


@inner_kernel
def _segment(clock: Integers, bits: int, first: int, stop: int, i: int) -> tuple[int, int]:
    """Return the begin and end of the segment around computation i in a program from `first` to
    before `stop`; what is before `first` or from `stop` on is around its end.
    """
    begin = i
    end = i + 1
    count = stop - first
    at = clock[i] >> bits
    while end - begin < count and clock[first + (begin - 1 - first) % count] >> bits == at:
        begin -= 1
    while end - begin < count and clock[first + (end - first) % count] >> bits == at:
        end += 1
    return begin, end


@inner_kernel
def _first_at_wave(wave: Floats, first: int, stop: int, at: float) -> int:
    """Return the first computation from `first` to before `stop` that runs at that wave or
    later, or `stop`.
    """
    while first < stop:
        middle = (first + stop) // 2
        if wave[middle] < at:
            first = middle + 1
        else:
            stop = middle
    return first


@inner_kernel
def _set(problem: ClockProblem, state: ClockState, k: int, new: int) -> float:
    """Give a computation another clock; return the effective energy added, joules: infinite where
    its rank may not have it in that mode.
    """
    old = state.clock[k]
    if new == old:
        return 0.0
    if problem.mode_bits > 0:
        rank = problem.rank[k]
        if problem.usable[rank, problem.place[rank, new]] != new:
            return np.inf
    member = problem.member[k]
    state.clock[k] = new
    state.duration_s[problem.node[k]] = problem.time_s[member, new]
    state.touched[0] = min(state.touched[0], problem.node[k])
    added_j: float = problem.cost_j[member, new] - problem.cost_j[member, old]
    return added_j


@inner_kernel
def _change(
    problem: ClockProblem,
    state: ClockState,
    ranks: tuple[int, int],
    at: int,
    sign: int,
    library: Integers,
) -> float:
    """Make the same random change at the same time on several ranks, of clocks or of modes; return
    the effective energy added, joules.

    Args:
        problem: the problem.
        state: changed in place.
        ranks: the first and the last rank that change.
        at: the computation that is changed, or that runs when others are.
        sign: 1 for later clocks in the list and longer segments, -1 for earlier and shorter ones.
        library: (plans, m) clocks of plans, parts of which may be taken.
    """
    kind = np.random.random()
    how = np.random.random()
    ahead = np.random.random() < 0.5
    steps = sign * _random_count(0.5 if np.random.random() < 0.7 else 4.0)
    far = _random_count(1.0 if np.random.random() < 0.5 else 8.0)
    length = np.exp(-6.0 * np.random.random())
    model = library[np.random.randint(len(library))]
    wave = problem.wave
    added_j = 0.0
    bits = problem.mode_bits
    mask = (1 << bits) - 1
    mode = -1
    if bits > 0 and np.random.random() < _MODES:
        mode = np.random.randint(mask + 1)
    for rank in range(ranks[0], ranks[1] + 1):
        first = problem.rank_start[rank]
        stop = problem.rank_start[rank + 1]
        i = at
        if problem.rank[at] != rank:
            i = min(_first_at_wave(wave, first, stop, wave[at]), stop - 1)
        begin, end = _segment(state.clock, bits, first, stop, i)
        place = problem.place[rank, state.clock[i]] + (steps << bits)
        place = min(max(place, 0), problem.usable_count[rank] - 1)
        clock = problem.usable[rank, place]
        if 0.3 <= kind < 0.7:
            neighbour = state.clock[
                first + ((end if ahead else begin - 1) - first) % (stop - first)
            ]
            if kind >= 0.62:  # the segment joins the one before or after it
                clock = neighbour
            elif sign > 0:  # it takes from that one
                begin, end = (end, end + far) if ahead else (begin - far, begin)
                clock = state.clock[i]
            else:
                begin, end = (
                    (max(begin, end - far), end) if ahead else (begin, min(end, begin + far))
                )
                clock = neighbour
        elif kind >= 0.7:  # a part of the iteration
            if how < 0.5:
                begin = i
                end = _first_at_wave(wave, i, stop, wave[at] + length)
            elif how < 0.75:
                begin, end = (i, end) if ahead else (begin, i + 1)
            else:
                begin, end = (i, stop) if ahead else (first, i + 1)
        for j in range(begin, min(end, begin + stop - first)):
            k = first + (j - first) % (stop - first)
            if mode < 0:
                new = model[k] if kind >= 0.85 else clock
                added_j += _set(problem, state, k, new & ~mask | state.clock[k] & mask)
                continue
            other = k if problem.member[k] == problem.member[i] else -1
            while other >= 0:
                added_j += _set(problem, state, other, state.clock[other] & ~mask | mode)
                other = problem.tied[other] if problem.tied[other] != k else -1
    return added_j


@inner_kernel
def _restore(node: Integers, source: ClockState, target: ClockState, first: int, stop: int) -> None:
    """Copy clocks and durations from `source` to `target`, for the computations from `first` to
    before `stop`.
    """
    for i in range(first, stop):
        if target.clock[i] != source.clock[i]:
            target.clock[i] = source.clock[i]
            target.duration_s[node[i]] = source.duration_s[node[i]]


def anneal(
    problem: ClockProblem,
    start: Integers,
    goal: Goal,
    heat: Heat,
    library: Integers,
    change: ChangeCost | None = None,
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
        change: what clock changes cost; None if nothing.
    """
    (now, cost_j), (trial, _) = load_state(problem, start), load_state(problem, start)
    best = start.copy()
    scale_j = np.cumsum(np.abs(problem.cost_j[problem.member, start]))[-1]
    time_s = replay(problem, now)
    replay(problem, trial)
    if change is not None:
        time_s, cost_j = replay_changes(problem, trial, change)
    cost_j += goal.waiting_w * time_s
    _anneal(problem, now, trial, best, time_s, cost_j, 1e-10 * scale_j, goal, heat, library, change)
    return best


@kernel
def _anneal(
    problem: ClockProblem,
    now: ClockState,
    trial: ClockState,
    best: Integers,
    time_s: float,
    cost_j: float,
    margin_j: float,
    goal: Goal,
    heat: Heat,
    library: Integers,
    change: ChangeCost | None,
) -> None:
    """Do as `anneal` does, with two equal states of the start, replayed, whose clocks are `best`,
    its seconds and joules, and the rounding error of a sum of joules.
    """
    np.random.seed(heat.seed)
    node = problem.node
    rank = problem.rank
    rank_start = problem.rank_start
    nodes = len(now.end_s)
    ranks = len(rank_start) - 1
    best_s = time_s
    best_j = cost_j
    stale = nodes  # the first node whose end in `trial` differs from `now`
    for attempt in range(heat.tries):
        part = attempt / heat.tries
        heat_j = heat.first_j * (heat.last_j / heat.first_j) ** part
        price_w = goal.price_w * _DEARER**part
        worth_j = cost_j + price_w * max(0.0, time_s - goal.deadline_s)
        most_j = worth_j - heat_j * np.log(1.0 - np.random.random())
        sign = 1 if np.random.random() < 0.5 else -1
        turns = 2 if np.random.random() < 0.4 else 1
        at = np.random.randint(len(best))
        first = last = rank[at]
        if np.random.random() < _TOGETHER:
            first = 0
            last = ranks - 1
            if np.random.random() < 0.5:
                first = np.random.randint(ranks)
                last = min(ranks - 1, first + np.random.randint(ranks))
        low = first
        high = last
        trial_j = cost_j
        for turn in range(turns):
            if turn == 1:  # something else, the other way, on the same ranks or on any
                at = np.random.randint(rank_start[first], rank_start[last + 1])
                if first == last and np.random.random() < 0.5:
                    at = np.random.randint(len(best))
                    first = last = rank[at]
            trial_j += _change(problem, trial, (first, last), at, sign, library)
            sign = -sign
        low = min(low, first)
        high = max(high, last)
        good = trial.touched[0] < nodes and trial_j <= most_j + heat.slack_j
        changes = max_changes(rank_start, trial.clock, low, high, problem.mode_bits) if good else 0
        good = good and changes <= goal.budget
        if good:
            if change is None:
                trial.touched[0] = stale = min(trial.touched[0], stale)
                trial_s = replay(problem, trial)
            else:
                trial_s, trial_j = replay_changes(problem, trial, change)
                trial_j += goal.waiting_w * trial_s
            good = trial_j + price_w * max(0.0, trial_s - goal.deadline_s) <= most_j
        trial.touched[0] = nodes
        begin = rank_start[low]
        end = rank_start[high + 1]
        if not good:
            _restore(node, now, trial, begin, end)
            continue
        _restore(node, trial, now, begin, end)
        cost_j = trial_j
        time_s = trial_s
        stale = nodes
        late = time_s > goal.deadline_s
        better = time_s < best_s if late else best_s > goal.deadline_s or cost_j < best_j - margin_j
        if better and (late or best_s > goal.deadline_s or cost_j >= goal.floor_j - margin_j):
            best_s = time_s
            best_j = cost_j
            for i in range(len(best)):
                best[i] = now.clock[i]
