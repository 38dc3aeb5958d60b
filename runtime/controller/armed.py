"""The clocks by time of one rank (`runtime/by_time.py`), as the controller makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Due(NamedTuple):
    """A clock that is due."""

    place: int  #: Which one of the iteration, from 0
    clock: int  #: MHz or watts
    due_ns: int  #: When it was due


class ArmedClocks:
    """The clocks by time of one rank, as the controller makes them. All times are nanoseconds of
    the monotonic clock.

    They are armed when an iteration begins, and only if it begins as long after the end of the one
    before as is usual: otherwise something else ran in between, or what was seen is no begin, and
    the iteration runs at full clocks.
    """

    def __init__(self) -> None:
        self._dues: deque[Due] = deque()
        self._ended_ns: int | None = None  #: when the last iteration ended, if that is known
        self._is_inside = False

    @property
    def next_ns(self) -> int | None:
        """When the next clock is due; None if none is."""
        return self._dues[0].due_ns if self._dues else None

    def begin(self, now_ns: int, looked_ns: int, row: Sequence[tuple[int, int]] | None) -> bool:
        """Begin an iteration; return whether its clocks are armed.

        Args:
            now_ns: When its begin was seen.
            looked_ns: When it was looked for before: if no end of the iteration before was seen, it
                has been since then.
            row: Its clocks; None if they are not known.
        """
        # Inside means that no end was seen, so the last look is the latest that it can have been.
        ended_ns = looked_ns if self._is_inside else self._ended_ns
        self._is_inside = True
        # Clocks of an iteration that was cut off must not be set in the next one.
        self._dues.clear()
        if row is None or ended_ns is None:
            return False
        (least_ns, longest_ns), *clocks = row
        # A pause of another length means that something ran in between, such as an evaluation.
        if not least_ns <= now_ns - ended_ns <= longest_ns:
            return False
        due_ns = now_ns
        before = 0
        for position, (clock, until_ns) in enumerate(clocks):
            if clock != before:  # rows repeat their last entry
                self._dues.append(Due(position, clock, due_ns))
            before = clock
            due_ns = now_ns + until_ns
        return True

    def take(self, now_ns: int) -> Due | None:
        """Return the clock that is due by now, the last one if there are several; None if no other
        one is due than before.
        """
        due = None
        while self._dues and self._dues[0].due_ns <= now_ns:
            due = self._dues.popleft()
        return due

    def end(self, now_ns: int) -> None:
        """Note that the iteration has ended, if one has begun."""
        if self._is_inside:
            self._ended_ns = now_ns
        self._is_inside = False
        self._dues.clear()

    def cancel(self) -> None:
        """Forget everything, as what runs is not timed."""
        self._ended_ns = None
        self._is_inside = False
        self._dues.clear()
