"""Rank 0's part in the autopilot: which keys it reads, what it passes on, and what follows when
the process ends.
"""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from perseus_planner.base.loops import FIRST_PAUSE_S
from perseus_planner.base.wires import decode, encode
from perseus_planner.extensions.autopilot.ranks import coordinator as module
from perseus_planner.extensions.autopilot.ranks.__main__ import _taken
from perseus_planner.extensions.autopilot.ranks.coordinator import (
    NOTHING,
    Coordinator,
    observed_key,
    rank_key,
)
from perseus_planner.extensions.autopilot.ranks.messages import (
    End,
    Frame,
    FromProcess,
    JobDescription,
    Observations,
    Places,
    Programs,
    RankTraining,
    Status,
    ToProcess,
    Waits,
    order_number,
)
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.runtime.decider import Learnt, ServiceExchange
from perseus_planner.runtime.options import AutopilotSettings

ORDER = [(0, "F", 0), (0, "B", 0)]
OTHER = [(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "B", 1)]


class Store(HashStore):
    """Counts the keys that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read.append(len(keys))
        found: list[bytes] = super().multi_get(keys)
        return found


class Process:
    """Stands for the process of the autopilot."""

    def __init__(self) -> None:
        self.sent: list[ToProcess] = []
        self.replies: list[FromProcess] = []
        self.has_ended = False

    def send(self, message: ToProcess) -> None:
        self.sent.append(message)

    def messages(self) -> list[FromProcess]:
        if self.has_ended:
            raise EOFError
        replies, self.replies = self.replies, []
        return replies

    def end(self, timeout_s: float) -> list[FromProcess]:
        self.has_ended = True
        return []


class Job:
    """Pipelines of one rank, rank 0's part in the autopilot, and what it does."""

    def __init__(
        self,
        pipelines: int,
        monkeypatch: pytest.MonkeyPatch,
        exchange: ServiceExchange | None = None,
    ) -> None:
        self.exchange = exchange
        self.store, self.now_s, self.begun = Store(), 0.0, -1
        self.started: list[Process] = []
        self.warned: list[str] = []
        self.proposed: list[bytes] = []
        self.lost = None
        monkeypatch.setattr(module, "AutopilotProcess", self._start)
        places = Places.among([(pipeline, 0) for pipeline in range(pipelines)])
        described = JobDescription(AutopilotSettings(), places, sets_clocks=True, state=None)
        self.coordinator = Coordinator(
            self.store,
            described,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            exchange,
            now_s=lambda: self.now_s,
        )
        for rank in range(pipelines):
            self.store.set(observed_key(rank), NOTHING)

    def _start(self) -> Process:
        self.started.append(Process())
        return self.started[-1]

    def since_if_proposed(self) -> int:
        return self.begun + 2

    def propose(self, blob: bytes) -> None:
        self.proposed.append(blob)

    def warn(self, key: str, text: str, **_: Any) -> None:
        self.warned.append(text)

    def observe(self, rank: int, iteration: int, order: list[tuple[int, str, int]] = ORDER) -> None:
        self.store.set(rank_key(rank), encode(RankTraining(tuple(order), None)))
        self.store.set(
            observed_key(rank), encode(Frame(rank, order_number(order), iteration, 0, 1.0))
        )

    def look(self) -> list[ToProcess]:
        """Look once; return what the process is told."""
        self.now_s += 1.0
        self.coordinator.look()
        sent, self.started[-1].sent = self.started[-1].sent, []
        return sent


def test_an_iteration_is_passed_on_once_when_all_have_told_it(monkeypatch: pytest.MonkeyPatch):
    job = Job(2, monkeypatch)
    assert job.look() == []
    job.observe(0, 0)
    job.begun = 1
    assert job.look() == []
    job.observe(1, 0)
    described, observed = job.look()
    assert isinstance(described, JobDescription)
    assert isinstance(observed, Observations)
    assert described.trainings == {0: RankTraining(tuple(ORDER), None)}
    assert decode(encode(described), ToProcess) == described
    ranks = [decode(frame, Frame).rank for frame in observed.frames]
    assert (observed.since, ranks) == (3, [0, 1])
    reads = len(job.store.read)
    assert job.look() == []
    assert len(job.store.read) == reads  # nothing is left to be told


