"""A schedule of torch.distributed.pipelining, followed through the methods of its stages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.engine import (
    EngineStage,
    PipelineRank,
    are_same,
    attached_once,
    check_free,
    check_has,
    replaced,
)
from perseus_planner.engines.guard import Guard, HookGuard, marked, original_of

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.guard import IterationHook
    from perseus_planner.schedules import Computation

_Attributes = dict[str, Callable[..., Any]]

_NEEDED = ("step", "_has_backward", "_maybe_compute_loss", "_n_microbatches")
_STAGE_NEEDED = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "group_rank",
    "group_size",
)
_VERSIONS = "torch 2.6 or later"
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_PAIR = "OVERLAP_F_B"
"""The type of action that runs an overlapped pair: by a function that a training has registered for
it, or, if there is none, one after the other.
"""
_OF_STEP = frozenset(
    {
        "target",
        "losses",
        "return_outputs",
        "loss_kwargs",
        "arg_mbs",
        "kwarg_mbs",
        "target_mbs",
        "finalize_gradients",
    }
)
"""The parameters of `step`, up to torch 2.15, of which is known what they do to a batch."""
_LINEAR = ("ScheduleGPipe", "Schedule1F1B")  # of one stage
_SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipe-v",
}
"""The classes of torch -> the names of their generators."""

_LOG = logging.getLogger("perseus_planner.runtime")


class TorchPipeline:
    """One rank of a schedule; the forward of the last stage includes its loss.

    All schedules run their stages by the same methods, which take the number of the microbatch.
    Functions that the training has registered to run computations in another way are followed
    themselves (`register_custom_function`), and one for OVERLAP_F_B runs a pair, which is one
    computation. Before its first step a schedule learns the shapes of activations without these
    methods. In the zero-bubble schedules the first stage has no input gradient to compute: its I is
    hooked too, and takes almost no time.

    Args:
        schedule: The schedule, of torch 2.6 or later.
    """

    name = "torch.distributed.pipelining"
    packages = ("torch",)
    tensor_rank = 0  # a schedule does not know about GPUs that share a stage

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        #: The schedule or one of its stages -> the wrappers of its methods.
        self._kept: dict[Any, _Wrapped] = {}

    def check(self) -> None:
        """See `Engine.check`."""
        check_has(self._schedule, _NEEDED, _VERSIONS)
        check_free(self._schedule)
        for stage in self._stages:
            check_has(stage, _STAGE_NEEDED, _VERSIONS)

    @property
    def _stages(self) -> list[Any]:
        return _stages_of(self._schedule)

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`; a schedule does not know about other pipelines."""
        import torch.distributed as dist

        stage = self._stages[0]
        group = dist.group.WORLD if stage.group is None else stage.group
        return PipelineRank(
            stage.group_rank, stage.group_size, None, tuple(dist.get_process_group_ranks(group))
        )

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        import torch

        return torch.device(self._stages[0].device)

    @property
    def sharded_torch(self) -> str | None:
        """See `engine.sharded_torch`: stages are sharded that are `fully_shard` as a whole."""
        import torch
        from torch.distributed.fsdp import FSDPModule

        is_sharded = any(isinstance(stage.submod, FSDPModule) for stage in self._stages)
        return str(torch.__version__) if is_sharded else None

    @property
    def splits_backward(self) -> bool:
        """See `Engine.splits_backward`."""
        order: Mapping[int, Any] = getattr(self._schedule, "pipeline_order", None) or {}
        actions = (action for row in order.values() for action in row if action is not None)
        return any(
            getattr(action.computation_type, "name", "") == "BACKWARD_INPUT" for action in actions
        )

    def stages(self) -> list[EngineStage]:
        """See `Engine.stages`."""
        return [
            EngineStage(
                stage.stage_index,
                stage.submod,
                stage.submod,
                loss=(self._schedule, "_loss_fn") if stage.is_last else None,
            )
            for stage in self._stages
        ]

    def parameters(self) -> Iterator[torch.Tensor]:
        """See `Engine.parameters`."""
        for stage in self._stages:
            yield from stage.submod.parameters()

    def microbatches(self) -> int:
        """See `Engine.microbatches`."""
        return int(self._schedule._n_microbatches)

    def iteration(self, forwards: int) -> Mapping[str, str | int]:
        """See `Engine.iteration`; empty for a schedule that is read from a file or the user's
        own.
        """
        schedule = self._schedule
        stages = self._stages
        name = _SCHEDULES.get(type(schedule).__name__)
        if name is None:
            return {}
        # With a function for pairs, the two of a pair are one computation of the schedule.
        if name == "dualpipe-v" and self.has_pairs:
            name = "dualpipe-v-overlapped"
        microbatches: int = schedule._n_microbatches
        iteration: dict[str, str | int] = {
            "schedule": name,
            "microbatches": microbatches,
            "virtual_stages": len(stages),
        }
        if name == "interleaved-1f1b":
            # As torch's own schedule divides its microbatches into groups.
            groups = max(1, microbatches // stages[0].group_size)
            iteration["microbatch_group"] = microbatches // groups
        return iteration

    def order(self) -> tuple[Computation, ...] | None:
        """See `Engine.order`; None for user-defined schedules without a list of actions."""
        schedule = self._schedule
        first_stage = self._stages[0]
        # The order that schedules of one stage report is not what they run: 1F1B is off by one on
        # its last rank.
        for base in type(schedule).__mro__:
            if base.__name__ in _LINEAR:
                from perseus_planner.schedules import generate

                linear = generate(
                    _SCHEDULES[base.__name__],
                    ranks=first_stage.group_size,
                    microbatches=schedule._n_microbatches,
                )
                return linear.ranks[first_stage.group_rank]
        # What is run has the sends and receives; where torch has not lowered it, the plain order
        # says the same computations.
        lists = getattr(schedule, "pipeline_order_with_comms", None) or getattr(
            schedule, "pipeline_order", None
        )
        if not lists:
            return None
        return tuple(_computations(lists[first_stage.group_rank], has_pairs=self.has_pairs))

    @property
    def has_pairs(self) -> bool:
        """See `engine.has_pairs`: those that a function is registered for; else the two of a pair
        run one after the other.
        """
        return any(kind.name == _PAIR for kind in _functions_of(self._schedule))

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`; another schedule over the same stages, for example with more
        microbatches, is followed too, and is the engine's from its first step on.
        """
        from torch.distributed.pipelining import schedules

        guard = HookGuard(hook)
        modules = parts_of(self._schedule)

        def is_shown(schedule: Any) -> bool:
            # Other stages are another model, such as a teacher that runs beside this one.
            if not are_same(parts_of(schedule), modules):
                return False
            if not _trains(schedule):
                guard.note_evaluation()
                return False
            return True

        def step_hooked(schedule: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # `step` may call that of its base class, which is hooked as well.
            if guard.is_inside or not guard.ask(is_shown, schedule):
                return step(*args, **kwargs)
            run = partial(step, *args, **kwargs)
            return guard.run(run, self._begin, guard, schedule, args, kwargs)

        own_schedule = self._schedule
        step = self._schedule.step
        with ExitStack() as stack:
            # The instance too: this marks it as followed.
            stack.enter_context(
                attached_once(own_schedule, step=partial(step_hooked, own_schedule, step))
            )
            # The classes, for schedules that the training makes later.
            for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
                stack.enter_context(replaced(kind, step=_step_of(kind, step_hooked)))
            # On leaving this comes first: what stays wrapped then only passes on.
            stack.callback(guard.close)
            yield

    def _begin(
        self,
        stack: ExitStack,
        guard: HookGuard,
        schedule: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Show an iteration: the step of a schedule with these arguments."""
        if schedule is not self._schedule:
            self._kept.clear()  # a training may make a schedule for each step
        self._schedule = schedule
        stages = self._stages
        for stage in stages:
            stack.enter_context(self._wrapped(guard, _hooked_stage, stage))
        stack.enter_context(self._wrapped(guard, _hooked_loss, schedule))
        stack.enter_context(_functions_shown(guard, schedule))
        microbatches = None
        has_batch = guard.wants_batch and (args or kwargs)
        # Only the first stage has the inputs of the model.
        if has_batch and any(stage.is_first for stage in stages):
            batch = _Batch(schedule, kwargs)
            # If the step raises before it has split its batch, nobody may wait for ever.
            stack.callback(batch.end)
            stack.enter_context(replaced(schedule, **batch.hooked(guard)))
            microbatches = batch.microbatches
        guard.show(schedule._n_microbatches, microbatches)

    def _wrapped(
        self, guard: HookGuard, make: Callable[[HookGuard, Any], _Attributes], owner: Any
    ) -> AbstractContextManager[None]:
        """Return what replaces methods of a stage or schedule by wrappers, which are made once for
        all iterations in which it has the same methods.
        """
        kept = self._kept.get(owner)
        # Wrapping costs more than comparing, and a step does it for each stage.
        if kept is not None and kept.guard is guard:
            for name, original in kept.originals:
                if original_of(getattr(owner, name)) != original:
                    break
            else:
                return kept.replacement
        made = make(guard, owner)
        originals = [(name, original_of(wrapper)) for name, wrapper in made.items()]
        kept = _Wrapped(guard, originals, replaced(owner, **made))
        self._kept[owner] = kept
        return kept.replacement


class _Wrapped(NamedTuple):
    """Wrappers of the methods of a stage or schedule."""

    guard: HookGuard  #: That they call
    originals: list[tuple[str, Callable[..., Any]]]  #: Names of the methods, and these
    replacement: AbstractContextManager[None]  #: Sets the wrappers, again and again


def _trains(schedule: Any) -> bool:
    """Return whether a step of a schedule would train now, instead of evaluating.

    A schedule whose backwards do without autograd trains also where gradients are off.
    """
    import torch

    if not schedule._has_backward:
        return False
    return torch.is_grad_enabled() or not getattr(schedule, "_backward_requires_autograd", True)


class _Batch:
    """The microbatches of one step, as the schedule runs them.

    However they come, whole or split, `step` ends in `_step_microbatches`, which gets the arguments
    of each: they are taken from there, and so nothing is split twice or differently.

    Args:
        schedule: The schedule.
        kwargs: Arguments of the step by name.
    """

    def __init__(self, schedule: Any, kwargs: Mapping[str, Any]) -> None:
        self._schedule = schedule
        self._kwargs = kwargs
        self._split: Future[tuple[Any, Any]] = Future()  #: arguments by position, and by name

    def microbatches(self) -> Iterator[Any]:
        """See `Microbatches`: each is the only argument of the model, a dictionary if all arguments
        have names, or else both. They are waited for until the schedule has split them.

        Raises:
            UsageError: If the step has a parameter of which is not known what it does.
        """
        unknown = _unknown_parameters(type(self._schedule), self._kwargs)
        if unknown:
            raise UsageError(
                f"{type(self._schedule).__name__}.step has a parameter {unknown[0]}, of which "
                "the planner does not know what it does to the batch; leave it out, or say the "
                "work of each batch by runtime.batch(work=...)"
            )
        return self._when_split()

    def _when_split(self) -> Iterator[Any]:
        args, kwargs = self._split.result()
        for positional, named in zip(args, kwargs, strict=True):
            if positional and named:
                yield positional, named
            elif named:
                yield named
            else:
                yield positional[0] if len(positional) == 1 else positional

    def hooked(self, guard: HookGuard) -> _Attributes:
        """Return the method of the schedule from whose arguments the microbatches are taken."""
        run = self._schedule._step_microbatches
        return {"_step_microbatches": guard.around(run, before=self._take)}

    def _take(self, arg_mbs: Any = None, kwarg_mbs: Any = None, *_: Any, **__: Any) -> None:
        count = self._schedule._n_microbatches
        # A step splits its batch once; a future takes one result.
        if not self._split.done():
            self._split.set_result((arg_mbs or [()] * count, kwarg_mbs or [{}] * count))

    def end(self) -> None:
        """End the step: nobody waits for it any more."""
        if not self._split.done():
            self._split.set_exception(UsageError("the schedule has not split its batch"))


def _unknown_parameters(kind: type, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a step that are parameters of its own, and not the model's, and of
    which is not known what they do.

    Args:
        kind: Class of the schedule; a subclass may have added parameters to those of torch.
        kwargs: Arguments of the step by name.
    """
    parameters = {
        name
        for base in kind.__mro__
        if "step" in vars(base)
        for name, parameter in inspect.signature(vars(base)["step"]).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return [name for name in kwargs if name in parameters and name not in _OF_STEP]


def parts_of(schedule: Any) -> list[Any]:
    """Return the modules of a schedule's stages on this rank."""
    return [stage.submod for stage in _stages_of(schedule)]


def _stages_of(schedule: Any) -> list[Any]:
    """Return its stages, for which torch has no public attribute."""
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def _step_of(kind: Any, step_hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a class of schedules that runs by a function."""
    original = kind.step

    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step_hooked(self, partial(original, self), *args, **kwargs)

    return step


def wrap_training(module: Any, guard: Guard, begin: Callable[[Any], bool]) -> None:
    """See `engines.wrap_training`."""

    def begins(schedule: Any) -> bool:
        return _trains(schedule) and begin(schedule)

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if guard.call(begins, self):
                return self.step(*args, **kwargs)  # now has a hook
            return original(self, *args, **kwargs)

        return step

    for schedule in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        schedule.step = wrapped(schedule.step)


def _hooked_stage(guard: HookGuard, stage: Any) -> _Attributes:
    """Return the methods of a stage with the hook called around what they compute."""
    number = stage.stage_index

    def begin_forward(fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        guard.begin(number, "F", fwd_chunk_id)

    def begin_backward(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *_: Any, **__: Any
    ) -> None:
        guard.begin(number, "B" if full_backward else "I", bwd_chunk_id)

    def begin_weight(bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        guard.begin(number, "W", bwd_chunk_id)

    # On the last stage the forward ends with the loss.
    is_last = stage.is_last
    return {
        "forward_one_chunk": guard.computing(
            stage.forward_one_chunk, begin_forward, usual=(number, "F"), ends=not is_last
        ),
        "backward_one_chunk": guard.computing(
            stage.backward_one_chunk,
            begin_backward,
            usual=(number, "B"),
            unless="full_backward",
        ),
        "backward_weight_one_chunk": guard.computing(
            stage.backward_weight_one_chunk, begin_weight, usual=(number, "W")
        ),
    }


def _hooked_loss(guard: HookGuard, schedule: Any) -> _Attributes:
    """Return what the schedule calls after each forward, with the hook called at the end of the
    last stage's loss.
    """
    compute = original_of(schedule._maybe_compute_loss)
    compute_last = guard.computing(compute)

    def compute_hooked(stage: Any, *args: Any, **kwargs: Any) -> Any:
        # Stages that are not the last one have ended with their forward.
        run = compute_last if stage.is_last else compute
        return run(stage, *args, **kwargs)

    return {"_maybe_compute_loss": marked(compute_hooked, compute)}


@contextmanager
def _functions_shown(guard: HookGuard, schedule: Any) -> Iterator[None]:
    """Show each call of a function that a training has registered to run computations in its place
    as one computation, or one pair, however it runs them.
    """
    functions = _functions_of(schedule)

    def begin(action: Any, *_: Any) -> None:
        # A function is called for one action: a computation or a pair.
        (computation,) = _computations((action,), has_pairs=True)
        guard.begin(*computation)

    # Others run no computations, such as a send.
    originals = {
        kind: function for kind, function in functions.items() if kind.name in (*_KINDS, _PAIR)
    }
    shown = {kind: guard.as_one(function, begin) for kind, function in originals.items()}
    functions.update(shown)
    try:
        yield
    finally:
        for kind, function in shown.items():
            if functions.get(kind) is function:  # else another was registered meanwhile
                functions[kind] = originals[kind]


def _functions_of(schedule: Any) -> dict[Any, Callable[..., Any]]:
    """Return what is registered with a schedule to run computations in its place."""
    functions: dict[Any, Callable[..., Any]]
    functions = getattr(schedule, "_comp_type_to_function_map", {})
    return functions


def _computations(actions: Any, *, has_pairs: bool = False) -> Iterator[Computation]:
    """Yield the computations among a rank's actions. If not `has_pairs`, the two of an overlapped
    pair run one after the other.
    """
    from perseus_planner.schedules import Computation, overlapped

    for action in actions:
        parts = getattr(action, "sub_actions", None)
        # An action without parts is a computation, or a send, a receive and the like.
        if parts and has_pairs:
            yield overlapped(*_computations(parts))
            continue
        for part in parts or (action,):
            kind = None if part is None else _KINDS.get(part.computation_type.name)
            if kind is not None:
                yield Computation(part.stage_index, kind, part.microbatch_index)
