"""Notebooks show profiles, frontiers, plans and runs as HTML and as pandas frames."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
from browsing import chromium, opened
from hypothesis import given, settings
from made_runs import any_plan, write_run
from strategies import fixed, graphs, profiles, smooth_profile

from perseus_planner import Frontier, Plan, Profile, schedules, solve, solve_dag
from perseus_planner.errors import UsageError, how_to_install
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.runs import Run
from perseus_planner.runs.records import IterationRecord
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.views.columns import numbers
from perseus_planner.views.frontier import summarize_frontier

few = settings(fixed, max_examples=8)

NAME = '<script>alert("1")</script>&'


class ParsedHtml(HTMLParser):
    """Parses HTML: the cells of the table, the words beside it, and the elements and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words, self.tags, self.attributes, self.sources = (
            "",
            set[str](),
            set[str](),
            list[str](),
        )
        self._in_cell = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.sources += [str(value) for name, value in attrs if name == "src"]
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data
        else:
            self.words += data


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(replace(smooth_profile(3, step_mhz=150), gpu=NAME), schedules.one_f_one_b(3, 4))


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan_for(1.1 * frontier.baseline_time_s)


@pytest.fixture(scope="module")
def run(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, plan, 4, origin="measured", deviations={2: f"2 microbatches {NAME}"})
    return Run.load(folder)


def test_each_shows_itself_as_html_that_loads_and_runs_nothing(
    frontier: Frontier, plan: Plan, run: Run
):
    for each in (frontier.profile, frontier, plan, run):
        html = each._repr_html_()
        seen = ParsedHtml(html)
        assert seen.tags <= {
            "div",
            "p",
            "strong",
            "br",
            "small",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "img",
        }
        assert not seen.attributes & {"href", "class", "id"}
        assert not {name for name in seen.attributes if name.startswith("on")}
        assert all(source.startswith("data:image/png;base64,") for source in seen.sources)
        assert NAME in seen.words
        assert len({len(row) for row in seen.rows}) == 1
        assert len(html) < 60_000


def test_a_plan_shows_the_table_of_the_command(plan: Plan):
    seen = ParsedHtml(plan._repr_html_())
    _, times, energies, _ = seen.rows
    assert "Replayed from a measured profile" in seen.words
    assert seen.rows[0] == ["", "this plan", "all clocks at maximum"]
    assert times[1:] == numbers([plan.time_s, plan.baseline_time_s])
    assert energies[1:] == numbers([plan.energy_j, plan.baseline_energy_j])
    assert (
        f"({100 * plan.saving_j / plan.baseline_energy_j:.2f} %) compared with all clocks at "
        "maximum" in seen.words
    )


def test_a_frontier_shows_its_points(frontier: Frontier):
    seen = ParsedHtml(frontier._repr_html_())
    summary = summarize_frontier(frontier)
    assert [row[0] for row in seen.rows[1:]] == numbers([point.time_s for point in summary.points])
    assert [row[-1] for row in seen.rows[1:]] == [point.mark for point in summary.points]


def test_a_profile_shows_what_was_measured_and_says_when_it_was_simulated():
    profile = replace(smooth_profile(30, step_mhz=150), origin="simulated")
    seen = ParsedHtml(profile._repr_html_())
    assert "simulated: no GPU was touched" in seen.words
    assert "Shown are 24 of 60 rows." in seen.words
    assert seen.rows[1][:4] == ["0", "forward", "4", "1410 to 960"]


def test_a_run_shows_what_was_measured_beside_what_was_planned(run: Run, plan: Plan):
    seen = ParsedHtml(run._repr_html_())
    assert (
        "Run: times measured, energy and clocks measured. Plan: replayed from a measured profile"
        in seen.words
    )
    assert seen.rows[1][:2] == ["1", "4"]
    assert seen.rows[1][4] == numbers([plan.time_s])[0]


def test_without_matplotlib_the_table_stays_and_says_how_to_install_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.cm", None)
    seen = ParsedHtml(plan._repr_html_())
    assert "img" not in seen.tags
    assert len(seen.rows) == 4
    assert (
        "A figure needs matplotlib; run `pip install '.[plot]'` in your clone of perseus-planner"
        in seen.words
    )


@given(graphs(12))
@few
def test_any_frontier_and_plan_can_be_shown(dag: PipelineDag):
    frontier = solve_dag(dag)
    for each in (dag.profile, frontier, frontier.plan_for_least_energy()):
        seen = ParsedHtml(each._repr_html_())
        assert len(seen.rows) > 1
        assert not {"nan", "inf"} & {cell for row in seen.rows for cell in row}


def test_they_render_in_a_browser_without_a_complaint_in_light_and_dark(
    frontier: Frontier, plan: Plan, run: Run, tmp_path: Path
):
    shown = "".join(each._repr_html_() for each in (frontier.profile, frontier, plan, run))
    page = tmp_path / "shown.html"
    style = "@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } }"
    page.write_text(
        '<!doctype html><html lang="en"><meta '
        f'charset="utf-8"><title>Shown</title><style>{style}</style>'
        f"<body><main><h1>Shown</h1>{shown}</main></body></html>"
    )
    with chromium() as browser:
        for scheme, colour in (("light", "rgb(0, 0, 0)"), ("dark", "rgb(238, 238, 238)")):
            with opened(browser, page.as_uri(), color_scheme=scheme) as tab:
                assert tab.locator("table").count() == 4
                pictures = [each.bounding_box() for each in tab.locator("img").all()]
                assert [box["width"] > 300 and box["height"] > 80 for box in pictures] == [True] * 3
                assert (
                    tab.locator("td").first.evaluate("cell => getComputedStyle(cell).color")
                    == colour
                )


