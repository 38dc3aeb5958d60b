"""Clocks in runs: what a replay of one clock per computation takes, and how often each GPU changes its clock.

A run is a stretch of a rank's program, around from its end to its beginning, at one clock: the next iteration follows
this one, so as many runs are as many changes, and a single run is none. Operations without a clock are in no program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from perseus_planner.choices import Floats
from perseus_planner.mincut import Integers


class RunProblem(NamedTuple):
    """n operations in topological order; m of them have a clock: the programs of all ranks, one after the other."""

    before_start: Integers  #: (n + 1,)
    before: Integers  #: operations that each one waits for
    before_lag_s: Floats  #: aligned with `before`: seconds from the end of that one until this one may start
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
    wave: Floats  #: (m,) when each place runs, as a part of the iteration; never falls along a program


class State(NamedTuple):
    """Clocks and what follows from them. The kernels change it in place."""

    clock: Integers  #: (m,)
    duration_s: Floats  #: (n,)
    end_s: Floats  #: (n,) as of the last replay
    touched: Integers  #: (1,) the first operation whose duration changed since; n if none did


def run_problem(
    before_start: Integers,
    before: Integers,
    before_lag_s: Floats | None,
    member: Integers,
    programs: Sequence[Sequence[int]],
    time_s: Floats,
    cost_j: Floats,
    unlimited: Integers,
) -> RunProblem:
    """Lay out a problem for the kernels.

    Args:
        before_start: (n + 1,) where the entries of each operation in `before` begin.
        before: operations that each one waits for; operations are numbered in a topological order.
        before_lag_s: aligned with `before`, seconds from the end of that one until this one may start; None: no lags.
        member: (n,) class of each operation.
        programs: per rank, the operations with a clock, in the order in which the rank runs them.
        time_s: (classes, clocks) seconds, infinite where not measured; an operation without a clock takes the least.
        cost_j: (classes, clocks) effective energy, joules, infinite where not measured.
        unlimited: (n,) the clock of each operation in a plan without a budget; those without a clock do not count.
    """
    programs = [program for program in programs if len(program)]
    node = np.array([k for program in programs for k in program], dtype=np.int64)
    lengths = [len(program) for program in programs]
    ranks, clocks = len(programs), time_s.shape[1]
    usable, place = np.full((ranks, clocks), -1), np.zeros((ranks, clocks), dtype=np.int64)
    counts = np.zeros(ranks, dtype=np.int64)
    for r, program in enumerate(programs):
        known = np.flatnonzero(np.isfinite(time_s[member[list(program)]]).any(axis=0))
        counts[r], usable[r, : len(known)], place[r, known] = len(known), known, np.arange(len(known))
    problem = RunProblem(
        before_start, before, np.zeros(len(before)) if before_lag_s is None else before_lag_s,
        time_s.min(axis=1)[member], time_s, cost_j, node, member[node], np.repeat(np.arange(ranks), lengths),
        np.cumsum([0, *lengths], dtype=np.int64), usable, counts, place, np.zeros(len(node)),
    )  # fmt: skip
    return problem._replace(wave=_waves(problem, unlimited[node]))


def _waves(problem: RunProblem, clock: Integers) -> Floats:
    state, _ = loaded(problem, clock)
    makespan_s = replayed(problem, state)
    middle = (state.end_s - state.duration_s / 2)[problem.node] / makespan_s
    for first, stop in zip(problem.rank_start[:-1], problem.rank_start[1:], strict=True):
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
        latest_s = max(latest_s, end_s[before[i]] + lag_s[i])
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
    return end_s.max()


@njit(cache=True)
def put(problem: RunProblem, state: State, i: int, clock: int) -> float:
    """Set the clock at place i; what that adds to effective energy, joules, infinite where it is not measured."""
    old, member, k = state.clock[i], problem.member[i], problem.node[i]
    if old == clock:
        return 0.0
    state.clock[i] = clock
    state.duration_s[k] = problem.time_s[member, clock]
    state.touched[0] = min(state.touched[0], k)
    return problem.cost_j[member, clock] - problem.cost_j[member, old]


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
            least_s = min(least_s, makespan_s - last_s + first_s)
    return least_s
