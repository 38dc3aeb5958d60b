"""Summaries have the right numbers, and their texts are as expected."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.base.tables import Column, lay_out
from perseus_planner.plans.plan import Interval, OnTime
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.pipeline import FixedOperation, Transfer
from perseus_planner.views.curves import profile_text, summarize_profile
from perseus_planner.views.frontier import frontier_text, summarize_frontier
from perseus_planner.views.plan import plan_text, summarize_plan, summarize_timeline, timeline_text

FORWARD = (Measurement(1400, 1.0, 300.0), Measurement(1000, 1.25, 250.0))
BACKWARD = (Measurement(1400, 2.0, 600.0), Measurement(1000, 2.5, 500.0))
LAST_FORWARD = (Measurement(1400, 1.25, 375.0), Measurement(1000, 1.5, 320.0))
LAST_BACKWARD = (Measurement(1400, 2.5, 750.0), Measurement(1000, 3.0, 640.0))
CURVES = {(0, "F"): FORWARD, (0, "B"): BACKWARD, (1, "F"): LAST_FORWARD, (1, "B"): LAST_BACKWARD}
PROFILE = Profile(CURVES, blocking_power_w=100.0, gpu="test GPU", origin="measured")


def solved(
    curves: dict[tuple[int, str], tuple[Measurement, ...]], blocking_power_w: float = 100.0
) -> Frontier:
    return solve(Profile(curves, blocking_power_w), schedules.one_f_one_b(stages=2, microbatches=3))


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(PROFILE, schedules.one_f_one_b(stages=2, microbatches=3))


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    """Return a plan that slows the first stage down, except for its first forward."""
    slow = [
        name for name in map(str, frontier.dag.computations) if name[0] == "0" and name != "0F0"
    ]
    clocks = {
        **dict.fromkeys(map(str, frontier.dag.computations), 1400),
        **dict.fromkeys(slow, 1000),
    }
    return replace(frontier.plan_of(clocks), deadline_s=18.0)


def test_the_profile_is_a_row_per_computation_from_its_highest_clock_to_its_lowest():
    assert (
        profile_text(summarize_profile(PROFILE))
        == """\
Profile of 2 stages, test GPU (measured); blocking power 100 W

computation  rows        MHz       time s     energy J
0 forward       2  1400-1000  1.000-1.250  300.0-250.0
0 backward      2  1400-1000  2.000-2.500  600.0-500.0
1 forward       2  1400-1000  1.250-1.500  375.0-320.0
1 backward      2  1400-1000  2.500-3.000  750.0-640.0
"""
    )


def test_the_frontier_is_a_table_against_all_clocks_at_maximum(frontier: Frontier):
    assert (
        frontier_text(summarize_frontier(frontier))
        == """\
Frontier of 1f1b, 2 stages x 3 microbatches on test GPU; 12 computations
Replayed from a measured profile; blocking power 100 W.
Baseline of every saving: all clocks at maximum, 14.25 s and 6900 J per iteration.

 time s  x baseline  bound J  saved J  saved %
14.2500      1.0000  6450.00   450.00     6.52    fastest; time of full clocks
14.3925      1.0100  6432.90   467.10     6.77
14.5350      1.0200  6415.80   484.20     7.02
14.9625      1.0500  6364.50   535.50     7.76
15.6750      1.1000  6279.00   621.00     9.00
17.1000      1.2000  6120.00   780.00    11.30
17.2500      1.2105  6105.00   795.00    11.52    least energy

The bound is the least energy of any plan of that time, on all GPUs of the pipeline, waiting included.
"""  # noqa: E501
    )


def test_slower_plans_than_that_of_least_energy_are_compared_with_waiting_for_a_straggler():
    frontier = solved(CURVES, 290.0)
    summary = summarize_frontier(frontier)
    assert frontier.least_energy_time_s == frontier.min_time_s == summary.points[-1].time_s
    last = summary.beside_stragglers[-1]
    assert (last.time_s, last.mark) == (frontier.max_time_s, "then it waits")
    for point in summary.beside_stragglers:
        waiting_j = 2 * 290.0 * (point.time_s - frontier.baseline_time_s)
        assert point.baseline_energy_j == pytest.approx(frontier.baseline_energy_j + waiting_j)
        assert point.energy_j == frontier.bound_j(point.time_s)
        assert point.saved_j == pytest.approx(point.baseline_energy_j - point.energy_j)
        assert point.time_ratio == pytest.approx(point.time_s / frontier.baseline_time_s)
    assert "saved against waiting for it:\n\nstraggler s  x baseline" in frontier_text(summary)


def test_the_plan_is_compared_with_all_clocks_at_maximum_and_the_bound(plan: Plan):
    assert (
        plan_text(summarize_plan(plan, straggler_time_s=20.0))
        == """\
