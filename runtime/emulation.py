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

FLOPs and bytes of a stage are counted in its first training microbatch, and again when shapes
change, as the profiler counts them. A profile of `emulated:a100-sxm?slower=2000` is made in virtual
time, and predicts training there. A backward is timed as a whole, from the first gradient until
autograd has finished. Schedules that compute the gradients of inputs and of weights separately are
not supported. Evaluation is not slowed down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.training.engine_kinds import SUPPORTED_ENGINES, engine_kind, megatron_chunks
from perseus_planner.training.op_cost import StageOpCost, stage_op_cost
from perseus_planner.training.values import copy_tensors, is_training, tensors

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu.simulated.model import OpCost

Loss = Callable[[Any], "torch.Tensor"]


@contextmanager
def emulate(engine: Any, gpu: str) -> Iterator[EmulatedGpu]:
    """Make computations of `engine` on this rank take as long as on an emulated GPU, inside the
    block.

    Args:
        engine: A DeepSpeed PipelineEngine, the chunks of a Megatron-core model, or a schedule of
            torch.distributed.pipelining.
        gpu: Text such as "emulated:a100-sxm/0?slower=2000"; without the number, the local rank is
            used.

    Raises:
        UsageError: If the engine is not supported or splits its backwards, or `gpu` is not
            emulated.
        GpuError: If there is no such GPU.
    """
    kind = engine_kind(engine)
    if kind is None:
        raise UsageError(
            f"emulate was given a {type(engine).__name__}; give it {SUPPORTED_ENGINES}"
        )
    find = {"torch": _torch_stages, "deepspeed": _deepspeed_stages, "megatron": _megatron_stages}[
        kind
    ]
    with ExitStack() as stack:
        device = stack.enter_context(_open(gpu))
        for stage in find(engine, device):
            stack.enter_context(stage)
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
    with _EmulatedStage(gpu, module, module, first=first, loss=loss).attached():
        yield


