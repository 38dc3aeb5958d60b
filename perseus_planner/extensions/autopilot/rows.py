"""What clocks cost: measured times, what they say about the others and what bounds the rest; and
power, by regression, as each GPU's counter tells the energy of all that it ran in an iteration.
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

# All by hand. Numbers 22 and 31 of `benchmarks/run.py` show what the autopilot saves with them.

_MEMORY = 400.0  #: observations of a row that count; older ones fade
_MOST_MISS = 3.0  #: standard errors by which an iteration changes a row at most
_REMEMBERED = 20  #: iterations from which the noise is known
_LONGEST = 0.3  #: a time that is longer by more, relative, is a pause
_NOISE = 0.006  #: standard deviation of an observed time, relative, before it is known
#: what the noise, the spread and the excess of an iteration count as at least, relative
_LEAST_NOISE = 1e-4
_TAILS = 2.0  #: times the noise; a tail that is larger is not noise
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
#: how many more rows, as a share, are worth other scales: those of few rows promise too much
_NEW_ROWS = 0.05
#: measured rows of a kind from which the process is trusted to bound others; and times of an
#: iteration from which its noise is noted
_ENOUGH = 12
#: logarithm: how far over the physical bound the worst measured rows may be for the process to be
#: trusted; and how far over the process an outlier of few times may be to be planned on
_OVER = 0.05
#: computations of a row up to which it may count as an outlier
_FEW = 12
#: standard errors between a row and what all others say of it, above which it is an outlier
_OUTLIER = 3.0
_FEW_OVER = 0.05  #: share of measured rows over the bound that tells nothing of others
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
        self.count = np.zeros(shape)
        self.mean = np.zeros(shape)
        self.factor = np.ones(gpus)
        self.noise = _NOISE
        self.spread = _NOISE
        #: (class, clock) -> times far over the physical bound, before they are seen again
        self.doubted: dict[tuple[int, int], Floats] = {}
        #: by how much the mean of a few times is longer than that of those that are not the longest
        self.excess = 0.0
        self._noted = 0  # iterations whose noise was noted
        self._scales: dict[int, tuple[float, float]] = {}
        self._fitted_rows = 0  # how many were known when the scales were found

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
        if len(misses) < _ENOUGH:
            return
        self._noted += 1
        weight = 1 / min(self._noted, _REMEMBERED)
        # A pause is no noise, however long it was.
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
        # Without full clocks in its mode, a class has no level that its other clocks could be told
        # by.
        based = self.known[:, 0]
        mean, error, enough, apart = self._by_process(based)
        # What nobody measured is bounded by physics, and by how far measured rows exceed that.
        bound, beta = self.bound()
        # Rows far over the bound show that the process does not describe this GPU, so it bounds
        # nothing.
        enough &= np.log(beta) < _OVER
        known = self.known & based[:, None]
        top = mean[:, :1]
        # The fewer rows are known, the less it is excluded that the bound fails.
        fading = float(np.exp(-known[:, 1:].sum() / _FADING))
        # Planned on with a margin of one error, but for full clocks, which are the reference.
        plan = mean + error
        plan[:, 0] = mean[:, 0]
        least = bound + np.log(beta)
        # A trial is safe up to what the process or the bound says, whichever is less.
        safe = np.maximum(
            np.where(enough[:, None], np.minimum(mean + 3 * error, least), least), top
        )
        # A row of few times that is far over the process is not planned on before it is seen again.
        known &= ~apart
        usable = known | (between & (error < _USABLE) & enough[:, None])
        # An unmeasured row is not planned on as longer than what is safe to try.
        planned = np.where(known, plan, np.minimum(plan, safe))
        safe = np.where(usable, np.minimum(planned, mean + error), safe)
        doubt = np.where(
            usable, safe, np.maximum(safe, bound + np.log(max(beta, 1.0 + _DOUBT * fading)))
        )
        plan = np.where(usable, planned, np.inf)
        # A mode that never ran may take much longer, so trials of it are given more room.
        safe[~based] = safe[self._own[~based]] + _NEW_SAFE
        doubt[~based] = doubt[self._own[~based]] + _NEW_DOUBT
        return TimeTables(np.exp(mean), np.exp(plan), np.exp(safe), np.exp(doubt), error)

    def _by_process(
        self, based: NDArray[np.bool_]
    ) -> tuple[Floats, Floats, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the logarithms of all rows as the process of their kind tells them, and their
        errors; of which classes it tells enough, and which measured rows are apart from it.

        Args:
            based: (classes,) whether a class was measured at full clocks; others get what its own
                mode tells.
        """
        measured = int(self.known.sum())
        # Scales are found again only when there are notably more rows, as that tries all pairs of
        # them.
        if refit := abs(measured - self._fitted_rows) > _NEW_ROWS * self._fitted_rows:
            self._fitted_rows = measured
        mean = np.empty_like(self.mean)
        error = np.empty_like(self.mean)
        enough = np.zeros(self.mean.shape[0], dtype=bool)
        apart = np.zeros_like(self.known)
        for kind in np.unique(self._kinds):
            rows = np.flatnonzero((self._kinds == kind) & based)
            if len(rows):
                mean[rows], error[rows], apart[rows] = self._process(int(kind), rows, refit=refit)
            enough[rows] = self.known[rows][:, 1:].sum() >= _ENOUGH
        mean[~based] = mean[self._own[~based]]
        error[~based] = _NEW
        return mean, error, enough, apart

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

    def _process(
        self, kind: int, rows: NDArray[np.int64], *, refit: bool
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Return mean and standard error of the log times of classes of one kind, a Gaussian
        process over the clock; and which rows of few times are much longer.
        """
        known = self.known[rows]
        x = self._x
        top = self.mean[rows, 0]
        stage, clock = np.nonzero(known)
        # The level at full clocks and the expected slope are taken out, so that the process is
        # about zero.
        value = self.mean[rows][known] - top[stage] - _SLOPE * x[clock]
        noise = self.variance()[rows][known]

        def of_rows(scales: tuple[float, float]) -> Floats:
            return _covariance(x, stage, clock, stage, clock, *scales) + np.diag(noise)

        # Scales are those by which every row is told best from all others.
        if refit or kind not in self._scales:
            every_scales = list(product(_BENDS, _STEPS))
            improbable = [_improbable(*_left_out(of_rows(each), value)) for each in every_scales]
            self._scales[kind] = every_scales[int(np.argmin(improbable))]
        scales = self._scales[kind]
        # A row of few times may be an outlier, so it is told from the others before it counts.
        miss, variance = _left_out(of_rows(scales), value)
        few = self.count[rows][known] < _FEW
        doubted = few & (np.abs(miss) > _OUTLIER * np.sqrt(variance))
        # Its miss becomes its noise, so that it hardly moves others.
        noise += np.where(doubted, miss**2, 0.0)
        apart = np.zeros_like(known)
        apart[known] = doubted & (miss > _OVER)
        # By the Cholesky factor L: L^-1 K, with the covariance K of measured rows and all rows,
        # gives both the mean and the error there. numpy solves it as any other system.
        root, missed = _factored(of_rows(scales), value)
        every = np.repeat(np.arange(len(rows)), len(x)), np.tile(np.arange(len(x)), len(rows))
        half = np.linalg.solve(root, _covariance(x, stage, clock, *every, *scales))
        mean = half.T @ missed
        # The variance left is the prior's, less what the measured rows explain of it.
        own = _variance(x[every[1]], *scales)
        error = np.sqrt(np.maximum(own - (half**2).sum(axis=0), 1e-10))
        shape = len(rows), len(x)
        expected: Floats = top[:, None] + _SLOPE * x + mean.reshape(shape)
        return expected, error.reshape(shape), apart


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


_KNOTS = 7  #: clocks at most between which power is taken as linear
#: expected power of a waiting GPU, relative to the highest power; by hand, as the others here
_WAITING = 0.2
#: standard deviation of that power of all ranks together
_WAITING_DOUBT = 0.08
#: standard deviation of that power from one rank to another
_OWN_WAITING = 0.01
_ENERGY_NOISE = 0.002  #: standard deviation of an energy, relative
_DRIFT = 0.002  #: of the level of a stage's power between iterations, relative
#: of the energy that a counter has not shown, as a part of the highest power times its step
_UNREAD = 0.35


class PowerRows:
    """Power of computations by (class, clock), and of waiting.

    Power is linear between a few clocks, at which stages share a curve and deviate from it;
    everything is linear and Gaussian, so each reading of a counter is one update of a Kalman
    filter. What the counter had not shown yet at the end of an iteration it shows in the next one;
    that is a part of the state as well.

    Args:
        clocks_mhz: all clocks, highest first.
        kinds: the number of the kind of each class.
        stages: the stage of each class.
        ranks: the rank of each class.
        gpus: number of GPUs, pipeline by pipeline.
    """

    def __init__(
        self,
        clocks_mhz: Sequence[int],
        kinds: Sequence[int],
        stages: Sequence[int],
        ranks: Sequence[int],
        gpus: int,
    ) -> None:
        clocks = np.asarray(clocks_mhz, dtype=np.float64)
        x = clocks / clocks[0]
        # Knots are fewer than clocks, because power is smooth over the clock.
        knots = np.linspace(x[0], x[-1], min(_KNOTS, len(clocks))) if len(clocks) > 1 else x
        self._hats = np.array(
            [np.interp(-x, -knots, unit_row) for unit_row in np.eye(len(knots))]
        ).T  # (clocks, knots)
        self._classes = len(kinds)
        self._knots = len(knots)
        self._ranks = max(ranks) + 1
        self._gpus = gpus
        self._class_ranks = np.asarray(ranks)
        self.top_w = 0.0  #: the highest power, roughly; 0 before it is known
        # The state has powers of all classes, of waiting, and what each counter has not shown yet.
        size = self._classes * self._knots
        self._waiting = size  # where the power of each rank's waiting begins
        self._unread = (
            size + self._ranks
        )  # where what each counter has not shown begins; the last one is the next
        self._mean = np.zeros(self._unread + gpus + 1)
        # Expected at first is a power that falls with the square of the clock, down to an idle
        # part.
        self._mean[:size] = np.tile(0.3 + 0.7 * knots**2, self._classes)
        self._mean[self._waiting : self._unread] = _WAITING
        self._covariance = np.zeros((len(self._mean), len(self._mean)))
        self._covariance[:size, :size] = _prior(1.0 - knots, np.asarray(kinds), np.asarray(stages))
        waiting = slice(self._waiting, self._unread)
        # Ranks wait nearly alike, so what one's counter tells of waiting tells of the others.
        self._covariance[waiting, waiting] = _WAITING_DOUBT**2 + _OWN_WAITING**2 * np.eye(
            self._ranks
        )
        self._steps_s = np.zeros(gpus)

    def start(self, energy_j: float, busy_s: float, waiting_s: float) -> None:
        """Find the scale of all powers from what GPUs drew at full clocks."""
        self.top_w = energy_j / (busy_s + _WAITING * waiting_s)

    def add(
        self, gpu: int, seconds: Floats, waiting_s: float, energy_j: float, step_s: float
    ) -> None:
        """Learn from the energy of one GPU in one iteration.

        Args:
            gpu: its number, pipeline by pipeline.
            seconds: (classes, clocks) for which it ran each row.
            waiting_s: for which it waited.
            energy_j: joules, as its counter shows.
            step_s: between updates of the counter.
        """
        rank = gpu % self._ranks
        time_s = float(seconds.sum()) + waiting_s
        row = np.zeros(len(self._mean))
        row[: self._waiting] = (seconds @ self._hats).ravel()
        row[self._waiting + rank] = waiting_s
        # What the counter shows now began before and ends early by what it has not shown yet.
        place = self._unread + gpu
        following = len(self._mean) - 1
        doubt = (_UNREAD * step_s) ** 2
        # Before the first reading nothing is known of the counter's lag but its size.
        if not self._steps_s[gpu]:
            self._reset(place, doubt)
            self._steps_s[gpu] = step_s
        self._reset(following, doubt)
        row[place] = 1.0
        row[following] = -1.0
        # The level of a power drifts between iterations, so old readings fade.
        self._drift(rank)
        self._update(row, energy_j / self.top_w, (_ENERGY_NOISE * time_s) ** 2)
        # What this reading lacked is what the next one has too much.
        self._mean[place] = self._mean[following]
        self._covariance[place] = self._covariance[following]
        self._covariance[:, place] = self._covariance[:, following]
        self._covariance[place, place] = self._covariance[following, following]

    def add_row(self, row: int, clock: int, power_w: float, doubt: float) -> None:
        """Learn the power of a row, watts, known with a relative standard error."""
        weights = np.zeros(len(self._mean))
        weights[row * self._knots : (row + 1) * self._knots] = self._hats[clock]
        value = power_w / self.top_w
        self._update(weights, value, (doubt * value) ** 2)

    def tables(self) -> tuple[Floats, Floats, Floats]:
        """Return the power of each row and its standard error, (classes, clocks), and of
        waiting, (ranks,): watts.
        """
        # The filter's state holds powers at knots, so rows and errors follow by interpolation.
        size = self._waiting
        hats = self._hats
        mean = self._mean[:size].reshape(self._classes, self._knots) @ hats.T
        blocks = [
            self._covariance[i : i + self._knots, i : i + self._knots]
            for i in range(0, size, self._knots)
        ]
        variance = np.array([np.einsum("ck,kl,cl->c", hats, block, hats) for block in blocks])
        # A waiting GPU draws something, even where the regression says it does not.
        waiting = np.maximum(self._mean[self._waiting : self._unread], 0.02)
        error = np.sqrt(np.maximum(variance, 0.0))
        return self.top_w * np.maximum(mean, 0.05), self.top_w * error, self.top_w * waiting

    def energy(self, seconds: Floats, waiting_s: Floats) -> tuple[float, Floats]:
        """Return joules of (classes, clocks) seconds and (ranks,) waits, and their gradient in
        the state.
        """
        row = np.zeros(len(self._mean))
        row[: self._waiting] = (seconds @ self._hats).ravel()
        row[self._waiting : self._unread] = waiting_s
        row *= self.top_w
        return float(row @ self._mean), row

    def variance(self, gradient: Floats) -> float:
        """Return the variance of a quantity with this gradient."""
        return max(0.0, float(gradient @ self._covariance @ gradient))

    def _reset(self, place: int, variance: float) -> None:
        self._mean[place] = 0.0
        self._covariance[place] = self._covariance[:, place] = 0.0
        self._covariance[place, place] = variance

    def _drift(self, rank: int) -> None:
        of_rank = np.repeat(self._class_ranks == rank, self._knots)
        level = _DRIFT * self._mean[: self._waiting] * of_rank
        self._covariance[: self._waiting, : self._waiting] += np.outer(level, level)

    def _update(self, row: Floats, value: float, noise: float) -> None:
        gain = self._covariance @ row
        variance = float(row @ gain) + noise
        self._mean += gain * ((value - float(row @ self._mean)) / variance)
        self._covariance -= np.outer(gain, gain) / variance


def _prior(u: Floats, kinds: NDArray[np.int64], stages: NDArray[np.int64]) -> Floats:
    """Return the covariance of the powers of all classes at the knots, relative to the highest
    power.

    Args:
        u: (knots,) how far each is below the highest clock, relative.
        kinds: (classes,)
        stages: (classes,)
    """
    # A line and a walk from the highest clock, at which only levels differ.
    line = np.outer(u, u)
    walk = np.minimum.outer(u, u)
    # What all classes share, then those of a kind, those of a stage, and each by itself.
    every = 0.10**2 + 0.4**2 * line + 0.10**2 * walk
    of_kind = 0.08**2 + 0.2**2 * line + 0.05**2 * walk
    of_stage = 0.04**2 + 0.1**2 * line + 0.01**2 * walk
    own = 0.02**2 + 0.07**2 * line + 0.02**2 * walk
    same_kind = kinds[:, None] == kinds
    same_stage = stages[:, None] == stages
    ones = np.ones_like(same_kind)
    parts = (
        (ones, every),
        (same_kind, of_kind),
        (same_stage, of_stage),
        (np.eye(len(kinds), dtype=bool), own),
    )
    # Kronecker products, as each share is a mask over classes times a shape over knots.
    total: Floats = sum(
        (np.kron(mask, part) for mask, part in parts), np.zeros((len(kinds) * len(u),) * 2)
    )
    return total
