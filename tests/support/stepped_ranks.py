"""Ranks that share a store and advance by one store operation at a time, in any order; and their invariants."""
# ruff: noqa: TID253 - tests that use this are there for torch

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from perseus_planner.runtime.switching.agreement import Acceptance, Agreement, Proposal

PATIENCE_S = 60.0
_ALLOWED = {"set", "add", "check", "compare_set", "delete_key"}  # these never wait


class Disagreement(Exception):
    """Two ranks ran an iteration by different plans, or one went back to an older one."""


class _Ended(BaseException):
    """Ends a rank's thread where it stands."""


class Counted:
    """A store that counts its operations, and refuses those that may wait."""

    def __init__(self, store: Any, before: Callable[[], None] = lambda: None):
        self._store, self._before = store, before
        self.counts: Counter[str] = Counter()
        self.is_gone = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert name in _ALLOWED, name

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

    def __init__(self, world: World, number: int):
        self.steps = Steps()
        self.store = Counted(world.store, self.steps.before_operation)
        self.agreement = world.kind(
            self.store, number, world.size, self._accept, patience_s=PATIENCE_S, now_s=lambda: world.now_s
        )
        self.iteration = -1
        self.version = 1
        self.refuses = False
        self.lives = True
        self.proposals: list[Proposal] = []

    def look(self) -> None:
        self.agreement.look(self.iteration + 2)

    def _accept(self, version: int, blob: bytes) -> str | None:
        assert blob == b"a plan"
        return "no such clock" if self.refuses else None


class World:
    """All ranks, their store and their clock; `kind` is the protocol that they follow."""

    def __init__(self, size: int, kind: type[Agreement] = Agreement):
        self.size, self.kind = size, kind
        self.store = HashStore()
        self.now_s = 0.0
        self.ran: dict[int, int] = {}
        self.ranks = [Rank(self, number) for number in range(size)]

    def step(self, number: int, times: int = 1) -> None:
        """Let a rank's background thread do some operations."""
        rank = self.ranks[number]
        for _ in range(times if rank.lives else 0):
            rank.steps.step(rank.look)

    def begin(self, number: int) -> int:
        """Let a rank's training thread begin its next iteration; return its version, 0 for none."""
        rank = self.ranks[number]
        if not rank.lives:
            return 0
        rank.iteration += 1
        if not rank.agreement.may_begin(rank.iteration):
            return 0
        version = rank.agreement.version_at(rank.iteration)
        if self.ran.setdefault(rank.iteration, version) != version:
            raise Disagreement(f"{rank.iteration} by {self.ran[rank.iteration]} and by {version}")
        if version < rank.version:
            raise Disagreement(f"rank {number} went back from {rank.version} to {version}")
        rank.version = version
        return version

    def propose(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.lives:
            rank.proposals.append(rank.agreement.propose(b"a plan"))

    def refuse(self, number: int) -> None:
        self.ranks[number].refuses = True

    def accept(self, number: int) -> None:
        self.ranks[number].refuses = False

    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    def lose(self, number: int) -> None:
        """Cut a rank off from the store."""
        self.ranks[number].store.is_gone = True

    def kill(self, number: int) -> None:
        self.ranks[number].lives = False

    def settle(self) -> None:
        """Let every living rank go on until all proposals have ended."""
        for _ in range(4):
            self.now_s += PATIENCE_S + 1
            for number, rank in enumerate(self.ranks):
                self.step(number)
                while rank.lives and not rank.steps.is_idle:
                    self.step(number)

    def check_settled(self) -> None:
        """After `settle`, check that proposals have ended, all run by the last decision, and no keys are left."""
        living = [rank for rank in self.ranks if rank.lives]
        connected = [rank for rank in living if not rank.store.is_gone]
        assert [rank.agreement.lost for rank in connected] == [None] * len(connected)
        outcomes = [proposal.outcome for rank in living for proposal in rank.proposals]
        assert None not in outcomes
        decided = [outcome for outcome in outcomes if isinstance(outcome, Acceptance)]
        for iteration, version in self.ran.items():
            assert all((iteration >= each.iteration) == (version >= each.version) for each in decided)
        last = max(rank.iteration for rank in self.ranks) + 3
        versions = {rank.agreement.version_at(last) for rank in connected}
        if len(connected) == self.size:
            assert versions == {max((each.version for each in decided), default=1)}
            left = self.store.num_keys() - sum(map(self.store.check, (["state"], ["versions"])))
            assert left == 0, left
        else:  # a proposer that died may have left one open
            assert len(versions - {0}) <= 1

    def end(self) -> None:
        for rank in self.ranks:
            rank.steps.end()
