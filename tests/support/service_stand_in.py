"""A service in memory without policy or solver, to test what is in front of the real one; and
its app, opened.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from perseus_planner.base.errors import (
    FrontierError,
    InfeasibleBudget,
    InfeasibleDeadline,
    InfeasiblePower,
    PlannerError,
)
from perseus_planner.base.files import sha256
from perseus_planner.extensions.service.access import Access, Limits
from perseus_planner.extensions.service.app import create_app
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.models import (
    Answer,
    Conflict,
    Counters,
    Decision,
    Event,
    Expected,
    History,
    JobStatus,
    JobTotals,
    PipelineStatus,
    PlanSet,
    PowerBudget,
    Registered,
    RegisteredJob,
    Report,
    Taken,
    Target,
    UnknownJob,
    UnknownReport,
)
from perseus_planner.extensions.service.solving import Unsolved, solve_profile
from perseus_planner.extensions.service.tally import Tally, add_counters
from perseus_planner.extensions.service.writer import Writing

httpx = pytest.importorskip("httpx")

NOW_S = 1_000.0
LEAST_W, LEAST_S = 100.0, 0.5
EXPECTED = Expected(900.0, 1000.0, "simulated")


def submitted(method: Callable[..., Any]) -> Callable[..., Future[Any]]:
    """Return the method that returns a future, as those of the service do that change something."""

    @wraps(method)
    def submit(*arguments: Any) -> Future[Any]:
        result = Future[Any]()
        try:
            result.set_result(method(*arguments))
        except PlannerError as error:
            result.set_exception(error)
        return result

    return submit


class StandIn:
    """What is sent to it is kept; every report and every setting is a new version."""

    def __init__(self) -> None:
        self.kept: dict[str, RegisteredJob] = {}
        self.of_job: dict[str, dict[str, Report]] = {}
        self.versions: dict[str, int] = {}
        self.taken_by: dict[str, Taken] = {}
        self.told: dict[str, Tally | None] = {}
        self.on_version: Callable[[str, int], None] = lambda _, __: None
        self.calls: list[str] = []
        self.ticks: list[float] = []  # what tick() gives next; the last one again and again
        self.ticked = threading.Event()
        self.failure: Exception | None = None
        self.problem: str | None = None
        self.writing = Writing(commits=0, committing_s=0.0, failed=0, waiting=0, lag_s=0.0)
        self._lock = threading.RLock()

    def now_s(self) -> float:
        return NOW_S

    def solve(self, unsolved: Unsolved, most_s: float) -> bytes:
        return solve_profile(unsolved)

    def register(
        self, job: RegisteredJob, frontier: bytes, *, take_over: bool = False
    ) -> Registered:
        if not frontier.startswith(b"PK"):
            raise FrontierError(
                "frontier.npz: is not a frontier file; name one that `planner solve` wrote"
            )
        known = self.kept.get(job.name)
        if known is not None and known != replace(
            job, frontier=sha256(frontier), since_s=NOW_S, ranks=len(job.places)
        ):
            raise Conflict(
                f"a job {job.name} runs, and is another one; end it, or choose another name"
            )
        self.kept.setdefault(
            job.name, replace(job, frontier=sha256(frontier), since_s=NOW_S, ranks=len(job.places))
        )
        self.of_job.setdefault(job.name, {})
        if known is None:
            self._publish(job.name)
        return Registered(self.kept[job.name], self.versions[job.name], known is None)

    @submitted
    def report(self, job: str, report: Report) -> Answer:
        self._check(job)
        self.of_job[job][report.key] = report
        return self._changed(job, report)

    def next_tick_s(self) -> float:
        return self.ticks[0] if self.ticks else math.inf

    @submitted
    def alert(self, reports: Sequence[Report]) -> Any:
        return (), {each.key: "no running job has it" for each in reports}

    @submitted
    def clear(self, job: str, key: str) -> Answer:
        self._check(job)
        if key not in self.of_job[job]:
            raise UnknownReport(f"job {job} has no report {key}")
        return self._changed(job, self.of_job[job].pop(key))

    @submitted
    def set_deadline(self, job: str, deadline_s: float | None) -> Answer:
        self._check(job)
        if deadline_s is not None and deadline_s < LEAST_S:
            raise InfeasibleDeadline(deadline_s, LEAST_S)
        if deadline_s == LEAST_S:
            raise InfeasibleBudget(deadline_s, 0, None)
        self.kept[job] = replace(self.kept[job], deadline_s=deadline_s)
        return self._changed(job, None)

    power_budget = PowerBudget(None, ())

    @submitted
    def set_power(
        self, job: str | None, power_w: float | None, schedule: Any = ()
    ) -> tuple[Answer, ...]:
        if power_w is not None and power_w < LEAST_W:
            raise InfeasiblePower(power_w, LEAST_W)
        if job is not None:
            self._check(job)
        return tuple(
            self._changed(name, None) for name in ([job] if job is not None else self.kept)
        )

    @submitted
    def taken(self, job: str, version: int, iteration: int) -> None:
        self._check(job)
        self.taken_by[job] = Taken(version, iteration, NOW_S)

    @submitted
    def telemetry(self, job: str, sent: Counters) -> None:
        self._check(job)
        self.told[job] = add_counters(self.told.get(job), sent, NOW_S)

    def curve(self, job: str) -> Curve:
        self._check(job)
        times_s = tuple(1.0 + place / 1000 for place in range(1000))
        return Curve(
            times_s, tuple(1000.0 / each for each in times_s), 1.0, 1100.0, 100.0, 2, 4, "simulated"
        )

    def totals(self) -> tuple[JobTotals, ...]:
        return tuple(
            JobTotals(each.name, each.pipelines, each.since_s, None, None, ())
            for each in self.kept.values()
        )

    def pipelines(self, job: str) -> tuple[int, tuple[PipelineStatus, ...]]:
        self._check(job)
        return self.versions[job], (PipelineStatus(0, 1.25, 900.0, 1.5, {0: 1.5}, "key"),)

    def history(self, job: str) -> History:
        self._check(job)
        return History((), (Event(NOW_S, "registered"),))

    def status(self, job: str) -> JobStatus:
        self._check(job)
        same = (0,) * self.kept[job].pipelines
        decision = Decision(
            (Target(1.0, {0: 1.5}),), same, 1.5, {0: "key"}, NOW_S, math.inf, "because"
        )
        version, reports = self.versions[job], tuple(self.of_job[job].values())
        return JobStatus(
            self.kept[job],
            decision,
            version,
            version,
            self.taken_by.get(job),
            reports,
            12.5,
            EXPECTED,
            self.told.get(job),
        )

    def jobs(self) -> tuple[JobStatus, ...]:
        if self.failure is not None:
            raise self.failure
        return tuple(map(self.status, self.kept))

    def reports(self, job: str) -> tuple[Report, ...]:
        self._check(job)
        return tuple(self.of_job[job].values())

    @submitted
    def end(self, job: str) -> None:
        self._check(job)
        del self.kept[job]
        self.on_version(job, self.versions[job])

    def plans(self, job: str, after: int, *, asks: bool = True) -> PlanSet | None:
        self._check(job)
        version, pipelines = self.versions[job], self.kept[job].pipelines
        texts = (f"plan {version} of the straggler\n", f"plan {version} “of the others”\n")
        return PlanSet(version, texts, (0, *(1,) * (pipelines - 1))) if version > after else None

    def epoch(self, job: str) -> str:
        self._check(job)
        return "e"

    def lease_s(self, job: str) -> float | None:
        self._check(job)
        return None

    def tick(self) -> float:
        if self.failure is not None:
            raise self.failure
        self.calls.append("tick")
        self.ticked.set()
        return self.ticks.pop(0) if self.ticks else math.inf

    def _check(self, job: str) -> None:
        if job not in self.kept:
            raise UnknownJob(f"no job {job} runs; register it")

    def _changed(self, job: str, report: Report | None) -> Answer:
        self._publish(job)
        return Answer(job, report, self.versions[job], True, "next iteration", 12.5, "it is slow")

    def _publish(self, job: str) -> None:
        with self._lock:
            self.versions[job] = version = self.versions.get(job, 0) + 1
        self.on_version(job, version)


@asynccontextmanager
async def opened(
    service: Any,
    access: Access | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app of `service`, which runs meanwhile."""
    app = create_app(service, access or Access(), limits or Limits())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", **options
        ) as client:
            yield client


@contextmanager
def asking(service: Any, **options: Any) -> Iterator[Callable[..., httpx.Response]]:
    """What asks the app of `service` one thing after another, as `httpx.request` does."""
    loop = asyncio.new_event_loop()
    app = opened(service, **options)
    client = loop.run_until_complete(app.__aenter__())
    try:
        yield lambda *arguments, **content: loop.run_until_complete(
            client.request(*arguments, **content)
        )
    finally:
        loop.run_until_complete(app.__aexit__(None, None, None))
        loop.close()
