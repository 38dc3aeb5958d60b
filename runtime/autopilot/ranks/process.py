"""The process of the autopilot: a child of rank 0 that ends with it, however it ends, and has a
low priority.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from perseus_planner.base.processes import WatchedProcess, child_environment, is_readable
from perseus_planner.runtime.autopilot.ranks.messages import END, Message, Stream

NICENESS = 5
"""A third of the share of a training thread where cores are scarce."""
DESCRIPTOR = 3
"""The descriptor at which the process finds its end of the connection."""

_POLL_S = 0.05  #: between two looks at the connection while the process ends
_END_POLL_S = 0.002  #: between two looks at a process that has closed it


class AutopilotProcess:
    """A running process of the autopilot.

    It is spawned, not started by `subprocess`, which waits for the end of a pipe: children that the
    training forks at the same time would keep it open, and the thread would wait for them.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable does not name the Python to start it with")
        here, there = socket.socketpair()
        try:
            arguments = [
                sys.executable,
                "-m",
                "perseus_planner.runtime.autopilot.ranks",
                "--owner",
                str(os.getpid()),
            ]
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, there.fileno(), DESCRIPTOR),
            ]
            # In a session of its own: Ctrl-C interrupts training, which then ends it.
            self.pid = os.posix_spawn(
                sys.executable, arguments, child_environment(), file_actions=actions, setsid=True
            )
        except OSError:
            here.close()
            raise
        finally:
            there.close()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)
        self._process = WatchedProcess(self.pid)
        self._stream = Stream(here, is_blocking=False)

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
        messages = self._stream.receive()
        if (
            not messages and self._process.has_ended()
        ):  # a child of the training may hold the connection open
            raise EOFError
        return messages

    def end(self, timeout_s: float) -> Sequence[Message]:
        """Have it write its state and end; kill it if that takes longer than `timeout_s` seconds.

        Returns:
            The last messages that it has sent.
        """
        messages: list[Message] = []
        until_s = time.monotonic() + timeout_s
        with suppress(EOFError):
            self._stream.send(END)
            while time.monotonic() < until_s:  # it may wait until a long message has been read
                self._stream.flush()
                is_readable(self._stream.fileno(), _POLL_S)
                messages += self._stream.receive()
        while not self._process.has_ended() and time.monotonic() < until_s:
            time.sleep(_END_POLL_S)  # it has closed the connection, so it ends now
        if not self._process.has_ended():
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # the training may have its children waited for
            os.waitpid(self.pid, 0)
        self._process.close()
        self._stream.close()
        return messages
