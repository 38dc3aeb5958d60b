"""The service on an event loop, and its routes with the role that each needs, which is checked
before any of the body is read. Changes are awaited on no thread, nor are thousands of long polls;
what computes for long runs on a few threads, and a clock ticks the service.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import inspect
import logging
import math
import re
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from http import HTTPStatus
from importlib.resources import files
from itertools import takewhile
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints
from weakref import WeakValueDictionary

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from typing_extensions import TypedDict

from perseus_planner.base import __version__
from perseus_planner.base.errors import PlannerError
from perseus_planner.base.files import sha256
from perseus_planner.base.loops import Loop
from perseus_planner.extensions.service import alerts as alerts_sent
from perseus_planner.extensions.service import curve, models, parts
from perseus_planner.extensions.service.access import (
    PROBLEM,
    STATIC,
    Access,
    Guard,
    Limits,
    Role,
    check_role,
    error_answer,
)
from perseus_planner.extensions.service.alerts import (
    AlertAnswers,
    AlertGroup,
    IgnoredAlert,
    read_alert,
    rule_of,
)
from perseus_planner.extensions.service.bodies import check_size, read_registration
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.headline import together
from perseus_planner.extensions.service.kinds import KEY, MOST_WHOLE, NAME
from perseus_planner.extensions.service.metrics import CONTENT_TYPE, Metrics
from perseus_planner.extensions.service.models import (
    EPOCH,
    LEASE,
    Answer,
    Answers,
    Counters,
    DeadlineRequest,
    Fenced,
    Health,
    History,
    Jobs,
    JobStatus,
    Me,
    Pipelines,
    PlanSet,
    PowerBudget,
    PowerRequest,
    Problem,
    Registered,
    RegisteredJob,
    Registration,
    ReportRequest,
    Reports,
    TakenRequest,
    Totals,
    UnknownJob,
    from_json,
    to_json,
)
from perseus_planner.extensions.service.planning import Unsolved
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.watch import Watchdog
from perseus_planner.runs import account

Handler = TypeVar("Handler", bound=Callable[..., Any])
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


_QUICK = 1  # the level of gzip: higher ones take much longer and save little
_READS_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


def page_response(request: Request, value: Any) -> Response:
    """Return a value, or its JSON, as the answer to a request: 304 if the client has it, and
    compressed if it can read that; takes some milliseconds for a megabyte.
    """
    content = value if isinstance(value, bytes) else to_json(value)
    headers = {"ETag": f'"{sha256(content)}"', "Vary": "Accept-Encoding"}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if _READS_GZIP.search(request.headers.get("accept-encoding", "")):
        content = gzip.compress(content, _QUICK, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


_SCHEME = "HTTPBearer"  # as OpenAPI names it
_SMALL_BYTES = 64 * 2**10  # parsed within some milliseconds


class Call(Request):
    """A request to the service."""

    @property
    def live(self) -> AsyncService:
        """What it asks."""
        live: AsyncService = self.app.state.service
        return live

    @property
    def service(self) -> Service:
        """The service itself."""
        return self.live.service


class CheckedRoute(APIRoute):
    """Checks the role before any of the body is read, and parses it, large ones on a thread; and
    writes the value that is answered, or what it becomes once it is on disk.

    FastAPI describes a route. What is asked is read here, in one step for all parameters.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what handles a request."""
        # The role is read from where OpenAPI has it, so that both say the same.
        security = (self.openapi_extra or {}).get("security")
        role: Role | None = security[0][_SCHEME][0] if security else None
        # What is left beside the request and its body are the parameters of path, query and header,
        # which are validated together.
        hints = get_type_hints(self.endpoint, include_extras=True)
        kinds = {name: hints.pop(name, None) for name in ("return", "call", "_", "sent")}
        parameters = TypeAdapter[Any](TypedDict("Parameters", hints, total=False))  # type: ignore[operator]

        async def checked(request: Request) -> Response:
            # Before anything is read or computed for somebody who may not ask.
            if role:
                check_role(request.state.role, role)
            call = Call(request.scope, request.receive)
            headers = request.headers
            path = request.path_params
            of_header = {"idempotency_key": headers.get("idempotency-key")}
            # Of equal names the path wins, as the route was chosen by it.
            given = {**request.query_params, **path, **of_header}
            try:
                values = parameters.validate_python(given)
            except ValidationError as error:
                name = error.errors()[0]["loc"][0]
                where = "path" if name in path else "header" if name in of_header else "query"
                raise _refused(error, where) from None
            kind = kinds["sent"]
            if kind:
                if headers.get("content-type", "").partition(";")[0] != "application/json":
                    problem = {"type": "json", "loc": ("body",), "msg": "is not sent as JSON"}
                    raise RequestValidationError([problem])
                values["sent"] = await _sent(call, kind)
            # Pages are read again and again: they are compared, and compressed on a thread, as that
            # takes milliseconds.
            if 304 in self.responses:
                return await call.live.call(
                    lambda: page_response(call, self.endpoint(call, **values))
                )
            # A future is a change that has to reach the disk before it is answered.
            answer = self.endpoint(call, **values)
            if isinstance(answer, Future):
                answer = await call.live.done(answer)
            elif inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Response):
                return answer
            if answer is None:
                return Response(status_code=204)
            return _json(answer, self.status_code or 200)

        return checked


async def _sent(call: Call, kind: Any) -> Any:
    """Read the body of a request as a value of `kind`; a large one on a thread, few at once."""
    body = bytearray()
    async for part in call.stream():
        body += part
    if len(body) <= _SMALL_BYTES:
        return _parsed(kind, body)
    return await call.live.parse(partial(_parsed, kind, body))


def _parsed(kind: Any, body: bytearray) -> Any:
    """Return a value of `kind` from a body.

    Raises:
        RequestValidationError: If it is not one.
        UsageError: If it has too many values.
    """
    try:
        if kind is Registration:
            return read_registration(body)
        check_size(body)
        return from_json(kind, body)
    except ValidationError as error:
        raise _refused(error, "body") from None


def _refused(error: ValidationError, where: str) -> RequestValidationError:
    problems = error.errors(include_url=False, include_input=False)
    return RequestValidationError(
        [{**problem, "loc": (where, *problem["loc"])} for problem in problems]
    )


def _route(
    method: str,
    path: str,
    role: Role | None,
    answer: Any,
    *errors: int,
    also: Mapping[int | str, dict[str, Any]] = MappingProxyType({}),
    **options: Any,
) -> Callable[[Handler], Handler]:
    """Return the decorator of a route for `role` and the roles above it, or for everyone if it is
    None.

    OpenAPI gets the class of its `answer`, its `errors` beside those of all routes, and what it
    `also` answers.
    """
    # Any route may refuse a request by its token, its site, its body or its values, and fail while
    # nothing can be written.
    statuses = sorted({401, 403, 408, 413, 421, 422, 500, 503, *errors})
    failures: dict[int | str, Any] = {
        status: {"model": Problem, "description": HTTPStatus(status).phrase} for status in statuses
    }
    return router.api_route(
        path,
        methods=[method],
        response_model=answer,
        responses={**also, **failures},
        openapi_extra={} if role is None else {"security": [{_SCHEME: [role]}]},
        **options,
    )


_LONGEST_POLL_S = 60.0
_MOST_POINTS = 500


JobName = Annotated[str, Path(pattern=NAME, description="Name of the job.")]
After = Annotated[
    int,
    Query(ge=0, le=MOST_WHOLE, description="The version that the client has; 0 for none."),
]
Epoch = Annotated[
    str, Query(max_length=256, description="That in which `after` is; empty for this one.")
]
Wait = Annotated[
    float,
    Query(
        ge=0.0,
        le=_LONGEST_POLL_S,
        allow_inf_nan=False,
        description="How long to wait for it, seconds.",
    ),
]


router = APIRouter(route_class=CheckedRoute)
_get, _put, _post, _delete = (
    partial(_route, method) for method in ("GET", "PUT", "POST", "DELETE")
)
_UNCHANGED: Mapping[int | str, Any] = {
    304: {"description": "The page is the one with the tag in `If-None-Match`."}
}
_NOTHING_NEWER: Mapping[int | str, Any] = {204: {"description": "Nothing newer within `wait_s`."}}


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


_NO_CONTENT: dict[str, Any] = {"status_code": 204, "response_class": Response}


@_post(
    "/v1/jobs",
    "operate",
    Registered,
    409,
    also={200: {"model": Registered, "description": "The same job was registered before."}},
    status_code=201,
)
async def register(call: Call, sent: Registration) -> Response:
    """Register a job. Its plans are there when this is answered.

    A profile is solved first. The same request may be sent again while that lasts, and a job whose
    client does not wait for it is not registered.
    """
    frontier = sent.frontier
    if frontier is None:
        unsolved = Unsolved(
            sent.profile_csv or "", sent.profile_yaml or "", sent.schedule or "", sent.microbatches
        )
        frontier = await call.live.solve(unsolved)
        if await call.is_disconnected():
            raise HTTPException(
                503, "the client did not wait until the profile was solved; send it again"
            )
    registered = await call.live.register(sent.job(), frontier, take_over=bool(sent.take_over))
    return _json(registered, 201 if registered.is_new else 200)


@_get("/v1/jobs", "read", Jobs, also=_UNCHANGED)
def jobs(call: Call) -> bytes:
    """List all running jobs with their status."""
    statuses = call.service.jobs()
    texts = b",".join(map(to_json, statuses))
    return b'{"jobs":[%b],"together":%b}' % (texts, to_json(together(statuses)))


@_get("/v1/totals", "read", Totals, also=_UNCHANGED)
def totals(call: Call) -> Totals:
    """List what every job ran, used and saved since it was registered, also of jobs that have
    ended.
    """
    return Totals(call.service.totals())


@_get("/v1/jobs/{job}", "read", JobStatus, 404, also=_UNCHANGED)
def status(call: Call, job: JobName) -> JobStatus:
    """Return what a job's pipelines are to do and why, which version it runs, and its reports."""
    return call.service.status(job)


