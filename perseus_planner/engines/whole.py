"""Training without a pipeline: data-parallel, fully sharded, or on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perseus_planner.engines.engine import PipelineRank
from perseus_planner.schedules import WHOLE

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.engine import EngineStage, IterationHook
    from perseus_planner.schedules import Computation


class WholeTraining:
    """A rank that trains without a pipeline: a pipeline of one stage, which runs an iteration as
    one computation. The training says where its iterations begin and end.
    """

    name = "training without a pipeline"
    splits_backward = False
    tensor_rank = 0

    def __init__(self) -> None:
        self._hook: IterationHook | None = None
        self._is_inside = False  #: an iteration has begun

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`; each rank is a pipeline."""
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        return PipelineRank(0, 1, rank, (rank,))

    @property
    def device(self) -> torch.device:
        """See `Engine.device`: the current CUDA device, or the CPU if there is none."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def stages(self) -> list[EngineStage]:
        """See `Engine.stages`; nothing is measured alone."""
        return []

    def parameters(self) -> Iterator[torch.Tensor]:
        """See `Engine.parameters`."""
        return iter(())

    def microbatches(self) -> int:
        """See `Engine.microbatches`."""
        return 1

    def iteration(self, forwards: int) -> Mapping[str, str | int]:
        """See `Engine.iteration`."""
        return {"schedule": WHOLE.name, "microbatches": 1}

    def order(self) -> tuple[Computation, ...]:
        """See `Engine.order`."""
        return WHOLE.ranks[0]

    def check(self) -> None:
        """See `Engine.check`; there is nothing to refuse."""

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`."""
        self._hook = hook
        try:
            yield
        finally:
            self._hook = None

    def begin(self) -> None:
        """Begin an iteration."""
        if self._hook is not None:
            self._is_inside = True
            self._hook.begin_iteration(1)
            self._hook.begin(*WHOLE.ranks[0][0])

    def end(self) -> None:
        """End the iteration, if one has begun."""
        if self._hook is not None and self._is_inside:
            self._is_inside = False
            self._hook.end()
            self._hook.end_iteration()

    def abandon(self) -> None:
        """End the iteration because it raises."""
        self._is_inside = False
        if self._hook is not None:
            self._hook.abandon_iteration()
