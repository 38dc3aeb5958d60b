"""The choice of settings: where few of them are enough for good plans, and when to stop."""

from __future__ import annotations

from statistics import NormalDist, fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.gpu.simulated.model import CATALOG, OpCost
from perseus_planner.profiler.choosing import (
    _RISES,
    MAX_SETTINGS,
    _expected_improvement,
    descent,
    next_setting,
)
from perseus_planner.profiles.measurement import Evidence, Measurement

CLOCKS = tuple(range(1980, 209, -15))


def chosen(
    settings: tuple[int, ...],
    rows: dict[str, dict[int, Measurement]],
    waiting_w: float = 80.0,
    seed: int = 0,
) -> list[int]:
    """Return the settings that a sweep measures, in order, if measuring gives `rows`."""
    seen: dict[str, dict[int, Measurement]] = {kind: {} for kind in rows}
    order: list[int] = []
    while (setting := next_setting(settings, seen, waiting_w, seed=seed)) is not None:
        assert setting not in order
        order.append(setting)
        for kind, table in rows.items():
            seen[kind][setting] = table[setting]
    return order


def modelled(name: str, work: OpCost) -> dict[int, Measurement]:
    """Return the rows of a simulated GPU without noise."""
    model = CATALOG[name]
    load = model.load(work)
    rows = {}
    for clock in model.clocks_mhz:
        achieved = load.achieved_mhz(clock)
        throttle = ("sw-power-cap",) if achieved < clock else ()
        rows[clock] = Measurement(
            clock,
            load.time_s(clock),
            load.energy_j(clock),
            Evidence(achieved, 0, 0, 3, 60, throttle),
        )
    return rows


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("intensity", [1e4, 700, 100, 10])
def test_few_clocks_hold_the_hull_of_every_simulated_gpu(name: str, intensity: float):
    rows = modelled(name, OpCost(flops=1e12, bytes=1e12 / intensity))
    settings = CATALOG[name].clocks_mhz
    order = chosen(settings, {"F": rows})
    assert len(order) <= MAX_SETTINGS
    assert order[0] == settings[0]
    # At every price of a second, the chosen clocks cost little more than the best one.
    losses = lost(rows, order)
    assert max(losses) < 0.04
    assert fmean(losses) < 0.008


def test_chosen_clocks_lose_less_than_as_many_evenly_spaced():
    chosen_losses, even_losses = [], []
    for name, model in CATALOG.items():
        for intensity in (1e4, 700, 100):
            rows, settings = (
                modelled(name, OpCost(flops=1e12, bytes=1e12 / intensity)),
                model.clocks_mhz,
            )
            last = len(settings) - 1
            even = [
                settings[round(index * last / (MAX_SETTINGS - 1))] for index in range(MAX_SETTINGS)
            ]
            chosen_losses.append(fmean(lost(rows, chosen(settings, {"F": rows}))))
            even_losses.append(fmean(lost(rows, even)))
    assert fmean(chosen_losses) < 0.7 * fmean(even_losses)


def lost(rows: dict[int, Measurement], order: list[int], waiting_w: float = 80.0) -> list[float]:
    """Return, for each price of time, the relative cost of the best of `order` above the best of
    `rows`.
    """
    top = rows[max(rows)]
    losses = []
    for step in range(30):
        second_w = 3 * step / 29 * top.energy_j / top.time_s - waiting_w

        def cost_j(setting: int, second_w: float = second_w) -> float:
            return rows[setting].energy_j + second_w * rows[setting].time_s

        best = min(rows, key=cost_j)
        losses.append((min(map(cost_j, order)) - cost_j(best)) / rows[best].energy_j)
    return losses


def test_settings_above_a_power_cap_are_skipped():
    rows = modelled("h100-sxm", OpCost(flops=1e13, bytes=1e10))
    achieved = rows[1980].evidence.achieved_mhz  # type: ignore[union-attr]
    order = chosen(CLOCKS[: CLOCKS.index(345) + 1], {"F": rows})
    assert achieved < 1800
    assert [setting for setting in order if setting > achieved] == [1980]


def test_the_descent_ends_when_effective_energy_has_risen_twice():
    # Half the clock costs twice the energy: slower is worse, and nothing is measured below the
    # higher of two that are so.
    rising = {clock: Measurement(clock, 1980 / clock, 200 * 1980 / clock) for clock in CLOCKS}
    orders = [chosen(CLOCKS, {"F": rising}, seed=seed) for seed in range(20)]
    for order in orders:
        coarse = [setting for setting in order if setting in descent(CLOCKS, CLOCKS[0])]
        for done in range(_RISES + 1, len(coarse)):
            assert coarse[done] > sorted(coarse[:done])[_RISES - 1]
    assert len({len(order) for order in orders if order}) == 1
    assert len({order[1] for order in orders}) > 2, "the order is random"


