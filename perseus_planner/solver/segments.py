"""Clock segments: the replay of one clock per computation, and how often each GPU changes its
clock.

A clock segment is a stretch of a rank's program at one clock. The next iteration follows this one,
so a segment can go around from the end of the program to its begin; a rank changes its clock as
often as it has segments, and never if it has one. Programs hold computations only, not fixed
operations, which have no clock.

Random changes are of one segment, its borders and clock, or of the same part of many ranks at once:
the ranks of a pipeline run in lockstep, so slowing one of them alone often costs time and saves
little; it pays if many do the same at the same time. `SegmentProblem.wave` tells which computations
of different ranks belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import inner_kernel, kernel

if TYPE_CHECKING:
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Floats, Integers
    from perseus_planner.solver.point_problem import PointProblem


class SegmentProblem(NamedTuple):
    """n nodes in topological order; m of them are computations: the programs of all ranks, one
    after the other.
    """

    before_start: Integers  #: (n + 1,) where the predecessors of each node begin in `before`
    before: Integers  #: the predecessors of all nodes
    before_lag_s: Floats  #: aligned with `before`: least seconds from their end to the node's start
    last: Integers  #: nodes without successors
    fixed_s: Floats  #: (n,) durations; they count for fixed operations
    time_s: Floats  #: (classes, clocks), infinite if not measured
    cost_j: Floats  #: (classes, clocks) effective energy, infinite if not measured
    node: Integers  #: (m,) node of each computation, in the order of the programs
    member: Integers  #: (m,) its class
    rank: Integers  #: (m,) its rank
    rank_start: Integers  #: (ranks + 1,) where the program of each rank begins
    usable: (
        Integers  #: (ranks, clocks) the clocks that any class of the rank has, rising numbers first
    )
    usable_count: Integers  #: (ranks,) how many clocks that are
    place: Integers  #: (ranks, clocks) the index of each clock in `usable`
    #: (m,) when each computation runs, as a part of the iteration; never falls along a program
    wave: Floats


class SegmentState(NamedTuple):
    """The clocks, and the durations and ends that follow from them. The kernels change it in
    place.
    """

    clock: Integers  #: (m,)
    duration_s: Floats  #: (n,)
    end_s: Floats  #: (n,) as of the last replay
    touched: (
        Integers  #: (1,) the first node whose duration changed since then; n if nothing changed
    )


def segment_problem(
    dag: PipelineDag, points: PointProblem, unlimited_mhz: Sequence[int]
) -> tuple[SegmentProblem, list[int]]:
    """Lay out `dag` for the kernels, with every measured clock; also return the clocks, MHz,
    highest first.

    Args:
        dag: the iteration.
        points: its operating points, from `point_problem`.
        unlimited_mhz: the clock of each computation of `dag.computations` in a plan without a
            budget.
    """
    used = [key for key in dag.points if key in dag.profile.measurements]
    clocks = sorted(
        {m.clock_mhz for key in used for m in dag.profile.measurements[key]}, reverse=True
    )
    column = {clock: i for i, clock in enumerate(clocks)}
    time_s = np.full((len(dag.points), len(clocks)), np.inf)
    cost_j = time_s.copy()
    for row, key in enumerate(dag.points):
        if key in used:
            for m in dag.profile.measurements[key]:
                time_s[row, column[m.clock_mhz]] = m.time_s
                cost_j[row, column[m.clock_mhz]] = (
                    m.energy_j - dag.profile.blocking_w(key[0]) * m.time_s
                )
    node_of = {place: k for k, place in enumerate(dag.order)}
    ends = np.cumsum([0, *map(len, dag.schedule.ranks)]).tolist()
    programs = [[node_of[place] for place in range(first, stop)] for first, stop in pairwise(ends)]
    unlimited = np.array([column[clock] for clock in unlimited_mhz], dtype=np.int64)
    return _problem(points, programs, time_s, cost_j, unlimited), clocks


def _problem(
    points: PointProblem,
    programs: Sequence[Sequence[int]],
    time_s: Floats,
    cost_j: Floats,
    unlimited: Integers,
) -> SegmentProblem:
    """Make the problem from the nodes of each rank, tables by class and clock, and a clock of
    each computation.
    """
    node = np.array([k for program in programs for k in program], dtype=np.int64)
    member, ranks = points.member[node], len(programs)
    usable, place = (
        np.full((ranks, time_s.shape[1]), -1),
        np.zeros((ranks, time_s.shape[1]), dtype=np.int64),
    )
    counts = np.zeros(ranks, dtype=np.int64)
    for rank, program in enumerate(programs):
        clocks = np.flatnonzero(np.isfinite(time_s[points.member[program]]).any(axis=0))
        counts[rank], usable[rank, : len(clocks)], place[rank, clocks] = (
            len(clocks),
            clocks,
            np.arange(len(clocks)),
        )
    problem = SegmentProblem(
        before_start=points.before_start,
        before=points.before,
        before_lag_s=points.before_lag_s,
        last=np.flatnonzero(np.diff(points.after_start) == 0),
        fixed_s=points.time_s[points.point_start[points.member]],
        time_s=time_s,
        cost_j=cost_j,
        node=node,
        member=member,
        rank=np.repeat(np.arange(ranks), [len(program) for program in programs]),
        rank_start=np.cumsum([0, *map(len, programs)], dtype=np.int64),
        usable=usable,
        usable_count=counts,
        place=place,
        wave=np.zeros(len(node)),
    )
    return problem._replace(wave=_waves(problem, unlimited))


def _waves(problem: SegmentProblem, clock: Integers) -> Floats:
    state, _ = load_state(problem, clock)
    makespan_s = replay(problem, state)
    middle = (state.end_s - state.duration_s / 2)[problem.node] / makespan_s
    for first, stop in pairwise(problem.rank_start.tolist()):
        middle[first:stop] = np.maximum.accumulate(middle[first:stop])
    return middle


def load_state(problem: SegmentProblem, clock: Integers) -> tuple[SegmentState, float]:
    """Return a state with these clocks, not yet replayed, and its effective energy, joules."""
    duration_s = problem.fixed_s.copy()
    duration_s[problem.node] = problem.time_s[problem.member, clock]
    state = SegmentState(
        clock.copy(), duration_s, np.zeros(len(duration_s)), np.zeros(1, dtype=np.int64)
    )
    return state, float(np.cumsum(problem.cost_j[problem.member, clock])[-1])


@inner_kernel
def start_s(
    before_start: Integers, before: Integers, before_lag_s: Floats, end_s: Floats, k: int
) -> float:
    """Return when node k starts: as soon as everything that it waits for has ended, seconds."""
    latest_s = 0.0
    for i in range(before_start[k], before_start[k + 1]):
        latest_s = max(latest_s, end_s[before[i]] + before_lag_s[i])
    return latest_s


@kernel
def replay(problem: SegmentProblem, state: SegmentState) -> float:
    """Bring `state.end_s` up to date; return the makespan, seconds."""
    before_start, before, lag_s = problem.before_start, problem.before, problem.before_lag_s
    duration_s, end_s = state.duration_s, state.end_s
    for k in range(state.touched[0], len(end_s)):
        latest_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            latest_s = max(latest_s, end_s[before[i]] + lag_s[i])
        end_s[k] = latest_s + duration_s[k]
    state.touched[0] = len(end_s)
    makespan_s = 0.0
    for k in problem.last:
        makespan_s = max(makespan_s, end_s[k])
    return makespan_s


@inner_kernel
def set_clock(problem: SegmentProblem, state: SegmentState, i: int, clock: int) -> float:
    """Set the clock of computation i; return the effective energy added, joules, infinite if it
    is not measured.
    """
    old, member, k = state.clock[i], problem.member[i], problem.node[i]
    if old == clock:
        return 0.0
    state.clock[i] = clock
    state.duration_s[k] = problem.time_s[member, clock]
    state.touched[0] = min(state.touched[0], k)
    return problem.cost_j[member, clock] - problem.cost_j[member, old]  # type: ignore[no-any-return]


@inner_kernel
def set_range(
    problem: SegmentProblem, state: SegmentState, first: int, stop: int, clock: int
) -> float:
    """Do `set_clock` for the computations from `first` to before `stop`; return the effective
    energy added.
    """
    added_j = 0.0
    for i in range(first, stop):
        added_j += set_clock(problem, state, i, clock)
    return added_j


@inner_kernel
def restore(
    node: Integers, source: SegmentState, target: SegmentState, first: int, stop: int
) -> None:
    """Copy clocks and durations from `source` to `target`, for the computations from `first` to
    before `stop`.
    """
    for i in range(first, stop):
        if target.clock[i] != source.clock[i]:
            target.clock[i] = source.clock[i]
            target.duration_s[node[i]] = source.duration_s[node[i]]


@kernel
def max_changes(rank_start: Integers, clock: Integers, first_rank: int, last_rank: int) -> int:
    """Return the most changes of the clock in an iteration of any of these ranks, including the
    change back.
    """
    most = 0
    for rank in range(first_rank, last_rank + 1):
        first, stop, count = rank_start[rank], rank_start[rank + 1], 0
        for i in range(first, stop):
            count += clock[i] != clock[i - 1 if i > first else stop - 1]
        most = max(most, count)
    return most


def max_changes_of(problem: SegmentProblem, clock: Integers) -> int:
    """Return the most changes of any rank."""
    return max_changes(problem.rank_start, clock, 0, len(problem.usable_count) - 1)


@inner_kernel
def _random_count(mean: float) -> int:
    """Draw a whole number of at least 1, on average a bit less than 1 + `mean`."""
    return 1 + int(-np.log(1.0 - np.random.random()) * mean)


@inner_kernel
def _step_clock(problem: SegmentProblem, rank: int, clock: int, by: int) -> int:
    """Return the clock that is `by` steps further among those of the rank, or the last one in
    that direction.
    """
    place = problem.place[rank, clock] + by
    return int(problem.usable[rank, min(max(place, 0), problem.usable_count[rank] - 1)])


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
