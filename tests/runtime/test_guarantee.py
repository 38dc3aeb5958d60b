"""The parts of the guarantee that are the same whatever decides clocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.runtime.guarantee import (
    CREDIT,
    AuditTimes,
    Measured,
    Reference,
    audited_share,
    is_drawn,
    owed_after,
)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 9))
def test_the_first_audit_is_certain_and_each_is_of_its_length(first: int, length: int, seed: int):
    times = AuditTimes(first, length, random.Random(seed))
    steps = [times.step(1, 0.0) for _ in range(first + length + 20)]
    assert steps.index(True) == first - 1
    assert steps.count(True) == length


def test_later_audits_are_drawn_as_often_as_asked_and_by_time_as_by_steps():
    for passed in (1.0, 0.25):
        times = AuditTimes(1, 4, random.Random(1))
        audits = 0
        for _ in range(int(40_000 / passed)):
            was_running = times.is_running
            audits += times.step(passed, 0.02) and not was_running
        # An audit of 4 after 50 without one in the mean.
        assert audits == pytest.approx(40_000 / 54, rel=0.1)


def test_one_iteration_of_64_is_drawn_and_no_period_meets_all_of_them():
    drawn = [number for number in range(64 * 200) if is_drawn(number, 64)]
    assert [number // 64 for number in drawn] == list(range(200))
    for period in (2, 8, 64, 100):
        met = sum(number % period == 0 for number in drawn) / len(drawn)
        assert met < 1 / period + 0.1


@given(st.lists(st.floats(-10.0, 10.0), max_size=50), st.floats(0.0, 5.0))
def test_what_is_owed_is_the_sum_but_for_credit_that_ended(more: list[float], burst: float):
    owed = 0.0
    for each in more:
        owed = owed_after(owed, each, burst)
        assert owed >= -CREDIT * burst
    assert owed >= sum(more) - 1e-9


def test_a_measured_sum_counts_its_errors_once():
    measured = Measured()
    for _ in range(16):
        measured.add(1.0, 0.25)
    assert measured.upper(2.0) == pytest.approx(16.0 + 2.0 * 2.0)
    measured.raise_to(30.0, 2.0)
    assert measured.upper(2.0) == pytest.approx(30.0)


def test_a_reference_is_the_median_of_the_last_ones():
    reference = Reference(3)
    assert reference.value is None
    for value in (1.0, 9.0, 2.0, 3.0):
        reference.add(value)
    assert (len(reference), reference.value) == (3, 3.0)


def test_the_share_of_audits_is_that_of_doubt_within_limits():
    assert audited_share(0.001, 0.01, 0.01, 0.4) == pytest.approx(0.1)
    assert audited_share(0.0, 0.01, 0.01, 0.4) == 0.01
    assert audited_share(1.0, 0.01, 0.01, 0.4) == 0.4
    assert audited_share(0.001, 0.0, 0.01, 0.4) == 0.4
