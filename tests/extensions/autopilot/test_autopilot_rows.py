"""What the autopilot learns of rows: times and powers; and where it tries them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from perseus_planner import schedules
from perseus_planner.extensions.autopilot import AutopilotJob, ComputationObservation
from perseus_planner.extensions.autopilot.job import time_at_last_clock
from perseus_planner.extensions.autopilot.planning import Costs, Limit, Searcher
from perseus_planner.extensions.autopilot.power_rows import PowerRows
from perseus_planner.extensions.autopilot.time_rows import TimeRows
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules.pipeline import pipeline_iteration

CLOCKS = tuple(range(1410, 840, -45))


@pytest.mark.parametrize("change_s", [0.01, 0.04])
def test_a_computation_in_which_the_clock_changes_tells_its_time_at_the_new_one(change_s: float):
    old_s, new_s = 0.10, 0.14
    end_s = change_s + (1 - change_s / old_s) * new_s
    seen = ComputationObservation(0.0, end_s, 1410, change_s, 1000)
    assert time_at_last_clock(seen, {1410: old_s}) == (1000, pytest.approx(new_s))
    assert time_at_last_clock(seen, {}) is None
    late = ComputationObservation(0.0, 0.09 + 0.1 * new_s, 1410, 0.09, 1000)
    assert time_at_last_clock(late, {1410: old_s}) is None  # a tenth of it tells too little
    assert time_at_last_clock(ComputationObservation(0.0, 0.1, None), {1410: old_s}) is None


def times_of(measured: dict[int, float], stages: int = 2) -> TimeRows:
    """Rows of one kind, of equal stages: clock -> seconds."""
    rows = TimeRows(CLOCKS, [0] * stages, stages)
    rows.add_noise(np.full(40, 0.001))
    for row in range(stages):
        for clock, time_s in measured.items():
            rows.add(row, CLOCKS.index(clock), np.log(time_s * np.array([0.999, 1.001, 1.0])))
    return rows


def test_a_row_that_was_not_measured_is_bounded_by_the_clock():
    rows = times_of({1410: 0.10, 1230: 0.11})
    tables = rows.tables(between=True)
    at = CLOCKS.index(870)
    assert tables.safe_s[0, at] == pytest.approx(0.11 * 1230 / 870, rel=0.01)
    assert (
        tables.doubt_s[0, at] > 1.1 * tables.safe_s[0, at]
    )  # two rows do not tell that all keep to the bound
    assert np.isinf(tables.plan_s[0, at])
    assert np.isfinite(tables.plan_s[0, CLOCKS.index(1230)])


def test_a_measured_row_over_the_bound_makes_all_others_doubtful():
    tables = times_of({1410: 0.10, 1230: 0.10 * 1410 / 1230 * 1.2}).tables(between=True)
    at = CLOCKS.index(1320)
    assert tables.safe_s[0, at] == pytest.approx(0.10 * 1410 / 1320 * 1.2, rel=0.01)


def test_times_over_the_bound_make_all_others_doubtful_before_they_are_seen_again():
    rows = times_of({1410: 0.10})
    rows.doubted[0, CLOCKS.index(1230)] = np.log([0.10 * 1410 / 1230 * 1.2])
    at = CLOCKS.index(1320)
    assert rows.tables(between=True).safe_s[1, at] > 0.10 * 1410 / 1320 * 1.18


def test_a_row_of_one_time_that_is_much_longer_than_its_like_say_is_not_planned_on():
    slope = {clock: 0.10 * (1410 / clock) ** 0.6 for clock in CLOCKS}
    at = CLOCKS.index(1095)
    rows = times_of({clock: time_s for clock, time_s in slope.items() if clock != 1095}, 3)
    for row, times in ((0, 1.0), (1, 1.2), (2, 0.9)):
        rows.add(row, at, np.log([times * slope[1095]]))
    planned = np.isfinite(rows.tables(between=False).plan_s[:, at])
    assert planned.tolist() == [True, False, True]


def test_rows_between_measured_ones_are_planned_on_only_if_that_is_allowed():
    rows = times_of({clock: 0.02 + 110 / clock for clock in CLOCKS[::2]}, stages=3)
    between = CLOCKS.index(CLOCKS[3])
    tables = rows.tables(between=True)
    assert tables.plan_s[0, between] == pytest.approx(0.02 + 110 / CLOCKS[3], rel=0.01)
    assert np.isinf(rows.tables(between=False).plan_s[0, between])


def test_rows_between_measured_ones_are_not_planned_on_where_one_is_over_the_bound():
    measured = {clock: 0.02 + 110 / clock for clock in CLOCKS[::2]}
    between = CLOCKS.index(CLOCKS[3])
    for factor, trusted in ((1.0, True), (1.25, False)):
        rows = times_of({**measured, CLOCKS[8]: measured[CLOCKS[8]] * factor}, stages=3)
        tables = rows.tables(between=True)
        assert bool(np.isfinite(tables.plan_s[:, between]).all()) == trusted
        assert np.isfinite(tables.plan_s[:, CLOCKS.index(CLOCKS[2])]).all()  # measured


def test_a_long_time_of_one_row_tells_nothing_of_others():
    measured = {clock: 0.02 + 110 / clock for clock in CLOCKS[::2]}
    rows = times_of(measured, stages=4)
    before = rows.tables(between=True)
    rows.forget(1, 4)
    rows.add(1, 4, np.log([1.25 * measured[CLOCKS[4]]]))
    after = rows.tables(between=True)
    assert after.mean_s == pytest.approx(before.mean_s, rel=0.01)
    assert np.isfinite(after.plan_s).all()


def test_what_the_first_rows_promise_of_others_is_taken_back_when_later_ones_break_it():
    plateau = {clock: 0.1 * (1410 / clock) ** 0.2 for clock in CLOCKS[:6]}
    below = {clock: plateau[CLOCKS[5]] * CLOCKS[5] / clock for clock in CLOCKS[6:9]}
    rows = times_of(plateau, stages=3)
    assert rows.tables(between=True).stderr[0, 8] < 0.006  # as if the plateau went on
    for row, (clock, time_s) in product((1, 2), below.items()):
        rows.add(row, CLOCKS.index(clock), np.log([time_s]))
    assert rows.tables(between=True).stderr[0, 10] > 0.01


def test_a_trial_is_where_it_measures_the_most_new_rows():
    iteration = pipeline_iteration(schedules.one_f_one_b(2, 12))
    search = Searcher(AutopilotJob(iteration, CLOCKS), 8)
    times_s = np.array([0.1 * CLOCKS[0] / np.array(CLOCKS)] * len(search.keys))
    costs = Costs(times_s, np.full_like(times_s, 300.0), np.full(2, 80.0))
    known = np.ones(times_s.shape, dtype=bool)
    forward, backward = search.keys.index(Key(1, "F")), search.keys.index(Key(1, "B"))
    known[backward, 4] = False
    program = search.full()
    first = int(search.problem.rank_start[1])
    program[first] = 3  # a phase of one forward, whose clock is the nearest to the wanted one
    random = np.random.default_rng(1)
    wanted, limits = [[], [4]], [Limit(costs, 2 * search.replay(program, costs)[0])]
    trial, tried = search.with_trials(
        program, limits, wanted, ~known[[forward, backward]], known, random
    )
    assert tried == [(1, 4)]
    assert backward in search.problem.member[np.flatnonzero(trial == 4)]


def test_powers_are_found_from_energies_of_whole_iterations():
    random = np.random.default_rng(3)
    ranks, x = 3, np.array(CLOCKS) / CLOCKS[0]
    kinds, stages = [0, 1] * ranks, [stage for stage in range(ranks) for _ in range(2)]
    scale = random.uniform(0.95, 1.05, (2 * ranks, 1))
    true_w, waiting_w = 400 * scale * (0.25 + 0.75 * x**2.4), 80.0
    powers = PowerRows(CLOCKS, kinds, stages, stages, ranks)
    for iteration in range(40):
        for rank in range(ranks):
            seconds = np.zeros((2 * ranks, len(CLOCKS)))
            for row in (2 * rank, 2 * rank + 1):
                seconds[row] = random.dirichlet(np.ones(len(CLOCKS)) * 0.2) * (1 + row % 2)
            joules = float((seconds * true_w).sum()) + 0.5 * waiting_w
            if iteration == 0 and rank == 0:
                powers.start(joules, 3.0, 0.5)
            powers.add(rank, seconds, 0.5, joules, 0.0)
    found_w, error_w, _ = powers.tables()
    assert np.abs(found_w / true_w - 1).max() < 0.10
    assert (
        np.abs(found_w / true_w - 1).mean() < 0.03
    )  # what waiting draws is not told apart from it
    assert (np.abs(found_w - true_w) < 4 * error_w + 8).mean() > 0.95
