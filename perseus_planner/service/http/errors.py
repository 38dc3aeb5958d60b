"""What the service answers where it does not do what was asked: always `{"error": {"code", "message"}}`."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match

from perseus_planner.errors import InfeasibleDeadline, InfeasibleError, InfeasiblePower, PlannerError
from perseus_planner.service.model import Conflict, StorageError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI
    from starlette.requests import Request

_CODES = {
    400: "malformed",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    421: "wrong_host",
    422: "invalid",
    503: "unavailable",
}
_MESSAGES = {
    400: "the body cannot be read; send a JSON object as UTF-8 text, not nested deeply, with numbers of usual size",
    404: "there is nothing at this address; /openapi.json lists what there is",
    405: "this address does not take that method; /openapi.json lists what it takes",
}
_FAULT = "a fault of the service, not of what was sent; its log has the details"


def refusal(error: HTTPException) -> JSONResponse:
    """The answer that says what an HTTPException says."""
    by_framework = error.detail in (HTTPStatus(error.status_code).phrase, "There was an error parsing the body")
    message = _MESSAGES.get(error.status_code, error.detail) if by_framework else error.detail
    return _answer(error.status_code, message, headers=error.headers)


def add_refusals(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Have `app`, which has these routes, answer every error in the one shape."""

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 405:  # Starlette names the methods of the first route of that address alone
            error.headers = {"Allow": ", ".join(_methods(request, routes))}
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(422, complaint(error.errors()))

    @app.exception_handler(PlannerError)
    async def _(_: Request, error: PlannerError) -> JSONResponse:
        code = "infeasible" if isinstance(error, InfeasibleError) else None
        return _answer(status_of(error), str(error), code, least=_least(error))

    @app.exception_handler(Exception)
    async def _(_: Request, __: Exception) -> JSONResponse:
        return _answer(500, _FAULT)


def status_of(error: PlannerError) -> int:
    """The HTTP status of an error of the planner: 404 unknown, 409 not as things are, 422 not at all, 503 not now."""
    if isinstance(error, UnknownJob):
        return 404
    if isinstance(error, StorageError):
        return 503
    return 409 if isinstance(error, (Conflict, InfeasibleError)) else 422


def complaint(errors: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with a request, as one sentence on the first flaw; values are not repeated."""
    first = errors[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}; send a JSON object"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{place}: {first['msg']}{more}; /openapi.json says what is expected"


def _methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """What may be asked of the address of `request`."""
    there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", ())})


def _least(error: PlannerError) -> dict[str, float]:
    """The least that can be asked for, where too little was."""
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
) -> JSONResponse:
    error = {"code": code or _CODES.get(status, "fault"), "message": message, **(least or {})}
    return JSONResponse({"error": error}, status, headers)
