"""Leases GPUs for setting, to one process at a time, and resets them whatever happens to that
process.

For each GPU whose settings outlive a process, `lease_gpus` does the following; steps 1 to 3 under
the GPU's lock:

    1. refuse if another living process has a record of the GPU
    2. reset the GPU: this cleans up after a dead owner, and shows whether this process may set the
       GPU
    3. write a record, whose file stays locked until step 7
    4. start the guardian, and wait until it has opened the GPUs
    5. run the block, which sets clocks
    6. reset the GPU, then remove the record, under its lock
    7. dismiss the guardian, and unlock the files of the records

What happens if a process is killed:

    owner before 3              nothing was set
    owner in 3                  nothing was set; the half-written file has a temporary name and is
                                removed later
    owner between 3 and 5       nothing was set; the guardian or the next command of the planner
                                removes the record
    owner in 5                  the guardian resets the GPU and removes the record; driver calls end
                                before their process does, and for other back-ends the guardian
                                resets again a second later
    owner in 6 or 7             the same: resetting twice is harmless, and is not done if there is a
                                new owner
    guardian                    the owner does step 6; if the owner is killed too, the record stays
    both, at once or in turn    the record stays: `recover` resets the GPU, with which commands and
                                jobs begin; so does each rank whose clock controller was the owner
    guardian while it resets    the same, because the record is removed last
    all that the GPUs are for   the guardian ends an owner that is stopped or hangs, and resets
    holder of a lock            the kernel releases the lock

Whether an owner lives is decided by the lock on its records' files alone, which the kernel releases
when the owner dies or runs another program with `exec`. All containers that share the folder see
the lock, so what a killed container left is reset by the next command or job in any other. A new
owner may come while the guardian of the dead one still works: both read the records under the lock,
so the guardian never resets what the new owner has set. Owner and guardian also reset GPUs whose
records somebody has removed while the owner lives, as logind does with RemoveIPC when a user logs
out.

In a forked child of the owner, leaving the block changes nothing, and the child does not keep the
files locked.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perseus_planner.base.errors import GpuError, GpuInUse, GpuNotPermitted, GpuNotSupported
from perseus_planner.base.loops import in_background
from perseus_planner.base.processes import this_process
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.guardian import (
    Guardian,
    living_lease,
    release,
    run_at_once,
    undo,
)
from perseus_planner.gpu.lease.records import (
    LeaseRecord,
    LockedRecords,
    lock_records,
    read_records,
    recorded_uuids,
)

if TYPE_CHECKING:
    from perseus_planner.gpu.lease.records import FoundRecord
    from perseus_planner.gpu.protocol import Gpu

_locks: dict[str, list[int]] = {}
"""Descriptors that keep the files of this process's records locked, by lease."""


@contextmanager
def lease_gpus(
    gpus: Sequence[Gpu], *, power_limit: bool = True, users: Sequence[int] = ()
) -> Iterator[None]:
    """Lease GPUs for setting inside the block, and restore them afterwards, even if the block
    raises.

    Clocks are reset, and the power limit is restored.

    Args:
        gpus: The GPUs. Those that do not keep settings are reset afterwards, without records or a
            guardian.
        power_limit: Whether the power limit may be set; if not, it is left alone.
        users: Numbers of the other processes that the GPUs are set for. When all of them have
            ended and this one does not end the block, its guardian ends it.

    Raises:
        GpuInUse: If another living process has leased one of the GPUs, or this process already has.
        GpuNotPermitted: If this process may not set one of them.
        GpuNotSupported: If the clocks of one of them cannot be reset, and its power limit may not
            be set.
        GpuError: If a record cannot be written or the guardian cannot be started; or, after the
            block, if a GPU cannot be reset. The other GPUs are reset then, and its record is kept
            for `recover`.
    """
    owner = os.getpid()
    lease = secrets.token_hex(8)
    _locks[lease] = []
    leased: list[tuple[Gpu, LeaseRecord]] = []
    guardian = None
    try:
        for gpu in gpus:
            _take(gpu, _new_record(gpu, lease, power_limit=power_limit), leased)
        if any(gpu.keeps_settings for gpu, _ in leased):
            # Simulated GPUs end with their process: there is nothing to guard.
            guardian = Guardian(lease, users)
        yield
    finally:
        # A forked child leaves the block, too, and must not take the clock from its parent.
        if os.getpid() == owner:
            _give_back(lease, leased, guardian)


