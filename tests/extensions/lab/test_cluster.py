"""A replayed cluster equals one that steps through every iteration and GPU, closed formulas, and
sums by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed, pipelines, smooth_profile

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.lab.policies import Clocks
from perseus_planner.extensions.lab.replay import Cluster, replay_under, simulate
from perseus_planner.extensions.lab.stragglers import Condition, Straggler
from perseus_planner.profiles.profiles import ClockChange, Profile
from perseus_planner.schedules import Schedule, one_f_one_b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import FixedOperation, Transfer
from perseus_planner.solver.frontier import Frontier, solve
from perseus_planner.views.plan import summarize_plan

EXTRAS: dict[str, Any] = {
    "transfer": Transfer(0.001, 0.002),
    "operations": (
        FixedOperation("load", "before F", 0.003),
        FixedOperation("optimizer", "end", 0.01, 2.0),
    ),
}


class RandomPolicy:
    """A policy that draws random clocks for each set of known conditions."""

    def __init__(self, dag: PipelineDag) -> None:
        self.dag = dag

    def __call__(self, known: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        return {condition: self.clocks(condition, known) for condition in known}

    def clocks(self, condition: Condition, known: frozenset[Condition]) -> Clocks:
        rng = Random(repr((condition, sorted(known))))
        return tuple(
            rng.choice(self.dag.profile.measurements[key]).clock_mhz
            for key in self.dag.iteration.keys
        )


def seen_at(moment_s: Fraction, stragglers: Sequence[Straggler], pipeline: int) -> list[Straggler]:
    return [
        each
        for each in stragglers
        if each.pipeline == pipeline
        and each.start_s <= moment_s
        and (each.end_s == math.inf or moment_s < each.end_s)
    ]


def condition(stragglers: Sequence[Straggler]) -> Condition:
    whole, stages = 1.0, dict.fromkeys(range(9), 1.0)
    for each in stragglers:
        if each.stage is None:
            whole *= each.slowdown
        else:
            stages[each.stage] *= each.slowdown
    return Condition(
        whole, tuple((stage, slowdown) for stage, slowdown in stages.items() if slowdown > 1)
    )


def pipeline_iteration(
    dag: PipelineDag, clocks: Clocks, slow: Condition
) -> tuple[float, list[float], list[float]]:
    """Return the time of an iteration, then time and energy of each rank's work, by relaxing
    every wait.
    """
    stages, times_s, energies_j = dict(slow.stages), [], []
    for key, clock in zip(dag.iteration.keys, clocks, strict=True):
        point = next(m for m in dag.profile.measurements[key] if m.clock_mhz == clock)
        times_s.append(point.time_s * stages.get(key[0], 1.0))
        energies_j.append(point.energy_j * stages.get(key[0], 1.0))
    for operation in dag.iteration.operations:
        waiting_j = dag.rank_waiting_w[operation.rank] * operation.time_s
        times_s.append(operation.time_s)
        energies_j.append(waiting_j if operation.energy_j is None else operation.energy_j)
    ends_s, moved = list(times_s), True
    while moved:
        moved = False
        for place, waits in enumerate(dag.iteration.waits):
            end_s = (
                max((ends_s[other] + lag_s for other, lag_s in waits), default=0.0) + times_s[place]
            )
            moved, ends_s[place] = moved or end_s > ends_s[place], max(end_s, ends_s[place])
    busy_s, busy_j = [0.0] * len(dag.schedule.ranks), [0.0] * len(dag.schedule.ranks)
    for rank, time_s, energy_j in zip(dag.iteration.rank_of, times_s, energies_j, strict=True):
        busy_s[rank] += slow.slowdown * time_s
        busy_j[rank] += slow.slowdown * energy_j
    return slow.slowdown * (max(ends_s) + dag.profile.overhead_s), busy_s, busy_j


def stepped(
    cluster: Cluster, policy: RandomPolicy
) -> tuple[float, dict[tuple[int, int, int], list[float]]]:
    """Return the time of the job, and energy, busy and idle time of every GPU, iteration by
    iteration.
    """
    dag, gpus = cluster.frontier.dag, cluster.frontier.profile.gpus_per_stage
    now, totals = Fraction(0), {}
    for _ in range(cluster.iterations):
        late = now - Fraction(cluster.delay_s)
        beliefs = [
            condition(seen_at(late, cluster.stragglers, p)) for p in range(cluster.pipelines)
        ]
        done = []
        for pipeline, belief in enumerate(beliefs):
            truth = condition(seen_at(now, cluster.stragglers, pipeline))
            done.append(pipeline_iteration(dag, policy.clocks(belief, frozenset(beliefs)), truth))
        longest_s = max(time_s for time_s, _, _ in done)
        for pipeline, (_, busy_s, busy_j) in enumerate(done):
            for rank, waiting_w in enumerate(dag.rank_waiting_w):
                for gpu in range(gpus):
                    idle_s = longest_s - busy_s[rank]
                    added = [(busy_j[rank] + waiting_w * idle_s) / gpus, busy_s[rank], idle_s]
                    total = totals.setdefault((pipeline, rank, gpu), [0.0] * 3)
                    total[:] = [one + other for one, other in zip(total, added, strict=True)]
        now += Fraction(longest_s)
    return float(now), totals


def problem_of(problem: tuple[Profile, Schedule], **changes: Any) -> Frontier:
    return solve(replace(problem[0], **changes), problem[1], **EXTRAS)


@st.composite
def straggler_lists(draw: st.DrawFn, pipelines: int, stages: int, most: int = 6) -> list[Straggler]:
    """Draw stragglers of a job that takes 1 s."""
    found = []
    for _ in range(draw(st.integers(0, most))):
        start_s = draw(st.sampled_from((0.0, 0.25)) | st.floats(0, 1))
        end_s = start_s + draw(st.sampled_from((math.inf, 0.25)) | st.floats(1e-3, 1))
        slowdown = draw(st.sampled_from((1.0, 1.5)) | st.floats(1, 3))
        stage = draw(st.none() | st.integers(0, stages - 1))
        found.append(
            Straggler(start_s, end_s, slowdown, draw(st.integers(0, pipelines - 1)), stage)
        )
    return found


def stretched(stragglers: Sequence[Straggler], seconds: float) -> list[Straggler]:
    return [
        replace(each, start_s=each.start_s * seconds, end_s=each.end_s * seconds)
        for each in stragglers
    ]


@fixed
@given(problem=pipelines(3, 3, 3), data=st.data())
def test_a_replay_equals_stepping_through_every_iteration_and_gpu(
    problem: Any, data: st.DataObject
):
    frontier = problem_of(problem, overhead_s=0.05, gpus_per_stage=2)
    job_s = (iterations := 12) * frontier.baseline_time_s
    stragglers = stretched(data.draw(straggler_lists(3, frontier.schedule.stages)), job_s)
    cluster = Cluster(
        frontier, 3, iterations, stragglers, data.draw(st.sampled_from((0.0, 0.05, 0.4))) * job_s
    )
    outcome = replay_under(cluster, "whim", RandomPolicy(frontier.dag))
    time_s, totals = stepped(cluster, RandomPolicy(frontier.dag))
    assert math.isclose(outcome.time_s, time_s, rel_tol=1e-12)
    assert len(totals) == cluster.gpus
    for (pipeline, rank, _), total in totals.items():
        got = [
            values[pipeline, rank]
            for values in (outcome.energy_per_gpu_j, outcome.busy_s, outcome.idle_s)
        ]
        np.testing.assert_allclose(got, total, rtol=1e-9, atol=1e-9 * time_s)
    assert math.isclose(
        outcome.energy_j, math.fsum(total[0] for total in totals.values()), rel_tol=1e-9
    )


@fixed
@given(problem=pipelines(3, 4, 4), slowdown=st.sampled_from((1.0, 1.1)))
def test_without_stragglers_a_job_is_its_plan_over_and_over(problem: Any, slowdown: float):
    frontier = problem_of(problem)
    outcome = simulate(Cluster(frontier, 3, 7), "planner", slowdown)
    plan = frontier.plan_until(slowdown * frontier.baseline_time_s)
    assert math.isclose(outcome.time_s, 7 * plan.time_s, rel_tol=1e-12)
    assert math.isclose(outcome.energy_j, 3 * 7 * plan.energy_j, rel_tol=1e-9)
    for rank, expected in enumerate(summarize_plan(plan).per_rank):
        np.testing.assert_allclose(outcome.busy_s[:, rank], 7 * expected.busy_s, rtol=1e-12)
        np.testing.assert_allclose(
            outcome.energy_per_gpu_j[:, rank], 7 * expected.energy_j, rtol=1e-9, atol=1e-9
        )


@pytest.fixture(scope="module")
def smooth() -> Frontier:
    return solve(smooth_profile(3, step_mhz=60), one_f_one_b(3, 4))


def test_a_billion_iterations_take_no_longer(smooth: Frontier):
    stragglers = [Straggler(100.0, 200.0, 1.5, 0), Straggler(1e6, math.inf, 1.1, 1, stage=2)]
    outcome = simulate(Cluster(smooth, 4, 10**9, stragglers), "max")
    assert outcome.time_s > 1e9 * smooth.baseline_time_s
    assert (outcome.idle_s > 0).all()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pipelines": 0}, "pipelines: 0 is not a whole number of at least 1"),
        ({"iterations": 1.5}, "iterations: 1.5 is not a whole number of at least 1"),
        (
            {"delay_s": -1.0},
            "delay_s: -1.0 is not a wait: give finite seconds of 0 or more, such as 0.002",
        ),
    ],
)
def test_an_impossible_cluster_is_refused(
    smooth: Frontier, changes: dict[str, Any], complaint: str
):
    with pytest.raises(UsageError) as caught:
        Cluster(**{"frontier": smooth, "pipelines": 2, "iterations": 5, **changes})
    assert str(caught.value) == complaint


@pytest.mark.parametrize("gpus_per_stage", [1, 8])
def test_clock_changes_cost_a_cluster_what_they_cost_a_plan(gpus_per_stage: int):
    change = ClockChange(0.006, 0.001)
    profile = replace(smooth_profile(3), clock_change=change, gpus_per_stage=gpus_per_stage)
    frontier = solve(profile, one_f_one_b(3, 10))
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s)
    assert max(plan.changes) > 0
    outcome = simulate(Cluster(frontier, 2, 7), "planner", 1.05)
    assert outcome.time_s == pytest.approx(7 * plan.time_s, rel=1e-12)
    assert outcome.energy_j == pytest.approx(2 * 7 * plan.energy_j, rel=1e-12)
    slow = simulate(
        Cluster(frontier, 2, 7, [Straggler(0.0, math.inf, 1.3, 0, stage=1)], 0.0),
        "planner-fixed",
        1.05,
    )
    assert slow.time_s > outcome.time_s
