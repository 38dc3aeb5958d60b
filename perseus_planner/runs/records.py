"""What a rank records of an iteration and of its computations.

Times are seconds since the epoch by the clock of the rank's node. A clock is in the unit of the
plan's control: MHz, or watts of a power limit. Achieved clocks are always in MHz.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.schedules import Computation

LATE = 0.1
"""A change is late if more than this share of the first computation that it is for had run
before it was set.
"""
_MAX_CHARACTERS = 300  #: of a deviation


@dataclass(frozen=True)
class ComputationRecord:
    """One computation."""

    iteration: int  #: Number of the iteration
    computation: Computation  #: What ran
    begin_s: float  #: When it began
    end_s: float  #: When it ended
    #: The clock that it should run at; None if no clock was requested for it.
    clock: int | None = None
    #: When that clock was first requested; None if it was in force already.
    asked_s: float | None = None
    #: When the call that set the clock began; None if another clock was requested before.
    set_begin_s: float | None = None
    set_end_s: float | None = None  #: When that call returned
    #: Achieved clock, read after most of the computation had run; None if it is not known.
    achieved_mhz: int | None = None

    @property
    def duration_s(self) -> float:
        """How long it ran, in seconds."""
        return self.end_s - self.begin_s

    @property
    def is_late(self) -> bool:
        """Whether its clock was set after more than `LATE` of it had run."""
        return self.set_end_s is not None and self.set_end_s - self.begin_s > LATE * self.duration_s

    @property
    def is_overtaken(self) -> bool:
        """Whether another clock was requested before its own was set."""
        return self.asked_s is not None and self.set_end_s is None


@dataclass(frozen=True, kw_only=True)
class ChangeStatistics:
    """Statistics of the clock changes of one rank in an iteration, and of its clocks."""

    changes_asked: int = 0  #: Number of clock changes that were requested
    changes_set: int = 0  #: Number of them that were made before another clock was requested
    #: Number of those made after more than `LATE` of the first computation had run.
    changes_late: int = 0
    #: Number of requested changes that were not made before another clock was requested.
    changes_overtaken: int = 0
    off_clock_s: float = 0.0  #: Seconds of computation before the requested clock was set
    #: Median seconds from the request of a clock to the return of the call that sets it; None if no
    #: clock was set.
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None  #: The same for the 99th percentile
    #: Mean requested clock, weighted by time, over the computations whose achieved clock is known;
    #: None if no achieved clock is known.
    clock: float | None = None
    #: Mean achieved clock of the same computations, weighted by time.
    achieved_mhz: float | None = None

    @classmethod
    def of(cls, computations: Sequence[ComputationRecord]) -> ChangeStatistics:
        """Return the statistics of an iteration; `computations` are in the order in which they
        ran.
        """
        asked = [each for each in computations if each.asked_s is not None]
        latencies_s = sorted(
            each.set_end_s - each.asked_s
            for each in asked
            if each.set_end_s is not None and each.asked_s is not None
        )
        known = [
            each
            for each in computations
            if each.clock is not None and each.achieved_mhz is not None
        ]
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
class IterationRecord(ChangeStatistics):
    """One iteration on one rank.

    A value that is not known is None.
    """

    iteration: int  #: Number of the iteration
    version: int | None  #: Version of the plan that it ran by; None if it ran without a plan
    pipeline: int  #: Number of the rank's pipeline, unique among the pipelines
    pipeline_rank: int  #: Rank in the pipeline
    begin_s: float  #: When it began
    end_s: float  #: When it ended
    busy_s: float  #: Seconds of its computations
    #: Seconds of its computations by the measurements in the plan; None if it did not run as
    #: planned.
    planned_busy_s: float | None = None
    energy_j: float | None = None  #: Joules of this rank's GPU from begin to end
    #: Joules of a GPU with all clocks at maximum, by the profile, in an iteration that takes as
    #: long: the mean over the GPUs of the pipeline. With the autopilot, the mean over the last
    #: iterations of this GPU that ran so. None if it did not run as planned.
    baseline_j: float | None = None
    temperature_c: float | None = None  #: Degrees Celsius at its end
    #: Throttle reason -> seconds in which it held the GPU back, for the reasons that the GPU
    #: counts.
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    deviation: str | None = None  #: What was not as planned; None if it ran as planned
    #: "measured" or "simulated", for energy, clocks and throttling; None if no GPU was read.
    origin: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "throttled_s", dict(self.throttled_s))
        if self.deviation is not None:
            one_line = " ".join(self.deviation.split()).encode(errors="replace").decode()
            object.__setattr__(
                self, "deviation", one_line.replace("\0", "")[:_MAX_CHARACTERS] or "unknown"
            )

    @property
    def time_s(self) -> float:
        """How long it took, in seconds."""
        return self.end_s - self.begin_s

    @property
    def is_as_planned(self) -> bool:
        """Whether it ran by a plan without a deviation."""
        return self.version is not None and self.deviation is None


def _off_clock_s(computations: Sequence[ComputationRecord]) -> float:
    seconds, until_s, clock = 0.0, -math.inf, None
    for each in computations:
        if each.asked_s is not None:
            until_s = math.inf if each.set_end_s is None else each.set_end_s
        elif each.clock != clock:  # the clock was in force already
            until_s = -math.inf
        clock = each.clock
        seconds += max(0.0, min(each.end_s, until_s) - each.begin_s)
    return seconds


def _percentile(sorted_values: Sequence[float], share: float) -> float | None:
    """Return the nearest of the sorted values; None if there are none."""
    return sorted_values[int(share * (len(sorted_values) - 1) + 0.5)] if sorted_values else None


def _mean_by_time(
    computations: Sequence[ComputationRecord], values: Sequence[float]
) -> float | None:
    weights_s = [each.duration_s for each in computations]
    whole_s = math.fsum(weights_s)
    return math.fsum(map(operator.mul, weights_s, values)) / whole_s if whole_s > 0 else None
