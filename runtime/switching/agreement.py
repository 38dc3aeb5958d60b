"""Brings all ranks of a job to a new plan at the same iteration, through the job's torch.distributed store.

Keys of the store:

- `state`: five numbers (`AgreedState`); the one key on which several ranks act, changed by compare_set alone.
- `versions`: a counter. `plans/V`: a plan. `answers/V/R`: rank R can run it. `refused/V`: why a rank cannot.

The way of a plan: its proposer writes it down and makes it the newest, which closes an older one that was still open.
Every rank that sees it checks it and answers. When all have said yes, the proposer decides that it begins with
iteration `cleared + 1`. A refusal closes it, and so do `patience_s` without all answers.

Before a rank says yes it makes a promise: it begins no iteration beyond a limit before it knows what became of the
plan. It also raises `cleared` to that limit or further, and may raise both while the plan is open. Hence:

- All ranks take a plan at the same iteration. A decision needs everyone's yes, and is for an iteration after `cleared`,
  so after everyone's limit. `state` is one key whose changes have one order, so a rank that gets a later limit
  afterwards has read the decision. Every rank knows the decision before it begins the iteration that it is for.
- One decision in `state` is enough: the next one needs a yes of every rank, so every rank has read this one.
- A plan that is not the newest, or was closed, is never decided: a decision is a compare_set from a state in which the
  plan is the newest, and open.
- No rank waits for another. If a rank is late or stopped, it does not answer, and the plan begins later or never. A
  rank at its limit is told so, and goes on without clocks. A rank that has promised nothing has no limit.
- Without the store, a rank that has promised nothing keeps its plan: nothing is decided without its yes. A rank that
  has promised goes on to its limit; the others may have taken the new plan after that.
- If a proposer dies before it decides, its plan stays open until a newer one is proposed, and never begins.

A look takes one operation of the store while nothing is open. Each proposal costs every rank four more (read the plan,
raise `cleared`, answer, delete the answer) and its proposer five (count, write, announce, decide, delete), besides two
for each of its looks while it is open. No operation waits for a key.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.runtime.switching.shared_state import SharedState, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

LONGEST_PLAN_BYTES = 4 << 20
"""Longest compressed plan: a TCPStore drops a rank that sends 8 MiB at once, and the whole job with it."""

_MAX_NAMED = 4  #: of the ranks that have not answered
_SUPERSEDED = "a newer plan was proposed before this one was decided"


@dataclass(frozen=True)
class Acceptance:
    """All ranks take the plan.

    Attributes:
        version: Number of the plan in this job.
        iteration: The first iteration that runs by it.
    """

    version: int
    iteration: int


@dataclass(frozen=True)
class Rejection:
    """The plan is not taken, for the reason in `text`; if the store was lost, it may not be known whether it is."""

    text: str


class Proposal:
    """A plan that this rank has proposed."""

    def __init__(self) -> None:
        self._outcome: Acceptance | Rejection | None = None
        self._settled = threading.Event()

    @property
    def outcome(self) -> Acceptance | Rejection | None:
        """What became of the plan; None while it is open."""
        return self._outcome

    def settle(self, outcome: Acceptance | Rejection) -> None:
        """Set what became of the plan."""
        self._outcome = outcome
        self._settled.set()

    def wait(self, timeout_s: float) -> Acceptance | Rejection | None:
        """Wait for what becomes of the plan; return None if it is still open after `timeout_s` seconds."""
        self._settled.wait(timeout_s)
        return self._outcome


@dataclass(frozen=True)
class _OpenProposal:
    """A proposal of this rank that is in the store."""

    proposal: Proposal
    version: int
    deadline_s: float


class Agreement:
    """One rank's part in the agreement; version 1 is the plan that all ranks begin with.

    The training thread calls `may_begin` and `version_at`, one other thread looks, any thread proposes.

    Args:
        store: The same store for all ranks, under a prefix that nothing else uses.
        rank: This rank, from 0.
        ranks: Number of ranks.
        accept: Called with a version and its plan, on the thread that looks; returns None if this rank can run it, or
            the reason why not. An exception is a refusal too.
        patience_s: How long this rank waits for all answers to its proposal, in seconds.
        now_s: A clock, in seconds.

    Attributes:
        lost: Why the store can no longer be used, and what follows; None while it can.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        accept: Callable[[int, bytes], str | None],
        *,
        patience_s: float = 60.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost: str | None = None
        self._store, self._rank, self._ranks = store, rank, ranks
        self._accept, self._patience_s, self._now_s = accept, patience_s, now_s
        self._state = SharedState(store)
        # Shared by the training thread and the one that looks; held for a few instructions.
        self._lock = threading.Lock()
        self._begun = -1
        self._limit: int | None = None
        self._decisions: tuple[tuple[int, int], ...] = ((0, 1),)  #: (since, version), in order
        self._promised = 0  #: the version whose outcome this rank must know before it passes its limit
        self._answered = 1
        self._answer: tuple[int, str] | None = None  #: a version, and the key to delete when it is closed
        self._queued: deque[tuple[Proposal, bytes]] = deque()
        self._own: _OpenProposal | None = None

    def may_begin(self, iteration: int) -> bool:
        """Whether this rank knows what `iteration` runs by; if not, the iteration must run without clocks."""
        return self.version_at(iteration) > 0

    def version_at(self, iteration: int) -> int:
        """Return the version that `iteration` runs by on all ranks; 0 if this rank does not know it.

        This begins the iteration. Iterations before the last one begun may be forgotten, and return 0.
        """
        with self._lock:
            if self._limit is not None and iteration > self._limit:
                return 0
            self._begun = max(self._begun, iteration)
            return next((version for since, version in reversed(self._decisions) if since <= iteration), 0)

    def propose(self, blob: bytes) -> Proposal:
        """Propose a plan to all ranks in the looks that follow; it closes what any rank has proposed before."""
        proposal, packed = Proposal(), zlib.compress(blob, 1)
        if len(packed) > LONGEST_PLAN_BYTES:
            text = (
                f"the plan has {len(packed)} bytes, compressed, and the job's store takes {LONGEST_PLAN_BYTES}; plan "
                "for fewer microbatches"
            )
            proposal.settle(Rejection(text))
        elif self.lost is not None:
            proposal.settle(Rejection(self.lost))
        else:
            self._queued.append((proposal, packed))
        return proposal

    def look(self, through: int) -> None:
        """Read what was decided, answer what was proposed, and advance this rank's own proposal.

        Args:
            through: Last of the iterations that this rank will begin soon.
        """
        if self.lost is None:
            try:
                self._round(through)
            except Exception as error:  # a failure in the background must not end the training
                self.lost = self._loss_text(error)
        if self.lost is not None:
            self._give_up(self.lost)

    def end(self) -> None:
        """Stop taking part, after the last look; open proposals of this rank are rejected."""
        self.lost = self.lost or "this rank has ended its part in the training"
        self._give_up(self.lost)

    def _round(self, through: int) -> None:
        if self._promised and self._state.seen.cleared < through:
            self._clear(through)
        else:
            self._state.look()
            self._follow()
        if self._queued:
            self._announce()
        elif self._own is not None:
            self._advance(self._own)
        if self._answer is not None and not self._state.seen.has_open(self._answer[0]):
            self._store.delete_key(self._answer[1])
            self._answer = None
        if self._state.seen.is_open and self._state.seen.newest > self._answered:
            self._consider(self._state.seen.newest, through)

    # Following decisions

    def _change(self, **fields: int) -> None:
        self._state.change(self._state.seen._replace(**fields))
        self._follow()

    def _follow(self) -> None:
        """Take over decisions from the state seen last."""
        state = self._state.seen
        with self._lock:
            if state.version != self._decisions[-1][1]:
                self._decisions = (*self._needed_before(state.since), (state.since, state.version))
            if not state.has_open(self._promised):
                self._promised, self._limit = 0, None
            elif self._limit is not None:
                self._limit = max(self._limit, state.cleared)

    def _needed_before(self, since: int) -> list[tuple[int, int]]:
        """Return the decisions by which iterations before `since` may still begin."""
        needed = [decision for decision in self._decisions if decision[0] < since]
        while len(needed) > 1 and needed[1][0] <= self._begun:
            del needed[0]
        return needed

    def _clear(self, through: int) -> None:
        """Raise `cleared` to `through`, unless the promised version is closed meanwhile."""
        while self._promised and self._state.seen.cleared < through:
            self._change(cleared=through)

    # Answering proposals

    def _consider(self, version: int, through: int) -> None:
        self._answered = version
        packed = read(self._store, f"plans/{version}")
        if packed is None:  # it was closed meanwhile
            return
        refusal = self._refusal(version, packed)
        if refusal is not None:
            self._answer_with(version, f"refused/{version}", f"rank {self._rank}: {refusal}")
        elif self._promise(version, through):
            self._answer_with(version, f"answers/{version}/{self._rank}", "yes")

    def _refusal(self, version: int, packed: bytes) -> str | None:
        try:
            return self._accept(version, zlib.decompress(packed))
        except Exception as error:  # raised by the caller's code, or by a plan from another source
            return f"{type(error).__name__}: {error}"

    def _promise(self, version: int, through: int) -> bool:
        """Set this rank's limit; return False if the plan is closed meanwhile."""
        with self._lock:
            self._limit = limit = max(self._begun, through)
            self._promised = version
        self._clear(limit)
        return self._promised == version

    def _answer_with(self, version: int, key: str, text: str) -> None:
        self._answer = version, key
        self._store.set(key, text)

    # Proposing

    def _announce(self) -> None:
        """Write the newest queued proposal to the store, and make it the newest of all ranks."""
        version = 1 + self._store.add("versions", 1)
        if self._own is not None:
            self._settle(self._own, Rejection(_SUPERSEDED))
        # Only after the operations that may fail, so that each proposal is always either queued or this rank's own.
        *older, (proposal, packed) = [self._queued.popleft() for _ in range(len(self._queued))]
        self._own = _OpenProposal(proposal, version, self._now_s() + self._patience_s)
        for superseded, _ in older:
            superseded.settle(Rejection(_SUPERSEDED))
        self._store.set(f"plans/{version}", packed)
        while self._state.seen.newest < version:
            self._change(newest=version, is_open=1)

    def _advance(self, own: _OpenProposal) -> None:
        """Decide or close this rank's plan if it is time to."""
        answers = [f"answers/{own.version}/{rank}" for rank in range(self._ranks)]
        if not self._state.seen.has_open(own.version):
            self._settle(own, Rejection(_SUPERSEDED))
        elif (refusal := read(self._store, f"refused/{own.version}")) is not None:
            self._close(own, refusal.decode())
        elif self._store.check(answers):
            self._decide(own)
        elif self._now_s() > own.deadline_s:
            self._close(own, self._silence_text(answers))

    def _decide(self, own: _OpenProposal) -> None:
        while self._state.seen.has_open(own.version):
            self._change(is_open=0, version=own.version, since=self._state.seen.cleared + 1)
        state = self._state.seen
        is_decided = state.version == own.version
        self._settle(own, Acceptance(own.version, state.since) if is_decided else Rejection(_SUPERSEDED))

    def _close(self, own: _OpenProposal, text: str) -> None:
        while self._state.seen.has_open(own.version):
            self._change(is_open=0)
        self._settle(own, Rejection(text))

    def _silence_text(self, answers: list[str]) -> str:
        silent = [rank for rank, key in enumerate(answers) if not self._store.check([key])]
        named = ", ".join(map(str, silent[:_MAX_NAMED])) + (" and others" if len(silent) > _MAX_NAMED else "")
        return f"no answer within {self._patience_s:.6g} s from rank{'s' * (len(silent) != 1)} {named}"

    def _settle(self, own: _OpenProposal, outcome: Acceptance | Rejection) -> None:
        self._own = None
        own.proposal.settle(outcome)
        self._store.delete_key(f"plans/{own.version}")

    # Without the store

    def _loss_text(self, error: Exception) -> str:
        first_line = str(error).partition("\n")[0]
        text = (
            f"the job's store can no longer be used ({first_line or type(error).__name__}): no new plan will be taken"
        )
        if not self._promised:
            return text
        return (
            f"{text}; it is not known whether plan {self._promised} was taken, so this rank runs without clocks after "
            f"iteration {self._limit}"
        )

    def _give_up(self, text: str) -> None:
        if self._own is not None:
            self._own.proposal.settle(Rejection(text))
            self._own = None
        while self._queued:
            self._queued.popleft()[0].settle(Rejection(text))
