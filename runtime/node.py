"""The ranks of a job on one node. The first of them to come leads the node: it alone reads from the
job's store what all of them have to know, starts their clock controller, and looks for new plans.
It passes on what there is through memory of the node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec.structs import replace

from perseus_planner.base.processes import boot_id
from perseus_planner.base.wires import Board, NodeMemory, Record, decode, encode
from perseus_planner.runs.recording import Attempt


class RankPart(NamedTuple):
    """What a rank is told of itself."""

    pipeline: int  #: Number of its data-parallel pipeline, from 0
    is_first: bool  #: Whether no rank before it has its pipeline and its rank there


class NodePart(Record, frozen=True):
    """What rank 0 tells the ranks of a node."""

    ranks: Mapping[int, RankPart]  #: The ranks of the node that came in time
    pipelines: int  #: Number of data-parallel pipelines
    positions: int  #: Number of their ranks, of which each may be several ranks of the job
    nodes: int  #: Number of nodes
    present: int  #: Number of ranks that came in time
    has_plan: bool  #: Whether rank 0 has a plan; otherwise the autopilot makes the programs
    #: The attempt of the job, for the run folder; None if rank 0 is missing.
    attempt: Attempt | None
    #: For ranks that are late: the first rank of each pipeline that its engine does not number.
    firsts: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()  #: The modes that rank 0 has


class Refusal(Record, frozen=True):
    """A rank does not begin."""

    rank: int
    text: str


class NodeState(Record, frozen=True):
    """What the ranks of a node know; it only grows."""

    part: NodePart | None = None
    passed: tuple[str, ...] = ()  #: Barriers behind which all ranks are
    refusal: Refusal | None = None
    controller: str | None = None  #: Address of the clock controller that was started last
    problem: str | None = None  #: Why it was not started


class Node:
    """The node of this rank.

    Attributes:
        leads: Whether this rank leads it.
        plans: The newest plan of the node; None if it is not shared.
        state: What is known here.

    Args:
        board: The job's store, for background threads; this goes through it where memory cannot be
            shared.
        name: Name of the node.
        leads: As the attribute.
        stack: Closes the memory.
        addresses: Where the memory of the leader is, for others than the leader.
    """

    def __init__(
        self, board: Board, name: str, leads: bool, stack: ExitStack, addresses: str = ""
    ) -> None:
        self.leads, self.state = leads, NodeState()
        self._board, self._key, self._version = board, f"join/states/{name}", 0
        memories = [NodeMemory.create(), NodeMemory.create()] if leads else []
        with suppress(OSError):  # the leader has ended, or does not let others look
            memories += map(NodeMemory.open, addresses.split())
        for memory in memories:
            stack.callback(memory.close)
        self._memory: NodeMemory | None
        self.plans: NodeMemory | None
        self._memory, self.plans = memories if len(memories) == 2 else (None, None)

    @property
    def addresses(self) -> str:
        """Where others of the node find the memory of this rank, which leads it."""
        assert self._memory is not None
        assert self.plans is not None
        return f"{self._memory.address} {self.plans.address}"

    def pass_on(self, **changes: Any) -> None:
        """Change what is known here, on all ranks of the node if this one leads it."""
        self.state = replace(self.state, **changes)
        if self.leads and self._memory is not None:
            self._version += 1
            self._memory.write(self._version, encode(self.state))
            with suppress(RuntimeError):  # the store may be gone
                self._board.put(self._key, self.state)

    def look(self) -> NodeState:
        """Return what is known now; never waits."""
        if self._memory is None:
            with suppress(RuntimeError):
                self.state = self._board.get(self._key, NodeState) or self.state
        elif not self.leads:
            newer = self._memory.read(self._version)
            if newer is not None:
                self._version, self.state = newer[0], decode(newer[1], NodeState)
        return self.state


def node_name() -> str:
    """Return a text that is equal for exactly those processes that can share a clock controller."""
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    text = "/".join((boot_id(), *namespaces, str(os.geteuid())))
    return blake2b(text.encode(), digest_size=8).hexdigest()
