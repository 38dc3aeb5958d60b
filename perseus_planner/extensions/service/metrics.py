"""Metrics for Prometheus: requests, open long polls, every job, the power budget of all of them,
the database, the process and what was built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from starlette.types import Scope

from perseus_planner.base import __version__
from perseus_planner.extensions.service.models import JobStatus, StateName
from perseus_planner.extensions.service.service import Service

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """Counts requests, and reads all else when it is asked, on a registry of its own.

    Args:
        service: What it is read from.
        waiting: Returns how many long polls are open.
        problem: Returns why the service cannot take what it is sent; None if it can.
    """

    def __init__(
        self, service: Service, waiting: Callable[[], int], problem: Callable[[], str | None]
    ) -> None:
        # A second series beside each counter, which nobody asks for; in all registries of this
        # process, as there is no switch of one.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "planner_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "planner_http_request_seconds",
            "Time from the head of a request to the end of its answer; long polls wait on purpose.",
            ("route",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._alerts = Counter(
            "planner_alerts", "Alerts received.", ("outcome",), registry=registry
        )
        # There from the beginning, as an increase is only seen of what was there before.
        for outcome in ("ignored", "reported"):
            self._alerts.labels(outcome)
        waits = Gauge("planner_http_waiting", "Open long polls.", registry=registry)
        waits.set_function(waiting)
        ready = Gauge(
            "planner_ready", "Whether the service can take what it is sent.", registry=registry
        )
        ready.set_function(lambda: float(problem() is None))
        ProcessCollector(registry=registry)
        registry.register(_Service(service))

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def count_alerts(self, received: int, ignored: int) -> None:
        """Count alerts, and those of them that were ignored."""
        self._alerts.labels("ignored").inc(ignored)
        self._alerts.labels("reported").inc(received - ignored)

    def count(self, scope: Scope, status: int, took_s: float) -> None:
        """Count a request that was answered with a status. Only a few names are used as labels, so
        that requests for many paths do not fill the memory.
        """
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "other")
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(took_s)
        _log.debug("%s %s: %d in %.1f ms", method, scope["path"], status, 1e3 * took_s)


class _Service(Collector):
    """Metrics of the service and its jobs, computed when they are read. The label is not `job`,
    which Prometheus sets to its own name for what it scrapes.

    Telemetry that a killed service had not written returns with the job's next message. Showing a
    lower counter until then would count everything once more, as Prometheus takes a counter that
    falls as restarted: so there are counters only of jobs that sent telemetry since the service
    began.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since_s = service.now_s()

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("planner_build", "What was built.", {"version": __version__})
        yield from self._database()
        jobs = self._service.jobs()
        # A gauge of a silent job would stay at its last value for ever, and look alive.
        heard_of = [job for job in jobs if job.silent_since_s is None]
        yield GaugeMetricFamily("planner_jobs", "Jobs that are heard of.", len(heard_of))
        text = "Jobs that are registered and not heard of; of these there is the state alone."
        yield GaugeMetricFamily("planner_silent_jobs", text, len(jobs) - len(heard_of))
        budget_w = self._service.power_budget.power_w
        text = "The power budget of all jobs together, if there is one."
        budget = GaugeMetricFamily("planner_budget_watts", text)
        if budget_w is not None:
            budget.add_metric((), budget_w)
        yield budget
        # Of all jobs, as one state is that a job is not heard of.
        yield _states(jobs)
        told = [job for job in heard_of if job.telemetry is not None]
        since_s = self._since_s
        # The counters of a job that has sent nothing since the service began may be behind: see the
        # class.
        counted = [job for job in told if job.telemetry and job.telemetry.observed_s >= since_s]
        metered = [job for job in counted if job.telemetry and job.telemetry.energy_is]
        yield from _families(GaugeMetricFamily, _GAUGES, heard_of)
        yield from _families(GaugeMetricFamily, _TELEMETRY, told)
        yield from _families(CounterMetricFamily, _COUNTERS, counted)
        yield from _families(CounterMetricFamily, _JOULES, metered, with_energy=True)

    def _database(self) -> Iterator[Metric]:
        """Yield how writing goes: what is acknowledged waits for it."""
        figures = self._service.writing
        text = "Transactions that were written, and the time that they took."
        yield SummaryMetricFamily(
            "planner_database_commit_seconds", text, figures.commits, figures.committing_s
        )
        text = "Transactions that could not be written."
        yield CounterMetricFamily("planner_database_failed_commits", text, figures.failed)
        text = "Changes that wait to be written."
        yield GaugeMetricFamily("planner_database_queue", text, figures.waiting)
        text = "How long the oldest of them has waited."
        yield GaugeMetricFamily("planner_database_lag_seconds", text, figures.lag_s)


