"""Quantities with a unit are read exactly, or refused with an example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from perseus_planner.base.errors import InfeasibleDeadline, UsageError
from perseus_planner.base.units import (
    BLOCKING_POWER,
    CARBON,
    DURATION,
    LAG,
    MINUTES_LIMIT,
    POWER_BUDGET,
    SLOWDOWN,
    TRANSFER,
    Quantity,
)


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (DURATION, "2.95s", 2.95),
        (DURATION, "2950ms", 2.95),
        (DURATION, "2.95", 2.95),
        (DURATION, " 2.95 s ", 2.95),
        (DURATION, "0.1ms", 0.0001),
        (DURATION, "1.5min", 90.0),
        (DURATION, "1e-3s", 0.001),
        *((DURATION, "5m", 300.0), (DURATION, "0.1h", 360.0), (DURATION, "16us", 16e-6)),
        *((POWER_BUDGET, "4kw", 4000.0), (POWER_BUDGET, "1MW", 1e6), (MINUTES_LIMIT, "30", 30.0)),
        *((MINUTES_LIMIT, "1h", 60.0), (MINUTES_LIMIT, "90s", 1.5)),
        (SLOWDOWN, "1.05", 1.05),
        (SLOWDOWN, "1.05x", 1.05),
        (POWER_BUDGET, "5kW", 5000.0),
        (POWER_BUDGET, "5.2 kW", 5200.0),
        (POWER_BUDGET, "5000W", 5000.0),
        (POWER_BUDGET, "5000", 5000.0),
        (BLOCKING_POWER, "0", 0.0),
        (LAG, "10", 10.0),
        (LAG, "0s", 0.0),
        (LAG, "30m", 1800.0),
        (LAG, "1.5h", 5400.0),
        (LAG, "2 d", 172800.0),
    ],
)
def test_a_quantity_is_its_number_in_si_units(quantity: Quantity, text: str, value: float):
    assert quantity.read(text, "--option") == value


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_number_without_a_unit_is_taken_to_the_last_digit(value: float):
    assert (
        DURATION.read(repr(value), "--option") == DURATION.read(f"{value!r} s", "--option") == value
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "s",
            "3.2 parsecs",
            "3.2S",
            "3,2s",
            "1y",
            "-1s",
            "0s",
            "0x10",
            "3s\n4s",
            "2s 950ms",
            "1_0s",
        ),
        *(
            "nan",
            "inf",
            "1e999",
            "1e308min",
            "1e-323ms",
        ),  # the last two only once the unit is applied
    ],
)
def test_an_invalid_duration_is_refused_with_an_example(text: str):
    assert refusal(UsageError, DURATION.read, text, "--deadline") == (
        f"--deadline: {text!r} is not a duration: write seconds above 0, or "
        "a number with us, ms, s, m, h or d, such as 2.95s"
    )


@pytest.mark.parametrize(
    ("quantity", "text", "message"),
    [
        (
            SLOWDOWN,
            "5%",
            "a slowdown: write a number above 0, where 1 is as fast as all clocks at maximum, such "
            "as 1.05",
        ),
        (
            POWER_BUDGET,
            "0W",
            "a power: write watts above 0, or a number with W, kW or MW, such as 5kW",
        ),
        (
            POWER_BUDGET,
            "5mW",
            "a power: write watts above 0, or a number with W, kW or MW, such as 5kW",
        ),
        *(
            (
                BLOCKING_POWER,
                text,
                "the power of one GPU that waits: write watts of 0 to 5000, such as 83.64",
            )
            for text in ("-1", "77kW", "77000")
        ),
        *(
            (
                CARBON,
                text,
                "what a kWh emits: give g or kg of CO2e with the unit, such as 400g",
            )
            for text in ("0.4", "400", "-1g", "4t")
        ),
    ],
)
def test_other_refusals_have_their_own_example(quantity: Quantity, text: str, message: str):
    assert (
        refusal(UsageError, quantity.read, text, "--option")
        == f"--option: {text!r} is not {message}"
    )


def test_a_long_transfer_without_a_unit_is_asked_about():
    message = "--transfer: '5' has no unit; is it 5ms or 5s?"
    assert refusal(UsageError, TRANSFER.read, "5", "--transfer") == message
    assert TRANSFER.read("5s", "--transfer") == 5.0
    assert TRANSFER.read("0.002", "--transfer") == 0.002


@pytest.mark.parametrize(("text", "grams"), [("400g", 400.0), ("0.4 kg", 400.0), ("0g", 0.0)])
def test_carbon_is_read_in_grams(text: str, grams: float):
    assert CARBON.read(text, "--carbon") == pytest.approx(grams)


@given(st.floats(min_value=1e-9, max_value=1e5))
def test_the_least_time_that_a_refusal_names_is_feasible(least_s: float):
    text = str(InfeasibleDeadline(least_s / 2, least_s))
    named = text.partition("the fastest takes ")[2].partition(";")[0]
    assert named.endswith("ns") or DURATION.read(named, "--deadline") >= least_s
