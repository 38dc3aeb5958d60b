"""Stragglers: which pipeline of a cluster, or which stage of it, is how much slower from when to when; their CSV file.

The file has the columns `start,end,slowdown,pipeline,stage`: seconds since the first iteration began (an empty end: for
good), how many times as long everything takes, and the number of the pipeline and of its stage (empty: all of it).
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.documents import shown, text_of
from perseus_planner.errors import UsageError
from perseus_planner.quantities import FACTOR, STAGE, TIME, WAIT, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_COLUMNS = ("start", "end", "slowdown", "pipeline", "stage")
_HEADER = ",".join(_COLUMNS)
_START = WAIT._replace(wanted="a start: write finite seconds of 0 or more, such as 120.5")
_END = TIME._replace(wanted="an end: write finite seconds above 0, such as 180, or nothing for one that stays")
_SLOWDOWN = FACTOR._replace(wanted="a slowdown: write how many times as long it takes, 1 or more, such as 1.15")
_PIPELINE = STAGE._replace(wanted="a pipeline: write 0 for the first one, 1 for the next, and so on")
_STAGE = STAGE._replace(wanted="a stage: write 0 for the first one, or nothing for the whole pipeline")


@dataclass(frozen=True)
class Straggler:
    """A pipeline, or one stage of it, that is slower for a while.

    Attributes:
        start_s: from when on, seconds since the first iteration began, 0 or more.
        end_s: until when, seconds, above `start_s`; infinite for one that stays.
        slowdown: how many times as long everything takes, 1 or more. Power is not changed, so joules grow as times do.
        pipeline: its number.
        stage: the slow stage; None: all of the pipeline.

    Raises:
        UsageError: a value is not of that kind.
    """

    start_s: float
    end_s: float
    slowdown: float
    pipeline: int
    stage: int | None = None

    def __post_init__(self) -> None:
        for name, rule in (("start_s", _START), ("slowdown", _SLOWDOWN), ("pipeline", _PIPELINE)):
            object.__setattr__(self, name, _checked(name, getattr(self, name), rule))
        if self.end_s != math.inf:
            object.__setattr__(self, "end_s", _checked("end_s", self.end_s, _END))
        if self.stage is not None:
            object.__setattr__(self, "stage", _checked("stage", self.stage, _STAGE))
        if self.slowdown < 1:
            raise UsageError(f"straggler, slowdown: {self.slowdown!r} is not {_SLOWDOWN.wanted}")
        if self.end_s <= self.start_s:
            raise UsageError(
                f"straggler, end_s: {self.end_s!r} is not after its start {self.start_s!r}; correct one of them"
            )

    def check(self, pipelines: int, stages: int) -> None:
        """Refuse a straggler that is not in a cluster of so many pipelines of so many stages.

        Raises:
            UsageError: it is not.
        """
        for name, value, count in (("pipeline", self.pipeline, pipelines), ("stage", self.stage or 0, stages)):
            if value >= count:
                raise UsageError(f"straggler, {name}: there is no {value}; {name}s are 0 to {count - 1}")


class Condition(NamedTuple):
    """How slow a pipeline is at some moment.

    Attributes:
        slowdown: how many times as long all of it takes.
        stages: (stage, how many times as long its computations take beside that), in the order of the stages.
    """

    slowdown: float = 1.0
    stages: tuple[tuple[int, float], ...] = ()


CALM = Condition()  #: of a pipeline that no straggler is in


def condition_of(stragglers: Iterable[Straggler]) -> Condition:
    """What those stragglers, all in one pipeline, make of it: slowdowns that hit the same are multiplied."""
    slowdown = 1.0
    stages: dict[int, float] = {}
    for each in stragglers:
        if each.stage is None:
            slowdown *= each.slowdown
        else:
            stages[each.stage] = stages.get(each.stage, 1.0) * each.slowdown
    return Condition(slowdown, tuple(sorted((stage, slow) for stage, slow in stages.items() if slow != 1.0)))


def read_stragglers(path: Path, pipelines: int, stages: int) -> tuple[Straggler, ...]:
    """The stragglers of the CSV at `path`, in its order. Other columns than those five are ignored.

    Args:
        path: the file.
        pipelines: how many the cluster has.
        stages: how many each pipeline has.

    Raises:
        UsageError: the file cannot be read or a row is wrong; the text names file, line, column and remedy.
    """
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        return _stragglers(path, reader, pipelines, stages)
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}; correct its quotes") from error


def _text(path: Path) -> str:
    text = text_of(path, UsageError, "so hardly a trace of stragglers")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{path}, line {line}: has a NUL byte, so the file is damaged or no text; write it again")
    return text


def _stragglers(path: Path, reader: Any, pipelines: int, stages: int) -> tuple[Straggler, ...]:
    first = next(reader, None)
    if first is None:
        raise UsageError(f"{path}: is empty; write the header {_HEADER} and a row for each straggler")
    header = [cell.strip() for cell in first]
    for column in _COLUMNS:
        if header.count(column) != 1:
            wrong = "there twice" if column in header else "not there"
            raise UsageError(f"{path}, line 1: column {column!r} is {wrong}; write {_HEADER}")
    found = []
    for cells in filter(None, reader):
        place = f"{path}, line {reader.line_num}"
        if len(cells) != len(header):
            raise UsageError(
                f"{place}: has {len(cells)} cells where the header has {len(header)}; "
                "give each column one cell, with a point as decimal mark"
            )
        found.append(_straggler(place, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}))
        counts = {"pipeline": pipelines, "stage": stages}
        for column, count in counts.items():
            if (value := getattr(found[-1], column)) is not None and value >= count:
                raise UsageError(
                    f"{place}, column {column!r}: there is no {column} {value}; {column}s are 0 to {count - 1}"
                )
    return tuple(found)


def _straggler(place: str, cells: Mapping[str, str]) -> Straggler:
    start_s = _parsed(place, "start", cells, _START)
    end_s = _parsed(place, "end", cells, _END) if cells["end"] else math.inf
    if end_s <= start_s:
        raise UsageError(
            f"{place}, column 'end': {cells['end']!r} is not after the start {cells['start']!r}; correct one of them"
        )
    slowdown = _parsed(place, "slowdown", cells, _SLOWDOWN)
    if slowdown < 1:
        raise UsageError(f"{place}, column 'slowdown': {shown(cells['slowdown'])} is not {_SLOWDOWN.wanted}")
    stage = _parsed(place, "stage", cells, _STAGE) if cells["stage"] else None
    return Straggler(start_s, end_s, slowdown, _parsed(place, "pipeline", cells, _PIPELINE), stage)


def _parsed(place: str, column: str, cells: Mapping[str, str], rule: Rule) -> Any:
    value = rule.parse(cells[column])
    if value is None:
        raise UsageError(f"{place}, column {column!r}: {shown(cells[column])} is not {rule.wanted}")
    return value


def _checked(name: str, value: object, rule: Rule) -> Any:
    number = rule.accept(value)
    if number is None:
        raise UsageError(f"straggler, {name}: {shown(value)} is not {rule.wanted}")
    return number