@dataclass(frozen=True)
class Recovery:
    """What `recover` did about one record."""

    record: LeaseRecord  #: The record of a dead process
    #: Why the record is still there; None if its GPU is reset and it is removed.
    problem: str | None


def stale_records() -> tuple[FoundRecord, ...]:
    """Return the records of dead processes. Changes nothing.

    Raises:
        GpuError: If the state folder cannot be used.
    """
    return tuple(record for record in read_records()[0] if not record.is_living)


def frozen_records() -> tuple[FoundRecord, ...]:
    """Return the records of living processes of this host that are stopped. Changes nothing.

    Raises:
        GpuError: If the state folder cannot be used.
    """
    living = (record for record in read_records()[0] if record.is_living)
    return tuple(record for record in living if record.owner.is_stopped)


def recover(*, is_fresh: bool = False) -> tuple[Recovery, ...]:
    """Reset each GPU that a dead process left set, and remove its record. Commands and jobs begin
    with this.

    Records of GPUs that a living process has leased since are removed silently.

    Args:
        is_fresh: As for `release`.

    Raises:
        GpuError: If the state folder cannot be used.
    """
    stale = stale_records()
    for uuid in set(recorded_uuids()) - {record.uuid for record in stale}:
        with lock_records(uuid):  # removes temporary files of killed writers
            pass
    runs = [
        in_background(partial(_recover_record, record, is_fresh=is_fresh), "planner recovery")
        for record in stale
    ]
    return tuple(recovery for run in runs if (recovery := run.result()) is not None)


def reset_gpu(
    gpu: Gpu, *, power_limit: bool = False, force: bool = False
) -> tuple[LeaseRecord, ...]:
    """Reset the clocks of a GPU, and undo the leases of dead processes.

    Args:
        gpu: Any GPU.
        power_limit: Whether to set its power limit back to the default as well.
        force: Whether to reset it even if a living process has leased it. The record of that
            process stays.

    Returns:
        The records that were removed.

    Raises:
        GpuInUse: If a living process has leased the GPU, and `force` is False.
        GpuError: If the GPU cannot be reset, or a record cannot be removed.
    """
    if not gpu.keeps_settings:
        _reset(gpu, (), power_limit=power_limit)
        return ()
    with lock_records(gpu.uuid) as records:
        other = living_lease(records)
        if other is not None and not force:
            raise GpuInUse(f"{in_use_text(other)}, or reset it with --force")
        removable = tuple(record for record in records.read()[0] if not record.is_living)
        _reset(gpu, removable, power_limit=power_limit)
        # Only what is reset by now; the record of a living process stays for that process.
        for record in removable:
            records.remove(record)
    return removable


def in_use_text(record: LeaseRecord) -> str:
    """Return an error text about a lease that says what to do."""
    return f"{record}; wait for that process to end, end it, or choose another GPU"


def _reset(gpu: Gpu, records: Sequence[LeaseRecord], *, power_limit: bool) -> None:
    for record in records:
        undo(gpu, record)
    try:
        # The limit is restored even if the clock cannot be: each of them may be refused alone.
        gpu.reset_clocks()
    finally:
        if power_limit:
            gpu.reset_power_limit()


