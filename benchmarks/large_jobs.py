"""Number 29: the ranks of large jobs begin together, and take a new plan: the real functions, in
simulated time.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

from data import MissingError, Size
from results import Check, Section, Table

from perseus_planner.extensions.autopilot.ranks.messages import Places, turns
from perseus_planner.extensions.service.agent.outbox import RankLocation, StoreMessages
from perseus_planner.runs.recording import Attempt
from perseus_planner.runtime import job as jobs
from perseus_planner.runtime import rendezvous
from perseus_planner.runtime.job import JobWarnings, TrainingJob
from perseus_planner.runtime.rendezvous import RankInfo, Rendezvous
from perseus_planner.runtime.switching import Acceptance, Agreement, NodeShare

NUMBER = 29
STORE_PER_S = 90_000.0
"""How many operations a store serves in a second."""

_NODE_RANKS, _PIPELINE_RANKS = 8, 16
_PLAN = random.Random(0).randbytes(64 << 10)  # as sent, as long as those of the largest pipelines
_SPREAD_S = 0.5  # within which ranks come
_ROUND_S = 0.1  # twice the time between two rounds of a background thread, so that all are slow
_LOCAL_PAUSE_S = 0.5  # between two looks at the memory of a node, which take most of the time here
_LATE_S = 3.0  # for which the others wait for ranks that never come, instead of 300
_OPERATIONS = ("set", "add", "check", "compare_set", "delete_key", "multi_get")
_GIB = 2**30
_LIMITS = {16_384: (1.0, 1.0), 100_000: (5.0, 8.0)}  # ranks -> CPU s of a rank, GiB

_COLUMNS = {
    "ranks": ("ranks", ",d"),
    "absent": ("absent", ",d"),
    "first_s": ("rank 0, CPU s", ".3f"),
    "other_s": ("slowest other rank, CPU s", ".4f"),
    "gib": ("through the store, GiB", ".3f"),
    "per_rank": ("operations, a rank", ".1f"),
    "of_first": ("operations of rank 0", ",d"),
    "store_s": ("the store serves them in, s", ".2f"),
    "joined_s": ("all have begun after, simulated s", ".1f"),
    "new_plan": ("iterations until all run by a new plan", ""),
}


class _CountedStore:
    """A store in this process that counts its operations, and the bytes of keys and values; it has
    none that wait.
    """

    def __init__(self) -> None:
        try:
            from torch.distributed import HashStore
        except ModuleNotFoundError as error:
            raise MissingError(f"{error.name} is not installed") from error
        self._store: Any = HashStore()
        self.operations = self.bytes = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _OPERATIONS:
            raise AttributeError(name)
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            # `multi_get` waits for absent keys
            assert name != "multi_get" or self._store.check(*arguments)
            answer = operation(*arguments)
            self.operations += 1
            self.bytes += sum(map(_size, arguments)) + _size(answer)
            return answer

        return counted


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list) else 8


class _Memory:
    """Memory of a node, in this process, which may not open as many files as a large job."""

    _all: ClassVar[list[_Memory]] = []

    def __init__(self) -> None:
        self._number, self._content = len(self._all), (-1, b"")
        self._all.append(self)

    @classmethod
    def create(cls) -> _Memory:
        return cls()

    @classmethod
    def open(cls, address: str) -> _Memory:
        return cls._all[int(address)]

    @property
    def address(self) -> str:
        return str(self._number)

    def write(self, version: int, content: bytes) -> None:
        self._content = (version, content)

    def read(self, after: int) -> tuple[int, bytes] | None:
        return self._content if self._content[0] > after else None

    def close(self) -> None:
        pass


class LargeJob:
    """The ranks of a job in simulated time.

    Args:
        ranks: How many.
        absent: Those that never come.
        spread_s: Within how many seconds the others come.
    """

    def __init__(
        self, ranks: int, absent: Collection[int] = (), spread_s: float = _SPREAD_S
    ) -> None:
        self.store, self.now_s = _CountedStore(), 0.0
        self.cpu_s: dict[int, float] = dict.fromkeys(
            (rank for rank in range(ranks) if rank not in absent), 0.0
        )
        self.operations: Counter[int] = Counter()
        self.meetings: dict[int, Rendezvous] = {}
        self.places: Places | None = None
        self.agreements: list[Agreement] = []
        self._ranks, self._stack = ranks, ExitStack()
        self._draw, self._spread_s = random.Random(0), spread_s

    def join(self) -> None:
        """Let all ranks begin, up to their first iteration."""
        with (
            mock.patch.object(jobs, "NodeMemory", _Memory),
            mock.patch.object(rendezvous, "RENDEZVOUS_S", _LATE_S + self._spread_s),
            mock.patch.object(rendezvous, "_LOCAL_PAUSE_S", _LOCAL_PAUSE_S),
            mock.patch("logging.Logger.warning"),
        ):
            steps = {rank: self._join(rank) for rank in self.cpu_s}
            events = [(self._draw.uniform(0.0, self._spread_s), rank) for rank in steps]
            heapq.heapify(events)
            gc.collect()
            gc.disable()  # it would count as work of the rank that runs
            while events:
                self.now_s, rank = heapq.heappop(events)
                pause_s = self._timed(rank, lambda rank=rank: next(steps[rank], None))
                if pause_s is not None:
                    heapq.heappush(events, (self.now_s + pause_s, rank))
        self._timed(0, lambda: StoreMessages(self._as_store()).locations(self._ranks))
        gc.enable()

    def _timed(self, rank: int, step: Callable[[], Any]) -> Any:
        before = self.store.operations
        begin_s = time.thread_time()
        result = step()
        self.cpu_s[rank] = self.cpu_s.get(rank, 0.0) + time.thread_time() - begin_s
        self.operations[rank] += self.store.operations - before
        return result

    def _as_store(self) -> Any:
        return self.store

    def _join(self, rank: int) -> Generator[float]:
        job = TrainingJob(self._as_store(), rank, self._ranks)
        meeting = Rendezvous(job, JobWarnings(job), self._stack, lambda: self.now_s)
        self.meetings[rank] = meeting
        pipelines = self._ranks // _PIPELINE_RANKS or 1
        info = RankInfo(str(rank // _NODE_RANKS), None, rank % pipelines, rank // pipelines)
        yield from meeting.meet(info, *((Attempt(1), _PLAN) if rank == 0 else ()))
        assert meeting.plan == _PLAN
        yield from meeting.wait_at("plans", 300.0)
        yield from meeting.wait_at("gpus", 120.0)
        own = meeting.part.ranks[rank]
        location = RankLocation(rank, own.pipeline, info.rank, f"node-{info.node:>8}", "GPU-" * 10)
        StoreMessages(self._as_store()).write_location(location)
        if rank == 0:
            self.places = Places.among(meeting.positions)
        else:
            turns(meeting.part.pipelines, meeting.part.positions)

    def iterate(self, iteration: int, lasts_s: float) -> list[int]:
        """Run an iteration, which each rank begins up to a third of it after the first one; return
        the version of each rank.
        """
        if not self.agreements:
            self.agreements = [self._agreement(rank) for rank in self.meetings]
        rounds = round(lasts_s / _ROUND_S)
        begins = [self._draw.randrange(max(1, rounds // 3)) for _ in self.agreements]
        versions = [0] * len(self.agreements)
        for number in range(rounds):
            self.now_s += _ROUND_S
            for rank, agreement in enumerate(self.agreements):
                if begins[rank] == number:
                    versions[rank] = agreement.version_at(iteration)
                agreement.look()
        return versions

    def _agreement(self, rank: int) -> Agreement:
        meeting = self.meetings[rank]
        here = meeting.node
        share = NodeShare(meeting.part.nodes, looks=here.leads, plans=here.plans)
        return Agreement(self._as_store(), _take, share, now_s=lambda: self.now_s)


def _take(version: int, blob: bytes) -> None:
    """Have every plan fit."""
    assert version > 1
    assert blob == b"a plan"


def measure(size: Size) -> Section:
    """Return what joining takes, in one process, and whether a new plan comes soon."""
    rows = []
    whole = [(1_024, 0), (1_024, 10), (16_384, 0), (16_384, 164), (100_000, 0)]
    for ranks, absent in whole if size == Size() else [(1_024, 0), (1_024, 10)]:
        gone = random.Random(1).sample(range(1, ranks), absent)
        job = LargeJob(ranks, frozenset(gone))
        job.join()
        rows.append(_row(job, ranks, absent))
    return Section(
        NUMBER,
        "Large jobs",
        "*Simulated*, on the real functions: ranks on nodes of 8, in pipelines of 16 that their "
        "engine does not number, come within half a second, meet, read a plan of 64 KiB, wait for "
        "each other before and after they would attach to their controllers, and tell rank 0 their "
        "locations. All run in one process, one after the other, over a store in it that counts "
        "operations and the bytes of keys and values; the memory of a node is an object. CPU "
        "seconds are those of each rank's own steps, operations of the store among them. Where "
        "ranks are absent, the others wait for them, for 3 simulated seconds; they look at the "
        "memory of their node every 0.5 s instead of 0.05. To reach: 1 CPU s "
        "a rank and 1 GiB for 16,384 ranks, 5 CPU s and 8 GiB for 100,000.",
        [Table(_COLUMNS, rows)],
        [_check(row) for row in rows],
        [_beyond(rows[-1])],
    )


def _row(job: LargeJob, ranks: int, absent: int) -> dict[str, Any]:
    operations, joined_s = job.store.operations, job.now_s
    row = {
        "ranks": ranks,
        "absent": absent,
        "first_s": job.cpu_s[0],
        "other_s": max(cpu_s for rank, cpu_s in job.cpu_s.items() if rank),
        "gib": job.store.bytes / _GIB,
        "per_rank": operations / ranks,
        "of_first": job.operations[0],
        "store_s": operations / STORE_PER_S,
        "joined_s": joined_s,
        "new_plan": None,
    }
    if ranks <= 1_024:
        for iteration in range(2):
            job.iterate(iteration, 0.5)
        proposal = job.agreements[0].propose(b"a plan")
        versions = [job.iterate(iteration, 0.5) for iteration in range(2, 9)]
        assert isinstance(proposal.outcome, Acceptance)
        row["new_plan"] = next(number for number, each in enumerate(versions) if set(each) == {2})
    return row


def _check(row: dict[str, Any]) -> Check:
    most_s, most_gib = _LIMITS.get(row["ranks"], (1.0, 1.0))
    cpu_s = max(row["first_s"], row["other_s"])
    gone = f", {row['absent']:,} of them absent" if row["absent"] else ""
    return Check(
        f"{row['ranks']:,} ranks{gone}: {cpu_s:.2f} CPU s at most on a rank, limit {most_s:g}; "
        f"{row['gib']:.2f} GiB, limit {most_gib:g}",
        cpu_s <= most_s and row["gib"] <= most_gib,
    )


def _beyond(row: dict[str, Any]) -> str:
    """Say what breaks first in larger jobs, if all grows as the ranks do."""
    until = {
        "rank 0 works for more than 60 s, after which the others no longer wait for it": (
            60.0 / row["first_s"]
        ),
        "the store is busy for more than the 300 s for which ranks wait for each other": (
            300.0 / row["store_s"]
        ),
        "more than a TiB goes through the store": 1024.0 / row["gib"],
        "a registration at the service has more than the 1,048,576 locations that it takes": (
            2**20 / row["ranks"]
        ),
    }
    ordered = sorted(until.items(), key=lambda item: item[1])
    texts = [f"{text}, from {int(row['ranks'] * ratio):,} ranks on" for text, ratio in ordered]
    return f"What breaks first beyond, as everything grows with the ranks: {'; '.join(texts)}."
