"""A GPU that NVML reads and the zeusd daemon sets, for jobs without privilege.

The daemon may see more GPUs than this container does, so the GPU is looked up by its PCI address,
never by its index. ZEUSD_SOCK_PATH names the daemon's UNIX socket, ZEUSD_HOST_PORT its address if
it listens on TCP, and ZEUSD_TOKEN the token that it asks for, if any.

Requests and answers are those of zeusd 0.5.0 (docs/zeusd/api.md, src/auth.rs and src/error.rs of
Zeus): parameters are query parameters, bodies are empty, and status 200 to a blocking request means
that NVML has done it.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    how_to_install,
    one_line,
)
from perseus_planner.base.wires import decode
from perseus_planner.gpu.nvml.device import LIBRARY_NOT_FOUND
from perseus_planner.gpu.nvml.gpu import NvmlReader, open_device
from perseus_planner.gpu.protocol import check_clock

if TYPE_CHECKING:
    import httpx

    from perseus_planner.gpu.nvml.device import NvmlDevice

SOCKET_PATH = "/run/zeusd/zeusd.sock"
"""Default socket of zeusd."""

TIMEOUT_S = 10.0
"""How long to wait for an answer."""

_KEEPS = (
    "zeusd does not undo settings when the process that asked for them ends; `planner reset` does"
)


class ZeusdGpu(NvmlReader):
    """A GPU that zeusd sets.

    Args:
        device: The GPU.
        daemon: Connection to zeusd; closed with this GPU.

    Raises:
        GpuError: If the daemon does not have the GPU.
    """

    def __init__(self, device: NvmlDevice, daemon: Daemon) -> None:
        super().__init__(device, f"zeusd:{device.uuid}")
        bus_id = device.call("nvmlDeviceGetPciInfo", what="read its PCI address").busId
        self._daemon = daemon
        # Not NVML's index: the daemon may see more GPUs than this container.
        self._index = daemon.index_of(bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id))

    def warnings(self) -> tuple[str, ...]:
        """The warnings of NVML, and those about zeusd."""
        if not self._daemon.is_remote:
            return (*super().warnings(), _KEEPS)
        remote = (
            f"zeusd is reached over the network, at {self._daemon.address}: make sure that it "
            "runs on this node, because the GPUs of another node may have the same PCI addresses"
        )
        return (*super().warnings(), remote, _KEEPS)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock."""
        check_clock(self, clock_mhz)
        self._post("set_gpu_locked_clocks", min_clock_mhz=clock_mhz, max_clock_mhz=clock_mhz)

    def reset_clocks(self) -> None:
        """Unlock the SM clock."""
        self._post("reset_gpu_locked_clocks")

    def _limit_power(self, limit_w: float) -> None:
        self._post("set_power_limit", power_limit_mw=round(1000 * limit_w))

    def close(self) -> None:
        """Give NVML back, and close the connection."""
        super().close()
        self._daemon.close()

    def _post(self, command: str, **values: int) -> None:
        self._daemon.request("POST", f"/gpu/{command}", gpu_ids=self._index, block=True, **values)


