"""A slow GPU is reported once for each lasting change, and not for a short disturbance. A run that
takes over twice as long as planned, or under half, is told so in one sentence, and saves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import write_run
from strategies import fixed, smooth_profile

from perseus_planner import schedules, solve
from perseus_planner.runs import IterationRecord, Run
from perseus_planner.runs.straggler import (
    ENOUGH,
    RECOVERED,
    SLOW,
    StragglerDetection,
    StragglerDetector,
    of_another_machine,
)
from perseus_planner.views.report import make_report, page, report_text
from perseus_planner.views.run import summarize_run
from perseus_planner.views.run_text import run_text
from perseus_planner.views.savings import EnergyRates, IterationSize
from perseus_planner.views.sources import Sources


def ran(
    ratio: float, planned_s: float = 2.0, deviation: str | None = None, **throttled_s: float
) -> IterationRecord:
    """An iteration of 4 s whose computations took `ratio` times as long as planned."""
    return IterationRecord(
        iteration=0,
        version=1,
        pipeline=0,
        pipeline_rank=0,
        begin_s=10.0,
        end_s=14.0,
        busy_s=ratio * planned_s,
        planned_busy_s=planned_s if deviation is None else None,
        throttled_s={name.replace("_", "-"): seconds for name, seconds in throttled_s.items()},
        deviation=deviation,
    )


def reports(
    rows: list[IterationRecord], usual: float | None = 1.0
) -> list[tuple[int, StragglerDetection]]:
    """Return (index of the iteration, what was reported after it)."""
    watch, found = StragglerDetector(usual), []
    for place, row in enumerate(rows):
        watch, news = watch.after(row)
        if news is not None:
            found.append((place, news))
    return found


RATIOS = st.lists(
    st.tuples(
        st.sampled_from((0.9, 1.0, 1.01, 1.03, 1.049, 1.06, 1.1, 1.5, 3.0)), st.integers(1, 12)
    ),
    max_size=12,
).map(lambda runs: [ratio for ratio, times in runs for _ in range(times)])


@settings(fixed, max_examples=200)
@given(RATIOS)
def test_every_report_has_so_many_iterations_in_a_row_behind_it_and_none_is_missed(
    ratios: list[float],
):
    found = dict(reports([ran(ratio) for ratio in ratios]))
    reported = 1.0
    for place in range(len(ratios)):
        last = ratios[max(0, place + 1 - ENOUGH) : place + 1]
        if place in found:
            assert len(last) == ENOUGH
            if found[place].slowdown > 1.0:
                assert min(last) > SLOW
                assert found[place].slowdown == median(last)
                assert min(last) > SLOW * reported or max(last) * SLOW < reported
            else:
                assert reported > 1.0
                assert max(last) < RECOVERED
            reported = found[place].slowdown
        elif len(last) == ENOUGH:
            assert not (reported == 1.0 and min(last) > SLOW)
            assert not (reported > 1.0 and max(last) < RECOVERED)


@settings(fixed, max_examples=50)
@given(st.floats(0.2, 5.0), RATIOS)
def test_what_is_usual_is_learned_so_that_only_what_changes_counts(
    usual: float, ratios: list[float]
):
    rows = [ran(usual)] * ENOUGH + [ran(usual * ratio) for ratio in ratios]
    learned = reports(rows, None)
    expected = reports([ran(ratio) for ratio in ratios])
    assert [(place - ENOUGH, each.reason) for place, each in learned] == [
        (place, each.reason) for place, each in expected
    ]
    for (_, one), (_, other) in zip(learned, expected, strict=True):
        assert abs(one.slowdown - other.slowdown) < 1e-9


@settings(fixed, max_examples=50)
@given(RATIOS, st.data())
def test_iterations_that_did_not_run_as_planned_say_nothing(
    ratios: list[float], data: st.DataObject
):
    rows = [ran(ratio) for ratio in ratios]
    with_others = [*rows]
    for place in sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=5)), reverse=True):
        with_others.insert(place, ran(9.0, deviation="something else"))
    assert [each for _, each in reports(with_others)] == [each for _, each in reports(rows)]


def test_the_reason_is_what_the_counters_say():
    slow = [ran(1.2, sw_thermal=1.0, sw_power_cap=3.0, hw_thermal=0.1)] * ENOUGH
    assert reports(slow) == [
        (
            ENOUGH - 1,
            StragglerDetection(
                1.2, "throttled: sw-power-cap 75 % of the time, sw-thermal 25 % of the time"
            ),
        )
    ]
    assert reports([ran(1.2)] * 9) == [
        (
            ENOUGH - 1,
            StragglerDetection(1.2, "its computations take longer; no throttling was counted"),
        )
    ]


def test_a_gpu_that_is_held_back_from_the_start_is_judged_by_the_profile():
    held, free = ran(1.3, sw_thermal=2.0), ran(1.1)
    found = reports([held] * 7 + [free] * 20, None)
    assert [place for place, _ in found] == [ENOUGH - 1, 7 + 2 * ENOUGH - 1]
    assert [each.slowdown for _, each in found] == [1.3, 1.0]
    assert (
        reports([ran(1.3, sw_power_cap=4.0)] * 20, None) == []
    )  # at its power limit, like many GPUs all the time


@pytest.mark.parametrize(
    ("time_s", "is_told"), [(0.49, True), (0.5, False), (2.0, False), (2.01, True), (None, False)]
)
def test_only_times_over_twice_apart_are_of_another_machine(time_s: float | None, is_told: bool):
    assert (of_another_machine(time_s, 1.0) is not None) == is_told


def test_such_a_run_is_told_so_and_saves_nothing(tmp_path: Path):
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    plan = frontier.plan_for(frontier.baseline_time_s)
    write_run(tmp_path, plan, 4)
    run = Run.load(tmp_path)
    unlike = replace(
        run,
        plans={key: replace(each, time_s=each.time_s / 1000) for key, each in run.plans.items()},
    )
    found = []
    for each in (run, unlike):
        text = run_text(summarize_run(each))
        made = make_report(
            Sources(plans={"plan.yaml": plan}, runs={"run": each}), EnergyRates(), IterationSize()
        )
        found.append((text, made.savings, report_text(made), page(made)))
    (text, savings, told, html), (of_unlike, no_savings, told_unlike, html_unlike) = found
    assert "another machine" not in text + told + html
    assert [saving.name for saving in savings] == ["run", "plan.yaml"]  # what was measured leads
    sentence = "This plan is of another machine: iterations take"
    assert of_unlike.startswith(sentence)
    assert "saved" in text
    assert "saved" not in of_unlike.replace("no saving", "")
    assert "ran as planned." not in of_unlike
    assert no_savings == ()
    assert told_unlike.startswith(sentence)
    assert sentence in html_unlike
    assert "Energy saved" not in html_unlike
    assert "Where the energy goes" in html
    assert "Where the energy goes" not in html_unlike