def _states(jobs: Sequence[JobStatus]) -> Metric:
    """Return 1 for the state of each job, and 0 for each other state, so that none goes stale."""
    text = "The state of each job, as `planner status` and the dashboard show it."
    family = GaugeMetricFamily("planner_job_state", text, labels=("training_job", "state"))
    for status in jobs:
        for name in get_args(StateName):
            family.add_metric((status.job.name, name), float(status.state.name == name))
    return family


def _families(
    kind: Callable[..., Metric],
    table: Iterable[Row],
    jobs: Sequence[JobStatus],
    *,
    with_energy: bool = False,
) -> Iterator[Metric]:
    """Yield a metric for each row, of jobs whose number is known; with the label `energy`, whether
    energy was measured or simulated, if that is asked for.
    """
    for name, text, number_of in table:
        labels = ("training_job", "energy") if with_energy else ("training_job",)
        family: Any = kind(name, text, labels=labels)
        for status in jobs:
            number = number_of(status)
            if number is None:
                continue
            energy = [status.telemetry.energy_is] if with_energy and status.telemetry else []
            family.add_metric((status.job.name, *energy), number)
        yield family


def _saved(name: str) -> Callable[[JobStatus], float | None]:
    """Return what reads a saving of a job, where everything else states one too."""

    def read(status: JobStatus) -> float | None:
        sent = status.telemetry
        if sent is None or not sent.is_judged or status.unlike_plan is not None:
            return None
        return float(getattr(sent, name))

    return read


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
        "The iteration time that all pipelines wait for: of the slowest, or their target without.",
        attrgetter("decision.straggler_time_s"),
    ),
    (
        "planner_job_expected_saving_watts",
        "Power that a job saves beside stragglers, beyond its own plans, by its frontier.",
        attrgetter("expected_saving_w"),
    ),
    (
        "planner_job_saves_watts",
        "Power below that with all clocks at maximum: measured, or by plans without telemetry.",
        attrgetter("saves_w"),
    ),
    (
        "planner_job_budget_watts",
        "The power budget of a job alone, if it has one.",
        attrgetter("job.power_w"),
    ),
    (
        "planner_job_share_watts",
        "What the budgets of a job and of all jobs allow its GPUs, if there are any.",
        attrgetter("power_limit_w"),
    ),
    (
        "planner_job_expected_watts",
        "Power of all GPUs of a job as its plans predict it.",
        attrgetter("expected.power_w"),
    ),
    (
        "planner_job_expected_baseline_watts",
        "Their power with all clocks at maximum in iterations as long as by the plans.",
        attrgetter("expected.baseline_power_w"),
    ),
    (
        "planner_job_over_budget",
        "Whether a job has drawn over 2 % more than its power budgets allow for a minute.",
        lambda status: float(status.over_budget_since_s is not None),
    ),
)
_TELEMETRY: Sequence[Row] = (
    ("planner_job_watts", "Recent power of all GPUs of a job.", attrgetter("telemetry.power_w")),
    (
        "planner_job_iteration_seconds",
        "Recent time of an iteration of a job.",
        attrgetter("telemetry.iteration_s"),
    ),
    (
        "planner_job_clock_set_median_seconds",
        "Recent time from requesting a clock until it is set: half of the changes took less.",
        attrgetter("telemetry.set_p50_s"),
    ),
    (
        "planner_job_clock_set_slow_seconds",
        "Recent time from requesting a clock until it is set: one change of 100 took longer.",
        attrgetter("telemetry.set_p99_s"),
    ),
    (
        "planner_job_saved_joules",
        "Energy saved since a job was registered: its baseline minus its energy. It may fall.",
        _saved("saved_j"),
    ),
    (
        "planner_job_saved_joules_error",
        "Half of the 95 % interval of the energy saved.",
        _saved("saved_within_j"),
    ),
)
_COUNTERS: Sequence[Row] = (
    (
        "planner_job_iterations",
        "Iterations of a job since it was registered.",
        attrgetter("telemetry.iterations"),
    ),
    (
        "planner_job_late_clock_changes",
        "Clock changes that came when most of their computation was over.",
        attrgetter("telemetry.changes_late"),
    ),
)
_JOULES: Sequence[Row] = (
    ("planner_job_energy_joules", "Energy of all GPUs of a job.", attrgetter("telemetry.energy_j")),
    (
        "planner_job_baseline_joules",
        "Their energy with all clocks at maximum in iterations as long, where that is known.",
        lambda status: status.telemetry.energy_j + status.telemetry.saved_j,
    ),
)
