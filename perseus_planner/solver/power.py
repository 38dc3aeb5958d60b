"""The fastest plan within a power budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.errors import InfeasibleBudget, InfeasiblePower

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.frontier import Frontier


def fastest_within_power(
    frontier: Frontier,
    power_w: float,
    power_of: Callable[[Plan], float],
    max_changes: int | None,
) -> Plan:
    """Return the fastest plan found whose power, as `power_of` tells it in watts, is at most
    `power_w`.

    Raises:
        InfeasiblePower: If no plan found draws that little; names the least power found.
    """
    target_w = power_w
    while True:
        deadline_s = _fastest_within(frontier, target_w)
        if deadline_s is None:
            frugal_s = float(
                frontier.times_s[int(np.argmin(frontier.energies_j / frontier.times_s))]
            )
            frugal = _plan_near(frontier, frugal_s, max_changes)
            if power_of(frugal) <= power_w:
                return frugal
            raise InfeasiblePower(power_w, power_of(frugal))
        plan = _plan_near(frontier, deadline_s, max_changes)
        excess_w = power_of(plan) - power_w
        if excess_w <= 0.0:
            return plan
        target_w -= max(excess_w, 1e-4 * power_w)  # lower the bound by the plan's excess


def _plan_near(frontier: Frontier, deadline_s: float, max_changes: int | None) -> Plan:
    """Return `plan_until`, or the fastest plan found if the switch budget allows none that fast."""
    try:
        return frontier.plan_until(deadline_s, max_changes=max_changes)
    except InfeasibleBudget as error:
        return frontier.plan_until(error.least_time_s, max_changes=max_changes)


def _fastest_within(frontier: Frontier, power_w: float) -> float | None:
    """Return the least time whose bound, as an average power, is at most `power_w`, or None if
    there is none.
    """
    average_w = frontier.energies_j / frontier.times_s
    fitting = np.flatnonzero(average_w <= power_w)
    if len(fitting) == 0:
        return None
    point = int(fitting[-1])  # the fastest one; the line from it to the next crosses the budget
    if point == len(frontier.times_s) - 1:
        return frontier.min_time_s
    (slow_s, fast_s), (slow_j, fast_j) = (
        frontier.times_s[point : point + 2],
        frontier.energies_j[point : point + 2],
    )
    slope_w = (fast_j - slow_j) / (fast_s - slow_s)
    crossing_s = (slow_j - slope_w * slow_s) / (power_w - slope_w)
    return float(min(max(crossing_s, fast_s), slow_s))
