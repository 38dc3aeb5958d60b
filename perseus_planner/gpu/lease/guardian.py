"""A process that resets GPUs when the process that leased them dies, even by SIGKILL.

The process that leased them, the owner, is the one that called `lease_gpus`. In training that is
the clock controller of the node, not a rank: the GPU of a rank that dies is reset by the
controller. (A rank leases only its memory clock, and only for modes that set it.) Elsewhere it is
the process that measures or serves, such as that of a sweep.

The owner of the lease starts the guardian as a child, in a separate session, so that neither Ctrl-C
nor a hang-up of the terminal reaches it; it also ignores the signals that ask a process to end. The
guardian opens the owner's GPUs first, so that nothing has to be loaded later, writes `ready`, and
waits for the lock that the owner keeps on its records. Once the lock is free, the owner has
reported that all GPUs are reset, or has died. A closed pipe means neither: forked children of the
owner may keep it open, and the owner may close it.

An owner that is stopped, or hangs, keeps the lock though nobody needs it any more. So the guardian
also watches the processes that the owner sets the GPUs for, and ends an owner that still has the
lock `FROZEN_S` after the last of them has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from perseus_planner.base.errors import GpuError, PlannerError
from perseus_planner.base.loops import in_background
from perseus_planner.base.processes import (
    WatchedProcess,
    end_module,
    is_readable,
    report_ready,
    start_module,
)
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


def release(gpu: Gpu, record: LeaseRecord, *, is_fresh: bool = False) -> bool:
    """Undo the settings and remove the record; if another living process has leased the GPU, only
    the latter.

    Args:
        gpu: The GPU.
        record: The record.
        is_fresh: Whether the owner may have been killed a moment ago. A call of NVML ends before
            its process does, but a command or a request may still be under way, so the GPU is reset
            now, and again when that is over.

    Returns:
        Whether the settings were undone.

    Raises:
        GpuError: If the GPU cannot be reset, in which case the record is kept, or the record cannot
            be removed.
    """
    # Through NVML there is nothing late to wait for.
    for is_last in (False, True) if is_fresh and not record.gpu.startswith("nvml:") else (True,):
        with lock_records(record.uuid) as records:
            others = [other for other in records.read()[0] if other.lease != record.lease]
            # A new owner has set the GPU by now: its clock is not to be touched.
            is_free = not any(other.is_living for other in others)
            if is_free:
                undo(gpu, record)
            if is_last:
                records.remove(record)
        if not is_last:
            time.sleep(_LATE_S)
    return is_free


def living_lease(records: LockedRecords) -> FoundRecord | None:
    """Return the lease of a living process; None if the GPU is free."""
    return next((record for record in records.read()[0] if record.is_living), None)


def run_at_once(action: Action, leased: Sequence[tuple[Gpu, LeaseRecord]]) -> list[Failure]:
    """Run `action` for all GPUs at once, so that one that hangs delays no other; return the
    failures.
    """
    runs = [
        in_background(partial(action, *gpu_and_record), "planner lease")
        for gpu_and_record in leased
    ]
    # Begun all at once above, so waiting in turn takes as long as the slowest.
    failures = []
    for run, (_, record) in zip(runs, leased, strict=True):
        try:
            run.result()
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


FROZEN_S = 5.0
"""How long an owner may keep a lease after all that it is for have ended: a reset takes
milliseconds, and one that a driver delays is taken over by the guardian. By hand."""
_LOOK_S = 1.0  #: between two looks whether a process has ended, where the kernel does not say


class Guardian:
    """Starts the guardian of a lease, whose records have been written, and stops it.

    Args:
        lease: Identifier of the lease.
        users: Numbers of the processes that the GPUs are set for; none if they are not known.

    Raises:
        GpuError: If the guardian does not become ready; the text says why.
    """

    def __init__(self, lease: str, users: Sequence[int] = ()) -> None:
        module = "perseus_planner.gpu.lease.guardian"
        who = "the guardian that resets GPUs if this process dies"
        given = (lease, *map(str, users))
        self._process, _ = start_module(module, *given, who=who, timeout_s=READY_S, has_input=True)

    def dismiss(self) -> None:
        """Report that all GPUs are reset; the guardian reads this once the records' files are
        unlocked.
        """
        assert self._process.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), b".")

    def wait(self) -> None:
        """Wait until the guardian ends."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        end_module(self._process)


def end_when_unused(owner: int, users: Sequence[WatchedProcess]) -> None:
    """Wait until the last of `users` has ended; then end the owner of their lease, this process's
    parent, unless it ends the lease itself in time.
    """
    for user in users:
        while not user.has_ended():
            if user.descriptor is None:
                time.sleep(_LOOK_S)
            else:
                is_readable(user.descriptor, _LOOK_S)
    time.sleep(FROZEN_S)
    if os.getppid() == owner:  # its number is not used again while this is its child
        os.kill(owner, signal.SIGKILL)


def main(lease: str, *numbers: str) -> int:
    """Guard the GPUs of a lease that is for processes of these numbers; return 0 once they are
    reset, by the guardian or the owner, else 2.
    """
    owner = os.getppid()
    # Numbers of processes are used again, so ranks are watched from the start, while they live.
    users = [WatchedProcess(int(number)) for number in numbers]
    # Who ends a job sends these to all of its processes, and the guardian has to outlive them.
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
        report_ready()
        if users:
            in_background(partial(end_when_unused, owner, users), "planner watch")
        wait_for_owner(records[0][1])  # the owner's other records are unlocked at the same moment
        if is_readable(0) and os.read(0, 1):  # the owner has reported that all GPUs are reset
            return 0
        # The records of GPUs that fail stay for the next command of the planner.
        return 2 if run_at_once(partial(release, is_fresh=True), leased) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
