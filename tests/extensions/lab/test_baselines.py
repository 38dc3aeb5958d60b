"""The rules of other planners choose measured clocks, meet deadlines, and follow their
publications.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import end_times_s
from strategies import fixed, pipelines, smooth_profile

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.lab import baselines
from perseus_planner.extensions.lab.baselines import critical_path, on_envelope
from perseus_planner.plans.replay import all_maximum
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule, one_f_one_b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve

Clocks = dict[str, int]
Points = dict[int, tuple[float, float]]  #: MHz -> seconds, joules

BY_DEADLINE = (baselines.one_clock, baselines.one_per_stage)
BLOCKING_W = {"a100_sxm": 83.64, "a40": 70.38}


def problems() -> st.SearchStrategy[PipelineDag]:
    return pipelines().map(lambda drawn: PipelineDag.from_schedule(*drawn))


def points_of(dag: PipelineDag, clocks: Clocks) -> list[Measurement]:
    """Return the measurements at these clocks; fail if a clock was not measured or is missing."""
    assert list(clocks) == [str(computation) for computation in dag.computations]
    measured = [
        {point.clock_mhz: point for point in dag.profile.measurements[c[:2]]}
        for c in dag.computations
    ]
    return [points[clock] for points, clock in zip(measured, clocks.values(), strict=True)]


def costs(dag: PipelineDag, clocks: Clocks) -> tuple[float, float]:
    """Return the time and the effective energy of an iteration."""
    points = points_of(dag, clocks)
    effective_j = math.fsum(p.energy_j - dag.profile.blocking_power_w * p.time_s for p in points)
    return max(end_times_s(dag, [p.time_s for p in points])), effective_j


def cheapest(dag: PipelineDag, family: list[Clocks], deadline_s: float) -> float | None:
    costed = [costs(dag, clocks) for clocks in family]
    return min(
        (effective_j for time_s, effective_j in costed if time_s <= deadline_s), default=None
    )


def profile_of(*stages: tuple[Points, Points]) -> Profile:
    """Return a profile from forward and backward of each stage, without blocking power."""
    table = {
        (stage, kind): tuple(Measurement(clock, *values) for clock, values in points.items())
        for stage, both in enumerate(stages)
        for kind, points in zip("FB", both, strict=True)
    }
    return Profile(table, 0.0)


def one_clock_family(dag: PipelineDag) -> list[Clocks]:
    every = [{p.clock_mhz for p in points} for points in dag.profile.measurements.values()]
    return [{str(c): clock for c in dag.computations} for clock in set.intersection(*every)]


def per_stage_family(dag: PipelineDag) -> list[Clocks]:
    """Search as ZeusPerStage does on GPUs: in rounds, in which all stages that still search move
    at once.
    """
    measured = dag.profile.measurements
    stages = range(dag.profile.stages)
    ladders = [
        sorted({p.clock_mhz for p in measured[s, "F"]} & {p.clock_mhz for p in measured[s, "B"]})[
            ::-1
        ]
        for s in stages
    ]
    forward_s = [{p.clock_mhz: p.time_s for p in measured[s, "F"]} for s in stages]
    at = [0 for _ in stages]

    def now_s() -> list[float]:
        return [forward_s[s][ladders[s][at[s]]] for s in stages]

    heavy = now_s().index(max(now_s()))
    family: list[Clocks] = []
    for clock in ladders[heavy]:
        for s in stages:
            while at[s] + 1 < len(ladders[s]) and ladders[s][at[s]] > clock:
                at[s] += 1
        target_s, before = now_s()[heavy], [(math.inf, 0.0) for _ in stages]
        searching = [s for s in stages if s != heavy]
        while searching:
            seen_s = now_s()
            for s in list(searching):
                gap_s, (gap_before_s, before_s) = abs(seen_s[s] - target_s), before[s]
                before[s] = (gap_s, seen_s[s])
                if gap_s > gap_before_s and seen_s[s] >= before_s:
                    at[s] -= 1
                    searching.remove(s)
                elif at[s] + 1 == len(ladders[s]):
                    searching.remove(s)
                else:
                    at[s] += 1
        family.append({str(c): ladders[c.stage][at[c.stage]] for c in dag.computations})
        if any(at[s] + 1 == len(ladders[s]) for s in stages):
            break
    return family


@fixed
@given(problems())
def test_all_maximum_is_the_highest_clock_of_each(dag: PipelineDag):
    clocks = all_maximum(dag)
    for computation, point in zip(dag.computations, points_of(dag, clocks), strict=True):
        assert point.clock_mhz == max(
            p.clock_mhz for p in dag.profile.measurements[computation[:2]]
        )


@fixed
@given(problems(), st.floats(0.9, 1.5))
@pytest.mark.parametrize(
    ("planner", "family_of"),
    [(baselines.one_clock, one_clock_family), (baselines.one_per_stage, per_stage_family)],
)
def test_the_cheapest_of_the_family_that_meets_the_deadline_is_taken(
    planner: Callable[..., Clocks],
    family_of: Callable[..., list[Clocks]],
    dag: PipelineDag,
    share: float,
):
    family, maximum = family_of(dag), all_maximum(dag)
    deadline_s = share * costs(dag, maximum)[0]
    chosen, least_j = planner(dag, deadline_s), cheapest(dag, family, deadline_s)
    if least_j is None:
        assert chosen == maximum
    else:
        assert chosen in family
        time_s, effective_j = costs(dag, chosen)
        assert time_s <= deadline_s
        assert effective_j == pytest.approx(least_j, rel=1e-9, abs=1e-9)


@settings(fixed, max_examples=50)
@given(pipelines(), st.floats(1.0, 1.5))
def test_no_baseline_is_below_the_bound_at_its_time(drawn, share: float):
    frontier, dag = solve(*drawn), PipelineDag.from_schedule(*drawn)
    deadline_s = share * frontier.baseline_time_s
    chosen = [
        all_maximum(dag),
        baselines.envpipe(dag),
        *(planner(dag, deadline_s) for planner in BY_DEADLINE),
    ]
    for clocks in chosen:
        time_s, effective_j = costs(dag, clocks)
        energy_j = effective_j + dag.profile.blocking_power_w * dag.profile.stages * time_s
        bound_j = frontier.bound_j(max(time_s, frontier.min_time_s))
        assert energy_j >= bound_j - 1e-9 * abs(bound_j)


@fixed
@given(problems())
def test_envpipe_ends_where_the_critical_path_cannot_be_sped_up(dag: PipelineDag):
    clocks, maximum = baselines.envpipe(dag), all_maximum(dag)
    names = list(clocks)
    path = [
        names[place]
        for place in critical_path(dag, [point.time_s for point in points_of(dag, clocks)])
    ]
    assert [clocks[name] for name in path] == [maximum[name] for name in path]
    assert costs(dag, clocks)[0] <= costs(dag, maximum)[0]
    assert baselines.envpipe(dag) == clocks


@fixed
@given(problems())
def test_envpipe_never_slows_the_envelope_nor_goes_below_the_valley(dag: PipelineDag):
    clocks, maximum = baselines.envpipe(dag), all_maximum(dag)
    last = (dag.schedule.stages - 1, dag.schedule.microbatches - 1)
    for computation, point in zip(dag.computations, points_of(dag, clocks), strict=True):
        measured = dag.profile.measurements[computation[:2]]
        least_j = min(p.energy_j for p in measured)
        assert point.clock_mhz >= max(p.clock_mhz for p in measured if p.energy_j == least_j)
        if on_envelope(computation, *last):
            assert point.clock_mhz == maximum[str(computation)]


def test_a_critical_path_goes_back_to_the_start_without_a_gap():
    dag = PipelineDag.from_schedule(smooth_profile(3), one_f_one_b(3, 4))
    durations_s = [point.time_s for point in points_of(dag, all_maximum(dag))]
    path = critical_path(dag, durations_s)
    assert str(dag.computations[path[0]]) == "0B3"
    assert str(dag.computations[path[-1]]) == "0F0"
    assert math.fsum(durations_s[place] for place in path) == pytest.approx(
        max(end_times_s(dag, durations_s))
    )


def test_envpipe_speeds_up_only_what_leaves_the_envelope_and_only_so_far():
    # By hand, seconds: 0F0 0-1, 1F0 1-4, 1B0 4-7, 1F1 7-10, 1B1 10-13, 0B1 13-14. 0F1 has from 1 to
    # 7, 0B0 from 7 to 13: 8 s at its valley are too long, 5.5 s one step up are not.
    forward = {1400: (1.0, 10.0), 1200: (2.0, 6.0), 1100: (3.0, 7.0)}
    backward = {1400: (1.0, 10.0), 1300: (5.5, 8.0), 1200: (8.0, 5.0)}
    last = {1400: (3.0, 9.0), 1200: (3.5, 6.0)}
    dag = PipelineDag.from_schedule(
        profile_of((forward, backward), (last, last)), one_f_one_b(2, 2)
    )
    high = dict.fromkeys(["0F0", "0B1", "1F0", "1B0", "1F1", "1B1"], 1400)
    assert baselines.envpipe(dag) == {**high, "0F1": 1200, "0B0": 1300}


def test_envpipe_speeds_up_the_lowest_clocks_of_the_path_first():
    # By hand, seconds: 1B0 4-7, 1B1 10-13, 1F2 13-16, 1B2 16-19. 0B0 and 0F2 have from 7 to 13; at
    # their valleys they take 5 + 2, with 0B0 one step up 4 + 2; 0B1 has from 13 to 19 and takes 5.
    forward = {1400: (1.0, 10.0), 1300: (2.0, 5.0)}
    backward = {1400: (1.0, 10.0), 1300: (4.0, 8.0), 1200: (5.0, 5.0)}
    last = {1400: (3.0, 9.0)}
    dag = PipelineDag.from_schedule(
        profile_of((forward, backward), (last, last)), one_f_one_b(2, 3)
    )
    inner = {"0F1": 1300, "0F2": 1300, "0B0": 1300, "0B1": 1200}
    assert baselines.envpipe(dag) == {**all_maximum(dag), **inner}


def test_envpipe_gives_up_at_the_highest_clocks_where_the_first_stage_is_the_heaviest():
    heavy = {1400: (5.0, 10.0), 1300: (6.0, 8.0), 1200: (8.0, 5.0)}
    light = {1400: (1.0, 9.0), 1200: (1.5, 6.0)}
    dag = PipelineDag.from_schedule(profile_of((heavy, heavy), (light, light)), one_f_one_b(2, 3))
    assert baselines.envpipe(dag) == all_maximum(dag)


def test_envpipe_refuses_another_schedule():
    forwards, backwards = ([Computation(0, kind, m) for m in range(2)] for kind in "FB")
    schedule = Schedule("gpipe", ((*forwards, *backwards),))
    dag = PipelineDag.from_schedule(smooth_profile(1), schedule)
    message = (
        r"^EnvPipe's rule is for 1F1B only, and this schedule is gpipe, 1 stages x 2 "
        r"microbatches; use a 1F1B"
    )
    with pytest.raises(UsageError, match=message):
        baselines.envpipe(dag)


def test_one_clock_is_refused_without_a_common_clock():
    points: Points = {1400: (1.0, 1.0)}
    dag = PipelineDag.from_schedule(profile_of((points, {1200: (1.0, 1.0)})), one_f_one_b(1, 2))
    with pytest.raises(
        UsageError, match=r"^no clock was measured for every computation; measure one clock"
    ):
        baselines.one_clock(dag, 9.0)
    with pytest.raises(
        UsageError,
        match=r"^stage 0: no clock was measured for all its computations; measure one clock",
    ):
        baselines.one_per_stage(dag, 9.0)


@pytest.mark.parametrize(
    ("model", "device", "same_energy"),
    # On the A40 several paths are critical at once in the ticks of the artifact's script, which
    # follows others.
    [
        ("gpt3-175b", "a100_sxm", 1e-8),
        pytest.param("bloom", "a40", 3e-4, marks=pytest.mark.soak),  # the same on other numbers
    ],
)
def test_envpipe_matches_the_perseus_artifact(
    model: str, device: str, same_energy: float, measured_data: Path
):
    data = measured_data / "perseus_sosp24"
    profile = Profile.load(
        data / "stage_profile" / f"{model}+{device}_bf16.csv", BLOCKING_W[device]
    )
    with (data / "envpipe_result.csv").open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if (row["model"], row["device"]) == (model, device)
        ]
    assert [row["num_microbatches"] for row in rows] == ["12", "24", "48", "96"]
    for row in rows:
        dag = PipelineDag.from_schedule(profile, one_f_one_b(8, int(row["num_microbatches"])))
        clocks = baselines.envpipe(dag)
        points = points_of(dag, clocks)
        time_s = max(end_times_s(dag, [point.time_s for point in points]))
        waiting_j = profile.blocking_power_w * (
            8 * time_s - math.fsum(point.time_s for point in points)
        )
        energy_j = math.fsum(point.energy_j for point in points) + waiting_j
        # The file has ten steps of time, of all 8 GPUs of a stage; its times are written in ms.
        assert 10 * time_s == pytest.approx(float(row["iteration_time"]), abs=5.1e-4)
        assert 10 * 8 * energy_j == pytest.approx(float(row["energy"]), rel=same_energy)
