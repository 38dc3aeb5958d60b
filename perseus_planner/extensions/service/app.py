"""The routes of the service, with the role that each needs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Match

from perseus_planner.base import __version__
from perseus_planner.base.errors import PlannerError
from perseus_planner.extensions.service.access import (
    Access,
    Guard,
    Limits,
    Role,
    error_answer,
)
from perseus_planner.extensions.service.alerts import (
    AlertAnswers,
    AlertGroup,
    IgnoredAlert,
    read_alert,
    rule_of,
)
from perseus_planner.extensions.service.calls import SCHEME, Call, CallRoute, json_response
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.headline import together
from perseus_planner.extensions.service.kinds import KEY, MOST_WHOLE, NAME
from perseus_planner.extensions.service.live import AsyncService
from perseus_planner.extensions.service.metrics import CONTENT_TYPE, Metrics
from perseus_planner.extensions.service.models import (
    EPOCH,
    LEASE,
    Answer,
    Answers,
    Counters,
    DeadlineRequest,
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
    Registration,
    ReportRequest,
    Reports,
    TakenRequest,
    Totals,
    UnknownJob,
    to_json,
)
from perseus_planner.extensions.service.openapi import complete
from perseus_planner.extensions.service.pages import pages
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.solving import Unsolved

Handler = TypeVar("Handler", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


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
        openapi_extra={} if role is None else {"security": [{SCHEME: [role]}]},
        **options,
    )


_LONGEST_POLL_S = 60.0
_MOST_POINTS = 500
_QUICK = 1  # the level of gzip: higher ones take much longer and save little


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


router = APIRouter(route_class=CallRoute)
_get, _put, _post, _delete = (
    partial(_route, method) for method in ("GET", "PUT", "POST", "DELETE")
)
_UNCHANGED: Mapping[int | str, Any] = {
    304: {"description": "The page is the one with the tag in `If-None-Match`."}
}
_NOTHING_NEWER: Mapping[int | str, Any] = {204: {"description": "Nothing newer within `wait_s`."}}


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
    return json_response(registered, 201 if registered.is_new else 200)


@_get("/v1/jobs", "read", Jobs, also=_UNCHANGED)
def jobs(call: Call) -> Response:
    """List all running jobs with their status."""
    statuses = call.service.jobs()
    texts = b",".join(map(to_json, statuses))
    return call.page(b'{"jobs":[%b],"together":%b}' % (texts, to_json(together(statuses))))


@_get("/v1/totals", "read", Totals, also=_UNCHANGED)
def totals(call: Call) -> Response:
    """List what every job ran, used and saved since it was registered, also of jobs that have
    ended.
    """
    return call.page(Totals(call.service.totals()))


@_get("/v1/jobs/{job}", "read", JobStatus, 404, also=_UNCHANGED)
def status(call: Call, job: JobName) -> Response:
    """Return what a job's pipelines are to do and why, which version it runs, and its reports."""
    return call.page(call.service.status(job))


@_delete("/v1/jobs/{job}", "operate", None, 404, **_NO_CONTENT)
async def end(call: Call, job: JobName) -> None:
    """Report that a job has ended. Requests that wait for its plans are answered with 404."""
    await call.live.done(call.service.end(job))


@_post("/v1/jobs/{job}/reports", "report", Answer, 404, 409, status_code=202)
async def report(
    call: Call,
    job: JobName,
    sent: ReportRequest,
    idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None,
    wait_s: Wait = 0.0,
) -> Response:
    """Report that something is slow, or has recovered. The answer says what changes and what that
    saves.

    If slow stages have to be solved and planned first, the answer waits up to `wait_s` for that.
    """
    straggler = sent.report(idempotency_key, call.service.now_s())
    answer = await call.live.done(call.service.report(job, straggler))
    if wait_s and answer.takes_effect == "planning":
        # Too many wait, or the job has ended: the report was taken.
        with suppress(HTTPException, UnknownJob):
            await call.live.newer(job, answer.version - 1, wait_s, asks=False)
            answer = answer.with_plans_of(call.service.status(job))
    return json_response(answer, 202)


@_get("/v1/jobs/{job}/reports", "read", Reports, 404, also=_UNCHANGED)
def reports(call: Call, job: JobName) -> Response:
    """List the reports of a job that count now or will count."""
    return call.page(Reports(call.service.reports(job)))


@_delete("/v1/jobs/{job}/reports/{key}", "report", Answer, 404)
async def clear(call: Call, job: JobName, key: Annotated[str, Path(pattern=KEY)]) -> Response:
    """Withdraw a report."""
    return await call.done(call.service.clear(job, key))


