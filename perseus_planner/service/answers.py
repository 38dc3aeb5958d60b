"""What the service answers, as values: the status of jobs, the effects of requests, errors.

Pydantic writes and reads them as JSON (see `schemas`); the service and its clients share these
classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.service.model import Decision, Origin, PowerStep, RegisteredJob, Report, Taken

Effect = Literal["planning", "next iteration", "already"]


@dataclass(frozen=True)
class JobSummary:
    """A job, with the deadline and the power budget that hold now."""

    name: str
    pipelines: int
    frontier: Annotated[str, Field(description="Digest of the frontier file.")]
    ranks: Annotated[int, Field(description="Number of ranks whose location is known.")]
    deadline_s: float | None
    max_changes: int | None
    power_w: float | None
    since_s: Annotated[
        float, Field(description="When the job was registered, seconds since the epoch.")
    ]
    on_time: Annotated[
        float | None, Field(description="Probability of being on time that plans are made for.")
    ] = None
    gpu_power_limit_w: Annotated[
        float | None,
        Field(
            description="Power limit that something else has set on its GPUs, watts; null for none."
        ),
    ] = None
    next_power: Annotated[
        PowerStep | None,
        Field(description="The power budget that comes next by a schedule; null if none does."),
    ] = None

    @classmethod
    def of(cls, job: RegisteredJob) -> JobSummary:
        """Summarize `job`."""
        limits = (job.deadline_s, job.max_changes, job.power_w)
        known = (job.name, job.pipelines, job.frontier, len(job.places))
        next_step = job.power_schedule[0] if job.power_schedule else None
        return cls(*known, *limits, job.since_s, job.on_time, job.gpu_power_limit_w, next_step)


@dataclass(frozen=True)
class Registered:
    """The answer to a registration."""

    job: JobSummary
    version: Annotated[int, Field(description="The newest version of the job's plans.")]
    #: Whether the job was unknown before; over HTTP, the status says it.
    is_new: Annotated[bool, Field(exclude=True)] = False


@dataclass(frozen=True)
class Expected:
    """The average power of all GPUs of a job that its newest plans predict."""

    power_w: Annotated[
        float, Field(description="With these plans, all pipelines waiting for the slowest, watts.")
    ]
    baseline_power_w: Annotated[
        float, Field(description="With all clocks at maximum and iterations as long, watts.")
    ]
    origin: Annotated[
        Origin, Field(description="measured: replayed from a measured profile; or simulated.")
    ]


@dataclass(frozen=True)
class JobTelemetry:
    """Iterations and energy of a job since it was registered, over all its runs."""

    iterations: Annotated[int, Field(description="Number of iterations that have ended.")]
    iteration_s: Annotated[float, Field(description="Recent time of an iteration, seconds.")]
    power_w: Annotated[
        float | None, Field(description="Recent power of all GPUs, watts; null if unknown.")
    ]
    energy_j: Annotated[float, Field(description="Energy of the metered iterations, joules.")]
    baseline_j: Annotated[
        float,
        Field(
            description="Energy of those iterations with all clocks at maximum and as long, by the "
            "profile, joules."
        ),
    ]
    saved_j: Annotated[
        float, Field(description="`baseline_j` - `energy_j`; negative if more was used.")
    ]
    energy_is: Annotated[
        Origin | None,
        Field(
            description="Origin of `energy_j`, simulated if any part is; null if no iteration was "
            "metered."
        ),
    ]
    late_changes: Annotated[
        int, Field(description="Clock changes that came when most of the computation was over.")
    ]
    set_p50_s: Annotated[
        float | None,
        Field(
            description="Recent median time from requesting a clock until it is set; null if none "
            "was."
        ),
    ]
    set_p99_s: Annotated[float | None, Field(description="The 99th percentile of that time.")]
    time_s: Annotated[float, Field(description="Total time of the iterations, seconds.")] = field(
        default=0.0, kw_only=True
    )
    ranks: Annotated[int, Field(description="Number of ranks; 0 if unknown.")] = field(
        default=0, kw_only=True
    )
    following: Annotated[
        int, Field(description="Ranks whose last iteration ran by their plan.")
    ] = field(default=0, kw_only=True)
    off_plan_since_s: Annotated[
        float | None,
        Field(
            description="Since when a rank has not followed its plan, seconds since the epoch; "
            "null if all do."
        ),
    ] = field(default=None, kw_only=True)
    observed_s: Annotated[
        float, Field(description="When the job last sent telemetry, seconds since the epoch.")
    ]


@dataclass(frozen=True)
class PlanTotal:
    """What a job ran by one version of its plans, over all its runs."""

    version: Annotated[
        int | None,
        Field(
            description="The version that it had reported; null before, and for old versions "
            "together."
        ),
    ]
    iterations: Annotated[int, Field(description="Number of iterations.")]
    time_s: Annotated[float, Field(description="Their total time, seconds.")]
    energy_j: Annotated[float, Field(description="Energy of the metered ones, joules.")]
    saved_j: Annotated[float, Field(description="As in the telemetry of the job, joules.")]

    def plus(self, other: PlanTotal) -> PlanTotal:
        """Add other iterations, by this version."""
        return PlanTotal(
            self.version,
            self.iterations + other.iterations,
            self.time_s + other.time_s,
            self.energy_j + other.energy_j,
            self.saved_j + other.saved_j,
        )


@dataclass(frozen=True)
class JobTotals:
    """What a job ran, used and saved since it was registered. It is kept after the job has
    ended.
    """

    name: str
    pipelines: int
    since_s: Annotated[
        float, Field(description="When the job was registered, seconds since the epoch.")
    ]
    ended_s: Annotated[float | None, Field(description="When it ended; null if it runs.")]
    telemetry: Annotated[JobTelemetry | None, Field(description="null if the job has sent none.")]
    plans: Annotated[
        tuple[PlanTotal, ...], Field(description="The same by version, for the newest ones.")
    ]


@dataclass(frozen=True)
class Totals:
    """The totals of running jobs, then those of ended ones, the last to end first."""

    jobs: tuple[JobTotals, ...]


@dataclass(frozen=True)
class JobStatus:
    """Everything the service knows about a job."""

    job: JobSummary
    decision: Decision
    version: Annotated[int, Field(description="The newest version of the plans.")]
    promised: Annotated[
        int, Field(description="The version that is being planned; equal to `version` if none is.")
    ]
    taken: Annotated[
        Taken | None, Field(description="null if the job has not reported which version it runs.")
    ]
    reports: Annotated[
        tuple[Report, ...],
        Field(description="Reports that count now or will, in order of arrival."),
    ]
    expected_saving_w: Annotated[float, Field(description="As in the answer to a report, watts.")]
    expected: Expected
    telemetry: Annotated[JobTelemetry | None, Field(description="null if the job has sent none.")]
    autopilot: Annotated[
        AutopilotStatus | None,
        Field(description="What the job's autopilot last knew; null if it runs by plans."),
    ] = None
    unlike_plan: Annotated[
        str | None,
        Field(
            description="A sentence, if iterations take over twice or under half as long as by the "
            "plans; then these "
            "are of another machine, and save nothing."
        ),
    ] = None
    gpus: Annotated[
        int,
        Field(description="Number of GPUs of all pipelines; 0 from services that do not say it."),
    ] = 0


@dataclass(frozen=True)
class Answer:
    """The effect of a request. All of it is on disk."""

    job: Annotated[str, Field(description="Name of the job.")]
    report: Annotated[
        Report | None,
        Field(description="The report as kept; null if the request was not about one."),
    ]
    version: Annotated[
        int,
        Field(description="The first version of the plans that takes the request into account."),
    ]
    changed: Annotated[
        bool, Field(description="Whether the request changed what the pipelines are to do.")
    ]
    takes_effect: Annotated[
        Effect,
        Field(
            description="planning: the version is being planned. next iteration: it is there, and "
            "the job takes it at "
            "its next iteration. already: the job runs it."
        ),
    ]
    expected_saving_w: Annotated[
        float | None,
        Field(
            description="Average power that all GPUs of the job are expected to save, watts, from "
            "the bounds of the "
            "frontier. null while slow stages are being solved; a report with `wait_s` waits for "
            "that."
        ),
    ]
    reason: Annotated[str, Field(description="One sentence for people.")]

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

    pipeline: Annotated[int, Field(description="Number of the pipeline, from 0.")]
    time_s: Annotated[float, Field(description="Iteration time of the plan, seconds.")]
    energy_j: Annotated[
        float, Field(description="Energy of such an iteration over all GPUs, joules.")
    ]
    target_s: Annotated[
        float, Field(description="Deadline of an iteration by the current decision, seconds.")
    ]
    slow_stages: Annotated[Mapping[int, float], Field(description="Slow stage -> slowdown.")]
    report: Annotated[
        str | None,
        Field(description="Key of the report that counts for the pipeline; null for none."),
    ]


@dataclass(frozen=True)
class Jobs:
    """All running jobs."""

    jobs: tuple[JobStatus, ...]


@dataclass(frozen=True)
class PowerBudget:
    """The power budget of all jobs together."""

    power_w: Annotated[
        float | None, Field(description="Upper bound on their average power, watts; null for none.")
    ]
    schedule: Annotated[
        tuple[PowerStep, ...], Field(description="What replaces it later, in order.")
    ]


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

    index: Annotated[int, Field(description="Position of the alert in the request, from 0.")]
    name: Annotated[str, Field(description="Name of the alert's rule.")]
    problem: Annotated[str, Field(description="Why it was ignored, and what to do.")]


@dataclass(frozen=True)
class AlertAnswers:
    """The effect of alerts."""

    answers: Annotated[
        tuple[Answer, ...], Field(description="For each job that has a GPU or node that they name.")
    ]
    ignored: tuple[IgnoredAlert, ...]


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    at_s: Annotated[float, Field(description="Seconds since the epoch.")]
    text: Annotated[str, Field(description="What happened, in words.")]


@dataclass(frozen=True)
class Point:
    """The figures of a job at one time."""

    at_s: Annotated[float, Field(description="Seconds since the epoch.")]
    iteration_s: Annotated[float, Field(description="Recent time of an iteration, seconds.")]
    power_w: Annotated[
        float | None, Field(description="Recent power of all GPUs, watts; null if unknown.")
    ]
    saved_j: Annotated[
        float | None,
        Field(description="Saved since the job was registered, joules; null if unknown."),
    ]


@dataclass(frozen=True)
class History:
    """The history of a running job, oldest first."""

    points: tuple[Point, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of a job."""

    version: Annotated[int, Field(description="The newest version of the plans.")]
    pipelines: Annotated[tuple[PipelineStatus, ...], Field(description="In order.")]


@dataclass(frozen=True)
class Health:
    """The service is running."""

    status: Literal["ok"]
    version: Annotated[str, Field(description="Version of the planner.")]


@dataclass(frozen=True)
class Me:
    """The client, as the service sees it."""

    role: Annotated[
        Literal["read", "report", "operate"] | None,
        Field(
            description="What the client may do; each role includes those before it. null without "
            "a valid token."
        ),
    ]
    name: Annotated[str | None, Field(description="Name of the token; null without one.")]


@dataclass(frozen=True)
class ErrorContent:
    """Why a request was not carried out."""

    code: Annotated[str, Field(description="For programs.")]
    message: Annotated[str, Field(description="What is wrong and what to do, for people.")]
    least_power_w: Annotated[
        float | None, Field(description="The least feasible power budget, watts.")
    ] = None
    least_deadline_s: Annotated[
        float | None, Field(description="The least feasible deadline, seconds.")
    ] = None


@dataclass(frozen=True)
class Error:
    """The answer to every request that was not carried out."""

    error: ErrorContent
