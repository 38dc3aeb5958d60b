"""The processes of the load benchmark: the service, the echo, and their clients, each with the
CPU that it takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_HERE = Path(__file__).parent
_PYTHON = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]
_CONNECTIONS = 32

Bodies = Sequence[tuple[str, str]]
"""(path, JSON) of requests."""


class Row(NamedTuple):
    """A request that was answered; times of the monotonic clock, seconds.

    Attributes:
        due_s: when it was to be sent.
        sent_s: when it was.
        answered_s: when its answer was there.
        status: of HTTP.
        body: of the answer, or how many bytes it has.
    """

    due_s: float
    sent_s: float
    answered_s: float
    status: int
    body: Any


@dataclass(frozen=True)
class Server:
    """A process that serves at a port of this machine, and those that it starts."""

    process: psutil.Process
    port: int

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far: its own, and of its processes."""
        return _cpu_s(self.process), sum(map(_cpu_s, self.process.children(recursive=True)))

    def memory_mib(self) -> tuple[float, float]:
        """Resident memory: its own, and of its processes."""
        others = self.process.children(recursive=True)
        return _resident_mib(self.process), sum(map(_resident_mib, others))


@dataclass(frozen=True)
class Spell:
    """Requests of one spell, and the CPU seconds that it took: the server's, its processes', the
    clients'.
    """

    rows: list[Row]
    wall_s: float
    server_s: float
    workers_s: float
    clients_s: float

    def __add__(self, other: Spell) -> Spell:
        """Both."""
        mine, theirs = (
            (each.wall_s, each.server_s, each.workers_s, each.clients_s) for each in (self, other)
        )
        return Spell(
            self.rows + other.rows, *(sum(pair) for pair in zip(mine, theirs, strict=True))
        )


@contextmanager
def service(database: Path) -> Iterator[Server]:
    """`planner serve` with its default settings, on SQLite in a file."""
    command = [
        *_PYTHON,
        "-m",
        "perseus_planner",
        "serve",
        "--port",
        "0",
        "--database",
        str(database),
    ]
    with _running(command, stderr=subprocess.DEVNULL) as process:  # its log has a line each
        line = process.stdout.readline()
        yield Server(psutil.Process(process.pid), int(line.partition(",")[0].rpartition(":")[2]))


@contextmanager
def echo(database: Path) -> Iterator[Server]:
    """The plain application of echo_app.py."""
    with _running([sys.executable, str(_HERE / "echo_app.py"), str(database)]) as process:
        yield Server(psutil.Process(process.pid), int(process.stdout.readline()))


class Leaders:
    """A process that has a long poll open for each of many pipelines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.process = psutil.Process(process.pid)

    def end(self) -> dict[str, Any]:
        """What they saw, as `service_clients.lead` says it."""
        print(file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def leading(server: Server, leaders: Sequence[tuple[str, int, int]]) -> Iterator[Leaders]:
    """Leaders of these pipelines: (job, pipeline, version known)."""
    with _running([sys.executable, str(_HERE / "service_clients.py"), "lead"]) as process:
        print(json.dumps({"port": server.port, "leaders": leaders}), file=process.stdin, flush=True)
        assert process.stdout.readline() == "waiting\n"
        yield Leaders(process)


def spell(
    server: Server,
    bodies: Bodies,
    per_s: float | None,
    for_s: float,
    others: Sequence[psutil.Process] = (),
    connections: int = _CONNECTIONS,
) -> Spell:
    """Post `bodies` at a rate, or with None for so long as fast as they are answered; `others`
    are clients too.
    """
    with _running([sys.executable, str(_HERE / "service_clients.py"), "post"]) as process:
        wanted = {
            "port": server.port,
            "bodies": bodies,
            "per_s": per_s,
            "for_s": for_s,
            "connections": connections,
        }
        client = psutil.Process(process.pid)
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "begins\n"
        before = [*server.cpu_s(), sum(map(_cpu_s, [client, *others])), time.monotonic()]
        assert process.stdout.readline() == "answered\n"
        after = [*server.cpu_s(), sum(map(_cpu_s, [client, *others])), time.monotonic()]
        rows = [Row(*each) for each in json.loads(process.stdout.readline())]
    server_s, workers_s, clients_s, wall_s = (
        late - early for early, late in zip(before, after, strict=True)
    )
    return Spell(rows, wall_s, server_s, workers_s, clients_s)


def look(server: Server, pages: Sequence[tuple[str, float]], for_s: float) -> list[list[Row]]:
    """Visit these pages (path, every so many seconds) for so long; the bodies of the rows are
    their lengths.
    """
    with _running([sys.executable, str(_HERE / "service_clients.py"), "look"]) as process:
        print(
            json.dumps({"port": server.port, "pages": pages, "for_s": for_s}),
            file=process.stdin,
            flush=True,
        )
        return [[Row(*each) for each in rows] for rows in json.loads(process.stdout.readline())]


@contextmanager
def _running(command: Sequence[str], stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _resident_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20
