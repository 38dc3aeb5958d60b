"""Keeps faults of the planner away from the training that calls it.

All that an engine's adapter, a hook or a recording does on the training thread goes through a
`Guard`. What the training itself raises (model, loss, data) passes through unchanged: only our own
functions are called inside a `try`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, TypeVar

from perseus_planner.base.errors import fault_text
from perseus_planner.base.loops import Backoff

T = TypeVar("T")

_ORIGINAL = "_perseus_planner_original"
_LOG = logging.getLogger("perseus_planner.runtime")


Microbatches = Callable[[], Iterable[Any]]
"""Returns the microbatches of an iteration, for another thread to look at."""


Stamp = Any
"""A moment: nanoseconds, or on CUDA an event; None where the device takes none."""
Span = tuple[Stamp, Stamp]
"""Begin and end of a computation."""


@dataclass(slots=True)
class Lane:
    """All that it takes to show a computation that runs as planned, without a call of the hook.

    A wrapper of the engine checks that the next of `order` is what runs, adds its span, and writes
    what is due `after` it: caches are cold when a computation ends, and each further function costs
    the training more than what it does.
    """

    now: Callable[[], Stamp]  #: Returns this moment
    write: Callable[[int, int], object]  #: Called with 0 and a clock request
    is_open: bool = False  #: Whether it says all; else the hook is called
    #: The computations of an iteration, and None at the end.
    order: Sequence[tuple[int, str, int] | None] = (None,)
    after: Sequence[int] = ()  #: The clock request at the end of each computation
    spans: list[Span] = field(default_factory=list)  #: Of this iteration, so far
    begun: Stamp = None  #: When the computation in progress has begun


class IterationHook(Protocol):
    """What an engine's iterations are shown to, through a `HookGuard`: methods may raise."""

    @property
    def lane(self) -> Lane | None:
        """What shows computations without a call; None if only calls do."""

    @property
    def wants_batch(self) -> bool:
        """Whether it looks at the microbatches of an iteration, so that they are to be given."""

    @property
    def iteration(self) -> int:
        """Number of the iteration that has begun last, from 0; -1 before the first."""

    def begin_iteration(
        self,
        microbatches: int | None = None,
        batch: Microbatches | None = None,
        number: int | None = None,
    ) -> None:
        """Begin a training iteration.

        Args:
            microbatches: How many it has, if the engine knows.
            batch: Returns them, on a rank that has them, where the hook `wants_batch`: each as the
                model takes it. It may read them ahead from where they come from, in their order;
                the iteration then gets those.
            number: Its number; by default that after the last one.
        """

    def note_evaluation(self) -> None:
        """Note that the engine evaluates, between two iterations: the next one begins while other
        ranks still do, and may hold what the engine has to do again after it.
        """

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Begin a computation; an overlapped pair is one, named as by `schedules.overlapped`."""

    def end(self) -> None:
        """End the computation."""

    def begin_update(self) -> None:
        """Begin the update of the weights, if it is a part of the iteration."""

    def end_iteration(self) -> None:
        """End the iteration."""

    def abandon_iteration(self) -> None:
        """End the iteration because it raises."""

    def stop_following(self, problem: str) -> None:
        """Nothing more is shown, because the engine runs what its adapter does not see.

        Args:
            problem: What it runs, and what to do.
        """

    def pass_iteration(self, number: int) -> None:
        """Take that an iteration begins that is not shown, after a fault."""

    def take_fault(self, error: Exception) -> IterationHook | None:
        """Set no clocks any more, because a call of this hook or its adapter has raised; the
        iteration in progress is shown no further.

        Returns:
            What iterations are shown to meanwhile, from the next computation on; None for nothing.
        """

    def end_fault(self) -> None:
        """Set clocks again: after a fault an iteration has ended without one."""


def marked(wrapper: Callable[..., T], original: Callable[..., T]) -> Callable[..., T]:
    """Return a wrapper of ours that is known as one of a function of the training."""
    vars(wrapper)[_ORIGINAL] = original
    return wrapper


def original_of(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function of the training inside a wrapper that `marked` has returned, or the
    function.
    """
    original: Callable[..., T] = getattr(function, _ORIGINAL, function)
    return original


