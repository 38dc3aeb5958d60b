"""A service of the job's own: it follows the job, survives its restart, and harms no training,
whoever is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import waiting
from launching import Ended, ranks
from waiting import LONG_S

from perseus_planner.errors import ServiceAway, ServiceRefusal, UsageError
from perseus_planner.runtime.agent.embedded import TOKENS_VARIABLE, EmbeddedService, Embedding
from perseus_planner.service.client.client import Client
from perseus_planner.service.model import Scope
from perseus_planner.service.schemas import ReportRequest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("sqlalchemy")

REPORT = ReportRequest("ops", Scope("stage", "1"), slowdown=1.2, key="k", cause="compute")


def eventually(holds: Callable[[], Any]) -> Any:
    def found() -> Any:
        with suppress(ServiceAway, ServiceRefusal):  # it begins, or the job does
            return holds()
        return None

    return waiting.eventually(found)


class Run:
    """Two ranks that train, in a folder of their own."""

    def __init__(self, folder: Path, ended: Callable[[], list[Ended]]) -> None:
        self.folder, self.ended = folder, ended

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def rows(self, rank: int) -> list[float]:
        return [float(line) for line in (self.folder / f"rows-{rank}").read_text().split("\n")[:-1]]

    def goes_on(self) -> None:
        """Both ranks run some iterations more."""
        ran = min(len(self.rows(rank)) for rank in range(2))
        eventually(lambda: min(len(self.rows(rank)) for rank in range(2)) > ran + 3)

    def address(self) -> str:
        """What it has said."""
        file = self.folder / "heard-0"
        text = eventually(
            lambda: file.exists() and "listens at http" in file.read_text() and file.read_text()
        )
        return str(text.partition("listens at ")[2].split()[0])

    def service(self) -> psutil.Process:
        """The process."""
        return eventually(lambda: next(iter(services(self.pid(0))), None))


def services(rank_pid: int) -> list[psutil.Process]:
    living = [
        each
        for each in psutil.Process(rank_pid).children()
        if each.status() != psutil.STATUS_ZOMBIE
    ]
    return [each for each in living if "serve" in each.cmdline()]


@contextmanager
def training(folder: Path, service: str = "embedded") -> Iterator[Run]:
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        state = str(folder.parent / "state")
        started = pool.submit(ranks, "embedded_programs:train", 2, folder, service, state)
        try:
            yield Run(folder, lambda: started.result(LONG_S))
        finally:
            (folder / "stop").touch()


def taken(service: Client, version: int) -> bool:
    found = service.status("own").taken
    return (
        found is not None and found.version >= version
    )  # on a busy machine ranks find themselves slow, too


def test_the_service_of_a_job_lives_with_it_and_what_it_knows_outlives_a_killed_one(tmp_path: Path):
    pytest.importorskip("torch")
    with training(tmp_path / "first") as run:
        address, process = run.address(), run.service()
        assert process.nice() == 10
        with Client(address) as service:
            eventually(lambda: taken(service, 1))
            own_s = run.rows(0)[-1]
            service.report("own", REPORT)
            eventually(lambda: taken(service, 2))
            eventually(lambda: run.rows(0)[-1] == run.rows(1)[-1] != own_s)
            process.kill()
            run.goes_on()
            again = eventually(lambda: run.service() if run.service() != process else None)
            eventually(lambda: "k" in [each.key for each in service.reports("own")])
        os.kill(run.pid(0), signal.SIGKILL)
        again.wait(LONG_S)
        with suppress(ProcessLookupError):  # it may have seen that its neighbour is gone
            os.kill(run.pid(1), signal.SIGKILL)
        assert run.ended()[0].code == -signal.SIGKILL
    with training(tmp_path / "second") as run:
        address, process = run.address(), run.service()
        with Client(address) as service:
            eventually(lambda: "k" in [each.key for each in service.reports("own")])
            eventually(lambda: run.rows(1)[-1] != own_s)
        (run.folder / "stop").touch()
        assert [each.code for each in run.ended()] == [0, 0], [each.stderr for each in run.ended()]
        assert not process.is_running()
    assert list((tmp_path / "state" / f"services-{os.geteuid()}").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("embedded", "127.0.0.1", 0),
        ("embedded:8400", "127.0.0.1", 8400),
        ("embedded:127.0.0.2:0", "127.0.0.2", 0),
        ("embedded:localhost:8400", "localhost", 8400),
        ("embedded:[::1]:8400", "::1", 8400),
    ],
)
def test_where_it_listens_is_said_after_a_colon(text: str, host: str, port: int):
    assert Embedding.parse(text) == Embedding(host, port)


@pytest.mark.parametrize("text", ["http://embedded:8400", "unix:/run/planner.sock", "embeddedly"])
def test_other_addresses_are_of_other_services(text: str):
    assert Embedding.parse(text) is None


@pytest.mark.parametrize(
    "text", ["embedded:", "embedded:70000", "embedded:a:b", "embedded:/run/x", "embedded:h:1:2"]
)
def test_what_is_no_place_is_refused(text: str):
    with pytest.raises(UsageError, match="write embedded, embedded:PORT or embedded:HOST:PORT"):
        Embedding.parse(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "node07"])
def test_where_others_reach_it_there_must_be_tokens(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKENS_VARIABLE, raising=False)
    with pytest.raises(
        UsageError,
        match=f"other machines can reach it, so clients need tokens; set {TOKENS_VARIABLE}",
    ):
        Embedding.parse(f"embedded:{host}:8400")
    monkeypatch.setenv(TOKENS_VARIABLE, "0123456789abcdef read eve")
    assert Embedding.parse(f"embedded:{host}:8400") == Embedding(host.strip("[]"), 8400)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_where_tokens_are_needed_rank_0_has_one_of_its_own(
    state: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(TOKENS_VARIABLE, "0123456789abcdef read eve")
    own = EmbeddedService(Embedding(), "a/../job")
    try:
        with Client(own.running(), own.token) as service, Client(own.running(), "") as stranger:
            assert service.jobs() == ()
            with pytest.raises(Exception, match="no valid token"):
                stranger.jobs()
        folder = state / f"services-{os.geteuid()}"
        assert folder.stat().st_mode & 0o077 == 0
        assert all(own.token.encode() not in path.read_bytes() for path in folder.iterdir())
    finally:
        own.close()
    with pytest.raises(ServiceAway, match="the job is ending"):
        own.running()


def test_what_keeps_it_from_starting_is_said(state: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Embedding(port=other.getsockname()[1])
        with pytest.raises(
            ServiceAway, match=r"could not be started: --host 127\.0\.0\.1 --port \d+: cannot list"
        ):
            EmbeddedService(taken, "job").running()
    folder = state / f"services-{os.geteuid()}"
    for path in [*folder.iterdir()]:
        path.unlink()
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(ServiceAway, match="is not a folder of this user"):
        EmbeddedService(Embedding(), "job").running()


def test_serve_ends_with_its_owner_even_one_that_is_killed(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        command = [
            sys.executable,
            "-m",
            "perseus_planner",
            "serve",
            "--port",
            "0",
            "--owner",
            str(owner.pid),
        ]
        command += ["--database", "service.sqlite"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            assert service.stdout.readline().startswith("Listening at ")
            owner.kill()
            assert service.wait(LONG_S) == 0
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as service:
        assert service.wait(LONG_S) in (0, -signal.SIGTERM)
