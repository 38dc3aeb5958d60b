"""Find plans within a switch budget: a limit on clock changes per GPU and iteration.

The ranks of a pipeline run in lockstep, so a good plan with few changes has phases: for a time all
ranks keep one pace, each at the clock that suits it best there, and then another pace. Mixing two
paces costs what the straight line between them says. The begin and end of an iteration, where the
pipeline fills and drains, are phases too.

1. *No change.* For every possible pace, each rank takes its cheapest clock that keeps it, for the
   whole iteration. A local search over the clocks of single ranks, and of two at a time, follows
   (`paces.py`).
   Annealing (`clock_search.py`) starts from the best of these plans that meets the deadline.
2. *Two changes.* A slower pace and a faster one, one after the other, share an iteration as the
   deadline allows. And all ranks may be fast while the pipeline fills and drains, and keep one
   clock each between. The best plan of either sort is annealed.
3. *More changes.* The levels, a fixed series of numbers of changes, are annealed in turn, each from
   the plan of the level before; it may take parts of the plans of all paces and of the plan without
   a budget. So a larger budget never gives a worse plan.

If there are few combinations of clocks, all of them are tried instead. Everything is seeded: equal
input, equal plan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget
from perseus_planner.solver.budget_problem import BudgetPlan, BudgetProblem, by_worth
from perseus_planner.solver.clock_search import Goal, Heat, anneal
from perseus_planner.solver.exhaustive import count_choices, try_all
from perseus_planner.solver.paces import around_deadline, find_paces
from perseus_planner.solver.phases import fast_ends, fastest_segments, mixtures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.network import Integers


class Tries(NamedTuple):
    """How many moves an annealing tries. A replay takes as long as there are nodes, so large
    problems get fewer.
    """

    times_nodes: int  #: tries times nodes of the problem
    least: int
    most: int

    def of(self, nodes: int) -> int:
        """Return the tries for a problem of so many nodes."""
        return min(max(self.times_nodes // nodes, self.least), self.most)


class Repeats(NamedTuple):
    """How often a small problem is annealed from one start, at least once."""

    times_nodes: int  #: repeats times nodes of the problem
    most: int

    def of(self, nodes: int) -> int:
        """Return the repeats for a problem of so many nodes."""
        return min(max(self.times_nodes // nodes, 1), self.most)


#: combinations up to which all are tried, so that the smallest problems are solved exactly
_FEW = 2**15
#: for each level
_EFFORT = Tries(times_nodes=150_000_000, least=5_000, most=120_000)
#: from each start
_REPEATS = Repeats(times_nodes=300, most=4)
#: first temperature: the distance to the plan without a budget, for so many computations
_HEAT = 3.0
_LEAST_HEAT = 3e-3  #: and at least this part of that distance
_HOTTER = 3.0  #: times as hot, every second repeat
_COOLING = 0.01  #: last temperature, as a part of the first one
#: first temperature as a part of the iteration time, when the search is for the fastest plan
_HEAT_OF_TIME = 1e-3
_NEAR = 0.12  #: distance from the deadline of the paces whose parts may be taken, as a part of it
#: in the fastest plan that a search begins with if none meets the deadline
_MOST_FAST_SEGMENTS = 16


def clocks_within_budget(
    dag: PipelineDag,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    most_changes: int,
) -> list[int]:
    """Return the clock of each computation of `dag.computations`, MHz, in the best plan found
    within a switch budget.

    Args:
        dag: the iteration.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget.
        most_changes: how often each rank may change its clock in an iteration, including the change
            back to its first clock.

    Returns:
        With equal other arguments, a larger budget never gives a larger effective energy. If
        `unlimited_mhz` is within the budget, the result is that, or one clock per rank if that
        costs less.

    Raises:
        InfeasibleBudget: If no plan found within the budget meets the deadline; names the least
            time found.
    """
    search = _Search(BudgetProblem(dag, deadline_s, unlimited_mhz))
    best: BudgetPlan | None = search.unlimited
    # A plan that keeps the budget by itself needs no search.
    if search.problem.changes_of(search.unlimited.clock) > most_changes:
        *_, best = search.by_level(budget_levels(most_changes))
    if best is None or best.late_s > 0.0:
        raise InfeasibleBudget(deadline_s, most_changes, None if best is None else best.time_s)
    return search.problem.mhz(best.clock)


def budget_levels(most_changes: int) -> list[int]:
    """Return the numbers of changes that are searched in turn for a budget: 0, 2, 3, 4, 6, 8, 12,
    16 and so on, as many as it allows.

    The series does not depend on the budget: a larger one goes through the plans of every smaller
    one, and so is never worse.
    """
    levels = [0, *(k << power for power in range(most_changes.bit_length()) for k in (2, 3))]
    return [level for level in levels if level <= most_changes]


def clocks_by_budget(
    dag: PipelineDag,
    deadline_s: float,
    unlimited_mhz: Sequence[int],
    levels: Sequence[int],
    effort: float = 1.0,
) -> dict[int, list[int]]:
    """Return `clocks_within_budget` for several numbers of changes, each searched from the one
    before.

    Args:
        dag: the iteration.
        deadline_s: deadline of the replay, seconds.
        unlimited_mhz: the clock of each computation in a plan that meets the deadline without a
            budget.
        levels: numbers of changes, rising.
        effort: how long to search, as a share of what `clocks_within_budget` takes.

    Returns:
        Number of changes -> clocks, MHz. Numbers within which no plan was found are left out.
    """
    search = _Search(BudgetProblem(dag, deadline_s, unlimited_mhz), effort)
    plans = zip(levels, search.by_level(levels), strict=True)
    return {
        level: search.problem.mhz(plan.clock)
        for level, plan in plans
        if plan is not None and plan.late_s == 0.0
    }


class _Search:
    """What is known before a search: the plan without a budget, and the paces.

    Args:
        problem: the iteration and its deadline.
        effort: how long to search, as a share of the usual.
    """

    def __init__(self, problem: BudgetProblem, effort: float = 1.0) -> None:
        self.problem = problem
        self._effort = effort
        self._paces = find_paces(problem)
        self.unlimited = problem.plan(problem.unlimited)
        # If few clocks fit a deadline, one clock per rank may be better than the rounded plan.
        steady = min(self._paces, key=by_worth, default=self.unlimited)
        if steady.late_s == 0.0 and steady.cost_j < self.unlimited.cost_j:
            self.unlimited = steady

    def by_level(self, levels: Sequence[int]) -> Iterator[BudgetPlan | None]:
        """Yield the best plan found for each number of changes in turn, if there is any."""
        if count_choices(self.problem.clocks) <= _FEW:
            return try_all(self.problem, levels)
        return self._annealed(levels)

    def _annealed(self, levels: Sequence[int]) -> Iterator[BudgetPlan | None]:
        """Yield what `by_level` does, each level annealed from the plan of the level before."""
        price_w = self._saving_per_second_w()
        steady_parts, all_parts = self._libraries()
        best: BudgetPlan | None = None
        has_phases = False
        for level in levels:
            # The best plan of each sort that is new at this level, and that of the level before.
            sorts = [self._paces] if best is None else [[best]]
            # Two changes allow two more sorts of plans.
            if level >= 2 and not has_phases:
                has_phases = True
                sorts += [mixtures(self.problem, self._paces), fast_ends(self.problem)]
            starts = [start for start in map(self._best, sorts) if start is not None]
            # No start is in time: the fastest plan of so few segments is tried as one.
            if not starts or min(start.late_s for start in starts) > 0.0:
                starts += self._fastest(level)
            goal = Goal(self.problem.deadline_s, level, price_w, self.unlimited.cost_j)
            # Parts of the unlimited plan bring changes, of which level 0 has none.
            library = steady_parts if level == 0 else all_parts
            best = self._best([self._improved(start, goal, library) for start in starts])
            yield best

    def _libraries(self) -> tuple[Integers, Integers]:
        """Return the (plans, m) clocks of which a search may take parts: those of paces, and those
        of paces and of the unlimited plan.
        """
        deadline_s = self.problem.deadline_s
        # Only plans about as fast as the deadline have parts that fit.
        near = [
            pace.clock for pace in self._paces if abs(pace.time_s / deadline_s - 1) <= _NEAR
        ] or [self.unlimited.clock]
        # About a third of the library is the plan without a budget.
        unlimited = [self.unlimited.clock] * ((len(near) + 1) // 2)
        return np.array(near), np.array([*near, *unlimited])

    def _fastest(self, level: int) -> list[BudgetPlan]:
        """Return the fastest plan of as many segments as a level allows, if there is one."""
        segments = min(max(level, 1), _MOST_FAST_SEGMENTS)
        plan = self.problem.plan(fastest_segments(self.problem, segments))
        # Too few segments for the measured clocks: the plan has an infinite cost.
        return [plan] if plan.cost_j < math.inf else []

    def _best(self, plans: Sequence[BudgetPlan]) -> BudgetPlan | None:
        """Return the best of these plans.

        One that costs less than the one without a budget counts only if no other meets the
        deadline.
        """
        dear = [p for p in plans if p.late_s == 0.0 and p.cost_j >= self.unlimited.cost_j]
        return min(dear or plans, key=by_worth, default=None)

    def _improved(self, start: BudgetPlan, goal: Goal, library: Integers) -> BudgetPlan:
        """Anneal one level; the result is at least as good as `start`."""
        problem = self.problem
        clocks = problem.clocks
        nodes = len(clocks.fixed_s)
        tries = math.ceil(self._effort * _EFFORT.of(nodes))
        # Search for the fastest plan first, whatever it costs.
        if start.late_s > 0.0:
            start = min(start, self._faster(start, goal, tries, library), key=by_worth)
        gap_j = start.cost_j - goal.floor_j
        # What costs less than the floor does not count, so nothing better is to be found.
        if gap_j <= 0.0:
            return start
        first_j = gap_j * max(_HEAT / len(clocks.member), _LEAST_HEAT)
        found = [start]
        # Seeds differ, and every second search is hotter, so that it leaves other valleys.
        for repeat in range(math.ceil(self._effort * _REPEATS.of(nodes))):
            hot_j = first_j if repeat % 2 == 0 else _HOTTER * first_j
            heat = Heat(tries, hot_j, hot_j * _COOLING, seed=repeat + 1)
            found.append(problem.plan(anneal(clocks, start.clock, goal, heat, library)))
        return min(found, key=by_worth)

    def _faster(self, start: BudgetPlan, goal: Goal, tries: int, library: Integers) -> BudgetPlan:
        """Return the fastest plan that an annealing finds."""
        clocks = self.problem.clocks
        # Costs are 0 and the price is 1, so what is minimized here is seconds.
        free = clocks._replace(cost_j=np.where(np.isfinite(clocks.cost_j), 0.0, np.inf))
        by_time = goal._replace(price_w=1.0, floor_j=-math.inf)
        hot_s = _HEAT_OF_TIME * start.time_s
        heat = Heat(tries, hot_s, _HEAT_OF_TIME * _COOLING * start.time_s)
        return self.problem.plan(anneal(free, start.clock, by_time, heat, library))

    def _saving_per_second_w(self) -> float:
        """Return what a second more of deadline saves: between the paces around it, else from
        fastest to cheapest clock.
        """
        slopes_w = [
            (fast.cost_j - slow.cost_j) / (slow.time_s - fast.time_s)
            for fast, slow in around_deadline(self._paces)
        ]
        if slopes_w:
            return float(np.median(slopes_w))
        # Without paces on both sides: how steep all rows are together, once for each rank.
        clocks = self.problem.clocks
        finite = np.isfinite(clocks.time_s)
        spread_j = max(np.ptp(clocks.cost_j[finite]), 1e-9)
        spread_s = max(np.ptp(clocks.time_s[finite]), 1e-9)
        return float(spread_j / spread_s) * len(self.problem.ranks)
