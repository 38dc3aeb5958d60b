"""The fit finds the physics behind a profile, also through noise, and comes near to what was
measured.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from load_fit import fit_load, fit_profile
from strategies import drawn

from perseus_planner.base.errors import ProfileError
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG, Load, OpCost
from perseus_planner.gpu.simulated.options import SimulationOptions
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

A40 = CATALOG["a40"]
PROFILES = ("gpt3-175b+a100_sxm_bf16", "bloom+a40_bf16")


@st.composite
def loads(draw: st.DrawFn) -> tuple[Load, list[int]]:
    """A computation on a GPU of the catalogue under some power limit, and clocks that it could
    be measured at.
    """
    model = draw(st.sampled_from(list(CATALOG.values())))
    work = OpCost(draw(st.floats(1e11, 1e13)), draw(st.floats(1e8, 1e11)))
    limit_w = draw(st.floats(0.5, 1.0)) * model.power_limit_w
    lowest = draw(st.sampled_from([0.0, 0.3, 0.6])) * model.clocks_mhz[0]
    clocks = [clock for clock in model.clocks_mhz if clock >= lowest][
        :: draw(st.sampled_from([1, 2, 3]))
    ]
    return replace(model.load(work), power_limit_w=limit_w), clocks


def rows_of(load: Load, clocks: list[int], noise: float = 0.0, seed: int = 0) -> list[Measurement]:
    """What would be measured, each number off by a normal relative error."""
    error = random.Random(seed)
    return [
        Measurement(
            c,
            load.time_s(c) * (1 + error.gauss(0, noise)),
            load.energy_j(c) * (1 + error.gauss(0, noise)),
        )
        for c in clocks
    ]


def errors(load: Load, rows: list[Measurement]) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of time and of energy."""
    time = [abs(load.time_s(row.clock_mhz) / row.time_s - 1) for row in rows]
    energy = [abs(load.energy_j(row.clock_mhz) / row.energy_j - 1) for row in rows]
    return np.array(time), np.array(energy)


def measured(folder: Path, name: str) -> Profile:
    return Profile.load(
        folder / "perseus_sosp24" / "stage_profile" / f"{name}.csv", blocking_power_w=80.0
    )


def test_a_fit_has_at_most_nine_numbers():
    assert len(fields(Load)) <= 9
    assert {field.type for field in fields(Load)} == {"float"}


@drawn(6, 60, draw=loads())
def test_what_has_no_noise_is_found_again(draw: tuple[Load, list[int]]):
    load, clocks = draw
    rows = rows_of(load, clocks)
    for error in errors(fit_load(rows), rows):
        assert (
            np.median(error) <= 0.008
        )  # reached where a limit holds nearly all clocks; otherwise below 0.001
        assert error.max() <= 0.03


@drawn(6, 60, draw=loads(), seed=st.integers(0, 1000))
def test_through_noise_the_truth_is_found(draw: tuple[Load, list[int]], seed: int):
    load, clocks = draw
    found = fit_load(rows_of(load, clocks, noise=0.01, seed=seed))
    for error in errors(found, rows_of(load, clocks)):
        assert np.median(error) <= 0.012
        assert error.max() <= 0.06


def test_the_parameters_themselves_are_found_where_the_clocks_tell_them_apart():
    truth = A40.load(OpCost(3e12, 4e10))
    found = fit_load(rows_of(truth, list(A40.clocks_mhz), noise=0.003))
    for field in fields(Load):
        if (
            field.name != "power_limit_w"
        ):  # half of the work waits for memory: the limit hardly holds
            assert getattr(found, field.name) == pytest.approx(
                getattr(truth, field.name), rel=0.1
            ), field.name


def test_the_power_limit_is_found():
    truth = A40.load(OpCost(1e13, 1e9))
    found = fit_load(rows_of(truth, list(A40.clocks_mhz), noise=0.003))
    assert found.power_limit_w == pytest.approx(300.0, rel=0.01)
    assert found.achieved_mhz(1740) == pytest.approx(truth.achieved_mhz(1740), rel=0.02)


@pytest.mark.parametrize("clocks", [(1410, 1200, 1005, 810), tuple(range(1410, 464, -45))])
def test_a_limit_that_holds_at_all_clocks_is_kept(clocks: tuple[int, ...]):
    # Nearly all times are one, and nothing but noise tells static power from the rest.
    truth = replace(CATALOG["a100-pcie"].load(OpCost(4e10, 1e8)), power_limit_w=150.0)
    found = fit_load(rows_of(truth, list(clocks), noise=0.01, seed=86))
    for clock in (2000, *clocks):
        assert found.time_s(clock) == pytest.approx(truth.time_s(clock), rel=0.02)


