"""What Prometheus reads: requests, those who wait, and every job; on a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.runtime.service.outcomes import JobStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """Counts what the service does.

    Args:
        waiting: how many long polls and event streams are open now.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "planner_http_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "planner_http_request_seconds",
            "From the head of a request to the end of its answer; long polls wait on purpose.",
            ("route",),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._alerts = Counter("planner_alerts", "Alerts received.", ("outcome",), registry=self._registry)
        waits = Gauge("planner_http_waiting", "Long polls and event streams that are open.", registry=self._registry)
        waits.set_function(waiting)

    def text(self, jobs: Sequence[JobStatus]) -> bytes:
        """All of it, with these jobs, in the text format of Prometheus."""
        of_jobs = CollectorRegistry()
        of_jobs.register(_Jobs(jobs))
        return generate_latest(self._registry) + generate_latest(of_jobs)

    def alerted(self, received: int, ignored: int) -> None:
        """Count alerts, and those of them that no job has taken."""
        self._alerts.labels("ignored").inc(ignored)
        self._alerts.labels("reported").inc(received - ignored)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """`app`, whose requests are counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began_s, status = time.perf_counter(), 500

            async def sending(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, sending)
            finally:
                # Only names that there are a few of: whoever asks for many addresses must not fill the memory.
                method = scope["method"] if scope["method"] in _METHODS else "other"
                route = getattr(scope.get("route"), "path", "other")
                self._requests.labels(method, route, str(status)).inc()
                self._seconds.labels(route).observe(time.perf_counter() - began_s)

        return counted


class _Jobs(Collector):
    """What jobs are at when they are asked for."""

    def __init__(self, jobs: Sequence[JobStatus]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("planner_jobs", "Jobs that are registered.", len(self._jobs))
        of_each: dict[str, tuple[str, Callable[[JobStatus], float | None]]] = {
            "planner_job_version": ("The newest version of a job's plans.", lambda status: status.version),
            "planner_job_version_taken": (
                "The version that a job runs by, as it last said.",
                lambda status: status.taken.version if status.taken else None,
            ),
            "planner_job_reports": ("Reports that count now or are to count.", lambda status: len(status.reports)),
            "planner_job_stragglers": ("Pipelines that straggle.", lambda status: len(status.decision.stragglers)),
            "planner_job_straggler_time_seconds": (
                "The iteration time that all pipelines of a job wait for.",
                lambda status: status.decision.straggler_time_s,
            ),
            "planner_job_expected_saving_watts": (
                "What all GPUs of a job are expected to save, by the bounds of its frontier.",
                lambda status: status.expected_saving_w,
            ),
        }
        for name, (text, value_of) in of_each.items():
            family = GaugeMetricFamily(name, text, labels=("job",))
            for status in self._jobs:
                value = value_of(status)
                if value is not None:
                    family.add_metric((status.job.name,), value)
            yield family