class _EmulatedStage:
    """Times the computations of one stage.

    Args:
        gpu: The emulated GPU.
        module: The stage.
        forward: Function that runs the stage to count its FLOPs and bytes.
        first: As in `emulate_stage`.
        loss: As in `emulate_stage`.
        state: Makes a context that preserves further state while counting.
    """

    def __init__(
        self,
        gpu: EmulatedGpu,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        *,
        first: bool,
        loss: Loss | None = None,
        state: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._gpu, self._module, self._forward, self._first, self._state = (
            gpu,
            module,
            forward,
            first,
            state,
        )
        self._loss = loss
        self._costs: dict[object, StageOpCost] = {}  #: by shapes of the inputs
        self._running: StageOpCost | None = None  #: cost of the forward that runs
        self._is_counting = False
        self._uncounted: tuple[Any, Mapping[str, Any]] | None = (
            None  #: the call to count once its loss is known
        )

    @contextmanager
    def attached(self, owner: object = None, loss: str = "") -> Iterator[None]:
        """Time the module inside the block; in the last stage of an engine, `loss` is the
        attribute of `owner`.
        """
        with ExitStack() as stack:
            follows = owner is not None and getattr(owner, loss) is not None
            if follows:
                stack.enter_context(_intercept(owner, loss, self._after_loss))
            for handle in (
                self._module.register_forward_pre_hook(
                    partial(self._before, loss_follows=follows), with_kwargs=True
                ),
                self._module.register_forward_hook(self._after),
            ):
                stack.callback(handle.remove)
            yield

    def _before(
        self, _: object, args: Any, kwargs: Mapping[str, Any], *, loss_follows: bool
    ) -> None:
        """Handle the call of the module."""
        self._running = self._uncounted = None
        if self._is_counting or not is_training(args, kwargs):
            return
        shapes = _shapes(args, kwargs)
        if shapes not in self._costs:
            if loss_follows:
                self._uncounted = copy_tensors((tuple(args), dict(kwargs)))
                return
            self._costs[shapes] = self._count(args, kwargs, self._loss)
        self._running = self._costs[shapes]
        _start(self._gpu, self._running.forward)

    def _after(self, _: object, args: Any, output: Any) -> None:
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
        (inputs, named), self._uncounted = self._uncounted, None
        cost = self._count(inputs, named, lambda output: function(output, *args[1:], **kwargs))
        self._costs[_shapes(inputs, named)] = cost
        _start(self._gpu, cost.forward)
        self._gpu.finish()
        _time_backward(self._gpu, result, cost.backward)

    def _count(self, args: Any, kwargs: Mapping[str, Any], loss: Loss | None) -> StageOpCost:
        self._is_counting = True
        try:
            with self._state():
                return stage_op_cost(
                    self._module,
                    {"args": tuple(args), "kwargs": dict(kwargs)},
                    loss,
                    first=self._first,
                    forward=lambda args, kwargs: self._forward(*args, **kwargs),
                )
        finally:
            self._is_counting = False


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
def _intercept(owner: object, name: str, after: Callable[..., None]) -> Iterator[None]:
    """Call `after` after every call of attribute `name`, a function or a module, inside the
    block.
    """
    import torch

    found: Callable[..., Any] = getattr(owner, name)
    if isinstance(found, torch.nn.Module):
        handle = found.register_forward_hook(
            lambda _, args, kwargs, result: after(found, args, kwargs, result), with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()
        return

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = found(*args, **kwargs)
        after(found, args, kwargs, result)
        return result

    is_on_instance = name in vars(owner)
    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        if is_on_instance:
            setattr(owner, name, found)
        else:
            delattr(owner, name)


def _torch_stages(schedule: Any, gpu: EmulatedGpu) -> Iterator[AbstractContextManager[None]]:
    parts = (
        [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    )  # there is no public attribute
    order: Mapping[int, Any] = getattr(schedule, "pipeline_order", None) or {}
    kinds = {
        action.computation_type.name
        for row in order.values()
        for action in row
        if action is not None
    }
    if kinds & {"BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"}:
        raise UsageError(
            f"{type(schedule).__name__} computes the gradients of inputs and of weights "
            "separately, which cannot be emulated; use a schedule with whole backwards, such as "
            "Schedule1F1B or ScheduleInterleaved1F1B"
        )
    for part in parts:
        stage = _EmulatedStage(gpu, part.submod, part.submod, first=part.is_first)
        yield stage.attached(schedule, "_loss_fn") if part.is_last else stage.attached()


def _deepspeed_stages(engine: Any, gpu: EmulatedGpu) -> Iterator[AbstractContextManager[None]]:
    module = engine.module
    # module.forward, because the engine's hooks on the module prepare for a backward by the engine.
    stage = _EmulatedStage(
        gpu,
        module,
        module.forward,
        first=engine.stage_id == 0,
        state=lambda: _preserve_attribute(module, "micro_offset"),
    )
    yield stage.attached(module, "loss_fn") if engine.is_last_stage() else stage.attached()


def _megatron_stages(model: Any, gpu: EmulatedGpu) -> Iterator[AbstractContextManager[None]]:
    from megatron.core import parallel_state as state

    chunks, rank = megatron_chunks(model), state.get_pipeline_model_parallel_rank()
    last = len(chunks) - 1 if rank == state.get_pipeline_model_parallel_world_size() - 1 else None
    for index, chunk in enumerate(chunks):
        yield _emulated_chunk(gpu, chunk, first=rank == index == 0, last=index == last)


@contextmanager
def _emulated_chunk(gpu: EmulatedGpu, chunk: Any, *, first: bool, last: bool) -> Iterator[None]:
    """Time a chunk of Megatron-core, which gets its input by `set_input_tensor` and, if it is
    last, returns losses.
    """
    receiver = chunk
    while not hasattr(receiver, "set_input_tensor"):
        receiver = receiver.module
    receive, received = receiver.set_input_tensor, None

    def remember(_: object, args: Any, __: object, ___: object) -> None:
        nonlocal received
        (received,) = args

    @contextmanager
    def with_copy() -> Iterator[None]:
        receive(copy_tensors(received))
        try:
            yield
        finally:
            receive(received)

    loss: Loss | None = (lambda output: output.float().mean()) if last else None
    stage = _EmulatedStage(gpu, chunk, chunk, first=first, loss=loss, state=with_copy)
    with _intercept(receiver, "set_input_tensor", remember), stage.attached():
        yield


@contextmanager
def _preserve_attribute(owner: object, name: str) -> Iterator[None]:
    found = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, found)


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
