"""A process that resets GPUs when the process that leased them dies, even by SIGKILL.

The owner of the lease starts the guardian as a child, in a separate session, so that neither Ctrl-C
nor a hang-up of the terminal reaches it; it also ignores the signals that ask a process to end. The
guardian opens the owner's GPUs first, so that nothing has to be loaded later, writes `ready`, and
waits for the lock that the owner keeps on its records. Once the lock is free, the owner has
reported that all GPUs are reset, or has died. A closed pipe means neither: forked children of the
owner may keep it open, and the owner may close it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from perseus_planner.base.errors import GpuError, PlannerError
from perseus_planner.base.processes import child_environment, is_readable
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.records import (
    FoundRecord,
    LeaseRecord,
    LockedRecords,
    lock_records,
    open_records,
    wait_for_owner,
)
from perseus_planner.gpu.protocol import Gpu

Action = Callable[[Gpu, LeaseRecord], object]
Failure = tuple[LeaseRecord, GpuError]

SAME_LIMIT_W = 0.5  #: smaller differences between power limits are ignored


def undo(gpu: Gpu, record: LeaseRecord) -> None:
    """Undo what the owner of a lease may have set; harmless if nothing was set, or if repeated.

    Raises:
        GpuError: If the GPU cannot be reset.
    """
    if record.sets_clock:
        gpu.reset_clocks()
    if record.sets_power_limit:
        restore_power_limit(gpu, record.power_limit_w)


def release(gpu: Gpu, record: LeaseRecord) -> bool:
    """Undo the settings and remove the record; if another living process has leased the GPU, only
    the latter.

    Returns:
        Whether the settings were undone.

    Raises:
        GpuError: If the GPU cannot be reset, in which case the record is kept, or the record cannot
            be removed.
    """
    with lock_records(record.uuid) as records:
        is_free = living_lease(records, other_than=record.lease) is None
        if is_free:
            undo(gpu, record)
        records.remove(record)
    return is_free


def living_lease(records: LockedRecords, other_than: str = "") -> FoundRecord | None:
    """Return the lease of a living process, except the lease `other_than`; None if the GPU is
    free.
    """
    valid = records.read()[0]
    return next(
        (record for record in valid if record.lease != other_than and record.is_living), None
    )


def run_in_parallel(action: Action, leased: Sequence[tuple[Gpu, LeaseRecord]]) -> list[Failure]:
    """Run `action` for all GPUs at once, so that one that hangs delays no other; return the
    failures.
    """
    from concurrent.futures import ThreadPoolExecutor

    if not leased:
        return []
    with ThreadPoolExecutor(len(leased)) as pool:
        return [
            failure
            for failures in pool.map(lambda one: run_in_turn(action, [one]), leased)
            for failure in failures
        ]


def run_in_turn(action: Action, leased: Sequence[tuple[Gpu, LeaseRecord]]) -> list[Failure]:
    """Run `action` for one GPU after the other, and continue after failures; return the
    failures.
    """
    failures = []
    for gpu, record in leased:
        try:
            action(gpu, record)
        except GpuError as error:
            failures.append((record, error))
    return failures


def restore_power_limit(gpu: Gpu, limit_w: float | None) -> None:
    """Restore a power limit, watts, or the default if it is None.

    The limit in force may be a temporary one that something else imposes. The GPU is therefore set
    to its default first, and to `limit_w` only if the default is another.
    """
    if limit_w is not None and abs(gpu.power_limit_w() - limit_w) < SAME_LIMIT_W:
        return
    gpu.reset_power_limit()
    if limit_w is not None and abs(gpu.power_limit_w() - limit_w) >= SAME_LIMIT_W:
        gpu.set_power_limit_w(limit_w)


READY_S = 60.0
"""How long a guardian may take to open its GPUs: file systems can be slow, and the driver may
have to be loaded.
"""

_END_S = 10.0  #: to end after it is dismissed
_LATE_S = 1.0  #: during which a command or a request of the dead owner may still set a clock


class Guardian:
    """Starts the guardian of a lease, whose records have been written, and stops it.

    Args:
        lease: Identifier of the lease.

    Raises:
        GpuError: If the guardian does not become ready; the text says why.
    """

    def __init__(self, lease: str) -> None:
        if not sys.executable:
            raise GpuError(
                "cannot lease GPUs: sys.executable is empty, so that no guardian can be started"
            )
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
        """Report that all GPUs are reset; the guardian reads this once the records' files are
        unlocked.
        """
        with suppress(BrokenPipeError):
            os.write(_pipe(self._process.stdin).fileno(), b".")

    def wait(self) -> None:
        """Wait until the guardian ends."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._close()

    def _wait_until_ready(self) -> None:
        output = _pipe(self._process.stdout)
        if not is_readable(output.fileno(), READY_S):
            raise GpuError(
                "the guardian that resets GPUs if this process dies was not ready within "
                f"{READY_S:g} s"
            )
        first = output.readline().decode(errors="replace").strip()
        if first != "ready":
            lines = [first, *output.read().decode(errors="replace").splitlines()]
            reason = next(
                (line for line in reversed(lines) if line.strip()),
                "it ended without an error message",
            )
            raise GpuError(
                f"the guardian that resets GPUs if this process dies could not be started: {reason}"
            )

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # Popen was called with PIPE
    return stream


def main(lease: str) -> int:
    """Guard the GPUs of a lease; return 0 once they are reset, by the guardian or the owner,
    else 2.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    records = open_records(lease)
    if not records:  # the owner has died already, and another process has reset its GPUs
        return 0
    with ExitStack() as stack:
        try:
            leased = [(stack.enter_context(open_gpu(record.gpu)), record) for record, _ in records]
        except PlannerError as error:
            print(error)
            return 2
        _report_ready()
        wait_for_owner(records[0][1])  # the owner's other records are unlocked at the same moment
        if not _is_dismissed():
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


def _is_dismissed() -> bool:
    """Return whether the owner has reported that all GPUs are reset."""
    return bool(is_readable(0) and os.read(0, 1))


def _reset(leased: Sequence[tuple[Gpu, LeaseRecord]]) -> bool:
    """Reset all GPUs; return whether some failed, whose records stay for the next command of the
    planner.
    """
    if any(not record.gpu.startswith("nvml:") for _, record in leased):
        # A driver call ends before its process does, but a command or request of the owner may
        # still be under way. So reset the GPUs now, and again when it is over.
        run_in_parallel(undo, leased)
        time.sleep(_LATE_S)
    return bool(run_in_parallel(release, leased))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
