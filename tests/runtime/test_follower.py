"""A rank out of step waits once, and forgets the programs that it no longer needs."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from strategies import smooth_profile
from torch.distributed import HashStore

from perseus_planner import solve
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.job import TrainingJob
from perseus_planner.runtime.switching.follower import PATIENCE_S, PlanFollower
from perseus_planner.runtime.switching.plans import Plans

PLAN = solve(smooth_profile(2), "1f1b", microbatches=2).plan_for_least_energy()


def follower_of(store: HashStore, rank: int = 0, ranks: int = 1) -> PlanFollower:
    """Return a rank's follower, which has begun with a plan and wakes nobody."""

    def make_program(version: int, plans: Plans) -> Program:
        return Program(version, plans.of_pipeline(0), 0)

    follower = PlanFollower(TrainingJob(store, rank, ranks), make_program, lambda *_: None, lambda: None)
    follower.start(Program(1, PLAN, 0))
    return follower


class Waits(threading.Condition):
    """Records for how long it is waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s: list[float | None] = []

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        self.waited_s.append(timeout)
        return predicate()


def test_a_rank_that_is_out_of_step_waits_at_one_iteration_and_not_at_the_next():
    store = HashStore()
    rank, other = (follower_of(store, number, 2) for number in range(2))
    other.agreement.propose(Plans.load(PLAN).dumps())
    for each in (other, rank):  # both promise to begin none beyond the limit before they know the outcome
        each.look()
    rank._looked = waits = Waits()
    for iteration in range(1, 4):
        assert rank.program_for(iteration) is None
    assert rank.out_of_step == "iteration 3 began before this rank had learned which plan it runs by"
    assert waits.waited_s == [PATIENCE_S]


def test_programs_of_plans_that_were_replaced_are_dropped():
    follower = follower_of(HashStore())
    iteration = 0
    for version in range(2, 12):
        proposal = follower.agreement.propose(Plans.load(PLAN).dumps())
        while proposal.outcome is None:
            follower.look()
        iteration = max(iteration, proposal.outcome.iteration)
        program = follower.program_for(iteration)
        assert program is not None
        assert program.version == version
        follower.look()
        assert list(follower._programs) == [version]
