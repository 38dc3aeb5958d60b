"""What all routes share: the role is checked before any of the body is read, and a thread parses
a large body.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError

from perseus_planner.service import schemas
from perseus_planner.service.answers import Error
from perseus_planner.service.http.auth import Role, check_role

Handler = TypeVar("Handler", bound=Callable[..., Any])

_SMALL_BYTES = 64 * 2**10  # parsed within some milliseconds


class _Bearer(HTTPBearer):
    """Documents the role that a route needs and the token in OpenAPI; `CheckedRoute` checks the
    role.
    """

    def __init__(self, role: Role) -> None:
        super().__init__(
            scheme_name="HTTPBearer",
            description="A token of the service, if the service has tokens.",
        )
        self.role = role

    async def __call__(self, request: Request) -> None:  # type: ignore[override]  # the result is not used
        pass


class _ParsedRequest(Request):
    """A request whose body was parsed by a thread; FastAPI takes the value as it is."""

    parsed: Any

    async def body(self) -> bytes:
        return b"parsed"

    async def json(self) -> Any:
        return self.parsed


class CheckedRoute(APIRoute):
    """Checks the role before any of the body is read, and has large bodies parsed by a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what handles a request."""
        handle = super().get_route_handler()
        role = next(
            (
                each.dependency.role
                for each in self.dependencies
                if isinstance(each.dependency, _Bearer)
            ),
            None,
        )
        kind = self.body_field.field_info.annotation if self.body_field else None

        async def checked(request: Request) -> Response:
            if role is not None:
                check_role(request.state.role, role)
            is_json = (
                request.headers.get("content-type", "").partition(";")[0] == "application/json"
            )
            if kind is not None and is_json:
                parts = [part async for part in request.stream()]
                if sum(map(len, parts)) > _SMALL_BYTES:
                    parsed = _ParsedRequest(request.scope, request.receive)
                    parsed.parsed = await request.app.state.service.call(_parsed, kind, parts)
                    return await handle(parsed)
                request._body = b"".join(parts)
            return await handle(request)

        return checked


def _parsed(kind: type[Any], parts: list[bytes]) -> Any:
    """Return a value of `kind` from the parts of a body.

    Raises:
        RequestValidationError: If it is not one.
    """
    try:
        return schemas.from_json(kind, b"".join(parts))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in problems]
        ) from None


def add_route(
    router: APIRouter,
    method: str,
    path: str,
    role: Role | None,
    answer: Any,
    *errors: int,
    also: Mapping[int | str, dict[str, Any]] = MappingProxyType({}),
    **options: Any,
) -> Callable[[Handler], Handler]:
    """Return the decorator of a route for `role` and the roles above it, or for everyone if it is
    None.

    OpenAPI gets the class of its `answer`, its `errors` beside those of all routes, and what it
    `also` answers.
    """
    statuses = sorted({400, 401, 403, 408, 413, 421, 422, 500, 503, *errors})
    failures: dict[int | str, Any] = {
        each: {"model": Error, "description": HTTPStatus(each).phrase} for each in statuses
    }
    dependencies = [] if role is None else [Security(_Bearer(role))]
    return router.api_route(
        path,
        methods=[method],
        dependencies=dependencies,
        response_model=answer,
        responses={**also, **failures},
        **options,
    )
