"""Tables: CSV files that are read and written by their columns, and tables for people as text, as
HTML and as pandas frames.

A column is a heading, what a row has in it, and its form:

    lay_out(
        plans,
        Column("plan", "version"),
        Column("time {}", "time_s", "s"),
        Column("planned", "planned_time_s", "s"),
    )
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, count, groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from perseus_planner.base.errors import PlannerError, UsageError, how_to_install, shown
from perseus_planner.base.files import reading
from perseus_planner.base.prefixes import si_unit

if TYPE_CHECKING:
    import pandas as pd

    from perseus_planner.base.units import Rule

# No real row comes near this; it keeps a file without line ends from being read whole.
_MAX_LINE_BYTES = 65536
_DIGITS = 6  #: shown of the largest number in a column
_MOST_ROWS = 24  #: of a table on a page
WHOLE = "Int64"  #: pandas' type of whole numbers that may be missing


class Text(NamedTuple):
    """What a text in a file must be, as a `Rule` says it of a number."""

    parse: Callable[[str], Any]  #: Returns the value of a text, None for a wrong one
    wanted: str  #: what the text must be, in words; completes the sentence "5 is not ..."

    def read(self, text: str, where: str, error: type[PlannerError] = UsageError) -> Any:
        """Return what `text` writes; see `Rule.read`."""
        if (value := self.parse(text)) is None:
            raise error(f"{where}: {shown(text)} is not {self.wanted}")
        return value


@dataclass(frozen=True)
class CsvRow:
    """A row of a CSV file."""

    where: str  #: the file and the line, for error texts
    cells: Mapping[str, str]  #: column -> its text, without surrounding blanks
    error: type[PlannerError]  #: what a wrong cell raises
    is_cut: bool = False  #: whether the file ends without the end of this line

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def place(self, column: str) -> str:
        """Return the place of a cell, for error texts."""
        return f"{self.where}, column {shown(column)}"

    def read(self, column: str, rule: Rule | Text) -> Any:
        """Return the value of a cell.

        Raises:
            PlannerError: If it breaks the rule; of the type `error`.
        """
        try:
            return rule.read(self.cells[column], self.place(column), self.error)
        except PlannerError as error:
            # A half-written row may look like a wrong value.
            if self.is_cut:
                raise self.error(f"{error}; {_CUT}") from None
            raise


class CsvFile:
    """A CSV file with a header, read row by row: a wrong header is found before the rest is read.

    Args:
        path: the file.
        error: the type of error to raise.
        empty: what to write into a file without a header; if empty, such a file is read, and its
            header is empty.

    Raises:
        PlannerError: If the file cannot be read or is not CSV in UTF-8, or a row has more or fewer
            cells than the header; of the type `error`.
    """

    def __init__(self, path: Path, error: type[PlannerError], empty: str = "") -> None:
        self._error = error
        self._ending = _Ending()
        self._rows = csv_rows(path, error, self._ending)
        # The first row, read now, so that a wrong header is found before the rest.
        self.where, self.header = next(self._rows, (str(path), []))
        if empty and not self.header:
            raise error(f"{path}: is empty; write {empty}")

    def need(self, columns: Iterable[str], header: str) -> None:
        """Refuse a header without one of the columns; `header` is a right one."""
        if missing := [name for name in columns if name not in self.header]:
            raise self._error(
                f"{self.where}: no column {', '.join(map(repr, missing))} in the header "
                f"{shown(','.join(self.header))}; write {header}, separated by commas"
            )

    def one_of(self, names: Iterable[str], header: str) -> str:
        """Return the column that has one of the names; refuse a header with none or several of
        them, where `header` is a right one.
        """
        columns = [name for name in self.header if name in names]
        if len(columns) > 1:
            listed = " and ".join(map(repr, columns))
            raise self._error(f"{self.where}: has the columns {listed}; keep one of them")
        # None of them is refused like any other column that is missing.
        self.need(columns or [" or ".join(names)], header)
        return columns[0]

    def refuse_twice(self, columns: Iterable[str]) -> None:
        """Refuse a header that has one of the columns twice."""
        for name in columns:
            if self.header.count(name) > 1:
                raise self._error(
                    f"{self.where}: column {shown(name)} is there twice; keep one of them"
                )

    def __iter__(self) -> Iterator[CsvRow]:
        for where, cells in self._rows:
            # A comma as decimal mark makes more cells, and a cut file fewer.
            if len(cells) != len(self.header):
                remedy = "give each column one cell, with a point as decimal mark"
                raise self._error(
                    f"{where}: has {len(cells)} cells where the header has {len(self.header)}; "
                    f"{_CUT if self._ending.is_missing else remedy}"
                )
            columns = dict(zip(self.header, cells, strict=True))
            yield CsvRow(where, columns, self._error, self._ending.is_missing)


_CUT = "the file ends inside this row, or lacks its last end of line; write it again"


@dataclass
class _Ending:
    """How the lines that were read of a file end."""

    is_missing: bool = False  #: whether the last of them has no end of line


def csv_rows(
    path: Path, error: type[PlannerError], ending: _Ending | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each row of a CSV file, for error texts, and its cells without surrounding
    blanks.

    Blank lines and lines that begin with `#` are skipped. The file is read line by line, so that a
    wrong header is found before the rest is read.

    Raises:
        PlannerError: If the file cannot be read or is not CSV in UTF-8; of the type `error`.
    """
    with reading(path, error), path.open("rb") as file:
        # Of binary lines: a wrong encoding then has a line to name.
        reader = csv.reader(_lines(path, file, error, ending or _Ending()), strict=True)
        try:
            for cells in filter(None, reader):
                yield f"{path}, line {reader.line_num}", [cell.strip() for cell in cells]
        except csv.Error as reason:
            wrong = f"{reason}; correct its quotes"
            # A carriage return alone is taken for a line end by some programs and not by this one.
            if "new-line" in wrong:
                wrong = "has a carriage return in the middle; end rows with a line feed"
            raise error(f"{path}, line {reader.line_num}: {wrong}") from reason


