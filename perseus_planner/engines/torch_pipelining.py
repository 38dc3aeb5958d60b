"""A schedule of torch.distributed.pipelining, followed through the methods of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from perseus_planner.engines.engine import (
    EngineStage,
    IterationHook,
    PipelineRank,
    are_same,
    attached_once,
    check_free,
    check_has,
    replaced,
)

if TYPE_CHECKING:
    import torch

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
_OF_STEP = ("target", "losses", "return_outputs", "loss_kwargs")  #: that the model does not get
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


class TorchPipeline:
    """One rank of a schedule; the forward of the last stage includes its loss.

    All schedules run their stages by the same methods, which take the number of the microbatch.
    Before its first step a schedule learns the shapes of activations without these methods. In the
    zero-bubble schedules the first stage has no input gradient to compute: its I is hooked too, and
    takes almost no time.

    Args:
        schedule: The schedule, of torch 2.6 or later.
    """

    name = "torch.distributed.pipelining"
    tensor_rank = 0  # a schedule does not know about GPUs that share a stage

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

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
        schedule, stages = self._schedule, self._stages
        name = _SCHEDULES.get(type(schedule).__name__)
        if name is None:
            return {}
        microbatches: int = schedule._n_microbatches
        iteration: dict[str, str | int] = {
            "schedule": name,
            "microbatches": microbatches,
            "virtual_stages": len(stages),
        }
        if name == "interleaved-1f1b":
            groups = max(1, microbatches // stages[0].group_size)
            iteration["microbatch_group"] = microbatches // groups
        return iteration

    def order(self) -> tuple[Computation, ...] | None:
        """See `Engine.order`; None for user-defined schedules without a list of actions."""
        schedule, first_stage = self._schedule, self._stages[0]
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
        lists = getattr(schedule, "pipeline_order_with_comms", None) or getattr(
            schedule, "pipeline_order", None
        )
        return tuple(_computations(lists[first_stage.group_rank])) if lists else None

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`; another schedule over the same stages, for example with more
        microbatches, is followed too, and is the engine's from its first step on.
        """
        import torch
        from torch.distributed.pipelining import schedules

        modules, is_inside = parts_of(self._schedule), False

        def step_hooked(schedule: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            is_training = schedule._has_backward and torch.is_grad_enabled()
            if is_inside or not is_training or not are_same(parts_of(schedule), modules):
                if not (is_inside or is_training) and are_same(parts_of(schedule), modules):
                    hook.note_evaluation()
                return step(*args, **kwargs)
            self._schedule, is_inside = schedule, True
            batch = partial(_microbatches_of, schedule, args, kwargs) if args or kwargs else None
            is_first = any(stage.is_first for stage in self._stages)
            hook.begin_iteration(schedule._n_microbatches, batch if is_first else None)
            try:
                with ExitStack() as stack:
                    for stage in self._stages:
                        stack.enter_context(replaced(stage, **_hooked_stage(hook, stage)))
                    stack.enter_context(replaced(schedule, **_hooked_loss(hook, schedule)))
                    result = step(*args, **kwargs)
            except BaseException:
                hook.abandon_iteration()
                raise
            finally:
                is_inside = False
            hook.end_iteration()
            return result

        own, step = self._schedule, self._schedule.step
        with ExitStack() as stack:
            stack.enter_context(attached_once(own, step=partial(step_hooked, own, step)))
            for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
                stack.enter_context(_step_replaced(kind, step_hooked))
            yield


def _microbatches_of(schedule: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the microbatches of a step, as the schedule splits them: each the only argument of the
    model, a dictionary if all arguments have names, or else both.
    """
    named = {name: value for name, value in kwargs.items() if name not in _OF_STEP}
    split_args, split_named = schedule._split_inputs(args, named or None)
    if not named:
        yield from (each[0] if len(each) == 1 else each for each in split_args)
    elif not args:
        yield from split_named
    else:
        yield from zip(split_args, split_named, strict=True)


def parts_of(schedule: Any) -> list[Any]:
    """Return the modules of a schedule's stages on this rank."""
    return [stage.submod for stage in _stages_of(schedule)]


def _stages_of(schedule: Any) -> list[Any]:
    """Return its stages, for which torch has no public attribute."""
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


@contextmanager
def _step_replaced(kind: Any, step_hooked: Callable[..., Any]) -> Iterator[None]:
    """Have schedules of a class run their steps by a function, while the block runs."""
    original = kind.step

    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step_hooked(self, partial(original, self), *args, **kwargs)

    kind.step = step
    try:
        yield
    finally:
        kind.step = original


def wrap_training(module: Any, begin: Callable[[Any], bool]) -> None:
    """See `engines.wrap_training`."""
    import torch

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_training = self._has_backward and torch.is_grad_enabled()
            if is_training and begin(self):
                return self.step(*args, **kwargs)  # now has a hook
            return original(self, *args, **kwargs)

        return step

    for schedule in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        schedule.step = wrapped(schedule.step)


def _hooked_stage(hook: IterationHook, stage: Any) -> _Attributes:
    """Return the methods of a stage with the hook called around what they compute."""
    begin, end, number, is_last = hook.begin, hook.end, stage.stage_index, stage.is_last
    forward, backward, backward_weight = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.backward_weight_one_chunk,
    )

    def forward_hooked(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(number, "F", fwd_chunk_id)
        output = forward(fwd_chunk_id, *args, **kwargs)
        if not is_last:  # on the last stage the forward ends with the loss
            end()
        return output

    def backward_hooked(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        begin(number, "B" if full_backward else "I", bwd_chunk_id)
        result = backward(bwd_chunk_id, loss, full_backward, *args, **kwargs)
        end()
        return result

    def weight_hooked(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(number, "W", bwd_chunk_id)
        result = backward_weight(bwd_chunk_id, *args, **kwargs)
        end()
        return result

    return {
        "forward_one_chunk": forward_hooked,
        "backward_one_chunk": backward_hooked,
        "backward_weight_one_chunk": weight_hooked,
    }


def _hooked_loss(hook: IterationHook, schedule: Any) -> _Attributes:
    """Return what the schedule calls after each forward, with the hook called at the end of the
    last stage's loss.
    """
    end, compute = hook.end, schedule._maybe_compute_loss

    def compute_hooked(stage: Any, *args: Any, **kwargs: Any) -> None:
        compute(stage, *args, **kwargs)
        if stage.is_last:
            end()

    return {"_maybe_compute_loss": compute_hooked}


def _computations(actions: Any) -> Iterator[Computation]:
    """Yield the computations among a rank's actions; the two of an overlapped pair run one after
    the other.
    """
    from perseus_planner.schedules import Computation

    for action in actions:
        for part in getattr(action, "sub_actions", None) or (action,):
            kind = None if part is None else _KINDS.get(part.computation_type.name)
            if kind is not None:
                yield Computation(part.stage_index, kind, part.microbatch_index)