class Guard:
    """Calls functions of ours for the training, until one of them raises.

    Args:
        on_fault: Called with what was raised.

    Attributes:
        is_on: Whether our functions are called.
    """

    def __init__(self, on_fault: Callable[[Exception], object]) -> None:
        self.is_on = True
        self._on_fault = on_fault

    def call(self, action: Callable[..., T], *args: Any) -> T | None:
        """Return what a function of ours returns; None if it raises, or while the guard is off."""
        if not self.is_on:
            return None
        try:
            return action(*args)
        except Exception as error:
            self.fault(error)
            return None

    def attempt(self, action: Callable[..., object], *args: Any) -> None:
        """Call a function of ours also while the guard is off, as between iterations."""
        try:
            action(*args)
        except Exception as error:
            self.fault(error)

    def guarded(self, action: Callable[..., T]) -> Callable[..., T | None]:
        """Return a function of ours as the training may call it."""

        @wraps(action)
        def call(*args: Any, **kwargs: Any) -> T | None:
            if not self.is_on:
                return None
            try:
                return action(*args, **kwargs)
            except Exception as error:
                self.fault(error)
                return None

        return call

    def around(
        self,
        function: Callable[..., T],
        before: Callable[..., object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> Callable[..., T]:
        """Return a function of the training with functions of ours called around it.

        What is left of an earlier iteration, which could not be undone, is not called again.

        Args:
            function: Function of the training; what it returns or raises is not touched.
            before: Called before it, with its arguments.
            after: Called when it has returned.
        """
        function = original_of(function)

        def surrounded(*args: Any, **kwargs: Any) -> T:
            if before is not None and self.is_on:
                try:
                    before(*args, **kwargs)
                except Exception as error:
                    self.fault(error)
            result = function(*args, **kwargs)
            if after is not None and self.is_on:
                try:
                    after()
                except Exception as error:
                    self.fault(error)
            return result

        return marked(surrounded, function)

    def fault(self, error: Exception) -> None:
        """Call nothing more of ours, and pass the fault on; never raises."""
        self.is_on = False
        try:
            self._on_fault(error)
        except Exception:  # then at least say what was first
            _LOG.warning("planner: %s; training goes on without the planner", fault_text(error))


class RetryingGuard(Guard):
    """A guard that is on again after a pause of 30 s, and after pauses that double while faults go
    on; its functions go through `call`.

    Args:
        on_fault: As for `Guard`.
        now_s: A clock, in seconds.
    """

    def __init__(
        self, on_fault: Callable[[Exception], object], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(on_fault)
        self._now_s = now_s
        self._backoff = Backoff()

    def call(self, action: Callable[..., T], *args: Any) -> T | None:
        """See `Guard.call`."""
        self.is_on = self.is_on or self._backoff.is_due(self._now_s())
        return super().call(action, *args)

    def fault(self, error: Exception) -> None:
        """See `Guard.fault`."""
        self._backoff.fail(self._now_s())
        super().fault(error)


_CLOSED = Lane(time.monotonic_ns, lambda *_: None)
"""Of a hook that has none."""


class HookGuard(Guard):
    """Shows the iterations of an engine to a hook, for as long as that has no fault.

    After a fault the hook is off for the rest of the iteration. It is shown iterations again after
    a pause of 30 s, and after pauses that double while faults go on. Meanwhile it is told that
    iterations pass, so that this rank counts them as all others do. Where computations have modes
    that ranks enter together, `IterationHook.take_fault` returns what goes on to enter them.

    Attributes:
        begin, end, begin_update: As those of the hook; to be called through `around` or `call`.
        is_on: Whether the iteration in progress is shown.
        is_inside: Whether an iteration is in progress, shown or not.
        is_closed: Whether nothing more is shown, so that wrappers only pass on.

    Args:
        hook: The hook.
        now_s: A clock, in seconds.
    """

    def __init__(self, hook: IterationHook, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(self._take_fault)
        self._hook = hook
        self._now_s = now_s
        # Counted here as well, as the hook counts no iterations while it has a fault.
        self._number = hook.iteration  #: of the iteration that has begun last
        self._backoff = Backoff()
        self._has_failed = False  #: no iteration has ended without a fault since
        self._substitute: IterationHook | None = None  #: for the hook, until its pause is over
        self.is_on = self.is_inside = self.is_closed = False
        self._use(hook)

    def _use(self, hook: IterationHook) -> None:
        self._current = hook
        self.begin = hook.begin
        self.end = hook.end
        self.begin_update = hook.begin_update

    @property
    def wants_batch(self) -> bool:
        """See `IterationHook.wants_batch`."""
        return self._hook.wants_batch

    def note_evaluation(self) -> None:
        """Note an evaluation; see `IterationHook.note_evaluation`."""
        if self.is_closed:
            return
        try:
            self._hook.note_evaluation()
        except Exception as error:
            self.fault(error)

    def computing(
        self,
        function: Callable[..., T],
        begin: Callable[..., object] | None = None,
        *,
        usual: tuple[int, str] | None = None,
        unless: str | None = None,
        ends: bool = True,
    ) -> Callable[..., T]:
        """Return a function of the training that computes, shown to the hook, as `around` does.

        Args:
            function: Function of the training.
            begin: Begins the computation; called before it, with its arguments. None if it has
                begun.
            usual: Stage and kind of the computation if its first argument is the microbatch, as
                long as the plan has that; then the hook's `Lane` does without calls.
            unless: Name of an argument that makes it another kind where it is False, or is given by
                position.
            ends: Whether the computation ends with the function.
        """
        function = original_of(function)
        # Looked up once, not in each call: a call costs the training thread.
        lane = self._hook.lane or _CLOSED
        now = lane.now
        write = lane.write
        stage, kind = usual or (0, "")
        is_loss = begin is None

        def surrounded(*args: Any, **kwargs: Any) -> T:
            if not self.is_on:
                return function(*args, **kwargs)
            # A lane that is open says all if the plan's next computation is what runs.
            spans = lane.spans
            if lane.is_open and (
                is_loss
                or (
                    args
                    and lane.order[len(spans)] == (stage, kind, args[0])
                    and (unless is None or (len(args) == 1 and kwargs.get(unless, True)))
                )
            ):
                if not is_loss:
                    lane.begun = now()
            # Else the hook is called, and finds out what runs.
            elif begin is not None:
                try:
                    begin(*args, **kwargs)
                except Exception as error:
                    self.fault(error)
            result = function(*args, **kwargs)
            if ends and self.is_on:
                try:
                    if lane.is_open:
                        spans.append((lane.begun, now()))
                        # What is due after it: the clock request of what comes next.
                        write(0, lane.after[len(spans)])
                    else:
                        self.end()
                except Exception as error:
                    self.fault(error)
            return result

        return marked(surrounded, function)

    def as_one(self, function: Callable[..., T], begin: Callable[..., object]) -> Callable[..., T]:
        """Return a function of the training that is shown as one computation, whatever else that
        is shown it calls, on whichever thread.

        Args:
            function: Function of the training; what it returns or raises is not touched.
            begin: Begins the computation; called before it, with its arguments.
        """
        function = original_of(function)

        def surrounded(*args: Any, **kwargs: Any) -> T:
            self.call(begin, *args)
            was_on = self.is_on
            # What the function calls may be wrapped as well, and would be shown twice.
            self.is_on = False
            try:
                result = function(*args, **kwargs)
            finally:
                self.is_on = was_on
            self.call(self.end)
            return result

        return marked(surrounded, function)

    @property
    def _is_paused(self) -> bool:
        return self._has_failed and not self._backoff.is_due(self._now_s())

    def ask(self, question: Callable[..., bool], *args: Any) -> bool:
        """Return whether a call of the engine is an iteration to show.

        After a fault of the question nobody knows. It then counts as an iteration, as most calls
        are one, which passes without being shown.
        """
        if self.is_closed:
            return False
        try:
            return question(*args)
        except Exception as error:
            self.fault(error)
            return True

    def run(self, step: Callable[[], T], begin: Callable[..., object], *args: Any) -> T:
        """Run a training iteration, and show it.

        Args:
            step: Runs it; what it returns or raises is not touched.
            begin: Called first with an `ExitStack`, which undoes after the iteration what it has
                replaced, and with `args`; calls `show` last.
            args: Further arguments of `begin`.
        """
        stack = ExitStack()
        try:
            self.begin_iteration(begin, stack, *args)
            result = step()
        except BaseException:
            self._undo(stack)
            self.abandon_iteration()
            raise
        self._undo(stack)
        self.end_iteration()
        return result

    def begin_iteration(self, begin: Callable[..., object], *args: Any) -> None:
        """Begin an iteration, by a function that calls `show`; one that is still in progress has
        raised.
        """
        if self.is_closed:
            return
        if self.is_inside:
            self.abandon_iteration()
        self.is_inside = True
        self._number += 1
        is_paused = self._is_paused
        # Ranks count iterations alike, also one that does not show them.
        if is_paused and self._substitute is None:
            with suppress(Exception):
                self._hook.pass_iteration(self._number)
            return
        # The pause may just be over: then the hook itself is tried again.
        if self._has_failed:
            self._use(self._substitute if is_paused and self._substitute else self._hook)
        self.is_on = True
        self.call(begin, *args)

    def show(self, microbatches: int | None = None, batch: Microbatches | None = None) -> None:
        """Show the iteration that begins; see `IterationHook.begin_iteration`."""
        if self._current is self._hook:
            self._hook.begin_iteration(microbatches, batch, self._number)
        else:
            self._hook.pass_iteration(self._number)

    def end_iteration(self) -> None:
        """End the iteration in progress."""
        self.is_inside = False
        if not self.is_on:
            return
        self.call(self._current.end_iteration)
        # A whole iteration of the hook without a fault ends the fault.
        if self.is_on and self._has_failed and self._current is self._hook:
            self._has_failed = False
            self.call(self._hook.end_fault)
        self.is_on = False

    def abandon_iteration(self) -> None:
        """End the iteration in progress because it raises."""
        self.is_inside = False
        self.call(self._current.abandon_iteration)
        self.is_on = False

    def stop_following(self, problem: str) -> None:
        """Show nothing more; the argument is that of `IterationHook.stop_following`."""
        self.is_on = not self.is_closed
        self.call(self._hook.stop_following, problem)
        self.close()

    def close(self) -> None:
        """Show nothing more: what is left of our wrappers only passes on."""
        self.is_on = self.is_inside = False
        self.is_closed = True

    def _undo(self, stack: ExitStack) -> None:
        try:
            stack.close()
        except Exception as error:
            self.fault(error)

    def _take_fault(self, error: Exception) -> None:
        if self.is_closed or self._is_paused:
            return  # it was said, and is tried again when its pause is over
        self._backoff.fail(self._now_s())
        self._has_failed = True
        self._substitute = self._hook.take_fault(error)
        # What ranks enter together goes on in the middle of the iteration.
        if self._substitute is not None and self.is_inside:
            self._use(self._substitute)
            self.is_on = True
