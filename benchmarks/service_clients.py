"""Clients of the load benchmark, as lean as Python lets them be: HTTP/1.1 by hand, on protocols of
asyncio.

Run as a program, by service_load.py. `post` posts bodies on a schedule, or as fast as they are
answered; `lead` has many long polls open; `look` asks for pages again and again. Each reads what it
is to do from stdin, one line of JSON, and says what happened on stdout, one line. Times are of the
monotonic clock, which is the same in all processes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Answered = Callable[[int, bytes], None]
"""Is told the status and the body of an answer."""


class Connection(asyncio.Protocol):
    """One connection that is kept alive; one request at a time.

    Attributes:
        lost: whether it was closed.
        tag: the tag of the last answer; empty without one.
    """

    def __init__(self) -> None:
        self.tag = ""
        self._read = bytearray()
        self._answered: Answered | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to write."""
        self._transport: Any = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing is answered any more."""
        self.lost = True

    def ask(self, request: bytes, answered: Answered) -> None:
        """Send a whole request."""
        self._answered = answered
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Read a whole answer; the service gives the length of each."""
        self._read += data
        head = self._read.find(b"\r\n\r\n")
        if head < 0:
            return
        status = int(self._read[9:12])
        end = (
            head
            + 4
            + (0 if status in (204, 304) else int(self._header(b"content-length", head) or 0))
        )
        if len(self._read) < end:
            return
        self.tag = self._header(b"etag", head).decode()
        body = bytes(self._read[head + 4 : end])
        del self._read[:end]
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(status, body)

    def _header(self, name: bytes, head: int) -> bytes:
        """The value of a header; empty without it."""
        begin = self._read.find(b"\r\n" + name + b": ", 0, head) + len(name) + 4
        return (
            bytes(self._read[begin : self._read.index(b"\r\n", begin)])
            if begin > len(name) + 3
            else b""
        )


def get(path: str, headers: str = "") -> bytes:
    """A request; each header ends its line."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode()


def post(path: str, body: str) -> bytes:
    """A request with JSON."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body.encode())}\r\n\r\n{body}".encode()


