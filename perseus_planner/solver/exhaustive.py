"""Try every choice of clocks of the smallest problems, so that these are solved exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.solver.budget_problem import replay_each_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.solver.budget_problem import BudgetPlan, BudgetProblem
    from perseus_planner.solver.clock_problem import ClockProblem
    from perseus_planner.solver.network import Integers


def count_choices(problem: ClockProblem) -> int:
    """Return how many choices of measured clocks there are."""
    measured = np.isfinite(problem.time_s).sum(axis=1)
    counts: list[int] = measured[problem.member].tolist()
    return math.prod(counts)


def try_all(problem: BudgetProblem, levels: Sequence[int]) -> Iterator[BudgetPlan | None]:
    """Yield the best plan for each number of changes, None if no plan has so few.

    If all plans that have so few are late, one of these, the fastest.
    """
    clocks = problem.clocks
    member = clocks.member[:, None]
    choice = _all_choices(clocks)
    time_s = replay_each_s(clocks, clocks.time_s[member, choice])
    # The same order of summation as in `load_state`, so that equal plans cost the same.
    cost_j = np.cumsum(clocks.cost_j[member, choice], axis=0)[-1]
    # What is late counts by its time alone.
    cost_j[time_s > problem.deadline_s] = math.inf
    changes = np.max([_changes_of(choice[begin:end]) for begin, end in problem.ranks], axis=0)
    for level in levels:
        within = np.flatnonzero(changes <= level)
        if not len(within):
            yield None
            continue
        best = np.lexsort((time_s[within], cost_j[within]))[0]
        yield problem.plan(choice[:, within[best]].copy())


def _all_choices(problem: ClockProblem) -> Integers:
    """Return the (m, choices) numbers of clocks of every choice."""
    # A number of mixed radix stands for each choice: the last computation counts fastest.
    left = np.arange(count_choices(problem))
    choices = np.empty((len(problem.member), len(left)), dtype=np.int64)
    for computation in reversed(range(len(problem.member))):
        measured = np.flatnonzero(np.isfinite(problem.time_s[problem.member[computation]]))
        choices[computation] = measured[left % len(measured)]
        left //= len(measured)
    return choices


def _changes_of(choice: Integers) -> Integers:
    """Return the (choices,) numbers of changes of one rank with these (computations, choices)."""
    # Iterations repeat: the first computation follows the last one.
    changes: Integers = (choice != np.roll(choice, 1, axis=0)).sum(axis=0)
    return changes
