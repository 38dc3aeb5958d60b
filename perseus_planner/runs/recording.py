"""The files of a run folder, which the ranks of a job write together.

Each start of the job, by its user or by torchrun, is an *attempt*: a sub-folder named by when it
began, in UTC.

    totals-3.csv                       rank 3: sums over iterations whose rows are gone, by attempt
                                       and plan
    attempt-20261122T133502/
        decider.json                   what the decider knew last, if there was no plan
        plan-1.yaml                    a plan; plan-1-pipeline-0.yaml if each pipeline has its own
        iterations-3.csv               the last iterations of rank 3, a row for each
        iterations-3.old.csv           the rows before these, once there are many
        computations-3.csv             the computations of its last iterations

A rank writes its rows every few seconds and at the end, by one write each time, so a killed rank
loses a few seconds.

The folder is bounded, however long the job runs and however often it is started:

- A file of rows has at most 1 MiB. Then the file before it is deleted, so a rank has two.
- The newest `ATTEMPTS_KEPT` attempts have rows and plans. When a rank begins another attempt, it
  adds older rows to its totals and deletes them.
- An attempt has the plans of the newest `PLANS_KEPT` versions.
- The totals of a rank have at most `MOST_TOTALS` rows. They lose no joule and no second: older ones
  are added up.

A reader of a table finds whole rows at any time, and at most one at the end that is cut off,
because the rank was killed, the disk was full or it is being written. That one has no end of line,
and is not read. An empty cell is a value that is unknown.

A rank adds the iterations of a file of rows to its totals before the file is replaced or removed.
Its totals say which iteration was the last to be added, so a row that is still there counts once,
wherever the rank was killed.
"""

from __future__ import annotations

import csv
import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from perseus_planner.base.errors import RunError, ScheduleError
from perseus_planner.base.fields import rules
from perseus_planner.base.files import reading, replacing
from perseus_planner.base.tables import Text, csv_text
from perseus_planner.base.units import Rule
from perseus_planner.gpu.protocol import THROTTLE_REASONS
from perseus_planner.runs.account import Entry, fold
from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.runs.status import save_status
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from typing import BinaryIO

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.status import DeciderStatus

_MAX_READ_BYTES = 64 * 2**20  #: far above the size of a file that a run writes
_THROTTLED = "throttled_s_"  #: before a throttle reason, as the name of a column
_CHANGED = "the file was changed"

_OF_03 = ("planned_s", "next_s", "between_j", "host_load", "gpu")
_LATER = {*_OF_03, "lowered", "judged_j", "saved_j", "saved_error_j", "saved_noise_j"}
_LATER |= {"saved_variance_j2", "follows_evaluation", "precedes_evaluation", "is_dry_run"}
_LATER |= {"service_version"}
"""Columns that files of earlier versions may lack."""
_RETIRED = {"baseline_j", "unlocked_j", "unlocked_saved_j"}
"""Columns of earlier versions, of savings against other baselines, which are not read."""

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
    "sharded_torch": _Cell(Text(str, "a version"), True),
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
        self._kind = kind
        of_fields = rules(kind)  # type: ignore[arg-type]  # it is a class
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
        # A file without any whole line has just been created.
        header, *lines = [*_whole_lines(path)] or [self.header.rstrip("\n")]
        names = header.split(",")
        known_names = [name for name in names if name in self.columns]
        missing = [name for name in self.columns if name not in names]
        # Columns may be missing that came later, and be there that went; others are another format.
        if (
            known_names != [name for name in self.columns if name in names]
            or not {*names} - {*known_names} <= _RETIRED
            or not {*missing} <= _LATER
        ):
            raise RunError(
                f"{path}, line 1: has other columns; read it with the planner that the training "
                "ran with"
            )
        #: the cell of each column; None for one that is not read any more
        cells = [None if self._is_retired(name, names) else self.columns[name] for name in names]
        return [
            self._row(f"{path}, line {number}", line, dict(zip(names, cells, strict=True)))
            for number, line in enumerate(lines, 2)
        ]

    def _is_retired(self, name: str, names: Sequence[str]) -> bool:
        """Whether a column of a file is not read: its meaning was another one in 0.3."""
        is_of_others = name == "saved_j" and "judged_j" in self.columns and "judged_j" not in names
        return name not in self.columns or is_of_others

    def _row(self, where: str, line: str, cells: Mapping[str, _Cell | None]) -> Row:
        # The line is read by itself, so that an error names it.
        try:
            (texts,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError):
            texts = []
        if len(texts) != len(cells):
            raise RunError(
                f"{where}: is not a row of {len(cells)} cells; {_CHANGED}: record it again"
            )
        values: dict[str, Any] = {}
        # An empty cell is a value that is not known, where that may be.
        for (name, cell), text in zip(cells.items(), texts, strict=True):
            if cell is None:
                continue
            value = cell.rule.parse(text) if text else None
            if value is None and (text or not cell.is_optional):
                wanted = f"{cell.rule.wanted}; {_CHANGED}"
                cell.rule._replace(wanted=wanted).read(text, f"{where}, column {name!r}", RunError)
            # Throttle reasons have a column each, and are one mapping in a row.
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
    # One byte more than allowed tells that the file is larger.
    with reading(path, RunError), path.open("rb") as file:
        data = file.read(_MAX_READ_BYTES + 1)
    if len(data) > _MAX_READ_BYTES:
        raise RunError(
            f"{path}: is larger than {_MAX_READ_BYTES} bytes, so not what a run writes; name "
            "another folder"
        )
    # What stands behind the last line end is being written, or was cut off.
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
    # Rows that are in the totals already must not count twice.
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


