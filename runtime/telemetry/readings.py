"""What a GPU was read to say, and what follows for a stretch of time between two readings."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from perseus_planner.runtime.controller.protocol import Reading

_MOST = 1_000  #: that are remembered, whatever happens


class Readings:
    """The last readings of one GPU, oldest first.

    A counter is taken to rise evenly between two readings, so that the joules of iterations one after another add up to
    what the counter says of all of them.
    """

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    def __iter__(self) -> Iterator[Reading]:
        return iter(self._readings)

    def add(self, reading: Reading) -> None:
        """One more, which was taken after all others."""
        self._readings = [*self._readings[-_MOST + 1 :], reading]

    def first_after(self, at_ns: int) -> Reading | None:
        """The first one that was taken at `at_ns` or later."""
        place = self._place(at_ns)
        return self._readings[place] if place < len(self._readings) else None

    def forget_before(self, at_ns: int) -> None:
        """Forget what is not needed for times from `at_ns` on."""
        place = self._place(at_ns)
        is_there = place < len(self._readings) and self._readings[place].now_ns == at_ns
        self._readings = self._readings[max(0, place - (not is_there)) :]

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Joules in that time; None where it is not between two readings, or the counter has begun anew."""
        return self._rise(lambda reading: reading.energy_j, begin_ns, end_ns)

    def throttled_s(self, begin_ns: int, end_ns: int) -> Mapping[str, float]:
        """Reason -> seconds in that time, of the reasons that are known of all of it."""
        last = self.first_after(end_ns)
        reasons = last.throttled_s if last is not None else ()
        rises_s = {reason: self._rise(_seconds_of(reason), begin_ns, end_ns) for reason in reasons}
        return {reason: seconds for reason, seconds in rises_s.items() if seconds is not None}

    def _rise(self, counter: Callable[[Reading], float | None], begin_ns: int, end_ns: int) -> float | None:
        begin, end = self._at(counter, begin_ns), self._at(counter, end_ns)
        return None if begin is None or end is None or end < begin else end - begin

    def _at(self, counter: Callable[[Reading], float | None], at_ns: int) -> float | None:
        place = self._place(at_ns)
        if place == len(self._readings):
            return None
        after = self._readings[place]
        if after.now_ns == at_ns:
            return counter(after)
        if place == 0:
            return None
        before = self._readings[place - 1]
        first, last = counter(before), counter(after)
        if first is None or last is None or last < first:
            return None
        return first + (last - first) * (at_ns - before.now_ns) / (after.now_ns - before.now_ns)

    def _place(self, at_ns: int) -> int:
        return bisect_left(self._readings, at_ns, key=lambda reading: reading.now_ns)


def _seconds_of(reason: str) -> Callable[[Reading], float | None]:
    return lambda reading: reading.throttled_s.get(reason)
