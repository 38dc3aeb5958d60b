"""How the ranks of a job meet before training: rank 0 learns who they are and tells each node its
part, and all wait for each other between the steps in which they check rank 0's plan and attach to
a controller (`joining`).

This happens before training, so it may wait. What a user can correct is refused, on all ranks at
once: a plan that does not fit the engine, or a GPU that another job holds. What training can go on
without becomes a warning and no clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perseus_planner.base.errors import (
    EngineChanged,
    RankError,
)
from perseus_planner.base.wires import STORE_GONE, Board, Record, encode, read_key
from perseus_planner.runtime.job import (
    Node,
    NodePart,
    NodeState,
    RankPart,
    Refusal,
    TrainingJob,
    wait_for_others,
)
from perseus_planner.runtime.switching import AgreedState, read_plan, write_plan

if TYPE_CHECKING:
    from perseus_planner.runs.recording import Attempt
    from perseus_planner.runtime.job import JobWarnings

RENDEZVOUS_S = 300.0
"""How long the ranks wait for each other before training, and never longer than a third of the
time-out of their process group; one of them may still be solving and planning.
"""
REFUSAL_S = 10.0
"""How long rank 0 waits, at most, until all others have read why the job does not begin."""
COLLECT_S = 60.0
"""How long rank 0 may take to tell each node its part."""

_PAUSE_S = 0.05  #: between two looks at the store, at most, in jobs with few ranks
_LOCAL_PAUSE_S = 0.05  #: the same at memory
_LOOKS_PER_S = 40_000.0  #: at the store, at most, if each rank has a node of its own
_NAMED = 16  #: absent ranks


class RankInfo(Record, frozen=True, array_like=True):
    """What a rank tells rank 0."""

    node: str  #: Name of its node
    pipeline: int | None  #: Number of its pipeline; None if its engine does not know
    first: int  #: The first rank of its pipeline, in the whole job
    rank: int  #: Its rank there
    modes: tuple[str, ...] = ()  #: In which computations may run


class Rendezvous:
    """This rank's part in the beginning of a job.

    Every rank writes who it is, and is counted. Rank 0 reads that once all are there, or one waits
    no longer; it works out the pipelines, and writes for each node what its ranks have to know. The
    rank that leads the node passes that on, and later whether all are behind a barrier. So a rank
    takes a handful of operations, and only rank 0 reads more than a node's part.

    The methods that wait are generators of the seconds until they go on; `finish` runs them.

    Keys of the store:

    - `join/infos/R`: a `RankInfo`.
    - `join/ranks`, `join/B`: how many ranks have come, also to barrier B; more than the job has
      once one of them refuses, or waits no longer. `join/refused/B`: why it refuses.
    - `join/nodes/N`: how many ranks of node N have come. `join/memory/N`: where its leader, which
      came first, passes on what there is.
    - `join/states/N`: what the leader passes on, for ranks that cannot share its memory.
    - `join/collector`: the rank that collects the infos: rank 0, unless that is missing.
    - `join/parts/N`: a `NodePart`. `join/late`: the one for ranks that come too late.

    Args:
        job: The job.
        warnings: Gives warnings.
        stack: Closes what is opened here.
        now_s: A clock, in seconds.

    Attributes:
        node: The node of this rank, after `meet`.
        own: What this rank was told of itself, after `meet`.
        plan: The plan that all ranks begin with, as it was sent; None if there is none, or a newer
            one has replaced it.
        positions: On the rank that collects, for each rank of the job its pipeline and its rank
            there; None for absent ranks. Elsewhere empty.
    """

    def __init__(
        self,
        job: TrainingJob,
        warnings: JobWarnings,
        stack: ExitStack,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._warnings = warnings
        self._stack = stack
        self._now_s = now_s
        self._board = Board(job.store)
        self._own_board = Board(job.own_store)
        # All ranks ask one store, so each asks the less often the more there are.
        self._longest_pause_s = max(_PAUSE_S, job.ranks / _LOOKS_PER_S)
        self.node = Node(self._own_board, "", False, stack)
        self._wait_s = min(RENDEZVOUS_S, job.longest_wait_s)
        self._attempt: Attempt | None = None
        self.own = RankPart(0, False)
        self.plan: bytes | None = None
        self.positions: Sequence[tuple[int, int] | None] = ()

    @property
    def part(self) -> NodePart:
        """What rank 0 has told this node, after `meet`."""
        assert self.node.state.part is not None
        return self.node.state.part

    @contextmanager
    def refusing(self, barrier: str) -> Iterator[None]:
        """End all ranks if the block raises, which stands before a barrier."""
        try:
            yield
        except Exception as error:
            is_change = isinstance(error, EngineChanged)
            refusal = Refusal(self._job.rank, str(error) or repr(error), is_change)
            with suppress(RuntimeError):  # if the store is gone, the others cannot be told
                self._job.store.compare_set(f"join/refused/{barrier}", "", encode(refusal).decode())
                self._close(barrier)
            self.node.pass_on(refusal=refusal)
            self._leave(barrier)
            raise

    def finish(self, barrier: str, steps: Generator[float]) -> None:
        """Wait for the others at a barrier.

        Raises:
            RankError: If one of them refuses, which is named, or the store is gone.
            EngineChanged: If one refuses because its engine lacks a name.
        """
        try:
            for pause_s in steps:
                time.sleep(pause_s)
        except RuntimeError as error:
            raise RankError(STORE_GONE) from error
        except ValueError as error:
            raise RankError(
                f"what the ranks tell each other cannot be read: {error}; use the same version of "
                "the planner on all ranks"
            ) from error
        refusal = self.node.state.refusal
        if refusal is not None:
            self._leave(barrier)
            text = f"rank {refusal.rank} does not begin: {refusal.text}"
            raise EngineChanged(text) if refusal.is_change else RankError(text)

    def meet(
        self, info: RankInfo, attempt: Attempt | None = None, plan: bytes | None = None
    ) -> Generator[float]:
        """Meet the other ranks at the barrier `ranks`, and learn this rank's part.

        Args:
            info: Who this rank is.
            attempt: On rank 0, that of the job.
            plan: On rank 0, what `pack` returns; None if the autopilot makes the programs.
        """
        self._attempt = attempt
        self.plan = plan
        deadline_s = self._now_s() + self._wait_s
        store = self._job.store
        memory_key = f"join/memory/{info.node}"
        # The first rank of a node to count itself leads it: it waits at the store, and the others
        # wait at its memory.
        leads = store.add(f"join/nodes/{info.node}", 1) == 1
        if leads:
            self.node = Node(self._own_board, info.node, True, self._stack)
            store.set(memory_key, self.node.addresses)
        if plan is not None:
            store.set("plans/1", plan)
        # Before it counts itself, so that whoever sees all ranks counted finds all infos.
        self._board.put(f"join/infos/{self._job.rank}", info)
        # Rank 0 collects; if it does not come, the first rank that has waited long enough does.
        collects = attempt is not None and self._claim()
        store.add("join/ranks", 1)
        if not leads:
            pauses = _pauses(_PAUSE_S)
            addresses = read_key(store, memory_key)
            while addresses is None and self._now_s() < deadline_s:
                yield next(pauses)
                addresses = read_key(store, memory_key)
            there = (addresses or b"").decode()
            self.node = Node(self._own_board, info.node, False, self._stack, there)
        if not collects:
            yield from self._led(lambda state: state.part is not None, deadline_s)
        # Leaders read their part here, and so does a rank whose leader has said nothing in time.
        if self.node.state == NodeState():
            yield from self._read_part(info.node, collects, deadline_s)
        if self.node.state.part is None:  # a rank refuses
            return
        self.own = self.part.ranks.get(self._job.rank) or self._late(info)
        # From the memory of the node, which its leader has filled; from the store if there is none.
        # What is newer than the first plan comes as any later plan does.
        if self.part.has_plan and plan is None:
            newest = None if self.node.plans is None else read_plan(self.node.plans, 0)
            if newest is None:
                self.plan = read_key(store, "plans/1")
            elif newest[0].version == 1:
                self.plan = newest[1]

    def wait_at(self, barrier: str, timeout_s: float) -> Generator[float]:
        """Wait until all ranks that came in time are at a barrier, or one refuses; after
        `timeout_s` seconds, go on.
        """
        # A rank that came late is not counted, and waits for nobody.
        if self._job.rank not in self.part.ranks:
            return
        deadline_s = self._now_s() + timeout_s
        self._job.store.add(f"join/{barrier}", 1)
        yield from self._led(lambda state: barrier in state.passed, deadline_s)
        # The leader counts for its node; a rank whose leader is silent counts itself.
        state = self.node.state
        if barrier not in state.passed and state.refusal is None:
            refusal = yield from self._count(barrier, self.part.present, deadline_s)
            self.node.pass_on(passed=(*state.passed, barrier), refusal=refusal)

    def _late(self, info: RankInfo) -> RankPart:
        """Return the part of this rank, which is too late for the others and still goes on."""
        if info.pipeline is not None:
            return RankPart(info.pipeline, False)
        late = self._board.get("join/late", NodePart)
        return RankPart((*(late or self.part).firsts, info.first).index(info.first), False)

    def _leave(self, barrier: str) -> None:
        part = self.node.state.part
        ranks = self._job.ranks if part is None else part.present
        wait_for_others(self._job, barrier, ranks, REFUSAL_S)

    def _led(self, is_known: Callable[[NodeState], bool], deadline_s: float) -> Generator[float]:
        """Wait until the leader of the node has passed something on."""
        pauses = _pauses(_LOCAL_PAUSE_S)
        while not self.node.leads and self._now_s() <= deadline_s:
            state = self.node.look()
            if state.refusal is not None or is_known(state):
                return
            yield next(pauses)

    def _count(
        self, barrier: str, ranks: int, deadline_s: float
    ) -> Generator[float, None, Refusal | None]:
        """Wait until so many ranks are at a barrier; return why one of them refuses."""
        pauses = _pauses(self._longest_pause_s)
        count = self._board.get(f"join/{barrier}", int) or 0
        while count < ranks:
            # Closing adds more than all ranks, so the count passes `ranks` at once, for everybody
            # who waits.
            if self._now_s() > deadline_s:
                self._close(barrier)
            else:
                yield next(pauses)
            count = self._board.get(f"join/{barrier}", int) or 0
        return None if count == ranks else self._board.get(f"join/refused/{barrier}", Refusal)

    def _close(self, barrier: str) -> None:
        self._job.store.add(f"join/{barrier}", self._job.ranks + 1)

    def _claim(self) -> bool:
        """Return whether this rank is the one that collects the infos."""
        rank = str(self._job.rank)
        return bool(self._job.store.compare_set("join/collector", "", rank).decode() == rank)

    def _read_part(self, node: str, collects: bool, deadline_s: float) -> Generator[float]:
        refusal = yield from self._count("ranks", self._job.ranks, deadline_s)
        if refusal is not None:
            self.node.pass_on(refusal=refusal)
            return
        # Rank 0 may be missing.
        if collects or (self._now_s() > deadline_s and self._claim()):
            self._collect()
        pauses = _pauses(self._longest_pause_s)
        until_s = max(self._now_s(), deadline_s) + COLLECT_S
        while True:
            # Read first: as it is written last, a node without a part by then has none.
            late = self._board.get("join/late", NodePart)
            part = self._board.get(f"join/parts/{node}", NodePart) or late
            if part is not None:
                break
            if self._now_s() > until_s:
                raise RankError(
                    f"rank 0 did not say within {COLLECT_S:g} s how the job begins; see whether it "
                    "has ended"
                )
            yield next(pauses)
        # Into the memory of the node, from which its other ranks take it.
        plans = self.node.plans
        if part.has_plan and plans is not None and self.node.leads:
            packed = read_key(self._job.store, "plans/1")
            if packed is not None:
                write_plan(plans, AgreedState(), packed)
        self.node.pass_on(part=part)

    def _collect(self) -> None:
        """Work out the part of each node, and write them."""
        keys = [f"join/infos/{rank}" for rank in range(self._job.ranks)]
        infos = self._board.get_all(keys, RankInfo)
        has_plan = self.plan is not None
        self.positions, parts = node_parts(infos, self._attempt, has_plan=has_plan)
        for node, part in parts.items():
            self._board.put(f"join/parts/{node}" if node else "join/late", part)
        # Some names are enough: a rack that is off has hundreds.
        absent = [str(rank) for rank, info in enumerate(infos) if info is None]
        if absent:
            named = f"rank{'s' * (len(absent) > 1)} {', '.join(absent[:_NAMED])}"
            if len(absent) > _NAMED:
                named += f" and {len(absent) - _NAMED} others"
            self._warnings.warn(
                "late",
                f"{named} had not joined within {self._wait_s:g} s; training begins without "
                "waiting longer",
            )
        if self._attempt is None:
            text = "there is no plan: rank 0 is missing; training goes on without setting clocks"
            self._warnings.warn("no plan", text)


def _pauses(longest_s: float) -> Iterator[float]:
    pause_s = 1e-3
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def node_parts(
    infos: Sequence[RankInfo | None], attempt: Attempt | None, *, has_plan: bool
) -> tuple[list[tuple[int, int] | None], dict[str, NodePart]]:
    """Return, for each rank, its pipeline, as its engine numbers it or else by its first rank, and
    its rank there, None for absent ranks; and the part of each node, the last, if ranks are absent,
    under an empty name for those who come late.
    """
    there = {rank: info for rank, info in enumerate(infos) if info is not None}
    # Engines that do not number their pipelines are numbered here, by the first rank of each.
    firsts = sorted({info.first for info in there.values() if info.pipeline is None})
    number = {first: number for number, first in enumerate(firsts)}
    positions: list[tuple[int, int] | None] = [None] * len(infos)
    nodes: dict[str, dict[int, RankPart]] = {}
    seen = set[tuple[int, int]]()
    for rank, info in there.items():
        pipeline = number[info.first] if info.pipeline is None else info.pipeline
        position = (pipeline, info.rank)
        positions[rank] = position
        # Of ranks at one position, such as of tensor parallelism, the first stands for all in what
        # is counted.
        nodes.setdefault(info.node, {})[rank] = RankPart(pipeline, position not in seen)
        seen.add(position)
    late = NodePart(
        ranks={},
        pipelines=len({pipeline for pipeline, _ in seen}),
        positions=len(seen),
        nodes=len(nodes),
        present=len(there),
        has_plan=has_plan,
        attempt=attempt,
        modes=next((info.modes for info in there.values()), ()),
    )
    # All nodes are told the same but for their ranks, of which a large job has many.
    parts = {node: replace(late, ranks=ranks) for node, ranks in nodes.items()}
    if len(there) < len(infos):
        parts[""] = replace(late, firsts=tuple(firsts))
    return positions, parts
