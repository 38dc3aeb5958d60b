"""Preserves the state of a module while it is measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    import torch


@contextmanager
def preserve_state(module: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, training mode and random number generators after the block.

    Inside the block the module is in training mode and has no gradients. Gradients computed there,
    including Megatron-core's `main_grad`, are not reduced among replicas and never seen by an
    optimizer or engine: hooks on accumulated gradients do not run.

    Raises:
        UsageError: If the module is sharded over replicas (FSDP), which would have to be measured
            together.
    """
    if problem := sharding_problem([module]):
        raise UsageError(problem)
    with ExitStack() as stack:
        stack.enter_context(_preserve_random_state())
        stack.enter_context(_preserve_buffers(module))
        stack.enter_context(_training_mode(module))
        for parameter in module.parameters():
            stack.enter_context(_hide_gradient(parameter))
        for part in module.modules():
            if callable(no_sync := getattr(part, "no_sync", None)):
                stack.enter_context(no_sync())
        yield


def sharding_problem(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return why modules that are sharded over replicas (FSDP) cannot be measured; None if none
    of them is.
    """
    kinds = {
        base.__name__
        for module in modules
        for part in module.modules()
        for base in type(part).__mro__
    }
    if not kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        return None
    return (
        "a stage is sharded over its replicas (FSDP), so that it cannot be measured on one of "
        "them; profile the pipeline without FSDP"
    )


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    import torch

    state, devices = random.getstate(), []
    if torch.cuda.is_available():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)


@contextmanager
def _preserve_buffers(module: torch.nn.Module) -> Iterator[None]:
    import torch

    found = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, content in found:
                buffer.copy_(content)
                setattr(part, name, buffer)


@contextmanager
def _training_mode(module: torch.nn.Module) -> Iterator[None]:
    # A module in training mode may have parts that are deliberately not.
    modes = {part: part.training for part in module.modules()}
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def _hide_gradient(parameter: Any) -> Iterator[None]:
    """Hide the gradients of `parameter`, and disable the hooks on accumulated gradients."""
    hooks: dict[int, Callable[..., Any]] = (
        getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    )
    gradient, found_hooks = parameter.grad, dict(hooks)
    main = getattr(parameter, "main_grad", None)
    added = getattr(parameter, "grad_added_to_main_grad", None)
    parameter.grad = None
    hooks.clear()
    content = None
    if main is not None:  # in the memory of the host, as it may be as large as the model
        content = main.detach().to("cpu", copy=True)
        main.detach().zero_()
    try:
        yield
    finally:
        parameter.grad = gradient
        hooks.update(found_hooks)
        if main is not None:
            parameter.main_grad = main
            main.detach().copy_(content)
        if added is not None:
            parameter.grad_added_to_main_grad = added
