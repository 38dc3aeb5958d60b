"""All ranks gather the same messages on a board."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

from stepped_ranks import Counted
from torch.distributed import HashStore, TCPStore

from perseus_planner.base.errors import RankError
from perseus_planner.base.wires import Board


def value_of(rank: int) -> bytes:
    return bytes(range(256)) * rank


def gather(store: Any, rank: int, size: int, value: bytes, timeout_s: float) -> Sequence[Any]:
    return Board(store).gather(rank, size, value, bytes, timeout_s)


def all_enter(
    store: Any, numbers: list[int], size: int, timeout_s: float
) -> list[list[bytes | None]]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        futures = [
            pool.submit(gather, Counted(store), rank, size, value_of(rank), timeout_s)
            for rank in numbers
        ]
        return [each.result() for each in futures]


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_all_ranks_receive_the_values_of_all(kind: str):
    store = HashStore() if kind == "hash" else TCPStore("127.0.0.1", 0, None, True)
    assert all_enter(store, [0, 1, 2, 3], 4, 60.0) == 4 * [[value_of(rank) for rank in range(4)]]
    assert store.check(["all"])
    assert not any(store.check([f"values/{rank}"]) for rank in range(4))


@pytest.mark.parametrize("late", [0, 3])
def test_a_late_rank_receives_what_the_others_received(late: int):
    store = HashStore()
    there = [rank for rank in range(4) if rank != late]
    expected = [None if rank == late else value_of(rank) for rank in range(4)]
    assert all_enter(store, there, 4, 0.2) == 3 * [expected]
    assert all_enter(store, [late], 4, 60.0) == [expected]


def test_a_rank_without_others_enters_at_once():
    assert gather(HashStore(), 0, 1, b"", 60.0) == [b""]


def test_waiting_can_be_interrupted():
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        gather(HashStore(), 0, 2, b"", 60.0)
    timer.join()


def test_a_store_that_is_gone_is_an_error():
    store = Counted(HashStore())
    store.is_gone = True
    with pytest.raises(RankError) as error:
        gather(store, 0, 2, b"", 60.0)
    assert str(error.value) == "the rank or launcher that holds the job's store has ended; see why"


def test_what_a_rank_of_another_version_has_written_is_an_error():
    store = HashStore()
    with pytest.raises(
        RankError, match=r"Expected `int \| null`, got `str`.*; use the same version"
    ):
        Board(store).gather(0, 1, "text", int, 60.0)
