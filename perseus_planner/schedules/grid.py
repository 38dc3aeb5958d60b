"""Schedules as text: one line per rank, one cell per computation, as torch.distributed.pipelining writes them.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

A blank cell is a rank that waits; it says nothing about when, so it is read over. What torch writes with
`_dump_csv(file, format="compute_only")` is such a file, and its `_load_csv(file, format="compute_only")` reads what
is written here. Its overlapped pairs, `(3F9;4B2)OVERLAP_F_B`, are read as their parts, one after the other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.errors import ScheduleError, shown
from perseus_planner.files import read_text, write_file
from perseus_planner.schedules.checks import Flaw, find_layout_flaw, find_pipeline_flaw
from perseus_planner.schedules.computation import Computation
from perseus_planner.schedules.schedule import Schedule

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_LINE_END = re.compile(r"\r\n|\n|\r")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# What torch puts between computations when it is asked for communication too.
_COMMUNICATION = re.compile(r"[0-9]+(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")


class _Line(NamedTuple):
    """One rank as it was read.

    Attributes:
        number: of the line, from 1.
        order: its computations.
        cells: the number of each one's cell, from 1, blank ones counted.
    """

    number: int
    order: tuple[Computation, ...]
    cells: tuple[int, ...]


def load_grid(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in the text grid at `path`, named after the file without its ending; see `parse_grid`.

    Raises:
        ScheduleError: the file cannot be read, is too large or no text, or holds no grid of a pipeline.
    """
    file = Path(path)
    return parse_grid(read_text(file, ScheduleError, "the text grid of a schedule"), file.stem, str(file))


def parse_grid(text: str, name: str, source: str) -> Schedule:
    """The schedule that `text` writes, checked to be a pipeline that runs (see `check_pipeline`).

    Args:
        text: a line per rank, cells such as `3F17` separated by commas or, on a line without a comma, by spaces. Blank
            cells and blank lines say nothing, nor do lines that start with `#`.
        name: what to call the schedule.
        source: what to call the text in an error message, such as the file's name.

    Raises:
        ScheduleError: names the line and cell of the first flaw: text that is no computation, or a computation that is
            there twice or on a second rank, that can never run and what it waits for, or that lacks its counterpart.
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
    """`schedule` as text, a line per rank; `parse_grid` and torch's own loader read it back."""
    return "".join(",".join(map(str, rank)) + "\n" for rank in schedule.ranks)


def save_grid(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write `grid_text(schedule)` to `path`, whole or not at all.

    Raises:
        ScheduleError: the file cannot be written.
    """
    write_file(path, grid_text(schedule), ScheduleError)


def _content(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are ranks, with their numbers."""
    for number, line in enumerate(_LINE_END.split(text), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped if "," not in stripped else line


def _line(where: str, number: int, text: str) -> _Line:
    found = [
        (computation, cell)
        for cell, content in enumerate(text.split(",") if "," in text else text.split(), 1)
        if (stripped := content.strip())
        for computation in _cell(f"{where}, cell {cell}", stripped)
    ]
    return _Line(number, tuple(computation for computation, _ in found), tuple(cell for _, cell in found))


def _cell(where: str, text: str) -> Iterator[Computation]:
    """The computation of one cell, or the parts of an overlapped pair one by one."""
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
    """Where a flaw is, in words."""
    return f"line {line.number}" + ("" if flaw.position is None else f", cell {line.cells[flaw.position]}")
