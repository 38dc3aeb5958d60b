"""The physics of simulated GPUs: how long a computation takes at a clock, and how much power it
draws; and the GPUs that can be simulated.

The time consists of the two terms of the roofline, one after the other; only one depends on the
clock f:

    t(f) = memory_s + megacycles / f

Power follows a voltage that is flat up to a ridge and then rises linearly (Schoonhoven et al.,
"Going green: optimizing GPUs for energy efficiency through model-steered auto-tuning", PMBS 2022;
Kernel Tuner's energy model). The power per MHz of arithmetic and of waiting for memory are weighted
by their shares of the time:

    v(f) = 1 + slope * max(0, f - ridge)
    P(f) = static + (arithmetic share * a + memory share * m) * f * v(f)^2

A power limit acts as on a real GPU: it lowers the achieved clock until the power fits, so that the
highest clocks of heavy work have the same time and energy. Real ones hold themselves a little below
their limit: large matrix products on H200 and B200 draw 98.5 % of it (measured, NVIDIA
aiconfigurator).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from perseus_planner.base.documents import LOADER
from perseus_planner.base.errors import GpuError, did_you_mean


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
        # Never 0: time is work divided by the clock.
        low = clock_mhz / 100
        high = clock_mhz
        # The common case, without a limit in the way.
        if self.free_power_w(high) <= self.power_limit_w:
            return high
        # Power rises with the clock, so bisection finds where the limit is met, here to a
        # billionth.
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
        if self.megacycles == self.memory_s == 0.0:  # an empty stage
            return self.static_w
        arithmetic_s = self.megacycles / clock_mhz
        # Each kind of power counts for its share of the time.
        w_per_mhz = (
            self.arithmetic_w_per_mhz * arithmetic_s + self.memory_w_per_mhz * self.memory_s
        ) / (arithmetic_s + self.memory_s)
        return self.static_w + w_per_mhz * clock_mhz * self.voltage(clock_mhz) ** 2

    def voltage(self, clock_mhz: float) -> float:
        """Return the core voltage at an achieved clock, as a multiple of its smallest value."""
        above_mhz = clock_mhz - self.ridge_mhz
        return 1 + self.voltage_slope_per_mhz * above_mhz * (above_mhz > 0)  # arrays, too


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
    flops_per_cycle: float  #: bf16 FLOPs that long matrix products reach, over all SMs
    bytes_per_s: float  #: Bandwidth of the device memory, by the datasheet
    memory_share: float  #: Share of it that kernels reach
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
    #: Memory clocks that can be locked, highest first: assumed, the same for all.
    memory_clocks_mhz: tuple[int, ...] = (2619, 1593)

    def slowed(self, times: float) -> GpuModel:
        """Return a GPU that computes `times` as slowly at the same power."""
        return replace(
            self, flops_per_cycle=self.flops_per_cycle / times, bytes_per_s=self.bytes_per_s / times
        )

    def load(self, work: OpCost, memory_mhz: int | None = None) -> Load:
        """Return `work` on this GPU at `REFERENCE_C`, under the default power limit, at the highest
        memory clock or another one: that lengthens the time that waits for memory. What else it
        saves is not known, and left out.
        """
        top_mhz = self.memory_clocks_mhz[0]
        # Waiting for memory takes longer in proportion as its clock is lower.
        return self._load(
            work.bytes / (self.memory_share * self.bytes_per_s) * top_mhz / (memory_mhz or top_mhz),
            work.flops / self.flops_per_cycle / 1e6,
            self.arithmetic_w_per_mhz,
            self.memory_w_per_mhz,
        )

    def phases(
        self,
        megacycles: float,
        memory_s: float,
        exchange_s: float,
        idle_s: float,
        intensity: float = 1.0,
    ) -> Load:
        """Return work with known phases at `REFERENCE_C`, under the default power limit.

        Args:
            megacycles: Cycles of arithmetic, in millions.
            memory_s: Seconds that wait for memory.
            exchange_s: Seconds of traffic between GPUs; draws half of what waiting for memory draws
                (assumed).
            idle_s: Seconds in which the GPU waits for its host, at its static power.
            intensity: Power of the arithmetic above static power, as a share of that of products.
        """
        # What does not follow the clock: the memory's part of the roofline.
        fixed_s = memory_s + exchange_s + idle_s
        activity = (memory_s + 0.5 * exchange_s) / fixed_s if fixed_s > 0 else 0.0
        return self._load(
            fixed_s,
            megacycles,
            intensity * self.arithmetic_w_per_mhz,
            activity * self.memory_w_per_mhz,
        )

    def blocking(self) -> Load:
        """Return one second of waiting for a message. The GPU polls, which takes more power at a
        higher clock.
        """
        # At the top clock it has to draw what the catalog says, so the formula is solved for `m`.
        top_mhz = self.clocks_mhz[0]
        above_static_w = self.blocking_power_w - self.static_power_w
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


# Assumptions for all GPUs, unless their entry in `gpus.yaml` says otherwise:
#
# - The voltage ridge is at 77 % of the top clock, and power rises about four times as steeply above
#   it: the curve that Kernel Tuner measured on an RTX A4000 (its test data, synthetic FP32).
# - Above the static power, memory-bound phases draw half of what arithmetic draws.
# - At the default power limit the core gets 45 K warmer than the air, half of it within 25 s. Each
#   kelvin adds 0.5 % to the static power.

_RIDGE = 0.77
_SLOPE = 1.06  # of the voltage, over the whole range of clocks
_MEMORY_ACTIVITY = 0.5


def _model(
    name: str,
    *,
    clocks_mhz: tuple[int, int, float],
    peak_tflops: float,
    peak_mhz: float,
    bytes_per_s: float,
    efficiency: float,
    memory_share: float,
    power_limits_w: tuple[float, float],
    idle_power_w: float,
    static_power_w: float | None = None,
    blocking_power_w: float | None = None,
    capped_at: float = 0.9,
    sensor_s: float = 1.0,
    held_share: float = 1.0,
    **_: Any,
) -> GpuModel:
    """Return a GPU of `gpus.yaml`, which says what the arguments are."""
    top_mhz, least_mhz, step_mhz = clocks_mhz
    limit_w = power_limits_w[1]
    # Down to the lowest clock that a whole number of steps reaches.
    steps = range(int((top_mhz - least_mhz) / step_mhz) + 1)
    # Where nobody measured it: the ratio of the A100's 65 W at work to its 50 W at idle.
    static_w = 65 / 50 * idle_power_w if static_power_w is None else static_power_w
    # The catalog names the clock, as a share of the top one, at which heavy work meets the limit.
    # The formula for P(f) is solved there for the power of a MHz.
    voltage = 1 + _SLOPE * max(0.0, capped_at - _RIDGE)
    w_per_mhz = (limit_w - static_w) / (capped_at * top_mhz * voltage**2)
    return GpuModel(
        name=name,
        clocks_mhz=tuple(int(top_mhz - step_mhz * step) for step in steps),
        power_limit_w=float(limit_w),
        power_limits_w=(float(power_limits_w[0]), float(limit_w)),
        idle_power_w=float(idle_power_w),
        static_power_w=static_w,
        # Likewise: the ratio of the A100's 85 W while it polls to its 50 W at idle.
        blocking_power_w=85 / 50 * idle_power_w if blocking_power_w is None else blocking_power_w,
        # Of the datasheet's peak, the share that long matrix products reach.
        flops_per_cycle=efficiency * peak_tflops * 1e12 / (peak_mhz * 1e6),
        bytes_per_s=bytes_per_s,
        memory_share=memory_share,
        arithmetic_w_per_mhz=w_per_mhz,
        memory_w_per_mhz=_MEMORY_ACTIVITY * w_per_mhz,
        ridge_mhz=_RIDGE * top_mhz,
        voltage_slope_per_mhz=_SLOPE / top_mhz,
        # The assumptions listed above, the same for all GPUs.
        leakage_per_k=0.005,
        warming_k_per_w=45 / limit_w,
        warming_s=36.0,
        slowdown_c=85.0,
        sensor_s=sensor_s,
        held_share=held_share,
    )


_SPEEDS, _ROWS = yaml.load_all(
    Path(__file__).with_name("gpus.yaml").read_text(encoding="utf-8"), LOADER
)


def _with_speed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    # From the general to the particular: a later entry overrides an earlier one.
    every = _SPEEDS["every"]
    generation = _SPEEDS[row["generation"]]
    system = {**every["system"], **generation["system"], **row["system"]}
    return {**every, **generation, **row, "system": system}


GPUS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: _with_speed(row) for name, row in _ROWS.items()}
)
"""What `gpus.yaml` says of each GPU and its generation, by name of the GPU."""

CATALOG: Mapping[str, GpuModel] = MappingProxyType(
    {name: _model(name, **row) for name, row in GPUS.items()}
)
"""The GPUs that can be simulated, by name."""


def find_model(name: str, text: str, what: str, form: str) -> GpuModel:
    """Return a GPU of the catalog.

    Args:
        name: Its name.
        text: Text that names it, which begins the error.
        what: What it is, for the error.
        form: How such texts are written, with {} for the name.

    Raises:
        GpuError: If the catalog has none of this name; the text says which it has.
    """
    if name in CATALOG:
        return CATALOG[name]
    choices = ", ".join(map(form.format, CATALOG))
    advice = did_you_mean(name, CATALOG, form.format) or f"choose one of: {choices}"
    raise GpuError(f"GPU {text!r}: there is no {what} {name!r}; {advice}")
