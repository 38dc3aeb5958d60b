"""What is answered beside values: problems, as RFC 9457 has them; pages for those who look again
and again, with a tag and compressed; and the dashboard at `/`.

The dashboard is a page with scripts and styles, which contain nothing about jobs and need no token;
it asks the API for everything it shows, with the viewer's token.
"""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from perseus_planner.base.errors import (
    InfeasibleDeadline,
    InfeasibleError,
    InfeasiblePower,
    PlannerError,
)
from perseus_planner.base.files import sha256
from perseus_planner.service.answers import JobStatus, Problem
from perseus_planner.service.model import Conflict, StorageError, UnknownJob
from perseus_planner.service.planning import NotPlanned
from perseus_planner.service.schemas import to_json

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

PROBLEM = "application/problem+json"

_QUICK = 1  # the level of gzip: higher ones take much longer and save little
_READS_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


def page_response(request: Request, content: bytes) -> Response:
    """Return JSON as the answer to a request: 304 if the client has it, and compressed if it can
    read that; takes some milliseconds for a megabyte.
    """
    headers = {"ETag": f'"{sha256(content)}"', "Vary": "Accept-Encoding"}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if _READS_GZIP.search(request.headers.get("accept-encoding", "")):
        content = gzip.compress(content, _QUICK, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


class StatusPages:
    """The page with the status of all jobs, of which a job's part is made once for each change."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[JobStatus, bytes]] = {}

    def of(self, jobs: Sequence[JobStatus]) -> bytes:
        """Return the page with these jobs; from any thread."""
        parts = {}
        for status in jobs:
            part = self._parts.get(status.job.name)
            if part is None or part[0] is not status:
                part = status, to_json(status)
            parts[status.job.name] = part
        self._parts = parts
        return b'{"jobs":[' + b",".join(content for _, content in parts.values()) + b"]}"


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
    title = HTTPStatus(status).phrase
    problem = Problem(title, status, message, code or _CODES.get(status, "fault"), **(least or {}))
    content = to_json(problem, without_defaults=True)
    return Response(content, status, headers, media_type=PROBLEM)


PAGE = "/"
STATIC = "/static/"

_FOLDERS = (("perseus_planner.views", "web"), ("perseus_planner.service.http", "static"))
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page only runs scripts of the service, only connects to it, and cannot be framed by other
# pages.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

dashboard = APIRouter(include_in_schema=False)


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the page's files by name, each with its type, read once. No other files can be
    requested.
    """
    paths = [path for package, folder in _FOLDERS for path in (files(package) / folder).iterdir()]
    types = {path: _TYPES.get(PurePath(path.name).suffix) for path in paths}
    return {
        path.name: (path.read_bytes(), media_type)
        for path, media_type in types.items()
        if media_type
    }


def is_open(path: str) -> bool:
    """Whether a path is the page or one of its files, which need no token."""
    return path == PAGE or (path.startswith(STATIC) and path.removeprefix(STATIC) in _files())


@dashboard.get(PAGE)
async def page() -> Response:
    """Return the dashboard."""
    return _file_response("dashboard.html")


@dashboard.get(STATIC + "{name}")
async def static(name: str) -> Response:
    """Return a file of the dashboard."""
    return _file_response(name)


def _file_response(name: str) -> Response:
    if name not in _files():
        raise HTTPException(404)
    content, media_type = _files()[name]
    return Response(content, media_type=media_type, headers=_HEADERS)
