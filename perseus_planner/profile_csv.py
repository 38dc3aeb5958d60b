"""The CSV file of a profile, in and out: one row for each stage, instruction and clock."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from perseus_planner.documents import shown, unreadable
from perseus_planner.errors import ProfileError
from perseus_planner.quantities import CLOCK, ENERGY, STAGE, TIME

_COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_HEADER = ",".join(_COLUMNS)
_RULES = MappingProxyType({"stage": STAGE, "frequency": CLOCK, "time": TIME, "energy": ENERGY})
WORDS = MappingProxyType({"F": "forward", "B": "backward", "I": "input-gradient", "W": "weight-gradient"})
_KINDS = MappingProxyType({**{word: kind for kind, word in WORDS.items()}, **{kind: kind for kind in WORDS}})
_SUFFIX = re.compile(r"(\.[a-z0-9_-]+)?")
_INSTRUCTIONS = "forward or backward (or input-gradient, weight-gradient; with a suffix such as backward.sync)"
# No real row comes near it; it keeps a file without line ends from being read whole.
_MAX_LINE_BYTES = 65536


class Row(NamedTuple):
    """One measured computation: its stage, kind such as "F" or "B.sync", clock in MHz, seconds and joules."""

    stage: int
    kind: str
    clock_mhz: int
    time_s: float
    energy_j: float


def word_of(kind: str) -> str:
    """The instruction that the CSV writes for a kind: "backward" for "B", "backward.sync" for "B.sync"."""
    return WORDS[kind[0]] + kind[1:]


def kind_of(instruction: str) -> str | None:
    """Inverse of `word_of`, which reads kinds too; None for what is no instruction."""
    word, dot, suffix = instruction.strip().partition(".")
    kind = _KINDS.get(word)
    return None if kind is None or _SUFFIX.fullmatch(dot + suffix) is None else kind + dot + suffix


def written(rows: Iterable[Row]) -> bytes:
    """The CSV file that holds `rows`; reading it gives the same floats."""
    lines = [f"{row.stage},{word_of(row.kind)},{row.clock_mhz},{row.time_s!r},{row.energy_j!r}\n" for row in rows]
    return "".join([f"{_HEADER}\n", *lines]).encode()


def read_rows(path: Path) -> list[Row]:
    """The rows of the CSV at `path`, each number within its range, no stage, instruction and clock twice.

    Columns other than the profile's are ignored. Whether the stages are complete is not looked at.

    Raises:
        ProfileError: the file cannot be read, or a row is wrong.
    """
    try:
        with path.open("rb") as file:
            reader = csv.reader(_lines(path, file), strict=True)
            try:
                return _rows(path, reader)
            except csv.Error as error:
                raise ProfileError(f"{path}, line {reader.line_num}: {error}; correct its quotes") from error
    except OSError as error:
        raise ProfileError(unreadable(path, error)) from error


def _lines(path: Path, file: BinaryIO) -> Iterator[str]:
    """The lines of `file` as text, one read at a time, so that a wrong header is found before the rest is read."""
    for number in count(1):
        line = file.readline(_MAX_LINE_BYTES + 1)
        if not line:
            return
        if b"\0" in line:
            raise ProfileError(
                f"{path}, line {number}: has a NUL byte, so the file is damaged or no text; write it again"
            )
        if len(line) > _MAX_LINE_BYTES:
            raise ProfileError(f"{path}, line {number}: is longer than {_MAX_LINE_BYTES} bytes; write one row a line")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ProfileError(f"{path}, line {number}: is not UTF-8 text; save the file as UTF-8") from error


def _rows(path: Path, reader: Any) -> list[Row]:
    first = next(reader, None)
    if first is None:
        raise ProfileError(f"{path}: is empty; write the header {_HEADER} and a row for each measurement")
    header = [cell.strip() for cell in first]
    _check_header(path, header)
    rows = []
    seen: dict[tuple[int, str, int], int] = {}
    for cells in filter(None, reader):
        line = reader.line_num
        if len(cells) != len(header):
            raise ProfileError(
                f"{path}, line {line}: has {len(cells)} cells where the header has {len(header)}; "
                "give each column one cell, with a point as decimal mark"
            )
        row = _row(f"{path}, line {line}", dict(zip(header, cells, strict=True)))
        earlier = seen.setdefault(row[:3], line)
        if earlier != line:
            place = f"stage {row.stage} {word_of(row.kind)} at {row.clock_mhz} MHz"
            raise ProfileError(f"{path}, line {line}: {place} is on line {earlier} too; keep one of them")
        rows.append(row)
    return rows


def _check_header(path: Path, header: list[str]) -> None:
    missing = [column for column in _COLUMNS if column not in header]
    if missing:
        raise ProfileError(
            f"{path}, line 1: no column {', '.join(map(repr, missing))} in the header {shown(','.join(header))}; "
            f"write {_HEADER}, separated by commas"
        )
    for column in _COLUMNS:
        if header.count(column) > 1:
            raise ProfileError(f"{path}, line 1: column {column!r} is there twice; keep one of them")


def _row(place: str, cells: Mapping[str, str]) -> Row:
    found = {}
    for column, rule in _RULES.items():
        found[column] = rule.parse(cells[column])
        if found[column] is None:
            raise ProfileError(f"{place}, column {column!r}: {shown(cells[column])} is not {rule.wanted}")
    kind = kind_of(cells["instruction"])
    if kind is None:
        word = shown(cells["instruction"])
        raise ProfileError(f"{place}, column 'instruction': {word} is not an instruction: write {_INSTRUCTIONS}")
    return Row(found["stage"], kind, found["frequency"], found["time"], found["energy"])
