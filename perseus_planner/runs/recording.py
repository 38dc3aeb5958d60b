"""The files of a run folder, which the ranks of a job write together.

Each start of the job, by its user or by torchrun, is an *attempt*: a sub-folder named by when it
began, in UTC.

    totals-3.csv                       rank 3: sums over iterations whose rows are gone, by attempt
                                       and plan
    attempt-20261122T133502/
        autopilot.json                 what the autopilot knew last, if there was no plan
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
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import RunError
from perseus_planner.base.files import replacing
from perseus_planner.runs.autopilot import save_status
from perseus_planner.runs.tables import COMPUTATIONS, ITERATIONS, TOTALS, add_rows

if TYPE_CHECKING:
    from typing import BinaryIO

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.account import Entry
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.records import ComputationRecord, IterationRecord

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
        attempts: Sequence[int] = ()
        ended: Sequence[tuple[int, int]] = ()
        if folder is not None:
            with suppress(OSError):
                attempts = attempts_in(folder)
                ended = [
                    (attempt, _count(attempt_path(folder, attempt)))
                    for attempt in attempts[: len(attempts) + 1 - ATTEMPTS_KEPT]
                ]
        number = int(f"{now or datetime.now(timezone.utc):%Y%m%d%H%M%S}")
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
        self._rank, self._ranks, self._attempt = rank, ranks, attempt
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
        rows, self._rows = self._rows, []
        if not rows:
            return
        lines = "".join(map(ITERATIONS.line, rows)).encode()
        if self._file is None:
            self._begin()
            self._file = self._open()
        elif self._file.tell() + len(lines) > MAX_BYTES:
            self._replace_old(self._file)
            self._file = self._open()
        if self._file.tell() == 0:
            lines = ITERATIONS.header.encode() + lines
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the folder was removed
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if self._file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
        while len(self._plans) > PLANS_KEPT:
            self._plans.pop(min(self._plans)).unlink(missing_ok=True)

    def save_autopilot(self, status: AutopilotStatus) -> None:
        """Replace what the autopilot knew last."""
        self._path.mkdir(parents=True, exist_ok=True)
        save_status(self._path, status)

    def close(self) -> None:
        """Close the file of rows, without the rows that were not written."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for number, ranks in self._attempt.ended:
            path = attempt_path(self.folder, number)
            for rank in range(self._rank, max(ranks, self._ranks), self._ranks):
                with suppress(RunError):  # of damaged rows, which are left to be looked at
                    _add_up(self.folder, number, rank)
            if self._rank == 0:
                # The last of the other ranks may remove the folder meanwhile.
                with suppress(FileNotFoundError):
                    for name in os.listdir(path):
                        if name.startswith(("plan-", "autopilot.")):
                            (path / name).unlink(missing_ok=True)
            with suppress(OSError):  # other ranks still have files there
                path.rmdir()
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