def test_another_order_is_told_when_all_pipelines_run_it(monkeypatch: pytest.MonkeyPatch):
    job = Job(2, monkeypatch)
    kinds = []
    for iteration, orders in enumerate(
        [(ORDER, ORDER), (OTHER, ORDER), (OTHER, OTHER), (OTHER, OTHER)]
    ):
        assert job.warned == []
        for rank, order in enumerate(orders):
            job.observe(rank, iteration, order)
        job.begun = iteration + 1
        kinds.append(list(map(type, job.look())))
    assert kinds == [
        [JobDescription, Observations],
        [Observations],
        [JobDescription, Observations],
        [Observations],
    ]


def test_pipelines_that_go_on_running_different_orders_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
):
    job = Job(2, monkeypatch)
    for iteration in range(10):
        for rank, order in enumerate([ORDER, OTHER]):
            job.observe(rank, iteration, order)
        job.begun = iteration + 1
        assert list(map(type, job.look())) == [Observations]
        assert bool(job.warned) == (iteration >= module.DIFFERING)
    assert set(job.warned) == {
        "the pipelines of this job run different orders of computations, which the autopilot "
        "cannot plan; training goes on as it did before"
    }


def test_in_a_large_job_only_those_whose_turn_it_is_are_read(monkeypatch: pytest.MonkeyPatch):
    job = Job(200, monkeypatch)
    for iteration in range(8):
        for rank in range(200):
            if rank % 4 == iteration % 4:
                job.observe(rank, iteration)
        job.begun = iteration + 1
        kinds = list(map(type, job.look()))
        assert kinds == ([JobDescription, Observations] if iteration == 3 else [Observations])
    assert job.store.read == [50] * 8


def test_what_the_service_says_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    exchange = ServiceExchange()
    job = Job(1, monkeypatch, exchange)
    job.look()
    job.observe(0, 0)
    job.begun = 1
    assert list(map(type, job.look())) == [JobDescription, Observations]
    exchange.waits_s = (1.25,)
    assert [job.look(), job.look()] == [[Waits((1.25,))], []]
    learnt = Learnt("c", "y", "s", 4, 1.0)
    job.started[0].replies = [learnt, Status(AutopilotStatus("learning"))]
    job.look()
    assert exchange.learnt == learnt
    assert exchange.status.phase == "learning"
    job.started[0].has_ended = True  # its successor is told all again
    job.look()
    job.now_s += FIRST_PAUSE_S
    job.observe(0, 1)
    job.begun = 2
    assert list(map(type, job.look())) == [JobDescription, Observations, Waits]


def test_programs_are_proposed_and_a_process_that_ends_is_started_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
):
    job = Job(1, monkeypatch)
    job.look()
    programs = Programs(1, (), (), (), 1410, 0.5, None, AutopilotStatus())
    job.started[0].replies = [programs]
    job.look()
    assert job.proposed == [encode(programs)]
    job.started[0].has_ended = True
    job.look()
    (text,) = job.warned
    assert "the process of the autopilot has ended; training goes on with its last program" in text
    job.look()
    assert len(job.started) == 1
    job.now_s += FIRST_PAUSE_S
    job.observe(0, 0)
    job.begun = 1
    assert list(map(type, job.look())) == [JobDescription, Observations]
    assert len(job.started) == 2


class LateQueue(queue.SimpleQueue[ToProcess]):
    """A queue into which a message comes while its reader waits for one."""

    def __init__(self, late: ToProcess) -> None:
        self._late = [late]

    def get(self, block: bool = True, timeout: float | None = None) -> ToProcess:
        if self.empty() and self._late:
            self.put(self._late.pop())
        return super().get(block, timeout)


def test_while_the_process_rests_observations_wait_and_all_else_ends_its_rest():
    observed = Observations(3, ())
    received = LateQueue(observed)
    received.put(observed)
    rests_until_s = time.monotonic() + 0.5
    assert _taken(received, rests_until_s) == [observed, observed]
    assert time.monotonic() >= rests_until_s
    for message in (observed, observed, End()):
        received.put(message)
    assert _taken(received, time.monotonic() + 1000) == [observed, observed, End()]


def test_the_job_is_described_before_training_if_all_ranks_know_what_they_will_run(
    monkeypatch: pytest.MonkeyPatch,
):
    job, told = Job(2, monkeypatch), encode(RankTraining(tuple(ORDER), None))
    job.store.set(rank_key(0), told)
    assert job.look() == []
    job.store.set(rank_key(1), told)
    (described,) = job.look()
    assert isinstance(described, JobDescription)
    assert list(described.trainings) == [0]
    assert job.look() == []
    for rank in range(2):
        job.observe(rank, 0)
    job.begun = 1
    (observed,) = job.look()
    assert isinstance(observed, Observations)
