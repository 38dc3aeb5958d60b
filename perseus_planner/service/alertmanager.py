"""Alerts of Prometheus, as its Alertmanager posts them, read as reports.

An alert reports the GPU or node that it names, in every job that has it. The first of the labels
`UUID` (the GPU, as DCGM's exporter names it), `Hostname`, `node`, `nodename` and `instance` without
its port counts. A firing alert needs the annotation or label `slowdown` (time over normal time) or
`score` (its inverse); `cause` is optional. An example of a rule for GPUs that are slowed by heat or
a power brake, where 1980 is the highest SM clock. An exporter has these reasons only if they are on
its list of counters; newer exporters call them `DCGM_FI_DEV_CLOCKS_EVENT_REASONS`:

    groups:
    - name: planner
      rules:
      - alert: GpuSlowed
        # bit 8: hardware slowdown; 32, 64, 128: heat, by software or hardware, and power brake
        expr: >-
          1980 / avg_over_time(DCGM_FI_DEV_SM_CLOCK[2m]) > 1.05
          and (floor(DCGM_FI_DEV_CLOCK_THROTTLE_REASONS / 8) % 2 == 1
          or floor(DCGM_FI_DEV_CLOCK_THROTTLE_REASONS / 32) % 8 > 0)
        for: 1m
        annotations:
          slowdown: '{{ $value }}'
          cause: compute

This is the slowdown of the clocks; computations that wait for memory slow down less. Alertmanager
posts the alerts with:

    receivers:
    - name: planner
      webhook_configs:
      - url: http://127.0.0.1:8400/v1/alerts
        http_config:
          authorization: {credentials_file: /etc/alertmanager/planner-token}
    route:
      receiver: planner
      group_by: [alertname]
      group_wait: 5s
      repeat_interval: 5m  # a job that starts later gets the alert by then

Alertmanager repeats alerts, several instances of it send the same ones, and messages may overtake
each other. So an alert is one report, identified by its fingerprint and the moment it began to
fire. Its latest message sets the slowdown, and once it is resolved it stays resolved. When the
alert fires again, it is another report of the same source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast, get_args

from perseus_planner.base.errors import PlannerError, UsageError, shown
from perseus_planner.base.files import sha256
from perseus_planner.base.units import FACTOR
from perseus_planner.service.answers import Answer, IgnoredAlert
from perseus_planner.service.model import Cause, Report, Scope
from perseus_planner.service.schemas import MOST_SLOWDOWN
from perseus_planner.service.state import JobState, check_report, expire

_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII
)  # RFC 3339
_NODES = ("Hostname", "node", "nodename", "instance")
_LONGEST = 1024


@dataclass(frozen=True)
class Alert:
    """One alert of a group."""

    index: int  #: Position in the group, from 0
    name: str  #: Name of its rule, for people
    #: The alert as a report, which has expired if the alert is resolved; None if the alert is
    #: incomplete.
    report: Report | None
    problem: str = ""  #: Why there is no report, and what to do


@dataclass(frozen=True)
class AlertEffects:
    """The effect of alerts."""

    answers: tuple[Answer, ...]  #: For each job that has a GPU or node that they name
    #: Key of a report -> why no job, or not every job concerned, has taken it.
    ignored: Mapping[str, str]


def read_alerts(alerts: Sequence[Any], now_s: float) -> list[Alert]:
    """Read the alerts of a group; one that cannot be read does not affect the others.

    Args:
        alerts: `alerts` in the JSON of Alertmanager's version 4.
        now_s: Seconds since the epoch. An alert from a clock that is ahead begins now.
    """
    return [_alert(alert, index, now_s) for index, alert in enumerate(alerts)]


def ignored_alerts(alerts: Iterable[Alert], by_jobs: Mapping[str, str]) -> tuple[IgnoredAlert, ...]:
    """List the incomplete alerts, and those that jobs have ignored, given by the keys of their
    reports.
    """
    problems = (
        (alert, alert.problem if alert.report is None else by_jobs.get(alert.report.key))
        for alert in alerts
    )
    return tuple(
        IgnoredAlert(alert.index, alert.name, problem)
        for alert, problem in problems
        if problem is not None
    )


def jobs_concerned(
    jobs: Mapping[str, JobState], reports: Sequence[Report]
) -> tuple[dict[str, list[Report]], dict[str, str]]:
    """Return the reports that concern each job, and why the others concern none, by their keys."""
    holders: dict[tuple[str, str], set[str]] = {
        (report.scope.kind, report.scope.value): set() for report in reports
    }
    for name, state in jobs.items():
        for place in state.job.places:
            for part in (("gpu", place.gpu), ("node", place.node)):
                if part in holders:
                    holders[part].add(name)
    job_reports: dict[str, list[Report]] = {}
    ignored = {}
    for report in reports:
        scope = report.scope
        names = holders[scope.kind, scope.value]
        for name in names:
            job_reports.setdefault(name, []).append(report)
        if not names:
            ignored[report.key] = f"no running job has {scope.kind} {shown(scope.value)}"
    return dict(sorted(job_reports.items())), ignored


def with_alerts(
    state: JobState, reports: Iterable[Report], now_s: float
) -> tuple[JobState, dict[str, str]]:
    """Add the reports of alerts to a job.

    A known report takes the slowdown of its latest message; once it has expired, it stays expired.

    Returns:
        The new state, and the reasons for the reports that the job refuses, by their keys.
    """
    refused = {}
    for report in reports:
        known_report = state.reports.get(report.key)
        try:
            if known_report is not None:
                kept = _updated(known_report, report, now_s)
            elif report.key in state.past:
                continue
            else:
                check_report(state, report)
                kept = report
        except PlannerError as error:
            refused[report.key] = str(error)
            continue
        if kept != known_report:
            state = state.with_report(kept)
    return state, refused


def _updated(known: Report, report: Report, now_s: float) -> Report:
    if known.expires_s <= now_s:
        return known
    if report.expires_s <= now_s:
        return expire(
            replace(known, slowdown=1.0, observed_s=max(known.observed_s, report.observed_s)), now_s
        )
    return replace(known, slowdown=report.slowdown, cause=report.cause)


def _alert(alert: Any, index: int, now_s: float) -> Alert:
    alert = alert if isinstance(alert, Mapping) else {}
    labels = _texts(alert, "labels")
    name = labels.get("alertname", "unnamed")
    try:
        return Alert(index, name, _report(alert, labels, now_s))
    except UsageError as error:
        return Alert(index, name, None, str(error))


def _report(alert: Mapping[str, Any], labels: Mapping[str, str], now_s: float) -> Report:
    texts = {**_texts(alert, "annotations"), **labels}
    cause = texts.get("cause", "unknown")
    if cause not in get_args(Cause):
        raise UsageError(
            f"cause {shown(cause)} is unknown; write one of: {', '.join(get_args(Cause))}"
        )
    began_s, is_over = _moment_s(alert, "startsAt"), _is_resolved(alert)
    ended_s = (
        max(_moment_s(alert, "endsAt"), math.nextafter(began_s, math.inf)) if is_over else began_s
    )
    fingerprint = alert.get("fingerprint")
    if not isinstance(fingerprint, str) or not re.fullmatch(r"[0-9A-Za-z]{1,64}", fingerprint):
        fingerprint = sha256(json.dumps(labels, sort_keys=True).encode())[
            :16
        ]  # its labels identify it
    return Report(
        key=f"alert-{fingerprint}-{round(began_s * 1000)}",
        source=f"alertmanager, {fingerprint}",
        scope=_scope(texts),
        slowdown=1.0 if is_over else _slowdown(texts),
        iteration_s=None,
        observed_s=min(ended_s, now_s),
        begins_s=math.nextafter(now_s, 0.0) if is_over else now_s,
        expires_s=now_s if is_over else math.inf,
        cause=cast("Cause", cause),
    )


def _is_resolved(alert: Mapping[str, Any]) -> bool:
    status = alert.get("status")
    if status not in ("firing", "resolved"):
        raise UsageError(f"its status is {shown(status)}; it must be firing or resolved")
    return bool(status == "resolved")


def _slowdown(texts: Mapping[str, str]) -> float:
    kind = next((kind for kind in ("slowdown", "score") if kind in texts), None)
    if kind is None:
        raise UsageError(
            "has no slowdown; give its rule an annotation with the time over the normal time, such "
            "as "
            "slowdown: '{{ $value }}'"
        )
    number = FACTOR.parse(texts[kind])
    if number is None or not 1.0 / MOST_SLOWDOWN <= number <= MOST_SLOWDOWN:
        raise UsageError(
            f"{kind} {shown(texts[kind])} is not a number from {1.0 / MOST_SLOWDOWN:g} to "
            f"{MOST_SLOWDOWN:g}"
        )
    return float(max(1.0, number if kind == "slowdown" else 1.0 / number))


def _scope(texts: Mapping[str, str]) -> Scope:
    if texts.get("UUID"):
        return Scope("gpu", texts["UUID"])
    for label in _NODES:
        value = texts.get(label, "")
        if label == "instance":  # host:port or [address]:port
            value = re.sub(r":[0-9]+$", "", value).strip("[]")
        if value:
            return Scope("node", value)
    raise UsageError(
        "names neither a GPU nor a node; keep the label UUID, Hostname, node or instance in its "
        "rule"
    )


def _moment_s(alert: Mapping[str, Any], name: str) -> float:
    """Read a moment as seconds since the epoch."""
    text = alert.get(name)
    match = _MOMENT.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        with suppress(ValueError, OverflowError):
            whole = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
            return whole.timestamp() + float(match[2] or 0.0)
    raise UsageError(f"{name}: {shown(text)} is not a time as Alertmanager writes it")


def _texts(alert: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the labels or annotations of an alert, without those that are too long or not
    printable.
    """
    values = alert.get(name)
    if not isinstance(values, Mapping):
        return {}
    texts = {str(key): str(value) for key, value in values.items()}
    return {
        key: value for key, value in texts.items() if len(value) <= _LONGEST and value.isprintable()
    }
