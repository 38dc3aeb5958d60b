"""Figures of a frontier or a plan alone show its numbers with units, and say where they come
from.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.base.errors import UsageError
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules.pipeline import FixedOperation
from perseus_planner.views.figures import check_figure_path, draw_frontier, draw_gantt, save_figure
from perseus_planner.views.frontier import chart_frontier
from perseus_planner.views.gantt import chart_plan
from perseus_planner.views.web import page_file

FIRST_BYTES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def frontier_of(*clocks_mhz: int) -> Frontier:
    def rows(work: float) -> tuple[Measurement, ...]:
        return tuple(
            Measurement(mhz, 1000 * work / mhz, work * (50 + mhz / 5)) for mhz in clocks_mhz
        )

    measurements = {
        (stage, kind): rows(1.0 + stage + (kind == "B")) for stage in range(3) for kind in "FB"
    }
    profile = Profile(measurements, blocking_power_w=60.0, origin="simulated")
    return solve(profile, schedules.one_f_one_b(stages=3, microbatches=4))


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return frontier_of(1400, 1200, 1000)


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan_for(1.05 * frontier.baseline_time_s)


def draw_plan(plan: Plan) -> Any:
    return draw_gantt([chart_plan("plan", plan, "as planned")], plan.control)


def drawn_rows(axes: Any) -> dict[int, list[tuple[list[tuple[float, float]], Any]]]:
    """Row -> its collections of bars, first the background, each with its ends and colours."""
    rows: dict[int, list[tuple[list[tuple[float, float]], Any]]] = {}
    for bars in axes.collections:
        if bars.get_paths() and len(bars.get_paths()[0].vertices) > 2:
            row = round(bars.get_paths()[0].vertices[:, 1].mean())
            ends = [
                (path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()
            ]
            rows.setdefault(row, []).append((ends, bars.get_facecolors()))
    return rows


def test_a_plan_is_one_bar_per_computation_from_its_start_to_its_end(plan: Plan):
    axes = draw_plan(plan).axes[0]
    spans = replay(plan).spans
    for row, rank in enumerate(plan.schedule.ranks):
        _, (drawn, _) = drawn_rows(axes)[row]
        expected = [
            (spans[str(computation)].start_s, spans[str(computation)].end_s) for computation in rank
        ]
        assert np.allclose(drawn, expected, rtol=1e-12, atol=1e-6)
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
    rows = drawn_rows(axes)
    assert {row: [len(ends) for ends, _ in found] for row, found in rows.items()} == {
        0: [1, 8],
        1: [1, 9],
    }
    ends, colours = rows[1][1]
    assert np.allclose(
        ends[-1], (spans["1optimizer"].start_s, spans["1optimizer"].end_s), atol=1e-6
    )
    assert len(set(colours[-1][:3])) == 1  # grey
    assert len(set(colours[0][:3])) > 1
    assert axes.get_xlim()[1] == max(span.end_s for span in spans.values()) == plan.time_s + 0.25


def test_equal_clocks_have_one_colour_and_others_have_others(plan: Plan):
    rows = drawn_rows(draw_plan(plan).axes[0])
    colours = map(tuple, chain.from_iterable(rows[row][1][1] for row in sorted(rows)))
    pairs = set(zip(plan.clocks.values(), colours, strict=True))
    assert (
        len(pairs) == len({clock for clock, _ in pairs}) == len({colour for _, colour in pairs}) > 1
    )


def test_figures_have_the_colours_of_the_pages(plan: Plan):
    from matplotlib.colors import to_hex

    light, _ = page_file("theme.css").split("prefers-color-scheme: dark")
    stops = [light.split(f"--scale-{step}: ")[1][:7] for step in range(5)]
    used = draw_plan(plan).axes[-1].collections[-1].get_cmap()
    assert [to_hex(used(step / 4)) for step in (0, 4)] == [stops[0], stops[4]]
    assert stops[2] == "#ecd67a"


def test_a_plan_says_what_its_axes_and_colours_are(plan: Plan):
    axes, colour_bar = draw_plan(plan).axes
    assert (axes.get_xlabel(), axes.get_ylabel(), colour_bar.get_ylabel()) == (
        "time (s)",
        "rank",
        "clock (MHz)",
    )
    assert axes.get_title() == "plan, as planned (replayed, simulated profile)"


def test_a_plan_of_a_single_clock_can_be_drawn(tmp_path: Path):
    alone = frontier_of(1400)
    save_figure(draw_plan(alone.plan_for(alone.baseline_time_s)), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 0


def test_a_frontier_is_its_curve_and_three_marked_points(frontier: Frontier):
    axes = draw_frontier(chart_frontier(frontier)).axes[0]
    curve, *points = axes.lines
    assert np.array_equal(
        curve.get_xydata(), np.column_stack([frontier.times_s, frontier.energies_j])[::-1]
    )
    assert {point.get_label(): tuple(point.get_xydata()[0]) for point in points} == {
        f"{name} (replayed, simulated profile)": found
        for name, found in {
            "all clocks at maximum": (frontier.baseline_time_s, frontier.baseline_energy_j),
            "bound, fastest": (frontier.min_time_s, frontier.bound_j(frontier.min_time_s)),
            "bound, least energy": (frontier.least_energy_time_s, min(frontier.energies_j)),
        }.items()
    }
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "iteration time (s)",
        "energy per iteration, all GPUs (J)",
    )
    assert (
        axes.get_title()
        == "Frontier of 1f1b, 3 stages x 4 microbatches\nReplayed from a simulated profile"
    )


@pytest.mark.parametrize("kind", FIRST_BYTES)
def test_the_format_is_what_the_name_ends_with_and_equal_figures_are_equal_files(
    plan: Plan, kind: str, tmp_path: Path
):
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
        str(refusal.value)
        == "--plot plan.gif: figures are written as .png, .svg, .pdf; end the name with one of them"
    )


def test_without_matplotlib_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as refusal:
        check_figure_path(Path("plan.png"), "--plot")
    assert str(refusal.value) == (
        "--plot needs matplotlib, which is not installed; run `pip install '.[plot]'` in your "
        "clone of perseus-planner"
    )


def test_a_figure_that_cannot_be_written_is_refused(plan: Plan, folder: Path):
    with pytest.raises(UsageError) as refusal:
        save_figure(draw_plan(plan), Path("absent/plan.png"))
    assert (
        str(refusal.value)
        == "absent/plan.png: cannot be written: No such file or directory; check the folder"
    )