def _lines(path: Path, file: BinaryIO, error: type[PlannerError], ending: _Ending) -> Iterator[str]:
    for number in count(1):
        # One byte more than allowed tells that there is more.
        line = file.readline(_MAX_LINE_BYTES + 1)
        if not line:
            return
        ending.is_missing = not line.endswith((b"\n", b"\r"))
        if b"\0" in line:
            raise error(
                f"{path}, line {number}: has a NUL byte, so the file is damaged or not text; write "
                "it again"
            )
        if len(line) > _MAX_LINE_BYTES:
            raise error(
                f"{path}, line {number}: is longer than {_MAX_LINE_BYTES} bytes; write one row a "
                "line"
            )
        if line.startswith(b"#"):
            yield "\n"  # an empty line, so that line numbers stay
            continue
        try:
            # Spreadsheets put a byte order mark before the first line.
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as reason:
            raise error(
                f"{path}, line {number}: is not UTF-8 text; save the file as UTF-8"
            ) from reason


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as lines of CSV: None is an empty cell, and reading a float gives the same
    one.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class Column(NamedTuple):
    """A column of a table for people."""

    heading: str  #: its heading, where {} stands for the unit of a quantity
    #: name of an attribute of a row, or of a cell if rows are mappings; or a function of a row
    value: str | Callable[[Any], Any]
    #: how values are written: a unit, such as "s", "J" or "W4" for four digits, for a quantity,
    #: with one SI prefix for all columns side by side that have that form; "#" for six digits; "%"
    #: for a share in percent; a format such as ".4f"; "<" for texts to the left, which get the
    #: blanks before the heading
    form: str = ""


def lay_out(rows: Iterable[Any], *columns: Column, digits: int = _DIGITS) -> list[list[str]]:
    """Return the cells of each column, the heading first; an unknown value is a hyphen. Quantities
    and shares have so many digits, if their form does not say how many.
    """
    rows = list(rows)
    cells = list[list[str]]()
    # Columns side by side with the same form share a unit, so they are compared at a glance.
    for form, group in groupby(columns, key=lambda described: described.form):
        beside = list(group)
        values = [[_value(row, column.value) for row in rows] for column in beside]
        # A quantity is told by its unit: a letter of SI, and perhaps its digits.
        if unit := re.fullmatch(r"([A-Zs][A-Za-z/]*)(\d?)", form):
            names = [column.heading for column in beside]
            cells += quantities(names, unit[1], *values, digits=int(unit[2] or digits))
        else:
            cells += [
                _cells(column.heading, column.form, of_column, digits)
                for column, of_column in zip(beside, values, strict=True)
            ]
    return cells


def _value(row: Any, of: str | Callable[[Any], Any]) -> Any:
    if callable(of):
        return of(row)
    return row[of] if isinstance(row, Mapping) else attrgetter(of)(row)


def _cells(heading: str, form: str, values: Sequence[Any], digits: int) -> list[str]:
    if form == "<":
        # Texts stand below their heading, which may be indented.
        indent = " " * (len(heading) - len(heading.lstrip()))
        return [heading, *(f"{indent}{'-' if value is None else value}" for value in values)]
    if form == "#":
        return column(heading, numbers(values, digits))
    if form == "%":
        places = 2 if digits > 3 else 1  # and never -0.00
        values = [None if value is None else round(100 * value, places) + 0.0 for value in values]
        form = f".{places}f"
    return column(heading, ["-" if value is None else format(value, form) for value in values])


