"""The dashboard at `/`: a page and its scripts and styles, which tell nothing of any job and need no token.

The page asks the service's own API for all that it shows, with the token of whoever looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

PAGE = "/"
STATIC = "/static/"

_FOLDERS = (("perseus_planner.views", "web"), ("perseus_planner.service.dashboard", "static"))
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs what the service itself sends, asks the service alone, and stands in no other page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str


@cache
def _files() -> dict[str, _File]:
    """The page's files by name; all are read once, and nothing else can be asked for."""
    found = [each for package, folder in _FOLDERS for each in (files(package) / folder).iterdir()]
    types = {each: _TYPES.get(PurePath(each.name).suffix) for each in found}
    return {each.name: _File(each.read_bytes(), media_type) for each, media_type in types.items() if media_type}


def is_open(path: str) -> bool:
    """Whether that address is the page or one of its files, which are there without a token."""
    return path == PAGE or (path.startswith(STATIC) and path.removeprefix(STATIC) in _files())


@router.get(PAGE)
async def page() -> Response:
    """The dashboard."""
    return _said("dashboard.html")


@router.get(STATIC + "{name}")
async def static(name: str) -> Response:
    """A file of the dashboard."""
    return _said(name)


def _said(name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    return Response(file.content, media_type=file.media_type, headers=_HEADERS)
