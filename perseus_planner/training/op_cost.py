"""Counts the FLOPs and bytes of a torch computation while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.training.microbatch import Microbatch
from perseus_planner.training.state import preserve_state
from perseus_planner.training.values import tensors

if TYPE_CHECKING:
    import torch


class StageOpCost(NamedTuple):
    """FLOPs and bytes of one microbatch in a stage."""

    forward: OpCost  #: with the loss, if there is one
    backward: OpCost  #: for inputs and weights


def stage_op_cost(
    module: torch.nn.Module,
    inputs: object,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    first: bool = False,
    forward: Callable[..., Any] | None = None,
) -> StageOpCost:
    """Run one microbatch and count its FLOPs and bytes; the state of the module is preserved.

    The backward accumulates gradients, as for all microbatches of an iteration except the first.
    Arguments are those of `Microbatch`.

    Raises:
        UsageError: If forward or backward fails on these inputs.
    """
    microbatch = Microbatch(module, forward or module, inputs, loss, first=first)
    with preserve_state(module):
        try:
            if microbatch.can_keep_graph():
                backward = count_op_cost(microbatch.backward)
                microbatch.forget()
                return StageOpCost(count_op_cost(microbatch.forward), backward)
            microbatch.forward()
            microbatch.free_backward()
            ahead = count_op_cost(microbatch.forward)
            return StageOpCost(ahead, count_op_cost(microbatch.free_backward))
        finally:
            microbatch.forget()


def count_op_cost(action: Callable[[], object]) -> OpCost:
    """Run `action` once, and count its FLOPs and bytes.

    FLOPs are those of matrix products, convolutions and attention, as in torch's FlopCounterMode.
    Bytes are those of the tensors that each operator reads and writes. They are an upper bound,
    because fused kernels and caches are ignored. Operators that only view or allocate move nothing.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Traffic(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if _moves_data(func):
                self.bytes += sum(tensor.nbytes for tensor in tensors((args, kwargs, result)))
            return result

    flops, traffic = FlopCounterMode(display=False, custom_mapping=_attention_on_cpu()), Traffic()
    with warnings.catch_warnings():
        # FlopCounterMode also tracks modules, which recomputation confuses; only the total is used.
        warnings.filterwarnings("ignore", message="The module hierarchy tracking")
        with flops, traffic:
            action()
    return OpCost(float(flops.get_total_flops()), float(traffic.bytes))


def _attention_on_cpu() -> dict[Any, Callable[..., int]]:
    """Return the FLOP formulas of operators that torch counts only on GPUs."""
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    aten = torch.ops.aten
    names: dict[str, Callable[..., int]] = {"": forward, "_backward": backward}
    known = {
        f"_scaled_dot_product_flash_attention_for_cpu{end}": count for end, count in names.items()
    }
    return {getattr(aten, name): count for name, count in known.items() if hasattr(aten, name)}


def _moves_data(func: Any) -> bool:
    views = any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in func._schema.returns
    )
    return not views and not func._schema.name.startswith(
        ("aten::empty", "aten::new_empty", "aten::detach")
    )
