"""Which measured clocks are worth choosing, and the lower convex hull of points."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fixed, profiles

from perseus_planner.profiles.measurement import Measurement, lower_hull, pareto_front
from perseus_planner.profiles.profiles import Profile


@fixed
@given(profile=profiles())
def test_worthwhile_options_get_slower_and_cheaper_and_leave_none_out_that_is_better(
    profile: Profile,
):
    power_w = profile.blocking_power_w
    for measured in profile.measurements.values():
        kept = pareto_front(measured, power_w)
        assert {Measurement(o.clock_mhz, o.time_s, o.energy_j) for o in kept} <= set(measured)
        assert all(o.effective_j == o.energy_j - power_w * o.time_s for o in kept)
        assert all(a.time_s < b.time_s and a.effective_j > b.effective_j for a, b in pairwise(kept))
        for m in measured:
            assert any(
                o.time_s <= m.time_s and o.effective_j <= m.energy_j - power_w * m.time_s
                for o in kept
            )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_equal_options_the_highest_clock_stays(order: tuple[int, ...]):
    options = [Measurement(clock, 1.0, 50.0) for clock in (1410, 1395, 1380)]
    assert [option.clock_mhz for option in pareto_front([options[i] for i in order], 80.0)] == [
        1410
    ]


@fixed
@given(
    points=st.dictionaries(
        st.integers(0, 40), st.integers(-40, 40) | st.integers(-(2**62), 2**62), min_size=1
    )
)
def test_the_hull_is_convex_and_below_all_points(points: dict[int, int]):
    ordered = sorted(points.items())
    hull = lower_hull(ordered)
    assert set(hull) <= set(ordered)
    assert (hull[0], hull[-1]) == (ordered[0], ordered[-1])
    slopes = [Fraction(y - y0, x - x0) for (x0, y0), (x, y) in pairwise(hull)]
    assert all(a < b for a, b in pairwise(slopes))
    for ((x0, y0), (x1, _)), slope in zip(pairwise(hull), slopes, strict=True):
        assert all(y >= y0 + slope * (x - x0) for x, y in ordered if x0 <= x <= x1)