def test_the_descent_goes_on_while_a_waiting_gpu_would_draw_more():
    # The energy rises, but by less than what the GPU would draw if it waited instead.
    rising = {clock: Measurement(clock, 1980 / clock, 50 + 60 * 1980 / clock) for clock in CLOCKS}
    assert min(chosen(CLOCKS, {"F": rising}, 80.0)) == CLOCKS[-1]
    assert min(chosen(CLOCKS, {"F": rising}, 10.0)) > CLOCKS[-1]


def test_after_the_descent_the_lowest_settings_come_first_where_waiting_draws_much():
    rows = {
        clock: Measurement(clock, 1 + 1e-3 * (1980 - clock), 300 - (1980 - clock) / 10)
        for clock in CLOCKS
    }
    seen = {setting: rows[setting] for setting in descent(CLOCKS, CLOCKS[0])}
    lowest, second = sorted(seen)[:2]
    found = next_setting(CLOCKS, {"F": seen}, 180.0)
    assert found is not None
    assert lowest < found < second


def test_one_kind_that_still_saves_goes_on_to_the_bottom():
    falling = {
        clock: Measurement(clock, 1 + 1e-3 * (1980 - clock), 100 + clock / 10) for clock in CLOCKS
    }
    rising = {clock: Measurement(clock, 1980 / clock, 200 * 1980 / clock) for clock in CLOCKS}
    assert min(chosen(CLOCKS, {"F": rising, "B": falling})) == CLOCKS[-1]


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 100)), min_size=1, max_size=100),
    st.sampled_from((0.0, 80.0, 1e4)),
)
def test_few_settings_are_measured_beginning_with_the_top_one(
    rows: list[tuple[float, float]], waiting_w: float
):
    settings = tuple(1980 - 15 * index for index in range(len(rows)))
    table = {
        setting: Measurement(setting, *row) for setting, row in zip(settings, rows, strict=True)
    }
    order = chosen(settings, {"F": table}, waiting_w)
    assert order[0] == settings[0]
    assert len(order) == min(MAX_SETTINGS, len(settings)) or min(order) > settings[-1]


def test_settings_above_a_dip_are_measured():
    # As in a measured profile: below 1050 MHz other kernels run, which are 10 % faster and need
    # much less energy.
    def row(clock: int) -> Measurement:
        kernel = 0.9 if clock <= 1050 else 1.0
        return Measurement(
            clock, kernel * (0.06 + 120 / clock), kernel * (15 + 24 * (clock / 1740) ** 2)
        )

    settings = tuple(range(1740, 854, -15))
    assert any(
        1020 <= setting <= 1050
        for setting in chosen(settings, {"F": {clock: row(clock) for clock in settings}})
    )


def test_the_choice_depends_on_the_rows_and_not_on_their_order():
    rows = modelled("a100-sxm", OpCost(flops=1e13, bytes=1e10))
    settings = CATALOG["a100-sxm"].clocks_mhz
    order = chosen(settings, {"F": rows})
    for count in range(1, len(order)):
        seen = {setting: rows[setting] for setting in sorted(order[:count])}
        assert next_setting(settings, {"F": seen}, 80.0) == order[count]


@given(st.floats(-10, 10), st.floats(0.01, 10))
def test_the_expected_improvement_is_the_mean_of_what_is_above_0(mean: float, spread: float):
    normal = NormalDist(mean, spread)
    steps = [normal.inv_cdf((index + 0.5) / 2000) for index in range(2000)]
    assert _expected_improvement(mean, spread) == pytest.approx(
        fmean(max(0.0, each) for each in steps), abs=1e-3 * spread
    )
    assert _expected_improvement(mean, 0.0) == max(0.0, mean)


def test_power_limits_are_not_taken_for_clocks():
    limits = tuple(range(700, 199, -5))
    capped = Evidence(400.0, 0, 0, 3, 60, ("sw-power-cap",))
    seen = {"F": {700: Measurement(700, 1.0, 600.0, capped)}}
    # The steps down are fifths of all settings below the top, not below the 400 MHz that were
    # reached.
    found = {next_setting(limits, seen, 80.0, clocks=False, seed=seed) for seed in range(30)}
    assert found == {600, 500, 400, 300, 200}
