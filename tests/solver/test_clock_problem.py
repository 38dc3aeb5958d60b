"""The compiled replays of clocks against those of plans, which are plain Python."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed, job

from perseus_planner.plans.clock_replay import Task
from perseus_planner.plans.replay import end_times, replay_changes
from perseus_planner.profiles.measurement import ClockChange, Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver import clock_problem
from perseus_planner.solver.clock_problem import change_cost, clock_problem_of, load_state

CHANGES = st.builds(
    ClockChange,
    st.sampled_from((0.0, 1e-4, 2e-3, 6e-3, 0.1)),
    st.sampled_from((0.0, 1e-3, 0.05)),
    st.integers(1, 3),
)


def with_shared_clocks(dag: PipelineDag, rng: Random) -> PipelineDag:
    """The graph with any times and energies, in which all is measured at all clocks."""
    measurements = {
        key: tuple(
            Measurement(clock, rng.uniform(1e-3, 0.2), rng.uniform(1.0, 9.0))
            for clock in (1400, 1200, 1000)
        )
        for key in dag.profile.measurements
    }
    return PipelineDag(Profile(measurements, dag.profile.blocking_power_w), dag.iteration)


@fixed
@given(CHANGES, st.sampled_from((1, 2, 8)), st.integers(0, 2**32 - 1))
def test_the_compiled_replays_are_those_of_plans(change: ClockChange, gpus: int, seed: int):
    rng = Random(seed)
    dag = with_shared_clocks(job(seed, rng.randint(1, 4), rng.randint(1, 6), 3), rng)
    iteration, (problem, clocks) = dag.iteration, clock_problem_of(dag)
    chosen = [rng.randrange(len(clocks)) for _ in iteration.keys]
    rows = [dag.profile.measurements[key] for key in iteration.keys]
    state, planned_j = load_state(problem, np.array(chosen))
    time_s = clock_problem.replay(problem, state)
    end_s = end_times(dag, [row[c].time_s for row, c in zip(rows, chosen, strict=True)])
    assert state.end_s.tolist() == [end_s[place] for place in iteration.order]
    assert time_s == max(end_s)

    tasks = [
        Task({m.clock_mhz: m for m in row}, clocks[c]) for row, c in zip(rows, chosen, strict=True)
    ]
    wanted = replay_changes(iteration, tasks, change, dag.rank_waiting_w, gpus)
    tail_s = np.array([time_s - end_s[program[-1]] for program in iteration.programs])
    cost = change_cost(iteration, change, gpus)._replace(tail_s=tail_s)
    found_s, found_j = clock_problem.replay_changes(problem, state, cost)
    joules = [
        wanted.energies_j[place]
        - dag.profile.blocking_w(iteration.keys[place][0]) * wanted.durations_s[place]
        for place in range(len(chosen))
    ]
    assert found_s == max(wanted.ends_s)
    assert state.end_s.tolist() == [wanted.ends_s[place] for place in iteration.order]
    assert found_j == pytest.approx(sum(joules), rel=1e-9, abs=1e-9)
    if not wanted.calls:
        assert found_j == pytest.approx(planned_j, rel=1e-9, abs=1e-9)
