"""How a request becomes a call of the function of its route, and what that returns an answer."""

from __future__ import annotations

import gzip
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from perseus_planner.base.files import sha256
from perseus_planner.extensions.service.access import Role, check_role
from perseus_planner.extensions.service.bodies import check_size, read_registration
from perseus_planner.extensions.service.models import Registration, from_json, to_json

if TYPE_CHECKING:
    from fastapi.dependencies.models import Dependant

    from perseus_planner.extensions.service.live import AsyncService
    from perseus_planner.extensions.service.service import Service

SCHEME = "HTTPBearer"  #: the scheme of the tokens, as OpenAPI names it
_QUICK = 1  # the level of gzip: higher ones take much longer and save little
_READS_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


def page_response(request: Request, value: Any) -> Response:
    """Return a value, or its JSON, as the answer to a request: 304 if the client has it, and
    compressed if it can read that; takes some milliseconds for a megabyte.
    """
    content = value if isinstance(value, bytes) else to_json(value)
    headers = {"ETag": f'"{sha256(content)}"', "Vary": "Accept-Encoding"}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if _READS_GZIP.search(request.headers.get("accept-encoding", "")):
        content = gzip.compress(content, _QUICK, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


_SMALL_BYTES = 64 * 2**10  # parsed within some milliseconds


class Call(Request):
    """A request to the service."""

    @property
    def live(self) -> AsyncService:
        """What it asks."""
        live: AsyncService = self.app.state.service
        return live

    @property
    def service(self) -> Service:
        """The service itself."""
        return self.live.service


class CheckedRoute(APIRoute):
    """Checks the role before any of the body is read, and parses it, large ones on a thread; and
    writes the value that is answered, or what it becomes once it is on disk.

    FastAPI describes a route and finds out what its function takes. The first parameter is the
    call. What is asked is read here, in one step for all other parameters.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what handles a request."""
        # The role is read from where OpenAPI has it, so that both say the same.
        security = (self.openapi_extra or {}).get("security")
        role: Role | None = security[0][SCHEME][0] if security else None
        hints = get_type_hints(self.endpoint, include_extras=True)
        read_parameters = _reader(self.dependant, hints)
        body = next(iter(self.dependant.body_params), None)

        async def checked(request: Request) -> Response:
            # Before anything is read or computed for somebody who may not ask.
            if role:
                check_role(request.state.role, role)
            call = Call(request.scope, request.receive)
            values = read_parameters(call)
            if body is not None:
                values[body.name] = await _sent(call, hints[body.name])
            # Pages are read again and again: they are compared, and compressed on a thread, as that
            # takes milliseconds.
            if 304 in self.responses:
                return await call.live.call(
                    lambda: page_response(call, self.endpoint(call, **values))
                )
            # A future is a change that has to reach the disk before it is answered.
            answer = self.endpoint(call, **values)
            if isinstance(answer, Future):
                answer = await call.live.done(answer)
            elif inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Response):
                return answer
            if answer is None:
                return Response(status_code=204)
            return json_response(answer, self.status_code or 200)

        return checked


def _reader(dependant: Dependant, hints: Mapping[str, Any]) -> Callable[[Request], dict[str, Any]]:
    """Return what reads the parameters of a path, a query and headers."""
    where_of = {
        field.name: (where, field.alias)
        for where, those in (
            ("path", dependant.path_params),
            ("query", dependant.query_params),
            ("header", dependant.header_params),
        )
        for field in those
    }
    kinds = {name: hints[name] for name in where_of}
    adapter = TypeAdapter[Any](TypedDict("Parameters", kinds, total=False))  # type: ignore[operator]

    def read(request: Request) -> dict[str, Any]:
        sent: dict[str, Mapping[str, Any]] = {
            "path": request.path_params,
            "query": request.query_params,
            "header": request.headers,
        }
        given = {
            name: sent[where][alias]
            for name, (where, alias) in where_of.items()
            if alias in sent[where]
        }
        try:
            values: dict[str, Any] = adapter.validate_python(given)
        except ValidationError as error:
            where, _ = where_of[str(error.errors()[0]["loc"][0])]
            raise _refused(error, where) from None
        return values

    return read


async def _sent(call: Call, kind: Any) -> Any:
    """Read the body of a request as a value of `kind`; a large one on a thread, few at once."""
    if call.headers.get("content-type", "").partition(";")[0] != "application/json":
        problem = {"type": "json", "loc": ("body",), "msg": "is not sent as JSON"}
        raise RequestValidationError([problem])
    body = bytearray()
    async for part in call.stream():
        body += part
    if len(body) <= _SMALL_BYTES:
        return _parsed(kind, body)
    return await call.live.parse(partial(_parsed, kind, body))


def _parsed(kind: Any, body: bytearray) -> Any:
    """Return a value of `kind` from a body.

    Raises:
        RequestValidationError: If it is not one.
        UsageError: If it has too many values.
    """
    try:
        if kind is Registration:
            return read_registration(body)
        check_size(body)
        return from_json(kind, body)
    except ValidationError as error:
        raise _refused(error, "body") from None


def _refused(error: ValidationError, where: str) -> RequestValidationError:
    problems = error.errors(include_url=False, include_input=False)
    return RequestValidationError(
        [{**problem, "loc": (where, *problem["loc"])} for problem in problems]
    )


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(to_json(value), status, media_type="application/json")
