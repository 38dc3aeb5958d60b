"""What the best configuration is: the fastest, or that of the least energy, within bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.explore.curves import Curve


@dataclass(frozen=True)
class Objective:
    """What the best configuration is: the fastest, unless one of the others is given."""

    deadline_s: float | None = None  #: Least energy with iterations of at most that time
    power_w: float | None = None  #: The fastest whose mean power over all GPUs is at most that
    least_energy: bool = False  #: Least energy, whatever it takes

    def point(self, curve: Curve) -> tuple[float, float] | None:
        """Return the time and energy of the best point of a curve, or None if it has none."""
        times_s = curve.times_s
        energies_j = curve.energies_j
        # Bounds are infinite where an iteration is too short.
        finite = np.isfinite(energies_j)
        times_s = times_s[finite]
        energies_j = energies_j[finite]
        if len(times_s) == 0:
            return None
        if self.deadline_s is not None:
            return _within_time(times_s, energies_j, self.deadline_s)
        if self.power_w is not None:
            return _within_power(times_s, energies_j, self.power_w)
        best = int(np.argmin(energies_j)) if self.least_energy else 0
        return float(times_s[best]), float(energies_j[best])

    def value(self, curve: Curve) -> tuple[float, float]:
        """Return what is to be small: energy before time, or time before energy.

        If no point of the curve is allowed, the first is infinite, and the second the least
        deadline or power that is.
        """
        point = self.point(curve)
        if point is not None:
            return point[::-1] if self.least_energy or self.deadline_s is not None else point
        wanted = curve.times_s if self.deadline_s is not None else curve.energies_j / curve.times_s
        return math.inf, float(wanted.min(initial=math.inf))


def _within_time(
    times_s: NDArray[np.float64], energies_j: NDArray[np.float64], deadline_s: float
) -> tuple[float, float] | None:
    """Return the point of least energy of at most that time."""
    if times_s[0] > deadline_s:
        return None
    # The deadline itself is a point too, as energy is linear between points.
    until_s = np.append(times_s[times_s <= deadline_s], min(deadline_s, times_s[-1]))
    until_j = np.interp(until_s, times_s, energies_j)
    best = int(np.argmin(until_j))
    return float(until_s[best]), float(until_j[best])


def _within_power(
    times_s: NDArray[np.float64], energies_j: NDArray[np.float64], power_w: float
) -> tuple[float, float] | None:
    """Return the fastest point of at most that mean power."""
    powers_w = energies_j / times_s
    within = np.nonzero(powers_w <= power_w)[0]
    if len(within) == 0:
        return None
    # Points rise in time, and power falls along them.
    first = int(within[0])
    if first == 0:
        return float(times_s[0]), float(energies_j[0])
    low_s, high_s = times_s[first - 1 : first + 1]
    low_j, high_j = energies_j[first - 1 : first + 1]
    # Between two points energy is linear, so the time at which power is met follows.
    slope_w = (high_j - low_j) / (high_s - low_s)
    time_s = float((low_j - slope_w * low_s) / (power_w - slope_w))
    return time_s, power_w * time_s
