"""What is asked hundreds of times in a second, read without FastAPI where it is as usual, in a fifth of the time.

FastAPI documents these routes, and reads whatever is not as usual: it alone says what is wrong with a request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from perseus_planner.service.http.auth import Role, check_role
from perseus_planner.service.schemas import NAME, StragglerReport

Reader = Callable[[Request], Awaitable[dict[str, Any] | None]]
"""Gives the arguments of a route's function but `request`; None: the request is not as usual."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])

LONGEST_POLL_S = 60.0

_MARK = "_usually"
_NAME = re.compile(NAME)
_NUMBER = re.compile(r"[0-9]{1,9}")
_POLL = re.compile(rb"after=([0-9]{1,15})&wait_s=([0-9]{1,2}(?:\.[0-9]{1,6})?)")


def usually(role: Role, read: Reader) -> Callable[[Endpoint], Endpoint]:
    """Have the function of a `UsualRoute` be given what `read` finds, if who asks has that role."""

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _MARK, (role, read))
        return endpoint

    return mark


class UsualRoute(APIRoute):
    """A route whose requests are read as `usually` says, where it says so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        by_fastapi = super().get_route_handler()
        endpoint: Any = self.endpoint
        if not hasattr(endpoint, _MARK):
            return by_fastapi
        role, read = getattr(endpoint, _MARK)

        async def answer(request: Request) -> Response:
            arguments = await read(request)
            if arguments is None:
                return await by_fastapi(request)
            check_role(request.state.role, role)
            response: Response = await endpoint(request=request, **arguments)
            return response

        return answer


async def read_report(request: Request) -> dict[str, Any] | None:
    """A report with its key, if any, in its body, that asks for no waiting."""
    job, headers = request.path_params["job"], request.headers
    as_usual = headers.get("content-type") == "application/json" and "idempotency-key" not in headers
    if not as_usual or request.scope["query_string"] or not _NAME.fullmatch(job):
        return None
    try:
        return {"job": job, "sent": StragglerReport.model_validate_json(await request.body())}
    except ValidationError:
        return None


async def read_poll(request: Request) -> dict[str, Any] | None:
    """A long poll for one pipeline's plan, as the client of this package sends it."""
    job, pipeline = request.path_params["job"], request.path_params["pipeline"]
    asked = _POLL.fullmatch(request.scope["query_string"])
    if asked is None or not _NAME.fullmatch(job) or not _NUMBER.fullmatch(pipeline):
        return None
    wait_s = float(asked[2])
    if wait_s > LONGEST_POLL_S:
        return None
    return {"job": job, "pipeline": int(pipeline), "after": int(asked[1]), "wait_s": wait_s}
