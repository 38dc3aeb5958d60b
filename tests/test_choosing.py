"""Few settings tell what a plan needs: where they go, and when there are enough."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.gpu.simulation.catalogue import CATALOGUE
from perseus_planner.gpu.simulation.model import Work
from perseus_planner.measurement import Evidence, Measurement
from perseus_planner.profiler.choosing import MOST_SETTINGS, descent, next_setting

CLOCKS = tuple(range(1980, 209, -15))


def chosen(settings: tuple[int, ...], rows: dict[str, dict[int, Measurement]], waiting_w: float = 80.0) -> list[int]:
    """The settings that a sweep measures of what `rows` says, in that order."""
    seen: dict[str, dict[int, Measurement]] = {kind: {} for kind in rows}
    order: list[int] = []
    while (setting := next_setting(settings, seen, waiting_w)) is not None:
        assert setting not in order
        order.append(setting)
        for kind, table in rows.items():
            seen[kind][setting] = table[setting]
    return order


def modelled(name: str, work: Work) -> dict[int, Measurement]:
    """What a simulated GPU does, without noise."""
    model = CATALOGUE[name]
    load = model.load(work)
    rows = {}
    for clock in model.clocks_mhz:
        achieved = load.achieved_mhz(clock)
        throttle = ("sw-power-cap",) if achieved < clock else ()
        rows[clock] = Measurement(
            clock, load.time_s(clock), load.energy_j(clock), Evidence(achieved, 0, 0, 3, 60, throttle)
        )
    return rows


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("intensity", [1e4, 700, 100, 10])
def test_few_clocks_hold_the_hull_of_every_simulated_gpu(name: str, intensity: float):
    rows = modelled(name, Work(flops=1e12, bytes=1e12 / intensity))
    settings = CATALOGUE[name].clocks_mhz
    order = chosen(settings, {"F": rows})
    assert len(order) <= MOST_SETTINGS
    assert order[0] == settings[0]
    # Whatever time up to that of the least energy is allowed: mixing two of the chosen costs hardly more than the best.
    least = min(rows.values(), key=lambda row: row.energy_j)
    useful = [row for row in rows.values() if row.time_s <= least.time_s]
    extras = [mixed_j([rows[setting] for setting in order], row.time_s) / row.energy_j - 1 for row in useful]
    assert max(extras) < 0.02
    assert fmean(extras) < 0.005


def mixed_j(rows: list[Measurement], time_s: float) -> float:
    """The least energy of one or two of `rows` mixed so that they take `time_s` at most."""
    best = min((row.energy_j for row in rows if row.time_s <= time_s * (1 + 1e-4)), default=float("inf"))
    for fast in rows:
        for slow in rows:
            if fast.time_s < time_s < slow.time_s:
                share = (time_s - fast.time_s) / (slow.time_s - fast.time_s)
                best = min(best, fast.energy_j + share * (slow.energy_j - fast.energy_j))
    return best


def test_what_a_power_cap_makes_alike_is_passed_over():
    rows = modelled("h100-sxm", Work(flops=1e13, bytes=1e10))
    achieved = rows[1980].evidence.achieved_mhz  # type: ignore[union-attr]
    order = chosen(CLOCKS[: CLOCKS.index(345) + 1], {"F": rows})
    assert achieved < 1800
    assert [setting for setting in order if setting > achieved] == [1980]


def test_the_descent_ends_when_energy_has_risen_twice():
    rows = modelled("a100-sxm", Work(flops=1e13, bytes=1e10))
    order = chosen(CATALOGUE["a100-sxm"].clocks_mhz, {"F": rows})
    least = min(rows.values(), key=lambda row: row.energy_j).clock_mhz
    assert (
        sum(setting < 0.97 * least for setting in descent(CATALOGUE["a100-sxm"].clocks_mhz, 1410) if setting in order)
        <= 3
    )
    assert min(order) > 500


def test_one_kind_that_still_saves_goes_on_to_the_bottom():
    falling = {clock: Measurement(clock, 1 + 1e-3 * (1980 - clock), 100 + clock / 10) for clock in CLOCKS}
    rising = {clock: Measurement(clock, 1980 / clock, 100 * 1980 / clock) for clock in CLOCKS}
    assert min(chosen(CLOCKS, {"F": rising})) > 1700
    assert min(chosen(CLOCKS, {"F": rising, "B": falling})) < 250


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 100)), min_size=1, max_size=100),
    st.sampled_from((0.0, 80.0, 1e4)),
)
def test_whatever_is_measured_few_settings_are_and_the_first_is_the_top(
    rows: list[tuple[float, float]], waiting_w: float
):
    settings = tuple(1980 - 15 * place for place in range(len(rows)))
    table = {setting: Measurement(setting, *row) for setting, row in zip(settings, rows, strict=True)}
    order = chosen(settings, {"F": table}, waiting_w)
    assert order[0] == settings[0]
    assert len(order) <= max(MOST_SETTINGS, len(descent(settings, settings[0])) + 1)


def test_a_dip_that_a_lower_clock_shows_is_looked_for_above_it():
    # As in a measured profile: below 1050 MHz other kernels run, a tenth faster and much cheaper.
    def row(clock: int) -> Measurement:
        kernel = 0.9 if clock <= 1050 else 1.0
        return Measurement(clock, kernel * (0.06 + 120 / clock), kernel * (15 + 24 * (clock / 1740) ** 2))

    settings = tuple(range(1740, 854, -15))
    assert any(
        1020 <= setting <= 1050 for setting in chosen(settings, {"F": {clock: row(clock) for clock in settings}})
    )


def test_a_straight_hull_is_not_refined():
    settings = tuple(range(1410, 854, -15))
    line = {clock: Measurement(clock, 2 - clock / 1410, 100 * clock / 1410) for clock in settings}
    assert sorted(chosen(settings, {"F": line})) == sorted(descent(settings, settings[0]))


def test_power_limits_are_not_taken_for_clocks():
    limits = tuple(range(700, 199, -5))
    capped = Evidence(400.0, 0, 0, 3, 60, ("sw-power-cap",))
    seen = {"F": {700: Measurement(700, 1.0, 600.0, capped)}}
    assert next_setting(limits, seen, 80.0, clocks=False) > 600  # type: ignore[operator]
