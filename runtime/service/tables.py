"""The tables of the service's database, and how a job is written to them and read from them.

| table | content |
|---|---|
| meta | the version of this layout, and who writes |
| jobs, decisions | the jobs that run; what is decided for each now |
| reports | those that count, and the last that did |
| versions, version_plans, plans | the last versions of each job's plans; every plan once |
| frontiers | every frontier once, and its curve |
| budgets | the power budget of all jobs |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
    and_,
    exists,
    select,
)

from perseus_planner.files import sha256
from perseus_planner.runtime.service import records
from perseus_planner.runtime.service.curves import Curve
from perseus_planner.runtime.service.model import Decision, Report
from perseus_planner.runtime.service.outcomes import PlanSet
from perseus_planner.runtime.service.state import JobState

LAYOUT = "1"
"""The version of the tables; a database of another version is refused."""

VERSIONS_KEPT = 16
"""How many versions of a job's plans are kept: it goes to and fro between few plans, which are then not made again."""

_JOB_FIELDS = ("job", "promised", "taken", "share_s")

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
    Column("promised", Integer, nullable=False),
    Column("taken", Text),
    Column("share_s", Float(53)),
)
decisions = Table(
    "decisions", TABLES, Column("job", String(255), primary_key=True), Column("content", Text, nullable=False)
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
budgets = Table(
    "budgets", TABLES, Column("name", String(32), primary_key=True), Column("power_w", Float(53), nullable=False)
)


def put(connection: Connection, table: Table, key: Mapping[str, Any], **values: Any) -> None:
    """Write the row of that key, whether or not it is there."""
    this = _is(table, key)
    if connection.execute(table.update().where(this).values(**values)).rowcount == 0:
        connection.execute(table.insert().values(**key, **values))


def add_frontier(connection: Connection, digest: str, content: bytes, curve: Curve) -> None:
    """Write a frontier unless it is there."""
    if not connection.scalar(select(exists().where(frontiers.c.digest == digest))):
        row = {"digest": digest, "content": content, "curve": records.text_of(curve)}
        connection.execute(frontiers.insert().values(row))


def write_job(connection: Connection, before: JobState | None, after: JobState) -> None:
    """Write what is not as it was before; None: the job was not there."""
    name = after.job.name
    if before is None or any(getattr(before, each) != getattr(after, each) for each in _JOB_FIELDS):
        values = {
            "registered": records.text_of(after.registered),
            "content": records.text_of(after.job),
            "frontier": after.job.frontier,
            "promised": after.promised,
            "taken": None if after.taken is None else records.text_of(after.taken),
            "share_s": after.share_s,
        }
        put(connection, jobs, {"name": name}, **values)
    if before is None or before.decision != after.decision:
        put(connection, decisions, {"job": name}, content=records.text_of(after.decision))
    _write_reports(connection, name, before, after)
    if before is None or before.published.version != after.published.version:
        _write_version(connection, name, after.published, after.decision)


def forget_job(connection: Connection, name: str) -> None:
    """Delete all that is only of this job."""
    plan_digests = connection.scalars(select(version_plans.c.plan).where(version_plans.c.job == name)).all()
    frontier = connection.scalar(select(jobs.c.frontier).where(jobs.c.name == name))
    for table in (reports, versions, version_plans, decisions):
        connection.execute(table.delete().where(table.c.job == name))
    connection.execute(jobs.delete().where(jobs.c.name == name))
    _forget_plans(connection, plan_digests)
    unused = ~exists().where(jobs.c.frontier == frontier)
    connection.execute(frontiers.delete().where(frontiers.c.digest == frontier, unused))


def read_jobs(connection: Connection, kept: Mapping[str, list[tuple[PlanSet, Decision]]]) -> dict[str, JobState]:
    """Every job that runs, by its name; `kept` as `read_versions` gives it."""
    curves = {
        row.digest: records.curve_from(row.curve)
        for row in connection.execute(select(frontiers.c.digest, frontiers.c.curve))
    }
    decided = {row.job: records.decision_from(row.content) for row in connection.execute(select(decisions))}
    counting: dict[str, dict[str, Report]] = {}
    past: dict[str, dict[str, Report]] = {}
    for row in connection.execute(select(reports).order_by(reports.c.number)):
        (past if row.past else counting).setdefault(row.job, {})[row.key] = records.report_from(row.content)
    return {
        row.name: JobState(
            registered=records.job_from(row.registered),
            job=records.job_from(row.content),
            curve=curves[row.frontier],
            decision=decided[row.name],
            published=kept[row.name][-1][0],
            promised=row.promised,
            reports=counting.get(row.name, {}),
            past=past.get(row.name, {}),
            taken=None if row.taken is None else records.taken_from(row.taken),
            share_s=row.share_s,
        )
        for row in connection.execute(select(jobs))
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


def _write_reports(connection: Connection, name: str, before: JobState | None, after: JobState) -> None:
    if before is not None and before.reports is after.reports and before.past is after.past:
        return
    old = {} if before is None else _all_reports(before)
    new = _all_reports(after)
    for key, (past, report) in new.items():
        if key not in old:
            row = {"job": name, "key": key, "past": past, "content": records.text_of(report)}
            connection.execute(reports.insert().values(row))
        elif old[key] != (past, report):
            values = {"past": past, "content": records.text_of(report)}
            connection.execute(reports.update().where(_is(reports, {"job": name, "key": key})).values(**values))
    for key in old.keys() - new.keys():
        connection.execute(reports.delete().where(_is(reports, {"job": name, "key": key})))


def _all_reports(state: JobState) -> dict[str, tuple[bool, Report]]:
    """Key -> (whether it is past, report)."""
    past = {key: (True, report) for key, report in state.past.items()}
    return past | {key: (False, report) for key, report in state.reports.items()}


def _write_version(connection: Connection, name: str, published: PlanSet, decision: Decision) -> None:
    row = {
        "job": name,
        "version": published.version,
        "made_s": published.made_s,
        "decision": records.text_of(decision),
        "of_pipeline": json.dumps(published.of_pipeline),
    }
    connection.execute(versions.insert().values(row))
    for place, text in enumerate(published.texts):
        digest = sha256(text.encode())
        if not connection.scalar(select(exists().where(plans.c.digest == digest))):
            connection.execute(plans.insert().values(digest=digest, text=text))
        values = {"job": name, "version": published.version, "place": place, "plan": digest}
        connection.execute(version_plans.insert().values(values))
    _forget_versions(connection, name, published.version - VERSIONS_KEPT)


def _forget_versions(connection: Connection, name: str, last: int) -> None:
    """Delete the versions up to `last`."""
    old = (version_plans.c.job == name) & (version_plans.c.version <= last)
    digests = connection.scalars(select(version_plans.c.plan).where(old)).all()
    connection.execute(version_plans.delete().where(old))
    connection.execute(versions.delete().where(versions.c.job == name, versions.c.version <= last))
    _forget_plans(connection, digests)


def _forget_plans(connection: Connection, digests: Iterable[str]) -> None:
    """Delete those of the plans that no version has."""
    for digest in set(digests):
        unused = ~exists().where(version_plans.c.plan == digest)
        connection.execute(plans.delete().where(plans.c.digest == digest, unused))


def _is(table: Table, key: Mapping[str, Any]) -> Any:
    """The row of that key."""
    return and_(*(table.c[name] == value for name, value in key.items()))
