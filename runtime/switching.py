"""Brings all ranks of a job to a new plan at the same iteration, through the job's
torch.distributed store.

Keys of the store:

- `state`: two numbers (`AgreedState`), changed by compare_set alone, and only to a higher version.
- `versions`: a counter. `plans/V`: a plan, until a newer one replaces it; `plans/1` is the one that
  all ranks begin with.

The way of a plan: its proposer numbers it, writes it down, and makes it the newest from an
iteration on that is far enough ahead for every node to look before. On each node one rank looks at
`state`, about once in an iteration, and passes a newer plan on to the others (`NodeMemory`). Hence:

- There is one order of versions: `state` only goes to a higher one, and so does every rank.
- All ranks that hear of a plan in time take it at the same iteration. A rank that hears of it late
  takes it at its next iteration. Clocks never decide what is computed: such an iteration costs some
  energy or time, and nothing else.
- No rank waits for another, and no operation waits for a key. A proposer is told at once when its
  plan begins.
- Without the store, a rank keeps its plan.
- If a proposer dies before it has changed `state`, its plan never begins.

A look takes one operation. A new plan takes one more on each node, and four of its proposer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from perseus_planner.base.errors import PlanError
from perseus_planner.base.wires import ABSENT, NodeMemory, read_key
from perseus_planner.runtime.sending import pack, unpack

if TYPE_CHECKING:
    from torch.distributed import Store

    from perseus_planner.runtime.sending import GivenPlan


class SwitchTo(Protocol):
    """Moves all ranks to other plans: `Runtime.switch_to`."""

    def __call__(self, plan: GivenPlan, *, number: int | None = None) -> Proposal:
        """Propose a plan, or one for each pipeline, that a service may count by a number."""


class AgreedState(NamedTuple):
    """What the ranks of a job agree on."""

    version: int = 1  #: The newest version; it only grows
    since: int = 0  #: The first iteration that runs by it


def write_plan(memory: NodeMemory, state: AgreedState, packed: bytes) -> None:
    """Replace the newest plan of a node."""
    memory.write(state.version, b"%d %b" % (state.since, packed))


def read_plan(memory: NodeMemory, after: int) -> tuple[AgreedState, bytes] | None:
    """Return the plan of a node if it is newer than version `after`."""
    newer = memory.read(after)
    if newer is None:
        return None
    since, _, packed = newer[1].partition(b" ")
    return AgreedState(newer[0], int(since)), packed


@dataclass(frozen=True)
class NodeShare:
    """This rank's part in the looks of its node."""

    nodes: int = 1  #: Number of nodes of the job
    #: Whether this rank looks at the job's store; otherwise another one of its node does.
    looks: bool = True
    #: What it shares with the other ranks of its node; None if it shares nothing.
    plans: NodeMemory | None = None


LOOK_S = 0.05
"""Shortest time between two looks of a node, in seconds."""
LOOKS_PER_S = 1500.0
"""How often the nodes of a job look at its store at most, together: a store serves about 90,000
operations a second.
"""

#: from the begin of an iteration until all ranks of a node know what one of them has read
_PASS_S = 0.1
_AHEAD = 0.25  #: share of an iteration by which a rank may be ahead of another one
_SUPERSEDED = "a newer plan was proposed before this one"


@dataclass(frozen=True)
class Acceptance:
    """All ranks take the plan."""

    version: int  #: Number of the plan in this job
    iteration: int  #: The first iteration that runs by it


@dataclass(frozen=True)
class Rejection:
    """The plan is not taken, for the reason in `text`; if the store was lost, it may not be
    known whether it is.
    """

    text: str


