"""The two kinds of databases that the service may have, and how each makes sure of one writer."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from perseus_planner.base.errors import how_to_install
from perseus_planner.extensions.service.models import Fenced, StorageError

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

_CLAIM = (
    "UPDATE meta SET value = {value} WHERE name IN ({names}) "
    "AND EXISTS (SELECT 1 FROM meta WHERE name = 'writer' AND value = ?)"
)
_log = logging.getLogger(__name__)


class StandBy(StorageError):
    """Another service has the database; this one may take over when that has ended."""


class Database:
    """An open database.

    Attributes:
        location: Where it is, as it is shown.
    """

    #: How long nothing may be written before it is checked that something can be, seconds.
    checked_after_s: ClassVar[float] = 30.0
    _begin: ClassVar[str]
    #: Changes a row for the time of writing (the first `?`), if that names the writer (the second
    #: one), so that any other one waits for the end of this transaction.
    claim: ClassVar[str]

    def __init__(self, location: str, connection: Any, errors: tuple[type[Exception], ...]) -> None:
        """Use a connection of a driver that raises `errors`."""
        self.location = location
        self._connection = connection
        self._errors = errors

    def execute(self, statement: str, *values: Any) -> Any:
        """Run a statement with a value for each `?`, and return the cursor."""
        return self._connection.execute(statement, values)

    def become_writer(self) -> None:
        """Prepare to write, before the first transaction.

        Raises:
            StandBy: If another service writes.
        """

    def first_heartbeat(self) -> str | None:
        """Return the heartbeat of a new writer, while a transaction runs; None if it needs none."""
        return None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written in the block is on disk after it, or not at all if it raises.

        Raises:
            StorageError: If the database cannot be read or written.
            Fenced: If it is not this one's any more.
        """
        try:
            self._connection.execute(self._begin)
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(*self._errors):
                    self._connection.execute("ROLLBACK")
                raise
        except self._errors as error:
            raise self._failed(error) from error
        self._check()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Close the database if the block raises.

        Raises:
            StorageError: If the driver has raised an error.
        """
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, self._errors):
                raise _error(self.location, error) from error
            raise

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _failed(self, error: Exception) -> StorageError:
        return _error(self.location, error)

    def _check(self) -> None:
        """Check after a transaction that what was written is what will be read again."""


class Sqlite(Database):
    """An SQLite file. The last process to open it is its writer: a service that opened it earlier
    can no longer write.
    """

    _begin = "BEGIN IMMEDIATE"
    claim = _CLAIM.format(value="?", names="'written_s'")

    def __init__(self, location: str) -> None:
        """Open a file, or create it.

        Raises:
            StorageError: If it cannot be opened.
        """
        if "://" in location:
            raise StorageError(
                f"{without_password(location)}: is not a database of the service; give the path of "
                "an SQLite file, or postgresql://user@host/name"
            )
        _make_private(location)
        try:
            connection = sqlite3.connect(
                location, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise _error(location, error) from error
        super().__init__(location, connection, (sqlite3.Error,))
        #: Path of each file that is open -> its device and inode
        self._identities: dict[str, tuple[int, int]] = {}
        with suppress(OSError):
            self._identities[location] = _identity(location)

    def become_writer(self) -> None:
        """Have what is written survive a loss of power."""
        self.execute("PRAGMA journal_mode=WAL")
        self.execute("PRAGMA synchronous=FULL")

    def _check(self) -> None:
        """Check that the files at the paths of the database and of its log are those that are
        open, as only those are read again: what was written last may be in the log alone.

        Raises:
            Fenced: If one is not.
        """
        log = f"{self.location}-wal"
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


class Postgres(Database):
    """A database of PostgreSQL. The first connection to open it is its writer, as long as it lives
    and its heartbeat is not late. Then the next one to open it ends that connection, in which
    nothing can be written any more.
    """

    checked_after_s = 2.0  # as another service may stand by
    _begin = "BEGIN"
    claim = _CLAIM.format(
        value=f"CASE name WHEN 'heartbeat' THEN CAST({_NOW} AS TEXT) ELSE ? END",
        names="'written_s', 'heartbeat'",
    )

    def __init__(self, location: str) -> None:
        """Connect to the database at a URL.

        Raises:
            StorageError: If that is not possible, or psycopg is not installed.
        """
        try:
            import psycopg
        except ImportError as error:
            raise StorageError(
                f"{without_password(location)}: needs psycopg; {how_to_install('postgresql')}"
            ) from error
        try:
            connection = psycopg.connect(location, autocommit=True, connect_timeout=_WAIT_S)
            connection.execute("SET synchronous_commit TO on")
            # Set on the server's side: after 8 s it notices that this machine has vanished, and
            # frees its lock.
            for name, number in (("idle", 5), ("interval", 1), ("count", 3)):
                connection.execute(f"SET tcp_keepalives_{name} TO {number}")
        except psycopg.Error as error:
            raise StorageError(
                f"{without_password(location)}: {_one_line(error)}; check that the server runs and "
                "lets this user in"
            ) from error
        super().__init__(without_password(location), connection, (psycopg.Error,))

    def execute(self, statement: str, *values: Any) -> Any:
        """Run a statement with a value for each `?`, and return the cursor."""
        return super().execute(statement.replace("?", "%s"), *values)

    def become_writer(self) -> None:
        """Take the lock of the writer, which this connection then holds."""
        (has_lock,) = self.execute("SELECT pg_try_advisory_lock(?)", _LOCK).fetchone()
        if not has_lock:
            self._end_late_writer()
            raise StandBy(f"{self.location}: another service has it; this one stands by")

    def first_heartbeat(self) -> str | None:
        """Return one that is ahead: that of the last writer may be late already, and the new one
        must not be ended before it has read all.
        """
        (due_s,) = self.execute(f"SELECT CAST({_NOW} + {_BEGINS_S} AS TEXT)").fetchone()
        return str(due_s)

    def _end_late_writer(self) -> None:
        """End the connection of a writer whose heartbeat is late, so that its lock is free at the
        next try.
        """
        late_s = f"SELECT {_NOW} - CAST(value AS DOUBLE PRECISION) FROM meta WHERE name = ?"
        try:
            beat = self.execute(late_s, "heartbeat").fetchone()
        except self._errors:  # its tables are being made
            return
        late = 0.0 if beat is None else float(beat[0])
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

    def _failed(self, error: Exception) -> StorageError:
        if self._connection.broken:
            return Fenced(
                f"{self.location}: the connection is lost, and with it the right to write; start "
                "the service again"
            )
        return super()._failed(error)


def _error(location: str, error: Exception) -> StorageError:
    return StorageError(
        f"{location}: {_one_line(error)}; check that it is a database of the service, can be "
        "written and has room"
    )


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
