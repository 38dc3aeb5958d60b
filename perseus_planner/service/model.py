"""The values that the service keeps and decides on.

They are frozen dataclasses. Pydantic reads and writes them as JSON by their annotations (see
`schemas`), so the service, its database, its HTTP interface and its clients share one class for
each value. Times are in seconds; a moment is in seconds since the epoch. A moment that never comes
is infinite here and null in JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema

from perseus_planner.base.errors import PlannerError, UsageError, shown
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import ON_TIME, Changes, Count, Probability, Rule
from perseus_planner.plans.plan import Plan

ScopeKind = Literal["pipeline", "stage", "rank", "gpu", "node"]
Cause = Literal["compute", "communication", "data", "unknown"]
Origin = Literal["measured", "simulated"]
Slowing = Literal["straggler", "job budget", "cluster budget", "GPU limit", "deadline"]
"""Why a pipeline is planned for another time than that of all clocks at maximum."""
ProfileOrigin = Literal["measured", "simulated", "unknown"]

REMEMBERED = 256
"""How many inactive reports of a job are kept, so that a report that is delivered again is
recognized.
"""


_LONGEST_NAME = 255


class UnknownJob(PlannerError):
    """The job, or the part of it that was asked for, does not exist."""


class UnknownReport(UnknownJob):
    """The job has no report with that key."""


class Conflict(PlannerError):
    """The request contradicts an earlier one."""


class StorageError(PlannerError):
    """The service's database cannot be read or written; the request has not been carried out."""


class Fenced(StorageError):
    """Another service has opened the database, so this one can never write to it again."""


def check_name(what: str, name: str) -> None:
    """Check that the text `what` is a name.

    Raises:
        UsageError: If it is not.
    """
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()):
        raise UsageError(
            f"{what}: {shown(name)} is not a name; write 1 to {_LONGEST_NAME} printable characters"
        )


