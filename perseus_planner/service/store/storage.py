"""The service's database: all that must survive its death, in any database that SQLAlchemy reaches; one writer."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from sqlalchemy import URL, Connection, Engine, StaticPool, bindparam, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from perseus_planner.service.model import Decision, StorageError
from perseus_planner.service.store import records, tables
from perseus_planner.service.store.rows import Rows, forget_jobs, forget_unused_plans, write_telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from perseus_planner.service.outcomes import PlanSet
    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.state import JobState
    from perseus_planner.service.telemetry import JobTelemetry

Synchronous = Literal["NORMAL", "FULL", "EXTRA"]

_ALL_JOBS = "all jobs"
_WAIT_S = 10  # for another process that has the file
_COMMITS_BETWEEN_SWEEPS = 256
_STILL_WRITER = (
    tables.meta.update()
    .where(tables.meta.c.name == "writer", tables.meta.c.value == bindparam("writer"))
    .values(value=bindparam("writer"))
)


@dataclass(frozen=True)
class Change:
    """What one transaction writes.

    Attributes:
        jobs: name -> (its state before, its state after); None: it did not, or does not, run.
        frontiers: digest -> file and curve, of those that these jobs may be the first to have.
        power_w: (the power budget of all jobs,), watts, or None in it for any; empty: as before.
        telemetry: name -> what it has counted, of jobs that run.
    """

    jobs: Mapping[str, tuple[JobState | None, JobState | None]] = field(default_factory=dict)
    frontiers: Mapping[str, tuple[bytes, Curve]] = field(default_factory=dict)
    power_w: tuple[float | None, ...] = ()
    telemetry: Mapping[str, JobTelemetry] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """What the database holds.

    Attributes:
        jobs: name -> state.
        versions: name -> the versions of its plans that are kept, rising, each with what had been decided.
        power_w: the power budget of all jobs, watts; None: any.
        telemetry: name -> what it has counted, of jobs that have sent it.
    """

    jobs: Mapping[str, JobState]
    versions: Mapping[str, list[tuple[PlanSet, Decision]]]
    power_w: float | None
    telemetry: Mapping[str, JobTelemetry]


class Storage:
    """A database of the service. A context manager: leaving it closes the database.

    Who opened it last writes; a service that opened it earlier can no longer write there. So two never write one.
    """

    def __init__(self, place: str | os.PathLike[str], *, synchronous: Synchronous = "FULL") -> None:
        """Open the database, or make it.

        Args:
            place: the path of a SQLite file, or a URL of SQLAlchemy, such as postgresql+psycopg://host/name.
            synchronous: of SQLite: with FULL, what is acknowledged survives a loss of power; with NORMAL, the death of
                the service alone.

        Raises:
            StorageError: it cannot be opened, or is of another version.
        """
        self._lock = threading.Lock()
        self._writer = uuid4().hex
        self._commits = 0
        self._known_plans: set[str] = set()  # some of those that are there
        self._engine = _engine(os.fspath(place), synchronous)
        try:
            with self._transaction() as connection:
                tables.TABLES.create_all(connection)
                self._check_layout(connection)
                connection.execute(tables.meta.delete().where(tables.meta.c.name == "writer"))
                connection.execute(tables.meta.insert().values(name="writer", value=self._writer))
                forget_unused_plans(connection)
        except BaseException:
            self._engine.dispose()
            raise

    def __enter__(self) -> Storage:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the database."""
        self._engine.dispose()

    def load(self) -> Stored:
        """All that the database holds but the files of frontiers.

        Raises:
            StorageError: it cannot be read, or holds what was never written there.
        """
        with self._transaction() as connection:
            budget = select(tables.budgets.c.power_w).where(tables.budgets.c.name == _ALL_JOBS)
            try:
                versions = tables.read_versions(connection)
                jobs, telemetry = tables.read_jobs(connection, versions), tables.read_telemetry(connection)
                return Stored(jobs, versions, connection.scalar(budget), telemetry)
            except (KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"{self._name}: holds what this planner cannot read ({error!r}); restore a copy of it, or begin "
                    "with another database"
                ) from error

    def frontier(self, digest: str) -> bytes:
        """The file of a frontier that a job has.

        Raises:
            StorageError: there is none, or it cannot be read.
        """
        with self._transaction() as connection:
            wanted = select(tables.frontiers.c.content).where(tables.frontiers.c.digest == digest)
            content: bytes | None = connection.scalar(wanted)
        if content is None:
            raise StorageError(f"{self._name}: has no frontier {digest}; its job has ended")
        return content

    def commit(self, change: Change) -> None:
        """Write `change`, all or nothing; it is on disk when this returns.

        Raises:
            StorageError: it cannot be written, or another service has opened the database since.
        """
        rows, ended = Rows(self._known_plans), []
        for name, (before, after) in change.jobs.items():
            if after is None:
                ended.append(name)
            else:
                rows.add(before, after)
        with self._transaction() as connection:
            self._check_writer(connection)
            for digest, (content, curve) in change.frontiers.items():
                _add_frontier(connection, digest, content, curve)
            rows.write(connection)
            if change.telemetry:
                write_telemetry(connection, change.telemetry)
            if ended:
                forget_jobs(connection, ended)
            for power_w in change.power_w:
                connection.execute(tables.budgets.delete().where(tables.budgets.c.name == _ALL_JOBS))
                if power_w is not None:
                    connection.execute(tables.budgets.insert().values(name=_ALL_JOBS, power_w=power_w))
            self._commits += 1
            sweeps = self._commits % _COMMITS_BETWEEN_SWEEPS == 0
            if sweeps:
                forget_unused_plans(connection)
        self._known_plans = set() if sweeps else self._known_plans | rows.plans.keys()

    def _check_writer(self, connection: Connection) -> None:
        """By an update, not by a look: it makes any other writer wait for the end of this transaction."""
        if connection.execute(_STILL_WRITER, {"writer": self._writer}).rowcount != 1:
            raise StorageError(
                f"{self._name}: another service has opened it, so this one writes no more; run one of them"
            )

    def _check_layout(self, connection: Connection) -> None:
        layout = connection.scalar(select(tables.meta.c.value).where(tables.meta.c.name == "layout"))
        if layout is None:
            connection.execute(tables.meta.insert().values(name="layout", value=tables.LAYOUT))
        elif layout != tables.LAYOUT:
            raise StorageError(
                f"{self._name}: is of version {layout} and this planner reads version {tables.LAYOUT}; use the planner "
                "that wrote it, or begin with another database"
            )

    @property
    def _name(self) -> str:
        """For people, without a password."""
        url = self._engine.url
        return (url.database or "memory") if url.get_backend_name() == "sqlite" else url.render_as_string()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A connection; what is written in the block is kept if it ends well."""
        try:
            with self._lock, self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise StorageError(
                f"{self._name}: {reason}; see that it is a database of the service, can be written and has room"
            ) from error


def _add_frontier(connection: Connection, digest: str, content: bytes, curve: Curve) -> None:
    """Write it unless it is there."""
    if connection.scalar(select(tables.frontiers.c.digest).where(tables.frontiers.c.digest == digest)) is None:
        row = {"digest": digest, "content": content, "curve": records.text_of(curve)}
        connection.execute(tables.frontiers.insert().values(row))


def _engine(place: str, synchronous: Synchronous) -> Engine:
    try:
        url = make_url(place) if "://" in place else URL.create("sqlite", database=place)
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True)
        # One connection for all threads, which take turns: then a database in memory works as well.
        connecting = {"check_same_thread": False, "timeout": _WAIT_S}
        engine = create_engine(url, poolclass=StaticPool, connect_args=connecting)
    except (ArgumentError, ImportError, ValueError) as error:
        raise StorageError(
            f"{place}: {error}; give the path of a SQLite file, or a URL of SQLAlchemy whose driver is installed"
        ) from error

    @event.listens_for(engine, "connect")
    def _(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    return engine
