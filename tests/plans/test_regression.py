"""The regression of iteration times: it finds the terms that plans were made from, and on real
runs the constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import measured_runs
import numpy as np
import pytest
from data import MissingError
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fixed

from perseus_planner import Profile
from perseus_planner.plans.calibration import fit_terms
from perseus_planner.profiles.measurement import Measurement

TERMS = [("a",), ("b",), ("a", "b")]
SCALES = {"a": 1.0, "b": 1.0}
PATHS = np.random.default_rng(3).uniform(
    0.5, 2.0, (8, 3, 3)
)  # (measurements, paths, seconds of 1, a and b)


def replay(values: Mapping[str, float]) -> Sequence[float]:
    """Return the seconds of the longest of three paths."""
    of_path = PATHS @ [1.0, values.get("a", 0.0), values.get("b", 0.0)]
    return [float(each) for each in of_path.max(axis=1)]


@settings(fixed, max_examples=60)
@given(a=st.floats(0, 2), b=st.floats(0, 2), constant_s=st.floats(0, 3))
def test_terms_that_are_there_are_found(a: float, b: float, constant_s: float):
    measured_s = [each + constant_s for each in replay({"a": a, "b": b})]
    found = fit_terms(measured_s, replay, TERMS, SCALES)
    assert found.left_out_error is not None
    assert found.left_out_error < 1e-6
    predicted_s = [each + found.constant_s for each in replay(found.values)]
    assert predicted_s == pytest.approx(measured_s, rel=1e-6)


@settings(fixed, max_examples=60)
@given(st.lists(st.floats(0.5, 20), min_size=1, max_size=8))
def test_no_value_is_negative_and_left_out_errors_are_never_above_those_of_the_constant(
    measured_s: list[float],
):
    def of_these(values: Mapping[str, float]) -> Sequence[float]:
        return replay(values)[: len(measured_s)]

    alone = fit_terms(measured_s, of_these, [], {})
    found = fit_terms(measured_s, of_these, TERMS, SCALES)
    assert not found.values or min(found.constant_s, *found.values.values()) >= 0
    assert (alone.left_out_error is None) == (len(measured_s) == 1)
    assert found == alone or (found.left_out_error or 0.0) < 0.8 * (alone.left_out_error or 0.0)


def test_one_measurement_gives_the_constant():
    found = fit_terms([5.0], lambda _: [5.25], TERMS, SCALES)
    assert (found.constant_s, found.values, found.left_out_error) == (-0.25, {}, None)


def test_the_constant_is_all_that_a_measured_run_can_carry():
    try:
        run = measured_runs._load("bert-huge_a100_pp4_mb32")
    except MissingError as reason:
        pytest.skip(str(reason))
    plans = sorted(run.clocks)[2::3]
    profiles = {plan: measured_runs._profile_without(run, plan)[0] for plan in plans}

    def replayed(values: Mapping[str, float]) -> list[float]:
        return [
            measured_runs._replayed_s(run, slower(profiles[plan], values), run.clocks[plan])
            for plan in plans
        ]

    found = fit_terms(
        [run.iteration_s[plan] for plan in plans], replayed, [("F", "B")], {"F": 0.1, "B": 0.1}
    )
    assert not found.values
    assert found.constant_s > 0.3
    assert found.left_out_error is not None
    assert found.left_out_error < 0.005


def slower(profile: Profile, values: Mapping[str, float]) -> Profile:
    rows = {
        key: tuple(
            Measurement(m.clock_mhz, m.time_s * (1 + values.get(key[1], 0.0)), 0.0) for m in each
        )
        for key, each in profile.measurements.items()
    }
    return Profile(rows, 0.0)
