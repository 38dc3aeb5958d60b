"""What clocks cost in time: measured rows, what they say about the others, and what bounds the
rest.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MEMORY = 400.0  #: observations of a row that count; older ones fade
_MOST_MISS = 3.0  #: standard errors by which an iteration changes a row at most
_REMEMBERED = 20  #: iterations from which the noise is known
_LONGEST = 0.3  #: a time that is longer by more, relative, is a pause
_NOISE = 0.006  #: standard deviation of an observed time, relative, before it is known
_LEAST_NOISE = 1e-4
_TAILS = 2.0  #: times the noise; a tail that is larger is not noise
_BENDS, _STEPS = (
    (0.01, 0.03, 0.1),
    (0.0007, 0.002, 0.005, 0.015, 0.05, 0.15),
)  #: that are tried; see `_covariance`
_SLOPE, _SLOPE_DOUBT, _OWN_SLOPE = (
    0.6,
    0.4,
    0.1,
)  #: of log time over log clock: expected, its doubt, and between stages
_OWN = 0.4  #: how much of bends and steps is a stage's own
#: how many more rows, as a share, are worth other scales: those of few rows promise too much
_NEW_ROWS = 0.05
_ENOUGH = 12  #: measured rows of a kind from which the process is trusted to bound others
_OVER = 0.05  #: how far over the physical bound a measured row may be for the process to be trusted
_FEW, _OUTLIER = (
    12,
    3.0,
)  #: computations of a row up to which it is doubted, and standard errors beside all others
_FEW_OVER = 0.05  #: share of measured rows over the bound that tells nothing of others
_DOUBT, _FADING = (
    0.3,
    10.0,
)  #: how far over the physical bound a row may be before any is known, and after how many
#: logarithm of the time of a class in a mode in which it was not measured yet, over that in its own
#: way: its doubt, most likely at most, and at most
_NEW, _NEW_SAFE, _NEW_DOUBT = 0.3, 0.3, 0.7


class TimeTables(NamedTuple):
    """(classes, clocks) each: seconds of a computation."""

    mean_s: Floats  #: expected
    plan_s: Floats  #: expected and a margin; infinite where it is too uncertain to plan on
    safe_s: Floats  #: most likely at most, for a trial
    doubt_s: Floats  #: at most, even if rows are over the physical bound, which nothing tells yet
    stderr: Floats  #: standard error of the logarithm of the expected time


class TimeRows:
    """Observed times by (class, clock).

    Times of equal GPUs are taken together. `factor` is how much slower each GPU is than its rows
    say.

    Args:
        clocks_mhz: all clocks, highest first.
        kinds: the number of the kind of each class; classes of one kind are alike.
        gpus: number of GPUs.
        modes: how many modes the classes have: all in the first one, then all in the next one.
    """

    def __init__(
        self, clocks_mhz: Sequence[int], kinds: Sequence[int], gpus: int, modes: int = 1
    ) -> None:
        self._own = np.arange(len(kinds)) % (len(kinds) // modes)  #: each class in the first mode
        self._x = np.log(clocks_mhz[0] / np.asarray(clocks_mhz, dtype=np.float64))
        self._kinds = np.asarray(kinds)
        shape = len(kinds), len(clocks_mhz)
        self.count, self.mean = np.zeros(shape), np.zeros(shape)
        self.factor = np.ones(gpus)
        self.noise, self.spread = _NOISE, _NOISE
        #: by how much the mean of a few times is longer than that of those that are not the longest
        self.excess = 0.0
        self._noted = 0  # iterations whose noise was noted
        self._scales: dict[int, tuple[float, float]] = {}
        self._fitted_rows = 0  # how many were known when the scales were found

    def add(self, row: int, clock: int, values: Floats) -> None:
        """Learn the trimmed mean of what an iteration tells of a row: logarithms of seconds, with
        all taken out that is not the row's.
        """
        count = min(self.count[row, clock], _MEMORY)
        low = max(len(values) // 4, int(len(values) > 2))
        high = max(low, int(len(values) > 1))  # of two, the shorter one
        value = float(np.sort(values)[low : len(values) - high].mean())
        value -= self.excess if len(values) == 1 else 0.0
        total = count + len(values)
        if count:
            miss = value - self.mean[row, clock]
            most = _MOST_MISS * math.sqrt(self._variance(count) + self._variance(len(values)))
            value = self.mean[row, clock] + min(max(miss, -most), most) * len(values) / total
        self.mean[row, clock], self.count[row, clock] = value, total

    def add_noise(self, misses: Floats) -> None:
        """Note what an iteration's times differ from their rows by, relative."""
        if len(misses) < _ENOUGH:
            return
        self._noted += 1
        weight = 1 / min(self._noted, _REMEMBERED)
        clipped = np.clip(misses, -_LONGEST, _LONGEST)
        for name, found in (
            ("excess", float(clipped.mean())),
            ("noise", 1.48 * float(np.median(np.abs(misses)))),
            ("spread", float(np.sqrt(np.mean(clipped**2)))),
        ):
            before = getattr(self, name)
            setattr(self, name, before + weight * (max(found, _LEAST_NOISE) - before))

    @property
    def tail(self) -> float:
        """How much more times spread than by their noise, as a few are much longer; relative."""
        return math.sqrt(max(0.0, self.spread**2 - self.noise**2))

    @property
    def has_tails(self) -> bool:
        """Whether a few times are longer by much more than noise."""
        return self.tail > _TAILS * self.noise

    def _variance(self, count: float) -> float:
        """Return the variance of the logarithm of a row of so many times: what is trimmed of
        many times is all that is known of few.
        """
        return self.noise**2 / count + (self.tail / count) ** 2

    def variance(self) -> Floats:
        """(classes, clocks) variance of the logarithm of each row, infinite where it is not
        known.
        """
        count = np.where(self.known, self.count, 1.0)
        variance: Floats = self.noise**2 / count + (self.tail / count) ** 2
        return np.where(self.known, variance, np.inf)

    def forget(self, row: int, clock: int) -> None:
        """Count a row as not measured."""
        self.count[row, clock] = self.mean[row, clock] = 0.0

    @property
    def known(self) -> NDArray[np.bool_]:
        """(classes, clocks) whether a row was measured."""
        return self.count > 0

    def tables(self, *, between: bool) -> TimeTables:
        """Return the times of all rows; every class was measured at the highest clock in its first
        mode. In another one rows tell something once it was measured so.

        Args:
            between: whether rows that were not measured may be planned on where measured ones tell
                enough of them.
        """
        measured, based = int(self.known.sum()), self.known[:, 0]
        if refit := abs(measured - self._fitted_rows) > _NEW_ROWS * self._fitted_rows:
            self._fitted_rows = measured
        mean, error = np.empty_like(self.mean), np.empty_like(self.mean)
        enough = np.zeros(self.mean.shape[0], dtype=bool)
        for kind in np.unique(self._kinds):
            rows = np.flatnonzero((self._kinds == kind) & based)
            if len(rows):
                mean[rows], error[rows] = self._process(int(kind), rows, refit=refit)
            enough[rows] = self.known[rows][:, 1:].sum() >= _ENOUGH
        mean[~based], error[~based] = mean[self._own[~based]], _NEW
        bound, beta = self.bound()
        enough &= np.log(beta) < _OVER
        known, top = self.known & based[:, None], mean[:, :1]
        fading = float(np.exp(-known[:, 1:].sum() / _FADING))
        plan = mean + error
        plan[:, 0] = mean[:, 0]
        least = bound + np.log(beta)
        safe = np.maximum(
            np.where(enough[:, None], np.minimum(mean + 3 * error, least), least), top
        )
        usable = known | (between & (error < _USABLE) & enough[:, None])
        planned = np.where(known, plan, np.minimum(plan, safe))
        safe = np.where(usable, np.minimum(planned, mean + error), safe)
        doubt = np.where(
            usable, safe, np.maximum(safe, bound + np.log(max(beta, 1.0 + _DOUBT * fading)))
        )
        plan = np.where(usable, planned, np.inf)
        safe[~based] = safe[self._own[~based]] + _NEW_SAFE
        doubt[~based] = doubt[self._own[~based]] + _NEW_DOUBT
        return TimeTables(np.exp(mean), np.exp(plan), np.exp(safe), np.exp(doubt), error)

    def bound(self) -> tuple[Floats, float]:
        """Return the logarithm of the longest physical time of each row, from measured ones, and
        the worst excess.

        A computation at a clock takes at most its time at a higher one times the ratio of the
        clocks; if a measured row took longer, others may too, by as much. Only what exceeds three
        standard errors counts.
        """
        known = self.known & self.known[:, :1]
        over = np.where(known, self.mean - self._x, np.inf)
        before = np.minimum.accumulate(
            np.concatenate([np.full((len(over), 1), np.inf), over[:, :-1]], axis=1), axis=1
        )
        bound = before + self._x
        bound[:, 0] = self.mean[:, 0]
        bounded = known[:, 1:]
        variance = self.variance()
        error = np.sqrt(variance[:, 1:] + variance[:, :1])
        excess = np.sort(((self.mean - bound)[:, 1:] - 3 * error)[bounded])[::-1]
        many = excess[int(_FEW_OVER * len(excess)) :]
        return bound, float(np.exp(many.max(initial=0.0)))

    def _process(self, kind: int, rows: NDArray[np.int64], *, refit: bool) -> tuple[Floats, Floats]:
        """Return mean and standard error of the log times of classes of one kind: a Gaussian
        process over the clock.
        """
        known, x = self.known[rows], self._x
        top = self.mean[rows, 0]
        stage, clock = np.nonzero(known)
        value = self.mean[rows][known] - top[stage] - _SLOPE * x[clock]
        noise = self.variance()[rows][known]

        def of_rows(scales: tuple[float, float]) -> Floats:
            return _covariance(x, stage, clock, stage, clock, *scales) + np.diag(noise)

        if refit or kind not in self._scales:
            every_scales = list(product(_BENDS, _STEPS))
            improbable = [_improbable(*_left_out(of_rows(each), value)) for each in every_scales]
            self._scales[kind] = every_scales[int(np.argmin(improbable))]
        scales = self._scales[kind]
        miss, variance = _left_out(of_rows(scales), value)
        few = self.count[rows][known] < _FEW
        noise += np.where(few & (np.abs(miss) > _OUTLIER * np.sqrt(variance)), miss**2, 0.0)
        root, missed = _factored(of_rows(scales), value)
        every = np.repeat(np.arange(len(rows)), len(x)), np.tile(np.arange(len(x)), len(rows))
        half = np.linalg.solve(root, _covariance(x, stage, clock, *every, *scales))
        mean = half.T @ missed
        own = _variance(x[every[1]], *scales)
        error = np.sqrt(np.maximum(own - (half**2).sum(axis=0), 1e-10))
        shape = len(rows), len(x)
        expected: Floats = top[:, None] + _SLOPE * x + mean.reshape(shape)
        return expected, error.reshape(shape)


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
    larger[:size, :size], larger[size, :size], larger[:size, size] = covariance, value, value
    root = np.linalg.cholesky(larger)
    return root[:size, :size], root[size, :size]


#: the largest relative standard error of a row that was not measured and may be planned on
_USABLE = 0.015


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
    a, b = x[clock], x[other_clock]
    same = stage[:, None] == other_stage
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
