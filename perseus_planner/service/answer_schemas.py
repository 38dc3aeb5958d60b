"""What the service answers, as OpenAPI shows it: the values of `outcomes` and `model`, infinite times as null."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from perseus_planner.service.model import Cause, ScopeKind
from perseus_planner.service.telemetry import Origin


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


Moment = Annotated[float | None, BeforeValidator(_finite)]


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True, frozen=True)


class JobAnswer(_Answer):
    """A job, with the deadline and the power that hold now."""

    name: str
    pipelines: int
    frontier: str = Field(description="Digest of its frontier's file.")
    ranks: Annotated[int, BeforeValidator(len)] = Field(validation_alias="places", description="How many are known.")
    deadline_s: float | None
    max_changes: int | None
    min_dwell_s: float
    power_w: float | None
    since_s: float = Field(description="When it was registered, seconds since the epoch.")


class RegisteredAnswer(_Answer):
    """A job is known."""

    job: JobAnswer
    version: int = Field(description="The newest version of its plans.")


class ScopeAnswer(_Answer):
    """What is slow."""

    kind: ScopeKind
    value: str
    pipeline: int | None


class ReportAnswer(_Answer):
    """A report as it is kept; times in seconds since the epoch."""

    key: str
    source: str
    scope: ScopeAnswer
    slowdown: float | None
    iteration_s: float | None
    observed_s: float
    begins_s: float
    begins_iteration: int | None
    expires_s: Moment = Field(description="null: it holds until it is cleared.")
    cause: Cause


class ReportsAnswer(_Answer):
    """The reports of a job that count now or are to count."""

    reports: list[ReportAnswer]


class EffectAnswer(_Answer):
    """What follows from a request; all of it is on disk."""

    job: str
    report: ReportAnswer | None = Field(description="null: the request was about no report.")
    version: int = Field(description="The first version of the job's plans that takes the request into account.")
    changed: bool = Field(description="The request changed what the pipelines are to do.")
    takes_effect: str = Field(
        description="planning: that version is being planned, and follows; next iteration: it is there, and the job "
        "takes it at its next iteration; already: the job has said that it runs by it."
    )
    expected_saving_w: float | None = Field(
        description="What all GPUs of the job are expected to save on average, watts; from bounds of the frontier. "
        "null: slow stages are solved first; a report with `wait_s` waits for that, and the job's status has it later."
    )
    reason: str = Field(description="One sentence for people.")


class EffectsAnswer(_Answer):
    """What follows for each job that a power budget is about."""

    answers: list[EffectAnswer]


class IgnoredAnswer(_Answer):
    """An alert that no job, or not every one that it is of, has taken."""

    place: int = Field(description="Which one of the body, from 0.")
    name: str = Field(description="Of its rule.")
    problem: str = Field(description="Why, and what to do.")


class AlertsAnswer(_Answer):
    """What follows from alerts."""

    answers: list[EffectAnswer] = Field(description="Of each job that has a GPU or node that they name.")
    ignored: list[IgnoredAnswer]


class TargetAnswer(_Answer):
    """What one pipeline is to do."""

    time_s: float = Field(description="Within what an iteration of it is to end, seconds.")
    slow_stages: dict[int, float] = Field(description="Stage -> how many times as long as profiled it takes.")
    power_w: float | None = Field(description="The most that all its GPUs may draw on average, watts; null: any.")


class DecisionAnswer(_Answer):
    """What the pipelines of a job are to do now, and why."""

    targets: list[TargetAnswer] = Field(description="Of each pipeline, in order.")
    straggler_time_s: float = Field(description="The iteration time of the slowest pipeline, seconds.")
    stragglers: dict[int, str] = Field(description="Pipeline -> key of the report that counts for it.")
    since_s: float = Field(description="Since when these targets hold, seconds since the epoch.")
    look_again_s: Moment = Field(description="When time alone may change it, seconds since the epoch; null: never.")
    reason: str = Field(description="One sentence for people.")


class TakenAnswer(_Answer):
    """Which version of its plans a job runs by, as it last said."""

    version: int
    iteration: int = Field(description="The first iteration that ran by it.")
    at_s: float = Field(description="When the job said so, seconds since the epoch.")


class ExpectedAnswer(_Answer):
    """What all GPUs of a job draw on average by its newest plans, foreseen by these."""

    power_w: float = Field(description="By these plans, each waiting for the slowest pipeline, watts.")
    baseline_power_w: float = Field(description="With all clocks at maximum, iterations being as long, watts.")
    origin: Origin = Field(description="measured: replayed from a measured profile; simulated.")


class TelemetryAnswer(_Answer):
    """What a job has counted since it was registered, over all its runs."""

    iterations: int
    iteration_s: float = Field(description="What an iteration took of late, seconds.")
    power_w: float | None = Field(description="What all GPUs drew of late, watts; null: not known.")
    energy_j: float = Field(description="What they have taken in the iterations of which it is known, joules.")
    baseline_j: float = Field(
        description="What these would have taken with all clocks at maximum, each as long as it took, by the profile, "
        "joules."
    )
    saved_j: float = Field(description="`baseline_j` less `energy_j`; below 0 where more was taken.")
    energy_is: Origin | None = Field(
        description="How `energy_j` comes to be, simulated if any of it is; null: it is known of no iteration."
    )
    set_p50_s: float | None = Field(
        description="From when a clock is asked for until it is set, median of late, seconds; null: none was set."
    )
    set_p99_s: float | None = Field(description="The same, 99th percentile.")
    late_changes: int = Field(description="Clock changes that came when much of their computation was over.")
    observed_s: float = Field(description="When the job was last heard of, seconds since the epoch.")


class StatusAnswer(_Answer):
    """A job, as the service knows it."""

    job: JobAnswer
    decision: DecisionAnswer
    version: int = Field(description="The newest version of its plans that is there.")
    promised: int = Field(description="The version that is being planned; as `version` where none is.")
    taken: TakenAnswer | None = Field(description="null: the job has not said.")
    reports: list[ReportAnswer]
    expected_saving_w: float = Field(description="As in the answer to a report, watts.")
    expected: ExpectedAnswer
    telemetry: TelemetryAnswer | None = Field(description="null: the job has sent nothing.")


class StatusesAnswer(_Answer):
    """All jobs that run."""

    jobs: list[StatusAnswer]


class PlanAnswer(_Answer):
    """The plan of one pipeline."""

    version: int
    pipeline: int
    plan: str = Field(description="A plan file, as `planner plan` writes it.")


class PlansAnswer(_Answer):
    """The plans of all pipelines; equal ones once."""

    version: int
    plans: list[str] = Field(description="Plan files.")
    of_pipeline: list[int] = Field(description="For each pipeline, in order, the place of its plan in `plans`.")


class FrontierAnswer(_Answer):
    """The least energy of an iteration of one pipeline, for every iteration time; in between, along a line."""

    times_s: list[float] = Field(validation_alias="rising_s", description="Iteration times, rising, seconds.")
    energies_j: list[float] = Field(
        validation_alias="rising_j", description="The bound at each: no plan of that time takes less, joules."
    )
    baseline_time_s: float = Field(description="With all clocks at maximum, seconds.")
    baseline_j: float = Field(description="The energy of such an iteration, joules.")
    waiting_w: float = Field(description="What all GPUs of the pipeline draw while they wait, watts.")
    stages: int
    gpus: int
    origin: Origin = Field(description="Of the profile: what is said here is replayed from it, or simulated.")


class PipelineAnswer(_Answer):
    """One pipeline."""

    pipeline: int = Field(description="Its number, from 0.")
    time_s: float = Field(description="Iteration time of its plan, seconds.")
    energy_j: float = Field(description="Energy of such an iteration, joules.")
    target_s: float = Field(description="Within what an iteration is to end by what is decided now, seconds.")
    slow_stages: dict[int, float] = Field(description="Stage -> how many times as long as profiled it takes.")
    report: str | None = Field(description="Key of the report that counts for it; null: none does.")


class PipelinesAnswer(_Answer):
    """The pipelines of a job."""

    version: int = Field(description="Of the plans: the newest that is there.")
    pipelines: list[PipelineAnswer] = Field(description="In order.")


class HealthAnswer(_Answer):
    """The service lives."""

    status: Literal["ok"]
    version: str = Field(description="Of the planner.")


class MeAnswer(_Answer):
    """Who asks."""

    role: Literal["read", "report", "operate"] | None = Field(
        description="What the bearer may do; each may do what those before it may. null: nothing, for want of a token."
    )
    name: str | None = Field(description="Of the token; null: there is none.")


class ErrorContent(_Answer):
    """Why a request was not done."""

    code: str = Field(description="One word or a few, for programs.")
    message: str = Field(description="What is wrong and what to do, for people.")
    least_power_w: float | None = Field(None, description="Of an infeasible budget: the least that can be met, watts.")
    least_deadline_s: float | None = Field(None, description="Of an infeasible deadline: the least, seconds.")


class ErrorAnswer(_Answer):
    """What every request that is not done is answered with."""

    error: ErrorContent
