"""Lets Megatron-core train on the CPU, by replacing what it assumes of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that are meant for "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _NoTracker:
    """Replaces the random states of tensor-parallel ranks by the global one."""

    def fork(self, name=None):
        return nullcontext()


@contextmanager
def cpu_only() -> Iterator[None]:
    """Let Megatron-core run on the CPU inside the block."""
    from megatron.core.transformer import dot_product_attention

    with ExitStack() as stack:
        stack.enter_context(_OnCpu())
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        stack.enter_context(
            mock.patch.object(
                dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", _NoTracker
            )
        )
        yield