MAX_BYTES = 2**20
"""Size of one file of rows."""
ATTEMPTS_KEPT = 2
"""How many attempts keep their rows and plans."""
PLANS_KEPT = 64
"""How many versions of plans an attempt keeps."""

_ATTEMPT = re.compile(r"attempt-([0-9]{8})T([0-9]{6})")
_ROWS = re.compile(r"iterations-([0-9]{1,9})(?:\.old)?\.csv")
_TOTALS = re.compile(r"totals-([0-9]{1,9})\.csv")


class Attempt(NamedTuple):
    """A start of a job, as its first rank tells all others."""

    #: When it began, in UTC, such as 20261122133502; greater than that of every earlier attempt.
    number: int
    #: Number of each earlier attempt whose rows are to be added up now, with its number of ranks.
    ended: Sequence[tuple[int, int]] = ()

    @classmethod
    def next_in(cls, folder: Path | None, now: datetime | None = None) -> Attempt:
        """Return the next attempt in a run folder, which need not exist."""
        # A folder that cannot be read is none yet, as the first attempt may create it.
        attempts: Sequence[int] = ()
        ended: Sequence[tuple[int, int]] = ()
        if folder is not None:
            with suppress(OSError):
                attempts = attempts_in(folder)
                # With the attempt that begins now, all but the newest few are older than what is
                # kept.
                ended = [
                    (attempt, _count(attempt_path(folder, attempt)))
                    for attempt in attempts[: len(attempts) + 1 - ATTEMPTS_KEPT]
                ]
        number = int(f"{now or datetime.now(timezone.utc):%Y%m%d%H%M%S}")
        # Attempts are numbered by time, and stay in order if the clock was set back.
        return cls(max([number, *(attempt + 1 for attempt in attempts[-1:])]), ended)


