"""The dashboard at `/`: a page with its scripts and styles, which contain nothing about jobs and
need no token.

The page asks the service's API for everything it shows, with the viewer's token.
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
# The page only runs scripts of the service, only connects to it, and cannot be framed by other
# pages.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str


@cache
def _files() -> dict[str, _File]:
    """Return the page's files by name, read once. No other files can be requested."""
    paths = [each for package, folder in _FOLDERS for each in (files(package) / folder).iterdir()]
    types = {each: _TYPES.get(PurePath(each.name).suffix) for each in paths}
    return {
        each.name: _File(each.read_bytes(), media_type)
        for each, media_type in types.items()
        if media_type
    }


def is_open(path: str) -> bool:
    """Whether a path is the page or one of its files, which need no token."""
    return path == PAGE or (path.startswith(STATIC) and path.removeprefix(STATIC) in _files())


@router.get(PAGE)
async def page() -> Response:
    """Return the dashboard."""
    return _file_response("dashboard.html")


@router.get(STATIC + "{name}")
async def static(name: str) -> Response:
    """Return a file of the dashboard."""
    return _file_response(name)


def _file_response(name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    return Response(file.content, media_type=file.media_type, headers=_HEADERS)