Plan for 1f1b, 2 stages x 3 microbatches on test GPU, within 18 s
Replayed from a measured profile; blocking power 100 W.

                 this plan  all clocks at maximum
s per iteration    14.7500                14.2500
J per iteration    6400.00                6900.00
W on average       433.898                484.211

Beside a straggler of 20 s it saves 600 J (7.45 %) compared with all clocks at maximum and \
waiting; it draws 372.5 W on average, waiting included.
Its energy is 0.156 % above the bound of 6390 J, the least of any plan of that time.
No GPU changes its clock more than 2 times per iteration.
"""
    )


def test_a_faster_iteration_is_no_straggler(plan: Plan):
    text = plan_text(summarize_plan(plan, straggler_time_s=3.0))
    assert (
        "Nothing waits for an iteration of 3 s, as this pipeline takes longer even with all clocks "
        "at maximum. It saves 500 J (7.25 %) compared with all clocks at maximum, at 1.0351x the "
        "time.\n" in text
    )


def test_what_rounds_to_the_bound_has_no_sign(plan: Plan):
    text = plan_text(summarize_plan(replace(plan, energy_j=plan.bound_j * (1 - 1e-9))))
    assert "Its energy is 0.000 % above the bound of " in text


def test_a_plan_says_how_far_it_is_above_the_closer_bound_for_measured_clocks_too(plan: Plan):
    summary = summarize_plan(replace(plan, point_bound_j=6395.0))
    assert summary.point_bound_j == 6395.0
    assert summary.above_point_bound_share == pytest.approx(5.0 / 6395.0)
    assert (
        "0.156 % above the bound of 6390 J, the least of any plan of that time, and 0.078 % above "
        "a closer bound, for plans of measured clocks alone.\n" in plan_text(summary)
    )


def test_a_plan_of_estimates_says_that_its_bound_is_of_them(plan: Plan):
    """`planner solve` shows another bound of that time, of the rows as measured."""
    sure = OnTime(
        probability=0.95,
        limit_ratio=1.001,
        limit_power_w=None,
        margin=1.0,
        time_ratio=Interval(1.0, 0.99, 1.01),
        saved_share=Interval(0.1, 0.09, 0.11),
        power_w=Interval(400.0, 390.0, 410.0),
        safety_share=0.0011,
        points=4,
        interpolated=0,
        has_errors=True,
    )
    text = plan_text(summarize_plan(replace(plan, on_time=sure)))
    assert (
        "0.156 % above the bound of 6390 J, the least of any plan of that time: all by its "
        "estimates; `planner solve` shows the bound of rows as measured.\n" in text
    )
    assert (
        "To be that sure costs 0.11 % of that energy, beside a plan of the same estimates without "
        "a margin. `--as-measured` is not that plan: it takes measured rows at face value.\n"
        in text
    )


def test_the_timeline_is_a_line_per_rank(plan: Plan):
    _, _, stages = timeline_text(summarize_timeline(plan)).partition("times per iteration.\n\n")
    assert (
        stages
        == """\
rank           MHz  changes  busy %        J    timeline
   0  1000 to 1400        2    74.6  2675.00    FFFFFFF........BBBBBBBBBFFFFBBBBBBBB....BBBBBBBB
   1          1400        0    76.3  3725.00    ...FFFFBBBBBBBBFFFFFBBBBBBBBFFFFBBBBBBBB........

