"""Whatever body a client sends, the service stays small and answers others meanwhile: a real
process, every route that takes a body, every role, bodies up to each route's limit.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from services import frontier_file
from waiting import LONG_S, calmly

httpx = pytest.importorskip("httpx")

MIB = 2**20
MOST_GROWTH_MIB = 300.0
MOST_SILENCE_S = 0.5
ROLES = {"read": "r" * 16, "report": "p" * 16, "operate": "o" * 16}
REGISTER, ALERTS = ("POST", "/v1/jobs"), ("POST", "/v1/alerts")
SMALL = (
    ("POST", "/v1/jobs/gpt3/reports"),
    ("POST", "/v1/jobs/gpt3/telemetry"),
    ("POST", "/v1/jobs/gpt3/taken"),
    ("PUT", "/v1/jobs/gpt3/power"),
    ("PUT", "/v1/jobs/gpt3/deadline"),
)
LIMITS = {REGISTER: 24 * MIB, ALERTS: 8 * MIB} | dict.fromkeys(SMALL, 64 * 1024)


def filled(head: bytes, unit: bytes, tail: bytes, size: int) -> bytes:
    """A text of at most that size: `unit` again and again between two others."""
    return head + unit * max((size - len(head) - len(tail)) // len(unit), 0) + tail


def job() -> bytes:
    """The beginning of a registration."""
    frontier = base64.b64encode(frontier_file()).decode()
    return json.dumps({"name": "big", "pipelines": 2**16, "frontier": frontier}).encode()[:-1]


def places(size: int, separators: tuple[str, str]) -> bytes:
    """As many places as fit into the size and may be sent."""
    count = min(size // 130, 2**17)
    each = [
        {
            "rank": rank,
            "pipeline": rank // 8,
            "stages": [0],
            "node": f"node{rank // 8:05}",
            "gpu": f"GPU-{rank:032x}",
        }
        for rank in range(count)
    ]
    return job() + b',"places":' + json.dumps(each, separators=separators).encode() + b"}"


def alert(**labels: str) -> dict[str, object]:
    """An alert that fires."""
    return {
        "status": "firing",
        "labels": {"alertname": "slow", "node": "node1", **labels},
        "annotations": {"slowdown": "1.4"},
        "startsAt": "2026-01-01T00:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": "0123456789abcdef",
    }


def many_labels(size: int) -> bytes:
    """One alert of as many labels as fit."""
    labels = {f"l{number:06}": "" for number in range(size // 16)}
    return json.dumps({"alerts": [alert(**labels)]}, separators=(",", ":")).encode()


def many_alerts(size: int) -> bytes:
    """As many alerts as fit."""
    text = json.dumps(alert()).encode()
    return filled(b'{"alerts":[' + text, b"," + text, b"]}", size)


Shape = Callable[[int], bytes]
#: Of every route
ANY: dict[str, Shape] = {
    "lists": lambda size: filled(b'{"x":[', b"[],", b"0]}", size),
    "objects": lambda size: filled(b'{"x":[', b"{},", b"0]}", size),
    "numbers": lambda size: filled(b'{"x":[', b"0,", b"0]}", size),
    "keys": lambda size: filled(b"{", b'"a":0,', b'"b":0}', size),
    "texts": lambda size: filled(b'{"x":[', b'"",', b"0]}", size),
    "depth": lambda size: b"[" * size,
    "closed depth": lambda size: b'{"x":' + b"[" * (size // 2 - 4) + b"]" * (size // 2 - 4) + b"}",
    "one number": lambda size: filled(b'{"x":', b"9", b"}", size),
    "one text": lambda size: filled(b'{"x":"', b"a", b'"}', size),
    "one key": lambda size: filled(b'{"', b"k", b'":0}', size),
    "escapes": lambda size: filled(b'{"x":"', b"\\u00e9", b'"}', size),
    "open text": lambda size: filled(b'{"x":"', b'\\"', b"", size),
    "quotes": lambda size: b'"' * size,
    "blanks": lambda size: b" " * size,
    "zeros": lambda size: b"\0" * size,
    "wide letters": lambda size: filled(b'{"x":"\xf0\x9f\x98\x80', b"a", b'"}', size),
}
OF_REGISTRATIONS: dict[str, Shape] = {
    "places of nothing": lambda size: filled(job() + b',"places":[', b"{},", b"{}]}", size),
    "places with blanks": lambda size: filled(job() + b',"places": [', b"{}, ", b"{}]}", size),
    "places that are numbers": lambda size: filled(job() + b',"places":[', b"0,", b"0]}", size),
    "places": lambda size: places(size, (",", ":")),
    "places as Python writes them": lambda size: places(size, (", ", ": ")),
    "a place of everything": lambda size: filled(
        job() + b',"places":[{"rank":0,"pipeline":0,"stages":[', b"0,", b"0]}]}", size
    ),
    "a place of unknown things": lambda size: filled(
        job() + b',"places":[{"rank":0,"pipeline":0,"stages":[],"x":[', b"[],", b"0]}]}", size
    ),
    "a name as the end of the places": lambda size: filled(
        job() + b',"places":[{"node":"}]"},', b"{},", b"{}]}", size
    ),
    "a frontier": lambda size: filled(
        b'{"name":"a","pipelines":1,"frontier":"', b"AAAA", b'"}', size
    ),
    "rows": lambda size: filled(
        b'{"name":"a","pipelines":1,"profile_yaml":"a","schedule":"1f1b","profile_csv":"',
        b"0,forward,1410,0.1,20\\n",
        b'"}',
        size,
    ),
    "a document": lambda size: filled(
        b'{"name":"a","pipelines":1,"profile_csv":"a","schedule":"1f1b","profile_yaml":"',
        b"- a\\n",
        b'"}',
        size,
    ),
    "a grid": lambda size: filled(
        b'{"name":"a","pipelines":1,"profile_csv":"a","profile_yaml":"a","schedule":"',
        b"0F0, ",
        b'"}',
        size,
    ),
}  # fmt: skip
OF_ALERTS: dict[str, Shape] = {
    "labels": many_labels,
    "alerts": many_alerts,
    "no alerts": lambda size: filled(b'{"alerts":[', b"{},", b"{}]}", size),
    "lists of alerts": lambda size: filled(b'{"alerts":[', b"[],", b"[]]}", size),
    "a long name": lambda size: filled(
        b'{"alerts":[{"labels":{"alertname":"', b"\\u0001", b'"}}]}', size
    ),
    "a long label": lambda size: filled(b'{"alerts":[{"labels":{"', b"l", b'":0}}]}', size),
}
OF_OTHERS: dict[str, Shape] = {
    "steps": lambda size: filled(b'{"power_w":null,"schedule":[', b"{},", b"{}]}", size),
    "shares": lambda size: filled(b'{"run":"a","waiting":[', b'"",', b"0]}", size),
    "columns": lambda size: filled(
        b'{"run":"a","autopilot":{"phase":"a","columns":{', b'"c":0,', b'"d":0}}}', size
    ),
}


@dataclass
class Server:
    """A service as a process, which is asked all the time whether it lives."""

    url: str
    process: subprocess.Popen[str]

    def __post_init__(self) -> None:
        self.begun_mib = self.rss_mib()
        self.watch()
        self._asks = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def rss_mib(self) -> float:
        """The resident memory of the service."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the service has ended")

    def watch(self) -> None:
        """Measure from now on."""
        self._since_s = time.monotonic()
        self.silence_s = 0.0
        self.most_mib = self.rss_mib()

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=LONG_S) as client:
            while not self._asks.wait(0.01):
                begin_s = time.monotonic()
                assert client.get("/livez").status_code == 200
                if begin_s >= self._since_s:
                    self.silence_s = max(self.silence_s, time.monotonic() - begin_s)
                self.most_mib = max(self.most_mib, self.rss_mib())

    def stop(self) -> None:
        """Ask no more."""
        self._asks.set()
        self._thread.join()

    def send(self, role: str, route: tuple[str, str], body: bytes) -> int:
        """Send a body; its status, 0 if the connection was closed before it was answered."""
        headers = {"Authorization": f"Bearer {ROLES[role]}", "Content-Type": "application/json"}
        with suppress(httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):
            request = httpx.request(
                route[0], self.url + route[1], content=body, headers=headers, timeout=LONG_S
            )
            return int(request.status_code)
        return 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bodies")
    lines = [f"{token} {role} {role}" for role, token in ROLES.items()]
    (folder / "tokens.txt").write_text("\n".join(lines))
    (folder / "tokens.txt").chmod(0o600)
    command = [sys.executable, "-m", "perseus_planner", "serve", "--port", "0"]
    options = ["--tokens", "tokens.txt", "--database", "service.sqlite", "--log-level", "error"]
    with subprocess.Popen(
        [*command, *options], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2].rstrip(",")
        # the process that plans is started, and everything is imported
        with httpx.Client(base_url=url, timeout=LONG_S) as client:
            headers = {"Authorization": f"Bearer {ROLES['operate']}"}
            small = {"name": "gpt3", "pipelines": 2}
            small["frontier"] = base64.b64encode(frontier_file()).decode()
            assert client.post("/v1/jobs", json=small, headers=headers).status_code == 201
        server = Server(url, process)
        yield server
        server.stop()
        process.kill()


