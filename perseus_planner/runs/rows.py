"""Rows of a run as lines of CSV, and back: a line is whole or is not read.

A line that was cut off, as when the rank that wrote it was killed or the disk was full, has no end of line; that tells
it from a whole one. What is not known is an empty cell.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from perseus_planner.errors import RunError, ScheduleError, shown
from perseus_planner.files import reading
from perseus_planner.gpu.protocol import THROTTLE_REASONS
from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_MAX_BYTES = 64 * 2**20  #: of a file; what a run writes is far below
_THROTTLED = "throttled_s_"  #: before a reason, as the name of a column

Row = TypeVar("Row")


class _Cell(NamedTuple):
    """What a cell holds: `read` gives None for what is none, `wanted` says what it should be."""

    read: Callable[[str], Any]
    wanted: str
    optional: bool = False

    def or_empty(self) -> _Cell:
        return self._replace(optional=True)


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
    """One kind of file.

    Attributes:
        columns: name -> what its cells hold.
        values_of: a row -> the value of each column.
        row_of: the value of each column, by name -> a row.
    """

    columns: Mapping[str, _Cell]
    values_of: Callable[[Row], Sequence[object]]
    row_of: Callable[[dict[str, Any]], Row]

    @property
    def header(self) -> str:
        """The first line of a file."""
        return ",".join(self.columns) + "\n"

    def line(self, row: Row) -> str:
        """`row` as a line that `read` reads as an equal row."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(["" if each is None else each for each in self.values_of(row)])
        return text.getvalue()

    def read(self, path: Path) -> list[Row]:
        """The whole rows of the file at `path`, which may be written meanwhile.

        Raises:
            RunError: it cannot be read, or a whole line of it is not one that was written.
        """
        header, *lines = [*_lines(path)] or [self.header.rstrip("\n")]
        if header != self.header.rstrip("\n"):
            raise RunError(f"{path}, line 1: has other columns; read it with the planner that the training ran with")
        return [self._row(f"{path}, line {number}", line) for number, line in enumerate(lines, 2)]

    def _row(self, place: str, line: str) -> Row:
        try:
            (texts,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError):
            texts = []
        if len(texts) != len(self.columns):
            raise RunError(
                f"{place}: is not a row of {len(self.columns)} cells; the file was changed, so write it anew"
            )
        values = {}
        for (name, cell), text in zip(self.columns.items(), texts, strict=True):
            values[name] = cell.read(text) if text else None
            if values[name] is None and (text or not cell.optional):
                raise RunError(f"{place}, column {name!r}: {shown(text)} is not {cell.wanted}; the file was changed")
        return self.row_of(values)


def _lines(path: Path) -> list[str]:
    """The whole lines, without their ends."""
    with reading(path, RunError), path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise RunError(f"{path}: is larger than {_MAX_BYTES} bytes, so not what a run writes; name another folder")
    return [line.decode(errors="replace") for line in data.split(b"\n")[:-1]]


_ITERATION = {
    "iteration": _WHOLE,
    "version": _WHOLE.or_empty(),
    "pipeline": _WHOLE,
    "pipeline_rank": _WHOLE,
    "begin_s": _NUMBER,
    "end_s": _NUMBER,
    "busy_s": _NUMBER,
    "planned_busy_s": _NUMBER.or_empty(),
    "energy_j": _NUMBER.or_empty(),
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
_REASONS = {f"{_THROTTLED}{reason}": _NUMBER.or_empty() for reason in THROTTLE_REASONS}


def _iteration_values(row: IterationRecord) -> list[object]:
    return [
        *(getattr(row, name) for name in _ITERATION),
        *(row.throttled_s.get(reason) for reason in THROTTLE_REASONS),
    ]


def _iteration_of(values: dict[str, Any]) -> IterationRecord:
    throttled_s = {name.removeprefix(_THROTTLED): values.pop(name) for name in _REASONS}
    known_s = {reason: seconds for reason, seconds in throttled_s.items() if seconds is not None}
    return IterationRecord(**values, throttled_s=known_s)


ITERATIONS = Table({**_ITERATION, **_REASONS}, _iteration_values, _iteration_of)
"""`IterationRecord`s, a row each."""

_RAN = {
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

COMPUTATIONS = Table(
    _RAN, lambda row: [getattr(row, name) for name in _RAN], lambda values: ComputationRecord(**values)
)
"""`ComputationRecord`s, a row each."""
