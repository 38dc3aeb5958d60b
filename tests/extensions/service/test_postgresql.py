"""A database of PostgreSQL: it keeps what SQLite keeps, and a second service takes over when the
first one has died or lost its connection, with everything that was acknowledged.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from postgres import postgres
from services import NOW_S, Clock, at_once, frontier_file, job, planned, report
from waiting import LONG_S, eventually

from perseus_planner.extensions.service.database import LATE_S, StandBy
from perseus_planner.extensions.service.models import Fenced
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage

httpx = pytest.importorskip("httpx")

TAKE_OVER_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    import psycopg

    name = f"test{time.monotonic_ns()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.rpartition("/")[0] + f"/{name}"


def terminate(url: str) -> None:
    """End the connection that holds the database, as an administrator does."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        ended = connection.execute(
            "SELECT pid, pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ).fetchall()
        living = "SELECT pid FROM pg_stat_activity WHERE pid = ANY(%s)"
        pids = [pid for pid, _ in ended]
        # It is only told to end, and has the lock until then.
        eventually(lambda: not connection.execute(living, (pids,)).fetchall())


def test_it_keeps_all_that_a_file_keeps(url: str):
    with Storage(url) as storage, Service(storage, now_s=Clock(), run=at_once) as service:
        service.register(job(), frontier_file())
        service.register(job("done"), frontier_file())
        service.report("gpt", report("a", expires_s=NOW_S + 1e6)).result()
        planned(service)
        service.report("gpt", report("b", slowdown=1.0, observed_s=NOW_S + 1.0)).result()
        planned(service)
        service.taken("gpt", 3, 17).result()
        service.set_power(None, 1e6).result()
        service.end("done").result()
        planned(service)
        before = service.jobs(), service.plans("gpt", 0), service.totals(), service.power_budget
    with Storage(url) as storage, Service(storage, now_s=Clock(), run=at_once) as service:
        after = service.jobs(), service.plans("gpt", 0), service.totals(), service.power_budget
        assert after == before
        assert service.report("gpt", report("a", expires_s=NOW_S + 1e6)).result().changed is False


def test_a_second_one_stands_by_and_who_lost_its_connection_acknowledges_nothing(url: str):
    with Storage(url) as storage, Service(storage, now_s=Clock(), run=at_once) as service:
        service.register(job(), frontier_file())
        with pytest.raises(StandBy, match="another service has it; this one stands by"):
            Storage(url)
        terminate(url)
        with (
            Storage(url) as second,
            Service(second, now_s=Clock(), run=at_once) as heir,
        ):
            with pytest.raises(Fenced, match="the connection is lost, and with it the right to"):
                service.report("gpt", report("a")).result()
            assert heir.reports("gpt") == ()
            heir.report("gpt", report("b")).result()
        with pytest.raises(Fenced):
            service.tick()


