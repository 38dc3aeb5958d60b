"""The plans of a job's pipelines as they are sent to all ranks, and programs."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import deadline_s, drawn, jobs

from perseus_planner.base.errors import PlanError
from perseus_planner.plans.plan import Plan
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.sending import Plans, pack, runs_of, unpack, values_of
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


@drawn(2, 15, dag=jobs(), anew=True)
def test_pipelines_with_equal_plans_share_what_is_sent(dag: PipelineDag):
    plan, other = plan_of(dag, 0.0), plan_of(dag, 1.0)
    text = plan.dumps()
    alone = len(Plans.load({0: plan}).dumps())
    many = Plans.load({**dict.fromkeys(range(64), plan), 64: Plan.loads(text)})
    assert len(many.dumps()) < alone + 64 * len(',"63":0')
    read = Plans.loads(many.dumps())
    assert len({id(each) for each in read.by_pipeline.values()}) == 1
    mixed = Plans.loads(Plans(plan, {3: other}).dumps())
    assert (mixed.common, mixed.by_pipeline) == (plan, {3: other})


@pytest.mark.parametrize("place", [-1, 1, 10**30])
@pytest.mark.parametrize("name", ["of_pipeline", "common"])
def test_a_plan_that_was_not_sent_is_no_plan(name: str, place: int):
    sent = {"texts": [], "of_pipeline": {}, name: {"0": place} if name == "of_pipeline" else place}
    with pytest.raises(PlanError, match=r"^what was sent to all ranks cannot be read: "):
        Plans.loads(json.dumps(sent).encode())


@drawn(20, 200, data=st.binary(max_size=3000), cut=st.integers(1, 10**6))
def test_what_is_packed_is_unpacked_as_a_whole_or_refused(data: bytes, cut: int):
    packed = pack(data)
    assert unpack(packed) == data
    with pytest.raises(PlanError, match="cannot be read"):
        unpack(packed[: -(1 + cut % len(packed))])


def test_neither_sender_nor_reader_goes_beyond_what_ranks_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perseus_planner.runtime.sending.LONGEST_BYTES", 1000)
    assert unpack(pack(bytes(1000))) == bytes(1000)
    with pytest.raises(PlanError, match=r"^the plan has 1001 bytes, and ranks read 1000; plan for"):
        pack(bytes(1001))
    with pytest.raises(PlanError, match=r"cannot be read: it has more than 1000 bytes; use the"):
        unpack(zlib.compress(bytes(10**8)))


@given(values=st.lists(st.sampled_from(["own", "keep", 900, 1005])))
def test_runs_are_the_values_again(values: list[object]):
    runs = runs_of(values)
    assert values_of(runs) == tuple(values)
    assert all(before != after for (before, _), (after, _) in pairwise(runs))
