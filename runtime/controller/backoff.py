"""When to try again what has failed: after half a minute, then less and less often."""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""The pause after the first failure, and the longest one. Each failure doubles the pause, until
none comes for `LONGEST_PAUSE_S` after a pause."""


class Backoff:
    """The pauses between failures and the next try. All times are in seconds of one clock."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._due_s: float | None = None

    def fail(self, now_s: float) -> None:
        """Note a failure: the next try is due a pause later."""
        is_first = self._due_s is None or now_s > self._due_s + LONGEST_PAUSE_S
        self._pause_s = FIRST_PAUSE_S if is_first else min(2.0 * self._pause_s, LONGEST_PAUSE_S)
        self._due_s = now_s + self._pause_s

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last failure is over; True if nothing has failed."""
        return self._due_s is None or now_s >= self._due_s
