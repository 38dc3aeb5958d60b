"""The service over HTTP: what a job counts, and what its frontier and its plans say of time and energy."""

from __future__ import annotations

from fastapi import APIRouter, Response

from perseus_planner.service.answer_schemas import FrontierAnswer, PipelinesAnswer
from perseus_planner.service.http.routing import Job, Live, errors, for_role, said
from perseus_planner.service.schemas import TelemetryBody

_MOST_POINTS = 500

router = APIRouter()


@router.post(
    "/v1/jobs/{job}/telemetry",
    dependencies=for_role("report"),
    status_code=204,
    response_class=Response,
    responses=errors(404, 409),
)
async def telemetry(job: Job, sent: TelemetryBody, live: Live) -> Response:
    """A run of a job says what it has counted since it began; its status then says what was saved.

    What was sent before, or has been overtaken, changes nothing. A job that is begun anew counts from 0, under another
    `run`. It is on disk some seconds later: if the service is killed before, it is there again with what is sent next.
    """
    await live.change(live.service.telemetry, job, sent.counters())
    return Response(status_code=204)


@router.get(
    "/v1/jobs/{job}/frontier",
    dependencies=for_role("read"),
    response_model=FrontierAnswer,
    responses=errors(404),
)
async def frontier(job: Job, live: Live) -> Response:
    """The least energy of an iteration of one pipeline as profiled, for iteration times at which its slope changes."""
    return await live.call(lambda: said(FrontierAnswer, live.service.curve(job).thinned(_MOST_POINTS)))


@router.get(
    "/v1/jobs/{job}/pipelines",
    dependencies=for_role("read"),
    response_model=PipelinesAnswer,
    responses=errors(404),
)
async def pipelines(job: Job, live: Live) -> Response:
    """What each pipeline of a job is to do now, and by which point of its frontier it is planned."""

    def answer() -> Response:
        version, each = live.service.pipelines(job)
        return said(PipelinesAnswer, {"version": version, "pipelines": each})

    return await live.call(answer)