def shapes() -> Iterator[tuple[str, tuple[str, str], Shape]]:
    for route, own in ((REGISTER, OF_REGISTRATIONS), (ALERTS, OF_ALERTS)):
        for name, shape in {**ANY, **own}.items():
            yield name, route, shape
    for place, (name, shape) in enumerate({**ANY, **OF_OTHERS}.items()):
        yield name, SMALL[place % len(SMALL)], shape


CASES = list(shapes())
assert len(CASES) >= 40
#: What ended the service once, and the largest that is taken; the others are tried in the soak
ALWAYS = ("places of nothing", "places as Python writes them", "labels", "numbers", "steps")


@pytest.mark.parametrize(
    ("route", "shape"),
    [
        pytest.param(*case[1:], marks=() if case[0] in ALWAYS else pytest.mark.soak)
        for case in CASES
    ],
    ids=[f"{route[1].rpartition('/')[2]}-{name}" for name, route, _ in CASES],
)
def test_no_body_makes_the_service_large_or_silent(
    server: Server, route: tuple[str, str], shape: Shape
):
    body = shape(LIMITS[route])
    assert len(body) <= LIMITS[route]
    growths_mib = []

    def check() -> None:
        server.watch()
        statuses = [server.send(role, route, body) for role in ROLES]
        silence_s = server.silence_s
        growths_mib.append(server.most_mib - server.begun_mib)
        for name in ("big", "a"):  # the largest may be taken, and then it is kept
            server.send("operate", ("DELETE", f"/v1/jobs/{name}"), b"")
        print(f"{statuses}: {growths_mib[-1]:.0f} MiB more, silent for {silence_s:.2f} s")
        assert statuses[0] in (403, 413, 422, 0)  # the role `read` may send none of them
        assert silence_s <= MOST_SILENCE_S

    calmly(check)  # a busy machine may be why it was silent
    assert server.process.poll() is None
    assert max(growths_mib) <= MOST_GROWTH_MIB


@pytest.mark.parametrize("declared", [100, 2**26])
def test_a_body_that_never_comes_costs_nothing(server: Server, declared: int):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n{"
            % (ROLES["operate"].encode(), declared)
        )
        assert httpx.get(f"{server.url}/livez", timeout=LONG_S).status_code == 200
    assert server.most_mib - server.begun_mib <= MOST_GROWTH_MIB
