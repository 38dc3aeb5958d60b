"""A process that resets GPUs when the process that leased them dies, even by SIGKILL.

The owner of the lease starts the guardian as a child, in a separate session, so that neither Ctrl-C nor a hang-up of
the terminal reaches it; it also ignores the signals that ask a process to end. The guardian opens the owner's GPUs
first, so that nothing has to be loaded later, writes `ready`, and waits until the owner reports that all GPUs are
reset, or dies. A closed pipe means neither: forked children of the owner may keep it open, and an owner that runs
another program with `exec` closes it.
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
from perseus_planner.gpu.lease.records import LeaseRecord, read_records
from perseus_planner.gpu.lease.release import release, run_in_parallel, undo
from perseus_planner.processes import child_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.processes import ProcessIdentity

READY_S = 60.0
"""How long a guardian may take to open its GPUs: file systems can be slow, and the driver may have to be loaded."""

_END_S = 10.0  #: to end after it is dismissed
_LATE_S = 1.0  #: during which a command or a request of the dead owner may still set a clock
_POLL_S = 0.1  #: between checks of the owner if the kernel cannot report its end


class Guardian:
    """Starts the guardian of a lease, whose records have been written, and stops it.

    Args:
        lease: Identifier of the lease.

    Raises:
        GpuError: If the guardian does not become ready; the text says why.
    """

    def __init__(self, lease: str) -> None:
        if not sys.executable:
            raise GpuError("cannot lease GPUs: sys.executable is empty, so that no guardian can be started")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perseus_planner.gpu.lease.guardian", lease],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",  # so that it keeps no file system busy
            env=child_environment(),
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._close()
            raise

    def dismiss(self) -> None:
        """Report that all GPUs are reset, and wait until the guardian ends."""
        with suppress(BrokenPipeError):
            os.write(_pipe(self._process.stdin).fileno(), b".")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._close()

    def _wait_until_ready(self) -> None:
        output = _pipe(self._process.stdout)
        if not select.select([output], [], [], READY_S)[0]:
            raise GpuError(f"the guardian that resets GPUs if this process dies was not ready within {READY_S:g} s")
        first = output.readline().decode(errors="replace").strip()
        if first != "ready":
            lines = [first, *output.read().decode(errors="replace").splitlines()]
            reason = next((line for line in reversed(lines) if line.strip()), "it ended without an error message")
            raise GpuError(f"the guardian that resets GPUs if this process dies could not be started: {reason}")

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # Popen was called with PIPE
    return stream


def main(lease: str) -> int:
    """Guard the GPUs of a lease; return 0 once they are reset, by the guardian or the owner, else 2."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    records = [record for record in read_records()[0] if record.lease == lease]
    if not records:  # the owner has died already, and another process has reset its GPUs
        return 0
    with ExitStack() as stack:
        try:
            leased = [(stack.enter_context(open_gpu(record.gpu)), record) for record in records]
        except PlannerError as error:
            print(error)
            return 2
        _report_ready()
        if _wait_for_death(records[0].owner):
            return 2 if _reset(leased) else 0
    return 0


def _report_ready() -> None:
    """Write `ready` to the owner, and detach from its pipes so that later output cannot fail."""
    owner, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with suppress(BrokenPipeError):
        os.write(owner, b"ready\n")
    os.close(owner)


def _wait_for_death(owner: ProcessIdentity) -> bool:
    """Wait until the owner has died (return True), or has reported that all GPUs are reset (return False)."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    end = _end_descriptor(owner.pid)
    if end is not None:
        poller.register(end, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll(None if end is not None else 1000 * _POLL_S)}
        if 0 in ready:  # checked first: the owner may end right after its report
            if os.read(0, 1):
                return False
            poller.unregister(0)
        if not owner.is_alive():
            return True


def _end_descriptor(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if there is none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _reset(leased: Sequence[tuple[Gpu, LeaseRecord]]) -> bool:
    """Reset all GPUs; return whether some failed, whose records stay for the next command of the planner."""
    if any(not record.gpu.startswith("nvml:") for _, record in leased):
        # A driver call ends before its process does, but a command or request of the owner may still be under way.
        # So reset the GPUs now, and again when it is over.
        run_in_parallel(undo, leased)
        time.sleep(_LATE_S)
    return bool(run_in_parallel(release, leased))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
