"""The service as a server: on a port or a unix socket, with or without TLS, until SIGTERM or
SIGINT.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import select
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from fastapi import Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from perseus_planner.base import __version__
from perseus_planner.base.errors import UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.extensions.service import models
from perseus_planner.extensions.service.access import (
    TOKENS_VARIABLE,
    Access,
    Limits,
    Token,
    error_answer,
    read_tokens,
)
from perseus_planner.extensions.service.app import create_app
from perseus_planner.extensions.service.live import AsyncService
from perseus_planner.extensions.service.service import Service

_STAND_BY_S = 1.0  # between two tries to take the database over
_STANDING_BY = (
    "another service has the database, and this one stands by; ask the other, or wait until this "
    "one takes over"
)
_log = logging.getLogger(__name__)

_GRACE_S = 5  # how long requests may still take when the server ends
_BACKLOG = 2048
# a thread that computes for long gives way this often; a report waits for that a few times
_SWITCH_S = 0.0005
_LAG_S = 0.1
HEAD_S = 10.0  # within which the head of a request must have come
_DESCRIPTORS = 2**16  # each long poll is one
_OWN_DESCRIPTORS = 64  # for the database and planning processes
_BETWEEN_WARNINGS_S = 60.0
_VANISHED_S = 60  # after which a client that the network no longer reaches is given up


@dataclass(frozen=True)
class Address:
    """Where the service listens."""

    host: str = "127.0.0.1"  #: A name or an IP address of this machine
    port: int = 8400  #: 0 for any free port
    unix: Path | None = None  #: A unix socket to listen on instead; only its owner may connect
    #: PEM files; None for no TLS.
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError("TLS: give both --tls-cert and --tls-key")
        if self.unix is not None and self.certificate is not None:
            raise UsageError(
                "TLS: is not needed on a unix socket, whose data stays on this machine; leave out "
                "--tls-cert and --tls-key"
            )
        if not 0 <= self.port <= 65535:
            raise UsageError(
                f"--port {self.port}: is not a port; give one from 1 to 65535, or 0 for any free "
                "port"
            )


@dataclass(frozen=True)
class Listener:
    """A bound socket, and who may send requests to it."""

    socket: socket.socket  #: The socket
    url: str  #: The address for clients, such as http://127.0.0.1:8400 or unix:/run/planner.sock
    address: Address  #: The address that was requested
    access: Access  #: The tokens of all clients


@contextmanager
def listening(address: Address, tokens: tuple[Token, ...] = ()) -> Iterator[Listener]:
    """Bind a socket to `address`; the file of a unix socket is removed when the block ends.

    Raises:
        UsageError: If it cannot be bound, others can reach it and there are no tokens, or the TLS
            files are unusable.
    """
    _check_tls(address)
    if address.unix is not None:
        with _unix_socket(address.unix) as bound:
            yield Listener(bound, f"unix:{address.unix.absolute()}", address, Access(tokens))
        return
    with _tcp_socket(address, only_loopback=not tokens) as bound:
        host, port = bound.getsockname()[:2]
        scheme = "http" if address.certificate is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if tokens and scheme == "http" and not ip_address(host.partition("%")[0]).is_loopback:
            _log.warning(
                "Tokens are sent in plain text to %s, and whoever reads the network has them; give "
                "--tls-cert and --tls-key, or listen on 127.0.0.1 behind a proxy that has TLS",
                url,
            )
        yield Listener(bound, url, address, Access(tokens, loopback_only=not tokens))


def serve(
    service: Service, listener: Listener, *, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM, or until SIGINT, which raises KeyboardInterrupt; on the main thread.

    Long polls are answered before it returns. `ready` is called when the
    server accepts requests.

    Raises:
        Fenced: If another service has opened the database.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()  # what is there stays, and need not be looked through again and again
    _raise_limit_of_descriptors()
    with _ended_by_sigterm():
        server = server_of(service, listener, ready, Limits())
        server.run(sockets=[listener.socket])
    if server.live.fenced is not None:
        raise server.live.fenced


def stand_by(listener: Listener, take_over: Callable[[], bool]) -> bool:
    """Answer with status 503, except that the process lives, until `take_over` returns True, which
    is called every second on another thread; or until SIGTERM or SIGINT, as for `serve`.

    Returns:
        Whether `take_over` did.
    """
    has_taken = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # Alive, so that no supervisor restarts it; not ready, so that no proxy sends it requests.
        if scope["path"] == "/livez":
            answer = Response(models.to_json(models.Health("ok", __version__)))
        else:
            answer = error_answer(HTTPException(503, _STANDING_BY, {"Retry-After": "1"}))
        await answer(scope, receive, send)

    server = uvicorn.Server(_config(app, listener.address, lifespan="off"))

    def look() -> None:
        if take_over():
            has_taken.set()
            server.should_exit = True

    loop = Loop(look, "planner-stand-by", _STAND_BY_S)
    with _ended_by_sigterm():
        loop.start()
        try:
            # A socket of its own: uvicorn closes it, and the service goes on listening at the
            # first.
            server.run(sockets=[listener.socket.dup()])
        finally:
            loop.stop()
    return has_taken.is_set()


class _Connection(H11Protocol):
    """A connection that is closed if the head of a request does not come, its client has vanished,
    or it takes a descriptor that the service needs for itself.
    """

    _late: asyncio.TimerHandle | None = None
    _warns_from_s: ClassVar[float] = -math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(self.connections) > descriptors - _OWN_DESCRIPTORS:
            transport.abort()
            if self.loop.time() > _Connection._warns_from_s:
                _Connection._warns_from_s = self.loop.time() + _BETWEEN_WARNINGS_S
                _log.warning(
                    "Connections are refused, as %d files may be open; raise the limit, such as "
                    "LimitNOFILE",
                    descriptors,
                )

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is not None and self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()
            self._late = None

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        unread = select.poll()
        unread.register(self.transport.get_extra_info("socket"), select.POLLIN)
        if unread.poll(0):  # the head waits, as the loop lags
            self._late = self.loop.call_later(_LAG_S, self._give_up)
        else:
            self.transport.abort()


class _Server(uvicorn.Server):
    """Reports when it is ready, and ends long polls before it waits for open requests."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], live: AsyncService
    ) -> None:
        super().__init__(config)
        self.live = live
        self._ready = ready
        live.on_fenced = self._end

    def _end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.live.end_waiting()
        await super().shutdown(sockets)


