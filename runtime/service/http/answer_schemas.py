"""What the service answers, as OpenAPI shows it: the values of `outcomes` and `model`, infinite times as null."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from perseus_planner.runtime.service.model import Cause, ScopeKind


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
    degree: float | None
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
    expected_saving_w: float = Field(
        description="What all GPUs of the job are expected to save on average, watts; from bounds of the frontier."
    )
    reason: str = Field(description="One sentence for people.")


class EffectsAnswer(_Answer):
    """What follows for each job that a power budget is about."""

    answers: list[EffectAnswer]


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


class StatusAnswer(_Answer):
    """A job, as the service knows it."""

    job: JobAnswer
    decision: DecisionAnswer
    version: int = Field(description="The newest version of its plans that is there.")
    promised: int = Field(description="The version that is being planned; as `version` where none is.")
    taken: TakenAnswer | None = Field(description="null: the job has not said.")
    reports: list[ReportAnswer]
    expected_saving_w: float = Field(description="As in the answer to a report, watts.")


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
