"""How errors are answered: always as `{"error": {"code", "message"}}`, whatever went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from perseus_planner.base.errors import (
    InfeasibleDeadline,
    InfeasibleError,
    InfeasiblePower,
    PlannerError,
)
from perseus_planner.service.answers import Error, ErrorContent
from perseus_planner.service.model import Conflict, StorageError, UnknownJob
from perseus_planner.service.planning.cache import NotPlanned
from perseus_planner.service.schemas import to_json

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

_CODES = {
    400: "malformed",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    421: "wrong_host",
    422: "invalid",
    503: "unavailable",
}
_MESSAGES = {
    400: "the body cannot be read; send a JSON object as UTF-8 text, without deep nesting or huge "
    "numbers",
    404: "there is no such path; /openapi.json lists them",
    405: "this path does not take that method; /openapi.json lists those that it takes",
}
_FAULT = (
    "the service has failed, and the request is not at fault; the log of the service has the "
    "details"
)


def error_answer(error: HTTPException) -> Response:
    """Return the answer for an HTTPException."""
    by_framework = error.detail in (
        HTTPStatus(error.status_code).phrase,
        "There was an error parsing the body",
    )
    message = _MESSAGES.get(error.status_code, error.detail) if by_framework else error.detail
    return _answer(error.status_code, message, headers=error.headers)


def add_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Have `app`, which has these routes, answer every error in that form."""

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        if (
            error.status_code == 405
        ):  # Starlette only names the methods of the first route with that path
            error.headers = {"Allow": ", ".join(_methods(request, routes))}
        return error_answer(error)

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> Response:
        return _answer(422, complaint(error.errors()))

    @app.exception_handler(PlannerError)
    async def _(_: Request, error: PlannerError) -> Response:
        code = "infeasible" if isinstance(error, InfeasibleError) else None
        status = status_of(error)
        again = {"Retry-After": "1"} if status == 503 else None
        return _answer(status, str(error), code, headers=again, least=_least(error))

    @app.exception_handler(Exception)
    async def _(_: Request, __: Exception) -> Response:
        return _answer(500, _FAULT)


def status_of(error: PlannerError) -> int:
    """Return the HTTP status of an error: 404 unknown, 409 in conflict, 422 not usable, 503 not
    now.
    """
    if isinstance(error, UnknownJob):
        return 404
    if isinstance(error, (StorageError, NotPlanned)):
        return 503
    return 409 if isinstance(error, (Conflict, InfeasibleError)) else 422


def complaint(errors: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first error in a request in one sentence, without repeating values."""
    first = errors[0]
    field = ".".join(map(str, first["loc"]))
    problem = (
        "Extra inputs are not permitted"
        if first["type"] == "unexpected_keyword_argument"
        else first["msg"]
    )
    if first["type"] == "json_invalid":
        where = f" at character {first['loc'][-1]}" if isinstance(first["loc"][-1], int) else ""
        return f"the body is not JSON: {first['ctx']['error']}{where}; send a JSON object"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{field}: {problem}{more}; /openapi.json describes what is expected"


def _methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """Return the methods of the routes that match the path of `request`."""
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in getattr(route, "methods", ())})


def _least(error: PlannerError) -> dict[str, float]:
    """Return the least value that is feasible, if that is what the error is about."""
    if isinstance(error, InfeasiblePower):
        return {"least_power_w": error.least_power_w}
    if isinstance(error, InfeasibleDeadline) and math.isfinite(error.least_time_s):
        return {"least_deadline_s": error.least_time_s}
    return {}


def _answer(
    status: int,
    message: str,
    code: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    least: Mapping[str, float] | None = None,
) -> Response:
    content = Error(ErrorContent(code or _CODES.get(status, "fault"), message, **(least or {})))
    return Response(
        to_json(content, without_nulls=True), status, headers, media_type="application/json"
    )
