"""The numbers of a report equal those of the frontier, the replay and the profile, and wrong
input is refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from commands import done, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import timed, write_run
from strategies import drawn, jobs, profiles, smooth_profile

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.base.errors import UsageError
from perseus_planner.plans.replay import Span, replay
from perseus_planner.profiles.measurement import Evidence
from perseus_planner.runs.run import Run
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.solver.frontier import solve_dag
from perseus_planner.views.curves import curves_of
from perseus_planner.views.figures import chart_plan, spare_s
from perseus_planner.views.report import (
    _used_columns,
    chart_sources,
    make_report,
    number,
    page,
    report_text,
)
from perseus_planner.views.savings import AS_LONG, EnergyRates, IterationSize, savings_of
from perseus_planner.views.sources import Sources

SMALL = smooth_profile(3, step_mhz=150)


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(SMALL, schedules.one_f_one_b(3, 5))


@pytest.fixture
def files(folder: Path, frontier: Frontier) -> Path:
    """Prepare a folder with a profile, its frontier, a plan and a run by that plan."""
    SMALL.save("profile.yaml")
    frontier.save("frontier.npz")
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s)
    plan.save("plan.yaml")
    Path("run").mkdir()
    write_run(Path("run"), plan)
    return folder


def data_of(text: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )


# --- Figures
# ------------------------------------------------------------------------------------------


@drawn(2, 12, jobs().map(solve_dag), st.floats(0, 1), anew=True)
def test_a_timeline_is_the_replay_in_whole_microseconds(frontier: Frontier, share: float):
    plan = frontier.plan_for(
        frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s), on_time=None
    )
    timeline, spans = chart_plan("plan", plan, ""), replay(plan).spans
    shown = {}
    for program, lane in zip(timeline.programs, timeline.lanes, strict=True):
        steps = [part for pair in zip(lane.gaps_us, lane.times_us, strict=True) for part in pair]
        times_us = list(accumulate(steps))
        rows = zip(program.split(), times_us[::2], times_us[1::2], lane.clocks, strict=True)
        shown |= {name: (begin, end, clock) for name, begin, end, clock in rows}
    assert shown.keys() == spans.keys()
    for name, (begin_us, end_us, clock) in shown.items():
        assert abs(begin_us - 1e6 * spans[name].start_s) <= 0.5 + 1e-6 * begin_us
        assert abs(end_us - 1e6 * spans[name].end_s) <= 0.5 + 1e-6 * end_us
        assert clock == plan.clocks.get(name)


@drawn(2, 12, jobs().map(solve_dag), st.randoms(use_true_random=False), anew=True)
def test_a_computation_may_end_later_by_its_spare_time_and_no_more(frontier: Frontier, rng):
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    iteration, spans = plan.iteration, list(replay(plan).spans.values())
    spare = spare_s(iteration, spans)
    assert min(spare) == 0
    place = rng.randrange(len(spans))

    def end_with(extra_s: float) -> float:
        ends_s = [0.0] * len(spans)
        for each in iteration.order:
            start_s = max(
                (ends_s[other] + lag_s for other, lag_s in iteration.waits[each]), default=0.0
            )
            ends_s[each] = (
                start_s
                + spans[each].end_s
                - spans[each].start_s
                + (extra_s if each == place else 0)
            )
        return max(ends_s)

    whole_s = max(span.end_s for span in spans)
    assert end_with(spare[place]) == pytest.approx(whole_s, rel=1e-9)
    assert end_with(spare[place] + 0.01 * whole_s) == pytest.approx(1.01 * whole_s, rel=1e-9)


@drawn(2, 12, jobs().map(solve_dag), anew=True)
def test_no_point_of_the_frontiers_figure_is_below_the_bound(frontier: Frontier):
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    found = chart_sources(Sources(frontier=frontier, plans={"plan": plan}))
    assert list(found.times_s) == sorted(found.times_s)
    assert (found.times_s[0], found.times_s[-1]) == (frontier.min_time_s, frontier.max_time_s)
    for time_s, energy_j in zip(found.times_s, found.energies_j, strict=True):
        assert energy_j == pytest.approx(frontier.bound_j(time_s), rel=1e-9, abs=1e-9)
    for point in found.points:
        if point.time_s >= frontier.min_time_s:
            size_j = abs(point.energy_j) + frontier.dag.waiting_w * point.time_s
            assert point.energy_j >= frontier.bound_j(point.time_s) - 1e-6 * size_j
    assert {point.kind for point in found.points} >= {"baseline", "plan", "landmark"}


@settings(max_examples=30)
@given(profiles(3))
def test_no_measured_point_is_below_the_hull_of_its_curve(profile: Profile):
    for curve in curves_of(profile):
        waiting_w = profile.blocking_w(curve.stage)
        rows = {
            point.clock: (point.time_s, point.energy_j - waiting_w * point.time_s)
            for point in curve.points
        }
        hull = [rows[clock] for clock in curve.hull]
        assert [time_s for time_s, _ in hull] == sorted(time_s for time_s, _ in hull)
        for time_s, effective_j in rows.values():
            for (t0, e0), (t1, e1) in pairwise(hull):
                if t0 <= time_s <= t1:
                    line_j = e0 + (e1 - e0) * (time_s - t0) / (t1 - t0)
                    assert effective_j >= line_j - 2e-6 - 1e-6 * abs(e0)


def test_standard_errors_come_from_the_profile_that_has_them(frontier: Frontier):
    evidence = Evidence(1400.0, 1e-4, 0.25, 3, 60.0)
    rows = {
        key: tuple(replace(row, evidence=evidence) for row in each)
        for key, each in SMALL.measurements.items()
    }
    known = curves_of(replace(SMALL, measurements=rows))
    assert {
        (point.time_stderr_s, point.energy_stderr_j) for curve in known for point in curve.points
    } == {(1e-4, 0.25)}
    unknown = curves_of(frontier.profile)
    assert {
        (point.time_stderr_s, point.energy_stderr_j) for curve in unknown for point in curve.points
    } == {(None, None)}


# --- Savings
# ------------------------------------------------------------------------------------------


def test_a_plans_saving_is_counted_against_all_clocks_at_maximum(frontier: Frontier):
    plan = frontier.plan_for(1.1 * frontier.baseline_time_s)
    size, rates = (
        IterationSize(pipelines=4, tokens=1000, samples=10, iterations=50),
        EnergyRates(0.2, 1.5, 0.3),
    )
    (saving,) = savings_of(Sources(plans={"plan": plan}), rates, size)
    assert saving.per_iteration.gpu_j == pytest.approx(4 * plan.saving_j)
    assert saving.per_iteration.kwh == pytest.approx(4 * plan.saving_j * 1.5 / 3.6e6)
    assert saving.per_iteration.usd == pytest.approx(0.2 * saving.per_iteration.kwh)
    assert saving.per_iteration.co2e_kg == pytest.approx(0.3 * saving.per_iteration.kwh)
    assert saving.per_day.kwh == pytest.approx(saving.per_iteration.kwh * 86400 / plan.time_s)
    assert saving.per_run is not None
    assert saving.per_run.gpu_j == pytest.approx(50 * saving.per_iteration.gpu_j)
    assert saving.efficiency["joules_per_token"] == pytest.approx(4 * plan.energy_j / 1000)
    power_w = 4 * plan.energy_j / plan.time_s
    assert saving.efficiency["samples_per_s_per_w"] == pytest.approx(10 / plan.time_s / power_w)
    assert saving.energy_origin == saving.baseline_origin == "replayed, measured profile"


@pytest.mark.parametrize("pipelines", [1, 2])
def test_a_run_exactly_by_its_plan_saves_as_much(
    frontier: Frontier, tmp_path: Path, pipelines: int
):
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s)
    for iterations in (4, 6):
        write_run(tmp_path, plan, iterations, pipelines=pipelines)
    sources = Sources(frontier=frontier, runs={"run": Run.load(tmp_path)})
    (saving,) = savings_of(sources, EnergyRates(), IterationSize(pipelines=2, tokens=64))
    saved_j = plan.baseline_j(plan.time_s) - plan.energy_j
    assert saving.per_iteration.gpu_j == pytest.approx(pipelines * saved_j, rel=1e-3)
    assert (saving.time_origin, saving.energy_origin) == ("measured", "simulated")
    assert (saving.iterations, saving.pipelines) == (10, pipelines)
    assert saving.per_run is not None
    assert saving.per_run.gpu_j == pytest.approx(10 * pipelines * saved_j, rel=1e-6)
    assert saving.efficiency["joules_per_token"] == pytest.approx(2 * plan.energy_j / 64, rel=1e-3)
    (point,) = (each for each in chart_sources(sources).points if each.kind == "run")
    assert point.energy_j == pytest.approx(plan.energy_j, rel=1e-3)


def test_joules_and_watts_are_of_the_seconds_beside_them(frontier: Frontier, tmp_path: Path):
    """Of a run with a slow first iteration too; no two baselines have one name."""
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s)

    def times(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
        usual = timed(plan, rank, number, begin_ns)
        longer = 1.1 if number else 1.5
        return replace(usual, end_ns=begin_ns + round(longer * (usual.end_ns - begin_ns)))

    write_run(tmp_path, plan, 4, times=times)
    sources = Sources(
        frontier=frontier, plans={"plan.yaml": plan}, runs={"run": Run.load(tmp_path)}
    )
    report = make_report(sources, EnergyRates(), IterationSize())
    headings = [column[0] for column in _used_columns(report)]
    rows = list(zip(*(column[1:] for column in _used_columns(report)), strict=True))
    names = [row[0].strip() for row in rows]
    assert names == [AS_LONG, "run", "all clocks at maximum", "plan.yaml"]
    for row in rows:
        told = dict(zip(headings, row, strict=True))
        until_next_s, energy_j, power_w = (
            float(told[name].replace(",", ""))
            for name in ("s until the next", "J per iteration", "W on average")
        )
        assert power_w == pytest.approx(energy_j / until_next_s, rel=0.02), row
    text = report_text(report)
    assert "saved kWh/day" in text
    assert "until the next s" in text


def test_watts_of_a_run_are_those_of_windows_that_differ_between_ranks(
    frontier: Frontier, tmp_path: Path
):
    """The first iteration of a job begins on each rank when that is ready."""
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s)

    def times(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
        usual = timed(plan, rank, number, begin_ns)
        longer = 1.0 if number else 1.0 + 0.4 * rank
        return replace(usual, end_ns=begin_ns + round(longer * (usual.end_ns - begin_ns)))

    write_run(tmp_path, plan, 4, times=times)
    run = Run.load(tmp_path)
    sources = Sources(frontier=frontier, plans={"plan.yaml": plan}, runs={"run": run})
    saving = savings_of(sources, EnergyRates(), IterationSize())[0]
    total = run.total
    assert saving.is_run
    assert total.gpu_s / total.windows > 1.01 * total.mean_iteration_s
    watts = total.energy_j / total.metered_s * len(run.ranks)
    assert saving.energy_j / saving.window_s == pytest.approx(watts)
    assert "without the first of them" in report_text(
        make_report(sources, EnergyRates(), IterationSize())
    )


@pytest.mark.parametrize(
    "option",
    [
        "--price -1",
        "--pue 0.9",
        "--pue nan",
        "--carbon infkg",
        "--pipelines 0",
        f"--tokens-per-iteration {10**400}",
    ],
)
def test_a_wrong_rate_is_refused(files: Path, option: str):
    code, _, stderr = refusal(f"report plan.yaml {option} -o report.html")
    assert code == 2
    assert "give" in stderr
    assert not Path("report.html").exists()


# --- The command
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_files",
    ["profile.yaml", "frontier.npz", "plan.yaml", "run", "frontier.npz plan.yaml run profile.yaml"],
)
def test_a_report_is_made_of_any_of_the_files(files: Path, given_files: str):
    content = json.loads(done(f"report {given_files} -o report.html --json"))
    assert content["files"] == ["report.html"]
    text = Path("report.html").read_text()
    assert data_of(text)["frontier"] == content["frontier"]
    assert not re.findall(r"(?:src|href)=|url\((?!#)|@import", text)


def test_equal_files_give_equal_pages(files: Path):
    for name in ("one.html", "two.html"):
        done(f"report frontier.npz plan.yaml run -o {name}")
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()


def test_pipelines_and_tokens_come_from_the_job_file(files: Path):
    head = (
        "format: perseus-planner/job\nversion: 1\nprofile: profile.yaml\nschedule: "
        "1f1b\nmicrobatches: 5\n"
    )
    Path("job.yaml").write_text(
        head + "replicas: 3\ntokens_per_iteration: 6000\nsamples_per_iteration: 12\n"
    )
    size = json.loads(done("report plan.yaml job.yaml -o report.html --json"))["size"]
    assert (size["pipelines"], size["tokens"], size["samples"]) == (3, 6000, 12)
    two = "replicas:\n- count: 3\n- {count: 1, slow_stages: {1: 1.2}}\ntokens_per_iteration: 6000\n"
    Path("job.yaml").write_text(head + two)
    size = json.loads(done("report plan.yaml job.yaml -o report.html --json"))["size"]
    assert (size["pipelines"], size["tokens"]) == (3, 4500)
    given_here = "--pipelines 2 --tokens-per-iteration 7"
    size = json.loads(done(f"report plan.yaml job.yaml {given_here} -o report.html --json"))["size"]
    assert (size["pipelines"], size["tokens"]) == (2, 7)


def test_files_that_do_not_belong_together_are_refused(files: Path):
    other = smooth_profile(3, step_mhz=300)
    other.save("other.yaml")
    solve(SMALL, schedules.one_f_one_b(3, 6)).save("longer.npz")
    for given_files, what in (
        ("frontier.npz other.yaml", "another profile"),
        ("longer.npz plan.yaml", "another schedule"),
        ("frontier.npz longer.npz", "only one frontier can be given"),
        ("absent.yaml", "no such file"),
        ("profile.csv", "--blocking-power"),
        ("report.py", "no such file"),
    ):
        code, stdout, stderr = refusal(f"report {given_files} -o report.html")
        assert (code, stdout) == (2, "")
        assert what in stderr
        assert not Path("report.html").exists()


def test_a_report_without_files_is_refused():
    with pytest.raises(UsageError, match="name at least one"):
        Sources()


def test_names_with_markup_are_texts(frontier: Frontier):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\""
    profile = replace(SMALL, gpu=evil)
    plan = replace(
        frontier.plan_for(frontier.baseline_time_s), gpu=evil, profile_digest=profile.digest
    )
    text = page(
        make_report(
            Sources(profile, plans={evil: plan}, names=(evil,)), EnergyRates(), IterationSize()
        )
    )
    assert "<img" not in text
    assert "alert(1)</script>" not in text
    assert data_of(text)["frontier"]["points"][-1]["name"] == evil


@given(st.floats(-1e12, 1e12))
def test_a_number_on_the_page_is_the_number_to_three_digits(value: float):
    text = number(value).replace(",", "").replace("\u2212", "-")
    assert math.isclose(float(text), value, rel_tol=5.1e-3, abs_tol=1e-11)
    if not value.is_integer():
        assert float(text) == float(f"{value:.3g}") or abs(value) < 1e-9


def test_a_lone_computation_has_no_spare_time(frontier: Frontier):
    iteration = solve(smooth_profile(1, step_mhz=300), schedules.one_f_one_b(1, 1)).dag.iteration
    assert spare_s(iteration, [Span(0.0, 1.0, 1.0), Span(1.0, 3.0, 1.0)]) == [0.0, 0.0]
