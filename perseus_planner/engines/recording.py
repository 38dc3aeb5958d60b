"""Records what an engine's stages compute in a training iteration, so that it can be repeated: the
arguments of their last microbatch, the modes of torch, and how long forwards and backwards took.

Beside the training, one copy of the inputs of a microbatch is kept for each stage, and never its
output: the stage makes it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from perseus_planner.base.errors import UsageError, fault_text
from perseus_planner.engines.engine import replaced
from perseus_planner.engines.guard import Guard
from perseus_planner.engines.torch_state import ComputeModes, copy_tensors, is_training, tensors

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.engine import Engine, EngineStage

ForwardStep = Callable[..., tuple[Any, Any]]
Before = Callable[[Any, Mapping[str, Any]], object]
"""Called with the arguments of a call."""
After = Callable[[Any, Mapping[str, Any], Any], object]
"""Called with the arguments and the result of a call."""


class RecordedCall:
    """The calls that train of a module or function: how long they and their backwards took, and
    the arguments of the last microbatch of an iteration.

    Engines may call modules before the first microbatch, with tensors that hold nothing, to find
    the shapes; such calls do not count. On a GPU times are taken by CUDA events in the stream that
    computes, so nothing waits for them.

    Attributes:
        count: The number of calls.
        before: Counts a call, unless it evaluates or only infers shapes; copies its arguments if it
            is the last.
        after: Takes the time of the call, and watches for its backward.

    Args:
        name: What is called, for messages.
        guard: Through it the training calls what is here.
        microbatches: As `Engine.microbatches`.
        made: How many of the first arguments are not kept, as the stage makes them again.
    """

    def __init__(
        self,
        name: str,
        guard: Guard,
        microbatches: Callable[[], int | None] = lambda: None,
        made: int = 0,
    ) -> None:
        self._guard = guard
        self.before = guard.guarded(self._before)
        self.after = guard.guarded(self._after)
        self._name = name
        self._microbatches = microbatches
        self._made = made
        self.count = 0
        self._has_run_without_gradients = False
        self._arguments: dict[str, Any] | None = None
        self._modes: ComputeModes | None = None
        self._begin: Any = None  # of the call in progress, if it counts
        self._forwards: list[tuple[Any, Any]] = []
        self._backwards: list[tuple[Any, Any]] = []

    def _before(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Count a call that trains, and copy its arguments if it is the last of an iteration."""
        import torch

        self._begin = None
        # An evaluation, or a call that only finds shapes.
        if not is_training(args, kwargs):
            self._has_run_without_gradients = not torch.is_grad_enabled()
            return
        self.count += 1
        # The last microbatch of an iteration, or each one where their number is not known.
        if self.count % (self._microbatches() or 1) == 0:
            self._arguments = None  # frees those of the iteration before
            self._modes = ComputeModes.current()
            kept = {"args": tuple(args)[self._made :], "kwargs": dict(kwargs)}
            self._arguments = copy_tensors(kept)
        # After the copy, whose time is none of the computation.
        self._begin = _mark()

    def _after(self, _: Any, __: Mapping[str, Any], result: Any) -> None:
        """Take the time of a call that counts, and of the backward of its result."""
        if self._begin is None:
            return
        self._forwards.append((self._begin, _mark()))
        begun = False

        def begin_backward(_: object) -> None:
            nonlocal begun
            if not begun:  # at the first of several results
                begun = True
                self._begin_backward()

        # A backward begins when the gradient of a result arrives.
        for tensor in tensors(result):
            if tensor.requires_grad:
                tensor.register_hook(self._guard.guarded(begin_backward))

    def as_recorded(self) -> AbstractContextManager[None]:
        """Have the modes of torch of the last microbatch inside the block."""
        return self._modes.entered() if self._modes is not None else nullcontext()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments under the names args and kwargs.

        Raises:
            UsageError: If the last microbatch did not run.
        """
        if self._arguments is None and self._has_run_without_gradients:
            raise UsageError(
                f"{self._name} ran without gradients inside the block of profile_pipeline, so that "
                "its backward cannot be repeated; profile it where autograd computes it"
            )
        if self._arguments is None:
            raise UsageError(
                f"{self._name} did not run inside the block of profile_pipeline; run one whole "
                "training iteration there"
            )
        return self._arguments

    def least_forward_s(self) -> float | None:
        """Return the time of the fastest call, seconds; None if there was none."""
        return min(map(_elapsed_s, self._forwards), default=None)

    def least_backward_s(self) -> float | None:
        """Return the time of the fastest backward, seconds; None if there was none."""
        return min(map(_elapsed_s, self._backwards), default=None)

    def _begin_backward(self) -> None:
        from torch.autograd import Variable

        begin = _mark()
        engine = cast("Any", Variable)._execution_engine
        end = self._guard.guarded(lambda: self._backwards.append((begin, _mark())))
        engine.queue_callback(end)  # at the end of this backward


def _mark() -> Any:
    """Return this moment: that of the CUDA device, if this process uses one."""
    import torch

    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_s(span: tuple[Any, Any]) -> float:
    begin, end = span
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _ignore(*_: object) -> None:
    pass


@contextmanager
def followed_module(
    module: torch.nn.Module, before: Before = _ignore, after: After = _ignore
) -> Iterator[None]:
    """Have functions called before and after every call of `module` inside the block."""

    def enter(_: object, args: Any, kwargs: Mapping[str, Any]) -> None:
        before(args, kwargs)

    def leave(_: object, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        after(args, kwargs, result)

    with ExitStack() as stack:
        for handle in (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ):
            stack.callback(handle.remove)
        yield


@contextmanager
def followed_attribute(
    owner: object, name: str, before: Before = _ignore, after: After = _ignore
) -> Iterator[None]:
    """Have functions called before and after every call of attribute `name` of `owner` inside the
    block; it is a function, a method, a module or None.
    """
    import torch

    function: Callable[..., Any] | None = getattr(owner, name)
    if function is None:
        yield
        return
    # A module keeps hooks of its own, and may not be replaced by a function.
    if isinstance(function, torch.nn.Module):
        with followed_module(function, before, after):
            yield
        return

    with replaced(owner, **{name: _wrapped(function, before, after)}):
        yield


def _wrapped(function: Callable[..., Any], before: Before, after: After) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(args, kwargs)
        result = function(*args, **kwargs)
        after(args, kwargs, result)
        return result

    return wrapper


class LossOfSteps:
    """The loss function that a `forward_step` of Megatron-core returned last.

    Attributes:
        guard: Through it the training calls what is recorded; off after a fault.
        problem: What fault there was; None if there was none.
        call: The calls of these functions.
    """

    def __init__(self) -> None:
        self.guard = Guard(self._take_fault)
        self.problem: str | None = None
        self.call = RecordedCall("the loss", self.guard, made=1)
        self._function: Callable[..., Any] | None = None

    def watched(self, forward_step: ForwardStep) -> ForwardStep:
        """Return `forward_step` wrapped to keep its loss function."""

        def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            result = forward_step(*args, **kwargs)
            # After a fault of ours the training gets its own result.
            return self.guard.call(self._kept, *result) or result

        return wrapper

    def _kept(self, output: Any, function: Callable[..., Any]) -> tuple[Any, Any]:
        self._function = function
        return output, _wrapped(function, self.call.before, self.call.after)

    def _take_fault(self, error: Exception) -> None:
        self.problem = fault_text(error)

    def scalar(self) -> Callable[[Any], Any]:
        """Return the loss as a function of the output alone.

        Raises:
            UsageError: If there was none.
        """
        if (function := self._function) is None:
            raise UsageError(
                "the loss of the last stage is not known: inside the block of profile_pipeline, "
                "give Megatron `profiling.watched(forward_step)` as its forward_step_func"
            )
        # It returns the loss and what to report, or the loss, the number of tokens and what to
        # report.
        return lambda output: function(output)[0]


@dataclass(frozen=True)
class RecordedStage:
    """A stage, and the microbatch of the training to repeat through it."""

    stage: EngineStage  #: The stage
    inputs: dict[str, Any]  #: What `forward` takes by name
    forward: Callable[..., Any]  #: Runs the microbatch
    loss: Callable[[Any], Any] | None  #: In the last stage, maps its result to a scalar
    as_recorded: Callable[[], AbstractContextManager[None]]  #: The modes of torch in the training
    #: Kind -> its time in the iteration, seconds; of an engine that splits backwards, only that of
    #: forwards.
    trained_s: Mapping[str, float] = field(default_factory=dict)


class Recording:
    """The calls of the stages of an engine; see `record_stages`."""

    def __init__(self, engine: Engine, loss_of_steps: LossOfSteps) -> None:
        self._engine = engine
        self._loss_of_steps = loss_of_steps
        self._stages = engine.stages()
        count = engine.microbatches
        guard = loss_of_steps.guard
        self._calls = [
            RecordedCall(f"stage {stage.number}", guard, count) for stage in self._stages
        ]
        self._received = [RecordedCall("its receiver", guard, count) for _ in self._stages]
        self._losses = [RecordedCall("the loss", guard, count, made=1) for _ in self._stages]
        self._loss_functions: list[Any] = [
            None if stage.loss is None else getattr(*stage.loss) for stage in self._stages
        ]

    @property
    def problem(self) -> str | None:
        """The fault that has ended the recording; None if there was none."""
        return self._loss_of_steps.problem

    @property
    def forwards(self) -> int:
        """How many microbatches ran through the first stage of this rank."""
        return self._calls[0].count

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record inside the block."""
        with ExitStack() as stack:
            # Whatever a stage calls is followed in its own way: module, plan, receiver and loss.
            for stage, call, received, loss in zip(
                self._stages, self._calls, self._received, self._losses, strict=True
            ):
                if stage.planned is None:
                    stack.enter_context(followed_module(stage.module, call.before, call.after))
                else:  # what it returns has no time of its own
                    stack.enter_context(followed_attribute(*stage.planned, call.before))
                if stage.receiver is not None:
                    receiver = (stage.receiver, "set_input_tensor")
                    stack.enter_context(followed_attribute(*receiver, received.before))
                if stage.loss is not None:
                    stack.enter_context(followed_attribute(*stage.loss, loss.before, loss.after))
            yield

    def stages(self) -> list[RecordedStage]:
        """Return the stages with what was recorded.

        Raises:
            UsageError: If a stage did not run, or its loss is not known.
        """
        return [self._stage(index) for index in range(len(self._stages))]

    def _stage(self, index: int) -> RecordedStage:
        """Return one stage with what was recorded of it."""
        stage = self._stages[index]
        call = self._calls[index]
        loss = None
        # The forward of the last stage ends with its loss, so both times are added.
        calls = [call]
        if stage.loss_with_output:
            loss = self._loss_of_steps.scalar()
            calls.append(self._loss_of_steps.call)
        elif stage.loss is not None:
            loss = _bound(self._loss_functions[index], self._losses[index])
            calls.append(self._losses[index])
        inputs = call.arguments()
        if stage.receiver is not None:
            (received,) = self._received[index].arguments()["args"]
            # Megatron gives one tensor, or a list of it.
            inputs["received"] = received[0] if isinstance(received, list) else received
        return RecordedStage(
            stage,
            inputs,
            _forward(stage),
            loss,
            call.as_recorded,
            {} if stage.planned else _trained_s(calls, self._engine.splits_backward),
        )


def _forward(stage: EngineStage) -> Callable[..., Any]:
    def forward(args: Any, kwargs: Any, received: Any = None) -> Any:
        if stage.receiver is not None:
            stage.receiver.set_input_tensor([received])
        return stage.forward(*args, **kwargs)

    return forward


def _bound(function: Callable[..., Any], call: RecordedCall) -> Callable[[Any], Any]:
    """Return `function` as a function of the output alone, with the other arguments as recorded."""
    arguments = call.arguments()

    def loss(output: Any) -> Any:
        with call.as_recorded():
            return function(output, *arguments["args"], **arguments["kwargs"])

    return loss


def _trained_s(calls: Sequence[RecordedCall], splits_backward: bool) -> dict[str, float]:
    forward_s = [call.least_forward_s() for call in calls]
    # A backward begins at the last of the calls, and goes through all. Of one that is split, the
    # whole has no time.
    backward_s = None if splits_backward else calls[-1].least_backward_s()
    trained_s = {} if None in forward_s else {"F": math.fsum(filter(None, forward_s))}
    return trained_s if backward_s is None else {**trained_s, "B": backward_s}
