"""How long computations take at each clock: measured times, what they say about the others, and
what bounds the rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.extensions.autopilot.process import (
    KindRows,
    Scales,
    best_scales,
    expected_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# All by hand. Numbers 22 and 31 of `benchmarks/run.py` show what the autopilot saves with them.

_MEMORY = 400.0  #: observations of a row that count; older ones fade
_MOST_MISS = 3.0  #: standard errors by which an iteration changes a row at most
_REMEMBERED = 20  #: iterations from which the noise is known
_LONGEST = 0.3  #: a time that is longer by more, relative, is a pause
_NOISE = 0.006  #: standard deviation of an observed time, relative, before it is known
#: what the noise, the spread and the excess of an iteration count as at least, relative
_LEAST_NOISE = 1e-4
_TAILS = 2.0  #: times the noise; a tail that is larger is not noise
#: how many more rows, as a share, are worth other scales: those of few rows promise too much
_NEW_ROWS = 0.05
#: measured rows of a kind from which the process is trusted to bound others
_ENOUGH_ROWS = 12
_ENOUGH_TIMES = 12  #: times of an iteration from which its noise is noted
#: logarithm: how far over the physical bound the worst measured rows may be for the process to be
#: trusted
_OVER = 0.05
_FEW_OVER = 0.05  #: share of measured rows over the bound that tells nothing of others
#: the largest relative standard error of a row that was not measured and may be planned on
_USABLE = 0.015
#: how far over the physical bound a row may be before any is measured, relative
_DOUBT = 0.3
#: measured rows below full clocks after which `_DOUBT` has fallen by a factor of e
_FADING = 10.0
#: standard error of the logarithm of a class's time in a mode in which it was not measured yet;
#: its expected time is that in its own way
_NEW = 0.3
#: logarithm of its time that is safe to try (`TimeTables.safe_s`), over the same in its own way
_NEW_SAFE = 0.3
#: logarithm of the time that it takes at most (`TimeTables.doubt_s`), over the same in its own way
_NEW_DOUBT = 0.7


class TimeTables(NamedTuple):
    """(classes, clocks) each: seconds of a computation."""

    mean_s: Floats  #: expected
    plan_s: Floats  #: expected and a margin; infinite where it is too uncertain to plan on
    safe_s: Floats  #: most likely at most, for a trial
    doubt_s: Floats  #: at most, even if rows are over the physical bound, which nothing tells yet
    stderr: Floats  #: standard error of the logarithm of the expected time


class _Told(NamedTuple):
    """What measured rows tell of all of them: (classes, clocks) each, unless other shapes are
    given. Times are logarithms of seconds.
    """

    mean: Floats  #: as the process tells them
    error: Floats  #: standard error of that
    enough: NDArray[np.bool_]  #: (classes,) whether the process is trusted to bound rows
    bound: Floats  #: the longest physical time
    excess: float  #: by how much measured rows exceed that at most, a factor
    known: NDArray[np.bool_]  #: whether a row was measured, and is not apart from the process
    usable: NDArray[np.bool_]  #: whether it may be planned on


class _ByProcess(NamedTuple):
    """What the process of each kind tells of rows: (classes, clocks) each, unless another shape is
    given.
    """

    mean: Floats  #: logarithms of seconds
    error: Floats  #: standard error of that
    enough: NDArray[np.bool_]  #: (classes,) whether enough rows were measured to trust it
    apart: NDArray[np.bool_]  #: whether a measured row is far from it


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
        # A class in another mode is compared with itself in the first one.
        self._own = np.arange(len(kinds)) % (len(kinds) // modes)  #: each class in the first mode
        # Times are learnt over the logarithm of the clock, over which a bound by clocks is a line
        # of slope 1.
        self._x = np.log(clocks_mhz[0] / np.asarray(clocks_mhz, dtype=np.float64))
        self._kinds = np.asarray(kinds)
        shape = len(kinds), len(clocks_mhz)
        #: (classes, clocks) how many times each row is the mean of; 0 where it is not known
        self.count = np.zeros(shape)
        #: (classes, clocks) logarithm of the seconds of each row
        self.mean = np.zeros(shape)
        #: (gpus,) how many times as long each GPU takes as rows say
        self.factor = np.ones(gpus)
        #: standard deviation of times beside their rows without outliers, relative
        self.noise = _NOISE
        #: the same with outliers, of which the longest are clipped
        self.spread = _NOISE
        #: (class, clock) -> times far over the physical bound, before they are seen again
        self.doubted: dict[tuple[int, int], Floats] = {}
        #: by how much the mean of a few times is longer than that of those that are not the longest
        self.excess = 0.0
        self._noted = 0  #: iterations whose noise was noted
        self._scales: dict[int, Scales] = {}  #: of the process of each kind
        self._fitted_rows = 0  #: how many were known when the scales were found

    def add(self, row: int, clock: int, values: Floats) -> None:
        """Learn the trimmed mean of what an iteration tells of a row: logarithms of seconds, with
        all taken out that is not the row's.
        """
        # Older observations fade, because a row may change over a long training.
        count = min(self.count[row, clock], _MEMORY)
        # A quarter is trimmed on either side, so that pauses do not count.
        low = max(len(values) // 4, int(len(values) > 2))
        high = max(low, int(len(values) > 1))  # of two, the shorter one
        value = float(np.sort(values)[low : len(values) - high].mean())
        # Nothing is trimmed of a single time, so what trimming usually takes off is taken off here.
        value -= self.excess if len(values) == 1 else 0.0
        total = count + len(values)
        # A step is bounded by its error, so that an iteration with a pause moves a known row
        # little.
        if count:
            miss = value - self.mean[row, clock]
            most = _MOST_MISS * math.sqrt(self._variance(count) + self._variance(len(values)))
            value = self.mean[row, clock] + min(max(miss, -most), most) * len(values) / total
        self.mean[row, clock] = value
        self.count[row, clock] = total

    def add_noise(self, misses: Floats) -> None:
        """Note what an iteration's times differ from their rows by, relative."""
        if len(misses) < _ENOUGH_TIMES:
            return
        self._noted += 1
        weight = 1 / min(self._noted, _REMEMBERED)
        # A pause is no noise, however long it was.
        clipped = np.clip(misses, -_LONGEST, _LONGEST)

        def followed(before: float, found: float) -> float:
            return before + weight * (max(found, _LEAST_NOISE) - before)

        self.excess = followed(self.excess, float(clipped.mean()))
        self.noise = followed(self.noise, 1.48 * float(np.median(np.abs(misses))))
        self.spread = followed(self.spread, float(np.sqrt(np.mean(clipped**2))))

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
        # Without full clocks in its mode, a class has no level that its other clocks could be told
        # by.
        based = self.known[:, 0]
        told = self._told(based, between=between)
        most = self._most(told)
        plan = self._plan(told, most)
        # Where a row may be planned on, what is expected of it bounds a trial more closely.
        safe = np.where(told.usable, np.minimum(plan, told.mean + told.error), most)
        doubt = self._doubt(told, safe, based)
        # A mode that never ran may take much longer, so trials of it are given more room.
        safe[~based] = safe[self._own[~based]] + _NEW_SAFE
        doubt[~based] = doubt[self._own[~based]] + _NEW_DOUBT
        plan = np.where(told.usable, plan, np.inf)
        return TimeTables(np.exp(told.mean), np.exp(plan), np.exp(safe), np.exp(doubt), told.error)

    def _told(self, based: NDArray[np.bool_], *, between: bool) -> _Told:
        """Return what measured rows tell of all of them.

        Args:
            based: (classes,) whether a class was measured at full clocks.
            between: as for `tables`.
        """
        process = self._by_process(based)
        # What nobody measured is bounded by physics, and by how far measured rows exceed that.
        bound, excess = self.bound()
        # Rows far over the bound show that the process does not describe this GPU, so it bounds
        # nothing.
        enough = process.enough & (np.log(excess) < _OVER)
        # A row of few times that is far over the process is not planned on before it is seen again.
        known = self.known & based[:, None] & ~process.apart
        usable = known | (between & (process.error < _USABLE) & enough[:, None])
        return _Told(process.mean, process.error, enough, bound, excess, known, usable)

    def _most(self, told: _Told) -> Floats:
        """Return the longest that rows are most likely by the process or the bound, whichever is
        less, logarithms: what is safe to try of an unmeasured row.
        """
        by_bound = told.bound + np.log(told.excess)
        by_process = np.minimum(told.mean + 3 * told.error, by_bound)
        # No clock is taken as faster than full clocks.
        most: Floats = np.maximum(
            np.where(told.enough[:, None], by_process, by_bound), told.mean[:, :1]
        )
        return most

    def _plan(self, told: _Told, most: Floats) -> Floats:
        """Return as how long rows are planned on, logarithms: with a margin of one error, but for
        full clocks, which are the reference.
        """
        plan = told.mean + told.error
        plan[:, 0] = told.mean[:, 0]
        # An unmeasured row is not planned on as longer than what is safe to try.
        return np.where(told.known, plan, np.minimum(plan, most))

    def _doubt(self, told: _Told, safe: Floats, based: NDArray[np.bool_]) -> Floats:
        """Return how long rows are at most, even if the bound fails, logarithms."""
        # The fewer rows are known, the less it is excluded that the bound fails.
        measured = (self.known & based[:, None])[:, 1:].sum()
        fading = float(np.exp(-measured / _FADING))
        over = max(told.excess, 1.0 + _DOUBT * fading)
        return np.where(told.usable, safe, np.maximum(safe, told.bound + np.log(over)))

    def _by_process(self, based: NDArray[np.bool_]) -> _ByProcess:
        """Return what the process of each kind tells of all of its rows.

        Args:
            based: (classes,) whether a class was measured at full clocks; others get what its own
                mode tells.
        """
        measured = int(self.known.sum())
        # Scales are found again only when there are notably more rows, or fewer, as that tries all
        # pairs of them.
        refit = abs(measured - self._fitted_rows) > _NEW_ROWS * self._fitted_rows
        if refit:
            self._fitted_rows = measured
        mean = np.empty_like(self.mean)
        error = np.empty_like(self.mean)
        enough = np.zeros(self.mean.shape[0], dtype=bool)
        apart = np.zeros_like(self.known)
        variance = self.variance()
        for kind in np.unique(self._kinds).tolist():
            rows = np.flatnonzero((self._kinds == kind) & based)
            if len(rows):
                of_kind = KindRows(
                    self.known[rows], self.mean[rows], variance[rows], self.count[rows]
                )
                if refit or kind not in self._scales:
                    self._scales[kind] = best_scales(self._x, of_kind)
                expected = expected_rows(self._x, of_kind, self._scales[kind])
                mean[rows] = expected.mean
                error[rows] = expected.stderr
                apart[rows] = expected.is_apart
            enough[rows] = self.known[rows][:, 1:].sum() >= _ENOUGH_ROWS
        mean[~based] = mean[self._own[~based]]
        error[~based] = _NEW
        return _ByProcess(mean, error, enough, apart)

    def bound(self) -> tuple[Floats, float]:
        """Return the logarithm of the longest physical time of each row, from measured ones, and
        the worst excess, also of those that are doubted, which are the last to be known.

        A computation at a clock takes at most its time at a higher one times the ratio of the
        clocks; if a measured row took longer, others may too, by as much. Only what exceeds three
        standard errors counts.
        """
        # Every computation at a higher clock bounds those at lower ones; without full clocks none
        # does.
        known = self.known & self.known[:, :1]
        over = np.where(known, self.mean - self._x, np.inf)
        # The tightest bound is that by the best of all higher clocks.
        before = np.minimum.accumulate(
            np.concatenate([np.full((len(over), 1), np.inf), over[:, :-1]], axis=1), axis=1
        )
        bound = before + self._x
        bound[:, 0] = self.mean[:, 0]
        bounded = known[:, 1:]
        variance = self.variance()
        error = np.sqrt(variance[:, 1:] + variance[:, :1])
        # Doubted times are not rows yet, but may be over the bound all the same.
        doubted = [
            min(values) - bound[r, c] - 3 * math.sqrt(self._variance(len(values)) + variance[r, 0])
            for (r, c), values in self.doubted.items()
        ]
        # Only what is beyond three standard errors counts, as noise exceeds a bound half of the
        # time.
        excess = ((self.mean - bound)[:, 1:] - 3 * error)[bounded]
        excess = np.sort(np.concatenate([excess, doubted]))[::-1]
        # A few rows over the bound may be outliers, so a small share of the worst ones is left out.
        many = excess[int(_FEW_OVER * len(excess)) :]
        return bound, float(np.exp(many.max(initial=0.0)))
