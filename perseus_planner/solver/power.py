"""The fastest plan within a power budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget, InfeasiblePower

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.curve import TimeEnergyCurve


def fastest_within_power(
    curve: TimeEnergyCurve,
    power_w: float,
    plan_until: Callable[[float], Plan],
    power_of: Callable[[Plan], float],
) -> Plan:
    """Return the fastest plan found whose power, as `power_of` tells it in watts, is at most
    `power_w`.

    Args:
        curve: that of the plans.
        power_w: watts.
        plan_until: makes a plan for a deadline, seconds, within a switch budget.
        power_of: tells the power of a plan, watts.

    Raises:
        InfeasiblePower: If no plan found draws that little; names the least power found.
    """

    def plan_near(deadline_s: float) -> Plan:
        try:
            return plan_until(deadline_s)
        except InfeasibleBudget as error:  # the fastest plan found that the budget allows
            return plan_until(error.least_time_s)

    target_w = power_w
    while True:
        deadline_s = _fastest_within(curve, target_w)
        if deadline_s is None:
            frugal = plan_near(float(curve.times_s[np.argmin(curve.energies_j / curve.times_s)]))
            if power_of(frugal) <= power_w:
                return frugal
            raise InfeasiblePower(power_w, power_of(frugal))
        plan = plan_near(deadline_s)
        excess_w = power_of(plan) - power_w
        if excess_w <= 0.0:
            return plan
        target_w -= max(excess_w, 1e-4 * power_w)  # lower the bound by the plan's excess


def _fastest_within(curve: TimeEnergyCurve, power_w: float) -> float | None:
    """Return the least time whose bound, as an average power, is at most `power_w`, or None if
    there is none.
    """
    average_w = curve.energies_j / curve.times_s
    fitting = np.flatnonzero(average_w <= power_w)
    if len(fitting) == 0:
        return None
    point = int(fitting[-1])  # the fastest one; the line from it to the next crosses the budget
    if point == len(curve.times_s) - 1:
        return curve.min_time_s
    (slow_s, fast_s), (slow_j, fast_j) = (
        curve.times_s[point : point + 2],
        curve.energies_j[point : point + 2],
    )
    slope_w = (fast_j - slow_j) / (fast_s - slow_s)
    crossing_s = (slow_j - slope_w * slow_s) / (power_w - slope_w)
    return float(min(max(crossing_s, fast_s), slow_s))
