"""The stages of a schedule of torch.distributed.pipelining."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.profiler.engines.held import Held, by_name, called, local_stage, loss_of
from perseus_planner.profiler.engines.recorder import recorded_attribute, recorded_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


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
                loss = loss_of(function, losses) if part.is_last else None
                inputs = called(recorded, f"stage {part.stage_index}")
                forward = by_name(part.submod)
                stages.append(local_stage(part.stage_index, part.submod, forward, inputs, loss, split_backward=split))
            return Held(tuple(stages), tensor_rank, parts[0].device)

        yield held


def _splits_backward(schedule: Any) -> bool:
    order: Mapping[int, Any] = getattr(schedule, "pipeline_order", None) or {}
    actions = (action for row in order.values() for action in row if action is not None)
    return any(getattr(action.computation_type, "name", "") == "BACKWARD_INPUT" for action in actions)
