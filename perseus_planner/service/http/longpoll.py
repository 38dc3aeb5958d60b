"""The service on an event loop: its calls on a few threads, thousands who wait for a version on none, and its clock."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException

from perseus_planner.service.http.plan_texts import PlanTexts
from perseus_planner.service.model import UnknownJob

if TYPE_CHECKING:
    from perseus_planner.service.http.auth import Limits
    from perseus_planner.service.model import Job, Report
    from perseus_planner.service.outcomes import Answer, Registered
    from perseus_planner.service.service import Service

_THREADS = 32  # nearly all of them wait, for what is written to disk together
_REGISTERING = 4
_BETWEEN_TICKS_S, _LONGEST_NAP_S = 0.01, 60.0
_AFTER_FAILURE_S = 1.0

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger(__name__)


class AsyncService:
    """`service` for coroutines of one event loop, while `running`.

    Attributes:
        service: what answers.
        waiting: how many long polls and event streams are open.
        problem: why time cannot go on in the service, such as a full disk; None: it can.
    """

    def __init__(self, service: Service, limits: Limits, now_s: Callable[[], float] = time.time) -> None:
        self.service = service
        self.waiting = 0
        self.problem: str | None = None
        self._limits = limits
        self._now_s = now_s
        self._ended = False
        self._changes: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._registering = asyncio.Semaphore(_REGISTERING)
        self._napping_until_s = math.inf

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Threads, clock and news of the service, until the block ends."""
        loop = asyncio.get_running_loop()
        self._ended, self._sooner = False, asyncio.Event()
        self._pool = ThreadPoolExecutor(_THREADS, "planner-service")

        def heard(job: str, _: int) -> None:  # on any thread
            loop.call_soon_threadsafe(self.changed, job)

        unsubscribe = self.service.subscribe(heard)
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            unsubscribe()
            self.end_waiting()
            self._sooner.set()
            await clock
            self._pool.shutdown(wait=False)  # a registration that plans ends with the service

    async def call(self, method: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """What a call of the service gives, which may take its time."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(method, *args, **options))

    async def change(self, method: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """The same of a call after which time may matter earlier: something begins or ends at a moment of its own."""
        try:
            return await self.call(method, *args, **options)
        finally:
            self._sooner.set()

    async def report(self, job: str, report: Report) -> Answer:
        """`Service.report`, without a thread that waits for the disk."""
        try:
            return await asyncio.wrap_future(self.service.reporting(job, report))
        finally:
            if self.service.next_tick_s() < self._napping_until_s:
                self._sooner.set()

    async def register(self, job: Job, frontier: bytes) -> Registered:
        """`Service.register`; of those that plan, few at a time, so that threads are left for reports."""
        async with self._registering:
            return await self.change(self.service.register, job, frontier)

    async def newer(self, job: str, after: int, wait_s: float) -> PlanTexts | None:
        """The plans of `job` as soon as their version is above `after`; None: not within `wait_s` seconds.

        Raises:
            UnknownJob: there is none of that name, or no longer.
            HTTPException: 503, too many wait.
        """
        loop = asyncio.get_running_loop()
        with self._place():
            until_s = loop.time() + wait_s
            while True:
                change = self._next_change(job)  # before the look, so that no change falls in between
                plans = self.service.plans(job, after)  # from memory
                if plans is not None:
                    return PlanTexts.of(plans)
                left_s = until_s - loop.time()
                if left_s <= 0.0 or self._ended:
                    return None
                await asyncio.wait({change}, timeout=left_s)

    async def events(self, job: str) -> AsyncIterator[str]:
        """The version of `job`, now and whenever there is a new one, as server-sent events; ends with the job.

        Also where too many wait: the client comes back then.
        """
        after = 0
        with suppress(UnknownJob, HTTPException):
            while True:
                plans = await self.newer(job, after, self._limits.keep_alive_s)
                if plans is not None:
                    after = plans.version
                    yield f'id: {after}\nevent: version\ndata: {{"version":{after}}}\n\n'
                elif self._ended:
                    return
                else:
                    yield ": nothing new\n\n"

    def changed(self, job: str) -> None:
        """Wake all who wait for news of `job`: a version, or that it has ended."""
        change = self._changes.pop(job, None)
        if change is not None:
            change.set_result(None)

    def end_waiting(self) -> None:
        """Have every long poll and event stream end now, and those that come end at once."""
        self._ended = True
        for job in list(self._changes):
            self.changed(job)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self.waiting >= self._limits.waiting:
            raise HTTPException(503, f"{self.waiting} requests wait already; try again later", {"Retry-After": "1"})
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def _next_change(self, job: str) -> asyncio.Future[None]:
        """What is done when there are news of `job`: one for all who wait, gone with the last of them."""
        change = self._changes.get(job)
        if change is None:
            change = self._changes[job] = asyncio.get_running_loop().create_future()
        return change

    async def _tick(self) -> None:
        """Tell the service that time has passed, whenever that matters to it."""
        while not self._ended:
            self._sooner.clear()
            self._napping_until_s = math.inf  # whatever comes while it ticks is sooner than what it will say
            try:
                self._napping_until_s = await self.call(self.service.tick)
                nap_s = self._napping_until_s - self._now_s()
                self.problem = None
            except Exception as error:  # whatever it is, such as a full disk: it may pass, and then time goes on
                if self.problem is None:
                    _log.exception("The service cannot go on with what is due; it tries again every second")
                self.problem = str(error)
                nap_s = _AFTER_FAILURE_S
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), min(nap_s, _LONGEST_NAP_S))
            await asyncio.sleep(_BETWEEN_TICKS_S)  # one for all reports of a burst