Timeline: 48 moments of the iteration; F forward, B backward, . waiting.
Changes: clock changes from one computation to the next, and back for the next iteration.
"""
    )


def of_a_job(overhead_s: float) -> Frontier:
    """Solve two ranks with two stages each, with a load before each first forward and an
    optimizer step on rank 1.
    """
    one = {"F": 1.0, "I": 1.5, "W": 0.5}
    points = {
        (stage, kind): tuple(Measurement(mhz, 1000 * s / mhz, s * mhz / 5) for mhz in (1000, 800))
        for stage in range(4)
        for kind, s in one.items()
    }
    profile = Profile(points, (100.0, 90.0, 90.0, 100.0), overhead_s=overhead_s, gpus_per_stage=2)
    return solve(
        profile,
        schedules.zbv(2, 2),
        transfer=Transfer(0.5),
        operations=[
            FixedOperation("load", "before F", 0.5, where=(0,)),
            FixedOperation("optimizer", "end", 1.0, 400.0, where=(1,)),
        ],
    )


def test_a_timeline_shows_virtual_stages_by_rank_and_fixed_operations():
    frontier = of_a_job(overhead_s=2.0)
    plan = frontier.plan_for(frontier.baseline_time_s)
    text = timeline_text(summarize_timeline(plan))
    assert (
        text[text.index("rank   ") :]
        == """\
rank          MHz  changes  busy %        J    timeline
   0  800 to 1000        4    79.1  2627.50    oFFFoFFF....FFIIIIWWFFFIIIIIWWIIIIWW..IIIIW.....
   1  800 to 1000        4    73.6  3138.75    .....FFFFFFFFFFFF.IIIIWIIIIWWIIIWWIIIIWooo......

