"""Measure the stages that this process holds, alone or beside other ranks, and assemble the
profile of all stages.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.ranks.group import TIMEOUT_S, RankGroup, StageGroup
from perseus_planner.profiler.ranks.neighbours import connect_neighbour
from perseus_planner.profiler.row_file import delete_rows, rows_path
from perseus_planner.profiler.stage import assemble_profile, with_one_power
from perseus_planner.profiler.sweep import SweepSettings, measure_stage
from perseus_planner.profiler.training_check import UNLIKE_TRAINING, difference_from_training

if TYPE_CHECKING:
    import torch

    from perseus_planner.profiler.stage import Block, Progress, Stage, StageRows
    from perseus_planner.profiles.profiles import Profile

_logger = logging.getLogger("perseus_planner.profiler")


@dataclass(frozen=True)
class LocalStage:
    """A stage of the pipeline that this process holds."""

    number: int  #: The number of the stage in the pipeline, from 0
    #: Opens the stage on a GPU for as long as it is measured, given the function that blocks it on
    #: its neighbour (None if it has none).
    open: Callable[[Gpu, Block | None], AbstractContextManager[Stage]]
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
    #: A rank without a heartbeat for this long is presumed dead, seconds.
    timeout_s: float = TIMEOUT_S
    progress: Progress | None = None  #: Called with this rank's rows
    iteration: Mapping[str, str | int] = field(default_factory=dict)  #: As in `Profile.iteration`


@dataclass(frozen=True)
class _Part:
    """This process's part in the measurement of a pipeline."""

    held: int  #: Number of the stages that it holds
    stages: int  #: Number of all stages
    tensor_rank: int = 0  #: Its rank among the processes that share its stages
    group: RankGroup | None = None  #: All ranks; None if it is alone
    sharing: StageGroup | None = None  #: The ranks that share its stages
    block: Block | None = None  #: As in `Stage`


def measure_alone(
    stages: Sequence[LocalStage], request: ProfileRequest, device: torch.device
) -> Profile:
    """Measure all stages of a pipeline in this process, one after the other, and write their
    profile.

    Raises:
        UsageError: If the stages would not run on the GPU that is measured.
        GpuError, ProfileError: As in `measure_stage` and `assemble_profile`.
    """
    part = _Part(len(stages), len(stages))
    with _lease_gpu(request, device) as gpu:
        rows = [_measure(gpu, stage, request, part) for stage in stages]
    return _write_profile(with_one_power(rows), request)


def measure_with_ranks(
    group: RankGroup,
    stages: Sequence[LocalStage],
    tensor_rank: int,
    request: ProfileRequest,
    device: torch.device,
) -> Profile | None:
    """Measure the stages of this rank while the others measure theirs. All ranks call this; rank 0
    gets the profile.

    Of data-parallel replicas, the one with the lowest ranks measures while the others wait.

    Args:
        group: All ranks.
        stages: The stages that this rank holds.
        tensor_rank: The tensor rank of this rank.
        request: How to measure; the same on all ranks.
        device: Where this rank computes.

    Raises:
        UsageError: If the stages would not run on the GPU that is measured, or two ranks would
            measure the same GPU.
        RankError: If another rank has ended.
        GpuError, ProfileError: As in `measure_stage` and `assemble_profile`.
    """
    holdings = group.gather((tuple(stage.number for stage in stages), tensor_rank))
    measuring = [rank for rank, holding in enumerate(holdings) if holdings.index(holding) == rank]
    pipelines = [
        sorted(
            (rank for rank in measuring if holdings[rank][1] == number), key=holdings.__getitem__
        )
        for number in dict.fromkeys(number for _, number in holdings)
    ]
    rows: list[StageRows] = []
    messages = pipelines if request.blocking_power_w is None else []
    with connect_neighbour(group, messages, device) as neighbour:
        if group.rank not in measuring:
            group.gather(None)
        else:
            sharing = [rank for rank in measuring if holdings[rank][0] == holdings[group.rank][0]]
            part = _Part(
                held=len(stages),
                stages=len({number for numbers, _ in holdings for number in numbers}),
                tensor_rank=tensor_rank,
                group=group,
                sharing=StageGroup(group, sorted(sharing, key=lambda rank: holdings[rank][1])),
                block=neighbour.block if neighbour.exists else None,
            )
            with _lease_gpu(request, device) as gpu:
                _refuse_shared_gpus(
                    group.gather((socket.gethostname(), gpu.uuid, gpu.keeps_settings))
                )
                with _rank_errors(group):
                    rows = [_measure(gpu, stage, request, part) for stage in stages]
    gathered = group.gather(with_one_power(rows) if tensor_rank == 0 else [])
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


def _refuse_shared_gpus(gpus: Sequence[tuple[str, str, bool] | None]) -> None:
    taken: set[Any] = set()
    for gpu in gpus:
        if gpu is not None and gpu[2] and gpu in taken:
            raise UsageError(
                f"two ranks on {gpu[0]} would measure the same GPU, {gpu[1]}; name the back-end "
                "alone, such as nvml, and each rank measures the GPU that it computes on"
            )
        taken.add(gpu)


def _measure(gpu: Gpu, stage: LocalStage, request: ProfileRequest, part: _Part) -> StageRows:
    def progress(done: int, total: int) -> None:
        if part.group is not None:
            part.group.check()
        if request.progress is not None:
            request.progress(done, total)

    output = request.output if part.tensor_rank == 0 else None
    with stage.open(gpu, part.block) as opened:
        # The times of a simulated GPU are modelled.
        trained_s = {} if gpu.origin == "simulated" else stage.trained_s
        difference = difference_from_training(opened, trained_s)
        if difference:
            _logger.warning("stage %d: %s, %s", stage.number, difference, UNLIKE_TRAINING)
        rows = measure_stage(
            gpu,
            opened,
            stage.number,
            request.settings.for_one_of(part.held),
            group=part.sharing,
            rows_file=None if output is None else rows_path(output, stage.number),
            resume=request.resume,
            progress=progress,
            stages=part.stages,
        )
    if not difference:
        return rows
    return replace(rows, conditions={**rows.conditions, "unlike training": difference})


def _write_profile(rows: Sequence[StageRows], request: ProfileRequest) -> Profile:
    import torch

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    conditions = {"measured at": now, "torch": str(torch.__version__)}
    profile = assemble_profile(
        rows,
        blocking_power_w=request.blocking_power_w,
        iteration=request.iteration,
        conditions=conditions,
    )
    if request.output is not None:
        profile.save(request.output)
        delete_rows(request.output, profile.stages)
    return profile
