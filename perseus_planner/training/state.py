"""A module that is measured, and afterwards trains on as if it had not been."""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@contextmanager
def as_found(module: torch.nn.Module) -> Iterator[None]:
    """Put back on leaving: gradients, buffers, mode, and the state of the random generators.

    Inside, gradients start from none, so that the ones there are (a `main_grad` of Megatron-core too) stay as they are,
    and are not reduced among replicas, nor does an optimizer or an engine see them: hooks that run when a gradient has
    been accumulated do not run. A module that is not in training mode is put into it.

    Raises:
        UsageError: the module is sharded over replicas (FSDP), which would have to measure in step.
    """
    _refuse_sharded(module)
    with ExitStack() as stack:
        stack.enter_context(_same_random_state())
        stack.enter_context(_same_buffers(module))
        stack.enter_context(_training(module))
        for parameter in module.parameters():
            stack.enter_context(_own_gradient(parameter))
        for each in module.modules():
            if callable(no_sync := getattr(each, "no_sync", None)):
                stack.enter_context(no_sync())
        yield


def _refuse_sharded(module: torch.nn.Module) -> None:
    kinds = {each.__name__ for part in module.modules() for each in type(part).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise UsageError(
            "this stage is sharded over its replicas (FSDP), so that none of them can be measured alone; "
            "profile the pipeline without FSDP"
        )


@contextmanager
def _same_random_state() -> Iterator[None]:
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
def _same_buffers(module: torch.nn.Module) -> Iterator[None]:
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
def _training(module: torch.nn.Module) -> Iterator[None]:
    # A module in training mode may have parts that are not, on purpose.
    modes = {part: part.training for part in module.modules()}
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def _own_gradient(parameter: Any) -> Iterator[None]:
    """Keep the gradients that `parameter` has out of reach, and the hooks on accumulated ones from running."""
    import torch

    hooks: dict[int, Callable[..., Any]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    gradient, found_hooks = parameter.grad, dict(hooks)
    main = getattr(parameter, "main_grad", None)
    added = getattr(parameter, "grad_added_to_main_grad", None)
    parameter.grad = None
    hooks.clear()
    if main is not None:
        parameter.main_grad = torch.zeros_like(main)
    try:
        yield
    finally:
        parameter.grad = gradient
        hooks.update(found_hooks)
        if main is not None:
            parameter.main_grad = main
        if added is not None:
            parameter.grad_added_to_main_grad = added
