"""The stages that Megatron-core holds on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.profiler.engines.computation_times import ComputationTimes
from perseus_planner.profiler.engines.engine_stages import (
    EngineStages,
    RecordedCall,
    local_stage,
    record_attribute,
    record_module,
)
from perseus_planner.training.state import sharding_problem
from perseus_planner.training.values import first_device

ForwardStep = Callable[..., tuple[Any, Any]]


class MegatronLoss:
    """The loss function that a `forward_step` returned last.

    Attributes:
        function: The loss function; None until there was one.
        times: How long these functions and their backwards took.
    """

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None
        self.times = ComputationTimes()

    def watched(self, forward_step: ForwardStep) -> ForwardStep:
        """Return `forward_step` wrapped to keep its loss function."""

        def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss = forward_step(*args, **kwargs)
            self.function = loss
            return output, self.times.timed(loss)

        return wrapper


@contextmanager
def record_megatron(
    chunks: Sequence[Any], loss: MegatronLoss
) -> Iterator[Callable[[], EngineStages]]:
    """Find the stages of the model chunks, first to last on this rank, while they run an
    iteration.
    """
    from megatron.core import parallel_state

    if parallel_state.get_expert_model_parallel_world_size() > 1:
        problem = (
            "expert parallelism spreads experts over replicas, so no stage can be measured "
            "alone; profile without it"
        )
        yield lambda: EngineStages.unmeasurable(problem)
        return
    rank, ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    with ExitStack() as stack:
        calls = [stack.enter_context(record_module(chunk)) for chunk in chunks]
        received = [
            stack.enter_context(record_attribute(_receiver(chunk), "set_input_tensor"))
            for chunk in chunks
        ]

        def stages() -> EngineStages:
            found = []
            for index, (chunk, call, tensor) in enumerate(
                zip(chunks, calls, received, strict=True)
            ):
                number = index * ranks + rank
                last = number == ranks * len(chunks) - 1
                stage = local_stage(
                    number,
                    chunk,
                    _forward(chunk),
                    call,
                    _scalar_loss(loss.function) if last else None,
                    loss.times if last else None,
                    preserve_state=_preserve_random_states,
                    received=_first(tensor),
                )
                found.append(stage)
            device = first_device(list(chunks[0].parameters()))
            iteration = _iteration(chunks, calls[0].count)
            return EngineStages(
                tuple(found), _tensor_rank(), device, iteration, sharding_problem(chunks)
            )

        yield stages


def _iteration(chunks: Sequence[Any], microbatches: int) -> dict[str, str | int]:
    iteration: dict[str, str | int] = {"schedule": "1f1b", "microbatches": microbatches}
    if len(chunks) > 1:
        iteration |= {"schedule": "interleaved-1f1b", "virtual_stages": len(chunks)}
        group = getattr(_receiver(chunks[0]).config, "microbatch_group_size_per_vp_stage", None)
        iteration |= {} if group is None else {"microbatch_group": group}
    return iteration


def _tensor_rank() -> int:
    """Return the rank among the GPUs that share the stage, tensor and context parallel."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    return int(dist.get_rank(parallel_state.get_tensor_and_context_parallel_group()))


def _receiver(chunk: Any) -> Any:
    """Return the module inside a wrapped chunk that takes the tensor from the stage before."""
    while not hasattr(chunk, "set_input_tensor"):
        chunk = chunk.module
    return chunk


def _first(call: RecordedCall) -> Any:
    (value,) = call.args or (None,)
    return value[0] if isinstance(value, list) else value


def _forward(chunk: Any) -> Callable[..., Any]:
    receive = _receiver(chunk).set_input_tensor

    def forward(args: Any, kwargs: Any, received: Any) -> Any:
        receive([received])
        return chunk(*args, **kwargs)

    return forward


def _scalar_loss(function: Callable[..., Any] | None) -> Callable[[Any], Any]:
    if function is None:
        raise UsageError(
            "the loss of the last stage is not known: inside the block of profile_pipeline, give "
            "Megatron `profiling.watched(forward_step)` as its forward_step_func"
        )
    # It returns the loss and what to report, or the loss, the number of tokens and what to report.
    return lambda output: function(output)[0]


@contextmanager
def _preserve_random_states() -> Iterator[None]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states() if hasattr(tracker, "get_states") else None
    try:
        yield
    finally:
        if states is not None:
            tracker.set_states(states)
