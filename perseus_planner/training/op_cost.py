"""What a torch computation does, counted while it runs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.training.microbatch import Microbatch
from perseus_planner.training.state import as_found
from perseus_planner.training.values import tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class StageOpCost(NamedTuple):
    """The work of one microbatch in a stage."""

    forward: OpCost  #: the loss included, if it has one
    backward: OpCost  #: of inputs and weights


def stage_op_cost(
    module: torch.nn.Module,
    inputs: object,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    first: bool = False,
    forward: Callable[..., Any] | None = None,
) -> StageOpCost:
    """What `module` does in one microbatch, counted in a run of it that leaves no trace; arguments as of `Microbatch`.

    The backward adds to gradients that are there, as those of all microbatches but the first of an iteration do.

    Raises:
        UsageError: the module cannot be run forward or backward on these inputs.
    """
    microbatch = Microbatch(module, forward or module, inputs, loss, first=first)
    with as_found(module):
        try:
            if microbatch.can_keep_graph():
                backward = counted(microbatch.backward)
                microbatch.forget()
                return StageOpCost(counted(microbatch.forward), backward)
            microbatch.forward()
            microbatch.free_backward()
            ahead = counted(microbatch.forward)
            return StageOpCost(ahead, counted(microbatch.free_backward))
        finally:
            microbatch.forget()


def counted(action: Callable[[], object]) -> OpCost:
    """The work of `action`, which runs once.

    FLOPs are those of matrix products, convolutions and attention, as torch's FlopCounterMode knows them. Bytes are
    those of the tensors that each operator reads and writes: no kernel is taken to be fused with another, nothing to
    stay in a cache, so they are an upper estimate. Operators that only view or allocate move nothing.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Traffic(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if _moves_data(func):
                self.bytes += sum(each.nbytes for each in tensors((args, kwargs, result)))
            return result

    flops, traffic = FlopCounterMode(display=False, custom_mapping=_attention_on_cpu()), Traffic()
    with warnings.catch_warnings():
        # It tracks modules too, which a recomputation confuses; only the sum is used.
        warnings.filterwarnings("ignore", message="The module hierarchy tracking")
        with flops, traffic:
            action()
    return OpCost(float(flops.get_total_flops()), float(traffic.bytes))


def _attention_on_cpu() -> dict[Any, Callable[..., int]]:
    """Operator -> FLOPs, of those that torch counts on a GPU only."""
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    aten = torch.ops.aten
    names: dict[str, Callable[..., int]] = {"": forward, "_backward": backward}
    known = {f"_scaled_dot_product_flash_attention_for_cpu{end}": count for end, count in names.items()}
    return {getattr(aten, name): count for name, count in known.items() if hasattr(aten, name)}


def _moves_data(func: Any) -> bool:
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return not views and not func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach"))
