"""Programs of ranks that agree on plans; launching.py runs them as "agreement_programs:NAME"."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from waiting import LONG_S

from perseus_planner.runtime.switching import Acceptance, Agreement

SIZE = 4
ITERATION_S = 0.002


class Training:
    """A training loop of one rank, with a background thread that looks."""

    def __init__(self, store: Any):
        self.agreement = Agreement(dist.PrefixStore("plans", store), lambda version, blob: None)
        self.versions: list[int] = []

    def iterate(self, duration_s: float = ITERATION_S) -> int:
        """Run one iteration; return the version that it ran by."""
        self.versions.append(self.agreement.version_at(len(self.versions)))
        time.sleep(duration_s)
        return self.versions[-1]

    @contextmanager
    def looking(self) -> Iterator[None]:
        left = threading.Event()

        def look() -> None:
            while not left.wait(ITERATION_S):
                self.agreement.look()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()


def train(store: Any, rank: int) -> Training:
    """Rank 1 proposes while rank 2 stands still for a while; all go on until they run by the
    plan.
    """
    training = Training(store)
    with training.looking():
        while training.iterate() != 2 or len(training.versions) < 50:
            if rank == 1 and len(training.versions) == 10:
                proposal = training.agreement.propose(b"a plan")
            if rank == 2 and len(training.versions) in (11, 20):
                training.iterate(0.2)
        if rank == 1:
            outcome = proposal.wait(LONG_S)
            assert isinstance(outcome, Acceptance)
            assert training.versions.index(2) == outcome.iteration
    assert training.agreement.lost is None
    # The last that each asks of the store; who may hold it stays.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < SIZE:
        time.sleep(ITERATION_S)
    return training


def over_tcp() -> None:
    """Run ranks that print the versions of their iterations."""
    _said(train(_tcp_store(), _rank()).versions)


def over_file(path: str) -> None:
    """Run ranks that print the versions of their iterations."""
    _said(train(dist.FileStore(path, -1), _rank()).versions)


def over_hash() -> None:
    """Run the ranks as threads of this process."""
    store, trained = dist.HashStore(), {}

    def run(rank: int) -> None:
        trained[rank] = train(store, rank).versions

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _said([trained[rank] for rank in range(SIZE)])


def host_dies() -> None:
    """Kill the process that holds the store; the others train on."""
    store = _tcp_store()
    training = Training(store)
    with training.looking():
        for _ in range(10):
            training.iterate()
        store.set(f"trained/{_rank()}", "")
        while _rank() == 0:
            if store.check([f"trained/{rank}" for rank in range(SIZE)]):
                os.kill(os.getpid(), signal.SIGKILL)
        _go_on(training)


def _go_on(training: Training) -> None:
    until_s = time.monotonic() + LONG_S
    while training.agreement.lost is None and time.monotonic() < until_s:
        training.iterate()
    for _ in range(100):
        training.iterate()
    _said({"lost": training.agreement.lost, "versions": training.versions})


def _tcp_store() -> Any:
    port, timeout = int(os.environ["MASTER_PORT"]), timedelta(seconds=LONG_S)
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, SIZE, _rank() == 0, timeout)


def _rank() -> int:
    return int(os.environ["RANK"])


def _said(value: Any) -> None:
    print(json.dumps(value))
