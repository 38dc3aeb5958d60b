"""Metrics for Prometheus: requests, open long polls, and every job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perseus_planner.service.models import JobStatus, JobTelemetry

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """Counts requests, on a registry separate from that of the process.

    Args:
        waiting: Returns how many long polls are open.
        since_s: When the service began, seconds since the epoch.
    """

    def __init__(self, waiting: Callable[[], int], since_s: float) -> None:
        self._since_s = since_s
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "planner_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "planner_http_request_seconds",
            "Time from the head of a request to the end of its answer; long polls wait on purpose.",
            ("route",),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._alerts = Counter(
            "planner_alerts", "Alerts received.", ("outcome",), registry=self._registry
        )
        waits = Gauge("planner_http_waiting", "Open long polls.", registry=self._registry)
        waits.set_function(waiting)

    def text(self, jobs: Sequence[JobStatus]) -> bytes:
        """Return all metrics, with those of `jobs`, in the text format of Prometheus."""
        of_jobs = CollectorRegistry()
        of_jobs.register(_Jobs(jobs, self._since_s))
        return generate_latest(self._registry) + generate_latest(of_jobs)

    def count_alerts(self, received: int, ignored: int) -> None:
        """Count alerts, and those of them that were ignored."""
        self._alerts.labels("ignored").inc(ignored)
        self._alerts.labels("reported").inc(received - ignored)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with its requests counted."""

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
                # Only a few names are used as labels, so that requests for many paths do not fill
                # the memory.
                method = scope["method"] if scope["method"] in _METHODS else "other"
                route = getattr(scope.get("route"), "path", "other")
                self._requests.labels(method, route, str(status)).inc()
                took_s = time.perf_counter() - began_s
                self._seconds.labels(route).observe(took_s)
                _log.debug("%s %s: %d in %.1f ms", method, scope["path"], status, 1e3 * took_s)

        return counted


class _Jobs(Collector):
    """Metrics of jobs, computed when they are read; counters only of jobs that sent telemetry after
    `since_s`. The label is not `job`, which Prometheus sets to its own name for what it scrapes.

    Telemetry that a killed service had not written returns with the job's next message. Showing a
    lower counter until then would count everything once more, as Prometheus takes a counter that
    falls as restarted.
    """

    def __init__(self, jobs: Sequence[JobStatus], since_s: float) -> None:
        self._jobs, self._since_s = jobs, since_s

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("planner_jobs", "Jobs that are registered.", len(self._jobs))
        told = [(each.job.name, each.telemetry) for each in self._jobs if each.telemetry]
        yield from _families(
            GaugeMetricFamily, _GAUGES, [(each.job.name, each) for each in self._jobs]
        )
        yield from _families(GaugeMetricFamily, _TELEMETRY, told)
        counted = [(name, each) for name, each in told if each.observed_s >= self._since_s]
        yield from _families(CounterMetricFamily, _COUNTERS, counted)
        for name, text, joules_of in _JOULES:
            family = CounterMetricFamily(name, text, labels=("training_job", "energy"))
            for job, telemetry in counted:
                if telemetry.energy_is is not None:
                    family.add_metric((job, telemetry.energy_is), joules_of(telemetry))
            yield family


def _families(
    kind: Callable[..., Metric], table: Iterable[Row], values: Iterable[tuple[str, Any]]
) -> Iterator[Metric]:
    """Yield a metric for each row, of jobs whose number is known."""
    for name, text, number_of in table:
        family: Any = kind(name, text, labels=("training_job",))
        for job, value in values:
            if (number := number_of(value)) is not None:
                family.add_metric((job,), number)
        yield family


Row = tuple[str, str, Callable[[Any], "float | None"]]
"""Name and text of a metric, and its number."""
_GAUGES: Sequence[Row] = (
    ("planner_job_version", "The newest version of a job's plans.", lambda status: status.version),
    (
        "planner_job_version_taken",
        "The version that a job runs, as it last reported.",
        lambda status: status.taken and status.taken.version,
    ),
    (
        "planner_job_reports",
        "Reports that count now or will count.",
        lambda status: len(status.reports),
    ),
    (
        "planner_job_stragglers",
        "Pipelines that straggle.",
        lambda status: len(status.decision.stragglers),
    ),
    (
        "planner_job_straggler_time_seconds",
        "The iteration time that all pipelines of a job wait for.",
        attrgetter("decision.straggler_time_s"),
    ),
    (
        "planner_job_expected_saving_watts",
        "Power that all GPUs of a job are expected to save, by the bounds of its frontier.",
        attrgetter("expected_saving_w"),
    ),
    (
        "planner_job_expected_watts",
        "Power of all GPUs of a job as its plans predict it.",
        attrgetter("expected.power_w"),
    ),
    (
        "planner_job_expected_baseline_watts",
        "Their power with all clocks at maximum as the profile predicts it.",
        attrgetter("expected.baseline_power_w"),
    ),
    (
        "planner_job_over_budget",
        "Whether a job has drawn over 2 % more than its power budgets allow for a minute.",
        lambda status: float(status.over_budget_since_s is not None),
    ),
)
_TELEMETRY: Sequence[Row] = (
    ("planner_job_watts", "Recent power of all GPUs of a job.", attrgetter("power_w")),
    (
        "planner_job_iteration_seconds",
        "Recent time of an iteration of a job.",
        attrgetter("iteration_s"),
    ),
    (
        "planner_job_clock_set_median_seconds",
        "Recent time from requesting a clock until it is set: half of the changes took less.",
        attrgetter("set_p50_s"),
    ),
    (
        "planner_job_clock_set_slow_seconds",
        "Recent time from requesting a clock until it is set: one change of 100 took longer.",
        attrgetter("set_p99_s"),
    ),
    (
        "planner_job_saved_joules",
        "Energy saved since a job was registered: its baseline minus its energy. It may fall.",
        lambda telemetry: telemetry.saved_j if telemetry.energy_is else None,
    ),
)
_COUNTERS: Sequence[Row] = (
    (
        "planner_job_iterations",
        "Iterations of a job since it was registered.",
        attrgetter("iterations"),
    ),
    (
        "planner_job_late_clock_changes",
        "Clock changes that came when most of their computation was over.",
        attrgetter("changes_late"),
    ),
)
_JOULES: Sequence[tuple[str, str, Callable[[JobTelemetry], float]]] = (
    ("planner_job_energy_joules", "Energy of all GPUs of a job.", attrgetter("energy_j")),
    (
        "planner_job_baseline_joules",
        "Their energy with all clocks at maximum in iterations as long, by the profile.",
        lambda telemetry: telemetry.energy_j + telemetry.saved_j,
    ),
)
