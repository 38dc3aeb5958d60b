"""The physics of simulated GPUs: how long a computation takes at a clock, and how much power it
draws; and the GPUs that can be simulated.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

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
        return self._load(
            work.bytes / self.bytes_per_s * top_mhz / (memory_mhz or top_mhz),
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


# The GPUs that can be simulated. Each number comes with its source; numbers without a source are
# marked as assumed.
#
# Assumptions for all GPUs, unless an entry says otherwise:
#
# - Training kernels reach 62 % of the peak (Narayanan et al., SC'21, report 52 % over whole
#   iterations with bubbles).
# - The voltage ridge is at 77 % of the top clock, and power rises about four times as steeply above
#   it: the curve that Kernel Tuner measured on an RTX A4000 (its test data, synthetic FP32).
# - Above the static power, memory-bound phases draw half of what arithmetic draws.
# - At the default power limit the core gets 45 K warmer than the air, half of it within 25 s. Each
#   kelvin adds 0.5 % to the static power.
# - Static power and power while waiting are proportional to idle power as on the A100 SXM: 65 W
#   with the clock locked at 1410 MHz (pytorch issue 97459) and 85 W waiting in a receive (Kareus,
#   model_config.py) for 50 W idle.

_EFFICIENCY = 0.62
_RIDGE = 0.77
_SLOPE = 1.06  # of the voltage, over the whole range of clocks
_MEMORY_ACTIVITY = 0.5
# median of bf16 products of 0.3 ms and more on H200 and B200 (NVIDIA aiconfigurator); H100 assumed
_HELD_SHARE = 0.985


def _model(
    name: str,
    *,
    clocks_mhz: tuple[int, ...],
    peak_flops: float,
    peak_mhz: float,
    bytes_per_s: float,
    power_limits_w: tuple[float, float],
    idle_power_w: float,
    static_power_w: float | None = None,
    blocking_power_w: float | None = None,
    capped_at: float = 0.9,
    sensor_s: float = 1.0,
    held_share: float = 1.0,
) -> GpuModel:
    """Return a GPU whose default power limit is the largest, and is reached by dense arithmetic at
    `capped_at`.

    Args:
        name: Name that follows `simulated:`.
        clocks_mhz: SM clocks that can be locked, highest first.
        peak_flops: Dense bf16 (V100: fp16) FLOPS of the datasheet.
        peak_mhz: Clock that the datasheet assumes.
        bytes_per_s: Memory bandwidth of the datasheet.
        power_limits_w: Smallest and largest power limit.
        idle_power_w: Power of an idle GPU.
        static_power_w: As in `GpuModel`; None for the assumption of this module.
        blocking_power_w: As in `GpuModel`; None for the assumption of this module.
        capped_at: Share of the top clock.
        sensor_s: As in `GpuModel`. By nvml.h an average over 1 s, but instant power on A100 and
            older.
        held_share: As in `GpuModel`.
    """
    limit_w, top_mhz = power_limits_w[1], clocks_mhz[0]
    static_w = 65 / 50 * idle_power_w if static_power_w is None else static_power_w
    voltage = 1 + _SLOPE * max(0.0, capped_at - _RIDGE)
    w_per_mhz = (limit_w - static_w) / (capped_at * top_mhz * voltage**2)
    return GpuModel(
        name=name,
        clocks_mhz=clocks_mhz,
        power_limit_w=limit_w,
        power_limits_w=power_limits_w,
        idle_power_w=idle_power_w,
        static_power_w=static_w,
        blocking_power_w=85 / 50 * idle_power_w if blocking_power_w is None else blocking_power_w,
        flops_per_cycle=_EFFICIENCY * peak_flops / (peak_mhz * 1e6),
        bytes_per_s=bytes_per_s,
        arithmetic_w_per_mhz=w_per_mhz,
        memory_w_per_mhz=_MEMORY_ACTIVITY * w_per_mhz,
        ridge_mhz=_RIDGE * top_mhz,
        voltage_slope_per_mhz=_SLOPE / top_mhz,
        leakage_per_k=0.005,
        warming_k_per_w=45 / limit_w,
        warming_s=36.0,
        slowdown_c=85.0,
        sensor_s=sensor_s,
        held_share=held_share,
    )


def _steps(top_mhz: int, least_mhz: int, step_mhz: int = 15) -> tuple[int, ...]:
    return tuple(range(top_mhz, least_mhz - 1, -step_mhz))


_MODELS = (
    _model(
        "v100",
        # 135 to 1530 MHz, 7 and 8 MHz apart in turns. Datasheet of the SXM2: 125 TFLOPS, 900 GB/s,
        # 300 W. Smallest limit: that of Zeus' sweeps. Idle about 40 W.
        clocks_mhz=tuple(3060 - 15 * step >> 1 for step in range(187)),
        peak_flops=125e12,
        peak_mhz=1530,
        bytes_per_s=900e9,
        power_limits_w=(100.0, 300.0),
        idle_power_w=40.0,
        sensor_s=0.0,
    ),
    _model(
        "a100-pcie",
        # Clocks of the SXM. Datasheet of 80 GB: 312 TFLOPS, 1935 GB/s, 300 W. Smallest limit and
        # idle power assumed.
        clocks_mhz=_steps(1410, 210),
        peak_flops=312e12,
        peak_mhz=1410,
        bytes_per_s=1935e9,
        power_limits_w=(150.0, 300.0),
        idle_power_w=45.0,
        capped_at=0.8,  # assumed: less power for the same chip
        sensor_s=0.0,
    ),
    _model(
        "a100-sxm",
        # 210 to 1410 MHz in steps of 15, 100 to 400 W (README of phase-aware-dvfs-llm). Datasheet
        # of 80 GB: 312 TFLOPS, 2039 GB/s. Idle 50 W; static and waiting as above. The cap near 1270
        # MHz is assumed.
        clocks_mhz=_steps(1410, 210),
        peak_flops=312e12,
        peak_mhz=1410,
        bytes_per_s=2039e9,
        power_limits_w=(100.0, 400.0),
        idle_power_w=50.0,
        sensor_s=0.0,
    ),
    _model(
        "a40",
        # 210 to 1740 MHz in steps of 15 (Zeus' profile in its documentation). Datasheet: 149.7
        # TFLOPS dense, 696 GB/s, 300 W. 100 W: the smallest limit of Zeus' sweeps. Waiting 70 W
        # (Kareus, model_config.py). Heavy kernels are capped from 1740 to 1710 MHz in Zeus'
        # profile, and lower on 175B models: 85 % assumed, as are idle and static.
        clocks_mhz=_steps(1740, 210),
        peak_flops=149.7e12,
        peak_mhz=1740,
        bytes_per_s=696e9,
        power_limits_w=(100.0, 300.0),
        idle_power_w=30.0,
        static_power_w=60.0,
        blocking_power_w=70.0,
        capped_at=0.85,
    ),
    _model(
        "l40s",
        # 210 to 2520 MHz, step assumed; 100 to 350 W (a profile of it in NVIDIA's mock NVML).
        # Datasheet: 362 TFLOPS dense, 864 GB/s. 35 W idle, 110 W loaded and waiting ("Energy Cost
        # of Execution-Idle"). Static assumed.
        clocks_mhz=_steps(2520, 210),
        peak_flops=362e12,
        peak_mhz=2520,
        bytes_per_s=864e9,
        power_limits_w=(100.0, 350.0),
        idle_power_w=35.0,
        static_power_w=90.0,
        blocking_power_w=110.0,
    ),
    _model(
        "h100-sxm",
        # 345 to 1980 MHz in steps of 15, 200 to 700 W, idle 75 W (outputs of nvidia-smi).
        # Datasheet: 989.4 TFLOPS dense, which is 132 SMs x 4096 a cycle at 1830 MHz; 3350 GB/s.
        # Capped kernels run at about 1590 MHz at 700 W.
        clocks_mhz=_steps(1980, 345),
        peak_flops=989.4e12,
        peak_mhz=1830,
        bytes_per_s=3350e9,
        power_limits_w=(200.0, 700.0),
        idle_power_w=75.0,
        capped_at=1590 / 1980,
        held_share=_HELD_SHARE,
    ),
    _model(
        "h200",
        # 345 to 1980 MHz seen. Datasheet: 989.4 TFLOPS dense, 4800 GB/s, 700 W. The rest assumed to
        # be the H100's.
        clocks_mhz=_steps(1980, 345),
        peak_flops=989.4e12,
        peak_mhz=1830,
        bytes_per_s=4800e9,
        power_limits_w=(200.0, 700.0),
        idle_power_w=75.0,
        capped_at=1590 / 1980,
        held_share=_HELD_SHARE,
    ),
    _model(
        "b200",
        # 345 to 1965 MHz (seen, the step assumed); 400 to 1000 W (mock NVML); idle about 140 W
        # (PowerWeave). Datasheet of the HGX: 2250 TFLOPS dense, assumed to be at 1850 MHz; 8000
        # GB/s. Capped as the H100, assumed.
        clocks_mhz=_steps(1965, 345),
        peak_flops=2250e12,
        peak_mhz=1850,
        bytes_per_s=8000e9,
        power_limits_w=(400.0, 1000.0),
        idle_power_w=140.0,
        capped_at=1590 / 1980,
        held_share=_HELD_SHARE,
    ),
    _model(
        "h100-nvl",
        # Datasheet: 835 TFLOPS dense, 3938 GB/s, 400 W; 132 SMs x 4096 a cycle at 1545 MHz. Clocks
        # to 1785 MHz; smallest limit, idle, cap as the H100's, assumed.
        clocks_mhz=_steps(1785, 345),
        peak_flops=835e12,
        peak_mhz=1545,
        bytes_per_s=3938e9,
        power_limits_w=(200.0, 400.0),
        idle_power_w=60.0,
        capped_at=0.8,
        held_share=_HELD_SHARE,
    ),
    _model(
        "h20",
        # Datasheet: 148 TFLOPS dense, 4000 GB/s. 500 W in outputs of nvidia-smi; it has 78 SMs, but
        # a sixth of the H100's FLOPS, so that its clock is hardly capped, assumed.
        clocks_mhz=_steps(1980, 345),
        peak_flops=148e12,
        peak_mhz=1980,
        bytes_per_s=4000e9,
        power_limits_w=(200.0, 500.0),
        idle_power_w=75.0,
        capped_at=0.94,
    ),
    _model(
        "gb200",
        # Datasheet of the NVL72: 2500 TFLOPS dense, assumed to be at 1965 MHz, 8000 GB/s, 1200 W.
        # The rest as the B200's, assumed.
        clocks_mhz=_steps(2062, 345),
        peak_flops=2500e12,
        peak_mhz=1965,
        bytes_per_s=8000e9,
        power_limits_w=(400.0, 1200.0),
        idle_power_w=140.0,
        capped_at=1590 / 1980,
        held_share=_HELD_SHARE,
    ),
    _model(
        "b300",
        # Datasheet of the HGX: 2250 TFLOPS dense, 8000 GB/s, 1100 W. The rest as the B200's,
        # assumed.
        clocks_mhz=_steps(1920, 345),
        peak_flops=2250e12,
        peak_mhz=1850,
        bytes_per_s=8000e9,
        power_limits_w=(400.0, 1100.0),
        idle_power_w=150.0,
        capped_at=1590 / 1980,
        held_share=_HELD_SHARE,
    ),
    _model(
        "gb300",
        # Datasheet of the NVL72: 2500 TFLOPS dense, 8000 GB/s, 1400 W. The rest as the GB200's,
        # assumed.
        clocks_mhz=_steps(2062, 345),
        peak_flops=2500e12,
        peak_mhz=1965,
        bytes_per_s=8000e9,
        power_limits_w=(400.0, 1400.0),
        idle_power_w=150.0,
        capped_at=1590 / 1980,
        held_share=_HELD_SHARE,
    ),
    _model(
        "mi300x",
        # Datasheet: 1307.4 TFLOPS dense at 2100 MHz, 5300 GB/s, 750 W. Clocks, smallest limit, idle
        # power and cap assumed.
        clocks_mhz=_steps(2100, 500, 20),
        peak_flops=1307.4e12,
        peak_mhz=2100,
        bytes_per_s=5300e9,
        power_limits_w=(300.0, 750.0),
        idle_power_w=140.0,
        capped_at=0.8,
    ),
)

CATALOG: Mapping[str, GpuModel] = MappingProxyType({model.name: model for model in _MODELS})
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
