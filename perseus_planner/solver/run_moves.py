"""Random changes of runs: of one run, its borders and its clock, or of the same part of many ranks at once.

The ranks of a pipeline run in lockstep, so that slowing one of them alone often costs time and saves little: what pays
is that many do the same at the same time. Which places of different ranks belong together, `RunProblem.wave` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from perseus_planner.solver.runs import RunProblem, State, paint, put

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers


@njit(cache=True)
def _some(mean: float) -> int:
    """A whole number from 1 on, `mean` above that on average or a bit less."""
    return 1 + int(-np.log(1.0 - np.random.random()) * mean)


@njit(cache=True)
def _stepped(problem: RunProblem, rank: int, clock: int, by: int) -> int:
    """The clock so many steps on among those of the rank, or the last one there."""
    at = problem.place[rank, clock] + by
    return int(problem.usable[rank, min(max(at, 0), problem.usable_count[rank] - 1)])


@njit(cache=True)
def _from_wave(problem: RunProblem, rank: int, wave: float) -> int:
    """The first place of the rank that runs at that wave or later; the end of its program if none does."""
    first, stop = problem.rank_start[rank], problem.rank_start[rank + 1]
    return int(first + np.searchsorted(problem.wave[first:stop], wave))


@njit(cache=True)
def _run(problem: RunProblem, clock: Integers, i: int) -> tuple[int, int]:
    """From where to where the clock is that at place i, not around the end of the program."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = i, i + 1
    while begin > first and clock[begin - 1] == clock[i]:
        begin -= 1
    while end < stop and clock[end] == clock[i]:
        end += 1
    return begin, end


@njit(cache=True)
def _recolour(problem: RunProblem, state: State, i: int, clock: int) -> float:
    """Another clock for the run around place i, also where it goes around the end of the program."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _run(problem, state.clock, i)
    added_j = 0.0
    if begin == first and end < stop and state.clock[stop - 1] == state.clock[i]:
        added_j += paint(problem, state, _run(problem, state.clock, stop - 1)[0], stop, clock)
    elif end == stop and begin > first and state.clock[first] == state.clock[i]:
        added_j += paint(problem, state, first, _run(problem, state.clock, first)[1], clock)
    return added_j + paint(problem, state, begin, end, clock)


@njit(cache=True)
def _shift(problem: RunProblem, state: State, i: int) -> float:
    """Move one border of the run around place i."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _run(problem, state.clock, i)
    by = _some(1.0 if np.random.random() < 0.5 else 8.0)
    behind, grows = np.random.random() < 0.5, np.random.random() < 0.5
    if behind:
        if grows and end < stop:
            return paint(problem, state, end, min(stop, end + by), state.clock[i])
        after = end if end < stop else first
        return paint(problem, state, max(begin, end - by), end, state.clock[after])
    if grows and begin > first:
        return paint(problem, state, max(first, begin - by), begin, state.clock[i])
    ahead = begin - 1 if begin > first else stop - 1
    return paint(problem, state, begin, min(end, begin + by), state.clock[ahead])


@njit(cache=True)
def _cut(problem: RunProblem, state: State, i: int, clock: int) -> float:
    """Another clock from place i to an end of its run, or for some places from there on."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _run(problem, state.clock, i)
    how = np.random.random()
    if how < 0.25:
        return paint(problem, state, i, end, clock)
    if how < 0.5:
        return paint(problem, state, begin, i + 1, clock)
    length = int((stop - first) ** np.random.random())
    return paint(problem, state, i, min(stop, i + length), clock)


@njit(cache=True)
def _merge(problem: RunProblem, state: State, i: int) -> float:
    """The clock of a neighbour for the run around place i."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _run(problem, state.clock, i)
    ahead, after = begin - 1 if begin > first else stop - 1, end if end < stop else first
    return _recolour(problem, state, i, state.clock[ahead if np.random.random() < 0.5 else after])


@njit(cache=True)
def change_one(problem: RunProblem, state: State, i: int, sign: int) -> float:
    """A change of the run around place i; what it adds to effective energy, joules.

    Args:
        problem: the problem.
        state: changed in place.
        i: the place.
        sign: 1 for later clocks in the list, -1 for earlier ones, where the change is one of the clock.
    """
    kind = np.random.random()
    if 0.3 <= kind < 0.7:
        return _shift(problem, state, i)
    if kind >= 0.87:
        return _merge(problem, state, i)
    by = sign * _some(0.5 if np.random.random() < 0.7 else 4.0)
    clock = _stepped(problem, problem.rank[i], state.clock[i], by)
    return _recolour(problem, state, i, clock) if kind < 0.3 else _cut(problem, state, i, clock)


@njit(cache=True)
def _shift_near(problem: RunProblem, state: State, i: int, by: int) -> float:
    """Move the border that is nearest to place i by so many places, back where `by` is negative."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _run(problem, state.clock, i)
    if begin == first and end == stop:
        return 0.0
    border = end if begin == first or (end < stop and end - i < i - begin) else begin
    if by > 0:
        return paint(problem, state, border, min(stop, border + by), state.clock[border - 1])
    return paint(problem, state, max(first, border + by), border, state.clock[border])


@njit(cache=True)
def _window() -> tuple[float, float]:
    """Some part of the iteration; three in ten from its beginning or to its end."""
    wave, length, how = np.random.random(), np.exp(-6.0 * np.random.random()), np.random.random()
    if how < 0.15:
        return wave, 2.0
    return (0.0, wave) if how < 0.3 else (wave, wave + length)


@njit(cache=True)
def change_many(
    problem: RunProblem, state: State, first_rank: int, last_rank: int, sign: int, library: Integers
) -> float:
    """The same change of several ranks at the same time; what it adds to effective energy, joules.

    Args:
        problem: the problem.
        state: changed in place.
        first_rank: the first rank that changes.
        last_rank: the last one.
        sign: 1 for later clocks in the list or later borders, -1 for earlier ones.
        library: (plans, m) clocks of plans from which a part may be taken.
    """
    kind, (wave, until) = np.random.random(), _window()
    by, far = sign * _some(0.5), sign * _some(1.0 if np.random.random() < 0.4 else 6.0)
    model = library[np.random.randint(len(library))]
    if kind < 0.6:
        wave = np.random.random()
    added_j = 0.0
    for rank in range(first_rank, last_rank + 1):
        begin, end = _from_wave(problem, rank, wave), _from_wave(problem, rank, until)
        i = min(begin, problem.rank_start[rank + 1] - 1)
        clock = _stepped(problem, rank, state.clock[i], by)
        if kind < 0.3:
            added_j += _recolour(problem, state, i, clock)
        elif kind < 0.6:
            added_j += _shift_near(problem, state, i, far)
        elif kind < 0.7:
            added_j += paint(problem, state, begin, end, clock)
        else:
            for j in range(begin, end):
                added_j += put(problem, state, j, model[j])
    return added_j
