"""Profiles, frontiers, plans and runs become pandas frames."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from made_runs import any_plan, write_run
from refusals import refusal
from strategies import fixed, graphs, profiles, smooth_profile

from perseus_planner import Frontier, Plan, Profile, schedules, solve, solve_dag
from perseus_planner.base.errors import UsageError, how_to_install
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.runs import Run
from perseus_planner.runs.records import IterationRecord
from perseus_planner.schedules.dag import PipelineDag

few = settings(fixed, max_examples=8)


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(smooth_profile(3, step_mhz=150), schedules.one_f_one_b(3, 4))


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan_for(1.1 * frontier.baseline_time_s)


@pytest.fixture(scope="module")
def run(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, plan, 4, origin="measured", deviations={2: "2 microbatches"})
    return Run.load(folder)


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


def test_a_notebook_shows_a_small_escaped_table(frontier: Frontier):
    evil = "<script>alert(1)</script>"
    profile = replace(frontier.profile, gpu=evil)
    again = solve(profile, frontier.schedule)
    plan = again.plan_for(again.baseline_time_s)
    for value in (profile, again, plan):
        html = value._repr_html_()
        assert evil not in html
        assert html.startswith("<div>")
        assert "<table" in html
        assert len(html) < 20_000
    assert "&lt;script&gt;" in profile._repr_html_()
    assert f"{plan.schedule}" in plan._repr_html_()
    clocks = [min(plan.clocks[str(each)] for each in rank) for rank in plan.schedule.ranks]
    assert all(f">{clock}<" in plan._repr_html_() for clock in clocks)


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
        assert refusal(UsageError, frame) == (
            f"to_frame() needs pandas, which is not installed; {how_to_install('frames')}"
        )
