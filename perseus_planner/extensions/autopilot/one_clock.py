"""Chooses one value, a clock or a power limit, for whole iterations: the least energy that an
agreed slowdown allows, learnt in the noise of real training.

1. Short blocks of iterations at full clocks and at a planned value take turns. What a planned block
   took is compared with the blocks at full clocks before and after it, so that what all of them
   have in common cancels: drift, lengths, a loader. When a block at full clocks begins is drawn.
2. A block counts by a mean without its outliers, and its error is known from how much iterations
   next to each other differ. What a value takes, beside the highest one, and what it draws, are
   learnt from all blocks at all values: each is a smooth curve, with errors (`ValueCurves`).
3. The planned value is the one that may use the least energy, among those that are fast enough. A
   value is fast enough if a block of it owes no more than may be risked, even where its iterations
   take one standard error more than expected. That error adds no more than physics allows: twice
   the time at half the clock. The larger the error of a value, the more of the iterations beside
   it run at full clocks.
4. What was owed by measured blocks, and two standard errors of it, is paid before more is risked.
   So the mean time is at most `slowdown` + `max_slowdown` times that at full clocks, in expectation
   and as measured at the same time. Ranks keep a ledger of the block that runs.
5. A curve is doubted if measurements differ from it by more than noise, in one direction, again and
   again. One outlier or a pause decides nothing.

It is pure: it sees no GPU and no time of day. A value is told by its position (`index`): 0 is the
highest one, which stands for full clocks.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.autopilot.job import Decision, Phase, RankRow
from perseus_planner.extensions.autopilot.value_blocks import SETTLING, Block, Comparison
from perseus_planner.extensions.autopilot.value_curves import OUTLIER, Best, ValueCurves, clipped
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.guarantee import Ledger, Measured, audited_share
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.job import AutopilotJob, RankObservation
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.options import AutopilotSettings

# All constants are by hand: benchmark 30 checks them together.
_BLOCK = 4
"""Iterations of a block at full clocks, at least."""
_BLOCK_S = 2.0
"""The seconds that it lasts at least: an energy counter steps every .1 s."""
_LEAST_FULL = 1 / 40
"""The least share of iterations at full clocks, which is what a quiet job loses."""
_MOST_FULL = 0.4
"""The most, which a noisy one loses."""
_SHORTEST = 0.3
"""No value below this share of the highest one is tried: its iterations could take more than three
times as long."""
_RISK = 0.1
"""What may be risked at once, iterations at full clocks."""
_SPREAD = 100
"""Iterations in which credit is spent."""
_SURE = 2.0
"""Standard errors of what is owed that are paid for too."""
_PAUSE = 2.0
"""A time of more than so many references is a pause, such as for a checkpoint."""
_COUNTER_ERROR = 0.41
"""The standard error of the time between two readings of an energy counter, in steps of it: each is
up to a step old, which gives the root of 1/6."""
_LEAST_NOISE = 1e-4
"""The least standard deviation of the logarithm of an iteration's time."""


@dataclass(frozen=True)
class Turn:
    """The block that was decided last: it runs, or is about to. What ran is told by a `Block`."""

    index: int  #: position of its value
    length: int  #: iterations
    first: int  #: the iteration from which it was decided
    phase: Phase


class Choices(NamedTuple):
    """What is known of each value that may run next: (values,) each."""

    lengths: np.ndarray  #: iterations of a block, in the mean
    #: how long an iteration may take in all likelihood, as a multiple of that at full clocks.
    longest: np.ndarray
    log_costs: np.ndarray  #: logarithm of the least energy that is likely
    is_possible: np.ndarray  #: whether it is fast enough, and a block of it may be risked