@_delete("/v1/jobs/{job}", "operate", None, 404, **_NO_CONTENT)
def end(call: Call, job: JobName) -> Future[None]:
    """Report that a job has ended. Requests that wait for its plans are answered with 404."""
    return call.service.end(job)


@_post("/v1/jobs/{job}/reports", "report", Answer, 404, 409, status_code=202)
async def report(
    call: Call,
    job: JobName,
    sent: ReportRequest,
    idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None,
    wait_s: Wait = 0.0,
) -> Answer:
    """Report that something is slow, or has recovered. The answer says what changes and what that
    saves.

    If slow stages have to be solved and planned first, the answer waits up to `wait_s` for that.
    """
    straggler = sent.report(idempotency_key, call.service.now_s())
    answer = await call.live.done(call.service.report(job, straggler))
    if wait_s and answer.takes_effect == "planning":
        # Too many wait, or the job has ended: the report was taken.
        with suppress(HTTPException, UnknownJob):
            await call.live.newer(job, answer.version - 1, wait_s)
            answer = answer.with_plans_of(call.service.status(job))
    return answer


@_get("/v1/jobs/{job}/reports", "read", Reports, 404, also=_UNCHANGED)
def reports(call: Call, job: JobName) -> Reports:
    """List the reports of a job that count now or will count."""
    return Reports(call.service.reports(job))


