"""Taking GPUs to set them: by one process at a time, and reset whatever becomes of it.

What `held` does for each GPU whose settings outlive a process, in this order; steps 1 to 3 under the GPU's lock:

    1. refuse if another process that lives has a record of it
    2. reset it: this cleans up after an owner that died, and shows whether this process may set it at all
    3. write a record
    4. start the guardian, wait until it has opened the GPUs
    5. the block: set clocks
    6. reset the GPU, then remove the record, under its lock
    7. dismiss the guardian

Who is killed, and what follows:

    owner before 3              nothing was set
    owner in 3                  nothing was set; the half-written file has another name, and the next to lock removes it
    owner between 3 and 5       nothing was set; the guardian, or the next command of the planner, removes the record
    owner in 5                  the guardian resets and removes; a call of the driver ends before its process does, and
                                for other back-ends the guardian resets again a second later
    owner in 6 or 7             the same; to reset twice is harmless, and with a record of a new owner it is not done
    guardian                    the owner does 6; if it is killed too, the record is left for the next command
    both, at once or in turn    the record is left: `recover`, which commands and jobs begin with, finds and resets it
    guardian while it resets    the same, as the record goes last
    whoever has a lock          the kernel gives it back

An owner is known by its number and start, and the boot and container that it belongs to, so a number that is used again
is not taken for it. A new owner may come while the guardian of the dead one is still at work: both go by the lock and
look at the records under it, so the guardian never resets what the new one has set. Records that somebody removed while
their owner lives (logind does, with RemoveIPC, when a user logs out) stop neither owner nor guardian from resetting.

A child that the owner forks holds nothing: leaving the block in it changes nothing.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuHeld, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.guardian import Guardian
from perseus_planner.gpu.lease.owner import Owner, this_process
from perseus_planner.gpu.lease.records import Page, Record, page, read_records, recorded_uuids
from perseus_planner.gpu.lease.release import for_each, holder, in_turn, release, undo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.gpu.protocol import Gpu


@contextmanager
def held(gpus: Sequence[Gpu], *, power_limit: bool = True) -> Iterator[None]:
    """Take GPUs for setting inside the block; on leaving, by whatever way, set them back.

    Clocks are reset. The power limit goes back to what it was before, unless `power_limit` says that nobody will set
    it. GPUs that keep no settings are reset on leaving, no more.

    Raises:
        GpuHeld: another process, which lives, has one of them; or this one has it already.
        GpuNotPermitted: this process may not set one of them; it is as it was.
        GpuError: a record cannot be written, or the guardian not be started; or, on leaving, a GPU could not be reset:
            the others are, and its record is kept for `recover`.
    """
    owner, hold = this_process(), secrets.token_hex(8)
    taken: list[tuple[Gpu, Record]] = []
    guardian = None
    try:
        for gpu in gpus:
            _take(gpu, _record(gpu, owner, hold, power_limit=power_limit), taken)
        if any(gpu.keeps_settings for gpu, _ in taken):
            guardian = Guardian(hold)
        yield
    finally:
        if os.getpid() == owner.pid:
            _leave(taken, guardian)


@dataclass(frozen=True)
class Recovery:
    """What came of a record that a dead process left.

    Attributes:
        record: the record.
        problem: why it is still there; None: its GPU is reset, and it is removed.
    """

    record: Record
    problem: str | None


def left_behind() -> tuple[Record, ...]:
    """The records whose owner is dead. Changes nothing.

    Raises:
        GpuError: the folder of the records cannot be used.
    """
    return tuple(record for record in read_records()[0] if not record.owner.lives())


def recover() -> tuple[Recovery, ...]:
    """Reset each GPU that a dead process left set, and remove its record. For the start of jobs and commands.

    Records of a GPU that a living process has taken since, or of another boot, are removed without a word.

    Raises:
        GpuError: the folder of the records cannot be used.
    """
    dead = left_behind()
    for uuid in set(recorded_uuids()) - {record.uuid for record in dead}:
        with page(uuid):  # removes what a writer that was killed left
            pass
    return tuple(recovery for record in dead if (recovery := _recovered(record)) is not None)


def reset_gpu(gpu: Gpu, *, power_limit: bool = False, force: bool = False) -> tuple[Record, ...]:
    """Reset the clocks of `gpu`, with what the records of dead owners tell of; gives and removes these.

    Args:
        gpu: any GPU, held or not.
        power_limit: set its power limit back to the default as well.
        force: reset it also where a process holds it that lives, or may do so; the record of one that is seen to live
            stays.

    Raises:
        GpuHeld: a process that lives holds it, and that is not forced.
        GpuError: it could not be reset, or a record cannot be removed.
    """
    if not gpu.keeps_settings:
        _reset(gpu, (), power_limit=power_limit)
        return ()
    with page(gpu.uuid) as opened:
        other = holder(opened)
        if other is not None and not force:
            raise GpuHeld(f"{held_text(other)}, or reset it with --force")
        left = tuple(record for record in opened.read()[0] if not record.owner.lives_here())
        _reset(gpu, left, power_limit=power_limit)
        for record in left:
            opened.remove(record)
    return left


def _reset(gpu: Gpu, left: Sequence[Record], *, power_limit: bool) -> None:
    for record in left:
        if record.owner.is_of_this_boot():
            undo(gpu, record)
    gpu.reset_clocks()
    if power_limit:
        gpu.reset_power_limit()


def _record(gpu: Gpu, owner: Owner, hold: str, *, power_limit: bool) -> Record:
    """What is written of a GPU, before it is known which of its settings can be set back."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Record(gpu.text, gpu.uuid, gpu.name, hold, since, True, power_limit, None, owner)


