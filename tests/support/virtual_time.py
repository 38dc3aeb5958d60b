"""Time that passes only where something waits for it, so that no test depends on how fast a
machine is.
"""

from __future__ import annotations

import time

import pytest

from perseus_planner.gpu.simulated import emulated


class VirtualTime:
    """Stands for the module `time` of whoever waits.

    Attributes:
        now_s: The time, seconds; at first that of the monotonic clock.

    Args:
        look_s: How much later each look is than the last one, so that whoever looks often enough
            sees time pass; 0 for time that only waiting takes.
    """

    def __init__(self, look_s: float = 1e-6) -> None:
        self.now_s = time.monotonic()
        self._look_s = look_s

    def monotonic(self) -> float:
        self.now_s += self._look_s
        return self.now_s

    perf_counter = monotonic

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """The time of emulated GPUs in this process."""
    found = VirtualTime()
    monkeypatch.setattr(emulated, "time", found)
    return found
