"""One microbatch through one module: forward, and backward whole or in two parts, as often as is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.training.values import arguments, copied, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Microbatch:
    """The computations of one microbatch.

    Args:
        module: whose weights' gradients are computed.
        forward: what is called with the inputs, mostly the module itself.
        inputs: as in `torch_stage`; copied.
        loss: as in `torch_stage`.
        first: whether no gradients go back to a stage before this one.

    Raises:
        UsageError: forward or backward fails, or what comes out of forward has no gradient.
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
        self._module, self._forward, self._loss = module, forward, loss
        self._inputs = copied(inputs)
        leaves = [each for each in tensors(self._inputs) if each.is_floating_point()]
        if not first and not any(each.requires_grad for each in leaves):
            for each in leaves:
                each.requires_grad_()
        self._leaves = [each for each in leaves if each.requires_grad]
        self._roots: list[torch.Tensor] = []  # what forward gave, its graph with it
        self._kept: list[torch.Tensor] | None = None  # the same of a graph that backward is to leave as it is
        self._gradients: list[torch.Tensor] = []  # of the roots
        self._weights_left: list[dict[str, Any]] | None = None  # what the gradient of the inputs leaves to the weights'

    def forward(self) -> None:
        """Run forward; the graph of the forward before is freed first."""
        import torch

        self._roots = []
        args, kwargs = arguments(self._inputs)
        with torch.enable_grad():
            result = self._forward(*args, **kwargs)
            if self._loss is not None:
                result = self._loss(result)
        self._roots = [each for each in tensors(result) if each.requires_grad]

    def free_backward(self) -> None:
        """Run the backward of the last forward, which frees its graph."""
        self._backward(self._roots, keep=False)
        self._roots = []

    def keep(self) -> None:
        """Have a forward's graph for `backward` and `input_gradient`, unless there is one."""
        if self._kept is None:
            self.forward()
            self._kept, self._roots = self._roots, []

    def forget(self) -> None:
        """Free what is kept: forward alone is measured without a second microbatch in memory."""
        self._roots, self._kept, self._weights_left = [], None, None

    def backward(self) -> None:
        """Run the backward of the kept graph, which stays."""
        assert self._kept is not None
        self._backward(self._kept, keep=True)

    def can_keep_graph(self) -> bool:
        """Whether backward can run more than once on a graph: not where an autograd function frees what it saved.

        Raises:
            UsageError: forward, or one backward, fails.
        """
        try:
            self.keep()
            self._check_roots()
            self.backward()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"the stage cannot be run on its sample input: {described(error)}") from error
        try:
            self.backward()
        except Exception:  # whatever an autograd function that has lost its tensors raises
            self.forget()
            return False
        return True

    def input_gradient(self) -> None:
        """Run the gradient of the inputs on the kept graph, as torch's pipelines do."""
        assert self._kept is not None
        stage_backward_input, _ = _pipeline_backward()
        self._clear_input_gradients()
        for root in self._kept:
            # It ends with freeing the graph of the outputs; here that is kept for the next time.
            root.detach_ = _nothing
        gradients = None if self._loss is not None else self._gradients_of(self._kept)
        _, self._weights_left = stage_backward_input(
            self._kept, gradients, self._leaves, iter(self._module.parameters())
        )

    def keep_input_gradient(self) -> None:
        """Have what `weight_gradient` starts from, unless it is there."""
        self.keep()
        if self._weights_left is None:
            self.input_gradient()

    def weight_gradient(self) -> None:
        """Run the gradient of the weights, as torch's pipelines do, after that of the inputs."""
        assert self._weights_left is not None
        _, stage_backward_weight = _pipeline_backward()
        # It takes its entries out of the groups; with copies they are there the next time.
        groups = [dict(group) for group in self._weights_left]
        stage_backward_weight(iter(self._module.parameters()), groups, retain_graph=True)

    def _backward(self, roots: Sequence[torch.Tensor], *, keep: bool) -> None:
        import torch

        self._clear_input_gradients()
        torch.autograd.backward(roots, self._gradients_of(roots), retain_graph=keep)

    def _gradients_of(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What stands for the gradients that the next stage sends: real numbers, for zeros draw less power."""
        import torch

        if not self._gradients:
            self._gradients = [
                torch.ones_like(each) if each.numel() == 1 else torch.randn_like(each) / each.numel() for each in roots
            ]
        return self._gradients

    def _clear_input_gradients(self) -> None:
        for leaf in self._leaves:  # each microbatch has inputs of its own
            leaf.grad = None

    def _check_roots(self) -> None:
        roots = self._kept or []
        if not roots:
            raise UsageError(
                "nothing that the stage returns has a gradient, so that there is no backward; return floating-point "
                "tensors that depend on its weights"
            )
        if self._loss is not None and (len(roots) != 1 or roots[0].numel() != 1):
            shapes = ", ".join(str(tuple(each.shape)) for each in roots)
            raise UsageError(f"the loss is {len(roots)} tensors of shapes {shapes}; return one scalar")


def _nothing() -> None:
    pass


def described(error: BaseException) -> str:
    """An exception of someone else's code on one line: its kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _pipeline_backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    except ImportError as error:
        raise UsageError(
            "this torch has no functions for the two parts of a backward; install torch 2.6 or later, or measure "
            "without split_backward"
        ) from error
    return stage_backward_input, stage_backward_weight
