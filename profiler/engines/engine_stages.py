"""What the adapters of all engines share: recorded calls of modules and losses, and stages made
from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.profiler.engines.computation_times import ComputationTimes, mark
from perseus_planner.profiler.ranks.measure import LocalStage
from perseus_planner.profiler.torch_stage import torch_stage
from perseus_planner.training.modes import ComputeModes
from perseus_planner.training.values import copy_tensors, first_device, is_training

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.stage import Block, Stage


@dataclass(frozen=True)
class EngineStages:
    """What this rank holds of the pipeline."""

    stages: tuple[LocalStage, ...]  #: Its stages, first to last
    tensor_rank: int  #: Its rank among the GPUs that share these stages
    device: torch.device  #: Where it computes
    iteration: Mapping[str, str | int]  #: As in `Profile.iteration`
    problem: str | None = None  #: Why the stages cannot be measured; None if they can

    @classmethod
    def unmeasurable(cls, problem: str) -> EngineStages:
        """Return stages that cannot be measured, and why."""
        return cls((), 0, first_device(None), {}, problem)


@dataclass
class RecordedCall:
    """The arguments of the last call that trains; `args` is None until there was one.

    The last call counts because engines may call modules before the first microbatch, with tensors
    that hold nothing, to find the shapes.
    """

    args: tuple[Any, ...] | None = None  #: Its arguments by position
    kwargs: dict[str, Any] = field(default_factory=dict)  #: Its arguments by name
    count: int = 0  #: The number of such calls
    modes: ComputeModes | None = None  #: The modes of torch in the last call
    #: How long such calls and their backwards took.
    times: ComputationTimes = field(default_factory=ComputationTimes)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Keep copies of the arguments; return False for a call that only infers shapes or
        evaluates.
        """
        if not is_training(args, kwargs):
            return False
        self.count += 1
        self.modes = ComputeModes.current()
        self.args, self.kwargs = copy_tensors(tuple(args)), copy_tensors(dict(kwargs))
        return True

    def as_recorded(self) -> AbstractContextManager[None]:
        """Have the modes of torch of the last call inside the block."""
        return self.modes.entered() if self.modes is not None else nullcontext()

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the arguments under the names args and kwargs.

        Raises:
            UsageError: If there was no call of `name`.
        """
        if self.args is None:
            raise UsageError(
                f"{name} did not run inside the block of profile_pipeline; run one whole training "
                "iteration there"
            )
        return {"args": self.args, "kwargs": self.kwargs}


@contextmanager
def record_module(module: torch.nn.Module) -> Iterator[RecordedCall]:
    """Record the calls of `module` inside the block."""
    call = RecordedCall()
    begin: Any = None

    def enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal begin
        begin = mark() if call.record(args, kwargs) else None

    def leave(_: torch.nn.Module, args: object, result: object) -> None:
        if begin is not None:
            call.times.add_forward(begin, result)

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]
    try:
        yield call
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_attribute(owner: object, name: str) -> Iterator[RecordedCall]:
    """Record the calls of the function, method or module that is attribute `name` of `owner`, if
    it is not None.
    """
    import torch

    target: Callable[..., Any] | None = getattr(owner, name)
    if isinstance(target, torch.nn.Module):
        with record_module(target) as call:
            yield call
        return
    call, is_own = RecordedCall(), name in vars(owner)
    if target is None:
        yield call
        return

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        function = call.times.timed(target) if call.record(args, kwargs) else target
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield call
    finally:
        if is_own:
            setattr(owner, name, target)
        else:
            delattr(owner, name)


def local_stage(
    number: int,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    call: RecordedCall,
    loss: Callable[[Any], Any] | None,
    loss_times: ComputationTimes | None = None,
    *,
    split_backward: bool = False,
    preserve_state: Callable[[], AbstractContextManager[None]] = nullcontext,
    **more_inputs: Any,
) -> LocalStage:
    """Return a stage as an engine runs it.

    Args:
        number: The number of the stage in the pipeline.
        module: The module that holds its weights.
        forward: Called with args, kwargs and `more_inputs` by name.
        call: The call of `module` to repeat, in the precision and the other modes of that call.
        loss: In the last stage, maps the result of `forward` to a scalar.
        loss_times: How long `loss` took in the iteration.
        split_backward: As in `torch_stage`.
        preserve_state: Restores further state of the engine after the measurement.
        more_inputs: Further inputs of one microbatch, by name.

    Raises:
        UsageError: If `module` was not called.
    """
    inputs = call.arguments(f"stage {number}") | more_inputs

    @contextmanager
    def opened(gpu: Gpu, block: Block | None) -> Iterator[Stage]:
        stage = torch_stage(
            gpu,
            module,
            inputs,
            loss,
            first=number == 0,
            split_backward=split_backward,
            forward=forward,
            block=block,
        )
        with call.as_recorded(), preserve_state(), stage as result:
            yield result

    return LocalStage(number, opened, _trained_s(call.times, loss_times, split_backward))


def _trained_s(
    times: ComputationTimes, loss_times: ComputationTimes | None, split_backward: bool
) -> dict[str, float]:
    """Return kind -> its time in the iteration; of a stage that splits its backward, only that
    of the forward.
    """
    parts = [times, *([] if loss_times is None else [loss_times])]
    forward_s = [part.least_forward_s() for part in parts]
    backward_s = None if split_backward else parts[-1].least_backward_s()
    found = {} if None in forward_s else {"F": math.fsum(filter(None, forward_s))}
    return found if backward_s is None else {**found, "B": backward_s}


def bind_loss(function: Callable[..., Any], call: RecordedCall) -> Callable[[Any], Any]:
    """Return `function` as a function of the output alone, with the other arguments as recorded.

    Raises:
        UsageError: If it was not called.
    """
    call_arguments = call.arguments("the loss")
    _, *rest = call_arguments["args"]

    def loss(output: Any) -> Any:
        with call.as_recorded():
            return function(output, *rest, **call_arguments["kwargs"])

    return loss


def unpacked(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return `module` as a function of args and kwargs, which are unpacked."""
    return lambda args, kwargs: module(*args, **kwargs)
