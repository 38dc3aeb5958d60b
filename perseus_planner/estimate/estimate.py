"""Estimate: a profile of a pipeline that nobody has run, from its shape and a model of its GPU.

A computation takes the seconds and joules that the model of the GPU gives to its FLOPs and bytes (`works.py`), times
how far a measured stage shows that model to be off (`calibration.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.estimate.calibration import Calibration, factors
from perseus_planner.profiles.groups import on_each_gpu
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.estimate.op_costs import Workload
    from perseus_planner.gpu.simulated.model import GpuModel


def estimate(
    workload: Workload, gpu: GpuModel, calibrations: Sequence[Calibration] = (), *, split_backward: bool = False
) -> Profile:
    """The profile of every stage at every clock of `gpu`, said to be simulated; its `conditions` tell from what.

    Args:
        workload: what runs. With a tensor degree above 1 energies are sums over the GPUs of a stage.
        gpu: what each GPU is.
        calibrations: a measured stage, or two of different sequence lengths; none: the model of the GPU alone. The
            blocking power is that of the first which has one.
        split_backward: estimate the gradients of inputs and of weights apart too.

    Raises:
        UsageError: the calibrations do not go together.
    """
    found = factors(calibrations, gpu, workload.transformer.sequence)
    measurements = {}
    for stage, works in enumerate(workload.works(gpu)):
        for kind in "FBIW" if split_backward else "FB":
            load, (times, energies) = gpu.load(works[kind]), found[kind]
            measurements[stage, kind] = tuple(
                Measurement(
                    clock, load.time_s(clock) * float(times[place]), load.energy_j(clock) * float(energies[place])
                )
                for place, clock in enumerate(gpu.clocks_mhz)
            )
    powers_w = [each.blocking_power_w for each in calibrations if each.blocking_power_w is not None]
    one = Profile(
        measurements,
        blocking_power_w=(powers_w or [gpu.blocking_power_w])[0],
        gpu=f"simulated {gpu.name}",
        origin="simulated",
        conditions=_conditions(workload, calibrations),
    )
    return on_each_gpu(one, workload.transformer.tensor_degree)


def _conditions(workload: Workload, calibrations: Sequence[Calibration]) -> dict[str, str]:
    shape, link = workload.transformer, workload.link_bytes_per_s
    return {
        "estimate": "FLOPs and bytes in closed form, on a model of the GPU; nothing was measured on these stages",
        "workload": f"{workload.name}, {shape.microbatch} x {shape.sequence} tokens a microbatch, "
        f"layers {','.join(map(str, workload.split))}, tensor degree {shape.tensor_degree}, "
        f"{shape.attention} attention, recomputation {shape.recomputation}",
        "tensor_traffic": "not counted" if link is None else f"at {link / 1e9:g} GB/s",
        "calibration": "; ".join(f"{each.source} at {each.sequence} tokens" for each in calibrations) or "none",
    }