async def connections(port: int, count: int) -> list[Connection]:
    """That many, open."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


class Posting:
    """Posts requests over a few connections; a request waits for a free one, and its waiting
    counts.
    """

    def __init__(self, requests: Sequence[bytes], free: Sequence[Connection]) -> None:
        self.rows: list[
            tuple[float, float, float, int, str]
        ] = []  # due, sent, answered, status, body
        self._requests = requests
        self._free = deque(free)
        self._due: deque[tuple[int, float]] = deque()
        self._next = 0

    async def on_schedule(self, per_s: float) -> None:
        """All requests, one each 1 / `per_s` seconds, whatever becomes of those before."""
        begin_s = time.monotonic() + 0.1
        while self._next < len(self._requests):
            await asyncio.sleep(begin_s + self._next / per_s - time.monotonic())
            while (
                self._next < len(self._requests)
                and begin_s + self._next / per_s <= time.monotonic()
            ):
                self._due.append((self._next, begin_s + self._next / per_s))
                self._next += 1
            self._send()
        await self._all_answered()

    async def as_answered(self, for_s: float) -> None:
        """Requests for so many seconds, on each connection the next one once one is answered."""
        end_s = time.monotonic() + for_s
        for _ in range(len(self._free)):
            self._take_next(end_s)
        await self._all_answered()

    def _take_next(self, end_s: float) -> None:
        now_s = time.monotonic()
        if now_s < end_s and self._next < len(self._requests):
            self._due.append((self._next, now_s))
            self._next += 1
            self._send(lambda: self._take_next(end_s))

    def _send(self, then: Callable[[], None] = lambda: None) -> None:
        while self._due and self._free:
            (number, due_s), connection, sent_s = (
                self._due.popleft(),
                self._free.popleft(),
                time.monotonic(),
            )

            def answered(
                status: int,
                body: bytes,
                due_s: float = due_s,
                sent_s: float = sent_s,
                of: Connection = connection,
            ) -> None:
                self.rows.append((due_s, sent_s, time.monotonic(), status, body.decode()))
                self._free.append(of)
                self._send(then)
                then()

            connection.ask(self._requests[number], answered)

    async def _all_answered(self) -> None:
        while len(self.rows) < self._next:
            await asyncio.sleep(0.05)


class Leader:
    """Waits for plans of a job, again and again."""

    def __init__(self, job: str, version: int, connection: Connection) -> None:
        self.seen: list[tuple[int, float]] = []  # version, when it came
        self.strange: list[int] = []  # other statuses than those for plans and for none
        self._path = f"/v1/jobs/{job}/plans?after="
        self._version = version
        self._connection = connection

    def wait(self) -> None:
        """Ask for what is newer than it has."""
        self._connection.ask(get(f"{self._path}{self._version}&wait_s=60"), self._answered)

    def _answered(self, status: int, body: bytes) -> None:
        if status == 200:
            self._version = int(body[len(b'{"version":') : body.index(b",")])
            self.seen.append((self._version, time.monotonic()))
        elif status != 204:
            self.strange.append(status)
            return
        self.wait()


class Visitor:
    """Asks for a page every so many seconds, as a browser does: compressed, and only if it is
    another one.
    """

    def __init__(self, path: str, every_s: float, port: int) -> None:
        self.rows: list[
            tuple[float, float, float, int, int]
        ] = []  # due, sent, answered, status, bytes of the body
        self._path, self._every_s, self._port, self._tag = path, every_s, port, ""

    async def visit(self, for_s: float) -> None:
        """Do so for a while."""
        (connection,) = await connections(self._port, 1)
        begin_s = due_s = time.monotonic()
        while due_s < begin_s + for_s:
            await asyncio.sleep(due_s - time.monotonic())
            if connection.lost:  # the service has closed it, as nothing was asked for some seconds
                (connection,) = await connections(self._port, 1)
            answered, sent_s = asyncio.get_running_loop().create_future(), time.monotonic()
            tag = f"if-none-match: {self._tag}\r\n" if self._tag else ""
            connection.ask(
                get(self._path, f"accept-encoding: gzip\r\n{tag}"),
                lambda *answer, of=answered: of.set_result(answer),
            )
            status, body = await answered
            self._tag = connection.tag
            self.rows.append((due_s, sent_s, time.monotonic(), status, len(body)))
            due_s += self._every_s


async def post_bodies(wanted: dict[str, Any]) -> None:
    """Post `bodies` (path, JSON) at `per_s`, or where that is null for `for_s` seconds as fast
    as they are answered.
    """
    requests = [post(path, body) for path, body in wanted["bodies"]]
    posting = Posting(requests, await connections(wanted["port"], wanted["connections"]))
    print("begins", flush=True)
    if wanted["per_s"] is None:
        await posting.as_answered(wanted["for_s"])
    else:
        await posting.on_schedule(wanted["per_s"])
    print("answered", flush=True)
    print(json.dumps(posting.rows), flush=True)


async def look(wanted: dict[str, Any]) -> None:
    """Visit `pages` (path, every so many seconds) for `for_s` seconds, each by a connection of
    its own.
    """
    visitors = [Visitor(*page, wanted["port"]) for page in wanted["pages"]]
    await asyncio.gather(*(each.visit(wanted["for_s"]) for each in visitors))
    print(json.dumps([each.rows for each in visitors]), flush=True)


async def lead(wanted: dict[str, Any]) -> None:
    """Be the `leaders` (job, version known) until stdin ends."""
    known = wanted["leaders"]
    opened = await connections(wanted["port"], len(known))
    leaders = [Leader(*each, connection) for each, connection in zip(known, opened, strict=True)]
    for leader in leaders:
        leader.wait()
    print("waiting", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    lost = sum(each.lost for each in opened)
    seen, strange = [each.seen for each in leaders], [each.strange for each in leaders]
    print(json.dumps({"seen": seen, "strange": strange, "lost": lost}), flush=True)


if __name__ == "__main__":
    asyncio.run(
        {"post": post_bodies, "lead": lead, "look": look}[sys.argv[1]](
            json.loads(sys.stdin.readline())
        )
    )
