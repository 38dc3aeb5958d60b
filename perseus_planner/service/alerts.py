"""Alerts of Prometheus, as its Alertmanager posts them, read as reports; `docs/api.md` has a rule.

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError

from perseus_planner.base.errors import PlannerError, UsageError, shown
from perseus_planner.base.units import FACTOR
from perseus_planner.service.jobs import JobState, check_report, expire
from perseus_planner.service.models import ReportRequest, from_json
from perseus_planner.service.reports import concerned_by

if TYPE_CHECKING:
    from perseus_planner.service.models import Report


@dataclass(frozen=True)
class _Alert:
    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]
    began: Annotated[AwareDatetime, Field(alias="startsAt")]
    ended: Annotated[AwareDatetime, Field(alias="endsAt")]
    annotations: dict[str, str]


def read_alert(alert: Any, now_s: float) -> Report | str:
    """Read an alert as Alertmanager's version 4 has it.

    Returns:
        The alert as a report, which has expired if the alert is resolved; why there is none and
        what to do, if it is incomplete. One from a clock that is ahead of `now_s` begins now.
    """
    try:
        return _report(from_json(_Alert, json.dumps(alert)), now_s)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(('alert', *map(str, first['loc'])))}: {first['msg']}"
    except UsageError as error:
        return str(error)


def rule_of(alert: Any) -> str:
    """Return the name of the rule of an alert, whatever else it has."""
    try:
        return str(alert["labels"]["alertname"])
    except (TypeError, LookupError):
        return "unnamed"


def jobs_concerned(
    jobs: Mapping[str, JobState], reports: Sequence[Report]
) -> tuple[dict[str, list[Report]], dict[str, str]]:
    """Return the reports that concern each job, and why the others concern none, by their keys."""
    of_jobs: dict[str, list[Report]] = {}
    for name, state in sorted(jobs.items()):
        if found := concerned_by(state.job, reports):
            of_jobs[name] = found
    taken = {report.key for found in of_jobs.values() for report in found}
    return of_jobs, {
        report.key: f"no running job has {report.scope.kind} {shown(report.scope.value)}"
        for report in reports
        if report.key not in taken
    }


def with_alerts(
    state: JobState, reports: Iterable[Report], now_s: float
) -> tuple[JobState, dict[str, str]]:
    """Add the reports of alerts to a job.

    Returns:
        The new state, and the reasons for the reports that the job refuses, by their keys.
    """
    refused = {}
    for report in reports:
        known = state.reports.get(report.key)
        if report.key in state.past or (known is not None and known.expires_s <= now_s):
            continue
        if known is None:
            try:
                check_report(state, report)
            except PlannerError as error:
                refused[report.key] = str(error)
                continue
        elif report.expires_s > now_s:
            report = replace(known, slowdown=report.slowdown, cause=report.cause)
        if report != known:
            state = state.with_report(report, now_s)
    return state, refused


def _report(alert: _Alert, now_s: float) -> Report:
    texts, is_over = {**alert.annotations, **alert.labels}, alert.status == "resolved"
    began_s = alert.began.timestamp()
    ended_s = max(alert.ended.timestamp(), math.nextafter(began_s, math.inf))
    sent = {
        "key": f"alert-{alert.fingerprint}-{round(began_s * 1000)}",
        "source": f"alertmanager, {alert.fingerprint}",
        "scope": _scope(texts),
        "slowdown": 1.0 if is_over else _slowdown(texts),
        "observed_s": ended_s if is_over else began_s,
        "cause": texts.get("cause", "unknown"),
    }
    report = from_json(ReportRequest, json.dumps(sent)).report(None, now_s)
    return expire(report, now_s) if is_over else report


def _slowdown(texts: Mapping[str, str]) -> float:
    for kind in ("slowdown", "score"):
        if kind in texts:
            number = FACTOR.read(texts[kind], kind)
            return float(max(1.0, number if kind == "slowdown" else 1.0 / number))
    raise UsageError(
        "has no slowdown; give its rule an annotation with the time over the normal time, such as "
        "slowdown: '{{ $value }}'"
    )


def _scope(texts: Mapping[str, str]) -> dict[str, str]:
    for label in ("UUID", "Hostname", "node", "nodename", "instance"):
        value = texts.get(label, "")
        if label == "instance":  # host:port or [address]:port
            value = re.sub(r":[0-9]+$", "", value).strip("[]")
        if value:
            return {"kind": "gpu" if label == "UUID" else "node", "value": value}
    raise UsageError(
        "names neither a GPU nor a node; keep the label UUID, Hostname, node or instance in its "
        "rule"
    )
