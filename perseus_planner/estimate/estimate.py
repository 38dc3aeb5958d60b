"""Estimates the profile of a transformer pipeline from its dimensions and a model of its GPU.

The system predicts time and energy of each computation from its operations (`kernel_times.py`), and
measured stages correct the prediction (`calibration.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perseus_planner.estimate.calibration import StageCalibration, correction_factors
from perseus_planner.profiles.groups import on_each_gpu
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from perseus_planner.estimate.op_costs import TransformerPipeline
    from perseus_planner.estimate.system import System


def estimate(
    pipeline: TransformerPipeline,
    system: System,
    calibrations: Sequence[StageCalibration] = (),
    *,
    split_backward: bool = False,
) -> Profile:
    """Return the profile of every stage at every clock of a GPU, marked as simulated; `conditions`
    record its sources.

    Args:
        pipeline: The model and its stages. With a tensor degree above 1, energies are sums over the
            GPUs of a stage.
        system: GPUs and their links.
        calibrations: A measured stage, two with different sequence lengths, or none. The blocking
            power is that of the first calibration that has one.
        split_backward: Whether to estimate the gradients of inputs and of weights separately as
            well.

    Raises:
        UsageError: If the calibrations contradict each other.
    """
    gpu = system.gpu
    factors = correction_factors(calibrations, gpu.clocks_mhz, pipeline.transformer.sequence)
    measurements = {}
    for stage, loads in enumerate(pipeline.loads(system)):
        for kind in "FBIW" if split_backward else "FB":
            load, (times, energies) = loads[kind], factors[kind]
            measurements[stage, kind] = tuple(
                Measurement(
                    clock,
                    load.time_s(clock) * float(times[index]),
                    load.energy_j(clock) * float(energies[index]),
                )
                for index, clock in enumerate(gpu.clocks_mhz)
            )
    powers_w = [
        found.blocking_power_w for found in calibrations if found.blocking_power_w is not None
    ]
    one_gpu = Profile(
        measurements,
        blocking_power_w=(powers_w or [gpu.blocking_power_w])[0],
        gpu=f"simulated {gpu.name}",
        origin="simulated",
        conditions=_conditions(pipeline, system, calibrations),
    )
    return on_each_gpu(one_gpu, pipeline.transformer.tensor_degree)


def _conditions(
    pipeline: TransformerPipeline, system: System, calibrations: Sequence[StageCalibration]
) -> dict[str, str]:
    shape, link = pipeline.transformer, pipeline.on(system).link_bytes_per_s
    return {
        "estimate": "operations in closed form, on a model of the system; nothing was measured on "
        "these stages",
        "workload": f"{pipeline.name}, {shape.microbatch} x {shape.sequence} tokens a microbatch, "
        f"layers {','.join(map(str, pipeline.split))}, tensor degree {shape.tensor_degree}, "
        f"{shape.attention} attention, recomputation {shape.recomputation}",
        "tensor_traffic": f"at {link / 1e9:g} GB/s",
        "calibration": "; ".join(
            f"{found.source} at {found.sequence} tokens" for found in calibrations
        )
        or "none",
    }
