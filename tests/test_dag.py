"""What each computation of an iteration waits for, and graphs that are none."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from strategies import dags, fixed

from perseus_planner.dag import PipelineDag
from perseus_planner.errors import ProfileError, ScheduleError
from perseus_planner.iteration import Iteration
from perseus_planner.profiles import Measurement, Profile
from perseus_planner.schedules import Computation, Schedule, one_f_one_b


def same_everywhere(stages: int) -> Profile:
    options = (Measurement(1410, 0.05, 20.0), Measurement(855, 0.07, 15.0))
    return Profile({(stage, kind): options for stage in range(stages) for kind in "FB"}, 83.64)


def parsed(*ranks: str) -> Schedule:
    return Schedule("by hand", tuple(tuple(map(Computation.parse, rank.split())) for rank in ranks))


def waits(dag: PipelineDag) -> set[str]:
    return {f"{before} {after}" for before, after in dag.to_networkx().edges}


def test_a_pipeline_waits_for_its_rank_and_for_activations_and_gradients():
    schedule = parsed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert waits(PipelineDag.from_schedule(same_everywhere(2), schedule)) == {
        *("0F0 0F1", "0F1 0B0", "0B0 0B1"),  # rank 0
        *("1F0 1B0", "1B0 1F1", "1F1 1B1"),  # rank 1, and the last stage's backwards after their forwards
        *("0F0 1F0", "0F1 1F1"),  # activations
        *("1B0 0B0", "1B1 0B1"),  # gradients
    }


def test_one_stage_runs_one_after_the_other():
    dag = PipelineDag.from_schedule(same_everywhere(1), one_f_one_b(1, 2))
    assert waits(dag) == {"0F0 0B0", "0B0 0F1", "0F1 0B1"}


def test_the_last_stage_may_run_all_forwards_first():
    dag = PipelineDag.from_schedule(same_everywhere(1), parsed("0F0 0F1 0B0 0B1"))
    assert waits(dag) == {"0F0 0F1", "0F1 0B0", "0B0 0B1", "0F0 0B0", "0F1 0B1"}


@fixed
@given(dag=dags(12))
def test_networkx_sees_the_same_graph_and_the_order_is_topological(dag: PipelineDag):
    graph = dag.to_networkx()
    assert list(graph) == list(dag.computations)
    assert nx.is_directed_acyclic_graph(graph)
    edges = {(dag.computations[i], dag.computations[k]) for k, before in enumerate(dag.predecessors) for i in before}
    assert set(graph.edges) == edges
    rank = {place: k for k, place in enumerate(dag.order)}
    assert sorted(rank) == list(range(len(dag.computations)))
    assert all(rank[other] < rank[place] for place, before in enumerate(dag.predecessors) for other in before)


def test_nodes_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError) as caught:
        Iteration(parsed("0F0 0B0"), ((1,), (0,)))
    assert str(caught.value) == (
        "0F0 can never start: it waits for 0B0, which in the end waits for it; reorder the schedule"
    )


@pytest.mark.parametrize("ranks", [("0B0 0F0", "1F0 1B0"), ("0F0 0B0", "1F0"), ("0F0 0B0", "1F0 1B0 1F1 1B1")])
def test_a_schedule_that_is_no_pipeline_is_refused(ranks: tuple[str, ...]):
    with pytest.raises(ScheduleError):
        PipelineDag.from_schedule(same_everywhere(2), parsed(*ranks))


def test_a_profile_of_other_stages_is_refused():
    with pytest.raises(ProfileError) as caught:
        PipelineDag.from_schedule(same_everywhere(3), one_f_one_b(2, 4))
    assert str(caught.value) == (
        "the profile has 3 stages and the schedule 2; profile the stages of this schedule, or make the schedule for 3"
    )


@pytest.mark.parametrize(
    "predecessors",
    [((), (3,), ()), ((), (), (-3,)), ((), ()), ((), (), (), ())],
    ids=["behind the end", "before the start", "too few", "too many"],
)
def test_waiting_for_what_is_not_there_is_refused(predecessors: tuple[tuple[int, ...], ...]):
    with pytest.raises(ScheduleError):
        Iteration(parsed("0F0 0B0 0F1"), predecessors)


@pytest.mark.parametrize("ranks", [(), ("",), ("0F0 0B0", "0F0 0B0")], ids=["no rank", "an empty rank", "twice"])
def test_a_schedule_without_computations_or_with_one_twice_is_refused(ranks: tuple[str, ...]):
    with pytest.raises(ScheduleError):
        PipelineDag.from_schedule(same_everywhere(1), parsed(*ranks))