def rows_of(frame: Any) -> list[dict[str, Any]]:
    """Return the rows, with None for missing values."""
    import pandas as pd

    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


@given(profiles())
@few
def test_a_profile_is_a_frame_of_its_measurements(profile: Profile):
    frame = profile.to_frame()
    expected = [
        (stage, {"F": "forward", "B": "backward"}[kind], row.clock_mhz, row.time_s, row.energy_j)
        for (stage, kind), measured in profile.measurements.items()
        for row in measured
    ]
    assert list(frame.columns)[:5] == ["stage", "instruction", "clock_mhz", "time_s", "energy_j"]
    assert [tuple(row.values())[:5] for row in rows_of(frame)] == expected
    assert frame["achieved_mhz"].isna().all()
    assert frame.attrs["origin"] == profile.origin


def test_the_evidence_of_a_profile_is_in_its_frame():
    known = Measurement(1400, 1.0, 200.0, Evidence(1395.0, 0.01, 2.0, 5, 61.5, ("sw-power-cap",)))
    profile = Profile(
        {(0, "F"): (known,), (0, "B"): (Measurement(300, 1.0, 2.0),)}, 80.0, control="power-limit"
    )
    first, second = rows_of(profile.to_frame())
    assert first == {
        "stage": 0,
        "instruction": "forward",
        "power_limit_w": 1400,
        "time_s": 1.0,
        "energy_j": 200.0,
        "achieved_mhz": 1395.0,
        "time_stderr_s": 0.01,
        "energy_stderr_j": 2.0,
        "windows": 5,
        "temperature_c": 61.5,
        "throttle": "sw-power-cap",
    }
    assert {second[name] for name in list(second)[5:]} == {None}


@given(graphs(12))
@few
def test_a_frontier_is_a_frame_of_its_corners(dag: PipelineDag):
    frontier = solve_dag(dag)
    frame = frontier.to_frame()
    assert list(frame.columns) == ["time_s", "time_ratio", "bound_j", "saved_j", "power_w"]
    assert frame["time_s"].tolist() == frontier.times_s.tolist()[::-1]
    assert frame["bound_j"].tolist() == frontier.energies_j.tolist()[::-1]
    assert frame["time_s"].is_monotonic_increasing
    back_j = frame.attrs["baseline_energy_j"] - frame["saved_j"]
    assert back_j.tolist() == pytest.approx(
        frame["bound_j"].tolist(), rel=1e-9, abs=1e-9 * frontier.baseline_energy_j
    )
    assert frame.attrs["baseline"] == "all clocks at maximum"


@given(graphs(12))
@few
def test_a_plan_is_a_frame_of_all_that_runs(dag: PipelineDag):
    plan = any_plan(dag, Random(len(dag.computations)))
    rows = rows_of(plan.to_frame())
    spans = replay(plan).spans
    assert [row["computation"] for row in rows] == list(plan.iteration.names) == list(spans)
    assert [row["rank"] for row in rows] == list(plan.iteration.rank_of)
    assert [(row["start_s"], row["end_s"], row["power_w"]) for row in rows] == [
        (span.start_s, span.end_s, span.power_w) for span in spans.values()
    ]
    for row, one in zip(rows, plan.iteration.computations, strict=False):
        assert (row["stage"], row["kind"][0], row["microbatch"]) == one
        assert row["clock_mhz"] == plan.clocks[str(one)]
        assert row["energy_j"] == pytest.approx(plan.measurement(one).energy_j, rel=1e-6, abs=1e-12)
    for row in rows[len(plan.iteration.computations) :]:
        assert [row[name] for name in ("stage", "kind", "microbatch", "clock_mhz")] == [None] * 4


def test_a_run_is_a_frame_of_its_iterations(run: Run):
    rows = rows_of(run.to_frame())
    expected = [(rank.rank, row) for rank in run.ranks for row in rank.iterations]
    names = [each.name for each in fields(IterationRecord) if each.name != "throttled_s"]
    for row, (rank, iteration) in zip(rows, expected, strict=True):
        assert row["rank"] == rank
        assert {name: row[name] for name in names} == {
            name: getattr(iteration, name) for name in names
        }
        throttled_s = {name: row[f"throttled_s_{name}"] for name in iteration.throttled_s}
        assert throttled_s == iteration.throttled_s
    frame = run.to_frame()
    assert frame["energy_j"].dtype == frame["latency_p99_s"].dtype == float
    assert math.isfinite(frame["energy_j"].mean())


def test_without_pandas_the_refusal_says_how_to_install_it(
    frontier: Frontier, plan: Plan, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pandas", None)
    frames: list[Callable[[], Any]] = [
        frontier.to_frame,
        plan.to_frame,
        frontier.profile.to_frame,
        run.to_frame,
    ]
    for frame in frames:
        with pytest.raises(UsageError) as refused:
            frame()
        assert str(refused.value) == (
            f"to_frame() needs pandas, which is not installed; {how_to_install('frames')}"
        )
