"""What the service answers; frozen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.plans.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.service.model import Decision, Job, Report
    from perseus_planner.service.telemetry import JobTelemetry


@dataclass(frozen=True)
class PlanSet:
    """One version of a job's plans.

    Attributes:
        version: from 1; a later one is greater.
        texts: the plans, as `Plan.dumps` writes them, equal ones once.
        of_pipeline: for each pipeline, in order, the place of its plan in `texts`.
        made_s: when it was published, seconds since the epoch.
    """

    version: int
    texts: tuple[str, ...] = field(repr=False)
    of_pipeline: tuple[int, ...]
    made_s: float

    def text(self, pipeline: int) -> str:
        """The plan of one pipeline, as text."""
        return self.texts[self.of_pipeline[pipeline]]

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each pipeline, in order; read from the texts when first asked for, some 10 ms for each text."""
        plans = [Plan.loads(text) for text in self.texts]
        return tuple(plans[place] for place in self.of_pipeline)


@dataclass(frozen=True)
class Taken:
    """Which version a job runs by, as it last said.

    Attributes:
        version: of the plans.
        iteration: the first one that ran by it.
        at_s: when the job said so, seconds since the epoch.
    """

    version: int
    iteration: int
    at_s: float


@dataclass(frozen=True)
class Registered:
    """A job is known.

    Attributes:
        job: as it is kept.
        version: the newest version of its plans.
        is_new: it was not known before.
    """

    job: Job
    version: int
    is_new: bool


@dataclass(frozen=True)
class Answer:
    """What follows from a request. All of it is on disk.

    Attributes:
        job: the name of the job it is about.
        report: as it is kept; None where the request was about no report.
        version: the first version of the job's plans that takes the request into account.
        changed: the request changed what the pipelines are to do.
        takes_effect: "planning": that version is being planned, and follows; "next iteration": it is there, and the job
            takes it at its next iteration; "already": the job has said that it runs by it.
        expected_saving_w: watts on average that all GPUs of the job are expected to save by what is decided now, as
            `policy.saving_w` has it; from bounds of the frontier. None: slow stages are being solved first.
        reason: one sentence for people.
    """

    job: str
    report: Report | None
    version: int
    changed: bool
    takes_effect: str
    expected_saving_w: float | None
    reason: str

    def as_planned(self, status: JobStatus) -> Answer:
        """The same where `status` tells what came of the planning."""
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
class Expected:
    """What all GPUs of a job draw on average by its newest plans, foreseen by these.

    Attributes:
        power_w: by these plans, each waiting for the slowest pipeline, watts.
        baseline_power_w: with all clocks at maximum, iterations being as long, watts.
        origin: of the profile that the plans are from: they are replayed from it if it was "measured", or "simulated".
    """

    power_w: float
    baseline_power_w: float
    origin: str


@dataclass(frozen=True)
class PipelineStatus:
    """One pipeline of a job.

    Attributes:
        pipeline: its number, from 0.
        time_s: iteration time of its newest plan, seconds.
        energy_j: energy of such an iteration over its GPUs, joules.
        target_s: within what an iteration is to end by what is decided now, seconds.
        slow_stages: stage -> how many times as long as profiled its computations take.
        report: key of the report that counts for it; None: none does.
    """

    pipeline: int
    time_s: float
    energy_j: float
    target_s: float
    slow_stages: Mapping[int, float]
    report: str | None


@dataclass(frozen=True)
class JobStatus:
    """A job, as the service knows it.

    Attributes:
        job: with the deadline and the power that hold now.
        decision: what its pipelines are to do, and why.
        version: the newest version of its plans that is there.
        promised: the version that is being planned; equal to `version` where none is.
        taken: which version it runs by; None: it has not said.
        reports: those that count now or are to count, in the order in which they came.
        expected_saving_w: as in `Answer`.
        expected: what its GPUs draw by its newest plans.
        telemetry: what it has counted; None: it has sent nothing.
    """

    job: Job
    decision: Decision
    version: int
    promised: int
    taken: Taken | None
    reports: tuple[Report, ...]
    expected_saving_w: float
    expected: Expected
    telemetry: JobTelemetry | None
