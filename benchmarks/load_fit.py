"""Fits the physics of `model.py` to what was measured of a computation: eight numbers for all its clocks.

Where a power limit holds, the achieved clock is the same whatever higher clock is set, so the limit is known by the
clock at which it begins to hold. Given that clock, the ridge, the slope above it and what a MHz draws while memory is
awaited against what it draws in arithmetic, time is linear in 1 and 1 / clock, and energy in a static and a dynamic
part. So four numbers are searched, on a grid and then from its best point in ever smaller steps, and four are solved
for each of these.

Errors are relative. Small ones count by their squares and larger ones by their size alone, so that single clocks that
were measured badly have little pull (Huber, "Robust estimation of a location parameter", 1964).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perseus_planner.errors import ProfileError
from perseus_planner.gpu.simulated.model import Load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.profiles.profiles import Profile

Floats = NDArray[np.float64]

LEAST_CLOCKS = 4
"""How many clocks a fit needs: eight numbers, two a clock."""

# What is searched, within which bounds, where at first, and in which steps then: the clock at which the limit begins to
# hold and the ridge, both as shares of the way from the lowest to the highest clock; the slope times the highest clock;
# what a MHz draws while memory is awaited, as a share of what it draws in arithmetic.
_LOW, _HIGH = np.array([0.0, 0.0, 0.0, 0.05]), np.array([1.0, 1.0, 4.0, 1.0])
_GRID = (np.linspace(0.1, 1.0, 13), np.linspace(0.0, 0.95, 12), np.array([0.5, 1.0, 1.5, 2.5]), np.array([0.3, 0.8]))
_STEPS = np.array([0.05, 0.05, 0.2, 0.2])
_GRID_CLOCKS = 24  # as many are looked at on the grid
_FINEST = 0.01  # of the first steps
_ROUNDS = 8  # of reweighting
_LEAST_RISING = 0.01  # of the power at a limit, what at least rises with the clock
_SMALL = 0.01  # relative errors below it count by their squares


def fitted(measurements: Sequence[Measurement]) -> Load:
    """The physics that come nearest to the time and energy of `measurements`, at one setting of the power limit.

    Raises:
        ProfileError: they are at fewer than `LEAST_CLOCKS` clocks, or have an energy of 0.
    """
    clocks = len({each.clock_mhz for each in measurements})
    if clocks < LEAST_CLOCKS:
        raise ProfileError(f"a fit needs {LEAST_CLOCKS} clocks or more, and here are {clocks}; measure more")
    if not all(each.energy_j for each in measurements):
        raise ProfileError("a fit needs energies, and here is one of 0 J; measure it again in a longer window")
    rows = sorted((each.clock_mhz, each.time_s, each.energy_j) for each in measurements)
    return _Fit(*np.array(rows, dtype=float).T).best()


def fitted_profile(profile: Profile) -> Mapping[tuple[int, str], Load]:
    """Stage and kind -> what was fitted to its measurements, per GPU of the profile.

    Raises:
        ProfileError: its control is the power limit, or something cannot be fitted; the text names it.
    """
    if profile.control == "power-limit":
        raise ProfileError("the profile is over power limits; a fit needs one over clocks")
    loads = {}
    for (stage, kind), rows in profile.measurements.items():
        try:
            loads[stage, kind] = fitted(rows)
        except ProfileError as error:
            raise ProfileError(f"stage {stage} {kind}: {error}") from None
    return loads


@dataclass(frozen=True)
class _Fit:
    """The measurements, lowest clock first, and how near a choice of the four numbers comes to them."""

    clocks_mhz: Floats
    times_s: Floats
    energies_j: Floats

    def best(self) -> Load:
        """The best of all choices."""
        count = len(self.clocks_mhz)
        some = np.unique(np.linspace(0, count - 1, min(count, _GRID_CLOCKS)).round().astype(int))
        grid = np.array(list(product(*_GRID)))
        sample = _Fit(self.clocks_mhz[some], self.times_s[some], self.energies_j[some])
        choice = grid[np.argmin(sample.solved(grid)[0])]
        steps = _STEPS
        around = np.array(list(product((0.0, -1.0, 1.0), repeat=4)))
        while steps[0] > _FINEST * _STEPS[0]:
            choices = np.clip(choice + around * steps, _LOW, _HIGH)
            nearest = np.argmin(self.solved(choices)[0])  # the first of equals: where it stands
            choice = choices[nearest]
            if nearest == 0:
                steps = steps / 2
        return self._load(choice)

    def solved(self, choices: Floats) -> tuple[Floats, Floats, Floats]:
        """What is solved for each choice, a row: error; memory_s and megacycles; static_w and arithmetic_w_per_mhz."""
        achieved_mhz, voltage, ratio = self._held(choices)
        memory_s, megacycles = _nearest(1 / self.times_s, 1 / achieved_mhz / self.times_s)
        times_s = memory_s + megacycles / achieved_mhz
        cycles = (megacycles + ratio * memory_s * achieved_mhz) * voltage**2
        static_w, w_per_mhz = _nearest(times_s / self.energies_j, cycles / self.energies_j)
        off_time = np.abs(times_s / self.times_s - 1)
        off_energy = np.abs((static_w * times_s + w_per_mhz * cycles) / self.energies_j - 1)
        error = (_huber(off_time) + _huber(off_energy)).sum(axis=1)
        return error, np.hstack([memory_s, megacycles]), np.hstack([static_w, w_per_mhz])

    def _held(self, choices: Floats) -> tuple[Floats, Floats, Floats]:
        """Achieved clock and voltage at each clock, a row for each choice; and the ratio of each."""
        lowest, highest = self.clocks_mhz[0], self.clocks_mhz[-1]
        limit, ridge, slope, ratio = (column[:, np.newaxis] for column in choices.T)
        span_mhz = highest - lowest
        achieved_mhz = np.minimum(self.clocks_mhz, lowest + limit * span_mhz)
        return achieved_mhz, 1 + slope * np.maximum(0.0, (achieved_mhz - lowest - ridge * span_mhz) / highest), ratio

    def _load(self, choice: Floats) -> Load:
        lowest, highest = self.clocks_mhz[0], self.clocks_mhz[-1]
        _, (times,), (powers,) = self.solved(choice[np.newaxis])
        limit, ridge, slope, ratio = choice.tolist()
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
            # Where nearly all clocks are held back nothing tells static power apart, but a limit holds only what rises.
            w_per_mhz = max(w_per_mhz, _LEAST_RISING * limit_w / load.free_power_w(limit_mhz))
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
    """For each row, the p and q, neither below 0, for which p * one + q * two is nearest to 1, by Huber's measure.

    Both arrays are positive, of choices x clocks, or of one row for all choices. Returns two columns.
    """
    one, two = np.broadcast_arrays(one, two)
    weight = np.ones_like(two)
    for _ in range(_ROUNDS):
        p, q = _least_squares(one, two, weight)
        weight = 1 / np.maximum(np.abs(p * one + q * two - 1), _SMALL)
    return p, q


def _least_squares(one: Floats, two: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """The same for the weighted sum of squares, by its normal equations."""

    def total(values: Floats) -> Floats:
        column: Floats = np.sum(weight * values, axis=1, keepdims=True)
        return column

    one_one, one_two, two_two, one_all, two_all = map(total, (one * one, one * two, two * two, one, two))
    determinant = one_one * two_two - one_two**2
    alike = determinant <= 1e-12 * one_one * two_two  # nothing tells the two apart: all is given to the first
    determinant = np.where(alike, 1.0, determinant)
    p = np.where(alike, one_all / one_one, (one_all * two_two - two_all * one_two) / determinant)
    q = np.where(alike, 0.0, (two_all * one_one - one_all * one_two) / determinant)
    # Where one would be below 0 the least lies where it is 0. Not both are: all terms are positive.
    without_q, without_p = one_all / one_one, two_all / two_two
    return np.where(q < 0, without_q, np.maximum(p, 0.0)), np.where(p < 0, without_p, np.maximum(q, 0.0))
