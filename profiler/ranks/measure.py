"""Measure the stages that this process holds, alone or beside other ranks, and assemble the
profile of all stages.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.prefixes import si
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.ranks.group import RankGroup, StageGroup
from perseus_planner.profiler.ranks.neighbours import connect_neighbour
from perseus_planner.profiler.stage import SingleGpu, assemble_profile, with_one_power
from perseus_planner.profiler.sweep import SweepSettings, delete_rows, measure_stage, rows_path
from perseus_planner.profiles.sharding import TORCH

if TYPE_CHECKING:
    import torch

    from perseus_planner.profiler.again import Again
    from perseus_planner.profiler.stage import Block, Progress, Repeating, Stage, StageRows
    from perseus_planner.profiles.profiles import Profile

UNLIKE_TRAINING = (
    "over 10% apart, so the profile is not that of the training; profile an iteration after "
    "the first ones, of several microbatches, while nothing else runs on the GPU"
)
"""What `difference_from_training` means, and what to do."""

_TOLERANCE = 0.10

# The same on all GPUs of a stage, which may wait for each other in each repetition.
_ROUNDS = 3
_REPETITIONS = 3


def difference_from_training(stage: Stage, trained_s: Mapping[str, float]) -> str:
    """Run kinds of a stage again, and return how their times differ from those in training; empty
    if they do not.

    Args:
        stage: The stage, at the clock at which the iteration ran.
        trained_s: Kind -> its time in the iteration, seconds.
    """
    texts = []
    for kind, before_s in trained_s.items():
        repeated_s = _repeated_s(stage, kind)
        if abs(repeated_s - before_s) > _TOLERANCE * before_s:
            texts.append(
                f"{kind} took {si(before_s, 's')} in the iteration and takes {si(repeated_s, 's')} "
                "when it is repeated"
            )
    return "; ".join(texts)


def _repeated_s(stage: Stage, kind: str) -> float:
    """Return the time of one repetition in the fastest of some rounds, seconds."""
    timed = stage.runs[kind]
    timed.run(1)  # gets ready
    least_s = min(_round_s(stage, kind) for _ in range(_ROUNDS))
    return least_s - (0.0 if timed.includes is None else _repeated_s(stage, timed.includes))


def _round_s(stage: Stage, kind: str) -> float:
    stage.synchronize()
    begin_s = time.perf_counter()
    stage.runs[kind].run(_REPETITIONS)
    stage.synchronize()
    return (time.perf_counter() - begin_s) / _REPETITIONS


_logger = logging.getLogger("perseus_planner.profiler")


@dataclass(frozen=True)
class LocalStage:
    """A stage of the pipeline that this process holds."""

    number: int  #: The number of the stage in the pipeline, from 0
    #: Opens the stage on a GPU for as long as it is measured, given the function that blocks it on
    #: its neighbour (None if it has none), and what watches its repetitions.
    open: Callable[[Gpu, Block | None, Repeating], AbstractContextManager[Stage]]
    #: Kind -> its time in the training iteration that the stage repeats, seconds; empty if there is
    #: none.
    trained_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileRequest:
    """How to make a profile."""

    gpu: str  #: Each rank's GPU, as in `gpu_text`
    settings: SweepSettings = field(default_factory=SweepSettings)  #: How to measure
    #: The profile to write, .yaml, beside which finished rows are kept until then; None to write
    #: nothing.
    output: Path | None = None
    resume: bool = False  #: Whether to go on from the rows that were kept
    #: Power of one waiting GPU, watts, instead of what is measured.
    blocking_power_w: float | None = None
    progress: Progress | None = None  #: Called with this rank's rows
    iteration: Mapping[str, str | int] = field(default_factory=dict)  #: As in `Profile.iteration`
    #: Further conditions of the measurement, as in `Profile.conditions`.
    conditions: Mapping[str, str] = field(default_factory=dict)
    #: What alone to measure, and to join to a profile; None for a new profile.
    again: Again | None = None


def measure_alone(
    stages: Sequence[LocalStage], request: ProfileRequest, device: torch.device
) -> Profile:
    """Measure all stages of a pipeline in this process, one after the other, and write their
    profile.

    Raises:
        UsageError: If the stages would not run on the GPU that is measured.
        GpuError, ProfileError: As in `measure_stage` and `assemble_profile`.
    """
    with _lease_gpu(request, device) as gpu:
        rows = _measure(gpu, stages, len(stages), request, SingleGpu(), None, nullcontext)
    return _write_profile(rows, request)


def measure_with_ranks(
    group: RankGroup,
    stages: Sequence[LocalStage],
    tensor_rank: int,
    request: ProfileRequest,
    device: torch.device,
) -> Profile | None:
    """Measure the stages of this rank while the others measure theirs, and in step with the ranks
    that hold the same ones. All ranks call this; rank 0 gets the profile.

    Args:
        group: All ranks.
        stages: The stages that this rank holds.
        tensor_rank: The tensor rank of this rank.
        request: How to measure; the same on all ranks.
        device: Where this rank computes.

    Raises:
        UsageError: If the stages would not run on the GPU that is measured, two ranks would
            measure the same GPU, or the ranks of a stage are no replicas of each other.
        RankError: If another rank has ended.
        GpuError, ProfileError: As in `measure_stage` and `assemble_profile`.
    """
    held = group.gather((tuple(stage.number for stage in stages), tensor_rank))
    replicas: Counter[object] = Counter()
    pipelines: dict[tuple[int, int], list[int]] = {}  # of a replica and a tensor rank
    sharing: list[tuple[int, int, int]] = []  # replica, tensor rank, rank
    # The k-th rank with the same stages and tensor rank is of the k-th replica.
    for rank, (numbers, tensor) in enumerate(held):
        replica = replicas[numbers, tensor]
        replicas[numbers, tensor] += 1
        pipelines.setdefault((replica, tensor), []).append(rank)
        if numbers == held[group.rank][0]:
            sharing.append((replica, tensor, rank))
    size = len({tensor for _, tensor, _ in sharing})
    # Every replica must have each of its tensor ranks once.
    if len(sharing) != size * (1 + max(sharing)[0]):
        raise UsageError(
            f"stage {stages[0].number} is on {len(sharing)} ranks, which are not replicas of "
            f"{size} GPUs each; give every rank that shares a stage the same tensor_group"
        )
    of_stage = StageGroup(group, [rank for _, _, rank in sorted(sharing)], size)
    # The ranks of each pipeline from the first stage to the last.
    messages = [sorted(ranks, key=held.__getitem__) for ranks in pipelines.values()]
    with (
        connect_neighbour(
            group, messages if request.blocking_power_w is None else [], device
        ) as neighbour,
        _lease_gpu(request, device) as gpu,
    ):
        # Two ranks on one GPU would set and measure each other's clocks.
        _refuse_shared_gpus(group.gather((socket.gethostname(), gpu.uuid, gpu.keeps_settings)))
        block = neighbour.block if neighbour.exists else None
        total = len({number for numbers, _ in held for number in numbers})
        with _rank_errors(group):
            rows = _measure(gpu, stages, total, request, of_stage, block, group.repeating)
    # One rank of each stage hands over the rows, which all of the stage have.
    gathered = group.gather(rows if group.rank == min(sharing)[2] else [])
    profile = None
    if group.rank == 0:
        profile = _write_profile([row for rows in gathered for row in rows], request)
    group.gather(None)  # if writing fails, all ranks end
    return profile


@contextmanager
def _rank_errors(group: RankGroup) -> Iterator[None]:
    """Turn the error of a stage's collective that lost a rank into the one that all ranks agree
    on.
    """
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "Connection closed by peer" not in str(error):
            raise
        raise group.rank_error(
            "a rank that shares a stage has ended; see why, and resume"
        ) from error


@contextmanager
def _lease_gpu(request: ProfileRequest, device: torch.device) -> Iterator[Gpu]:
    """Open this process's GPU, which no other process of the planner can set meanwhile.

    Of an emulated GPU, open the simulated one that it behaves like: the same times and energies,
    without the wait.
    """
    gpu = open_gpu(gpu_text(request.gpu, device))
    if isinstance(gpu, EmulatedGpu):
        with gpu:
            gpu = open_gpu(gpu.simulated_text)
    with gpu, _lease(gpu, request.settings):
        yield gpu


def _lease(gpu: Gpu, settings: SweepSettings) -> AbstractContextManager[None]:
    if settings.control == "observed" or not gpu.keeps_settings:
        return nullcontext()
    from perseus_planner.gpu.lease.lease import lease_gpus

    return lease_gpus([gpu], power_limit=settings.control == "power-limit")


def _refuse_shared_gpus(gpus: Sequence[tuple[str, str, bool]]) -> None:
    taken: set[Any] = set()
    for gpu in gpus:
        if gpu[2] and gpu in taken:
            raise UsageError(
                f"two ranks on {gpu[0]} would measure the same GPU, {gpu[1]}; name the back-end "
                "alone, such as nvml, and each rank measures the GPU that it computes on"
            )
        taken.add(gpu)


def _measure(
    gpu: Gpu,
    stages: Sequence[LocalStage],
    total: int,
    request: ProfileRequest,
    group: SingleGpu | StageGroup,
    block: Block | None,
    repeating: Repeating,
) -> list[StageRows]:
    """Measure stages one after the other, of `total` in the pipeline."""
    rows = []
    for stage in stages:
        with stage.open(gpu, block, repeating) as opened:
            # The times of a simulated GPU are modelled.
            trained_s = {} if gpu.origin == "simulated" else stage.trained_s
            # Before clocks are set, as the training ran at its own.
            difference = difference_from_training(opened, trained_s)
            if difference:
                _logger.warning("stage %d: %s, %s", stage.number, difference, UNLIKE_TRAINING)
            measured = measure_stage(
                gpu,
                opened,
                stage.number,
                request.settings.for_one_of(len(stages)),
                group=group,
                rows_file=rows_path(request.output, stage.number)
                if request.output is not None and group.is_first
                else None,
                resume=request.resume,
                progress=request.progress,
                stages=total,
                again=request.again,
            )
        if difference:
            measured = replace(
                measured, conditions={**measured.conditions, "unlike training": difference}
            )
        # Said once for each stage, by the rank that keeps its rows.
        for name in ("slow replicas", "power sensor"):
            if group.is_first and name in measured.conditions:
                _logger.warning("stage %d: %s: %s", stage.number, name, measured.conditions[name])
        rows.append(measured)
    return with_one_power(rows)


def _write_profile(rows: Sequence[StageRows], request: ProfileRequest) -> Profile:
    """Return the profile of all stages; write it and delete the kept rows, if there is a file."""
    import torch

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    conditions = {"measured at": now, TORCH: str(torch.__version__), **request.conditions}
    profile = assemble_profile(
        rows,
        blocking_power_w=request.blocking_power_w,
        iteration=request.iteration,
        conditions=conditions,
    )
    if request.again is not None:
        profile = request.again.joined(profile)
    if request.output is not None:
        profile.save(request.output)
        # Only now: until the profile is on disk, they are what `resume` goes on from.
        delete_rows(request.output, profile.stages)
    return profile
