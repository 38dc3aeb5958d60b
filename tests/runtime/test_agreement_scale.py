"""The agreement of the ranks of a large job, which have joined it, in simulated time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from large_jobs import LargeJob

from perseus_planner.runtime.switching import Acceptance


@pytest.mark.parametrize(
    ("ranks", "lasts_s", "within"),
    [
        (2_048, 0.5, 6),
        pytest.param(16_384, 0.5, 6, marks=pytest.mark.soak),
        pytest.param(16_384, 1.5, 3, marks=pytest.mark.soak),
    ],
)
def test_many_ranks_take_few_operations_and_switch_together_soon(
    ranks: int, lasts_s: float, within: int
):
    job = LargeJob(ranks)
    job.join()
    job.iterate(0, lasts_s)
    before, begun_s = job.store.operations, job.now_s
    for iteration in range(1, 4):
        assert set(job.iterate(iteration, lasts_s)) == {1}
    assert job.store.operations - before <= 2000 * (job.now_s - begun_s)
    proposal = job.agreements[0].propose(b"a plan")
    versions = [set(job.iterate(iteration, lasts_s)) for iteration in range(4, 4 + within)]
    assert isinstance(proposal.outcome, Acceptance)
    late = proposal.outcome.iteration - 4
    assert versions == [{1}] * late + [{2}] * (within - late)
    assert late < within
