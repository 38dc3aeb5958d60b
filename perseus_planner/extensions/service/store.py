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

import json
import logging
import os
import queue
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter
from pydantic_core import from_json as read_json
from pydantic_core import to_json as write_json

from perseus_planner.base.errors import UsageError, how_to_install, shown
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.jobs import JobState, Tally
from perseus_planner.extensions.service.models import (
    Fenced,
    JobTotals,
    PlanSet,
    PowerBudget,
    PowerStep,
    RegisteredJob,
    Report,
    StorageError,
    UnknownJob,
    from_json,
    shared,
    to_json,
)
from perseus_planner.extensions.service.statuses import with_events
from perseus_planner.extensions.service.watch import Watchdog

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


_OF_03 = ("saved_j", "unlocked_j", "unlocked_saved_j")
"""What accounts of 0.3 said of savings, against other baselines."""


def _as_judged(text: str) -> str:
    """Return accounts without the savings of 0.3, which are not known by what is compared now."""
    content = json.loads(text)
    _forget_savings(content)
    return json.dumps(content)


def _forget_savings(content: Any) -> None:
    if isinstance(content, dict):
        if "iterations" in content and "judged_j" not in content:
            for name in _OF_03:
                content.pop(name, None)
            for point in content.get("points", ()):
                point["saved_j"] = None
        for value in content.values():
            _forget_savings(value)
    elif isinstance(content, list):
        for value in content:
            _forget_savings(value)


ENDED_SHOWN = 1000
"""How many of the jobs that have ended are listed; the totals of all are kept."""

_WAIT_S = 10  # for another process that has locked the file
_LOCK = 0x706C616E6E6572  # of PostgreSQL: names the writer's lock, which its connection holds
LATE_S = 10.0
"""A writer of PostgreSQL whose heartbeat is so late loses its lock to one that stands by. It writes
every 2 s at least, unless it is stopped, as by SIGSTOP or a frozen virtual machine."""
_BEGINS_S = 60.0  # that a new writer has to read everything, before its first heartbeat is due
_NOW = "extract(epoch FROM clock_timestamp())"  # by the one clock that all writers share
_HOLDER = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND classid = CAST(? AS oid) AND objid = CAST(? AS oid)
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_STATE = (
    "saving_w",
    "promised",
    "taken",
    "share",
    "silent_since_s",
    "over_budget_since_s",
    "noted",
    "noted_since_s",
)
_CHANGING = ("job", "decision", "events", "budgets", *_STATE)
_SETTINGS = (
    "deadline_s",
    "power_w",
    "next_power",
    "power_schedule",
    "power_since_s",
    "gpu_power_limit_w",
)


class StandBy(StorageError):
    """Another service has the database; this one may take over when that has ended."""


_WRITTEN = (*_CHANGING, "registered", "published", "reports", "past")
_NO_BUDGET = PowerBudget(None, ())


def _differ(before: JobState | None, after: JobState | None, fields: Sequence[str]) -> bool:
    return any(getattr(before, name, None) != getattr(after, name, None) for name in fields)


