"""The dependencies of an iteration, and refusals of malformed graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import networkx as nx
import pytest
from refusals import refusal
from strategies import deadline_s, drawn, jobs, problems, shares

from perseus_planner import schedules
from perseus_planner.base.errors import ProfileError, ScheduleError
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Measurement, OperatingPoint
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule, one_f_one_b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.schedules.pipeline import FixedOperation
from perseus_planner.solver.frontier import solve_dag


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
        *(
            "1F0 1B0",
            "1B0 1F1",
            "1F1 1B1",
        ),  # rank 1, and the last stage's backwards after their forwards
        *("0F0 1F0", "0F1 1F1"),  # activations
        *("1B0 0B0", "1B1 0B1"),  # gradients
    }


@drawn(20, 200, dag=problems(12))
def test_networkx_sees_the_same_graph_and_the_order_is_topological(dag: PipelineDag):
    graph = dag.to_networkx()
    nodes = [*dag.computations, *map(str, dag.iteration.operations)]
    assert list(graph) == nodes
    assert nx.is_directed_acyclic_graph(graph)
    edges = {(nodes[i], nodes[k]) for k, before in enumerate(dag.predecessors) for i in before}
    assert set(graph.edges) == edges
    rank = {place: k for k, place in enumerate(dag.order)}
    assert sorted(rank) == list(range(len(nodes)))
    assert all(
        rank[other] < rank[place]
        for place, before in enumerate(dag.predecessors)
        for other in before
    )


@drawn(10, 100, dag=jobs())
def test_a_job_comes_back_from_networkx_as_it_was(dag: PipelineDag):
    graph = dag.to_networkx()
    assert PipelineDag.from_networkx(dag.profile, graph, dag.schedule.name) == dag
    as_text = nx.relabel_nodes(graph, str)
    assert PipelineDag.from_networkx(dag.profile, as_text, dag.schedule.name) == dag


@drawn(6, 60, dag=jobs(), share=shares())
def test_the_order_in_which_a_graph_was_written_does_not_matter(dag: PipelineDag, share: float):
    graph = dag.to_networkx()
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from(reversed(list(graph.nodes(data=True))))
    shuffled.add_edges_from(reversed(list(graph.edges(data=True))))
    again = PipelineDag.from_networkx(dag.profile, shuffled, dag.schedule.name)
    assert again.schedule == dag.schedule
    assert sorted(again.iteration.operations) == sorted(dag.iteration.operations)
    frontier, other = solve_dag(dag), solve_dag(again)
    assert (other.min_time_s, other.max_time_s) == (frontier.min_time_s, frontier.max_time_s)
    at_s = deadline_s(frontier, share)
    assert math.isclose(other.bound_j(at_s), frontier.bound_j(at_s), rel_tol=1e-9, abs_tol=1e-9)


def test_a_graph_of_the_users_own():
    """Two ranks that share the embedding's gradients before either of them steps."""
    graph = nx.DiGraph()
    nx.add_path(graph, ["0F0", "0B0", "0optimizer"])
    nx.add_path(graph, ["1F0", "1B0", "1share", "1optimizer"])
    graph.add_edge("0F0", "1F0", lag_s=0.25)
    graph.add_edges_from([("1B0", "0B0"), ("0B0", "1share"), ("1share", "0optimizer")])
    graph.add_nodes_from(
        [("1B0", {"kind": "B.last"}), ("1share", {"rank": 1, "time_s": 0.5, "energy_j": 40.0})]
    )
    graph.add_nodes_from([(f"{rank}optimizer", {"rank": rank, "time_s": 1.0}) for rank in range(2)])
    options = {"F": Measurement(1410, 1.0, 90.0), "B": Measurement(1410, 2.0, 200.0)}
    points = {(stage, kind): (each,) for stage in range(2) for kind, each in options.items()}
    profile = Profile({**points, (1, "B.last"): (Measurement(1410, 3.0, 330.0),)}, 50.0)
    dag = PipelineDag.from_networkx(profile, graph)
    assert [list(map(str, rank)) for rank in dag.schedule.ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]
    plan = solve_dag(dag).plan_for(100.0)
    spans = replay(plan).spans
    assert {name: (span.start_s, span.end_s) for name, span in spans.items()} == {
        **{"0F0": (0.0, 1.0), "1F0": (1.25, 2.25), "1B0": (2.25, 5.25), "0B0": (5.25, 7.25)},
        **{"1share": (7.25, 7.75), "0optimizer": (7.75, 8.75), "1optimizer": (7.75, 8.75)},
    }
    assert plan.energy_j == 90 + 200 + 90 + 330 + 40 + 50 * (2 * 8.75 - 1 - 2 - 1 - 3 - 0.5)