class Pair:
    """Two services of one database, each a process that is started again when it has ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._running: list[tuple[subprocess.Popen[str], str]] = []
        for _ in range(2):
            self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "perseus_planner", "serve", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--database", self._url, "--log-level", "error"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        self._running.append((process, said.split()[2].rstrip(",")))

    def ask(self, method: str, path: str, **sent: Any) -> Any:
        """The answer of whichever serves; None if none does now."""
        for _, address in self._running:
            with suppress(httpx.RequestError):
                answer = httpx.request(method, address + path, timeout=LONG_S, **sent)
                if answer.status_code != 503:
                    return answer
        return None

    def insist(self, method: str, path: str, **sent: Any) -> Any:
        """That answer as soon as there is one."""
        answers: list[Any] = []

        def answered() -> bool:
            answers.append(self.ask(method, path, **sent))
            return answers[-1] is not None

        eventually(answered)
        return answers[-1]

    def ready(self) -> list[int]:
        statuses = []
        for _, address in self._running:
            with suppress(httpx.RequestError):
                statuses.append(httpx.get(f"{address}/readyz", timeout=LONG_S).status_code)
                assert httpx.get(f"{address}/livez", timeout=LONG_S).status_code == 200
        return sorted(statuses)

    def fail(self, how: str) -> float:
        """Have the one that serves lose the database; how long it took until another had it."""
        (serving,) = [
            each
            for each in self._running
            if httpx.get(f"{each[1]}/readyz", timeout=LONG_S).status_code == 200
        ]
        begin_s = time.monotonic()
        if how == "kill":
            serving[0].send_signal(signal.SIGKILL)
        elif how == "stop":
            serving[0].send_signal(signal.SIGSTOP)
        else:
            terminate(self._url)
        self._running.remove(serving)
        eventually(lambda: 200 in self.ready())
        took_s = time.monotonic() - begin_s
        if how == "stop":
            with ThreadPoolExecutor(1) as pool:  # what a stopped one gets it never acknowledges
                answer = pool.submit(self._report_to, serving[1])
                serving[0].send_signal(signal.SIGCONT)
                assert answer.result() not in (200, 202)
        assert _ended(serving[0]) == (-signal.SIGKILL if how == "kill" else 2)
        self.start()
        return took_s

    def _report_to(self, address: str) -> int:
        body = {"source": "late", "slowdown": 1.1, "scope": {"kind": "pipeline", "value": 1}}
        try:
            sent = httpx.post(f"{address}/v1/jobs/gpt/reports", json=body, timeout=LONG_S)
        except httpx.RequestError:
            return 0
        return int(sent.status_code)

    def end(self) -> None:
        for process, _ in self._running:
            process.terminate()
        for process, _ in self._running:
            assert _ended(process) == 0


def _ended(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(LONG_S)


def survive(url: str, failures: list[str]) -> float:
    """Fail so often while reports come; returns the longest time until another had taken over."""
    with Storage(url) as storage, Service(storage, run=at_once) as service:
        service.register(job(), frontier_file())
    pair, acknowledged, longest_s = Pair(url), set[str](), 0.0
    try:
        assert pair.ready() == [200, 503]
        for number, how in enumerate(failures):
            for probe in range(5):
                key = f"{number}-{probe}"
                body = {"key": key, "source": key, "slowdown": 1.1, "ttl_s": 3600.0}
                body |= {"scope": {"kind": "pipeline", "value": probe % 3}}
                answer = pair.insist("POST", "/v1/jobs/gpt/reports", json=body)
                assert answer.status_code == 202
                acknowledged.add(key)
            longest_s = max(longest_s, pair.fail(how))
            known = {
                each["key"] for each in pair.insist("GET", "/v1/jobs/gpt/reports").json()["reports"]
            }
            assert acknowledged <= known
    finally:
        pair.end()
    return longest_s


def test_a_second_service_takes_over_from_one_that_is_stopped(url: str):
    """Its connection, and with it the lock, lived on."""
    assert survive(url, ["stop"]) < LATE_S + TAKE_OVER_S


def test_a_writer_that_writes_keeps_its_lock_from_one_that_stands_by(url: str):
    with Storage(url) as storage, Service(storage, now_s=Clock(), run=at_once) as service:
        service.register(job(), frontier_file())
        for late_s, is_ended in ((LATE_S - 8.0, False), (LATE_S + 1.0, True)):
            with storage.transaction():
                storage.execute(
                    "UPDATE meta SET value = CAST(extract(epoch FROM clock_timestamp()) - "
                    "CAST(? AS DOUBLE PRECISION) AS TEXT) WHERE name = 'heartbeat'",
                    late_s,
                )
            with pytest.raises(StandBy):
                Storage(url)
            if not is_ended:
                service.report("gpt", report("b")).result()
        eventually(lambda: is_free(url))  # its connection ends a moment later
        with pytest.raises(Fenced):
            service.report("gpt", report("a")).result()


def is_free(url: str) -> bool:
    """Whether a service can have the database now."""
    with suppress(StandBy), Storage(url):
        return True
    return False


def test_a_second_service_takes_over_with_all_that_was_acknowledged(url: str):
    assert survive(url, ["kill", "terminate"]) < TAKE_OVER_S


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_second_service_takes_over_50_times(url: str):
    rng = random.Random(31)
    longest_s = survive(url, [rng.choice(("kill", "terminate", "stop")) for _ in range(50)])
    print(f"the longest take-over took {longest_s:.1f} s")
    assert longest_s < LATE_S + TAKE_OVER_S
