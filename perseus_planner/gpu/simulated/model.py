"""The physics of the simulated GPU: how long a computation takes at a clock, and what it draws.

Time is the roofline's two terms in sequence, of which only one depends on the clock f:

    t(f) = memory_s + megacycles / f

Power follows a voltage that is flat up to a ridge and then rises linearly (Schoonhoven et al., "Going green: optimizing
GPUs for energy efficiency through model-steered auto-tuning", PMBS 2022; Kernel Tuner's energy model). What arithmetic
draws per MHz, and what is drawn while memory is awaited, count by their shares of the time:

    v(f) = 1 + slope * max(0, f - ridge)        P(f) = static + (arithmetic share * a + memory share * m) * f * v(f)^2

A power limit acts as on a real GPU: the achieved clock falls below the one that was set until the power fits, so the
top clocks of heavy work share one time and one energy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OpCost:
    """What one computation does.

    Attributes:
        flops: floating-point operations.
        bytes: bytes moved to and from device memory while no arithmetic hides them.
    """

    flops: float
    bytes: float

    def __add__(self, other: OpCost) -> OpCost:
        """Both, one after the other."""
        return OpCost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> OpCost:
        """The same work `times` over."""
        return OpCost(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class Load:
    """One computation on one kind of GPU: the parameters of the module's formulas.

    Attributes:
        memory_s: the part of its time that no clock changes, seconds.
        megacycles: the cycles of the rest, in millions, so that megacycles / MHz are seconds.
        static_w: drawn whatever the clock.
        arithmetic_w_per_mhz: the `a`.
        memory_w_per_mhz: the `m`.
        ridge_mhz: clock up to which the voltage stays at its least.
        voltage_slope_per_mhz: relative rise of the voltage above the ridge.
        power_limit_w: the power that the achieved clock keeps to; infinite where nothing limits it.
    """

    memory_s: float
    megacycles: float
    static_w: float
    arithmetic_w_per_mhz: float
    memory_w_per_mhz: float
    ridge_mhz: float
    voltage_slope_per_mhz: float
    power_limit_w: float = math.inf

    def time_s(self, clock_mhz: float) -> float:
        """Seconds that it takes when `clock_mhz` is set."""
        return self.free_time_s(self.achieved_mhz(clock_mhz))

    def energy_j(self, clock_mhz: float) -> float:
        """Joules that it takes when `clock_mhz` is set."""
        achieved_mhz = self.achieved_mhz(clock_mhz)
        return self.free_power_w(achieved_mhz) * self.free_time_s(achieved_mhz)

    def achieved_mhz(self, clock_mhz: float) -> float:
        """The highest clock, up to the one that is set, at which the power keeps to the limit.

        No clock fits a limit below the static power; the GPU then runs at a hundredth of what was set.
        """
        low, high = clock_mhz / 100, clock_mhz
        if self.free_power_w(high) <= self.power_limit_w:
            return high
        while high - low > 1e-9 * clock_mhz:
            middle = (low + high) / 2
            if self.free_power_w(middle) <= self.power_limit_w:
                low = middle
            else:
                high = middle
        return low

    def free_time_s(self, clock_mhz: float) -> float:
        """Seconds that it takes at an achieved clock."""
        return self.memory_s + self.megacycles / clock_mhz

    def free_power_w(self, clock_mhz: float) -> float:
        """Watts that it draws on average at an achieved clock, whatever the limit."""
        arithmetic_s = self.megacycles / clock_mhz
        w_per_mhz = (self.arithmetic_w_per_mhz * arithmetic_s + self.memory_w_per_mhz * self.memory_s) / (
            arithmetic_s + self.memory_s
        )
        return self.static_w + w_per_mhz * clock_mhz * self.voltage(clock_mhz) ** 2

    def voltage(self, clock_mhz: float) -> float:
        """The core voltage at an achieved clock, as a multiple of its least."""
        return 1 + self.voltage_slope_per_mhz * max(0.0, clock_mhz - self.ridge_mhz)


@dataclass(frozen=True)
class GpuModel:
    """The physical parameters of one kind of GPU.

    Attributes:
        name: what follows `simulated:` in the text that chooses it.
        clocks_mhz: SM clocks that can be locked, highest first.
        power_limit_w: the default power limit.
        power_limits_w: the least and the greatest that can be set.
        idle_power_w: drawn with nothing to do.
        static_power_w: drawn by a busy GPU whatever the clock, at `REFERENCE_C`.
        blocking_power_w: drawn at the top clock while waiting for a neighbour's message.
        flops_per_cycle: reached by training kernels, over all SMs.
        bytes_per_s: bandwidth of the device memory.
        arithmetic_w_per_mhz: the `a` of the module's formula.
        memory_w_per_mhz: the `m` of the module's formula.
        ridge_mhz: clock up to which the voltage stays at its least.
        voltage_slope_per_mhz: relative rise of the voltage above the ridge.
        leakage_per_k: relative rise of the static power with each kelvin.
        warming_k_per_w: what the core is warmer than the air in the end, for each watt drawn.
        warming_s: time constant of that.
        slowdown_c: core temperature at which the clock is lowered so that it rises no further.
        sensor_s: what the power sensor averages over; 0 if it tells the power of the moment.
    """

    name: str
    clocks_mhz: tuple[int, ...]
    power_limit_w: float
    power_limits_w: tuple[float, float]
    idle_power_w: float
    static_power_w: float
    blocking_power_w: float
    flops_per_cycle: float
    bytes_per_s: float
    arithmetic_w_per_mhz: float
    memory_w_per_mhz: float
    ridge_mhz: float
    voltage_slope_per_mhz: float
    leakage_per_k: float
    warming_k_per_w: float
    warming_s: float
    slowdown_c: float
    sensor_s: float

    def slowed(self, times: float) -> GpuModel:
        """The same GPU, so many times slower in all that it computes; it draws what it draws."""
        return replace(self, flops_per_cycle=self.flops_per_cycle / times, bytes_per_s=self.bytes_per_s / times)

    def load(self, work: OpCost) -> Load:
        """`work` on this GPU, at `REFERENCE_C`, under the default power limit."""
        return self._load(
            work.bytes / self.bytes_per_s,
            work.flops / self.flops_per_cycle / 1e6,
            self.arithmetic_w_per_mhz,
            self.memory_w_per_mhz,
        )

    def blocking(self) -> Load:
        """One second of waiting for a neighbour's message: it polls, so it draws a little more at a higher clock."""
        top_mhz, above_static_w = self.clocks_mhz[0], self.blocking_power_w - self.static_power_w
        return self._load(
            1.0, 0.0, 0.0, above_static_w / (top_mhz * self._load(1.0, 0.0, 0.0, 0.0).voltage(top_mhz) ** 2)
        )

    def _load(self, memory_s: float, megacycles: float, arithmetic_w_per_mhz: float, memory_w_per_mhz: float) -> Load:
        return Load(
            memory_s,
            megacycles,
            self.static_power_w,
            arithmetic_w_per_mhz,
            memory_w_per_mhz,
            self.ridge_mhz,
            self.voltage_slope_per_mhz,
            self.power_limit_w,
        )


REFERENCE_C = 60.0
"""The core temperature at which static powers hold, degrees Celsius."""