@dataclass
class Draft:
    """What the service knows after some commands, before it is written: what one transaction
    changes.
    """

    stored: Mapping[str, JobState] = field(default_factory=dict)  #: The jobs that are stored
    #: Name -> state; None if the job has ended.
    changed: dict[str, JobState | None] = field(default_factory=dict)
    #: Digest -> file and curve, for frontiers that these jobs may be the first to have.
    frontiers: dict[str, tuple[bytes, Curve]] = field(default_factory=dict)
    stored_budget: PowerBudget = _NO_BUDGET
    budget: PowerBudget = _NO_BUDGET  #: The power budget of all jobs
    telemetry: set[str] = field(default_factory=set)  #: Names of jobs whose telemetry is written
    ended: list[JobTotals] = field(default_factory=list)  #: What jobs that ended ran and saved
    #: Returns a job after the policy has decided again.
    reconciled: Callable[[JobState], JobState] = lambda state: state

    def state(self, name: str) -> JobState:
        """Return the state of a job.

        Raises:
            UnknownJob: If no such job runs.
        """
        state = self.find(name)
        if state is None:
            raise unknown_job(name)
        return state

    def find(self, name: str) -> JobState | None:
        """Return the state of a job; None if no such job runs."""
        return self.changed[name] if name in self.changed else self.stored.get(name)

    def jobs(self) -> dict[str, JobState]:
        """Return the states of all jobs by name."""
        jobs = {**self.stored, **self.changed}
        return {name: state for name, state in jobs.items() if state is not None}

    def put(self, state: JobState) -> None:
        """Add a job, or replace its state."""
        self.changed[state.job.name] = state

    def reconcile(self, state: JobState) -> JobState:
        """Put and return a job after the policy has decided again."""
        after = self.reconciled(state)
        self.put(after)
        return after

    def changes(self) -> list[tuple[str, JobState | None, JobState | None]]:
        """Return the name of each job that differs, its state that is stored, and the new one."""
        changed = ((name, self.stored.get(name), after) for name, after in self.changed.items())
        return [change for change in changed if change[1] is not change[2]]

    @property
    def is_written(self) -> bool:
        """Whether there is something to write; telemetry alone is not written at once."""
        return (
            bool(self.telemetry or self.ended)
            or self.budget is not self.stored_budget
            or any(_differ(before, after, _WRITTEN) for _, before, after in self.changes())
        )

    def note(self, earlier: Draft, now_s: float) -> None:
        """Add events for what differs from an earlier draft."""
        for name, after in self.changed.items():
            before = earlier.find(name)
            if after is not None and after is not before:
                self.changed[name] = with_events(before, after, now_s)

    def copy(self) -> Draft:
        """Return an independent copy."""
        return replace(
            self,
            changed=dict(self.changed),
            frontiers=dict(self.frontiers),
            telemetry=set(self.telemetry),
            ended=list(self.ended),
        )


@dataclass(frozen=True)
class Stored:
    """The content of the database."""

    jobs: Mapping[str, JobState]  #: Name -> state
    budget: PowerBudget  #: The power budget of all jobs
    written_s: float = 0.0  #: When something was last written, by the clock of who wrote it


