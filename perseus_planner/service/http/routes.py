"""The service over HTTP: what is at which address, and which role may ask for it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from perseus_planner import __version__
from perseus_planner.service import alertmanager as webhook
from perseus_planner.service import answer_schemas as answers
from perseus_planner.service.http.metrics import CONTENT_TYPE
from perseus_planner.service.http.routing import Job, Live
from perseus_planner.service.http.routing import errors as _errors
from perseus_planner.service.http.routing import for_role as _for
from perseus_planner.service.http.routing import said as _said
from perseus_planner.service.model import UnknownJob
from perseus_planner.service.schemas import (
    KEY,
    MOST_WHOLE,
    AlertsBody,
    DeadlineBody,
    PowerBody,
    Registration,
    StragglerReport,
    TakenBody,
)

LONGEST_POLL_S = 60.0
"""The longest time that a request may wait for a newer version, seconds."""

_log = logging.getLogger(__name__)

After = Annotated[int, Query(ge=0, le=MOST_WHOLE, description="The version that is known already; 0: none.")]
Wait = Annotated[
    float,
    Query(ge=0.0, le=LONGEST_POLL_S, allow_inf_nan=False, description="How long to wait for it, seconds."),
]

router = APIRouter()


@router.post(
    "/v1/jobs",
    dependencies=_for("operate"),
    status_code=201,
    response_model=answers.RegisteredAnswer,
    responses={
        200: {"model": answers.RegisteredAnswer, "description": "It was registered before with the same content."},
        **_errors(409),
    },
)
async def register(request: Request, sent: Registration, live: Live) -> Response:
    """Register a job. Its plans are there when this is answered."""
    frontier = await live.call(sent.given_frontier)
    if frontier is None:
        frontier = await request.app.state.solver.frontier(sent.unsolved())
    registered = await live.register(sent.job(), frontier)
    return _said(answers.RegisteredAnswer, registered, 201 if registered.is_new else 200)


@router.get("/v1/jobs", dependencies=_for("read"), response_model=answers.StatusesAnswer, responses=_errors())
async def jobs(live: Live) -> Response:
    """All jobs that run."""
    return await live.call(lambda: _said(answers.StatusesAnswer, {"jobs": live.service.jobs()}))


@router.get("/v1/jobs/{job}", dependencies=_for("read"), response_model=answers.StatusAnswer, responses=_errors(404))
async def status(job: Job, live: Live) -> Response:
    """What a job's pipelines are to do and why, what it has taken, and what is reported of it."""
    return await live.call(lambda: _said(answers.StatusAnswer, live.service.status(job)))


@router.delete(
    "/v1/jobs/{job}",
    dependencies=_for("operate"),
    status_code=204,
    response_class=Response,
    responses=_errors(404),
)
async def end(job: Job, live: Live) -> Response:
    """A job has ended. Who waits for its plans is told that there is no such job."""
    await live.change(live.service.end, job)
    return Response(status_code=204)


@router.post(
    "/v1/jobs/{job}/reports",
    dependencies=_for("report"),
    status_code=202,
    response_model=answers.EffectAnswer,
    responses=_errors(404, 409),
)
async def report(
    request: Request,
    job: Job,
    sent: StragglerReport,
    live: Live,
    idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None,
    wait_s: Wait = 0.0,
) -> Response:
    """Report that something is slow, or has recovered; the answer says what follows, and what that saves.

    Where slow stages are solved and planned first, it waits `wait_s` for that at most.
    """
    straggler = sent.report(idempotency_key, request.app.state.now_s())
    answer = await live.report(job, straggler)
    if wait_s and answer.takes_effect == "planning":
        with suppress(HTTPException, UnknownJob):  # too many wait, or the job has ended: the report was taken
            await live.newer(job, answer.version - 1, wait_s)
            answer = answer.as_planned(await live.call(live.service.status, job))
    return _said(answers.EffectAnswer, answer, 202)


@router.get(
    "/v1/jobs/{job}/reports",
    dependencies=_for("read"),
    response_model=answers.ReportsAnswer,
    responses=_errors(404),
)
async def reports(job: Job, live: Live) -> Response:
    """The reports of a job that count now or are to count."""
    return await live.call(lambda: _said(answers.ReportsAnswer, {"reports": live.service.reports(job)}))


@router.delete(
    "/v1/jobs/{job}/reports/{key}",
    dependencies=_for("report"),
    response_model=answers.EffectAnswer,
    responses=_errors(404),
)
async def clear(job: Job, key: Annotated[str, Path(pattern=KEY)], live: Live) -> Response:
    """Take a report back."""
    return _said(answers.EffectAnswer, await live.change(live.service.clear, job, key))


