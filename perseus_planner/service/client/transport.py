"""How a client reaches the service over HTTP, and what the service's refusals and silences mean."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from perseus_planner.base.errors import (
    PlanError,
    ServiceAway,
    ServiceRefusal,
    UsageError,
    how_to_install,
    one_line,
)

if TYPE_CHECKING:
    import httpx

Value = TypeVar("Value")

DEFAULT_ADDRESS = "http://127.0.0.1:8400"
"""Where the service listens by default."""

ADDRESS_VARIABLE, TOKEN_VARIABLE = "PLANNER_SERVICE", "PLANNER_TOKEN"
"""The environment variables with the address of the service and the token to send."""


class Transport:
    """The connection to one service. Its methods raise `ServiceAway` and `ServiceRefusal`.

    Args:
        address: As for `Client`.
        token: As for `Client`; an empty one is not sent.
        timeout_s: How long to wait for an answer, seconds.

    Raises:
        UsageError: If the address or the token is malformed, or httpx is not installed.
    """

    def __init__(self, address: str | None, token: str | None, timeout_s: float) -> None:
        self.address = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        self.timeout_s = timeout_s
        sent = os.environ.get(TOKEN_VARIABLE, "").strip() if token is None else token
        self._http = _connected(self.address, sent, timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(
        self, method: str, path: str, *, body: bytes | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request and return a successful answer; `body` is JSON, `options` are those of
        httpx.
        """
        import httpx

        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = self._http.request(method, path, content=body, headers=headers, **options)
        except httpx.RequestError as error:
            raise self._away(path, error) from error
        if not response.is_success:
            self._refuse(path, response)
        return response

    def read(self, parse: Callable[[bytes], Value], response: httpx.Response) -> Value:
        """Return what `parse` makes of a JSON answer."""
        try:
            _ = response.json() if response.content else None
        except (ValueError, RecursionError):  # also if it is not UTF-8
            self._refuse_answer(response.text)
        try:
            return parse(response.content)
        except (LookupError, TypeError, ValueError, AttributeError, PlanError, UsageError) as error:
            raise ServiceAway(
                f"the service at {self.address} answered what this planner does not understand "
                f"({one_line(str(error), 200)}); use the same version of perseus-planner on both "
                "sides"
            ) from error

    def _away(self, path: str, error: Exception) -> ServiceAway:
        import httpx

        if isinstance(error, httpx.TimeoutException) and not isinstance(
            error, httpx.ConnectTimeout
        ):
            return ServiceAway(
                f"the service at {self.address} did not answer {path} in time; check whether it "
                "still runs, and its log"
            )
        reason = (
            one_line(str(error), 80).rpartition("] ")[2] or type(error).__name__
        )  # without [Errno 111]
        return ServiceAway(
            f"there is no answer from the service at {self.address} ({reason}); start it with "
            f"`planner serve`, or name another in {ADDRESS_VARIABLE} or --service"
        )

    def _refuse(self, path: str, response: httpx.Response) -> NoReturn:
        """Raise the error for a status that is not a success."""
        try:
            error = response.json()["error"]
            code, message = str(error["code"]), one_line(str(error["message"]), 400)
            least = error.get("least_power_w", error.get("least_deadline_s"))
            least = None if least is None else float(least)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            self._refuse_answer(f"HTTP {response.status_code} {response.text}")
        if (
            response.status_code == HTTPStatus.TOO_MANY_REQUESTS or response.status_code >= 500
        ):  # 429: of a proxy
            raise ServiceAway(f"the service at {self.address} could not answer {path}: {message}")
        if response.status_code == 401:
            message += f"; put a token of the service in {TOKEN_VARIABLE}"
        raise ServiceRefusal(
            f"the service at {self.address} refused: {message}", response.status_code, code, least
        )

    def _refuse_answer(self, answer: object) -> NoReturn:
        raise ServiceAway(
            f"what answers at {self.address} is not a planner's service of this version: "
            f"{one_line(str(answer), 120)!r}"
            f"; check what listens there, or name another address in {ADDRESS_VARIABLE} or "
            "--service"
        )


def _connected(address: str, token: str, timeout_s: float) -> httpx.Client:
    try:
        import httpx
    except ImportError as error:
        raise UsageError(f"the client needs httpx; {how_to_install('service')}") from error
    if not re.fullmatch(r"[!-~]*", token):
        raise UsageError(
            f"{TOKEN_VARIABLE} holds a blank or a letter that is not ASCII, which tokens do not "
            "have; set it again"
        )
    base, transport = _base(address)
    return httpx.Client(
        base_url=base,
        transport=transport,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=timeout_s,
        trust_env=False,  # a proxy in the environment does not lead to a service of this cluster
        verify=ssl.create_default_context() if base.startswith("https:") else True,
    )


def _base(address: str) -> tuple[str, httpx.HTTPTransport | None]:
    """Return the URL before every path, and the transport if it is a unix socket."""
    import httpx

    if address.startswith("unix:"):
        path = re.sub("^//+", "/", address.removeprefix("unix:"))
        if path:
            return "http://localhost", httpx.HTTPTransport(uds=path)
    elif re.fullmatch(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?", address):
        try:
            return str(httpx.URL(address)), None
        except httpx.InvalidURL:
            pass
    raise UsageError(
        f"the service's address {address!r} is malformed; write http://host:port, "
        f"https://host:port or unix:/path/of/socket, such as {DEFAULT_ADDRESS}"
    )
