"""Megatron-core, through the timers that its schedules start and stop around all that they run.

`timers` is a field that Megatron's config declares. Where a schedule is given timers, it calls
`config.timers(name, log_level=...)` and starts and stops what comes back: `forward-backward` around an iteration,
`forward-compute` around the forward and the loss of a microbatch, `backward-compute` around its backward (core 0.9 to
0.19, the same places in each).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.runtime.engines.engine import Seat
from perseus_planner.schedules import Computation, interleaved_1f1b

if TYPE_CHECKING:
    import torch

    from perseus_planner.runtime.hook import Hook

Timers = Callable[..., Any]
"""What a config has as its timers: called with a name, it gives what is started and stopped."""


class MegatronModel:
    """The chunks of a Megatron-core model on this rank, which 1F1B or interleaved 1F1B trains.

    Args:
        chunks: as they are given to Megatron's schedule, first to last.
    """

    name = "Megatron-core"

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = tuple(chunks)

    @property
    def seat(self) -> Seat:
        """Where this process stands; every tensor-parallel rank of a stage has a pipeline of its own.

        Raises:
            UsageError: Megatron's parallel state is not initialized.
        """
        import torch.distributed as dist
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            raise UsageError("Megatron's parallel state is not initialized; call initialize_model_parallel before")
        return Seat(
            rank=state.get_pipeline_model_parallel_rank(),
            ranks=state.get_pipeline_model_parallel_world_size(),
            pipeline=state.get_data_parallel_rank(),
            peers=tuple(dist.get_process_group_ranks(state.get_pipeline_model_parallel_group())),
        )

    @property
    def device(self) -> torch.device:
        """Where the chunks are.

        Raises:
            UsageError: they have no parameters.
        """
        device = next((each.device for chunk in self._chunks for each in chunk.parameters()), None)
        if device is None:
            raise UsageError("the chunks of the Megatron-core model have no parameters; give those that are trained")
        return device

    def order(self) -> tuple[Computation, ...] | None:
        """What this rank runs, where Megatron knows that every iteration has the same number of microbatches."""
        from megatron.core import num_microbatches_calculator as module

        calculator = getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
        # The others change the number as training goes on.
        if type(calculator).__name__ != "ConstantNumMicroBatchesCalculator":
            return None
        return self.order_for(module.get_num_microbatches())

    def order_for(self, microbatches: int) -> tuple[Computation, ...]:
        """What this rank runs in an iteration of `microbatches`.

        Raises:
            ScheduleError: Megatron refuses so many.
        """
        seat = self.seat
        return interleaved_1f1b(seat.ranks, len(self._chunks), microbatches, self._group).ranks[seat.rank]

    @contextmanager
    def attached(self, hook: Hook) -> Iterator[None]:
        """See `Engine.attached`.

        Raises:
            UsageError: a hook is attached already, or Megatron runs what its timers do not show.
        """
        owners = [(config, "timers") for config in self._configs]
        # Megatron-LM takes its timers from here, at the start of training and after every evaluation.
        module = sys.modules.get("megatron.training.global_vars")
        if getattr(module, "_GLOBAL_TIMERS", None) is not None:
            owners.append((module, "_GLOBAL_TIMERS"))
        for config in self._configs:
            _refuse_unseen(config)
        if any(isinstance(getattr(*owner), _Timers) for owner in owners):
            raise UsageError("a runtime is attached to this Megatron-core model already; leave its block first")
        seat = self.seat
        told = _Told(hook, seat, len(self._chunks), self._group or seat.ranks)
        with ExitStack() as stack:
            stack.callback(told.leave)
            for owner, name in owners:
                found = getattr(owner, name)
                stack.callback(setattr, owner, name, found)
                setattr(owner, name, _Timers(found, told.meanings))
            yield

    @property
    def _group(self) -> int | None:
        """How many microbatches go through one chunk before the next one's turn."""
        return getattr(self._configs[0], "microbatch_group_size_per_vp_stage", None)

    @property
    def _configs(self) -> list[Any]:
        """The config of each chunk, of which they may have one together."""
        from megatron.core.utils import get_model_config

        try:
            configs = [get_model_config(chunk) for chunk in self._chunks]
        except RuntimeError as error:
            raise UsageError(
                f"a chunk has no config of Megatron-core ({error}); give the chunks as its schedule has them"
            ) from error
        return list({id(config): config for config in configs}.values())


