"""Training on emulated GPUs: a real engine, in which computations take as long as a GPU takes that is not there.

    with emulated(engine, "emulated:a100-sxm?slower=2000"):
        ...  # train

Every forward and every backward of this rank lasts as long as `gpu/simulated/emulated.py` says for its FLOPs and
bytes, at the clock that is in force on the emulated GPU while it runs; whoever sets that clock changes how long it
lasts. What is computed is the same, to the last bit: the engine runs its own modules, losses, transfers and schedule.

What it is for: trying plans, stragglers, failures and the planner's own service on a laptop, so that a wrong, late or
missing clock change shows in the iteration time and in the energy. What it is not: a measurement of any GPU. It knows
no kernels, no memory limits and no transfers but those that the engine really makes, which take what they take here.

The real computation is part of the time that it is given. So it must take less: choose `slower` such that computations
take tens of milliseconds. Where it takes longer, so does the emulated computation, and the GPU waits meanwhile.

The work of a stage is counted in its first training microbatch, and again when shapes change, as the profiler counts
it on a simulated GPU: a profile from `simulated:a100-sxm?slower=2000&noise=0&drift=0` says what
`emulated:a100-sxm?slower=2000` will take.
Whole backwards are timed, from the first gradient that comes in until autograd has done all. Schedules that compute
the gradients of inputs and of weights apart are refused. Evaluation takes no longer than it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.training.engine_kinds import engine_kind
from perseus_planner.training.op_cost import StageOpCost, stage_op_cost
from perseus_planner.training.values import copied, is_training, tensors

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu.simulated.model import OpCost

Loss = Callable[[Any], "torch.Tensor"]


@contextmanager
def emulated(engine: Any, gpu: str) -> Iterator[EmulatedGpu]:
    """While the block runs, what `engine` computes on this rank takes as long as on the emulated GPU `gpu`.

    Args:
        engine: a PipelineEngine of DeepSpeed or a schedule of torch.distributed.pipelining.
        gpu: "emulated:a100-sxm/0?slower=2000"; without the number, the one of this process' local rank.

    Raises:
        UsageError: the engine is none of these, splits its backwards, or `gpu` is not emulated.
        GpuError: no such GPU.
    """
    find = {"torch": _torch_stages, "deepspeed": _deepspeed_stages}.get(engine_kind(engine) or "")
    if find is None:
        raise UsageError(
            f"emulated was given a {type(engine).__name__}; give it a DeepSpeed PipelineEngine or a schedule of "
            "torch.distributed.pipelining"
        )
    with ExitStack() as stack:
        device = stack.enter_context(_opened(gpu))
        for stage in find(engine, device):
            stack.enter_context(stage)
        yield device


@contextmanager
def emulated_stage(
    module: torch.nn.Module, gpu: EmulatedGpu, *, loss: Loss | None = None, first: bool = False
) -> Iterator[None]:
    """While the block runs, a training call of `module` takes as long as on `gpu`, and so does its backward.

    For pipelines without an engine.

    Args:
        module: the stage.
        gpu: what it is to run on.
        loss: of the last stage, from the module's output to a scalar; its work is counted with the module's, and takes
            its time there. It is not called but for that.
        first: whether it is the first stage, which sends no gradients back.

    Raises:
        UsageError: at the first call: the module cannot be run forward or backward on its inputs.
    """
    with _Stage(gpu, module, module, first=first, loss=loss).attached():
        yield


class _Stage:
    """What makes one stage take its time.

    Args:
        gpu: where it runs.
        module: the stage.
        forward: runs it, for its work to be counted.
        first: as in `emulated_stage`.
        loss: as in `emulated_stage`.
        state: what else is put back after counting.
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
        self._gpu, self._module, self._forward, self._first, self._state = gpu, module, forward, first, state
        self._loss = loss
        self._works: dict[object, StageOpCost] = {}  #: shapes -> work
        self._running: StageOpCost | None = None  #: of the forward that runs
        self._is_counting = False
        self._awaits_loss: tuple[Any, Mapping[str, Any]] | None = None  #: the call whose work its loss will tell

    @contextmanager
    def attached(self, owner: object = None, loss: str = "") -> Iterator[None]:
        """Time the module; and, of the last stage of an engine, know the loss, which is attribute `loss` of `owner`."""
        with ExitStack() as stack:
            follows = owner is not None and getattr(owner, loss) is not None
            if follows:
                stack.enter_context(_followed(owner, loss, self._lost))
            for handle in (
                self._module.register_forward_pre_hook(partial(self._before, loss_follows=follows), with_kwargs=True),
                self._module.register_forward_hook(self._after),
            ):
                stack.callback(handle.remove)
            yield

    def _before(self, _: object, args: Any, kwargs: Mapping[str, Any], *, loss_follows: bool) -> None:
        """The module is called."""
        self._running = self._awaits_loss = None
        if self._is_counting or not is_training(args, kwargs):
            return
        shapes = _shapes(args, kwargs)
        if shapes not in self._works:
            if loss_follows:
                self._awaits_loss = copied((tuple(args), dict(kwargs)))
                return
            self._works[shapes] = self._counted(args, kwargs, self._loss)
        self._running = self._works[shapes]
        _start(self._gpu, self._running.forward)

    def _after(self, _: object, args: Any, output: Any) -> None:
        """The module has returned."""
        if self._running is not None:
            self._gpu.finish()
            _time_backward(self._gpu, output, self._running.backward)

    def _lost(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """The engine has computed the loss with `function`."""
        if self._is_counting or self._awaits_loss is None:
            return
        (inputs, named), self._awaits_loss = self._awaits_loss, None
        work = self._counted(inputs, named, lambda output: function(output, *args[1:], **kwargs))
        self._works[_shapes(inputs, named)] = work
        _start(self._gpu, work.forward)
        self._gpu.finish()
        _time_backward(self._gpu, result, work.backward)

    def _counted(self, args: Any, kwargs: Mapping[str, Any], loss: Loss | None) -> StageOpCost:
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


def _start(gpu: EmulatedGpu, work: OpCost) -> None:
    if work.flops or work.bytes:
        gpu.start(work)


def _time_backward(gpu: EmulatedGpu, output: Any, work: OpCost) -> None:
    """Let the backward from `output` take what `work` takes on `gpu`.

    By hooks on the graph, not by operations of it: engines free outputs and detach them in place, which they could not
    do with views.
    """
    import torch

    under_way = False

    def begin(_: object) -> None:
        nonlocal under_way
        if not under_way:
            under_way = True
            _start(gpu, work)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        nonlocal under_way
        under_way = False
        gpu.finish()

    for node in {each.grad_fn for each in tensors(output) if each.grad_fn is not None}:
        node.register_prehook(begin)


def _shapes(*values: object) -> object:
    return tuple((each.shape, each.dtype, each.requires_grad) for each in tensors(values))


@contextmanager
def _followed(owner: object, name: str, told: Callable[..., None]) -> Iterator[None]:
    """While the block runs, `told` is called with every call of attribute `name`, a function or a module."""
    import torch

    found: Callable[..., Any] = getattr(owner, name)
    if isinstance(found, torch.nn.Module):
        handle = found.register_forward_hook(
            lambda _, args, kwargs, result: told(found, args, kwargs, result), with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()
        return

    def follower(*args: Any, **kwargs: Any) -> Any:
        result = found(*args, **kwargs)
        told(found, args, kwargs, result)
        return result

    is_own = name in vars(owner)
    setattr(owner, name, follower)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, found)
        else:
            delattr(owner, name)


def _torch_stages(schedule: Any, gpu: EmulatedGpu) -> Iterator[AbstractContextManager[None]]:
    parts = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)  # the engine has no other way
    order: Mapping[int, Any] = getattr(schedule, "pipeline_order", None) or {}
    kinds = {action.computation_type.name for row in order.values() for action in row if action is not None}
    if kinds & {"BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"}:
        raise UsageError(
            f"{type(schedule).__name__} computes the gradients of inputs and of weights apart, which cannot be "
            "emulated; use a schedule with whole backwards, such as Schedule1F1B or ScheduleInterleaved1F1B"
        )
    for part in parts:
        stage = _Stage(gpu, part.submod, part.submod, first=part.is_first)
        yield stage.attached(schedule, "_loss_fn") if part.is_last else stage.attached()


def _deepspeed_stages(engine: Any, gpu: EmulatedGpu) -> Iterator[AbstractContextManager[None]]:
    module = engine.module
    # Without the hooks of the engine on the module, which prepare for a backward that it would run.
    stage = _Stage(
        gpu, module, module.forward, first=engine.stage_id == 0, state=lambda: _same_attribute(module, "micro_offset")
    )
    yield stage.attached(module, "loss_fn") if engine.is_last_stage() else stage.attached()


@contextmanager
def _same_attribute(owner: object, name: str) -> Iterator[None]:
    found = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, found)


@contextmanager
def _opened(text: str) -> Iterator[EmulatedGpu]:
    import torch

    if not text.startswith("emulated:"):
        raise UsageError(f"GPU {text!r} is not emulated; give one such as emulated:a100-sxm?slower=2000")
    with open_gpu(gpu_text(text, torch.device("cpu"))) as gpu:
        assert isinstance(gpu, EmulatedGpu)
        yield gpu
