"""The embedded service: `planner serve` as a process of rank 0, which ends with it however rank 0
ends.

It is a process, as a thread would compete with training for Python's global lock. It has a low
priority, so that training has the cores. By default it listens on a free port of loopback.

What it acknowledges is kept in the node's state folder, `services-UID/` in $PLANNER_STATE_DIR or
/dev/shm/perseus-planner, in one database for each job name. So a job that is killed and restarted
on this node finds its reports, as a GPU that was slow still is; and no locks on a network file
system are needed, as they would be next to the run. A job that ends normally leaves nothing behind.
Next to the database is the log of the service, a file that ends with `.log`.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from perseus_planner.errors import PlannerError, ServiceAway, UsageError
from perseus_planner.files import sha256
from perseus_planner.gpu.lease.records import open_state_folder
from perseus_planner.processes import child_environment, is_readable, state_folder

TOKENS_VARIABLE = "PLANNER_SERVICE_TOKENS"
"""As for `planner serve`: a line `token role name` for each client."""

_EMBEDDED = re.compile(
    r"embedded(:(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]))??(:(?P<port>[0-9]{1,5}))?"
)
_NICENESS = 10  #: a tenth of the share of a training thread when cores are scarce
_START_S = 120.0  #: until it listens
_END_S = 2.0  #: from SIGTERM until it is killed


@dataclass(frozen=True)
class Embedding:
    """Where an embedded service is to listen: "embedded", "embedded:8400", "embedded:0.0.0.0:8400".

    Attributes:
        host: An address or a name of this machine.
        port: 0 for any free port.
    """

    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Embedding | None:
        """Parse an address; None if it is not that of an embedded service.

        Raises:
            UsageError: If what follows "embedded" is not an address, or other machines can reach it
                without tokens.
        """
        if text != "embedded" and not text.startswith("embedded:"):
            return None
        match = _EMBEDDED.fullmatch(text)
        if match is None or int(match["port"] or 0) > 65535:
            raise UsageError(
                f"service={text!r}: write embedded, embedded:PORT or embedded:HOST:PORT"
            )
        found = cls((match["host"] or cls.host).strip("[]"), int(match["port"] or cls.port))
        if not found.is_loopback and not os.environ.get(TOKENS_VARIABLE, "").strip():
            raise UsageError(
                f"service={text!r}: other machines can reach it, so clients need tokens; set "
                f"{TOKENS_VARIABLE} as for `planner serve`, or leave the host out"
            )
        return found

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class EmbeddedService:
    """The service process of one job. One thread starts it, any thread may close it.

    Attributes:
        token: The token that this rank sends; None if the service needs none.
    """

    def __init__(self, embedding: Embedding, job: str) -> None:
        """Start nothing yet.

        Args:
            embedding: Where it is to listen.
            job: Name of the job.
        """
        self._host, self._port = embedding.host, embedding.port
        self._name = sha256(job.encode())[:16]  # job names never become paths
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._lock = threading.Lock()  #: of `_is_closed`, and of starting
        self._is_closed = False
        self.token = secrets.token_hex(16) if os.environ.get(TOKENS_VARIABLE, "").strip() else None

    def running(self) -> str:
        """Start the service if it does not run, at the port that it had, and return its URL.

        Raises:
            ServiceAway: If it cannot be started; says why.
        """
        if self._process is None or self._process.poll() is not None:
            try:
                self._start()
            except (OSError, PlannerError) as error:
                self._end(0.0)
                raise ServiceAway(
                    f"the service of this job could not be started: {error}"
                ) from error
        return self._url

    def close(self) -> None:
        """End it for good, and remove its files."""
        with self._lock:
            self._is_closed = True
        self._end(_END_S)
        with suppress(OSError, PlannerError):
            for path in self._database().parent.glob(f"{self._name}.*"):
                path.unlink()

    def _start(self) -> None:
        database = self._database()
        log = database.with_suffix(".log")
        process = self._launch(database, log)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        assert process.stdout is not None  # PIPE was asked for
        with process.stdout as output:
            has_started = is_readable(output.fileno(), _START_S)
            match = re.match(
                r"Listening at (\S+),", output.readline().decode() if has_started else ""
            )
        if match is None:
            raise ServiceAway(_last_line(log) or f"it did not start within {_START_S:g} s")
        self._url = match[1]
        self._port = int(self._url.rpartition(":")[2])

    def _launch(self, database: Path, log: Path) -> subprocess.Popen[bytes]:
        options = ["--host", self._host, "--port", str(self._port), "--database", str(database)]
        options += ["--log-level", "warning"]
        with self._lock, open(log, "wb", opener=_private) as errors:
            if self._is_closed:
                raise ServiceAway("the job is ending")
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "perseus_planner",
                    "serve",
                    *options,
                    "--owner",
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",  # so that it keeps no file system mounted
                env=self._environment(),
                start_new_session=True,  # Ctrl-C interrupts training, which then ends the service
            )
        return self._process

    def _end(self, patience_s: float) -> None:
        """Terminate the process, and kill it if it has not ended within `patience_s` seconds."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
            process.kill()
            process.wait()

    def _environment(self) -> dict[str, str]:
        environment = child_environment()
        if self.token is not None:
            environment[TOKENS_VARIABLE] = (
                f"{environment[TOKENS_VARIABLE]}\n{self.token} operate rank-0\n"
            )
        return environment

    def _database(self) -> Path:
        """Return the path of its database, in a folder that only this user can access."""
        with open_state_folder(create=True):
            folder = Path(state_folder()).absolute() / f"services-{os.geteuid()}"
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise UsageError(
                f"{folder}: is not a folder of this user; remove it, or set another "
                "PLANNER_STATE_DIR"
            )
        return folder / f"{self._name}.sqlite"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("Error: ") if lines else ""
