"""Who may ask the service for what, and how much: bearer tokens with roles, size limits, safe headers."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perseus_planner.errors import UsageError
from perseus_planner.files import read_text
from perseus_planner.service.dashboard import routes as dashboard
from perseus_planner.service.http.errors import refusal

Role = Literal["read", "report", "operate"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what those before it may: ask; report stragglers and what a job took; all else."""

TOKENS_VARIABLE = "PLANNER_SERVICE_TOKENS"
"""The environment variable that holds what a file of tokens would."""

_LINE = re.compile(r"(?P<secret>[!-~]{16,}) +(?P<role>\S+) +(?P<name>[A-Za-z0-9._-]{1,64})")
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_OPEN_PATHS = ("/healthz", "/v1/me")  # supervisors and the dashboard ask them, and they say nothing of any job
_ELSEWHERE = ("cross-site", "same-site")  # whence a browser says that a request comes; same-site: of another port
_SAFE = ("GET", "HEAD", "OPTIONS")
_REGISTER, _ALERT = ("POST", "/v1/jobs"), ("POST", "/v1/alerts")
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True)
class Token:
    """What a client shows. The secret itself is not kept.

    Attributes:
        digest: SHA-256 of the secret.
        role: what the bearer may do.
        name: who that is.
    """

    digest: bytes = field(repr=False)
    role: Role
    name: str


@dataclass(frozen=True)
class Access:
    """Who may come in.

    Attributes:
        tokens: those of all clients; empty: whoever reaches the service may do all.
        loopback_only: refuse requests whose header `Host` is not this machine. Where no token is needed, this keeps
            out a web page in a browser on this machine that has had its own name point to 127.0.0.1.
    """

    tokens: tuple[Token, ...] = ()
    loopback_only: bool = False

    def bearer(self, authorization: str | None) -> Token | None:
        """Whose token the header `Authorization` carries; None: nobody's.

        All tokens are compared, each in constant time, so that the time taken says nothing about any of them.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        digest = sha256(secret.strip().encode()).digest()
        matching = [token for token in self.tokens if hmac.compare_digest(token.digest, digest)]
        return matching[0] if matching and scheme.lower() == "bearer" else None


@dataclass(frozen=True)
class Limits:
    """What one client may use.

    Attributes:
        body_bytes: the largest body of a request.
        registration_bytes: the same where a job is registered, which carries a frontier.
        alerts_bytes: the same where Alertmanager posts a group of alerts, of some 1.5 kB each.
        waiting: how many long polls and event streams may be open, over all clients.
        keep_alive_s: an event stream says something at least so often.
        solve_s: how long the service solves a profile that a job was registered with.
    """

    body_bytes: int = 64 * 2**10
    registration_bytes: int = 64 * 2**20
    alerts_bytes: int = 8 * 2**20
    waiting: int = 10_000
    keep_alive_s: float = 15.0
    solve_s: float = 600.0


def read_tokens(path: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[Token, ...]:
    """The tokens of the file at `path`, or of the environment variable where there is none.

    Args:
        path: a line `token role name` for each client; blank lines and lines that start with # say nothing.
        environment: where `TOKENS_VARIABLE` is looked up.

    Raises:
        UsageError: the file cannot be read, or a line is no token.
    """
    if path is None:
        return _tokens(environment.get(TOKENS_VARIABLE, ""), TOKENS_VARIABLE)
    text = read_text(path, UsageError, "a list of tokens")
    tokens = _tokens(text, str(path))
    if not tokens:
        raise UsageError(f"{path}: has no token; write lines of token, role and name")
    return tokens


def _tokens(text: str, source: str) -> tuple[Token, ...]:
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    tokens = [_token(line, f"{source}, line {number}") for number, line in lines if line and not line.startswith("#")]
    if len({token.digest for token in tokens}) < len(tokens):
        raise UsageError(f"{source}: has a token twice; give every client one of its own")
    return tuple(tokens)


def _token(line: str, place: str) -> Token:
    match = _LINE.fullmatch(line)  # what does not match may be a secret, so it is not shown
    if match is None:
        raise UsageError(
            f"{place}: is no token of 16 characters or more, a role and a name, with spaces between; "
            "`openssl rand -hex 16` makes a token"
        )
    role = next((role for role in ROLES if role == match["role"]), None)
    if role is None:
        raise UsageError(f"{place}: the role is none of {', '.join(ROLES)}; give one of them")
    return Token(sha256(match["secret"].encode()).digest(), role, match["name"])


class Guard:
    """ASGI middleware that lets a request through only from those who may ask, and no larger than it may be.

    It looks at headers alone, before anything of a body is read, and counts the body as it comes.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits) -> None:
        self._app = app
        self._access = access
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _with_headers(send)
        try:
            most = self._admit(scope, Headers(scope=scope))
        except HTTPException as error:
            await refusal(error)(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, most), send)

    def _admit(self, scope: Scope, headers: Headers) -> int:
        """How large the body may be; the bearer is left in `scope`."""
        if self._access.loopback_only and not _LOOPBACK.fullmatch(headers.get("host", "localhost")):
            raise HTTPException(421, "the service answers on this machine alone; ask for 127.0.0.1 or localhost")
        if scope["method"] not in _SAFE and headers.get("sec-fetch-site") in _ELSEWHERE:
            raise HTTPException(403, "a page of another site may not ask for this; ask from the service's own page")
        bearer = self._access.bearer(headers.get("authorization"))
        if bearer is None and self._access.tokens and not _is_open(scope["path"]):
            wanted = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "no valid token; send the header `Authorization: Bearer TOKEN`", wanted)
        stranger: Role | None = None if self._access.tokens else "operate"
        scope.setdefault("state", {}).update(
            {"role": bearer.role if bearer else stranger, "name": bearer.name if bearer else None}
        )
        larger = {_REGISTER: self._limits.registration_bytes, _ALERT: self._limits.alerts_bytes}
        most = larger.get((scope["method"], scope["path"]), self._limits.body_bytes)
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise _too_large(most)
        return most


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or dashboard.is_open(path)


def check_role(role: Role, wanted: Role) -> None:
    """Refuse who has `role` what only `wanted` and those above it may do.

    Raises:
        HTTPException: 403.
    """
    if ROLES.index(role) < ROLES.index(wanted):
        raise HTTPException(403, f"a token of the role {role} may not do this; use one of the role {wanted}")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message["headers"]}  # the dashboard allows its own scripts
            message["headers"] = [*message["headers"], *(each for each in _HEADERS if each[0] not in own)]
        await send(message)

    return sending


def _bounded(receive: Receive, most: int) -> Receive:
    """`receive`, which refuses a body that turns out larger than it may be."""
    seen = 0

    async def receiving() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise _too_large(most)
        return message

    return receiving


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes; send less")
