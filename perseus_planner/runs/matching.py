"""Matches clock changes to the computations of an iteration that they were for.

A change names the position of the rank's program that it was made for, but not the iteration, and
no change is made for a clock that is in force. Successive computations at one clock need one
change, made while any of them runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.runs.records import ComputationRecord

if TYPE_CHECKING:
    from perseus_planner.schedules import Computation


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
    index = _CallIndex(calls, in_force)
    requests = {} if clocks is None else dict(_requests(clocks, spans_s, index, first_asked_s))
    achieved = _achieved_mhz(spans_s, calls, samples)
    records, no_request = [], _Request()
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
    for first, last in _segments(clocks):
        asked_s = spans_s[first - 1][1] if first else first_asked_s
        since_s = spans_s[first - 1][0] if first else -math.inf
        call = index.find(range(first, last + 1), clocks[first], since_s, spans_s[last][1])
        if call is not None:
            # Times of the device are not exact: the end of a computation may seem later than the
            # request that follows.
            yield first, _Request(min(asked_s, call.seen_s), call.begun_s, call.ended_s)
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
        self._calls, self._before = calls, before
        self._begun_s = [call.begun_s for call in calls]
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
    ordered = sorted(
        [*samples, *(ClockSample(call.begun_s, call.before_mhz) for call in calls)], key=_time_s
    )
    for begin_s, end_s in spans_s:
        index = bisect_left(ordered, (begin_s + end_s) / 2, key=_time_s)
        yield ordered[index].clock_mhz if index < len(ordered) else None


def _time_s(sample: ClockSample) -> float:
    return sample.time_s
