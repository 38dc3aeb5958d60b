"""Background work: a thread that calls a function once, or again and again, when to try again
after a failure, and a clock that nobody sets.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("perseus_planner")

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0
"""The pause after the first failure, and the longest one. Each failure doubles the pause, until
none comes for `LONGEST_PAUSE_S` after a pause."""


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function on a daemon thread of its own; return what becomes of it.

    While the interpreter shuts down no thread can be started, from Python 3.12 on: the function is
    then called here.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    # Told by `start`, as the interpreter shuts down: the work is done in this thread instead.
    except RuntimeError:
        run()
    return future


class SteadyClock:
    """Seconds since the epoch that rise by a second each second, also when somebody sets the
    machine's clock.

    The machine's clock is read once. So reports begin and expire when they are due, and none
    vanishes because the clock was wrong and has been set right.

    Args:
        wall_s: The machine's clock.
        monotonic_s: A clock that nobody sets.
    """

    def __init__(
        self,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic_s = monotonic_s
        # Read once: from now on nobody's setting of the clock moves this one.
        self._offset_s = wall_s() - monotonic_s()

    def __call__(self) -> float:
        """Return the time."""
        return self._offset_s + self._monotonic_s()


class Backoff:
    """The pauses between failures and the next try. All times are in seconds of one clock.

    Args:
        first_s: The pause after the first failure.
        longest_s: The longest pause.
        chance: Returns a random number of at least 0 and below 1, by which a pause is up to half
            as long, so that processes do not align; None for full pauses.
    """

    def __init__(
        self,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        chance: Callable[[], float] | None = None,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._chance = chance
        self._next_s = first_s
        self._due_s: float | None = None

    def next_s(self) -> float:
        """Return the pause after one more failure in a row, seconds."""
        pause_s = self._next_s
        self._next_s = min(2.0 * self._next_s, self._longest_s)
        return pause_s if self._chance is None else pause_s * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next_s = self._first_s

    def fail(self, now_s: float) -> None:
        """Note a failure: the next try is due a pause later."""
        # Long without a failure: it was another trouble then.
        if self._due_s is not None and now_s > self._due_s + self._longest_s:
            self.reset()
        self._due_s = now_s + self.next_s()

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last failure is over; True if nothing has failed."""
        return self._due_s is None or now_s >= self._due_s


class Loop:
    """A daemon thread that calls `step` every `period_s` seconds, and at once when it is woken.

    Args:
        step: What is done; returns the seconds until the next call, or None for `period_s`. Or a
            generator that yields them, and ends the loop when it returns.
        name: Name of the thread.
        period_s: Seconds between calls; None to be called only when woken.
        descriptors: Returns descriptors that wake the thread when they can be read.
        rest_s: For how long after a call they do not, seconds.
        on_error: Called with an exception of `step`, which ends the loop; by default it is logged.
    """

    def __init__(
        self,
        step: Callable[[], float | None] | Generator[float | None],
        name: str,
        period_s: float | None = None,
        *,
        descriptors: Callable[[], Iterable[int]] = tuple,
        rest_s: float = 0.0,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._steps = step if isinstance(step, Generator) else _calls(step)
        self._period_s = period_s
        self._rest_s = rest_s
        self._descriptors = descriptors
        self._on_error = on_error
        # Events are an eventfd, as `poll` waits for it and for descriptors at once.
        self._is_ending = False
        self._lock = threading.Lock()  #: of what wakes the thread
        self._waker: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def thread(self) -> threading.Thread:
        """The thread."""
        return self._thread

    def start(self) -> Loop:
        """Start the thread."""
        self._thread.start()
        return self

    def wake(self) -> None:
        """Have `step` called now, or once more if it runs; costs one system call."""
        with self._lock:
            if self._waker is not None:
                os.eventfd_write(self._waker, 1)

    def stop(self, limit_s: float | None = None) -> bool:
        """End the loop after the call that runs; may be repeated, and called from the loop itself.

        Returns:
            Whether the thread has ended within `limit_s` seconds; None waits for it.
        """
        # First, so that the woken thread sees it.
        self._is_ending = True
        self.wake()
        # From within the loop itself, joining would wait for ever.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(limit_s)
        if self._thread.is_alive():
            return False
        # `wake` may run in another thread, and must not write to a number that was given away.
        with self._lock:
            if self._waker is not None:
                os.close(self._waker)
                self._waker = None
        return True

    def _run(self) -> None:
        try:
            # Closed at the end: a generator may hold something in its `finally`.
            with closing(self._steps):
                while not self._is_ending:
                    pause_s = next(self._steps)
                    self._wait(self._period_s if pause_s is None else pause_s)
        # A generator that returns ends its loop; that is no error.
        except StopIteration:
            pass
        except BaseException as error:
            if self._on_error is None:
                _LOG.exception("%s ended", self._thread.name)
            else:
                self._on_error(error)

    def _wait(self, pause_s: float | None) -> None:
        assert self._waker is not None  # closed when the thread has ended
        poller = select.poll()  # unlike select, takes descriptors of any number
        poller.register(self._waker, select.POLLIN)
        # While it rests, only `wake` ends the pause: other descriptors may be readable all the
        # time.
        if not poller.poll(1e3 * self._rest_s):
            for descriptor in self._descriptors():
                poller.register(descriptor, select.POLLIN)
            # The rest is part of the pause.
            poller.poll(None if pause_s is None else 1e3 * max(pause_s - self._rest_s, 0.0))
        with suppress(BlockingIOError):  # nobody woke it
            os.eventfd_read(self._waker)


def _calls(step: Callable[[], float | None]) -> Generator[float | None]:
    while True:
        yield step()
