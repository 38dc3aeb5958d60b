"""Speaking with the zeusd daemon over HTTP, through its UNIX socket or TCP, and what its refusals mean.

Source: zeusd 0.5.0, docs/zeusd/api.md, src/auth.rs and src/error.rs. All parameters are query parameters, bodies are
empty, and a 200 to a blocking call means that NVML has done it.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from perseus_planner.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.foreign_text import one_line

if TYPE_CHECKING:
    import httpx

SOCKET_PATH = "/run/zeusd/zeusd.sock"
"""Where zeusd listens unless it is told otherwise."""

TIMEOUT_S = 10.0
"""For how long an answer is waited for."""


class Daemon:
    """A zeusd daemon.

    Args:
        where: its socket's path or its host and port, as errors name it.
        client: an HTTP client whose paths are the daemon's.
        elsewhere: whether it may run on another node than this.
    """

    def __init__(self, where: str, client: httpx.Client, elsewhere: bool) -> None:
        self.where, self.elsewhere = where, elsewhere
        self._client = client

    def ask(self, path: str, **parameters: str) -> Any:
        """What the daemon answers to a GET: JSON, unchecked.

        Raises:
            GpuError: it cannot be reached, refuses, or answers what is not JSON.
        """
        response = self._request("GET", path, parameters)
        try:
            return response.json()
        except (ValueError, RecursionError):  # also of what is not UTF-8
            self.refuse_answer(path, response.text)

    def tell(self, path: str, **parameters: str) -> None:
        """POST, and wait until the daemon has done it.

        Raises:
            GpuError: it cannot be reached, or refuses.
        """
        self._request("POST", path, parameters | {"block": "true"})

    def refuse_answer(self, path: str, answer: object) -> NoReturn:
        """Raise the `GpuError` of an answer that zeusd does not give."""
        raise GpuError(
            f"zeusd at {self.where} answered {path} with {one_line(str(answer), 80)!r}, which zeusd 0.5 does not; see "
            "what listens there, and which version it is"
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _request(self, method: str, path: str, parameters: dict[str, str]) -> httpx.Response:
        import httpx

        advice = "see whether it still runs, and what its log says"
        if method == "POST":
            advice += "; it may or may not have done this, so run `planner reset` then"
        try:
            response = self._client.request(method, path, params=parameters)
        except httpx.TimeoutException as error:
            raise GpuLost(f"zeusd at {self.where} did not answer {path} within {TIMEOUT_S:g} s; {advice}") from error
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.RequestError as error:
            said = one_line(str(error), 80)
            raise GpuLost(f"zeusd at {self.where} broke off at {path} ({said}); {advice}") from error
        if response.status_code != httpx.codes.OK:
            raise self._refusal(path, response)
        return response

    def _unreachable(self, error: httpx.ConnectError) -> GpuError:
        number = _errno(error)
        if number == errno.EACCES:
            return GpuNotPermitted(
                f"this user may not write to the socket of zeusd at {self.where}; start zeusd with "
                "--socket-permissions 666, or with --socket-gid and a group that this user is in"
            )
        why = os.strerror(number) if number else one_line(str(error), 80)
        return GpuLost(
            f"there is no zeusd at {self.where} ({why}); start it with `sudo zeusd serve`, or name its socket in "
            "ZEUSD_SOCK_PATH or its host:port in ZEUSD_HOST_PORT"
        )

    def _refusal(self, path: str, response: httpx.Response) -> GpuError:
        """The error of a status that is not 200.

        The texts are those of nvml-wrapper 0.12, through which zeusd calls NVML; it gives them the status 400 or 500.
        """
        said, by_gpu = _said(response)
        start = f"zeusd at {self.where} refused {path}: {said}; "
        group = "gpu-control" if response.request.method == "POST" else "gpu-read"
        if response.status_code == 401:
            return GpuNotPermitted(f"{start}put a token that `zeusd token issue --scope {group}` made in ZEUSD_TOKEN")
        if response.status_code == 403 and by_gpu:
            return GpuNotPermitted(f"{start}zeusd itself must run as root, in a container with SYS_ADMIN")
        if response.status_code == 403:
            return GpuNotPermitted(f"{start}ask for a token of scope {group}")
        if response.status_code == 404:
            return GpuNotSupported(f"{start}start zeusd 0.5 or later with --enable {group}")
        if "not available on the target device" in said:
            return GpuNotSupported(f"{start}use the other control (SM clock or power limit), or observe mode")
        if "fell off the bus" in said:
            return GpuLost(f"{start}the node needs a reset or a reboot")
        if response.status_code == 400:
            return GpuError(f"{start}see with `nvidia-smi -q` what this GPU takes")
        return GpuError(f"{start}look into the log of zeusd (HTTP {response.status_code})")


def connected() -> Daemon:
    """The daemon that ZEUSD_SOCK_PATH, else ZEUSD_HOST_PORT, else the usual socket names; nothing is asked yet.

    ZEUSD_TOKEN is shown to it where that is set.

    Raises:
        GpuError: httpx is not installed, or a variable is malformed.
    """
    try:
        import httpx
    except ImportError as error:
        raise GpuError("zeusd is reached through httpx; run: pip install 'perseus-planner[zeusd]'") from error
    headers = _authorization(os.environ.get("ZEUSD_TOKEN", "").strip())
    socket, host_port = os.environ.get("ZEUSD_SOCK_PATH"), os.environ.get("ZEUSD_HOST_PORT")
    if host_port and not socket:
        where, base, transport = host_port, _tcp_url(host_port), None
        elsewhere = not re.match(r"localhost:|127\.|\[::1\]:", host_port)
    else:
        where, base, elsewhere = socket or SOCKET_PATH, "http://localhost", False
        transport = httpx.HTTPTransport(uds=where)
    # trust_env=False: a proxy of the environment is not on the way to a daemon of this node.
    client = httpx.Client(base_url=base, transport=transport, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    return Daemon(where, client, elsewhere)


def _authorization(token: str) -> dict[str, str]:
    if not re.fullmatch(r"[!-~]*", token):
        raise GpuError(
            "ZEUSD_TOKEN holds what no token of zeusd does: a space, or a letter that is not ASCII; set it again"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tcp_url(host_port: str) -> str:
    import httpx

    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", host_port)
    with suppress(httpx.InvalidURL):  # what is in brackets may still be no address
        if match and int(match[2]) <= 65535:
            return str(httpx.URL(f"http://{host_port}"))
    raise GpuError(f"ZEUSD_HOST_PORT is {host_port!r}, which is no host:port; set it, for example, to localhost:4938")


def _errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error below those of the HTTP libraries."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    return error.errno if isinstance(error, OSError) else None


def _said(response: httpx.Response) -> tuple[str, bool]:
    """What a refusal says, and whether it is said of a GPU: {"errors": {"0": text}}, {"error": text}, or plain text."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    by_gpu = body.get("errors") if isinstance(body, dict) else None
    if isinstance(by_gpu, dict):
        return one_line(", ".join(map(str, by_gpu.values()))), True
    said = body.get("error", body) if isinstance(body, dict) else body
    return one_line(str(said)) or f"HTTP {response.status_code}", False
