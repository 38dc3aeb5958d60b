"""Clock changes of a program are counted, and their costs are checked."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.measurement import (
    ClockChange,
    changes_per_rank,
    with_fewer_changes,
)

SEEDS = st.integers(0, 2**32 - 1)


@fixed
@given(clocks=st.lists(st.sampled_from((None, 900, 1200, 1410)), min_size=1, max_size=12))
def test_changes_are_those_of_the_second_of_three_iterations_in_a_row(clocks: list[int | None]):
    clocked = [(i, clock) for i in range(3) for clock in clocks if clock is not None]
    assert changes_per_rank(clocks) == sum(
        i == 1 and clock != before for (_, before), (i, clock) in pairwise(clocked)
    )


@pytest.mark.parametrize(
    ("most", "merged"),
    [
        (4, [1410, 900, 900, 930, 1200, 1200]),
        (3, [1410, 930, 930, 930, 1200, 1200]),
        (2, [1410, 930, 930, 930, 1410, 1410]),  # 2 x 210 MHz, where 930 to 1200 MHz is 3 x 270
        (1, [1410] * 6),
        (0, [1410] * 6),
    ],
)
def test_neighbours_that_are_raised_least_are_merged_first(most: int, merged: list[int]):
    assert list(with_fewer_changes([1410, 900, 900, 930, 1200, 1200], most)) == merged


@fixed
@given(
    clocks=st.lists(st.integers(9, 14).map(lambda each: 100 * each), min_size=1, max_size=20),
    data=st.data(),
)
def test_fewer_changes_make_no_computation_slower(clocks: list[int], data: st.DataObject):
    planned = changes_per_rank(clocks)
    most = data.draw(st.integers(0, planned))
    fewer = with_fewer_changes(clocks, most)
    assert changes_per_rank(fewer) <= most
    assert len(fewer) == len(clocks)
    assert all(clock >= before for before, clock in zip(clocks, fewer, strict=True))
    assert set(fewer) <= set(clocks)
    assert with_fewer_changes(clocks, planned) == tuple(clocks)
    assert with_fewer_changes(clocks, 0) == (max(clocks),) * len(clocks)


@pytest.mark.parametrize("value", [-0.001, math.nan, math.inf, "5 ms", None, True])
def test_a_latency_is_finite_and_not_negative(value):
    wanted = "is not a wait: give finite seconds of 0 or more, such as 0.002"
    for name in ("call_s", "settle_s"):
        with pytest.raises(ProfileError) as caught:
            ClockChange(**{"call_s": 0.0, "settle_s": 0.0, name: value})
        assert str(caught.value).startswith(f"clock_change, {name}: ")
        assert str(caught.value).endswith(wanted)
