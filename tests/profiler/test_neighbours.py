"""Ranks that wait for each other's messages on GPUs never wait for ever; NCCL and the streams
are stand-ins.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from fake_nccl import FakeNccl

from perseus_planner.base.errors import RankError
from perseus_planner.profiler.ranks import neighbours
from perseus_planner.profiler.ranks.neighbours import Neighbour

pytest.importorskip("torch")

MESSAGE_S = 0.2
PAIRS = {0: 1, 1: 0}


class Device(NamedTuple):
    type: str
    index: int


class Group:
    """The ranks as `Neighbour` uses them."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.store = rank, store

    def check(self) -> None:
        pass

    def rank_error(self, text: str, *, has_lost: bool = True) -> RankError:
        return RankError(text)


def pair(monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl) -> list[Neighbour]:
    """Return two neighbours, whose torch is the stand-in."""
    from torch.distributed import HashStore

    store: Any = HashStore()
    monkeypatch.setitem(sys.modules, "torch", nccl.torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", nccl.distributed)
    channels = {0: "to 0", 1: "to 1"}
    return [Neighbour(Group(rank, store), PAIRS, channels, Device("cuda", rank)) for rank in PAIRS]  # type: ignore[arg-type]


def spent_s(neighbour: Neighbour, later_s: float) -> float:
    threading.Event().wait(later_s)
    start_s = time.monotonic()
    neighbour.block(MESSAGE_S)
    return time.monotonic() - start_s


@pytest.mark.parametrize("one_queue", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("later", [0.0, 0.3, 0.9])
def test_neighbours_that_block_on_each_other_end(
    later: float, one_queue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins its message before the other one's has come."""
    both = pair(monkeypatch, FakeNccl(one_queue=one_queue, limit_s=300.0))
    for each in both:
        each.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            times_s = list(pool.map(spent_s, both, (0.0, later * MESSAGE_S)))
    finally:
        for each in both:
            each.stop()
    assert all(each_s >= MESSAGE_S for each_s in times_s)


def test_a_message_that_does_not_come_is_an_error_that_names_both_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, _ = pair(monkeypatch, FakeNccl(one_queue=False, limit_s=5.0))
    monkeypatch.setattr(neighbours, "LIMIT_S", 0.05)
    with pytest.raises(RankError) as error:
        waiting.block(0.1)
    assert str(error.value) == (
        "rank 1 is alive, but a message that rank 0 waits for has not come within 0.15 s; see "
        "with NCCL_DEBUG=INFO whether their GPUs can reach each other, or give --blocking-power W "
        "(in Python blocking_power_w=), which needs no messages"
    )
