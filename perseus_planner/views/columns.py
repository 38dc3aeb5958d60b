"""Columns of numbers as plain text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGITS = 6  #: shown of the largest number in a column


def number(value: float) -> str:
    """`value` with six digits."""
    return f"{value:.{_decimals(abs(value))}f}"


def numbers(values: Sequence[float | None]) -> list[str]:
    """`values` with as many decimals each, so that the largest has six digits; a hyphen for None."""
    decimals = _decimals(max((abs(value) for value in values if value is not None), default=0.0))
    return ["-" if value is None else f"{value:.{decimals}f}" for value in values]


def ranges(pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Each pair as "first to last"."""
    shown = numbers([value for pair in pairs for value in pair])
    return [f"{first} to {last}" for first, last in zip(shown[::2], shown[1::2], strict=True)]


def column(name: str, cells: Sequence[str]) -> list[str]:
    """A column of a table, flush right."""
    width = max(map(len, (name, *cells)))
    return [cell.rjust(width) for cell in (name, *cells)]


def table(columns: Sequence[Sequence[str]]) -> str:
    """The columns side by side."""
    widths = [max(map(len, cells)) for cells in columns]
    rows = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _decimals(largest: float) -> int:
    magnitude = math.floor(math.log10(largest)) if largest > 0 else 0
    return min(max(_DIGITS - 1 - magnitude, 0), 12)
