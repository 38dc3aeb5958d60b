"""Recognizes training engines by the names of their classes, without importing any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

SUPPORTED_ENGINES = (
    "a DeepSpeed PipelineEngine, the chunks of a Megatron-core model, or a "
    "schedule of torch.distributed.pipelining"
)
"""The supported engines, for error messages."""

EngineKind = Literal["deepspeed", "megatron", "torch"]


def engine_kind(engine: Any) -> EngineKind | None:
    """Return the kind of a training engine; None if it is not supported."""
    classes = {(base.__module__.split(".")[0], base.__name__) for base in type(engine).__mro__}
    if ("deepspeed", "PipelineEngine") in classes:
        return "deepspeed"
    if ("torch", "_PipelineSchedule") in classes:
        return "torch"
    chunks = megatron_chunks(engine)
    return "megatron" if chunks and all(_is_megatron(chunk) for chunk in chunks) else None


def megatron_chunks(model: Any) -> list[Any]:
    """Return the chunks of a Megatron-core model, which is one module or a list of them."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _is_megatron(chunk: Any) -> bool:
    modules: Callable[[], Iterator[Any]] | None = getattr(chunk, "modules", None)
    return modules is not None and any(hasattr(module, "set_input_tensor") for module in modules())
