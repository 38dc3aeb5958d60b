"""The service's clock, and the timers of decisions that time alone may change."""

from __future__ import annotations

import heapq
import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch that rise by a second each second, also when somebody sets the
    machine's clock.

    The machine's clock is read once. So reports begin and expire when they are due, and none
    vanishes because the clock was wrong and has been set right.

    Args:
        wall_s: The machine's clock.
        monotonic_s: A clock that nobody sets.
    """

    def __init__(
        self,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic_s = monotonic_s
        self._offset_s = wall_s() - monotonic_s()

    def __call__(self) -> float:
        """Return the time."""
        return self._offset_s + self._monotonic_s()


_SPARE = 1024  # outdated heap entries that are tolerated besides as many as there are timers


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
        names = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now_s:
                at_s, name = heapq.heappop(self._heap)
                if self._at_s.get(name) == at_s:
                    del self._at_s[name]
                    names.append(name)
        return names

    def next_s(self) -> float:
        """Return the time of the first timer; infinite if there is none."""
        with self._lock:
            while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
                heapq.heappop(self._heap)
            return self._heap[0][0] if self._heap else math.inf
