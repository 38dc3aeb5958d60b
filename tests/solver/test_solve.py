"""`solve` takes a schedule or its name, and its results show themselves in one line."""

from __future__ import annotations

import pytest
from refusals import refusal
from strategies import smooth_profile
from validators import same

from perseus_planner import schedules, solve
from perseus_planner.base.errors import PlannerError, ScheduleError, UsageError


@pytest.mark.parametrize(
    ("name", "sizes", "schedule"),
    [
        ("1f1b", {"microbatches": 3}, schedules.one_f_one_b(4, 3)),
        ("gpipe", {"microbatches": 2, "ranks": 4}, schedules.gpipe(4, 2)),
        (
            "interleaved-1f1b",
            {"microbatches": 4, "virtual_stages": 2},
            schedules.interleaved_1f1b(2, 2, 4),
        ),
        (
            "interleaved-1f1b",
            {"microbatches": 4, "ranks": 2, "group": 4},
            schedules.interleaved_1f1b(2, 2, 4, 4),
        ),
    ],
)
def test_a_schedule_may_be_given_by_its_name(
    name: str, sizes: dict[str, int], schedule: schedules.Schedule
):
    profile = smooth_profile(4)
    assert same(solve(profile, name, **sizes), solve(profile, schedule))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            ("1f1b", {}),
            UsageError,
            'microbatches: is missing; write solve(profile, "1f1b", microbatches=8)',
        ),
        (
            ("1f1", {"microbatches": 3}),
            ScheduleError,
            "there is no schedule '1f1'; did you mean 1f1b?",
        ),
        (
            ("1f1b", {"microbatches": 0}),
            ScheduleError,
            "microbatches: 0 is not a whole number of at least 1",
        ),
        (
            ("interleaved-1f1b", {"microbatches": 3, "virtual_stages": 3}),
            ScheduleError,
            "4 stages cannot be shared by ranks of 3 stages each; give the number of ranks",
        ),
        (
            (schedules.one_f_one_b(4, 3), {"microbatches": 3}),
            UsageError,
            "microbatches: the schedule has its sizes; leave it out, or name the schedule",
        ),
    ],
)
def test_a_name_without_its_sizes_is_refused(arguments, error: type[PlannerError], text: str):
    schedule, sizes = arguments
    assert refusal(error, solve, smooth_profile(4), schedule, **sizes) == text


def test_a_frontier_and_a_plan_show_themselves_in_one_line():
    frontier = solve(smooth_profile(2), "1f1b", microbatches=3)
    plan = frontier.plan_until(frontier.baseline_time_s, on_time=None)
    assert repr(frontier) == (
        f"<Frontier: 1f1b, 2 stages x 3 microbatches, {frontier.min_time_s:.6g} s to "
        f"{frontier.max_time_s:.6g} s, least energy {min(frontier.energies_j):.6g} J at "
        f"{frontier.least_energy_time_s:.6g} s>"
    )
    assert repr(plan) == (
        f"<Plan: 1f1b, 2 stages x 3 microbatches, {plan.time_s:.6g} s and {plan.energy_j:.6g} J "
        f"per iteration, deadline {plan.deadline_s:.6g} s>"
    )
