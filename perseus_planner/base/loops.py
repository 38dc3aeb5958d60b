"""Background work: a thread that calls a function again and again, and when to try again after a
failure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger("perseus_planner")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""The pause after the first failure, and the longest one. Each failure doubles the pause, until
none comes for `LONGEST_PAUSE_S` after a pause."""


class Backoff:
    """The pauses between failures and the next try. All times are in seconds of one clock.

    Args:
        first_s: The pause after the first failure.
        longest_s: The longest pause.
    """

    def __init__(self, first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._pause_s = 0.0
        self._due_s: float | None = None

    def fail(self, now_s: float) -> None:
        """Note a failure: the next try is due a pause later."""
        is_first = self._due_s is None or now_s > self._due_s + self._longest_s
        self._pause_s = self._first_s if is_first else min(2.0 * self._pause_s, self._longest_s)
        self._due_s = now_s + self._pause_s

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last failure is over; True if nothing has failed."""
        return self._due_s is None or now_s >= self._due_s


class Loop:
    """A daemon thread that calls `step` every `period_s` seconds, and at once when it is woken.

    Args:
        step: What is done; returns the seconds until the next call, or None for `period_s`.
        name: Name of the thread.
        period_s: Seconds between calls; None to be called only when woken.
        on_error: Called with an exception of `step`, which ends the loop; by default it is logged.
    """

    def __init__(
        self,
        step: Callable[[], float | None],
        name: str,
        period_s: float | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._step, self._period_s = step, period_s
        self._on_error = on_error
        self._woken = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Loop:
        """Start the thread."""
        self._thread.start()
        return self

    def wake(self) -> None:
        """Have `step` called now, or once more if it runs."""
        self._woken.set()

    def stop(self, limit_s: float | None = None) -> bool:
        """End the loop after the call that runs; may be repeated, and called from the loop itself.

        Returns:
            Whether the thread has ended within `limit_s` seconds; None waits for it.
        """
        self._is_ending = True
        self._woken.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                pause_s = self._step()
                self._woken.wait(self._period_s if pause_s is None else pause_s)
                self._woken.clear()
        except BaseException as error:
            if self._on_error is None:
                _LOG.exception("%s ended", self._thread.name)
            else:
                self._on_error(error)