class RankFiles:
    """The files that one rank writes; every method raises OSError if the folder cannot be written.

    Args:
        folder: The run folder; created if it does not exist.
        rank: Rank in the whole job.
        ranks: Number of ranks of the job.
        attempt: The attempt of the job.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, attempt: Attempt) -> None:
        self.folder = folder = folder.absolute()  # the training script may change its folder
        self._rank = rank
        self._ranks = ranks
        self._attempt = attempt
        self._path = attempt_path(folder, attempt.number)
        self._file: BinaryIO | None = None
        self._rows: list[IterationRecord] = []  #: not written yet
        self._totals: Sequence[Entry] = ()
        self._plans: dict[int, Path] = {}  #: by version

    @property
    def has_rows(self) -> bool:
        """Whether rows wait to be written."""
        return bool(self._rows)

    def add_iteration(self, record: IterationRecord) -> None:
        """Add a row, which is written by the next `write`."""
        self._rows.append(record)

    def write(self) -> None:
        """Write the rows that were added. They can be read from then on, even if this process is
        killed.

        Raises:
            RunError: If the totals in the folder are damaged.
        """
        rows = self._rows
        self._rows = []
        if not rows:
            return
        # One write for all rows, so that a killed rank leaves at most one cut row.
        lines = "".join(map(ITERATIONS.line, rows)).encode()
        # Files are made when there is a row, so an attempt without iterations leaves nothing.
        if self._file is None:
            self._begin()
            self._file = self._open()
        # A full file takes the place of the old one, so there are two at most.
        elif self._file.tell() + len(lines) > MAX_BYTES:
            self._replace_old(self._file)
            self._file = self._open()
        if self._file.tell() == 0:
            lines = ITERATIONS.header.encode() + lines
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the folder was removed
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        # A short write means that the disk is full, which no exception says.
        if self._file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Rows count in the totals once they are on the disk.
        self._totals = add_rows(self._totals, self._attempt.number, self._rank, rows)

    def replace_computations(self, computations: Sequence[ComputationRecord]) -> None:
        """Replace the computations by these."""
        with replacing(computations_path(self._path, self._rank)) as file:
            file.write(
                (COMPUTATIONS.header + "".join(map(COMPUTATIONS.line, computations))).encode()
            )

    def save_plan(self, plan: Plan, version: int, pipeline: int | None) -> None:
        """Save a plan that is run by; `pipeline` is None if all pipelines run by it.

        Raises:
            PlanError: If it cannot be written.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        self._plans[version] = plan_path(self._path, version, pipeline)
        plan.save(self._plans[version])
        # The oldest versions go first: reports are of the newest.
        while len(self._plans) > PLANS_KEPT:
            self._plans.pop(min(self._plans)).unlink(missing_ok=True)

    def save_status(self, status: DeciderStatus) -> None:
        """Replace what the decider knew last."""
        self._path.mkdir(parents=True, exist_ok=True)
        save_status(self._path, status)

    def close(self) -> None:
        """Close the file of rows, without the rows that were not written."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        # Ranks of older attempts are shared among today's, which may be fewer.
        for number, ranks in self._attempt.ended:
            path = attempt_path(self.folder, number)
            for rank in range(self._rank, max(ranks, self._ranks), self._ranks):
                with suppress(RunError):  # of damaged rows, which are left to be looked at
                    _add_up(self.folder, number, rank)
            # Plans and status are of all ranks, so one rank removes them.
            if self._rank == 0:
                # The last of the other ranks may remove the folder meanwhile.
                with suppress(FileNotFoundError):
                    for name in os.listdir(path):
                        if name.startswith(("plan-", "decider.", "autopilot.")):
                            (path / name).unlink(missing_ok=True)
            with suppress(OSError):  # other ranks still have files there
                path.rmdir()
        # Read after older rows were added up, as these are in them now.
        self._totals = read_totals(self.folder, self._rank)

    def _open(self) -> BinaryIO:
        return iterations_path(self._path, self._rank).open("ab", buffering=0)

    def _replace_old(self, file: BinaryIO) -> None:
        # The totals come first: should this process end in between, rows that are in the totals do
        # not count again.
        _save_totals(self.folder, self._rank, self._totals)
        path = iterations_path(self._path, self._rank)
        os.replace(path, iterations_path(self._path, self._rank, old=True))
        file.close()


def _add_up(folder: Path, attempt: int, rank: int) -> None:
    """Add the rows that a rank has in an attempt to its totals, and delete its files there."""
    path = attempt_path(folder, attempt)
    file = iterations_path(path, rank)
    if file.exists():
        rows = ITERATIONS.read(file)
        _save_totals(folder, rank, add_rows(read_totals(folder, rank), attempt, rank, rows))
    for rank_file in (file, iterations_path(path, rank, old=True), computations_path(path, rank)):
        rank_file.unlink(missing_ok=True)


def _save_totals(folder: Path, rank: int, totals: Iterable[Entry]) -> None:
    with replacing(totals_path(folder, rank)) as file:
        file.write((TOTALS.header + "".join(map(TOTALS.line, totals))).encode())


def read_totals(folder: Path, rank: int) -> Sequence[Entry]:
    """Return the saved totals of a rank. Whoever adds rows to them reads the rows first: they may
    be added meanwhile.

    Raises:
        RunError: If the file is damaged.
    """
    path = totals_path(folder, rank)
    return TOTALS.read(path) if path.exists() else []


def attempts_in(folder: Path) -> list[int]:
    """Return the numbers of the attempts in a run folder, oldest first."""
    return sorted(
        int(match[1] + match[2]) for match in map(_ATTEMPT.fullmatch, os.listdir(folder)) if match
    )


def ranks_in(folder: Path) -> list[int]:
    """Return the ranks that have rows in the folder of an attempt, or totals in a run folder."""
    names = os.listdir(folder)
    return sorted(
        {
            int(match[1])
            for name in names
            if (match := _ROWS.fullmatch(name) or _TOTALS.fullmatch(name))
        }
    )


def _count(attempt: Path) -> int:
    """Return the number of ranks in an attempt of which no rank is missing."""
    return max(ranks_in(attempt), default=-1) + 1


def attempt_path(folder: Path, number: int) -> Path:
    """Return the folder of an attempt."""
    return folder / f"attempt-{number // 10**6:08}T{number % 10**6:06}"


def attempt_of(folder: Path) -> int | None:
    """Return the number of the attempt that a folder is of; None if it is of none."""
    match = _ATTEMPT.fullmatch(folder.name)
    return None if match is None else int(match[1] + match[2])


def totals_path(folder: Path, rank: int) -> Path:
    """Return the path of the totals of a rank."""
    return folder / f"totals-{rank}.csv"


def plan_path(attempt: Path, version: int, pipeline: int | None) -> Path:
    """Return the path of a plan."""
    return attempt / (
        f"plan-{version}.yaml" if pipeline is None else f"plan-{version}-pipeline-{pipeline}.yaml"
    )


def iterations_path(attempt: Path, rank: int, *, old: bool = False) -> Path:
    """Return the path of the iterations of a rank."""
    return attempt / f"iterations-{rank}{'.old' if old else ''}.csv"


def computations_path(attempt: Path, rank: int) -> Path:
    """Return the path of the computations of a rank."""
    return attempt / f"computations-{rank}.csv"
