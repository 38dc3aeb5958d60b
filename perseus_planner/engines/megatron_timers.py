"""The timers of Megatron-core's config, which show to a hook what its schedules run.

`timers` is a field of Megatron's config. A schedule calls `config.timers(name, log_level=...)` and
starts and stops the timer that it returns: `forward-backward` around an iteration,
`forward-compute` around the forward and the loss of a microbatch, and `backward-compute` around its
backward. Core 0.9 to 0.19 do so at the same points.

A schedule draws microbatches one by one. Megatron's development branch packs the sequences of a
whole batch before an iteration (`wrap_data_iterator`), with another number of microbatches each
time, and then every stage has their lengths. The branch calls itself 0.20.0; no release up to
0.19.2 has the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.prefixes import counted
from perseus_planner.engines.engine import PipelineRank, say_left

if TYPE_CHECKING:
    from perseus_planner.engines.guard import HookGuard
    from perseus_planner.schedules import Computation

_MULTIMODULE = ("MultiModulePipelineCommunicator", "MultiModuleProcessGroupCollection")
"""Classes of arguments of a schedule that make it run a pipeline of several modules."""

HALF_SEEN_MODULES = (
    "Megatron-core runs a pipeline of several modules, whose backwards its timers do not show"
)

_EVALUATION = "evaluate"
"""The timer of an evaluation of Megatron-LM, inside which its config has no timers."""

SHOWN = {
    "forward-backward": None,
    "forward-compute": "F",
    "backward-compute": "B",
    _EVALUATION: None,
}
"""Timers that show something: an iteration, the kind of a computation, or an evaluation."""

_UNREADABLE_CALL = (
    "Megatron-core's timer forward-backward was started by no function with the arguments "
    "num_microbatches and forward_only, so the planner does not know what its schedule runs; use "
    "a release that is tested"
)

T = TypeVar("T")

Timers = Callable[..., Any]
"""The timers of a config: called with a name, they return a timer to start and stop."""

WAITS = ("pre_forward", "pre_backward")
"""Arguments of a combined step that wait for what it computes on, in the order of their calls."""


class TimerEvents:
    """Calls a hook when timers start and stop.

    Attributes:
        guard: The guard of the hook.
        packed: The microbatches that were packed last, if they are.
    """

    def __init__(self, guard: HookGuard, rank: PipelineRank, chunks: int, group: int) -> None:
        self.guard = guard
        self._rank = rank
        self._chunks = chunks
        self._group = group
        self._computations: dict[str, Iterator[Computation]] = {}
        self._microbatches: int | None = None  #: of the iteration
        self._ended = {"F": 0, "B": 0}  #: how many of each kind have ended in the iteration
        self._is_in_step = False  #: inside a combined step, which is shown as a whole
        self.packed: Sequence[Mapping[str, Any]] | None = None

    def around(self, name: str, timer: Any) -> WrappedTimer:
        """Return a timer of `SHOWN` with the hook called when it has started and before it
        stops.
        """
        # Bound once, as Megatron starts a timer for each computation.
        guard = self.guard
        kind = SHOWN[name]
        if name == _EVALUATION:

            def evaluate(*args: Any, **kwargs: Any) -> Any:
                result = timer.start(*args, **kwargs)
                guard.note_evaluation()
                return result

            return WrappedTimer(timer, evaluate, timer.stop)
        if kind is None:

            def start(*args: Any, **kwargs: Any) -> Any:
                result = timer.start(*args, **kwargs)
                self._begin_iteration()
                return result

            def stop(*args: Any, **kwargs: Any) -> Any:
                self._end_iteration()
                return timer.stop(*args, **kwargs)

            return WrappedTimer(timer, start, stop)

        def begin() -> None:
            if not self._is_in_step:
                self._begin_next(kind)

        def end(*_: Any, **__: Any) -> None:
            if not self._is_in_step:
                self._end_kinds(kind)

        started = guard.around(timer.start, after=begin)
        return WrappedTimer(timer, started, guard.around(timer.stop, before=end))

    def _begin_next(self, kinds: str) -> None:
        """Begin the next computation of a kind, or of "FB" the next of both, which overlap."""
        self.guard.begin(*joined([next(self._computations[kind]) for kind in kinds]))

    def _end_kinds(self, kinds: str) -> None:
        for kind in kinds:
            self._ended[kind] += 1
        self.guard.end()

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """Run a combined step, shown as one computation from when it has what it waits for.

        Args:
            kinds: What it runs: "F", "B", or "FB" for a pair.
            step: Runs it; takes other values for arguments.
            values: Its arguments. `pre_forward` and `pre_backward` wait for other ranks.
        """
        waits = [name for name in WAITS if values.get(name) is not None]
        begin = partial(self.guard.call, self._begin_next, kinds)
        instead = {}
        # Waiting for other ranks is no part of the computation.
        if waits:  # it begins when the last one has returned
            instead = {waits[-1]: _followed_by(values[waits[-1]], begin)}
        else:
            begin()
        # The step may start the timer of its forward, which must not show it once more.
        self._is_in_step = True
        try:
            result = step(**instead)
        finally:
            self._is_in_step = False
        self.guard.call(self._end_kinds, kinds)
        return result

    def _begin_iteration(self) -> None:
        if self.guard.is_inside:  # the iteration before has raised, and never stopped its timer
            self.guard.abandon_iteration()
        # If `_is_shown` fails, the call of an earlier iteration is not taken for this one.
        self._call = ScheduleCall(None, forward_only=False)
        if self.guard.ask(self._is_shown):
            self.guard.begin_iteration(self._begin, self._call)

    def _is_shown(self) -> bool:
        """Return whether the schedule that has started its timer trains; one of which that cannot
        be read is the last one that is followed.
        """
        call = ScheduleCall.running()
        self._call = call
        problem = call.problem
        if problem is None and call.is_multimodule:
            problem = HALF_SEEN_MODULES
        if problem is not None and not call.forward_only:
            self.guard.stop_following(problem)
            return False
        if call.forward_only:
            self.guard.note_evaluation()
        return not call.forward_only

    def _begin(self, call: ScheduleCall) -> None:
        self._is_in_step = False
        self._microbatches = call.microbatches
        self._ended = dict.fromkeys("FB", 0)
        chunks = range(self._chunks)
        self._computations = {
            # Forwards go through the chunks from the first one on, backwards from the last one.
            "F": self._in_order("F", chunks, call.microbatches or 0),
            "B": self._in_order("B", chunks[::-1], call.microbatches or 0),
        }
        packed = self.packed
        batch = None if packed is None else partial(_with_lengths, packed)
        self.guard.show(call.microbatches, batch)

    def _end_iteration(self) -> None:
        if not self.guard.is_inside:
            return
        problem = self.guard.call(self._unseen)
        if problem is None:
            self.guard.end_iteration()
        else:
            self.guard.stop_following(problem)

    def _unseen(self) -> str | None:
        """Return what shows that the iteration ran computations without timers; None if nothing
        does.
        """
        forwards = self._ended["F"]
        backwards = self._ended["B"]
        expected = forwards
        if self._microbatches is not None:
            # Each microbatch goes through every chunk of this rank once, both ways.
            expected = self._microbatches * self._chunks
        if forwards == backwards == expected:
            return None
        return (
            f"Megatron-core's timers show {counted(forwards, 'forward')} and "
            f"{counted(backwards, 'backward')} in an iteration that should run {expected} of each, "
            "so the planner does not see all that runs"
        )

    def _in_order(
        self, kind: str, chunks: Iterable[int], microbatches: int
    ) -> Iterator[Computation]:
        """Yield all computations of one kind in Megatron's order.

        A group of microbatches runs through each of `chunks`, then the next group does. The last
        group ends with the last microbatch. The iterator then goes on with microbatches that should
        not run, so that the hook sees them if they do.
        """
        from perseus_planner.schedules import Computation

        begin = 0
        while True:
            # The last group may be smaller; beyond it, all are whole again.
            end = (
                min(begin + self._group, microbatches)
                if begin < microbatches
                else begin + self._group
            )
            for chunk in chunks:
                for microbatch in range(begin, end):
                    yield Computation(chunk * self._rank.ranks + self._rank.rank, kind, microbatch)
            begin = end


class EdgeEvents(TimerEvents):
    """Shows iterations alone, in which timers need not show all that runs."""

    def around(self, name: str, timer: Any) -> WrappedTimer:
        """See `TimerEvents.around`."""
        if SHOWN[name] is not None:
            return WrappedTimer(timer, timer.start, timer.stop)
        return super().around(name, timer)

    def run_step(self, kinds: str, step: Callable[..., T], values: Mapping[str, Any]) -> T:
        """See `TimerEvents.run_step`."""
        return step()

    def _unseen(self) -> str | None:
        return None


def joined(computations: Sequence[Computation]) -> Computation:
    """Return a computation, or the two of a pair, as it is shown."""
    from perseus_planner.schedules import overlapped

    return computations[0] if len(computations) == 1 else overlapped(*computations)


def _followed_by(function: Callable[..., T], after: Callable[[], object]) -> Callable[..., T]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        result = function(*args, **kwargs)
        after()
        return result

    return call


def noting_packed(
    create: Callable[..., Any], events: TimerEvents, *args: Any, **kwargs: Any
) -> Any:
    """Note the packed microbatches of which an iterator is made, the first argument; the ranks that
    share a stage get none, but for the first. This runs before an iteration, and cannot fail.
    """
    events.packed = args[0] if args else None
    return create(*args, **kwargs)


def _with_lengths(packed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return packed microbatches with their `cu_seqlens` on the CPU. They were computed before the
    packing counted them there, so one copy of all waits for nothing more.
    """
    import torch

    lengths = [microbatch["cu_seqlens"] for microbatch in packed]
    if not lengths:
        return []
    on_cpu = torch.cat(lengths).cpu().split([len(cu_seqlens) for cu_seqlens in lengths])
    return [
        {**microbatch, "cu_seqlens": cu_seqlens}
        for microbatch, cu_seqlens in zip(packed, on_cpu, strict=True)
    ]


