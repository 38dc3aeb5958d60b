"""Restores GPUs to the state that they had before a lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.lease.records import FoundRecord, LeaseRecord, LockedRecords, lock_records
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
