"""Runs one microbatch through one module repeatedly: forward, and backward as a whole or in two
parts; and counts its FLOPs and bytes.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.torch_state import (
    call_arguments,
    copy_tensors,
    map_tensors,
    preserve_state,
    tensors,
)
from perseus_planner.gpu.simulated.model import OpCost

if TYPE_CHECKING:
    import torch


class Microbatch:
    """The computations of one microbatch.

    Args:
        module: Module whose weights get gradients.
        forward: Function to call with the inputs, usually the module itself.
        inputs: As in `torch_stage`; they are used where they are, and left without gradients.
        loss: As in `torch_stage`.
        first: Whether this is the first stage, which sends no gradients back.

    Raises:
        UsageError: If forward or backward fails.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        inputs: object,
        loss: Callable[[Any], torch.Tensor] | None,
        *,
        first: bool,
    ) -> None:
        self.first = first
        self.module = module
        self._forward = forward
        self._loss = loss
        # Detached, so that no backward runs on into what made them.
        self._inputs = map_tensors(
            lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), inputs
        )
        leaves = [tensor for tensor in tensors(self._inputs) if tensor.is_floating_point()]
        # A stage behind another one computes gradients of what it has received.
        if not first and not any(leaf.requires_grad for leaf in leaves):
            for leaf in leaves:
                leaf.requires_grad_()
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._roots: list[torch.Tensor] = []  # results of forward, with their graph
        # the same for a graph that backward must not free
        self._kept: list[torch.Tensor] | None = None
        self._gradients: list[torch.Tensor] = []  # of the roots
        # what that of the inputs leaves for the weights
        self._weights_left: list[dict[str, Any]] | None = None

    def forward(self) -> None:
        """Run forward, after freeing the graph of the last forward."""
        import torch

        # The old graph goes first, or there would be two in memory.
        self._roots = []
        args, kwargs = call_arguments(self._inputs)
        with torch.enable_grad():
            result = self._forward(*args, **kwargs)
            if self._loss is not None:
                result = self._loss(result)
        self._roots = [tensor for tensor in tensors(result) if tensor.requires_grad]

    def free_backward(self) -> None:
        """Run the backward of the last forward, and free its graph."""
        self._backward(self._roots, keep=False)
        self._roots = []

    def keep(self) -> None:
        """Run forward for `backward` and `input_gradient`, unless its graph is already there."""
        if self._kept is None:
            self.forward()
            self._kept = self._roots
            self._roots = []

    def forget(self) -> None:
        """Free all graphs, so that forward is measured without a second microbatch in memory."""
        self._roots = []
        self._kept = None
        self._weights_left = None

    def backward(self) -> None:
        """Run the backward of the kept graph without freeing it."""
        assert self._kept is not None
        self._backward(self._kept, keep=True)

    def has_backward(self) -> bool:
        """Return whether the result of the kept forward has a gradient. That of a first stage whose
        weights are frozen has none.
        """
        return bool(self._kept)

    def can_keep_graph(self) -> bool:
        """Return whether backward can run repeatedly on a graph; some autograd functions free what
        they saved. Where there is nothing to run, it can.

        Raises:
            UsageError: If forward, or the first backward, fails.
        """
        try:
            self.keep()
            if not self.has_backward():
                return True
            self._check_loss()
            # A first backward fails for reasons of the stage itself; a second one, if the graph is
            # freed.
            self.backward()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the stage cannot be run on its sample input: {describe_error(error)}"
            ) from error
        try:
            self.backward()
        except Exception:  # an autograd function without its tensors may raise anything
            self.forget()
            return False
        return True

    def input_gradient(self) -> None:
        """Compute the gradient of the inputs on the kept graph, as torch.distributed.pipelining
        does.
        """
        assert self._kept is not None
        stage_backward_input, _ = _pipeline_backward()
        self._clear_input_gradients()
        for root in self._kept:
            # stage_backward_input frees the graph of the outputs at its end; here it is needed
            # again.
            root.detach_ = _nothing
        gradients = None if self._loss is not None else self._gradients_of(self._kept)
        _, self._weights_left = stage_backward_input(
            self._kept, gradients, self._leaves, iter(self.module.parameters())
        )

    def keep_input_gradient(self) -> None:
        """Run `input_gradient` for `weight_gradient`, unless its result is already there."""
        self.keep()
        if self._weights_left is None:
            self.input_gradient()

    def weight_gradient(self) -> None:
        """Compute the gradient of the weights after that of the inputs, as
        torch.distributed.pipelining does.
        """
        assert self._weights_left is not None
        _, stage_backward_weight = _pipeline_backward()
        # stage_backward_weight removes entries from the groups, which are needed again.
        groups = [dict(group) for group in self._weights_left]
        stage_backward_weight(iter(self.module.parameters()), groups, retain_graph=True)

    def _backward(self, roots: Sequence[torch.Tensor], *, keep: bool) -> None:
        import torch

        if not roots:
            return
        self._clear_input_gradients()
        torch.autograd.backward(roots, self._gradients_of(roots), retain_graph=keep)

    def _gradients_of(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return random gradients in place of those from the next stage: zeros would take less
        power.
        """
        import torch

        if not self._gradients:
            self._gradients = [
                torch.ones_like(root) if root.numel() == 1 else torch.randn_like(root)
                for root in roots
            ]
        return self._gradients

    def _clear_input_gradients(self) -> None:
        for leaf in self._leaves:  # each microbatch has different inputs
            leaf.grad = None

    def _check_loss(self) -> None:
        roots = self._kept or []
        if self._loss is not None and (len(roots) != 1 or roots[0].numel() != 1):
            shapes = ", ".join(str(tuple(root.shape)) for root in roots)
            raise UsageError(
                f"the loss consists of {len(roots)} tensors of shapes {shapes}; return one scalar"
            )


def _nothing() -> None:
    pass


def describe_error(error: BaseException) -> str:
    """Describe an exception on one line: its class and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _pipeline_backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )
    except ImportError as error:
        raise UsageError(
            "this torch has no functions for the two parts of a backward; install torch 2.6 or "
            "later, or measure without split_backward"
        ) from error
    return stage_backward_input, stage_backward_weight


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
    copies = copy_tensors(inputs)  # which the module may change
    microbatch = Microbatch(module, forward or module, copies, loss, first=first)
    with preserve_state(module):
        try:
            if microbatch.can_keep_graph():
                backward = OpCost(0.0, 0.0)
                if microbatch.has_backward():
                    backward = count_op_cost(microbatch.backward)
                microbatch.forget()
                return StageOpCost(count_op_cost(microbatch.forward), backward)
            microbatch.forward()
            # Once before counting: gradients that exist are added to, as in most microbatches.
            microbatch.free_backward()
            ahead = count_op_cost(microbatch.forward)
            return StageOpCost(ahead, count_op_cost(microbatch.free_backward))
        finally:
            microbatch.forget()


