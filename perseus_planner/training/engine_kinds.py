"""Which training engine an object belongs to, told from the names of its classes, so that none is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KNOWN = "a DeepSpeed PipelineEngine, the chunks of a Megatron-core model, or a schedule of torch.distributed.pipelining"
"""What can be given, in words."""

EngineKind = Literal["deepspeed", "megatron", "torch"]


def engine_kind(engine: Any) -> EngineKind | None:
    """Which of them `engine` is: one of `KNOWN`; None if it is none of these."""
    classes = {(each.__module__.split(".")[0], each.__name__) for each in type(engine).__mro__}
    if ("deepspeed", "PipelineEngine") in classes:
        return "deepspeed"
    if ("torch", "_PipelineSchedule") in classes:
        return "torch"
    chunks = megatron_chunks(engine)
    return "megatron" if chunks and all(_is_megatron(chunk) for chunk in chunks) else None


def megatron_chunks(model: Any) -> list[Any]:
    """The chunks of a Megatron-core model, which is given as one module or as a list of them."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _is_megatron(chunk: Any) -> bool:
    modules: Callable[[], Iterator[Any]] | None = getattr(chunk, "modules", None)
    return modules is not None and any(hasattr(each, "set_input_tensor") for each in modules())
