"""A stand-in for the planner's service: says over HTTP what a test tells it to, and keeps what
it was asked.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Answers = Callable[[str, str, Any], tuple[Any, ...]]
"""(method, path with its query, body) -> status, body, headers if any. A text is sent as it is;
None: no content.
"""


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    body: Any
    authorization: str | None


class StandIn(NamedTuple):
    """Where it listens, and what it was asked."""

    address: str
    asked: list[Asked]


@contextmanager
def stand_in(answers: Answers, port: int = 0) -> Iterator[StandIn]:
    """While the block runs, it listens."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(sent) if sent else None
            asked.append(Asked(self.command, self.path, body, self.headers.get("Authorization")))
            status, content, *more = answers(self.command, self.path, body)
            headers = more[0] if more else {}
            data = (
                b""
                if content is None
                else content.encode()
                if isinstance(content, str)
                else json.dumps(content).encode()
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - as http.server asks for them

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        connections: list[socket.socket] = []  # noqa: RUF012 - of this one server

        def get_request(self) -> Any:
            request, where = super().get_request()
            self.connections.append(request)
            return request, where

        def handle_error(self, *_: Any) -> None:  # who asked may have gone
            pass

    with Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield StandIn(f"http://127.0.0.1:{server.server_address[1]}", asked)
        finally:
            server.shutdown()
            thread.join()
            for connection in server.connections:
                with suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
