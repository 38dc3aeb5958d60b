"""Finds tensors in the arguments and results of modules, which may be nested tuples, lists and
dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with each tensor replaced by the result of `function`."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def copy_tensors(value: Any) -> Any:
    """Return `value` with copies of its tensors, which are leaves and require gradients if the
    tensors do.
    """
    return map_tensors(
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value
    )


def call_arguments(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs for a module: a dict by name, a tuple or list by position, another
    value alone.
    """
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def first_device(value: object) -> torch.device:
    """Return the device of the first tensor in `value`; the CPU if there is none."""
    import torch

    return next((tensor.device for tensor in tensors(value)), torch.device("cpu"))


def is_training(*values: object) -> bool:
    """Return whether a call with these values trains, instead of evaluating or inferring shapes
    with fake tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    real = (
        tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
        for tensor in tensors(values)
    )
    return torch.is_grad_enabled() and all(real)
