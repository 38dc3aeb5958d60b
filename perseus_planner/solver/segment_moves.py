"""Random changes of clock segments: of one segment, its borders and clock, or of the same part of many ranks at once.

The ranks of a pipeline run in lockstep, so slowing one of them alone often costs time and saves little; it pays if many
do the same at the same time. `SegmentProblem.wave` tells which computations of different ranks belong together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.solver.kernels import kernel
from perseus_planner.solver.segments import SegmentProblem, SegmentState, set_clock, set_range

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers


@kernel
def _random_count(mean: float) -> int:
    """Draw a whole number of at least 1, on average a bit less than 1 + `mean`."""
    return 1 + int(-np.log(1.0 - np.random.random()) * mean)


@kernel
def _step_clock(problem: SegmentProblem, rank: int, clock: int, by: int) -> int:
    """Return the clock that is `by` steps further among those of the rank, or the last one in that direction."""
    at = problem.place[rank, clock] + by
    return int(problem.usable[rank, min(max(at, 0), problem.usable_count[rank] - 1)])


@kernel
def _first_at_wave(problem: SegmentProblem, rank: int, wave: float) -> int:
    """Return the first computation of the rank that runs at that wave or later, or the end of its program."""
    first, stop = problem.rank_start[rank], problem.rank_start[rank + 1]
    return int(first + np.searchsorted(problem.wave[first:stop], wave))


@kernel
def _segment(problem: SegmentProblem, clock: Integers, i: int) -> tuple[int, int]:
    """Return the begin and end of the segment around computation i, without going around the end of the program."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = i, i + 1
    while begin > first and clock[begin - 1] == clock[i]:
        begin -= 1
    while end < stop and clock[end] == clock[i]:
        end += 1
    return begin, end


@kernel
def _set_segment_clock(problem: SegmentProblem, state: SegmentState, i: int, clock: int) -> float:
    """Give the segment around computation i another clock, including the part around the end of the program."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _segment(problem, state.clock, i)
    added_j = 0.0
    if begin == first and end < stop and state.clock[stop - 1] == state.clock[i]:
        added_j += set_range(problem, state, _segment(problem, state.clock, stop - 1)[0], stop, clock)
    elif end == stop and begin > first and state.clock[first] == state.clock[i]:
        added_j += set_range(problem, state, first, _segment(problem, state.clock, first)[1], clock)
    return added_j + set_range(problem, state, begin, end, clock)


@kernel
def _shift_border(problem: SegmentProblem, state: SegmentState, i: int) -> float:
    """Move one border of the segment around computation i."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _segment(problem, state.clock, i)
    by = _random_count(1.0 if np.random.random() < 0.5 else 8.0)
    behind, grows = np.random.random() < 0.5, np.random.random() < 0.5
    if behind:
        if grows and end < stop:
            return set_range(problem, state, end, min(stop, end + by), state.clock[i])
        after = end if end < stop else first
        return set_range(problem, state, max(begin, end - by), end, state.clock[after])
    if grows and begin > first:
        return set_range(problem, state, max(first, begin - by), begin, state.clock[i])
    ahead = begin - 1 if begin > first else stop - 1
    return set_range(problem, state, begin, min(end, begin + by), state.clock[ahead])


@kernel
def _split_segment(problem: SegmentProblem, state: SegmentState, i: int, clock: int) -> float:
    """Set another clock from computation i to an end of its segment, or for some computations from there."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _segment(problem, state.clock, i)
    how = np.random.random()
    if how < 0.25:
        return set_range(problem, state, i, end, clock)
    if how < 0.5:
        return set_range(problem, state, begin, i + 1, clock)
    length = int((stop - first) ** np.random.random())
    return set_range(problem, state, i, min(stop, i + length), clock)


@kernel
def _merge_segment(problem: SegmentProblem, state: SegmentState, i: int) -> float:
    """Give the segment around computation i the clock of a neighbouring segment."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _segment(problem, state.clock, i)
    ahead, after = begin - 1 if begin > first else stop - 1, end if end < stop else first
    return _set_segment_clock(problem, state, i, state.clock[ahead if np.random.random() < 0.5 else after])


@kernel
def change_segment(problem: SegmentProblem, state: SegmentState, i: int, sign: int) -> float:
    """Change the segment around computation i; return the effective energy added, joules.

    Args:
        problem: the problem.
        state: changed in place.
        i: the computation.
        sign: 1 for later clocks in the list, -1 for earlier ones, if the change is one of the clock.
    """
    kind = np.random.random()
    if 0.3 <= kind < 0.7:
        return _shift_border(problem, state, i)
    if kind >= 0.87:
        return _merge_segment(problem, state, i)
    by = sign * _random_count(0.5 if np.random.random() < 0.7 else 4.0)
    clock = _step_clock(problem, problem.rank[i], state.clock[i], by)
    return _set_segment_clock(problem, state, i, clock) if kind < 0.3 else _split_segment(problem, state, i, clock)


@kernel
def _shift_nearest_border(problem: SegmentProblem, state: SegmentState, i: int, by: int) -> float:
    """Move the border nearest to computation i by so many computations, backwards if `by` is negative."""
    first, stop = problem.rank_start[problem.rank[i]], problem.rank_start[problem.rank[i] + 1]
    begin, end = _segment(problem, state.clock, i)
    if begin == first and end == stop:
        return 0.0
    border = end if begin == first or (end < stop and end - i < i - begin) else begin
    if by > 0:
        return set_range(problem, state, border, min(stop, border + by), state.clock[border - 1])
    return set_range(problem, state, max(first, border + by), border, state.clock[border])


@kernel
def _window() -> tuple[float, float]:
    """Draw a part of the iteration; three in ten start at its begin or stop at its end."""
    wave, length, how = np.random.random(), np.exp(-6.0 * np.random.random()), np.random.random()
    if how < 0.15:
        return wave, 2.0
    return (0.0, wave) if how < 0.3 else (wave, wave + length)


@kernel
def change_ranks(
    problem: SegmentProblem, state: SegmentState, first_rank: int, last_rank: int, sign: int, library: Integers
) -> float:
    """Make the same change at the same time on several ranks; return the effective energy added, joules.

    Args:
        problem: the problem.
        state: changed in place.
        first_rank: the first rank that changes.
        last_rank: the last one.
        sign: 1 for later clocks in the list or later borders, -1 for earlier ones.
        library: (plans, m) clocks of plans, parts of which may be taken.
    """
    kind, (wave, until) = np.random.random(), _window()
    by, far = sign * _random_count(0.5), sign * _random_count(1.0 if np.random.random() < 0.4 else 6.0)
    model = library[np.random.randint(len(library))]
    if kind < 0.6:
        wave = np.random.random()
    added_j = 0.0
    for rank in range(first_rank, last_rank + 1):
        begin, end = _first_at_wave(problem, rank, wave), _first_at_wave(problem, rank, until)
        i = min(begin, problem.rank_start[rank + 1] - 1)
        clock = _step_clock(problem, rank, state.clock[i], by)
        if kind < 0.3:
            added_j += _set_segment_clock(problem, state, i, clock)
        elif kind < 0.6:
            added_j += _shift_nearest_border(problem, state, i, far)
        elif kind < 0.7:
            added_j += set_range(problem, state, begin, end, clock)
        else:
            for j in range(begin, end):
                added_j += set_clock(problem, state, j, model[j])
    return added_j
