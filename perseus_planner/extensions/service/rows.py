"""Jobs as the JSON texts in rows of the service's database, and what older versions wrote there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import from_json as read_json
from pydantic_core import to_json as write_json

from perseus_planner.extensions.service.jobs import JobState
from perseus_planner.extensions.service.models import (
    PowerStep,
    RegisteredJob,
    Report,
    from_json,
    shared,
    to_json,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.service.curve import Curve
    from perseus_planner.extensions.service.tally import Tally

_STATE = (
    "saving_w",
    "promised",
    "taken",
    "share",
    "silent_since_s",
    "over_budget_since_s",
    "noted",
    "noted_since_s",
)
CHANGING = ("job", "decision", "events", "budgets", *_STATE)
_SETTINGS = (
    "deadline_s",
    "power_w",
    "next_power",
    "power_schedule",
    "power_since_s",
    "gpu_power_limit_w",
)


_OF_03 = ("saved_j", "unlocked_j", "unlocked_saved_j")
"""What accounts of 0.3 said of savings, against other baselines."""


def as_judged(text: str) -> str:
    """Return accounts without the savings of 0.3, which are not known by what is compared now."""
    content = json.loads(text)
    _forget_savings(content)
    return json.dumps(content)


def _forget_savings(content: Any) -> None:
    if isinstance(content, dict):
        if "iterations" in content and "judged_j" not in content:
            for name in _OF_03:
                content.pop(name, None)
            for point in content.get("points", ()):
                point["saved_j"] = None
        for value in content.values():
            _forget_savings(value)
    elif isinstance(content, list):
        for value in content:
            _forget_savings(value)


def json_text(value: Any) -> str:
    """Return a value as JSON; infinite moments become null."""
    return write_json(value, inf_nan_mode="null").decode()


_SLICE = 1000
"""How many places are written at once: other threads get no turn meanwhile."""


def registration_text(job: RegisteredJob) -> str:
    """Return a registration as JSON, its places in slices."""
    begins = range(0, len(job.places), _SLICE)
    rest = {**shared(RegisteredJob, job), "places": ()}
    slices = [to_json(job.places[begin : begin + _SLICE])[1:-1].decode() for begin in begins]
    return json_text(rest).replace('"places":[]', f'"places":[{",".join(slices)}]', 1)


def state_text(state: JobState) -> str:
    """Return what changes of a job as JSON; what has not changed was written before."""
    kept: dict[str, Any] = {field: getattr(state, field) for field in (*_STATE, "budgets")}
    kept["job"] = {field: getattr(state.job, field) for field in _SETTINGS}
    decision = to_json(state.decision).decode()
    # Events keep their JSON: a job has up to a hundred, of which a change adds one.
    events = (event.as_json for event in state.events)
    return f'{json_text(kept)[:-1]},"decision":{decision},"events":[{",".join(events)}]}}'


def state_of(
    texts: Sequence[str],
    curve: Curve,
    tally: Tally | None,
    past: Mapping[str, Report],
    reports: Mapping[str, Report],
    now_s: float,
) -> JobState:
    """Return the state of a job from its registration, state and plans in the database."""
    registration, state, plans = texts
    registered = from_json(RegisteredJob, registration)
    content = read_json(state)
    newest = read_json(plans)
    job = {**vars(registered), **content["job"]}
    if "budgets" not in content:  # written before 0.4: nobody noted when it was set
        set_w = job["power_w"]
        content["budgets"] = [] if set_w is None else [PowerStep(now_s, set_w)]
    content |= {
        "registered": registered,
        "job": job,
        "curve": curve,
        "tally": tally,
        "published": newest["published"],
        "planned": newest["planned"],
        "reports": reports,
        "past": past,
    }
    return _states().validate_python(content)


@cache
def _states() -> TypeAdapter[JobState]:
    return TypeAdapter(JobState)
