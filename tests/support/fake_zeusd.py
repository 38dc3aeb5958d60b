"""A stand-in for the zeusd daemon, version 0.5.0: a real HTTP server on a real UNIX socket, or on a
TCP port.

    with FakeZeusd(path, [KeptGpu("0000:07:00.0")]) as zeusd:      # its GPU 0
        ...
        assert zeusd.gpus[0].locked_mhz == (1200, 1200)

It is as strict as zeusd is (docs/zeusd/api.md, src/routes, src/auth.rs): all parameters in the
query, none that it does not know and none left out, `block` and `gpu_ids` on every write, a token
of the right scope where a key is given, 404 for a group that is off, and {"errors": {"0": text}}
with the texts of nvml-wrapper and the status that goes with them. It is stricter than zeusd in one
thing: a body that is not empty is refused.

What is behind it is either kept by itself (`KeptGpu`) or a GPU of NVML (`NvmlGpu`), on which it
acts as zeusd does."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

NOT_PERMITTED, NOT_SUPPORTED, INVALID, LOST = 4, 3, 2, 15

# nvmlReturn_t -> (status, text): zeusd's src/error.rs and nvml-wrapper's src/error.rs; its
# spelling, too.
REFUSALS = {
    INVALID: (400, "NVML error: a supplied argument was invalid"),
    NOT_SUPPORTED: (
        400,
        "NVML error: the requested operation is not available on the target device",
    ),
    NOT_PERMITTED: (
        403,
        "NVML error: the current user does not have permission to perform this operation",
    ),
    LOST: (500, "NVML error: device fell off the bus or has otherwise become inacessible"),
}
UNKNOWN = (500, "NVML error: an internal driver error occured")


class Refused(Exception):
    """NVML returned an error, an `nvmlReturn_t`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class KeptGpu:
    """A GPU that only remembers its settings."""

    pci_address: str
    name: str = "NVIDIA A100-SXM4-80GB"
    locked_mhz: tuple[int, int] | None = None
    limited_mw: int = 400_000
    refuses: int = 0  #: with this code, if it is not 0

    def _called(self) -> None:
        if self.refuses:
            raise Refused(self.refuses)

    def lock(self, least_mhz: int, greatest_mhz: int) -> None:
        self._called()
        self.locked_mhz = (least_mhz, greatest_mhz)

    def unlock(self) -> None:
        self._called()
        self.locked_mhz = None

    def limit(self, limit_mw: int) -> None:
        self._called()
        self.limited_mw = limit_mw


class NvmlGpu:
    """A GPU of NVML, which this process sets through nvidia-ml-py, as if it were root."""

    def __init__(self, index: int) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pci = pynvml.nvmlDeviceGetPciInfo(self._handle)
        self.pci_address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
        self.name = pynvml.nvmlDeviceGetName(self._handle)

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            raise Refused(error.value) from error

    def lock(self, least_mhz: int, greatest_mhz: int) -> None:
        self._call("nvmlDeviceSetGpuLockedClocks", least_mhz, greatest_mhz)

    def unlock(self) -> None:
        self._call("nvmlDeviceResetGpuLockedClocks")

    def limit(self, limit_mw: int) -> None:
        self._call("nvmlDeviceSetPowerManagementLimit", limit_mw)


def token(key: bytes, scopes: Sequence[str], expires: int | None = None) -> str:
    """Return a token like `zeusd token issue`: a JWT signed with HS256; `expires` in Unix
    seconds, None for never.
    """
    claims = {"sub": "alice", "scopes": list(scopes)} | (
        {"exp": expires} if expires is not None else {}
    )
    signed = f"{_base64({'alg': 'HS256', 'typ': 'JWT'})}.{_base64(claims)}"
    return f"{signed}.{_signature(key, signed)}"


