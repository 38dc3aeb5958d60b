"""Profile a pipeline inside its training script: the engine's stages, on the inputs of a real
iteration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.engines import blocks, engine_of
from perseus_planner.engines.engine import has_pairs, sharded_torch
from perseus_planner.engines.recording import ForwardStep, LossOfSteps, RecordedStage, Recording
from perseus_planner.engines.torch_state import preserve_state, refusal
from perseus_planner.profiler.ranks.group import RankGroup
from perseus_planner.profiler.ranks.measure import LocalStage, ProfileRequest, measure_with_ranks
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiler.torch_stage import torch_stage
from perseus_planner.profiles.sharding import SHARDED
from perseus_planner.schedules import cell_of
from perseus_planner.schedules.pipeline import pair_kind

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.engines.overlapped import OverlappedMicrobatch
    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.again import Again
    from perseus_planner.profiler.stage import Block, Progress, Repeating, Stage
    from perseus_planner.profiles.profiles import Profile

_logger = logging.getLogger("perseus_planner.profiler")

_HAS_PAIRS = (
    "a function of the training runs forwards and backwards as overlapped pairs, which cannot be "
    "repeated alone; train without a plan, which learns the rows of pairs"
)


@dataclass
class Profiling:
    """The profiling in progress inside the block of `profile_pipeline`."""

    profile: Profile | None = None  #: After the block, on rank 0, the profile; None on other ranks
    #: After the block, why there is no profile, the same on all ranks; None if there is one.
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
    again: Again | None = None,
) -> Iterator[Profiling]:
    """Profile the pipeline that `engine` trains, on all its ranks.

    Inside the block, run one training iteration on every rank: `engine.train_batch(...)`,
    `forward_backward_func(forward_step_func=profiling.watched(forward_step), ...)` or
    `schedule.step(...)`. On leaving the block, the stages that the iteration ran are measured on
    its last microbatch. Weights, optimizer, gradients and random state are left as after the
    iteration. All ranks must enter and leave the block; those that hold a stage, its replicas and
    their tensor ranks, measure it in step.

    Profiling never ends the training. Whatever goes wrong while it records or measures, on any
    rank, gives no profile but `Profiling.problem` on all ranks, and a warning through the logger
    `perseus_planner.profiler`: stages that cannot be measured, a GPU that cannot be read, a
    repetition that takes longer than `SweepSettings.repetition_s`, or a fault of the planner. Rows
    that were finished stay beside `output`, for `resume`.

    A kind that runs nothing, such as the backward of a first stage whose weights are frozen, has
    rows of 0 s and 0 J. A warning also says if a forward or backward takes over 10 % more or less
    time when it is repeated than in the iteration; the profile says so under `conditions`.

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
        again: The plan whose rows alone are measured, and the profile that they are joined to.

    Raises:
        UsageError: If `engine` is of another kind, before the block.
        RankError: If another rank has ended, or does not come back from a repetition, so that the
            training could not go on either.
    """
    profiling = Profiling()
    adapter = engine_of(engine, "profile_pipeline")
    settings = settings or SweepSettings()
    recording: Recording | None = None
    fault: Exception | None = None
    with ExitStack() as stack:
        try:
            recording = Recording(adapter, profiling._loss)
            stack.enter_context(recording.running())
        except Exception as error:
            # The training goes on in any case; the fault is told on all ranks below.
            fault = error
        stack.enter_context(blocks.opened("profile"))
        yield profiling
    with RankGroup(settings.repetition_s) as group:
        try:
            # Pairs that this engine cannot run alone cannot be repeated.
            hides_pairs = has_pairs(adapter) and not hasattr(adapter, "overlapped")
            recorded = _recorded(recording, fault, hides_pairs=hides_pairs)
            request = ProfileRequest(
                gpu=gpu,
                settings=settings,
                output=None if output is None else Path(output),
                resume=resume,
                blocking_power_w=blocking_power_w,
                progress=progress,
                iteration=adapter.iteration(recorded.forwards),
                conditions={SHARDED: "by fully_shard"} if sharded_torch(adapter) else {},
                again=again,
            )
            profiling.profile = measure_with_ranks(
                group,
                _local_stages(adapter, recorded, modes),
                adapter.tensor_rank if tensor_group is None else _rank_in(tensor_group),
                request,
                adapter.device,
            )
        except Exception as error:
            profiling.problem = group.problem_of(error)
            # A rank has not come back: the training could not go on either.
            if profiling.problem is None:
                raise
            if not isinstance(error, PlannerError):
                _logger.warning("a fault of the planner, or of what it repeats:", exc_info=error)
            if group.rank == 0:
                _logger.warning("the pipeline was not profiled: %s", profiling.problem)


def _recorded(
    recording: Recording | None, fault: Exception | None, *, hides_pairs: bool
) -> Recording:
    """Return the recording, if all of its stages can be repeated.

    Args:
        recording: The recording; None if it was not begun.
        fault: Why it was not.
        hides_pairs: Whether the pipeline runs overlapped pairs that cannot be repeated.
    """
    if hides_pairs:
        raise UsageError(_HAS_PAIRS)
    # The fault that was first is the one to tell.
    if recording is None or fault is not None:
        raise fault or UsageError("nothing was recorded")
    if recording.problem is not None:
        raise UsageError(recording.problem)
    if problem := refusal(recorded.stage.module for recorded in recording.stages()):
        raise UsageError(problem)
    return recording


def _local_stages(
    adapter: Engine, recording: Recording, modes: Mapping[str, Callable[[], None]] | None
) -> list[LocalStage]:
    """Return the stages of this rank to measure, with the pairs whose backward is of each."""
    recorded = recording.stages()
    splits = adapter.splits_backward
    if not has_pairs(adapter):
        return [_local_stage(stage, splits, modes) for stage in recorded]
    overlapping: Any = adapter
    microbatches = {
        local.stage.number: overlapping.overlapped(index, local.inputs, local.loss)
        for index, local in enumerate(recorded)
    }
    # Which forwards run beside which backwards shows in the schedule's order.
    cells = [cell_of(computation) for computation in overlapping.order_for(recording.forwards)]
    pairs = {
        (backward.stage, pair_kind(forward, backward)): microbatches[forward.stage]
        for forward, backward in (cell for cell in cells if len(cell) == 2)
    }
    return [
        _local_stage(
            local,
            splits,
            modes,
            microbatches[local.stage.number],
            {kind: other for (stage, kind), other in pairs.items() if stage == local.stage.number},
            [other for other in recorded if other is not local],
        )
        for local in recorded
    ]


def _local_stage(
    recorded: RecordedStage,
    splits_backward: bool,
    modes: Mapping[str, Callable[[], None]] | None,
    microbatch: OverlappedMicrobatch | None = None,
    pairs: Mapping[str, OverlappedMicrobatch] | None = None,
    others: Sequence[RecordedStage] = (),
) -> LocalStage:
    """Return a stage to measure.

    Args:
        recorded: What was recorded of it.
        splits_backward: As that of the engine.
        modes: As in `profile_pipeline`.
        microbatch: Runs its microbatch, where forwards and backwards overlap.
        pairs: Kind of a pair -> the microbatch of its forward.
        others: The other stages of this rank, of which pairs run forwards.
    """
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
            microbatch=microbatch,
            pairs=pairs,
        )
        with ExitStack() as stack:
            stack.enter_context(recorded.as_recorded())
            # A pair also runs forwards of the other stages here, whose state is kept as well.
            for other in others:
                stack.enter_context(other.stage.preserve_state())
                stack.enter_context(preserve_state(other.stage.module))
            stack.enter_context(recorded.stage.preserve_state())
            yield stack.enter_context(measured)

    return LocalStage(number, opened, recorded.trained_s)


def _rank_in(group: Any) -> int:
    import torch.distributed as dist

    return int(dist.get_rank(group))
