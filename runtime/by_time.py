"""Clocks by time: where only the begin and the end of an iteration are seen, its changes are made
at offsets from the begin, by the controller's clock, which is monotonic.

The offsets are those of the plan's replay, multiplied by how much longer iterations take than
replayed. A change to a higher clock is made a guard early, one to a lower clock a guard late: the
clock in force is then at least the plan's as long as the iteration is where it is expected within
the guard. A segment at a low clock that is shorter than two guards is left out. What runs before a
change makes it uncertain, so the guard grows with the offset.

This is the rank's part, on its background thread; `controller/armed.py` is the controller's.
`python benchmarks/run.py --only 46` runs both on simulated GPUs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan

MAX_CHANGES = 4
"""Most changes of a rank's clock in an iteration that are made by time, by number 46 of the
benchmarks: plans with any number lose a third of what they save with hooks.
"""

MEASURED = 8
"""Iterations that are measured at full clocks before the first one runs by time, by hand."""

LEAST_GUARDS = 10.0
"""Iterations that are shorter than so many guards run at one clock, by number 46."""

_TIMER_DEVIATIONS = 1.5
"""Standard deviations of setting a clock and of seeing a begin, together, that a guard is long. By
number 46: with 2, iterations of .24 s keep 64 % of what hooks save for 74 %, and are .12 % late for
.22 % (by hooks 1.14 %), as an error costs only the difference of two clocks.
"""
_LEAST_SHARE = 0.005  #: guard over the iteration time, by number 46
_WEIGHT = 0.2  #: of the newest iteration in the running mean of times, by number 46
_KEPT = 32  #: iterations, settings and begins of which standard deviations are taken, by hand
_KNOWN = 8  #: iterations that make a standard deviation, by hand
_LEFT_OUT = 16  #: one of so many values, the farthest, is left out of a standard deviation
_MISSES = 3.0  #: standard deviations by which one iteration moves the mean at most, by hand
_GAPS = 2.5  #: standard deviations from the usual pause that are still usual, by number 46
_MOST_GAPS = 4.0  #: the same as long as they are so small a share of the iteration, by number 46
_MOST_SHARE = 0.05
# What is assumed before enough are measured: seconds to set a clock and for its begin to be seen
_SETTING_S = 0.005
_SETTING_DEVIATION_S = 0.002
_BEGIN_DEVIATION_S = 0.005
_FOREVER_NS = 1 << 62  #: the end of the last clock of an iteration, which ends when it does

Row = list[tuple[int, int]]
"""A row of `LatestStarts` with clocks by time: the least and the longest time, in nanoseconds, from
the end of an iteration to the begin of the next, as they are usual; then each clock, with when the
next one is due, in nanoseconds after the begin of the iteration was seen."""


class Segment(NamedTuple):
    """Computations of a rank in a row that have one clock."""

    clock: int  #: MHz or watts
    begin_s: float  #: When the first one begins, seconds after the iteration
    end_s: float  #: When the last one ends


def segments_of(plan: Plan, rank: int) -> tuple[Segment, ...]:
    """Return what a rank of a plan's pipeline runs, in order, by the plan's replay."""
    segments: list[Segment] = []
    spans = plan.timeline.spans
    for computation in plan.schedule.ranks[rank]:
        name = str(computation)
        clock = plan.clocks[name]
        span = spans[name]
        if segments and segments[-1].clock == clock:
            segments[-1] = segments[-1]._replace(end_s=span.end_s)
        else:
            segments.append(Segment(clock, span.start_s, span.end_s))
    return tuple(segments)


class Guard(NamedTuple):
    """By how much a change is made early or late, by its offset from the begin of the iteration."""

    timer_s: float  #: for setting a clock and seeing the begin, which no offset changes
    whole_s: float = 0.0  #: for what runs before a change, at the end of the iteration
    iteration_s: float = 1.0

    def at(self, offset_s: float) -> float:
        """Return the guard of a change.

        The errors of the computations before it add up, so their standard deviation grows at most
        with the offset, and with its square root if they are independent; the root is the larger.
        """
        share = min(1.0, max(0.0, offset_s / self.iteration_s))
        return max(self.timer_s, self.whole_s * math.sqrt(share))

    def widened(self, factor: float) -> Guard:
        """Return a guard that is so many times as long."""
        return Guard(factor * self.timer_s, factor * self.whole_s, self.iteration_s)

    def at_scale(self, scale: float) -> Guard:
        """Return the guard of times that are divided by a scale."""
        return Guard(self.timer_s / scale, self.whole_s / scale, self.iteration_s / scale)


def guarded(segments: Sequence[Segment], guard: Guard) -> list[tuple[int, float]]:
    """Return the clocks of an iteration, each with when the next one is to be in force, in seconds
    after its begin; infinity for the last one.

    A higher clock is in force a guard before its first computation begins, or when the last one
    before it ends if that is earlier; a lower one a guard after that end, or when its own first
    computation begins if that is later: changes in the middle of a wait are the safest, and a GPU
    that waits draws about as much at any clock.
    """
    # The first clock holds from before the iteration on, the last one beyond its end.
    changes_s = [-math.inf]
    for before, after in pairwise(segments):
        rises = after.clock > before.clock
        # A clock that is too low makes computations late and one that is too high only costs
        # energy: so both guards err upwards.
        early_s = min(before.end_s, after.begin_s - guard.at(after.begin_s))
        late_s = max(after.begin_s, before.end_s + guard.at(before.end_s))
        changes_s.append(early_s if rises else late_s)
    changes_s.append(math.inf)
    # Where a segment is too short, those around it overlap: the highest clock counts.
    spans_s = list(pairwise(changes_s))
    clocks: list[tuple[int, float]] = []
    for begin_s, end_s in pairwise(sorted(set(changes_s))):
        clock = max(
            segment.clock
            for segment, span_s in zip(segments, spans_s, strict=True)
            if span_s[0] <= begin_s and end_s <= span_s[1]
        )
        if clocks and clocks[-1][0] == clock:
            clocks[-1] = clock, end_s
        else:
            clocks.append((clock, end_s))
    return clocks


@dataclass(frozen=True)
class Timing:
    """What is known of the iterations of a rank, with which its clocks are timed."""

    measured: int = 0  #: Number of iterations
    scale: float = 1.0  #: How long what is replayed takes, over its replay: a running mean
    iteration_s: float = 0.0  #: Seconds of an iteration: the same mean
    deviation_s: float = 0.0  #: Standard deviation of measured iteration times
    #: Mean and standard deviation of the seconds until a clock is set that was due.
    setting_s: float = _SETTING_S
    setting_deviation_s: float = _SETTING_DEVIATION_S
    #: Mean and standard deviation of the seconds after which a begin is seen.
    begin_s: float = 0.0
    begin_deviation_s: float = _BEGIN_DEVIATION_S
    #: The pause before an iteration, seconds: as it usually is, and its standard deviation; None
    #: until enough were measured.
    pause_s: float | None = None
    pause_deviation_s: float = 0.0

    @property
    def guard(self) -> Guard:
        """By how much changes are made early or late so that nothing runs at too low a clock."""
        timer_s = math.hypot(self.setting_deviation_s, self.begin_deviation_s)
        whole_s = max(_LEAST_SHARE * self.iteration_s, self.deviation_s)
        return Guard(_TIMER_DEVIATIONS * timer_s, whole_s, self.iteration_s)

    @property
    def guard_s(self) -> float:
        """The largest guard: that of a change at the end of the iteration."""
        guard = self.guard
        return max(guard.timer_s, guard.whole_s)

    @property
    def is_measured(self) -> bool:
        """Whether enough is known to time clocks."""
        return self.measured >= MEASURED and self.pause_s is not None

    @property
    def is_too_short(self) -> bool:
        """Whether iterations are too short for clocks by time."""
        return self.iteration_s < LEAST_GUARDS * self.guard_s

    def scaled(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments when they are expected."""
        return [
            Segment(segment.clock, self.scale * segment.begin_s, self.scale * segment.end_s)
            for segment in segments
        ]

    def row(self, segments: Sequence[Segment]) -> Row:
        """Return the row by which the controller sets these segments' clocks."""
        guard_s = self.guard_s
        # A change is in force so long after it was due, and due so long after the begin is seen.
        lead_s = self.setting_s + self.begin_s
        pause_s = (self.pause_s or 0.0) + self.begin_s
        seen_s = math.hypot(self.pause_deviation_s, self.begin_deviation_s)
        usual_s = min(_MOST_GAPS * seen_s, _MOST_SHARE * self.iteration_s)
        tolerance_s = max(guard_s, _GAPS * seen_s, usual_s)
        row = [(_ns(max(0.0, pause_s - tolerance_s)), _ns(pause_s + tolerance_s))]
        for clock, until_s in guarded(self.scaled(segments), self.guard):
            due_ns = _FOREVER_NS if math.isinf(until_s) else _ns(until_s - lead_s)
            if due_ns > 0:
                row.append((clock, due_ns))
        return row


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class EdgeTimes:
    """Measures the iterations of a rank, of which begin and end are known.

    Attributes:
        timing: What is known now; never changed, only replaced.
    """

    def __init__(self) -> None:
        self.timing = Timing()
        self._misses: deque[float] = deque(maxlen=_KEPT)
        self._pauses_s: deque[float] = deque(maxlen=_KEPT)
        self._settings_s: deque[float] = deque(maxlen=_KEPT)
        self._begins_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, time_s: float, expected_s: float) -> None:
        """Take the time of an iteration that ran as planned.

        Args:
            time_s: Seconds from its begin to its end.
            expected_s: The same by the replay of what it ran by.
        """
        timing = self.timing
        ratio = time_s / expected_s
        miss = ratio - timing.scale
        if timing.measured >= _KNOWN:
            # One iteration that was held up is no news of the next: it counts as far as usual.
            most = _MISSES * max(timing.deviation_s, _LEAST_SHARE * timing.iteration_s)
            most /= expected_s
            miss = min(max(miss, -most), most)
        if timing.measured:  # beside what was expected, so that slow drifts widen no guard
            self._misses.append(ratio - timing.scale)
        measured = timing.measured + 1
        # A mean of all first ones, then a running one
        weight = max(_WEIGHT, 1.0 / measured)
        scale = timing.scale + weight * miss
        deviation = _deviation(self._misses, _KNOWN - 1) or 0.0
        self.timing = replace(
            timing,
            measured=measured,
            scale=scale,
            iteration_s=scale * expected_s,
            deviation_s=deviation * expected_s,
        )

    def add_pause(self, pause_s: float) -> None:
        """Take the seconds from the end of an iteration to the begin of the next."""
        self._pauses_s.append(pause_s)
        if len(self._pauses_s) >= MEASURED - 1:
            # By the median and the median miss, as a pause for a checkpoint is none of the usual.
            middle_s = median(self._pauses_s)
            miss_s = median(abs(each_s - middle_s) for each_s in self._pauses_s)
            deviation_s = 1.4826 * miss_s  # of normal errors
            self.timing = replace(self.timing, pause_s=middle_s, pause_deviation_s=deviation_s)

    def add_setting(self, setting_s: float) -> None:
        """Take the seconds from when a change was due until it was in force."""
        self._settings_s.append(setting_s)
        deviation_s = _deviation(self._settings_s)
        if deviation_s is not None:
            mean_s = fmean(self._settings_s)
            self.timing = replace(self.timing, setting_s=mean_s, setting_deviation_s=deviation_s)

    def add_begin(self, delay_s: float) -> None:
        """Take the seconds from the begin of an iteration until it was seen."""
        self._begins_s.append(delay_s)
        deviation_s = _deviation(self._begins_s)
        if deviation_s is not None:
            mean_s = fmean(self._begins_s)
            self.timing = replace(self.timing, begin_s=mean_s, begin_deviation_s=deviation_s)


def _deviation(values: Sequence[float], least: int = _KEPT) -> float | None:
    """Return the standard deviation of values, but for the farthest of every `_LEFT_OUT`: one
    iteration that was held up does not widen the guard of the next ones. None if they are fewer
    than `least`: few may say by chance that iterations are too short, and then none are added.
    """
    if len(values) < least:
        return None
    middle = median(values)
    nearest = sorted(values, key=lambda value: abs(value - middle))
    kept = len(values) - len(values) // _LEFT_OUT
    return pstdev(nearest[:kept])
