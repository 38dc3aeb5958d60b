"""The back-end `zeusd:`; test_contract.py tests what all back-ends have in common."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_nvml import PCI, UUIDS, StandIn, nvml, nvml_library  # noqa: F401  # fixtures
from fake_zeusd import (
    INVALID,
    LOST,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    Answer,
    FakeZeusd,
    KeptGpu,
    Request,
    token,
)
from launching import free_port

from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    how_to_install,
)
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu import zeusd as zeusd_module
from perseus_planner.gpu.zeusd import pci_address

pytest.importorskip("httpx", reason="httpx is not installed")

# httpcore leaves a socket that it could not connect to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

KEY = b"a signing key"
SOCKET = "zeusd.sock"
GPU = "zeusd:1"
LOCK, RESET = "/gpu/set_gpu_locked_clocks", "/gpu/reset_gpu_locked_clocks"
LIMIT = "/gpu/set_power_limit"
REFUSED = f"zeusd at zeusd.sock refused {LOCK}: "


@pytest.fixture(scope="module", autouse=True)
def _freeze_existing_objects() -> Iterator[None]:
    """Freeze the objects that exist already, because each test collects garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_client_is_left_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that a test has closed each client that it made: garbage is collected in any later
    test.
    """
    import httpx

    made = []

    class Client(httpx.Client):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(httpx, "Client", Client)
    yield
    assert [client.is_closed for client in made] == [True] * len(made)


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide libnvidia-ml.so.1, even if the machine has one or the process has loaded a stand-in."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

    def absent(*_: object) -> None:
        raise OSError(
            "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
        )

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", absent)


@pytest.fixture
def zeusd(nvml: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeZeusd]:  # noqa: F811
    """Start a daemon without tokens at `zeusd.sock`, with a GPU that NVML does not show, and
    NVML's GPU 1.
    """
    monkeypatch.setenv("ZEUSD_SOCK_PATH", SOCKET)
    monkeypatch.delenv("ZEUSD_HOST_PORT", raising=False)
    monkeypatch.delenv("ZEUSD_TOKEN", raising=False)
    with FakeZeusd(Path(SOCKET), [KeptGpu("0000:c1:00.0"), KeptGpu(PCI[1].lower())]) as daemon:
        yield daemon
    gc.collect()  # while that warning is ignored


def lock_clock(text: str = GPU) -> None:
    """Lock a clock."""
    with open_gpu(text) as gpu:
        gpu.set_clock_mhz(1200)


def refusal(kind: type[GpuError], text: str = GPU) -> str:
    """Return the text of the error of exactly that class that `lock_clock` raises."""
    with pytest.raises(GpuError) as error:
        lock_clock(text)
    assert type(error.value) is kind
    return str(error.value)


# --- what is asked


def test_settings_are_sent_with_the_daemons_own_index_and_waited_for(zeusd):
    with open_gpu(GPU) as gpu:
        gpu.set_clock_mhz(1200)
        assert zeusd.gpus[1].locked_mhz == (1200, 1200)
        gpu.reset_clocks()
        assert zeusd.gpus[1].locked_mhz is None
        with pytest.raises(
            GpuError, match=r"is 700 W: stop what else"
        ):  # the GPU behind is not that of NVML
            gpu.set_power_limit_w(250.1234)
    ours = {"gpu_ids": "1"}
    assert zeusd.requests == [
        Request("GET", "/discover"),
        Request(
            "POST", LOCK, ours | {"min_clock_mhz": "1200", "max_clock_mhz": "1200", "block": "true"}
        ),
        Request("POST", RESET, ours | {"block": "true"}),
        Request("POST", LIMIT, ours | {"power_limit_mw": "250123", "block": "true"}),
    ]
    assert zeusd.gpus[0] == KeptGpu("0000:c1:00.0")


def test_tcp_is_used_where_only_that_is_named_whatever_proxy_the_environment_has(
    zeusd, monkeypatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("ZEUSD_SOCK_PATH")
    gpu = KeptGpu(PCI[1].lower())
    with FakeZeusd(("127.0.0.1", 0), [gpu]) as over_tcp:
        monkeypatch.setenv("ZEUSD_HOST_PORT", f"127.0.0.1:{over_tcp.port}")
        lock_clock()
        assert gpu.locked_mhz == (1200, 1200)
    assert zeusd.requests == []


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_a_daemon_over_the_network_must_be_this_nodes(zeusd, monkeypatch, host: str, told: bool):
    monkeypatch.delenv("ZEUSD_SOCK_PATH")
    with FakeZeusd(("127.0.0.1", 0), [KeptGpu(PCI[1].lower())]) as over_tcp:
        monkeypatch.setenv("ZEUSD_HOST_PORT", f"{host}:{over_tcp.port}")
        with open_gpu(GPU) as gpu:
            warnings = gpu.warnings()
    warned = (
        f"zeusd is reached over the network, at {host}:{over_tcp.port}: make sure that it runs on "
        "this node, because the GPUs of another node may have the same PCI addresses"
    )
    assert (warned in warnings) is told
    assert len(warnings) == 1 + told


def test_a_socket_goes_before_tcp(zeusd, monkeypatch):
    monkeypatch.setenv("ZEUSD_HOST_PORT", "127.0.0.1:9")
    lock_clock()
    assert zeusd.gpus[1].locked_mhz == (1200, 1200)


def test_a_token_is_shown_whatever_white_space_is_around_it(zeusd, monkeypatch):
    zeusd.key = KEY
    monkeypatch.setenv("ZEUSD_TOKEN", f" {token(KEY, ['gpu-control', 'gpu-read'])}\n")
    lock_clock()
    assert zeusd.gpus[1].locked_mhz == (1200, 1200)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:07:00.0", "0000:07:00.0"),
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("00010000:c1:00.0", "10000:c1:00.0"),
        ("GPU-8f6b", None),
        ("0", None),
        ("07:00.0", None),
        ("0000:07:00.0\n", None),
        ("", None),
    ],
)
def test_pci_addresses_are_read_as_nvml_and_zeusd_write_them(text: str, address: str | None):
    assert pci_address(text) == address


# --- what is refused

Setup = Callable[[FakeZeusd, Callable[[str, str], None]], object]
"""What goes wrong: given the daemon, and what sets an environment variable."""

START = (
    "start it with `sudo zeusd serve`, or set ZEUSD_SOCK_PATH to its socket or ZEUSD_HOST_PORT to "
    "its host:port"
)
ISSUE = "set ZEUSD_TOKEN to a token from `zeusd token issue --scope gpu-control`"
ENABLE = "start zeusd 0.5 or later with --enable gpu-control"


def shown(scope: str = "gpu-control", key: bytes = KEY, expires_in_s: int = 60) -> Setup:
    """Let the daemon want a token, and show it this one."""

    def setup(zeusd: FakeZeusd, env: Callable[[str, str], None]) -> None:
        zeusd.key = KEY
        env("ZEUSD_TOKEN", token(key, [scope], int(time.time()) + expires_in_s))

    return setup


def over_tcp(host_port: str) -> Setup:
    return lambda _, env: (env("ZEUSD_SOCK_PATH", ""), env("ZEUSD_HOST_PORT", host_port))


REFUSALS: dict[str, tuple[Setup, type[GpuError], str]] = {
    "no socket": (
        lambda _, env: env("ZEUSD_SOCK_PATH", "absent.sock"),
        GpuLost,
        f"there is no zeusd at absent.sock (No such file or directory); {START}",
    ),
    "a socket that nobody listens on": (
        lambda zeusd, _: zeusd.stop(),
        GpuLost,
        f"there is no zeusd at zeusd.sock (Connection refused); {START}",
    ),
    **{
        f"the address {host_port!r}": (
            over_tcp(host_port),
            GpuError,
            f"ZEUSD_HOST_PORT is {host_port!r}, which is not host:port; set it to, for example, "
            "localhost:4938",
        )
        for host_port in (
            *("localhost", "localhost:", "localhost:70000"),
            *("a b:1", "http://a:1", "a:1/x", "[::::]:1"),
        )
    },
    **{
        f"the token {text!r}": (
            lambda _, env, text=text: env("ZEUSD_TOKEN", text),  # type: ignore[misc]
            GpuError,
            "ZEUSD_TOKEN contains a space or a character that is not ASCII; set it to a token of "
            "zeusd",
        )
        for text in ("two words", "new\nline", "naïve")
    },
    "a daemon that breaks off": (
        lambda zeusd, _: setattr(zeusd, "breaks_off_at", LOCK),
        GpuLost,
        "zeusd at zeusd.sock broke off at /gpu/set_gpu_locked_clocks (Server disconnected without "
        "sending a response.); check whether it still runs, and its log; the request may or may "
        "not have taken effect, so run `planner reset`",
    ),
    "no token": (
        lambda zeusd, _: setattr(zeusd, "key", KEY),
        GpuNotPermitted,
        f"{REFUSED}Authentication required. Provide an Authorization: Bearer <token> header.; "
        f"{ISSUE}",
    ),
    "a token that has expired": (
        shown(expires_in_s=-60),
        GpuNotPermitted,
        f"{REFUSED}Token has expired.; {ISSUE}",
    ),
    "a token with another key": (
        shown(key=b"another key"),
        GpuNotPermitted,
        f"{REFUSED}Invalid token: InvalidSignature; {ISSUE}",
    ),
    "a token of another scope": (
        shown("gpu-read"),
        GpuNotPermitted,
        f"{REFUSED}Token for user 'alice' lacks required scope 'gpu-control'. Token scopes: "
        "['gpu-read']; ask for a token of scope gpu-control",
    ),
    "a group that is off": (
        lambda zeusd, _: setattr(zeusd, "groups", ("gpu-read",)),
        GpuNotSupported,
        f"{REFUSED}API group 'gpu-control' is not enabled on this server.; {ENABLE}",
    ),
    "a path that an older daemon does not have": (
        lambda zeusd, _: zeusd.answers.update({LOCK: Answer(404)}),
        GpuNotSupported,
        f"{REFUSED}HTTP 404; {ENABLE}",
    ),
    **{
        f"code {code} of NVML": (
            lambda zeusd, _, code=code: setattr(zeusd.gpus[1], "refuses", code),  # type: ignore[misc]
            kind,
            f"{REFUSED}NVML error: {said}",
        )
        for code, kind, said in (
            (
                NOT_PERMITTED,
                GpuNotPermitted,
                "the current user does not have permission to perform this operation; run zeusd "
                "itself as root, in a container with SYS_ADMIN",
            ),
            (
                NOT_SUPPORTED,
                GpuNotSupported,
                "the requested operation is not available on the target device; use the other "
                "control (SM clock or power limit), or observe mode",
            ),
            (
                INVALID,
                GpuError,
                "a supplied argument was invalid; `nvidia-smi -q` shows which values this GPU "
                "supports",
            ),
            (
                LOST,
                GpuLost,
                "device fell off the bus or has otherwise become inacessible; reset the GPU, or "
                "reboot the node",
            ),
            (999, GpuError, "an internal driver error occured; check the log of zeusd (HTTP 500)"),
        )
    },
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_goes_wrong_is_said_with_what_to_do(
    zeusd: FakeZeusd, monkeypatch: pytest.MonkeyPatch, name: str
):
    setup, kind, said = REFUSALS[name]
    setup(zeusd, monkeypatch.setenv)
    assert refusal(kind) == said


# --- the daemon cannot be reached


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every socket")
def test_a_socket_that_this_user_may_not_write_to(zeusd):
    Path(SOCKET).chmod(0o400)
    assert refusal(GpuNotPermitted) == MAY_NOT_WRITE


def test_a_socket_that_this_user_may_not_write_to_as_the_system_says_it(zeusd, monkeypatch):
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", denied)
    assert refusal(GpuNotPermitted) == MAY_NOT_WRITE


MAY_NOT_WRITE = (
    "this user may not write to the socket of zeusd at zeusd.sock; start zeusd with "
    "--socket-permissions 666, or with --socket-gid and a group of this user"
)


def test_a_port_that_nobody_listens_on(zeusd, monkeypatch):
    port = free_port()
    monkeypatch.delenv("ZEUSD_SOCK_PATH")
    monkeypatch.setenv("ZEUSD_HOST_PORT", f"127.0.0.1:{port}")
    assert refusal(GpuLost) == (
        f"there is no zeusd at 127.0.0.1:{port} (Connection refused); start it with `sudo zeusd "
        "serve`, or set ZEUSD_SOCK_PATH to its socket or ZEUSD_HOST_PORT to its host:port"
    )


def test_a_daemon_that_ends_while_it_is_in_use(zeusd):
    with open_gpu(GPU) as gpu:
        gpu.set_clock_mhz(1200)
        zeusd.stop()
        with pytest.raises(GpuLost, match=r"^(there is no zeusd at|zeusd at zeusd.sock broke off)"):
            gpu.reset_clocks()
        with pytest.raises(GpuLost) as error:
            gpu.reset_clocks()
    assert str(error.value).startswith("there is no zeusd at zeusd.sock (Connection refused); ")


def test_a_daemon_that_does_not_answer(zeusd, monkeypatch):
    monkeypatch.setattr(zeusd_module, "TIMEOUT_S", 0.2)
    zeusd.waits_at = LOCK
    assert refusal(GpuLost) == (
        "zeusd at zeusd.sock did not answer /gpu/set_gpu_locked_clocks within 0.2 s; check "
        "whether it still runs, and its log; the request may or may not have taken effect, so run "
        "`planner reset`"
    )
    zeusd.waits_at = "/discover"
    assert refusal(GpuLost) == (
        "zeusd at zeusd.sock did not answer /discover within 0.2 s; check whether it still runs, "
        "and its log"
    )


def test_a_refusal_is_quoted_in_one_line_and_not_at_length(zeusd):
    zeusd.answers[LOCK] = Answer(500, "\x1b[31m" + "a line\n" * 1000 + "the end")
    said = refusal(GpuError)
    assert said.isprintable()
    assert len(said) < 500
    assert said.endswith("a line a line the end; check the log of zeusd (HTTP 500)")


# --- the daemon answers what zeusd does not


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        "",
        [],
        None,
        7,
        {},
        {"gpus": None},
        {"gpus": [{}]},
        {"gpus": [{"id": "0", "name": "x", "pci_address": "0000:07:00.0"}]},
        {"gpus": [{"id": True, "name": "x", "pci_address": "0000:07:00.0"}]},
        {"gpus": [{"id": 0, "name": "x", "pci_address": 7}]},
    ],
)
def test_a_discovery_that_is_none(zeusd, answer: object):
    zeusd.answers["/discover"] = Answer(200, answer)
    quoted = " ".join((answer if isinstance(answer, str) else json.dumps(answer)).split())
    assert refusal(GpuError) == (
        f"zeusd at zeusd.sock answered /discover with {quoted!r}, which zeusd 0.5 does not; check "
        "what listens there, and its version"
    )


def test_a_gpu_that_the_daemon_does_not_have(zeusd):
    assert refusal(GpuError, "zeusd:0") == (
        "zeusd at zeusd.sock has no GPU '0000:3b:00.0'; it has 0 at 0000:c1:00.0, 1 at "
        f"{PCI[1].lower()}: check that it is the zeusd of this node, started with --enable "
        "gpu-control"
    )


# --- with and without NVML


@pytest.mark.parametrize("which", ["0", "0000:07:00.0", "GPU-8f6b"])
def test_without_the_library_the_error_says_what_to_mount(zeusd, no_nvml, which: str):
    assert refusal(GpuError, f"zeusd:{which}") == (
        f"zeusd:{which}: zeusd only sets GPUs, NVML reads them, and libnvidia-ml.so.1 is not "
        "here; in a container, mount it by setting NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )
    assert zeusd.requests == []


@pytest.fixture
def behind_nvml(
    nvml: StandIn,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FakeZeusd]:
    """Start a daemon with a GPU that is not visible here, followed by the two of NVML."""
    path = tmp_path / SOCKET
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(path))
    with FakeZeusd(
        path, [KeptGpu("0000:01:00.0"), KeptGpu(PCI[0].lower()), KeptGpu(PCI[1].lower())]
    ) as daemon:
        yield daemon
    gc.collect()


@pytest.mark.parametrize("which", ["1", UUIDS[1], PCI[1]])
def test_the_daemons_gpu_is_found_by_pci_address(behind_nvml, which: str):
    with open_gpu(f"zeusd:{which}") as gpu:
        gpu.set_clock_mhz(1200)
        assert gpu.text == f"zeusd:{UUIDS[1]}"
    assert [each.locked_mhz for each in behind_nvml.gpus] == [None, None, (1200, 1200)]


def test_the_power_limit_goes_back_to_the_default_of_nvml(behind_nvml, nvml):  # noqa: F811
    with open_gpu("zeusd:0") as gpu:
        with pytest.raises(GpuError, match=r"is 700 W: stop what else"):
            gpu.set_power_limit_w(250.1234)
        assert behind_nvml.gpus[1].limited_mw == 250_123
        behind_nvml.requests.clear()
        gpu.reset_power_limit()
        assert behind_nvml.requests == []  # as NVML says that the default is in force
        nvml.set("limit_mw", "100000 700000 600000")
        nvml.fail("nvmlDeviceGetPowerManagementDefaultLimit", NOT_SUPPORTED)
        with pytest.raises(GpuNotSupported):
            gpu.reset_power_limit()


def test_its_warnings_are_those_of_nvml_and_one_more(behind_nvml, nvml):  # noqa: F811
    nvml.set("persistence", 0)
    with open_gpu("zeusd:0") as gpu, open_gpu("nvml:0") as direct:
        assert gpu.warnings() == (
            *direct.warnings(),
            "zeusd does not undo settings when the process that asked for them ends; `planner "
            "reset` does",
        )
        assert len(direct.warnings()) == 1


def test_without_httpx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(GpuError) as error:
        zeusd_module.Daemon()
    assert str(error.value) == f"zeusd is reached through httpx; {how_to_install('zeusd')}"
