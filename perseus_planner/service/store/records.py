"""Values of the service as JSON text, and back: what its database holds in text columns."""

from __future__ import annotations

import json
from typing import Any

from perseus_planner.service.model import Decision, Job, Place, Report, Scope, Target
from perseus_planner.service.outcomes import Taken
from perseus_planner.service.planning.curves import Curve
from perseus_planner.service.power import Share
from perseus_planner.service.telemetry import Counters, JobTelemetry


def text_of(value: Job | Report | Decision | Taken | Curve | Share | JobTelemetry) -> str:
    """`value` as JSON; infinity is `Infinity`, as Python's JSON reads it."""
    return json.dumps(value, default=vars)  # ten times as fast as by `dataclasses.asdict`


def job_from(text: str) -> Job:
    """Read what `text_of` wrote of a Job."""
    fields = json.loads(text)
    places = tuple(Place(**{**place, "stages": tuple(place["stages"])}) for place in fields["places"])
    return Job(**{**fields, "places": places})


def report_from(text: str) -> Report:
    """Read what `text_of` wrote of a Report."""
    fields = json.loads(text)
    return Report(**{**fields, "scope": Scope(**fields["scope"])})


def decision_from(text: str) -> Decision:
    """Read what `text_of` wrote of a Decision."""
    fields = json.loads(text)
    targets = tuple(Target(**{**each, "slow_stages": _by_number(each["slow_stages"])}) for each in fields["targets"])
    return Decision(**{**fields, "targets": targets, "stragglers": _by_number(fields["stragglers"])})


def taken_from(text: str) -> Taken:
    """Read what `text_of` wrote of a Taken."""
    return Taken(**json.loads(text))


def share_from(text: str) -> Share:
    """Read what `text_of` wrote of a Share."""
    return Share(**json.loads(text))


def curve_from(text: str) -> Curve:
    """Read what `text_of` wrote of a Curve."""
    fields = json.loads(text)
    return Curve(**{**fields, "rising_s": tuple(fields["rising_s"]), "rising_j": tuple(fields["rising_j"])})


def telemetry_from(text: str) -> JobTelemetry:
    """Read what `text_of` wrote of a JobTelemetry."""
    fields = json.loads(text)
    return JobTelemetry(**{**fields, "latest": Counters(**fields["latest"]), "earlier": tuple(fields["earlier"])})


def _by_number(mapping: dict[str, Any]) -> dict[int, Any]:
    """JSON has no keys but text."""
    return {int(key): value for key, value in mapping.items()}