@_delete("/v1/jobs/{job}/reports/{key}", "report", Answer, 404)
def clear(call: Call, job: JobName, key: Annotated[str, Path(pattern=KEY)]) -> Future[Answer]:
    """Withdraw a report."""
    return call.service.clear(job, key)


@_post("/v1/alerts", "report", AlertAnswers)
async def alerts(call: Call, sent: AlertGroup) -> AlertAnswers:
    """Take the alerts that Prometheus' Alertmanager posts.

    Each reports the GPU (label `UUID`) or node (`Hostname`, `node`, `nodename` or `instance`) that
    it names, in every job that has it, with the annotation or label `slowdown` or `score`.
    Alertmanager drops a whole group that is answered with 4xx, so only what is not a group is
    refused.
    """
    now_s = call.service.now_s()
    # On a thread, as a group of many alerts takes long to read.
    received = await call.live.call(lambda: [read_alert(alert, now_s) for alert in sent.alerts])
    reports = [report for report in received if not isinstance(report, str)]
    answers, refused = await call.live.done(call.service.alert(reports))
    ignored = []
    for index, (alert, reading) in enumerate(zip(sent.alerts, received, strict=True)):
        problem = reading if isinstance(reading, str) else refused.get(reading.key)
        if problem is not None:
            ignored.append(IgnoredAlert(index, rule_of(alert), problem))
    # One line for a group: Alertmanager sends it again and again until the alerts are resolved.
    if ignored:
        text = "%d of %d alerts are ignored, first one of the rule %r: %s"
        _log.warning(text, len(ignored), len(received), ignored[0].name, ignored[0].problem)
    call.app.state.metrics.count_alerts(len(received), len(ignored))
    return AlertAnswers(answers, tuple(ignored))


