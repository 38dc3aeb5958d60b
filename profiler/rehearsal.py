"""Try within a minute, on the GPU of a rank, what a profile needs: load, clocks, energy and memory.

The load is a matrix product in bfloat16, measured as the rows of a profile are: at the highest
clock and at about half of it, to see whether the lock has an effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from perseus_planner.base.errors import (
    GpuNotPermitted,
    GpuNotSupported,
    PlannerError,
    UsageError,
)
from perseus_planner.engines.microbatch import describe_error
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.control import LockCheck
from perseus_planner.profiler.row_meter import RowMeter
from perseus_planner.profiler.stage import SingleGpu
from perseus_planner.profiler.torch_stage import synchronizer, torch_stage

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu

_WINDOW_S = 1.0
# of the matrices, by torch device; on the CPU, their cost is only counted
_SIZES = {"cuda": 8192, "cpu": 512}
# float32 matrices that the load needs memory for, with its gradients and what torch keeps
_NEEDED = 12
_USED = 0.05  # a share of the memory in use that is worth a remark


@dataclass(frozen=True)
class LoadRun:
    """The load at one setting."""

    locked_mhz: int | None  #: The SM clock that was locked, MHz; None if none was
    achieved_mhz: float  #: The SM clock that was achieved, MHz
    time_s: float  #: Time of one matrix product, seconds
    power_w: float  #: Mean power, watts
    throttle: tuple[str, ...]  #: Throttle reasons


@dataclass
class RankRehearsal:
    """What one rank found."""

    rank: int  #: The rank
    size: int  #: The number of rows of the matrices of the load
    gpu: str = ""  #: Text that opens its GPU; empty if it could not be opened
    name: str = ""  #: The name of the GPU; empty if it could not be opened
    #: Whether its clock can be locked; None if that was not tried, or failed for another reason.
    locks: bool | None = None
    #: Time between two moves of the energy counter, seconds; None if it cannot be used.
    counter_step_s: float | None = None
    runs: list[LoadRun] = field(default_factory=list)  #: The load at each setting
    #: What keeps this rank from being profiled, and what to do.
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  #: What else to know, and what to do


def rehearse_gpu(rank: int, text: str, device: torch.device, locks: bool) -> RankRehearsal:
    """Rehearse on this rank's GPU alone; an error becomes one of its problems.

    Args:
        rank: This rank.
        text: The GPU, as in `gpu_text`.
        device: The device of that GPU.
        locks: Whether to lock clocks; they are reset.
    """
    rehearsal = RankRehearsal(rank, _SIZES[device.type], remarks=[*surroundings()])
    try:
        with open_gpu(gpu_text(text, device)) as gpu:
            rehearsal.gpu = gpu.text
            rehearsal.name = gpu.name
            rehearsal.remarks += gpu.warnings()
            if device.type == "cuda":
                _check_memory(device, rehearsal)
            _measure_load(gpu, device, locks, rehearsal)
    except RuntimeError as error:  # of torch or CUDA
        rehearsal.problems.append(
            f"torch could not run a matrix product: {describe_error(error)}; see whether a script "
            "of torch alone can"
        )
    except PlannerError as error:
        rehearsal.problems.append(str(error))
    return rehearsal


def surroundings() -> Iterator[str]:
    """Yield what else on this node may set clocks."""
    if frequency := os.environ.get("SLURM_GPU_FREQ"):
        yield (
            f"Slurm sets the clocks of this job (--gpu-freq {frequency}); submit it without "
            "--gpu-freq"
        )
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = path.read_text().strip()
        except OSError:  # it has ended meanwhile
            continue
        if name == "nv-hostengine":
            yield (
                "DCGM runs on this node; see with `dcgmi config --get` that it sets no clocks or "
                "power limits, as it would set them again"
            )
            return


def _check_memory(device: torch.device, found: RankRehearsal) -> None:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    needed = _NEEDED * 4 * found.size**2
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU's memory are free"
    if free < needed:
        raise UsageError(
            f"{text}, and the rehearsal needs {needed / 2**30:.1f} GiB; end what else runs on this "
            "GPU"
        )
    if free < (1 - _USED) * total:
        found.remarks.append(
            f"{text}: other processes use the rest; end them, as they would be measured too"
        )


def _measure_load(gpu: Gpu, device: torch.device, locks: bool, found: RankRehearsal) -> None:
    """Measure the load at the highest clock and at a low one, which must have an effect; or at the
    clock that the GPU runs at.
    """
    meter = _meter(gpu, device)
    found.counter_step_s = meter.counter.interval_s
    # A dry run sets nothing, so a lock without effect is no finding there.
    if locks and not gpu.text.startswith("dry-run:"):
        try:
            with lease_gpus([gpu], power_limit=False):
                clocks_mhz = gpu.supported_clocks_mhz
                half_mhz = clocks_mhz[0] / 2
                # About half of the highest clock: far enough apart that a lock shows.
                low_mhz = min(clocks_mhz, key=lambda clock_mhz: abs(clock_mhz - half_mhz))
                check = LockCheck(gpu.text)
                for clock_mhz in (clocks_mhz[0], low_mhz):
                    gpu.set_clock_mhz(clock_mhz)
                    found.runs.append(run := _run(gpu, device, meter, clock_mhz))
                    check.add(clock_mhz, run.achieved_mhz, run.throttle)
                check.finish()
                found.locks = True
        except (GpuNotPermitted, GpuNotSupported) as error:
            found.remarks.append(f"clocks were only observed: {error}")
            found.locks = False
    # What was measured under a lock that failed is replaced, as it may be half of it.
    if not found.locks:
        found.runs = [_run(gpu, device, meter, None)]


def _run(gpu: Gpu, device: torch.device, meter: RowMeter, clock_mhz: int | None) -> LoadRun:
    import torch

    size = _SIZES[device.type]
    module = torch.nn.Linear(size, size, bias=False, device=device)
    inputs = torch.randn(size, size, device=device)
    with (
        torch.autocast(device.type, torch.bfloat16),
        torch_stage(gpu, module, inputs) as stage,
    ):
        row = meter.measure_row(stage.runs["F"].run, clock_mhz, Random(0))
    throttle = row.evidence.throttle if row.evidence is not None else ()
    return LoadRun(clock_mhz, meter.achieved_mhz, row.time_s, row.energy_j / row.time_s, throttle)


def unlocked_mhz(text: str, device: torch.device) -> float:
    """Return the SM clock that a GPU achieves under load when nothing is set, MHz.

    Args:
        text: The GPU, as in `gpu_text`.
        device: The device of that GPU.

    Raises:
        GpuError: If the GPU cannot be read.
    """
    with open_gpu(gpu_text(text, device)) as gpu:
        return _run(gpu, device, _meter(gpu, device), None).achieved_mhz


def _meter(gpu: Gpu, device: torch.device) -> RowMeter:
    return RowMeter(gpu, synchronizer(device), SingleGpu(), _WINDOW_S, 0.0)
