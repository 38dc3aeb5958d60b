"""The exact time-energy frontier of a pipeline iteration, and the plans along it.

The planner and its compiled kernels are loaded when a plan is asked for, so that looking at a frontier stays cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.displayed import Displayable
from perseus_planner.errors import (
    InfeasibleBudget,
    InfeasiblePower,
    PlanError,
)
from perseus_planner.quantities import CHANGES, POWER, TIME, WAIT
from perseus_planner.solver.curve import TimeEnergyCurve
from perseus_planner.solver.frontier_check import check_frontier
from perseus_planner.solver.frontier_file import checking_frontier, read_frontier, write_frontier

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.planner import Planner


@dataclass(frozen=True, eq=False, repr=False)
class Frontier(TimeEnergyCurve, Displayable):
    """The exact time-energy curve of an iteration, and the plans along it."""

    def __repr__(self) -> str:
        least = f"least energy {self.energies_j.min():.6g} J at {self.least_energy_time_s:.6g} s"
        return f"<Frontier: {self.schedule}, {self.min_time_s:.6g} s to {self.max_time_s:.6g} s, {least}>"

    def plan_for(self, deadline_s: float, *, max_changes: int | None = None, min_dwell_s: float = 0.0) -> Plan:
        """Return the plan for an iteration that may take `deadline_s` seconds; it is never slower than `max_time_s`.

        It spends the least effective energy: the right plan if others wait until the deadline anyway.

        Args:
            deadline_s: seconds.
            max_changes: how often each GPU may change its clock in an iteration, including the change back for the next
                one; 0 for one clock per GPU, None for any number.
            min_dwell_s: the least time for which a GPU must hold a clock, seconds.

        Raises:
            InfeasibleDeadline: If no choice of clocks is that fast; names the least feasible time.
            InfeasibleBudget: If no plan found is that fast with so few changes; names the least time found.
            UsageError: If an argument is out of range.
        """
        most = None if max_changes is None else CHANGES.check(max_changes, "max_changes")
        return self._planner.plan(self.check_deadline(deadline_s), most, WAIT.check(min_dwell_s, "min_dwell_s"))

    def plan_for_least_energy(self, *, max_changes: int | None = None, min_dwell_s: float = 0.0) -> Plan:
        """Return the plan with the least energy per iteration, for a pipeline that does not wait for others.

        `max_changes` and `min_dwell_s` are those of `plan_for`. The deadline is a hair above `least_energy_time_s`, so
        that a plan of exactly that time is not refused because of a rounding error.
        """
        deadline_s = self.least_energy_time_s * (1 + 1e-9)
        return self.plan_for(deadline_s, max_changes=max_changes, min_dwell_s=min_dwell_s)

    def plan_beside_straggler(
        self, straggler_time_s: float, *, max_changes: int | None = None, min_dwell_s: float = 0.0
    ) -> Plan:
        """Return the plan beside a straggler whose iteration takes `straggler_time_s` seconds.

        The plan is as slow as the straggler, but never slower than `max_time_s` (Perseus, SOSP'24). If the straggler is
        faster than this pipeline can be, the plan is as fast as possible. `max_changes` and `min_dwell_s` are those of
        `plan_for`.

        Raises:
            UsageError: If an argument is out of range.
        """
        deadline_s = max(TIME.check(straggler_time_s, "straggler_time_s"), self.min_time_s)
        return self.plan_for(deadline_s, max_changes=max_changes, min_dwell_s=min_dwell_s)

    def plan_within_power(self, power_w: float, *, max_changes: int | None = None, min_dwell_s: float = 0.0) -> Plan:
        """Return the fastest plan found whose average power over all GPUs of the pipeline is at most `power_w` watts.

        `max_changes` and `min_dwell_s` are those of `plan_for`.

        Raises:
            InfeasiblePower: If no plan found draws that little; names the least power found.
            UsageError: If an argument is out of range.
        """
        target_w = power_w = POWER.check(power_w, "power_w")
        while True:
            deadline_s = self._fastest_within(target_w)
            if deadline_s is None:
                frugal_s = float(self.times_s[int(np.argmin(self.energies_j / self.times_s))])
                frugal = self._plan_near(frugal_s, max_changes, min_dwell_s)
                if frugal.power_w <= power_w:
                    return frugal
                raise InfeasiblePower(power_w, frugal.power_w)
            plan = self._plan_near(deadline_s, max_changes, min_dwell_s)
            if plan.power_w <= power_w:
                return plan
            target_w -= max(plan.power_w - power_w, 1e-4 * power_w)  # lower the bound by the plan's excess

    def plan_of(self, clocks: Mapping[str, int]) -> Plan:
        """Return the plan that runs every computation at its clock in `clocks`: "3F17" -> MHz.

        Raises:
            PlanError: If the clock of a computation is missing or was not measured.
        """
        chosen = []
        for computation, key in zip(self.dag.computations, self.dag.iteration.keys, strict=True):
            clock = clocks.get(str(computation))
            if clock is None or all(m.clock_mhz != clock for m in self.profile.measurements[key]):
                read = "has no clock" if clock is None else f"{clock} MHz was not measured"
                raise PlanError(f"{computation}: {read}; choose a clock of the profile")
            chosen.append(clock)
        return self._planner.plan_of(chosen, None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file that `load` reads; equal frontiers give equal bytes.

        Raises:
            FrontierError: If the file cannot be written.
        """
        write_frontier(path, self.dag, (self.times, self.powers), self.checkpoints)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read a file that `save` wrote.

        Raises:
            FrontierError: If the file cannot be read, or does not hold what `save` writes.
        """
        dag, (times, powers), checkpoints = read_frontier(path)
        frontier = cls(dag, times, powers, checkpoints)
        with checking_frontier(path):
            check_frontier(frontier.scaled.network, times, powers, checkpoints)
        return frontier

    @cached_property
    def _planner(self) -> Planner:
        from perseus_planner.solver.planner import Planner

        return Planner(self)

    def _plan_near(self, deadline_s: float, max_changes: int | None, min_dwell_s: float) -> Plan:
        """Return `plan_for`, or the fastest plan found if the switch budget allows none that fast."""
        try:
            return self.plan_for(deadline_s, max_changes=max_changes, min_dwell_s=min_dwell_s)
        except InfeasibleBudget as error:
            return self.plan_for(error.least_time_s, max_changes=max_changes, min_dwell_s=min_dwell_s)

    def _fastest_within(self, power_w: float) -> float | None:
        """Return the least time whose bound, as an average power, is at most `power_w`, or None if there is none."""
        average_w = self.energies_j / self.times_s
        fitting = np.flatnonzero(average_w <= power_w)
        if len(fitting) == 0:
            return None
        point = int(fitting[-1])  # the fastest one; the line from it to the next crosses the budget
        if point == len(self.times_s) - 1:
            return self.min_time_s
        (slow_s, fast_s), (slow_j, fast_j) = self.times_s[point : point + 2], self.energies_j[point : point + 2]
        slope_w = (fast_j - slow_j) / (fast_s - slow_s)
        crossing_s = (slow_j - slope_w * slow_s) / (power_w - slope_w)
        return float(min(max(crossing_s, fast_s), slow_s))
