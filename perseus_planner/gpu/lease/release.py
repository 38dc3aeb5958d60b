"""Setting a GPU back to what it was before a process took it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perseus_planner.errors import GpuError
from perseus_planner.gpu.lease.records import Page, Record, page
from perseus_planner.gpu.protocol import Gpu

Action = Callable[[Gpu, Record], object]
Failure = tuple[Record, GpuError]

_NEAR_W = 0.5  #: power limits that differ by less are one


def undo(gpu: Gpu, record: Record) -> None:
    """Reset what the taking that `record` tells of may have set; harmless when nothing was, and when done again.

    Raises:
        GpuError: the GPU did not do that.
    """
    if record.sets_clock:
        gpu.reset_clocks()
    if record.sets_power_limit:
        put_back_power_limit(gpu, record.power_limit_w)


def release(gpu: Gpu, record: Record) -> bool:
    """Undo, then remove the record; if by now another process that lives has the GPU, only the latter.

    Returns whether it was undone.

    Raises:
        GpuError: the GPU could not be reset, and the record is kept; or the record cannot be removed.
    """
    with page(record.uuid) as opened:
        is_free = holder(opened, record.hold) is None
        if is_free:
            undo(gpu, record)
        opened.remove(record)
    return is_free


def holder(opened: Page, hold: str = "") -> Record | None:
    """Whoever lives and has the GPU, by another taking than `hold`; what is no record is passed over."""
    return next((each for each in opened.read()[0] if each.hold != hold and each.owner.lives()), None)


def for_each(action: Action, taken: Sequence[tuple[Gpu, Record]]) -> list[Failure]:
    """Do `action` for all at once, so that a GPU that hangs or fails stops no other; gives those that failed."""
    from concurrent.futures import ThreadPoolExecutor

    if not taken:
        return []
    with ThreadPoolExecutor(len(taken)) as pool:
        return [failure for failures in pool.map(lambda one: in_turn(action, [one]), taken) for failure in failures]


def in_turn(action: Action, taken: Sequence[tuple[Gpu, Record]]) -> list[Failure]:
    """Do `action` for one after the other, failed or not; gives those that failed."""
    failures = []
    for gpu, record in taken:
        try:
            action(gpu, record)
        except GpuError as error:
            failures.append((record, error))
    return failures


def put_back_power_limit(gpu: Gpu, before_w: float | None) -> None:
    """By way of the default, so that a limit that something else imposes for now is not made to last."""
    if before_w is not None and abs(gpu.power_limit_w() - before_w) < _NEAR_W:
        return
    gpu.reset_power_limit()
    if before_w is not None and abs(gpu.power_limit_w() - before_w) >= _NEAR_W:
        gpu.set_power_limit_w(before_w)
