"""Who is notified when: callbacks for new versions, and timers for decisions that time alone may
change.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections.abc import Callable

_SPARE = 1024  # outdated heap entries that are tolerated besides as many as there are timers

_log = logging.getLogger(__name__)


class Subscriptions:
    """Callbacks that hear of new versions and of jobs that end. It may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[str, int], None]] = {}

    def add(self, callback: Callable[[str, int], None]) -> Callable[[], None]:
        """Add a callback, and return the function that removes it."""
        token = object()
        with self._lock:
            self._callbacks = {**self._callbacks, token: callback}

        def remove() -> None:
            with self._lock:
                self._callbacks = {
                    key: value for key, value in self._callbacks.items() if key is not token
                }

        return remove

    def notify(self, name: str, version: int) -> None:
        """Call every callback with the name of a job and its version."""
        for callback in self._callbacks.values():
            try:
                callback(name, version)
            except Exception:
                _log.exception("A subscriber failed on version %d of job %r", version, name)


class Timers:
    """One timer for each job. It may be used from any thread, and finds due jobs without looking
    at all of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, name: str, at_s: float) -> None:
        """Set the timer of a job, replacing an earlier one; infinite removes it."""
        with self._lock:
            if self._at_s.pop(name, math.inf) == at_s == math.inf:
                return
            if at_s < math.inf:
                self._at_s[name] = at_s
                heapq.heappush(self._heap, (at_s, name))
            if len(self._heap) > 2 * len(self._at_s) + _SPARE:
                self._heap = [(time_s, job) for job, time_s in self._at_s.items()]
                heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[str]:
        """Remove the timers that are due, and return the names of their jobs."""
        found = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now_s:
                at_s, name = heapq.heappop(self._heap)
                if self._at_s.get(name) == at_s:
                    del self._at_s[name]
                    found.append(name)
        return found

    def next_s(self) -> float:
        """Return the time of the first timer; infinite if there is none."""
        with self._lock:
            while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
                heapq.heappop(self._heap)
            return self._heap[0][0] if self._heap else math.inf
