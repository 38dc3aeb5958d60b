"""A process that resets GPUs when the one that set them dies, by whatever cause, SIGKILL included.

The owner starts it as a child, in a session of its own, so that neither a terminal's Ctrl-C nor its hang-up reaches it;
it ignores the signals that would end it politely, too. It opens the owner's GPUs first, so that later nothing is to be
loaded, says `ready`, and waits: for the owner's word that all is reset, or for the owner's end. A closed pipe is
neither: children that the owner forked may hold it open, and an owner that runs another program closes it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING

from perseus_planner.errors import GpuError, PlannerError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.folder import elsewhere
from perseus_planner.gpu.lease.records import Record, read_records
from perseus_planner.gpu.lease.release import for_each, release, undo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.gpu.lease.owner import Owner
    from perseus_planner.gpu.protocol import Gpu

READY_S = 60.0
"""How long a guardian may take to open its GPUs: Python may have to come from a slow file system, a driver to load."""

_END_S = 10.0  #: to end after the owner's word
_LATE_S = 1.0  #: in which a command, or a request to a daemon, that the owner left behind may still set a clock
_LOOK_S = 0.1  #: between two looks at the owner where the kernel cannot tell of its end


class Guardian:
    """The owner's side: starts the process for the taking `hold`, whose records are written already.

    Raises:
        GpuError: it does not become ready; the text says why.
    """

    def __init__(self, hold: str) -> None:
        if not sys.executable:
            raise GpuError("no GPU can be held: sys.executable does not name the Python to start its guardian with")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perseus_planner.gpu.lease.guardian", hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",  # it keeps no file system from being unmounted
            env=elsewhere(),
            start_new_session=True,
        )
        try:
            self._await_ready()
        except BaseException:
            self._process.kill()
            self._close()
            raise

    def dismiss(self) -> None:
        """Say that all is reset, and wait for its end."""
        with suppress(BrokenPipeError):
            os.write(self._to().fileno(), b".")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._close()

    def _await_ready(self) -> None:
        said = self._process.stdout
        assert said is not None  # PIPE was asked for
        if not select.select([said], [], [], READY_S)[0]:
            raise GpuError(f"the guardian that resets GPUs if this process dies was not ready within {READY_S:g} s")
        first = said.readline().decode(errors="replace").strip()
        if first != "ready":
            lines = [first, *said.read().decode(errors="replace").splitlines()]
            words = next((line for line in reversed(lines) if line.strip()), "it ended without a word")
            raise GpuError(f"the guardian that resets GPUs if this process dies could not be started: {words}")

    def _to(self) -> IO[bytes]:
        assert self._process.stdin is not None  # PIPE was asked for
        return self._process.stdin

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def main(hold: str) -> int:
    """Guard the GPUs of the taking `hold`; 0 when they are reset or the owner has done that, else 2."""
    for politely in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(politely, signal.SIG_IGN)
    records = [record for record in read_records()[0] if record.hold == hold]
    if not records:  # the owner died before this process came to look, and somebody has reset its GPUs
        return 0
    with ExitStack() as stack:
        try:
            taken = [(stack.enter_context(open_gpu(record.gpu)), record) for record in records]
        except PlannerError as error:
            print(error)
            return 2
        _say_ready()
        if _outlives(records[0].owner):
            return 2 if _reset(taken) else 0
    return 0


def _say_ready() -> None:
    """Let go of the owner's pipes, so that nothing written later can fail, and with the last word on them tell it."""
    owners, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with suppress(BrokenPipeError):
        os.write(owners, b"ready\n")
    os.close(owners)


def _outlives(owner: Owner) -> bool:
    """Wait until the owner has died without a word (True), or has said that all is reset (False)."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    end = _end_of(owner.pid)
    if end is not None:
        poller.register(end, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll(None if end is not None else 1000 * _LOOK_S)}
        if 0 in ready:  # looked at first: an owner may end right after its word
            if os.read(0, 1):
                return False
            poller.unregister(0)
        if not owner.lives():
            return True


def _end_of(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None: there is no such process, or kernel function."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _reset(taken: Sequence[tuple[Gpu, Record]]) -> bool:
    """Set all back; says whether some failed, whose records stay for the next command of the planner."""
    if any(not record.gpu.startswith("nvml:") for _, record in taken):
        # Only a call of the driver ends with the process that made it. So: reset at once, and again when all is over.
        for_each(undo, taken)
        time.sleep(_LATE_S)
    return bool(for_each(release, taken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
