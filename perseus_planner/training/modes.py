"""The modes of torch in which a computation ran: autocast, and the kernels that attention may
choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


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
        enabled = {
            SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
            SDPBackend.MATH: cuda.math_sdp_enabled(),
            SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        }
        return cls(
            {
                each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                for each in devices
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