class _Debt:
    """What blocks took beyond what is agreed, and beyond full clocks.

    Args:
        aim: Up to which time of an iteration nothing is owed, as a multiple of that at full clocks.
    """

    def __init__(self, aim: float) -> None:
        self._aim = aim
        self._owed_s = Measured()  #: by blocks that were compared, beyond what is agreed
        self._longer_s = Measured()  #: by how much these were longer than at full clocks
        # What iterations had taken at full clocks.
        self._all_s = 0.0  #: those until the last comparison
        self._since_s = 0.0  #: those since then

    @property
    def upper_s(self) -> float:
        """What is owed at most, seconds, as far as is sure."""
        return self._owed_s.upper(_SURE)

    @property
    def longest(self) -> float | None:
        """By how much longer than at full clocks iterations were at most, a share of all; None
        before any comparison.
        """
        return self._longer_s.upper(_SURE) / self._all_s if self._all_s else None

    def count(self, full_s: float) -> None:
        """Count an iteration that takes so long at full clocks."""
        self._since_s += full_s

    def pay(self, full_s: float) -> None:
        """Count one at full clocks as payment: slower ones may take as much longer."""
        self._owed_s.add(-(self._aim - 1.0) * full_s)

    def charge(self, full_s: float, took: float, variance: float) -> None:
        """Charge a planned block.

        Args:
            full_s: What its iterations had taken at full clocks.
            took: The logarithm of what they took beside that.
            variance: Of it.
        """
        self._owed_s.add(full_s * (math.exp(took) - self._aim), full_s**2 * variance)
        self._longer_s.add(full_s * (math.exp(took) - 1.0), full_s**2 * variance)

    def close(self, reference_s: float) -> None:
        """End a comparison, after which an iteration at full clocks takes so long."""
        self._all_s += self._since_s
        self._since_s = 0.0
        # Credit is bounded, so that a long quiet time does not pay for a long slow one.
        self._owed_s.raise_to(-_SPREAD * (self._aim - 1.0) * reference_s, _SURE)


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
        # How values compare is all that a prior tells, so rows count beside its highest one.
        rows = () if prior is None else prior.measurements[job.iteration.keys[0]]
        top, *others = job.clocks_mhz
        # Without learning, only measured values may be used.
        measured = {row.clock_mhz for row in rows}
        known = [value for value in others if settings.learn or value in measured]
        self.values = [top, *(value for value in known if value >= _SHORTEST * top)]
        self._curves = ValueCurves(self.values)
        self._curves.add_prior(rows)
        self._slowdown = settings.slowdown
        self._max_slowdown = settings.max_slowdown
        #: the time of an iteration that the value of least energy may take in the mean, as a
        #: multiple: it leaves the rest of what is allowed to trials.
        self._aim = max(settings.slowdown, 1.0 + max(settings.max_slowdown / 2, 1e-6))
        self._debt = _Debt(self._aim)
        self._random = random.Random(settings.seed)
        self.reference_s: float | None = None  #: seconds of an iteration at full clocks, lately
        self._step_s = 0.0  #: how old a reading of an energy counter can be
        self._steps: deque[float] = deque(maxlen=200)  #: between iterations next to each other
        self._blocks: list[Block] = []  #: since a block at full clocks that was compared
        self._ledger: Ledger | None = None
        self._turn = Turn(0, 2 * _BLOCK, 0, "reference")

    @property
    def _noise(self) -> float:
        """Standard deviation of the logarithm of an iteration's time, without outliers."""
        return max(_LEAST_NOISE, 1.48 * median(self._steps or (0.0,)) / math.sqrt(2.0))

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
        self._debt.count(self.reference_s or time_s)
        # An iteration at full clocks pays back what slower ones may take longer.
        if index == 0:
            self._debt.pay(self.reference_s or 0.0)
        # A block ends where another value begins, also where a rank's ledger forced full clocks.
        if not self._blocks or self._blocks[-1].index != index:
            self._blocks.append(Block.empty(index, iteration))
        block = self._blocks[-1]
        block.add(iteration)
        # A computation at another clock, or with a change inside, belongs to no value.
        if not self._ran_whole(observations, index):
            return
        self._step_s = observations[0].energy_step_s
        block.measure(time_s, observations)
        # Neighbours differ by noise alone, as a drift changes both.
        if len(block.logs) > 1:
            self._steps.append(abs(block.logs[-1] - block.logs[-2]))

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
            # After a planned block, one at full clocks closes the comparison.
            if self._turn.index:
                self._turn = Turn(0, self._full_length, iteration, "audit")
            # Full clocks have just run on both sides, so what lies between them can be compared.
            else:
                self._compare()
                self._choose(iteration)
        curves = self._curves
        index = self._turn.index
        best = self.best
        return Decision(
            iteration=iteration,
            version=index,
            phase=self._turn.phase,
            clocks=(((self.values[index],),),) * self.job.pipelines,
            ledger=self._ledger,
            trials=int(index > 0 and index not in curves.measured),
            unknown=len(self.values) - len(curves.measured) - (curves.top_w is not None),
            # Before any comparison, nothing is known of what a value takes.
            time_s=self._seconds(index) if curves.measured else None,
            saving=best.saving,
            saving_stderr=(1.0 - best.saving) * curves.energy_error(best.position),
            untold=_SURE * float(curves.time.error[best.position]) or None,
            longest=self._debt.longest,
        )

    def _seconds(self, index: int) -> float:
        """Return the expected seconds of an iteration at a value."""
        return (self.reference_s or 0.0) * math.exp(self._curves.time.mean[index])

    def _has_ended(self, block: Block) -> bool:
        """Whether the block that ran last has all that it is for; a planned one also if ledgers
        forced full clocks, or if it takes a time that noise does not explain.
        """
        turn = self._turn
        # Decisions are ahead, so what ran may be from before the last one.
        if block.end <= turn.first:
            return False
        # Full clocks after a planned block: ranks have forced them, so that block is over. A value
        # from before full clocks were decided still runs out.
        if block.index != turn.index:
            return block.index == 0 and len(self._blocks) > 1
        # A level and its noise need two iterations.
        if len(block.logs) < 2:
            return False
        # Iterations that settle after a change are not part of what is measured.
        if block.end - max(block.first, turn.first) - SETTLING >= turn.length:
            return True
        # A block at full clocks has a length alone, however long its iterations take.
        return block.index > 0 and self._is_off(block)

    def _is_off(self, block: Block) -> bool:
        """Whether a planned block takes a time that noise does not explain: what is beyond it is
        owed, so the block is compared with full clocks at once.
        """
        expected = math.log(self._seconds(block.index))
        # Clipped, so that one pause does not end a block.
        most = OUTLIER * self._noise
        # A difference of logarithms is a share of an iteration, so their sum is in iterations.
        off = sum(clipped(log - expected, most) for log in block.logs)
        return abs(off) > self._likely_debt(len(block.logs), _SURE)

    @property
    def _full_length(self) -> int:
        """Iterations of a block at full clocks."""
        return max(_BLOCK, math.ceil(_BLOCK_S / (self.reference_s or _BLOCK_S)))

    def _likely_debt(self, length: int, errors: float) -> float:
        """Return what a block of so many iterations may seem to owe, in iterations: what is risked,
        and so many standard errors of its sum.

        Noise is a share of an iteration. That of each iteration counts, and so does that of the
        reference, which is the mean of a block at full clocks and errs alike in all of them.
        """
        variance = length + length**2 / self._full_length
        return _RISK + errors * self._noise * math.sqrt(variance)

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
            self._curves.top_w = full.watts
        for block in self._blocks:
            if block.index > 0:
                self._charge(block, full, noise)
        # The block at full clocks is the begin of the next comparison as well.
        self._blocks = [after]
        self._debt.close(self.reference_s)

    def _charge(self, block: Block, full: Comparison, noise: float) -> None:
        """Learn from a planned block, and charge what it took beyond what is agreed."""
        # Without a time of its own, the block is charged by what the curve says.
        curve = self._curves.time
        took = curve.mean[block.index]
        variance = curve.error[block.index] ** 2
        if block.logs:
            measured = block.level(noise) - full.middle
            # Errors of the block's mean, and of the mean of both blocks at full clocks.
            sampling = noise**2 * (1 / len(block.logs) + full.per_noise)
            measured_variance = curve.add(block.index, measured, sampling + full.drift)
            # If full clocks drifted by more, the block tells less than the curve.
            if full.drift <= max(sampling, variance):
                took = measured
                variance = measured_variance
            self._learn_power(block, full)
        # What the block's iterations would have taken at full clocks.
        full_s = block.iterations * math.exp(full.middle)
        self._debt.charge(full_s, took, variance)

    def _learn_power(self, block: Block, full: Comparison) -> None:
        """Learn what a planned block drew, if that and full clocks were measured."""
        power = block.power()
        if power is None or not full.powers:
            return
        # Counters are late at both ends of both blocks.
        stale_s = _COUNTER_ERROR * self._step_s
        stale = stale_s**2 * (power.seconds**-2 + full.powers[0].seconds ** -2)
        self._curves.add_power(block.index, math.log(power.watts / full.watts), stale)

    def _choose(self, iteration: int) -> None:
        """Decide the next value from an iteration on, and a ledger for ranks: what is owed by the
        blocks before, and what this one may owe.
        """
        assert self.reference_s is not None
        owed_s = self._debt.upper_s
        # What may still be risked, iterations at full clocks.
        left = _RISK - owed_s / self.reference_s
        choices = self._choices(left)
        index = int(np.argmin(np.where(choices.is_possible, choices.log_costs, np.inf)))
        # What a rank may owe in the block, iterations at full clocks.
        burst = _RISK
        if index == 0:
            self._turn = self._full_turn(iteration, left)
        else:
            self._turn = self._planned_turn(iteration, index, choices.lengths[index])
            burst = self._burst(self._turn.length, choices.longest[index])
        self._ledger = Ledger(
            self.reference_s,
            self._slowdown,
            self._max_slowdown,
            burst_s=burst * self.reference_s,
            owed_s=max(0.0, owed_s),
            last=self._blocks[0].end - 1,
            pause=_PAUSE,
        )

    def _choices(self, left: float) -> Choices:
        """Return what is known of each value that may run next, where so many iterations at full
        clocks may still be risked.
        """
        curves = self._curves
        mean = curves.time.mean
        error = curves.time.error
        # The less a value is known, the larger its share of full clocks, which compare with it; a
        # curve in doubt counts as less well known.
        doubted = _SURE * error * (1.0 + curves.time.doubt)
        audits = [
            audited_share(of_value, self._aim - 1.0, _LEAST_FULL, _MOST_FULL)
            for of_value in doubted.tolist()
        ]
        # A block is so long that the next one at full clocks is its share of all.
        lengths = self._full_length * (1.0 / np.array(audits) - 1.0)
        # At most its error longer than expected, but no longer than the physical bound, unless it
        # is known to be.
        longest = np.exp(np.maximum(mean, np.minimum(mean + error, curves.x)))
        # Credit may be spent over many iterations.
        credit = max(0.0, left - _RISK)
        allowed = self._aim + credit / np.maximum(_SPREAD, lengths)
        # A value may be tried while it is not surely too slow; even if it is as slow as its error
        # allows, a block of it must not owe more than may be risked.
        may_be_fast = np.exp(mean - _SURE * error) <= allowed
        may_be_risked = longest <= allowed + min(left, _RISK) / lengths
        # In debt, or before the power at full clocks is known, nothing is tried.
        may_try = left > 0.0 and curves.top_w is not None
        is_possible = may_be_fast & may_be_risked & may_try
        is_possible[0] = True
        # Doubt counts in a value's favour, so that what might be the best is measured.
        cost_error = np.hypot(error, curves.power.error)
        log_costs = mean + curves.power.mean - _SURE * cost_error
        return Choices(lengths, longest, log_costs, is_possible)

    def _full_turn(self, iteration: int, left: float) -> Turn:
        """Return one more block at full clocks, where so many iterations may still be risked."""
        # Full clocks follow on full clocks, so the comparison goes on with a new block.
        self._blocks.append(Block.empty(0, self._blocks[-1].end))
        return Turn(0, self._full_length, iteration, "paying" if left <= 0.0 else "following")

    def _planned_turn(self, iteration: int, index: int, mean_length: float) -> Turn:
        """Return a block at a planned value, of so many iterations in the mean."""
        # The length is drawn, so that no period of the training always meets full clocks.
        length = math.ceil(mean_length * self._random.uniform(0.5, 1.5))
        is_known = index in self._curves.measured
        return Turn(index, length, iteration, "following" if is_known else "learning")

    def _burst(self, length: int, longest: float) -> float:
        """Return how many iterations at full clocks a rank may owe in a planned block: noise and
        the planned slowdown are no debt before the block is compared.

        Args:
            length: Its iterations.
            longest: How long one may take, as a multiple of one at full clocks.
        """
        allowed = self._slowdown + self._max_slowdown
        return self._likely_debt(length, OUTLIER) + length * max(0.0, longest - allowed)

    @property
    def best(self) -> Best:
        """The value of least energy among those that are as fast as agreed, down to the lowest one
        that was measured.
        """
        return self._curves.best(self._aim)

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
        curves = self._curves
        if curves.top_w is None:
            return ()
        time_s = self._seconds(self._turn.index)
        full_s = self._seconds(0)
        full_w = curves.top_w * math.exp(curves.power.mean[0])
        watts = curves.top_w * math.exp(curves.power.mean[self._turn.index])
        row = RankRow(time_s, time_s * watts, full_s, full_s * full_w, 0.0)
        return ((row,),) * self.job.pipelines

    def learned(self) -> Profile:
        """Return what was learnt as a profile, with the values whose energy was measured.

        Raises:
            UsageError: If the highest value was not measured yet.
        """
        job = self.job
        curves = self._curves
        top_w = curves.top_w
        if top_w is None:
            raise UsageError("no iteration at full clocks was measured; there is no profile yet")
        # The highest value is the reference of all others, so it is known as well.
        rows = []
        for index in sorted({0, *curves.measured}):
            time_s = self._seconds(index)
            energy_j = time_s * top_w * math.exp(curves.power.mean[index])
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
