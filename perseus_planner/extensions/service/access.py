"""What stands before every route: bearer tokens with roles, limits on the size of requests, safe
headers; and problems, as RFC 9457 has them, which every request gets that is not carried out.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, get_args

from anyio import fail_after
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perseus_planner.base.errors import (
    InfeasibleDeadline,
    InfeasibleError,
    InfeasiblePower,
    PlannerError,
    UsageError,
)
from perseus_planner.base.files import read_text
from perseus_planner.extensions.service.metrics import Metrics
from perseus_planner.extensions.service.models import (
    Conflict,
    Problem,
    StorageError,
    UnknownJob,
    to_json,
)
from perseus_planner.extensions.service.processes import NotPlanned

_log = logging.getLogger(__name__)

Role = Literal["read", "report", "operate"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each role includes those before it: read; report stragglers and telemetry; everything else."""

TOKENS_VARIABLE = "PLANNER_SERVICE_TOKENS"
"""The environment variable that may hold the lines of a token file."""

_LINE = re.compile(r"(?P<secret>[!-~]{16,}) +(?P<role>\S+) +(?P<name>[A-Za-z0-9._-]{1,64})")
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
#: For supervisors and the dashboard; they reveal nothing about jobs.
_OPEN_PATHS = ("/", "/livez", "/readyz", "/healthz", "/v1/me")
STATIC = "/static/"
"""Where the dashboard's files are, which need no token either."""
# Browsers send these for pages of other sites, or of another port.
_ELSEWHERE = (
    "cross-site",
    "same-site",
)
_LEAST_BYTES_A_SECOND = 2**16
_SAFE = ("GET", "HEAD", "OPTIONS")
_REGISTER = ("POST", "/v1/jobs")
_ALERT = ("POST", "/v1/alerts")
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True)
class Token:
    """A token of a client. The secret itself is not kept."""

    digest: bytes = field(repr=False)  #: SHA-256 of the secret
    role: Role  #: What the client may do
    name: str  #: Name of the client


@dataclass
class Access:
    """Who may send requests."""

    #: The tokens of all clients, which may be replaced. If it is empty, everyone who reaches the
    #: service may do everything.
    tokens: tuple[Token, ...] = ()
    #: Refuse requests whose header `Host` does not name this machine. Without tokens, this keeps
    #: out web pages in a browser on this machine whose host name points to 127.0.0.1.
    loopback_only: bool = False

    def bearer(self, authorization: str | None) -> Token | None:
        """Return the token in the header `Authorization`; None if it is missing or unknown.

        All tokens are compared, each in constant time, so that the time taken reveals nothing about
        them.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        digest = sha256(secret.strip().encode()).digest()
        matching = [token for token in self.tokens if hmac.compare_digest(token.digest, digest)]
        return matching[0] if matching and scheme.lower() == "bearer" else None


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    body_bytes: int = 64 * 2**10  #: The largest body of a request
    #: The largest body of a registration, which carries a frontier or a profile, and places: a
    #: frontier of 16 stages and 512 microbatches, or 131,072 places, fit with room to spare.
    registration_bytes: int = 24 * 2**20
    alerts_bytes: int = 8 * 2**20  #: The largest group of alerts, which have some 1.5 kB each
    waiting: int = 10_000  #: How many long polls may be open, over all clients
    #: The longest time to solve a profile that a job is registered with, seconds.
    solve_s: float = 600.0
    #: How long a body may take, seconds, and a second more for each 64 KiB of it that have come.
    body_s: float = 20.0


def read_tokens(
    path: Path | None, environment: Mapping[str, str] = os.environ
) -> tuple[Token, ...]:
    """Read the tokens from the file at `path`, or from the environment variable without one.

    Args:
        path: A file with a line `token role name` for each client. Blank lines and lines that start
            with # are ignored.
        environment: Where `TOKENS_VARIABLE` is looked up.

    Raises:
        UsageError: If the file cannot be read, or a line is not a token.
    """
    if path is None:
        return _tokens(environment.get(TOKENS_VARIABLE, ""), TOKENS_VARIABLE)
    text = read_text(path, UsageError, "a list of tokens")
    tokens = _tokens(text, str(path))
    if not tokens:
        raise UsageError(f"{path}: has no token; write lines of token, role and name")
    with suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            _log.warning(
                "%s: everyone on this machine can read the tokens; run `chmod 600 %s`", path, path
            )
    return tokens


def _tokens(text: str, source: str) -> tuple[Token, ...]:
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    tokens = [
        _token(line, f"{source}, line {number}")
        for number, line in lines
        if line and not line.startswith("#")
    ]
    if len({token.digest for token in tokens}) < len(tokens):
        raise UsageError(f"{source}: has a token twice; give every client another one")
    return tuple(tokens)


def _token(line: str, where: str) -> Token:
    # A line that does not match may hold a secret, so it is not shown.
    match = _LINE.fullmatch(line)
    if match is None:
        raise UsageError(
            f"{where}: is not a token of 16 characters or more, a role and a name, separated by "
            "spaces; `openssl rand -hex 16` makes a token"
        )
    role = next((role for role in ROLES if role == match["role"]), None)
    if role is None:
        raise UsageError(f"{where}: the role is not one of {', '.join(ROLES)}; give one of them")
    return Token(sha256(match["secret"].encode()).digest(), role, match["name"])


class Guard:
    """ASGI middleware that refuses requests without a valid token, from other sites, or with too
    large a body; and counts all.

    It checks the headers before any of the body is read, and counts the body as it arrives.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # An answer may have its own: the dashboard allows its scripts.
                present = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(header for header in _HEADERS if header[0] not in present),
                ]
            await send(message)

        try:
            most = self._admit(scope, Headers(scope=scope))
        except HTTPException as error:
            await error_answer(error)(scope, receive, sending)
        else:
            await self._app(scope, _bounded(receive, most, self._limits.body_s), sending)
        finally:
            self._metrics.count(scope, status, time.perf_counter() - began_s)

    def _admit(self, scope: Scope, headers: Headers) -> int:
        """Check the headers, put the client's role into `scope`, and return how large the body
        may be.
        """
        # A page of the web may send its browser to this machine under a name of its own (DNS
        # rebinding); the host header gives it away.
        if self._access.loopback_only and not _LOOPBACK.fullmatch(headers.get("host", "localhost")):
            raise HTTPException(
                421, "the service only answers on this machine; connect to 127.0.0.1 or localhost"
            )
        # Browsers say where a request comes from; programs send no such header.
        if scope["method"] not in _SAFE and headers.get("sec-fetch-site") in _ELSEWHERE:
            raise HTTPException(
                403, "a page of another site may not do this; use the service's dashboard"
            )
        bearer = self._access.bearer(headers.get("authorization"))
        path = scope["path"]
        is_open = path in _OPEN_PATHS or path.startswith(STATIC)
        if bearer is None and self._access.tokens and not is_open:
            challenge = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(
                401, "no valid token; send the header `Authorization: Bearer TOKEN`", challenge
            )
        # Without tokens, whoever reaches the port may do all.
        anonymous: Role | None = None if self._access.tokens else "operate"
        role = bearer.role if bearer else anonymous
        scope.setdefault("state", {}).update(
            {"role": role, "name": bearer.name if bearer else None}
        )
        most = self._most_bytes(role, (scope["method"], scope["path"]))
        # Without a length, or with a false one, `_bounded` counts what arrives. 18 digits are more
        # than any machine has, and quick to convert.
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise _too_large(most)
        return most

    def _most_bytes(self, role: Role | None, route: tuple[str, str]) -> int:
        if route == _REGISTER and role == "operate":
            return self._limits.registration_bytes
        if route == _ALERT and role in ("report", "operate"):
            return self._limits.alerts_bytes
        return self._limits.body_bytes


