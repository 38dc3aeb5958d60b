"""What the service knows of jobs and stragglers, and what it decides; frozen, times in seconds since the epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from perseus_planner.errors import PlannerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

ScopeKind = Literal["pipeline", "stage", "rank", "gpu", "node"]
Cause = Literal["compute", "communication", "data", "unknown"]


class UnknownJob(PlannerError):
    """No job of that name runs, or it has not what was asked for."""


class UnknownReport(UnknownJob):
    """The job has no report of that key."""


class Conflict(PlannerError):
    """What was asked contradicts what was asked before."""


class StorageError(PlannerError):
    """The service's database cannot be read or written; what was asked has not been done."""


@dataclass(frozen=True)
class Place:
    """Where one rank of a job is.

    Attributes:
        rank: in the whole job, from 0.
        pipeline: which data-parallel pipeline it is in, from 0.
        stages: the stages of that pipeline which it holds.
        node: the host's name; empty: not known.
        gpu: the UUID of its GPU; empty: not known.
    """

    rank: int
    pipeline: int
    stages: tuple[int, ...]
    node: str = ""
    gpu: str = ""


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        name: unique among those that run.
        pipelines: how many data-parallel pipelines it has; all have the same frontier.
        frontier: digest of its frontier.
        places: its ranks; may be empty, where reports name pipelines only.
        deadline_s: the iteration time that is wanted where nobody straggles; None: that of all clocks at maximum.
        max_changes, min_dwell_s: switch budget of its plans, as for `Frontier.plan_for`.
        power_w: the most that all its GPUs together may draw on average; None: any.
        since_s: when it was registered.
    """

    name: str
    pipelines: int
    frontier: str
    places: tuple[Place, ...] = ()
    deadline_s: float | None = None
    max_changes: int | None = None
    min_dwell_s: float = 0.0
    power_w: float | None = None
    since_s: float = 0.0


@dataclass(frozen=True)
class Scope:
    """What is slow: "pipeline" 3; "stage" 2 (of `pipeline`); "rank" 17; "gpu" "GPU-8f6b…"; "node" "node07"."""

    kind: ScopeKind
    value: str
    pipeline: int | None = None


@dataclass(frozen=True)
class Report:
    """That something is slow, or has recovered.

    Attributes:
        key: which report this is: the same key again is the same report.
        source: who says it; a later report of the same source about the same scope takes the place of the earlier.
        scope: what is slow.
        slowdown: how many times as long it takes, 1 or more; 1: it has recovered. None where `iteration_s` is given.
        iteration_s: the iteration time that is expected of its pipeline, seconds.
        observed_s: when the source observed it: what is later counts, in whatever order reports come.
        begins_s: from when it holds.
        begins_iteration: from which iteration it holds; None: `begins_s` says it.
        expires_s: until when it holds; infinite: until it is cleared.
        cause: what it is about.
    """

    key: str
    source: str
    scope: Scope
    slowdown: float | None
    iteration_s: float | None
    observed_s: float
    begins_s: float
    begins_iteration: int | None = None
    expires_s: float = math.inf
    cause: Cause = "unknown"

    def __post_init__(self) -> None:
        if (self.slowdown is None) == (self.iteration_s is None):
            raise UsageError(f"report {self.key}: give either a slowdown or an iteration time")
        if self.slowdown is not None and not 1.0 <= self.slowdown < math.inf:
            raise UsageError(f"report {self.key}: slowdown {self.slowdown} is not a number of 1 or more")
        if self.iteration_s is not None and not 0.0 < self.iteration_s < math.inf:
            raise UsageError(f"report {self.key}: iteration_s {self.iteration_s} is not a number of seconds above 0")


@dataclass(frozen=True)
class Target:
    """What one pipeline is to do.

    Attributes:
        time_s: within what an iteration of it is to end.
        slow_stages: stage -> how many times as long as profiled its computations take now; then it is planned anew on
            such a profile, exactly.
        power_w: the most that all its GPUs may draw on average, even if the iteration then takes longer; None: any.
    """

    time_s: float
    slow_stages: Mapping[int, float] = field(default_factory=dict)
    power_w: float | None = None


@dataclass(frozen=True)
class Decision:
    """What the pipelines of a job are to do now, and why.

    Attributes:
        targets: of each pipeline, in order.
        straggler_time_s: the iteration time of the slowest pipeline, for which the others wait.
        stragglers: pipeline -> key of the report that counts for it.
        since_s: since when these targets hold.
        look_again_s: when time alone may change it: a report begins or expires, a holding time ends; infinite: never.
        reason: one sentence for people.
    """

    targets: tuple[Target, ...]
    straggler_time_s: float
    stragglers: Mapping[int, str]
    since_s: float
    look_again_s: float
    reason: str


class Numbers(Protocol):
    """What the policy asks of a job's frontier; `Frontier` answers all but `slowed`."""

    @property
    def baseline_time_s(self) -> float: ...  # noqa: D102
    @property
    def min_time_s(self) -> float: ...  # noqa: D102
    @property
    def max_time_s(self) -> float: ...  # noqa: D102
    def bound_j(self, deadline_s: float) -> float:
        """The least energy of one pipeline's iteration of that time, joules."""

    def slowed(self, stages: Mapping[int, float]) -> Numbers:
        """Of the pipeline in which these stages are so many times slower."""
