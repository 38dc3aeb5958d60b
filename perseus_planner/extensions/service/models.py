"""The values that the service keeps, decides on, is sent and answers.

They are frozen dataclasses. Pydantic reads and writes them as JSON by their annotations, so the
service, its database, its HTTP interface and its clients share one class for each value. Times are
in seconds; a moment is in seconds since the epoch. A moment that never comes is infinite here and
null in JSON. What is sent is read strictly: values are not converted.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    FailFast,
    Field,
    PlainSerializer,
    Strict,
    TypeAdapter,
    WithJsonSchema,
)

from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.base.prefixes import counted
from perseus_planner.base.units import ON_TIME
from perseus_planner.extensions.service.kinds import (
    MOST_S,
    MOST_SLOWDOWN,
    MOST_WHOLE,
    STRICT,
    JobName,
    Key,
    Line,
    Moment,
    Number,
    Past,
    Seconds,
    SentStatus,
    Share,
    Span,
    Text,
    Watts,
    Whole,
)
from perseus_planner.extensions.service.parts import (
    MOST_PLACES,
    MOST_PLACES_OF_A_PIPELINE,
    Parts,
    Places,
)
from perseus_planner.extensions.service.parts import Place as Place
from perseus_planner.extensions.service.parts import Scope as Scope
from perseus_planner.plans.plan import Plan
from perseus_planner.runs.account import GROWING, SUMS, Account, Entry

Cause = Literal["compute", "communication", "data", "thermal", "unknown"]
Slowing = Literal["straggler", "job budget", "cluster budget", "GPU limit", "deadline"]
"""Why a pipeline is planned for another time than that of all clocks at maximum."""
ProfileOrigin = Literal["measured", "simulated", "traced", "unknown"]

REMEMBERED = 256
"""How many inactive reports of a job are kept, so that a report that is delivered again is
recognized.
"""
EPOCH = "Planner-Epoch"  #: the header that says in what versions are numbered
LEASE = "Planner-Lease"  #: the header that says how long plans hold, seconds
MOST_RANKS = 1_024  #: of which each one's waiting is sent
_MOST_STEPS = 2_000  # of a schedule of twenty days by quarters of an hour; a job's row has them
_MOST_PROFILE = 2**22  #: characters of a profile's rows, or of a schedule: some 70,000 of each
_MOST_YAML = 2**18  #: characters of a profile.yaml, which has some 2,000


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


def shared(kind: type, value: object) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` that `value` has too, by name."""
    names = [attribute.name for attribute in fields(kind)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@dataclass(frozen=True)
class PowerStep:
    """A power budget that holds from a moment on."""

    __pydantic_config__ = STRICT

    start_s: Past  #: From when, seconds since the epoch.
    power_w: Watts | None  #: Watts; null for no budget.


Steps = Annotated[tuple[PowerStep, ...], FailFast(), Field(max_length=_MOST_STEPS)]


def split_at(
    schedule: tuple[PowerStep, ...], now_s: float
) -> tuple[PowerStep | None, tuple[PowerStep, ...]]:
    """Return the last step that has begun, None if none has; and those that follow."""
    begun = sum(step.start_s <= now_s for step in schedule)
    return (schedule[begun - 1] if begun else None), schedule[begun:]


@dataclass(frozen=True)
class _Job:
    """What is said of a training job when it is registered."""

    __pydantic_config__ = STRICT

    name: JobName  #: Unique among the running jobs.
    #: Number of data-parallel pipelines, which all have the same frontier.
    pipelines: Annotated[int, Strict(), Field(ge=1, le=2**16)]
    #: Iteration time to aim for without stragglers; null for that of all clocks at maximum.
    deadline_s: Span | None = field(default=None, kw_only=True)
    #: Clock changes that each GPU may make in an iteration; null for any number.
    max_changes: Number | None = field(default=None, kw_only=True)
    #: Upper bound on the average power of all GPUs of the job; null for none.
    power_w: Watts | None = field(default=None, kw_only=True)
    #: Probability of being on time that plans are made for; null takes each row for the truth.
    on_time: Annotated[float | None, Field(gt=0, le=0.99)] = field(default=ON_TIME, kw_only=True)


@dataclass(frozen=True)
class RegisteredJob(_Job):
    """A training job, with the deadline and the power budget that hold now."""

    frontier: str  #: Digest of the frontier file.
    places: Annotated[Places, Field(exclude=True)] = field(default=(), repr=False)
    since_s: float = 0.0  #: When the job was registered, seconds since the epoch.
    ranks: int = 0  #: Number of ranks whose location is known.
    #: The least power limit, watts, that something else than the planner has set on one of its
    #: GPUs, as the job reports it; null if none is below its default.
    gpu_power_limit_w: float | None = None
    #: The power budget that comes next by a schedule; null if none does.
    next_power: PowerStep | None = None
    # the budgets of a schedule, by their moment; the first one is that from before it
    power_schedule: Annotated[Steps, Field(exclude=True)] = ()
    # the moment of the one that is in force, as `power_w`
    power_since_s: Annotated[float, Field(exclude=True)] = 0.0

    @cached_property
    def parts(self) -> Parts:
        """Its parts."""
        return Parts(self.name, self.pipelines, self.places)


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

    def expired(self, now_s: float) -> Report:
        """Return the report, expired now. If it had begun, it still counts as begun and so ends its
        source's older ones.
        """
        just_before_s = math.nextafter(now_s, 0.0)
        begins_s = self.begins_s if self.begins_s > now_s else min(self.begins_s, just_before_s)
        return replace(self, begins_s=begins_s, expires_s=now_s)


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

    targets: tuple[Target, ...]  #: Each once.
    of_pipeline: tuple[int, ...]  #: For each pipeline, the index of its target in `targets`.
    straggler_time_s: float  #: Iteration time of the slowest pipeline, seconds.
    stragglers: Mapping[int, str]  #: Pipeline -> key of the report that counts for it.
    since_s: float  #: Since when these targets hold.
    look_again_s: Moment  #: When time alone may change the decision; null for never.
    reason: str  #: One sentence for people.
    #: What a pipeline would do that waits for no straggler; null if none waits for one.
    own: Target | None = None

    @property
    def asked(self) -> tuple[Any, ...]:
        """What is to be done, without the reasons."""
        return self.targets, self.of_pipeline, self.own

    @property
    def each(self) -> tuple[Target, ...]:
        """The target of each pipeline, in order."""
        return tuple(map(self.targets.__getitem__, self.of_pipeline))


@dataclass(frozen=True)
class PlanSet:
    """One version of the plans of a job; equal plans are listed once."""

    version: int  #: Rises with every change, from 1.
    #: Plan files, as `planner plan` writes them.
    texts: Annotated[tuple[str, ...], Field(alias="plans")] = field(repr=False)
    of_pipeline: tuple[int, ...]  #: For each pipeline, the index of its plan in `plans`.
    #: If pipelines wait for a straggler, the index in `plans` of what they run when that is over:
    #: the job's own plan, within its budgets. null if none waits for one.
    own: int | None = None

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


Value = TypeVar("Value")


FileBytes = Annotated[
    bytes,
    PlainSerializer(lambda content: base64.b64encode(content).decode(), str),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


@dataclass(frozen=True)
class Registration(_Job):
    """A job to register: with its frontier, or with a profile and a schedule that the service
    solves.
    """

    #: The file that `planner solve` writes, in base64.
    frontier: FileBytes | None = field(default=None, repr=False)
    #: Locations of the ranks; needed if reports name ranks, GPUs or nodes.
    places: Places = ()
    #: Instead of `frontier`: the text of profile.csv.
    profile_csv: Annotated[str, Field(max_length=_MOST_PROFILE)] | None = None
    #: The text of the profile.yaml that names it.
    profile_yaml: Annotated[str, Field(max_length=_MOST_YAML)] | None = None
    #: The name of a schedule, or a text grid.
    schedule: Annotated[str, Field(max_length=_MOST_PROFILE)] | None = None
    #: For a schedule given by its name.
    microbatches: Annotated[int, Strict(), Field(ge=1, le=2**20)] | None = None
    #: Whether a running job of that name goes on with this frontier and these settings. Its reports
    #: and totals stay, and so do a deadline and a power budget that were set since it was
    #: registered.
    take_over: Annotated[bool, Strict()] | None = None

    def __post_init__(self) -> None:
        profile = (self.profile_csv, self.profile_yaml, self.schedule)
        if self.frontier is None and None in profile:
            raise UsageError("give a frontier, or all of profile_csv, profile_yaml and schedule")
        if self.frontier is not None and (*profile, self.microbatches) != (None,) * 4:
            raise UsageError(
                "frontier: leave out profile_csv, profile_yaml, schedule and microbatches beside it"
            )
        self.check_places(len(self.places))

    def check_places(self, count: int) -> None:
        """Check that the job may have so many places.

        Raises:
            UsageError: If it may not.
        """
        most = min(MOST_PLACES_OF_A_PIPELINE * self.pipelines, MOST_PLACES)
        if count > most:
            raise UsageError(
                f"places: more than {most:,} for {counted(self.pipelines, 'pipeline')}; list each "
                "rank once"
            )

    def job(self) -> RegisteredJob:
        """Return the job. The service adds its frontier's digest and the time."""
        return RegisteredJob(**{**shared(RegisteredJob, self), "frontier": ""})


@dataclass(frozen=True)
class ReportRequest:
    """A report that part of a job is slow, or has recovered. Give exactly one of slowdown,
    iteration_s and score.
    """

    __pydantic_config__ = STRICT

    #: Who reports. A later report replaces an earlier one about that scope.
    source: Annotated[Line, Field(min_length=1)]
    scope: Scope
    #: Time over normal time; 1 means recovered.
    slowdown: Annotated[float, Strict(), Field(ge=1.0, le=MOST_SLOWDOWN)] | None = None
    iteration_s: Span | None = None  #: Expected iteration time of the pipeline, seconds.
    #: Performance over normal performance, the inverse of a slowdown.
    score: Annotated[float, Strict(), Field(ge=1.0 / MOST_SLOWDOWN, le=1.0)] | None = None
    in_s: Seconds | None = None  #: It begins in this many seconds; null for now.
    at_iteration: Whole | None = None  #: Or it begins with this iteration of the job.
    ttl_s: Span | None = None  #: How long it holds once begun, seconds; null until it is cleared.
    cause: Cause = "unknown"
    #: When the source observed it, seconds since the epoch; null for now. Of one source's reports
    #: about one scope the latest observation counts, in whatever order they arrive. A later moment
    #: than now counts as now.
    observed_s: Annotated[float, Strict(), Field(ge=0.0, le=10 * MOST_S)] | None = None
    #: Identifies the report: however often it is sent, it counts once. Once that report was cleared
    #: or has expired, its key is refused with status 409. It may also be sent as the
    #: header `Idempotency-Key`. Without either, the service chooses one.
    key: Key | None = None

    def __post_init__(self) -> None:
        given = [
            name for name in ("slowdown", "iteration_s", "score") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise UsageError(
                "a report says how slow in one way: give a slowdown, an iteration time or a score, "
                f"and not {' and '.join(given) or 'none'}"
            )
        if self.in_s is not None and self.at_iteration is not None:
            raise UsageError(
                "a report begins after a time or with an iteration; give one of the two"
            )
        if self.slowdown is not None and not 1.0 <= self.slowdown < math.inf:
            raise UsageError(
                f"slowdown {self.slowdown:g} is not a number of 1 or more; 1 means recovered"
            )
        if self.score is not None and not 0.0 < self.score <= 1.0:
            raise UsageError(
                f"score {self.score:g} is not above 0 and at most 1; 1 means recovered"
            )

    def report(self, header_key: str | None, now_s: float) -> Report:
        """Return the report that the service keeps, received at `now_s`.

        Raises:
            UsageError: If the header has another key than the body.
        """
        if self.key is not None and header_key is not None and self.key != header_key:
            raise UsageError("key: differs from the header Idempotency-Key; send one of them")
        # Times count from the arrival, by the clock of the service; that of the source may be
        # wrong. An observation is never in the future, where it would keep later ones from
        # counting.
        begins_s = now_s + (self.in_s or 0.0)
        kept = {
            "key": self.key or header_key or uuid.uuid4().hex,
            "slowdown": self.slowdown if self.score is None else 1.0 / self.score,
            "observed_s": now_s if self.observed_s is None else min(self.observed_s, now_s),
            "begins_s": begins_s,
            "begins_iteration": self.at_iteration,
            "expires_s": math.inf if self.ttl_s is None else begins_s + self.ttl_s,
        }
        return Report(**{**shared(Report, self), **kept})


@dataclass(frozen=True)
class TakenRequest:
    """The version of its plans that a job runs."""

    __pydantic_config__ = STRICT

    version: Annotated[int, Strict(), Field(ge=1, le=MOST_WHOLE)]
    iteration: Whole  #: The first iteration that ran this version.


@dataclass(frozen=True, kw_only=True)
class _Running(Account):
    """An account, and how what runs is now."""

    #: Recent median time from requesting a clock until it is set; null if none.
    set_p50_s: Seconds | None = None
    set_p99_s: Seconds | None = None  #: The 99th percentile of that time.
    ranks: Whole = 0  #: Number of ranks; 0 if unknown.
    following: Whole = 0  #: Ranks whose last iteration ran by their plan.
    #: Since when a rank has not followed its plan, seconds since the epoch; null if all do.
    off_plan_since_s: Past | None = None


@dataclass(frozen=True, kw_only=True)
class Counters(_Running):
    """The account of one run of a job since it began, over all ranks, and how the run is now."""

    __pydantic_config__ = STRICT

    run: Key  #: Names the run. A restarted job counts from 0 under another name.
    #: What the autopilot of the run knows; null for a run by plans.
    autopilot: SentStatus | None = None
    #: The least power limit of its GPUs that is below their default and that the planner has not
    #: set; null if none is. The job is planned again whenever it changes.
    gpu_power_limit_w: Watts | None = None
    #: Why iterations do not take the planned time of late, in a sentence; null if they do.
    verdict: Text | None = None
    #: Recent seconds of an iteration over those by the plan, if there is a verdict; null if not.
    time_over_planned: Annotated[float, Strict(), Field(gt=0.0, le=1e9)] | None = None
    #: Why no saving by its plans can be stated, in a sentence; null if it can.
    unlike_plan: Text | None = None
    #: Share of the recent time in which each rank ran no computation, in order of ranks; [] if it
    #: is not known, and for more than 1,024 ranks.
    waiting: Annotated[tuple[Share, ...], FailFast(), Field(max_length=MOST_RANKS)] = ()

    def __post_init__(self) -> None:
        for name in SUMS:
            least = 0.0 if name in GROWING else -1e18
            if not least <= getattr(self, name) <= 1e18:
                raise UsageError(f"{name}: is not between {least:g} and 1e18")
        if self.energy_is not in (None, "measured", "simulated"):
            raise UsageError("energy_is: is neither measured nor simulated")
        if (self.energy_is is None) != (self.metered_s == 0.0):
            raise UsageError(
                "energy_is gives the origin of energy_j: send it with metered_s, and only then"
            )
        if self.metered_s == 0.0 and self.energy_j != 0.0:
            raise UsageError("energy_j is of metered_s, and there are none")


@dataclass(frozen=True)
class DeadlineRequest:
    """The iteration time to aim for without stragglers."""

    __pydantic_config__ = STRICT

    deadline_s: Span | None  #: Seconds; null for that of all clocks at maximum.


@dataclass(frozen=True)
class PowerRequest:
    """A power budget."""

    __pydantic_config__ = STRICT

    power_w: Watts | None  #: Upper bound on average power, watts; null for no bound.
    #: What replaces it later, in order; it replaces an earlier schedule.
    schedule: Steps = ()

    def __post_init__(self) -> None:
        for before, after in pairwise(self.schedule):
            if after.start_s <= before.start_s:
                raise UsageError(
                    f"schedule: {after.start_s:.15g} is not after {before.start_s:.15g}; sort its "
                    "moments"
                )


def to_json(value: Any, *, without_defaults: bool = False, indent: int | None = None) -> bytes:
    """Write a value of a class such as those of this module as JSON; infinite moments become
    null.
    """
    kind: Any = type(value)
    adapter = _adapter(kind)
    return adapter.dump_json(value, by_alias=True, exclude_defaults=without_defaults, indent=indent)


def from_json(kind: type[Value], text: str | bytes | bytearray) -> Value:
    """Read a value that `to_json` wrote.

    Raises:
        ValueError: If `text` is not JSON of such a value.
    """
    adapted: Any = kind
    value: Value = _adapter(adapted).validate_json(text)
    return value


@lru_cache(maxsize=128)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


Effect = Literal["planning", "next iteration", "already"]


@dataclass(frozen=True)
class Registered:
    """The answer to a registration."""

    job: RegisteredJob
    version: int  #: The newest version of the job's plans.
    #: Whether the job was unknown before; over HTTP, the status says it.
    is_new: Annotated[bool, Field(exclude=True)] = False


@dataclass(frozen=True)
class Expected:
    """The average power of all GPUs of a job that its newest plans predict."""

    power_w: float  #: With these plans, all pipelines waiting for the slowest, watts.
    baseline_power_w: float  #: With all clocks at maximum and iterations as long, watts.
    origin: ProfileOrigin  #: Origin of the profile from which it is replayed.
    #: The iteration to which both belong, seconds; null from services that do not say it.
    iteration_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobTelemetry(_Running):
    """The account of a job since it was registered, over all its runs, and how it runs now."""

    iteration_s: float  #: Recent time from the begin of an iteration to that of the next, seconds.
    power_w: float | None  #: Recent power of all GPUs, watts; null if unknown.
    observed_s: float  #: When the job last sent telemetry, seconds since the epoch.


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    at_s: float  #: Seconds since the epoch.
    text: str  #: What happened, in words.

    @cached_property
    def as_json(self) -> str:
        """The event as JSON, which is written with each change of its job."""
        return to_json(self).decode()


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
    #: What has happened last to a job that has ended, oldest first; [] if it runs.
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Totals:
    """The totals of running jobs, then those of ended ones, the last to end first."""

    jobs: tuple[JobTotals, ...]


StateName = Literal[
    "not heard of",
    "over budget",
    "late",
    "off plan",
    "beside a straggler",
    "not known",
    "fine",
]
"""The states of a running job: the first that is true of it, by the table of `headline`."""


@dataclass(frozen=True)
class Headline:
    """What an operator has to know first of a job. Everything that shows the job shows this."""

    name: StateName  #: The state in a word or two.
    text: str  #: The state in a sentence without its full stop.
    since_s: float | None = None  #: Since when, seconds since the epoch; null if not known.


_NOT_SAID = Headline("not known", "the service, of an older version, does not say it")


@dataclass(frozen=True)
class JobStatus:
    """Everything the service knows about a job."""

    job: RegisteredJob
    decision: Decision
    version: int  #: The newest version of the plans.
    promised: int  #: The version that is being planned; equal to `version` if none is.
    taken: Taken | None  #: null if the job has not reported which version it runs.
    reports: tuple[Report, ...]  #: Reports that count now or will, in order of arrival.
    expected_saving_w: float  #: As in the answer to a report, watts.
    expected: Expected
    telemetry: JobTelemetry | None  #: null if the job has sent none.
    #: What the job's autopilot last knew; null if it runs by plans.
    autopilot: SentStatus | None = None
    #: Why no saving by its plans can be stated, in a sentence; null if it can.
    unlike_plan: str | None = None
    #: Why iterations do not take the planned time of late, in a sentence; null if they do.
    verdict: str | None = None
    #: Recent seconds of an iteration over those by the plan, if there is a verdict; null if not.
    time_over_planned: float | None = None
    gpus: int = 0  #: Number of GPUs of all pipelines; 0 from services that do not say it.
    #: Since when the job has not been heard of for its lease, so that it has no share of the power
    #: budget of all jobs, seconds since the epoch; null if it is heard of.
    silent_since_s: float | None = None
    #: Since when its GPUs have drawn over 2 % more than its power budgets allow, for a minute or
    #: longer, seconds since the epoch; null if they do not.
    over_budget_since_s: float | None = None
    #: Watts less than with all clocks at maximum, now: measured if the job sends its power, else by
    #: its plans; null if what all clocks at maximum would draw is not known, and for a job that is
    #: not heard of.
    saves_w: float | None = None
    power_limit_w: float | None = None  #: What its budgets allow its GPUs; null without any.
    state: Headline = _NOT_SAID  #: What an operator has to know first.


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


@dataclass(frozen=True, kw_only=True)
class Together:
    """What the running jobs that are heard of draw and save together, now."""

    heard_of: int  #: Jobs that are heard of: all that follows is of these.
    measured: int  #: Those of them that send their power; that of the others is by their plans.
    silent: int  #: Jobs that are not heard of, which are left out.
    power_w: float  #: Watts of all their GPUs.
    #: Watts less than with all clocks at maximum, of the jobs that `compared` counts.
    saves_w: float
    compared: int  #: Jobs of which it is known what all clocks at maximum would draw.
    extra_w: float  #: Watts that they save beside stragglers, of those.


@dataclass(frozen=True)
class Jobs:
    """All running jobs."""

    jobs: tuple[JobStatus, ...]
    together: Together | None = None  #: What they draw and save; null from older services.


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
        if not self.schedule:
            return math.inf
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
    #: The job's own power budgets by the moment when each was set or began, the last ones.
    budgets: tuple[PowerStep, ...] = ()
    #: Share of the recent time in which each rank ran no computation, in order of ranks; [] if it
    #: is not known.
    waiting: tuple[float, ...] = ()


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
