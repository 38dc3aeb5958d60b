"""Try within a minute, on every rank, all that a profile needs: load, clocks, energy, memory and
messages.

The load is a matrix product, measured as the rows of a profile are: in float32, in bfloat16 under
autocast, and in bfloat16 at about half the highest clock, to see whether the lock has an effect.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from perseus_planner.base.checks import PASSED, Check, run_check
from perseus_planner.base.errors import (
    GpuError,
    GpuNotPermitted,
    GpuNotSupported,
    PlannerError,
    UsageError,
)
from perseus_planner.base.prefixes import si
from perseus_planner.engines.microbatch import describe_error
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.build import require_torch, torch_device
from perseus_planner.profiler.lock_check import LockCheck
from perseus_planner.profiler.ranks.group import RankGroup, process_group
from perseus_planner.profiler.ranks.neighbours import Message, exchange
from perseus_planner.profiler.row_meter import RowMeter
from perseus_planner.profiler.stage import SingleGpu
from perseus_planner.profiler.torch_stage import synchronizer, torch_stage

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu

MESSAGE_LIMIT_S = 20.0
"""How long the messages between two ranks may take, seconds."""

_WINDOW_S = 1.0
_SIZES = {
    "cuda": 8192,
    "cpu": 512,
}  # of the matrices, by torch device; on the CPU, their cost is only counted
_NEEDED = (
    12  # float32 matrices that the load needs memory for, with its gradients and what torch keeps
)
_USED = 0.05  # a share of the memory in use that is worth a remark
_SLOW = 1.10  # times the median of all ranks


@dataclass(frozen=True)
class LoadRun:
    """The load at one setting."""

    precision: str  #: "fp32", or "bf16" for float32 under autocast in bfloat16
    locked_mhz: int | None  #: The SM clock that was locked, MHz; None if none was
    achieved_mhz: float  #: The SM clock that was achieved, MHz
    time_s: float  #: Time of one matrix product, seconds
    power_w: float  #: Mean power, watts
    throttle: tuple[str, ...]  #: Throttle reasons


@dataclass(frozen=True)
class RankRehearsal:
    """What one rank found."""

    rank: int  #: The rank
    node: str  #: The name of its node
    gpu: str = ""  #: Text that opens its GPU; empty if it could not be opened
    name: str = ""  #: The name of the GPU; empty if it could not be opened
    #: Whether its clock can be locked; None if that was not tried, or failed for another reason.
    locks: bool | None = None
    size: int = 0  #: The number of rows of the matrices of the load
    #: Time between two moves of the energy counter, seconds; None if it cannot be used.
    counter_step_s: float | None = None
    runs: tuple[LoadRun, ...] = ()  #: The load at each setting
    free_bytes: int | None = None  #: Free memory of the GPU before the load; None on the CPU
    total_bytes: int | None = None  #: The memory of the GPU; None on the CPU
    received: tuple[Message, ...] = ()  #: The messages of the neighbours
    problems: tuple[str, ...] = ()  #: What keeps this rank from being profiled, and what to do
    remarks: tuple[str, ...] = ()  #: What else to know, and what to do


@dataclass(frozen=True)
class Rehearsal:
    """What all ranks found."""

    ranks: tuple[RankRehearsal, ...]  #: Each rank's
    has_passed: bool  #: Whether no rank has a problem
    #: Whether this process waits for a message that does not come, and cannot leave its process
    #: group.
    is_stuck: bool


@contextmanager
def rehearse(
    gpu: str = "cuda", *, locks: bool = True, stages: int | None = None
) -> Iterator[Rehearsal]:
    """Rehearse a profile on all ranks of a job, or on one GPU in a process alone; yield the same
    result on all ranks.

    Args:
        gpu: Each rank's GPU, as in `gpu_text`.
        locks: Whether to lock clocks; they are reset.
        stages: The number of stages; None for one on each rank. The ranks of a stage are next to
            each other.

    Raises:
        UsageError: If the ranks do not fit the stages, or torch cannot be imported.
        RankError: If another rank has ended.
    """
    require_torch()
    with process_group() as position:
        device = torch_device(gpu)
        if position is None:
            yield _rehearsal([rehearse_gpu(0, gpu, device, locks)])
            return
        with RankGroup() as group:
            result = _rehearse_together(group, gpu, device, locks, stages or group.size)
        yield result  # once all ranks have it, so that any of them may end


def _rehearse_together(
    group: RankGroup, gpu: str, device: torch.device, locks: bool, stages: int
) -> Rehearsal:
    if group.size % stages:
        raise UsageError(
            f"{group.size} ranks cannot hold {stages} stages evenly; give --stages a divisor of "
            "this number"
        )
    group.gather(None)
    own = rehearse_gpu(group.rank, gpu, device, locks)
    group.gather(None)
    messages = exchange(group, stages, device, MESSAGE_LIMIT_S)
    own = replace(own, received=messages.received, problems=(*own.problems, *messages.problems))
    return _rehearsal(group.gather(own), messages.is_stuck)


def _rehearsal(ranks: Sequence[RankRehearsal], is_stuck: bool = False) -> Rehearsal:
    compared = _compared(ranks)
    return Rehearsal(compared, not any(rank.problems for rank in compared), is_stuck)


def rehearse_gpu(rank: int, text: str, device: torch.device, locks: bool) -> RankRehearsal:
    """Rehearse on this rank's GPU alone; an error becomes one of its problems.

    Args:
        rank: This rank.
        text: The GPU, as in `gpu_text`.
        device: The device of that GPU.
        locks: Whether to lock clocks; they are reset.
    """
    rehearsal = RankRehearsal(rank, socket.gethostname(), remarks=tuple(surroundings()))
    try:
        with open_gpu(gpu_text(text, device)) as gpu:
            remarks = (*rehearsal.remarks, *gpu.warnings())
            rehearsal = replace(rehearsal, gpu=gpu.text, name=gpu.name, remarks=remarks)
            trial = _Trial(gpu, device, locks, rehearsal)
            for check in CHECKS:
                result = run_check(check, trial)
                if result.result != PASSED:
                    return replace(trial.found, problems=(result.text,))
            return trial.found
    except PlannerError as error:
        return replace(rehearsal, problems=(str(error),))


@dataclass
class _Trial:
    """The rehearsal of a rank that is under way."""

    gpu: Gpu
    device: torch.device
    locks: bool  #: Whether to lock clocks
    found: RankRehearsal  #: What it has found

    def note(self, remark: str = "", **fields: Any) -> None:
        """Add to what it has found."""
        remarks = (*self.found.remarks, remark) if remark else self.found.remarks
        self.found = replace(self.found, remarks=remarks, **fields)


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


def _check_memory(trial: _Trial) -> str:
    size = _SIZES[trial.device.type]
    trial.note(size=size)
    if trial.device.type != "cuda":
        return ""
    import torch

    free, total = torch.cuda.mem_get_info(trial.device)
    needed = _NEEDED * 4 * size * size
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU's memory are free"
    trial.note(free_bytes=free, total_bytes=total)
    if free < needed:
        raise UsageError(
            f"{text}, and the rehearsal needs {needed / 2**30:.1f} GiB; end what else runs on this "
            "GPU"
        )
    if free < (1 - _USED) * total:
        trial.note(f"{text}: other processes use the rest; end them, as they would be measured too")
    return text


def _check_load(trial: _Trial) -> str:
    """Measure the load at the highest clock, and at a low one; or at the clock that the GPU runs
    at.
    """
    gpu, device = trial.gpu, trial.device
    meter = _meter(gpu, device)
    trial.note(counter_step_s=meter.counter.interval_s)
    try:
        if trial.locks and not gpu.text.startswith("dry-run:"):
            try:
                with lease_gpus([gpu], power_limit=False):
                    trial.note(runs=_runs_at_clocks(gpu, device, meter), locks=True)
            except (GpuNotPermitted, GpuNotSupported) as error:
                trial.note(f"clocks were only observed: {error}", locks=False)
        if not trial.found.runs:
            observed = [_run(gpu, device, meter, precision, None) for precision in ("fp32", "bf16")]
            trial.note(runs=tuple(observed))
    except RuntimeError as error:  # of torch or CUDA
        raise UsageError(
            f"torch could not run a matrix product: {describe_error(error)}; see whether a "
            "script of torch alone can"
        ) from error
    return ""


def _check_locks(trial: _Trial) -> str:
    """Check that the clocks that were locked had an effect."""
    check = LockCheck(trial.gpu.text)
    try:
        for run in trial.found.runs:
            if run.precision == "bf16" and run.locked_mhz is not None:
                check.add(run.locked_mhz, run.achieved_mhz, run.throttle)
        check.finish()
    except GpuError:
        trial.note(locks=False)
        raise
    return ""


CHECKS: tuple[Check[_Trial], ...] = (
    Check("memory", _check_memory),
    Check("load", _check_load),
    Check("locks", _check_locks),
)
"""What is tried on each rank, in order; the first that fails is the last."""


def _runs_at_clocks(gpu: Gpu, device: torch.device, meter: RowMeter) -> tuple[LoadRun, ...]:
    clocks_mhz = gpu.supported_clocks_mhz
    low_mhz = min(clocks_mhz, key=lambda clock_mhz: abs(clock_mhz - clocks_mhz[0] / 2))
    runs = []
    for precision, clock_mhz in (
        ("fp32", clocks_mhz[0]),
        ("bf16", clocks_mhz[0]),
        ("bf16", low_mhz),
    ):
        gpu.set_clock_mhz(clock_mhz)
        runs.append(_run(gpu, device, meter, precision, clock_mhz))
    return tuple(runs)


def _run(
    gpu: Gpu, device: torch.device, meter: RowMeter, precision: str, clock_mhz: int | None
) -> LoadRun:
    import torch

    size = _SIZES[device.type]
    module = torch.nn.Linear(size, size, bias=False, device=device)
    inputs = torch.randn(size, size, device=device)
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        torch_stage(gpu, module, inputs) as stage,
    ):
        row = meter.measure_row(stage.runs["F"].run, clock_mhz, Random(0))
    throttle = row.evidence.throttle if row.evidence is not None else ()
    return LoadRun(
        precision, clock_mhz, meter.achieved_mhz, row.time_s, row.energy_j / row.time_s, throttle
    )


def unlocked_mhz(text: str, device: torch.device) -> float:
    """Return the SM clock that a GPU achieves under load when nothing is set, MHz.

    Args:
        text: The GPU, as in `gpu_text`.
        device: The device of that GPU.

    Raises:
        GpuError: If the GPU cannot be read.
    """
    with open_gpu(gpu_text(text, device)) as gpu:
        return _run(gpu, device, _meter(gpu, device), "bf16", None).achieved_mhz


def _meter(gpu: Gpu, device: torch.device) -> RowMeter:
    return RowMeter(gpu, synchronizer(device), SingleGpu(), _WINDOW_S, 0.0)


def _compared(ranks: Sequence[RankRehearsal]) -> tuple[RankRehearsal, ...]:
    """Add problems and remarks that only all ranks together show: GPUs that are shared, and slow
    ones.
    """
    gpus = Counter(
        (rank.node, rank.gpu)
        for rank in ranks
        if rank.gpu and not rank.gpu.startswith("simulated:")
    )
    return tuple(
        _beside_others(rank, gpus[rank.node, rank.gpu] > 1, _median_s(rank.name, ranks))
        for rank in ranks
    )


def _beside_others(rank: RankRehearsal, shares: bool, median_s: float) -> RankRehearsal:
    if shares:
        problem = (
            f"another rank on {rank.node} uses the same GPU, {rank.gpu}; name the back-end "
            "alone, such as nvml, and each rank uses the GPU that it computes on"
        )
        rank = replace(rank, problems=(*rank.problems, problem))
    time_s = _bf16_s(rank)
    if time_s is not None and time_s > _SLOW * median_s:
        remark = (
            f"its matrix product took {si(time_s, 's')}, and {si(median_s, 's')} on most ranks; "
            "see whether something else runs on this GPU, or cool it"
        )
        rank = replace(rank, remarks=(*rank.remarks, remark))
    return rank


def _median_s(name: str, ranks: Sequence[RankRehearsal]) -> float:
    return median(
        [time_s for rank in ranks if rank.name == name and (time_s := _bf16_s(rank)) is not None]
        or [0.0]
    )


def _bf16_s(rank: RankRehearsal) -> float | None:
    """Return the time of the load in bfloat16 at the highest clock, seconds; None if it was not
    measured.
    """
    return next((run.time_s for run in rank.runs if run.precision == "bf16"), None)