class Storage:
    """A database of the service. Use it as a context manager, which closes it.

    The last process to open an SQLite file is its writer: a service that opened it earlier can no
    longer write. In PostgreSQL the first one is, as long as its connection lives; and as long as
    its heartbeat is not late: then the next one to open it ends that connection, in which nothing
    can be written any more. So two services never write to one database.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
    ) -> None:
        """Open the database, or create it.

        Args:
            location: The path of an SQLite file, or a URL of PostgreSQL.

        Raises:
            StandBy: If another service has it, in PostgreSQL.
            StorageError: If it cannot be opened, or is of another version.
        """
        location = os.fspath(location)
        self.location = without_password(location)
        self._path: str | None = None
        #: Path of each file that is open -> its device and inode
        self._identities: dict[str, tuple[int, int]] = {}
        self._lock = threading.RLock()
        self.now_s: Callable[[], float] = time.time  #: when something is written, as it is noted
        self._writer = uuid4().hex
        self._report_number = 0
        self._size = 0  #: characters and bytes written in the transaction
        self.is_shared = location.startswith(("postgresql://", "postgres://"))
        self._connection: Any = _postgres(location) if self.is_shared else self._sqlite(location)
        try:
            self._become_writer()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, _errors()):
                raise self._error(error) from error
            raise

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    # Statements

    def execute(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement with a value for each `?`, and return its rows; while a transaction
        runs.
        """
        self._size += sum(len(value) for value in values if isinstance(value, (str, bytes)))
        if self.is_shared:
            statement = statement.replace("?", "%s")
        cursor = self._connection.execute(statement, values)
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
            self._size = 0
            try:
                self._connection.execute("BEGIN" if self.is_shared else "BEGIN IMMEDIATE")
                try:
                    yield
                    self._connection.execute("COMMIT")
                except BaseException:
                    with suppress(*_errors()):
                        self._connection.execute("ROLLBACK")
                    raise
            except _errors() as error:
                if self.is_shared and self._connection.broken:
                    raise Fenced(
                        f"{self.location}: the connection is lost, and with it the right to write; "
                        "start the service again"
                    ) from error
                raise self._error(error) from error
            self._check_file()

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

    def _sqlite(self, location: str) -> sqlite3.Connection:
        if "://" in location and not location.startswith("sqlite://"):
            raise StorageError(
                f"{self.location}: is not a database of the service; give the path of an SQLite "
                "file, or postgresql://user@host/name"
            )
        path = re.sub("^sqlite:///?", "", location) or ":memory:"
        self.location = path
        if path != ":memory:":
            _make_private(path)
            self._path = path
        try:
            connection = sqlite3.connect(
                path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._error(error) from error
        with suppress(OSError):
            self._identities[path] = _identity(path)
        return connection

    def _become_writer(self) -> None:
        if self.is_shared and not self._has_lock():
            self._end_late_writer()
            raise StandBy(f"{self.location}: another service has it; this one stands by")
        if not self.is_shared:
            self.execute("PRAGMA journal_mode=WAL")
            self.execute("PRAGMA synchronous=FULL")  # survives a loss of power
        with self.transaction():
            self._check_layout()
            self._set("writer", self._writer)
            # `_claim` updates this row, and counts it to see whether the claim held.
            if self._get("written_s") is None:
                self._set("written_s", "0.0")
            # The heartbeat of the last writer may be late already: the new one must not be ended
            # before it has read all.
            if self.is_shared:
                due_s = f"SELECT CAST({_NOW} + {_BEGINS_S} AS TEXT)"
                self._set("heartbeat", self._value(due_s))

    def _has_lock(self) -> bool:
        return bool(self._value("SELECT pg_try_advisory_lock(?)", _LOCK))

    def _end_late_writer(self) -> None:
        """End the connection of a writer whose heartbeat is late, so that its lock is free at the
        next try.
        """
        late_s = f"SELECT {_NOW} - CAST(value AS DOUBLE PRECISION) FROM meta WHERE name = ?"
        try:
            late = float(self._value(late_s, "heartbeat") or 0.0)
        except _errors():  # its tables are being made
            return
        if late <= LATE_S:
            return
        # PostgreSQL shows the key of an advisory lock as two halves of 32 bits.
        for (number,) in self.execute(_HOLDER, _LOCK >> 32, _LOCK & 0xFFFFFFFF):
            _log.warning(
                "The service that has the database has not written for %.0f s; its connection, "
                "process %d of the server, is ended",
                late,
                number,
            )
            self.execute("SELECT pg_terminate_backend(?)", number)

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

    def _error(self, error: Exception) -> StorageError:
        return StorageError(
            f"{self.location}: {_one_line(error)}; check that it is a database of the service, can "
            "be written and has room"
        )

    def _check_file(self) -> None:
        """Check that the files at the paths of the database and of its log are those that are
        open, as only those are read again: what was written last may be in the log alone.

        Raises:
            Fenced: If one is not.
        """
        if self._path is None:
            return
        log = f"{self._path}-wal"
        if log not in self._identities:  # it is there once something was written
            with suppress(OSError):
                self._identities[log] = _identity(log)
        for path, identity in self._identities.items():
            with suppress(OSError):
                if _identity(path) == identity:
                    continue
            raise Fenced(
                f"{path}: was removed or replaced while the service wrote it, so this one writes "
                "no more; start it again"
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
                    tallies[name] = from_json(Tally, _as_judged(content))
            states = {}
            rows = self.execute(
                "SELECT name, frontier, registration, states.content, plans.content "
                "FROM jobs JOIN states ON states.job = name JOIN plans ON plans.job = name"
            )
            for name, frontier, *texts in rows:
                with self._row("jobs, states or plans", name):
                    states[name] = _state_of(
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
                totals.append(from_json(JobTotals, _as_judged(text)))
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
                self._set("budget", write_json(change.budget).decode())

    def probe(self, size: int) -> None:
        """Write and remove `size` characters, to see that as much can be written.

        Raises:
            StorageError: If it cannot, as for `commit`.
        """
        for text in ("x" * size, ""):
            with self.transaction():
                self._claim()
                self._set("probe", text)

    @property
    def size(self) -> int:
        """How many characters and bytes the last transaction wrote, or was to write."""
        return self._size

    def _claim(self) -> None:
        """Check that this is the writer, by an update, which makes any other one wait for the end
        of this transaction.
        """
        value = "?"
        names = "('written_s')"
        if self.is_shared:
            value = f"CASE name WHEN 'heartbeat' THEN CAST({_NOW} AS TEXT) ELSE ? END"
            names = "('written_s', 'heartbeat')"
        self.execute(
            f"UPDATE meta SET value = {value} WHERE name IN {names} "
            "AND EXISTS (SELECT 1 FROM meta WHERE name = 'writer' AND value = ?)",
            repr(self.now_s()),
            self._writer,
        )
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
            row = (name, after.job.frontier, _registration_text(after.registered))
            self.execute("INSERT INTO jobs (name, frontier, registration) VALUES (?, ?, ?)", *row)
        if _differ(before, after, _CHANGING):
            self._put("states", name, _state_text(after))
        self._write_reports(name, before, after)
        if before is None or before.published.version != after.published.version:
            published = shared(PlanSet, after.published)
            # by its name in JSON, as which it is read
            published["plans"] = published.pop("texts")
            plans = {"published": published, "planned": after.planned}
            self._put("plans", name, _text(plans))

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
    """Return the reports that are new or other, which stand behind those that are written."""
    others = takewhile(lambda key: old.get(key) is not new[key], reversed([*new]))
    return [new[key] for key in others][::-1]


def _text(value: Any) -> str:
    return write_json(value, inf_nan_mode="null").decode()


_SLICE = 1000
"""How many places are written at once: other threads get no turn meanwhile."""


def _registration_text(job: RegisteredJob) -> str:
    """Return a registration as JSON, its places in slices."""
    begins = range(0, len(job.places), _SLICE)
    rest = {**shared(RegisteredJob, job), "places": ()}
    slices = [to_json(job.places[begin : begin + _SLICE])[1:-1].decode() for begin in begins]
    return _text(rest).replace('"places":[]', f'"places":[{",".join(slices)}]', 1)


def _state_text(state: JobState) -> str:
    """Return what changes of a job as JSON; what has not changed was written before."""
    kept: dict[str, Any] = {field: getattr(state, field) for field in (*_STATE, "budgets")}
    kept["job"] = {field: getattr(state.job, field) for field in _SETTINGS}
    decision = to_json(state.decision).decode()
    # Events keep their JSON: a job has up to a hundred, of which a change adds one.
    events = (event.as_json for event in state.events)
    return f'{_text(kept)[:-1]},"decision":{decision},"events":[{",".join(events)}]}}'


def _state_of(
    texts: Sequence[str],
    curve: Curve,
    tally: Tally | None,
    past: Mapping[str, Report],
    reports: Mapping[str, Report],
    now_s: float,
) -> JobState:
    """Return the state of a job from its registration, state and plans in the database."""
    registered = from_json(RegisteredJob, texts[0])
    content, newest = map(read_json, texts[1:])
    job = {**vars(registered), **content["job"]}
    if "budgets" not in content:  # written before 0.4: nobody noted when it was set
        set_w = job["power_w"]
        content["budgets"] = [] if set_w is None else [PowerStep(now_s, set_w)]
    content |= {
        "registered": registered,
        "job": job,
        "curve": curve,
        "tally": tally,
        "published": newest["published"],
        "planned": newest["planned"],
        "reports": reports,
        "past": past,
    }
    return _states().validate_python(content)


@cache
def _states() -> TypeAdapter[JobState]:
    return TypeAdapter(JobState)


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Return what the drivers raise."""
    try:
        import psycopg
    except ImportError:
        return (sqlite3.Error,)
    return (sqlite3.Error, psycopg.Error)


def _postgres(location: str) -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise StorageError(
            f"{without_password(location)}: needs psycopg; {how_to_install('postgresql')}"
        ) from error
    try:
        connection = psycopg.connect(location, autocommit=True, connect_timeout=_WAIT_S)
        connection.execute("SET synchronous_commit TO on")
        # Set on the server's side: after 8 s it notices that this machine has vanished, and frees
        # its lock.
        for name, number in (("idle", 5), ("interval", 1), ("count", 3)):
            connection.execute(f"SET tcp_keepalives_{name} TO {number}")
    except psycopg.Error as error:
        raise StorageError(
            f"{without_password(location)}: {_one_line(error)}; check that the server runs and "
            "lets this user in"
        ) from error
    return connection


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _one_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def _make_private(path: str) -> None:
    """Have only the owner read and write an SQLite file, and the log files that SQLite puts
    beside it.
    """
    with suppress(OSError):  # SQLite says what is wrong with the path
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with suppress(OSError):  # another user's
        if os.path.isfile(path):
            os.chmod(path, 0o600)


def without_password(location: str) -> str:
    """Return the location of a database as it is shown."""
    return re.sub(r"(://[^/@]*):.*@", r"\1:***@", location)


Result = TypeVar("Result")

CHECKED_AFTER_S = 30.0
SHARED_CHECKED_AFTER_S = 2.0
"""How long nothing may be written before it is checked that something can be: a file, and a
database of which another service stands by."""
_ROOM = 65536  # characters beyond what failed, with which it is tried again
_MOST_AT_ONCE = 256  # commands in one transaction

_log = logging.getLogger(__name__)


_ENDED = "the thread that writes has ended, so nothing is taken; start the service again"
_Given = tuple[Callable[[Draft], Any], Future[Any]]  # a command, and its result


@dataclass(frozen=True)
class Writing:
    """How a writer does."""

    commits: int  #: Transactions that were written
    committing_s: float  #: The time that they took, seconds
    failed: int  #: Transactions that could not be written
    waiting: int  #: Commands that are not written
    lag_s: float  #: For how long the oldest of them has waited, seconds; 0 if none waits


class Writer:
    """The writing thread, as a context manager; leaving it finishes the commands that were given.

    Attributes:
        jobs: Name -> state of every running job. All of it is on disk. It is replaced, never
            changed.
        budget: The power budget of all jobs.
        problem: Why the last transaction could not be written; None if it was.
    """

    def __init__(
        self,
        storage: Storage,
        stored: Stored,
        reconciled: Callable[[JobState], JobState],
        committed: Callable[[Draft], None],
        now_s: Callable[[], float],
        watchdog: Watchdog,
    ) -> None:
        """Start from what is stored; `reconciled` is that of drafts, and `committed` is called with
        every change once it is on disk. The thread is watched.
        """
        self._watchdog = watchdog
        self.jobs: Mapping[str, JobState] = stored.jobs
        self.budget = stored.budget
        self.problem: str | None = None
        self._written_s = time.monotonic()
        self._failed_size = 0
        self._commits = 0
        self._committing_s = 0.0
        self._failed = 0
        self._waiting: deque[float] = deque()  #: When each command came that is not answered
        self._storage = storage
        self._reconciled = reconciled
        self._committed = committed
        self._now_s = now_s
        self._commands: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="planner-writer", daemon=True)
        self._lock = threading.Lock()
        self._open = False
        self._closed = False

    def __enter__(self) -> Writer:
        self._thread.start()
        self._watchdog.watch(self._thread)
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open = False
            self._closed = True
            self._commands.put(None)
        self._thread.join()

    def check(self) -> None:
        """Check that the database can be written, unless that was seen to work a moment ago. After
        a fault, as much must be written as what failed.

        Raises:
            StorageError: If it cannot.
        """
        # A disk may have room for a few bytes and not for what failed, so the probe is larger than
        # that.
        failed = self._failed_size
        after_s = SHARED_CHECKED_AFTER_S if self._storage.is_shared else CHECKED_AFTER_S
        if self.problem is None and time.monotonic() - self._written_s < after_s:
            return
        try:
            self._storage.probe(2 * failed + _ROOM if failed else 1)
        except Exception as error:
            self._failed += 1
            self.problem = str(error)
            raise
        self._written_s = time.monotonic()
        # Unless another transaction has failed meanwhile, on the writing thread.
        if self._failed_size == failed:
            self.problem = None
            self._failed_size = 0

    def figures(self) -> Writing:
        """Return how it does."""
        # The writing thread may have emptied it in between.
        with suppress(IndexError):
            lag_s = time.monotonic() - self._waiting[0]
            return Writing(
                self._commits, self._committing_s, self._failed, len(self._waiting), lag_s
            )
        return Writing(self._commits, self._committing_s, self._failed, 0, 0.0)

    def submit(self, command: Callable[[Draft], Result]) -> Future[Result]:
        """Run `command` without waiting: its result is in the future once its changes are on disk.
        If it raises, nothing changes, and its error is in the future; as is `StorageError` if the
        changes cannot be written, and `UsageError` if the service is not running.
        """
        future: Future[Result] = Future()
        # Under the lock that closing takes: no command comes behind the None that ends the thread.
        with self._lock:
            if self._open:
                self._waiting.append(time.monotonic())
                self._commands.put((command, future))
            else:
                closed = "the service does not run; use it inside `with Service(...) as service:`"
                has_died = self._thread.ident is not None and not self._closed
                future.set_exception(StorageError(_ENDED) if has_died else UsageError(closed))
        return future

    def _write(self) -> None:
        """Write the commands that wait, together, until None comes, after which nothing does."""
        batch: list[_Given | None] = []
        try:
            while None not in batch:
                batch = [self._commands.get()]
                # What has come meanwhile shares one transaction, as a disk takes as long to sync
                # one change as many.
                waiting = min(self._commands.qsize(), _MOST_AT_ONCE - 1)
                batch += [self._commands.get() for _ in range(waiting)]
                with self._watchdog.working():
                    self._write_batch(
                        [
                            given
                            for given in batch
                            if given and given[1].set_running_or_notify_cancel()
                        ]
                    )
                # After the answers, so that the lag has the time of the commit in it.
                for _ in filter(None, batch):
                    self._waiting.popleft()
        finally:
            self._end(batch)

    def _end(self, batch: list[_Given | None]) -> None:
        """Take nothing more, and refuse what waits: nobody would ever answer it."""
        with self._lock:
            self._open = False
        while not self._commands.empty():
            batch.append(self._commands.get())
        for given in batch:
            if given is not None and not given[1].done():
                given[1].set_exception(StorageError(_ENDED))

    def _write_batch(self, batch: list[_Given]) -> None:
        answers = list[Callable[[], None]]()
        draft = Draft(
            self.jobs,
            stored_budget=self.budget,
            budget=self.budget,
            reconciled=self._reconciled,
        )
        for command, future in batch:
            # A command that raises leaves the changes of those before it as they are.
            trial = draft.copy()
            try:
                result = command(trial)
                trial.note(draft, self._now_s())
            except Exception as error:
                # The answers are given once all is on disk; the defaults bind the values of this
                # turn of the loop.
                answers.append(lambda future=future, error=error: future.set_exception(error))  # type: ignore[misc]
            else:
                draft = trial
                answers.append(lambda future=future, result=result: future.set_result(result))  # type: ignore[misc]
        try:
            if draft.is_written:
                began_s = time.monotonic()
                self._storage.commit(draft)
                self._written_s = time.monotonic()
                self._commits += 1
                self._committing_s += self._written_s - began_s
        except Exception as error:
            self._failed += 1
            self.problem = str(error)
            # At least 1, as 0 says that nothing has failed.
            self._failed_size = max(self._failed_size, self._storage.size, 1)
            # Nothing of the batch is on disk, so every command failed, whatever its own result.
            for _, future in batch:
                future.set_exception(error)
            return
        # Readers on other threads get the new states only now that they are on disk.
        self.jobs = draft.jobs()
        self.budget = draft.budget
        try:
            self._committed(draft)
        except Exception:
            _log.exception("An action after a committed change has failed")
        # Last: who is answered may ask at once, and finds the timers set and the plans requested.
        for answer in answers:
            answer()


def unknown_job(name: str) -> UnknownJob:
    """Return the error for a job that does not run."""
    return UnknownJob(f"no job {name!r} runs here; register it, or list the running ones")
