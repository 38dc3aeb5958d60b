"""A run folder as the ranks of a job write it together, each its own files, and the plans that they run by.

    plan-1.yaml              a plan that was run by; plan-1-pipeline-0.yaml where each pipeline has one of its own
    iterations-3.csv         rank 3, a row for each iteration, added as it ends
    iterations-3.old.csv     the rows before these, once there are many
    computations-3.csv       the computations of its last iterations

Rows are added as a whole, so that whoever reads the file, at whatever moment, finds whole rows and at most one that is
cut off. A rank keeps at most 16 MiB of rows: the older half goes when there are more.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from perseus_planner.files import replacing
from perseus_planner.runs.rows import COMPUTATIONS, ITERATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.records import ComputationRecord, IterationRecord

MAX_BYTES = 8 * 2**20
"""Of one file of rows; there are two of them at most."""


class Recording:
    """What one rank writes; each method raises OSError where the folder cannot be written.

    What an earlier run has left in this rank's files goes with the first row.

    Args:
        folder: of the run; made where it is missing.
        rank: of the whole job.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._begun = False

    def add(self, row: IterationRecord) -> None:
        """Add a row; who reads the file from then on finds it, also when this process is killed."""
        path = iterations_path(self._folder, self._rank)
        if not self._begun:
            self._begin()
        with path.open("ab", buffering=0) as file:
            if file.tell() > MAX_BYTES:
                os.replace(path, iterations_path(self._folder, self._rank, old=True))
        with path.open("ab", buffering=0) as file:
            header = "" if file.tell() else ITERATIONS.header
            line = (header + ITERATIONS.line(row)).encode()
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def keep(self, computations: Sequence[ComputationRecord]) -> None:
        """Replace the computations by these."""
        with replacing(computations_path(self._folder, self._rank)) as file:
            file.write((COMPUTATIONS.header + "".join(map(COMPUTATIONS.line, computations))).encode())

    def keep_plan(self, plan: Plan, version: int, pipeline: int | None) -> None:
        """Write down what is run by; `pipeline`: which one runs by it, None: all.

        Raises:
            PlanError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        plan.save(plan_path(self._folder, version, pipeline))

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in (
            iterations_path(self._folder, self._rank),
            iterations_path(self._folder, self._rank, old=True),
            computations_path(self._folder, self._rank),
        ):
            path.unlink(missing_ok=True)
        self._begun = True


def plan_path(folder: Path, version: int, pipeline: int | None) -> Path:
    """The file of a plan."""
    return folder / (f"plan-{version}.yaml" if pipeline is None else f"plan-{version}-pipeline-{pipeline}.yaml")


def iterations_path(folder: Path, rank: int, *, old: bool = False) -> Path:
    """The file of the iterations of a rank."""
    return folder / f"iterations-{rank}{'.old' if old else ''}.csv"


def computations_path(folder: Path, rank: int) -> Path:
    """The file of the computations of a rank."""
    return folder / f"computations-{rank}.csv"