def test_work_that_no_limit_holds_back_is_fitted_without_one():
    truth = replace(A40.load(OpCost(3e12, 1e9)), power_limit_w=float("inf"))
    found = fit_load(rows_of(truth, list(A40.clocks_mhz)))
    assert found.achieved_mhz(1740) == pytest.approx(1740, rel=1e-3)


def test_rows_that_were_measured_badly_have_little_pull():
    truth = A40.load(OpCost(5e12, 3e10))
    clean, rows = (
        rows_of(truth, list(A40.clocks_mhz)),
        rows_of(truth, list(A40.clocks_mhz), noise=0.005),
    )
    for index in range(3, len(rows), 10):
        rows[index] = replace(
            rows[index], time_s=1.3 * rows[index].time_s, energy_j=1.2 * rows[index].energy_j
        )
    for error in errors(fit_load(rows), clean):
        assert np.median(error) <= 0.01
        assert error.max() <= 0.04


def test_memory_bound_work_is_as_fast_at_any_clock():
    found = fit_load(rows_of(A40.load(OpCost(0.0, 1e11)), list(A40.clocks_mhz)))
    assert found.time_s(210) == pytest.approx(found.time_s(1740))


@pytest.mark.parametrize("clocks", [(1740, 1305, 870, 435), (1740, 1500, 1200, 900, 600, 300)])
def test_few_clocks_give_a_fit_through_them(clocks: tuple[int, ...]):
    rows = rows_of(A40.load(OpCost(5e12, 3e10)), list(clocks))
    for error in errors(fit_load(rows), rows):
        assert error.max() <= 0.01


def test_the_order_of_the_rows_does_not_matter():
    rows = rows_of(A40.load(OpCost(5e12, 3e10)), list(A40.clocks_mhz), noise=0.01)
    assert fit_load(rows) == fit_load(rows[::-1])


def test_what_cannot_be_fitted_is_refused_by_its_name():
    enough = tuple(Measurement(clock, 1.0, 100.0) for clock in (900, 800, 700, 600))
    with pytest.raises(ProfileError) as refusal:
        fit_profile(Profile({(0, "F"): enough, (0, "B"): enough[:3]}, 80.0))
    assert (
        str(refusal.value)
        == "stage 0 B: a fit needs 4 clocks or more, but there are 3; measure more"
    )
    empty = (*enough[:3], Measurement(600, 1.0, 0.0))
    with pytest.raises(ProfileError) as refusal:
        fit_profile(Profile({(0, "F"): empty, (0, "B"): enough}, 80.0))
    expected = "stage 0 F: a fit needs energies above 0 J; measure again in a longer window"
    assert str(refusal.value) == expected
    with pytest.raises(ProfileError) as refusal:
        fit_profile(Profile({(0, "F"): enough, (0, "B"): enough}, 80.0, control="power-limit"))
    assert str(refusal.value) == "the profile is over power limits; give a profile over clocks"


@pytest.mark.parametrize("name", PROFILES)
def test_it_comes_within_two_percent_of_what_was_measured(measured_data: Path, name: str):
    profile = measured(measured_data, name)
    found = fit_profile(profile)
    both = [errors(found[key], list(rows)) for key, rows in profile.measurements.items()]
    for error in (np.concatenate(each) for each in zip(*both, strict=True)):
        assert np.median(error) <= 0.02
        assert error.max() <= 0.08


@pytest.mark.parametrize("name", PROFILES)
def test_clocks_that_it_did_not_see_are_predicted_as_well(measured_data: Path, name: str):
    profile = measured(measured_data, name)
    for key in ((0, "F"), (7, "B")):
        rows = profile.measurements[key]
        unseen = [row for index, row in enumerate(rows) if index % 5]
        for error in errors(fit_load(rows[::5]), unseen):
            assert np.median(error) <= 0.04


def test_a_fitted_computation_runs_on_the_simulated_gpu():
    truth = replace(A40.load(OpCost(8e12, 1e10)), power_limit_w=320.0)
    load = fit_load(rows_of(truth, list(A40.clocks_mhz[:70]), noise=0.01))
    gpu = SimulatedGpu(A40, options=SimulationOptions(noise=0.0, step_s=0.0, drift=0.0))
    assert load.power_limit_w > A40.power_limit_w, "it would not show whose limit holds"
    for clock in (1740, 1350, 900):
        gpu.set_clock_mhz(clock)
        gpu.wait(0.01)
        start_s, start_j = gpu.now_s(), gpu.energy_j()
        gpu.run(load, 10)
        assert (gpu.now_s() - start_s) / 10 == pytest.approx(load.time_s(clock), rel=1e-6)
        assert (gpu.energy_j() - start_j) / 10 == pytest.approx(load.energy_j(clock), rel=1e-6)
