"""The tables of the service's database, and what a job's row holds.

| table | content |
|---|---|
| meta | the version of these tables, the current writer, the power budget of all jobs |
| jobs | one row for each running job: its registration, its state and its telemetry as JSON |
| versions, version_plans, plans | the latest versions of each job's plans; every plan once |
| ended | what each job that has ended ran, used and saved, as JSON; rows are never deleted |
| frontiers | every frontier once, with its curve |

A database of 0.2 also has a table `learnt`, which nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Column, Index, Integer, LargeBinary, MetaData, String, Table, Text

from perseus_planner.service.answers import Event
from perseus_planner.service.curves import Curve
from perseus_planner.service.model import (
    Decision,
    PlanSet,
    PowerStep,
    RegisteredJob,
    Report,
    Taken,
    shared,
)
from perseus_planner.service.schemas import from_json, to_json
from perseus_planner.service.state import JobState, Share

LAYOUT = "3"
"""The version of the tables. A database of another version is refused."""

TABLES = MetaData()
meta = Table(
    "meta",
    TABLES,
    Column("name", String(32), primary_key=True),
    Column("value", Text, nullable=False),
)
frontiers = Table(
    "frontiers",
    TABLES,
    Column("digest", String(64), primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("curve", Text, nullable=False),
)
jobs = Table(
    "jobs",
    TABLES,
    Column("name", String(255), primary_key=True),
    Column("frontier", String(64), nullable=False, index=True),
    Column("registration", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("telemetry", Text),
)
versions = Table(
    "versions",
    TABLES,
    Column("job", String(255), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("content", Text, nullable=False),
)
version_plans = Table(
    "version_plans",
    TABLES,
    Column("job", String(255), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("plan", String(64), primary_key=True),
    Index("version_plans_plan", "plan"),
)
ended = Table(
    "ended", TABLES, Column("id", Integer, primary_key=True), Column("totals", Text, nullable=False)
)
plans = Table(
    "plans",
    TABLES,
    Column("digest", String(64), primary_key=True),
    Column("text", Text, nullable=False),
)


@dataclass(frozen=True)
class VersionRecord:
    """The JSON of one version of a job's plans."""

    made_s: float  #: When it was published
    decision: Decision  #: The decision that it was planned for
    of_pipeline: tuple[int, ...]  #: For each pipeline, the index of its plan in `plans`
    plans: tuple[str, ...]  #: Digests of the plans
    own: int | None = None  #: As in `PlanSet`


@dataclass(frozen=True)
class StateRecord:
    """The JSON of what changes of a job: `JobState` without its registration, curve and plans."""

    deadline_s: float | None
    power_w: float | None
    decision: Decision
    saving_w: float
    promised: int
    reports: tuple[Report, ...]
    past: tuple[Report, ...]
    taken: Taken | None
    share: Share | None
    gpu_power_limit_w: float | None = None
    power_schedule: tuple[PowerStep, ...] = ()
    events: tuple[Event, ...] = ()
    silent_since_s: float | None = None

    @classmethod
    def of(cls, state: JobState) -> StateRecord:
        """Return the record of a job's state."""
        reports = {"reports": tuple(state.reports.values()), "past": tuple(state.past.values())}
        return cls(**{**shared(cls, state.job), **shared(cls, state), **reports})


def job_row(state: JobState, before: JobState | None = None) -> dict[str, str]:
    """Return the columns of a job's row that differ from those of the state before; all without
    one.
    """
    row = {"state": to_json(StateRecord.of(state)).decode()}
    if (
        before is None or state.registered is not before.registered
    ):  # some megabytes for a large job
        row |= {"frontier": state.job.frontier, "registration": to_json(state.registered).decode()}
    return row


def state_of(row: Any, curve: Curve, newest: tuple[PlanSet, Decision]) -> JobState:
    """Return the state of the job in a row of `jobs`, with its newest plans and the decision they
    were made for.

    Raises:
        ValueError: If the row does not hold a job.
    """
    registered = from_json(RegisteredJob, row.registration)
    record = from_json(StateRecord, row.state)
    job = replace(registered, **shared(RegisteredJob, record))
    of_keys = {
        name: {report.key: report for report in getattr(record, name)}
        for name in ("reports", "past")
    }
    published, planned = newest
    given = {"registered": registered, "job": job, "curve": curve, **of_keys}
    return JobState(**{**shared(JobState, record), **given}, published=published, planned=planned)
