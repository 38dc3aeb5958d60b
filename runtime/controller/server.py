"""The controller: one thread that looks at what ranks want, and sets their GPUs.

It goes round: who has come, said something or ended; what has every word changed to; one GPU is set, or, where none is
to be, one is read; a sign of life for every rank. After each call of the driver, which takes milliseconds, it looks at
all again, so that the next call is for what is wanted then.

What it does when processes end: that GPU is reset at once when a rank does, all GPUs when the launcher does, upon
which it ends; and it ends when the last rank is gone. Signals that end processes politely do not end it, as launchers
send them to all that they know while ranks still run. Its own end, however it comes, is what its guardian waits for.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.runtime.controller.hold import Hold, shared
from perseus_planner.runtime.controller.protocol import Dwell, Leave, Left
from perseus_planner.runtime.controller.scheduler import JUDGED, Pacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.processes import Watched
    from perseus_planner.runtime.controller.arrivals import Arrivals
    from perseus_planner.runtime.controller.rank import Rank

TOGETHER_NS = 10_000_000_000
"""From the first hello until GPUs are taken at the latest; whoever comes later has its GPU taken apart."""

ALONE_NS = 60_000_000_000
"""How long it waits for a first hello."""

_BUSY_S, _IDLE_S = 100e-6, 1e-3  #: between two looks
_BUSY_NS = 1_000_000_000  #: since a word has changed
_LOOK_NS = 100_000_000  #: between looks at what the kernel does not tell of


class Controller:
    """Serves the ranks of one node.

    Args:
        arrivals: where they connect.
        ranks: how many there are.
        max_changes_per_s: of all their GPUs together.
        starter: the process that has started this one, without which no rank comes; None: some other one.

    Raises:
        UsageError: that is no rate.
    """

    def __init__(
        self, arrivals: Arrivals, ranks: int, max_changes_per_s: float, starter: Watched | None = None
    ) -> None:
        self._arrivals, self._count, self._starter = arrivals, ranks, starter
        self._pacing: Pacing[Rank] = Pacing(max_changes_per_s)
        self._waiting: list[Rank] = []  #: that have said hello
        self._attached: dict[Rank, Hold] = {}  #: whose GPUs are held
        self._first_ns: int | None = None  #: when the first said hello
        self._has_taken = False
        self._is_over = False
        self._has_done = False  #: a GPU was set or read: there may be another one
        self._begun_ns = self._changed_ns = self._looked_ns = time.monotonic_ns()

    def run(self) -> None:
        """Serve until no rank is left."""
        try:
            while not self._is_over:
                self._turn()
        except BaseException as error:
            self._end(f"the clock controller of this node has failed: {error!r}")
            raise
        finally:
            self._arrivals.close()

    def _turn(self) -> None:
        ready = self._ready()
        now_ns = time.monotonic_ns()
        self._serve(ready, now_ns)
        if self._waiting and self._is_complete(now_ns):
            self._take()
        self._look(time.monotonic_ns())  # to take GPUs may have lasted
        self._has_done = self._set_one(time.monotonic_ns()) or self._read_one()
        self._beat()
        if self._first_ns is None:
            is_left = self._starter is not None and self._starter.has_ended()
            self._is_over = is_left or now_ns - self._begun_ns > ALONE_NS
        elif not self._waiting and not self._attached:
            self._is_over = True

    def _ready(self) -> set[int]:
        """What is readable, after a wait that is short."""
        is_calm = time.monotonic_ns() - self._changed_ns > _BUSY_NS
        timeout_s = 0.0 if self._has_done else _IDLE_S if is_calm else _BUSY_S
        descriptors = self._arrivals.descriptors()
        for rank in self._ranks():
            descriptors.append(rank.peer.fileno())
            descriptors += [each.descriptor for each in rank.watched if each.descriptor is not None]
        return set(select.select(descriptors, [], [], timeout_s)[0])

    def _serve(self, ready: set[int], now_ns: int) -> None:
        """Those who have come, have ended, or have said something."""
        is_to_look = now_ns - self._looked_ns > _LOOK_NS
        if not ready and not is_to_look:
            return
        if is_to_look:
            self._looked_ns = now_ns
        for rank in self._ranks():
            if _has_ended(rank.process, ready, is_to_look):
                self._depart(rank)
            elif rank.launcher is not None and _has_ended(rank.launcher, ready, is_to_look):
                self._end_with(rank.launcher)
                return
            elif rank.peer.fileno() in ready:
                self._hear(rank)
        for rank in self._arrivals.serve(ready, now_ns):
            self._welcome(rank, now_ns)

    def _welcome(self, rank: Rank, now_ns: int) -> None:
        if len(self._ranks()) >= self._count:
            rank.refuse(GpuError(f"the {self._count} ranks of this node are here; rank {rank.hello.rank} is one more"))
            rank.close()
            return
        self._waiting.append(rank)
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        if rank.launcher is not None and rank.launcher.has_ended():  # before it was watched
            self._end_with(rank.launcher)

    def _hear(self, rank: Rank) -> None:
        try:
            heard = rank.peer.heard()
        except EOFError:
            self._depart(rank)
            return
        except ValueError as error:
            self._send_away(rank, str(error))
            return
        if heard is None:
            return
        message, descriptor = heard
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, Leave):
            self._depart(rank, answers=True)
        elif isinstance(message, Dwell):
            self._dwell(rank, message.min_dwell_s)
        else:
            self._send_away(rank, f"{type(message).__name__} is not said by a rank, or not now")

    def _send_away(self, rank: Rank, why: str) -> None:
        rank.refuse(GpuError(f"the clock controller does not understand rank {rank.hello.rank}: {why}"))
        self._depart(rank)

    def _dwell(self, rank: Rank, min_dwell_s: float) -> None:
        rank.min_dwell_s = min_dwell_s
        if rank in self._attached:
            self._pacing.dwell(rank, min_dwell_s)

    def _is_complete(self, now_ns: int) -> bool:
        """Whether those who wait are all that are waited for."""
        assert self._first_ns is not None  # somebody waits
        return self._has_taken or len(self._waiting) == self._count or now_ns - self._first_ns > TOGETHER_NS

    def _take(self) -> None:
        """Attach those who wait; refuse those for whom that is not possible."""
        self._has_taken = True
        self._beat()
        ranks, self._waiting = self._waiting, []
        ranks = [rank for rank in ranks if self._opens(rank)]
        refused = shared([*self._attached, *ranks])
        for rank in ranks:
            if rank in refused:
                _turn_away(rank, refused[rank])
        ranks = [rank for rank in ranks if rank not in refused]
        try:
            hold = Hold(ranks)
        except GpuError as error:
            for rank in ranks:
                _turn_away(rank, error)
            return
        for rank in ranks:
            self._attach(rank, hold)

    def _opens(self, rank: Rank) -> bool:
        try:
            rank.open()
        except GpuError as error:
            _turn_away(rank, error)
            return False
        return True

    def _attach(self, rank: Rank, hold: Hold) -> None:
        self._attached[rank] = hold
        self._pacing.add(rank, rank.min_dwell_s)
        try:
            rank.attach()
        except GpuError as error:
            rank.refuse(error)
            self._depart(rank)
            return
        rank.read(time.monotonic_ns(), 0)

    def _look(self, now_ns: int) -> None:
        """See what every rank wants."""
        for rank in self._attached:
            look = rank.places.look(rank.page.word[0])
            if look is None:
                continue
            self._changed_ns = now_ns
            if look.is_new_iteration:
                rank.due_ns = now_ns
            if not rank.is_set:
                continue
            for value in (*look.passed, look.value):
                self._pacing.ask(rank, value, look.place, now_ns)
            if self._pacing.is_too_slow(rank):
                self._fail(rank, _too_slow(rank.hello.gpu))

    def _set_one(self, now_ns: int) -> bool:
        """Set the GPU that is to be set now, if one is."""
        granted = self._pacing.grant(now_ns)
        if granted is None:
            return False
        rank, wanted = granted
        try:
            rank.tell(rank.change(wanted))
        except GpuError as error:
            self._fail(rank, str(error))
        return True

    def _read_one(self) -> bool:
        """Read a GPU of which a reading is due, if there is one."""
        for rank in self._attached:
            if rank.due_ns is not None:
                rank.read(rank.due_ns, self._pacing.overtaken(rank))
                return True
        return False

    def _fail(self, rank: Rank, why: str) -> None:
        self._pacing.withdraw(rank)
        rank.fail(why, rank.reset())

    def _depart(self, rank: Rank, *, answers: bool = False) -> None:
        """A rank goes: its GPU is reset."""
        problem = None
        hold = self._attached.pop(rank, None)
        if hold is None:
            self._waiting.remove(rank)
        else:
            if answers:
                rank.read(time.monotonic_ns(), self._pacing.overtaken(rank))
            self._pacing.remove(rank)
            problem = hold.leave(rank)
        if answers:
            rank.tell(Left(problem))
        rank.close()

    def _end_with(self, launcher: Watched) -> None:
        self._end(f"process {launcher.pid}, which launched this job, has ended: all GPUs are reset")

    def _end(self, why: str) -> None:
        """Reset all, tell all, and end."""
        self._is_over = True
        problems = [problem for hold in set(self._attached.values()) if (problem := hold.release()) is not None]
        for rank in self._ranks():
            rank.fail(why, "; ".join(problems) or None)
            rank.close()
        self._waiting, self._attached = [], {}

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        for rank in self._ranks():
            rank.page.alive_ns[0] = now_ns
            rank.tell_failure()

    def _ranks(self) -> Sequence[Rank]:
        return [*self._attached, *self._waiting]


def _has_ended(process: Watched, ready: set[int], is_to_look: bool) -> bool:
    return is_to_look and process.has_ended() if process.descriptor is None else process.descriptor in ready


def _turn_away(rank: Rank, error: GpuError) -> None:
    rank.refuse(error)
    rank.close()
    if rank.gpu is not None:
        rank.gpu.close()


def _too_slow(gpu: str) -> str:
    return (
        f"GPU {gpu}: more than half of the last {JUDGED} changes of its clock came when the one before had not been "
        "made yet; make the plan with fewer changes (--max-changes, --min-dwell), or allow more changes per second"
    )
