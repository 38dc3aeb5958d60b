"""Chooses one value, a clock or a power limit, for whole iterations: the least energy that an
agreed slowdown allows, learnt in the noise of real training.

1. Short blocks of iterations at full clocks and at a planned value take turns. What a planned block
   took is compared with the blocks at full clocks before and after it, so that what all of them
   have in common cancels: drift, lengths, a loader. When a block at full clocks begins is drawn.
2. A block counts by a mean without its outliers, and its error is known from how much iterations
   next to each other differ. What a value takes, beside the highest one, and what it draws, are
   learnt from all blocks at all values: each is a smooth curve, with errors (`Curve`).
3. The planned value is the one of least energy that is as fast as agreed but for one standard error
   (no value takes more than its share of the highest one's time). The larger the error, the more
   iterations run at full clocks.
4. What was owed by measured blocks, and two standard errors of it, is paid before more is risked.
   So the mean time is at most `slowdown` + `max_slowdown` times that at full clocks, in expectation
   and as measured at the same time. Ranks keep a ledger of the block that runs.
5. A curve is doubted if measurements differ from it by more than noise, in one direction, again and
   again. One outlier or a pause decides nothing.

It is pure: it sees no GPU and no time of day.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.autopilot.job import Decision, Phase, RankRow
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.guarantee import Ledger, Measured, audited_share
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.job import AutopilotJob, RankObservation
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.options import AutopilotSettings

SETTLING = 1
"""Iterations after a change that are not measured, unless there are no others."""


@dataclass(frozen=True)
class Tuning:
    """The constants of one clock. All are by hand: benchmark 30 checks them together."""

    #: Iterations of a block at full clocks, and the seconds that it lasts at least: an energy
    #: counter steps every .1 s.
    block: int = 4
    block_s: float = 2.0
    #: The share of iterations at full clocks, at least and at most: what a quiet job loses, and a
    #: noisy one.
    least_full: float = 1 / 40
    most_full: float = 0.4
    #: No value below this share of the highest one is tried: its iterations could take more than
    #: three times as long.
    shortest: float = 0.3
    #: What may be risked at once, iterations at full clocks.
    risk: float = 0.1
    #: Iterations in which credit is spent.
    spread: int = 100
    #: Standard errors of what is owed that are paid for too.
    sure: float = 2.0
    #: Standard errors beyond which more tells nothing.
    outlier: float = 3.0
    #: Sum of standard errors, less one each, from which a curve is doubted.
    doubted: float = 6.0
    #: A time of more than so many references is a pause, such as for a checkpoint.
    pause: float = 2.0
    #: The relative error of what an earlier start has learnt.
    prior_error: float = 0.01
    #: The share of what was known at first that is forgotten with each block.
    forgotten: float = 1e-5


_TUNING = Tuning()


class Curve:
    """The logarithm of a quantity at each value, beside that at the highest value.

    Args:
        x: Of each value: the logarithm of the highest one over it.
        slope: The expected slope over `x`.
        error: Its standard error.
    """

    def __init__(self, x: np.ndarray, slope: float, error: float) -> None:
        less = np.minimum.outer(x, x)
        more = np.maximum.outer(x, x)
        bends = 4.0 * less**2 * (3.0 * more - less) / 6.0  # a slope may change by 2 within x = 1
        self._prior = error**2 * np.outer(x, x) + bends
        self._covariance = self._prior.copy()
        self.mean = slope * x
        self._scatter = 1.0  #: of measurements: their variance, beside what it should be
        self.doubt = np.zeros(2)  #: sums of standard errors, less one each; upwards, downwards

    @property
    def error(self) -> np.ndarray:
        """The standard error of each value."""
        return np.sqrt(np.maximum(0.0, np.diag(self._covariance)))

    def add(self, index: int, measured: float, variance: float) -> float:
        """Learn what was measured at a value; return its variance, larger if measurements scatter
        more than they should.
        """
        # What was known at first fades, so that a curve can follow a GPU that changes.
        self._covariance += _TUNING.forgotten * self._prior
        # Measurements may scatter more than their own variance says.
        off = self._off(index, measured, variance * self._scatter)
        # Moves until half of all measurements miss by less than .675 errors, as normal ones do.
        self._scatter = max(1.0, self._scatter * 1.1 ** np.sign(abs(off) - 0.675))
        # Counts misses in one direction beyond one error each; outliers to both sides cancel.
        self.doubt = np.maximum(0.0, self.doubt + np.array((off - 1.0, -off - 1.0)))
        # Noise alone hardly does that, so the curve begins again with its first doubt.
        if self.doubt.max() > _TUNING.doubted:
            self._covariance = self._prior.copy()
            self.doubt = np.zeros(2)
        variance *= self._scatter
        # The update of a Gaussian process by one value.
        gain = self._covariance[index] / math.sqrt(self._covariance[index, index] + variance)
        self.mean = self.mean + gain * self._off(index, measured, variance)
        self._covariance -= np.outer(gain, gain)
        return variance

    def _off(self, index: int, measured: float, variance: float) -> float:
        """Return by how many standard errors a measurement is off."""
        error = math.sqrt(self._covariance[index, index] + variance)
        return _clipped(float(measured - self.mean[index]) / error, _TUNING.outlier)


def _clipped(value: float, most: float) -> float:
    """Return the value from -`most` to `most` that is nearest."""
    return max(-most, min(most, value))


class Power(NamedTuple):
    """What a rank drew in a block."""

    watts: float
    seconds: float  #: in which it was measured


class Reading(NamedTuple):
    """An energy counter at the end of an iteration."""

    iterations: int  #: that were counted so far
    energy_j: float  #: of all of them
    time_s: float  #: of the last one


@dataclass
class Block:
    """Iterations at one value, one after another."""

    index: int  #: position of the value, 0 for the highest
    first: int  #: the number of the first iteration
    last: int  #: of the last one
    is_settled: bool = False  #: whether iterations are past those that settle after the change
    logs: list[float] = field(default_factory=list)  #: of the seconds of those that are measured
    #: pipeline -> its counter after each of those
    metered: dict[int, list[Reading]] = field(default_factory=dict)

    def level(self, noise: float) -> float:
        """Return the mean of the logarithms, given their standard deviation; an outlier counts
        as three of these.
        """
        middle = median(self.logs)
        most = _TUNING.outlier * noise
        return middle + fmean(_clipped(log - middle, most) for log in self.logs)

    def power(self) -> Power | None:
        """Return what a rank drew in the mean; None if it was not measured."""
        watts = []
        seconds = 0.0
        for readings in self.metered.values():
            begin = readings[0]
            end = readings[-1]
            iterations = end.iterations - begin.iterations
            # A counter that stood still, or began anew, tells nothing.
            if iterations > 0 and end.energy_j > begin.energy_j:
                seconds = iterations * fmean(reading.time_s for reading in readings[1:])
                watts.append((end.energy_j - begin.energy_j) / seconds)
        return Power(fmean(watts), seconds) if watts else None


@dataclass(frozen=True)
class Comparison:
    """Blocks at full clocks before and after planned ones, with which these are compared."""

    begin: float  #: level of the one before
    end: float  #: level of the one after
    per_noise: float  #: the variance of the mean of both, over that of one iteration
    powers: tuple[Power, ...]  #: what was drawn in those that were measured

    @classmethod
    def of(cls, before: Block, after: Block, noise: float) -> Comparison:
        """Return the comparison with two blocks at full clocks, in noise of this standard
        deviation.
        """
        powers = (before.power(), after.power())
        return cls(
            before.level(noise),
            after.level(noise),
            0.5 / len(before.logs) + 0.5 / len(after.logs),
            tuple(power for power in powers if power is not None),
        )

    @property
    def middle(self) -> float:
        """The level of both: their mean, which cancels a steady drift."""
        return (self.begin + self.end) / 2

    @property
    def drift(self) -> float:
        """The variance of where between both ends a steady drift stood: that of a uniform share."""
        return (self.end - self.begin) ** 2 / 12

    @property
    def watts(self) -> float:
        """What a rank drew in the mean of both."""
        return fmean(power.watts for power in self.powers)


class Best(NamedTuple):
    """The best value by what is known."""

    position: int  #: of the value
    time: float  #: of an iteration, as a multiple of that at full clocks
    saving: float  #: the share of energy that it saves


class Choices(NamedTuple):
    """What is known of each value that may run next: (values,) each."""

    lengths: np.ndarray  #: iterations of a block, in the mean
    #: how long an iteration may take in all likelihood, as a multiple of that at full clocks.
    longest: np.ndarray
    log_costs: np.ndarray  #: logarithm of the least energy that is likely
    is_possible: np.ndarray  #: whether it is fast enough, and a block of it may be risked


class OneClock:
    """Decides the one value of all GPUs of a job without a pipeline, as `Autopilot` decides the
    clocks of a pipeline: call `observe` and `decide` as its docstring says.

    Args:
        job: The job, whose iteration is one computation.
        settings: What it may do.
        prior: A profile of the iteration. How its values compare counts as measured to 1 %.
    """

    #: a rank that waits for another in its iteration cannot be told from one that computes.
    tells_busy = False

    def __init__(
        self, job: AutopilotJob, settings: AutopilotSettings, prior: Profile | None = None
    ) -> None:
        self.job = job
        measured = () if prior is None else prior.measurements[job.iteration.keys[0]]
        # How values compare is all that a prior tells, so rows count beside its highest one.
        rows = {row.clock_mhz: row for row in measured}
        top, *others = job.clocks_mhz
        # Without learning, only measured values may be used.
        known = [value for value in others if settings.learn or value in rows]
        self.values = [top, *(value for value in known if value >= _TUNING.shortest * top)]
        self._slowdown = settings.slowdown
        self._max_slowdown = settings.max_slowdown
        #: the time of an iteration that the value of least energy may take in the mean, as a
        #: multiple: it leaves the rest of what is allowed to trials.
        self._aim = max(settings.slowdown, 1.0 + max(settings.max_slowdown / 2, 1e-6))
        self._random = random.Random(settings.seed)
        self._x = np.log(top / np.array(self.values))
        # Before measurements, time rises half as fast as the clock falls, and power falls a bit
        # faster than it.
        self._time = Curve(self._x, slope=0.5, error=0.35)
        self._power = Curve(self._x, slope=-1.2, error=1.0)
        self._measured: set[int] = set()  #: positions of values whose time and energy are
        for index, value in enumerate(self.values):
            if index and top in rows and value in rows:
                time = math.log(rows[value].time_s / rows[top].time_s)
                energy = math.log(rows[value].energy_j / rows[top].energy_j)
                self._time.add(index, time, _TUNING.prior_error**2)
                self._power.add(index, energy - time, 2 * _TUNING.prior_error**2)
                self._measured.add(index)
        self.reference_s: float | None = None  #: seconds of an iteration at full clocks, lately
        self._top_w: float | None = None  #: watts of a rank there
        self._step_s = 0.0  #: how old a reading of an energy counter can be
        self._steps: deque[float] = deque(maxlen=200)  #: between iterations next to each other
        self._blocks: list[Block] = []  #: since a block at full clocks that was compared
        self._ledger: Ledger | None = None
        self._owed_s = Measured()  #: by blocks that were compared
        self._longer_s = Measured()  #: by how much these were longer than at full clocks
        # What iterations had taken at full clocks.
        self._all_s = 0.0  #: those until the last comparison
        self._since_s = 0.0  #: those since then
        # The block that runs.
        self._index = 0  #: position of its value
        self._length = 2 * _TUNING.block  #: iterations
        self._decided = 0  #: the iteration from which it was decided
        self._phase: Phase = "reference"

    @property
    def _noise(self) -> float:
        """Standard deviation of the logarithm of an iteration's time, without outliers."""
        return max(1e-4, 1.48 * median(self._steps or (0.0,)) / math.sqrt(2.0))

    def observe(self, observations: Sequence[RankObservation]) -> None:
        """Learn from what ranks observed of one iteration."""
        if not observations:
            return
        # All GPUs end an iteration together, so the longest one is its time.
        iteration = observations[0].iteration
        time_s = max(seen.time_s for seen in observations)
        index = max(seen.version for seen in observations)
        # Ranks account with the same ledger, which is renewed with each block.
        if self._ledger is not None:
            self._ledger = self._ledger.add(time_s, full_clocks=index == 0, iteration=iteration)
        if index and self.reference_s is None:  # by a decision from before a restart
            return
        self._since_s += self.reference_s or time_s
        # An iteration at full clocks pays back what slower ones may take longer.
        if index == 0:
            self._owed_s.add(-(self._aim - 1.0) * (self.reference_s or 0.0))
        # A block ends where another value begins, also where a rank's ledger forced full clocks.
        if not self._blocks or self._blocks[-1].index != index:
            self._blocks.append(Block(index, iteration, iteration))
        block = self._blocks[-1]
        block.last = iteration
        # Iterations up to here settle after the change, and count only if there are no others.
        if not block.is_settled and iteration >= block.first + SETTLING:
            block.is_settled = True
            block.logs.clear()
            block.metered.clear()
        # A computation at another clock, or with a change inside, belongs to no value.
        if not self._ran_whole(observations, index):
            return
        self._step_s = observations[0].energy_step_s
        block.logs.append(math.log(time_s))
        # Neighbours differ by noise alone, as a drift changes both.
        if len(block.logs) > 1:
            self._steps.append(abs(block.logs[-1] - block.logs[-2]))
        for seen in observations:
            readings = block.metered.setdefault(seen.pipeline, [])
            readings.append(Reading(*seen.metered, seen.time_s))

    def _ran_whole(self, observations: Sequence[RankObservation], index: int) -> bool:
        """Whether all that ran is known to have run at one value from begin to end."""
        ran = {
            (seen.version, computation.clock_mhz, computation.change_s)
            for seen in observations
            for computation in seen.computations
        }
        return ran == {(index, self.values[index], None)}

    def decide(self, iteration: int) -> Decision:
        """Return what all ranks run in `iteration`, which is still ahead."""
        if self._blocks and self._has_ended(self._blocks[-1]):
            self._decided = iteration
            # After a planned block, one at full clocks closes the comparison.
            if self._index:
                self._index = 0
                self._length = self._full_length
                self._phase = "audit"
            # Full clocks have just run on both sides, so what lies between them can be compared.
            else:
                self._compare()
                self._choose()
        best = self.best
        value = self.values[self._index]
        return Decision(
            iteration=iteration,
            version=self._index,
            phase=self._phase,
            clocks=(((value,),),) * self.job.pipelines,
            ledger=self._ledger,
            trials=int(self._index > 0 and self._index not in self._measured),
            unknown=len(self.values) - len(self._measured) - (self._top_w is not None),
            # Before any comparison, nothing is known of what a value takes.
            time_s=self._seconds(self._index) if self._measured else None,
            saving=best.saving,
            saving_stderr=(1.0 - best.saving) * self._error(best.position),
            untold=_TUNING.sure * float(self._time.error[best.position]) or None,
            longest=self._longer_s.upper(_TUNING.sure) / self._all_s if self._all_s else None,
        )

    def _error(self, index: int) -> float:
        """Return the relative standard error of the energy at a value."""
        return math.hypot(self._time.error[index], self._power.error[index])

    def _seconds(self, index: int) -> float:
        """Return the expected seconds of an iteration at a value."""
        return (self.reference_s or 0.0) * math.exp(self._time.mean[index])

    def _has_ended(self, block: Block) -> bool:
        """Whether the block has all that it is for; a planned one also if ledgers forced full
        clocks, or if it takes a time that noise does not explain.
        """
        # Decisions are ahead, so the block may hold iterations from before the last one.
        if block.last < self._decided:
            return False
        # Ranks have forced full clocks, so the planned block is over.
        if block.index != self._index:
            return block.index == 0 and len(self._blocks) > 1
        # A level and its noise need two iterations.
        if len(block.logs) < 2:
            return False
        # Iterations that settle after a change are not part of what is measured.
        length = block.last + 1 - max(block.first, self._decided) - SETTLING
        if length >= self._length:
            return True
        # A block at full clocks has a length alone, however long its iterations take.
        return block.index > 0 and self._is_off(block)

    def _is_off(self, block: Block) -> bool:
        """Whether a planned block takes a time that noise does not explain: what is beyond it is
        owed, so the block is compared with full clocks at once.
        """
        expected = math.log(self._seconds(block.index))
        # Clipped, so that one pause does not end a block.
        most = _TUNING.outlier * self._noise
        off = sum(_clipped(log - expected, most) for log in block.logs)
        return abs(off) > self._owed(len(block.logs), _TUNING.sure)

    @property
    def _full_length(self) -> int:
        """Iterations of a block at full clocks."""
        return max(
            _TUNING.block, math.ceil(_TUNING.block_s / (self.reference_s or _TUNING.block_s))
        )

    def _owed(self, length: int, errors: float) -> float:
        """Return what so many iterations may seem to owe by noise, theirs and the reference's, and
        what is risked; in iterations.
        """
        return _TUNING.risk + errors * self._noise * math.sqrt(
            length + length**2 / self._full_length
        )

    def _compare(self) -> None:
        """Learn from planned blocks, compared with those at full clocks before and after them, and
        charge them to the ledger.
        """
        noise = self._noise
        after = self._blocks[-1]
        full = Comparison.of(self._blocks[0], after, noise)
        # The newest block tells the reference of what comes next.
        self.reference_s = math.exp(full.end)
        if full.powers:
            self._top_w = full.watts
        for block in self._blocks:
            if block.index > 0:
                self._charge(block, full, noise)
        # The block at full clocks is the begin of the next comparison as well.
        self._blocks = [after]
        self._all_s += self._since_s
        self._since_s = 0.0
        # Credit is bounded, so that a long quiet time does not pay for a long slow one.
        least_s = -_TUNING.spread * (self._aim - 1.0) * self.reference_s
        self._owed_s.raise_to(least_s, _TUNING.sure)

    def _charge(self, block: Block, full: Comparison, noise: float) -> None:
        """Learn from a planned block, and charge what it took beyond what is agreed."""
        # Without a time of its own, the block is charged by what the curve says.
        took = self._time.mean[block.index]
        variance = self._time.error[block.index] ** 2
        if block.logs:
            measured = block.level(noise) - full.middle
            # Errors of the block's mean, and of the mean of both blocks at full clocks.
            sampling = noise**2 * (1 / len(block.logs) + full.per_noise)
            measured_variance = self._time.add(block.index, measured, sampling + full.drift)
            # If full clocks drifted by more, the block tells less than the curve.
            if full.drift <= max(sampling, variance):
                took = measured
                variance = measured_variance
            self._learn_power(block, full)
        # What the block's iterations would have taken at full clocks.
        iterations = block.last - block.first + 1
        full_s = iterations * math.exp(full.middle)
        self._owed_s.add(full_s * (math.exp(took) - self._aim), full_s**2 * variance)
        self._longer_s.add(full_s * (math.exp(took) - 1.0), full_s**2 * variance)

    def _learn_power(self, block: Block, full: Comparison) -> None:
        """Learn what a planned block drew, if that and full clocks were measured."""
        power = block.power()
        if power is None or not full.powers:
            return
        # The counter is up to a step old at both ends, which is an error of the root of 1/6, or
        # .41, steps.
        stale_s = 0.41 * self._step_s
        stale = stale_s**2 * (power.seconds**-2 + full.powers[0].seconds ** -2)
        beside_full = math.log(power.watts / full.watts)
        self._power.add(block.index, beside_full, stale + _TUNING.prior_error**2)
        self._measured.add(block.index)

    @property
    def _upper_s(self) -> float:
        """What is owed at most, seconds, as far as is sure."""
        return self._owed_s.upper(_TUNING.sure)

    def _choose(self) -> None:
        """Begin with the next value, and with a ledger for ranks: what is owed by the blocks
        before, and what this one may owe.
        """
        assert self.reference_s is not None
        # What may still be risked, iterations at full clocks.
        left = _TUNING.risk - self._upper_s / self.reference_s
        choices = self._choices(left)
        self._index = int(np.argmin(np.where(choices.is_possible, choices.log_costs, np.inf)))
        if self._index == 0:
            owed = self._begin_full(left)
        else:
            length = choices.lengths[self._index]
            owed = self._begin_planned(length, choices.longest[self._index])
        self._ledger = Ledger(
            self.reference_s,
            self._slowdown,
            self._max_slowdown,
            burst_s=owed * self.reference_s,
            owed_s=max(0.0, self._upper_s),
            last=self._blocks[0].last,
            pause=_TUNING.pause,
        )

    def _choices(self, left: float) -> Choices:
        """Return what is known of each value that may run next, where so many iterations at full
        clocks may still be risked.
        """
        mean = self._time.mean
        error = self._time.error
        # The less a value is known, the larger its share of full clocks, which compare with it; a
        # curve in doubt counts as less well known.
        doubted = _TUNING.sure * error * (1.0 + self._time.doubt.max())
        audits = [
            audited_share(of_value, self._aim - 1.0, _TUNING.least_full, _TUNING.most_full)
            for of_value in doubted.tolist()
        ]
        # A block is so long that the next one at full clocks is its share of all.
        lengths = self._full_length * (1.0 / np.array(audits) - 1.0)
        # At most its error longer than expected, but no longer than the physical bound, unless it
        # is known to be.
        longest = np.exp(np.maximum(mean, np.minimum(mean + error, self._x)))
        # Credit may be spent over many iterations.
        credit = max(0.0, left - _TUNING.risk)
        allowed = self._aim + credit / np.maximum(_TUNING.spread, lengths)
        # A value may be tried while it is not surely too slow; even if it is as slow as its error
        # allows, a block of it must not owe more than may be risked.
        may_be_fast = np.exp(mean - _TUNING.sure * error) <= allowed
        may_be_risked = longest <= allowed + min(left, _TUNING.risk) / lengths
        # In debt, or before the power at full clocks is known, nothing is tried.
        may_try = left > 0.0 and self._top_w is not None
        is_possible = may_be_fast & may_be_risked & may_try
        is_possible[0] = True
        # Doubt counts in a value's favour, so that what might be the best is measured.
        cost_error = np.hypot(error, self._power.error)
        log_costs = mean + self._power.mean - _TUNING.sure * cost_error
        return Choices(lengths, longest, log_costs, is_possible)

    def _begin_full(self, left: float) -> float:
        """Begin with one more block at full clocks, where so many iterations may still be risked;
        return how many a rank may owe in it.
        """
        self._length = self._full_length
        self._phase = "paying" if left <= 0.0 else "following"
        # Full clocks follow on full clocks, so the comparison goes on with a new block.
        last = self._blocks[-1].last
        self._blocks.append(Block(0, last + 1, last))
        return _TUNING.risk

    def _begin_planned(self, mean_length: float, longest: float) -> float:
        """Begin with a block at a planned value; return how many iterations at full clocks a rank
        may owe in it.

        Args:
            mean_length: its iterations, in the mean.
            longest: how long one may take, as a multiple of one at full clocks.
        """
        # The length is drawn, so that no period of the training always meets full clocks.
        self._length = math.ceil(mean_length * self._random.uniform(0.5, 1.5))
        self._phase = "following" if self._index in self._measured else "learning"
        # Noise and the planned slowdown are no debt, so ranks may owe them until the block is
        # compared.
        allowed = self._slowdown + self._max_slowdown
        owed = self._owed(self._length, _TUNING.outlier)
        return owed + self._length * max(0.0, longest - allowed)

    @property
    def best(self) -> Best:
        """The value of least energy among those that are as fast as agreed, down to the lowest one
        that was measured.
        """
        # Only down to the lowest measured one, as the curve beyond it is a guess.
        lowest = max(self._measured, default=0)
        times = np.exp(self._time.mean)
        costs = np.exp(self._time.mean + self._power.mean)
        fast = [index for index in range(1, lowest + 1) if times[index] <= self._aim]
        best = min((0, *fast), key=lambda index: float(costs[index]))
        return Best(best, float(times[best]), 1.0 - float(costs[best]))

    def wait_for(self, times_s: Sequence[float]) -> None:
        """Do nothing: all GPUs have one value, whichever of them waits for another."""

    def set_clock_change(self, change: ClockChange) -> None:
        """Know what setting a clock was measured to cost, which nothing depends on."""
        self.job = replace(self.job, clock_change=change)

    def rank_costs(self) -> tuple[tuple[RankRow, ...], ...]:
        """Return for each pipeline what a GPU takes and uses in an iteration at the value of the
        last decision, and at full clocks; empty before that was measured.

        What it draws while it waits was not seen: so it counts as 0, and a GPU that would wait at
        full clocks is said to save less than it does.
        """
        if self._top_w is None:
            return ()
        time_s = self._seconds(self._index)
        full_s = self._seconds(0)
        full_w = self._top_w * math.exp(self._power.mean[0])
        watts = self._top_w * math.exp(self._power.mean[self._index])
        row = RankRow(time_s, time_s * watts, full_s, full_s * full_w, 0.0)
        return ((row,),) * self.job.pipelines

    def learned(self) -> Profile:
        """Return what was learnt as a profile, with the values whose energy was measured.

        Raises:
            UsageError: If the highest value was not measured yet.
        """
        job = self.job
        top_w = self._top_w
        if top_w is None:
            raise UsageError("no iteration at full clocks was measured; there is no profile yet")
        # The highest value is the reference of all others, so it is known as well.
        rows = []
        for index in sorted({0, *self._measured}):
            time_s = self._seconds(index)
            energy_j = time_s * top_w * math.exp(self._power.mean[index])
            rows.append(Measurement(self.values[index], time_s, energy_j))
        return Profile(
            {job.iteration.keys[0]: tuple(rows)},
            0.0,  # what a GPU draws while it waits was not seen, and so waiting costs nothing
            gpu=job.gpu,
            clock_change=job.clock_change,
            control=job.control,
            iteration={"schedule": WHOLE.name, "microbatches": 1},
            conditions={"learnt": "while training"},
        )
