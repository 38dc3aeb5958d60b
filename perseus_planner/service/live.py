"""The service on an event loop: calls run on a few threads, thousands of long polls on none, and
a clock ticks it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException

from perseus_planner.service.access import Limits
from perseus_planner.service.models import Fenced, PlanSet, Registered, RegisteredJob
from perseus_planner.service.planning import Unsolved
from perseus_planner.service.service import Service

_THREADS = 32  # nearly all of them wait for the disk, together
_REGISTERING = 4
_BETWEEN_TICKS_S, _LONGEST_NAP_S = 0.01, 2.0
_RETRY_S = 1.0

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger(__name__)


class AsyncService:
    """`service` for the coroutines of one event loop, while `running`.

    Attributes:
        service: The service itself.
        waiting: Number of long polls that are open.
        fenced: The error if another service has opened the database; this one has to end.
    """

    def __init__(self, service: Service, limits: Limits, now_s: Callable[[], float]) -> None:
        self.service = service
        self.waiting = 0
        self.fenced: Fenced | None = None
        self.on_fenced: Callable[[], None] = lambda: None
        self._problem: str | None = None  # of the last tick
        self._limits = limits
        self._now_s = now_s
        self._ended = False
        self._changes: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._registering = asyncio.Semaphore(_REGISTERING)
        self._solving = asyncio.Semaphore()
        self._solutions: dict[Unsolved, asyncio.Task[bytes]] = {}  # that are awaited
        self._next_tick_s = math.inf

    @property
    def problem(self) -> str | None:
        """Why the last change or tick of the service failed, such as a full disk; None if all is
        well.
        """
        return self.service.problem or self._problem

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the threads and the clock of the service, and hear of its changes, until the block
        ends.
        """
        loop = asyncio.get_running_loop()
        self._ended, self._wake_clock = False, asyncio.Event()
        self._pool = ThreadPoolExecutor(_THREADS, "planner-service")

        def notified(job: str, _: int) -> None:  # on any thread
            loop.call_soon_threadsafe(self.changed, job)

        unsubscribe = self.service.subscribe(notified)
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            unsubscribe()
            self.end_waiting()
            self._wake_clock.set()
            await clock
            self._pool.shutdown(
                wait=False
            )  # a registration that is being planned ends with the service

    async def call(self, method: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a method of the service on a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, partial(method, *args, **options)
        )

    async def change(self, method: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a method that may change when the service wants its next tick."""
        try:
            return await self.call(method, *args, **options)
        finally:
            self._wake_clock.set()

    async def written(self, submitted: Future[R]) -> R:
        """Return the result of a change that was submitted, without a thread that waits for the
        disk.
        """
        try:
            return await asyncio.wrap_future(submitted)
        finally:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Tick earlier if the service wants that by now."""
        if self.service.next_tick_s() < self._next_tick_s:
            self._wake_clock.set()

    async def solve(self, unsolved: Unsolved) -> bytes:
        """Call `Service.solve`, which may take minutes, once for all who ask for the same
        meanwhile.
        """
        if unsolved not in self._solutions:
            solution = self._solutions[unsolved] = asyncio.create_task(self._solved(unsolved))
            solution.add_done_callback(lambda _: self._solutions.pop(unsolved))
        return await asyncio.shield(self._solutions[unsolved])

    async def _solved(self, unsolved: Unsolved) -> bytes:
        async with self._solving:  # who waits takes no thread
            return await self.call(self.service.solve, unsolved, self._limits.solve_s)

    async def register(self, job: RegisteredJob, frontier: bytes, *, take_over: bool) -> Registered:
        """Call `Service.register`, a few at a time, so that threads are left for others."""
        async with self._registering:
            return await self.change(self.service.register, job, frontier, take_over=take_over)

    async def newer(self, job: str, after: int, wait_s: float) -> PlanSet | None:
        """Return the plans of `job` as soon as their version is above `after`; None if it is not
        within `wait_s`.

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
                plans = self.service.plans(job, after)  # from memory
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
        if (change := self._changes.pop(job, None)) is not None:
            change.set_result(None)

    def end_waiting(self) -> None:
        """End every long poll now, and those that come at once."""
        self._ended = True
        for job in list(self._changes):
            self.changed(job)

    async def _tick(self) -> None:
        """Tick the service whenever it is due."""
        while not self._ended:
            self._wake_clock.clear()
            self._next_tick_s = (
                math.inf
            )  # so that whatever is due earlier than that wakes the clock
            try:
                self._next_tick_s = await self.call(self.service.tick)
                nap_s = self._next_tick_s - self._now_s()
                self._problem = None
            except Fenced as error:
                self.fenced = error
                self.on_fenced()
                return
            except Exception as error:  # a full disk, for example: it may pass
                if self._problem is None:
                    _log.exception(
                        "The service cannot carry out what is due; it tries again every second"
                    )
                self._problem = str(error)
                nap_s = _RETRY_S
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._wake_clock.wait(), min(max(nap_s, 0.0), _LONGEST_NAP_S)
                )
            await asyncio.sleep(_BETWEEN_TICKS_S)  # one tick for many reports
