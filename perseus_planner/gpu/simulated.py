"""A GPU that computes nothing, in virtual time: only how long work takes and what it draws.

Time is the roofline's two terms in sequence, of which only one depends on the clock f:

    t(f) = bytes / bandwidth + flops / (flops per cycle * f)

Power follows a voltage that is flat up to a ridge and then rises linearly, under a power limit
(Schoonhoven et al., "Going green: optimizing GPUs for energy efficiency through model-steered
auto-tuning", PMBS 2022; Kernel Tuner's energy model):

    v(f) = 1 + slope * max(0, f - ridge)        P(f) = static + activity * a * f * v(f)^2

The limit acts as on a real GPU: the achieved clock falls below the requested one until the power
fits, so the top clocks of heavy work share one time and one energy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from perseus_planner.errors import GpuError

NOISE = 0.01
"""Largest relative deviation of the time, and of the power, of one run from the model."""


@dataclass(frozen=True)
class Work:
    """What one computation does.

    Attributes:
        flops: floating-point operations.
        bytes: bytes moved to and from device memory while no arithmetic hides them.
    """

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        """The same work `times` over."""
        return Work(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class GpuModel:
    """The physical parameters of one kind of GPU, and what follows from them.

    Attributes:
        name: what follows `simulated:` in the text that chooses it.
        clocks_mhz: SM clocks that can be locked, highest first.
        power_limit_w: the power that the driver holds the board to.
        static_power_w: drawn whatever the clock.
        blocking_power_w: drawn while waiting for a neighbour's message, at any clock.
        flops_per_cycle: reached by training kernels, over all SMs.
        bytes_per_s: bandwidth of the device memory.
        dynamic_w_per_mhz: the `a` of the module's formula, for arithmetic (activity 1).
        memory_activity: activity while only memory is busy.
        ridge_mhz: clock up to which the voltage stays at its least.
        voltage_slope_per_mhz: relative rise of the voltage above the ridge.
    """

    name: str
    clocks_mhz: tuple[int, ...]
    power_limit_w: float
    static_power_w: float
    blocking_power_w: float
    flops_per_cycle: float
    bytes_per_s: float
    dynamic_w_per_mhz: float
    memory_activity: float
    ridge_mhz: float
    voltage_slope_per_mhz: float

    def time_s(self, work: Work, clock_mhz: float) -> float:
        """Seconds that `work` takes at an achieved clock."""
        return self._memory_s(work) + self._arithmetic_s(work, clock_mhz)

    def power_w(self, work: Work, clock_mhz: float) -> float:
        """Watts that `work` would draw on average at a clock if there were no limit."""
        memory_s, arithmetic_s = self._memory_s(work), self._arithmetic_s(work, clock_mhz)
        activity = (arithmetic_s + self.memory_activity * memory_s) / (arithmetic_s + memory_s)
        voltage = 1 + self.voltage_slope_per_mhz * max(0.0, clock_mhz - self.ridge_mhz)
        return self.static_power_w + activity * self.dynamic_w_per_mhz * clock_mhz * voltage**2

    def achieved_clock_mhz(self, work: Work, requested_mhz: int) -> int:
        """The highest clock up to the requested one at which `work` keeps to the power limit."""
        allowed = [clock for clock in self.clocks_mhz if clock <= requested_mhz]
        return next((clock for clock in allowed if self.power_w(work, clock) <= self.power_limit_w), allowed[-1])

    def _memory_s(self, work: Work) -> float:
        return work.bytes / self.bytes_per_s

    def _arithmetic_s(self, work: Work, clock_mhz: float) -> float:
        return work.flops / (self.flops_per_cycle * clock_mhz * 1e6)


_A100_SXM = GpuModel(
    name="a100-sxm",
    # 210 to 1410 MHz in steps of 15 (README of phase-aware-dvfs-llm).
    clocks_mhz=tuple(range(1410, 209, -15)),
    # NVIDIA A100 datasheet: 400 W, 2039 GB/s (80 GB), 312 TFLOPS dense bf16 at the top clock of 1410 MHz.
    power_limit_w=400.0,
    bytes_per_s=2039e9,
    # Assumed: kernels reach 62 % of the peak. Narayanan et al. (SC'21) report 52 % over whole iterations,
    # bubbles and communication included.
    flops_per_cycle=0.62 * 312e12 / 1410e6,
    # Idle with the clock held at 1410 MHz: 65 W (A100 with 40 GB, pytorch issue 97459).
    static_power_w=65.0,
    # Waiting in a point-to-point receive: 85 W (the constant of Kareus' model_config.py).
    blocking_power_w=85.0,
    # The ridge of the curve that Kernel Tuner measured (RTX A4000) lies at 76-80 % of the top clock, and power
    # rises about four times as steeply above it. The two slopes give that, and the 400 W limit near 1270 MHz
    # under dense arithmetic; assumed, as is the activity of memory-bound phases.
    ridge_mhz=1080.0,
    voltage_slope_per_mhz=7.5e-4,
    dynamic_w_per_mhz=0.2,
    memory_activity=0.5,
)

CATALOGUE = {model.name: model for model in (_A100_SXM,)}
"""The GPUs that can be simulated, by name."""


class SimulatedGpu:
    """One simulated GPU: a `Gpu` that also runs `Work` and waits, both in virtual time.

    Equal models, seeds and calls give equal numbers.
    """

    origin = "simulated"

    def __init__(self, model: GpuModel, seed: int = 0) -> None:
        self.model = model
        self.locked_mhz: int | None = None  #: what is locked; None when clocks are reset
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._energy_j = 0.0

    @property
    def name(self) -> str:
        """What a profile is labelled with, e.g. "simulated a100-sxm"."""
        return f"simulated {self.model.name}"

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks that can be locked, highest first."""
        return self.model.clocks_mhz

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock.

        Raises:
            GpuError: the clock is not supported; the text names the nearest that is.
        """
        clocks = self.supported_clocks_mhz
        if clock_mhz not in clocks:
            nearest = min(clocks, key=lambda supported: abs(supported - clock_mhz))
            raise GpuError(f"{self.name} cannot run at {clock_mhz} MHz; the nearest supported clock is {nearest} MHz")
        self.locked_mhz = clock_mhz

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`: the GPU runs at its highest clock again."""
        self.locked_mhz = None

    def energy_j(self) -> float:
        """Cumulative energy, joules since the start of virtual time."""
        return self._energy_j

    def now_s(self) -> float:
        """Virtual time, seconds."""
        return self._now_s

    def run(self, work: Work, repetitions: int = 1) -> None:
        """Run `work` so many times back to back; virtual time and energy are spent on return."""
        clock_mhz = self.model.achieved_clock_mhz(work, self.locked_mhz or self.model.clocks_mhz[0])
        time_s, power_w = self.model.time_s(work, clock_mhz), self.model.power_w(work, clock_mhz)
        for _ in range(repetitions):
            self._spend(time_s * self._noise(), power_w * self._noise())

    def block(self, duration_s: float) -> None:
        """Wait for a neighbour's message for so many seconds of virtual time."""
        self._spend(duration_s, self.model.blocking_power_w * self._noise())

    def close(self) -> None:
        """Nothing is to be given back."""

    def _noise(self) -> float:
        return 1 + self._random.uniform(-NOISE, NOISE)

    def _spend(self, time_s: float, power_w: float) -> None:
        self._now_s += time_s
        self._energy_j += time_s * min(power_w, self.model.power_limit_w)


def opened(which: str) -> SimulatedGpu:
    """The simulated GPU that `which` names: a name of `CATALOGUE`, and its options, such as "a100-sxm?seed=3".

    Raises:
        GpuError: no such GPU, or no such option.
    """
    name, _, options = which.partition("?")
    if name not in CATALOGUE:
        known = ", ".join(f"simulated:{each}" for each in CATALOGUE)
        raise GpuError(f"GPU 'simulated:{which}': there is no simulated GPU {name!r}; choose one of: {known}")
    return SimulatedGpu(CATALOGUE[name], int(options.removeprefix("seed=") or 0))
