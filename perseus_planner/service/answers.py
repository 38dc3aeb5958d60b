"""What the service answers, as values: the status of jobs, the effects of requests, errors.

Pydantic writes and reads them as JSON (see `schemas`); the service and its clients share these
classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from perseus_planner.runs.account import Account, Entry
from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.service.model import (
    Decision,
    PowerStep,
    ProfileOrigin,
    RegisteredJob,
    Report,
    Slowing,
    Taken,
    shared,
    split_at,
)

Effect = Literal["planning", "next iteration", "already"]


@dataclass(frozen=True)
class JobSummary:
    """A job, with the deadline and the power budget that hold now."""

    name: str
    pipelines: int
    frontier: str  #: Digest of the frontier file.
    ranks: int  #: Number of ranks whose location is known.
    deadline_s: float | None
    max_changes: int | None
    power_w: float | None
    since_s: float  #: When the job was registered, seconds since the epoch.
    on_time: float | None = None  #: Probability of being on time that plans are made for.
    #: Power limit that something else has set on its GPUs, watts; null for none.
    gpu_power_limit_w: float | None = None
    #: The power budget that comes next by a schedule; null if none does.
    next_power: PowerStep | None = None

    @classmethod
    def of(cls, job: RegisteredJob) -> JobSummary:
        """Summarize `job`."""
        next_power = next(
            (step for step in job.power_schedule if step.start_s > job.power_since_s), None
        )
        return cls(**shared(cls, job), ranks=len(job.places), next_power=next_power)


@dataclass(frozen=True)
class Registered:
    """The answer to a registration."""

    job: JobSummary
    version: int  #: The newest version of the job's plans.
    #: Whether the job was unknown before; over HTTP, the status says it.
    is_new: Annotated[bool, Field(exclude=True)] = False


@dataclass(frozen=True)
class Expected:
    """The average power of all GPUs of a job that its newest plans predict."""

    power_w: float  #: With these plans, all pipelines waiting for the slowest, watts.
    baseline_power_w: float  #: With all clocks at maximum and iterations as long, watts.
    origin: ProfileOrigin  #: Origin of the profile from which it is replayed.


@dataclass(frozen=True, kw_only=True)
class JobTelemetry(Account):
    """The account of a job since it was registered, over all its runs, and how it runs now."""

    iteration_s: float  #: Recent time from the begin of an iteration to that of the next, seconds.
    power_w: float | None  #: Recent power of all GPUs, watts; null if unknown.
    #: Recent median time from requesting a clock until it is set; null if none was.
    set_p50_s: float | None = None
    set_p99_s: float | None = None  #: The 99th percentile of that time.
    ranks: int = 0  #: Number of ranks; 0 if unknown.
    following: int = 0  #: Ranks whose last iteration ran by their plan.
    #: Since when a rank has not followed its plan, seconds since the epoch; null if all do.
    off_plan_since_s: float | None = None
    observed_s: float  #: When the job last sent telemetry, seconds since the epoch.


@dataclass(frozen=True)
class JobTotals:
    """What a job ran, used and saved since it was registered. It is kept after the job has
    ended.
    """

    name: str
    pipelines: int
    since_s: float  #: When the job was registered, seconds since the epoch.
    ended_s: float | None  #: When it ended; null if it runs.
    telemetry: JobTelemetry | None  #: null if the job has sent none.
    plans: tuple[Entry, ...]  #: The account by version, for the newest ones; attempts are 0.


@dataclass(frozen=True)
class Totals:
    """The totals of running jobs, then those of ended ones, the last to end first."""

    jobs: tuple[JobTotals, ...]


@dataclass(frozen=True)
class JobStatus:
    """Everything the service knows about a job."""

    job: JobSummary
    decision: Decision
    version: int  #: The newest version of the plans.
    promised: int  #: The version that is being planned; equal to `version` if none is.
    taken: Taken | None  #: null if the job has not reported which version it runs.
    reports: tuple[Report, ...]  #: Reports that count now or will, in order of arrival.
    expected_saving_w: float  #: As in the answer to a report, watts.
    expected: Expected
    telemetry: JobTelemetry | None  #: null if the job has sent none.
    #: What the job's autopilot last knew; null if it runs by plans.
    autopilot: AutopilotStatus | None = None
    #: That its plans are of another machine, in a sentence; then they save nothing. null if they
    #: are not.
    unlike_plan: str | None = None
    #: Why iterations do not take the planned time of late, in a sentence; null if they do.
    verdict: str | None = None
    gpus: int = 0  #: Number of GPUs of all pipelines; 0 from services that do not say it.
    #: Since when the job has not been heard of for its lease, so that it has no share of the power
    #: budget of all jobs, seconds since the epoch; null if it is heard of.
    silent_since_s: float | None = None
    #: Since when its GPUs have drawn over 2 % more than its power budgets allow, for a minute or
    #: longer, seconds since the epoch; null if they do not.
    over_budget_since_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """The effect of a request. All of it is on disk."""

    job: str  #: Name of the job.
    report: Report | None  #: The report as kept; null if the request was not about one.
    version: int  #: The first version of the plans that takes the request into account.
    changed: bool  #: Whether the request changed what the pipelines are to do.
    #: planning: the version is being planned. next iteration: it is there, and the job takes it at
    #: its next iteration. already: the job runs it.
    takes_effect: Effect
    #: Average power that all GPUs of the job are expected to save, watts, from the bounds of the
    #: frontier. null while slow stages are being solved; a report with `wait_s` waits for that.
    expected_saving_w: float | None
    reason: str  #: One sentence for people.

    def with_plans_of(self, status: JobStatus) -> Answer:
        """Return the answer updated from a later `status`, if the version has been published by
        then.
        """
        if status.version < self.version:
            return self
        is_taken = status.taken is not None and status.taken.version >= self.version
        return replace(
            self,
            takes_effect="already" if is_taken else "next iteration",
            expected_saving_w=status.expected_saving_w,
            reason=status.decision.reason,
        )


@dataclass(frozen=True)
class PipelineStatus:
    """One pipeline of a job and its newest plan."""

    pipeline: int  #: Number of the pipeline, from 0.
    time_s: float  #: Iteration time of the plan, seconds.
    energy_j: float  #: Energy of such an iteration over all GPUs, joules.
    target_s: float  #: Deadline of an iteration by the current decision, seconds.
    slow_stages: Mapping[int, float]  #: Slow stage -> slowdown.
    report: str | None  #: Key of the report that counts for the pipeline; null for none.
    reason: Slowing | None = None  #: Why it is planned for its target, as in the decision.


@dataclass(frozen=True)
class Jobs:
    """All running jobs."""

    jobs: tuple[JobStatus, ...]


@dataclass(frozen=True)
class PowerBudget:
    """The power budget of all jobs together."""

    power_w: float | None  #: Upper bound on their average power, watts; null for none.
    schedule: tuple[PowerStep, ...]  #: What replaces it later, in order.
    #: The moment of the step of a schedule that is in force. Inside the service, `schedule` has all
    #: steps, the first one with what held before it.
    since_s: Annotated[float, Field(exclude=True)] = 0.0

    @classmethod
    def of(cls, power_w: float | None, schedule: tuple[PowerStep, ...]) -> PowerBudget:
        """Return a budget with all steps of its schedule."""
        return cls(power_w, (PowerStep(0.0, power_w), *schedule) if schedule else ())

    @property
    def later(self) -> PowerBudget:
        """The budget with those steps of its schedule that come later."""
        return replace(
            self, schedule=tuple(step for step in self.schedule if step.start_s > self.since_s)
        )

    def next_s(self, now_s: float, wall_s: float) -> float:
        """Return when another step is in force, by a clock that says `now_s` when it is `wall_s`;
        `now_s` if it is that now, infinite for never.
        """
        due, later = split_at(self.schedule, wall_s)
        if due is not None and due.start_s != self.since_s:
            return now_s
        return now_s + (later[0].start_s - wall_s) if later else math.inf


@dataclass(frozen=True)
class Reports:
    """The reports of a job that count now or will count."""

    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Answers:
    """The effect on each job that a power budget concerns."""

    answers: tuple[Answer, ...]


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


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    at_s: float  #: Seconds since the epoch.
    text: str  #: What happened, in words.


@dataclass(frozen=True)
class Point:
    """The figures of a job at one time."""

    at_s: float  #: Seconds since the epoch.
    iteration_s: float  #: Recent time of an iteration, seconds.
    power_w: float | None  #: Recent power of all GPUs, watts; null if unknown.
    saved_j: float | None  #: Saved since the job was registered, joules; null if unknown.


@dataclass(frozen=True)
class History:
    """The history of a running job, oldest first."""

    points: tuple[Point, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of a job."""

    version: int  #: The newest version of the plans.
    pipelines: tuple[PipelineStatus, ...]  #: In order.


@dataclass(frozen=True)
class Health:
    """The service is running."""

    status: Literal["ok"]
    version: str  #: Version of the planner.


@dataclass(frozen=True)
class Me:
    """The client, as the service sees it."""

    #: What the client may do; each role includes those before it. null without a valid token.
    role: Literal["read", "report", "operate"] | None
    name: str | None  #: Name of the token; null without one.


@dataclass(frozen=True)
class Problem:
    """Why a request was not carried out, as RFC 9457 has it; the answer to every such request."""

    title: str  #: The status in words.
    status: int  #: The HTTP status.
    detail: str  #: What is wrong and what to do, for people.
    code: str  #: What is wrong, for programs.
    least_power_w: float | None = None  #: The least feasible power budget, watts.
    least_deadline_s: float | None = None  #: The least feasible deadline, seconds.
