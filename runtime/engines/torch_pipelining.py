"""A schedule of torch.distributed.pipelining, told by the chunks that its stages run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from perseus_planner.runtime.engines.attachment import attached_once, check_free, check_has, replaced
from perseus_planner.runtime.engines.engine import Seat
from perseus_planner.schedules import Computation, gpipe, one_f_one_b

if TYPE_CHECKING:
    import torch

    from perseus_planner.runtime.hook import Hook

_Attributes = dict[str, Callable[..., Any]]

_NEEDED = ("step", "_has_backward", "_maybe_compute_loss", "_n_microbatches")
_STAGE_NEEDED = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "group_rank", "group_size")
_VERSIONS = "torch 2.6 or later"
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_LINEAR = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}


class TorchPipeline:
    """One rank of a schedule; a forward is told with its loss.

    All its schedules run their stages by the same methods of these, with the number of the microbatch; what a
    schedule does to learn the shapes of activations, before its first step, does not pass through them. In the zero
    bubble schedules the first stage has no gradient of inputs to compute: its I is told, and takes next to no time.

    Args:
        schedule: of torch 2.6 or later.

    Raises:
        UsageError: it lacks what is held on to here, or a runtime is attached to it.
    """

    name = "torch.distributed.pipelining"

    def __init__(self, schedule: Any) -> None:
        check_has(schedule, _NEEDED, _VERSIONS)
        check_free(schedule)
        self._schedule = schedule
        self._stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
        for stage in self._stages:
            check_has(stage, _STAGE_NEEDED, _VERSIONS)

    @property
    def seat(self) -> Seat:
        """See `Engine.seat`; schedules do not know of other pipelines."""
        import torch.distributed as dist

        stage = self._stages[0]
        group = dist.group.WORLD if stage.group is None else stage.group
        return Seat(stage.group_rank, stage.group_size, None, tuple(dist.get_process_group_ranks(group)))

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        import torch

        return torch.device(self._stages[0].device)

    def order(self) -> tuple[Computation, ...] | None:
        """See `Engine.order`; None for schedules of the user's own that hold no list of actions."""
        schedule, seat = self._schedule, self._stages[0]
        # What schedules of one stage say of their order is not what they run: 1F1B is off by one on its last rank.
        for each in type(schedule).__mro__:
            if each.__name__ in _LINEAR:
                return _LINEAR[each.__name__](seat.group_size, schedule._n_microbatches).ranks[seat.group_rank]
        lists = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
        return tuple(_computations(lists[seat.group_rank])) if lists else None

    @contextmanager
    def attached(self, hook: Hook) -> Iterator[None]:
        """See `Engine.attached`.

        Raises:
            UsageError: another hook is attached.
        """
        import torch

        schedule, step = self._schedule, self._schedule.step

        def told(*args: Any, **kwargs: Any) -> Any:
            if not (schedule._has_backward and torch.is_grad_enabled()):
                return step(*args, **kwargs)
            hook.begin_iteration(schedule._n_microbatches)
            try:
                with ExitStack() as stack:
                    for stage in self._stages:
                        stack.enter_context(replaced(stage, **_told_stage(hook, stage)))
                    stack.enter_context(replaced(schedule, **_told_loss(hook, schedule)))
                    return step(*args, **kwargs)
            finally:
                hook.end_iteration()

        with attached_once(schedule, step=told):
            yield


def _told_stage(hook: Hook, stage: Any) -> _Attributes:
    """The methods of `stage`, with `hook` told of what they compute."""
    begin, end, number, is_last = hook.begin, hook.end, stage.stage_index, stage.is_last
    forward, backward, weigh = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def told_forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(number, "F", fwd_chunk_id)
        output = forward(fwd_chunk_id, *args, **kwargs)
        if not is_last:  # where it ends with the loss
            end()
        return output

    def told_backward(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        begin(number, "B" if full_backward else "I", bwd_chunk_id)
        result = backward(bwd_chunk_id, loss, full_backward, *args, **kwargs)
        end()
        return result

    def told_weigh(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(number, "W", bwd_chunk_id)
        result = weigh(bwd_chunk_id, *args, **kwargs)
        end()
        return result

    return {
        "forward_one_chunk": told_forward,
        "backward_one_chunk": told_backward,
        "backward_weight_one_chunk": told_weigh,
    }


def _told_loss(hook: Hook, schedule: Any) -> _Attributes:
    """What `schedule` calls after each forward, with `hook` told that the last stage's has ended."""
    end, compute = hook.end, schedule._maybe_compute_loss

    def told_compute(stage: Any, *args: Any, **kwargs: Any) -> None:
        compute(stage, *args, **kwargs)
        if stage.is_last:
            end()

    return {"_maybe_compute_loss": told_compute}


def _computations(actions: Any) -> Iterator[Computation]:
    """Those of a rank's actions that compute; an overlapped pair runs one after the other."""
    for action in actions:
        for each in getattr(action, "sub_actions", None) or (action,):
            kind = None if each is None else _KINDS.get(each.computation_type.name)
            if kind is not None:
                yield Computation(each.stage_index, kind, each.microbatch_index)
