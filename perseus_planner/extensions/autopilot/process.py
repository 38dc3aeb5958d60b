"""What measured rows tell of the others: a Gaussian process over the clock, for classes of one
kind.

Classes share a line of log time over log clock, Brownian bends of it, and a step at each clock;
each class has a smaller share of all three for itself.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

# All by hand. Numbers 22 and 31 of `benchmarks/run.py` show what the autopilot saves with them.

#: scales of the Brownian bends of log time over log clock (`_covariance`) that are tried
_BENDS = (0.01, 0.03, 0.1)
#: scales of the step of log time at each clock (`_covariance`) that are tried
_STEPS = (0.0007, 0.002, 0.005, 0.015, 0.05, 0.15)
#: expected slope of log time over log of (highest clock / clock); 1 is bound by the clock alone
_SLOPE = 0.6
#: standard deviation of that slope of all stages together
_SLOPE_DOUBT = 0.4
#: standard deviation of that slope from one stage to another
_OWN_SLOPE = 0.1
#: standard deviation of a stage's own bends and steps, as a part of those that stages share
_OWN = 0.4
#: computations of a row up to which it may count as an outlier
_FEW = 12
#: standard errors between a row and what all others say of it, above which it is an outlier
_OUTLIER = 3.0
#: logarithm: how far over the process an outlier of few times may be to be planned on
_OVER = 0.05
_LEAST_VARIANCE = 1e-10  #: what rounding may leave of a variance


class Scales(NamedTuple):
    """How large the parts of the process are, as standard deviations of log time."""

    bend: float  #: of the Brownian bends, over a log clock of 1
    step: float  #: of the step at each clock


class KindRows(NamedTuple):
    """The rows of the classes of one kind, which were all measured at full clocks.

    All are (classes, clocks); times and their variances hold where rows are known.
    """

    known: NDArray[np.bool_]  #: whether a row was measured
    mean: Floats  #: logarithm of its seconds
    variance: Floats  #: of that
    observations: Floats  #: how many of it there are


class Expected(NamedTuple):
    """What the process says of all rows of a kind: (classes, clocks) each."""

    mean: Floats  #: logarithm of the expected seconds
    stderr: Floats  #: standard error of that
    is_apart: NDArray[np.bool_]  #: measured rows of few times that are much longer


class _Observed(NamedTuple):
    """The measured rows, one after the other."""

    stage: Integers  #: number of the class
    clock: Integers  #: number of the clock
    value: Floats  #: logarithm of the seconds, less the level and the slope that are expected
    noise: Floats  #: variance of that


def best_scales(x: Floats, rows: KindRows) -> Scales:
    """Return the scales by which every measured row is told best from all others.

    Args:
        x: (clocks,) logarithm of the highest clock over each.
        rows: The rows.
    """
    observed = _observed(x, rows)
    every_scales = [Scales(*each) for each in product(_BENDS, _STEPS)]
    improbable = [
        _improbable(*_left_out(_covariance_of(x, observed, scales), observed.value))
        for scales in every_scales
    ]
    return every_scales[int(np.argmin(improbable))]


def expected_rows(x: Floats, rows: KindRows, scales: Scales) -> Expected:
    """Return what the process says of all rows.

    Args:
        x: (clocks,) logarithm of the highest clock over each.
        rows: The rows.
        scales: Those of the process.
    """
    observed = _observed(x, rows)
    # A row of few times may be an outlier, so it is told from the others before it counts.
    miss, variance = _left_out(_covariance_of(x, observed, scales), observed.value)
    few = rows.observations[rows.known] < _FEW
    is_doubted = few & (np.abs(miss) > _OUTLIER * np.sqrt(variance))
    is_apart = np.zeros_like(rows.known)
    is_apart[rows.known] = is_doubted & (miss > _OVER)
    # Its miss becomes its noise, so that it hardly moves others.
    noise = observed.noise + np.where(is_doubted, miss**2, 0.0)
    observed = observed._replace(noise=noise)
    # By the Cholesky factor L: L^-1 K, with the covariance K of measured rows and all rows,
    # gives both the mean and the error there. numpy solves it as any other system.
    root, missed = _factored(_covariance_of(x, observed, scales), observed.value)
    shape = rows.known.shape
    every_stage = np.repeat(np.arange(shape[0]), shape[1])
    every_clock = np.tile(np.arange(shape[1]), shape[0])
    between = _covariance(
        x, observed.stage, observed.clock, every_stage, every_clock, scales.bend, scales.step
    )
    half = np.linalg.solve(root, between)
    mean = half.T @ missed
    # The variance left is the prior's, less what the measured rows explain of it.
    own = _variance(x[every_clock], *scales)
    stderr = np.sqrt(np.maximum(own - (half**2).sum(axis=0), _LEAST_VARIANCE))
    expected: Floats = rows.mean[:, :1] + _SLOPE * x + mean.reshape(shape)
    return Expected(expected, stderr.reshape(shape), is_apart)


def _observed(x: Floats, rows: KindRows) -> _Observed:
    stage, clock = np.nonzero(rows.known)
    # The level at full clocks and the expected slope are taken out, so that the process is
    # about zero.
    value = rows.mean[rows.known] - rows.mean[stage, 0] - _SLOPE * x[clock]
    return _Observed(stage, clock, value, rows.variance[rows.known])


def _covariance_of(x: Floats, observed: _Observed, scales: Scales) -> Floats:
    """Return the covariance of the measured rows, with their noise."""
    stage = observed.stage
    clock = observed.clock
    return _covariance(x, stage, clock, stage, clock, *scales) + np.diag(observed.noise)


def _left_out(covariance: Floats, value: Floats) -> tuple[Floats, Floats]:
    """Return by how much each value differs from what all others say of it, and the variance of
    that.
    """
    inverse = np.linalg.inv(covariance)
    variance = 1 / np.diag(inverse)
    return variance * (inverse @ value), variance


def _improbable(miss: Floats, variance: Floats) -> float:
    """Return how improbable misses are; an outlier tells no more than that it is one."""
    return float((np.log(variance) + np.minimum(miss**2 / variance, _OUTLIER**2)).sum())


def _factored(covariance: Floats, value: Floats) -> tuple[Floats, Floats]:
    """Return the Cholesky factor L of a covariance, and L^-1 value: the last row of the factor
    with a row more.
    """
    size = len(value)
    larger = np.full((size + 1, size + 1), 1e12)
    larger[:size, :size] = covariance
    larger[size, :size] = value
    larger[:size, size] = value
    root = np.linalg.cholesky(larger)
    return root[:size, :size], root[size, :size]


def _covariance(
    x: Floats,
    stage: NDArray[np.int64],
    clock: NDArray[np.int64],
    other_stage: NDArray[np.int64],
    other_clock: NDArray[np.int64],
    bend: float,
    step: float,
) -> Floats:
    """Return the covariance of log times, less the level of the top clock, between two lists of
    rows.

    Stages share a line, Brownian bends and a step at each clock; each has a share of them for
    itself.
    """
    # A line and Brownian bends are 0 at the top clock, whose level was taken out.
    a = x[clock]
    b = x[other_clock]
    same = stage[:, None] == other_stage
    # A step at a clock is of that clock alone, and the top one has none.
    there = (clock[:, None] == other_clock) & (clock[:, None] > 0)
    wave = bend**2 * np.minimum.outer(a, b) + step**2 * there
    covariance: Floats = (
        _SLOPE_DOUBT**2 * np.outer(a, b)
        + wave
        + same * (_OWN_SLOPE**2 * np.outer(a, b) + _OWN**2 * wave)
    )
    return covariance


def _variance(x: Floats, bend: float, step: float) -> Floats:
    wave = bend**2 * x + step**2 * (x > 0)
    variance: Floats = (_SLOPE_DOUBT**2 + _OWN_SLOPE**2) * x * x + (1 + _OWN**2) * wave
    return variance
