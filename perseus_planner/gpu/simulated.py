"""A GPU that computes nothing, in virtual time: only how long work takes and what it draws.

The physics are those of `gpu/simulation/model.py`. Beside them stands what makes measuring hard: noise, static power
that follows the temperature, an energy counter that moves in steps, settings that take time and wait for those of the
node's other GPUs, and the faults of `gpu/simulation/conditions.py`. Time passes only while something runs or waits, or
a setting is made; readings take none, and tell of what was done last.

Equal models, seeds, conditions and calls give equal numbers. The noise of a call of `run` follows from the seed, what
is run, the clock and power limit that are set, and how often the same was run under the same before; not from anything
else that was done. So a sweep that goes on after an interruption meets the noise that it would have met, where it
begins each measurement anew. Temperature and the phase of the energy counter do follow from all that was done before;
the options `drift=0` and `step=0` take them out.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType

import numpy as np

from perseus_planner import __version__
from perseus_planner.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.simulation.catalogue import CATALOGUE
from perseus_planner.gpu.simulation.chip import COUNTED, LOST, Chip
from perseus_planner.gpu.simulation.conditions import NOISE, Conditions, parsed, written
from perseus_planner.gpu.simulation.model import GpuModel, Load, Work

__all__ = ["CATALOGUE", "COUNTED", "NOISE", "Conditions", "GpuModel", "Load", "Node", "SimulatedGpu", "Work", "opened"]

# Quantiles of the time that a call to set a clock takes on an A800 (p50 4.5 ms, p99 13 ms, in an unpublished
# measurement); their ends are chosen so that the mean is the 6 ms that were measured too.
_QUANTILES, _CALL_S = (0.0, 0.5, 0.99, 1.0), (1.8e-3, 4.5e-3, 13e-3, 14e-3)
_LASTING = 0.25  # of the noise of one computation, the share that stays however often a call repeats it
_LARGEST = 3.0  # standard deviations


class Node:
    """What the GPUs of one machine share: the driver's lock, which makes calls that set something wait for each other.

    The GPUs' virtual times begin together. One of them may be ahead of another: a call takes the first gap after its
    own time.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []  # (start, end) of each, in order

    def call_s(self, now_s: float, duration_s: float) -> float:
        """When a call ends that is made at `now_s` and holds the lock for `duration_s`."""
        start_s = now_s
        for begin_s, end_s in self._calls[max(0, bisect(self._calls, (now_s,)) - 1) :]:
            if start_s + duration_s <= begin_s:
                break
            start_s = max(start_s, end_s)
        insort(self._calls, (start_s, start_s + duration_s))
        return start_s + duration_s


