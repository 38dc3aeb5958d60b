"""The tables of a run folder: CSV files whose rows are read back as they were written.

A reader finds whole rows at any time, and at most one at the end that is cut off, because the rank
was killed, the disk was full or it is being written. That one has no end of line, and is not read.
An empty cell is a value that is unknown.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from perseus_planner.base.errors import RunError, ScheduleError, shown
from perseus_planner.base.files import reading
from perseus_planner.gpu.protocol import THROTTLE_REASONS
from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.runs.totals import Total
from perseus_planner.schedules import Computation

_MAX_READ_BYTES = 64 * 2**20  #: far above the size of a file that a run writes
_THROTTLED = "throttled_s_"  #: before a throttle reason, as the name of a column

Row = TypeVar("Row")


class _Cell(NamedTuple):
    """The values of a column: `read` returns None for a wrong text, and `expected` describes a
    right one.
    """

    read: Callable[[str], Any]
    expected: str
    is_optional: bool = False

    def or_empty(self) -> _Cell:
        return self._replace(is_optional=True)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _computation(text: str) -> Computation | None:
    try:
        return Computation.parse(text)
    except ScheduleError:
        return None


def _origin(text: str) -> str | None:
    return text if text in ("measured", "simulated") else None


_WHOLE, _NUMBER = _Cell(_whole, "a whole number of 0 or more"), _Cell(_finite, "a finite number")
_TEXT, _ORIGIN = _Cell(str, "a text"), _Cell(_origin, "measured or simulated")
_COMPUTATION = _Cell(_computation, "a computation such as 3F17")


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The format of one kind of CSV file."""

    columns: Mapping[str, _Cell]  #: Name -> its cells
    values_of: Callable[[Row], Sequence[object]]  #: Returns the value of each column of a row
    row_of: Callable[[dict[str, Any]], Row]  #: Returns the row with these values by column

    @property
    def header(self) -> str:
        """The first line of a file."""
        return ",".join(self.columns) + "\n"

    def line(self, row: Row) -> str:
        """Return the line that `read` reads as an equal row."""
        text = io.StringIO()
        values = ["" if value is None else value for value in self.values_of(row)]
        csv.writer(text, lineterminator="\n").writerow(values)
        return text.getvalue()

    def read(self, path: Path) -> list[Row]:
        """Return the whole rows of a file, which may be written meanwhile.

        Raises:
            RunError: If the file cannot be read, or has a whole line that the planner did not
                write.
        """
        header, *lines = [*_whole_lines(path)] or [self.header.rstrip("\n")]
        if header != self.header.rstrip("\n"):
            raise RunError(
                f"{path}, line 1: has other columns; read it with the planner that the training "
                "ran with"
            )
        return [self._row(f"{path}, line {number}", line) for number, line in enumerate(lines, 2)]

    def _row(self, where: str, line: str) -> Row:
        try:
            (texts,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError):
            texts = []
        if len(texts) != len(self.columns):
            raise RunError(
                f"{where}: is not a row of {len(self.columns)} cells; the file was changed: record "
                "it again"
            )
        values = {}
        for (name, cell), text in zip(self.columns.items(), texts, strict=True):
            values[name] = cell.read(text) if text else None
            if values[name] is None and (text or not cell.is_optional):
                raise RunError(
                    f"{where}, column {name!r}: {shown(text)} is not {cell.expected}; the file was "
                    "changed"
                )
        return self.row_of(values)


def _whole_lines(path: Path) -> list[str]:
    """Return the lines that have an end, without it."""
    with reading(path, RunError), path.open("rb") as file:
        data = file.read(_MAX_READ_BYTES + 1)
    if len(data) > _MAX_READ_BYTES:
        raise RunError(
            f"{path}: is larger than {_MAX_READ_BYTES} bytes, so not what a run writes; name "
            "another folder"
        )
    return [line.decode(errors="replace") for line in data.split(b"\n")[:-1]]


def ends_whole(path: Path) -> bool:
    """Whether the last row of a file has its end."""
    with reading(path, RunError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        return file.read() in (b"", b"\n")


_ITERATION_COLUMNS = {
    "iteration": _WHOLE,
    "version": _WHOLE.or_empty(),
    "pipeline": _WHOLE,
    "pipeline_rank": _WHOLE,
    "begin_s": _NUMBER,
    "end_s": _NUMBER,
    "busy_s": _NUMBER,
    "planned_busy_s": _NUMBER.or_empty(),
    "energy_j": _NUMBER.or_empty(),
    "baseline_j": _NUMBER.or_empty(),
    "clock": _NUMBER.or_empty(),
    "achieved_mhz": _NUMBER.or_empty(),
    "temperature_c": _NUMBER.or_empty(),
    "changes_asked": _WHOLE,
    "changes_set": _WHOLE,
    "changes_late": _WHOLE,
    "changes_overtaken": _WHOLE,
    "off_clock_s": _NUMBER,
    "latency_p50_s": _NUMBER.or_empty(),
    "latency_p99_s": _NUMBER.or_empty(),
    "origin": _ORIGIN.or_empty(),
    "deviation": _TEXT.or_empty(),
}
_REASON_COLUMNS = {f"{_THROTTLED}{reason}": _NUMBER.or_empty() for reason in THROTTLE_REASONS}


def _iteration_values(row: IterationRecord) -> list[object]:
    values = [getattr(row, name) for name in _ITERATION_COLUMNS]
    return [*values, *(row.throttled_s.get(reason) for reason in THROTTLE_REASONS)]


def _iteration_of(values: dict[str, Any]) -> IterationRecord:
    throttled_s = {name.removeprefix(_THROTTLED): values.pop(name) for name in _REASON_COLUMNS}
    known_s = {reason: seconds for reason, seconds in throttled_s.items() if seconds is not None}
    return IterationRecord(**values, throttled_s=known_s)


_COMPUTATION_COLUMNS = {
    "iteration": _WHOLE,
    "computation": _COMPUTATION,
    "begin_s": _NUMBER,
    "end_s": _NUMBER,
    "clock": _WHOLE.or_empty(),
    "asked_s": _NUMBER.or_empty(),
    "set_begin_s": _NUMBER.or_empty(),
    "set_end_s": _NUMBER.or_empty(),
    "achieved_mhz": _WHOLE.or_empty(),
}

ITERATIONS = Table({**_ITERATION_COLUMNS, **_REASON_COLUMNS}, _iteration_values, _iteration_of)
"""The format of `IterationRecord`s."""

COMPUTATIONS = Table(
    _COMPUTATION_COLUMNS,
    lambda row: [getattr(row, name) for name in _COMPUTATION_COLUMNS],
    lambda values: ComputationRecord(**values),
)
"""The format of `ComputationRecord`s."""

_TOTAL_CELLS = {"version": _WHOLE.or_empty(), "origin": _ORIGIN.or_empty()}
_COUNTS = ("attempt", "iterations", "metered_iterations", "last_iteration")
_TOTAL_COLUMNS = {
    each.name: _TOTAL_CELLS.get(each.name, _WHOLE if each.name in _COUNTS else _NUMBER)
    for each in fields(Total)
}

TOTALS = Table(
    _TOTAL_COLUMNS,
    lambda row: [getattr(row, name) for name in _TOTAL_COLUMNS],
    lambda values: Total(**values),
)
"""The format of `Total`s."""
