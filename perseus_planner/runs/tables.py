"""The tables of a run folder, and the totals of a run: sums over all iterations that there ever
were, also over those whose rows are gone.

A reader of a table finds whole rows at any time, and at most one at the end that is cut off,
because the rank was killed, the disk was full or it is being written. That one has no end of line,
and is not read. An empty cell is a value that is unknown.

A rank adds the iterations of a file of rows to its totals before the file is replaced or removed.
Its totals say which iteration was the last to be added, so a row that is still there counts once,
wherever the rank was killed.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from perseus_planner.base.errors import RunError, ScheduleError
from perseus_planner.base.fields import rules
from perseus_planner.base.files import reading
from perseus_planner.base.tables import Text, csv_text
from perseus_planner.base.units import Rule
from perseus_planner.gpu.protocol import THROTTLE_REASONS
from perseus_planner.runs.account import Entry, fold
from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.schedules import Computation

_MAX_READ_BYTES = 64 * 2**20  #: far above the size of a file that a run writes
_THROTTLED = "throttled_s_"  #: before a throttle reason, as the name of a column
_CHANGED = "the file was changed"

Row = TypeVar("Row")


def _parse_computation(text: str) -> Computation | None:
    try:
        return Computation.parse(text)
    except ScheduleError:
        return None


class _Cell(NamedTuple):
    rule: Rule | Text
    is_optional: bool


_TEXTS = {
    "computation": _Cell(Text(_parse_computation, "a computation such as 3F17"), False),
    "deviation": _Cell(Text(str, "a text"), True),
    "gpu": _Cell(Text(str, "a text"), True),
    **dict.fromkeys(
        ("origin", "energy_is"),
        _Cell(
            Text({name: name for name in ("measured", "simulated")}.get, "measured or simulated"),
            True,
        ),
    ),
}
_SECONDS = _Cell(rules(IterationRecord)["energy_j"].rule, True)


class Table(Generic[Row]):
    """The format of one kind of CSV file: a column for each field, in their order, and for
    `throttled_s` one for each reason.

    Args:
        kind: what a row is. A field is read by the rule in its type.
    """

    def __init__(self, kind: Callable[..., Row]) -> None:
        self._kind, of_fields = kind, rules(kind)  # type: ignore[arg-type]  # it is a class
        self.columns: dict[str, _Cell] = {}
        for column in fields(kind):  # type: ignore[arg-type]
            name = column.name
            if name == "throttled_s":
                self.columns |= {f"{_THROTTLED}{reason}": _SECONDS for reason in THROTTLE_REASONS}
            elif name in of_fields:
                self.columns[name] = _Cell(of_fields[name].rule, of_fields[name].is_optional)
            else:
                self.columns[name] = _TEXTS[name]

    def cells(self, row: Row) -> dict[str, Any]:
        """Return column -> value of a row."""
        return {name: _cell(row, name) for name in self.columns}

    @property
    def header(self) -> str:
        """The first line of a file."""
        return ",".join(self.columns) + "\n"

    def line(self, row: Row) -> str:
        """Return the line that `read` reads as an equal row."""
        return csv_text([[*self.cells(row).values()]])

    def read(self, path: Path) -> list[Row]:
        """Return the whole rows of a file, which may be written meanwhile.

        Raises:
            RunError: If the file cannot be read, or has a whole line that the planner did not
                write.
        """
        whole = self.header.rstrip("\n")
        header, *lines = [*_whole_lines(path)] or [whole]
        count = header.count(",") + 1
        later = list(self.columns.values())[count:]  # which an earlier version did not write
        if header != whole.rsplit(",", len(later))[0] or not all(c.is_optional for c in later):
            raise RunError(
                f"{path}, line 1: has other columns; read it with the planner that the training "
                "ran with"
            )
        return [
            self._row(f"{path}, line {number}", line, count) for number, line in enumerate(lines, 2)
        ]

    def _row(self, where: str, line: str, count: int) -> Row:
        try:
            (texts,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError):
            texts = []
        if len(texts) != count:
            raise RunError(f"{where}: is not a row of {count} cells; {_CHANGED}: record it again")
        values: dict[str, Any] = {}
        for (name, cell), text in zip(self.columns.items(), texts, strict=False):
            value = cell.rule.parse(text) if text else None
            if value is None and (text or not cell.is_optional):
                wanted = f"{cell.rule.wanted}; {_CHANGED}"
                cell.rule._replace(wanted=wanted).read(text, f"{where}, column {name!r}", RunError)
            if not name.startswith(_THROTTLED):
                values[name] = value
            elif value is not None:
                values.setdefault("throttled_s", {})[name.removeprefix(_THROTTLED)] = value
        return self._kind(**values)


def _cell(row: Any, name: str) -> object:
    if name.startswith(_THROTTLED):
        return row.throttled_s.get(name.removeprefix(_THROTTLED))
    return getattr(row, name)


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


MOST_TOTALS = 1000
"""How many totals of a rank are kept apart, by attempt and version; older ones are added up to
one.
"""


def add_rows(
    totals: Iterable[Entry], attempt: int, rank: int, rows: Iterable[IterationRecord]
) -> tuple[Entry, ...]:
    """Return the totals of a rank with those iterations of an attempt that were not added
    before.
    """
    totals = list(totals)
    added = [total.last_iteration or 0 for total in totals if total.attempt == attempt]
    last = max(added, default=-1)
    new = (
        Entry.of(row, is_first=rank == 0, attempt=attempt, version=row.version)
        for row in rows
        if row.iteration > last
    )
    return fold([*totals, *new], MOST_TOTALS)


ITERATIONS = Table(IterationRecord)
"""The format of `IterationRecord`s."""
COMPUTATIONS = Table(ComputationRecord)
"""The format of `ComputationRecord`s."""
TOTALS = Table(Entry)
"""The format of the totals of a rank."""
