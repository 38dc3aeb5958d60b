"""The stages of a schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from perseus_planner.profiler.engines.engine_stages import (
    EngineStages,
    bind_loss,
    local_stage,
    record_attribute,
    record_module,
    unpacked,
)
from perseus_planner.training.state import sharding_problem

_SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipe-v",
}
"""The classes of torch -> the names of their generators."""


@contextmanager
def record_torch_schedule(schedule: Any, tensor_rank: int) -> Iterator[Callable[[], EngineStages]]:
    """Find the stages of a schedule while it runs an iteration. If it runs I and W, these are
    measured too.
    """
    # torch offers no public access to the stages and the loss.
    parts = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    split = _splits_backward(schedule)
    with ExitStack() as stack:
        calls = [stack.enter_context(record_module(part.submod)) for part in parts]
        function = schedule._loss_fn
        loss_call = stack.enter_context(record_attribute(schedule, "_loss_fn"))

        def stages() -> EngineStages:
            found = []
            for part, call in zip(parts, calls, strict=True):
                loss = (
                    (bind_loss(function, loss_call), loss_call.times) if part.is_last else (None,)
                )
                forward = unpacked(part.submod)
                found.append(
                    local_stage(
                        part.stage_index, part.submod, forward, call, *loss, split_backward=split
                    )
                )
            problem = sharding_problem(part.submod for part in parts)
            return EngineStages(
                tuple(found), tensor_rank, parts[0].device, _iteration(schedule, parts), problem
            )

        yield stages


def _iteration(schedule: Any, parts: Sequence[Any]) -> dict[str, str | int]:
    """Return how a schedule of torch is generated; nothing for one that is read from a file or
    the user's own.
    """
    name = _SCHEDULES.get(type(schedule).__name__)
    if name is None:
        return {}
    microbatches: int = schedule._n_microbatches
    iteration: dict[str, str | int] = {
        "schedule": name,
        "microbatches": microbatches,
        "virtual_stages": len(parts),
    }
    if name == "interleaved-1f1b":
        iteration["microbatch_group"] = microbatches // max(1, microbatches // parts[0].group_size)
    return iteration


def _splits_backward(schedule: Any) -> bool:
    order: Mapping[int, Any] = getattr(schedule, "pipeline_order", None) or {}
    actions = (action for row in order.values() for action in row if action is not None)
    return any(
        getattr(action.computation_type, "name", "") == "BACKWARD_INPUT" for action in actions
    )
