"""`planner serve`: run the service, which takes reports of stragglers and gives jobs their
plans.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import click

from perseus_planner.base.errors import UsageError, how_to_install
from perseus_planner.base.files import read_text
from perseus_planner.base.prefixes import counted
from perseus_planner.cli.options import Option, Time, command

LEAST_LEASE_S = 60.0
"""The shortest lease of jobs: a job without telemetry waits 30 s for plans and pauses for 4 s, so
two of its requests fit. Chosen by hand."""


@command(
    "planner serve",
    "planner serve --unix /run/planner.sock --database /var/lib/planner/service.sqlite",
    "planner serve --host 0.0.0.0 --tokens tokens.txt --tls-cert cert.pem --tls-key key.pem",
    has_json=False,
)
def serve(
    *,
    host: Annotated[
        str | None,
        "Name or address to listen on; one that other machines can reach needs tokens.  [default: "
        "127.0.0.1]",
        Option(metavar="HOST"),
    ],
    port: Annotated[
        int | None,
        "Port to listen on; 0 for any free port.  [default: 8400]",
        Option(metavar="PORT"),
    ],
    unix: Annotated[
        Path | None,
        "Unix socket to listen on instead, which only your processes can use.",
        Option(metavar="PATH"),
    ],
    database: Annotated[
        str | None,
        "SQLite file with everything that must survive, created if needed, or the URL of a "
        "PostgreSQL database, which several services may name: one serves, the others stand by. "
        "PLANNER_SERVICE_DATABASE or a file, whose name follows an @, may hold a URL with a "
        "password.  "
        "[default: perseus-planner/service.sqlite in $XDG_STATE_HOME or ~/.local/state]",
        Option(envvar="PLANNER_SERVICE_DATABASE", metavar="FILE|URL|@FILE"),
    ],
    workers: Annotated[
        int,
        "Number of processes that solve and plan.",
        Option(type=click.IntRange(1, 64), metavar="N"),
    ] = 1,
    lease: Annotated[
        Time,
        "A job that is silent for this long has no share of the power budget of all jobs and "
        "no metrics but its state, until it is heard of again; 60 s at least.",
        Option(default="180s"),
    ],
    forget: Annotated[
        Time,
        "A job that is silent for this long is ended; its totals and its last events stay.",
        Option(default="7d"),
    ],
    tokens: Annotated[
        Path | None,
        "File with a line `token role name` for each client; roles are read, report and operate. "
        "It is read again on SIGHUP. Without it, the environment variable PLANNER_SERVICE_TOKENS "
        "may hold such lines.",
    ],
    tls_cert: Annotated[Path | None, "Certificate or chain, PEM, to serve HTTPS."],
    tls_key: Annotated[Path | None, "Private key of the certificate, PEM, without a password."],
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        "What to log to stderr: with info what happens to jobs, with debug also each request.",
    ] = "info",
    log_format: Annotated[
        Literal["logfmt", "json"],
        "Lines of key=value, or of JSON with the same keys.",
    ] = "logfmt",
) -> None:
    """Serve plans to training jobs, and take reports of stragglers.

    Everyone on this machine may do everything, unless there are tokens. What the service
    acknowledges survives its death. It runs until it is interrupted or gets SIGTERM; training
    continues with the plans that it has.
    """
    if unix is not None and (host is not None or port is not None):
        raise UsageError("--unix: replaces --host and --port; give one or the other")
    try:
        from perseus_planner.extensions.service.access import read_tokens
        from perseus_planner.extensions.service.database import StandBy
        from perseus_planner.extensions.service.models import StorageError
        from perseus_planner.extensions.service.serve import (
            Address,
            listening,
            stand_by,
            tokens_again,
        )
        from perseus_planner.extensions.service.serve import serve as serve_at
        from perseus_planner.extensions.service.service import Service
        from perseus_planner.extensions.service.store import Storage
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; {how_to_install('service')}") from error
    if lease < LEAST_LEASE_S:
        raise UsageError(
            f"--lease {lease:g}s: is shorter than jobs may be quiet while all is well; give "
            f"{LEAST_LEASE_S:g}s or more"
        )
    line = JsonLine() if log_format == "json" else LogLine()
    _log_to_stderr(log_level, line)

    def say(text: str) -> None:
        """Print where it listens; as a line of the log where programs read all that is printed."""
        if log_format == "json":
            text = line.format(logging.makeLogRecord({"levelname": "INFO", "msg": text}))
        click.echo(text)

    if database is not None and database.startswith("@"):
        database = read_text(Path(database[1:]), UsageError, "the URL of a database").strip()
    # Bound before the database is opened, as a service that stands by answers at the address too.
    address = Address(host or "127.0.0.1", 8400 if port is None else port, unix, tls_cert, tls_key)
    with (
        listening(address, read_tokens(tokens)) as listener,
        tokens_again(listener.access, tokens),
    ):
        opened: list[Storage] = []

        def open_database() -> bool:
            try:
                opened.append(Storage(database or _default_database()))
            except StandBy:
                return False
            return True

        def try_again() -> bool:
            with suppress(StorageError):  # the database may be away too, and come back
                return open_database()
            return False

        if not open_database():
            say(f"Stand-by at {listener.url}, as another service has the database")
            if not stand_by(listener, try_again):
                return
        with (
            opened[0] as storage,
            Service(storage, workers=workers, lease_s=lease, forget_s=forget) as service,
        ):
            text = _listening(listener.url, len(listener.access.tokens), storage.location)

            def ready() -> None:
                with suppress(OSError):  # a service does not end for a full disk behind stdout
                    say(text)

            serve_at(service, listener, ready=ready)


class LogLine(logging.Formatter):
    """A line of `key=value` for people and programs (logfmt): the time in UTC, the level, the
    job if any, and what. What others sent can neither begin a line nor control a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback below it, indented, if there is one."""
        quoted = {"job", "msg"}
        fields = _fields(record).items()
        line = " ".join(
            f"{key}={_quoted(value) if key in quoted else value}" for key, value in fields
        )
        # A traceback quotes what others sent as well.
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        safe = (row if row.isprintable() else _quoted(row)[1:-1] for row in trace)
        return "\n  ".join([line, *safe])


class JsonLine(logging.Formatter):
    """A line of JSON with the keys of `LogLine`, and `trace` for a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = _fields(record)
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _fields(record: logging.LogRecord) -> dict[str, str]:
    """Return what a line of the log says, by key."""
    time_text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
    fields = {"time": time_text, "level": record.levelname.lower()}
    job = getattr(record, "job", None)
    if job is not None:
        fields["job"] = str(job)
    return {**fields, "msg": record.getMessage()}


def _quoted(text: str) -> str:
    """Return a text in quotation marks, with what is not printable as JSON escapes it."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _log_to_stderr(level: str, line: logging.Formatter) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(line)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("perseus_planner").setLevel(level.upper())


def _default_database() -> str:
    """Return the database in the folder for state of this user, by the XDG base directory
    specification.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    folder = base / "perseus-planner"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be created: {error.strerror}; name the file of the database with "
            "--database"
        ) from error
    return str(folder / "service.sqlite")


def _listening(url: str, tokens: int, database: str) -> str:
    """Return the line that is printed when the service is ready."""
    who = counted(tokens, "token") if tokens else "no tokens"
    return f"Listening at {url}, {who}, database {database}"
