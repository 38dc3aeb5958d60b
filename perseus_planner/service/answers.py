"""What the service answers, read from its JSON; what is missing there or of another kind raises as Python does.

A time that never comes, which is infinite in values, is null in JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.plans.plan import Plan
from perseus_planner.service.model import Decision, Report, Scope, Target
from perseus_planner.service.outcomes import Answer, Expected, PipelineStatus, Taken

if TYPE_CHECKING:
    from collections.abc import Mapping


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
class Telemetry:
    """What a job has counted since it was registered, over all its runs.

    Attributes:
        iterations: how many have ended.
        iteration_s: what one took of late, seconds.
        power_w: what all GPUs drew of late, watts; None: not known.
        energy_j: what they have taken in the iterations of which it is known, joules.
        baseline_j: what these would have taken with all clocks at maximum, each as long as it took, joules.
        saved_j: what that is more.
        energy_is: "measured" or "simulated"; None: it is known of no iteration.
        set_p50_s, set_p99_s: from when a clock is asked for until it is set, of late, seconds; None: none was set.
        late_changes: clock changes that came when much of their computation was over.
        observed_s: when the job was last heard of, seconds since the epoch.
    """

    iterations: int
    iteration_s: float
    power_w: float | None
    energy_j: float
    baseline_j: float
    saved_j: float
    energy_is: str | None
    set_p50_s: float | None
    set_p99_s: float | None
    late_changes: int
    observed_s: float


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
        expected: what its GPUs draw by its newest plans.
        telemetry: what it has counted; None: it has sent nothing.
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
    expected: Expected
    telemetry: Telemetry | None


@dataclass(frozen=True)
class Points:
    """The least energy of an iteration of one pipeline of a job as profiled, for every iteration time.

    Attributes:
        times_s: iteration times, rising, seconds.
        energies_j: the bound at each, waiting included, joules; in between, along a line.
        baseline_time_s: with all clocks at maximum, seconds.
        baseline_j: the energy of such an iteration, joules.
        waiting_w: what all GPUs of the pipeline draw while they wait, watts.
        stages, gpus: how many it has.
        origin: of the profile, "measured" or "simulated".
    """

    times_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    baseline_time_s: float
    baseline_j: float
    waiting_w: float
    stages: int
    gpus: int
    origin: str


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
        expected_saving_w=_optional(content, "expected_saving_w", float),
        reason=str(content["reason"]),
    )


def report_from(content: Any) -> Report:
    """A report, as it is kept."""
    scope = content["scope"]
    return Report(
        key=str(content["key"]),
        source=str(content["source"]),
        scope=Scope(scope["kind"], str(scope["value"]), _optional(scope, "pipeline", int)),
        slowdown=_optional(content, "slowdown", float),
        iteration_s=_optional(content, "iteration_s", float),
        observed_s=float(content["observed_s"]),
        begins_s=float(content["begins_s"]),
        begins_iteration=_optional(content, "begins_iteration", int),
        expires_s=_end(content, "expires_s"),
        cause=content["cause"],
    )


def status_from(content: Any) -> Status:
    """A job, as the service knows it."""
    job, taken, telemetry = content["job"], content["taken"], content["telemetry"]
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
        expected=_expected(content["expected"]),
        telemetry=None if telemetry is None else _telemetry(telemetry),
    )


def points_from(content: Any) -> Points:
    """The frontier of a job's pipelines."""
    return Points(
        times_s=tuple(map(float, content["times_s"])),
        energies_j=tuple(map(float, content["energies_j"])),
        baseline_time_s=float(content["baseline_time_s"]),
        baseline_j=float(content["baseline_j"]),
        waiting_w=float(content["waiting_w"]),
        stages=int(content["stages"]),
        gpus=int(content["gpus"]),
        origin=str(content["origin"]),
    )


def pipelines_from(content: Any) -> tuple[PipelineStatus, ...]:
    """The pipelines of a job, in order."""
    return tuple(
        PipelineStatus(
            pipeline=int(each["pipeline"]),
            time_s=float(each["time_s"]),
            energy_j=float(each["energy_j"]),
            target_s=float(each["target_s"]),
            slow_stages=_slow_stages(each),
            report=_optional(each, "report", str),
        )
        for each in content["pipelines"]
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
            Target(float(each["time_s"]), _slow_stages(each), _optional(each, "power_w", float))
            for each in content["targets"]
        ),
        straggler_time_s=float(content["straggler_time_s"]),
        stragglers={int(pipeline): str(key) for pipeline, key in content["stragglers"].items()},
        since_s=float(content["since_s"]),
        look_again_s=_end(content, "look_again_s"),
        reason=str(content["reason"]),
    )


def _expected(content: Any) -> Expected:
    return Expected(float(content["power_w"]), float(content["baseline_power_w"]), str(content["origin"]))


def _telemetry(content: Any) -> Telemetry:
    return Telemetry(
        iterations=int(content["iterations"]),
        iteration_s=float(content["iteration_s"]),
        power_w=_optional(content, "power_w", float),
        energy_j=float(content["energy_j"]),
        baseline_j=float(content["baseline_j"]),
        saved_j=float(content["saved_j"]),
        energy_is=_optional(content, "energy_is", str),
        set_p50_s=_optional(content, "set_p50_s", float),
        set_p99_s=_optional(content, "set_p99_s", float),
        late_changes=int(content["late_changes"]),
        observed_s=float(content["observed_s"]),
    )


def _slow_stages(content: Any) -> dict[int, float]:
    return {int(stage): float(times) for stage, times in content["slow_stages"].items()}


def _end(content: Mapping[str, Any], name: str) -> float:
    found = content.get(name)
    return math.inf if found is None else float(found)


def _optional(content: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    found = content.get(name)
    return None if found is None else kind(found)
