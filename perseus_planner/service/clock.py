"""The service's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch that rise by a second each second, also when somebody sets the
    machine's clock.

    The machine's clock is read once. So reports begin and expire when they are due, and none
    vanishes because the clock was wrong and has been set right.

    Args:
        not_before_s: The least first value, such as the last moment of an earlier service.
        wall_s: The machine's clock.
        monotonic_s: A clock that nobody sets.
    """

    def __init__(
        self,
        not_before_s: float = -math.inf,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic_s = monotonic_s
        self._offset_s = max(wall_s(), not_before_s) - monotonic_s()

    def __call__(self) -> float:
        """Return the time."""
        return self._offset_s + self._monotonic_s()
