"""Read and write schedules as text grids: a line per rank, a cell per computation, as torch writes
them.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

A blank cell means that the rank waits; it does not tell when, so it is skipped. The
`_dump_csv(file, format="compute_only")` of torch.distributed.pipelining writes such files, and its
`_load_csv(file, format="compute_only")` reads them. Its overlapped pairs, `(3F9;4B2)OVERLAP_F_B`,
are read as their parts, one after the other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import ScheduleError, shown
from perseus_planner.base.files import read_text, write_file
from perseus_planner.schedules.schedule import (
    Computation,
    Flaw,
    Schedule,
    find_layout_flaw,
    find_pipeline_flaw,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_LINE_END = re.compile(r"\r\n|\n|\r")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# torch writes these between computations if communication is dumped too.
_COMMUNICATION = re.compile(
    r"[0-9]+(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*"
)


class _Line(NamedTuple):
    """One line of a grid."""

    number: int  #: its number, from 1
    order: tuple[Computation, ...]  #: the computations of the rank
    cells: tuple[int, ...]  #: the number of each computation's cell, from 1, blank ones included


def load_grid(path: str | os.PathLike[str]) -> Schedule:
    """Read the schedule in the text grid at `path`; its name is that of the file without its
    ending.

    Raises:
        ScheduleError: If the file cannot be read, is too large, is not text, or is not the grid of
            a pipeline.
    """
    file = Path(path)
    return parse_grid(
        read_text(file, ScheduleError, "the text grid of a schedule"), file.stem, str(file)
    )


def parse_grid(text: str, name: str, source: str) -> Schedule:
    """Return the schedule that `text` writes, checked to be a pipeline that runs (see
    `check_pipeline`).

    Args:
        text: a line per rank, cells such as `3F17` separated by commas or, on a line without a
            comma, by spaces. Blank cells, blank lines and lines that start with `#` are skipped.
        name: the name of the schedule.
        source: the name of the text in error messages, such as the file's name.

    Raises:
        ScheduleError: If a cell is not a computation, or a computation is there twice or on a
            second rank, can never run, or lacks its counterpart; names the line and cell of the
            first flaw.
    """
    lines = [_line(f"{source}, line {number}", number, line) for number, line in _content(text)]
    if not lines:
        raise ScheduleError(f"{source}: is empty; write one line per rank, such as 0F0,0F1,0B0,0B1")
    ranks = tuple(line.order for line in lines)
    flaw = find_layout_flaw(ranks) or find_pipeline_flaw(ranks)
    if flaw is not None:
        raise ScheduleError(f"{source}, {_place(lines[flaw.rank], flaw)}: {flaw.text}")
    return Schedule(name, ranks)


def grid_text(schedule: Schedule) -> str:
    """Return `schedule` as text, a line per rank; `parse_grid` and torch read it back."""
    return "".join(",".join(map(str, rank)) + "\n" for rank in schedule.ranks)


def save_grid(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write `grid_text(schedule)` to `path`.

    Raises:
        ScheduleError: If the file cannot be written.
    """
    write_file(path, grid_text(schedule), ScheduleError)


def _content(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are ranks, with their numbers."""
    for number, line in enumerate(_LINE_END.split(text), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped if "," not in stripped else line


def _line(where: str, number: int, text: str) -> _Line:
    pairs = [
        (computation, cell)
        for cell, content in enumerate(text.split(",") if "," in text else text.split(), 1)
        if (stripped := content.strip())
        for computation in _cell(f"{where}, cell {cell}", stripped)
    ]
    return _Line(
        number, tuple(computation for computation, _ in pairs), tuple(cell for _, cell in pairs)
    )


def _cell(where: str, text: str) -> Iterator[Computation]:
    """Yield the computation of a cell, or the two of an overlapped pair."""
    overlapped = _OVERLAPPED.fullmatch(text)
    parts = overlapped[1].split(";") if overlapped else [text]
    for part in parts:
        if _COMMUNICATION.fullmatch(part):
            raise ScheduleError(
                f"{where}: {shown(part)} is communication, not a computation; "
                'dump the schedule with format="compute_only"'
            )
        try:
            yield Computation.parse(part)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error}") from error


def _place(line: _Line, flaw: Flaw) -> str:
    """Return the place of a flaw in words."""
    return f"line {line.number}" + (
        "" if flaw.position is None else f", cell {line.cells[flaw.position]}"
    )