def _base64(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def _signature(key: bytes, signed: str) -> str:
    return (
        base64.urlsafe_b64encode(hmac.digest(key, signed.encode(), hashlib.sha256))
        .rstrip(b"=")
        .decode()
    )


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    body: object = ""  #: a str is sent as plain text, anything else as JSON


@dataclass(frozen=True)
class Request:
    """An HTTP request."""

    method: str
    path: str
    parameters: dict[str, str] = field(default_factory=dict)


class FakeZeusd:
    """The daemon, which runs inside the block.

    Args:
        where: the path of its socket, or (host, port) with port 0 for any that is free.
        gpus: what its indices 0, 1, ... stand for.
        groups: the API groups that are enabled.
        key: of the tokens; None: none is needed.
    """

    def __init__(
        self,
        where: Path | tuple[str, int],
        gpus: Sequence[Any],
        groups: Sequence[str] = ("gpu-control", "gpu-read"),
        key: bytes | None = None,
    ) -> None:
        self.gpus = gpus
        self.groups = groups
        self.key = key
        self.requests: list[Request] = []  #: all that came
        self.answers: dict[str, Answer] = {}  #: path -> what is answered there, whatever is asked
        self.breaks_off_at = ""  #: a path at which the connection is cut without an answer
        self.waits_at = ""  #: a path at which nothing is answered before the end
        self.ended = threading.Event()
        server = _UnixServer if isinstance(where, Path) else _TcpServer
        self._server: Any = server(str(where) if isinstance(where, Path) else where, _Handler)
        self._server.zeusd = self
        self.port = None if isinstance(where, Path) else self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def __enter__(self) -> FakeZeusd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it like a killed process: connections are cut, and the file of the socket stays."""
        self.ended.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.cut_connections()
        self._server.server_close()

    def answer(self, request: Request, authorization: str) -> Answer:
        """Return the answer of zeusd."""
        self.requests.append(request)
        refusal = self._gate(request, authorization)
        if refusal:
            return refusal
        if request.path in self.answers:
            return self.answers[request.path]
        if (request.method, request.path) == ("GET", "/discover"):
            return Answer(200, self._discovered())
        command = _COMMANDS.get((request.method, request.path.removeprefix("/gpu/")))
        if command is None:
            return Answer(404)
        return self._done(request, *command)

    def _gate(self, request: Request, authorization: str) -> Answer | None:
        if request.path == "/discover":
            return None
        verb = request.path.removeprefix("/gpu/").split("_")[0]
        scope = "gpu-control" if verb in ("set", "reset") else "gpu-read"
        if scope not in self.groups:
            return Answer(404, {"error": f"API group '{scope}' is not enabled on this server."})
        if self.key is None:
            return None
        return _unauthorized(self.key, scope, authorization)

    def _discovered(self) -> object:
        gpus = [
            {
                "id": index,
                "name": gpu.name,
                "pci_address": gpu.pci_address,
                "cumulative_energy_available": True,
            }
            for index, gpu in enumerate(self.gpus)
        ]
        needs_token = self.key is not None
        return {
            "gpus": gpus,
            "cpus": [],
            "enabled_api_groups": list(self.groups),
            "auth_required": needs_token,
        }

    def _done(
        self, request: Request, types: dict[str, Callable[[str], Any]], act: Callable[..., Any]
    ) -> Answer:
        try:
            values = _parsed(request, types)
            indices = sorted({int(index) for index in values.pop("gpu_ids").split(",")})
        except ValueError as error:
            return Answer(400, f"Query deserialize error: {error}")
        if indices[-1] >= len(self.gpus):
            return Answer(400, f"GPU index {indices[-1]} does not exist.")
        values.pop("block", None)
        results, errors = {}, {}
        for index in indices:
            try:
                results[str(index)] = act(self.gpus[index], **values)
            except Refused as error:
                errors[str(index)] = REFUSALS.get(error.code, UNKNOWN)
        if errors:
            worst = max(status for status, _ in errors.values())
            return Answer(worst, {"errors": {index: text for index, (_, text) in errors.items()}})
        if request.method == "POST":
            return Answer(200)
        return Answer(200, results)


def _parsed(request: Request, types: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    wanted = {"gpu_ids": str} | types | ({"block": _boolean} if request.method == "POST" else {})
    if unknown := request.parameters.keys() - wanted.keys():
        raise ValueError(f"unknown field `{sorted(unknown)[0]}`")
    if missing := wanted.keys() - request.parameters.keys():
        raise ValueError(f"missing field `{sorted(missing)[0]}`")
    return {name: wanted[name](text) for name, text in request.parameters.items()}


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("provided string was not `true` or `false`")
    return text == "true"


def _u32(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise ValueError("invalid digit found in string")
    return int(text)


_CLOCKS: dict[str, Callable[[str], Any]] = {"min_clock_mhz": _u32, "max_clock_mhz": _u32}
_COMMANDS: dict[tuple[str, str], tuple[dict[str, Callable[[str], Any]], Callable[..., Any]]] = {
    ("POST", "set_gpu_locked_clocks"): (
        _CLOCKS,
        lambda gpu, min_clock_mhz, max_clock_mhz: gpu.lock(min_clock_mhz, max_clock_mhz),
    ),
    ("POST", "reset_gpu_locked_clocks"): ({}, lambda gpu: gpu.unlock()),
    ("POST", "set_power_limit"): (
        {"power_limit_mw": _u32},
        lambda gpu, power_limit_mw: gpu.limit(power_limit_mw),
    ),
}


def _unauthorized(key: bytes, scope: str, authorization: str) -> Answer | None:
    if not authorization.startswith("Bearer "):
        wanted = "Authentication required. Provide an Authorization: Bearer <token> header."
        return Answer(401, {"error": wanted})
    signed, _, signature = authorization.removeprefix("Bearer ").rpartition(".")
    if signature != _signature(key, signed):
        return Answer(401, {"error": "Invalid token: InvalidSignature"})
    claims = json.loads(base64.urlsafe_b64decode(signed.split(".")[1] + "=="))
    if claims.get("exp", time.time() + 1) < time.time():
        return Answer(401, {"error": "Token has expired."})
    if scope in claims["scopes"]:
        return None
    scopes = ", ".join(f"'{each}'" for each in claims["scopes"])
    lacks = (
        f"Token for user '{claims['sub']}' lacks required scope '{scope}'. Token scopes: [{scopes}]"
    )
    return Answer(403, {"error": lacks})


class _Server(ThreadingMixIn):
    block_on_close = True  # a connection that is cut ends its thread
    zeusd: FakeZeusd

    def process_request(self, request: Any, client_address: Any) -> None:
        self.__dict__.setdefault("connections", []).append(request)
        super().process_request(request, client_address)

    def cut_connections(self) -> None:
        for connection in self.__dict__.get("connections", ()):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the client has closed it
                continue


class _UnixServer(_Server, UnixStreamServer):
    pass


class _TcpServer(_Server, TCPServer):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as zeusd keeps them
    server: Any

    def do_GET(self) -> None:
        zeusd, url = self.server.zeusd, urlsplit(self.path)
        request = Request(
            self.command, url.path, dict(parse_qsl(url.query, keep_blank_values=True))
        )
        if url.path == zeusd.waits_at:
            zeusd.ended.wait()
        if url.path in (zeusd.waits_at, zeusd.breaks_off_at):
            zeusd.requests.append(request)
            self.close_connection = True
            return
        body = int(self.headers.get("Content-Length") or 0)
        answer = (
            Answer(400, "no body is wanted")
            if body
            else zeusd.answer(request, self.headers.get("Authorization", ""))
        )
        self._send(answer)

    do_POST = do_GET  # noqa: N815  # the name that http.server looks for

    def _send(self, answer: Answer) -> None:
        text = isinstance(answer.body, str)
        body = (
            answer.body.encode()
            if isinstance(answer.body, str)
            else json.dumps(answer.body).encode()
        )
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/plain" if text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ValueError):  # cut by the client, or by `cut_connections`
            self.close_connection = True