def small_graph() -> nx.DiGraph:
    """Of one stage: a forward, a backward, then the optimizer."""
    graph = nx.DiGraph()
    nx.add_path(graph, ["0F0", "0B0", "0optimizer"])
    graph.add_node("0optimizer", rank=0, time_s=1.0)
    return graph


def with_node(name: object, **attributes: object) -> nx.DiGraph:
    graph = small_graph()
    graph.add_node(name, **attributes)
    return graph


def with_edge(tail: object, head: object, **attributes: object) -> nx.DiGraph:
    graph = small_graph()
    graph.add_edge(tail, head, **attributes)
    return graph


NEEDS_WAIT = "is not a wait: give finite seconds of 0 or more, such as 0.002"
NEEDS_RANK = "is not a rank; number the ranks 0, 1, 2 and so on"
NEEDS_TYPE = "is of the wrong type; give a networkx.DiGraph"
BAD_GRAPHS = {
    "no graph": (7, f"graph: int {NEEDS_TYPE}"),
    "undirected": (nx.Graph(), f"graph: Graph {NEEDS_TYPE}"),
    "several edges": (nx.MultiDiGraph(), f"graph: MultiDiGraph {NEEDS_TYPE}"),
    "empty": (nx.DiGraph(), "schedule custom: has no ranks; give at least one"),
    "cycle": (
        with_edge("0optimizer", "0F0"),
        "the graph has the cycle 0F0 -> 0B0 -> 0optimizer -> 0F0; nothing on it can ever start",
    ),
    "waits for itself": (
        with_edge("0B0", "0B0"),
        "the graph has the cycle 0B0 -> 0B0; nothing on it can ever start",
    ),
    "no order": (
        with_edge("0F0", "0F1"),
        "0B0 and 0F1 are both on rank 0 and neither waits for the other; "
        "add an edge for the order in which it runs them",
    ),
    "operation in no order": (
        with_node("0load", rank=0, time_s=1.0),
        "0F0 and 0load are both on rank 0 and neither waits for the other; "
        "add an edge for the order in which it runs them",
    ),
    "rank below 0": (with_node("0B0", rank=-1), f"0B0, rank: -1 {NEEDS_RANK}"),
    "rank of text": (with_node("0B0", rank="0"), f"0B0, rank: '0' {NEEDS_RANK}"),
    "rank of an operation": (
        with_node("0optimizer", rank=1.5),
        f"0optimizer, rank: 1.5 {NEEDS_RANK}",
    ),
    "rank far off": (
        with_node("0optimizer", rank=10**12),
        f"0optimizer, rank: 1000000000000 {NEEDS_RANK}",
    ),
    "empty rank": (
        with_node("0optimizer", rank=1),
        "schedule custom, rank 1: runs nothing; give each rank at least one computation",
    ),
    "one stage on two ranks": (
        with_node("0B0", rank=1),
        "schedule custom, rank 1, computation 1: stage 0 is on rank 0 too; keep a stage on one "
        "rank",
    ),
    "operation without rank": (
        with_node("0save", time_s=1.0),
        "0save: is an operation without the attribute rank; give the rank that runs it",
    ),
    "operation without time": (
        with_node("0save", rank=0),
        "'0save' is not a computation, such as 3F17; an operation needs the attribute time_s",
    ),
    "operation without a name": (
        with_node("optimizer", rank=0, time_s=1.0),
        "'optimizer' is not an operation; write rank or stage, a lower-case name and any "
        "microbatch",
    ),
    "time of no operation": (
        with_node("0optimizer", time_s=0),
        "0optimizer: 0 is not a time: write finite seconds above 0, such as 0.0512",
    ),
    "energy of no operation": (
        with_node("0optimizer", energy_j="20"),
        "0optimizer: '20' is not an energy: write finite joules of 0 or more, such as 23.8",
    ),
    "no lag": (with_edge("0F0", "0B0", lag_s="soon"), f"lag_s of 0F0 -> 0B0: 'soon' {NEEDS_WAIT}"),
    "lag below 0": (
        with_edge("0B0", "0optimizer", lag_s=-1),
        f"lag_s of 0B0 -> 0optimizer: -1 {NEEDS_WAIT}",
    ),
    "no kind": (
        with_node("0B0", kind="F.sync"),
        "kinds: are not those of the computations, with or without a suffix such as .sync",
    ),
    "twice": (
        with_edge("0optimizer", Computation(0, "F", 0)),
        "schedule custom, rank 0, computation 3: 0F0 is there twice; keep one",
    ),
}


