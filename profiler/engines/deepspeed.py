"""The stage of a DeepSpeed PipelineEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from perseus_planner.training.values import first_device


@contextmanager
def record_deepspeed(engine: Any) -> Iterator[Callable[[], EngineStages]]:
    """Find the stage of a PipelineEngine while it runs an iteration."""
    if any(each.__name__ == "DualPipeVEngine" for each in type(engine).__mro__):
        problem = (
            "DualPipeV engines cannot be profiled; give `planner profile` a function that "
            "builds the stages"
        )
        yield lambda: EngineStages.unmeasurable(problem)
        return
    module, number = engine.module, engine.stage_id
    with record_module(module) as call, record_attribute(module, "loss_fn") as loss_call:

        def stages() -> EngineStages:
            function, loss, loss_times = module.loss_fn, None, None
            if engine.is_last_stage() and function is not None:
                loss, loss_times = bind_loss(function, loss_call), loss_call.times
            # `forward` skips the engine's hooks on the module, which prepare for a backward that it
            # would run.
            stage = local_stage(
                number,
                module,
                unpacked(module.forward),
                call,
                loss,
                loss_times,
                preserve_state=lambda: _preserve_offset(module),
            )
            device = first_device(list(module.parameters()))
            iteration: dict[str, str | int] = {
                "schedule": "1f1b",
                "microbatches": engine.micro_batches,
            }
            problem = sharding_problem([module])
            return EngineStages(
                (stage,), engine.grid.get_slice_parallel_rank(), device, iteration, problem
            )

        yield stages


@contextmanager
def _preserve_offset(module: Any) -> Iterator[None]:
    offset = module.micro_offset  # counts forwards, and seeds layers
    try:
        yield
    finally:
        module.micro_offset = offset
