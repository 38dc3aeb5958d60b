"""Read a GPU's energy counter without the error of its update interval.

The energy counters of data-centre GPUs update about every 100 ms, so the difference of two readings
taken at arbitrary times is wrong by up to the energy of one interval. A reading taken right after
an update is not. Every window therefore begins and ends at an update, with the GPU at rest, and the
energy that the GPU drew at rest between these updates and its work is subtracted. The remaining
error is the time between two polls at the power of a resting GPU: about 0.1 J of the 1500 J of a
window of 5 s.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import GpuError
from perseus_planner.base.prefixes import si

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu

POLL_S = 1e-3
"""How often the counter is read to find its next update, seconds."""

_STUCK_S = 5.0  # every known counter updates at least once a second
_INTERVALS = 5  # intervals that are timed to find the length of one
_MIN_REST_S = 0.01  # the power at rest is the mean over at least this long
_STABLE = 0.05  # the GPU is at rest when the power of two intervals differs by less
_MAX_INTERVALS = 20


class RestingReading(NamedTuple):
    """The counter right after an update while the GPU is at rest."""

    time_s: float  #: When the counter was updated, seconds
    energy_j: float  #: The counter, joules
    rest_w: float  #: The power of the resting GPU, watts


class EnergyCounter:
    """The energy counter of a GPU, whose update interval is measured on construction.

    Attributes:
        interval_s: The median time between two updates, seconds.

    Raises:
        GpuError: If the counter does not move for seconds, or runs backwards.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        times_s = [self._wait_for_update()[0] for _ in range(_INTERVALS + 1)]
        self.interval_s = median(after - before for before, after in pairwise(times_s))

    def wait_for_rest(self) -> RestingReading:
        """Wait until the counter counts nothing but the power of the resting GPU. Nothing may be
        running.

        A counter that is fed from averaged power still counts finished work for some intervals. So
        this waits until two intervals in a row have the same power.

        Raises:
            GpuError: If the counter does not move for seconds, or runs backwards.
        """
        time_s, energy_j = self._wait_for_update()
        before_w = 0.0
        for _ in range(_MAX_INTERVALS):
            # Polling starts shortly before the update is due.
            self._gpu.wait(max(0.8 * self.interval_s, _MIN_REST_S))
            next_s, next_j = self._wait_for_update()
            rest_w = (next_j - energy_j) / (next_s - time_s)
            time_s, energy_j = next_s, next_j
            if abs(rest_w - before_w) <= _STABLE * rest_w:
                break
            before_w = rest_w
        return RestingReading(time_s, energy_j, rest_w)

    def _wait_for_update(self) -> tuple[float, float]:
        """Return the time and the counter, seconds and joules, right after its next update."""
        gpu = self._gpu
        before_j, give_up_s = gpu.energy_j(), gpu.now_s() + _STUCK_S
        while (energy_j := gpu.energy_j()) == before_j:
            if gpu.now_s() >= give_up_s:
                raise GpuError(
                    f"{gpu.name}: its energy counter has stood at {si(energy_j, 'J', 9)} for "
                    f"{_STUCK_S:g} s, so energy cannot be measured; run `planner doctor` to check "
                    "the counter, and reload the driver"
                )
            gpu.wait(POLL_S)
        if energy_j < before_j:
            raise GpuError(
                f"{gpu.name}: its energy counter went back from {si(before_j, 'J', 9)} to "
                f"{si(energy_j, 'J', 9)}, as after a reload of the driver; turn persistence mode "
                "on and measure again"
            )
        return gpu.now_s(), energy_j
