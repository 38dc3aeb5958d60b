"""The service on an event loop: changes are awaited on no thread, nor are thousands of long polls;
what computes for long runs on a few threads, and a clock ticks the service.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException

from perseus_planner.base.loops import Loop
from perseus_planner.extensions.service.models import Fenced, PlanSet, Registered, RegisteredJob
from perseus_planner.extensions.service.watch import Watchdog

if TYPE_CHECKING:
    from perseus_planner.extensions.service.access import Limits
    from perseus_planner.extensions.service.service import Service
    from perseus_planner.extensions.service.solving import Unsolved

R = TypeVar("R")
_log = logging.getLogger(__name__)

_THREADS = 32  # nearly all of them wait for the disk, together
_REGISTERING = 4
_PARSING = 2  # large bodies at once, each of which takes up to 200 MB meanwhile
_BETWEEN_TICKS_S = 0.01
_LONGEST_NAP_S = 2.0
_RETRY_S = 1.0


class AsyncService:
    """`service` for the coroutines of one event loop, while `running`.

    Attributes:
        service: The service itself.
        waiting: Number of long polls that are open.
        fenced: The error if another service has opened the database; this one has to end.
    """

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self.waiting = 0
        self.fenced: Fenced | None = None
        self.on_fenced: Callable[[], None] = lambda: None
        self._problem: str | None = None  # of the last tick
        self._watchdog = Watchdog()
        self._limits = limits
        self._ended = False
        self._changes: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._registering = asyncio.Semaphore(_REGISTERING)
        self._solving = asyncio.Semaphore()
        self._solutions: dict[Unsolved, asyncio.Task[bytes]] = {}  # that are awaited
        self._next_tick_s = math.inf

    @property
    def problem(self) -> str | None:
        """Why the last change or tick of the service failed, such as a full disk, or which of its
        threads has ended or is stuck; None if all is well.
        """
        return self.service.problem or self._problem or self._watchdog.problem

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the threads and the clock of the service, and hear of its changes, until the block
        ends.
        """
        loop = asyncio.get_running_loop()
        self._ended = False
        self._watchdog = Watchdog()
        watch = self._watchdog.watch
        self._pool = ThreadPoolExecutor(_THREADS, "planner-service", watch)
        # of their own, as each thread keeps some of the memory that it had
        self._parsers = ThreadPoolExecutor(_PARSING, "planner-parsing", watch)

        def notified(job: str, _: int) -> None:  # on any thread
            loop.call_soon_threadsafe(self.changed, job)

        self.service.on_version = notified
        self._clock = Loop(self._tick, "planner-clock").start()
        watch(self._clock.thread)
        try:
            yield
        finally:
            self.service.on_version = lambda _, __: None
            self.end_waiting()
            self._clock.stop()
            self._parsers.shutdown(wait=False)
            # A registration that is being planned ends with the service.
            self._pool.shutdown(wait=False)

    async def call(self, function: Callable[[], R]) -> R:
        """Call a function on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def parse(self, parse: Callable[[], R]) -> R:
        """Call a function that reads a large body on a thread, a few at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._parsers, parse)

    async def done(self, changed: Future[R]) -> R:
        """Return the result of a change, without a thread that waits for the disk; and tick earlier
        if the service wants that by now.
        """
        try:
            return await asyncio.wrap_future(changed)
        finally:
            if self.service.next_tick_s() < self._next_tick_s:
                self._clock.wake()

    async def solve(self, unsolved: Unsolved) -> bytes:
        """Call `Service.solve`, which may take minutes, once for all who ask for the same
        meanwhile.
        """
        if unsolved not in self._solutions:
            solution = asyncio.create_task(self._solved(unsolved))
            self._solutions[unsolved] = solution
            solution.add_done_callback(lambda _: self._solutions.pop(unsolved))
        # Whoever gives up waiting must not end the solution for the others.
        return await asyncio.shield(self._solutions[unsolved])

    async def _solved(self, unsolved: Unsolved) -> bytes:
        async with self._solving:  # who waits takes no thread
            return await self.call(partial(self.service.solve, unsolved, self._limits.solve_s))

    async def register(self, job: RegisteredJob, frontier: bytes, *, take_over: bool) -> Registered:
        """Call `Service.register`, a few at a time, so that threads are left for others."""
        register = partial(self.service.register, job, frontier, take_over=take_over)
        async with self._registering:
            return await self.done(self._pool.submit(register))

    async def newer(
        self, job: str, after: int, wait_s: float, *, asks: bool = True
    ) -> PlanSet | None:
        """Return the plans of `job` as soon as their version is above `after`; None if it is not
        within `wait_s`.

        Args:
            job: Its name.
            after: The version.
            wait_s: How long to wait, seconds.
            asks: Whether it is the job that asks, which is then heard of.

        Raises:
            UnknownJob: If there is no such job, or no longer.
            HTTPException: 503 if too many requests wait.
        """
        if self.waiting >= self._limits.waiting:
            raise HTTPException(
                503, f"{self.waiting} requests wait already; try again later", {"Retry-After": "1"}
            )
        self.waiting += 1
        try:
            loop = asyncio.get_running_loop()
            until_s = loop.time() + wait_s
            while True:
                # before the look, so that no change is missed in between
                change = self._changes.setdefault(job, loop.create_future())
                plans = self.service.plans(job, after, asks=asks)  # from memory
                if plans is not None:
                    return plans
                left_s = until_s - loop.time()
                if left_s <= 0.0 or self._ended:
                    return None
                await asyncio.wait({change}, timeout=left_s)
        finally:
            self.waiting -= 1

    def changed(self, job: str) -> None:
        """Wake all requests that wait for `job`, as it has a new version or has ended."""
        change = self._changes.pop(job, None)
        if change is not None:
            change.set_result(None)

    def end_waiting(self) -> None:
        """End every long poll now, and those that come at once."""
        self._ended = True
        for job in list(self._changes):
            self.changed(job)

    def _tick(self) -> float:
        """Tick the service, which is due; return in how many seconds it is again."""
        time.sleep(_BETWEEN_TICKS_S)  # one tick for many reports
        with self._watchdog.working():
            return self._ticked()

    def _ticked(self) -> float:
        self._next_tick_s = math.inf  # so that whatever is due earlier than that wakes the clock
        try:
            self._next_tick_s = self.service.tick()
            nap_s = self._next_tick_s - self.service.now_s()
            self._problem = None
        # It never passes: the other service has the database.
        except Fenced as error:
            self.fenced = error
            nap_s = math.inf
            self.on_fenced()
        except Exception as error:  # a full disk, for example: it may pass
            if self._problem is None:
                _log.exception(
                    "The service cannot carry out what is due; it tries again every second"
                )
            self._problem = str(error)
            nap_s = _RETRY_S
        return min(max(nap_s, 0.0), _LONGEST_NAP_S)
