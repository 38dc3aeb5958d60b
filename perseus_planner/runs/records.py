"""What a rank records of an iteration and of its computations.

Times are seconds since the epoch by the clock of the rank's node. A clock is in the unit of the
plan's control: MHz, or watts of a power limit. Achieved clocks are always in MHz.

Clock changes are matched to the computations that they were for. A change names the position of the
rank's program that it was made for, but not the iteration, and no change is made for a clock that
is in force. Successive computations at one clock need one change, made while any of them runs.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.base.units import Finite, Index

if TYPE_CHECKING:
    from perseus_planner.schedules import Computation

LATE = 0.1
"""A change is late if more than this share of the first computation that it is for had run
before it was set.
"""
PAUSE = 2.0
PAUSE_S = 1.0
"""The time after an iteration is a pause if it is longer than `PAUSE` times the iteration plus
`PAUSE_S`.
"""
_NOT_FOLLOWED = 1.05  #: times the requested clock above which the GPU has not followed it
_MAX_CHARACTERS = 300  #: of a deviation


@dataclass(frozen=True)
class ComputationRecord:
    """One computation."""

    iteration: Index  #: Number of the iteration
    computation: Computation  #: What ran
    begin_s: Finite  #: When it began
    end_s: Finite  #: When it ended
    #: The clock that it should run at; None if no clock was requested for it.
    clock: Index | None = None
    #: When that clock was first requested; None if it was in force already.
    asked_s: Finite | None = None
    #: When the call that set the clock began; None if another clock was requested before.
    set_begin_s: Finite | None = None
    set_end_s: Finite | None = None  #: When that call returned
    #: Achieved clock, read after most of the computation had run; None if it is not known.
    achieved_mhz: Index | None = None

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
class IterationRecord:
    """One iteration on one rank.

    A value that is not known is None.
    """

    iteration: Index  #: Number of the iteration
    version: Index | None  #: Version of the plan that it ran by; None if it ran without a plan
    pipeline: Index  #: Number of the rank's pipeline, unique among the pipelines
    pipeline_rank: Index  #: Rank in the pipeline
    begin_s: Finite  #: When it began
    end_s: Finite  #: When it ended
    busy_s: Finite  #: Seconds of its computations
    #: Seconds of its computations by the measurements in the plan; None if it did not run as
    #: planned.
    planned_busy_s: Finite | None = None
    energy_j: Finite | None = None  #: Joules of this rank's GPU from begin to end
    #: Mean requested clock, weighted by time, over the computations whose achieved clock is known;
    #: None if no achieved clock is known.
    clock: Finite | None = None
    #: Mean achieved clock of the same computations, weighted by time.
    achieved_mhz: Finite | None = None
    temperature_c: Finite | None = None  #: Degrees Celsius at its end
    changes_asked: Index = 0  #: Number of clock changes that were requested
    changes_set: Index = 0  #: Number of them that were made before another clock was requested
    #: Number of those made after more than `LATE` of the first computation had run.
    changes_late: Index = 0
    #: Number of requested changes that were not made before another clock was requested.
    changes_overtaken: Index = 0
    off_clock_s: Finite = 0.0  #: Seconds of computation before the requested clock was set
    #: Median seconds from the request of a clock to the return of the call that sets it; None if no
    #: clock was set.
    latency_p50_s: Finite | None = None
    latency_p99_s: Finite | None = None  #: The same for the 99th percentile
    #: "measured" or "simulated", for energy, clocks and throttling; None if no GPU was read.
    origin: str | None = None
    deviation: str | None = None  #: What was not as planned; None if it ran as planned
    #: Throttle reason -> seconds in which it held the GPU back, for the reasons that the GPU
    #: counts.
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    # Files of version 0.2 do not have the following.
    planned_s: Finite | None = None  #: Seconds of it by the plan; None if it did not run as planned
    #: When the next one began; None for the last, and where that is not known.
    next_s: Finite | None = None
    between_j: Finite | None = None  #: Joules of the GPU from its end to the begin of the next
    host_load: Finite | None = None  #: Load of the node in the last minute, for each of its CPUs
    gpu: str | None = None  #: Name of the rank's GPU
    #: Version of torch if it shards the rank's stages; None if they are not sharded by it.
    sharded_torch: str | None = None
    #: Joules of the GPU from begin to end by its power sensor, which is read about twice a second:
    #: it says little of one iteration. None if it cannot be read.
    sensor_j: Finite | None = None
    # Files of version 0.3 do not have the following.
    #: 1 if it follows an evaluation, of which it may hold a part: its times tell nothing, and its
    #: window counts as a pause.
    follows_evaluation: Index = 0
    precedes_evaluation: Index = 0  #: 1 if an evaluation comes after it
    #: Number of computations for which a clock below the highest was requested, or another mode.
    lowered: Index = 0
    #: Joules less than with all of them at full clocks, by the rows, in as much time: see
    #: `savings`. 0 where nothing was lowered; None if it is not known.
    saved_j: Finite | None = None
    saved_error_j: Finite = 0.0  #: Its standard error, as far as iterations share it
    saved_noise_j: Finite = 0.0  #: Its standard error, as far as it is this iteration's own
    #: What a service counts its plan by; None if the plan is of none.
    service_version: Index | None = None
    is_dry_run: Index = 0  #: 1 if no clock was set, as the job was a dry run

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
    def is_paused(self) -> bool:
        """Whether a pause, for example an evaluation, came after it."""
        return self.next_s is not None and (
            self.precedes_evaluation > 0 or is_pause(self.next_s - self.end_s, self.time_s)
        )

    @property
    def is_as_planned(self) -> bool:
        """Whether it ran by a plan without a deviation."""
        return self.version is not None and self.deviation is None


def is_pause(between_s: float, iteration_s: float) -> bool:
    """Whether `between_s` seconds after an iteration of `iteration_s` seconds are a pause."""
    return between_s > PAUSE * iteration_s + PAUSE_S


def change_statistics(computations: Sequence[ComputationRecord]) -> dict[str, Any]:
    """Return the fields of an `IterationRecord` about clock changes and clocks; `computations` are
    in the order in which they ran.
    """
    # Only requests are changes: a clock that was in force needs none.
    asked = [computation for computation in computations if computation.asked_s is not None]
    latencies_s = sorted(
        computation.set_end_s - computation.asked_s
        for computation in asked
        if computation.set_end_s is not None and computation.asked_s is not None
    )
    with_clocks = [
        computation
        for computation in computations
        if computation.clock is not None and computation.achieved_mhz is not None
    ]
    return {
        "changes_asked": len(asked),
        "changes_set": len(latencies_s),
        "changes_late": sum(computation.is_late for computation in asked),
        "changes_overtaken": sum(computation.is_overtaken for computation in asked),
        "off_clock_s": _off_clock_s(computations),
        "latency_p50_s": _percentile(latencies_s, 0.50),
        "latency_p99_s": _percentile(latencies_s, 0.99),
        **{
            name: _mean_by_time(
                with_clocks,
                [getattr(computation_record, name) for computation_record in with_clocks],
            )
            for name in ("clock", "achieved_mhz")
        },
    }


def followed_clocks(computations: Sequence[ComputationRecord], *, is_clock: bool) -> list[bool]:
    """Return for each computation whether its clock was set for it, as far as is known: not
    overtaken by another request, and not above it by what the GPU achieved.

    Args:
        computations: In the order in which they ran.
        is_clock: Whether their clocks are in MHz.
    """
    followed = []
    is_set = True
    # In the order of the program: a clock stays in force until another is set.
    clock = None
    for computation_record in computations:
        if computation_record.asked_s is not None:
            is_set = computation_record.set_end_s is not None
        elif computation_record.clock != clock:  # the clock was in force already
            is_set = True
        clock = computation_record.clock
        is_above = (
            is_clock
            and clock is not None
            and computation_record.achieved_mhz is not None
            and not computation_record.is_late  # else the reading may be from before
            and computation_record.achieved_mhz > _NOT_FOLLOWED * clock
        )
        followed.append(clock is not None and is_set and not is_above)
    return followed


def _off_clock_s(computations: Sequence[ComputationRecord]) -> float:
    seconds = 0.0
    # Until when the clock before it was in force; for ever, if its own was never set.
    until_s = -math.inf
    clock = None
    for computation in computations:
        if computation.asked_s is not None:
            until_s = math.inf if computation.set_end_s is None else computation.set_end_s
        elif computation.clock != clock:  # the clock was in force already
            until_s = -math.inf
        clock = computation.clock
        seconds += max(0.0, min(computation.end_s, until_s) - computation.begin_s)
    return seconds


def _percentile(sorted_values: Sequence[float], share: float) -> float | None:
    """Return the nearest of the sorted values; None if there are none."""
    return sorted_values[int(share * (len(sorted_values) - 1) + 0.5)] if sorted_values else None


def _mean_by_time(
    computations: Sequence[ComputationRecord], values: Sequence[float]
) -> float | None:
    weights_s = [computation.duration_s for computation in computations]
    whole_s = math.fsum(weights_s)
    return math.fsum(map(operator.mul, weights_s, values)) / whole_s if whole_s > 0 else None


class SetCall(NamedTuple):
    """A call that set a GPU to another value; its times are by the clock of the computations."""

    position: int | None  #: in the rank's program, for which it was made; None for a reset
    value: int  #: MHz or watts; 0 for a reset
    seen_s: float  #: when the request was seen
    begun_s: float  #: when the call began
    ended_s: float  #: when the call returned
    before_mhz: int | None  #: achieved clock right before; None if it is not known


class ClockSample(NamedTuple):
    """An achieved clock that was read."""

    time_s: float
    clock_mhz: int | None


def match_changes(
    iteration: int,
    computations: Sequence[Computation],
    clocks: Sequence[int] | None,
    spans_s: Sequence[tuple[float, float]],
    calls: Sequence[SetCall],
    *,
    first_asked_s: float,
    in_force: int | None,
    samples: Sequence[ClockSample] = (),
) -> tuple[ComputationRecord, ...]:
    """Return the computations of one rank in an iteration, with the changes made for them; O(n log
    n).

    Args:
        iteration: Number of the iteration.
        computations: What ran, in order.
        clocks: The requested clock of each computation; None if no clocks were requested.
        spans_s: When each computation began and ended.
        calls: Calls that set the rank's GPU, in order, from the middle of the last computation of
            the previous iteration on.
        first_asked_s: When the clock of the first computation was requested; the clock of any other
            computation is requested when the one before it ends.
        in_force: The clock that was set before the first of `calls`; None if it is not known.
        samples: Clocks that were read in addition to those of `calls`.
    """
    # Calls are found by position and time, as they do not name their iteration.
    index = _CallIndex(calls, in_force)
    requests = {} if clocks is None else dict(_requests(clocks, spans_s, index, first_asked_s))
    achieved = _achieved_mhz(spans_s, calls, samples)
    records = []
    no_request = _Request()
    for position, (computation, span, mhz) in enumerate(
        zip(computations, spans_s, achieved, strict=True)
    ):
        clock = None if clocks is None else clocks[position]
        request = requests.get(position, no_request)
        records.append(ComputationRecord(iteration, computation, *span, clock, *request, mhz))
    return tuple(records)


def _requests(
    clocks: Sequence[int],
    spans_s: Sequence[tuple[float, float]],
    index: _CallIndex,
    first_asked_s: float,
) -> Iterator[tuple[int, _Request]]:
    """Yield the positions for which a change was requested, with the request."""
    # Neighbours at one clock need one change.
    for first, last in _segments(clocks):
        # A clock is requested when the computation before ends.
        asked_s = spans_s[first - 1][1] if first else first_asked_s
        # A call for it cannot have been seen before that computation began.
        since_s = spans_s[first - 1][0] if first else -math.inf
        call = index.find(range(first, last + 1), clocks[first], since_s, spans_s[last][1])
        if call is not None:
            # Times of the device are not exact: the end of a computation may seem later than the
            # request that follows.
            yield first, _Request(min(asked_s, call.seen_s), call.begun_s, call.ended_s)
        # Without a call the clock was in force already, or the change was never made.
        elif index.in_force(asked_s) != clocks[first]:
            yield first, _Request(asked_s)


class _Request(NamedTuple):
    """When the clock of a computation was requested, and when the call that set it began and
    returned.
    """

    asked_s: float | None = None
    set_begin_s: float | None = None
    set_end_s: float | None = None


class _CallIndex:
    """Finds calls by position and by time."""

    def __init__(self, calls: Sequence[SetCall], before: int | None) -> None:
        self._calls = calls
        self._before = before
        self._begun_s = [call.begun_s for call in calls]
        # Several calls may be for one position, in several iterations.
        self._by_position: dict[int | None, list[SetCall]] = {}
        for call in calls:
            self._by_position.setdefault(call.position, []).append(call)

    def find(self, positions: range, value: int, since_s: float, until_s: float) -> SetCall | None:
        """Return the call to set `value` that was made for one of the positions and seen in this
        span of time.
        """
        calls = (call for position in positions for call in self._by_position.get(position, ()))
        return next(
            (call for call in calls if call.value == value and since_s <= call.seen_s <= until_s),
            None,
        )

    def in_force(self, at_s: float) -> int | None:
        """Return the value that was set last before `at_s`."""
        count = bisect_right(self._begun_s, at_s)
        return self._calls[count - 1].value if count else self._before


def _segments(clocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each segment of equal clocks."""
    first = 0
    for position in range(1, len(clocks) + 1):
        if position == len(clocks) or clocks[position] != clocks[first]:
            yield first, position - 1
            first = position


def _achieved_mhz(
    spans_s: Sequence[tuple[float, float]], calls: Sequence[SetCall], samples: Sequence[ClockSample]
) -> Iterator[int | None]:
    """Yield the first clock that was read after the middle of each computation: no call was made
    in between.
    """
    # Each call reads the clock right before it changes it.
    ordered = sorted(
        [*samples, *(ClockSample(call.begun_s, call.before_mhz) for call in calls)], key=_time_s
    )
    for begin_s, end_s in spans_s:
        index = bisect_left(ordered, (begin_s + end_s) / 2, key=_time_s)
        yield ordered[index].clock_mhz if index < len(ordered) else None


def _time_s(sample: ClockSample) -> float:
    return sample.time_s
