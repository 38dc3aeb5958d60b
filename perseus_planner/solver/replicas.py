"""Plan data-parallel pipelines that end an iteration together: one deadline for all of them, a
plan for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline, UsageError
from perseus_planner.base.units import COUNT, ON_TIME

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.frontier import Frontier


@dataclass(frozen=True)
class Replicas:
    """The pipelines of one job, each kind given once; every pipeline waits for the slowest.

    Raises:
        UsageError: If there is no frontier, or the counts are not one positive whole number for
            each.
    """

    #: the frontier of each kind of pipeline, such as one for each GPU generation.
    frontiers: tuple[Frontier, ...]
    counts: tuple[int, ...] = ()  #: the number of pipelines of each kind; empty for 1 each

    def __post_init__(self) -> None:
        object.__setattr__(self, "frontiers", tuple(self.frontiers))
        object.__setattr__(self, "counts", tuple(self.counts) or (1,) * len(self.frontiers))
        if not self.frontiers or len(self.counts) != len(self.frontiers):
            raise UsageError(
                f"replicas: {len(self.counts)} counts for {len(self.frontiers)} kinds of "
                "pipelines; give one for each"
            )
        for count in self.counts:
            COUNT.check(count, "replicas")

    @property
    def min_time_s(self) -> float:
        """The least iteration time: that of the slowest pipeline, seconds."""
        return max(frontier.min_time_s for frontier in self.frontiers)

    @property
    def max_time_s(self) -> float:
        """The longest useful iteration time: beyond it no pipeline saves by being slower,
        seconds.
        """
        return max(frontier.max_time_s for frontier in self.frontiers)

    @property
    def baseline_time_s(self) -> float:
        """The iteration time with all clocks at their maximum, seconds."""
        return max(frontier.baseline_time_s for frontier in self.frontiers)

    @property
    def baseline_energy_j(self) -> float:
        """The energy of that iteration over all pipelines, joules, including the wait for the
        slowest.
        """
        energies_j = [frontier.baseline_energy_j for frontier in self.frontiers]
        times_s = [frontier.baseline_time_s for frontier in self.frontiers]
        return self._waiting_until(self.baseline_time_s, times_s, energies_j)

    @property
    def least_energy_time_s(self) -> float:
        """The iteration time at which all pipelines together need the least energy, seconds."""
        times_s = np.unique(np.concatenate([frontier.times_s for frontier in self.frontiers]))
        feasible = times_s[times_s >= self.min_time_s].tolist()
        return float(min(feasible, key=self.bound_j))

    def least_deadline_s(self, on_time: float | None = ON_TIME) -> float:
        """Return the least common deadline for which there are plans of this probability,
        seconds.
        """
        return max(frontier.least_deadline_s(on_time) for frontier in self.frontiers)

    def bound_j(self, deadline_s: float) -> float:
        """Return the least relaxed energy of an iteration of that time over all pipelines, joules,
        waiting included.

        Raises:
            InfeasibleDeadline: If no iteration is that fast.
            UsageError: If `deadline_s` is not a time.
        """
        bounds_j = [frontier.bound_j(deadline_s) for frontier in self.frontiers]
        return math.fsum(
            count * bound_j for count, bound_j in zip(self.counts, bounds_j, strict=True)
        )

    def plans_for(self, deadline_s: float, **budget: Any) -> tuple[Plan, ...]:
        """Return a plan for each kind of pipeline, for one common deadline.

        Each plan is as slow as the deadline allows, but never slower than the `max_time_s` of its
        frontier.

        Args:
            deadline_s: seconds that an iteration may take.
            budget: further keyword arguments of `Frontier.plan_until`.

        Raises:
            InfeasibleBudget: If no plan of some pipeline was found within its switch budget.
            InfeasibleDeadline: If some pipeline cannot be that fast; names the least feasible time
                of all.
            UsageError: If an argument is out of range.
        """
        try:
            return tuple(frontier.plan_until(deadline_s, **budget) for frontier in self.frontiers)
        except InfeasibleBudget:
            raise
        except InfeasibleDeadline as error:
            raise InfeasibleDeadline(deadline_s, max(self.min_time_s, error.least_time_s)) from None

    def time_and_energy(self, plans: Sequence[Plan]) -> tuple[float, float]:
        """Return the seconds of an iteration of `plans`, one of each kind, and its joules over
        all pipelines.
        """
        time_s = max(plan.time_s for plan in plans)
        energies_j = [plan.energy_j for plan in plans]
        return time_s, self._waiting_until(time_s, [plan.time_s for plan in plans], energies_j)

    def _waiting_until(
        self, time_s: float, times_s: Sequence[float], energies_j: Sequence[float]
    ) -> float:
        """Return the joules of all pipelines, which wait from their `times_s` until `time_s`."""
        kinds = zip(self.counts, self.frontiers, times_s, energies_j, strict=True)
        return math.fsum(
            count * (energy_j + frontier.dag.waiting_w * (time_s - end_s))
            for count, frontier, end_s, energy_j in kinds
        )