def _new_record(gpu: Gpu, lease: str, *, power_limit: bool) -> LeaseRecord:
    """Return a record before it is known which settings of the GPU can be restored."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return LeaseRecord(
        gpu.text, gpu.uuid, gpu.name, lease, since, True, power_limit, None, this_process()
    )


def _take(gpu: Gpu, record: LeaseRecord, leased: list[tuple[Gpu, LeaseRecord]]) -> None:
    """Take one GPU, and append it to `leased`."""
    if not gpu.keeps_settings:
        leased.append((gpu, _with_restorable_settings(gpu, record)))
        return
    with lock_records(record.uuid) as records:
        _check_free(records, record)
        # Dead owners may have set another power limit, which must not be taken for the one to
        # restore.
        for stale in records.read()[0]:
            undo(gpu, stale)
        complete = _with_restorable_settings(gpu, record)
        leased.append((gpu, complete))  # before it is written: an interrupt may come in between
        records.write(complete, _locks[record.lease])
        _remove_stale(records, record.lease)


def _with_restorable_settings(gpu: Gpu, record: LeaseRecord) -> LeaseRecord:
    """Reset the clocks and read the power limit; settings that do not support this cannot be set
    either.
    """
    try:
        gpu.reset_clocks()
    except GpuNotSupported:
        if not record.sets_power_limit:
            raise
        record = replace(record, sets_clock=False)
    # What was not allowed, or is not supported, is not restored either.
    if not record.sets_power_limit:
        return record
    try:
        return replace(record, power_limit_w=float(gpu.power_limit_w()))
    except (GpuNotSupported, GpuNotPermitted):
        return replace(record, sets_power_limit=False)


def _check_free(records: LockedRecords, record: LeaseRecord) -> None:
    other = living_lease(records)
    # The same process: waiting for its end, which the other message advises, would take for ever.
    if other is not None and other.lease in _locks:
        raise GpuInUse(
            f"GPU {record.gpu} ({record.name}): this process has leased it already; name each GPU "
            "once"
        )
    if other is not None:
        raise GpuInUse(in_use_text(other))
    # An unreadable record may be that of a living process.
    problems = records.read()[1]
    if problems:
        raise GpuError(f"GPU {record.gpu}: cannot tell whether it is free: {problems[0]}")


def _remove_stale(records: LockedRecords, lease: str) -> None:
    for stale in records.read()[0]:
        if stale.lease != lease:
            # Other users' records may stay: they are ignored while this process lives.
            with suppress(GpuError):
                records.remove(stale)


def _give_back(
    lease: str, leased: Sequence[tuple[Gpu, LeaseRecord]], guardian: Guardian | None
) -> None:
    """Restore all GPUs, dismiss the guardian and end the lease; then raise the failures."""
    # At once: a reset takes milliseconds, and the driver may hang on one GPU.
    failures = run_at_once(release, [one for one in leased if one[0].keeps_settings])
    for one in leased:
        if not one[0].keeps_settings:  # in turn: simulated GPUs that share a clock depend on it
            failures += run_at_once(undo, [one])
    # Before the files are unlocked: the guardian wakes by that, and then looks for this report.
    if guardian is not None:
        guardian.dismiss()
    _unlock(lease)
    if guardian is not None:
        guardian.wait()
    if failures:
        listed = "; ".join(f"{record.gpu}: {error}" for record, error in failures)
        first_error = failures[0][1]
        raise GpuError(f"not reset: {listed}; fix this, then run `planner reset`") from first_error


def _unlock(lease: str) -> None:
    for descriptor in _locks.pop(lease):
        os.close(descriptor)


def _unlock_in_child() -> None:
    """Close a forked child's descriptors: the files would otherwise stay locked after their
    owner's death.
    """
    for lease in list(_locks):
        _unlock(lease)


os.register_at_fork(after_in_child=_unlock_in_child)


def _recover_record(record: LeaseRecord, *, is_fresh: bool) -> Recovery | None:
    """Reset the GPU of a stale record, and remove the record; return None if there was nothing
    to reset.
    """
    try:
        with open_gpu(record.gpu) as gpu:
            # A number such as nvml:0 may be another GPU after a reboot or a repair.
            if gpu.uuid == record.uuid:
                was_set = release(gpu, record, is_fresh=is_fresh)
                return Recovery(record, None) if was_set else None
            problem = f"GPU {record.gpu}: is {gpu.uuid}, not {record.uuid} as its record says"
            return Recovery(record, f"{problem}; remove that file")
    except GpuError as error:
        return Recovery(record, str(error))
