"""The training job that this process is a rank of: its store, its warnings, its ranks on one node.

The first rank of a node to come leads it: it alone reads from the job's store what all of them have
to know, starts their clock controller, and looks for new plans. It passes on what there is through
memory of the node.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec.structs import replace

from perseus_planner.base.errors import RankError
from perseus_planner.base.processes import boot_id
from perseus_planner.base.wires import STORE_GONE, Board, NodeMemory, Record, decode, encode
from perseus_planner.runs.recording import Attempt

if TYPE_CHECKING:
    from torch.distributed import Store

_LOG = logging.getLogger("perseus_planner.runtime")
_DONE_PAUSE_S = 0.01


@dataclass(frozen=True)
class TrainingJob:
    """What all ranks share."""

    #: The torch.distributed store of the job, under a prefix that no other runtime uses.
    store: Store
    rank: int  #: Rank of this process, from 0
    ranks: int  #: Number of ranks
    #: The same store, for background threads: through a connection of its own, because a connection
    #: serves one operation at a time, and training may wait on its own for a key. In a torch whose
    #: stores cannot be cloned, it is `store`.
    own_store: Store = field(init=False)

    @property
    def longest_wait_s(self) -> float:
        """How long a rank may wait for others that never come: a third of the time-out of the
        process group, after which a watchdog may end the job; infinite if that is not known.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_initialized() or dist.group.WORLD is None:
            return math.inf
        try:  # torch has no public way to it
            device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
            timeout = dist.group.WORLD._get_backend(device).options._timeout
            return float(timeout.total_seconds()) / 3.0
        except (AttributeError, RuntimeError):
            return math.inf

    def __post_init__(self) -> None:
        clone = getattr(self.store, "clone", lambda: self.store)
        object.__setattr__(self, "own_store", clone())


def this_job() -> TrainingJob:
    """Return the job of this process; a job of one rank if torch.distributed is not initialized.

    Every rank must call this the same number of times.

    Raises:
        RankError: If the store is gone.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return TrainingJob(dist.HashStore(), 0, 1)
    # Torch has no public way to it.
    from torch.distributed.distributed_c10d import (
        _get_default_store,
    )

    # torchrun may keep the store when it restarts ranks, which must not read what ranks before them
    # have written. Each node counts its own restarts alone, so with several nodes it is the ranks
    # that count how often they have begun.
    start = _restarts() if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else "any"
    store = dist.PrefixStore(f"perseus-planner/runtime/{start}", _get_default_store())
    try:
        number = store.add(f"begun/{dist.get_rank()}", 1)
        return TrainingJob(
            dist.PrefixStore(str(number), store), dist.get_rank(), dist.get_world_size()
        )
    except RuntimeError as error:
        raise RankError(STORE_GONE) from error


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def launcher() -> int | None:
    """Return the process that launched this rank, whose death ends the job; None if no launcher
    is known.
    """
    return os.getppid() if "LOCAL_RANK" in os.environ or "RANK" in os.environ else None


def wait_for_others(job: TrainingJob, key: str, ranks: int, timeout_s: float) -> None:
    """Count this rank under `key`, and wait on rank 0 until `ranks` ranks are counted, `timeout_s`
    at most.

    So the process of rank 0, which holds the store unless a launcher does, does not end before the
    others are done with the store. Later uses of the store make torch print stack dumps on them.

    Args:
        job: The job.
        key: What the ranks are done with.
        ranks: How many are counted.
        timeout_s: The longest wait, in seconds; 0 does not wait.
    """
    deadline_s = time.monotonic() + timeout_s
    with suppress(RuntimeError):  # the store may be gone
        done = job.own_store.add(f"done/{key}", 1)
        while job.rank == 0 and done < ranks and time.monotonic() < deadline_s:
            time.sleep(_DONE_PAUSE_S)
            done = job.own_store.add(f"done/{key}", 0)


class JobWarnings:
    """Warnings through the logger `perseus_planner.runtime`, each given once in the whole job
    until it is over.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._keys: set[str] = set()

    def warn(self, key: str, text: str, *, by: Literal["one", "rank 0"] = "one") -> None:
        """Warn, unless a warning with this key was given before.

        This uses the job's store, so it must not be called on the training thread.

        Args:
            key: What the warning is about.
            text: One sentence.
            by: "one" if the first rank to get here warns; "rank 0" if all ranks get here and only
                rank 0 warns.
        """
        if key in self._keys:
            return
        self._keys.add(key)
        if self._job.rank == 0 if by == "rank 0" else self._is_first(key):
            _LOG.warning("planner, rank %d: %s", self._job.rank, text)

    def end(self, key: str, text: str) -> None:
        """Say on rank 0 that what a warning by rank 0 is about is over, if it was given; it may
        then be given again.

        Args:
            key: That of the warning.
            text: One sentence.
        """
        if key in self._keys:
            self._keys.remove(key)
            if self._job.rank == 0:
                _LOG.warning("planner, rank %d: %s", self._job.rank, text)

    def forget(self, key: str) -> None:
        """Let a warning of any rank be given again, because what it is about is over."""
        self._keys.discard(key)
        with suppress(RuntimeError):  # the store may be gone
            self._job.own_store.delete_key(f"warned/{key}")

    def _is_first(self, key: str) -> bool:
        rank = str(self._job.rank)
        # The store may be gone; a repeated warning is better than none.
        with suppress(RuntimeError):
            return bool(self._job.own_store.compare_set(f"warned/{key}", "", rank).decode() == rank)
        return True


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
    is_change: bool = False  #: Whether its engine lacks a name (`EngineChanged`)


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
        self.leads = leads
        self.state = NodeState()
        self._board = board
        self._key = f"join/states/{name}"
        self._version = 0
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
                self.state = decode(newer[1], NodeState)
                self._version = newer[0]  # after it: what cannot be read is not passed over
        return self.state


def node_name() -> str:
    """Return a text that is equal for exactly those processes that can share a clock controller."""
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    text = "/".join((boot_id(), *namespaces, str(os.geteuid())))
    return blake2b(text.encode(), digest_size=8).hexdigest()
