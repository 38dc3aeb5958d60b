"""What is sent to the service, as OpenAPI shows it; strict: nothing is guessed, and nothing unknown is taken."""

from __future__ import annotations

import base64
import binascii
import math
import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perseus_planner.errors import UsageError
from perseus_planner.service.model import Cause, Job, Place, Report, Scope, ScopeKind
from perseus_planner.service.planning.solving import Unsolved
from perseus_planner.service.telemetry import Counters, Origin

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
KEY = r"^[!-.0-~]{1,256}$"  # printable ASCII without a blank and without /, as it stands in an address
_LINE = r"^[^\x00-\x1f\x7f]*$"
_MOST_S = 1e9  # some thirty years, and the epoch until 2286 with a digit more
MOST_ALERTS = 10_000
MOST_WHOLE = 2**53 - 1  #: the most that JSON readers agree on

JobName = Annotated[str, Field(pattern=NAME, description="1 to 128 letters, digits, `.`, `_` and `-`; no `.` first.")]
Key = Annotated[str, Field(pattern=KEY, description="Up to 256 printable ASCII characters, no blank and no `/`.")]
Line = Annotated[str, Field(pattern=_LINE, max_length=1024)]
Whole = Annotated[int, Field(ge=0, le=MOST_WHOLE)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Span = Annotated[float, Field(gt=0.0, le=_MOST_S)]
Seconds = Annotated[float, Field(ge=0.0, le=_MOST_S)]
Watts = Annotated[float, Field(gt=0.0, le=1e12)]


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class PlaceBody(_Sent):
    """Where one rank of a job is."""

    rank: Number = Field(description="In the whole job, from 0.")
    pipeline: Number = Field(description="Which data-parallel pipeline it is in, from 0.")
    stages: list[Number] = Field(max_length=4096, description="The stages of that pipeline which it holds.")
    node: Line = Field("", description="The host's name; empty: not known.")
    gpu: Line = Field("", description="The UUID of its GPU; empty: not known.")


class Registration(_Sent):
    """A job: either with `frontier`, or with what the service solves for it."""

    name: JobName
    frontier: str | None = Field(None, description="The file that `planner solve` writes, in base64.")
    profile_csv: str | None = Field(None, description="Instead of `frontier`: the text of profile.csv.")
    profile_yaml: str | None = Field(None, description="With it: the text of the profile.yaml that names it.")
    schedule: str | None = Field(None, description="With it: the name of a schedule, or the text grid of one.")
    microbatches: int | None = Field(None, ge=1, le=2**20, description="With the name of a schedule: how many.")
    pipelines: int = Field(ge=1, le=2**16, description="How many data-parallel pipelines it has.")
    places: list[PlaceBody] = Field([], max_length=2**20, description="Its ranks; needed where reports name them.")
    deadline_s: Span | None = Field(
        None, description="The iteration time wanted where nobody straggles, seconds; null: that of maximum clocks."
    )
    max_changes: Number | None = Field(
        None, description="How often each GPU may change its clock in an iteration; null: any number of times."
    )
    min_dwell_s: float = Field(0.0, ge=0.0, le=_MOST_S, description="For how long a clock must be held, seconds.")
    power_w: Watts | None = Field(
        None, description="The most that all GPUs of the job may draw on average, watts; null: any."
    )

    @model_validator(mode="after")
    def _checked(self) -> Registration:
        profile = (self.profile_csv, self.profile_yaml, self.schedule)
        if self.frontier is None and None in profile:
            raise ValueError("give a frontier, or all of profile_csv, profile_yaml and schedule")
        if self.frontier is not None and (*profile, self.microbatches) != (None,) * 4:
            raise ValueError("has a frontier, so leave out profile_csv, profile_yaml, schedule and microbatches")
        return self

    def given_frontier(self) -> bytes | None:
        """The bytes of `frontier`; None where it is to be solved.

        Raises:
            UsageError: it is not base64.
        """
        if self.frontier is None:
            return None
        try:
            return base64.b64decode(self.frontier, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UsageError(f"frontier: is not base64 ({error}); encode the file with `base64 -w0`") from error

    def unsolved(self) -> Unsolved:
        """What is to be solved where there is no `frontier`."""
        return Unsolved(self.profile_csv or "", self.profile_yaml or "", self.schedule or "", self.microbatches)

    def job(self) -> Job:
        """The job, whose frontier and time the service sets."""
        return Job(
            name=self.name,
            pipelines=self.pipelines,
            frontier="",
            places=tuple(Place(**{**dict(place), "stages": tuple(place.stages)}) for place in self.places),
            deadline_s=self.deadline_s,
            max_changes=self.max_changes,
            min_dwell_s=self.min_dwell_s,
            power_w=self.power_w,
        )


class ScopeBody(_Sent):
    """What is slow: pipeline 3; stage 2 of `pipeline`; rank 17; GPU "GPU-8f6b…"; node "node07"."""

    kind: ScopeKind
    value: Line | Number = Field(description="Its number, or the GPU's UUID, or the node's name.")
    pipeline: Number | None = Field(None, description="In which pipeline; null: wherever it is.")

    def scope(self) -> Scope:
        """The value that the service takes."""
        return Scope(self.kind, str(self.value), self.pipeline)


class StragglerReport(_Sent):
    """That something is slow, or has recovered; how slow in exactly one of three ways."""

    key: Key | None = Field(
        None,
        description="Which report this is: however often it is sent, it counts once. Also as the header "
        "`Idempotency-Key`; the service chooses one where there is neither.",
    )
    source: Line = Field(
        min_length=1,
        description="Who says it; its later report about the same scope takes the place of the earlier.",
    )
    scope: ScopeBody
    slowdown: float | None = Field(
        None, ge=1.0, le=1e6, description="How many times as long it takes; 1: it has recovered."
    )
    iteration_s: Span | None = Field(None, description="The iteration time expected of its pipeline, seconds.")
    score: float | None = Field(
        None, ge=1e-6, le=1.0, description="Performance relative to what it should be; its slowdown is 1 / score."
    )
    in_s: float | None = Field(None, ge=0.0, le=_MOST_S, description="It begins in so many seconds; null: now.")
    at_iteration: Whole | None = Field(None, description="Or it begins with this iteration of the job.")
    ttl_s: Span | None = Field(
        None, description="For how long it holds once begun, seconds; null: until it is cleared."
    )
    cause: Cause = Field("unknown", description="What it is about.")
    observed_s: float | None = Field(
        None,
        ge=0.0,
        le=10 * _MOST_S,
        description="When its source observed it, seconds since the epoch: of what one source says about one scope, "
        "the latest counts, in whatever order reports come. null: now. What is later than now, by a clock that is "
        "ahead, counts as observed now.",
    )

    @model_validator(mode="after")
    def _checked(self) -> StragglerReport:
        if [self.slowdown, self.iteration_s, self.score].count(None) != 2:
            raise ValueError("say how slow in one way: slowdown, iteration_s or score")
        if self.in_s is not None and self.at_iteration is not None:
            raise ValueError("it begins in_s seconds from now or at_iteration; give one of them")
        return self

    def report(self, header_key: str | None, now_s: float) -> Report:
        """The value that the service takes.

        Raises:
            UsageError: the key of the header is another one.
        """
        if self.key is not None and header_key is not None and self.key != header_key:
            raise UsageError("key: is not that of the header Idempotency-Key; send one of them")
        begins_s = now_s + (self.in_s or 0.0)
        return Report(
            key=self.key or header_key or uuid.uuid4().hex,
            source=self.source,
            scope=self.scope.scope(),
            slowdown=1.0 / self.score if self.score is not None else self.slowdown,
            iteration_s=self.iteration_s,
            observed_s=now_s if self.observed_s is None else min(self.observed_s, now_s),
            begins_s=begins_s,
            begins_iteration=self.at_iteration,
            expires_s=math.inf if self.ttl_s is None else begins_s + self.ttl_s,
            cause=self.cause,
        )


class AlertsBody(_Sent):
    """What a webhook of Prometheus' Alertmanager sends, version 4; other fields of it are of no interest."""

    model_config = ConfigDict(extra="ignore")

    alerts: list[Any] = Field(
        max_length=MOST_ALERTS,
        description="Each with `status`, `labels`, `annotations`, `startsAt`, `endsAt` and `fingerprint`; one that "
        "says too little is answered as ignored, and does the others no harm.",
    )


class TakenBody(_Sent):
    """Which version of its plans a job runs by."""

    version: int = Field(ge=1, le=MOST_WHOLE)
    iteration: Whole = Field(description="The first iteration that ran by it.")


class TelemetryBody(_Sent):
    """What one run of a job has counted since it began, all ranks together; all but the latencies only grows."""

    run: Key = Field(description="Which run of the job: one that is begun anew counts from 0, under another name.")
    iterations: Whole = Field(description="How many have ended.")
    time_s: Seconds = Field(description="How long they took, each from the end of the one before, seconds.")
    metered_iterations: Whole = Field(0, description="Those of them in which the energy of all GPUs is known.")
    metered_s: Seconds = Field(0.0, description="How long these took, seconds.")
    energy_j: float = Field(0.0, ge=0.0, le=1e18, description="Of all GPUs in these, joules.")
    energy_is: Origin | None = Field(None, description="How that comes to be; null: it is known of no iteration.")
    late_changes: Whole = Field(0, description="Clock changes that came when much of their computation was over.")
    set_p50_s: Seconds | None = Field(
        None, description="From when a clock is asked for until it is set, median of late, seconds; null: none was set."
    )
    set_p99_s: Seconds | None = Field(None, description="The same, 99th percentile.")

    @model_validator(mode="after")
    def _checked(self) -> TelemetryBody:
        if self.metered_iterations > self.iterations:
            raise ValueError("metered_iterations are some of iterations, and cannot be more")
        if (self.energy_is is None) != (self.metered_iterations == 0):
            raise ValueError("energy_is says how energy_j comes to be: give it with metered_iterations, and only then")
        if self.metered_iterations == 0 and (self.metered_s, self.energy_j) != (0.0, 0.0):
            raise ValueError("metered_s and energy_j are of metered_iterations, and there are none")
        return self

    def counters(self) -> Counters:
        """The value that the service takes."""
        return Counters(**dict(self))


class DeadlineBody(_Sent):
    """The iteration time that is wanted where nobody straggles."""

    deadline_s: Span | None = Field(description="Seconds; null: that of all clocks at maximum.")


class PowerBody(_Sent):
    """A power budget."""

    power_w: Watts | None = Field(description="The most that all GPUs may draw on average, watts; null: any.")
