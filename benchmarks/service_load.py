"""Number 18: the service under load, beside a plain echo of the same framework in the same run."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from itertools import count, islice
from pathlib import Path

from data import STAGES, Case, Size, frontier_of
from results import Section
from service_figures import Alone, Found, Mixed, section_of
from service_processes import Leaders, Row, Server, Spell, echo, leading, look, service, spell

from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import (
    Counters,
    Place,
    Registration,
    ReportRequest,
    Scope,
    TakenRequest,
    to_json,
)

_SLOWDOWNS = (1.3, 1.2, 1.1)
_AGAIN = 0.5  # that share of the reports says what the same probe said last
_RECOVERED = 0.3  # and that share of the others that a pipeline is as fast as ever
_MOST_PER_S = 2000  # reports that are made for a spell without a rate
_SOURCES = 200  # of reports to one job, while nothing else goes on
_ECHO_S = 10.0
_TELEMETRY_S, _SCRAPE_S, _LIST_S, _JOB_S = (
    5.0,
    15.0,
    10.0,
    3.0,
)  # each job; Prometheus; a dashboard's list, and its job
_DASHBOARDS = 2
_LARGE = 3  # registrations of a large job
_PATIENCE_S = 120.0

Jobs = Mapping[str, tuple[Case, int]]
"""Name -> the profile and the microbatches of its frontier."""


def measure(size: Size) -> Section:
    """Everything in one run."""
    kinds = [(case, count) for count in size.load_microbatches for case in size.cases]
    jobs = {f"job-{number:04}": kinds[number % len(kinds)] for number in range(size.load_jobs)}
    with tempfile.TemporaryDirectory() as folder:
        database, echoed = Path(folder) / "service.sqlite", Path(folder) / "echo.sqlite"
        with service(Path(folder) / "alone.sqlite") as server, echo(echoed) as plain:
            by_itself = alone(size, server, plain)
        echoed.unlink()
        with service(database) as server, echo(echoed) as plain:
            found = _run(size, jobs, server, plain, by_itself)
        return section_of(size, found, _lost(database, found.answers()))


def alone(size: Size, server: Server, plain: Server) -> Alone:
    """One client, which posts the next report once one is answered, beside the echo that has each
    on disk; and a large registration. Nothing else goes on.
    """
    kind, pipelines = (size.cases[0], size.load_microbatches[0]), size.load_pipelines
    names = {
        f"{pipelines} pipelines": pipelines,
        f"{size.load_wide:,} pipelines": size.load_wide,
        f"{pipelines} pipelines, {size.load_pending:,} reports pending": pipelines,
    }
    pairs: list[tuple[str, Spell, Spell]] = []
    with Client(f"http://127.0.0.1:{server.port}", timeout_s=_PATIENCE_S) as client:
        jobs = {f"job-{number}": (what, names[what]) for number, what in enumerate(names)}
        for job, (_, count_of) in jobs.items():
            client.register(Registration(job, count_of, _file(*kind), _places(count_of)))
        _have_plans_made(client, {"job-0": kind})
        for number in range(size.load_pending):
            pipeline = Scope("pipeline", str(number % pipelines))
            client.report(
                "job-2",
                ReportRequest(f"later-{number % 4}", pipeline, slowdown=1.2, in_s=1e5),
            )
        for job, (what, count_of) in jobs.items():
            bodies = _news(random.Random(18), job, count_of)
            for _ in range(2):
                posted = list(islice(bodies, round(_MOST_PER_S * size.load_alone_s)))
                asked = (None, size.load_alone_s, (), 1)
                ours = spell(server, posted, *asked)
                theirs = spell(plain, [("/kept", body) for _, body in posted], *asked)
                pairs.append((what, ours, theirs))
        before_s = sum(server.cpu_s())
        large = size.load_pipelines_large
        client.register(Registration("large", large, _file(*kind), _places(large)))
        registering_s = sum(server.cpu_s()) - before_s
    found = [[pair[1:] for pair in pairs if pair[0] == what] for what in names]
    sums = [[one + other for one, other in zip(*each, strict=True)] for each in found]
    return Alone(
        {what: (ours, theirs) for what, (ours, theirs) in zip(names, sums, strict=True)},
        registering_s,
    )


def _run(size: Size, jobs: Jobs, server: Server, plain: Server, by_itself: Alone) -> Found:
    bodies = _bodies(random.Random(18), list(jobs), size.load_pipelines)
    memory = {"begun": server.memory_mib()}
    with Client(f"http://127.0.0.1:{server.port}", timeout_s=_PATIENCE_S) as client:
        registering_s = _register(client, jobs, size.load_pipelines)
        memory["all jobs registered"] = server.memory_mib()
        _have_plans_made(client, jobs)
        leaders = _leaders(client, size)
        with leading(server, leaders) as led:
            _until(lambda: f"planner_http_waiting {len(leaders)}.0" in client.metrics())
            memory["all long polls open"] = server.memory_mib()
            mixed = _mixed(size, client, dict(leaders), server, bodies, led)
            memory["after the reports"] = server.memory_mib()
            echoed = spell(
                plain,
                _echoed(bodies, size.load_per_s, _ECHO_S),
                size.load_per_s,
                min(_ECHO_S, size.load_s),
            )
            peak = spell(
                server,
                list(islice(bodies, round(_MOST_PER_S * size.load_peak_s))),
                None,
                size.load_peak_s,
                [led.process],
            )
            peak_echoed = spell(
                plain, _echoed(bodies, _MOST_PER_S * 4, size.load_peak_s), None, size.load_peak_s
            )
            _all_planned(client)
            seen = led.end()
    return Found(
        registering_s, mixed, echoed, (peak, peak_echoed), leaders, seen, memory, by_itself
    )


def _mixed(
    size: Size,
    client: Client,
    versions: Mapping[str, int],
    server: Server,
    bodies: Iterator[tuple[str, str]],
    led: Leaders,
) -> Mixed:
    """Everything that users have going on at once, with jobs of these versions."""
    jobs = list(versions)
    pages = [("/metrics", "/metrics", _SCRAPE_S)]
    for job in jobs[:_DASHBOARDS]:
        pages += [("/v1/jobs", "/v1/jobs", _LIST_S), ("/v1/jobs/JOB", f"/v1/jobs/{job}", _JOB_S)]
        pages += [("/v1/jobs/JOB/pipelines", f"/v1/jobs/{job}/pipelines", _JOB_S)]
    posted = list(islice(bodies, round(size.load_per_s * size.load_s)))
    telemetry, per_s = _telemetry(jobs, size.load_s), len(jobs) / _TELEMETRY_S
    taken = _taken(versions, round(size.load_taken_per_s * size.load_s))
    with ThreadPoolExecutor(4) as pool:
        looked = pool.submit(
            look, server, [(path, every_s) for _, path, every_s in pages], size.load_s
        )
        sent = pool.submit(spell, server, telemetry, per_s, size.load_s)
        runs = pool.submit(spell, server, taken, size.load_taken_per_s, size.load_s)
        large = pool.submit(_register_large, client, size)
        reported = spell(server, posted, size.load_per_s, size.load_s, [led.process])
        rows: dict[str, list[Row]] = {}
        for (what, *_), found in zip(pages, looked.result(), strict=True):
            rows.setdefault(what, []).extend(found)
        return Mixed(reported, sent.result(), runs.result(), rows, large.result())


def _taken(versions: Mapping[str, int], count_of: int) -> list[tuple[str, str]]:
    """That jobs, one after the other, run their version; each time from a later iteration on."""
    names = [*versions]
    requests = ((names[number % len(names)], number) for number in range(count_of))
    return [
        (f"/v1/jobs/{job}/taken", to_json(TakenRequest(versions[job], number)).decode())
        for job, number in requests
    ]


def _telemetry(jobs: Sequence[str], for_s: float) -> list[tuple[str, str]]:
    """What each job counts every few seconds; one iteration takes 5 s."""
    found = []
    for number in range(1, math.ceil(for_s / _TELEMETRY_S) + 1):
        time_s = _TELEMETRY_S * number
        counters = Counters(
            run="load",
            iterations=number,
            time_s=time_s,
            windows=number,
            gpu_s=time_s,
            metered_s=time_s,
            energy_j=1e5 * number,
            energy_is="simulated",
            set_p50_s=0.01,
            set_p99_s=0.02,
        )
        text = to_json(counters, without_defaults=True).decode()
        found += [(f"/v1/jobs/{job}/telemetry", text) for job in jobs]
    return found


def _register_large(client: Client, size: Size) -> list[tuple[float, float]]:
    """Register large jobs one after the other, which end at once; when each registration began
    and was answered.
    """
    file, pipelines = _file(size.cases[0], size.load_microbatches[0]), size.load_pipelines_large
    job = Registration("large", pipelines, file, _places(pipelines))
    spans = []
    for _ in range(_LARGE):
        time.sleep(size.load_s / (_LARGE + 1))
        begin_s = time.monotonic()
        client.register(job)
        spans.append((begin_s, time.monotonic()))
        client.end(job.name)
    return spans


def _echoed(bodies: Iterator[tuple[str, str]], per_s: float, for_s: float) -> list[tuple[str, str]]:
    return [("/echo", body) for _, body in islice(bodies, round(per_s * for_s))]


def _bodies(rng: random.Random, jobs: Sequence[str], pipelines: int) -> Iterator[tuple[str, str]]:
    """Reports without end, of probes that watch a pipeline each: some say again what was last
    said.
    """
    said: dict[tuple[str, int], float] = {}
    known: list[tuple[str, int]] = []
    for number in count():
        if known and rng.random() < _AGAIN:
            job, pipeline = rng.choice(known)
        else:
            job, pipeline = rng.choice(jobs), rng.randrange(pipelines)
            if (job, pipeline) not in said:
                known.append((job, pipeline))
            said[job, pipeline] = 1.0 if rng.random() < _RECOVERED else rng.choice(_SLOWDOWNS)
        request = _request(f"load-{number}", pipeline, said[job, pipeline])
        yield f"/v1/jobs/{job}/reports", to_json(request, without_defaults=True).decode()


def _news(rng: random.Random, job: str, pipelines: int) -> Iterator[tuple[str, str]]:
    """Reports without end of many probes to one job, each with a slowdown that nobody has said."""
    for number in count():
        source = rng.randrange(_SOURCES)
        scope = Scope("pipeline", str(source % pipelines))
        request = ReportRequest(
            f"probe-{source}",
            scope,
            slowdown=1.0 + 0.3 * rng.random(),
            ttl_s=1800.0,
            cause="data",
            key=f"news-{number}",
        )
        yield f"/v1/jobs/{job}/reports", to_json(request, without_defaults=True).decode()


def _request(key: str, pipeline: int, slowdown: float) -> ReportRequest:
    """As a probe of that pipeline reports it: what it said before counts no more."""
    scope = Scope("pipeline", str(pipeline))
    return ReportRequest(
        f"probe-{pipeline}", scope, slowdown=slowdown, ttl_s=1800.0, cause="data", key=key
    )


@cache
def _file(case: Case, microbatches: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frontier.npz"
        frontier_of(case, microbatches).save(path)
        return path.read_bytes()


@cache
def _places(pipelines: int) -> tuple[Place, ...]:
    """A rank for each stage, on a GPU of its own; a node for each pipeline."""
    return tuple(
        Place(rank, rank // STAGES, (rank % STAGES,), f"node-{rank // STAGES}", f"GPU-{rank:032}")
        for rank in range(pipelines * STAGES)
    )


def _register(client: Client, jobs: Jobs, pipelines: int) -> float:
    """Seconds that it took, one job after the other."""
    files = {name: _file(*kind) for name, kind in jobs.items()}
    begin_s = time.monotonic()
    for name, file in files.items():
        client.register(Registration(name, pipelines, file, _places(pipelines)))
    return time.monotonic() - begin_s


def _have_plans_made(client: Client, jobs: Jobs) -> None:
    """Have every plan that the load will ask for made once: how long that takes is number 5, and
    not the service's.
    """
    first = {kind: name for name, kind in reversed(jobs.items())}
    for slowdown in (*_SLOWDOWNS, 1.0):  # rising speed: that is never held back
        for job in first.values():
            client.report(job, _request(f"first-{slowdown}", 0, slowdown))
        _all_planned(client)


def _all_planned(client: Client) -> None:
    _until(lambda: all(each.version == each.promised for each in client.jobs()))


def _leaders(client: Client, size: Size) -> list[tuple[str, int]]:
    """(job, version that it has): of every job as many as it has pipelines."""
    known = [(each.job.name, each.version) for each in client.jobs()]
    return (known * size.load_pipelines)[: size.load_leaders]


def _lost(database: Path, answers: Sequence[Row]) -> int:
    """How many reports were acknowledged and are not in the database."""
    with closing(sqlite3.connect(database)) as connection:
        kept = {key for (key,) in connection.execute("SELECT key FROM reports")}
    return sum(
        json.loads(row.body)["report"]["key"] not in kept for row in answers if row.status == 202
    )


def _until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError("the service did not get there")
        time.sleep(0.1)
