"""Number 18: the service under load, beside a plain echo of the same framework in the same run."""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from itertools import count, islice
from pathlib import Path

from data import STAGES, Case, Size, frontier_of
from results import Section
from service_figures import Change, Found, section_of
from service_processes import Row, Server, Spell, echo, leading, service, spell

from perseus_planner.service.client.client import Client
from perseus_planner.service.model import Place, Scope
from perseus_planner.service.schemas import Registration, ReportRequest, to_json

PIPELINES = 16
_PLACES = tuple(
    Place(rank, rank // STAGES, (rank % STAGES,), f"node-{rank // STAGES}", f"GPU-{rank:08}")
    for rank in range(PIPELINES * STAGES)
)
_SLOWDOWNS = (1.3, 1.2, 1.1)
_AGAIN, _MOSTLY_AGAIN = 0.5, 0.95  # that share of the reports says what the same probe said last
_RECOVERED = 0.3  # and that share of the others that a pipeline is as fast as ever
_MOST_PER_S = 2000  # reports that are made for a spell without a rate
_BUDGET = 0.9  # of what all jobs draw as they are registered
_PATIENCE_S = 120.0

Jobs = Mapping[str, tuple[Case, int]]
"""Name -> the profile and the microbatches of its frontier."""


def measure(size: Size) -> Section:
    """Everything in one run."""
    kinds = [(case, count) for count in size.load_microbatches for case in size.cases]
    jobs = {f"job-{number:04}": kinds[number % len(kinds)] for number in range(size.load_jobs)}
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "service.sqlite"
        with service(database) as server, echo() as plain:
            found = _run(size, jobs, server, plain)
        return section_of(size, found, _lost(database, found.answers()))


def _run(size: Size, jobs: Jobs, server: Server, plain: Server) -> Found:
    bodies = _bodies(random.Random(18), list(jobs), _AGAIN)
    calmer = _bodies(random.Random(19), list(jobs), _MOSTLY_AGAIN)
    memory = {"begun": server.memory_mib()}
    with Client(f"http://127.0.0.1:{server.port}", timeout_s=_PATIENCE_S) as client:
        registering_s = _register(client, jobs)
        memory["all jobs registered"] = server.memory_mib()
        _have_plans_made(client, jobs)
        leaders = _leaders(client, size.load_leaders)
        with leading(server, leaders) as led:
            _until(lambda: f"planner_http_waiting {len(leaders)}.0" in client.metrics())
            memory["all long polls open"] = server.memory_mib()
            loaded = _beside(server, plain, bodies, size.load_per_s, size.load_s, led.process)
            memory["after the reports"] = server.memory_mib()
            fewer = _beside(server, plain, bodies, size.load_per_s / 2, size.load_s, led.process)
            calm = _beside(server, plain, calmer, size.load_per_s, size.load_s, led.process)
            peak = _beside(server, plain, bodies, None, size.load_peak_s, led.process)
            _all_planned(client)
            budgets = _budgets(client, jobs)
            seen = led.end()
    return Found(registering_s, loaded, fewer, calm, peak, budgets, leaders, seen, memory)


def _beside(
    server: Server, plain: Server, bodies: Iterator[tuple[str, str]], per_s: float | None, for_s: float, led: object
) -> tuple[Spell, Spell]:
    """A spell of the service, and of the echo before and after it, half as long each."""

    def echoed() -> Spell:
        posted = islice(bodies, round((per_s or _MOST_PER_S) * for_s / 2))
        return spell(plain, [("/echo", body) for _, body in posted], per_s, for_s / 2)

    first = echoed()
    reported = spell(server, list(islice(bodies, round((per_s or _MOST_PER_S) * for_s))), per_s, for_s, [led])
    return reported, first + echoed()


def _bodies(rng: random.Random, jobs: Sequence[str], again: float) -> Iterator[tuple[str, str]]:
    """Reports without end, of probes that watch a pipeline each: that share says again what was last said."""
    said: dict[tuple[str, int], float] = {}
    known: list[tuple[str, int]] = []
    for number in count():
        if known and rng.random() < again:
            job, pipeline = rng.choice(known)
        else:
            job, pipeline = rng.choice(jobs), rng.randrange(PIPELINES)
            if (job, pipeline) not in said:
                known.append((job, pipeline))
            said[job, pipeline] = 1.0 if rng.random() < _RECOVERED else rng.choice(_SLOWDOWNS)
        request = _request(f"load-{again}-{number}", pipeline, said[job, pipeline])
        yield f"/v1/jobs/{job}/reports", to_json(request, without_nulls=True).decode()


def _request(key: str, pipeline: int, slowdown: float) -> ReportRequest:
    """As a probe of that pipeline reports it: what it said before counts no more."""
    scope = Scope("pipeline", str(pipeline))
    return ReportRequest(f"probe-{pipeline}", scope, slowdown=slowdown, ttl_s=1800.0, cause="data", key=key)


@cache
def _file(case: Case, microbatches: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frontier.npz"
        frontier_of(case, microbatches).save(path)
        return path.read_bytes()


def _register(client: Client, jobs: Jobs) -> float:
    """Seconds that it took, one job after the other."""
    files = {name: _file(*kind) for name, kind in jobs.items()}
    begin_s = time.monotonic()
    for name, file in files.items():
        client.register(Registration(name, PIPELINES, file, _PLACES))
    return time.monotonic() - begin_s


def _have_plans_made(client: Client, jobs: Jobs) -> None:
    """Have every plan that the load will ask for made once: how long that takes is number 5, and not the service's."""
    first = {kind: name for name, kind in reversed(jobs.items())}
    for slowdown in (*_SLOWDOWNS, 1.0):  # rising speed: that is never held back
        for job in first.values():
            client.report(job, _request(f"first-{slowdown}", 0, slowdown))
        _all_planned(client)


def _all_planned(client: Client) -> None:
    _until(lambda: all(each.version == each.promised for each in client.jobs()))


def _leaders(client: Client, count: int) -> list[tuple[str, int, int]]:
    """(job, pipeline, version that it has): of every job the first pipelines."""
    known = [(pipeline, each) for pipeline in range(PIPELINES) for each in client.jobs()]
    return [(each.job.name, pipeline, each.version) for pipeline, each in known[:count]]


def _budgets(client: Client, jobs: Jobs) -> dict[str, list[Change]]:
    """What a power budget of all jobs changes, and what lifting it does, when all plans have been made already."""
    drawn_w = sum(_draws_w(*kind) for kind in jobs.values())
    found = {}
    for what, power_w in (("a power budget of all jobs", _BUDGET * drawn_w), ("that budget lifted", None)):
        sent_s = time.monotonic()
        answers = client.set_power(power_w)
        found[what] = [
            Change(each.job, each.version, sent_s, each.takes_effect == "planning") for each in answers if each.changed
        ]
        _all_planned(client)
        time.sleep(1.0)  # to reach: by then all are served
    return found


def _draws_w(case: Case, microbatches: int) -> float:
    frontier = frontier_of(case, microbatches)
    return PIPELINES * frontier.bound_j(frontier.baseline_time_s) / frontier.baseline_time_s


def _lost(database: Path, answers: Sequence[Row]) -> int:
    """How many reports were acknowledged and are not in the database."""
    with closing(sqlite3.connect(database)) as connection:
        states = [json.loads(state) for (state,) in connection.execute("SELECT state FROM jobs")]
    kept = {report["key"] for state in states for kind in ("reports", "past") for report in state[kind]}
    return sum(json.loads(row.body)["report"]["key"] not in kept for row in answers if row.status == 202)


def _until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError("the service did not get there")
        time.sleep(0.1)
