"""What GPUs that are a model have in common, whether their time is virtual or real: what is read of them, and set."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner import __version__
from perseus_planner.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.simulated.chip import LOST, Chip
from perseus_planner.gpu.simulated.options import Conditions, number_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perseus_planner.gpu.simulated.model import GpuModel

# Quantiles of the time that a call to set a clock takes on an A800 (p50 4.5 ms, p99 13 ms, in an unpublished
# measurement); their ends are chosen so that the mean is the 6 ms that were measured too.
_QUANTILES, _CALL_S = (0.0, 0.5, 0.99, 1.0), (1.8e-3, 4.5e-3, 13e-3, 14e-3)
_LASTING = 0.25  # of the noise of one computation, the share that stays however often a call repeats it
_LARGEST = 3.0  # standard deviations


class ModelGpu(ABC):
    """A `Gpu` that is a model.

    Args:
        model: which GPU, as in the catalogue.
        seed: which of the noises.
        conditions: what it runs under; it is slowed by as much as they say.
    """

    origin = "simulated"
    driver = f"perseus-planner {__version__}"

    def __init__(self, model: GpuModel, seed: int, conditions: Conditions) -> None:
        self.model, self.seed, self.conditions = model.slowed(conditions.slower), seed, conditions
        self._faults = conditions.faults
        self._calls = 0
        self._repeated: Counter[object] = Counter()

    @property
    @abstractmethod
    def _chip(self) -> Chip:
        """The chip as it is now."""

    @abstractmethod
    def _set(self, change: Callable[[Chip], None]) -> None:
        """Make a call that sets something: it needs permission, waits for those of the node, takes time, then acts."""

    @abstractmethod
    def now_s(self) -> float:
        """See `Gpu.now_s`."""

    @property
    def name(self) -> str:
        """What a profile is labelled with, e.g. "simulated a100-sxm"; a GPU that is slowed says so."""
        slower = self.conditions.slower
        return f"simulated {self.model.name}" + (f" slower={number_text(slower)}" if slower != 1 else "")

    @property
    def locked_mhz(self) -> int | None:
        """The clock that is locked, MHz; None when clocks are reset."""
        return self._chip.locked_mhz

    def notices(self) -> tuple[str, ...]:
        """Nothing beyond its origin."""
        return ()

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks that can be locked, highest first."""
        self._called("clocks")
        return self.model.clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock: takes some milliseconds, and a little longer until the clock follows.

        Raises:
            GpuError: the clock is not supported; the text names the nearest that is.
        """
        clocks = self.supported_clocks_mhz
        if clock_mhz not in clocks:
            nearest = min(clocks, key=lambda supported: abs(supported - clock_mhz))
            raise GpuError(f"{self.name} cannot run at {clock_mhz} MHz; the nearest supported clock is {nearest} MHz")
        self._set(lambda chip: chip.lock(clock_mhz))

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`: the GPU runs at its highest clock again."""
        self._called("clocks")
        self._set(lambda chip: chip.lock(None))

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """The least and the greatest power limit that can be set, watts."""
        self._called("power-limit")
        return self.model.power_limits_w

    def power_limit_w(self) -> float:
        """The power limit that is in force, watts."""
        self._called("power-limit")
        limit_w = self._chip.limit_w
        return self.model.power_limit_w if limit_w is None else limit_w

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, watts.

        Raises:
            GpuError: it is out of range; the text names the range.
        """
        least_w, greatest_w = self.power_limits_w
        if not least_w <= limit_w <= greatest_w:
            raise GpuError(
                f"{self.name} cannot be limited to {limit_w:g} W; give a limit from {least_w:g} to {greatest_w:g} W"
            )
        self._set(lambda chip: chip.limit(limit_w))

    def reset_power_limit(self) -> None:
        """Set the power limit back to its default."""
        self._called("power-limit")
        self._set(lambda chip: chip.limit(None))

    def energy_j(self) -> float:
        """Energy as the counter shows it, joules; it moves in steps, unless these are 0 seconds apart."""
        self._called("energy")
        return self._chip.meter.counter_j

    def power_w(self) -> float:
        """Power as the sensor shows it, watts: of the moment or the average of the last second, by model."""
        self._called("power")
        return self._chip.meter.sensed_w()

    def clock_mhz(self) -> int:
        """The SM clock that is achieved; of what was done last, where time passes with work only. MHz."""
        self._called()
        return round(self._chip.clock_mhz)

    def temperature_c(self) -> float:
        """Core temperature, whole degrees Celsius."""
        self._called("temperature")
        return float(round(self._chip.temperature_c))

    def throttle_reasons(self) -> frozenset[str]:
        """What holds the clock back, or did in what was done last."""
        self._called("throttle")
        return self._chip.reasons

    def throttled_s(self) -> Mapping[str, float]:
        """Reason -> seconds for which it has held, of those of `COUNTED`."""
        self._called("throttle")
        return MappingProxyType(dict(self._chip.throttled_s))

    def _called(self, function: str = "") -> None:
        """Count a call of `function`, one of `FUNCTIONS` or none of them, and refuse it where a fault asks so."""
        self._calls += 1
        if self._calls > self._faults.lost_after_calls or self._fault_time_s() >= self._faults.lost_at_s:
            raise GpuLost(f"{self.name} is lost: {LOST}")
        if function in self._faults.not_supported:
            raise GpuNotSupported(
                f"{self.name} does not support {function}, as its fault asks; open it without not-supported:{function}"
            )

    def _fault_time_s(self) -> float:
        """The time that faults go by, seconds."""
        return self.now_s()

    def _check_permission(self) -> None:
        if self._faults.not_permitted:
            raise GpuNotPermitted(
                f"{self.name} does not let this process set anything, as its fault asks; open it without not-permitted"
            )

    def _counter_phase_s(self) -> float:
        """When the energy counter moves first."""
        return self.conditions.step_s * self._uniform("phase")[0]

    def _call_s(self) -> float:
        """How long the next call takes that sets something, by itself."""
        if self.conditions.call_s is not None:
            return self.conditions.call_s
        return float(np.interp(self._uniform("call", self._again("call"))[0], _QUANTILES, _CALL_S))

    def _noise(self, chip: Chip, work: object, repetitions: int) -> tuple[float, float]:
        """What time and power of a call are multiplied by."""
        conditions, setting = self.conditions, (work, chip.locked_mhz, chip.limit_w)
        one, two, odd, size = self._uniform(*setting, self._again(setting))
        deviation = conditions.noise * max(_LASTING, 1 / math.sqrt(max(1, repetitions)))
        length = deviation * min(_LARGEST, math.sqrt(-2 * math.log(1 - one)))  # Box and Muller's two normal numbers
        slower = 1.05 + 0.25 * size if odd < conditions.outliers else 1.0
        return slower * (1 + length * math.cos(math.tau * two)), 1 + length * math.sin(math.tau * two)

    def _again(self, what: object) -> int:
        """How often this was asked of `what` before."""
        self._repeated[what] += 1
        return self._repeated[what] - 1

    def _uniform(self, *key: object) -> tuple[float, ...]:
        """Four numbers from 0 to below 1 that follow from the seed and `key` alone, in any process."""
        digest = blake2b(repr((self.seed, *key)).encode(), digest_size=32).digest()
        return tuple(int.from_bytes(digest[i : i + 8], "big") / 2**64 for i in range(0, 32, 8))
