"""How changes of jobs are written: what differs, table by table, so that many jobs take few statements."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, exists, insert, select, update

from perseus_planner.files import sha256
from perseus_planner.service.store.records import text_of
from perseus_planner.service.store.tables import (
    decisions,
    frontiers,
    jobs,
    plans,
    reports,
    telemetry,
    version_plans,
    versions,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from perseus_planner.service.model import Report
    from perseus_planner.service.state import JobState
    from perseus_planner.service.telemetry import JobTelemetry

VERSIONS_KEPT = 16
"""How many versions of a job's plans are kept: it goes to and fro between few plans, which are then not made again."""

_NOW = ("decision", "saving_w", "promised", "taken", "share")
_KEYS = {jobs: ("name",), decisions: ("job",), reports: ("job", "key")}
_KEY = "of_"  # before the names of the values that say which row is meant: SQLAlchemy wants the plain ones itself


def _named(table: Table) -> Any:
    """The row whose key is given."""
    return and_(*(table.c[name] == bindparam(_KEY + name) for name in _KEYS[table]))


# Built once: building a statement takes longer than running it.
_INSERT = {table: insert(table) for table in (jobs, decisions, reports, versions, version_plans, plans)}
_UPDATE = {table: update(table).where(_named(table)) for table in _KEYS}
_DELETE = {table: delete(table).where(_named(table)) for table in (reports,)} | {
    table: delete(table).where(table.c.job == bindparam("of_job"), table.c.version <= bindparam("up_to"))
    for table in (versions, version_plans)
}

_FORGET_TELEMETRY = delete(telemetry).where(telemetry.c.job == bindparam("of_job"))
_ADD_TELEMETRY = insert(telemetry)


class Rows:
    """What is to be written of jobs that run on.

    Attributes:
        plans: digest -> text, of the plans that may not be there yet.
    """

    def __init__(self, known: Collection[str]) -> None:
        """`known`: digests of plans that are there."""
        self.plans: dict[str, str] = {}
        self._known = known
        self._added: dict[Table, list[dict[str, Any]]] = {table: [] for table in _INSERT}
        self._changed: dict[Table, list[dict[str, Any]]] = {table: [] for table in _UPDATE}
        self._removed: dict[Table, list[dict[str, Any]]] = {table: [] for table in _DELETE}

    def add(self, before: JobState | None, after: JobState) -> None:
        """What is not as it was before; None: the job was not there."""
        name = after.job.name
        if before is None or before.job != after.job:
            self._put(jobs, before is None, {"name": name}, _job_row(after))
        if before is None or any(getattr(before, each) != getattr(after, each) for each in _NOW):
            self._put(decisions, before is None, {"job": name}, _decision_row(after))
        if before is None or before.reports is not after.reports or before.past is not after.past:
            self._add_reports(name, before, after)
        if before is None or before.published.version != after.published.version:
            self._add_version(name, after)

    def write(self, connection: Connection) -> None:
        """Write all of it."""
        if self.plans:
            found = set(connection.scalars(select(plans.c.digest).where(plans.c.digest.in_(self.plans))))
            self._added[plans] = [{"digest": each, "text": self.plans[each]} for each in self.plans.keys() - found]
        for statements, rows in ((_INSERT, self._added), (_UPDATE, self._changed), (_DELETE, self._removed)):
            for table, values in rows.items():
                if values:
                    connection.execute(statements[table], values)

    def _put(self, table: Table, is_new: bool, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        if is_new:
            self._added[table].append({**key, **values})
        else:
            self._changed[table].append({**_named_by(key), **values})

    def _add_reports(self, name: str, before: JobState | None, after: JobState) -> None:
        old = {} if before is None else _all_reports(before)
        new = _all_reports(after)
        for key, (past, report) in new.items():
            if old.get(key) != (past, report):
                values = {"past": past, "content": text_of(report)}
                self._put(reports, key not in old, {"job": name, "key": key}, values)
        self._removed[reports] += [_named_by({"job": name, "key": key}) for key in old.keys() - new.keys()]

    def _add_version(self, name: str, state: JobState) -> None:
        published = state.published
        key = {"job": name, "version": published.version}
        row = {"made_s": published.made_s, "decision": text_of(state.planned)}
        self._added[versions].append({**key, **row, "of_pipeline": json.dumps(published.of_pipeline)})
        for place, text in enumerate(published.texts):
            digest = _digest(text)
            if digest not in self._known:
                self.plans[digest] = text
            self._added[version_plans].append({**key, "place": place, "plan": digest})
        if published.version > VERSIONS_KEPT:
            for table in (versions, version_plans):
                self._removed[table].append({"of_job": name, "up_to": published.version - VERSIONS_KEPT})


def write_telemetry(connection: Connection, of_jobs: Mapping[str, JobTelemetry]) -> None:
    """Write what jobs have counted, in the place of what was written before."""
    connection.execute(_FORGET_TELEMETRY, [{"of_job": name} for name in of_jobs])
    connection.execute(_ADD_TELEMETRY, [{"job": name, "content": text_of(each)} for name, each in of_jobs.items()])


def forget_jobs(connection: Connection, names: Iterable[str]) -> None:
    """Delete all that is only of these jobs, but for plans."""
    for name in names:
        for table in (reports, versions, version_plans, decisions, telemetry):
            connection.execute(delete(table).where(table.c.job == name))
        connection.execute(delete(jobs).where(jobs.c.name == name))
    unused = ~exists().where(jobs.c.frontier == frontiers.c.digest)
    connection.execute(delete(frontiers).where(unused))


def forget_unused_plans(connection: Connection) -> None:
    """Delete the plans that no version has."""
    connection.execute(delete(plans).where(~exists().where(version_plans.c.plan == plans.c.digest)))


@lru_cache(maxsize=1024)
def _digest(text: str) -> str:
    """Remembered, as the same plans are published again and again."""
    return sha256(text.encode())


def _job_row(state: JobState) -> dict[str, Any]:
    return {
        "registered": text_of(state.registered),
        "content": text_of(state.job),
        "frontier": state.job.frontier,
    }


def _decision_row(state: JobState) -> dict[str, Any]:
    return {
        "content": text_of(state.decision),
        "saving_w": state.saving_w,
        "promised": state.promised,
        "taken": None if state.taken is None else text_of(state.taken),
        "share": None if state.share is None else text_of(state.share),
    }


def _all_reports(state: JobState) -> dict[str, tuple[bool, Report]]:
    """Key -> (whether it is past, report)."""
    past = {key: (True, report) for key, report in state.past.items()}
    return past | {key: (False, report) for key, report in state.reports.items()}


def _named_by(key: Mapping[str, Any]) -> dict[str, Any]:
    return {_KEY + name: value for name, value in key.items()}
