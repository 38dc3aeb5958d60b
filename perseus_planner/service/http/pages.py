"""Answers for those who look again and again: with a tag, so that nothing is sent twice, and
compressed.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from perseus_planner.base.files import sha256
from perseus_planner.service.schemas import to_json

if TYPE_CHECKING:
    from starlette.requests import Request

    from perseus_planner.service.answers import JobStatus

_QUICK = 1  # the level of gzip: higher ones take much longer and save little


class Page(NamedTuple):
    """JSON with its tag, as it is and compressed."""

    tag: str
    content: bytes
    zipped: bytes

    @classmethod
    def of(cls, content: bytes) -> Page:
        """Return the page with this content; takes some milliseconds for a megabyte."""
        return cls(f'"{sha256(content)}"', content, gzip.compress(content, _QUICK, mtime=0))

    def answer(self, request: Request) -> Response:
        """Return the answer to a request: 304 if the client has the page, and compressed if it
        can read that.
        """
        headers = {"ETag": self.tag, "Vary": "Accept-Encoding"}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.content, headers=headers, media_type="application/json")
        headers["Content-Encoding"] = "gzip"
        return Response(self.zipped, headers=headers, media_type="application/json")


class StatusPages:
    """The page with the status of all jobs: a job's part is made once for each change, the whole
    once for all who ask.

    It may be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[JobStatus, bytes]] = {}
        self._made: tuple[tuple[bytes, ...], Page] | None = None

    def of(self, jobs: Sequence[JobStatus]) -> Page:
        """Return the page with these jobs."""
        with self._lock:
            self._parts = {each.job.name: self._part(each) for each in jobs}
            parts = tuple(content for _, content in self._parts.values())
            if self._made is None or self._made[0] != parts:
                self._made = parts, Page.of(b'{"jobs":[' + b",".join(parts) + b"]}")
            return self._made[1]

    def _part(self, status: JobStatus) -> tuple[JobStatus, bytes]:
        known = self._parts.get(status.job.name)
        return known if known is not None and known[0] is status else (status, to_json(status))
