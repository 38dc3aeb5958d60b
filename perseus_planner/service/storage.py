"""The service's database: everything that must survive it, in any database that SQLAlchemy
reaches, with one writer.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    StaticPool,
    bindparam,
    create_engine,
    delete,
    event,
    exists,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from perseus_planner.base.files import sha256
from perseus_planner.service.answers import JobTotals, PowerBudget
from perseus_planner.service.curves import Curve
from perseus_planner.service.model import Decision, Fenced, PlanSet, StorageError
from perseus_planner.service.schemas import PowerRequest, from_json, to_json
from perseus_planner.service.tables import (
    LAYOUT,
    TABLES,
    VersionRecord,
    ended,
    frontiers,
    job_row,
    jobs,
    meta,
    plans,
    state_of,
    version_plans,
    versions,
)
from perseus_planner.service.telemetry import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perseus_planner.service.state import JobState

Synchronous = Literal["NORMAL", "FULL", "EXTRA"]
Versions = list[tuple[PlanSet, Decision]]
"""Versions of a job's plans, rising, each with the decision it was planned for."""

VERSIONS_KEPT = 16
"""How many versions of a job's plans are kept. Jobs return to earlier plans, which are then not
computed again.
"""
ENDED_SHOWN = 1000
"""How many of the jobs that have ended are listed; the totals of all are kept."""

_WAIT_S = 10  # for another process that has locked the file
_COMMITS_BETWEEN_SWEEPS = 256
_POWER, _POWER_SCHEDULE = "power_w", "power_schedule"
_STILL_WRITER = (
    update(meta)
    .where(meta.c.name == "writer", meta.c.value == bindparam("writer"))
    .values(value=bindparam("writer"))
)
_OLD_VERSIONS = [
    delete(table).where(table.c.job == bindparam("of_job"), table.c.version <= bindparam("up_to"))
    for table in (versions, version_plans)
]


@dataclass(frozen=True)
class Change:
    """The content of one transaction."""

    #: Name -> (state before, state after); None if the job did not run before, or has ended.
    jobs: Mapping[str, tuple[JobState | None, JobState | None]] = field(default_factory=dict)
    #: Digest -> file and curve, for frontiers that these jobs may be the first to have.
    frontiers: Mapping[str, tuple[bytes, Curve]] = field(default_factory=dict)
    budget: PowerBudget | None = None  #: The new power budget of all jobs; None if it is as before
    #: Name -> telemetry, for running jobs.
    telemetry: Mapping[str, Tally] = field(default_factory=dict)
    ended: Sequence[JobTotals] = ()  #: What jobs that have ended ran, used and saved


@dataclass(frozen=True)
class Stored:
    """The content of the database."""

    jobs: Mapping[str, JobState]  #: Name -> state
    versions: Mapping[str, Versions]  #: Name -> the versions of its plans that are kept
    budget: PowerBudget  #: The power budget of all jobs
    telemetry: Mapping[str, Tally]  #: Name -> telemetry, for jobs that have sent some