def check_role(role: Role, wanted: Role) -> None:
    """Check that `role` is `wanted` or above it.

    Raises:
        HTTPException: 403 if it is not.
    """
    if ROLES.index(role) < ROLES.index(wanted):
        raise HTTPException(
            403, f"a token with the role {role} may not do this; use one with the role {wanted}"
        )


def _bounded(receive: Receive, most: int, most_s: float) -> Receive:
    """Return a `receive` that refuses a body that is larger than `most` bytes, or takes longer than
    `most_s` seconds and one for each 64 KiB.
    """
    loop = asyncio.get_running_loop()
    seen = 0  # bytes of the body that have come
    is_whole = False
    until_s = loop.time() + most_s

    async def receiving() -> Message:
        nonlocal seen, is_whole
        try:
            left_s = None if is_whole else until_s + seen / _LEAST_BYTES_A_SECOND - loop.time()
            with fail_after(left_s):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408, f"{seen} bytes of the body came in time; send all of it within {most_s:g} s"
            ) from None
        seen += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if seen > most:
            raise _too_large(most)
        return message

    return receiving


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes; send less")


PROBLEM = "application/problem+json"
_CODES = {
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
    404: "there is no such path; /openapi.json lists them",
    405: "this path does not take that method; /openapi.json lists those that it takes",
}
_FAULT = (
    "the service has failed, and the request is not at fault; the log of the service has the "
    "details"
)


_SHOWN = 128  #: characters of a field's name, which the client may have chosen


def error_answer(error: Exception) -> Response:
    """Return the answer for an error."""
    if isinstance(error, HTTPException):
        status = error.status_code
        text = error.detail
        if text == HTTPStatus(status).phrase:
            text = _MESSAGES.get(status, text)  # in place of the framework's
        return _answer(status, text, headers=error.headers)
    if isinstance(error, RequestValidationError):
        return _answer(422, complaint(error.errors()))
    if not isinstance(error, PlannerError):
        return _answer(500, _FAULT)
    status = status_of(error)
    code = "infeasible" if isinstance(error, InfeasibleError) else None
    again = {"Retry-After": "1"} if status == 503 else None
    return _answer(status, str(error), code, headers=again, least=_least(error))


def status_of(error: PlannerError) -> int:
    """Return the HTTP status of an error: 404 unknown, 409 in conflict, 422 not usable, 503 not
    now.
    """
    if isinstance(error, UnknownJob):
        return 404
    if isinstance(error, (StorageError, NotPlanned)):
        return 503
    return 409 if isinstance(error, (Conflict, InfeasibleError)) else 422


def complaint(errors: Sequence[Mapping[str, Any]], where: str = "") -> str:
    """Describe the first error in a request in one sentence, without repeating values; `where`
    stands before the field.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}; send a JSON object"
    field = ".".join(str(name)[:_SHOWN] for name in first["loc"])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}{field}: {first['msg']}{more}; /openapi.json describes what is expected"


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
