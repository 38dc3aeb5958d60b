"""What the tests of the service share: a small frontier, a clock that stands still, and waiting
for plans.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from strategies import smooth_profile
from waiting import LONG_S

from perseus_planner import Frontier, schedules, solve
from perseus_planner.extensions.service.access import Limits, Token
from perseus_planner.extensions.service.models import Place, RegisteredJob, Report, Scope
from perseus_planner.extensions.service.serve import Address, listening, server_of
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage
from perseus_planner.plans.replay import time_and_energy
from perseus_planner.schedules.dag import PipelineDag

PIPELINES, STAGES = 3, 2
NOW_S = 1_800_000_000.0


@cache
def small_frontier() -> Frontier:
    return solve(smooth_profile(STAGES, 90), schedules.one_f_one_b(stages=STAGES, microbatches=3))


def baseline_s() -> float:
    """Of that frontier, replayed: modules ask for it, and to solve takes seconds where nothing
    is compiled.
    """
    dag = PipelineDag.from_schedule(
        smooth_profile(STAGES, 90), schedules.one_f_one_b(stages=STAGES, microbatches=3)
    )
    return time_and_energy(dag, dag.baseline_measurements())[0]


@cache
def frontier_file(step_mhz: int = 90) -> bytes:
    """The file of a small frontier; another one for another step."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "frontier.npz"
        schedule = schedules.one_f_one_b(stages=STAGES, microbatches=3)
        solve(smooth_profile(STAGES, step_mhz), schedule).save(path)
        return path.read_bytes()


def job(name: str = "gpt", **settings: Any) -> RegisteredJob:
    """A rank for each stage of each pipeline, two ranks on a node."""
    ranks = [(pipeline, stage) for pipeline in range(PIPELINES) for stage in range(STAGES)]
    places = tuple(
        Place(rank, pipeline, (stage,), f"node{pipeline}", f"GPU-{rank}")
        for rank, (pipeline, stage) in enumerate(ranks)
    )
    return RegisteredJob(name, PIPELINES, "", places, **settings)


def report(
    key: str, pipeline: int = 1, slowdown: float = 1.3, source: str = "ops", **fields: Any
) -> Report:
    """That a pipeline is slow."""
    times = {"observed_s": NOW_S, "begins_s": NOW_S} | fields
    return Report(
        key, source, times.pop("scope", Scope("pipeline", str(pipeline))), slowdown, None, **times
    )


def at_once(function: Any, *arguments: Any) -> Any:
    """Solves and plans on the thread that wants it."""
    return function(*arguments)


class Clock:
    """Time that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def service_at(
    place: str | Path, clock: Callable[[], float] | None = None, run: Any = at_once
) -> Iterator[Service]:
    """A service with its database at `place`, by the true time without a clock; it never stops
    hearing of a job.
    """
    with (
        Storage(place) as storage,
        Service(storage, now_s=clock, run=run, lease_s=math.inf) as service,
    ):
        yield service


def planned(service: Service, timeout_s: float = LONG_S) -> None:
    """Wait until every version that was promised is there."""
    told = threading.Event()
    with heard(service, lambda job, version: told.set()):
        while any(status.promised > status.version for status in service.jobs()):
            assert told.wait(timeout_s), "a promised version did not come"
            told.clear()


@contextmanager
def heard(service: Service, listen: Callable[[str, int], None]) -> Iterator[None]:
    """Hear of versions besides who does already."""
    before = service.on_version

    def both(job: str, version: int) -> None:
        listen(job, version)
        before(job, version)

    service.on_version = both
    try:
        yield
    finally:
        service.on_version = before


@contextmanager
def versions_told(service: Service) -> Iterator[dict[str, list[int]]]:
    """Every version that is told of, by job."""
    told: dict[str, list[int]] = {}
    with heard(service, lambda job, version: told.setdefault(job, []).append(version)):
        yield told


@contextmanager
def serving(
    service: Service, address: Address, tokens: tuple[Token, ...] = (), limits: Limits | None = None
) -> Iterator[str]:
    """Serve on a thread of this process until the block ends, which gets the URL."""
    with listening(address, tokens) as listener:
        server = server_of(service, listener, lambda: None, limits or Limits())
        thread = threading.Thread(target=server.run, args=([listener.socket],))
        # clients that connect early wait for a moment, as the socket already listens
        thread.start()
        try:
            yield listener.url
        finally:
            server.should_exit = True
            thread.join()
