"""Which process sets a GPU, told from every other process that has, had or will have its number."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

_LONGEST = 200  #: characters of a command that are kept


@dataclass(frozen=True)
class Owner:
    """One process of this node.

    Attributes:
        pid: its number.
        started: when it was started, clock ticks since boot. Unlike a time of day, no correction of the clock moves it.
        boot_id: the boot of the node that it belongs to; settings of a GPU do not outlive that.
        pid_namespace: where `pid` means this process: a container may have numbers of its own.
        user: who it runs as.
        command: its command line, printable, cut where it is long.
    """

    pid: int
    started: int
    boot_id: str
    pid_namespace: str
    user: str
    command: str

    def lives(self) -> bool:
        """Whether it may still set the GPU. True where that cannot be seen from here: in another container."""
        return self.is_of_this_boot() and (self.pid_namespace != _pid_namespace() or self.lives_here())

    def lives_here(self) -> bool:
        """Whether it lives, and in no other container."""
        if not self.is_of_this_boot() or self.pid_namespace != _pid_namespace():
            return False
        found = _state_and_start(self.pid)
        if found is None:
            return _is_hidden(self.pid)
        state, started = found
        return started == self.started and state not in "ZX"  # a zombie waits for its parent only

    def is_of_this_boot(self) -> bool:
        """Whether the node has not been booted since."""
        return self.boot_id == boot_id()

    def __str__(self) -> str:
        """As messages name it."""
        where = "" if self.pid_namespace == _pid_namespace() else " of another container"
        return f"process {self.pid}{where} of {self.user} (`{self.command}`)"


def this_process() -> Owner:
    """The process that calls."""
    import psutil

    process = psutil.Process()
    found = _state_and_start(process.pid)
    assert found is not None  # /proc has every process that asks for itself
    return Owner(
        pid=process.pid,
        started=found[1],
        boot_id=boot_id(),
        pid_namespace=_pid_namespace(),
        user=_printable(process.username()),
        command=_printable(shlex.join(process.cmdline())),
    )


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State letter and start in ticks since boot, fields 3 and 22 of proc(5)'s stat; None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_name = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return after_name[0], int(after_name[19])


def _is_hidden(pid: int) -> bool:
    """Whether there is a process that /proc does not show to this user (its mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def boot_id() -> str:
    """What tells this boot of the node from all others."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _printable(text: str) -> str:
    """`text` on one line, without what would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_LONGEST])
