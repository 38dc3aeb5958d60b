"""A replay against a simulation of ranks that send each other messages, and by hand."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed, pipelines

from perseus_planner.errors import ScheduleError
from perseus_planner.pipeline import pipeline_iteration
from perseus_planner.plan import Plan
from perseus_planner.profiles import Measurement, Profile
from perseus_planner.schedules import Computation, Schedule, one_f_one_b
from perseus_planner.simulate import replay


def with_clocks(profile: Profile, schedule: Schedule, rng: Random) -> Plan:
    """A plan of clocks drawn for each computation; what it says of time, energy and bound is nothing."""
    clocks = {str(c): rng.choice(profile.measurements[c[:2]]).clock_mhz for c in schedule.computations()}
    table = {key: {m.clock_mhz: m for m in measured} for key, measured in profile.measurements.items()}
    iteration, power_w = pipeline_iteration(schedule), profile.blocking_power_w
    return Plan(iteration, clocks, table, "", None, "measured", power_w, *[math.nan] * 6)


def simulated(plan: Plan) -> dict[Computation, tuple[float, float]]:
    """When each computation runs: ranks take their work in order, and wait for what others send."""
    last, sent, ran = plan.schedule.stages - 1, {}, {}
    ready_s = dict.fromkeys(range(last + 1), 0.0)
    work = {rank[0].stage: list(rank) for rank in plan.schedule.ranks}
    while any(work.values()):
        for stage, queue in work.items():
            if not queue:
                continue
            kind, microbatch = queue[0].kind, queue[0].microbatch
            inbox = (stage, kind, microbatch)
            if (kind, stage) in (("F", 0), ("B", last)):
                sent[inbox] = 0.0  # from the data loader, or from its own forward, which its own order brings first
            if inbox not in sent:
                continue
            computation = queue.pop(0)
            start_s = max(ready_s[stage], sent[inbox])
            end_s = ready_s[stage] = start_s + plan.measurement(computation).time_s
            sent[stage + (1 if kind == "F" else -1), kind, microbatch] = end_s
            ran[computation] = start_s, end_s
    return ran


@fixed
@given(problem=pipelines(5, 8), seed=st.integers(0, 2**32))
def test_a_replay_is_what_ranks_do_that_wait_for_messages(problem: tuple[Profile, Schedule], seed: int):
    plan = with_clocks(*problem, Random(seed))
    timeline, ran = replay(plan), simulated(plan)
    assert list(timeline.spans) == [str(computation) for computation in plan.schedule.computations()]
    busy_j = busy_s = 0.0
    for computation, (start_s, end_s) in ran.items():
        span, point = timeline.spans[str(computation)], plan.measurement(computation)
        assert (span.start_s, span.end_s) == (start_s, end_s)
        assert span.power_w == point.energy_j / point.time_s
        busy_j, busy_s = busy_j + point.energy_j, busy_s + point.time_s
    assert timeline.time_s == max(end_s for _, end_s in ran.values())
    waiting_j = plan.blocking_power_w * (plan.schedule.stages * timeline.time_s - busy_s)
    assert math.isclose(timeline.energy_j, busy_j + waiting_j, rel_tol=1e-12)


def test_two_stages_by_hand():
    points = {
        (0, "F"): (Measurement(1410, 1.0, 100.0),),
        (0, "B"): (Measurement(1410, 2.0, 300.0),),
        (1, "F"): (Measurement(1410, 1.5, 120.0),),
        (1, "B"): (Measurement(1410, 2.5, 400.0),),
    }
    timeline = replay(with_clocks(Profile(points, 50.0), one_f_one_b(2, 2), Random(0)))
    assert {text: (span.start_s, span.end_s) for text, span in timeline.spans.items()} == {
        **{"0F0": (0.0, 1.0), "0F1": (1.0, 2.0), "0B0": (5.0, 7.0), "0B1": (9.0, 11.0)},
        **{"1F0": (1.0, 2.5), "1B0": (2.5, 5.0), "1F1": (5.0, 6.5), "1B1": (6.5, 9.0)},
    }
    assert timeline.time_s == 11.0
    assert timeline.energy_j == 2 * (100 + 300 + 120 + 400) + 50 * (22 - 14)
    assert timeline.spans["1B0"].power_w == 160.0


def test_a_schedule_that_cannot_run_is_not_replayed():
    schedule = Schedule("stuck", ((Computation(0, "B", 0), Computation(0, "F", 0)),))
    points = {(0, kind): (Measurement(1410, 1.0, 100.0),) for kind in "FB"}
    with pytest.raises(ScheduleError, match="0B0 can never run"):
        replay(with_clocks(Profile(points, 50.0), schedule, Random(0)))
