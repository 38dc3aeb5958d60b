"""The stages that Megatron-core holds on this rank, found while it runs an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from perseus_planner.errors import UsageError
from perseus_planner.profiler.engines.held import Held, called, local_stage
from perseus_planner.profiler.engines.recorder import Recorded, recorded_attribute, recorded_module
from perseus_planner.training.values import first_device

ForwardStep = Callable[..., tuple[Any, Any]]


class MegatronLosses:
    """The loss that a `forward_step` gave last."""

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None

    def watched(self, forward_step: ForwardStep) -> ForwardStep:
        """`forward_step`, whose loss is kept."""

        def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss = forward_step(*args, **kwargs)
            self.function = loss
            return output, loss

        return wrapper


@contextmanager
def megatron_chunks(chunks: Sequence[Any], losses: MegatronLosses) -> Iterator[Callable[[], Held]]:
    """The chunks of a Megatron-core model, first to last on this rank."""
    from megatron.core import parallel_state

    if parallel_state.get_expert_model_parallel_world_size() > 1:
        raise UsageError("experts are spread over replicas, which cannot be measured alone; profile without that")
    rank, ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    with ExitStack() as stack:
        calls = [stack.enter_context(recorded_module(chunk)) for chunk in chunks]
        received = [stack.enter_context(recorded_attribute(_receiver(chunk), "set_input_tensor")) for chunk in chunks]

        def held() -> Held:
            stages = []
            for each, (chunk, call, tensor) in enumerate(zip(chunks, calls, received, strict=True)):
                number = each * ranks + rank
                inputs = called(call, f"stage {number}") | {"received": _first(tensor)}
                last = number == ranks * len(chunks) - 1
                loss = _loss(losses.function) if last else None
                stages.append(local_stage(number, chunk, _forward(chunk), inputs, loss, state=_same_random_states))
            return Held(tuple(stages), _tensor_rank(), first_device(list(chunks[0].parameters())))

        yield held


def _tensor_rank() -> int:
    """Among the GPUs that share the stage: tensor and context parallel."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    return int(dist.get_rank(parallel_state.get_tensor_and_context_parallel_group()))


def _receiver(chunk: Any) -> Any:
    """What of a wrapped chunk takes the tensor that came from the stage before."""
    while not hasattr(chunk, "set_input_tensor"):
        chunk = chunk.module
    return chunk


def _first(recorded: Recorded) -> Any:
    (value,) = recorded.args or (None,)
    return value[0] if isinstance(value, list) else value


def _forward(chunk: Any) -> Callable[..., Any]:
    receive = _receiver(chunk).set_input_tensor

    def forward(args: Any, kwargs: Any, received: Any) -> Any:
        receive([received])
        return chunk(*args, **kwargs)

    return forward


def _loss(function: Callable[..., Any] | None) -> Callable[[Any], Any]:
    if function is None:
        raise UsageError(
            "the loss of the last stage is not known: inside the block of profile_pipeline, give Megatron "
            "`profiling.watched(forward_step)` as its forward_step_func"
        )
    # It returns the loss and what is reported, or the loss, the number of tokens and what is reported.
    return lambda output: function(output)[0]


@contextmanager
def _same_random_states() -> Iterator[None]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states() if hasattr(tracker, "get_states") else None
    try:
        yield
    finally:
        if states is not None:
            tracker.set_states(states)