@_post("/v1/alerts", "report", AlertAnswers)
async def alerts(call: Call, sent: AlertGroup) -> Response:
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
    return json_response(AlertAnswers(answers, tuple(ignored)))


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
    answer = Response(status_code=204) if newer is None else json_response(newer)
    answer.headers[EPOCH] = call.service.epoch(job)
    lease_s = call.service.lease_s(job)
    if lease_s is not None:
        answer.headers[LEASE] = f"{lease_s:.3f}"
    return answer


@_post("/v1/jobs/{job}/taken", "report", None, 404, 409, **_NO_CONTENT)
async def taken(call: Call, job: JobName, sent: TakenRequest) -> None:
    """Report which version of its plans a job runs."""
    await call.live.done(call.service.taken(job, sent.version, sent.iteration))


@_post("/v1/jobs/{job}/telemetry", "report", None, 404, 409, **_NO_CONTENT)
async def telemetry(call: Call, job: JobName, sent: Counters) -> None:
    """Send what a run of a job has counted since it began. The job's status then says what was
    saved.

    Sending the same again, or older counts, changes nothing. A restarted job counts from 0 under
    another `run`. The counts are on disk some seconds later; if the service is killed before, the
    next message makes up for it.
    """
    await call.live.done(call.service.telemetry(job, sent))


@_get("/v1/jobs/{job}/frontier", "read", Curve, 404, also=_UNCHANGED)
def frontier(call: Call, job: JobName) -> Response:
    """Return the least energy of an iteration of one pipeline as profiled, at the times where
    its slope changes.
    """
    return call.page(call.service.curve(job).thinned(_MOST_POINTS))


@_get("/v1/jobs/{job}/pipelines", "read", Pipelines, 404, also=_UNCHANGED)
def pipelines(call: Call, job: JobName) -> Response:
    """Return what each pipeline of a job is to do now, and the point of its frontier that it is
    planned for.
    """
    return call.page(Pipelines(*call.service.pipelines(job)))


@_get("/v1/jobs/{job}/history", "read", History, 404, also=_UNCHANGED)
def history(call: Call, job: JobName) -> Response:
    """Return what has happened to a job, in words, and how its power, iteration time and saving
    went; both bounded.
    """
    return call.page(call.service.history(job))


@_put("/v1/jobs/{job}/deadline", "operate", Answer, 404, 409)
async def deadline(call: Call, job: JobName, sent: DeadlineRequest) -> Response:
    """Set the iteration time to aim for without stragglers."""
    return await call.done(call.service.set_deadline(job, sent.deadline_s))


@_put("/v1/jobs/{job}/power", "operate", Answers, 404, 409)
async def power(call: Call, job: JobName, sent: PowerRequest) -> Response:
    """Bound the average power of all GPUs of a job."""
    return await _set_power(call, job, sent)


@_put("/v1/power", "operate", Answers, 409)
async def cluster_power(call: Call, sent: PowerRequest) -> Response:
    """Bound the average power of all jobs together. They slow down so that the sum fits."""
    return await _set_power(call, None, sent)


async def _set_power(call: Call, job: str | None, sent: PowerRequest) -> Response:
    set_power = call.service.set_power(job, sent.power_w, sent.schedule)
    return json_response(Answers(await call.live.done(set_power)))


@_get("/v1/power", "read", PowerBudget, also=_UNCHANGED)
def power_budget(call: Call) -> Response:
    """Return the power budget of all jobs together, and what a schedule replaces it with later."""
    return call.page(call.service.power_budget)


@_get(
    "/metrics",
    "read",
    None,
    also={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
)
def metrics(call: Call) -> Response:
    """Return metrics for Prometheus."""
    return Response(call.app.state.metrics.text(), media_type=CONTENT_TYPE)


@_get("/v1/me", None, Me)
async def me(call: Call) -> Response:
    """Return the client's name and role; needs no token."""
    return json_response(Me(call.state.role, call.state.name))


@_get("/livez", None, Health)
@router.head("/livez", include_in_schema=False)
async def livez() -> Response:
    """Return whether the service answers at all; needs no token."""
    return json_response(Health("ok", __version__))


@_get("/healthz", None, Health)
@router.head("/healthz", include_in_schema=False)
@_get("/readyz", None, Health)
@router.head("/readyz", include_in_schema=False)
async def readyz(call: Call) -> Response:
    """Return whether the service can take what it is sent; needs no token."""
    if call.live.problem is not None:
        raise HTTPException(503, f"the service is stuck: {call.live.problem}; see its log")
    return json_response(Health("ok", __version__))


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
                route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE
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
        routes=[*router.routes, *pages.routes],
        exception_handlers=dict.fromkeys(errors, answered),
    )
    app.state.service = live
    app.state.metrics = metrics
    document = app.openapi
    app.openapi = cache(lambda: complete(document()))  # type: ignore[method-assign]
    app.add_middleware(GZipMiddleware, compresslevel=_QUICK)
    app.add_middleware(Guard, access=access, limits=limits, metrics=metrics)
    return app
