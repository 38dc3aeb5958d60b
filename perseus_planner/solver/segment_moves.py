"""Random changes of clock segments: of one segment, its borders and clock, or of the same part of
many ranks at once.

The ranks of a pipeline run in lockstep, so slowing one of them alone often costs time and saves
little; it pays if many do the same at the same time. `SegmentProblem.wave` tells which computations
of different ranks belong together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.solver.kernels import inner_kernel
from perseus_planner.solver.segments import SegmentProblem, SegmentState, set_clock, set_range

if TYPE_CHECKING:
    from perseus_planner.solver.network import Floats, Integers


@inner_kernel
def _random_count(mean: float) -> int:
    """Draw a whole number of at least 1, on average a bit less than 1 + `mean`."""
    return 1 + int(-np.log(1.0 - np.random.random()) * mean)


@inner_kernel
def _step_clock(problem: SegmentProblem, rank: int, clock: int, by: int) -> int:
    """Return the clock that is `by` steps further among those of the rank, or the last one in
    that direction.
    """
    at = problem.place[rank, clock] + by
    return int(problem.usable[rank, min(max(at, 0), problem.usable_count[rank] - 1)])


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
def _segment(clock: Integers, first: int, stop: int, i: int) -> tuple[int, int]:
    """Return the begin and end of the segment around computation i in a program from `first` to
    before `stop`.

    It does not go around the end of the program.
    """
    begin, end = i, i + 1
    while begin > first and clock[begin - 1] == clock[i]:
        begin -= 1
    while end < stop and clock[end] == clock[i]:
        end += 1
    return begin, end


@inner_kernel
def _set_segment_clock(
    problem: SegmentProblem, state: SegmentState, first: int, stop: int, i: int, clock: int
) -> float:
    """Give the segment around computation i another clock, including the part around the end of
    the program.
    """
    begin, end = _segment(state.clock, first, stop, i)
    far_begin = far_end = begin
    if begin == first and end < stop and state.clock[stop - 1] == state.clock[i]:
        far_begin, far_end = _segment(state.clock, first, stop, stop - 1)
    elif end == stop and begin > first and state.clock[first] == state.clock[i]:
        far_begin, far_end = _segment(state.clock, first, stop, first)
    added_j = set_range(problem, state, far_begin, far_end, clock)
    return added_j + set_range(problem, state, begin, end, clock)


@inner_kernel
def _shift_border(first: int, stop: int, begin: int, end: int) -> tuple[int, int, int]:
    """Move one border of the segment from `begin` to before `end`.

    Returns the range whose clock changes, from its begin to before its end, and a computation that
    has its new clock.
    """
    by = _random_count(1.0 if np.random.random() < 0.5 else 8.0)
    behind, grows = np.random.random() < 0.5, np.random.random() < 0.5
    if behind:
        if grows and end < stop:
            return end, min(stop, end + by), begin
        return max(begin, end - by), end, end if end < stop else first
    if grows and begin > first:
        return max(first, begin - by), begin, begin
    return begin, min(end, begin + by), begin - 1 if begin > first else stop - 1


@inner_kernel
def _split_segment(first: int, stop: int, begin: int, end: int, i: int) -> tuple[int, int]:
    """Draw a part of the segment around computation i up to one of its ends, or some
    computations from i on.
    """
    how = np.random.random()
    if how < 0.25:
        return i, end
    if how < 0.5:
        return begin, i + 1
    return i, min(stop, i + int((stop - first) ** np.random.random()))


@inner_kernel
def change_segment(problem: SegmentProblem, state: SegmentState, i: int, sign: int) -> float:
    """Change the segment around computation i; return the effective energy added, joules.

    Args:
        problem: the problem.
        state: changed in place.
        i: the computation.
        sign: 1 for later clocks in the list, -1 for earlier ones, if the change is one of the
            clock.
    """
    rank, kind = problem.rank[i], np.random.random()
    first, stop = problem.rank_start[rank], problem.rank_start[rank + 1]
    begin, end = _segment(state.clock, first, stop, i)
    if 0.3 <= kind < 0.7:
        begin, end, like = _shift_border(first, stop, begin, end)
        clock = state.clock[like]
    elif kind >= 0.87:  # the clock of a neighbouring segment
        ahead, after = begin - 1 if begin > first else stop - 1, end if end < stop else first
        clock = state.clock[ahead if np.random.random() < 0.5 else after]
    else:
        by = sign * _random_count(0.5 if np.random.random() < 0.7 else 4.0)
        clock = _step_clock(problem, rank, state.clock[i], by)
        if kind >= 0.7:
            begin, end = _split_segment(first, stop, begin, end, i)
    if kind < 0.3 or kind >= 0.87:
        return _set_segment_clock(problem, state, first, stop, i, clock)
    return set_range(problem, state, begin, end, clock)


@inner_kernel
def _shift_nearest_border(
    clock: Integers, first: int, stop: int, i: int, by: int
) -> tuple[int, int, int]:
    """Move the border nearest to computation i by so many computations, backwards if `by` is
    negative.

    Returns the range whose clock changes, from its begin to before its end, and its new clock.
    """
    begin, end = _segment(clock, first, stop, i)
    if begin == first and end == stop:
        return i, i, clock[i]
    border = end if begin == first or (end < stop and end - i < i - begin) else begin
    if by > 0:
        return border, min(stop, border + by), clock[border - 1]
    return max(first, border + by), border, clock[border]


@inner_kernel
def _window() -> tuple[float, float]:
    """Draw a part of the iteration; three in ten start at its begin or stop at its end."""
    wave, length, how = np.random.random(), np.exp(-6.0 * np.random.random()), np.random.random()
    if how < 0.15:
        return wave, 2.0
    return (0.0, wave) if how < 0.3 else (wave, wave + length)


@inner_kernel
def change_ranks(
    problem: SegmentProblem,
    state: SegmentState,
    first_rank: int,
    last_rank: int,
    sign: int,
    library: Integers,
) -> float:
    """Make the same change at the same time on several ranks; return the effective energy added,
    joules.

    Args:
        problem: the problem.
        state: changed in place.
        first_rank: the first rank that changes.
        last_rank: the last one.
        sign: 1 for later clocks in the list or later borders, -1 for earlier ones.
        library: (plans, m) clocks of plans, parts of which may be taken.
    """
    kind, (wave, until) = np.random.random(), _window()
    by, far = (
        sign * _random_count(0.5),
        sign * _random_count(1.0 if np.random.random() < 0.4 else 6.0),
    )
    waves, model = problem.wave, library[np.random.randint(len(library))]
    if kind < 0.6:
        wave = np.random.random()
    added_j = 0.0
    for rank in range(first_rank, last_rank + 1):
        first, stop = problem.rank_start[rank], problem.rank_start[rank + 1]
        begin, end = (
            _first_at_wave(waves, first, stop, wave),
            _first_at_wave(waves, first, stop, until),
        )
        i = min(begin, stop - 1)
        clock = _step_clock(problem, rank, state.clock[i], by)
        if kind < 0.3:
            added_j += _set_segment_clock(problem, state, first, stop, i, clock)
        elif kind < 0.7:
            if kind < 0.6:
                begin, end, clock = _shift_nearest_border(state.clock, first, stop, i, far)
            added_j += set_range(problem, state, begin, end, clock)
        else:
            for j in range(begin, end):
                added_j += set_clock(problem, state, j, model[j])
    return added_j