class _NoTimer:
    """Stands for a timer where there is none."""

    def start(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    stop = start


class WrappedTimers:
    """Timers that pass everything on to the original ones, and show some to a hook.

    Args:
        original: The original timers; None if there were none.
        events: Shows them.
    """

    def __init__(self, original: Timers | None, events: TimerEvents) -> None:
        no_timer = _NoTimer()
        self._original = original
        self.events = events
        self._call: Timers = original if original is not None else lambda *_, **__: no_timer
        self._wrapped: dict[str, WrappedTimer] = {}

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a timer of the original ones, shown if it shows something."""
        timer = self._call(name, *args, **kwargs)
        if name not in SHOWN:
            return timer
        wrapped = self._wrapped.get(name)
        # Megatron may make a timer anew; then so is what is around it.
        if wrapped is not None and wrapped.original is timer:
            return wrapped
        try:
            wrapped = self.events.around(name, timer)
            self._wrapped[name] = wrapped
        # The training gets its own timer, whatever happens to ours.
        except Exception as error:
            self.events.guard.fault(error)
            return timer
        return wrapped

    def note_evaluation(self) -> None:
        """Note an evaluation that is not timed."""
        self.events.guard.note_evaluation()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or saved config has the original timers.
        return getitem, ((self._original,), 0)


@contextmanager
def timed(owner: Any, name: str, events: TimerEvents) -> Iterator[None]:
    """Show the timers that are an attribute, inside the block.

    Megatron-LM's loops set the attribute anew, to the timers that are shown or to None, and that
    is no replacement by something else.
    """
    original = getattr(owner, name)
    setattr(owner, name, WrappedTimers(original, events))
    try:
        yield
    finally:
        timers = getattr(owner, name)
        # Ours, or none, as Megatron-LM's loops set it: nobody else has replaced it.
        if timers is None or (isinstance(timers, WrappedTimers) and timers.events is events):
            setattr(owner, name, original)
        else:
            say_left(owner, name)


class WrappedTimer:
    """A timer with other functions to start and stop it."""

    def __init__(self, original: Any, start: Callable[..., Any], stop: Callable[..., Any]) -> None:
        self.original = original
        self.start = start
        self.stop = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


@dataclass(frozen=True)
class ScheduleCall:
    """What a schedule that starts a timer was called with.

    Timers do not receive this, so it is read from the arguments of the calling schedule, which are
    passed by name.

    Attributes:
        microbatches: How many it runs; None if no caller has such arguments.
        forward_only: Whether it only evaluates them.
        is_multimodule: Whether it runs a pipeline of several modules.
        problem: Why that cannot be read; None if it can.
    """

    microbatches: int | None
    forward_only: bool
    is_multimodule: bool = False
    problem: str | None = None

    @classmethod
    def running(cls) -> ScheduleCall:
        """Return the call of the innermost schedule that runs now."""
        import torch

        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            # Names of parameters alone; local names come after them.
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if "num_microbatches" in arguments and "forward_only" in arguments:
                # The innermost one: a schedule may call another one.
                values = frame.f_locals
                kinds = {
                    type(values.get(name)).__name__
                    for name in ("p2p_communicator", "pg_collection")
                }
                return cls(
                    values["num_microbatches"],
                    values["forward_only"] or not torch.is_grad_enabled(),
                    not kinds.isdisjoint(_MULTIMODULE),
                )
            frame = frame.f_back
        return cls(None, not torch.is_grad_enabled(), problem=_UNREADABLE_CALL)
