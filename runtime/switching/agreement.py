"""All ranks of a job take a new plan at the same iteration: agreed through its torch.distributed store.

What is kept there:

- `state`: five numbers (`State`), the one key on which several ranks act at once, and changed by compare_set alone.
- `versions`: a counter. `plans/V`: a plan. `answers/V/R`: rank R can run it. `refused/V`: a rank that cannot says why.

The way of a plan: its proposer writes it down and makes it the newest, which ends an older one that was still open.
Every rank that sees it checks it and answers. When all have said yes the proposer decides: it begins with iteration
`cleared + 1`. A refusal, or `patience_s` without all answers, closes it.

Before a rank says yes it makes a promise: it begins no iteration beyond a limit before it knows what became of the
plan; and it brings `cleared` to that limit or further. It may bring both on while the plan is open. Hence:

- All take a plan at the same iteration. A decision needs everyone's yes, and is for an iteration after `cleared`, so
  after everyone's limit. `state` is one key with one order of changes, so that who gets a later limit afterwards has
  read the decision. Every rank knows of it before it begins the iteration that it is for.
- One decision in `state` is enough: the next one needs a yes of every rank, and so every rank has read this one.
- A plan that is not the newest, or was closed, is never decided: deciding it is a compare_set from a state in which it
  is the newest, and open.
- Nobody waits. A rank that is late or stopped gives no answer: the plan begins later or never. A rank at its limit is
  told so, and goes on without a plan's clocks. A rank that has promised nothing has no limit.
- Without the store, a rank that has promised nothing goes on by its plan for ever: nothing is decided without it. One
  that has goes on to its limit; the others may have taken the new plan after that.
- When a proposer dies before it decides, its plan stays open until a newer one is proposed; it never begins.

A look takes one operation of the store while nothing is open. Each proposal costs every rank four more (read the plan,
bring `cleared` on, answer, delete the answer) and its proposer five (count, write, announce, decide, delete), besides
two with each of its looks while it is open. No operation waits for a key.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.runtime.switching.proposals import Decided as Decided
from perseus_planner.runtime.switching.proposals import Proposal as Proposal
from perseus_planner.runtime.switching.proposals import Refused as Refused
from perseus_planner.runtime.switching.shared_state import SharedState, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

LONGEST_PLAN_BYTES = 4 << 20
"""A plan may be so long, compressed: a TCPStore cuts off who sends it 8 MiB at once, and with it the whole job."""
# So many of the ranks that have not answered are named.
_NAMED = 4
_SUPERSEDED = "a newer plan was proposed before this one was decided"


@dataclass(frozen=True)
class _Own:
    """A proposal of this rank that is in the store."""

    proposal: Proposal
    version: int
    until_s: float


class Agreement:
    """One rank's part; version 1 is the plan that all ranks enter with.

    The training thread asks `may_begin` and `version_at`, one other thread looks, any thread proposes.

    Args:
        store: the same for all ranks, under a prefix that nothing else uses.
        rank: which one this is, from 0.
        ranks: how many there are.
        accept: takes a version and its plan, on the thread that looks; None if this rank can run it, else why not. What
            it raises is a refusal too.
        patience_s: for how long this rank waits for everyone's answer to its proposal, seconds.
        now_s: a clock, seconds.

    Attributes:
        lost: why the store cannot be used any more, and what follows; None while it can.
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
        # Between the training thread and the one that looks; held for a few instructions.
        self._lock = threading.Lock()
        self._begun = -1
        self._limit: int | None = None
        self._decisions: tuple[tuple[int, int], ...] = ((0, 1),)  #: (since, version), in order
        self._promised = 0  #: the version whose end this rank must know before it passes its limit
        self._answered = 1
        self._answer: tuple[int, str] | None = None  #: a version, and the key that is to be deleted when it has ended
        self._queued: deque[tuple[Proposal, bytes]] = deque()
        self._own: _Own | None = None

    def may_begin(self, iteration: int) -> bool:
        """Whether this rank knows what `iteration` runs by; if not, it is to run without a plan's clocks."""
        return self.version_at(iteration) > 0

    def version_at(self, iteration: int) -> int:
        """The version that `iteration` runs by, on all ranks; 0 where `may_begin` is false.

        To be told a version counts as to begin the iteration. What came before the last one begun may be forgotten: 0.
        """
        with self._lock:
            if self._limit is not None and iteration > self._limit:
                return 0
            self._begun = max(self._begun, iteration)
            return next((version for since, version in reversed(self._decisions) if since <= iteration), 0)

    def propose(self, blob: bytes) -> Proposal:
        """Put a plan to all ranks, in the looks that follow; it ends what any rank has proposed before."""
        proposal, packed = Proposal(), zlib.compress(blob, 1)
        if len(packed) > LONGEST_PLAN_BYTES:
            text = (
                f"the plan has {len(packed)} bytes, compressed, and the job's store takes {LONGEST_PLAN_BYTES}; plan "
                "for fewer microbatches"
            )
            proposal.settle(Refused(text))
        elif self.lost is not None:
            proposal.settle(Refused(self.lost))
        else:
            self._queued.append((proposal, packed))
        return proposal

    def look(self, through: int) -> None:
        """One round: see what was decided, answer what was proposed, bring this rank's own proposal on.

        Args:
            through: this rank will soon begin the iterations up to this one.
        """
        if self.lost is None:
            try:
                self._round(through)
            except Exception as error:  # whatever fails in the background must not end the training
                self.lost = self._loss(error)
        if self.lost is not None:
            self._give_up(self.lost)

    def end(self) -> None:
        """Take part no more, after the last look: what this rank has proposed and is open is refused."""
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
            self._bring_on(self._own)
        if self._answer is not None and not self._state.seen.has_open(self._answer[0]):
            self._store.delete_key(self._answer[1])
            self._answer = None
        if self._state.seen.is_open and self._state.seen.newest > self._answered:
            self._consider(self._state.seen.newest, through)

    # As one of those who run by what is decided.

    def _change(self, **fields: int) -> None:
        self._state.change(self._state.seen._replace(**fields))
        self._follow()

    def _follow(self) -> None:
        """Run by the state seen last."""
        state = self._state.seen
        with self._lock:
            if state.version != self._decisions[-1][1]:
                self._decisions = (*self._needed_before(state.since), (state.since, state.version))
            if not state.has_open(self._promised):
                self._promised, self._limit = 0, None
            elif self._limit is not None:
                self._limit = max(self._limit, state.cleared)

    def _needed_before(self, since: int) -> list[tuple[int, int]]:
        """The decisions that iterations before `since` may still be begun by."""
        needed = [decision for decision in self._decisions if decision[0] < since]
        while len(needed) > 1 and needed[1][0] <= self._begun:
            del needed[0]
        return needed

    def _clear(self, through: int) -> None:
        """Bring `cleared` to `through`, unless what was promised comes to its end."""
        while self._promised and self._state.seen.cleared < through:
            self._change(cleared=through)

    # As one of those who answer.

    def _consider(self, version: int, through: int) -> None:
        self._answered = version
        packed = read(self._store, f"plans/{version}")
        if packed is None:  # it has come to its end meanwhile
            return
        refusal = self._refusal(version, packed)
        if refusal is not None:
            self._say(version, f"refused/{version}", f"rank {self._rank}: {refusal}")
        elif self._has_promised(version, through):
            self._say(version, f"answers/{version}/{self._rank}", "yes")

    def _refusal(self, version: int, packed: bytes) -> str | None:
        try:
            return self._accept(version, zlib.decompress(packed))
        except Exception as error:  # the caller's code, or a plan that was not written here
            return f"{type(error).__name__}: {error}"

    def _has_promised(self, version: int, through: int) -> bool:
        """Set this rank its limit; False where the plan comes to its end meanwhile."""
        with self._lock:
            self._limit = limit = max(self._begun, through)
            self._promised = version
        self._clear(limit)
        return self._promised == version

    def _say(self, version: int, key: str, text: str) -> None:
        self._answer = version, key
        self._store.set(key, text)

    # As the one who proposes.

    def _announce(self) -> None:
        """Make the newest of what is queued the newest of all."""
        version = 1 + self._store.add("versions", 1)
        if self._own is not None:
            self._settle(self._own, Refused(_SUPERSEDED))
        # After what the store may fail in, so that each proposal is always found in one place or the other.
        *older, (proposal, packed) = [self._queued.popleft() for _ in range(len(self._queued))]
        self._own = _Own(proposal, version, self._now_s() + self._patience_s)
        for each, _ in older:
            each.settle(Refused(_SUPERSEDED))
        self._store.set(f"plans/{version}", packed)
        while self._state.seen.newest < version:
            self._change(newest=version, is_open=1)

    def _bring_on(self, own: _Own) -> None:
        """Decide or close the plan, if it is time."""
        answers = [f"answers/{own.version}/{rank}" for rank in range(self._ranks)]
        if not self._state.seen.has_open(own.version):
            self._settle(own, Refused(_SUPERSEDED))
        elif (refusal := read(self._store, f"refused/{own.version}")) is not None:
            self._close(own, refusal.decode())
        elif self._store.check(answers):
            self._decide(own)
        elif self._now_s() > own.until_s:
            self._close(own, self._silence(answers))

    def _decide(self, own: _Own) -> None:
        while self._state.seen.has_open(own.version):
            self._change(is_open=0, version=own.version, since=self._state.seen.cleared + 1)
        state = self._state.seen
        is_decided = state.version == own.version
        self._settle(own, Decided(own.version, state.since) if is_decided else Refused(_SUPERSEDED))

    def _close(self, own: _Own, text: str) -> None:
        while self._state.seen.has_open(own.version):
            self._change(is_open=0)
        self._settle(own, Refused(text))

    def _silence(self, answers: list[str]) -> str:
        silent = [rank for rank, key in enumerate(answers) if not self._store.check([key])]
        named = ", ".join(map(str, silent[:_NAMED])) + (" and others" if len(silent) > _NAMED else "")
        return f"no answer within {self._patience_s:.6g} s from rank{'s' * (len(silent) != 1)} {named}"

    def _settle(self, own: _Own, outcome: Decided | Refused) -> None:
        self._own = None
        own.proposal.settle(outcome)
        self._store.delete_key(f"plans/{own.version}")

    # Without the store.

    def _loss(self, error: Exception) -> str:
        first_line = str(error).partition("\n")[0]
        text = f"the job's store cannot be used any more ({first_line or type(error).__name__}): no new plan is taken"
        if not self._promised:
            return text
        return (
            f"{text}; what became of plan {self._promised} is not known, and this rank runs without a plan's clocks "
            f"after iteration {self._limit}"
        )

    def _give_up(self, text: str) -> None:
        if self._own is not None:
            self._own.proposal.settle(Refused(text))
            self._own = None
        while self._queued:
            self._queued.popleft()[0].settle(Refused(text))