def _take(gpu: Gpu, record: Record, taken: list[tuple[Gpu, Record]]) -> None:
    """Take one GPU, and add it to `taken`."""
    if not gpu.keeps_settings:
        taken.append((gpu, _with_what_can_be_set_back(gpu, record)))
        return
    with page(record.uuid) as opened:
        _refuse_if_held(opened, record)
        for dead in opened.read()[0]:
            if dead.owner.is_of_this_boot():
                undo(gpu, dead)
        complete = _with_what_can_be_set_back(gpu, record)
        taken.append((gpu, complete))  # before it is written: an interrupt may come in between
        opened.write(complete)
        _remove_dead(opened, record.hold)


def _with_what_can_be_set_back(gpu: Gpu, record: Record) -> Record:
    """Reset the clocks, read the power limit; what of that is not supported cannot be set either."""
    try:
        gpu.reset_clocks()
    except GpuNotSupported:
        record = replace(record, sets_clock=False)
    if not record.sets_power_limit:
        return record
    try:
        return replace(record, power_limit_w=float(gpu.power_limit_w()))
    except (GpuNotSupported, GpuNotPermitted):
        return replace(record, sets_power_limit=False)


def _refuse_if_held(opened: Page, record: Record) -> None:
    other = holder(opened)
    if other is not None and other.owner == record.owner:
        raise GpuHeld(f"GPU {record.gpu} ({record.name}): this process has it already; name each GPU once")
    if other is not None:
        raise GpuHeld(held_text(other))
    problems = opened.read()[1]
    if problems:
        raise GpuError(f"GPU {record.gpu}: whether it is free cannot be told: {problems[0]}")


def held_text(record: Record) -> str:
    """By whom a GPU is held, and what to do."""
    return (
        f"GPU {record.gpu} ({record.name}): {record.owner} has set its clocks since {record.since}; wait for its end, "
        "end it, or choose another GPU"
    )


def _remove_dead(opened: Page, hold: str) -> None:
    for dead in opened.read()[0]:
        if dead.hold != hold:
            with suppress(GpuError):  # of another user: it is passed over from now on, as this process lives
                opened.remove(dead)


def _leave(taken: Sequence[tuple[Gpu, Record]], guardian: Guardian | None) -> None:
    """Set all back; raise what failed when the guardian is gone."""
    failures = for_each(release, [(gpu, record) for gpu, record in taken if gpu.keeps_settings])
    # One after the other: simulated GPUs may share a clock, and so depend on the order.
    failures += in_turn(undo, [(gpu, record) for gpu, record in taken if not gpu.keeps_settings])
    if guardian is not None:
        guardian.dismiss()
    if failures:
        said = "; ".join(f"{record.gpu}: {error}" for record, error in failures)
        raise GpuError(f"not reset: {said}; when that is mended, run `planner reset`") from failures[0][1]


def _recovered(record: Record) -> Recovery | None:
    """What came of a dead owner's record; None: there was nothing to reset."""
    try:
        if not record.owner.is_of_this_boot():
            with page(record.uuid) as opened:
                opened.remove(record)
            return None
        with open_gpu(record.gpu) as gpu:
            _refuse_another(gpu, record)
            return Recovery(record, None) if release(gpu, record) else None
    except GpuError as error:
        return Recovery(record, str(error))


def _refuse_another(gpu: Gpu, record: Record) -> None:
    if gpu.uuid != record.uuid:
        raise GpuError(f"GPU {record.gpu}: is {gpu.uuid}, not {record.uuid} as its record says; remove that file")
