"""What the counters of a GPU have risen by between two moments, of which no sample need be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.runtime.controller.protocol import GpuSample

_MAX_SAMPLES = 128  #: there is one for each iteration, and at most `marks.KEPT` wait for theirs


class GpuSamples:
    """The last samples of one GPU, oldest first.

    Counters are interpolated linearly between two samples, so the energies of successive iterations
    add up to what the counter says of all of them.
    """

    def __init__(self) -> None:
        self._samples: list[GpuSample] = []

    def __iter__(self) -> Iterator[GpuSample]:
        return iter(self._samples)

    def add(self, sample: GpuSample) -> None:
        """Add a sample that was taken after all others."""
        self._samples = [*self._samples[-_MAX_SAMPLES + 1 :], sample]

    def first_after(self, at_ns: int) -> GpuSample | None:
        """Return the first sample that was taken at `at_ns` or later."""
        index = self._index(at_ns)
        return self._samples[index] if index < len(self._samples) else None

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the joules in a span of time; None if no samples enclose it, or the counter was
        reset in it.
        """
        return self._rise(lambda sample: sample.energy_j, begin_ns, end_ns)

    def sensor_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the joules by the power sensor in a span of time; None if they are not known."""
        return self._rise(lambda sample: sample.sensor_j, begin_ns, end_ns)

    def throttled_s(self, begin_ns: int, end_ns: int) -> Mapping[str, float]:
        """Return throttle reason -> seconds in a span of time, for the reasons that are known
        for all of it.
        """
        last = self.first_after(end_ns)
        reasons = last.throttled_s if last is not None else ()
        rises_s = {reason: self._rise(_seconds_of(reason), begin_ns, end_ns) for reason in reasons}
        return {reason: seconds for reason, seconds in rises_s.items() if seconds is not None}

    def _rise(
        self, counter: Callable[[GpuSample], float | None], begin_ns: int, end_ns: int
    ) -> float | None:
        begin = self._at(counter, begin_ns)
        end = self._at(counter, end_ns)
        return None if begin is None or end is None or end < begin else end - begin

    def _at(self, counter: Callable[[GpuSample], float | None], at_ns: int) -> float | None:
        index = self._index(at_ns)
        if index == len(self._samples):
            return None
        after = self._samples[index]
        if after.now_ns == at_ns:
            return counter(after)
        # Nothing is extrapolated: before the first sample and after the last one, nothing is known.
        if index == 0:
            return None
        before = self._samples[index - 1]
        first = counter(before)
        last = counter(after)
        # A counter that falls was reset in between, as by a new driver.
        if first is None or last is None or last < first:
            return None
        return first + (last - first) * (at_ns - before.now_ns) / (after.now_ns - before.now_ns)

    def _index(self, at_ns: int) -> int:
        return bisect_left(self._samples, at_ns, key=lambda sample: sample.now_ns)


def _seconds_of(reason: str) -> Callable[[GpuSample], float | None]:
    return lambda sample: sample.throttled_s.get(reason)
