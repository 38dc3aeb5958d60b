"""Marks the progress of a rank: requests the next clock and takes times, without ever waiting for
the device.

A rank and the clock controller share one number in memory, the clock request. The rank writes what
it wants now, and the controller acts on the latest value. On the CPU it is written at the call; on
CUDA, where the training thread runs ahead of the device, the device itself writes it in the order
of its stream (`cuda_marks.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.engines.guard import Span, Stamp

NO_REQUEST = 0
"""The clock request of a rank that wants no clock, so that its GPU is reset."""

KEPT = 64
"""How many iterations are kept until their times are read."""


_AGAIN = 1 << 63

OUTSIDE = 1 << 62
"""The part of a request that is written outside of computations, for the clock of the next one."""

BEGUN = 1 << 61
"""The part of a request that is written when its computation begins, if ranks catch up."""

BY_TIME = 1 << 60
"""The part of a request whose table has clocks by time (`by_time.py`): nothing is wanted before its
computation begins.
"""


def clock_request(
    position: int, value: int, *, again: bool = False, table: int = 0, by_time: bool = False
) -> int:
    """Pack a request for `value` (MHz or watts), for the computation at `position` of the rank's
    program.

    With `again` it is another number for the same: a program of one computation turns it with each
    iteration, so that the controller sees them begin. `table` is the number of the table by which a
    rank that is late gets a faster clock (`LatestStarts`); 0 for none. With `by_time` its first row
    has the clocks of the whole iteration (`BY_TIME`).
    """
    parts = again * _AGAIN | by_time * BY_TIME
    return parts | (position + 1) << 32 | table << 16 | value


def parse_clock_request(request: int) -> tuple[int | None, int]:
    """Return the position and the value of a request; (None, 0) for `NO_REQUEST`."""
    number = (request & ~(_AGAIN | OUTSIDE | BEGUN | BY_TIME)) >> 32
    # Positions are packed from 1 on, so that 0 says that nothing is requested.
    return number - 1 if number else None, request & 0xFFFF


def captured_request(position: int) -> int:
    """Pack a request that is captured in a CUDA graph: each replay writes it again, whatever the
    plan is then. So it says the position alone; the value is in the table that was named last.
    """
    return clock_request(position, 0)


def is_captured(request: int) -> bool:
    """Whether a request leaves the value to the table that was named last."""
    return not request & 0xFFFFFFFF


def table_of(request: int) -> int:
    """Return the number of the table that a request names; 0 for none."""
    return request >> 16 & 0xFFFF


def is_turned(request: int, before: int) -> bool:
    """Whether of two requests one is `again`, and the other is not."""
    return bool((request ^ before) & _AGAIN)


@dataclass(frozen=True)
class IterationTimes:
    """When one iteration ran on this rank, in nanoseconds of the monotonic clock."""

    number: int  #: Number of the iteration
    begin_ns: int  #: When it began
    #: (begin, end) of each computation, in the order in which they ran.
    spans_ns: tuple[tuple[int, int], ...]
    end_ns: int  #: When it ended
    #: Whether it follows an evaluation, of which it may hold a part: its times tell nothing.
    follows_evaluation: bool = False


class Marks:
    """Requests clocks and takes times; all methods but `finished` and `renew` are called on the
    training thread.

    This is for devices on which a computation is done when its call returns.

    What runs for each computation is as little as can be: `now` is called twice, a span is
    appended, and `write` is called, all of which are functions of the interpreter.

    Attributes:
        now: Returns the `Stamp` of this moment.
        write: Called with 0 and a clock request; writes it when the device comes to this point.

    Args:
        shared: The clock request, as a memoryview of one unsigned 64-bit number.
    """

    def __init__(self, shared: memoryview) -> None:
        self.now: Callable[[], Stamp] = time.monotonic_ns
        self.write: Callable[[int, int], object] = shared.__setitem__
        self._requests: Sequence[int] = (NO_REQUEST,)
        self._number = 0
        self._follows_evaluation = False
        self._iteration_begin_ns = 0
        self._ended_s: float | None = 0.0
        self._spans_ns: list[tuple[int, int]] = []
        self._finished: deque[IterationTimes] = deque(maxlen=KEPT)

    def ended_s(self) -> float | None:
        """Return how long the iteration took that has just ended, in seconds; None if the device
        may still run it, or its time tells nothing.
        """
        return self._ended_s

    def load(self, requests: Sequence[int]) -> None:
        """Make `request(i)` mean `requests[i]` from now on."""
        self._requests = (*requests, NO_REQUEST)

    def request(self, index: int, part: int = 0) -> None:
        """Write the clock request with this index, or `NO_REQUEST` for -1, when the device comes
        to this point.

        Args:
            index: Of a request that was loaded.
            part: `OUTSIDE` for a clock for later, if other work comes first; `BEGUN` if its
                computation begins; else 0.
        """
        self.write(0, self._requests[index] | part)

    def capture(self, position: int) -> None:
        """Write the position of the computation that is next when the device comes to this point,
        again in each replay of the CUDA graph that is captured now.
        """
        self.write(0, captured_request(position))

    def begin_iteration(self, number: int, *, follows_evaluation: bool = False) -> list[Span]:
        """Mark the begin of an iteration; return the list to which its computations are added."""
        self._number = number
        self._follows_evaluation = follows_evaluation
        spans_ns = self._spans_ns = list[tuple[int, int]]()
        self._iteration_begin_ns = time.monotonic_ns()
        return spans_ns

    def end_iteration(self) -> None:
        """Mark the end of the iteration."""
        end_ns = time.monotonic_ns()
        time_s = (end_ns - self._iteration_begin_ns) / 1e9
        self._ended_s = None if self._follows_evaluation else time_s
        self._finished.append(
            IterationTimes(
                self._number,
                self._iteration_begin_ns,
                tuple(self._spans_ns),
                end_ns,
                self._follows_evaluation,
            )
        )

    def finished(self) -> list[IterationTimes]:
        """Return the times that have become known since the last call; never waits. For another
        thread.

        At most `KEPT` iterations are kept until then.

        Raises:
            GpuError: If the device no longer reports times, until `renew`.
        """
        iterations = []
        while self._finished:
            iterations.append(self._finished.popleft())
        return iterations

    def renew(self) -> None:
        """Mark again after an error of the device. For another thread.

        Raises:
            GpuError: If the device cannot be used.
        """