@_get("/v1/jobs/{job}/plans", "read", PlanSet, 404, also=_NOTHING_NEWER)
async def plans(
    call: Call, job: JobName, after: After = 0, wait_s: Wait = 0.0, epoch: Epoch = ""
) -> Response:
    """Return the plans of all pipelines of a job, as soon as their version is above `after`, or at
    once if that was of another `epoch`, which the header `Planner-Epoch` says.

    The header `Planner-Lease` says for how many seconds plans that wait for a straggler hold if the
    service is not heard of any more. The job then runs the plan `own` in all pipelines.
    """
    now = call.service.epoch(job)
    newer = await call.live.newer(job, 0 if epoch and epoch != now else after, wait_s)
    answer = Response(status_code=204) if newer is None else _json(newer)
    answer.headers[EPOCH] = call.service.epoch(job)
    lease_s = call.service.lease_s(job)
    if lease_s is not None:
        answer.headers[LEASE] = f"{lease_s:.3f}"
    return answer


@_post("/v1/jobs/{job}/taken", "report", None, 404, 409, **_NO_CONTENT)
def taken(call: Call, job: JobName, sent: TakenRequest) -> Future[None]:
    """Report which version of its plans a job runs."""
    return call.service.taken(job, sent.version, sent.iteration)


@_post("/v1/jobs/{job}/telemetry", "report", None, 404, 409, **_NO_CONTENT)
def telemetry(call: Call, job: JobName, sent: Counters) -> Future[None]:
    """Send what a run of a job has counted since it began. The job's status then says what was
    saved.

    Sending the same again, or older counts, changes nothing. A restarted job counts from 0 under
    another `run`. The counts are on disk some seconds later; if the service is killed before, the
    next message makes up for it.
    """
    return call.service.telemetry(job, sent)


@_get("/v1/jobs/{job}/frontier", "read", Curve, 404, also=_UNCHANGED)
def frontier(call: Call, job: JobName) -> Curve:
    """Return the least energy of an iteration of one pipeline as profiled, at the times where
    its slope changes.
    """
    return call.service.curve(job).thinned(_MOST_POINTS)


