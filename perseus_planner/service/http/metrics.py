"""What Prometheus reads: requests, those who wait, and every job; on a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.service.outcomes import JobStatus
    from perseus_planner.service.telemetry import JobTelemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """Counts what the service does.

    Args:
        waiting: how many long polls and event streams are open now.
        since_s: when the service began, seconds since the epoch.
    """

    def __init__(self, waiting: Callable[[], int], since_s: float) -> None:
        self._since_s = since_s
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
        of_jobs.register(_Jobs(jobs, self._since_s))
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
    """What jobs are at when they are asked for; counts of those that were heard of since `since_s`.

    What a service that was killed had not written is there again when the job sends its counts the next time. To show
    less until then would count all of it once more, as Prometheus takes a counter that falls to begin anew.
    """

    def __init__(self, jobs: Sequence[JobStatus], since_s: float) -> None:
        self._jobs, self._since_s = jobs, since_s

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("planner_jobs", "Jobs that are registered.", len(self._jobs))
        for name, text, value_of in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=("job",))
            for status in self._jobs:
                value = value_of(status)
                if value is not None:
                    family.add_metric((status.job.name,), value)
            yield family
        heard = [(each.job.name, each.telemetry) for each in self._jobs if each.telemetry is not None]
        yield from _counters([(job, each) for job, each in heard if each.observed_s >= self._since_s])
        yield _latencies(heard)


def _counters(heard: Sequence[tuple[str, JobTelemetry]]) -> Iterator[Metric]:
    for name, text, number_of in _COUNTERS:
        family = CounterMetricFamily(name, text, labels=("job",))
        for job, telemetry in heard:
            family.add_metric((job,), number_of(telemetry))
        yield family
    for name, text, joules_of in _JOULES:
        family = CounterMetricFamily(name, text, labels=("job", "energy"))
        for job, telemetry in heard:
            if telemetry.energy_is is not None:
                family.add_metric((job, telemetry.energy_is), joules_of(telemetry))
        yield family


def _latencies(heard: Sequence[tuple[str, JobTelemetry]]) -> Metric:
    text = "From when a clock is asked for until it is set, of late."
    family = GaugeMetricFamily("planner_job_clock_set_seconds", text, labels=("job", "quantile"))
    for job, telemetry in heard:
        for quantile, seconds in (("0.5", telemetry.set_p50_s), ("0.99", telemetry.set_p99_s)):
            if seconds is not None:
                family.add_metric((job, quantile), seconds)
    return family


_GAUGES: Sequence[tuple[str, str, Callable[[JobStatus], float | None]]] = (
    ("planner_job_version", "The newest version of a job's plans.", lambda status: status.version),
    (
        "planner_job_version_taken",
        "The version that a job runs by, as it last said.",
        lambda status: status.taken.version if status.taken else None,
    ),
    ("planner_job_reports", "Reports that count now or are to count.", lambda status: len(status.reports)),
    ("planner_job_stragglers", "Pipelines that straggle.", lambda status: len(status.decision.stragglers)),
    (
        "planner_job_straggler_time_seconds",
        "The iteration time that all pipelines of a job wait for.",
        lambda status: status.decision.straggler_time_s,
    ),
    (
        "planner_job_expected_saving_watts",
        "What all GPUs of a job are expected to save, by the bounds of its frontier.",
        lambda status: status.expected_saving_w,
    ),
    (
        "planner_job_expected_watts",
        "What all GPUs of a job draw by its plans, as foreseen by these.",
        lambda status: status.expected.power_w,
    ),
    (
        "planner_job_expected_baseline_watts",
        "What they would draw with all clocks at maximum, as foreseen by the profile.",
        lambda status: status.expected.baseline_power_w,
    ),
    (
        "planner_job_watts",
        "What all GPUs of a job drew of late.",
        lambda status: status.telemetry.power_w if status.telemetry else None,
    ),
    (
        "planner_job_iteration_seconds",
        "What an iteration of a job took of late.",
        lambda status: status.telemetry.iteration_s if status.telemetry else None,
    ),
    (
        "planner_job_saved_joules",
        "What was saved since a job was registered: its baseline less its energy. It may fall.",
        lambda status: status.telemetry.saved_j if status.telemetry and status.telemetry.energy_is else None,
    ),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[JobTelemetry], float]]] = (
    ("planner_job_iterations", "Iterations of a job since it was registered.", lambda telemetry: telemetry.iterations),
    (
        "planner_job_late_clock_changes",
        "Clock changes that came when much of their computation was over.",
        lambda telemetry: telemetry.late_changes,
    ),
)
_JOULES: Sequence[tuple[str, str, Callable[[JobTelemetry], float]]] = (
    ("planner_job_energy_joules", "What all GPUs of a job have taken.", lambda telemetry: telemetry.energy_j),
    (
        "planner_job_baseline_joules",
        "What they would have taken with all clocks at maximum in iterations as long, by the profile.",
        lambda telemetry: telemetry.baseline_j,
    ),
)