def open_zeusd(which: str) -> ZeusdGpu:
    """Open the GPU that NVML finds by `which`, such as an index or UUID, to be set by zeusd.

    Raises:
        GpuError: If NVML cannot open the GPU, or zeusd cannot be reached or does not have it.
    """
    daemon = Daemon()
    try:
        return open_device(which, lambda device: ZeusdGpu(device, daemon))
    # Whatever failed, nobody else can close the connection.
    except BaseException as error:
        daemon.close()
        # Only the missing library has advice of its own here; what else failed says what to do
        # itself.
        if getattr(error.__cause__, "value", None) != LIBRARY_NOT_FOUND:
            raise
        raise GpuError(
            f"zeusd:{which}: zeusd only sets GPUs, NVML reads them, and libnvidia-ml.so.1 is not "
            "here; in a container, mount it by setting NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        ) from error


class _DiscoveredGpu(msgspec.Struct):
    id: int
    pci_address: str


class _Discovery(msgspec.Struct):
    gpus: list[_DiscoveredGpu]


class Daemon:
    """Connection to the zeusd daemon that the environment names; nothing is sent when it is made.

    Raises:
        GpuError: If httpx is not installed, or a variable is malformed.
    """

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise GpuError(f"zeusd is reached through httpx; {how_to_install('zeusd')}") from error
        headers = _authorization(os.environ.get("ZEUSD_TOKEN", "").strip())
        socket = os.environ.get("ZEUSD_SOCK_PATH")
        host_port = os.environ.get("ZEUSD_HOST_PORT")
        # If both are named, the socket: it cannot belong to another node.
        if host_port and not socket:
            self.address = host_port
            base = _tcp_url(host_port)
            transport = None
        else:
            self.address = socket or SOCKET_PATH
            base = "http://localhost"
            transport = httpx.HTTPTransport(uds=self.address)
        #: Whether it may run on another node.
        self.is_remote = transport is None and not re.match(
            r"localhost:|127\.|\[::1\]:", self.address
        )
        # trust_env=False: no proxy stands between this process and a daemon of its node.
        self._client = httpx.Client(
            base_url=base, transport=transport, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )

    def index_of(self, bus_id: str) -> int:
        """Return the daemon's index of the GPU at a PCI address.

        Raises:
            GpuError: If the daemon cannot be reached, is not zeusd, or does not have the GPU.
        """
        # The daemon's indices are its own; the PCI address is what both sides call the GPU.
        response = self.request("GET", "/discover")
        try:
            gpus = decode(response.content, _Discovery).gpus
            indices = {pci_address(gpu.pci_address): gpu.id for gpu in gpus}
        # Something else may listen there and answer with anything.
        except ValueError:
            raise GpuError(
                f"zeusd at {self.address} answered /discover with "
                f"{one_line(response.text, 80)!r}, which zeusd 0.5 does not; check what listens "
                "there, and its version"
            ) from None
        wanted = pci_address(bus_id)
        if wanted not in indices:
            listed = (
                ", ".join(f"{index} at {address}" for address, index in indices.items()) or "none"
            )
            raise GpuError(
                f"zeusd at {self.address} has no GPU {wanted!r}; it has {listed}: check that it "
                "is the zeusd of this node, started with --enable gpu-control"
            )
        return indices[wanted]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def request(self, method: str, path: str, **parameters: int) -> httpx.Response:
        """Send a request, and wait until the daemon has done it.

        Raises:
            GpuError: If the daemon cannot be reached, or refuses.
        """
        import httpx

        # A reading can be repeated; a setting may be in force although its answer never came.
        advice = "check whether it still runs, and its log"
        if method == "POST":
            advice += "; the request may or may not have taken effect, so run `planner reset`"
        try:
            response = self._client.request(method, path, params=parameters)
        except httpx.TimeoutException as error:
            raise GpuLost(
                f"zeusd at {self.address} did not answer {path} within {TIMEOUT_S:g} s; {advice}"
            ) from error
        # The most frequent fault, a daemon that is not started, gets its own advice.
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.RequestError as error:
            reason = one_line(str(error), 80)
            raise GpuLost(
                f"zeusd at {self.address} broke off at {path} ({reason}); {advice}"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise self._refusal(path, response)
        return response

    def _unreachable(self, error: httpx.ConnectError) -> GpuError:
        number = _errno(error)
        if number == errno.EACCES:
            return GpuNotPermitted(
                f"this user may not write to the socket of zeusd at {self.address}; start zeusd "
                "with --socket-permissions 666, or with --socket-gid and a group of this user"
            )
        reason = os.strerror(number) if number else one_line(str(error), 80)
        return GpuLost(
            f"there is no zeusd at {self.address} ({reason}); start it with `sudo zeusd serve`, "
            "or set ZEUSD_SOCK_PATH to its socket or ZEUSD_HOST_PORT to its host:port"
        )

    def _refusal(self, path: str, response: httpx.Response) -> GpuError:
        """Return the error for a status other than 200.

        zeusd answers 400 or 500 with the texts of nvml-wrapper 0.12, through which it calls NVML.
        """
        # The status alone does not tell whether zeusd refused or NVML did.
        message, is_from_nvml = _message(response)
        start = f"zeusd at {self.address} refused {path}: {message}; "
        if response.status_code == 401:
            return GpuNotPermitted(
                f"{start}set ZEUSD_TOKEN to a token from `zeusd token issue --scope gpu-control`"
            )
        # Its own refusals of a token have the same status as NVML's lack of permission.
        if response.status_code == 403 and is_from_nvml:
            return GpuNotPermitted(
                f"{start}run zeusd itself as root, in a container with SYS_ADMIN"
            )
        if response.status_code == 403:
            return GpuNotPermitted(f"{start}ask for a token of scope gpu-control")
        if response.status_code == 404:
            return GpuNotSupported(f"{start}start zeusd 0.5 or later with --enable gpu-control")
        # NVML's codes only come through as the texts of the daemon's library.
        if "not available on the target device" in message:
            return GpuNotSupported(
                f"{start}use the other control (SM clock or power limit), or observe mode"
            )
        if "fell off the bus" in message:
            return GpuLost(f"{start}reset the GPU, or reboot the node")
        if response.status_code == 400:
            return GpuError(f"{start}`nvidia-smi -q` shows which values this GPU supports")
        return GpuError(f"{start}check the log of zeusd (HTTP {response.status_code})")


def pci_address(text: str) -> str | None:
    """Return a PCI address in the form of `lspci -D`, such as "0000:07:00.0"; None if `text` is not
    one.

    NVML writes the domain with eight digits, and letters in upper case.
    """
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _authorization(token: str) -> dict[str, str]:
    if not re.fullmatch(r"[!-~]*", token):
        raise GpuError(
            "ZEUSD_TOKEN contains a space or a character that is not ASCII; set it to a token of "
            "zeusd"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tcp_url(host_port: str) -> str:
    import httpx

    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", host_port)
    with suppress(httpx.InvalidURL):  # the text in brackets may not be an address
        if match and int(match[2]) <= 65535:
            return str(httpx.URL(f"http://{host_port}"))
    raise GpuError(
        f"ZEUSD_HOST_PORT is {host_port!r}, which is not host:port; set it to, for example, "
        "localhost:4938"
    )


def _errno(error: BaseException | None) -> int | None:
    """Return the errno of the operating system's error that caused an error of httpx."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    return error.errno if isinstance(error, OSError) else None


def _message(response: httpx.Response) -> tuple[str, bool]:
    """Return the text of a refusal, and whether it comes from NVML.

    The body is {"errors": {"0": text}} if it does, else {"error": text} or plain text.
    """
    try:
        body = response.json()
    except ValueError:
        body = response.text
    by_gpu = body.get("errors") if isinstance(body, dict) else None
    if isinstance(by_gpu, dict):
        return one_line(", ".join(map(str, by_gpu.values()))), True
    text = body.get("error", body) if isinstance(body, dict) else body
    return one_line(str(text)) or f"HTTP {response.status_code}", False
