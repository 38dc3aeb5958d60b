"""Fits the physics of `gpu/simulated/model.py` to measurements of a computation: eight numbers for
all its clocks.

Above the clock at which a power limit takes effect, the achieved clock is constant, so that clock
determines the limit. Given that clock, the ridge, the slope above it, and the ratio of the power
per MHz of memory to that of arithmetic, time is linear in 1 and 1 / clock, and energy is linear in
a static and a dynamic part. So four numbers are searched, first on a grid and then from its best
point in decreasing steps, and the other four are solved for each candidate.

Errors are relative. Small errors count by their squares and larger ones linearly, so that single
bad measurements have little influence (Huber, "Robust estimation of a location parameter", 1964).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perseus_planner.base.errors import ProfileError
from perseus_planner.gpu.simulated.model import Load
from perseus_planner.profiles.keys import AnyKey, ByKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

Floats = NDArray[np.float64]

MIN_CLOCKS = 4
"""Number of clocks that a fit needs: eight unknowns, two values for each clock."""

# Bounds, grid and steps of the search, for: the clock at which the limit takes effect and the
# ridge, both as shares of the way from the lowest to the highest clock; the slope times the highest
# clock; the power per MHz of memory, as a share of that of arithmetic.
_LOW, _HIGH = np.array([0.0, 0.0, 0.0, 0.05]), np.array([1.0, 1.0, 4.0, 1.0])
_GRID = (
    np.linspace(0.1, 1.0, 13),
    np.linspace(0.0, 0.95, 12),
    np.array([0.5, 1.0, 1.5, 2.5]),
    np.array([0.3, 0.8]),
)
_STEPS = np.array([0.05, 0.05, 0.2, 0.2])
_GRID_CLOCKS = 24  # clocks compared on the grid
_FINEST = 0.01  # last steps, as a share of the first
_ROUNDS = 8  # of reweighting
_MIN_DYNAMIC = 0.01  # smallest share of the power at a limit that depends on the clock
_SMALL = 0.01  # smaller relative errors count by their squares


def fit_load(measurements: Sequence[Measurement]) -> Load:
    """Fit the time and energy of measurements that were made at one power limit.

    Raises:
        ProfileError: If there are fewer than `MIN_CLOCKS` clocks, or an energy is 0.
    """
    clocks = len({each.clock_mhz for each in measurements})
    if clocks < MIN_CLOCKS:
        raise ProfileError(
            f"a fit needs {MIN_CLOCKS} clocks or more, but there are {clocks}; measure more"
        )
    if not all(each.energy_j for each in measurements):
        raise ProfileError("a fit needs energies above 0 J; measure again in a longer window")
    rows = sorted((each.clock_mhz, each.time_s, each.energy_j) for each in measurements)
    return _Fit(*np.array(rows, dtype=float).T).best()


def fit_profile(profile: Profile) -> Mapping[AnyKey, Load]:
    """Fit each stage and kind of a profile.

    Raises:
        ProfileError: If the profile is over power limits, or cannot be fitted; the text names stage
            and kind.
    """
    if profile.control == "power-limit":
        raise ProfileError("the profile is over power limits; give a profile over clocks")
    loads = {}
    for key, rows in profile.measurements.items():
        try:
            loads[key] = fit_load(rows)
        except ProfileError as error:
            raise ProfileError(f"stage {key.stage} {key.name}: {error}") from None
    return ByKey(loads)


@dataclass(frozen=True)
class _Fit:
    """The measurements, lowest clock first, and the errors of candidates for the four numbers."""

    clocks_mhz: Floats
    times_s: Floats
    energies_j: Floats

    def best(self) -> Load:
        """Search the best candidate."""
        count = len(self.clocks_mhz)
        some = np.unique(np.linspace(0, count - 1, min(count, _GRID_CLOCKS)).round().astype(int))
        grid = np.array(list(product(*_GRID)))
        sample = _Fit(self.clocks_mhz[some], self.times_s[some], self.energies_j[some])
        candidate = grid[np.argmin(sample.solve(grid)[0])]
        steps = _STEPS
        around = np.array(list(product((0.0, -1.0, 1.0), repeat=4)))
        while steps[0] > _FINEST * _STEPS[0]:
            candidates = np.clip(candidate + around * steps, _LOW, _HIGH)
            nearest = np.argmin(
                self.solve(candidates)[0]
            )  # of equal errors the first, which does not move
            candidate = candidates[nearest]
            if nearest == 0:
                steps = steps / 2
        return self._load(candidate)

    def solve(self, candidates: Floats) -> tuple[Floats, Floats, Floats]:
        """Return a row for each candidate: error; memory_s and megacycles; static_w and
        arithmetic_w_per_mhz.
        """
        achieved_mhz, voltage, ratio = self._clocks_and_voltages(candidates)
        memory_s, megacycles = _nearest(1 / self.times_s, 1 / achieved_mhz / self.times_s)
        times_s = memory_s + megacycles / achieved_mhz
        cycles = (megacycles + ratio * memory_s * achieved_mhz) * voltage**2
        static_w, w_per_mhz = _nearest(times_s / self.energies_j, cycles / self.energies_j)
        off_time = np.abs(times_s / self.times_s - 1)
        off_energy = np.abs((static_w * times_s + w_per_mhz * cycles) / self.energies_j - 1)
        error = (_huber(off_time) + _huber(off_energy)).sum(axis=1)
        return error, np.hstack([memory_s, megacycles]), np.hstack([static_w, w_per_mhz])

    def _clocks_and_voltages(self, candidates: Floats) -> tuple[Floats, Floats, Floats]:
        """Return achieved clocks and voltages, a row for each candidate, and the ratio of each
        candidate.
        """
        lowest, highest = self.clocks_mhz[0], self.clocks_mhz[-1]
        limit, ridge, slope, ratio = (column[:, np.newaxis] for column in candidates.T)
        span_mhz = highest - lowest
        achieved_mhz = np.minimum(self.clocks_mhz, lowest + limit * span_mhz)
        return (
            achieved_mhz,
            1 + slope * np.maximum(0.0, (achieved_mhz - lowest - ridge * span_mhz) / highest),
            ratio,
        )

    def _load(self, candidate: Floats) -> Load:
        lowest, highest = self.clocks_mhz[0], self.clocks_mhz[-1]
        _, (times,), (powers,) = self.solve(candidate[np.newaxis])
        limit, ridge, slope, ratio = candidate.tolist()
        load = Load(
            memory_s=float(times[0]),
            megacycles=float(times[1]),
            static_w=0.0,
            arithmetic_w_per_mhz=1.0,
            memory_w_per_mhz=ratio,
            ridge_mhz=float(lowest + ridge * (highest - lowest)),
            voltage_slope_per_mhz=slope / float(highest),
        )
        static_w, w_per_mhz, limit_w = float(powers[0]), float(powers[1]), math.inf
        if limit < 1.0:
            limit_mhz = float(lowest + limit * (highest - lowest))
            limit_w = static_w + w_per_mhz * load.free_power_w(limit_mhz)
            # If the limit caps nearly all clocks, static power is undetermined, but only dynamic
            # power can be capped.
            w_per_mhz = max(w_per_mhz, _MIN_DYNAMIC * limit_w / load.free_power_w(limit_mhz))
            static_w = limit_w - w_per_mhz * load.free_power_w(limit_mhz)
        return replace(
            load,
            static_w=static_w,
            arithmetic_w_per_mhz=w_per_mhz,
            memory_w_per_mhz=ratio * w_per_mhz,
            power_limit_w=limit_w,
        )


def _huber(error: Floats) -> Floats:
    measure: Floats = np.where(error < _SMALL, error**2 / (2 * _SMALL), error - _SMALL / 2)
    return measure


def _nearest(one: Floats, two: Floats) -> tuple[Floats, Floats]:
    """Return, for each row, p and q of at least 0 for which p * one + q * two is nearest to 1 by
    Huber's measure.

    Args:
        one: Positive numbers of shape (candidates, clocks), or one row for all candidates.
        two: The same.

    Returns:
        Two columns of shape (candidates, 1).
    """
    one, two = np.broadcast_arrays(one, two)
    weight = np.ones_like(two)
    for _ in range(_ROUNDS):
        p, q = _least_squares(one, two, weight)
        weight = 1 / np.maximum(np.abs(p * one + q * two - 1), _SMALL)
    return p, q


def _least_squares(one: Floats, two: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Minimize the weighted sum of squares by its normal equations."""

    def total(values: Floats) -> Floats:
        column: Floats = np.sum(weight * values, axis=1, keepdims=True)
        return column

    one_one, one_two, two_two, one_all, two_all = map(
        total, (one * one, one * two, two * two, one, two)
    )
    determinant = one_one * two_two - one_two**2
    alike = (
        determinant <= 1e-12 * one_one * two_two
    )  # the two are indistinguishable: attribute everything to the first
    determinant = np.where(alike, 1.0, determinant)
    p = np.where(alike, one_all / one_one, (one_all * two_two - two_all * one_two) / determinant)
    q = np.where(alike, 0.0, (two_all * one_one - one_all * one_two) / determinant)
    # If one would be below 0, the minimum is where it is 0. Not both can be: all terms are
    # positive.
    without_q, without_p = one_all / one_one, two_all / two_two
    return np.where(q < 0, without_q, np.maximum(p, 0.0)), np.where(
        p < 0, without_p, np.maximum(q, 0.0)
    )
