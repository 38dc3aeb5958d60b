"""Profile a pipeline inside its training script: the engine's stages, on the inputs of a real
iteration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError, fault_text
from perseus_planner.engines import engine_of
from perseus_planner.engines.engine import sharded_torch
from perseus_planner.engines.recording import ForwardStep, LossOfSteps, RecordedStage, Recording
from perseus_planner.engines.torch_state import refusal
from perseus_planner.profiler.ranks.group import RankGroup, Stuck
from perseus_planner.profiler.ranks.measure import LocalStage, ProfileRequest, measure_with_ranks
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiler.torch_stage import torch_stage
from perseus_planner.profiles.sharding import SHARDED

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.stage import Block, Progress, Repeating, Stage
    from perseus_planner.profiles.profiles import Profile

_logger = logging.getLogger("perseus_planner.profiler")


@dataclass
class Profiling:
    """The profiling in progress inside the block of `profile_pipeline`."""

    profile: Profile | None = None  #: After the block, on rank 0, the profile; None on other ranks
    #: After the block, why there is no profile, if the stages cannot be measured; None if they can.
    problem: str | None = None
    _loss: LossOfSteps = field(default_factory=LossOfSteps, repr=False)

    def watched(self, forward_step: ForwardStep) -> ForwardStep:
        """Return the `forward_step` to give to Megatron-core inside the block, so that its loss
        is known.
        """
        return self._loss.watched(forward_step)


@contextmanager
def profile_pipeline(
    engine: Any,
    *,
    gpu: str = "cuda",
    output: str | os.PathLike[str] | None = None,
    settings: SweepSettings | None = None,
    resume: bool = False,
    tensor_group: Any = None,
    blocking_power_w: float | None = None,
    progress: Progress | None = None,
    modes: Mapping[str, Callable[[], None]] | None = None,
) -> Iterator[Profiling]:
    """Profile the pipeline that `engine` trains, on all its ranks.

    Inside the block, run one training iteration on every rank: `engine.train_batch(...)`,
    `forward_backward_func(forward_step_func=profiling.watched(forward_step), ...)` or
    `schedule.step(...)`. On leaving the block, the stages that the iteration ran are measured on
    its last microbatch. Weights, optimizer, gradients and random state are left as after the
    iteration. All ranks must enter and leave the block; those that hold a stage, its replicas and
    their tensor ranks, measure it in step. Stages that cannot be measured, and a repetition that
    takes longer than `SweepSettings.repetition_s`, give no profile but a warning through the logger
    `perseus_planner.profiler`. It also warns of a forward or backward that takes over 10 % more or
    less time when it is repeated than in the iteration; the profile says so under `conditions`.

    Args:
        engine: A DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a
            schedule of torch.distributed.pipelining.
        gpu: Each rank's GPU, as in `torch_device.gpu_text`.
        output: The profile to write on rank 0, .yaml.
        settings: How to measure; the defaults if None.
        resume: Whether to go on from the finished rows beside `output`.
        tensor_group: For torch schedules, the process group of the ranks that share a stage; None
            if they share none.
        blocking_power_w: Power of one waiting GPU, watts, instead of what is measured.
        progress: Called with this rank's rows.
        modes: As `planner_runtime` takes them; each stage is measured in every one.

    Raises:
        UsageError: If `engine` is of another kind, or no iteration ran inside the block.
        RankError: If another rank has ended, or does not come back from a repetition.
        GpuError, ProfileError: As in `measure_stage`.
    """
    profiling, adapter = Profiling(), engine_of(engine, "profile_pipeline")
    problem, recording = None, None
    try:
        recording = Recording(adapter, profiling._loss)
    except UsageError as error:
        problem = str(error)
    except Exception as error:
        problem = fault_text(error)
    with nullcontext() if recording is None else recording.running():
        yield profiling
    settings = settings or SweepSettings()
    with RankGroup(settings.repetition_s) as group:
        if recording is not None:
            problem = recording.problem
        stages = [] if recording is None or problem is not None else recording.stages()
        problem = problem or refusal(recorded.stage.module for recorded in stages)
        profiling.problem = next(filter(None, group.gather(problem)), None)
        if profiling.problem is None and recording is not None:
            request = ProfileRequest(
                gpu=gpu,
                settings=settings,
                output=None if output is None else Path(output),
                resume=resume,
                blocking_power_w=blocking_power_w,
                progress=progress,
                iteration=adapter.iteration(recording.forwards),
                conditions={SHARDED: "by fully_shard"} if sharded_torch(adapter) else {},
            )
            try:
                profiling.profile = measure_with_ranks(
                    group,
                    [_local_stage(recorded, adapter.splits_backward, modes) for recorded in stages],
                    adapter.tensor_rank if tensor_group is None else _rank_in(tensor_group),
                    request,
                    adapter.device,
                )
            except Stuck as error:
                if not group.have_all_returned():
                    raise
                profiling.problem = str(error)
        if profiling.problem is not None and group.rank == 0:
            _logger.warning("the pipeline was not profiled: %s", profiling.problem)


def _local_stage(
    recorded: RecordedStage,
    splits_backward: bool,
    modes: Mapping[str, Callable[[], None]] | None,
) -> LocalStage:
    number = recorded.stage.number

    @contextmanager
    def opened(gpu: Gpu, block: Block | None, repeating: Repeating) -> Iterator[Stage]:
        measured = torch_stage(
            gpu,
            recorded.stage.module,
            recorded.inputs,
            recorded.loss,
            first=number == 0,
            split_backward=splits_backward,
            forward=recorded.forward,
            block=block,
            repeating=repeating,
            modes=modes,
        )
        with recorded.as_recorded(), recorded.stage.preserve_state(), measured as stage:
            yield stage

    return LocalStage(number, opened, recorded.trained_s)


def _rank_in(group: Any) -> int:
    import torch.distributed as dist

    return int(dist.get_rank(group))
