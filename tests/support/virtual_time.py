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
    """

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def monotonic(self) -> float:
        """A microsecond later than the last time, so that whoever looks often enough sees time
        pass.
        """
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """The time of emulated GPUs in this process."""
    found = VirtualTime()
    monkeypatch.setattr(emulated, "time", found)
    return found
