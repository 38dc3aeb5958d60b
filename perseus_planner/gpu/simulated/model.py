"""The physics of simulated GPUs: how long a computation takes at a clock, and how much power it
draws.

The time consists of the two terms of the roofline, one after the other; only one depends on the
clock f:

    t(f) = memory_s + megacycles / f

Power follows a voltage that is flat up to a ridge and then rises linearly (Schoonhoven et al.,
"Going green: optimizing GPUs for energy efficiency through model-steered auto-tuning", PMBS 2022;
Kernel Tuner's energy model). The power per MHz of arithmetic and of waiting for memory are weighted
by their shares of the time:

    v(f) = 1 + slope * max(0, f - ridge)        P(f) = static + (arithmetic share * a + memory share
    * m) * f * v(f)^2

A power limit acts as on a real GPU: it lowers the achieved clock until the power fits, so that the
highest clocks of heavy work have the same time and energy. Real ones hold themselves a little below
their limit: large matrix products on H200 and B200 draw 98.5 % of it (measured, NVIDIA
aiconfigurator).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OpCost:
    """What one computation takes."""

    flops: float  #: Floating-point operations
    bytes: float  #: Bytes moved to and from device memory that no arithmetic hides

    def __add__(self, other: OpCost) -> OpCost:
        """Return the cost of both operations."""
        return OpCost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> OpCost:
        """Return the cost of `times` such operations."""
        return OpCost(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class Load:
    """One computation on one kind of GPU: the parameters of the module's formulas."""

    memory_s: float  #: Part of the time that does not depend on the clock, seconds
    megacycles: float  #: Cycles of the rest, in millions, so that megacycles / MHz are seconds
    static_w: float  #: Power at any clock
    arithmetic_w_per_mhz: float  #: The `a` of the formula
    memory_w_per_mhz: float  #: The `m` of the formula
    ridge_mhz: float  #: Clock up to which the voltage is constant
    voltage_slope_per_mhz: float  #: Relative rise of the voltage above the ridge
    power_limit_w: float = math.inf  #: Power limit; infinite if there is none

    def time_s(self, clock_mhz: float) -> float:
        """Return the time at a clock that is set, seconds."""
        return self.free_time_s(self.achieved_mhz(clock_mhz))

    def energy_j(self, clock_mhz: float) -> float:
        """Return the energy at a clock that is set, joules."""
        achieved_mhz = self.achieved_mhz(clock_mhz)
        return self.free_power_w(achieved_mhz) * self.free_time_s(achieved_mhz)

    def achieved_mhz(self, clock_mhz: float) -> float:
        """Return the highest clock, up to the one that is set, whose power is within the limit.

        If the limit is below the static power, the GPU runs at a hundredth of the clock that is
        set.
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
        """Return the time at an achieved clock, seconds."""
        return self.memory_s + self.megacycles / clock_mhz

    def free_power_w(self, clock_mhz: float) -> float:
        """Return the mean power at an achieved clock without a limit, watts."""
        arithmetic_s = self.megacycles / clock_mhz
        w_per_mhz = (
            self.arithmetic_w_per_mhz * arithmetic_s + self.memory_w_per_mhz * self.memory_s
        ) / (arithmetic_s + self.memory_s)
        return self.static_w + w_per_mhz * clock_mhz * self.voltage(clock_mhz) ** 2

    def voltage(self, clock_mhz: float) -> float:
        """Return the core voltage at an achieved clock, as a multiple of its smallest value."""
        return 1 + self.voltage_slope_per_mhz * max(0.0, clock_mhz - self.ridge_mhz)


@dataclass(frozen=True)
class GpuModel:
    """The physical parameters of one kind of GPU."""

    name: str  #: Name that follows `simulated:`
    clocks_mhz: tuple[int, ...]  #: SM clocks that can be locked, highest first
    power_limit_w: float  #: Default power limit
    power_limits_w: tuple[float, float]  #: Smallest and largest power limit that can be set
    idle_power_w: float  #: Power of an idle GPU
    static_power_w: float  #: Power of a busy GPU at any clock, at `REFERENCE_C`
    blocking_power_w: float  #: Power at the top clock while waiting for a neighbour's message
    flops_per_cycle: float  #: FLOPs that training kernels reach, over all SMs
    bytes_per_s: float  #: Bandwidth of the device memory
    arithmetic_w_per_mhz: float  #: The `a` of the formula
    memory_w_per_mhz: float  #: The `m` of the formula
    ridge_mhz: float  #: Clock up to which the voltage is constant
    voltage_slope_per_mhz: float  #: Relative rise of the voltage above the ridge
    leakage_per_k: float  #: Relative rise of the static power per kelvin
    warming_k_per_w: float  #: Final temperature of the core above the air, per watt
    warming_s: float  #: Time constant of the temperature
    slowdown_c: float  #: Core temperature at which the clock is lowered to stop further warming
    sensor_s: float  #: Time over which the power sensor averages; 0 for instant power
    held_share: float = 1.0  #: Share of a power limit up to which the GPU lets its power rise

    def slowed(self, times: float) -> GpuModel:
        """Return a GPU that computes `times` as slowly at the same power."""
        return replace(
            self, flops_per_cycle=self.flops_per_cycle / times, bytes_per_s=self.bytes_per_s / times
        )

    def load(self, work: OpCost) -> Load:
        """Return `work` on this GPU at `REFERENCE_C`, under the default power limit."""
        return self._load(
            work.bytes / self.bytes_per_s,
            work.flops / self.flops_per_cycle / 1e6,
            self.arithmetic_w_per_mhz,
            self.memory_w_per_mhz,
        )

    def phases(self, megacycles: float, memory_s: float, exchange_s: float, idle_s: float) -> Load:
        """Return work with known phases at `REFERENCE_C`, under the default power limit.

        Args:
            megacycles: Cycles of arithmetic, in millions.
            memory_s: Seconds that wait for memory.
            exchange_s: Seconds of traffic between GPUs; draws half of what waiting for memory draws
                (assumed).
            idle_s: Seconds in which the GPU waits for its host, at its static power.
        """
        fixed_s = memory_s + exchange_s + idle_s
        activity = (memory_s + 0.5 * exchange_s) / fixed_s if fixed_s > 0 else 0.0
        return self._load(
            fixed_s, megacycles, self.arithmetic_w_per_mhz, activity * self.memory_w_per_mhz
        )

    def blocking(self) -> Load:
        """Return one second of waiting for a message. The GPU polls, which takes more power at a
        higher clock.
        """
        top_mhz, above_static_w = self.clocks_mhz[0], self.blocking_power_w - self.static_power_w
        return self._load(
            1.0,
            0.0,
            0.0,
            above_static_w / (top_mhz * self._load(1.0, 0.0, 0.0, 0.0).voltage(top_mhz) ** 2),
        )

    def _load(
        self,
        memory_s: float,
        megacycles: float,
        arithmetic_w_per_mhz: float,
        memory_w_per_mhz: float,
    ) -> Load:
        return Load(
            memory_s,
            megacycles,
            self.static_power_w,
            arithmetic_w_per_mhz,
            memory_w_per_mhz,
            self.ridge_mhz,
            self.voltage_slope_per_mhz,
            self.held_share * self.power_limit_w,
        )


REFERENCE_C = 60.0
"""Core temperature to which static powers refer, degrees Celsius."""
