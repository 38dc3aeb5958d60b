"""How a request is read for the function of its route, and how an answer is written."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import sha256
from perseus_planner.extensions.service.access import Role, check_role, complaint
from perseus_planner.extensions.service.bodies import check_size, read_registration
from perseus_planner.extensions.service.models import Registration, from_json, to_json

if TYPE_CHECKING:
    from perseus_planner.extensions.service.live import AsyncService
    from perseus_planner.extensions.service.service import Service

SCHEME = "HTTPBearer"  #: the scheme of the tokens, as OpenAPI names it
_SMALL_BYTES = 64 * 2**10  # parsed within some milliseconds


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(to_json(value), status, media_type="application/json")


class Call(Request):
    """A request to the service, whose body is to be of one class of `models`."""

    #: That class; None if the route takes no body.
    kind: Any = None
    _text: bytearray | None = None

    @property
    def live(self) -> AsyncService:
        """What it asks."""
        live: AsyncService = self.app.state.service
        return live

    @property
    def service(self) -> Service:
        """The service itself."""
        return self.live.service

    async def body(self) -> Any:
        """Return the body, which is read once, into one place."""
        if self._text is None:
            self._text = bytearray()
            async for part in self.stream():
                self._text += part
        return self._text

    async def json(self) -> Any:
        """Read the body as what the route takes, so that FastAPI has nothing left to convert; a
        large one on a thread, few at once.

        Raises:
            HTTPException: If it is not one, or has too many values.
        """
        # FastAPI of some years ago takes such a body, which a page of another site can send.
        if "content-type" not in self.headers:
            raise HTTPException(422, "body: is not sent as JSON")
        body = await self.body()
        read = partial(_parsed, self.kind, body)
        try:
            return read() if len(body) <= _SMALL_BYTES else await self.live.parse(read)
        except ValidationError as error:
            raise HTTPException(422, complaint(error.errors(), "body.")) from None
        except UsageError as error:
            raise HTTPException(422, str(error)) from None

    async def done(self, change: Future[Any]) -> Response:
        """Return the result of a change once it is on disk."""
        return json_response(await self.live.done(change))

    def page(self, value: Any) -> Response:
        """Return a value, or its JSON, that clients read again and again; 304 if this one has it
        already.
        """
        content = value if isinstance(value, bytes) else to_json(value)
        headers = {"ETag": f'"{sha256(content)}"'}
        if headers["ETag"] in self.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type="application/json")


class CallRoute(APIRoute):
    """Gives its function a `Call`, once the role is checked."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what handles a request."""
        handle = super().get_route_handler()
        # The role is read from where OpenAPI has it, so that both say the same.
        security = (self.openapi_extra or {}).get("security")
        role: Role | None = security[0][SCHEME][0] if security else None
        kind = get_type_hints(self.endpoint).get("sent")

        async def checked(request: Request) -> Response:
            # Before anything is read or computed for somebody who may not ask.
            if role:
                check_role(request.state.role, role)
            call = Call(request.scope, request.receive)
            call.kind = kind
            return await handle(call)

        return checked


def _parsed(kind: Any, body: bytearray) -> Any:
    """Return a value of `kind` from a body, which is empty then: FastAPI holds it until the request
    is answered, and it may have megabytes.

    Raises:
        ValidationError: If it is not one.
        UsageError: If it has too many values.
    """
    try:
        if kind is Registration:
            return read_registration(body)
        check_size(body)
        return from_json(kind, body)
    finally:
        body.clear()
