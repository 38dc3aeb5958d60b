"""Figures hold the values of the report, and nothing else, with units and where they come from."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import done, refusal
from made_runs import write_run
from strategies import smooth_profile

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.base.errors import UsageError
from perseus_planner.cli.show import FIGURES as OFFERED
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Evidence, Measurement, pareto_front
from perseus_planner.runs import Run
from perseus_planner.schedules.pipeline import FixedOperation
from perseus_planner.views.figures import (
    chart_plan,
    check_figure_path,
    draw_curves,
    draw_frontier,
    draw_gantt,
    page_file,
    save_figure,
)
from perseus_planner.views.frontier import chart_frontier
from perseus_planner.views.report import FIGURES, chart_sources
from perseus_planner.views.sources import Sources

FIRST_BYTES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    operations = [FixedOperation("optimizer", "end", 0.01)]
    return solve(
        smooth_profile(3, step_mhz=150), schedules.one_f_one_b(3, 4), operations=operations
    )


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan_for(1.1 * frontier.baseline_time_s)


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


@pytest.mark.needs("lab")
def test_the_points_are_the_bound_the_chosen_plan_and_other_planners(
    frontier: Frontier, plan: Plan
):
    sources = Sources(frontier=frontier, plans={"chosen.yaml": plan})
    axes = FIGURES["points"](sources).axes[0]
    curve, *marks = axes.lines
    expected = chart_sources(sources)
    whole = np.column_stack([expected.times_s, expected.energies_j])
    near = whole[whole[:, 0] <= 1.15 * max(each.time_s for each in expected.points)]
    assert np.array_equal(curve.get_xydata(), near)
    assert len(near) < len(whole)
    assert {mark.get_label(): tuple(mark.get_xydata()[0]) for mark in marks} == {
        f"{each.name} ({each.origin})": (each.time_s, each.energy_j) for each in expected.points
    }
    shown = {mark.get_label() for mark in marks}
    assert {
        "chosen.yaml (replayed, measured profile)",
        "EnvPipe (replayed, measured profile)",
    } <= shown
    for mark in marks:
        ((x, y),) = mark.get_xydata()
        assert axes.get_xlim()[0] < x < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < y < axes.get_ylim()[1]


@pytest.mark.parametrize("by", ["power", "clock"])
def test_the_timelines_are_the_iteration_before_and_after(frontier: Frontier, plan: Plan, by: str):
    name = {"power": "timeline", "clock": "timeline-clock"}[by]
    figure = FIGURES[name](Sources(frontier=frontier, plans={"plan.yaml": plan}))
    before, after, scale = figure.axes
    assert (
        before.get_title()
        == "all clocks at maximum, before: the baseline of every saving (replayed, measured "
        "profile)"
    )
    assert after.get_title() == "plan.yaml, as planned (replayed, measured profile)"
    assert (
        scale.get_ylabel()
        == {"power": "power of all GPUs of the rank (W)", "clock": "clock (MHz)"}[by]
    )
    assert (after.get_xlabel(), after.get_ylabel()) == ("time (s)", "rank")
    fastest = frontier.plan_of({str(c): 1410 for c in frontier.dag.computations})
    assert before.get_ylim()[0] > before.get_ylim()[1]  # the first stage is on top
    for axes, one in ((before, fastest), (after, plan)):
        spans, colours = replay(one).spans, {}
        for rank, program in enumerate(one.iteration.programs):
            (waiting, _), (drawn, fill) = drawn_rows(axes)[rank]
            assert waiting == [pytest.approx((0.0, one.time_s), abs=1e-6)]
            expected = [spans[one.iteration.names[place]] for place in program]
            assert np.allclose(drawn, [(span.start_s, span.end_s) for span in expected], atol=1e-6)
            for place, colour in zip(program, map(tuple, fill), strict=True):
                name = one.iteration.names[place]
                value = round(spans[name].power_w) if by == "power" else one.clocks.get(name)
                assert colours.setdefault(value, colour) == colour
        assert len(set(colours.values())) == len(colours)


def test_a_critical_path_is_marked_from_end_to_end(frontier: Frontier):
    figure = FIGURES["timeline"](Sources(frontier=frontier))
    axes = figure.axes[0]
    marked = [
        (segment[0][0], segment[1][0])
        for each in axes.collections
        for segment in map(np.asarray, getattr(each, "get_segments", list)())
        if len(segment) == 2
    ]
    fastest = replay(frontier.plan_of({str(c): 1410 for c in frontier.dag.computations}))
    # Any moment of the iteration is covered: a path without a gap; there are no transfers here.
    covered_s = 0.0
    for start_s, end_s in sorted(marked):
        assert start_s <= covered_s + 2e-6
        covered_s = max(covered_s, end_s)
    assert covered_s == pytest.approx(fastest.time_s, abs=2e-6)
    assert len(marked) < len(fastest.spans)


def test_a_run_is_drawn_beside_its_plan(plan: Plan, tmp_path: Path):
    computing = solve(
        smooth_profile(3, step_mhz=150), schedules.one_f_one_b(3, 4)
    ).plan_for_least_energy()
    write_run(tmp_path / "run", computing, 3)
    run = Run.load(tmp_path / "run")
    planned, ran, _ = FIGURES["timeline-clock"](
        Sources(plans={"p": computing}, runs={"run": run})
    ).axes
    assert ran.get_title().startswith("run, recorded: iteration 2 by plan 1")
    for rank in range(3):
        ends = [drawn_rows(axes)[rank][-1][0] for axes in (planned, ran)]
        assert np.allclose(*ends, atol=3e-6)


def test_curves_are_the_measured_points_their_errors_and_a_hull_below_them():
    plain = smooth_profile(5, step_mhz=60)
    profile = replace(
        plain,
        measurements={
            key: tuple(
                replace(
                    row,
                    evidence=Evidence(row.clock_mhz, row.time_s / 50, row.energy_j / 25, 3, 60.0),
                )
                for row in rows
            )
            for key, rows in plain.measurements.items()
        },
    )
    figure = draw_curves(profile)
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == [
        f"stage {i}" for i in range(5)
    ]
    for (key, measured), (hull, drawn) in zip(
        profile.measurements.items(), _curves(figure), strict=True
    ):
        rows, errors = drawn
        assert rows == [(row.time_s, row.energy_j) for row in measured]
        assert errors == [(pytest.approx(x / 25), pytest.approx(y / 12.5)) for x, y in rows]
        waiting_w = profile.blocking_w(key[0])
        times_s, effective_j = hull[:, 0], hull[:, 1] - waiting_w * hull[:, 0]
        for each in pareto_front(measured, waiting_w):
            assert np.interp(each.time_s, times_s, effective_j) <= each.effective_j + 1e-9
    assert "smooth, measured" in figure.get_suptitle()


def _curves(figure):
    """Yield the hull of each curve, and its points with the lengths of their error bars."""
    for axes in figure.axes:
        if axes.get_visible():
            for hull, container in zip(axes.lines[::2], axes.containers, strict=True):
                line, _, (x_bars, y_bars) = container.lines
                lengths = [
                    (x[1][0] - x[0][0], y[1][1] - y[0][1])
                    for x, y in zip(x_bars.get_segments(), y_bars.get_segments(), strict=True)
                ]
                yield hull.get_xydata(), (list(map(tuple, line.get_xydata())), lengths)


def test_a_figure_without_its_file_is_refused(plan: Plan):
    alone = Sources(plans={"plan.yaml": plan})
    for name, message in (
        ("points", "--figure points: needs a frontier; name one, or add it with --beside"),
        ("curves", "--figure curves: needs a profile; name one, or add it with --beside"),
    ):
        with pytest.raises(UsageError) as refused:
            FIGURES[name](alone)
        assert str(refused.value) == message
    with pytest.raises(UsageError) as refused:
        FIGURES["timeline"](Sources(smooth_profile(2)))
    assert str(refused.value) == "--figure timeline: needs a plan, a run or a frontier; name one"


def test_show_draws_each_figure_and_shows_a_profile(folder: Path):
    smooth_profile(2, step_mhz=150).save("profile.yaml")
    done("solve profile.yaml --schedule 1f1b --microbatches 2 -o frontier.npz")
    done("plan frontier.npz --slowdown 1.1 -o plan.yaml")
    for figure, ending in (("points", "png"), ("timeline", "svg"), ("timeline-clock", "svg")):
        text = done(
            f"show frontier.npz --beside plan.yaml --plot {figure}.{ending} --figure {figure}"
        )
        assert text.endswith(f"\nWrote {figure}.{ending}\n")
    one, other = (Path(f"{name}.svg").read_text() for name in ("timeline", "timeline-clock"))
    assert one.startswith("<?xml")
    assert one != other
    assert done("show profile.yaml --plot profile.pdf").startswith(
        "Profile of 2 stages, smooth (measured)"
    )
    found = json.loads(done("show profile.yaml --json"))
    assert (found["context"]["profile_digest"], found["files"]) == (
        Profile.load("profile.yaml").digest,
        [],
    )
    for command, message in {
        "show plan.yaml --figure timeline": "--figure: chooses what --plot draws; add --plot "
        "FIGURE",
        "show plan.yaml --beside frontier.npz": "--beside: adds files to --figure or --perfetto; "
        "add --figure NAME",
        "show profile.yaml --perfetto a.json": "--perfetto a.json: profile.yaml has no timeline; "
        "name a plan or a run",
        "show plan.yaml --figure points --plot a.png": (
            "--figure points: needs a frontier; name one, or add it with --beside"
        ),
    }.items():
        assert refusal(command) == (2, "", f"Error: {message}\n")
    assert not Path("a.png").exists()


def test_the_command_offers_all_figures():
    assert tuple(FIGURES) == OFFERED


def draw_plan(plan: Plan) -> Any:
    return draw_gantt([chart_plan("plan", plan, "as planned")], plan.control)


def test_a_frontier_alone_is_its_curve_and_three_marked_points(frontier: Frontier):
    axes = draw_frontier(chart_frontier(frontier)).axes[0]
    assert {tuple(point.get_xydata()[0]) for point in axes.lines[1:]} == {
        (frontier.baseline_time_s, frontier.baseline_energy_j),
        (frontier.min_time_s, frontier.bound_j(frontier.min_time_s)),
        (frontier.least_energy_time_s, min(frontier.energies_j)),
    }
    labels = axes.get_xlabel(), axes.get_ylabel()
    assert labels == ("iteration time (s)", "energy per iteration, all GPUs (J)")
    assert (
        axes.get_title()
        == "Frontier of 1f1b, 3 stages x 4 microbatches\nReplayed from a measured profile"
    )


def test_a_point_looks_as_on_the_page_with_the_plan_on_top(frontier: Frontier, plan: Plan):
    """One colour for one thing: the figure and `report.js` agree; nothing hides the plan."""
    script = page_file("report.js")
    numbers = {
        kind: int(number)
        for kind, number in re.findall(r"(\w+): \[(\d), \"\w+\"\]", script.partition("LOOKS")[2])
    }
    light = page_file("theme.css").partition("@media")[0]
    chart = chart_sources(Sources(frontier=frontier, plans={"plan.yaml": plan}))
    axes = draw_frontier(chart).axes[0]
    drawn = {str(line.get_label()).partition(" (")[0]: line for line in axes.lines}
    for name, kind in (("plan.yaml", "plan"), ("all clocks at maximum", "baseline")):
        assert f"--series-{numbers[kind]}: {drawn[name].get_color()}" in light
    bound = drawn["bound: least energy of any plan"]
    assert bound.get_color() == drawn["bound, fastest"].get_color()
    others = [line for name, line in drawn.items() if name != "plan.yaml"]
    assert drawn["plan.yaml"].get_zorder() > max(line.get_zorder() for line in others)


def test_no_heading_leaves_its_figure(frontier: Frontier):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    chart = replace(
        chart_frontier(frontier), left_out=("EnvPipe: " + "it takes no such operations " * 8,)
    )
    figure = draw_frontier(chart)
    renderer = FigureCanvasAgg(figure).get_renderer()
    box = figure.axes[0].title.get_window_extent(renderer)
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


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


def test_figures_have_the_colours_of_the_pages(plan: Plan):
    from matplotlib.colors import to_hex

    light, _ = page_file("theme.css").split("prefers-color-scheme: dark")
    stops = [light.split(f"--scale-{step}: ")[1][:7] for step in range(5)]
    used = draw_plan(plan).axes[-1].collections[-1].get_cmap()
    assert [to_hex(used(step / 4)) for step in (0, 4)] == [stops[0], stops[4]]
    assert stops[2] == "#ecd67a"


def test_a_plan_of_a_single_clock_can_be_drawn(tmp_path: Path):
    points = {(0, kind): (Measurement(1400, 1.0, 90.0),) for kind in "FB"}
    alone = solve(Profile(points, 60.0), schedules.one_f_one_b(1, 2))
    save_figure(draw_plan(alone.plan_for_least_energy()), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 0


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


def test_a_figure_that_cannot_be_written_is_refused(plan: Plan, folder: Path):
    with pytest.raises(UsageError) as refusal:
        save_figure(draw_plan(plan), Path("absent/plan.png"))
    assert (
        str(refusal.value)
        == "absent/plan.png: cannot be written: No such file or directory; check the folder"
    )


@pytest.mark.parametrize(
    ("name", "absent", "text"),
    [
        (
            "plan.gif",
            None,
            "--plot plan.gif: figures are written as .png, .svg, .pdf; end the name with one of "
            "them",
        ),
        (
            "plan.png",
            "matplotlib",
            "--plot needs matplotlib, which is not installed; run `pip install '.[plot]'` in your "
            "clone of perseus-planner",
        ),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused_early(
    name: str, absent: str | None, text: str, monkeypatch: pytest.MonkeyPatch
):
    if absent is not None:
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(UsageError) as refusal:
        check_figure_path(Path(name), "--plot")
    assert str(refusal.value) == text
