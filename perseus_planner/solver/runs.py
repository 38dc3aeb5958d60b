"""Clocks in runs: what a replay of one clock per computation takes, and how often each GPU changes its clock.

A run is a stretch of a rank's program, around from its end to its beginning, at one clock: the next iteration follows
this one, so as many runs are as many changes, and a single run is none. Operations without a clock are in no program.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.choices import Choices, Floats
    from perseus_planner.solver.network import Integers


class RunProblem(NamedTuple):
    """n operations in topological order; m of them have a clock: the programs of all ranks, one after the other."""

    before_start: Integers  #: (n + 1,)
    before: Integers  #: operations that each one waits for
    before_lag_s: Floats  #: aligned with `before`: seconds from the end of that one until this one may start
    last: Integers  #: operations that none waits for
    fixed_s: Floats  #: (n,) durations; they count for operations without a clock
    time_s: Floats  #: (classes, clocks), infinite where not measured
    cost_j: Floats  #: (classes, clocks) effective energy, infinite where not measured
    node: Integers  #: (m,) the operation at each place of the programs
    member: Integers  #: (m,) its class
    rank: Integers  #: (m,) its rank
    rank_start: Integers  #: (ranks + 1,) where the program of each rank begins
    usable: Integers  #: (ranks, clocks) clocks that any class of the rank has, as numbers, first ones first
    usable_count: Integers  #: (ranks,) how many
    place: Integers  #: (ranks, clocks) where a clock is in `usable`
    overhead_s: float  #: from the end of the last operation to the next iteration
    wave: Floats  #: (m,) when each place runs, as a part of the iteration; never falls along a program


class State(NamedTuple):
    """Clocks and what follows from them. The kernels change it in place."""

    clock: Integers  #: (m,)
    duration_s: Floats  #: (n,)
    end_s: Floats  #: (n,) as of the last replay
    touched: Integers  #: (1,) the first operation whose duration changed since; n if none did


def run_problem(dag: PipelineDag, choices: Choices, unlimited_mhz: Sequence[int]) -> tuple[RunProblem, list[int]]:
    """Lay out `dag` for the kernels, with every measured clock; and the clocks, MHz, highest first.

    Args:
        dag: the iteration.
        choices: the same, as `choices_of` lays it out.
        unlimited_mhz: the clock of each computation, by its place, in a plan without a budget.
    """
    used = [key for key in dag.points if key in dag.profile.measurements]
    clocks = sorted({m.clock_mhz for key in used for m in dag.profile.measurements[key]}, reverse=True)
    column = {clock: i for i, clock in enumerate(clocks)}
    time_s = np.full((len(dag.points), len(clocks)), np.inf)
    cost_j = time_s.copy()
    for row, key in enumerate(dag.points):
        if key in used:
            for m in dag.profile.measurements[key]:
                time_s[row, column[m.clock_mhz]] = m.time_s
                cost_j[row, column[m.clock_mhz]] = m.energy_j - dag.profile.blocking_w(key[0]) * m.time_s
    node_of = {place: k for k, place in enumerate(dag.order)}
    ends = np.cumsum([0, *map(len, dag.schedule.ranks)]).tolist()
    programs = [[node_of[place] for place in range(first, stop)] for first, stop in pairwise(ends)]
    unlimited = np.array([column[clock] for clock in unlimited_mhz], dtype=np.int64)
    return _problem(choices, programs, time_s, cost_j, unlimited, dag.profile.overhead_s), clocks


def _problem(
    choices: Choices,
    programs: Sequence[Sequence[int]],
    time_s: Floats,
    cost_j: Floats,
    unlimited: Integers,
    overhead_s: float,
) -> RunProblem:
    """`run_problem` on arrays: the nodes that each rank runs, tables by class and clock, and a clock of each place."""
    node = np.array([k for program in programs for k in program], dtype=np.int64)
    member, ranks = choices.member[node], len(programs)
    usable, place = np.full((ranks, time_s.shape[1]), -1), np.zeros((ranks, time_s.shape[1]), dtype=np.int64)
    counts = np.zeros(ranks, dtype=np.int64)
    for rank, program in enumerate(programs):
        known = np.flatnonzero(np.isfinite(time_s[choices.member[program]]).any(axis=0))
        counts[rank], usable[rank, : len(known)], place[rank, known] = len(known), known, np.arange(len(known))
    problem = RunProblem(
        before_start=choices.before_start,
        before=choices.before,
        before_lag_s=choices.before_lag_s,
        last=np.flatnonzero(np.diff(choices.after_start) == 0),
        fixed_s=choices.time_s[choices.option_start[choices.member]],
        time_s=time_s,
        cost_j=cost_j,
        node=node,
        member=member,
        rank=np.repeat(np.arange(ranks), [len(program) for program in programs]),
        rank_start=np.cumsum([0, *map(len, programs)], dtype=np.int64),
        usable=usable,
        usable_count=counts,
        place=place,
        overhead_s=overhead_s,
        wave=np.zeros(len(node)),
    )
    return problem._replace(wave=_waves(problem, unlimited))


def _waves(problem: RunProblem, clock: Integers) -> Floats:
    state, _ = loaded(problem, clock)
    makespan_s = replayed(problem, state)
    middle = (state.end_s - state.duration_s / 2)[problem.node] / makespan_s
    for first, stop in pairwise(problem.rank_start.tolist()):
        middle[first:stop] = np.maximum.accumulate(middle[first:stop])
    return middle


@njit(cache=True)
def loaded(problem: RunProblem, clock: Integers) -> tuple[State, float]:
    """The state of some clocks, not replayed yet, and their effective energy, joules."""
    count = len(problem.fixed_s)
    state = State(clock.copy(), problem.fixed_s.copy(), np.zeros(count), np.zeros(1, dtype=np.int64))
    total_j = 0.0
    for i in range(len(clock)):
        state.duration_s[problem.node[i]] = problem.time_s[problem.member[i], clock[i]]
        total_j += problem.cost_j[problem.member[i], clock[i]]
    return state, total_j


@njit(cache=True)
def start_s(problem: RunProblem, end_s: Floats, k: int) -> float:
    """When operation k starts: as soon as all that it waits for has ended, seconds."""
    before_start, before, lag_s = problem.before_start, problem.before, problem.before_lag_s
    latest_s = 0.0
    for i in range(before_start[k], before_start[k + 1]):
        latest_s = max(latest_s, float(end_s[before[i]] + lag_s[i]))
    return latest_s


@njit(cache=True)
def replayed(problem: RunProblem, state: State) -> float:
    """Bring `state.end_s` up to date; the makespan, seconds."""
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
        makespan_s = max(makespan_s, float(end_s[k]))
    return makespan_s


@njit(cache=True)
def put(problem: RunProblem, state: State, i: int, clock: int) -> float:
    """Set the clock at place i; what that adds to effective energy, joules, infinite where it is not measured."""
    old, member, k = state.clock[i], problem.member[i], problem.node[i]
    if old == clock:
        return 0.0
    state.clock[i] = clock
    state.duration_s[k] = problem.time_s[member, clock]
    state.touched[0] = min(state.touched[0], k)
    return float(problem.cost_j[member, clock] - problem.cost_j[member, old])


@njit(cache=True)
def paint(problem: RunProblem, state: State, first: int, stop: int, clock: int) -> float:
    """`put` from one place to another."""
    added_j = 0.0
    for i in range(first, stop):
        added_j += put(problem, state, i, clock)
    return added_j


@njit(cache=True)
def restore(problem: RunProblem, source: State, target: State, first: int, stop: int) -> None:
    """Make clocks and durations in `target` those of `source` again, for places `first` to `stop`."""
    for i in range(first, stop):
        if target.clock[i] != source.clock[i]:
            k = problem.node[i]
            target.clock[i] = source.clock[i]
            target.duration_s[k] = source.duration_s[k]


@njit(cache=True)
def changes(problem: RunProblem, clock: Integers, rank: int) -> int:
    """How often the rank changes its clock in an iteration, the way back to its beginning included."""
    first, stop = problem.rank_start[rank], problem.rank_start[rank + 1]
    count = 0
    for i in range(first, stop):
        count += clock[i] != clock[i - 1 if i > first else stop - 1]
    return count


@njit(cache=True)
def most_changes(problem: RunProblem, clock: Integers) -> int:
    """The most `changes` of any rank."""
    most = 0
    for rank in range(len(problem.usable_count)):
        most = max(most, changes(problem, clock, rank))
    return most


@njit(cache=True)
def least_dwell_s(problem: RunProblem, state: State, makespan_s: float) -> float:
    """For how long the clock that is held shortest is held, seconds; infinite where none ever changes.

    From the start of the first computation of a run to that of the next run's, which may be in the next iteration.
    """
    least_s = np.inf
    for rank in range(len(problem.usable_count)):
        first, stop = problem.rank_start[rank], problem.rank_start[rank + 1]
        first_s, last_s = np.inf, -np.inf
        for i in range(first, stop):
            if state.clock[i] != state.clock[i - 1 if i > first else stop - 1]:
                now_s = start_s(problem, state.end_s, problem.node[i])
                if first_s == np.inf:
                    first_s = now_s
                else:
                    least_s = min(least_s, now_s - last_s)
                last_s = now_s
        if first_s < np.inf:
            least_s = min(least_s, makespan_s + problem.overhead_s - last_s + first_s)
    return least_s
