"""The ranks of a job meet: each learns its part, and nobody waits for ranks that do not come."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from large_jobs import LargeJob
from stepped_ranks import Counted
from torch import distributed as dist
from torch.distributed import HashStore, TCPStore

from perseus_planner.base.errors import PlanError, RankError
from perseus_planner.base.wires import NodeMemory
from perseus_planner.runs.recording import Attempt
from perseus_planner.runtime import rendezvous
from perseus_planner.runtime.job import JobWarnings, TrainingJob
from perseus_planner.runtime.rendezvous import (
    RankInfo,
    Rendezvous,
    node_parts,
)

PLAN = b"a plan"
NODES = ["a", "b", "a", "a"]
INFOS = [RankInfo(node, None, rank % 2, rank // 2) for rank, node in enumerate(NODES)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 60.0)
    monkeypatch.setattr(rendezvous, "REFUSAL_S", 1.0)


def met(
    store: Any,
    rank: int,
    stack: ExitStack,
    ranks: int = 4,
    now_s: Callable[[], float] = time.monotonic,
) -> Rendezvous:
    """Return the part of a rank, which has met the others."""
    job = TrainingJob(store, rank, ranks)
    meeting = Rendezvous(job, JobWarnings(job), stack, now_s)
    opening = (Attempt(7), PLAN) if rank == 0 else ()
    meeting.finish("ranks", meeting.meet(INFOS[rank], *opening))
    return meeting


def all_met(
    store: Any,
    ranks: Sequence[int],
    stack: ExitStack,
    now_s: Callable[[], float] = time.monotonic,
) -> list[Rendezvous]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(met, Counted(store), rank, stack, now_s=now_s) for rank in ranks]
        return [future.result() for future in futures]


def over_when_joined(store: Any, ranks: int) -> Callable[[], float]:
    """Return a clock that stands still until so many ranks are counted, and then is past all
    limits: however long a busy machine takes to start their threads.
    """
    begin_s = time.monotonic()

    def now_s() -> float:
        has_all = store.add("join/ranks", 0) >= ranks
        return time.monotonic() + 1.0 if has_all else begin_s

    return now_s


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_each_rank_learns_the_part_of_its_node_and_the_plan(kind: str, stack: ExitStack):
    store = HashStore() if kind == "hash" else TCPStore("127.0.0.1", 0, None, True)
    meetings = all_met(store, range(4), stack)
    of_node = {"a": {0: (0, True), 2: (0, True), 3: (1, True)}, "b": {1: (1, True)}}
    for node, meeting in zip(NODES, meetings, strict=True):
        part = meeting.part
        assert (part.ranks, meeting.plan) == (of_node[node], PLAN)
        assert (part.pipelines, part.positions, part.nodes, part.present) == (2, 4, 2, 4)
        assert (part.has_plan, part.attempt, part.firsts) == (True, Attempt(7, []), ())
    assert sorted(meeting.node.leads for meeting in meetings) == [False, False, True, True]
    assert [meeting.positions for meeting in meetings[1:]] == 3 * [()]
    assert meetings[0].positions == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_late_rank_goes_on_by_itself(
    late: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.2)
    store = HashStore()
    others = [rank for rank in range(4) if rank != late]
    there = all_met(store, others, stack, over_when_joined(store, 3))
    assert f"rank {late} had not joined within 0.2 s" in caplog.text
    for meeting in there:
        assert (meeting.part.present, meeting.part.has_plan) == (3, late > 0)
        assert late not in meeting.part.ranks
        for barrier in ("plans", "gpus"):
            meeting.finish(barrier, meeting.wait_at(barrier, 0.2))
    (own,) = all_met(store, [late], stack)
    assert late not in own.part.ranks
    assert own.plan == PLAN
    assert own.own == (late % 2, False)
    own.finish("plans", own.wait_at("plans", 60.0))


def test_ranks_that_never_come_are_waited_for_a_third_of_the_time_out_of_the_process_group(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
):
    dist.init_process_group(
        "gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=0.6)
    )
    stack.callback(dist.destroy_process_group)
    begun_s = time.monotonic()
    meeting = met(HashStore(), 0, stack, 2)
    assert time.monotonic() - begun_s < rendezvous.RENDEZVOUS_S / 2
    assert meeting.part.present == 1
    assert "rank 1 had not joined within 0.2 s" in caplog.text


def test_a_rank_without_others_begins_at_once(stack: ExitStack):
    assert met(HashStore(), 0, stack, 1).part.ranks == {0: (0, True)}


def test_ranks_that_share_no_memory_go_through_the_store(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(NodeMemory, "open", mock.Mock(side_effect=PermissionError))
    meetings = all_met(HashStore(), range(4), stack)
    assert [each.plan for each in meetings] == 4 * [PLAN]
    (leader,) = (each for each in (*meetings[:1], *meetings[2:]) if each.node.leads)
    leader.node.pass_on(controller="an address")
    assert meetings[2].node.look().controller == "an address"


def test_ranks_whose_leader_has_ended_read_for_themselves(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.2)
    store = HashStore()
    store.add("join/nodes/a", 1)
    store.set("join/memory/a", "1000000000/fd/1 1000000000/fd/2")
    meetings = all_met(store, range(4), stack, over_when_joined(store, 4))
    assert [(len(each.part.ranks), each.plan) for each in meetings] == [
        (3, PLAN),
        (1, PLAN),
        (3, PLAN),
        (3, PLAN),
    ]


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_refusal_ends_all_ranks_which_name_it(refusing: int, stack: ExitStack):
    store = HashStore()

    def begin(rank: int) -> str:
        with pytest.raises((RankError, PlanError)) as error:
            check(rank)
        return str(error.value)

    def check(rank: int) -> None:
        meeting = met(Counted(store), rank, stack)
        with meeting.refusing("plans"):
            if rank == refusing:
                raise PlanError("it does not fit")
        meeting.finish("plans", meeting.wait_at("plans", 60.0))

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(begin, range(4)))
    others = f"rank {refusing} does not begin: it does not fit"
    assert texts == ["it does not fit" if rank == refusing else others for rank in range(4)]


def test_waiting_can_be_interrupted(stack: ExitStack):
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def wait() -> None:
        timer.start()  # where the interrupt is expected, as it may come at once on a busy machine
        met(HashStore(), 0, stack)

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()


def test_a_store_that_is_gone_is_an_error(stack: ExitStack):
    store = Counted(HashStore())
    store.is_gone = True
    with pytest.raises(RankError) as error:
        met(store, 0, stack)
    assert str(error.value) == "the rank or launcher that holds the job's store has ended; see why"


def test_what_a_rank_of_another_version_has_written_is_an_error(stack: ExitStack):
    store = HashStore()
    store.add("join/ranks", 1)
    store.set("join/infos/1", '"text"')
    with pytest.raises(RankError, match=r"Expected `array`, got `str`.*; use the same version"):
        met(store, 0, stack, 2)


@given(st.data())
def test_parts_are_those_that_each_rank_would_work_out_from_the_infos_of_all(data: st.DataObject):
    pipelines, ranks, gpus = (data.draw(st.integers(1, 4)) for _ in range(3))
    order = data.draw(st.permutations(range(pipelines * ranks * gpus)))
    is_numbered = data.draw(st.booleans())
    peers: list[tuple[int, ...]] = [()] * len(order)
    numbers: list[int | None] = [None] * len(order)
    for number in range(pipelines * (gpus if not is_numbered else 1)):
        size = ranks * (gpus if is_numbered else 1)
        members = order[number * size : (number + 1) * size]
        for first in range(0, size, ranks):
            for rank in members[first : first + ranks]:
                peers[rank] = tuple(members[first : first + ranks])
                numbers[rank] = number if is_numbered else None
    infos = [
        RankInfo(data.draw(st.sampled_from("abc")), numbers[rank], members[0], members.index(rank))
        if data.draw(st.integers(0, 3))
        else None
        for rank, members in enumerate(peers)
    ]
    # As each rank did once, from the infos of all.
    keys = [
        None if info is None else peers[rank] if info.pipeline is None else (info.pipeline,)
        for rank, info in enumerate(infos)
    ]
    known = sorted({key for key in keys if key is not None})
    expected = [
        None
        if key is None
        else (known.index(key) if infos[rank].pipeline is None else key[0], peers[rank].index(rank))
        for rank, key in enumerate(keys)
    ]
    positions, parts = node_parts(infos, None, has_plan=False)
    assert positions == expected
    assert ("" in parts) == (None in infos)
    parts.pop("", None)
    for node, part in parts.items():
        assert (part.pipelines, part.nodes) == (len(known), len(parts))
        assert part.present == len(infos) - infos.count(None)
        assert part.ranks == {
            rank: (expected[rank][0], expected.index(expected[rank]) == rank)
            for rank, info in enumerate(infos)
            if info is not None and info.node == node
        }


@pytest.mark.parametrize("absent", [0, 8])
def test_operations_and_bytes_of_joining_grow_as_the_ranks_do(absent: int):
    jobs = [LargeJob(ranks, range(1, 1 + absent)) for ranks in (256, 1024)]
    for job in jobs:
        job.join()
    few, many = jobs
    assert many.store.operations <= 30 * 1024
    assert many.store.operations <= 4.4 * few.store.operations
    assert many.store.bytes <= 12_000 * 1024  # an eighth of it is the plan
    assert many.store.bytes <= 4.4 * few.store.bytes
    assert max(count for rank, count in many.operations.items() if rank) <= 250
    assert many.operations[0] <= 4.4 * few.operations[0] + 100 * absent
