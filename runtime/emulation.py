"""Trains on emulated GPUs: a real engine, whose computations take as long as they would on the GPU.

    with emulate(engine, "emulated:a100-sxm?slower=2000"):
        ...  # train

Every forward and every backward of this rank takes as long as `gpu/simulated/emulated.py` predicts
for its FLOPs and bytes, at the clock of the emulated GPU while it runs; setting that clock changes
the duration. The results are the same to the last bit: the engine runs its modules, losses,
transfers and schedule.

Emulation lets you try plans, stragglers, failures and the planner's service on a laptop: a wrong,
late or missing clock change shows in the iteration time and in the energy. It is not a measurement
of any GPU. It models no kernels and no memory limits, and transfers take as long as they really do
here.

The real computation happens within the emulated time, so it must be shorter: choose `slower` such
that computations take tens of milliseconds. A real computation that takes longer prolongs the
emulated one, and the GPU waits meanwhile.

FLOPs and bytes of a stage are counted in its first training microbatch, and again for other shapes
and in another mode, as the profiler counts them. A profile of `emulated:a100-sxm?slower=2000` is
made in virtual time, and predicts training there. A backward is timed as a whole, from the first
gradient until autograd has finished. Schedules that compute the gradients of inputs and of weights
separately are not supported. Evaluation is not slowed down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines import engine_of
from perseus_planner.engines.engine import EngineStage
from perseus_planner.engines.microbatch import StageOpCost, stage_op_cost
from perseus_planner.engines.recording import followed_attribute, followed_module
from perseus_planner.engines.torch_state import copy_tensors, is_training, tensors
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu.simulated.model import OpCost

Loss = Callable[[Any], "torch.Tensor"]


@contextmanager
def emulate(
    engine: Any, gpu: str, mode: Callable[[], object] = lambda: None
) -> Iterator[EmulatedGpu]:
    """Make computations of `engine` on this rank take as long as on an emulated GPU, inside the
    block.

    Args:
        engine: A DeepSpeed PipelineEngine, the chunks of a Megatron-core model, or a schedule of
            torch.distributed.pipelining.
        gpu: Text such as "emulated:a100-sxm/0?slower=2000"; without the number, the local rank is
            used.
        mode: Returns what tells apart the ways in which the engine computes, such as
            `lambda: recompute.is_on`, as each has FLOPs and bytes of its own.

    Raises:
        UsageError: If the engine is not supported or splits its backwards, or `gpu` is not
            emulated.
        GpuError: If there is no such GPU.
    """
    adapter = engine_of(engine, "emulate")
    with ExitStack() as stack:
        device = stack.enter_context(_open(gpu))
        if adapter.splits_backward:
            raise UsageError(
                f"{type(engine).__name__} computes the gradients of inputs and of weights "
                "separately, which cannot be emulated; use a schedule with whole backwards, such "
                "as Schedule1F1B or ScheduleInterleaved1F1B"
            )
        for stage in adapter.stages():
            stack.enter_context(_EmulatedStage(device, stage, mode=mode).attached())
        yield device


@contextmanager
def emulate_stage(
    module: torch.nn.Module, gpu: EmulatedGpu, *, loss: Loss | None = None, first: bool = False
) -> Iterator[None]:
    """Make training calls of `module` and their backwards take as long as on an emulated GPU,
    inside the block.

    Use this for pipelines without an engine.

    Args:
        module: The stage.
        gpu: The GPU to emulate.
        loss: Loss of the last stage, from the module's output to a scalar. Its FLOPs and bytes are
            added to those of the module; it is called only to count them.
        first: Whether this is the first stage, which sends no gradients back.

    Raises:
        UsageError: At the first call, if forward or backward fails on its inputs.
    """
    stage = EngineStage(0 if first else 1, module, module)
    with _EmulatedStage(gpu, stage, loss).attached():
        yield


class _EmulatedStage:
    """Times the computations of one stage.

    Args:
        gpu: The emulated GPU.
        stage: The stage.
        loss: As in `emulate_stage`.
        mode: As in `emulate`.
    """

    def __init__(
        self,
        gpu: EmulatedGpu,
        stage: EngineStage,
        loss: Loss | None = None,
        mode: Callable[[], object] = lambda: None,
    ) -> None:
        self._gpu = gpu
        self._stage = stage
        self._mode = mode
        # The output of a last chunk of Megatron-core is the losses of its tokens.
        self._loss = (lambda output: output.float().mean()) if stage.loss_with_output else loss
        self._received: Any = None  #: what the stage before has sent, if a receiver takes it
        self._costs: dict[object, StageOpCost] = {}  #: by mode and shapes of the inputs
        self._running: StageOpCost | None = None  #: cost of the forward that runs
        self._is_counting = False
        #: The call to count once its loss is known.
        self._uncounted: tuple[Any, Mapping[str, Any]] | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time the module inside the block."""
        stage = self._stage
        function: Any = None
        with ExitStack() as stack:
            if stage.receiver is not None:
                receiver = (stage.receiver, "set_input_tensor")
                stack.enter_context(followed_attribute(*receiver, self._receive))
            if stage.loss is not None:
                # The loss is computed outside of the module, so a call is counted once its loss is
                # known.
                function = getattr(*stage.loss)
                after = partial(self._after_loss, function)
                stack.enter_context(followed_attribute(*stage.loss, after=after))
            before = partial(self._before, loss_follows=function is not None)
            stack.enter_context(followed_module(stage.module, before, self._after))
            yield

    def _receive(self, args: Any, _: object) -> None:
        (self._received,) = args

    def _before(self, args: Any, kwargs: Mapping[str, Any], *, loss_follows: bool) -> None:
        """Handle the call of the module."""
        self._running = self._uncounted = None
        if self._is_counting or not is_training(args, kwargs):
            return
        key = self._mode(), _shapes(args, kwargs)
        if key not in self._costs:
            if loss_follows:
                self._uncounted = copy_tensors((tuple(args), dict(kwargs)))
                return
            self._costs[key] = self._count(args, kwargs, self._loss)
        self._running = self._costs[key]
        _start(self._gpu, self._running.forward)

    def _after(self, _: object, __: object, output: Any) -> None:
        """Handle the return of the module."""
        if self._running is not None:
            self._gpu.finish()
            _time_backward(self._gpu, output, self._running.backward)

    def _after_loss(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Handle the return of the loss function of an engine."""
        if self._is_counting or self._uncounted is None:
            return
        inputs, named = self._uncounted
        self._uncounted = None
        cost = self._count(inputs, named, lambda output: function(output, *args[1:], **kwargs))
        self._costs[self._mode(), _shapes(inputs, named)] = cost
        _start(self._gpu, cost.forward)
        self._gpu.finish()
        _time_backward(self._gpu, result, cost.backward)

    def _count(self, args: Any, kwargs: Mapping[str, Any], loss: Loss | None) -> StageOpCost:
        stage = self._stage
        self._is_counting = True
        try:
            with stage.preserve_state(), self._own_input():
                return stage_op_cost(
                    stage.module,
                    {"args": tuple(args), "kwargs": dict(kwargs)},
                    loss,
                    first=stage.number == 0,
                    forward=lambda args, kwargs: stage.forward(*args, **kwargs),
                )
        finally:
            self._is_counting = False

    @contextmanager
    def _own_input(self) -> Iterator[None]:
        """Have the receiver hold a copy of what was sent."""
        receiver = self._stage.receiver
        received = self._received
        if receiver is None:
            yield
            return
        receiver.set_input_tensor(copy_tensors(received))
        try:
            yield
        finally:
            receiver.set_input_tensor(received)


def _start(gpu: EmulatedGpu, cost: OpCost) -> None:
    if cost.flops or cost.bytes:
        gpu.start(cost)


def _time_backward(gpu: EmulatedGpu, output: Any, cost: OpCost) -> None:
    """Make the backward from `output` take as long as `cost` does on `gpu`.

    This uses hooks on the graph instead of operations in it: engines free outputs and detach them
    in place, which is impossible for views.
    """
    import torch

    is_running = False

    def begin(_: object) -> None:
        nonlocal is_running
        if not is_running:
            is_running = True
            _start(gpu, cost)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        nonlocal is_running
        is_running = False
        gpu.finish()

    for node in {tensor.grad_fn for tensor in tensors(output) if tensor.grad_fn is not None}:
        node.register_prehook(begin)


def _shapes(*values: object) -> object:
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors(values))


@contextmanager
def _open(text: str) -> Iterator[EmulatedGpu]:
    import torch

    if not text.startswith("emulated:"):
        raise UsageError(
            f"GPU {text!r} is not emulated; give a GPU such as emulated:a100-sxm?slower=2000"
        )
    with open_gpu(gpu_text(text, torch.device("cpu"))) as gpu:
        assert isinstance(gpu, EmulatedGpu)
        yield gpu