def _raise_limit_of_descriptors() -> None:
    """Raise the soft limit, which is low for programs that use select(), to what is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))


def server_of(
    service: Service, listener: Listener, ready: Callable[[], None], limits: Limits
) -> _Server:
    """Return what serves `service` at `listener` once it runs."""
    app = create_app(service, listener.access, limits)
    return _Server(_config(app, listener.address), ready, app.state.service)


@contextmanager
def tokens_again(access: Access, path: Path | None) -> Iterator[None]:
    """Read the tokens from a file again whenever SIGHUP comes in the block, on the main thread; a
    file that is wrong changes nothing. Without a file, they stay as they are.
    """

    def read(_: int, __: FrameType | None) -> None:
        if path is None:
            _log.warning("There is no file of tokens to read again; give --tokens")
            return
        try:
            access.tokens = read_tokens(path)
        except UsageError as error:
            _log.error("The tokens stay as they were: %s", error)
        else:
            _log.info("The tokens were read again: %d", len(access.tokens))

    before = signal.signal(signal.SIGHUP, read)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _config(app: Any, address: Address, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Connection,
        log_config=None,  # only warnings, on stderr
        access_log=False,
        server_header=False,
        proxy_headers=False,  # clients could forge them
        ws="none",
        # so many are accepted before others get a turn; the queue of the socket itself is longer
        backlog=1,
        timeout_keep_alive=_VANISHED_S,  # `HEAD_S` ends it before
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
        **more,
    )


def _check_tls(address: Address) -> None:
    if address.certificate is None or address.key is None:
        return
    for option, path in (("--tls-cert", address.certificate), ("--tls-key", address.key)):
        if not path.is_file():
            raise UsageError(f"{option} {path}: no such file; name a PEM file")
    try:  # an empty password, so that OpenSSL does not prompt for one
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            address.certificate, address.key, password=lambda: ""
        )
    except OSError as error:
        raise UsageError(
            f"--tls-cert {address.certificate}, --tls-key {address.key}: are not a certificate "
            f"and its key, in PEM and without a password: {_reason(error)}; name such files"
        ) from error


@contextmanager
def _tcp_socket(address: Address, *, only_loopback: bool) -> Iterator[socket.socket]:
    try:
        candidates = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # IPv4 first, also for "localhost".
        family, *_, socket_address = min(
            candidates, key=lambda candidate: candidate[0] != socket.AF_INET
        )
        if only_loopback and not ip_address(socket_address[0]).is_loopback:
            raise UsageError(
                f"--host {address.host}: other machines can reach it, so clients need tokens; "
                f"give --tokens FILE, or set {TOKENS_VARIABLE}, or listen on 127.0.0.1"
            )
        bound = socket.create_server(socket_address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        options = f"--host {address.host} --port {address.port}"
        raise UsageError(
            f"{options}: cannot listen there: {_reason(error)}; give another address"
        ) from error
    with bound:
        # Connections inherit these. asyncio would only set the first on a socket that names its
        # protocol, which this one does not. Without it, an answer in two parts takes 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_S // 2)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_S // 6)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _VANISHED_S)
        yield bound


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as bound:
        try:
            _remove_if_left_behind(path)
            # The file that is bound to takes this mode over, less the umask.
            os.fchmod(bound.fileno(), 0o600)
            bound.bind(str(path))
            bound.listen(_BACKLOG)
        except OSError as error:
            raise UsageError(
                f"--unix {path}: cannot listen there: {error.strerror or error}; give another path"
            ) from error
        inode = path.stat().st_ino
        try:
            yield bound
        finally:
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def _reason(error: OSError | UnicodeError) -> str:
    """Return the system's message, without the address that Python adds."""
    number = getattr(error, "errno", None)
    return (
        os.strerror(number)
        if number and number > 0 and not isinstance(error, ssl.SSLError)
        else str(error)
    )


def _remove_if_left_behind(path: Path) -> None:
    """Remove the socket of a service that was killed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--unix {path}: exists and is not a socket; give another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UsageError(f"--unix {path}: another process listens there; stop it, or give another path")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Survive SIGTERM: uvicorn ends gracefully on it, and then sends it to the process again."""

    def ignore(_: int, __: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGTERM, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
