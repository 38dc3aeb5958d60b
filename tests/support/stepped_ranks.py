"""Ranks that share a store and advance by one store operation at a time, in any order; and their
invariants.
"""
# ruff: noqa: TID253 - tests that use this are there for torch

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import HashStore

from perseus_planner.base.wires import NodeMemory
from perseus_planner.runtime.switching import LOOK_S, Acceptance, Agreement, NodeShare, Proposal

_ALLOWED = {"set", "add", "check", "compare_set", "delete_key"}  # these never wait, and
_OF_KEYS = "multi_get"  # does not after `check`


class Disagreement(Exception):
    """There is not one order of versions, or a rank did not run by the newest one that it knew
    and that had begun.
    """


class _Ended(BaseException):
    """Ends a rank's thread where it stands."""


class Counted:
    """A store that counts its operations, and refuses those that may wait."""

    def __init__(self, store: Any, before: Callable[[], None] = lambda: None):
        self._store, self._before = store, before
        self.counts: Counter[str] = Counter()
        self.is_gone = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "clone":  # not every store has it
            raise AttributeError(name)
        assert name in _ALLOWED or name == _OF_KEYS, name

        def operation(*arguments: Any) -> Any:
            self._before()
            self.counts[name] += 1
            if self.is_gone:
                raise RuntimeError("Broken pipe")
            return getattr(self._store, name)(*arguments)

        return operation


class Steps:
    """A thread that runs a job up to its next store operation, and stops there."""

    def __init__(self) -> None:
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._job: Callable[[], None] | None = None
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._job is None

    def step(self, job: Callable[[], None]) -> None:
        """Do one operation of the current job; begin `job` if there is none."""
        self._job = self._job or job
        self._go.release()
        self._stands.acquire()

    def before_operation(self) -> None:
        self._stands.release()
        self._go.acquire()
        if self._is_ended:
            raise _Ended

    def end(self) -> None:
        self._is_ended = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._is_ended:
                return
            assert self._job is not None
            try:
                self._job()
            except _Ended:
                return
            self._job = None
            self._stands.release()


class Rank:
    """A rank whose training thread and looks advance when the test says so."""

    def __init__(self, world: World, share: NodeShare):
        self.steps = Steps()
        self.store = Counted(world.store, self.steps.before_operation)
        self.agreement = world.kind(self.store, self._prepare, share, now_s=lambda: world.now_s)
        self.iteration = -1
        self.given: tuple[int, ...] = (1,)  #: versions
        self.ran: list[
            tuple[int, int, tuple[int, ...]]
        ] = []  #: iteration, version, and what was given before it
        self.lives = True
        self.proposals: list[Proposal] = []

    def _prepare(self, version: int, blob: bytes) -> None:
        assert blob == b"a plan"
        self.given = (*self.given, version)

    def begin(self) -> int:
        """Begin the next iteration; return its version."""
        self.iteration += 1
        given, version = self.given, self.agreement.version_at(self.iteration)
        if self.ran and version < self.ran[-1][1]:
            raise Disagreement(f"went back from {self.ran[-1][1]} to {version}")
        self.ran.append((self.iteration, version, given))
        return version


class World:
    """All ranks, their store and their clock.

    Args:
        nodes: How many ranks each node has.
        kind: The protocol that they follow.
    """

    def __init__(self, nodes: Sequence[int], kind: type[Agreement] = Agreement):
        self.kind, self.store, self.now_s = kind, HashStore(), 0.0
        self.memories = [NodeMemory.create() for _ in nodes]
        shares = [
            NodeShare(len(nodes), number == 0, memory)
            for memory, size in zip(self.memories, nodes, strict=True)
            for number in range(size)
        ]
        self.ranks = [Rank(self, share) for share in shares]

    def step(self, number: int, times: int = 1) -> None:
        """Let a rank's background thread do some operations."""
        rank = self.ranks[number]
        for _ in range(times if rank.lives else 0):
            rank.steps.step(rank.agreement.look)

    def begin(self, number: int) -> None:
        """Let a rank's training thread begin its next iteration."""
        if self.ranks[number].lives:
            self.ranks[number].begin()

    def propose(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.lives:
            rank.proposals.append(rank.agreement.propose(b"a plan"))

    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    def lose(self, number: int) -> None:
        """Cut a rank off from the store."""
        self.ranks[number].store.is_gone = True

    def kill(self, number: int) -> None:
        self.ranks[number].lives = False

    def settle(self) -> None:
        """Let every living rank begin iterations and look, until all know what was decided, and
        run by it.
        """
        for _ in range(3):
            self.now_s += 2 * LOOK_S
            for number, rank in enumerate(self.ranks):
                self.begin(number)
                self.step(number)
                while rank.lives and not rank.steps.is_idle:
                    self.step(number)
        last = max(rank.iteration for rank in self.ranks)
        since = max((each.iteration for each in self.accepted()), default=0)
        for rank in self.ranks:
            while rank.lives and rank.iteration < max(last + 1, since):
                rank.begin()

    def accepted(self) -> list[Acceptance]:
        outcomes = [proposal.outcome for rank in self.ranks for proposal in rank.proposals]
        return [outcome for outcome in outcomes if isinstance(outcome, Acceptance)]

    def check_settled(self) -> None:
        """After `settle`, check that versions had one order, all ranks ended with the last, and
        keys are gone.
        """
        since = {1: 0, **{each.version: each.iteration for each in self.accepted()}}
        assert len(since) == 1 + len(self.accepted())
        for rank in self.ranks:
            if list(rank.given) != sorted(set(rank.given)):
                raise Disagreement(f"given {rank.given}")
            for iteration, version, given in rank.ran:
                # Nobody is told since when a version begins if its proposer was killed.
                expected = max(
                    each for each in given if since.get(each, iteration + 1) <= iteration
                )
                if version < expected or since.get(version, iteration) > iteration:
                    raise Disagreement(f"{iteration} by {version} instead of {expected}")
        living = [rank for rank in self.ranks if rank.lives]
        assert all(proposal.outcome is not None for rank in living for proposal in rank.proposals)
        if len(living) == len(self.ranks) and not any(rank.store.is_gone for rank in self.ranks):
            assert [rank.agreement.lost for rank in living] == [None] * len(living)
            newest = max(since)
            if {rank.ran[-1][1] for rank in living} != {newest}:
                raise Disagreement(
                    f"{[rank.ran[-1] for rank in living]}, and the newest is {newest}"
                )
            kept = ["plans/" + str(newest), "state", "versions"] if newest > 1 else []
            if sorted(self.store.list_keys()) != kept:
                raise Disagreement(
                    f"the store has {self.store.list_keys()}, and the newest is {newest}"
                )

    def end(self) -> None:
        for rank in self.ranks:
            rank.steps.end()
        for memory in self.memories:
            memory.close()