class SimulatedGpu:
    """One simulated GPU: a `Gpu` that also runs `Work` and waits for messages, both in virtual time.

    Args:
        model: which GPU.
        seed: which of the noises.
        conditions: noise, counter steps, faults.
        node: the machine that it is in; None: one of its own.
    """

    origin = "simulated"
    driver = f"perseus-planner {__version__}"
    keeps_settings = False

    def __init__(
        self, model: GpuModel, seed: int = 0, conditions: Conditions | None = None, node: Node | None = None
    ) -> None:
        self.model, self.seed, self.conditions = model, seed, conditions or Conditions()
        self._faults = self.conditions.faults
        self._node = node or Node()
        self._calls = 0
        self._repeated: Counter[object] = Counter()
        self._chip = Chip(model, self.conditions, self.conditions.step_s * self._uniform("phase")[0])

    @property
    def locked_mhz(self) -> int | None:
        """The clock that is locked, MHz; None when clocks are reset."""
        return self._chip.locked_mhz

    @property
    def text(self) -> str:
        """What opens one that is equal to this when it was opened, e.g. "simulated:a100-sxm?seed=3"."""
        options = written(self.seed, self.conditions)
        return f"simulated:{self.model.name}{'?' if options else ''}{options}"

    @property
    def uuid(self) -> str:
        """Model and seed, e.g. "simulated-a100-sxm-seed-3"."""
        return f"simulated-{self.model.name}-seed-{self.seed}"

    @property
    def name(self) -> str:
        """What a profile is labelled with, e.g. "simulated a100-sxm"."""
        return f"simulated {self.model.name}"

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
        self._lock(clock_mhz)

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`: the GPU runs at its highest clock again."""
        self._called("clocks")
        self._lock(None)

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """The least and the greatest power limit that can be set, watts."""
        self._called("power-limit")
        return self.model.power_limits_w

    def power_limit_w(self) -> float:
        """The power limit that is in force, watts."""
        self._called("power-limit")
        return self.model.power_limit_w if self._chip.limit_w is None else self._chip.limit_w

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
        self._set()
        self._chip.limit_w = limit_w

    def reset_power_limit(self) -> None:
        """Set the power limit back to its default."""
        self._called("power-limit")
        self._set()
        self._chip.limit_w = None

    def energy_j(self) -> float:
        """Energy since the start of virtual time as the counter shows it, joules; it moves in steps."""
        self._called("energy")
        return self._chip.meter.counter_j

    def power_w(self) -> float:
        """Power as the sensor shows it, watts: of the moment or the average of the last second, by model."""
        self._called("power")
        return self._chip.meter.sensed_w()

    def clock_mhz(self) -> int:
        """The SM clock at the end of what was done last, MHz."""
        self._called()
        return round(self._chip.clock_mhz)

    def temperature_c(self) -> float:
        """Core temperature, whole degrees Celsius."""
        self._called("temperature")
        return float(round(self._chip.temperature_c))

    def throttle_reasons(self) -> frozenset[str]:
        """What held the clock back at the end of what was done last."""
        self._called("throttle")
        return self._chip.reasons

    def throttled_s(self) -> Mapping[str, float]:
        """Reason -> seconds for which it has held, of those of `COUNTED`."""
        self._called("throttle")
        return MappingProxyType(dict(self._chip.throttled_s))

    def now_s(self) -> float:
        """Virtual time, seconds."""
        return self._chip.meter.now_s

    def wait(self, duration_s: float) -> None:
        """Let so many seconds of virtual time pass with nothing to do."""
        self._called()
        self._chip.idle(duration_s)

    def run(self, work: Work | Load, repetitions: int = 1) -> None:
        """Run `work` so many times back to back; virtual time and energy are spent on return.

        A `Load`, such as one fitted to measurements, is run as it is, its own power limit included; a limit that
        is set on this GPU holds beside that.
        """
        self._called()
        load = self.model.load(work) if isinstance(work, Work) else work
        self._chip.execute(load, repetitions, *self._noise(work, repetitions))

    def block(self, duration_s: float) -> None:
        """Wait for a neighbour's message for so many seconds of virtual time."""
        self._called()
        self._chip.execute(self.model.blocking(), duration_s, 1.0, self._noise("block", 1)[1])

    def close(self) -> None:
        """Nothing is to be given back."""

    def _called(self, function: str = "") -> None:
        """Count a call of `function`, one of `FUNCTIONS` or none of them, and refuse it where a fault asks so."""
        self._calls += 1
        if self._calls > self._faults.lost_after_calls or self.now_s() >= self._faults.lost_at_s:
            raise GpuLost(f"{self.name} is lost: {LOST}")
        if function in self._faults.not_supported:
            raise GpuNotSupported(
                f"{self.name} does not support {function}, as its fault asks; open it without not-supported:{function}"
            )

    def _set(self) -> None:
        """What every setting takes: permission, the node's lock, and time."""
        if self._faults.not_permitted:
            raise GpuNotPermitted(
                f"{self.name} does not let this process set anything, as its fault asks; open it without not-permitted"
            )
        call_s = float(np.interp(self._uniform("call", self._again("call"))[0], _QUANTILES, _CALL_S))
        self._chip.idle(self._node.call_s(self.now_s(), call_s) - self.now_s())

    def _lock(self, clock_mhz: int | None) -> None:
        self._set()
        self._chip.lock(clock_mhz)

    def _noise(self, work: object, repetitions: int) -> tuple[float, float]:
        """What time and power of a call are multiplied by."""
        conditions, setting = self.conditions, (work, self.locked_mhz, self._chip.limit_w)
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


def opened(which: str) -> SimulatedGpu:
    """The simulated GPU that `which` names: a name of `CATALOGUE` and options, such as "a100-sxm?seed=3&noise=0".

    The options are those of `gpu/simulation/conditions.py`.

    Raises:
        GpuError: no such GPU, or no such option.
    """
    name, _, options = which.partition("?")
    if name not in CATALOGUE:
        known = ", ".join(f"simulated:{each}" for each in CATALOGUE)
        raise GpuError(f"GPU 'simulated:{which}': there is no simulated GPU {name!r}; choose one of: {known}")
    try:
        seed, conditions = parsed(options)
    except GpuError as error:
        raise GpuError(f"GPU 'simulated:{which}': {error}") from None
    return SimulatedGpu(CATALOGUE[name], seed, conditions)
