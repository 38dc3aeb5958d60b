"""Time calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def seconds(call: Callable[[], object], repetitions: int) -> list[float]:
    """Return the wall seconds of each of `repetitions` calls, fastest first."""
    taken = []
    for _ in range(repetitions):
        begin_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin_s)
    return sorted(taken)


def median_ms(taken_s: list[float]) -> float:
    """Return the median of seconds, in milliseconds."""
    return 1e3 * statistics.median(taken_s)
