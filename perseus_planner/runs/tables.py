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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from perseus_planner.base.errors import RunError, ScheduleError
from perseus_planner.base.fields import rules
from perseus_planner.base.files import reading
from perseus_planner.base.tables import Text, csv_text
from perseus_planner.base.units import Finite, Index, Rule
from perseus_planner.gpu.protocol import THROTTLE_REASONS
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
    "origin": _Cell(
        Text({each: each for each in ("measured", "simulated")}.get, "measured or simulated"), True
    ),
}
_SECONDS = _Cell(rules(IterationRecord)["energy_j"].rule, True)


class Table(Generic[Row]):
    """The format of one kind of CSV file.

    Args:
        kind: what a row is.
        names: the fields that are columns, in their order; all of them if empty. A field is read by
            the rule in its type; "throttled_s_" and a reason is the entry of `throttled_s`.
    """

    def __init__(self, kind: Callable[..., Row], *names: str) -> None:
        self._kind, of_fields = kind, rules(kind)  # type: ignore[arg-type]  # it is a class
        self.columns = {
            name: _Cell(of_fields[name].rule, of_fields[name].is_optional)
            if name in of_fields
            else _TEXTS.get(name, _SECONDS)
            for name in names or [column.name for column in fields(kind)]  # type: ignore[arg-type]
        }

    @property
    def header(self) -> str:
        """The first line of a file."""
        return ",".join(self.columns) + "\n"

    def line(self, row: Row) -> str:
        """Return the line that `read` reads as an equal row."""
        return csv_text([[_cell(row, name) for name in self.columns]])

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
                f"{where}: is not a row of {len(self.columns)} cells; {_CHANGED}: record it again"
            )
        values: dict[str, Any] = {}
        for (name, cell), text in zip(self.columns.items(), texts, strict=True):
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


@dataclass(frozen=True, kw_only=True)
class Total:
    """The iterations by one plan in one attempt of a job, added up: of one rank, or of all ranks
    together.
    """

    attempt: Index  #: Number of the attempt; 0 for several attempts together
    #: Version of the plan; None for iterations without a plan, and for several plans together.
    version: Index | None
    iterations: Index  #: Number of iterations; of all ranks, on the rank that has most
    #: Seconds from their begins to their ends; of all ranks, on the rank that has most.
    time_s: Finite
    #: Number of iterations whose energy is known; of all ranks, on the rank that has fewest.
    metered_iterations: Index
    energy_j: Finite  #: Joules of the GPUs in iterations whose energy is known
    #: Joules that iterations which ran as planned used less than they would have with all clocks at
    #: maximum, by the profile, in as much time. Negative if they used more.
    saved_j: Finite
    begin_s: Finite  #: When the first of them began, seconds since the epoch
    end_s: Finite  #: When the last of them ended, seconds since the epoch
    last_iteration: Index  #: Number of the last of them; of several attempts, the greatest
    #: "measured" or "simulated", for the energy; "simulated" if any of it is, None if none is
    #: known.
    origin: str | None

    @classmethod
    def of(cls, attempt: int, row: IterationRecord) -> Total:
        """Return the total of a single iteration."""
        is_metered = row.energy_j is not None
        energy_j = row.energy_j or 0.0
        return cls(
            attempt=attempt,
            version=row.version,
            iterations=1,
            time_s=row.time_s,
            metered_iterations=int(is_metered),
            energy_j=energy_j,
            saved_j=row.baseline_j - energy_j if is_metered and row.baseline_j is not None else 0.0,
            begin_s=row.begin_s,
            end_s=row.end_s,
            last_iteration=row.iteration,
            origin=row.origin if is_metered else None,
        )

    @property
    def saved_share(self) -> float:
        """`saved_j` over the energy that there would have been, or 0 if no energy is known."""
        whole_j = self.energy_j + self.saved_j
        return self.saved_j / whole_j if whole_j > 0.0 else 0.0

    def plus(self, other: Total) -> Total:
        """Add iterations of the same ranks; attempt and version stay if they are equal."""
        return replace(
            self,
            iterations=self.iterations + other.iterations,
            time_s=self.time_s + other.time_s,
            metered_iterations=self.metered_iterations + other.metered_iterations,
            attempt=self.attempt if self.attempt == other.attempt else 0,
            version=self.version if self.version == other.version else None,
            **self._sums(other),
        )

    def beside(self, other: Total) -> Total:
        """Add the same iterations of another rank."""
        return replace(
            self,
            iterations=max(self.iterations, other.iterations),
            time_s=max(self.time_s, other.time_s),
            metered_iterations=min(self.metered_iterations, other.metered_iterations),
            **self._sums(other),
        )

    def _sums(self, other: Total) -> dict[str, Any]:
        origins = self.origin, other.origin
        return {
            "energy_j": self.energy_j + other.energy_j,
            "saved_j": self.saved_j + other.saved_j,
            "begin_s": min(self.begin_s, other.begin_s),
            "end_s": max(self.end_s, other.end_s),
            "last_iteration": max(self.last_iteration, other.last_iteration),
            "origin": "simulated" if "simulated" in origins else self.origin or other.origin,
        }


class RankTotals:
    """The totals of one rank.

    Args:
        totals: Those that were saved.
    """

    def __init__(self, totals: Iterable[Total] = ()) -> None:
        self._totals = {(total.attempt, total.version): total for total in totals}

    def __iter__(self) -> Iterator[Total]:
        """Yield the totals, oldest first."""
        yield from (self._totals[key] for key in sorted(self._totals, key=_age))

    def add(self, attempt: int, rows: Iterable[IterationRecord]) -> None:
        """Add those iterations of an attempt that were not added before."""
        last = max(
            (total.last_iteration for total in self._totals.values() if total.attempt == attempt),
            default=-1,
        )
        for row in rows:
            if row.iteration > last:
                self._add(Total.of(attempt, row))
        while len(self._totals) > MOST_TOTALS:
            oldest = min((key for key in self._totals if key != _OLDER), key=_age)
            self._add(replace(self._totals.pop(oldest), attempt=0, version=None))

    def _add(self, total: Total) -> None:
        key = total.attempt, total.version
        self._totals[key] = self._totals[key].plus(total) if key in self._totals else total


def of_all_ranks(ranks: Iterable[Iterable[Total]]) -> tuple[Total, ...]:
    """Return the totals of all ranks together, oldest first."""
    sums: dict[tuple[int, int | None], Total] = {}
    for totals in ranks:
        for total in totals:
            key = total.attempt, total.version
            sums[key] = sums[key].beside(total) if key in sums else total
    return tuple(sums[key] for key in sorted(sums, key=_age))


_OLDER = (0, None)


def _age(key: tuple[int, int | None]) -> tuple[int, int]:
    return key[0], key[1] or 0


ITERATIONS = Table(
    IterationRecord,
    *("iteration", "version", "pipeline", "pipeline_rank", "begin_s", "end_s", "busy_s"),
    *("planned_busy_s", "energy_j", "baseline_j", "clock", "achieved_mhz", "temperature_c"),
    *("changes_asked", "changes_set", "changes_late", "changes_overtaken", "off_clock_s"),
    *("latency_p50_s", "latency_p99_s", "origin", "deviation"),
    *(f"{_THROTTLED}{reason}" for reason in THROTTLE_REASONS),
)
"""The format of `IterationRecord`s."""
COMPUTATIONS = Table(ComputationRecord)
"""The format of `ComputationRecord`s."""
TOTALS = Table(Total)
"""The format of `Total`s."""
