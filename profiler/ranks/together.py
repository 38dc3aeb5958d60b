"""The stages that this process holds, measured beside those of the other ranks, and the profile of them all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.profiling import (
    StageRows,
    SweepSettings,
    assembled,
    forget_rows,
    measure_stage,
    rows_path,
)
from perseus_planner.profiler.ranks.meeting import TIMEOUT_S, Meeting, StageGroup
from perseus_planner.profiler.ranks.neighbours import connected

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from perseus_planner.profiler.stage import Progress, Stage
    from perseus_planner.profiles.profiles import Profile

Block = Callable[[float], None]


@dataclass(frozen=True)
class LocalStage:
    """A stage of the pipeline that this process holds.

    Attributes:
        number: in the pipeline, from 0.
        opened: the stage on a GPU, given what blocks it on its neighbour (None where it has none), for as long as it is
            measured.
    """

    number: int
    opened: Callable[[Gpu, Block | None], AbstractContextManager[Stage]]


@dataclass(frozen=True)
class Request:
    """How a profile is made.

    Attributes:
        gpu: each rank's GPU, as `gpu_text` reads it.
        settings: of the sweep.
        output: the profile to write, .yaml, with the finished rows kept beside it until then; None: not written.
        resume: go on from the rows that were kept.
        blocking_power_w: used instead of what was measured; watts of one GPU.
        timeout_s: after how long without a sign of life a rank is taken for dead, seconds.
        progress: told of this rank's rows.
    """

    gpu: str
    settings: SweepSettings = field(default_factory=SweepSettings)
    output: Path | None = None
    resume: bool = False
    blocking_power_w: float | None = None
    timeout_s: float = TIMEOUT_S
    progress: Progress | None = None


def profiled_alone(stages: Sequence[LocalStage], request: Request, device: torch.device) -> Profile:
    """The profile of a pipeline all of whose stages are measured here, one after the other.

    Raises:
        UsageError: a GPU would not be what computes.
        GpuError, ProfileError: as `measure_stage` and `assembled`.
    """
    with _taken(request, device) as gpu:
        rows = [_measured(gpu, stage, request) for stage in stages]
    return _written(rows, request)


def profiled_together(
    meeting: Meeting, stages: Sequence[LocalStage], tensor_rank: int, request: Request, device: torch.device
) -> Profile | None:
    """The profile of a pipeline of which every rank measures its stages; all ranks call this, and only rank 0 gets it.

    Of data-parallel replicas, those of the lowest rank measure, the others wait.

    Args:
        meeting: of all ranks.
        stages: what this rank holds.
        tensor_rank: which of the GPUs that share its stages this rank has.
        request: how; the same on all ranks.
        device: where this rank computes.

    Raises:
        UsageError: a GPU would not be what computes, or two ranks would measure one GPU.
        RankError: another rank has ended.
        GpuError, ProfileError: as `measure_stage` and `assembled`.
    """
    seats = meeting.gathered((tuple(stage.number for stage in stages), tensor_rank))
    measuring = [rank for rank, seat in enumerate(seats) if seats.index(seat) == rank]
    of_tensor_rank = {each: [rank for rank in measuring if seats[rank][1] == each] for _, each in seats}
    pipelines = [sorted(ranks, key=lambda rank: seats[rank]) for ranks in of_tensor_rank.values()]
    rows: list[StageRows] = []
    with connected(meeting, pipelines, device) as neighbour:
        if meeting.rank not in measuring:
            meeting.gathered(None)
        else:
            sharing = [rank for rank in measuring if seats[rank][0] == seats[meeting.rank][0]]
            group = StageGroup(meeting, sorted(sharing, key=lambda rank: seats[rank][1]))
            block = neighbour.block if neighbour.exists else None
            with _taken(request, device) as gpu:
                _refuse_shared(meeting.gathered((socket.gethostname(), gpu.uuid, gpu.keeps_settings)))
                with _loss_of_peers_told(meeting):
                    rows = [_measured(gpu, stage, request, meeting, group, block, tensor_rank) for stage in stages]
    everyone = meeting.gathered(rows if tensor_rank == 0 else [])
    profile = None
    if meeting.rank == 0:
        profile = _written([row for each in everyone for row in each], request)
    meeting.gathered(None)  # an error in writing it is everyone's
    return profile


@contextmanager
def _loss_of_peers_told(meeting: Meeting) -> Iterator[None]:
    """What a collective of the stage's own says when another rank is gone becomes the error that all agree on."""
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "Connection closed by peer" not in str(error):
            raise
        raise meeting.ended("a rank that shares a stage has ended; see why, and resume") from error


@contextmanager
def _taken(request: Request, device: torch.device) -> Iterator[Gpu]:
    """This process's GPU; no other process of the planner sets it meanwhile."""
    with open_gpu(gpu_text(request.gpu, device)) as gpu, _held(gpu, request.settings):
        yield gpu


def _held(gpu: Gpu, settings: SweepSettings) -> AbstractContextManager[None]:
    if settings.control == "observed" or not gpu.keeps_settings:
        return nullcontext()
    from perseus_planner.gpu.lease.lease import held

    return held([gpu], power_limit=settings.control == "power-limit")


def _refuse_shared(gpus: Sequence[tuple[str, str, bool] | None]) -> None:
    found: set[Any] = set()
    for gpu in gpus:
        if gpu is not None and gpu[2] and gpu in found:
            raise UsageError(
                f"two ranks on {gpu[0]} would measure one GPU, {gpu[1]}; name the back-end alone, such as nvml, for "
                "each rank to measure the GPU that it computes on"
            )
        found.add(gpu)


def _measured(
    gpu: Gpu,
    stage: LocalStage,
    request: Request,
    meeting: Meeting | None = None,
    group: StageGroup | None = None,
    block: Block | None = None,
    tensor_rank: int = 0,
) -> StageRows:
    def progress(done: int, total: int) -> None:
        if meeting is not None:
            meeting.check()
        if request.progress is not None:
            request.progress(done, total)

    keep = rows_path(request.output, stage.number) if request.output is not None and tensor_rank == 0 else None
    with stage.opened(gpu, block) as opened:
        return measure_stage(
            gpu,
            opened,
            stage.number,
            request.settings,
            group=group,
            keep=keep,
            resume=request.resume,
            progress=progress,
        )


def _written(rows: Sequence[StageRows], request: Request) -> Profile:
    import torch

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    conditions = {"measured at": now, "torch": str(torch.__version__)}
    profile = assembled(rows, blocking_power_w=request.blocking_power_w, conditions=conditions)
    if request.output is not None:
        profile.save(request.output)
        forget_rows(request.output, profile.stages)
    return profile
