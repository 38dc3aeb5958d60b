"""The stages that an engine holds on this rank, found while it runs an iteration.

For each engine a context manager in which the iteration runs, that yields a function; called after it, this gives what
the iteration ran. No engine is imported that is not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.gpu import Gpu
from perseus_planner.profiler.recorder import Recorded, recorded_attribute, recorded_module
from perseus_planner.profiler.stage import Stage
from perseus_planner.profiler.together import Block, LocalStage
from perseus_planner.profiler.torch_stage import torch_stage
from perseus_planner.profiler.values import first_device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Held:
    """What this rank holds of the pipeline.

    Attributes:
        stages: its stages, first to last.
        tensor_rank: which of the GPUs that share them it has.
        device: where it computes.
    """

    stages: tuple[LocalStage, ...]
    tensor_rank: int
    device: torch.device


def local_stage(
    number: int,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    inputs: Mapping[str, Any],
    loss: Callable[[Any], Any] | None,
    *,
    split_backward: bool = False,
    state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> LocalStage:
    """A stage as an engine runs it.

    Args:
        number: in the pipeline.
        module: whose weights it has.
        forward: called with `inputs` by name.
        inputs: of one microbatch.
        loss: from what `forward` returns to a scalar, in the last stage.
        split_backward: as in `torch_stage`.
        state: what else is put back after it was measured.
    """

    @contextmanager
    def opened(gpu: Gpu, block: Block | None) -> Iterator[Stage]:
        stage = torch_stage(
            gpu,
            module,
            dict(inputs),
            loss,
            first=number == 0,
            split_backward=split_backward,
            forward=forward,
            block=block,
        )
        with state(), stage as result:
            yield result

    return LocalStage(number, opened)


def called(recorded: Recorded, what: str) -> dict[str, Any]:
    """The arguments that were recorded, by the names args and kwargs.

    Raises:
        UsageError: there was no call.
    """
    if recorded.args is None:
        raise UsageError(
            f"{what} did not run inside the block of profile_pipeline; run one whole training iteration there"
        )
    return {"args": recorded.args, "kwargs": recorded.kwargs}


@contextmanager
def torch_schedule(schedule: Any, tensor_rank: int) -> Iterator[Callable[[], Held]]:
    """A schedule of torch.distributed.pipelining; one that runs I and W is measured with both."""
    parts = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)  # the engine has no other way
    split = _splits_backward(schedule)
    with ExitStack() as stack:
        modules = [stack.enter_context(recorded_module(part.submod)) for part in parts]
        function = schedule._loss_fn
        losses = stack.enter_context(recorded_attribute(schedule, "_loss_fn"))

        def held() -> Held:
            stages = []
            for part, recorded in zip(parts, modules, strict=True):
                loss = _torch_loss(function, losses) if part.is_last else None
                inputs = called(recorded, f"stage {part.stage_index}")
                forward = _plain_call(part.submod)
                stages.append(local_stage(part.stage_index, part.submod, forward, inputs, loss, split_backward=split))
            return Held(tuple(stages), tensor_rank, parts[0].device)

        yield held


def _splits_backward(schedule: Any) -> bool:
    order: Mapping[int, Any] = getattr(schedule, "pipeline_order", None) or {}
    actions = (action for row in order.values() for action in row if action is not None)
    return any(getattr(action.computation_type, "name", "") == "BACKWARD_INPUT" for action in actions)


def _torch_loss(function: Callable[..., Any], recorded: Recorded) -> Callable[[Any], Any]:
    call = called(recorded, "the loss")
    _, *rest = call["args"]
    return lambda output: function(output, *rest, **call["kwargs"])


def _plain_call(module: Callable[..., Any]) -> Callable[..., Any]:
    return lambda args, kwargs: module(*args, **kwargs)


@contextmanager
def deepspeed_engine(engine: Any) -> Iterator[Callable[[], Held]]:
    """A PipelineEngine of DeepSpeed."""
    if any(each.__name__ == "DualPipeVEngine" for each in type(engine).__mro__):
        raise UsageError(
            "DualPipeV engines cannot be profiled; give `planner profile` a function that builds the stages"
        )
    module, number = engine.module, engine.stage_id
    with recorded_module(module) as inputs, recorded_attribute(module, "loss_fn") as losses:

        def held() -> Held:
            function, loss = module.loss_fn, None
            if engine.is_last_stage() and function is not None:
                loss = _torch_loss(function, losses)
            # Without the hooks of the engine on the module, which prepare for a backward that it would run.
            stage = local_stage(
                number,
                module,
                _plain_call(module.forward),
                called(inputs, f"stage {number}"),
                loss,
                state=lambda: _same_offset(module),
            )
            return Held((stage,), engine.grid.get_slice_parallel_rank(), first_device(list(module.parameters())))

        yield held


@contextmanager
def _same_offset(module: Any) -> Iterator[None]:
    offset = module.micro_offset  # counts forwards, and seeds layers
    try:
        yield
    finally:
        module.micro_offset = offset