@router.post(
    "/v1/alerts",
    dependencies=_for("report"),
    response_model=answers.AlertsAnswer,
    responses=_errors(),
    description=webhook.__doc__,
)
async def alerts(request: Request, sent: AlertsBody, live: Live) -> Response:
    """What Alertmanager posts; it drops all of a group that is answered with 4xx, so only what is no group is."""
    said = webhook.alerts_of(sent.alerts, request.app.state.now_s())
    found = await live.change(live.service.alert, [each.report for each in said if each.report is not None])
    ignored = webhook.ignored(said, found.ignored)
    request.app.state.metrics.alerted(len(said), len(ignored))
    for each in said:
        if each.report is None:
            _log.warning("An alert of the rule %r says too little: %s", each.name, each.problem)
    return _said(answers.AlertsAnswer, {"answers": found.answers, "ignored": ignored})


@router.get(
    "/v1/jobs/{job}/pipelines/{pipeline}/plan",
    dependencies=_for("read"),
    response_model=answers.PlanAnswer,
    responses={204: {"description": "Nothing newer within `wait_s`."}, **_errors(404)},
)
async def plan(
    job: Job,
    live: Live,
    pipeline: Annotated[int, Path(ge=0, lt=2**31, description="Which one, from 0.")],
    after: After = 0,
    wait_s: Wait = 0.0,
) -> Response:
    """The plan of one pipeline, as soon as its version is above `after`."""
    newer = await live.newer(job, after, wait_s)
    return _plans(None if newer is None else newer.of_one(pipeline))


@router.get(
    "/v1/jobs/{job}/plans",
    dependencies=_for("read"),
    response_model=answers.PlansAnswer,
    responses={204: {"description": "Nothing newer within `wait_s`."}, **_errors(404)},
)
async def plans(job: Job, live: Live, after: After = 0, wait_s: Wait = 0.0) -> Response:
    """The plans of all pipelines of a job, as soon as their version is above `after`."""
    newer = await live.newer(job, after, wait_s)
    return _plans(None if newer is None else newer.of_all())


@router.get(
    "/v1/jobs/{job}/events",
    dependencies=_for("read"),
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}, **_errors(404)},
)
async def events(job: Job, live: Live) -> StreamingResponse:
    """Server-sent events `version`, `{"version": n}`: the version of a job's plans now, and whenever there is another.

    Ends with the job. A comment comes where there is nothing new for some seconds.
    """
    await live.newer(job, 0, 0.0)  # so that an unknown job is refused before a stream begins
    return StreamingResponse(live.events(job), media_type="text/event-stream")


@router.post(
    "/v1/jobs/{job}/taken",
    dependencies=_for("report"),
    status_code=204,
    response_class=Response,
    responses=_errors(404, 409),
)
async def taken(job: Job, sent: TakenBody, live: Live) -> Response:
    """A job says which version of its plans it runs by."""
    await live.call(live.service.taken, job, sent.version, sent.iteration)
    return Response(status_code=204)


@router.put(
    "/v1/jobs/{job}/deadline",
    dependencies=_for("operate"),
    response_model=answers.EffectAnswer,
    responses=_errors(404, 409),
)
async def deadline(job: Job, sent: DeadlineBody, live: Live) -> Response:
    """Set the iteration time that is wanted where nobody straggles."""
    return _said(answers.EffectAnswer, await live.change(live.service.set_deadline, job, sent.deadline_s))


@router.put(
    "/v1/jobs/{job}/power",
    dependencies=_for("operate"),
    response_model=answers.EffectsAnswer,
    responses=_errors(404, 409),
)
async def power(job: Job, sent: PowerBody, live: Live) -> Response:
    """Set the most that all GPUs of a job may draw on average."""
    followed = await live.change(live.service.set_power, job, sent.power_w)
    return _said(answers.EffectsAnswer, {"answers": followed})


@router.put(
    "/v1/power",
    dependencies=_for("operate"),
    response_model=answers.EffectsAnswer,
    responses=_errors(409),
)
async def cluster_power(sent: PowerBody, live: Live) -> Response:
    """Set the most that all jobs together may draw on average; they slow down so that the sum fits."""
    followed = await live.change(live.service.set_power, None, sent.power_w)
    return _said(answers.EffectsAnswer, {"answers": followed})


@router.get(
    "/metrics",
    dependencies=_for("read"),
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors()},
)
async def metrics(request: Request, live: Live) -> Response:
    """What Prometheus reads."""
    text = await live.call(lambda: request.app.state.metrics.text(live.service.jobs()))
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/v1/me", response_model=answers.MeAnswer, responses=_errors())
async def me(request: Request) -> Response:
    """Whom the service takes the client for, and what that one may do; needs no token."""
    return _said(answers.MeAnswer, {"role": request.state.role, "name": request.state.name})


@router.get("/healthz", response_model=answers.HealthAnswer, responses=_errors())
async def healthz(live: Live) -> Response:
    """Whether the service does its work; needs no token."""
    if live.problem is not None:
        raise HTTPException(503, f"the service cannot go on: {live.problem}; see its log")
    return _said(answers.HealthAnswer, {"status": "ok", "version": __version__})


def _plans(text: bytes | None) -> Response:
    return Response(status_code=204) if text is None else Response(text, media_type="application/json")