def count_op_cost(action: Callable[[], object]) -> OpCost:
    """Run `action` once, and count its FLOPs and bytes.

    FLOPs are those of matrix products, convolutions and attention, as in torch's FlopCounterMode,
    and of products in groups, such as those of experts, which it does not know.
    Bytes are those of the tensors that each operator reads and writes. They are an upper bound,
    because fused kernels and caches are ignored. Operators that only view or allocate move nothing.

    Raises:
        UsageError: If an operator multiplies matrices, and how many FLOPs it takes is not known.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Traffic(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            # It would count as nothing, and the stage would come out too fast.
            if _MULTIPLIES.search(func._schema.name) and func._overloadpacket not in known:
                raise UsageError(
                    f"the FLOPs of the operator {func._schema.name} are not known, so this stage "
                    "cannot run on a simulated GPU; measure it on a GPU, or use another operator"
                )
            # Counted by operator: what kernels fuse or caches keep is counted too.
            if _moves_data(func):
                self.bytes += sum(tensor.nbytes for tensor in tensors((args, kwargs, result)))
            return result

    flops = FlopCounterMode(display=False, custom_mapping=_formulas())
    known = {*flops.flop_registry}
    traffic = Traffic()
    with warnings.catch_warnings():
        # FlopCounterMode also tracks modules, which recomputation confuses; only the total is used.
        warnings.filterwarnings("ignore", message="The module hierarchy tracking")
        with flops, traffic:
            action()
    return OpCost(float(flops.get_total_flops()), float(traffic.bytes))


_MULTIPLIES = re.compile(r"mm(_|$)|matmul|linear(_|$)|conv(_|\d|olution)|attention|encoder_layer")
"""Names of operators of ATen that multiply matrices."""


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return the FLOP formulas of operators that torch's counter does not have: attention on CPUs,
    and matrix products in groups.
    """
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    # Torch's own formulas, for operators that take other arguments than those of GPUs.
    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    def grouped(first: Any, second: Any, *_: Any, **__: Any) -> int:
        # Groups share out rows, columns or the inner width, so together they are one product; they
        # are as many if both have them.
        products = 2 * math.prod(first) * second[-1]
        return int(products // first[0] if len(first) > len(second) else products)

    aten = torch.ops.aten
    formulas: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": backward,
        "_grouped_mm": grouped,
        "_scaled_grouped_mm": grouped,
    }
    # Releases of torch differ in which of these operators they have.
    return {getattr(aten, name): count for name, count in formulas.items() if hasattr(aten, name)}


def _moves_data(func: Any) -> bool:
    views = any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in func._schema.returns
    )
    return not views and not func._schema.name.startswith(
        ("aten::empty", "aten::new_empty", "aten::detach")
    )
