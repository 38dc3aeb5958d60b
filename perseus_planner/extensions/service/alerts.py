"""Alerts of Prometheus, as its Alertmanager posts them, and the reports that they are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import FACTOR
from perseus_planner.extensions.service.models import Answer, Report, ReportRequest, from_json

_MOST_ALERTS = 10_000
MOST_LABELS = 64
"""Labels of one alert, and annotations; Prometheus itself warns above 30 labels."""


@dataclass(frozen=True)
class AlertGroup:
    """The body that the webhook of Prometheus' Alertmanager sends, version 4. Other fields of it
    are ignored.
    """

    #: Each has `status`, `labels`, `annotations`, `startsAt`, `endsAt` and `fingerprint`. An alert
    #: that cannot be used is listed under `ignored` in the answer and does not affect the others.
    alerts: Annotated[list[Any], Field(max_length=_MOST_ALERTS)]


@dataclass(frozen=True)
class _Alert:
    """An alert of Prometheus. Alertmanager repeats alerts, several instances of it send the same
    ones, and messages may overtake each other. So an alert is one report, identified by its
    fingerprint and the moment it began to fire. Its latest message sets the slowdown, and once it
    is resolved it stays resolved. When it fires again, it is another report of the same source.
    """

    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]
    began: Annotated[AwareDatetime, Field(alias="startsAt")]
    ended: Annotated[AwareDatetime, Field(alias="endsAt")]
    annotations: dict[str, str]


_SHOWN = 128  #: characters of a name that a client chose, where it is told what is wrong with it


def read_alert(alert: Any, now_s: float) -> Report | str:
    """Read an alert as Alertmanager's version 4 has it.

    Returns:
        The alert as a report, which has expired if the alert is resolved; why there is none and
        what to do, if it is incomplete. One from a clock that is ahead of `now_s` begins now.
    """
    for name in ("labels", "annotations"):
        labels = alert.get(name) if isinstance(alert, dict) else None
        if isinstance(labels, dict) and len(labels) > MOST_LABELS:
            return f"alert.{name}: more than {MOST_LABELS}; drop some in its rule"
    try:
        return _report(from_json(_Alert, json.dumps(alert)), now_s)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(("alert", *(str(name)[:_SHOWN] for name in first["loc"])))
        return f"{path}: {first['msg']}"
    except UsageError as error:
        return str(error)


def rule_of(alert: Any) -> str:
    """Return the name of the rule of an alert, whatever else it has."""
    try:
        return str(alert["labels"]["alertname"])[:_SHOWN]
    except (TypeError, LookupError):
        return "unnamed"


def _report(alert: _Alert, now_s: float) -> Report:
    texts = {**alert.annotations, **alert.labels}
    is_over = alert.status == "resolved"
    began_s = alert.began.timestamp()
    # A report must end after it begins; Alertmanager may send both moments alike.
    ended_s = max(alert.ended.timestamp(), math.nextafter(began_s, math.inf))
    # The moment is part of the key: a fingerprint is that of the labels, and returns when the same
    # alert fires again.
    sent = {
        "key": f"alert-{alert.fingerprint}-{round(began_s * 1000)}",
        "source": f"alertmanager, {alert.fingerprint}",
        "scope": _scope(texts),
        "slowdown": 1.0 if is_over else _slowdown(texts),
        "observed_s": ended_s if is_over else began_s,
        "cause": texts.get("cause", "unknown"),
    }
    report = from_json(ReportRequest, json.dumps(sent)).report(None, now_s)
    return report.expired(now_s) if is_over else report


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


@dataclass(frozen=True)
class IgnoredAlert:
    """An alert that was not taken by every job that it concerns, or that concerns none."""

    index: int  #: Position of the alert in the request, from 0.
    name: str  #: Name of the alert's rule.
    problem: str  #: Why it was ignored, and what to do.


@dataclass(frozen=True)
class AlertAnswers:
    """The effect of alerts."""

    answers: tuple[Answer, ...]  #: For each job that has a GPU or node that they name.
    ignored: tuple[IgnoredAlert, ...]
