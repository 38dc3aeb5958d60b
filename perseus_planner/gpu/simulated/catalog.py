"""The GPUs that can be simulated. Each number comes with its source; numbers without a source are
marked as assumed.

Assumptions for all GPUs, unless an entry says otherwise:

- Training kernels reach 62 % of the peak (Narayanan et al., SC'21, report 52 % over whole
  iterations with bubbles).
- The voltage ridge is at 77 % of the top clock, and power rises about four times as steeply above
  it: the curve that Kernel Tuner measured on an RTX A4000 (its test data, synthetic FP32).
- Above the static power, memory-bound phases draw half of what arithmetic draws.
- At the default power limit the core gets 45 K warmer than the air, half of it within 25 s. Each
  kelvin adds 0.5 % to the static power.
- Static power and power while waiting are proportional to idle power as on the A100 SXM: 65 W with
  the clock locked at 1410 MHz (pytorch issue 97459) and 85 W waiting in a receive (Kareus,
  model_config.py) for 50 W idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from perseus_planner.gpu.simulated.model import GpuModel

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
)

CATALOG: Mapping[str, GpuModel] = MappingProxyType({model.name: model for model in _MODELS})
"""The GPUs that can be simulated, by name."""
