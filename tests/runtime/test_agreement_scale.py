"""The agreement of 16,384 ranks on 2,048 nodes, in simulated time."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import random
import resource
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from stepped_ranks import Counted
from torch.distributed import HashStore

from perseus_planner.runtime.switching.agreement import Acceptance, Agreement, NodePlans, NodeShare

NODES, NODE_RANKS = 2048, 8
ROUND_S = 0.1  #: twice the time between two rounds of a background thread, so that all are slow


class Cluster:
    """The ranks of a job, which begin each iteration up to a third of it after the first one."""

    def __init__(self, lasts_s: float):
        self.lasts_s, self.now_s = lasts_s, 0.0
        self.store = Counted(HashStore())
        self.memories = [NodePlans.create() for _ in range(NODES)]
        self.ranks = [
            Agreement(
                self.store,
                lambda version, blob: None,
                NodeShare(NODES, number == 0, memory),
                now_s=lambda: self.now_s,
            )
            for memory in self.memories
            for number in range(NODE_RANKS)
        ]
        self._draw = random.Random(0)

    def iterate(self, iteration: int) -> list[int]:
        """Run an iteration; return the version of each rank."""
        rounds = round(self.lasts_s / ROUND_S)
        begins = [self._draw.randrange(max(1, rounds // 3)) for _ in self.ranks]
        versions = [0] * len(self.ranks)
        for number in range(rounds):
            self.now_s += ROUND_S
            for rank, agreement in enumerate(self.ranks):
                if begins[rank] == number:
                    versions[rank] = agreement.version_at(iteration)
                agreement.look()
        return versions


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NODES + 512:
        pytest.skip(f"a process may open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(
    ("lasts_s", "within"), [(0.5, 6), pytest.param(1.5, 3, marks=pytest.mark.soak)]
)
def test_many_ranks_take_few_operations_and_switch_together_soon(lasts_s: float, within: int):
    cluster = Cluster(lasts_s)
    cluster.iterate(0)
    cluster.store.counts.clear()
    begun_s = cluster.now_s
    for iteration in range(1, 4):
        assert set(cluster.iterate(iteration)) == {1}
    assert cluster.store.counts.total() <= 2000 * (cluster.now_s - begun_s)
    proposal = cluster.ranks[0].propose(b"a plan")
    versions = [set(cluster.iterate(iteration)) for iteration in range(4, 4 + within)]
    assert isinstance(proposal.outcome, Acceptance)
    before = proposal.outcome.iteration - 4
    assert versions == [{1}] * before + [{2}] * (within - before)
    assert before < within
    for memory in cluster.memories:
        memory.close()
