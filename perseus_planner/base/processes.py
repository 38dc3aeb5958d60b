"""Processes of the planner on one node: who they are, when they end, and the folder that they
share.
"""

from __future__ import annotations

import os
import pwd
import select
import shlex
import socket
import subprocess
import sys
import time

from perseus_planner.base.errors import GpuError
from perseus_planner.base.wires import Record


def is_readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Wait until the descriptor can be read or has been closed; return False if that takes
    longer than `timeout_s`.
    """
    poller = select.poll()  # unlike select, takes descriptors of any number
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, 1e3 * timeout_s)))


class WatchedProcess:
    """Tells when a process has ended; a zombie counts as ended.

    Attributes:
        pid: Number of the process.
        descriptor: Becomes readable when the process ends. None if the kernel cannot report the
            end, so that `has_ended` must be called from time to time.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor: int | None = None
        self._is_gone = False
        try:
            # A descriptor means this process for ever, its number may be used again.
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
            return is_readable(self.descriptor)
        import psutil

        try:
            # A zombie has ended: only its parent has not asked yet.
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        """Stop watching the process."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
            # A closed one counts as ended, as nobody watches it any more.
            self._is_gone = True

    def _find(self) -> None:
        import psutil

        try:
            # psutil remembers when it began, so that a later process of this number is told apart.
            self._process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            self._is_gone = True


def start_module(
    module: str, *arguments: str, who: str, timeout_s: float, has_input: bool = False
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a module as a program in a session of its own, in which it calls `report_ready`.

    Args:
        module: Name of the module.
        arguments: What it is given.
        who: What it is, which begins error messages.
        timeout_s: How long to wait until it is ready, in seconds.
        has_input: Whether its standard input is a pipe, and not empty.

    Returns:
        Its process, whose standard output is a pipe, and what it has reported.

    Raises:
        GpuError: If it does not become ready; the text says why.
    """
    # An embedded Python may not know its own program.
    if not sys.executable:
        raise GpuError(
            f"{who} cannot be started: sys.executable does not name the Python to start it with"
        )
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",  # so that it keeps no file system busy
        env=child_environment(),
        start_new_session=True,
    )
    try:
        return process, _read_report(process, who, timeout_s)
    except BaseException:
        end_module(process)
        raise


def _read_report(process: subprocess.Popen[bytes], who: str, timeout_s: float) -> str:
    assert process.stdout is not None  # it is a pipe
    descriptor = process.stdout.fileno()
    output = b""
    deadline_s = time.monotonic() + timeout_s
    # Until its output ends: a program that is ready closes it, and one that fails exits.
    while is_readable(descriptor, deadline_s - time.monotonic()):
        data = os.read(descriptor, 65536)
        output += data
        if not data:
            text = output.decode(errors="replace").strip() or "it ended without any output"
            lines = text.splitlines()
            # The first line says whether it is ready; the last one of another output is the error.
            status, _, report = lines[0].partition(" ")
            if status == "ready":
                return report
            raise GpuError(f"{who} could not be started: {lines[-1].strip()}")
    raise GpuError(f"{who} was not ready within {timeout_s:g} s")


def end_module(process: subprocess.Popen[bytes]) -> None:
    """Kill what `start_module` has started, unless it has ended, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def report_ready(report: str = "") -> bool:
    """Tell who has called `start_module` that this program is ready, and leave its output; return
    False if nobody reads it.
    """
    # Its output was a pipe to who started it, whose end must not end this program.
    reader = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Whatever is printed later goes nowhere.
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    # Last, so that nobody takes a program for ready whose output still goes to the pipe.
    try:
        os.write(reader, f"ready {report}\n".encode())
    except BrokenPipeError:
        return False
    finally:
        os.close(reader)
    return True


DEFAULT_STATE_FOLDER = "/dev/shm/perseus-planner"
"""State folder if $PLANNER_STATE_DIR is not set: in memory, so that a reboot empties it, as it
resets GPUs.
"""

_MAX_COMMAND = 200  #: characters of a command line that are kept


def state_folder() -> str:
    """Return the folder that the planner's processes on this node share; it may not exist."""
    return os.environ.get("PLANNER_STATE_DIR") or DEFAULT_STATE_FOLDER


def child_environment() -> dict[str, str]:
    """Return an environment in which a Python process in any folder finds this process's modules
    and state folder.
    """
    # A child in another folder would not find what a relative path names.
    modules = os.pathsep.join(map(os.path.abspath, sys.path))
    return {
        **os.environ,
        "PYTHONPATH": modules,
        "PLANNER_STATE_DIR": os.path.abspath(state_folder()),
    }


class ProcessDescription(Record, frozen=True):
    """A process as messages name it. Nothing is decided by it: containers number processes
    separately.
    """

    pid: int  #: Process number
    host: str  #: Host name, which containers have of their own
    user: str  #: Name of the user
    command: str  #: Command line, printable, shortened if it is long

    def __str__(self) -> str:
        """Describe the process in a message."""
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{where} of {self.user} (`{self.command}`)"

    @property
    def is_stopped(self) -> bool:
        """Whether a process of this number on this host is stopped, as by SIGSTOP."""
        # A number means a process of its own host only.
        if self.host != _printable(socket.gethostname()):
            return False
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                # the name, in parentheses, may have any characters
                return file.read().rpartition(")")[2].split()[0] in ("T", "t")
        except (OSError, IndexError):
            return False


def this_process() -> ProcessDescription:
    """Return the description of the calling process."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    # A container may run under a user that it has no name for.
    except KeyError:
        user = str(os.geteuid())
    with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
        command = shlex.join(file.read().split("\0")[:-1])
    return ProcessDescription(
        os.getpid(), _printable(socket.gethostname()), _printable(user), _printable(command)
    )


def boot_id() -> str:
    """Return the identifier of this boot of the node."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _printable(text: str) -> str:
    """Return `text` on one line, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_COMMAND])
