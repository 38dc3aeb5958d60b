"""Profiles of GPU groups, of stages measured apart, and of slower stages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from strategies import fixed, profiles, smooth_profile

from perseus_planner import schedules
from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.groups import (
    on_each_gpu,
    slowed,
    stage_by_stage,
    tensor_group,
    within_power_limit,
)
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import ClockChange, Profile
from perseus_planner.solver.frontier import solve

FAST = Profile(
    {(0, kind): (Measurement(1400, 1.0, 300.0), Measurement(1000, 1.5, 200.0)) for kind in "FB"},
    80.0,
    "A",
)
SLOW = Profile(
    {(0, kind): (Measurement(1400, 1.2, 250.0), Measurement(900, 2.0, 150.0)) for kind in "FB"},
    60.0,
    "B",
)


def test_a_group_takes_the_longest_time_and_all_the_energy_at_common_clocks():
    group = tensor_group([FAST, SLOW, FAST])
    assert group.measurements[0, "F"] == (Measurement(1400, 1.2, 850.0),)
    assert (group.blocking_power_w, group.gpus_per_stage, group.gpu) == (220.0, 3, "A + B")


@fixed
@given(profile=profiles(), gpus=st.integers(1, 9))
def test_a_group_of_like_gpus_saves_the_same_share(profile: Profile, gpus: int):
    schedule = schedules.one_f_one_b(profile.stages, 3)
    one, group = solve(profile, schedule), solve(on_each_gpu(profile, gpus), schedule)
    assert group.min_time_s == one.min_time_s
    assert group.profile.gpus_per_stage == gpus
    assert math.isclose(group.baseline_energy_j, gpus * one.baseline_energy_j, rel_tol=1e-12)
    middle_s = (one.min_time_s + one.max_time_s) / 2
    scale_j = max(map(abs, (one.bound_j(middle_s), one.baseline_energy_j)))
    assert math.isclose(
        group.bound_j(middle_s),
        gpus * one.bound_j(middle_s),
        rel_tol=0,
        abs_tol=1e-9 * gpus * scale_j,
    )


def with_errors(profile: Profile, time_s: float, energy_j: float) -> Profile:
    evidence = Evidence(1390.0, time_s, energy_j, 4, 60.0, ("sw-power-cap",))
    rows = {
        key: tuple(replace(row, evidence=evidence) for row in each)
        for key, each in profile.measurements.items()
    }
    return replace(profile, measurements=rows)


def test_a_group_has_the_errors_of_its_slowest_gpu_and_of_all_energies():
    group = tensor_group(
        [with_errors(FAST, 0.1, 2.0), with_errors(SLOW, 0.3, 5.0), with_errors(FAST, 0.2, 2.0)]
    )
    assert group.measurements[0, "F"][0].evidence == Evidence(
        1390.0, 0.3, 9.0, 4, 60.0, ("sw-power-cap",)
    )
    assert (
        tensor_group([FAST, with_errors(SLOW, 0.3, 5.0)]).measurements[0, "F"][0].evidence is None
    )


def test_the_errors_of_a_slower_stage_grow_as_its_times():
    rows = slowed(with_errors(FAST, 0.1, 2.0), {0: 1.5}).measurements[0, "F"]
    evidence = rows[0].evidence
    assert evidence is not None
    assert (evidence.time_stderr_s, evidence.energy_stderr_j) == pytest.approx(
        (0.15, 3.0), rel=1e-12
    )


def test_stages_measured_apart_make_one_pipeline():
    both = stage_by_stage([FAST, SLOW])
    assert both.measurements[0, "B"] == FAST.measurements[0, "B"]
    assert both.measurements[1, "F"] == SLOW.measurements[0, "F"]
    assert both.blocking_power_w == (80.0, 60.0)
    assert [both.blocking_w(stage) for stage in range(2)] == [80.0, 60.0]
    frontier = solve(both, schedules.one_f_one_b(2, 2))
    assert frontier.dag.waiting_w == 140.0


@fixed
@given(profile=profiles(), slowdown=st.floats(1.0, 3.0))
def test_a_pipeline_whose_every_stage_is_slower_is_that_much_slower(
    profile: Profile, slowdown: float
):
    schedule = schedules.one_f_one_b(profile.stages, 3)
    slow = solve(slowed(profile, dict.fromkeys(range(profile.stages), slowdown)), schedule)
    frontier = solve(profile, schedule)
    assert math.isclose(slow.min_time_s, slowdown * frontier.min_time_s, rel_tol=1e-12)
    assert math.isclose(
        slow.baseline_energy_j, slowdown * frontier.baseline_energy_j, rel_tol=1e-12, abs_tol=1e-9
    )


def test_only_the_slow_stage_is_slower():
    profile = smooth_profile(3)
    slow = slowed(profile, {1: 1.15})
    for (stage, kind), rows in profile.measurements.items():
        slowdown = 1.15 if stage == 1 else 1.0
        wanted = tuple(
            Measurement(m.clock_mhz, m.time_s * slowdown, m.energy_j * slowdown) for m in rows
        )
        assert slow.measurements[stage, kind] == wanted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tensor_group([]), "no profiles: give at least one"),
        (lambda: stage_by_stage([]), "no profiles: give at least one"),
        (
            lambda: tensor_group([FAST, smooth_profile(2)]),
            "GPU 1 of the group has other stages or kinds than GPU 0; measure the same",
        ),
        (
            lambda: tensor_group(
                [FAST, Profile(dict.fromkeys(FAST.measurements, (Measurement(7, 1, 1),)), 1.0)]
            ),
            "stage 0 forward: the GPUs of the group have no clock in common; measure one",
        ),
        (
            lambda: tensor_group([FAST, replace(FAST, control="power-limit")]),
            "GPU 1 of the group was measured by power-limit, GPU 0 by clock; use one",
        ),
        (lambda: on_each_gpu(FAST, 0), "gpus: 0 is not a whole number of at least 1"),
        (
            lambda: stage_by_stage([FAST, smooth_profile(2), smooth_profile(2)]),
            "the profile of stage 2 has only 2 stages; give one that has it",
        ),
        (
            lambda: stage_by_stage([FAST, replace(SLOW, clock_change=ClockChange(0.005))]),
            "the profiles of stage 0 and stage 1 differ in clock_change; give both the same",
        ),
        (lambda: slowed(FAST, {1: 1.1}), "slow stage 1: does not exist; stages are 0 to 0"),
        (
            lambda: slowed(FAST, {0: 0.0}),
            "slow stage 0: 0.0 is not a slowdown: give how many times as long it takes, above 0, "
            "such as 1.15",
        ),
    ],
)
def test_profiles_that_do_not_fit_together_are_refused(make, message: str):
    assert refusal(ProfileError, make) == message


def test_clocks_that_a_power_limit_would_cap_are_no_operating_points():
    limited = within_power_limit(FAST, 200.0)  # at 1400 MHz it draws 300 W, at 1000 MHz 133 W
    assert limited.measurements[0, "F"] == (Measurement(1000, 1.5, 200.0),)
    assert limited.digest != FAST.digest
    assert (
        within_power_limit(FAST, 295.0) is FAST
    )  # a GPU at its limit is read to draw a little more
    two = on_each_gpu(FAST, 2)
    assert within_power_limit(two, 295.0) is two  # the limit is that of one GPU
    frontier = solve(limited, schedules.one_f_one_b(1, 2))
    assert (
        frontier.plan_for(frontier.baseline_time_s, max_changes=0).time_s
        == frontier.min_time_s
        == 6.0
    )
    limits = replace(FAST, control="power-limit", gpu=None)
    assert within_power_limit(limits, 1200.0).measurements[0, "F"] == (
        Measurement(1000, 1.5, 200.0),
    )


def test_a_power_limit_under_which_nothing_can_run_is_refused():
    assert refusal(ProfileError, within_power_limit, FAST, 100.0) == (
        "stage 0 forward: draws 133 W at its least clock, and the power limit of its GPU is 100 W; "
        "measure lower clocks, or raise the limit"
    )
    with pytest.raises(
        ProfileError, match=r"gpu_power_limit_w: 0 is not a power: give finite watts above 0"
    ):
        within_power_limit(FAST, 0)
