"""Stragglers of a cluster, and the file that lists them.

The file of stragglers has the columns `start,end,slowdown,pipeline,stage`. Start and end are
seconds after the start of the first iteration; leave the end empty for a straggler that lasts. The
slowdown is a factor of all times. Pipeline and stage are numbers from 0; leave the stage empty if
the whole pipeline is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.tables import CsvFile, CsvRow
from perseus_planner.base.units import FACTOR, STAGE, TIME, WAIT

_COLUMNS = ("start", "end", "slowdown", "pipeline", "stage")
_HEADER = ",".join(_COLUMNS)
_START = WAIT._replace(wanted="a start: write finite seconds of 0 or more, such as 120.5")
_END = TIME._replace(
    wanted="an end: write finite seconds above 0, such as 180, or nothing for one that stays"
)
_SLOWDOWN = FACTOR._replace(
    wanted="a slowdown: write how many times as long it takes, 1 or more, such as 1.15", least=1.0
)
_PIPELINE = STAGE._replace(
    wanted="a pipeline: write 0 for the first one, 1 for the next, and so on"
)
_STAGE = STAGE._replace(
    wanted="a stage: write 0 for the first one, or nothing for the whole pipeline"
)


@dataclass(frozen=True)
class Straggler:
    """A pipeline, or one stage of it, that is slow for a while."""

    start_s: float  #: when it begins, seconds after the start of the first iteration, 0 or more
    end_s: float  #: when it ends, seconds, above `start_s`; infinite if it lasts
    #: factor of all times, 1 or more. Power does not change, so energies grow as times do.
    slowdown: float
    pipeline: int  #: number of the pipeline
    stage: int | None = None  #: number of the slow stage, or None if the whole pipeline is slow


class Condition(NamedTuple):
    """How slow a pipeline is at some moment."""

    slowdown: float = 1.0  #: factor of all its times
    #: (stage, further factor of the times of its computations), in the order of the stages.
    stages: tuple[tuple[int, float], ...] = ()


UNDISTURBED = Condition()  #: the condition of a pipeline without a straggler


def condition_of(stragglers: Iterable[Straggler]) -> Condition:
    """Return the condition of a pipeline with these stragglers; slowdowns of the same stage are
    multiplied.
    """
    slowdown = 1.0
    stages: dict[int, float] = {}
    for straggler in stragglers:
        if straggler.stage is None:
            slowdown *= straggler.slowdown
        else:
            stages[straggler.stage] = stages.get(straggler.stage, 1.0) * straggler.slowdown
    return Condition(
        slowdown, tuple(sorted((stage, slow) for stage, slow in stages.items() if slow != 1.0))
    )


def read_stragglers(path: Path, pipelines: int, stages: int) -> tuple[Straggler, ...]:
    """Read stragglers from the CSV file at `path`, in its order. Columns other than those five are
    ignored.

    Args:
        path: the file.
        pipelines: number of pipelines of the cluster.
        stages: number of stages of each pipeline.

    Raises:
        UsageError: If the file cannot be read or a row is wrong. The text names file, line, column
            and remedy.
    """
    table = CsvFile(path, UsageError, f"the header {_HEADER} and a row for each straggler")
    table.need(_COLUMNS, _HEADER)
    table.refuse_twice(_COLUMNS)
    stragglers = []
    for row in table:
        stragglers.append(_straggler(row))
        # The table knows no cluster, so whether such a pipeline or stage exists is checked here.
        counts = {"pipeline": pipelines, "stage": stages}
        for column, count in counts.items():
            if (value := getattr(stragglers[-1], column)) is not None and value >= count:
                raise UsageError(
                    f"{row.place(column)}: there is no {column} {value}; {column}s are 0 to "
                    f"{count - 1}"
                )
    return tuple(stragglers)


def _straggler(row: CsvRow) -> Straggler:
    start_s = row.read("start", _START)
    end_s = row.read("end", _END) if row["end"] else math.inf
    if end_s <= start_s:
        raise UsageError(
            f"{row.place('end')}: {shown(row['end'])} is not after the start "
            f"{shown(row['start'])}; correct one of them"
        )
    slowdown = row.read("slowdown", _SLOWDOWN)
    stage = row.read("stage", _STAGE) if row["stage"] else None
    return Straggler(start_s, end_s, slowdown, row.read("pipeline", _PIPELINE), stage)
