"""Alerts of Prometheus, as its Alertmanager posts them, read as reports; pure.

An alert is a report of the GPU or node that it names, in whatever jobs have it. Which GPU or node is the first there is
of the labels `UUID` (as DCGM's exporter names a GPU), `Hostname`, `node`, `nodename` and `instance` without its port.
How slow is the annotation or label `slowdown`, how many times as long it takes, or `score`, its inverse; one of them is
needed while the alert fires. `cause` may stand there too. A rule for GPUs that heat or a power brake slows, where 1980
is the highest SM clock; an exporter says these reasons only where its list of counters has them, newer ones as
`DCGM_FI_DEV_CLOCKS_EVENT_REASONS`:

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

That is the slowdown of the clocks: what waits for memory slows down less. And Alertmanager's, to post them:

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
      repeat_interval: 5m  # a job that begins later hears of the GPU by then

Alertmanager repeats itself, several of them say the same, and what one says may overtake what it said before. So an
alert is one report, known by its fingerprint and when it began to fire; it says how slow that is as it said last, and
once it is resolved it stays so. The same alert, firing again, is another report of the same source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast, get_args

from perseus_planner.errors import UsageError, shown
from perseus_planner.files import sha256
from perseus_planner.quantities import FACTOR
from perseus_planner.service.model import Cause, Report, Scope

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)  # RFC 3339
_NODES = ("Hostname", "node", "nodename", "instance")
_LONGEST = 1024
_MOST_TIMES = 1e6  # as for other reports


@dataclass(frozen=True)
class Alert:
    """One alert of a webhook's body.

    Attributes:
        place: in the body, from 0.
        name: of its rule, for people.
        report: what it says, expired once the alert is resolved; None: too little.
        problem: why there is no report, and what to do.
    """

    place: int
    name: str
    report: Report | None
    problem: str = ""


@dataclass(frozen=True)
class Ignored:
    """An alert that no job, or not every one that it is of, has taken; fields as in `Alert`."""

    place: int
    name: str
    problem: str


def alerts_of(alerts: Sequence[Any], now_s: float) -> list[Alert]:
    """The alerts of a webhook's body; those that cannot be read do no harm to the others.

    Args:
        alerts: `alerts` of the JSON of Alertmanager's version 4.
        now_s: seconds since the epoch; an alert of a clock that is ahead began now.
    """
    return [_alert(alert, place, now_s) for place, alert in enumerate(alerts)]


def ignored(alerts: Iterable[Alert], by_jobs: Mapping[str, str]) -> list[Ignored]:
    """Those that say too little, and those that jobs have ignored, by the keys of reports."""
    problems = ((each, each.problem if each.report is None else by_jobs.get(each.report.key)) for each in alerts)
    return [Ignored(each.place, each.name, problem) for each, problem in problems if problem is not None]


def _alert(alert: Any, place: int, now_s: float) -> Alert:
    alert = alert if isinstance(alert, Mapping) else {}
    labels = _texts(alert, "labels")
    name = labels.get("alertname", "without a name")
    try:
        return Alert(place, name, _report(alert, labels, now_s))
    except UsageError as error:
        return Alert(place, name, None, str(error))


def _report(alert: Mapping[str, Any], labels: Mapping[str, str], now_s: float) -> Report:
    said = {**_texts(alert, "annotations"), **labels}
    cause = said.get("cause", "unknown")
    if cause not in get_args(Cause):
        raise UsageError(f"cause {shown(cause)} is none; write one of: {', '.join(get_args(Cause))}")
    began_s, is_over = _moment_s(alert, "startsAt"), _is_resolved(alert)
    ended_s = max(_moment_s(alert, "endsAt"), math.nextafter(began_s, math.inf)) if is_over else began_s
    fingerprint = alert.get("fingerprint")
    if not isinstance(fingerprint, str) or not re.fullmatch(r"[0-9A-Za-z]{1,64}", fingerprint):
        fingerprint = sha256(json.dumps(labels, sort_keys=True).encode())[:16]  # it is told by its labels
    return Report(
        key=f"alert-{fingerprint}-{round(began_s * 1000)}",
        source=f"alertmanager, {fingerprint}",
        scope=_scope(said),
        slowdown=1.0 if is_over else _slowdown(said),
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


def _slowdown(said: Mapping[str, str]) -> float:
    """How many times as long it takes."""
    kind = next((kind for kind in ("slowdown", "score") if kind in said), None)
    if kind is None:
        raise UsageError(
            "does not say how slow; give its rule an annotation slowdown: how many times as long it takes, "
            "such as slowdown: '{{ $value }}'"
        )
    number = FACTOR.parse(said[kind])
    if number is None or not 1.0 / _MOST_TIMES <= number <= _MOST_TIMES:
        raise UsageError(f"{kind} {shown(said[kind])} is no number above 0 and of usual size")
    return float(max(1.0, number if kind == "slowdown" else 1.0 / number))


def _scope(said: Mapping[str, str]) -> Scope:
    if said.get("UUID"):
        return Scope("gpu", said["UUID"])
    for label in _NODES:
        value = said.get(label, "")
        if label == "instance":  # host:port or [address]:port
            value = re.sub(r":[0-9]+$", "", value).strip("[]")
        if value:
            return Scope("node", value)
    raise UsageError("names no GPU and no node; keep the label UUID, Hostname, node or instance in its rule")


def _moment_s(alert: Mapping[str, Any], name: str) -> float:
    """Seconds since the epoch."""
    text = alert.get(name)
    match = _MOMENT.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        with suppress(ValueError, OverflowError):
            whole = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
            return whole.timestamp() + float(match[2] or 0.0)
    raise UsageError(f"{name}: {shown(text)} is no time as Alertmanager writes it")


def _texts(alert: Mapping[str, Any], name: str) -> dict[str, str]:
    """Its labels or annotations; of any size that is of use."""
    values = alert.get(name)
    if not isinstance(values, Mapping):
        return {}
    texts = {str(key): str(value) for key, value in values.items()}
    return {key: value for key, value in texts.items() if len(value) <= _LONGEST and value.isprintable()}