Timeline: 48 moments of the iteration; F forward, I input gradient, W weight gradient, o fixed operation, . waiting.
Changes: clock changes from one computation to the next, and back for the next iteration.
"""  # noqa: E501
    )
    summary = summarize_plan(plan)
    assert math.isclose(
        math.fsum(rank.energy_j for rank in summary.per_rank), plan.energy_j, rel_tol=1e-12
    )


@pytest.mark.parametrize("overhead_s", [-3.0, 0.0, 30.0])
def test_a_strip_is_as_long_as_its_moments_whatever_was_calibrated(overhead_s: float):
    frontier = of_a_job(overhead_s)
    for plan in (frontier.plan_for(frontier.min_time_s), frontier.plan_for_least_energy()):
        lines = timeline_text(summarize_timeline(plan)).splitlines()
        strips = [line.split()[-1] for line in lines if line.lstrip()[:2] in ("0 ", "1 ")]
        assert list(map(len, strips)) == [48, 48]
        assert (
            frontier_text(summarize_frontier(frontier)).count("blocking power 90 W to 100 W") == 1
        )


def test_a_simulated_profile_is_called_so_everywhere():
    profile = Profile(CURVES, 100.0, origin="simulated")
    frontier = solve(profile, schedules.one_f_one_b(stages=2, microbatches=3))
    plan = frontier.plan_for(frontier.baseline_time_s)
    assert "(simulated: no GPU was touched)" in profile_text(summarize_profile(profile))
    for text in (
        frontier_text(summarize_frontier(frontier)),
        plan_text(summarize_plan(plan)),
        timeline_text(summarize_timeline(plan)),
    ):
        assert "\nReplayed from a simulated profile; " in text


def test_a_straggler_makes_both_wait(plan: Plan):
    beside = summarize_plan(plan, straggler_time_s=20.0).beside_straggler
    assert beside is not None
    # Two GPUs wait at 100 W from the end of the iteration on.
    assert beside.energy_j == pytest.approx(6400 + 200 * (20 - 14.75), rel=1e-12)
    assert beside.baseline_energy_j == pytest.approx(6900 + 200 * (20 - 14.25), rel=1e-12)
    assert summarize_plan(plan).beside_straggler is None


def test_points_that_coincide_share_a_row():
    marks = [point.mark for point in summarize_frontier(solved(CURVES)).points if point.mark]
    assert marks == [
        "fastest; time of full clocks",
        "least energy",
    ]
    assert len(summarize_frontier(solved(SINGLE)).points) == 1


SINGLE = {key: rows[:1] for key, rows in CURVES.items()}
LAST_STAGE_SINGLE = {key: rows if key[0] == 0 else rows[:1] for key, rows in CURVES.items()}
# Each computation costs 1 J more at 1000 MHz than at 1400 MHz with the wait after it, at 100 W.
DEAR = {
    (0, "F"): (1.25, 326.0),
    (0, "B"): (2.5, 651.0),
    (1, "F"): (1.5, 401.0),
    (1, "B"): (3.0, 801.0),
}
ALL_DEAR = {key: (rows[0], Measurement(1000, *DEAR[key])) for key, rows in CURVES.items()}
NEVER = (
    "Slower clocks never pay: a slower computation costs more than finishing early and waiting "
    "at 100 W."
)
TOO_LARGE = (
    "The blocking power of {} W is so large that the fastest iteration takes the least energy. "
    "Slower iterations pay only beside a straggler."
)
IMPLAUSIBLE = (
    "The blocking power of 301 W is more than any computation draws, 300 W at most; check it."
)
ALONE = "Every computation has a single clock, so there is a single plan."


@pytest.mark.parametrize(
    ("curves", "blocking_power_w", "remarks"),
    [
        pytest.param(CURVES, 100.0, (), id="nothing"),
        pytest.param(ALL_DEAR, 100.0, (NEVER,), id="no slowdown pays"),
        pytest.param(
            LAST_STAGE_SINGLE, 290.0, (TOO_LARGE.format(290),), id="blocking power too large"
        ),
        pytest.param(
            CURVES, 301.0, (TOO_LARGE.format(301), IMPLAUSIBLE), id="blocking power implausible"
        ),
        pytest.param(SINGLE, 100.0, (ALONE,), id="single clock"),
    ],
)
def test_surprising_frontiers_have_remarks(
    curves: dict[tuple[int, str], tuple[Measurement, ...]],
    blocking_power_w: float,
    remarks: tuple[str, ...],
):
    summary = summarize_frontier(solved(curves, blocking_power_w))
    assert summary.remarks == remarks
    alone, _, _ = frontier_text(summary).partition("\nBeside a straggler (")
    assert alone.endswith("".join(f"{remark}\n" for remark in remarks))


def test_texts_name_groups_of_gpus_and_several_stages_on_a_rank():
    profile = replace(PROFILE, gpus_per_stage=4)
    assert profile_text(summarize_profile(profile)).startswith(
        "Profile of 2 stages of 4 GPUs, test GPU (measured); "
    )
    three = Profile({**CURVES, (2, "F"): FORWARD, (2, "B"): BACKWARD}, 100.0)
    ranks = ("0F0 1F0 1B0 0B0", "2F0 2B0")
    schedule = Schedule("own", tuple(tuple(map(Computation.parse, rank.split())) for rank in ranks))
    frontier = solve(three, schedule)
    wanted = " own, 3 stages on 2 ranks x 1 microbatch"
    assert wanted in frontier_text(summarize_frontier(frontier)).splitlines()[0]
    assert wanted in plan_text(summarize_plan(frontier.plan_for_least_energy())).splitlines()[0]


def test_a_plan_of_one_clock_changes_none():
    plan = solved(SINGLE).plan_for_least_energy()
    assert "\nNo GPU changes its clock.\n" in plan_text(summarize_plan(plan))


def test_a_profile_shows_its_errors_and_warnings():
    hot = Evidence(1290.5, 0.002, 0.75, 3, 88.0, ("sw-power-cap", "hw-thermal"))
    rows = (replace(FORWARD[0], evidence=hot), FORWARD[1])
    conditions = {
        "driver": "570",
        "warnings": "MIG is on: turn it off",
        "measured while too hot": "F at 1400 MHz",
    }
    profile = replace(
        PROFILE,
        measurements={**CURVES, (0, "F"): rows},
        control="power-limit",
        conditions=conditions,
    )
    assert (
        profile_text(summarize_profile(profile))
        == """\
Profile of 2 stages, test GPU (measured; power limits were set); blocking power 100 W
Warnings: MIG is on: turn it off
Measured while too hot: F at 1400 MHz

computation  rows          W       time s  +- %     energy J  +- %  throttled
0 forward       2  1400-1000  1.000-1.250  0.20  300.0-250.0  0.25          1
0 backward      2  1400-1000  2.000-2.500     -  600.0-500.0     -          0
1 forward       2  1400-1000  1.250-1.500     -  375.0-320.0     -          0
1 backward      2  1400-1000  2.500-3.000     -  750.0-640.0     -          0
"""
    )


def test_a_share_is_never_minus_nothing():
    (cells,) = lay_out([{"x": -4e-5}, {"x": -6e-5}, {"x": None}], Column("x", "x", "%"))
    assert [cell.strip() for cell in cells] == ["x", "0.00", "-0.01", "-"]
