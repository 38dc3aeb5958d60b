"""What a training step calls its modules and losses with.

The last call counts: before the first microbatch, engines may call them with tensors that hold nothing, for the shapes.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perseus_planner.training.values import copied, is_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@dataclass
class Recorded:
    """The arguments of the last call that trains; None until there was one."""

    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep copies, unless the call only infers shapes or evaluates."""
        if is_training(args, kwargs):
            self.args, self.kwargs = copied(tuple(args)), copied(dict(kwargs))


@contextmanager
def recorded_module(module: torch.nn.Module) -> Iterator[Recorded]:
    """What `module` is called with inside the block."""
    recorded = Recorded()

    def see(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded.see(args, kwargs)

    handle = module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield recorded
    finally:
        handle.remove()


@contextmanager
def recorded_attribute(owner: object, name: str) -> Iterator[Recorded]:
    """What the function, method or module that is attribute `name` of `owner` is called with; nothing if it is None."""
    import torch

    found: Callable[..., Any] | None = getattr(owner, name)
    if isinstance(found, torch.nn.Module):
        with recorded_module(found) as recorded:
            yield recorded
        return
    recorded, own = Recorded(), name in vars(owner)
    if found is None:
        yield recorded
        return

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorded.see(args, kwargs)
        return found(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield recorded
    finally:
        if own:
            setattr(owner, name, found)
        else:
            delattr(owner, name)
