"""A run that takes over twice as long as planned, or under half, is told so in one sentence, and
saves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import write_run
from strategies import smooth_profile

from perseus_planner import schedules, solve
from perseus_planner.runs import Run
from perseus_planner.runs.straggler import of_another_machine
from perseus_planner.views.report.page import page
from perseus_planner.views.report.report import make_report, report_text
from perseus_planner.views.report.savings import EnergyRates, IterationSize
from perseus_planner.views.report.sources import Sources
from perseus_planner.views.run import summarize_run
from perseus_planner.views.run_text import run_text


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
