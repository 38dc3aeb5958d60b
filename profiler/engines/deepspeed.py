"""The stage of a PipelineEngine of DeepSpeed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.profiler.engines.held import Held, by_name, called, local_stage, loss_of
from perseus_planner.profiler.engines.recorder import recorded_attribute, recorded_module
from perseus_planner.training.values import first_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
                loss = loss_of(function, losses)
            # Without the hooks of the engine on the module, which prepare for a backward that it would run.
            stage = local_stage(
                number,
                module,
                by_name(module.forward),
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
