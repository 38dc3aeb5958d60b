"""The programs that a rank runs by, those that do not fit it, and those that it no longer needs."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from strategies import smooth_profile
from torch.distributed import HashStore

from perseus_planner import solve
from perseus_planner.runtime.decider import Decider
from perseus_planner.runtime.follower import Follower
from perseus_planner.runtime.job import TrainingJob
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.sending import Plans
from perseus_planner.runtime.switching import Acceptance, NodeShare

PLAN = solve(smooth_profile(2), "1f1b", microbatches=2).plan_for_least_energy()


class ByPlan(Decider):
    """Runs the plans that are proposed."""

    def program_of(self, version: int, data: bytes) -> Program:
        return Program.of_plan(version, Plans.loads(data).of_pipeline(0), 0)


def follower_of(store: HashStore, *, is_prompt: bool = False) -> Follower:
    """Return the follower of a job's only rank, which has begun with a plan."""
    decider = ByPlan()
    decider.is_continual = is_prompt
    follower = Follower(TrainingJob(store, 0, 1), NodeShare(), decider, lambda *_: None)
    follower.start(Program.of_plan(1, PLAN, 0))
    return follower


def test_a_rank_that_a_plan_does_not_fit_runs_without_clocks_until_it_has_one_that_does():
    follower = follower_of(HashStore())
    of_others = solve(smooth_profile(2), "1f1b", microbatches=4).plan_for_least_energy()
    versions: list[int | None] = []
    for plans in (Plans.load({1: of_others}), Plans.load(PLAN)):
        proposal = follower.agreement.propose(plans.dumps())
        follower.look()
        assert isinstance(proposal.outcome, Acceptance)
        for iteration in (proposal.outcome.iteration - 1, proposal.outcome.iteration):
            program = follower.program_for(iteration)
            versions.append(None if program is None else program.version)
    assert versions == [1, None, None, 3]
    assert (
        follower.misfit
        == "plan 2 is not for this rank: pipeline 0 has no plan; there are plans for 1"
    )


def test_programs_of_plans_that_were_replaced_are_dropped():
    follower = follower_of(HashStore())
    iteration = 0
    for version in range(2, 12):
        proposal = follower.agreement.propose(Plans.load(PLAN).dumps())
        follower.look()
        assert isinstance(proposal.outcome, Acceptance)
        iteration = max(iteration, proposal.outcome.iteration)
        program = follower.program_for(iteration)
        assert program is not None
        assert program.version == version
        follower.look()
        assert list(follower._programs) == [version]


@pytest.mark.parametrize("is_prompt", [False, True])
def test_plans_that_come_one_after_the_other_have_as_few_changes_as_can_be_made(is_prompt: bool):
    plan = solve(smooth_profile(2), "1f1b", microbatches=6).plan_for(
        1.05 * PLAN.baseline_time_s * 3
    )
    follower = follower_of(HashStore(), is_prompt=is_prompt)
    changes, fewest = [], []
    for _ in range(2):
        proposal = follower.agreement.propose(Plans.load(plan).dumps())
        follower.look()
        assert isinstance(proposal.outcome, Acceptance)
        program = follower.program_for(proposal.outcome.iteration)
        assert program is not None
        changes.append(program.changes)
        fewer = follower.keep_changes(2)
        fewest.append(2 if fewer is None else fewer.changes)
    assert plan.changes[0] > 2 >= fewest[0]
    assert changes == [plan.changes[0], fewest[0] if is_prompt else plan.changes[0]]
