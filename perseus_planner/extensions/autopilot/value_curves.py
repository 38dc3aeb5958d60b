"""What is known of the time and the power of each value, a clock or a power limit, beside the
highest one: two smooth curves with errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import Measurement

    Floats = NDArray[np.float64]

# All constants are by hand: benchmark 30 checks them together.
OUTLIER = 3.0
"""Standard errors, or deviations, beyond which more tells nothing."""
PRIOR_ERROR = 0.01
"""The relative error of what an earlier start has learnt."""
_BEND = 2.0
"""By how much the slope of a curve may change within a fall of the value by a factor of e: the
standard deviation of the change."""
_DOUBTED = 6.0
"""Sum of standard errors, less one each, from which a curve is doubted."""
_FORGOTTEN = 1e-5
"""The share of what was known at first that is forgotten with each block."""
_NORMAL_MEDIAN = 0.675
"""Standard errors that half of all normal errors are below."""


class Curve:
    """The logarithm of a quantity at each value, beside that at the highest value.

    It is a Gaussian process of what is measured. At the highest value it is 0. Its slope begins as
    expected, with an error, and walks at random from there.

    Args:
        x: Of each value: the logarithm of the highest one over it.
        slope: The expected slope over `x`.
        error: Its standard error.
    """

    def __init__(self, x: Floats, slope: float, error: float) -> None:
        self._prior = error**2 * np.outer(x, x) + _BEND**2 * _integrated_walk(x)
        self._covariance = self._prior.copy()
        #: (values,) what is expected
        self.mean: Floats = slope * x
        #: of measurements: their variance, over what it should be; at least 1
        self._scatter = 1.0
        #: sums of standard errors, less one each, by which measurements were above and below
        self._misses = np.zeros(2)

    @property
    def error(self) -> Floats:
        """The standard error of each value."""
        errors: Floats = np.sqrt(np.maximum(0.0, np.diag(self._covariance)))
        return errors

    @property
    def doubt(self) -> float:
        """By how much the last measurements differ in one direction: a sum of standard errors, less
        one each. The curve begins again where it is too large.
        """
        return float(self._misses.max())

    def add(self, index: int, measured: float, variance: float) -> float:
        """Learn what was measured at a value; return its variance, larger if measurements scatter
        more than they should.
        """
        # What was known at first fades, so that a curve can follow a GPU that changes.
        self._covariance += _FORGOTTEN * self._prior
        # Measurements may scatter more than their own variance says.
        off = self._off(index, measured, variance * self._scatter)
        self._note_scatter(off)
        self._note_miss(off)
        variance *= self._scatter
        self._follow(index, measured, variance)
        return variance

    def _off(self, index: int, measured: float, variance: float) -> float:
        """Return by how many standard errors a measurement is off."""
        error = math.sqrt(self._covariance[index, index] + variance)
        return clipped(float(measured - self.mean[index]) / error, OUTLIER)

    def _note_scatter(self, off: float) -> None:
        """Follow how much measurements scatter, given by how many errors one was off."""
        # Moves until half of all measurements miss by less than the median of normal ones.
        self._scatter = max(1.0, self._scatter * 1.1 ** np.sign(abs(off) - _NORMAL_MEDIAN))

    def _note_miss(self, off: float) -> None:
        """Doubt the curve by how many errors a measurement was off; begin again if it is wrong."""
        # Counts misses in one direction beyond one error each; outliers to both sides cancel.
        self._misses = np.maximum(0.0, self._misses + np.array((off - 1.0, -off - 1.0)))
        # Noise alone hardly does that, so the curve begins again with its first doubt.
        if self.doubt > _DOUBTED:
            self._covariance = self._prior.copy()
            self._misses = np.zeros(2)

    def _follow(self, index: int, measured: float, variance: float) -> None:
        """Update the Gaussian process by one value."""
        gain = self._covariance[index] / math.sqrt(self._covariance[index, index] + variance)
        self.mean = self.mean + gain * self._off(index, measured, variance)
        self._covariance -= np.outer(gain, gain)


def _integrated_walk(x: Floats) -> Floats:
    """(values, values) covariance of an integral from 0 to each `x`: that of a random walk whose
    variance at `x` is `x`. Its means are cubic splines.
    """
    less = np.minimum.outer(x, x)
    more = np.maximum.outer(x, x)
    covariance: Floats = less**2 * (3.0 * more - less) / 6.0
    return covariance


def clipped(value: float, most: float) -> float:
    """Return the value from -`most` to `most` that is nearest."""
    return max(-most, min(most, value))


class Best(NamedTuple):
    """The best value by what is known."""

    position: int  #: of the value
    time: float  #: of an iteration, as a multiple of that at full clocks
    saving: float  #: the share of energy that it saves


class ValueCurves:
    """How long iterations take at each value, and what a rank draws, beside the highest one.

    Args:
        values: Those that may run, highest first.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        #: (values,) the logarithm of the highest one over each
        self.x: Floats = np.log(values[0] / np.array(values))
        # Before measurements, time rises half as fast as the clock falls, and power falls a bit
        # faster than it.
        self.time = Curve(self.x, slope=0.5, error=0.35)
        self.power = Curve(self.x, slope=-1.2, error=1.0)
        #: positions of the values whose time and energy were measured, but for the highest one
        self.measured: set[int] = set()
        #: watts of a rank at the highest value; None before they were measured
        self.top_w: float | None = None

    def add_prior(self, rows: Sequence[Measurement]) -> None:
        """Learn from what an earlier start has learnt: how values compare with the highest one."""
        by_value = {row.clock_mhz: row for row in rows}
        top = by_value.get(self._values[0])
        for index, value in enumerate(self._values):
            row = by_value.get(value)
            if index and top is not None and row is not None:
                time = math.log(row.time_s / top.time_s)
                energy = math.log(row.energy_j / top.energy_j)
                self.time.add(index, time, PRIOR_ERROR**2)
                self.power.add(index, energy - time, 2 * PRIOR_ERROR**2)
                self.measured.add(index)

    def add_power(self, index: int, beside_top: float, variance: float) -> None:
        """Learn what a rank drew at a value.

        Args:
            index: The position of the value.
            beside_top: The logarithm of the watts over those at the highest value.
            variance: Of it, but for the error of what does not change from block to block.
        """
        self.power.add(index, beside_top, variance + PRIOR_ERROR**2)
        self.measured.add(index)

    def energy_error(self, index: int) -> float:
        """Return the relative standard error of the energy at a value."""
        return math.hypot(self.time.error[index], self.power.error[index])

    def best(self, most: float) -> Best:
        """Return the value of least energy among those of which an iteration takes at most this
        multiple of the time at full clocks, down to the lowest one that was measured.
        """
        # Only down to the lowest measured one, as the curve beyond it is a guess.
        lowest = max(self.measured, default=0)
        times = np.exp(self.time.mean)
        costs = np.exp(self.time.mean + self.power.mean)
        fast = [index for index in range(1, lowest + 1) if times[index] <= most]
        best = min((0, *fast), key=lambda index: float(costs[index]))
        return Best(best, float(times[best]), 1.0 - float(costs[best]))