class Storage:
    """A database of the service. Use it as a context manager, which closes it.

    The last process to open a database is its writer. A service that opened it earlier can no
    longer write, so two services never write to one database.
    """

    def __init__(
        self, location: str | os.PathLike[str], *, synchronous: Synchronous = "FULL"
    ) -> None:
        """Open the database, or create it.

        Args:
            location: The path of an SQLite file, or a URL of SQLAlchemy; only SQLite is tested.
            synchronous: For SQLite. With FULL, what is acknowledged survives a loss of power; with
                NORMAL, only the death of the service.

        Raises:
            StorageError: If it cannot be opened, or is of another version.
        """
        self._lock = threading.Lock()
        self._writer = uuid4().hex
        self._commits = 0
        self._known_plans: set[str] = set()  # digests of some plans that are stored
        self._engine = _engine(os.fspath(location), synchronous)
        try:
            with self._transaction() as connection:
                TABLES.create_all(connection)
                self._check_layout(connection)
                _set_meta(connection, "writer", self._writer)
                _sweep_plans(connection)
        except BaseException:
            self._engine.dispose()
            raise

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()

    def load(self) -> Stored:
        """Read everything except the frontier files.

        Raises:
            StorageError: If the database cannot be read, or holds what the service did not write.
        """
        with self._transaction() as connection:
            try:
                curves = {
                    row.digest: from_json(Curve, row.curve) for row in connection.execute(_CURVES)
                }
                kept = _versions(connection)
                rows = connection.execute(select(jobs)).all()
                states = {
                    row.name: state_of(row, curves[row.frontier], kept[row.name][-1])
                    for row in rows
                }
                tallies = {
                    row.name: from_json(Tally, row.telemetry)
                    for row in rows
                    if row.telemetry is not None
                }
                power_w, steps = _meta(connection, _POWER), _meta(connection, _POWER_SCHEDULE)
                schedule = () if steps is None else from_json(PowerRequest, steps).schedule
                budget = PowerBudget(None if power_w is None else float(power_w), schedule)
                return Stored(states, kept, budget, tallies)
            except (KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"{self._name}: holds what this planner cannot read ({_one_line(error)}); "
                    "restore a copy of it, or start with another database"
                ) from error

    def ended_jobs(self) -> tuple[JobTotals, ...]:
        """Return the totals of the `ENDED_SHOWN` jobs that have ended last, the last one first.

        Raises:
            StorageError: If they cannot be read.
        """
        with self._transaction() as connection:
            texts = connection.scalars(
                select(ended.c.totals).order_by(ended.c.id.desc()).limit(ENDED_SHOWN)
            ).all()
        return tuple(from_json(JobTotals, text) for text in texts)

    def frontier(self, digest: str) -> bytes:
        """Return the file of a frontier that a job has.

        Raises:
            StorageError: If there is no such frontier, or it cannot be read.
        """
        with self._transaction() as connection:
            content: bytes | None = connection.scalar(
                select(frontiers.c.content).where(frontiers.c.digest == digest)
            )
        if content is None:
            raise StorageError(f"{self._name}: has no frontier {digest}; its job has ended")
        return content

    def commit(self, change: Change) -> None:
        """Write `change`, all of it or nothing. It is on disk when this returns.

        Raises:
            StorageError: If it cannot be written, or another service has opened the database since.
        """
        with self._transaction() as connection:
            self._check_writer(connection)
            for digest, (content, curve) in change.frontiers.items():
                _add_frontier(connection, digest, content, curve)
            written = self._write_jobs(connection, change)
            if change.ended:
                connection.execute(
                    insert(ended),
                    [{"totals": to_json(job_totals).decode()} for job_totals in change.ended],
                )
            if change.budget is not None:
                power_w, steps = change.budget.power_w, change.budget.schedule
                _set_meta(connection, _POWER, None if power_w is None else repr(power_w))
                later = to_json(PowerRequest(None, steps)).decode() if steps else None
                _set_meta(connection, _POWER_SCHEDULE, later)
            self._commits += 1
            sweeps = self._commits % _COMMITS_BETWEEN_SWEEPS == 0
            if sweeps:
                _sweep_plans(connection)
        self._known_plans = set() if sweeps else self._known_plans | written

    def _write_jobs(self, connection: Connection, change: Change) -> set[str]:
        """Write the rows that differ, and return the digests of the plans that were published."""
        texts: dict[str, str] = {}
        for name, (before, after) in change.jobs.items():
            if after is None:
                _delete_job(connection, name)
                continue
            if before is None:
                connection.execute(insert(jobs).values(name=name, **job_row(after)))
            else:
                row = job_row(after, before)
                connection.execute(update(jobs).where(jobs.c.name == name).values(row))
                if before.job.frontier != after.job.frontier:  # its plans are of another frontier
                    _delete_plans(connection, name)
            if before is None or before.published.version != after.published.version:
                texts |= _add_version(connection, after)
        new = {digest: text for digest, text in texts.items() if digest not in self._known_plans}
        stored = (
            set(connection.scalars(select(plans.c.digest).where(plans.c.digest.in_(new))))
            if new
            else set()
        )
        if new.keys() - stored:
            connection.execute(
                insert(plans),
                [{"digest": digest, "text": new[digest]} for digest in new.keys() - stored],
            )
        for name, tally in change.telemetry.items():
            connection.execute(
                update(jobs).where(jobs.c.name == name).values(telemetry=to_json(tally).decode())
            )
        return set(texts)

    def _check_writer(self, connection: Connection) -> None:
        """Check by an update, which makes any other writer wait for the end of this transaction."""
        if connection.execute(_STILL_WRITER, {"writer": self._writer}).rowcount != 1:
            raise Fenced(
                f"{self._name}: another service has opened it, so this one writes no more; run one "
                "of them"
            )

    def _check_layout(self, connection: Connection) -> None:
        layout = _meta(connection, "layout")
        if layout in (None, "2"):
            if layout is not None:  # what it counted of running jobs is read no more
                connection.execute(update(jobs).values(telemetry=None))
            _set_meta(connection, "layout", LAYOUT)
        elif layout != LAYOUT:
            raise StorageError(
                f"{self._name}: is of version {layout} and this planner reads version {LAYOUT}; "
                "use the planner that wrote it, or start with another database"
            )

    @property
    def _name(self) -> str:
        """For error messages, without a password."""
        url = self._engine.url
        return (
            (url.database or "memory")
            if url.get_backend_name() == "sqlite"
            else url.render_as_string()
        )

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Open a connection; what is written in the block is kept if the block ends without an
        error.
        """
        try:
            with self._lock, self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            reason = _one_line(getattr(error, "orig", None) or error)
            raise StorageError(
                f"{self._name}: {reason}; check that it is a database of the service, can be "
                "written and has room"
            ) from error


_CURVES = select(frontiers.c.digest, frontiers.c.curve)


def _versions(connection: Connection) -> dict[str, Versions]:
    texts = {row.digest: row.text for row in connection.execute(select(plans))}
    by_job: dict[str, Versions] = {}
    for row in connection.execute(select(versions).order_by(versions.c.version)):
        record = from_json(VersionRecord, row.content)
        plan_set = PlanSet(
            row.version,
            tuple(texts[digest] for digest in record.plans),
            record.of_pipeline,
            record.made_s,
            record.own,
        )
        by_job.setdefault(row.job, []).append((plan_set, record.decision))
    return by_job


def _add_version(connection: Connection, state: JobState) -> dict[str, str]:
    """Write the published version of a job, delete those that are too old, and return its plans
    by digest.
    """
    name, published = state.job.name, state.published
    digests = [_digest(text) for text in published.texts]
    record = VersionRecord(
        published.made_s, state.planned, published.of_pipeline, tuple(digests), published.own
    )
    key = {"job": name, "version": published.version}
    connection.execute(insert(versions).values(**key, content=to_json(record).decode()))
    connection.execute(
        insert(version_plans), [{**key, "plan": digest} for digest in dict.fromkeys(digests)]
    )
    if published.version > VERSIONS_KEPT:
        for statement in _OLD_VERSIONS:
            connection.execute(
                statement, {"of_job": name, "up_to": published.version - VERSIONS_KEPT}
            )
    return dict(zip(digests, published.texts, strict=True))


def _add_frontier(connection: Connection, digest: str, content: bytes, curve: Curve) -> None:
    """Write a frontier unless it is there."""
    if connection.scalar(select(frontiers.c.digest).where(frontiers.c.digest == digest)) is None:
        row = {"digest": digest, "content": content, "curve": to_json(curve).decode()}
        connection.execute(insert(frontiers).values(row))


def _delete_job(connection: Connection, name: str) -> None:
    """Delete a job."""
    connection.execute(delete(jobs).where(jobs.c.name == name))
    _delete_plans(connection, name)


def _delete_plans(connection: Connection, name: str) -> None:
    """Delete the versions of a job, and frontiers that no job has any more. Plans are swept
    later.
    """
    for table in (versions, version_plans):
        connection.execute(delete(table).where(table.c.job == name))
    connection.execute(
        delete(frontiers).where(~exists().where(jobs.c.frontier == frontiers.c.digest))
    )


def _sweep_plans(connection: Connection) -> None:
    """Delete the plans that belong to no version."""
    connection.execute(delete(plans).where(~exists().where(version_plans.c.plan == plans.c.digest)))


def _meta(connection: Connection, name: str) -> str | None:
    value: str | None = connection.scalar(select(meta.c.value).where(meta.c.name == name))
    return value


def _set_meta(connection: Connection, name: str, value: str | None) -> None:
    connection.execute(delete(meta).where(meta.c.name == name))
    if value is not None:
        connection.execute(insert(meta).values(name=name, value=value))


@lru_cache(maxsize=1024)
def _digest(text: str) -> str:
    """Return the digest of a plan; cached, as the same plans are published again and again."""
    return sha256(text.encode())


def _one_line(error: object) -> str:
    return str(error).partition("\n")[0]


def _make_private(path: str | None) -> None:
    """Have only the owner read and write an SQLite file, and the log files that SQLite puts
    beside it.
    """
    if not path or path == ":memory:" or path.startswith("file:"):
        return
    with suppress(OSError):  # SQLite says what is wrong with the path
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with suppress(OSError):  # another user's
        if os.path.isfile(path):
            os.chmod(path, 0o600)


def _without_password(location: str) -> str:
    return re.sub(r"(://[^/@]*):.*@", r"\1:***@", location)


def _engine(location: str, synchronous: Synchronous) -> Engine:
    name = location
    try:
        url = make_url(location) if "://" in location else URL.create("sqlite", database=location)
        name = location if "://" not in location else url.render_as_string()
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True)
        # All threads share one connection and take turns, so a database in memory works as well.
        connecting = {"check_same_thread": False, "timeout": _WAIT_S}
        _make_private(url.database)
        engine = create_engine(url, poolclass=StaticPool, connect_args=connecting)
    except (ArgumentError, ImportError, ValueError) as error:
        raise StorageError(
            f"{_without_password(name)}: {error}; give the path of an SQLite file, or a URL of "
            "SQLAlchemy whose driver is installed"
        ) from error

    @event.listens_for(engine, "connect")
    def _(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    return engine
