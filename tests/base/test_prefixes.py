"""Quantities are written with the prefix that keeps them short."""

from __future__ import annotations

import pytest

from perseus_planner.base.prefixes import si


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *(
            (16.04e-6, "s", "16.04 us"),
            (0.0042, "J", "4.2 mJ"),
            (35_600.0, "W", "35.6 kW"),
            (0.76, "s", "0.76 s"),
        ),
        *(
            (9999.0, "J", "9999 J"),
            (123_456.0, "s", "123456 s"),
            (0.0, "W", "0 W"),
            (-12_345.0, "J", "-12.35 kJ"),
        ),
        *((2.5e13, "J", "25 TJ"), (3e-12, "s", "0.003 ns")),
    ],
)
def test_a_quantity_is_written_with_a_prefix(value: float, unit: str, text: str):
    assert si(value, unit, 6 if value == 123_456.0 else 4) == text
