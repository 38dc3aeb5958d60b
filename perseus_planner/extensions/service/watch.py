"""A watchdog of the service's threads: which of them has ended, or has been at one thing for too
long. What it finds stands behind `/readyz`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK_S = 15.0
"""How long one change may be written, or one tick take: a file that another process has locked is
given up after 10 s. By hand."""


class Watchdog:
    """Threads that have to live as long as the service does, and what they are doing.

    Args:
        monotonic_s: A clock that nobody sets.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._threads: list[threading.Thread] = []
        self._since_s: dict[str, float] = {}

    def watch(self, thread: threading.Thread | None = None) -> None:
        """Watch a thread; by default the one that calls this."""
        self._threads.append(thread or threading.current_thread())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Note that this thread is at one thing in the block."""
        name = threading.current_thread().name
        self._since_s[name] = self._monotonic_s()
        try:
            yield
        finally:
            del self._since_s[name]

    @property
    def problem(self) -> str | None:
        """Which thread has ended or is stuck, in words; None if all are well."""
        for thread in self._threads:
            if not thread.is_alive():
                return f"its thread {thread.name} has ended; start the service again"
        now_s = self._monotonic_s()
        for name, since_s in list(self._since_s.items()):
            if now_s - since_s > STUCK_S:
                return f"its thread {name} has been at one thing for {now_s - since_s:.0f} s"
        return None
