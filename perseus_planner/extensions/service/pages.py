"""The dashboard: the files of a page that browsers show."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from perseus_planner.extensions.service.access import STATIC

pages = APIRouter()
_FOLDERS = (("perseus_planner.views", "web"), ("perseus_planner.extensions.service", "static"))
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page only runs scripts of the service, only connects to it, and cannot be framed by other
# pages.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


@cache
def _files() -> dict[str, bytes]:
    """Return the page's files by name, read once. No other files can be requested."""
    paths = [path for package, folder in _FOLDERS for path in (files(package) / folder).iterdir()]
    return {path.name: path.read_bytes() for path in paths if PurePath(path.name).suffix in _TYPES}


@pages.get("/", include_in_schema=False)
def page() -> Response:
    """Return the dashboard."""
    return _file_response("dashboard.html")


@pages.get(STATIC + "{name}", include_in_schema=False)
def static(name: str) -> Response:
    """Return a file of the dashboard."""
    return _file_response(name)


def _file_response(name: str) -> Response:
    if name not in _files():
        raise HTTPException(404)
    media_type = _TYPES[PurePath(name).suffix]
    return Response(_files()[name], media_type=media_type, headers=_PAGE_HEADERS)