@_get("/v1/jobs/{job}/pipelines", "read", Pipelines, 404, also=_UNCHANGED)
def pipelines(call: Call, job: JobName) -> Pipelines:
    """Return what each pipeline of a job is to do now, and the point of its frontier that it is
    planned for.
    """
    return Pipelines(*call.service.pipelines(job))


@_get("/v1/jobs/{job}/history", "read", History, 404, also=_UNCHANGED)
def history(call: Call, job: JobName) -> History:
    """Return what has happened to a job, in words, and how its power, iteration time and saving
    went; both bounded.
    """
    return call.service.history(job)


@_put("/v1/jobs/{job}/deadline", "operate", Answer, 404, 409)
def deadline(call: Call, job: JobName, sent: DeadlineRequest) -> Future[Answer]:
    """Set the iteration time to aim for without stragglers."""
    return call.service.set_deadline(job, sent.deadline_s)


@_put("/v1/jobs/{job}/power", "operate", Answers, 404, 409)
async def power(call: Call, job: JobName, sent: PowerRequest) -> Answers:
    """Bound the average power of all GPUs of a job."""
    return await _set_power(call, job, sent)


@_put("/v1/power", "operate", Answers, 409)
async def cluster_power(call: Call, sent: PowerRequest) -> Answers:
    """Bound the average power of all jobs together. They slow down so that the sum fits."""
    return await _set_power(call, None, sent)


async def _set_power(call: Call, job: str | None, sent: PowerRequest) -> Answers:
    set_power = call.service.set_power(job, sent.power_w, sent.schedule)
    return Answers(await call.live.done(set_power))


@_get("/v1/power", "read", PowerBudget, also=_UNCHANGED)
def power_budget(call: Call) -> PowerBudget:
    """Return the power budget of all jobs together, and what a schedule replaces it with later."""
    return call.service.power_budget


