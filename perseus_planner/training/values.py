"""Tensors inside the arguments and results of modules: tuples, lists and dicts of them, nested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in `value`, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `function` of each tensor in its place."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(mapped(function, each) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(function, each) for each in value)
    return value


def copied(value: Any) -> Any:
    """`value` with copies of its tensors, each a leaf that requires a gradient if the tensor does."""
    return mapped(lambda each: each.detach().clone().requires_grad_(each.requires_grad), value)


def arguments(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a module is called with `inputs`: a dict by name, a tuple or list one after the other, else as the one."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def first_device(value: object) -> torch.device:
    """Where the first tensor in `value` is; the CPU where there is none."""
    import torch

    return next((each.device for each in tensors(value)), torch.device("cpu"))


def is_training(*values: object) -> bool:
    """Whether a call with these values trains: it does not evaluate, nor infer shapes with tensors without values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    real = (each.device.type != "meta" and not isinstance(each, FakeTensor) for each in tensors(values))
    return torch.is_grad_enabled() and all(real)
