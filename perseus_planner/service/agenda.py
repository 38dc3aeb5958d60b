"""Which job is to be looked at when."""

from __future__ import annotations

import heapq
import math
import threading

_SPARE = 1024  # times that no longer hold and may still be in the heap, beside as many as hold


class Agenda:
    """A time for each job; from any thread. What is due is found without a look at all jobs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def plan(self, name: str, at_s: float) -> None:
        """Look at that job at that time, and no other; infinite: never."""
        with self._lock:
            if self._at_s.pop(name, math.inf) == at_s == math.inf:
                return
            if at_s < math.inf:
                self._at_s[name] = at_s
                heapq.heappush(self._heap, (at_s, name))
            if len(self._heap) > 2 * len(self._at_s) + _SPARE:
                self._heap = [(planned_s, of) for of, planned_s in self._at_s.items()]
                heapq.heapify(self._heap)

    def due(self, now_s: float) -> list[str]:
        """The jobs whose time has come; they have none any more."""
        found = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now_s:
                at_s, name = heapq.heappop(self._heap)
                if self._at_s.get(name) == at_s:
                    del self._at_s[name]
                    found.append(name)
        return found

    def next_s(self) -> float:
        """The first time of any job; infinite: there is none."""
        with self._lock:
            while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
                heapq.heappop(self._heap)
            return self._heap[0][0] if self._heap else math.inf
