"""The plans of a job's pipelines as they are sent to all ranks, and programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st
from strategies import deadline_s, drawn, jobs

from perseus_planner.base.errors import PlanError
from perseus_planner.plans.plan import Plan
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.switching import Plans
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve_dag


def plan_of(dag: PipelineDag, share: float = 0.5) -> Plan:
    frontier = solve_dag(dag)
    return frontier.plan_for(deadline_s(frontier, share), on_time=None)


@drawn(2, 15, dag=jobs(), numbers=st.sets(st.integers(0, 30), min_size=1), anew=True)
def test_plans_are_the_same_on_all_ranks(dag: PipelineDag, numbers: set[int]):
    fast, slow = plan_of(dag, 0.0), plan_of(dag, 1.0)
    for given_plans in (fast, {number: slow if number % 2 else fast for number in numbers}):
        sent = Plans.load(given_plans)
        read = Plans.loads(sent.dumps())
        assert read == sent
        for number in numbers:
            wanted = given_plans if isinstance(given_plans, Plan) else given_plans[number]
            assert read.of_pipeline(number) == wanted


@drawn(2, 15, dag=jobs(), anew=True)
def test_a_pipeline_without_a_plan_is_refused(dag: PipelineDag):
    with pytest.raises(PlanError, match=r"^pipeline 2 has no plan; there are plans for 1$"):
        Plans.load({1: plan_of(dag)}).of_pipeline(2)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"": {}}', b'{"": "{}"}', b"\xff", b'{"x": "{}"}'])
def test_what_are_no_plans_is_refused(data: bytes):
    with pytest.raises(PlanError, match="sent"):
        Plans.loads(data)


def test_a_plan_may_be_named_by_its_file(folder: Path):
    with pytest.raises(PlanError, match=r"^plan.yaml: no such file"):
        Plans.load("plan.yaml")


@drawn(3, 15, dag=jobs(), place=st.integers(0, 10**6), cut=st.booleans(), anew=True)
def test_another_order_is_refused_at_its_first_difference(dag: PipelineDag, place: int, cut: bool):
    plan = plan_of(dag)
    program = Program.of_plan(1, plan, 0)
    order = program.computations
    program.check_order(order, "an engine")
    place %= len(order)
    other = (
        order[:place]
        if cut
        else (*order[:place], order[place]._replace(microbatch=10**6), *order[place + 1 :])
    )
    there = "missing" if cut else str(other[place])
    with pytest.raises(
        PlanError, match=f"computation {place + 1} is {there} there and {order[place]} in the plan"
    ):
        program.check_order(other, "an engine")


@drawn(2, 15, dag=jobs(), anew=True)
def test_a_rank_that_the_plan_has_not_is_refused(dag: PipelineDag):
    plan = plan_of(dag)
    with pytest.raises(
        PlanError,
        match=f"^the plan is for pipelines of {len(plan.schedule.ranks)} ranks, and this is rank",
    ):
        Program.of_plan(1, plan, len(plan.schedule.ranks))
