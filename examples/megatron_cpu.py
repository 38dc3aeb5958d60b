"""What Megatron-core takes for granted of a GPU, replaced where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Tensors that are made on "cuda" are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _NoTracker:
    """Stands for the random states of tensor ranks: here there is one state."""

    def fork(self, name=None):
        return nullcontext()


@contextmanager
def cpu_only() -> Iterator[None]:
    """Lets Megatron-core run on the CPU inside the block."""
    from megatron.core.transformer import dot_product_attention

    with ExitStack() as stack:
        stack.enter_context(_OnCpu())
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        stack.enter_context(
            mock.patch.object(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", _NoTracker)
        )
        yield
