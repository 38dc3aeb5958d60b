"""What clients send to the service, and how values are written and read as JSON.

Requests are strict: fields that are not listed are refused, and values are not converted.
"""

from __future__ import annotations

import base64
import binascii
import math
import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, Strict, TypeAdapter, WithJsonSchema

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import ON_TIME
from perseus_planner.runs.account import SUMS, Account
from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.service.model import (
    STRICT,
    Cause,
    Line,
    Number,
    Past,
    Place,
    PowerStep,
    RegisteredJob,
    Report,
    Scope,
    Watts,
    shared,
)

Value = TypeVar("Value")

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
KEY = r"^[!-.0-~]{1,256}$"  # printable ASCII without a blank and without /, as it is part of a path
MOST_WHOLE = 2**53 - 1  #: the largest whole number that all JSON readers agree on
MOST_SLOWDOWN = 1e6
EPOCH = "Planner-Epoch"  #: the header that says in what versions are numbered
LEASE = "Planner-Lease"  #: the header that says how long plans hold, seconds
_MOST_ALERTS = 10_000
_MOST_STEPS = 2_000  # of twenty days by quarters of an hour; a job's row has them
_MOST_S = 1e9  # some thirty years; moments may have one more digit, which is enough until 2286

JobName = Annotated[
    str,
    Field(pattern=NAME, description="1 to 128 letters, digits, `.`, `_` and `-`; not `.` first."),
]
Key = Annotated[
    str,
    Field(pattern=KEY, description="Up to 256 printable ASCII characters without blanks and `/`."),
]
Whole = Annotated[int, Strict(), Field(ge=0, le=MOST_WHOLE)]
Span = Annotated[float, Strict(), Field(gt=0.0, le=_MOST_S)]
Seconds = Annotated[float, Strict(), Field(ge=0.0, le=_MOST_S)]
Text = Annotated[str, Field(max_length=2000)]


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(
            f"frontier: is not base64 ({error}); encode the file with `base64 -w0`"
        ) from error


def _encoded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


FileBytes = Annotated[
    bytes | None,
    BeforeValidator(_decoded),
    PlainSerializer(_encoded),
    WithJsonSchema({"anyOf": [{"type": "string", "contentEncoding": "base64"}, {"type": "null"}]}),
]


@dataclass(frozen=True)
class Registration:
    """A job to register: with its frontier, or with a profile and a schedule that the service
    solves.
    """

    __pydantic_config__ = STRICT

    name: JobName
    #: Number of data-parallel pipelines.
    pipelines: Annotated[int, Strict(), Field(ge=1, le=2**16)]
    #: The file that `planner solve` writes, in base64.
    frontier: FileBytes = field(default=None, repr=False)
    #: Locations of the ranks; needed if reports name ranks, GPUs or nodes.
    places: Annotated[tuple[Place, ...], Field(max_length=2**20)] = ()
    #: Iteration time to aim for without stragglers; null for that of all clocks at maximum.
    deadline_s: Span | None = None
    #: Clock changes that each GPU may make in an iteration; null for any number.
    max_changes: Number | None = None
    #: Upper bound on the average power of all GPUs of the job; null for none.
    power_w: Watts | None = None
    #: Probability of being on time that plans are made for; null takes each row for the truth.
    on_time: Annotated[float | None, Field(gt=0, le=0.99)] = ON_TIME
    profile_csv: str | None = None  #: Instead of `frontier`: the text of profile.csv.
    profile_yaml: str | None = None  #: The text of the profile.yaml that names it.
    schedule: str | None = None  #: The name of a schedule, or a text grid.
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
    observed_s: Annotated[float, Strict(), Field(ge=0.0, le=10 * _MOST_S)] | None = None
    #: Identifies the report: however often it is sent, it counts once. It may also be sent as the
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
        if self.iteration_s is not None and not 0.0 < self.iteration_s < math.inf:
            raise UsageError(
                f"iteration time {self.iteration_s:g} is not a number of seconds above 0"
            )

    def report(self, header_key: str | None, now_s: float) -> Report:
        """Return the report that the service keeps, received at `now_s`.

        Raises:
            UsageError: If the header has another key than the body.
        """
        if self.key is not None and header_key is not None and self.key != header_key:
            raise UsageError("key: differs from the header Idempotency-Key; send one of them")
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
class AlertGroup:
    """The body that the webhook of Prometheus' Alertmanager sends, version 4. Other fields of it
    are ignored.
    """

    #: Each has `status`, `labels`, `annotations`, `startsAt`, `endsAt` and `fingerprint`. An alert
    #: that cannot be used is listed under `ignored` in the answer and does not affect the others.
    alerts: Annotated[list[Any], Field(max_length=_MOST_ALERTS)]


@dataclass(frozen=True)
class TakenRequest:
    """The version of its plans that a job runs."""

    __pydantic_config__ = STRICT

    version: Annotated[int, Strict(), Field(ge=1, le=MOST_WHOLE)]
    iteration: Whole  #: The first iteration that ran this version.


@dataclass(frozen=True, kw_only=True)
class Counters(Account):
    """The account of one run of a job since it began, over all ranks, and how the run is now."""

    __pydantic_config__ = STRICT

    run: Key  #: Names the run. A restarted job counts from 0 under another name.
    #: Recent median time from requesting a clock until it is set; null if none.
    set_p50_s: Seconds | None = None
    set_p99_s: Seconds | None = None  #: The 99th percentile of that time.
    ranks: Whole = 0  #: Number of ranks; 0 if unknown.
    following: Whole = 0  #: Ranks whose last iteration ran by their plan.
    #: Since when a rank has not followed its plan, seconds since the epoch.
    off_plan_since_s: Past | None = None
    #: What the autopilot of the run knows; null for a run by plans.
    autopilot: AutopilotStatus | None = None
    #: The least power limit of its GPUs that is below their default and that the planner has not
    #: set; null if none is. The job is planned again whenever it changes.
    gpu_power_limit_w: Watts | None = None
    #: Why iterations do not take the planned time of late, in a sentence; null if they do.
    verdict: Text | None = None
    #: That its plans are of another machine, in a sentence; null if they are not.
    unlike_plan: Text | None = None

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


GROWING = tuple(name for name in SUMS if name not in ("saved_j", "unlocked_saved_j"))
"""What only grows while a run goes on."""


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
    schedule: Annotated[tuple[PowerStep, ...], Field(max_length=_MOST_STEPS)] = ()

    def __post_init__(self) -> None:
        for before, after in pairwise(self.schedule):
            if after.start_s <= before.start_s:
                raise UsageError(
                    f"schedule: {after.start_s:.15g} is not after {before.start_s:.15g}; sort its "
                    "moments"
                )


def to_json(value: Any, *, without_defaults: bool = False, indent: int | None = None) -> bytes:
    """Write a value of `model` or of this module as JSON; infinite moments become null."""
    kind: Any = type(value)
    adapter = _adapter(kind)
    return adapter.dump_json(value, by_alias=True, exclude_defaults=without_defaults, indent=indent)


def from_json(kind: type[Value], text: str | bytes) -> Value:
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
