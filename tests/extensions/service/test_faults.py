"""Faults that do not kill the service, drawn one after the other while reports come: its log or its
database is taken away, it is stopped for a while, or one of its threads ends.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from services import frontier_file, job, service_at
from serving import Serving
from waiting import LONG_S, eventually

httpx = pytest.importorskip("httpx")

NOTICED_S = 10.0
"""Within which the service says that it is not ready, or has ended. It looks for its files with
each transaction, and every 30 s without any; here reports come all the time.
"""


class Reports:
    """Somebody who reports all the time.

    Attributes:
        acknowledged: The keys of reports that the service has acknowledged.
    """

    def __init__(self, address: str, begin: int) -> None:
        self.acknowledged: set[str] = set()
        self._address = address
        self._number = begin
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> Reports:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._over.is_set():
            self._number += 1
            key = f"r{self._number}"
            body = {"key": key, "source": key, "slowdown": 1.1, "ttl_s": 3600.0}
            body |= {"scope": {"kind": "pipeline", "value": self._number % 3}}
            url = f"{self._address}/v1/jobs/gpt/reports"
            with suppress(httpx.RequestError):
                if httpx.post(url, json=body, timeout=LONG_S).status_code == 202:
                    self.acknowledged.add(key)
            self._over.wait(0.02)


def is_ready(address: str) -> bool:
    with suppress(httpx.RequestError):
        return bool(httpx.get(f"{address}/readyz", timeout=LONG_S).status_code == 200)
    return False


def take_log(folder: Path, serving: Serving) -> Callable[[], None]:
    (folder / "service.sqlite-wal").unlink()
    return lambda: None


def take_file(folder: Path, serving: Serving) -> Callable[[], None]:
    """Somebody moves the database, and gives it back with its log."""
    kept = folder / "kept"
    kept.mkdir()
    names = ["service.sqlite", "service.sqlite-wal", "service.sqlite-shm"]
    for name in names:
        (folder / name).rename(kept / name)

    def give_back() -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                (kept / name).rename(folder / name)
        kept.rmdir()

    return give_back


def stop(folder: Path, serving: Serving) -> None:
    """It is stopped for a moment, as a virtual machine that is moved."""
    serving.send(signal.SIGSTOP)
    time.sleep(1.0)
    serving.send(signal.SIGCONT)


FAULTS = {"its log is removed": take_log, "its file is moved": take_file, "it is stopped": stop}


def survive(folder: Path, faults: int) -> int:
    """Have so many faults, drawn, and check what the service says; how many reports came."""
    with service_at(folder / "service.sqlite") as service:
        service.register(job(), frontier_file())
    rng = random.Random(55)
    kept: set[str] = set()
    serving = Serving(folder)
    serving.start()
    count = 0
    for number in range(faults):
        name = rng.choice(sorted(FAULTS))
        with Reports(serving.address, 1_000_000 * number) as reports:
            eventually(lambda: len(reports.acknowledged) > 3)
            time.sleep(rng.uniform(0.0, 0.3))
            begin_s = time.monotonic()
            mend = FAULTS[name](folder, serving)
            if mend is None:
                before = len(reports.acknowledged)
                eventually(lambda least=before: len(reports.acknowledged) > least)
                assert is_ready(serving.address), name
            else:
                eventually(lambda: not is_ready(serving.address))
                assert time.monotonic() - begin_s < NOTICED_S, name
        kept |= reports.acknowledged
        count += len(reports.acknowledged)
        if mend is not None:
            serving.wait()  # it ends by itself, as it can never write again
            mend()
            serving.start()
            eventually(lambda: is_ready(serving.address))
        answer = httpx.get(f"{serving.address}/v1/jobs/gpt/reports", timeout=LONG_S)
        there = {each["key"] for each in answer.json()["reports"]}
        assert kept <= there, (name, len(kept - there))
        for key in there:  # a job may have so many
            url = f"{serving.address}/v1/jobs/gpt/reports/{key}"
            httpx.delete(url, timeout=LONG_S).raise_for_status()
        kept.clear()
    serving.end(signal.SIGTERM)
    return count


def test_drawn_faults_lose_nothing_and_are_seen(tmp_path: Path):
    assert survive(tmp_path, 3) > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_40_drawn_faults_lose_nothing_and_are_seen(tmp_path: Path):
    print(f"{survive(tmp_path, 40)} reports acknowledged")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_schedule_of_all_jobs_begins_in_time_while_jobs_are_silent(tmp_path: Path):
    """On a real server: half of 20 jobs fall silent a minute after its start, and budgets begin
    before, meanwhile and after.
    """
    with service_at(tmp_path / "service.sqlite") as service:
        for number in range(20):
            service.register(job(f"gpt-{number}"), frontier_file())
        full_w = service.status("gpt-0").expected.baseline_power_w
    serving = Serving(tmp_path, "--lease", "60")
    serving.start()
    late_s = []
    try:
        begin_s = time.time()
        # around the moment when leases end
        starts_s = [begin_s + passed_s for passed_s in (5.0, 20.0, 58.0, 60.0, 62.0, 70.0, 80.0)]
        steps = [
            {"start_s": start_s, "power_w": (30.0 - number) * full_w}
            for number, start_s in enumerate(starts_s)
        ]
        with httpx.Client(base_url=serving.address, timeout=LONG_S) as client:
            asked = client.put("/v1/power", json={"power_w": 40.0 * full_w, "schedule": steps})
            asked.raise_for_status()
            for step in steps:
                while client.get("/v1/power").json()["power_w"] != pytest.approx(step["power_w"]):
                    for number in range(10):
                        client.get(f"/v1/jobs/gpt-{number}/plans")
                    time.sleep(0.02)
                late_s.append(time.time() - step["start_s"])
            jobs = client.get("/v1/jobs").json()["jobs"]
        assert sum(each["silent_since_s"] is not None for each in jobs) == 10
    finally:
        serving.end(signal.SIGTERM)
    print("seconds late:", [round(each, 2) for each in late_s])
    assert max(late_s) <= 2.0
