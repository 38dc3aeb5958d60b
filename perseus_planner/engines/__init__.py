"""Training engines: which stages each holds on this rank, what it runs, and where to hook into it.
Start at `engine`. An engine is imported only where it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from perseus_planner.engines.engine import Engine
    from perseus_planner.engines.guard import Guard

_TRAIN = {
    "deepspeed.runtime.pipe.engine": "deepspeed",
    "megatron.core.pipeline_parallel.schedules": "megatron",
    "torch.distributed.pipelining.schedules": "torch_pipelining",
}
"""The modules in which engines train -> the modules here that follow them."""


_SCHEDULE = ("torch", "_PipelineSchedule")
"""Package and name of the class of all schedules."""


def _classes_of(engine: Any) -> set[tuple[str, str]]:
    return {(base.__module__.split(".")[0], base.__name__) for base in type(engine).__mro__}


def engine_of(engine: Any, caller: str = "planner_runtime") -> Engine:
    """Return the adapter of a training engine, which is recognized by the names of its classes.

    Args:
        engine: A DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a
            schedule of torch.distributed.pipelining.
        caller: The function that was given it, for the error.

    Raises:
        UsageError: If it is none of these.
    """
    # By name, so that no engine is imported that the training does not use.
    classes = _classes_of(engine)
    if ("deepspeed", "PipelineEngine") in classes:
        from perseus_planner.engines.deepspeed import DeepSpeedPipeline

        return DeepSpeedPipeline(engine)
    if _SCHEDULE in classes:
        from perseus_planner.engines.torch_pipelining import TorchPipeline

        return TorchPipeline(engine)
    chunks = parts_of(engine)
    if chunks and all(map(_is_chunk_of_megatron, chunks)):
        from perseus_planner.engines.megatron import MegatronModel

        return MegatronModel(chunks)
    raise UsageError(
        f"{caller} was given a {type(engine).__name__}; give it a DeepSpeed PipelineEngine, the "
        "chunks of a Megatron-core model, or a schedule of torch.distributed.pipelining"
    )


def parts_of(engine: Any) -> list[Any]:
    """Return what an engine is made of: the chunks of a Megatron-core model, which is one module or
    a list of them; the modules of a schedule's stages; or the engine itself.
    """
    if _SCHEDULE in _classes_of(engine):
        from perseus_planner.engines import torch_pipelining

        return torch_pipelining.parts_of(engine)
    return list(engine) if isinstance(engine, (list, tuple)) else [engine]


def wrap_training(module: ModuleType, guard: Guard, begin: Callable[[Any], bool]) -> None:
    """Have `begin` called with the engine before each call that trains, given the module of an
    engine that has just been loaded.

    Args:
        module: The module.
        guard: Through it `begin` is called.
        begin: Returns whether it has attached a runtime just now.

    Raises:
        AttributeError: If the module is not as in the supported versions.
    """
    adapter = import_module(f"perseus_planner.engines.{_TRAIN[module.__name__]}")
    adapter.wrap_training(module, guard, begin)


def _is_chunk_of_megatron(chunk: Any) -> bool:
    modules: Callable[[], Iterator[Any]] | None = getattr(chunk, "modules", None)
    return modules is not None and any(hasattr(module, "set_input_tensor") for module in modules())
