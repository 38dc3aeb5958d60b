"""One microbatch of a chunk of Megatron-core whose forwards and backwards overlap, to be repeated.

Megatron runs such a chunk by `combined_forward_backward_step`: a forward alone, a backward alone,
or a forward beside the backward of another microbatch. The same function is called here, without
what it sends and receives in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.engines.engine import replaced
from perseus_planner.engines.torch_state import map_tensors

if TYPE_CHECKING:
    import torch


class _Forward(NamedTuple):
    """A forward that has run, and whose backward has not."""

    received: torch.Tensor | None  #: Its input from the stage before
    output: torch.Tensor | None
    gradient: torch.Tensor | None  #: Of the output; None after the loss


class OverlappedMicrobatch:
    """Runs one microbatch of a chunk, with the interface of `Microbatch` that profiles use.

    Args:
        chunk: The chunk, as Megatron's schedule takes it.
        config: Its config.
        number: Its number among the chunks of this rank; None if there is one.
        inputs: What was recorded of it: `args` and `kwargs` of its `build_schedule_plan`, and what
            it has `received`.
        loss: In the last stage, maps the output to a scalar.
        first: Whether this is the first stage.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        config: Any,
        number: int | None,
        inputs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
        *,
        first: bool,
    ) -> None:
        self.module = chunk
        self.first = first
        self._config = config
        self._number = number
        self._inputs = inputs
        self._loss = loss
        self._last: _Forward | None = None

    def forward(self) -> None:
        """Run a forward alone, after freeing the last one."""
        self._last = None
        self._run(self, None)

    def free_backward(self) -> None:
        """Run the backward of the last forward alone."""
        self._run(None, self)

    def pair(self, other: OverlappedMicrobatch) -> None:
        """Run a forward of a chunk of this rank beside the backward of the last forward of this
        one. If both are this chunk, the next pair has its forward.
        """
        self._run(other, self)

    def forget(self) -> None:
        """Free the last forward."""
        self._last = None

    def can_keep_graph(self) -> bool:
        """Return that a forward has one backward: Megatron frees what it needs."""
        self.forward()
        self.free_backward()
        return False

    def _run(
        self, forward: OverlappedMicrobatch | None, backward: OverlappedMicrobatch | None
    ) -> None:
        """Run a step of Megatron's, of chunks of this rank."""
        import torch
        from megatron.core.pipeline_parallel.combined_1f1b import combined_forward_backward_step

        # A new leaf each time, so that gradients of other repetitions do not add up in it.
        received = None
        if forward is not None:
            received = map_tensors(
                lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad),
                forward._inputs.get("received"),
            )
        before = _Forward(None, None, None)
        if backward is not None:
            assert backward._last is not None
            before = backward._last
            # Freed by the step as it goes; the next backward needs a forward of its own.
            backward._last = None
        # Megatron's own timers would wait for the GPU.
        with replaced(self._config, timers=None), torch.enable_grad():
            output, _, _ = combined_forward_backward_step(
                None if forward is None else forward._planned,
                None,
                None if forward is None else forward.module,
                1,
                received,
                [],
                None if backward is None else backward.module,
                before.received,
                before.output,
                before.gradient,
                self._config,
                f_model_chunk_id=None if forward is None else forward._number,
            )
        if forward is not None:
            # Stands for the next stage's gradient; zeros would take less power.
            gradient = None if forward._loss is not None else torch.ones_like(output)
            forward._last = _Forward(received, output, gradient)

    def _planned(self, _: Any, model: Any, return_schedule_plan: bool) -> tuple[Any, Any]:
        """Return what the forward runs, and its loss as Megatron takes it."""
        plan = model.build_schedule_plan(*self._inputs["args"], **self._inputs["kwargs"])
        return plan, self._with_report

    def _with_report(self, output: Any) -> tuple[Any, Any]:
        assert self._loss is not None
        return self._loss(output), {}
