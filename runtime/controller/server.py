"""The clock controller of a node: one thread that looks at what ranks request, and sets their GPUs.

Each turn of its loop takes in ranks that attach, detach or end; looks at every clock request; sets
one GPU or, if none is to be set, reads one. A call of the driver takes milliseconds, so all
requests are looked at again after each call, and the next call is for what is wanted then. Every
few milliseconds a turn also writes a sign of life for every rank.

In most turns nothing has changed, so such a turn does little: it reads one number of each rank.
Descriptors are registered only when there are others.

When the changes of a GPU cannot keep up, its rank is told, which goes on with fewer. When a GPU
cannot be set, it is reset, and set again after a pause (`backoff`); so is one whose iterations have
no change left to spare. When a rank ends, its GPU is reset at once. When the launcher ends, all
GPUs are reset and the controller ends. It also ends when the last rank has left. SIGINT, SIGTERM
and SIGHUP do not end it, because launchers send them to every process they know while ranks still
run. If the controller itself ends, for any reason, its guardian resets the GPUs.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError
from perseus_planner.runtime.controller.protocol import (
    DetachReply,
    DetachRequest,
    Overload,
)
from perseus_planner.runtime.controller.rank import LeaseGroup, Rank, shared_gpu_errors
from perseus_planner.runtime.controller.scheduler import JUDGED, ChangeScheduler

if TYPE_CHECKING:
    from perseus_planner.base.processes import WatchedProcess
    from perseus_planner.runtime.controller.protocol import Handshakes

LEASE_WAIT_NS = 10_000_000_000
"""How long to wait for the other ranks, after the first attach request, before GPUs are leased
without them.
"""

ALONE_NS = 60_000_000_000
"""How long to wait for the first attach request."""

_LEAST_PAUSE_S = 100e-6
_LONGEST_PAUSE_S = 2e-3
"""The pause between two turns, while ranks are attached: at least and at most."""
_IDLE_PAUSE_S = 4e-3  #: the same while no rank wants anything else; less than a call of a driver
_UNATTACHED_S = 0.02  #: the same while none is, so that only the sockets matter
#: of the shortest recent time between two changes of what a rank wants: how late one may be seen
_SHARE = 0.1
_JUDGED_GAPS = 64  #: how many of these times count
_IDLE_NS = 1_000_000_000  #: without a change after which these times no longer count
_POLL_NS = 100_000_000  #: between two looks at processes whose end the kernel does not report
_NOTHING: Set[int] = frozenset()
_MOST_EVENTS = 32  #: that one look at descriptors returns; the others are returned by the next
_SOCKETS_NS = 2_000_000  #: between two looks at descriptors, where turns follow faster
_LIFE_NS = 5_000_000  #: between two signs of life, of which ranks miss none for seconds


class Controller:
    """Serves the ranks of one node.

    Args:
        handshakes: Where ranks connect.
        ranks: How many ranks the node has.
        max_changes_per_s: Rate of the clock changes of all their GPUs together.
        starter: The process that started the controller; if it ends before the first rank attaches,
            so does the controller. None if any process may have.

    Raises:
        UsageError: If the rate is too low.
    """

    def __init__(
        self,
        handshakes: Handshakes,
        ranks: int,
        max_changes_per_s: float,
        starter: WatchedProcess | None = None,
    ) -> None:
        self._handshakes = handshakes
        self._count = ranks
        self._starter = starter
        self._scheduler: ChangeScheduler[Rank] = ChangeScheduler(max_changes_per_s)
        self._waiting: list[Rank] = []  #: not attached yet
        self._attached: dict[Rank, LeaseGroup] = {}
        self._first_ns: int | None = None  #: when the first attach request arrived
        self._has_leased = False
        self._is_over = False
        self._was_active = False  #: the last turn set or read a GPU, so there may be more to do
        #: recent times between two changes of what a rank wants
        self._gaps_s: deque[float] = deque(maxlen=_JUDGED_GAPS)
        self._pause_s = _LONGEST_PAUSE_S
        self._poller: select.epoll | None = None  #: of all descriptors; None if there are others
        self._changed_ns = 0  #: when a rank wanted something else last
        self._clock_due_ns: int | None = None  #: when the next clock by time is due
        self._reset_ns = 0  #: when a rank wanted a reset last
        self._begun_ns = time.monotonic_ns()
        self._polled_ns = self._begun_ns
        self._looked_ns = self._begun_ns  #: at descriptors
        self._due_ns: dict[Rank, int] = {}  #: those whose sample is due, the first ones first
        self._power_due_s = 0.0  #: when the first of all power sensors is to be read
        self._failed: set[Rank] = set()  #: those whose GPU is set again after a pause
        self._signed_ns = 0  #: when the last sign of life was written

    def run(self) -> None:
        """Serve until no rank is left."""
        try:
            while not self._is_over:
                self._turn()
        except BaseException as error:
            self._end(f"the clock controller of this node has failed: {error!r}")
            raise
        finally:
            self._handshakes.close()

    def _turn(self) -> None:
        ready = self._wait()
        now_ns = time.monotonic_ns()
        # Descriptors are looked at now and then even if none is readable, as some ends are not told
        # by any.
        if ready or now_ns - self._polled_ns > _POLL_NS:
            self._serve(ready, now_ns)
            # All GPUs are reset and given back: a change that was to come is not made any more.
            if self._is_over:
                return
        # GPUs are leased together, so the first ranks wait for the others.
        if self._waiting and self._is_complete(now_ns):
            self._attach_waiting()
            now_ns = time.monotonic_ns()  # leasing GPUs may have taken a while
        # Requests before settings: a change that is overtaken now need not be made.
        self._look_at_requests(now_ns)
        if self._failed:
            self._resume_failed(now_ns)
        # One call of the driver at most in a turn: it takes milliseconds, in which nobody looks.
        self._was_active = self._set_one(now_ns) or self._sample_one(now_ns)
        # Nobody has wanted anything for long, so looking less often costs nothing.
        if self._gaps_s and now_ns - self._changed_ns > _IDLE_NS:
            self._gaps_s.clear()
            self._pause_s = _IDLE_PAUSE_S
        if now_ns - self._signed_ns > _LIFE_NS:
            self._write_sign_of_life()
        # Without any rank, the job may have ended before it began.
        if self._first_ns is None:
            is_abandoned = self._starter is not None and self._starter.has_ended()
            self._is_over = is_abandoned or now_ns - self._begun_ns > ALONE_NS
        elif not self._ranks():
            self._is_over = True

    def _wait(self) -> Set[int]:
        """Wait briefly, and return the descriptors that are readable.

        Requests come through memory, which wakes nobody: the pause is a small part of the time
        between them.
        """
        timeout_s = 0.0
        pause_s = self._pause_s
        # Until the rate allows another change, what is seen earlier is not set earlier. What ranks
        # pass meanwhile is known, unless they want resets, which no program has.
        now_ns = time.monotonic_ns()
        until_allowed_s = (self._scheduler.allowed_ns - now_ns) / 1e9
        if until_allowed_s > pause_s and now_ns - self._reset_ns > _IDLE_NS:
            pause_s = min(until_allowed_s, _IDLE_PAUSE_S)
        # Awake in time for the next clock by time.
        if self._clock_due_ns is not None:
            left_s = (self._clock_due_ns - now_ns) / 1e9
            pause_s = min(pause_s, max(left_s, _LEAST_PAUSE_S))
        # Nothing is set yet, so only messages matter, and the poller wakes for them.
        if not self._attached:
            timeout_s = _UNATTACHED_S
        elif not self._was_active and pause_s >= _LONGEST_PAUSE_S:
            timeout_s = pause_s
        elif not self._was_active:
            time.sleep(pause_s)  # a poller takes whole milliseconds
        now_ns = time.monotonic_ns()
        # Ranks come and go seldom: looking at descriptors costs more than a whole turn.
        if not timeout_s and now_ns - self._looked_ns < _SOCKETS_NS:
            return _NOTHING
        self._looked_ns = now_ns
        if self._poller is None:
            self._poller = self._registered()
        ready = self._poller.poll(timeout_s, _MOST_EVENTS)
        return {descriptor for descriptor, _ in ready} if ready else _NOTHING

    def _registered(self) -> select.epoll:
        """Return a poller of the descriptors that there are now."""
        descriptors = self._handshakes.descriptors()
        for rank in self._ranks():
            descriptors.append(rank.channel.fileno())
            descriptors += [
                process.descriptor for process in rank.watched if process.descriptor is not None
            ]
        poller = select.epoll()  # unlike poll, it costs the same for any number of descriptors
        for descriptor in set(descriptors):
            poller.register(descriptor, select.EPOLLIN)
        return poller

    def _serve(self, ready: Set[int], now_ns: int) -> None:
        """Take in new ranks, ended processes and messages."""
        is_poll_due = now_ns - self._polled_ns > _POLL_NS
        self._poller = None  # whoever comes or goes has other descriptors
        if is_poll_due:
            self._polled_ns = now_ns
        # An end first: what has ended has nothing more to say.
        for rank in self._ranks():
            if _has_ended(rank.process, ready, is_poll_due):
                self._detach(rank)
            elif rank.launcher is not None and _has_ended(rank.launcher, ready, is_poll_due):
                self._end_with(rank.launcher)
                return
            elif rank.channel.fileno() in ready:
                self._receive(rank)
        new_ranks = [Rank(*new_rank) for new_rank in self._handshakes.serve(ready, now_ns)]
        added = [rank for rank in new_ranks if self._add(rank, now_ns)]
        # Once all of them are taken in, as who is not would not be told.
        for rank in added:
            if rank.launcher is not None and rank.launcher.has_ended():  # before it was watched
                self._end_with(rank.launcher)
                return

    def _add(self, rank: Rank, now_ns: int) -> bool:
        """Have a new rank wait for its GPU; turn it away and return False if it is one too many."""
        # One more than were announced would share a GPU with another.
        if len(self._ranks()) >= self._count:
            number = rank.attach_request.rank
            count = f"all {self._count} ranks of this node"
            _turn_away(rank, GpuError(f"{count} have attached; rank {number} is one too many"))
            return False
        self._waiting.append(rank)
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        return True

    def _receive(self, rank: Rank) -> None:
        try:
            received = rank.channel.receive()
        except EOFError:
            self._detach(rank)
            return
        except ValueError as error:
            self._reject(rank, str(error))
            return
        if received is None:
            return
        message, descriptor = received
        # A rank sends no descriptor after its first message.
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, DetachRequest):
            self._detach(rank, is_requested=True)
        else:
            self._reject(rank, f"a rank does not send {type(message).__name__} at this point")

    def _reject(self, rank: Rank, reason: str) -> None:
        who = f"rank {rank.attach_request.rank}"
        rank.refuse(GpuError(f"the clock controller does not understand {who}: {reason}"))
        self._detach(rank)

    def _is_complete(self, now_ns: int) -> bool:
        """Whether to attach the waiting ranks now."""
        assert self._first_ns is not None  # a rank is waiting
        return (
            self._has_leased
            or len(self._waiting) == self._count
            or now_ns - self._first_ns > LEASE_WAIT_NS
        )

    def _attach_waiting(self) -> None:
        """Attach the ranks that wait, and refuse those that cannot be attached."""
        self._has_leased = True
        self._poller = None
        # Leasing takes seconds, in which there is none.
        self._write_sign_of_life()
        waiting = self._waiting
        self._waiting = []
        # All GPUs are opened first, so that ranks that share one are told apart from those that do
        # not.
        opened = [rank for rank in waiting if _is_open(rank)]
        errors = shared_gpu_errors([*self._attached, *opened])
        ranks = [rank for rank in opened if rank not in errors]
        try:
            # One lease for all, so that no rank of a node trains without the others.
            group = LeaseGroup(ranks)
        except GpuError as error:
            errors |= dict.fromkeys(ranks, error)
        for rank in opened:
            # Also those of a lease that failed: all of its ranks.
            if rank in errors:
                _turn_away(rank, errors[rank])
                continue
            self._attached[rank] = group
            self._scheduler.add(rank)
            try:
                rank.attach()
            except GpuError as error:
                rank.refuse(error)
                self._detach(rank)
            else:
                # The first sample tells where energy begins.
                rank.sample(time.monotonic_ns(), 0)
                self._power_due_s = 0.0

    def _look_at_requests(self, now_ns: int) -> None:
        has_changed = False
        for rank in self._attached:
            request = rank.poll_request(now_ns)
            if request is None:
                continue
            # That a computation has begun is often told right after its clock is asked for.
            if request.is_change and not request.has_begun:
                self._note_gap(rank, now_ns)
                has_changed = True
            if request.is_new_iteration:
                # Ranks are sampled once in an iteration, when it begins.
                self._due_ns[rank] = now_ns
            elif request.position is None:
                self._reset_ns = now_ns
            # A rank whose GPU has failed keeps its requests, and nothing is set.
            if not rank.is_set:
                continue
            if request.is_new_program:
                self._scheduler.judge_anew(rank)
            asked_ns = now_ns if request.due_ns is None else request.due_ns
            # What was passed unseen counts as requested: it tells whether the node keeps up.
            for value in (*request.skipped, request.value):
                self._scheduler.request(rank, value, request.position, asked_ns)
            if self._scheduler.is_overloaded(rank):
                self._relieve(rank, is_new_iteration=request.is_new_iteration)
        dues_ns = [rank.due_ns for rank in self._attached if rank.due_ns is not None]
        self._clock_due_ns = min(dues_ns, default=None)
        if has_changed:
            # A turn follows each change early enough, however often ranks want another value.
            shortest_s = min(self._gaps_s)
            self._pause_s = min(max(_SHARE * shortest_s, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)

    def _relieve(self, rank: Rank, *, is_new_iteration: bool) -> None:
        """Have a rank whose changes cannot keep up go on with fewer, or reset its GPU if it has
        one clock only.
        """
        changes = rank.changes_per_iteration
        if changes == 0:
            self._fail(rank, _overload_text(rank.attach_request.gpu))
        elif is_new_iteration:  # so those of the one before are known
            rank.send(Overload(int(self._scheduler.made_share(rank) * changes)))
            self._scheduler.judge_anew(rank)

    def _note_gap(self, rank: Rank, now_ns: int) -> None:
        """Note since when a rank has wanted what it wants no more."""
        self._gaps_s.append((now_ns - rank.changed_ns) / 1e9)
        rank.changed_ns = now_ns
        self._changed_ns = now_ns

    def _set_one(self, now_ns: int) -> bool:
        """Make the next change that is allowed now; return False if there is none."""
        taken = self._scheduler.take(now_ns)
        if taken is None:
            return False
        rank, change = taken
        try:
            rank.make(change)
        except GpuError as error:
            self._fail(rank, str(error))
        return True

    def _sample_one(self, now_ns: int) -> bool:
        """Read a GPU whose sample is due, or its power; return False if there is none."""
        if self._due_ns:
            # Samples first, as iterations wait for their energy.
            rank = next(iter(self._due_ns))
            rank.sample(self._due_ns.pop(rank), self._scheduler.overtaken(rank))
            return True
        if now_ns / 1e9 < self._power_due_s or not self._attached:
            return False
        was_read = any(rank.watch_power(time.monotonic_ns() / 1e9) for rank in self._attached)
        self._power_due_s = min(rank.power_due_s for rank in self._attached)
        return was_read

    def _fail(self, rank: Rank, reason: str) -> None:
        # It is tried again after a pause, since drivers recover.
        self._failed.add(rank)
        self._scheduler.cancel(rank)
        problem = rank.reset()
        rank.backoff.fail(time.monotonic_ns() / 1e9)
        rank.fail(reason, problem)

    def _resume_failed(self, now_ns: int) -> None:
        """Set GPUs again whose pause after a failure is over, if they can be reset."""
        for rank in tuple(self._failed):
            if rank.gpu_to_set is None or not rank.backoff.is_due(now_ns / 1e9):
                continue
            # Only a GPU that can be reset is set again.
            if rank.reset() is None:
                self._failed.remove(rank)
                rank.resume()
            else:
                rank.backoff.fail(now_ns / 1e9)

    def _detach(self, rank: Rank, *, is_requested: bool = False) -> None:
        """Reset the GPU of a rank that leaves or has ended, and close the connection."""
        self._poller = None
        problem = None
        group = self._attached.pop(rank, None)
        self._due_ns.pop(rank, None)
        self._failed.discard(rank)
        if group is None:
            self._waiting.remove(rank)
        else:
            # The last sample closes the last iteration; a rank that has ended reads none.
            if is_requested:
                rank.sample(time.monotonic_ns(), self._scheduler.overtaken(rank))
            self._scheduler.remove(rank)
            problem = group.leave(rank)
        if is_requested:
            rank.send(DetachReply(problem))
        rank.close()

    def _end_with(self, launcher: WatchedProcess) -> None:
        self._end(f"process {launcher.pid}, which launched this job, has ended: all GPUs are reset")

    def _end(self, reason: str) -> None:
        """Reset all GPUs, tell all ranks, and end."""
        self._is_over = True
        # GPUs first: whoever reads the message may start anew at once.
        problems = [group.release() for group in set(self._attached.values())]
        for rank in self._ranks():
            rank.fail(reason, "; ".join(filter(None, problems)) or None)
            rank.close()
        self._waiting = []
        self._attached = {}

    def _write_sign_of_life(self) -> None:
        now_ns = time.monotonic_ns()
        self._signed_ns = now_ns
        for rank in self._ranks():
            rank.shared.alive_ns[0] = now_ns
            rank.send_news()

    def _ranks(self) -> Sequence[Rank]:
        return [*self._attached, *self._waiting]


def _has_ended(process: WatchedProcess, ready: Set[int], is_poll_due: bool) -> bool:
    return (
        is_poll_due and process.has_ended()
        if process.descriptor is None
        else process.descriptor in ready
    )


def _is_open(rank: Rank) -> bool:
    """Open the GPU of a rank; turn the rank away and return False if that fails."""
    try:
        rank.open()
    except GpuError as error:
        _turn_away(rank, error)
        return False
    return True


def _turn_away(rank: Rank, error: GpuError) -> None:
    rank.refuse(error)
    rank.close()
    if rank.gpu is not None:
        rank.gpu.close()


def _overload_text(gpu: str) -> str:
    return (
        f"GPU {gpu}: more than half of the last {JUDGED} changes of its clock were requested "
        "before the previous one had been made, although its iterations have one clock; allow "
        "more changes per second"
    )
