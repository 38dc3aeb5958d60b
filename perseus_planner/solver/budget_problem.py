"""An iteration and a deadline, as all searches within a switch budget see them, and the plans that
they compare.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.clock_problem import (
    clock_problem_of,
    load_state,
    replay,
    with_waves,
)
from perseus_planner.solver.clock_search import max_changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.clock_problem import ClockProblem
    from perseus_planner.solver.network import Floats, Integers


class BudgetPlan(NamedTuple):
    """A choice of clocks. The better one of two plans is the smaller one by `by_worth`."""

    late_s: float  #: seconds beyond the deadline, 0 in time
    cost_j: float  #: effective energy; infinite if a clock was not measured
    time_s: float
    clock: Integers  #: (m,) the number of the clock of each computation


def by_worth(plan: BudgetPlan) -> tuple[float, float]:
    """Return how plans are sorted: in time by energy, the others behind, by time."""
    return (plan.late_s, plan.cost_j if plan.late_s == 0.0 else plan.time_s)


def pareto_front(plans: Sequence[BudgetPlan]) -> list[BudgetPlan]:
    """Return the plans that no other one beats in time and energy, the fastest first."""
    kept: list[BudgetPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.time_s, plan.cost_j)):
        if not kept or plan.cost_j < kept[-1].cost_j:
            kept.append(plan)
    return kept


class BudgetProblem:
    """The clocks of an iteration are to be chosen for a deadline.

    Args:
        dag: the iteration.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget. It tells what runs at the same time on different ranks.

    Attributes:
        clocks: the iteration, laid out in arrays.
        unlimited: the (m,) numbers of the clocks of `unlimited_mhz`.
        deadline_s: seconds.
        ranks: where the program of each rank begins and ends.
        load_s: (ranks, clocks) seconds of all that a rank runs, at one clock; infinite if some of
            it was not measured there.
        load_j: (ranks, clocks) effective energy of it.
    """

    clocks: ClockProblem
    load_s: Floats
    load_j: Floats

    def __init__(self, dag: PipelineDag, deadline_s: float, unlimited_mhz: Sequence[int]) -> None:
        without_waves, self._clocks_mhz = clock_problem_of(dag)
        column = {mhz: i for i, mhz in enumerate(self._clocks_mhz)}
        self.unlimited = np.array([column[mhz] for mhz in unlimited_mhz], dtype=np.int64)
        self.clocks = with_waves(without_waves, self.unlimited)
        self.deadline_s = deadline_s
        self.ranks = list(pairwise(self.clocks.rank_start.tolist()))
        self.load_s = self._load(self.clocks.time_s)
        self.load_j = self._load(self.clocks.cost_j)

    def _load(self, table: Floats) -> Floats:
        """Return the (ranks, clocks) sums of a (classes, clocks) table over what each rank runs."""
        member = self.clocks.member
        return np.array([table[member[begin:end]].sum(axis=0) for begin, end in self.ranks])

    def plan(self, clock: Integers) -> BudgetPlan:
        """Return the replayed plan of these clocks."""
        state, cost_j = load_state(self.clocks, clock)
        time_s = replay(self.clocks, state)
        return BudgetPlan(max(0.0, time_s - self.deadline_s), cost_j, time_s, clock)

    def steady_plan(self, clock_of_rank: Integers) -> BudgetPlan:
        """Return the plan in which each rank keeps one clock."""
        return self.plan(clock_of_rank[self.clocks.rank])

    def mhz(self, clock: Integers) -> list[int]:
        """Return the clocks in MHz."""
        return [self._clocks_mhz[i] for i in clock.tolist()]

    def changes_of(self, clock: Integers) -> int:
        """Return the most changes of any rank."""
        return max_changes(self.clocks.rank_start, clock, 0, len(self.ranks) - 1, 0)


def replay_each_s(problem: ClockProblem, computed_s: Floats) -> Floats:
    """Return the (plans,) seconds of an iteration, of the (m, plans) durations of computations."""
    duration_s = np.tile(problem.fixed_s[:, None], computed_s.shape[1])
    duration_s[problem.node] = computed_s
    end_s = np.zeros_like(duration_s)
    # Nodes are in topological order, so one pass for all plans at once is enough.
    for k, own_s in enumerate(duration_s):
        for i in range(problem.before_start[k], problem.before_start[k + 1]):
            end_s[k] = np.maximum(end_s[k], end_s[problem.before[i]] + problem.before_lag_s[i])
        end_s[k] += own_s
    latest_s: Floats = end_s.max(axis=0)
    return latest_s
