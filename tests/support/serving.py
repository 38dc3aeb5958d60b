"""`planner serve` as a process that is ended and started again at the same place."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
from waiting import LONG_S

_COMMAND = [
    sys.executable,
    *(["-P"] if sys.version_info >= (3, 11) else []),
    "-m",
    "perseus_planner",
    "serve",
]


class Serving:
    """The service in a process of its own.

    Attributes:
        address: where it listens; the same once it has been started.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """Its database is `service.sqlite` in `folder`."""
        self._options = options
        self._folder, self.address, self._port = folder, "", "0"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        place = ["--port", self._port, "--database", "service.sqlite"]
        command = [*_COMMAND, *place, *self._options]
        self._process = subprocess.Popen(
            command, cwd=self._folder, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[2].rstrip(",")
        self._port = self.address.rpartition(":")[2]

    def send(self, signal_number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signal_number)

    def wait(self) -> None:
        """Wait until it has ended."""
        assert self._process is not None
        self._process.wait(LONG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def end(self, by: signal.Signals) -> None:
        self.send(by)
        self.wait()

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)