class _Told:
    """What a hook is told when timers start and stop."""

    def __init__(self, hook: Hook, seat: Seat, chunks: int, group: int) -> None:
        self._hook, self._seat, self._chunks, self._group = hook, seat, chunks, group
        self._is_training = self._has_left = False
        self._turns: dict[str, Iterator[Computation]] = {}
        self.meanings: Mapping[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "forward-backward": (self._begin_iteration, self._end_iteration),
            "forward-compute": (partial(self._begin, "F"), self._end),
            "backward-compute": (partial(self._begin, "B"), self._end),
        }
        """Name of a timer -> what its start and its stop mean."""

    def leave(self) -> None:
        """Tell nothing from now on, whoever keeps the timers."""
        self._is_training, self._has_left = False, True

    def _begin_iteration(self) -> None:
        microbatches, forward_only = _asked_for()
        self._is_training = not (forward_only or self._has_left)
        if self._is_training:
            chunks = range(self._chunks)
            self._turns = {
                "F": self._in_turn("F", chunks, microbatches or 0),
                "B": self._in_turn("B", chunks[::-1], microbatches or 0),
            }
            self._hook.begin_iteration(microbatches)

    def _end_iteration(self) -> None:
        if self._is_training:
            self._is_training = False
            self._hook.end_iteration()

    def _begin(self, kind: str) -> None:
        if self._is_training:
            self._hook.begin(*next(self._turns[kind]))

    def _end(self) -> None:
        if self._is_training:
            self._hook.end()

    def _in_turn(self, kind: str, chunks: Iterable[int], microbatches: int) -> Iterator[Computation]:
        """All of one kind, in Megatron's order: a group of microbatches through each of `chunks`, then the next group.

        The group of the last microbatch ends with it. It goes on after that: more was not to come, and is told as more.
        """
        begin = 0
        while True:
            end = min(begin + self._group, microbatches) if begin < microbatches else begin + self._group
            for chunk in chunks:
                for microbatch in range(begin, end):
                    yield Computation(chunk * self._seat.ranks + self._seat.rank, kind, microbatch)
            begin = end


class _NoTimer:
    """What is started and stopped where there are no timers."""

    def start(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    stop = start


class _Timers:
    """Timers that pass everything on to those that were there, and tell where three of them start and stop.

    Args:
        given: what was there; None where there was nothing.
        meanings: name of a timer -> what its start and its stop mean.
    """

    def __init__(
        self, given: Timers | None, meanings: Mapping[str, tuple[Callable[[], None], Callable[[], None]]]
    ) -> None:
        no_timer = _NoTimer()
        self._given, self._meanings = given, meanings
        self._call: Timers = given if given is not None else lambda *_, **__: no_timer
        self._telling: dict[str, _Timer] = {}

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        timer = self._call(name, *args, **kwargs)
        if name not in self._meanings:
            return timer
        telling = self._telling.get(name)
        if telling is None or telling.given is not timer:
            telling = self._telling[name] = _Timer(timer, *self._meanings[name])
        return telling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a config, or one that is saved, has the timers that were there.
        return getitem, ((self._given,), 0)


class _Timer:
    """A timer that tells where it starts and stops; what it does itself lies outside of what is told."""

    def __init__(self, given: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.given, self._begin, self._end = given, begin, end

    def start(self, *args: Any, **kwargs: Any) -> Any:
        result = self.given.start(*args, **kwargs)
        self._begin()
        return result

    def stop(self, *args: Any, **kwargs: Any) -> Any:
        self._end()
        return self.given.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.given, name)


def _asked_for() -> tuple[int | None, bool]:
    """How many microbatches the schedule runs that started the timer, and whether it only evaluates them.

    No timer is told that, so it is read from the schedule's arguments, whose names are those by which it is called. The
    number is None where no caller has such arguments.
    """
    import torch

    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "num_microbatches" in arguments and "forward_only" in arguments:
            given = frame.f_locals
            return given["num_microbatches"], given["forward_only"] or not torch.is_grad_enabled()
        frame = frame.f_back
    return None, not torch.is_grad_enabled()


def _refuse_unseen(config: Any) -> None:
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise UsageError(
            "overlap_moe_expert_parallel_comm makes Megatron-core run a forward and a backward as one, in which no "
            "clock can change; train without it, or without a plan"
        )
    scope = getattr(config, "cuda_graph_scope", None)
    scopes = [getattr(each, "name", each) for each in (scope if isinstance(scope, list) else [scope])]
    if "full_iteration" in (getattr(config, "cuda_graph_impl", None), *scopes):
        raise UsageError(
            "Megatron-core is to replay whole iterations as one CUDA graph (full_iteration), which shows none of its "
            "computations; train with graphs of layers, or without a plan"
        )
