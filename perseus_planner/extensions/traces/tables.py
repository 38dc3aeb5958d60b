"""Read tables of computations: CSV, or parquet where pyarrow is installed, with a row for each
computation.

The columns are stage, replica (which pipeline), step, kind (F or forward, B or backward, I, W),
start and duration (seconds) and microbatch. ByteDance's StragglerAnalysis writes `dp_rank`,
`stage`, `step`, `optype` (`forward-compute`, `backward-compute`), `start_ts`, `duration`, `mb_id`
and `mc`, the chunk of a rank with several stages; its rows of communication are left out. All times
are of one clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError, how_to_install, shown
from perseus_planner.base.prefixes import counted
from perseus_planner.base.tables import CsvFile
from perseus_planner.extensions.traces.job import TracedJob
from perseus_planner.extensions.traces.order import find_layout, with_grid
from perseus_planner.extensions.traces.steps import Ran, RankSteps

if TYPE_CHECKING:
    from perseus_planner.schedules import Schedule

_HEADER = "stage,replica,step,kind,start,duration,microbatch"
_KINDS = {
    "forward": "F",
    "forward-compute": "F",
    "f": "F",
    "backward": "B",
    "backward-compute": "B",
    "b": "B",
    "input-gradient": "I",
    "i": "I",
    "weight-gradient": "W",
    "w": "W",
}
#: our column -> the names that it has in tables of others
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "stage": ("stage",),
    "replica": ("replica", "dp_rank"),
    "step": ("step",),
    "kind": ("kind", "optype"),
    "start": ("start", "start_ts"),
    "duration": ("duration",),
    "microbatch": ("microbatch", "mb_id"),
    "chunk": ("mc",),
}
_REQUIRED = ("stage", "step", "kind", "start", "duration")


class _Row(NamedTuple):
    stage: int
    replica: int
    step: int
    kind: str
    begin_s: float
    time_s: float
    microbatch: int | None


def is_table(path: Path) -> bool:
    """Return whether a file is a table of computations, by its ending."""
    return path.suffix.lower() in (".csv", ".parquet")


def read_table_job(paths: Sequence[Path], grid: Schedule | None = None) -> TracedJob:
    """Read tables of one job.

    Raises:
        UsageError: If one cannot be read, or they are not those of a pipeline.
    """
    rows = [row for path in paths for row in _rows(path)]
    if not rows:
        raise UsageError(
            f"{paths[0]}: has no forwards and backwards; give a row to each, {_HEADER}"
        )
    by_worker: dict[tuple[int, int], dict[int, list[_Row]]] = {}
    for row in rows:
        worker = by_worker.setdefault((row.stage, row.replica), {})
        worker.setdefault(row.step, []).append(row)
    stages = 1 + max(stage for stage, _ in by_worker)
    replicas = sorted({replica for _, replica in by_worker})
    # Every stage of every replica is needed, as each waits for its neighbours.
    for replica in replicas:
        for stage in range(stages):
            if (stage, replica) not in by_worker:
                raise UsageError(
                    f"stage {stage} of replica {replica} has no rows; add them, or leave the "
                    "replica out"
                )
    steps, lost = _whole_steps(by_worker)
    remarks = []
    if lost:
        remarks.append(f"{counted(lost, 'step')} in which workers ran other computations are out.")
    # A number for some rows alone could not be put in order with the rest.
    is_numbered = all(row.microbatch is not None for row in rows)
    ranks = [
        _rank(stage, replica, by_worker[stage, replica], steps, is_numbered)
        for stage in range(stages)
        for replica in replicas
    ]
    if grid is not None:
        layout = with_grid(ranks, grid, len(replicas))
    else:
        layout = find_layout(ranks, len(replicas))
    by_rank = [
        np.array([[(ran.begin_s, ran.end_s) for ran in step] for step in rank.steps])
        for rank in ranks
    ]
    spans_s = np.array(
        [
            np.concatenate([by_rank[number_of_rank] for number_of_rank in pipeline], axis=1)
            for pipeline in layout.pipelines
        ]
    )
    begins_s = spans_s[..., 0]
    ends_s = spans_s[..., 1]
    return TracedJob(
        layout.schedule,
        begins_s,
        ends_s,
        # Tables do not know when kernels ran inside of computations.
        np.zeros_like(begins_s),
        ends_s.max(axis=2) - begins_s.min(axis=2),
        tuple(
            tuple(ranks[number_of_rank].name for number_of_rank in pipeline)
            for pipeline in layout.pipelines
        ),
        # All times are of one clock, so nothing is aligned.
        None,
        None,
        True,
        None,
        tuple(remarks),
    )


def _whole_steps(
    by_worker: Mapping[tuple[int, int], Mapping[int, Sequence[_Row]]],
) -> tuple[list[int], int]:
    """Return the steps in which all workers have equally many computations, and how many not."""
    everywhere = set.intersection(*(set(steps) for steps in by_worker.values()))
    anywhere = set.union(*(set(steps) for steps in by_worker.values()))
    # A step is whole if all workers have what they have in most steps.
    counts = {step: tuple(len(steps[step]) for steps in by_worker.values()) for step in everywhere}
    if not counts:
        raise UsageError("no step is there for all workers; give tables of the same steps")
    usual = max(set(counts.values()), key=list(counts.values()).count)
    whole = sorted(step for step, count in counts.items() if count == usual)
    return whole, len(anywhere) - len(whole)


def _rank(
    stage: int,
    replica: int,
    rows: Mapping[int, Sequence[_Row]],
    steps: Sequence[int],
    is_numbered: bool,
) -> RankSteps:
    table = []
    for step in steps:
        ordered = sorted(rows[step], key=lambda row: row.begin_s)
        counts: dict[str, int] = {}
        ran = []
        for row in ordered:
            number = row.microbatch
            if not is_numbered:  # in the order of their kind: pipelines run each kind in order
                number = counts.get(row.kind, 0)
                counts[row.kind] = number + 1
            end_s = row.begin_s + row.time_s
            assert number is not None
            ran.append(Ran(row.kind, stage, number, row.begin_s, end_s, row.begin_s, row.time_s))
        table.append(tuple(ran))
    return RankSteps(
        f"dp{replica} stage{stage}",
        None,
        True,
        tuple(table),
        tuple(steps),
        # Rows tell no time beside computations, so a step is what it ran.
        tuple(max(e.end_s for e in ran) - min(e.begin_s for e in ran) for ran in table),
    )


def _rows(path: Path) -> Iterator[_Row]:
    if path.suffix.lower() == ".parquet":
        yield from _parquet_rows(path)
        return
    table = CsvFile(path, UsageError, f"the header {_HEADER} and a row for each computation")
    names = _names(str(path), table.header)
    for cells in table:
        row = _row(cells.where, {key: cells[name] for key, name in names.items()})
        if row is not None:
            yield row


def _parquet_rows(path: Path) -> Iterator[_Row]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UsageError(f"{path}: parquet needs pyarrow; {how_to_install('traces')}") from None
    table = parquet.read_table(path)
    names = _names(str(path), table.column_names)
    columns = {key: table.column(name).to_pylist() for key, name in names.items()}
    for number in range(table.num_rows):
        cells = {key: values[number] for key, values in columns.items()}
        row = _row(f"{path}, row {number + 1}", cells)
        if row is not None:
            yield row


def _names(where: str, header: Sequence[str]) -> dict[str, str]:
    """Return our column -> its name in the table."""
    names = {}
    for key, candidates in _COLUMNS.items():
        name_in_table = next((name for name in candidates if name in header), None)
        if name_in_table is not None:
            names[key] = name_in_table
        elif key in _REQUIRED:
            raise UsageError(
                f"{where}: has no column {key} in the header {shown(','.join(header))}; write "
                f"{_HEADER}"
            )
    return names


def _row(where: str, cells: Mapping[str, Any]) -> _Row | None:
    kind = _KINDS.get(str(cells["kind"]).strip().lower())
    if kind is None:
        return None  # communication, say
    try:
        time_s = float(cells["duration"])
        begin_s = float(cells["start"])
        microbatch = cells.get("microbatch")
        row = _Row(
            int(cells["stage"]),
            int(cells.get("replica") or 0),
            int(cells["step"]),
            kind,
            begin_s,
            time_s,
            None if microbatch in (None, "") else int(str(microbatch)),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {error}; write numbers, as in {_HEADER}") from None
    # A chunk has its own stage, which these tables do not number.
    if int(cells.get("chunk") or 0):
        raise UsageError(
            f"{where}: is of a second chunk of its rank; number the stages of the pipeline "
            "instead, and name the schedule with --schedule GRID"
        )
    if not time_s >= 0.0 or not np.isfinite(begin_s) or row.stage < 0:
        raise UsageError(
            f"{where}: {shown(dict(cells))} is no computation; write times of 0 or more"
        )
    return row
