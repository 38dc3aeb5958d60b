"""The service's database: everything that must survive it, in an SQLite file or in PostgreSQL,
with one writer.

| table | content |
|---|---|
| meta | the version of these tables, the writer, when it last wrote, the power budget of all jobs |
| frontiers | every frontier once, with its curve |
| jobs | one row for each running job: its registration, which may have some megabytes |
| states | what changes of each job |
| reports | the reports of each job; `counts` is 0 for those that no longer count |
| totals | what each running job ran, used and saved |
| plans | the newest version of each job's plans |
| ended | what each job that has ended ran, used and saved; rows are never deleted |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from uuid import uuid4

from perseus_planner.base.errors import shown
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.database import Database, Postgres, Sqlite
from perseus_planner.extensions.service.draft import Draft, differ
from perseus_planner.extensions.service.jobs import JobState
from perseus_planner.extensions.service.models import (
    Fenced,
    JobTotals,
    PlanSet,
    PowerBudget,
    Report,
    StorageError,
    from_json,
    shared,
    to_json,
)
from perseus_planner.extensions.service.rows import (
    CHANGING,
    as_judged,
    json_text,
    registration_text,
    state_of,
    state_text,
)
from perseus_planner.extensions.service.tally import Tally

LAYOUT = 6
_LAYOUT_OF_0_2 = "2"  # which 0.3 brings to that of today
TABLES = (
    """CREATE TABLE frontiers (
    digest TEXT PRIMARY KEY, content BYTEA NOT NULL, curve TEXT NOT NULL)""",
    """CREATE TABLE jobs (
    name TEXT PRIMARY KEY, frontier TEXT NOT NULL, registration TEXT NOT NULL)""",
    "CREATE TABLE states (job TEXT PRIMARY KEY, content TEXT NOT NULL)",
    """CREATE TABLE reports (
    job TEXT NOT NULL, key TEXT NOT NULL, number BIGINT NOT NULL, counts INTEGER NOT NULL,
    content TEXT NOT NULL, PRIMARY KEY (job, key))""",
    "CREATE TABLE totals (job TEXT PRIMARY KEY, content TEXT NOT NULL)",
    "CREATE TABLE plans (job TEXT PRIMARY KEY, content TEXT NOT NULL)",
    "CREATE TABLE ended (id BIGINT PRIMARY KEY, totals TEXT NOT NULL)",
)


ENDED_SHOWN = 1000
"""How many of the jobs that have ended are listed; the totals of all are kept."""


@dataclass(frozen=True)
class Stored:
    """The content of the database."""

    jobs: Mapping[str, JobState]  #: Name -> state
    budget: PowerBudget  #: The power budget of all jobs
    written_s: float = 0.0  #: When something was last written, by the clock of who wrote it


class Storage:
    """A database of the service. Use it as a context manager, which closes it.

    Two services never write to one database; `Sqlite` and `Postgres` say which one does.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        """Open the database, or create it.

        Args:
            location: The path of an SQLite file, or a URL of PostgreSQL.

        Raises:
            StandBy: If another service has it, in PostgreSQL.
            StorageError: If it cannot be opened, or is of another version.
        """
        location = os.fspath(location)
        is_shared = location.startswith(("postgresql://", "postgres://"))
        self._database: Database = Postgres(location) if is_shared else Sqlite(location)
        self.location = self._database.location
        #: How long nothing may be written before `probe` is due, seconds.
        self.checked_after_s = self._database.checked_after_s
        self._lock = threading.RLock()
        self.now_s: Callable[[], float] = time.time  #: when something is written, as it is noted
        self._writer = uuid4().hex
        self._report_number = 0
        #: How many characters and bytes the last transaction wrote, or was to write.
        self.size = 0
        with self._database.opening():
            self._become_writer()

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    # Statements

    def execute(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement with a value for each `?`, and return its rows; while a transaction
        runs.
        """
        self.size += sum(len(value) for value in values if isinstance(value, (str, bytes)))
        cursor = self._database.execute(statement, *values)
        rows: list[Any] = cursor.fetchall() if cursor.description else []
        self._count = cursor.rowcount
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written in the block is on disk after it, or not at all if it raises.

        Raises:
            StorageError: If the database cannot be read or written.
            Fenced: If it is not this one's any more.
        """
        with self._lock:
            self.size = 0
            with self._database.transaction():
                yield

    def _value(self, statement: str, *values: Any) -> Any:
        rows = self.execute(statement, *values)
        return rows[0][0] if rows else None

    def _set(self, name: str, value: str | None) -> None:
        self.execute("DELETE FROM meta WHERE name = ?", name)
        if value is not None:
            self.execute("INSERT INTO meta (name, value) VALUES (?, ?)", name, value)

    def _get(self, name: str) -> str | None:
        value: str | None = self._value("SELECT value FROM meta WHERE name = ?", name)
        return value

    # Opening

    def _become_writer(self) -> None:
        self._database.become_writer()
        with self.transaction():
            self._check_layout()
            self._set("writer", self._writer)
            # `_claim` updates these rows, and counts them to see whether the claim held.
            if self._get("written_s") is None:
                self._set("written_s", "0.0")
            heartbeat = self._database.first_heartbeat()
            if heartbeat is not None:
                self._set("heartbeat", heartbeat)

    def _check_layout(self) -> None:
        """Make the tables of a new database, and refuse those of another layout."""
        self.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        layout = self._get("layout")
        if layout is None:
            for statement in TABLES:
                self.execute(statement)
            self._set("layout", str(LAYOUT))
            return
        if layout != str(LAYOUT):
            step = (
                "open it once with version 0.3, which brings it to this one"
                if layout == _LAYOUT_OF_0_2
                else "use the planner that wrote it, or start with another database"
            )
            raise StorageError(
                f"{self.location}: is of version {layout} and this planner reads version {LAYOUT}; "
                f"{step}"
            )

    # What is kept

    def load(self) -> Stored:
        """Read everything except the frontier files.

        Raises:
            StorageError: If the database cannot be read, or holds what the service did not write.
        """
        with self.transaction():
            curves = {}
            # One row at a time under `_row`, so that an error names the row and not the whole
            # database.
            for digest, text in self.execute("SELECT digest, curve FROM frontiers"):
                with self._row("frontiers", digest):
                    curves[digest] = from_json(Curve, text)
            # All reports are read by one query, not by one for each of thousands of jobs.
            reports = self._reports()
            tallies = {}
            for name, content in self.execute("SELECT job, content FROM totals"):
                with self._row("totals", name):
                    tallies[name] = from_json(Tally, as_judged(content))
            states = {}
            rows = self.execute(
                "SELECT name, frontier, registration, states.content, plans.content "
                "FROM jobs JOIN states ON states.job = name JOIN plans ON plans.job = name"
            )
            for name, frontier, *texts in rows:
                with self._row("jobs, states or plans", name):
                    states[name] = state_of(
                        texts,
                        curves[frontier],
                        tallies.get(name),
                        *reports.get(name, ({}, {})),
                        self.now_s(),
                    )
            with self._row("meta", "budget"):
                budget = self._get("budget")
                kept = PowerBudget(None, ()) if budget is None else from_json(PowerBudget, budget)
            with self._row("meta", "written_s"):
                written_s = float(self._get("written_s") or 0.0)
            return Stored(states, kept, written_s)

    @contextmanager
    def _row(self, table: str, key: object) -> Iterator[None]:
        """Name the row that cannot be read in the block, and quote nothing of it: it may hold what
        is nobody else's business.
        """
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"{self.location}: the row {shown(key)} of {table} is not as the service wrote it; "
                "restore a copy of the database, or start with another one"
            ) from error

    def _reports(self) -> dict[str, tuple[dict[str, Report], dict[str, Report]]]:
        """Return the reports of each job by key: those that do not count any more, and the others;
        each in their order.
        """
        of_jobs: dict[str, tuple[dict[str, Report], dict[str, Report]]] = {}
        rows = self.execute("SELECT job, counts, content, number FROM reports ORDER BY number")
        for job, counts, content, number in rows:
            with self._row("reports", f"{number} of job {job}"):
                report = from_json(Report, content)
            # `counts` is 0 or 1, the index in the pair.
            of_jobs.setdefault(job, ({}, {}))[counts][report.key] = report
            # New reports are numbered on from the last, which keeps their order.
            self._report_number = number
        return of_jobs

    def ended_jobs(self) -> tuple[JobTotals, ...]:
        """Return the totals of the `ENDED_SHOWN` jobs that have ended last, the last one first.

        Raises:
            StorageError: If they cannot be read.
        """
        with self.transaction():
            rows = self.execute(
                f"SELECT id, totals FROM ended ORDER BY id DESC LIMIT {ENDED_SHOWN}"
            )
        totals = []
        for number, text in rows:
            with self._row("ended", number):
                totals.append(from_json(JobTotals, as_judged(text)))
        return tuple(totals)

    def frontier(self, digest: str) -> bytes:
        """Return the file of a frontier that a job has.

        Raises:
            StorageError: If there is no such frontier, or it cannot be read.
        """
        with self.transaction():
            content = self._value("SELECT content FROM frontiers WHERE digest = ?", digest)
        if content is None:
            raise StorageError(f"{self.location}: has no frontier {digest}; its job has ended")
        return bytes(content)

    def commit(self, change: Draft) -> None:
        """Write `change`, all of it or nothing. It is on disk when this returns.

        Raises:
            StorageError: If it cannot be written.
            Fenced: If another service has opened the database since, or it was replaced.
        """
        with self.transaction():
            # First of all, so that a service that was replaced writes nothing at all.
            self._claim()
            # Another job may have brought the same file before.
            for digest, (content, curve) in change.frontiers.items():
                self.execute(
                    "INSERT INTO frontiers (digest, content, curve) VALUES (?, ?, ?) "
                    "ON CONFLICT (digest) DO NOTHING",
                    digest,
                    content,
                    to_json(curve).decode(),
                )
            moved = False
            for name, before, after in change.changes():
                if after is None:
                    for table in ("states", "reports", "totals", "plans"):
                        self.execute(f"DELETE FROM {table} WHERE job = ?", name)
                    self.execute("DELETE FROM jobs WHERE name = ?", name)
                else:
                    self._write_job(name, before, after)
                is_as_registered = (
                    before is not None
                    and after is not None
                    and before.registered is after.registered
                )
                moved = moved or not is_as_registered
            # A frontier may have megabytes, and goes with the last job that has it: swept when all
            # jobs of the change are written, as those of later ones are there already.
            if moved:
                self._sweep_frontiers()
            for name in change.telemetry:
                # It may have ended in the same transaction.
                state = change.find(name)
                if state is not None and state.tally is not None:
                    self._put("totals", name, to_json(state.tally).decode())
            for totals in change.ended:
                self.execute(
                    "INSERT INTO ended (id, totals) "
                    "SELECT COALESCE(MAX(id), 0) + 1, CAST(? AS TEXT) FROM ended",
                    to_json(totals).decode(),
                )
            if change.budget is not change.stored_budget:
                self._set("budget", json_text(change.budget))

    def probe(self, size: int) -> None:
        """Write and remove `size` characters, to see that as much can be written.

        Raises:
            StorageError: If it cannot, as for `commit`.
        """
        for text in ("x" * size, ""):
            with self.transaction():
                self._claim()
                self._set("probe", text)

    def _claim(self) -> None:
        """Check that this is the writer."""
        self.execute(self._database.claim, repr(self.now_s()), self._writer)
        if self._count < 1:
            raise Fenced(
                f"{self.location}: another service has opened it, so this one writes no more; run "
                "one of them"
            )

    def _write_job(self, name: str, before: JobState | None, after: JobState) -> None:
        """Write the rows that differ."""
        # A registration may have megabytes: it is written again only if the job was taken over.
        if before is None or before.registered is not after.registered:
            if before is not None:
                self.execute("DELETE FROM jobs WHERE name = ?", name)
            row = (name, after.job.frontier, registration_text(after.registered))
            self.execute("INSERT INTO jobs (name, frontier, registration) VALUES (?, ?, ?)", *row)
        if differ(before, after, CHANGING):
            self._put("states", name, state_text(after))
        self._write_reports(name, before, after)
        if before is None or before.published.version != after.published.version:
            published = shared(PlanSet, after.published)
            # by its name in JSON, as which it is read
            published["plans"] = published.pop("texts")
            plans = {"published": published, "planned": after.planned}
            self._put("plans", name, json_text(plans))

    def _put(self, table: str, job: str, content: str) -> None:
        """Write the content of a job in a table that has one row for it."""
        self.execute(
            f"INSERT INTO {table} (job, content) VALUES (?, ?) "
            "ON CONFLICT (job) DO UPDATE SET content = excluded.content",
            job,
            content,
        )

    def _write_reports(self, name: str, before: JobState | None, after: JobState) -> None:
        for counts, kind in enumerate(("past", "reports")):
            old: Mapping[str, Report] = {} if before is None else getattr(before, kind)
            new: Mapping[str, Report] = getattr(after, kind)
            # Numbers rise over all jobs, so reading them in that order gives back the order within
            # each.
            for report in _changed(old, new):
                self._report_number += 1
                row = (name, report.key, self._report_number, counts)
                self.execute(_WRITE_REPORT, *row, to_json(report).decode())
        # A report moves from one kind to the other under the same key; only one that is in neither
        # goes.
        if before is not None and before.past is not after.past:
            for key in before.past:
                if key not in after.past and key not in after.reports:
                    self.execute("DELETE FROM reports WHERE job = ? AND key = ?", name, key)

    def _sweep_frontiers(self) -> None:
        self.execute(
            "DELETE FROM frontiers WHERE NOT EXISTS "
            "(SELECT 1 FROM jobs WHERE jobs.frontier = frontiers.digest)"
        )


_WRITE_REPORT = """
INSERT INTO reports (job, key, number, counts, content) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (job, key) DO UPDATE SET
number = excluded.number, counts = excluded.counts, content = excluded.content
"""


def _changed(old: Mapping[str, Report], new: Mapping[str, Report]) -> list[Report]:
    """Return the reports that are new or other. They stand behind those that are written, as what
    was replaced last stands last; and a report that stayed is the same object (see `draft`).
    """
    others = takewhile(lambda key: old.get(key) is not new[key], reversed([*new]))
    return [new[key] for key in others][::-1]
