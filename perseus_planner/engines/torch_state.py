"""What a measurement must know of torch modules: the tensors in their arguments and results, the
state that it leaves as it was, and the modes of torch in which a computation ran.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError

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


@contextmanager
def preserve_state(module: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, training mode and random number generators after the block.

    Inside the block the module is in training mode and has no gradients. Gradients computed there,
    including Megatron-core's `main_grad`, are not reduced among replicas and never seen by an
    optimizer or engine: hooks on accumulated gradients do not run. So each repetition is that of a
    microbatch that is not the last one. Weights that are sharded (`fully_shard`) are gathered as
    they are for such a microbatch, for which all replicas enter the block.

    Raises:
        UsageError: If it cannot be repeated; see `refusal`.
    """
    if problem := refusal([module]):
        raise UsageError(problem)
    with ExitStack() as stack:
        stack.enter_context(_preserve_random_state())
        stack.enter_context(_preserve_buffers(module))
        stack.enter_context(_training_mode(module))
        for parameter in module.parameters():
            stack.enter_context(_hide_gradient(parameter))
        # Gradients are not reduced among replicas, as in a microbatch that is not the last one.
        for part in module.modules():
            if callable(no_sync := getattr(part, "no_sync", None)):
                stack.enter_context(preserve_attributes(part, "require_forward_param_sync"))
                stack.enter_context(no_sync())
        stack.enter_context(_preserve_shards(module))
        yield


def refusal(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return why modules cannot be repeated; None if they can."""
    kinds = {
        base.__name__
        for module in modules
        for part in module.modules()
        for base in type(part).__mro__
    }
    if "FullyShardedDataParallel" not in kinds:
        return None
    return (
        "a stage is sharded by FullyShardedDataParallel, which keeps its place in the iteration "
        "and reduces gradients in every backward, so that none can be repeated; shard it with "
        "fully_shard, or profile it without sharding"
    )


def regathers_weights(module: torch.nn.Module) -> bool:
    """Return whether weights of `module` are dropped after each forward, and gathered again for its
    backward.
    """
    # Torch keeps this mesh only for groups that it shards again after a forward.
    return any(group.post_forward_mesh_info is not None for group in _shard_groups(module))


_SHARD_STATE = (
    "is_last_backward",
    # From torch 2.15 on, whether whoever runs backwards finishes them, and whether one has begun.
    "manual_backward_finalization",
    "manual_backward_finalization_active",
)
"""What all shards of a module know of the backward in progress."""


def _sharded_parts(module: torch.nn.Module) -> list[Any]:
    from torch.distributed import is_available

    if not is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _shard_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of weights that are gathered together, which torch keeps to itself."""
    states = [part._get_fsdp_state() for part in _sharded_parts(module)]
    if states and not hasattr(states[0], "_fsdp_param_groups"):  # torch 2.9 and earlier
        return [group for state in states if (group := state._fsdp_param_group) is not None]
    return [group for state in states for group in state._fsdp_param_groups]


@contextmanager
def _preserve_shards(module: torch.nn.Module) -> Iterator[None]:
    """Have weights gathered as for a microbatch that is not the last one, as
    torch.distributed.pipelining does; then drop them, with their gradients.
    """
    parts = _sharded_parts(module)
    groups = _shard_groups(module)
    if not parts:
        yield
        return
    with ExitStack() as stack:
        # All of torch's own switches are restored, as the training may have set them.
        for part in parts:
            context = part._get_fsdp_state()._state_ctx
            stack.enter_context(preserve_attributes(context, *_SHARD_STATE))
            part.set_is_last_backward(False)
        # Kept attributes first, as the switches below change them.
        for group in groups:
            stack.enter_context(
                preserve_attributes(
                    group, "reduce_grads", "all_reduce_grads", "reshard_after_backward"
                )
            )
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            for group in groups:
                # Gradients of repetitions are dropped before an optimizer could see them.
                for weight in group.fsdp_params:
                    if "unsharded_accumulated_grad" in vars(weight):  # not in torch 2.15
                        weight.unsharded_accumulated_grad = None
                    if (gathered := getattr(weight, "_unsharded_param", None)) is not None:
                        gathered.grad = None
                group._post_forward_indices.clear()
                group.comm_ctx.post_forward_order.clear()
            for part in parts:
                part.reshard()


@contextmanager
def preserve_attributes(owner: Any, *names: str) -> Iterator[None]:
    """Restore attributes after the block, of those that there are."""
    before = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    import torch

    # Python's generator too: data and dropout of a training may draw from it.
    state = random.getstate()
    devices = []
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

    contents = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, content in contents:
                # The tensor itself stays: the training may hold it elsewhere.
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
    gradient = parameter.grad
    found_hooks = dict(hooks)
    # Megatron accumulates here, in the memory of its buffers, so it is emptied in place.
    main = getattr(parameter, "main_grad", None)
    added = getattr(parameter, "grad_added_to_main_grad", None)
    parameter.grad = None
    # Such hooks would reduce gradients, or count them as ready.
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


@dataclass(frozen=True)
class ComputeModes:
    """Modes of torch that change what a module computes, and in which precision."""

    #: Device type -> whether autocast is enabled, and its dtype.
    autocast: dict[str, tuple[bool, Any]]
    caches_casts: bool  #: Whether autocast keeps the weights that it has cast
    attention: tuple[Any, ...]  #: The kernels that scaled_dot_product_attention may choose

    @classmethod
    def current(cls) -> ComputeModes:
        """Return the modes of this thread."""
        import torch
        from torch.backends import cuda
        from torch.nn.attention import SDPBackend

        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        # Attention kernels differ in time and power, so the same ones must be allowed again.
        enabled = {
            SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
            SDPBackend.MATH: cuda.math_sdp_enabled(),
            SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        }
        return cls(
            {
                device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in devices
            },
            torch.is_autocast_cache_enabled(),
            tuple(kernel for kernel, is_enabled in enabled.items() if is_enabled),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have these modes inside the block."""
        import torch
        from torch.nn.attention import sdpa_kernel

        with ExitStack() as stack:
            for device, (enabled, dtype) in self.autocast.items():
                context = torch.autocast(
                    device, dtype=dtype, enabled=enabled, cache_enabled=self.caches_casts
                )
                stack.enter_context(context)
            if self.attention:
                stack.enter_context(sdpa_kernel(list(self.attention)))
            yield
