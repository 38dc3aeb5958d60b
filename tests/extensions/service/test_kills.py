"""`planner serve` is killed again and again while many talk to it: what it has said stays true."""

from __future__ import annotations

import base64
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from services import PIPELINES, frontier_file, service_at
from serving import Serving
from waiting import LONG_S

from perseus_planner.extensions.service.models import RegisteredJob

httpx = pytest.importorskip("httpx")

REPORTERS, WATCHERS, JOBS = 6, 4, 3
MOST_REPORTS = 150  # of a job, which then ends


@dataclass
class Told:
    """What the service has told its clients, all of which must stay true.

    Attributes:
        jobs: name -> keys of the reports that it acknowledged, of the jobs that run for certain.
        leaving: jobs that somebody is about to end.
        ended: those whose end it acknowledged.
        promised, published: job -> the highest version that it promised, and that it gave.
        reports: how many it acknowledged.
        wrong: what it should not have said.
        lock: of all of these.
        up: it runs, as far as is known.
        over: everybody is to stop.
    """

    jobs: dict[str, set[str]] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    promised: dict[str, int] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    reports: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    up: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def some_job(self, rng: random.Random) -> str | None:
        with self.lock:
            return rng.choice(sorted(self.jobs)) if self.jobs else None

    def has_gone(self, job: str) -> bool:
        """Nobody can expect it to be there."""
        with self.lock:
            return job in self.leaving or job in self.ended

    @contextmanager
    def rising(self, versions: dict[str, int], job: str) -> Iterator[Callable[[int], None]]:
        """Check the version that is given to what this yields: those of whoever was answered
        before are no higher.
        """
        with self.lock:
            before = versions.get(job, 0)

        def seen(version: int) -> None:
            with self.lock:
                if version < before:
                    self.wrong.append(f"{job}: version {version} after {before}")
                versions[job] = max(version, versions.get(job, 0))

        yield seen


