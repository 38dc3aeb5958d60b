"""A profile from inside a training script: the engine's own stages, on the inputs of a real iteration."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.profiler.engines.deepspeed import deepspeed_engine
from perseus_planner.profiler.engines.megatron import ForwardStep, MegatronLosses, megatron_chunks
from perseus_planner.profiler.engines.torch_pipelining import torch_schedule
from perseus_planner.profiler.profiling import SweepSettings
from perseus_planner.profiler.ranks.meeting import TIMEOUT_S, Meeting
from perseus_planner.profiler.ranks.together import Request, profiled_together
from perseus_planner.training.engine_kinds import KNOWN, engine_kind
from perseus_planner.training.engine_kinds import megatron_chunks as chunks_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from perseus_planner.profiler.engines.held import Held
    from perseus_planner.profiler.stage import Progress
    from perseus_planner.profiles.profiles import Profile


@dataclass
class Profiling:
    """What is under way inside the block.

    Attributes:
        profile: on rank 0, after the block: what was measured.
    """

    profile: Profile | None = None
    _losses: MegatronLosses = field(default_factory=MegatronLosses, repr=False)

    def watched(self, forward_step: ForwardStep) -> ForwardStep:
        """For Megatron-core: `forward_step` as it is to be given inside the block, for its loss to be known."""
        return self._losses.watched(forward_step)


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
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> Iterator[Profiling]:
    """Profile the pipeline that `engine` trains, on all its ranks.

    Inside the block, every rank runs one training iteration as ever: `engine.train_batch(...)`,
    `forward_backward_func(forward_step_func=profiling.watched(forward_step), ...)` or `schedule.step(...)`. On leaving
    it, the stages that the iteration ran are measured on its last microbatch. Weights, optimizer, gradients and random
    state are afterwards as the iteration left them. All ranks go in step: the block is entered and left on every one.

    Args:
        engine: a DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a schedule of
            torch.distributed.pipelining.
        gpu: as in `torch_device.gpu_text`, for each rank.
        output: the profile to write on rank 0, .yaml.
        settings: of the sweep; the defaults where None.
        resume: go on from finished rows beside `output`.
        tensor_group: for torch schedules: the process group of the ranks that share a stage; None: each has its own.
        blocking_power_w: of one GPU, watts, instead of what is measured.
        timeout_s: after how long without a sign of life a rank is taken for dead, seconds.
        progress: told of this rank's rows.

    Raises:
        UsageError: `engine` is none of these, or no iteration ran inside the block.
        RankError: another rank has ended.
        GpuError, ProfileError: as `measure_stage`.
    """
    profiling = Profiling()
    with _watched(engine, profiling, tensor_group) as held:
        yield profiling
    target = None if output is None else Path(output)
    request = Request(gpu, settings or SweepSettings(), target, resume, blocking_power_w, timeout_s, progress)
    with Meeting(timeout_s) as meeting:
        found = held()
        profiling.profile = profiled_together(meeting, found.stages, found.tensor_rank, request, found.device)


def _watched(engine: Any, profiling: Profiling, tensor_group: Any) -> AbstractContextManager[Callable[[], Held]]:
    """While its iteration runs."""
    kind = engine_kind(engine)
    if kind == "deepspeed":
        return deepspeed_engine(engine)
    if kind == "torch":
        return torch_schedule(engine, _rank_in(tensor_group))
    if kind == "megatron":
        return megatron_chunks(chunks_of(engine), profiling._losses)
    raise UsageError(f"profile_pipeline was given a {type(engine).__name__}; give it {KNOWN}")


def _rank_in(group: Any) -> int:
    import torch.distributed as dist

    return 0 if group is None else dist.get_rank(group)
