"""The energy counter read so that its steps cost no accuracy.

Counters of data-centre GPUs move about every 100 ms, so a difference of two readings taken at any moment is off by up
to a step's energy. A reading taken just when the counter moves is not: so every window begins and ends at such a
moment, with the GPU at rest, and what it drew at rest between that moment and its work is taken off again. What remains
is the error of the time of that moment, one poll, at the power of rest: about 0.1 J of the 1500 J of a window of 5 s.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.errors import GpuError

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu

_POLL_S = 1e-3
_STUCK_S = 5.0  # no counter that is known steps more rarely than once a second
_STEPS = 5  # so many are timed to learn how long one is
_LEAST_S = 0.01  # power at rest is that of at least so long, whatever the counter
_SETTLED = 0.05  # two steps of rest that differ by less say the same
_MOST_STEPS = 20


class Edge(NamedTuple):
    """A moment at which the counter moved while the GPU was at rest: seconds, joules, and the watts of its rest."""

    time_s: float
    energy_j: float
    rest_w: float


class EnergyCounter:
    """The energy counter of a GPU; finds out at birth how long its step is.

    Attributes:
        step_s: the median time between two moves, seconds.

    Raises:
        GpuError: it stands still for seconds, or runs backwards.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        times_s = [self._moved()[0] for _ in range(_STEPS + 1)]
        self.step_s = median(after - before for before, after in pairwise(times_s))

    def at_rest(self) -> Edge:
        """Wait, with nothing to do on the GPU, until the counter moves by what rest takes alone.

        A counter that is fed from averages still counts finished work for some steps; so it is waited until two steps
        in a row say the same power.

        Raises:
            GpuError: it stands still, or runs backwards.
        """
        time_s, energy_j = self._moved()
        before_w = 0.0
        for _ in range(_MOST_STEPS):
            # Polling starts shortly before the step is due.
            self._gpu.wait(max(0.8 * self.step_s, _LEAST_S))
            next_s, next_j = self._moved()
            rest_w = (next_j - energy_j) / (next_s - time_s)
            time_s, energy_j = next_s, next_j
            if abs(rest_w - before_w) <= _SETTLED * rest_w:
                break
            before_w = rest_w
        return Edge(time_s, energy_j, rest_w)

    def _moved(self) -> tuple[float, float]:
        """Seconds and joules when the counter next moves."""
        gpu = self._gpu
        before_j, give_up_s = gpu.energy_j(), gpu.now_s() + _STUCK_S
        while (energy_j := gpu.energy_j()) == before_j:
            if gpu.now_s() >= give_up_s:
                raise GpuError(
                    f"{gpu.name}: its energy counter has stood at {energy_j:.3f} J for {_STUCK_S:g} s, so energy "
                    "cannot be measured; see what `planner doctor` says of it, and load the driver again"
                )
            gpu.wait(_POLL_S)
        if energy_j < before_j:
            raise GpuError(
                f"{gpu.name}: its energy counter went back from {before_j:.3f} J to {energy_j:.3f} J, as when the "
                "driver is loaded again; turn persistence mode on and measure again"
            )
        return gpu.now_s(), energy_j
