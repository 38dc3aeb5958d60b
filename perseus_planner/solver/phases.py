"""Plans in which all ranks change their pace at the same moments of an iteration: from these, the
annealing of plans with few clock changes begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.solver.clock_problem import load_state, replay
from perseus_planner.solver.paces import around_deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.solver.budget_problem import BudgetPlan, BudgetProblem
    from perseus_planner.solver.network import Floats, Integers

#: computations that a rank runs fast at the begin, and at the end
_ENDS = (0, 1, 2, 3, 4, 6, 8, 11, 14)
_PAIRS = 16  #: pairs of paces that are tried one after the other
_HALVINGS = 12  #: steps to find how two paces share an iteration


def fast_ends(problem: BudgetProblem) -> list[BudgetPlan]:
    """Return plans in which each rank begins and ends fast, and keeps one clock between."""
    return [problem.plan(_head_pace_tail(problem, a, b)) for a in _ENDS for b in _ENDS]


def _head_pace_tail(problem: BudgetProblem, head: int, tail: int) -> Integers:
    """Return a plan in which each rank runs its first and last computations fast, and the
    others at one clock.

    That clock is the cheapest one in time, chosen rank by rank from the last one, so that two
    changes are enough. All of a rank is fast where no clock is in time, or where it has no more
    than `head` + `tail` computations.
    """
    clocks = problem.clocks
    fastest = problem.load_s.argmin(axis=1)
    state, _ = load_state(clocks, fastest[clocks.rank])
    for fast, (begin, end) in zip(fastest[::-1], reversed(problem.ranks), strict=True):
        # Not before the rank's own computations, or the slice would count from the last rank.
        inner = slice(begin + head, max(begin + head, end - tail))
        node = clocks.node[inner]
        member = clocks.member[inner]
        if not len(node):
            continue
        # Cheapest first: the first clock in time is taken, and the fast one in any case.
        for clock in np.argsort(clocks.cost_j[member].sum(axis=0), kind="stable"):
            state.clock[inner] = clock
            state.duration_s[node] = clocks.time_s[member, clock]
            # The replay goes on from the first node that changed.
            state.touched[0] = min(state.touched[0], node.min())
            if clock == fast or replay(clocks, state) <= problem.deadline_s:
                break
    return state.clock


def mixtures(problem: BudgetProblem, paces: Sequence[BudgetPlan]) -> list[BudgetPlan]:
    """Return plans of two paces, one until some moment and the other after it, in either order."""

    def promise_j(pair: tuple[BudgetPlan, BudgetPlan]) -> float:
        """What the straight line between both costs at the deadline."""
        fast, slow = pair
        part = (problem.deadline_s - fast.time_s) / (slow.time_s - fast.time_s)
        return fast.cost_j + part * (slow.cost_j - fast.cost_j)

    mixed = []
    for fast, slow in sorted(around_deadline(paces), key=promise_j)[:_PAIRS]:
        mixed.append(_mixed(problem, fast, slow))
        mixed.append(_mixed(problem, slow, fast))
    return mixed


def _mixed(problem: BudgetProblem, first: BudgetPlan, second: BudgetPlan) -> BudgetPlan:
    """Return as much of the slower plan as fits, with one moment of change for all ranks."""
    # Waves are from 0 to 1, so a moment of 1 is all of the first plan, and 0 all of the second.
    if first.late_s == 0.0:
        best = first
        fits = 1.0
        misses = 0.0
    else:
        best = second
        fits = 0.0
        misses = 1.0
    for _ in range(_HALVINGS):
        moment = (fits + misses) / 2
        mixed = problem.plan(np.where(problem.clocks.wave < moment, first.clock, second.clock))
        if mixed.late_s == 0.0:
            fits = moment
            best = mixed
        else:
            misses = moment
    return best


def fastest_segments(problem: BudgetProblem, segments: int) -> Integers:
    """Return clocks in at most so many segments per rank with the least sum of durations.

    If that few segments are impossible, some of the clocks are not measured ones.
    """
    clocks = problem.clocks
    chosen = list[int]()
    for begin, end in problem.ranks:
        chosen += _fastest_of_rank(clocks.time_s[clocks.member[begin:end]], segments)
    return np.array(chosen, dtype=np.int64)


def _fastest_of_rank(time_s: Floats, segments: int) -> list[int]:
    """Return the clocks of one rank, of its (computations, clocks) seconds, by dynamic
    programming over its computations.
    """
    computations, clocks = time_s.shape
    # (segments so far, clock of the last one) -> the least seconds
    least_s = np.full((segments + 1, clocks), np.inf)
    least_s[0] = 0.0
    # 1 + the clock before, where a segment begins with this computation; else 0
    came = np.zeros((computations, segments + 1, clocks), dtype=np.int64)
    for i, own_s in enumerate(time_s):
        before = least_s[:-1].argmin(axis=1)
        before_s = least_s[:-1].min(axis=1)
        # A segment begins where the best plan of one segment less beats going on at this clock.
        begins = before_s[:, None] < least_s[1:]
        came[i, 1:] = np.where(begins, before[:, None] + 1, 0)
        least_s[1:] = np.where(begins, before_s[:, None], least_s[1:]) + own_s
        # Only before the first computation there may be no segment.
        least_s[0] = np.inf
    # Back from the best end, along the clocks that it came from.
    segment = int(least_s[1:].min(axis=1).argmin()) + 1
    clock = int(least_s[segment].argmin())
    backwards = list[int]()
    for i in reversed(range(computations)):
        backwards.append(clock)
        if came[i, segment, clock]:
            clock = int(came[i, segment, clock]) - 1
            segment -= 1
    return backwards[::-1]