def shared(kind: type, value: object) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` that `value` has too, by name."""
    names = [attribute.name for attribute in fields(kind)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _text_of_number(value: object) -> object:
    return str(value) if type(value) is int and 0 <= value < 2**31 else value


def _infinite_if_null(value: object) -> object:
    return math.inf if value is None else value


Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=1024)]
Number = Annotated[int, Strict(), Field(ge=0, lt=2**31)]
Watts = Annotated[float, Strict(), Field(gt=0.0, le=1e12)]
Past = Annotated[float, Strict(), Field(ge=0.0, le=1e11)]
"""A moment that has been, or one of a schedule: seconds since the epoch."""
BOUND = Rule(float, False, "a finite number above 0; give one, or null for no limit")
Bound = Annotated[float, BOUND]
Moment = Annotated[
    float,
    BeforeValidator(_infinite_if_null),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]
"""A moment, which may be infinite: null in JSON."""
_ScopeValue = Annotated[
    Line,
    BeforeValidator(_text_of_number),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "maxLength": 1024}, {"type": "integer", "minimum": 0}]},
        "validation",
    ),
]
STRICT = ConfigDict(extra="ignore", allow_inf_nan=False)
"""For values that clients send: numbers that are not finite are refused, and fields that a newer
client may send are ignored."""


@dataclass(frozen=True)
class Place:
    """The location of one rank of a job."""

    __pydantic_config__ = STRICT

    rank: Number  #: Rank in the whole job, from 0.
    pipeline: Number  #: Data-parallel pipeline of the rank, from 0.
    #: Stages of that pipeline on this rank; [] if unknown.
    stages: Annotated[tuple[Number, ...], Field(max_length=4096)]
    node: Line = ""  #: Host name; empty if unknown.
    gpu: Line = ""  #: UUID of the GPU; empty if unknown.


@dataclass(frozen=True)
class PowerStep:
    """A power budget that holds from a moment on."""

    __pydantic_config__ = STRICT

    start_s: Past  #: From when, seconds since the epoch.
    power_w: Watts | None  #: Watts; null for no budget.


def split_at(
    schedule: tuple[PowerStep, ...], now_s: float
) -> tuple[PowerStep | None, tuple[PowerStep, ...]]:
    """Return the last step that has begun, None if none has; and those that follow."""
    begun = sum(step.start_s <= now_s for step in schedule)
    return (schedule[begun - 1] if begun else None), schedule[begun:]


@dataclass(frozen=True)
class RegisteredJob(Checked):
    """A training job, with the deadline and the power budget that hold now."""

    name: str  #: Unique among the running jobs
    pipelines: Count  #: Number of data-parallel pipelines. They all have the same frontier.
    frontier: str  #: Digest of the frontier file
    #: Locations of the ranks; may be empty if reports only name pipelines.
    places: tuple[Place, ...] = ()
    #: Iteration time to aim for without stragglers; None for that of all clocks at maximum.
    deadline_s: Bound | None = None
    max_changes: Changes | None = None  #: Switch budget of the plans, as for `Frontier.plan_for`
    #: Upper bound on the average power of all GPUs of the job, watts; None for no bound.
    power_w: Bound | None = None
    since_s: float = 0.0  #: When the job was registered
    #: The probability of the plans being on time, and within the power, as for
    #: `Frontier.plan_until`.
    on_time: Probability | None = ON_TIME
    #: The least power limit, watts, that something else than the planner has set on one of its
    #: GPUs, as the job reports it; None if none is below its default.
    gpu_power_limit_w: float | None = None
    #: The budgets of a schedule, by their moment; the first one is that from before it.
    power_schedule: tuple[PowerStep, ...] = ()
    power_since_s: float = 0.0  #: The moment of the one that is in force, as `power_w`

    def __post_init__(self) -> None:
        check_name("name", self.name)
        super().__post_init__()


@dataclass(frozen=True)
class Scope:
    """The part of a job that is slow: pipeline 3, stage 2 of `pipeline`, rank 17, GPU
    "GPU-8f6b…", node "node07".
    """

    __pydantic_config__ = STRICT

    kind: ScopeKind
    value: _ScopeValue  #: The number of the part, the UUID of the GPU or the node's name.
    pipeline: Number | None = None  #: The pipeline of that part; null for all that have it.

    @cached_property
    def part(self) -> tuple[str, str, int | None]:
        """All of it, to look it up."""
        return self.kind, self.value, self.pipeline


@dataclass(frozen=True)
class Report:
    """A report that part of a job is slow, or has recovered, as the service keeps it."""

    key: str  #: Identifies the report. A report with the same key is the same report.
    source: str  #: Who reports. A later report replaces an earlier one about that scope.
    scope: Scope
    #: Time over normal time, 1 or more; 1 means recovered. null if `iteration_s` is given.
    slowdown: float | None
    iteration_s: float | None  #: Expected iteration time of the pipeline, seconds.
    observed_s: float  #: When the source observed it. The latest observation counts.
    begins_s: float  #: When it begins.
    begins_iteration: int | None = None  #: The iteration in which it begins, if given.
    expires_s: Moment = math.inf  #: When it expires; null if it holds until it is cleared.
    cause: Cause = "unknown"

    @cached_property
    def about(self) -> tuple[Any, ...]:
        """Its source and scope: a later report about the same replaces it."""
        return self.source, *self.scope.part

    def __post_init__(self) -> None:
        if (self.slowdown is None) == (self.iteration_s is None):
            raise UsageError(f"report {self.key}: give either a slowdown or an iteration time")
        if self.slowdown is not None and not 1.0 <= self.slowdown < math.inf:
            raise UsageError(
                f"report {self.key}: slowdown {self.slowdown} is not a number of 1 or more"
            )
        if self.iteration_s is not None and not 0.0 < self.iteration_s < math.inf:
            raise UsageError(
                f"report {self.key}: iteration_s {self.iteration_s} is not a number of seconds "
                "above 0"
            )


@dataclass(frozen=True)
class Target:
    """The iteration that one pipeline is to be planned for."""

    time_s: float  #: Deadline of an iteration, seconds.
    #: Slow stage -> slowdown; the pipeline is solved anew with these.
    slow_stages: Mapping[int, float] = field(default_factory=dict)
    #: Upper bound on the average power of the pipeline, watts; it goes before `time_s`.
    power_w: float | None = None
    #: Power limit of each GPU, watts; clocks that it would cap are not used.
    gpu_power_limit_w: float | None = None
    #: Why it is for this time; null if that is the time of all clocks at maximum.
    reason: Slowing | None = None


@dataclass(frozen=True)
class Decision:
    """What the pipelines of a job are to do now, and why."""

    targets: tuple[Target, ...]  #: One for each pipeline, in order.
    straggler_time_s: float  #: Iteration time of the slowest pipeline, seconds.
    stragglers: Mapping[int, str]  #: Pipeline -> key of the report that counts for it.
    since_s: float  #: Since when these targets hold.
    look_again_s: Moment  #: When time alone may change the decision; null for never.
    reason: str  #: One sentence for people.
    #: What a pipeline would do that waits for no straggler; null if none waits for one.
    own: Target | None = None


def distinct(targets: Sequence[Target]) -> list[tuple[Target, int]]:
    """Return the targets that are other objects, in order of appearance, each with how many
    pipelines have it. A decision has one object for equal targets.
    """
    of_id = dict(zip(map(id, targets), targets, strict=True))
    return [(of_id[which], count) for which, count in Counter(map(id, targets)).items()]


@dataclass(frozen=True)
class PlanSet:
    """One version of the plans of a job; equal plans are listed once."""

    version: int  #: Rises with every change, from 1.
    #: Plan files, as `planner plan` writes them.
    texts: Annotated[tuple[str, ...], Field(alias="plans")] = field(repr=False)
    of_pipeline: tuple[int, ...]  #: For each pipeline, the index of its plan in `plans`.
    made_s: Annotated[float, Field(exclude=True)] = 0.0  #: When the version was published.
    #: If pipelines wait for a straggler, the index in `plans` of what they run when that is over:
    #: the job's own plan, within its budgets. null if none waits for one.
    own: int | None = None

    def text(self, pipeline: int) -> str:
        """Return the plan of one pipeline as text."""
        return self.texts[self.of_pipeline[pipeline]]

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each pipeline, in order. Parsing takes some 10 ms for each text, once.

        Raises:
            PlanError: If a text is not a plan.
        """
        plans = [Plan.loads(text) for text in self.texts]
        return tuple(plans[index] for index in self.of_pipeline)


@dataclass(frozen=True)
class Taken:
    """The version of the plans that a job runs, as it last reported."""

    version: int
    iteration: int  #: The first iteration that ran this version.
    at_s: float  #: When the job reported it, seconds since the epoch.


class Numbers(Protocol):
    """The part of a job's frontier that the policy needs. `Frontier` has all of it except
    `slowed`.
    """

    @property
    def baseline_time_s(self) -> float: ...  # noqa: D102
    @property
    def min_time_s(self) -> float: ...  # noqa: D102
    @property
    def max_time_s(self) -> float: ...  # noqa: D102
    def bound_j(self, deadline_s: float) -> float:
        """Return the least energy of one pipeline's iteration of that time, joules."""

    def slowed(self, stages: Mapping[int, float]) -> Numbers:
        """Return the numbers of the pipeline in which these stages are slower by these factors."""
