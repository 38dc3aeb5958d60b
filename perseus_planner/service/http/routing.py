"""What the routes of the service share: which job, which role, what a refusal and an answer look like."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Path, Request, Response, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel

from perseus_planner.service.answer_schemas import ErrorAnswer
from perseus_planner.service.http.auth import Role, check_role
from perseus_planner.service.http.longpoll import AsyncService
from perseus_planner.service.schemas import NAME

Job = Annotated[str, Path(pattern=NAME, description="The job's name.")]


async def _live(request: Request) -> AsyncService:
    service: AsyncService = request.app.state.service
    return service


Live = Annotated[AsyncService, Depends(_live)]


class _Bearer(HTTPBearer):
    """Who has a role; what `security.Guard` found out is not looked up again."""

    def __init__(self, role: Role) -> None:
        super().__init__(
            scheme_name="HTTPBearer", description="A token of the service; none is needed where it has none."
        )
        self._role = role

    async def __call__(self, request: Request) -> None:  # type: ignore[override]  # nobody asks for what it gives
        check_role(request.state.role, self._role)


def for_role(role: Role) -> list[Any]:
    """What a route for that role, and those above it, depends on."""
    return [Security(_Bearer(role))]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route, for OpenAPI."""
    common = (400, 401, 403, 413, 421, 422, 500, 503)
    return {
        status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase}
        for status in sorted({*common, *statuses})
    }


def said(content: type[BaseModel], value: Any, status: int = 200) -> Response:
    """`value` as JSON of that schema."""
    text = content.model_validate(value, from_attributes=True).model_dump_json()
    return Response(text, status, media_type="application/json")
