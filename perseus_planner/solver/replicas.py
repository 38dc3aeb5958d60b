"""Data-parallel pipelines that all end an iteration together: one deadline for all of them, a plan for each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.errors import InfeasibleBudget, InfeasibleDeadline, UsageError
from perseus_planner.quantities import COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.frontier import Frontier


@dataclass(frozen=True)
class Replicas:
    """Pipelines of one job, those alike given once; each waits for the slowest.

    Attributes:
        frontiers: of each kind of pipeline, such as one for each GPU generation.
        counts: how many pipelines of each kind there are; 1 each where it is empty.

    Raises:
        UsageError: there is no frontier, or the counts are not one positive whole number for each.
    """

    frontiers: tuple[Frontier, ...]
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "frontiers", tuple(self.frontiers))
        object.__setattr__(self, "counts", tuple(self.counts) or (1,) * len(self.frontiers))
        if not self.frontiers or len(self.counts) != len(self.frontiers):
            raise UsageError(
                f"replicas: {len(self.counts)} counts for {len(self.frontiers)} kinds of pipelines; give one for each"
            )
        for count in self.counts:
            COUNT.check(count, "replicas")

    @property
    def min_time_s(self) -> float:
        """The least time of an iteration of all: that of the slowest pipeline, seconds."""
        return max(frontier.min_time_s for frontier in self.frontiers)

    @property
    def max_time_s(self) -> float:
        """The iteration time from which on no pipeline saves by being slower, seconds."""
        return max(frontier.max_time_s for frontier in self.frontiers)

    @property
    def baseline_time_s(self) -> float:
        """The iteration time with all clocks at their maximum, seconds."""
        return max(frontier.baseline_time_s for frontier in self.frontiers)

    @property
    def baseline_energy_j(self) -> float:
        """The energy of that iteration over all pipelines, joules, waiting for the slowest included."""
        energies_j = [frontier.baseline_energy_j for frontier in self.frontiers]
        times_s = [frontier.baseline_time_s for frontier in self.frontiers]
        return self._waiting_until(self.baseline_time_s, times_s, energies_j)

    @property
    def least_energy_time_s(self) -> float:
        """The iteration time at which all pipelines together need the least energy, seconds."""
        times_s = np.unique(np.concatenate([frontier.times_s for frontier in self.frontiers]))
        feasible = times_s[times_s >= self.min_time_s].tolist()
        return float(min(feasible, key=self.bound_j))

    def bound_j(self, deadline_s: float) -> float:
        """The least relaxed energy of an iteration of that time over all pipelines, joules, waiting included.

        Raises:
            InfeasibleDeadline: no iteration is that fast.
            UsageError: it is no time.
        """
        bounds_j = [frontier.bound_j(deadline_s) for frontier in self.frontiers]
        return math.fsum(count * bound_j for count, bound_j in zip(self.counts, bounds_j, strict=True))

    def plans_for(self, deadline_s: float, **budget: Any) -> tuple[Plan, ...]:
        """A plan for each kind of pipeline for one common deadline.

        Each is as slow as the deadline allows, but never slower than its own `max_time_s`.

        Args:
            deadline_s: seconds that an iteration may take.
            budget: what else `Frontier.plan_for` takes.

        Raises:
            InfeasibleBudget: no plan of some pipeline was found within its switch budget.
            InfeasibleDeadline: some pipeline cannot be that fast; names the least feasible time of all.
            UsageError: it is no time.
        """
        try:
            return tuple(frontier.plan_for(deadline_s, **budget) for frontier in self.frontiers)
        except InfeasibleBudget:
            raise
        except InfeasibleDeadline as error:
            raise InfeasibleDeadline(deadline_s, max(self.min_time_s, error.least_time_s)) from None

    def time_and_energy(self, plans: Sequence[Plan]) -> tuple[float, float]:
        """What an iteration of `plans`, one of each kind, takes: seconds, and joules over all pipelines."""
        time_s = max(plan.time_s for plan in plans)
        energies_j = [plan.energy_j for plan in plans]
        return time_s, self._waiting_until(time_s, [plan.time_s for plan in plans], energies_j)

    def _waiting_until(self, time_s: float, times_s: Sequence[float], energies_j: Sequence[float]) -> float:
        """Joules over all pipelines that wait from their own `times_s` until `time_s`."""
        kinds = zip(self.counts, self.frontiers, times_s, energies_j, strict=True)
        return math.fsum(count * (own_j + each.dag.waiting_w * (time_s - own_s)) for count, each, own_s, own_j in kinds)
