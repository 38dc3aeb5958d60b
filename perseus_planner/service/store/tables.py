"""The tables of the service's database, and how jobs are read from them.

| table | content |
|---|---|
| meta | the version of this layout, and who writes |
| jobs | those that run, as they are to be |
| decisions | what is decided for each job now, and what it has taken |
| reports | those that count, and the last that did |
| versions, version_plans, plans | the last versions of each job's plans; every plan once |
| frontiers | every frontier once, and its curve |
| telemetry | what each job has counted |
| budgets | the power budget of all jobs |
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    select,
)

from perseus_planner.service.outcomes import PlanSet
from perseus_planner.service.state import JobState
from perseus_planner.service.store import records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.service.model import Decision, Report
    from perseus_planner.service.telemetry import JobTelemetry

LAYOUT = "1"
"""The version of the tables; a database of another version is refused."""

TABLES = MetaData()
meta = Table("meta", TABLES, Column("name", String(32), primary_key=True), Column("value", Text, nullable=False))
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
    Column("registered", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("frontier", String(64), nullable=False, index=True),
)
decisions = Table(
    "decisions",
    TABLES,
    Column("job", String(255), primary_key=True),
    Column("content", Text, nullable=False),
    Column("saving_w", Float(53), nullable=False),
    Column("promised", Integer, nullable=False),
    Column("taken", Text),
    Column("share", Text),
)
reports = Table(
    "reports",
    TABLES,
    Column("number", Integer, primary_key=True, autoincrement=True),  # in the order in which they came
    Column("job", String(255), nullable=False),
    Column("key", String(255), nullable=False),
    Column("past", Boolean, nullable=False),
    Column("content", Text, nullable=False),
    UniqueConstraint("job", "key"),
)
versions = Table(
    "versions",
    TABLES,
    Column("job", String(255), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("made_s", Float(53), nullable=False),
    Column("decision", Text, nullable=False),
    Column("of_pipeline", Text, nullable=False),
)
version_plans = Table(
    "version_plans",
    TABLES,
    Column("job", String(255), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),
    Column("plan", String(64), nullable=False),
    Index("version_plans_plan", "plan"),
)
plans = Table("plans", TABLES, Column("digest", String(64), primary_key=True), Column("text", Text, nullable=False))
telemetry = Table(
    "telemetry", TABLES, Column("job", String(255), primary_key=True), Column("content", Text, nullable=False)
)
budgets = Table(
    "budgets", TABLES, Column("name", String(32), primary_key=True), Column("power_w", Float(53), nullable=False)
)


def read_jobs(connection: Connection, kept: Mapping[str, list[tuple[PlanSet, Decision]]]) -> dict[str, JobState]:
    """Every job that runs, by its name; `kept` as `read_versions` gives it."""
    curves = {
        row.digest: records.curve_from(row.curve)
        for row in connection.execute(select(frontiers.c.digest, frontiers.c.curve))
    }
    decided = {row.job: row for row in connection.execute(select(decisions))}
    counting: dict[str, dict[str, Report]] = {}
    past: dict[str, dict[str, Report]] = {}
    for row in connection.execute(select(reports).order_by(reports.c.number)):
        (past if row.past else counting).setdefault(row.job, {})[row.key] = records.report_from(row.content)
    return {
        row.name: JobState(
            registered=records.job_from(row.registered),
            job=records.job_from(row.content),
            curve=curves[row.frontier],
            decision=records.decision_from(now.content),
            saving_w=now.saving_w,
            published=kept[row.name][-1][0],
            planned=kept[row.name][-1][1],
            promised=now.promised,
            reports=counting.get(row.name, {}),
            past=past.get(row.name, {}),
            taken=None if now.taken is None else records.taken_from(now.taken),
            share=None if now.share is None else records.share_from(now.share),
        )
        for row in connection.execute(select(jobs))
        for now in (decided[row.name],)
    }


def read_versions(connection: Connection) -> dict[str, list[tuple[PlanSet, Decision]]]:
    """The versions of each job's plans that are kept, rising, each with what had been decided."""
    texts = {row.digest: row.text for row in connection.execute(select(plans))}
    texts_of: dict[tuple[str, int], list[str]] = {}
    for row in connection.execute(select(version_plans).order_by(version_plans.c.place)):
        texts_of.setdefault((row.job, row.version), []).append(texts[row.plan])
    found: dict[str, list[tuple[PlanSet, Decision]]] = {}
    for row in connection.execute(select(versions).order_by(versions.c.version)):
        of_pipeline = tuple(json.loads(row.of_pipeline))
        plan_set = PlanSet(row.version, tuple(texts_of[row.job, row.version]), of_pipeline, row.made_s)
        found.setdefault(row.job, []).append((plan_set, records.decision_from(row.decision)))
    return found


def read_telemetry(connection: Connection) -> dict[str, JobTelemetry]:
    """What jobs have counted, by name."""
    return {row.job: records.telemetry_from(row.content) for row in connection.execute(select(telemetry))}
