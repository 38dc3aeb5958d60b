"""The process of the autopilot: a child of rank 0 that ends with it, however it ends, and has a low priority."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.processes import child_environment
from perseus_planner.runtime.learning.messages import END, Message, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

NICENESS = 10
"""A tenth of the share of a training thread where cores are scarce."""


class AutopilotProcess:
    """A running process of the autopilot.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self) -> None:
        here, there = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "perseus_planner.runtime.learning"),
                    *("--descriptor", str(there.fileno()), "--owner", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                cwd="/",  # so that it keeps no file system mounted
                env=child_environment(),
                start_new_session=True,  # Ctrl-C interrupts training, which then ends it
            )
        except OSError:
            here.close()
            raise
        finally:
            there.close()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        self._stream = Stream(here, is_blocking=False)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a message arrives."""
        return self._stream.fileno()

    def send(self, kind: bytes, content: bytes) -> None:
        """Send a message, without waiting.

        Raises:
            EOFError: If the process has ended or hangs.
        """
        self._stream.send(kind, content)

    def messages(self) -> Sequence[Message]:
        """Return what has arrived, without waiting.

        Raises:
            EOFError: If the process has ended.
        """
        self._stream.flush()
        return self._stream.receive()

    def end(self, timeout_s: float) -> None:
        """Have it write its state and end; kill it if that takes longer than `timeout_s` seconds."""
        with suppress(EOFError):
            self._stream.send(END)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        self._process.wait()
        self._stream.close()