@pytest.mark.parametrize(("graph", "message"), BAD_GRAPHS.values(), ids=BAD_GRAPHS.keys())
def test_a_malformed_graph_is_refused(graph: object, message: str):
    assert refusal(ScheduleError, PipelineDag.from_networkx, same_everywhere(1), graph) == message


def test_a_kind_that_was_not_profiled_is_refused():
    assert refusal(
        ProfileError, PipelineDag.from_networkx, same_everywhere(1), with_node("0B0", kind="B.sync")
    ) == (
        "the profile has no B.sync of stage 0, which 0B0 needs; measure it, or leave that variant "
        "out"
    )


def test_stages_of_one_rank_wait_at_one_power():
    schedule = schedules.interleaved_1f1b(2, 2, 2)
    profile = same_everywhere(4)
    PipelineDag.from_schedule(replace(profile, blocking_power_w=(70.0, 80.0, 70.0, 80.0)), schedule)
    assert refusal(
        ProfileError,
        PipelineDag.from_schedule,
        replace(profile, blocking_power_w=(70.0, 80.0, 71.0, 80.0)),
        schedule,
    ) == (
        "blocking_power_w: differs between the stages of rank 0, which are on the same GPUs; give "
        "them one power"
    )


@pytest.mark.parametrize("power_w", [0.0, 50.0, 1000.0])
def test_an_operation_is_one_option_without_a_clock(power_w: float):
    profile = replace(same_everywhere(2), blocking_power_w=(power_w, 10.0))
    dag = PipelineDag.from_schedule(
        profile,
        one_f_one_b(2, 1),
        operations=[
            FixedOperation("load", "start", 0.5, where=(0,)),
            FixedOperation("step", "end", 2.0, 300.0),
        ],
    )
    found = {
        str(each): dag.points[key]
        for each, key in zip(dag.iteration.operations, dag.keys[4:], strict=True)
    }
    assert found == {
        "0load": (OperatingPoint(0, 0.5, 0.5 * power_w, 0.0),),
        "0step": (OperatingPoint(0, 2.0, 300.0, 300.0 - 2 * power_w),),
        "1step": (OperatingPoint(0, 2.0, 300.0, 280.0),),
    }


def test_nodes_that_wait_for_each_other_are_refused():
    assert refusal(ScheduleError, Iteration, parsed("0F0 0B0"), ((1,), (0,))) == (
        "0F0 can never start: it waits for 0B0, which in the end waits for it; reorder the schedule"
    )


@pytest.mark.parametrize(
    "ranks", [("0B0 0F0", "1F0 1B0"), ("0F0 0B0", "1F0"), ("0F0 0B0", "1F0 1B0 1F1 1B1")]
)
def test_a_schedule_that_cannot_run_is_refused(ranks: tuple[str, ...]):
    with pytest.raises(ScheduleError):
        PipelineDag.from_schedule(same_everywhere(2), parsed(*ranks))


def test_a_profile_of_other_stages_is_refused():
    assert refusal(
        ProfileError, PipelineDag.from_schedule, same_everywhere(3), one_f_one_b(2, 4)
    ) == (
        "the profile has 3 stages and the schedule 2; profile the stages of this schedule, or make "
        "the schedule for 3"
    )


@pytest.mark.parametrize(
    "ranks", [(), ("",), ("0F0 0B0", "0F0 0B0")], ids=["no rank", "an empty rank", "twice"]
)
def test_a_schedule_without_computations_or_with_one_twice_is_refused(ranks: tuple[str, ...]):
    with pytest.raises(ScheduleError):
        PipelineDag.from_schedule(same_everywhere(1), parsed(*ranks))
