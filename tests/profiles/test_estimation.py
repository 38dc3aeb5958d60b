"""A profile knows what its rows tell about every clock, and how surely."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from noisy_rows import noisy_rows, unlike_stages
from refusals import refusal
from strategies import smooth_profile

from perseus_planner.base.errors import ProfileError, UsageError
from perseus_planner.profiles.estimation import Estimate
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile

TRUTH = unlike_stages(smooth_profile(6), seed=3)


def errors(found: Profile) -> np.ndarray:
    """(2, rows) relative errors of the times and energies."""
    pairs = [
        (row, true)
        for key, rows in found.measurements.items()
        for row in rows
        for true in TRUTH.measurements[key]
        if row.clock_mhz == true.clock_mhz
    ]
    assert len(pairs) == sum(map(len, found.measurements.values()))
    return np.array([(a.time_s / b.time_s - 1, a.energy_j / b.energy_j - 1) for a, b in pairs]).T


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


@pytest.mark.parametrize("noise", [0.0025, 0.01])
def test_estimates_are_nearer_to_the_truth_than_rows(noise: float):
    rows = noisy_rows(TRUTH, noise, None, seed=1)
    raw, found = errors(rows), errors(rows.estimated().mean)
    assert rms(raw) == pytest.approx(noise, rel=0.1)
    assert rms(found[0]) < 0.5 * rms(raw[0])
    assert rms(found[1]) < 0.5 * rms(raw[1])


@pytest.mark.parametrize("clocks", [12, None])
def test_truth_is_in_as_many_intervals_as_they_say(clocks: int | None):
    within = []
    for seed in range(4):
        draws = noisy_rows(TRUTH, 0.01, clocks, seed).estimated().draws(300, seed)
        for key, rows in TRUTH.measurements.items():
            for drawn, true in (
                (draws.time_s[key], [row.time_s for row in rows]),
                (draws.energy_j[key], [row.energy_j for row in rows]),
            ):
                low, high = np.quantile(drawn, [0.05, 0.95], axis=1)
                within.append((low <= true) & (true <= high))
    assert 0.83 < np.mean(within) < 0.99


@pytest.mark.parametrize("has_errors", [True, False])
def test_rows_without_noise_stay_as_they_are(has_errors: bool):
    rows = noisy_rows(TRUTH, 1e-5, None, seed=1) if has_errors else TRUTH
    assert np.abs(errors(rows.estimated().mean)).max() < 1e-4


@pytest.mark.parametrize("clocks", [12, None])
@pytest.mark.parametrize("states_errors", [True, False])
def test_a_row_that_is_far_off_is_not_believed(clocks: int | None, states_errors: bool):
    for seed in range(3):
        rows = noisy_rows(TRUTH, 0.005, clocks, seed, "outlier", states_errors=states_errors)
        assert errors(rows)[0].min() < -0.035
        assert errors(rows.estimated().mean)[0].min() > -0.015


def test_noise_is_found_if_rows_have_no_standard_errors():
    rows = noisy_rows(TRUTH, 0.01, None, seed=2)
    without = replace(
        rows,
        measurements={
            key: tuple(replace(row, evidence=None) for row in each)
            for key, each in rows.measurements.items()
        },
    )
    found = without.estimated()
    assert (found.has_errors, rows.estimated().has_errors) == (False, True)
    for errors_of_kind in found.noise.values():
        assert errors_of_kind == pytest.approx((0.01, 0.01), rel=0.25)


def test_clocks_between_the_measured_ones_are_estimated_and_marked():
    rows = noisy_rows(TRUTH, 0.001, 12, seed=1)
    found = rows.estimated()
    all_clocks = [row.clock_mhz for row in TRUTH.measurements[0, "F"]]
    for key, each in found.mean.measurements.items():
        measured = {row.clock_mhz for row in rows.measurements[key]}
        assert [row.clock_mhz for row in each] == all_clocks
        assert set(found.interpolated[key]) == set(all_clocks) - measured
        assert {row.clock_mhz for row in each if row.evidence is not None} == measured
    assert rms(errors(found.mean)) < 0.003
    draws = found.draws(200)
    assert draws.clocks_mhz == tuple(all_clocks)
    spread = np.std(np.log(draws.time_s[2, "B"]), axis=1)
    known = [clock not in found.interpolated[2, "B"] for clock in all_clocks]
    assert spread[~np.array(known)].mean() > spread[known].mean()


def one_stage(*rows: Measurement, **rest: object) -> Profile:
    return Profile({(0, "F"): rows, (0, "B"): rows}, 80.0, **rest)  # type: ignore[arg-type]


def test_only_evenly_spaced_clocks_are_filled_in():
    def clocks(*mhz: int, control: str = "clock") -> list[int]:
        profile = one_stage(*(Measurement(c, 60 / c, 20.0) for c in mhz), control=control)
        return [row.clock_mhz for row in profile.estimated().mean.measurements[0, "F"]]

    assert clocks(1410, 1380, 1335) == [1410, 1395, 1380, 1365, 1350, 1335]
    assert clocks(1530, 1522, 1507) == [1530, 1522, 1507]
    assert clocks(1410) == [1410]
    assert clocks(300, 200, 150, control="power-limit") == [300, 250, 200, 150]
    assert clocks(1410, 1380, 1320, control="observed") == [1410, 1380, 1320]


def test_supported_clocks_can_be_given():
    found = one_stage(Measurement(1400, 0.05, 20.0), Measurement(1000, 0.06, 15.0)).estimated(
        [1400, 1207]
    )
    assert [row.clock_mhz for row in found.mean.measurements[0, "B"]] == [1400, 1207, 1000]
    assert found.interpolated[0, "B"] == (1207,)


def test_times_below_the_lowest_measured_clock_are_physically_possible():
    rows = [
        Measurement(1400, 0.05, 20.0),
        Measurement(1300, 0.055, 18.0),
        Measurement(1200, 0.08, 17.0),
    ]
    profile = one_stage(*rows)
    draws = profile.estimated([1000, 600]).draws(300).time_s[0, "F"]
    for drawn, clock in zip(draws[-2:], (1000, 600), strict=True):
        assert (drawn >= draws[-3] * (1 - 1e-12)).all()
        assert (drawn <= draws[-3] * 1200 / clock * (1 + 1e-12)).all()


def test_rows_of_many_windows_count_for_more():
    def row(clock: int, factor: float, windows: int) -> Measurement:
        time_s = factor * (0.01 + 50 / clock)
        error = 0.01 / windows**0.5
        return Measurement(
            clock, time_s, 20.0, Evidence(clock, error * time_s, 20 * error, windows, 60.0)
        )

    def off(windows: int) -> float:
        rows = [
            row(clock, 1.02 if clock == 1200 else 1.0, windows if clock == 1200 else 4)
            for clock in range(1005, 1411, 15)
        ]
        found = {
            each.clock_mhz: each.time_s
            for each in one_stage(*rows).estimated().mean.measurements[0, "F"]
        }
        return found[1200] / (0.01 + 50 / 1200) - 1

    assert 0 < off(4) < 0.5 * off(400)


def test_draws_of_one_seed_are_equal():
    estimate: Estimate[Profile] = noisy_rows(TRUTH, 0.01, 12, seed=1).estimated()
    first, second, other = (estimate.draws(5, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.time_s[3, "F"], second.time_s[3, "F"])
    assert not np.array_equal(first.time_s[3, "F"], other.time_s[3, "F"])


REFUSALS = {
    "a clock above the highest": (
        lambda: smooth_profile(1).estimated([1425]),
        ProfileError,
        "clocks_mhz: 1425 is above 1410 MHz, the highest that was measured; measure it, or leave "
        "it out",
    ),
    "no energy": (
        lambda: one_stage(Measurement(1410, 0.05, 0.0)).estimated(),
        ProfileError,
        "stage 0 forward at 1410 MHz: has an energy of 0 J, from which nothing can be estimated; "
        "measure it, or ask for plans that take rows as measured",
    ),
    "no draws": (
        lambda: smooth_profile(1).estimated().draws(0),
        UsageError,
        "count: 0 is not a whole number of at least 1",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_estimated_is_refused(call, error: type[Exception], text: str):
    assert refusal(error, call) == text