class Talker:
    """A client, with a connection of its own, until all is over."""

    def __init__(self, address: str, told: Told, seed: int) -> None:
        self.told, self.rng = told, random.Random(seed)
        self._http = httpx.Client(base_url=address, timeout=LONG_S)

    def run(self) -> None:
        with self._http:
            while not self.told.over.is_set():
                self.talk()

    def talk(self) -> None:
        raise NotImplementedError

    def ask(self, method: str, path: str, **sent: Any) -> Any:
        """Its answer; None: it died meanwhile, so nobody knows what it did."""
        try:
            answer = self._http.request(method, path, **sent)
        except httpx.RequestError:
            self.told.up.wait(0.05)  # the one that is no more may still be taken to be up
            return None
        if answer.status_code >= 500:
            self.told.wrong.append(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer

    def insist(self, method: str, path: str, **sent: Any) -> Any:
        """The same again and again until there is an answer; None: all is over."""
        while not self.told.over.is_set():
            answer = self.ask(method, path, **sent)
            if answer is not None:
                return answer
            self.told.up.wait(1.0)
        return None


class Reporter(Talker):
    """Reports with keys; some again, some twice, some later than they were observed, some never
    again when lost.
    """

    def __init__(self, address: str, told: Told, seed: int) -> None:
        super().__init__(address, told, seed)
        self._made = 0
        self._bag: list[tuple[str, dict[str, Any]]] = []
        self._name = f"reporter-{seed}"

    def talk(self) -> None:
        job = self.told.some_job(self.rng)
        if job is None:
            return
        self._bag.append((job, self._report()))
        self.rng.shuffle(self._bag)
        while len(self._bag) > 4:
            job, body = self._bag.pop()
            self._send(job, body)
            if self.rng.random() < 0.2:
                self._bag.append((job, body))  # once more, whether it was acknowledged or not

    def _report(self) -> dict[str, Any]:
        self._made += 1
        key = f"{self._name}.{self._made}"
        scope = {"kind": "pipeline", "value": self.rng.randrange(PIPELINES)}
        return {
            "key": key,
            "source": key,
            "scope": scope,
            "slowdown": self.rng.choice((1.1, 1.2, 1.3)),
        } | {"observed_s": time.time() - self.rng.random()}

    def _send(self, job: str, body: dict[str, Any]) -> None:
        ask = self.insist if self.rng.random() < 0.8 else self.ask
        with self.told.rising(self.told.promised, job) as seen:
            answer = ask("POST", f"/v1/jobs/{job}/reports", json=body)
            if answer is None:
                return
            if answer.status_code == 202:
                seen(answer.json()["version"])
                with self.told.lock:
                    self.told.reports += 1
                    self.told.jobs.get(job, set()).add(body["key"])
            elif not (answer.status_code == 404 and self.told.has_gone(job)):
                self.told.wrong.append(f"{job}: report {body}: {answer.status_code} {answer.text}")


class Watcher(Talker):
    """Waits for plans, as the leader of a pipeline does."""

    def talk(self) -> None:
        job = self.told.some_job(self.rng)
        if job is None:
            return
        with self.told.lock:
            after = self.told.published.get(job, 0)
        if self.rng.random() < 0.5:
            after = max(0, after - 1)
        with self.told.rising(self.told.published, job) as seen:
            answer = self.insist(
                "GET", f"/v1/jobs/{job}/plans", params={"after": after, "wait_s": 0.5}
            )
            if answer is not None and answer.status_code == 200:
                seen(answer.json()["version"])


class Comer(Talker):
    """Registers jobs, and ends each once much has been reported of it."""

    def __init__(self, address: str, told: Told, seed: int) -> None:
        super().__init__(address, told, seed)
        self._made = 0
        self._frontier = base64.b64encode(frontier_file()).decode()

    def talk(self) -> None:
        told = self.told
        with told.lock:
            full = [name for name, keys in told.jobs.items() if len(keys) >= MOST_REPORTS]
            few = len(told.jobs) < JOBS
        if few:
            self._register()
        elif full:
            self._end(full[0])
        else:
            told.over.wait(0.01)

    def _register(self) -> None:
        self._made += 1
        name = f"job-{self._made}"
        body = {"name": name, "frontier": self._frontier, "pipelines": PIPELINES}
        answer = self.insist("POST", "/v1/jobs", json=body)
        if answer is not None:
            assert answer.status_code in (200, 201), answer.text
            with self.told.lock:
                self.told.jobs[name] = set()

    def _end(self, name: str) -> None:
        with self.told.lock:
            self.told.leaving.add(name)
            del self.told.jobs[name]
        answer = self.insist("DELETE", f"/v1/jobs/{name}")
        if answer is not None:
            assert answer.status_code in (204, 404), (
                answer.text
            )  # 404: it had ended before the answer was lost
            with self.told.lock:
                self.told.ended.add(name)


def survive(folder: Path, kills: int, lives_s: tuple[float, ...]) -> Told:
    """Kill the service so many times while clients talk to it, and check what it says each time it
    is back.

    It lives for any time up to one of `lives_s`.
    """
    told, serving = Told(), Serving(folder)
    with service_at(folder / "service.sqlite") as service:
        for number in range(JOBS):
            service.register(RegisteredJob(f"first-{number}", PIPELINES, ""), frontier_file())
            told.jobs[f"first-{number}"] = set()
    try:
        serving.start()
        talk_and_kill(serving, told, kills, lives_s)
        check(serving.address, told)
        check_promised(serving.address, told)
    finally:
        serving.end(signal.SIGTERM)
    assert told.wrong == []
    return told


def talk_and_kill(serving: Serving, told: Told, kills: int, lives_s: tuple[float, ...]) -> None:
    rng = random.Random(18)
    told.up.set()
    kinds = [Comer, *[Reporter] * REPORTERS, *[Watcher] * WATCHERS]
    talkers = [kind(serving.address, told, seed) for seed, kind in enumerate(kinds)]
    with ThreadPoolExecutor(len(talkers)) as pool:
        talking = [pool.submit(talker.run) for talker in talkers]
        try:
            for _ in range(kills):
                told.over.wait(rng.uniform(0.0, rng.choice(lives_s)))
                kill(serving, told)
                serving.start()
                told.up.set()
                check(serving.address, told)
                assert not any(talker.done() for talker in talking)
        finally:
            told.over.set()
    for talker in talking:
        talker.result()


def kill(serving: Serving, told: Told) -> None:
    """Nothing that the service has started outlives it."""
    children = serving.children()
    told.up.clear()
    serving.end(signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=LONG_S)[1] == []


def check(address: str, told: Told) -> None:
    """All acknowledged reports are there, and no job that has ended."""
    with told.lock:
        kept, ended = {name: set(keys) for name, keys in told.jobs.items()}, sorted(told.ended)
    with httpx.Client(base_url=address, timeout=LONG_S) as client:
        for name, keys in kept.items():
            answer = client.get(f"/v1/jobs/{name}/reports")
            if answer.status_code == 404:
                assert told.has_gone(name)
            else:
                assert keys <= {each["key"] for each in answer.json()["reports"]}
        there = {each["job"]["name"] for each in client.get("/v1/jobs").json()["jobs"]}
        assert there.isdisjoint(ended)
        assert all(client.get(f"/v1/jobs/{name}").status_code == 404 for name in ended)


def check_promised(address: str, told: Told) -> None:
    """Versions that reports were promised come."""
    with httpx.Client(base_url=address, timeout=LONG_S) as client:
        for name in told.jobs:
            promised = told.promised.get(name, 1)
            url = f"/v1/jobs/{name}/plans?after={promised - 1}&wait_s=60"
            answer = client.get(url)
            while answer.status_code == 204:  # a busy machine plans for longer
                answer = client.get(url)
            assert answer.status_code == 200
            assert answer.json()["version"] >= promised


def test_what_is_said_over_http_stays_true_when_the_service_is_killed(tmp_path: Path):
    assert survive(tmp_path, kills=3, lives_s=(0.5,)).reports > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_is_said_over_http_stays_true_in_200_kills(tmp_path: Path):
    told = survive(tmp_path, kills=200, lives_s=(0.2, 1.0, 4.0))
    print(f"{told.reports} reports acknowledged, {len(told.ended)} jobs ended")
    assert told.reports > 1000
    assert told.ended