class Sheet(NamedTuple):
    """A table with what is written around it."""

    title: str  #: one line
    source: str  #: where the numbers come from; may be empty
    columns: Sequence[Sequence[str]]  #: each with its heading first
    notes: Sequence[str] = ()  #: lines below the table

    def text(self) -> str:
        """Return the sheet as plain text for a terminal."""
        head = f"{self.title}\n{self.source}" if self.source else self.title
        return (
            "\n\n".join(part for part in (head, table(self.columns), "\n".join(self.notes)) if part)
            + "\n"
        )

    def html(self) -> str:
        """Return the sheet without its title as HTML with at most `_MOST_ROWS` rows."""
        rows = len(self.columns[0]) - 1
        # A page stays readable with the first rows; files have the rest.
        cut = f"Shown are {_MOST_ROWS} of {rows} rows." if rows > _MOST_ROWS else ""
        shown = [cells[: _MOST_ROWS + 1] for cells in self.columns]
        before, *after = [
            f"<p><small>{escape(text)}</small></p>" if text else ""
            for text in (self.source, cut, "\n".join(self.notes))
        ]
        return f"<div>{before}{html_table(shown)}{''.join(after)}</div>"


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
    # The largest of all decides, so that all columns have one prefix.
    magnitudes = [abs(value) for values in columns for value in values if value is not None]
    factor, name = si_unit(max(magnitudes, default=0.0), unit)
    # Written together for equal digits, and then cut into columns again.
    cells = numbers(
        [None if value is None else value / factor for values in columns for value in values],
        digits,
    )
    ends = list(accumulate(map(len, columns)))
    parts = [cells[end - len(values) : end] for end, values in zip(ends, columns, strict=True)]
    return [column(heading.format(name), part) for heading, part in zip(names, parts, strict=True)]


def ranges(name: str, unit: str, pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Write a column of pairs of numbers of 0 or more as "first-last", with four digits; its
    heading and its unit are as for `quantities`.
    """
    values = [value for pair in pairs for value in pair]
    # All numbers in one column get one unit; then every second one is a first.
    (heading, *cells), *_ = quantities([name], unit, values, digits=4)
    first, last = (list(map(str.strip, half)) for half in (cells[::2], cells[1::2]))
    return column(heading.strip(), list(map("-".join, zip(first, last, strict=True))))


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


def html_table(columns: Sequence[Sequence[str]]) -> str:
    """Return the columns as an HTML table, of which the first column names the rows."""
    # The columns turned into rows; the first cell of the first row stands above the names.
    (corner, *heading), *rows = zip(*columns, strict=True)
    first = _cell("th", corner, scope="col") if corner.strip() else "<td></td>"
    names = first + "".join(_cell("th", name, scope="col") for name in heading)
    # On a narrow page each cell stands alone, so it carries its heading.
    lines = (
        _cell("th", name, corner, scope="row")
        + "".join(
            _cell("td", *cell_and_heading) for cell_and_heading in zip(cells, heading, strict=True)
        )
        for name, *cells in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<table class="sheet stacked"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'
    )


def _cell(tag: str, text: str, label: str = "", scope: str = "") -> str:
    """Return a cell; a narrow page shows its `label` instead of the heading."""
    named = f' data-label="{escape(label.strip())}"' if label.strip() else ""
    return f"<{tag}{named}{scope and f' scope={scope}'}>{escape(text.strip())}</{tag}>"


def _decimals(largest: float, digits: int = _DIGITS) -> int:
    # The power of ten of the first digit.
    magnitude = math.floor(math.log10(largest)) if largest > 0 else 0
    # Never below 0: digits before the point are written anyway. Twelve are more than any number
    # here has.
    return min(max(digits - 1 - magnitude, 0), 12)


def make_frame(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    types: Mapping[str, Any] | None = None,
    **attrs: Any,
) -> pd.DataFrame:
    """Return a frame, in which values that are not known are missing.

    Args:
        rows: its rows, at least one; or its columns.
        types: the types of columns in which values may be missing.
        attrs: its `attrs`.

    Raises:
        UsageError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        remedy = how_to_install("frames")
        raise UsageError(f"to_frame() needs pandas, which is not installed; {remedy}") from error
    # Named, so that a frame without a value in some column has it all the same.
    columns = rows if isinstance(rows, Mapping) else rows[0]
    frame = pd.DataFrame(rows, columns=list(columns)).astype(types or {})
    frame.attrs = attrs
    return frame
