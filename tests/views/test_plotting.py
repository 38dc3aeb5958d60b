"""A figure shows the numbers of its frontier or plan, with units, and says where they come from."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.errors import UsageError
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules.pipeline import FixedOperation
from perseus_planner.views.plotting import check_figure_path, draw_frontier, draw_plan, save_figure

FIRST_BYTES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def frontier_of(*clocks_mhz: int) -> Frontier:
    def rows(work: float) -> tuple[Measurement, ...]:
        return tuple(Measurement(mhz, 1000 * work / mhz, work * (50 + mhz / 5)) for mhz in clocks_mhz)

    measurements = {(stage, kind): rows(1.0 + stage + (kind == "B")) for stage in range(3) for kind in "FB"}
    profile = Profile(measurements, blocking_power_w=60.0, origin="simulated")
    return solve(profile, schedules.one_f_one_b(stages=3, microbatches=4))


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return frontier_of(1400, 1200, 1000)


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan_for(1.05 * frontier.baseline_time_s)


def test_a_plan_is_one_bar_per_computation_from_its_start_to_its_end(plan: Plan):
    axes = draw_plan(plan).axes[0]
    spans = replay(plan).spans
    for row, (rank, bars) in enumerate(zip(plan.schedule.ranks, axes.collections, strict=True)):
        drawn = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
        expected = [(spans[str(computation)].start_s, spans[str(computation)].end_s) for computation in rank]
        assert np.allclose(drawn, expected, rtol=1e-12)
        assert {round(path.vertices[:, 1].mean()) for path in bars.get_paths()} == {row}
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first stage is on top


def test_a_rank_shows_all_its_stages_and_its_fixed_operations_in_grey():
    points = {(stage, kind): (Measurement(1000, 1.0, 90.0),) for stage in range(4) for kind in "FB"}
    frontier = solve(
        Profile(points, 60.0, overhead_s=-0.25),
        schedules.interleaved_1f1b(2, 2, 2),
        operations=[FixedOperation("optimizer", "end", 1.5, where=(1,))],
    )
    plan = frontier.plan_for_least_energy()
    axes, spans = draw_plan(plan).axes[0], replay(plan).spans
    drawn = {}
    for bars in axes.collections:
        row = round(bars.get_paths()[0].vertices[:, 1].mean())
        ends = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
        drawn.setdefault(row, []).append((ends, bars.get_facecolors()))
    assert {row: [len(ends) for ends, _ in each] for row, each in drawn.items()} == {0: [8], 1: [1, 8]}
    assert np.allclose(drawn[1][0][0], [(spans["1optimizer"].start_s, spans["1optimizer"].end_s)])
    assert len(set(drawn[1][0][1][0][:3])) == 1  # grey
    assert axes.get_xlim()[1] == max(span.end_s for span in spans.values()) == plan.time_s + 0.25


def test_equal_clocks_have_one_colour_and_others_have_others(plan: Plan):
    bars = draw_plan(plan).axes[0].collections
    colours = map(tuple, chain.from_iterable(each.get_facecolors() for each in bars))
    pairs = set(zip(plan.clocks.values(), colours, strict=True))
    assert len(pairs) == len({clock for clock, _ in pairs}) == len({colour for _, colour in pairs}) > 1


def test_a_plan_says_what_its_axes_and_colours_are(plan: Plan):
    axes, colour_bar = draw_plan(plan).axes
    assert (axes.get_xlabel(), axes.get_ylabel(), colour_bar.get_ylabel()) == ("time (s)", "rank", "clock (MHz)")
    what, origin = axes.get_title().splitlines()
    assert what == f"1f1b, 3 stages x 4 microbatches: {plan.time_s:.4g} s, {plan.energy_j:.5g} J"
    assert origin == "Replayed from a simulated profile"


def test_a_plan_of_a_single_clock_can_be_drawn(tmp_path: Path):
    alone = frontier_of(1400)
    save_figure(draw_plan(alone.plan_for(alone.baseline_time_s)), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 0


def test_a_frontier_is_its_curve_and_three_marked_points(frontier: Frontier):
    axes = draw_frontier(frontier).axes[0]
    curve, *points = axes.lines
    assert np.array_equal(curve.get_xydata(), np.column_stack([frontier.times_s, frontier.energies_j]))
    assert {point.get_label(): tuple(point.get_xydata()[0]) for point in points} == {
        "all clocks at maximum": (frontier.baseline_time_s, frontier.baseline_energy_j),
        "fastest": (frontier.min_time_s, frontier.bound_j(frontier.min_time_s)),
        "least energy": (frontier.least_energy_time_s, min(frontier.energies_j)),
    }
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration time (s)", "energy of an iteration, all GPUs (J)")
    assert axes.get_title() == "Frontier of 1f1b, 3 stages x 4 microbatches\nReplayed from a simulated profile"


@pytest.mark.parametrize("kind", FIRST_BYTES)
def test_the_format_is_what_the_name_ends_with_and_equal_figures_are_equal_files(plan: Plan, kind: str, tmp_path: Path):
    files = [tmp_path / f"{name}.{kind}" for name in ("one", "two")]
    for file in files:
        check_figure_path(file, "--plot")
        save_figure(draw_plan(plan), file)
    first, again = (file.read_bytes() for file in files)
    assert first == again
    assert first.startswith(FIRST_BYTES[kind])


def test_another_format_is_refused():
    with pytest.raises(UsageError) as refusal:
        check_figure_path(Path("plan.gif"), "--plot")
    assert (
        str(refusal.value) == "--plot plan.gif: figures are written as .png, .svg, .pdf; end the name with one of them"
    )


def test_without_matplotlib_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as refusal:
        check_figure_path(Path("plan.png"), "--plot")
    assert str(refusal.value) == (
        "--plot needs matplotlib, which is not installed; install it with: pip install 'perseus-planner[plot]'"
    )


def test_a_figure_that_cannot_be_written_is_refused(plan: Plan, folder: Path):
    with pytest.raises(UsageError) as refusal:
        save_figure(draw_plan(plan), Path("absent/plan.png"))
    assert str(refusal.value) == "absent/plan.png: cannot be written: No such file or directory; check the folder"
