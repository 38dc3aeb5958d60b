"""Processes of the planner on one node: who they are, when they end, and the folder that they share."""

from __future__ import annotations

import os
import select
import shlex
import sys
from dataclasses import dataclass


class WatchedProcess:
    """Tells when a process has ended; a zombie counts as ended.

    Attributes:
        pid: Number of the process.
        descriptor: Becomes readable when the process ends. None if the kernel cannot report the end, so that
            `has_ended` must be called from time to time.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor: int | None = None
        self._is_gone = False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
        except OSError:  # the kernel has no such call, or the container does not allow it
            self._find()

    def has_ended(self) -> bool:
        """Whether the process has ended; never waits."""
        if self._is_gone:
            return True
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], 0)[0])
        import psutil

        try:
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        """Stop watching the process."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
            self._is_gone = True

    def _find(self) -> None:
        import psutil

        try:
            self._process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            self._is_gone = True


DEFAULT_STATE_FOLDER = "/dev/shm/perseus-planner"
"""State folder if $PLANNER_STATE_DIR is not set: in memory, so that a reboot empties it, as it resets GPUs."""

_MAX_COMMAND = 200  #: characters of a command line that are kept


def state_folder() -> str:
    """Return the folder that the planner's processes on this node share; it may not exist."""
    return os.environ.get("PLANNER_STATE_DIR") or DEFAULT_STATE_FOLDER


def child_environment() -> dict[str, str]:
    """Return an environment in which a Python process in any folder finds this process's modules and state folder."""
    modules = os.pathsep.join(map(os.path.abspath, sys.path))
    return {**os.environ, "PYTHONPATH": modules, "PLANNER_STATE_DIR": os.path.abspath(state_folder())}


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of this node, distinct from any other process that ever has the same number.

    Attributes:
        pid: Process number.
        started: Start time, clock ticks since boot. Corrections of the system clock do not change it.
        boot_id: Boot of the node during which the process runs.
        pid_namespace: Namespace of `pid`: a container may number its processes separately.
        user: Name of the user.
        command: Command line, printable, shortened if it is long.
    """

    pid: int
    started: int
    boot_id: str
    pid_namespace: str
    user: str
    command: str

    def is_alive(self) -> bool:
        """Return whether the process may still run; True for a process of another container, which is not visible."""
        return self.is_of_this_boot() and (self.pid_namespace != _pid_namespace() or self.is_alive_here())

    def is_alive_here(self) -> bool:
        """Return whether the process runs in this container."""
        if not self.is_of_this_boot() or self.pid_namespace != _pid_namespace():
            return False
        found = _state_and_start(self.pid)
        if found is None:
            return _is_hidden(self.pid)
        state, started = found
        return started == self.started and state not in "ZX"  # a zombie has ended

    def is_of_this_boot(self) -> bool:
        """Return whether the node has not been rebooted since the process started."""
        return self.boot_id == boot_id()

    def __str__(self) -> str:
        """Describe the process in a message."""
        where = "" if self.pid_namespace == _pid_namespace() else " in another container"
        return f"process {self.pid}{where} of {self.user} (`{self.command}`)"


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    import psutil

    process = psutil.Process()
    found = _state_and_start(process.pid)
    assert found is not None  # every process is in its own /proc
    return ProcessIdentity(
        pid=process.pid,
        started=found[1],
        boot_id=boot_id(),
        pid_namespace=_pid_namespace(),
        user=_printable(process.username()),
        command=_printable(shlex.join(process.cmdline())),
    )


def boot_id() -> str:
    """Return the identifier of this boot of the node."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time, fields 3 and 22 of /proc/pid/stat; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return after_name[0], int(after_name[19])


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists that /proc does not show to this user (mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _printable(text: str) -> str:
    """Return `text` on one line, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_COMMAND])