@_get(
    "/metrics",
    "read",
    None,
    also={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
)
async def metrics(call: Call) -> Response:
    """Return metrics for Prometheus."""
    text = await call.live.call(call.app.state.metrics.text)
    return Response(text, media_type=CONTENT_TYPE)


@_get("/v1/me", None, Me)
def me(call: Call) -> Me:
    """Return the client's name and role; needs no token."""
    return Me(call.state.role, call.state.name)


@_get("/livez", None, Health)
@router.head("/livez", include_in_schema=False)
def livez(_: Call) -> Health:
    """Return whether the service answers at all; needs no token."""
    return Health("ok", __version__)


@_get("/healthz", None, Health)
@router.head("/healthz", include_in_schema=False)
@_get("/readyz", None, Health)
@router.head("/readyz", include_in_schema=False)
def readyz(call: Call) -> Health:
    """Return whether the service can take what it is sent; needs no token."""
    if call.live.problem is not None:
        raise HTTPException(503, f"the service is stuck: {call.live.problem}; see its log")
    return Health("ok", __version__)


_FOLDERS = (("perseus_planner.views", "web"), ("perseus_planner.extensions.service", "static"))
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page only runs scripts of the service, only connects to it, and cannot be framed by other
# pages.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


@cache
def _files() -> dict[str, bytes]:
    """Return the page's files by name, read once. No other files can be requested."""
    paths = [path for package, folder in _FOLDERS for path in (files(package) / folder).iterdir()]
    return {path.name: path.read_bytes() for path in paths if PurePath(path.name).suffix in _TYPES}


@router.get("/", include_in_schema=False)
def page(_: Call) -> Response:
    """Return the dashboard."""
    return _file_response("dashboard.html")


@router.get(STATIC + "{name}", include_in_schema=False)
def static(_: Call, name: str) -> Response:
    """Return a file of the dashboard."""
    return _file_response(name)


def _file_response(name: str) -> Response:
    if name not in _files():
        raise HTTPException(404)
    media_type = _TYPES[PurePath(name).suffix]
    return Response(_files()[name], media_type=media_type, headers=_PAGE_HEADERS)


_DESCRIPTION = """
Report that a rank, a GPU, a node, a stage or a pipeline of a training job is slow, and all other
pipelines of the job get plans that save energy in the meantime, until it has recovered. Times are
in seconds, powers in watts. Every request that is not carried out is answered with a problem as RFC
9457 has it, whose `code` is for programs. What is answered with 2xx is on disk.
"""


def create_app(service: Service, access: Access, limits: Limits) -> FastAPI:
    """Return the application that serves `service`. Its lifespan must run, as ASGI servers have it.

    Args:
        service: The service, which the application does not close.
        access: Who may send requests.
        limits: How large requests may be, and how many may wait.
    """
    live = AsyncService(service, limits)
    metrics = Metrics(service, lambda: live.waiting, lambda: live.problem)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with live.running():
            yield

    async def answered(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            # Starlette only names the methods of the first route with that path.
            matching = [
                route
                for route in router.routes
                if route.matches(request.scope)[0] is not Match.NONE
            ]
            methods = {method for route in matching for method in getattr(route, "methods", ())}
            error.headers = {"Allow": ", ".join(sorted(methods))}
        return error_answer(error)

    errors = (HTTPException, RequestValidationError, PlannerError, Exception)
    app = FastAPI(
        title="perseus-planner",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from another host
        redoc_url=None,
        routes=router.routes,
        exception_handlers=dict.fromkeys(errors, answered),
    )
    app.state.service = live
    app.state.metrics = metrics
    document = app.openapi
    app.openapi = cache(lambda: _with_texts(document()))  # type: ignore[method-assign]
    app.add_middleware(Guard, access=access, limits=limits, metrics=metrics)
    return app


def _with_texts(document: dict[str, Any]) -> dict[str, Any]:
    """Describe the fields in an OpenAPI document by the comments that stand beside them, and name
    the type of problems, which FastAPI takes for plain JSON.
    """
    # FastAPI has answers to errors as JSON of the model; they are sent as RFC 9457 names them.
    for methods in document["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                if status >= "400":
                    answer["content"] = {PROBLEM: answer["content"].pop("application/json")}
    described = document["components"]["schemas"]
    text = "A token of the service, if the service has tokens; it needs the role."
    scheme = {"type": "http", "scheme": "bearer", "description": text}
    document["components"]["securitySchemes"] = {_SCHEME: scheme}
    # The texts are comments (`#:`), which are in the sources alone. A class takes those of its
    # bases, which stand before it.
    of_kinds: dict[str, dict[str, str]] = {}
    for module in (account, parts, models, alerts_sent, curve):
        source = inspect.getsource(module)
        for kind in ast.parse(source).body:
            if isinstance(kind, ast.ClassDef):
                texts = of_kinds.setdefault(kind.name, {})
                for base in kind.bases:
                    texts |= of_kinds.get(ast.unparse(base), {})
                texts |= _texts(kind, source.splitlines())
                # Pydantic splits a model whose input and output differ.
                for end in ("", "-Input", "-Output"):
                    properties = described.get(kind.name + end, {}).get("properties", {})
                    for name in properties.keys() & texts:
                        properties[name]["description"] = texts[name]
    return document


def _texts(kind: ast.ClassDef, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name in JSON and the text of each field with a text."""
    for field in kind.body:
        if isinstance(field, ast.AnnAssign):
            # A text stands above its field, or behind it on its lines.
            above = takewhile(_is_text, reversed(lines[: field.lineno - 1]))
            beside = lines[field.lineno - 1 : field.end_lineno]
            texts = [line.partition("#: ")[2] for line in (*reversed([*above]), *beside)]
            alias = re.search(r"alias='(\w+)'", ast.unparse(field.annotation))
            text = " ".join(filter(None, texts))
            if text:
                yield alias[1] if alias else ast.unparse(field.target), text


def _is_text(line: str) -> bool:
    return line.lstrip().startswith("#: ")
