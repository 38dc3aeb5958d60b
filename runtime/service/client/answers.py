"""What the service answers, read from its JSON; what is missing there or of another kind raises as Python does.

A time that never comes, which is infinite in values, is null in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perseus_planner.plan import Plan
from perseus_planner.runtime.service.model import Decision, Report, Scope, Target
from perseus_planner.runtime.service.outcomes import Answer, Taken


@dataclass(frozen=True)
class Registered:
    """A job is known.

    Attributes:
        version: the newest version of its plans.
        is_new: it was not known before.
    """

    version: int
    is_new: bool


@dataclass(frozen=True)
class Status:
    """A job, as the service knows it.

    Attributes:
        name: of the job.
        pipelines: how many data-parallel pipelines it has.
        ranks: of how many ranks the place is known.
        deadline_s: the iteration time that is wanted where nobody straggles; None: that of all clocks at maximum.
        power_w: the most that all its GPUs together may draw on average, watts; None: any.
        since_s: when it was registered, seconds since the epoch.
        decision: what its pipelines are to do, and why.
        version: the newest version of its plans that is there.
        promised: the version that is being planned; equal to `version` where none is.
        taken: which version it runs by; None: it has not said.
        reports: those that count now or are to count.
        expected_saving_w: as in `Answer`.
    """

    name: str
    pipelines: int
    ranks: int
    deadline_s: float | None
    power_w: float | None
    since_s: float
    decision: Decision
    version: int
    promised: int
    taken: Taken | None
    reports: tuple[Report, ...]
    expected_saving_w: float


@dataclass(frozen=True)
class PlanVersion:
    """The plan of each pipeline, in order, of one version of a job's plans."""

    version: int
    plans: tuple[Plan, ...]


def registered_from(content: Any, *, is_new: bool) -> Registered:
    """The answer to a registration."""
    return Registered(int(content["version"]), is_new)


def answer_from(content: Any) -> Answer:
    """The answer to what may change plans."""
    report = content.get("report")
    return Answer(
        job=str(content["job"]),
        report=None if report is None else report_from(report),
        version=int(content["version"]),
        changed=bool(content["changed"]),
        takes_effect=str(content["takes_effect"]),
        expected_saving_w=float(content["expected_saving_w"]),
        reason=str(content["reason"]),
    )


def report_from(content: Any) -> Report:
    """A report, as it is kept."""
    scope = content["scope"]
    return Report(
        key=str(content["key"]),
        source=str(content["source"]),
        scope=Scope(scope["kind"], str(scope["value"]), _optional(scope, "pipeline", int)),
        degree=_optional(content, "degree", float),
        iteration_s=_optional(content, "iteration_s", float),
        observed_s=float(content["observed_s"]),
        begins_s=float(content["begins_s"]),
        begins_iteration=_optional(content, "begins_iteration", int),
        expires_s=_end(content, "expires_s"),
        cause=content["cause"],
    )


def status_from(content: Any) -> Status:
    """A job, as the service knows it."""
    job, taken = content["job"], content["taken"]
    return Status(
        name=str(job["name"]),
        pipelines=int(job["pipelines"]),
        ranks=int(job["ranks"]),
        deadline_s=_optional(job, "deadline_s", float),
        power_w=_optional(job, "power_w", float),
        since_s=float(job["since_s"]),
        decision=_decision(content["decision"]),
        version=int(content["version"]),
        promised=int(content["promised"]),
        taken=None if taken is None else Taken(int(taken["version"]), int(taken["iteration"]), float(taken["at_s"])),
        reports=tuple(map(report_from, content["reports"])),
        expected_saving_w=float(content["expected_saving_w"]),
    )


def plan_from(text: Any) -> Plan:
    """A plan, which is sent as text.

    Raises:
        PlanError: it is none.
    """
    if not isinstance(text, str):
        raise TypeError(f"a plan is a text, and this is {type(text).__name__}")
    return Plan.loads(text)


def plan_version_from(content: Any) -> PlanVersion:
    """The plans of all pipelines; equal ones are sent once.

    Raises:
        PlanError: one of them is none.
    """
    plans = tuple(map(plan_from, content["plans"]))
    return PlanVersion(int(content["version"]), tuple(plans[int(place)] for place in content["of_pipeline"]))


def _decision(content: Any) -> Decision:
    return Decision(
        targets=tuple(
            Target(
                float(each["time_s"]),
                {int(stage): float(times) for stage, times in each["slow_stages"].items()},
                None if each["power_w"] is None else float(each["power_w"]),
            )
            for each in content["targets"]
        ),
        straggler_time_s=float(content["straggler_time_s"]),
        stragglers={int(pipeline): str(key) for pipeline, key in content["stragglers"].items()},
        since_s=float(content["since_s"]),
        look_again_s=_end(content, "look_again_s"),
        reason=str(content["reason"]),
    )


def _end(content: Mapping[str, Any], name: str) -> float:
    found = content.get(name)
    return math.inf if found is None else float(found)


def _optional(content: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    found = content.get(name)
    return None if found is None else kind(found)
