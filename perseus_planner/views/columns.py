"""Tables of numbers as plain text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement

from perseus_planner.base.prefixes import si_unit

_DIGITS = 6  #: shown of the largest number in a column
_MOST_ROWS = 24  #: of a table on a page


class Sheet(NamedTuple):
    """A table with what is written around it."""

    title: str  #: one line
    source: str  #: where the numbers come from; may be empty
    columns: Sequence[Sequence[str]]  #: each with its heading first
    notes: str = ""  #: text below the table; may be empty

    def text(self) -> str:
        """Return the sheet as plain text for a terminal."""
        head = f"{self.title}\n{self.source}" if self.source else self.title
        return "\n\n".join(part for part in (head, table(self.columns), self.notes) if part) + "\n"

    def html(self) -> Element:
        """Return the sheet without its title as an HTML element with at most `_MOST_ROWS` rows."""
        whole = Element("div")
        _paragraph(whole, self.source)
        (heading, *rows) = zip(*self.columns, strict=True)
        grid = SubElement(whole, "table")
        names = SubElement(SubElement(grid, "thead"), "tr")
        for name in heading:
            SubElement(names, "th", scope="col").text = name.strip()
        body = SubElement(grid, "tbody")
        for cells in rows[:_MOST_ROWS]:
            row = SubElement(body, "tr")
            for cell in cells:
                SubElement(row, "td").text = cell.strip()
        cut = f"Shown are {_MOST_ROWS} of {len(rows)} rows." if len(rows) > _MOST_ROWS else ""
        _paragraph(whole, cut)
        _paragraph(whole, self.notes)
        return whole


def _paragraph(whole: Element, text: str) -> None:
    if text:
        SubElement(SubElement(whole, "p"), "small").text = text


def number(value: float) -> str:
    """Write `value` with six digits."""
    return f"{value:.{_decimals(abs(value))}f}"


def numbers(values: Sequence[float | None], digits: int = _DIGITS) -> list[str]:
    """Write `values` with as many decimals as give the largest so many digits; None becomes a
    hyphen.
    """
    decimals = _decimals(
        max((abs(value) for value in values if value is not None), default=0.0), digits
    )
    return ["-" if value is None else f"{value:.{decimals}f}" for value in values]


def quantities(
    names: Sequence[str], unit: str, *columns: Sequence[float | None], digits: int = _DIGITS
) -> list[list[str]]:
    """Write columns of one quantity with one SI prefix, which the unit in the headings has, and
    equal digits.

    Args:
        names: the heading of each column, where {} stands for the unit.
        unit: s, J or W.
        columns: the values of each column.
        digits: digits of the largest value.
    """
    known = [abs(value) for values in columns for value in values if value is not None]
    factor, name = si_unit(max(known, default=0.0), unit)
    cells = numbers(
        [None if value is None else value / factor for values in columns for value in values],
        digits,
    )
    ends = list(accumulate(map(len, columns)))
    parts = [cells[end - len(values) : end] for end, values in zip(ends, columns, strict=True)]
    return [column(heading.format(name), part) for heading, part in zip(names, parts, strict=True)]


def ranges(name: str, unit: str, pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Write a column of pairs as "first to last"; its heading and its unit are as for
    `quantities`.
    """
    (heading, *shown), *_ = quantities([name], unit, [value for pair in pairs for value in pair])
    first, last = (list(map(str.strip, cells)) for cells in (shown[::2], shown[1::2]))
    return column(
        heading.strip(), [f"{one} to {other}" for one, other in zip(first, last, strict=True)]
    )


def column(name: str, cells: Sequence[str]) -> list[str]:
    """Return a column of a table, aligned to the right."""
    width = max(map(len, (name, *cells)))
    return [cell.rjust(width) for cell in (name, *cells)]


def table(columns: Sequence[Sequence[str]]) -> str:
    """Lay out the columns side by side."""
    widths = [max(map(len, cells)) for cells in columns]
    rows = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _decimals(largest: float, digits: int = _DIGITS) -> int:
    magnitude = math.floor(math.log10(largest)) if largest > 0 else 0
    return min(max(digits - 1 - magnitude, 0), 12)
