"""What was measured of one iteration on one rank, and which clock change was for which computation.

Times are in seconds since the epoch, as the clock of the rank's node has it. What is called a clock here is in the unit
of the plan's control: MHz, or watts of a power limit; what was achieved is always in MHz.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.schedules import Computation

LATE = 0.1
"""A change is late when more than this share of the first computation that it is for was over before it was set."""
_LONGEST = 300  #: characters that are kept of what an engine did


@dataclass(frozen=True)
class ComputationRecord:
    """One computation that ran.

    Attributes:
        iteration: number of the iteration.
        computation: what ran.
        begin_s: when it began.
        end_s: when it ended.
        clock: what it was to run at; None: at no clock of its own.
        asked_s: when the GPU was first asked for that clock; None where it was in force, so that nothing was to be set.
        set_begin_s: when the call that set it began; None: there was none before another clock was asked for.
        set_end_s: when that call returned.
        achieved_mhz: the clock that was read after most of it had run; None: not known.
    """

    iteration: int
    computation: Computation
    begin_s: float
    end_s: float
    clock: int | None = None
    asked_s: float | None = None
    set_begin_s: float | None = None
    set_end_s: float | None = None
    achieved_mhz: int | None = None

    @property
    def duration_s(self) -> float:
        """How long it ran, seconds."""
        return self.end_s - self.begin_s

    @property
    def is_late(self) -> bool:
        """Whether its clock was set when more than `LATE` of it was over."""
        return self.set_end_s is not None and self.set_end_s - self.begin_s > LATE * self.duration_s

    @property
    def is_overtaken(self) -> bool:
        """Whether its clock was never set before another one was asked for."""
        return self.asked_s is not None and self.set_end_s is None


@dataclass(frozen=True, kw_only=True)
class RanChanges:
    """What the clock changes of one rank came to in an iteration, and what it ran at.

    Attributes:
        changes_asked: clock changes that were asked for.
        changes_set: those that were made before another clock was asked for.
        changes_late: those of them that were made when more than `LATE` of the first computation was over.
        changes_overtaken: those that were not made before another clock was asked for.
        off_clock_s: seconds of computation before the clock was set that was asked for.
        latency_p50_s: from when a clock was asked for until its call returned, median; None: none was set.
        latency_p99_s: the same, 99th percentile.
        clock: mean by time of the clocks that were asked for, over the computations whose achieved clock is known.
        achieved_mhz: mean achieved clock of these, by time; None, as `clock`: none is known.
    """

    changes_asked: int = 0
    changes_set: int = 0
    changes_late: int = 0
    changes_overtaken: int = 0
    off_clock_s: float = 0.0
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    clock: float | None = None
    achieved_mhz: float | None = None

    @classmethod
    def of(cls, computations: Sequence[ComputationRecord]) -> RanChanges:
        """What they came to in an iteration of `computations`, in the order in which they ran."""
        asked = [each for each in computations if each.asked_s is not None]
        latencies_s = sorted(
            each.set_end_s - each.asked_s for each in asked if each.set_end_s is not None and each.asked_s is not None
        )
        known = [each for each in computations if each.clock is not None and each.achieved_mhz is not None]
        return cls(
            changes_asked=len(asked),
            changes_set=len(latencies_s),
            changes_late=sum(each.is_late for each in asked),
            changes_overtaken=sum(each.is_overtaken for each in asked),
            off_clock_s=_off_clock_s(computations),
            latency_p50_s=_percentile(latencies_s, 0.50),
            latency_p99_s=_percentile(latencies_s, 0.99),
            clock=_mean_by_time(known, [each.clock or 0 for each in known]),
            achieved_mhz=_mean_by_time(known, [each.achieved_mhz or 0 for each in known]),
        )


@dataclass(frozen=True, kw_only=True)
class IterationRecord(RanChanges):
    """One iteration on one rank.

    Attributes:
        iteration: its number.
        version: of the plan that it ran by; None: by none.
        pipeline: which of the pipelines the rank is in, by a number that no other one has.
        pipeline_rank: which rank of that pipeline it is.
        begin_s: when it began.
        end_s: when it ended.
        busy_s: seconds of its computations.
        planned_busy_s: what they take by the measurements in the plan; None where it did not run as planned.
        energy_j: joules of this rank's GPU from begin to end; None: not known.
        temperature_c: degrees Celsius at its end; None: not known.
        throttled_s: reason -> seconds of it in which that held the GPU back, of the reasons that are counted.
        deviation: what was not as planned; None: nothing.
        origin: how energy, clocks and throttling come to be, "measured" or "simulated"; None: no GPU was read.
    """

    iteration: int
    version: int | None
    pipeline: int
    pipeline_rank: int
    begin_s: float
    end_s: float
    busy_s: float
    planned_busy_s: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    deviation: str | None = None
    origin: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "throttled_s", dict(self.throttled_s))
        if self.deviation is not None:
            one_line = " ".join(self.deviation.split()).encode(errors="replace").decode()
            object.__setattr__(self, "deviation", one_line.replace("\0", "")[:_LONGEST] or "not said")

    @property
    def time_s(self) -> float:
        """How long it took, seconds."""
        return self.end_s - self.begin_s

    @property
    def is_as_planned(self) -> bool:
        """Whether it ran by a plan, and as that says."""
        return self.version is not None and self.deviation is None


def _off_clock_s(computations: Sequence[ComputationRecord]) -> float:
    seconds, until_s, clock = 0.0, -math.inf, None
    for each in computations:
        if each.asked_s is not None:
            until_s = math.inf if each.set_end_s is None else each.set_end_s
        elif each.clock != clock:  # and so in force already
            until_s = -math.inf
        clock = each.clock
        seconds += max(0.0, min(each.end_s, until_s) - each.begin_s)
    return seconds


def _percentile(in_order: Sequence[float], share: float) -> float | None:
    """The nearest of the values in order; None where there are none."""
    return in_order[int(share * (len(in_order) - 1) + 0.5)] if in_order else None


def _mean_by_time(computations: Sequence[ComputationRecord], values: Sequence[float]) -> float | None:
    weights_s = [each.duration_s for each in computations]
    whole_s = math.fsum(weights_s)
    return math.fsum(map(operator.mul, weights_s, values)) / whole_s if whole_s > 0 else None