class Proposal:
    """A plan that this rank has proposed.

    Attributes:
        outcome: What became of the plan; None while it is open.
    """

    def __init__(self) -> None:
        self.outcome: Acceptance | Rejection | None = None
        self._settled = threading.Event()

    def settle(self, outcome: Acceptance | Rejection) -> None:
        """Set what became of the plan."""
        self.outcome = outcome
        self._settled.set()

    def wait(self, timeout_s: float) -> Acceptance | Rejection | None:
        """Wait for what becomes of the plan; return None if it is still open after `timeout_s`
        seconds.
        """
        self._settled.wait(timeout_s)
        return self.outcome


class Agreement:
    """One rank's part in the agreement; version 1 is the plan that all ranks begin with.

    The training thread calls `version_at`, one other thread looks, any thread proposes.

    Args:
        store: The same store for all ranks, under a prefix that nothing else uses.
        prepare: Called with a version and its plan, on the thread that looks, before this rank may
            run by it.
        share: This rank's part in the looks of its node.
        is_prompt: Whether plans come one after the other, made from what has just been observed:
            then nodes look by time, not once in an iteration, and a plan begins as early as they
            can have read it.
        now_s: A clock, in seconds.

    Attributes:
        lost: Why the store can no longer be used, and what follows; None while it can.
        version: The version that the last iteration begun runs by.
    """

    def __init__(
        self,
        store: Store,
        prepare: Callable[[int, bytes], None],
        share: NodeShare | None = None,
        *,
        is_prompt: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost: str | None = None
        self.version = 1
        self._store = store
        self._prepare = prepare
        self._now_s = now_s
        self._share = share or NodeShare()
        self._is_prompt = is_prompt
        self._text = ""  #: of the state in the store; empty while the key is absent
        self._seen = AgreedState()  #: the state
        self._queued: deque[tuple[Proposal, bytes]] = deque()
        # Written by the training thread alone:
        self._begun = -1
        self._begun_s = math.inf
        self._lasts_s = math.inf
        # Written by the thread that looks alone:
        #: what this rank runs by, and what it is to
        self._known: tuple[AgreedState, ...] = (AgreedState(),)
        self._looked = -2  #: the iteration in which this rank looked last
        self._looked_s = -math.inf
        self._period_s = max(LOOK_S, self._share.nodes / LOOKS_PER_S)

    @property
    def begun(self) -> int:
        """The iteration that this rank has begun last; -1 before the first."""
        return self._begun

    def version_at(self, iteration: int) -> int:
        """Return the version that this rank runs `iteration` by, which begins now. Versions
        never go back.
        """
        now_s = self._now_s()
        self._lasts_s = now_s - self._begun_s if now_s > self._begun_s else math.inf
        self._begun = iteration
        self._begun_s = now_s
        self.version = max(
            self.version, *(state.version for state in self._known if state.since <= iteration)
        )
        return self.version

    def propose(self, blob: bytes) -> Proposal:
        """Propose a plan to all ranks in the next look."""
        proposal = Proposal()
        try:
            self._queued.append((proposal, pack(blob)))
        except PlanError as error:
            proposal.settle(Rejection(str(error)))
        if self.lost is not None:
            self._reject_queued(self.lost)
        return proposal

    def look(self) -> None:
        """Make this rank's proposals, and find out about those of others if an iteration has begun
        since the last look.

        Raises:
            Exception: What `prepare` raises.
        """
        newer = None
        if self.lost is None:
            try:
                newer = self._find()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
                self.lost = (
                    f"the job's store can no longer be used ({reason}): no new plan will be taken"
                )
        if self.lost is not None:
            self._reject_queued(self.lost)
        if newer is not None:
            self._learn(*newer)

    def end(self) -> None:
        """Stop taking part, after the last look; open proposals of this rank are rejected."""
        self.lost = self.lost or "this rank has ended its part in the training"
        self._reject_queued(self.lost)

    def _find(self) -> tuple[AgreedState, bytes] | None:
        """Return a plan that is newer than those that this rank knows, if there is one."""
        if self._queued:
            self._announce()
        # One rank of each node asks the store; the others read its memory, which costs the store
        # nothing.
        elif not self._share.looks:
            plans = self._share.plans
            return None if plans is None else read_plan(plans, self._known[-1].version)
        elif self._now_s() < self._looked_s + self._period_s or (
            self._begun <= self._looked and not self._is_prompt
        ):
            return None
        else:
            self._looked = self._begun
            self._looked_s = self._now_s()
            self._read_state()
        state = self._seen
        if state.version <= self._known[-1].version:
            return None
        packed = read_key(self._store, f"plans/{state.version}")
        if packed is None:  # a newer one has replaced it meanwhile
            return None
        # For the other ranks of the node.
        if self._share.looks and self._share.plans is not None:
            write_plan(self._share.plans, state, packed)
        return state, packed

    def _read_state(self, new: AgreedState | None = None) -> None:
        """Read the state, after replacing it by `new` if it is still the one that was seen last;
        one operation.

        Raises:
            RuntimeError: If the store has lost the state, or is lost itself.
        """
        expected, text = (ABSENT, ABSENT) if new is None else (self._text, " ".join(map(str, new)))
        value: str = self._store.compare_set("state", expected, text).decode()
        # If the key is absent, the expected value comes back although it was not replaced.
        if value == ABSENT or value == expected != text:
            if self._text:
                raise RuntimeError("the store has lost what the ranks had agreed on")
        else:
            self._seen = AgreedState(*map(int, value.split()))
            self._text = value  # after it: a text that cannot be read is not the one seen last

    def _learn(self, state: AgreedState, packed: bytes) -> None:
        needed = tuple(
            known_state for known_state in self._known if known_state.version >= self.version
        )
        try:
            self._prepare(state.version, unpack(packed))
        finally:  # also what cannot be run is known, and not read again
            self._known = (*needed, state)

    def _announce(self) -> None:
        """Make the newest proposal of this rank the newest plan of all ranks, unless another
        rank has a newer one.
        """
        while len(self._queued) > 1:
            self._queued.popleft()[0].settle(Rejection(_SUPERSEDED))
        # It stays in the queue during the operations, which may fail.
        proposal, packed = self._queued[0]
        version = 1 + self._store.add("versions", 1)
        self._store.set(f"plans/{version}", packed)
        replaced = version
        while self._seen.version < version:
            replaced = self._seen.version
            self._read_state(AgreedState(version, self.since_if_proposed()))
        is_newest = self._seen.version == version
        self._store.delete_key(f"plans/{replaced if is_newest else version}")
        self._queued.popleft()
        proposal.settle(
            Acceptance(version, self._seen.since) if is_newest else Rejection(_SUPERSEDED)
        )

    def since_if_proposed(self) -> int:
        """Return from which iteration on a plan is run by that is proposed now."""
        return self._begun + (self._shortest_lead() if self._is_prompt else self._lead())

    def _lead(self) -> int:
        """Return after how many iterations all ranks know what is proposed now, if none is ahead
        by more than one.
        """
        return 2 + max(1, math.ceil((self._period_s + _PASS_S) / max(self._lasts_s, 1e-3)))

    def _shortest_lead(self) -> int:
        """Return after how many iterations nearly all ranks know what is proposed now.

        A rank that is ahead, or hears of it late, takes it an iteration later: that costs a mixed
        iteration at worst. What is proposed before the first iteration is run from then on.
        """
        if self._begun < 0:
            return 1
        heard_s = self._period_s + _PASS_S
        elapsed_s = self._now_s() - self._begun_s
        lasts_s = max(self._lasts_s, 1e-3)
        if not math.isfinite(lasts_s):  # the first one is taken to last as long again
            lasts_s = max(2.0 * elapsed_s, heard_s)
        left_s = (1.0 - _AHEAD) * lasts_s - elapsed_s
        return 1 + max(0, math.ceil((heard_s - left_s) / lasts_s))

    def _reject_queued(self, text: str) -> None:
        while self._queued:
            self._queued.popleft()[0].settle(Rejection(text))
