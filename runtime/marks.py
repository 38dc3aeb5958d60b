"""Where a rank is in its program: told to the clock controller, and timed, without ever waiting for the device.

A rank and the controller share one word of memory. The rank writes what it wants now; the controller looks at it and
acts on the latest value. On the CPU the word is written at the call; on CUDA, where the training thread runs ahead of
the device, by the device itself, in the order of its stream (`cuda_marks.py`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTHING = 0
"""The word of a rank that wants no clock: its GPU is reset."""

KEPT = 64
"""How many iterations are timed ahead of who reads the times."""


def word(place: int, value: int) -> int:
    """What a rank writes when `value` (MHz, or watts) is to hold for the computation at `place` of its program."""
    return (place + 1) << 32 | value


def place_and_value(written: int) -> tuple[int | None, int]:
    """Inverse of `word`; (None, 0) for `NOTHING`."""
    return (written >> 32) - 1 if written >> 32 else None, written & 0xFFFFFFFF


@dataclass(frozen=True)
class Timed:
    """When one iteration ran on this rank, nanoseconds of the monotonic clock.

    Attributes:
        number: of the iteration.
        begin_ns: when it began.
        spans_ns: (begin, end) of each computation, in the order in which they ran.
        end_ns: when it ended.
    """

    number: int
    begin_ns: int
    spans_ns: tuple[tuple[int, int], ...]
    end_ns: int


class Marks(Protocol):
    """How the hook tells and times; all but `finished` are called on the training thread."""

    def load(self, words: Sequence[int]) -> None:
        """From now on, `want(i)` means `words[i]`."""

    def want(self, index: int) -> None:
        """When the device comes to this point, write `words[index]`; `NOTHING` where the index is -1."""

    def begin_iteration(self, number: int) -> None:
        """Iteration `number` begins."""

    def begin(self) -> None:
        """A computation begins."""

    def end(self) -> None:
        """The computation that began last ends."""

    def end_iteration(self) -> None:
        """The iteration ends."""

    def finished(self) -> list[Timed]:
        """The iterations whose times are known by now and have not been given yet; never waits. For another thread.

        Where nobody asks, the times of `KEPT` iterations are kept.

        Raises:
            GpuError: the device tells no more.
        """


class HostMarks:
    """Marks where computations are done when their call returns.

    Args:
        shared: the word, as a memoryview of one unsigned 64-bit number.
    """

    def __init__(self, shared: memoryview) -> None:
        self._shared = shared
        self._words: Sequence[int] = ()
        self._number = 0
        self._iteration_begin_ns = 0
        self._begin_ns = 0
        self._spans_ns: list[tuple[int, int]] = []
        self._finished: deque[Timed] = deque(maxlen=KEPT)

    def load(self, words: Sequence[int]) -> None:
        """See `Marks.load`."""
        self._words = (*words, NOTHING)

    def want(self, index: int) -> None:
        """See `Marks.want`."""
        self._shared[0] = self._words[index]

    def begin_iteration(self, number: int) -> None:
        """See `Marks.begin_iteration`."""
        self._number, self._iteration_begin_ns, self._spans_ns = number, time.monotonic_ns(), []

    def begin(self) -> None:
        """See `Marks.begin`."""
        self._begin_ns = time.monotonic_ns()

    def end(self) -> None:
        """See `Marks.end`."""
        self._spans_ns.append((self._begin_ns, time.monotonic_ns()))

    def end_iteration(self) -> None:
        """See `Marks.end_iteration`."""
        spans_ns = tuple(self._spans_ns)
        self._finished.append(Timed(self._number, self._iteration_begin_ns, spans_ns, time.monotonic_ns()))

    def finished(self) -> list[Timed]:
        """See `Marks.finished`."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found
