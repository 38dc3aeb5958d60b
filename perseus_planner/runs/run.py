"""A run folder, read: the plans, and what every rank measured."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.displayed import Shown
from perseus_planner.errors import RunError
from perseus_planner.files import reading
from perseus_planner.plans.plan import Plan
from perseus_planner.runs.recording import COMPUTATIONS, ITERATIONS, computations_path, iterations_path, plan_path

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from perseus_planner.runs.records import ComputationRecord, IterationRecord

_PLAN = re.compile(r"plan-([0-9]{1,9})(?:-pipeline-([0-9]{1,9}))?\.yaml")
_ROWS = re.compile(r"iterations-([0-9]{1,9})\.csv")
_ALL = "copy what all nodes wrote into one folder, or look again when each rank has ended an iteration"


@dataclass(frozen=True)
class RankRecord:
    """What one rank measured.

    Attributes:
        rank: of the whole job.
        iterations: those that are kept, one after another; at least one.
        computations: iteration -> its computations, of the last few.
    """

    rank: int
    iterations: tuple[IterationRecord, ...]
    computations: Mapping[int, tuple[ComputationRecord, ...]] = field(repr=False)

    @property
    def pipeline(self) -> int:
        """The pipeline it is in."""
        return self.iterations[-1].pipeline

    @property
    def pipeline_rank(self) -> int:
        """Which rank of it it is."""
        return self.iterations[-1].pipeline_rank

    def counted(self, version: int) -> tuple[IterationRecord, ...]:
        """The iterations that ran as planned by that plan but for its first one, which is like no other."""
        return tuple(row for row in self.by(version)[1:] if row.is_as_planned)

    def by(self, version: int) -> tuple[IterationRecord, ...]:
        """The iterations that ran by that plan, as planned or not."""
        return tuple(row for row in self.iterations if row.version == version)


@dataclass(frozen=True)
class Run(Shown):
    """What all ranks of a job measured.

    Attributes:
        folder: where it was found.
        plans: (version, pipeline) -> plan; the pipeline is None where all run by one.
        ranks: by their numbers in the job.
    """

    folder: Path
    plans: Mapping[tuple[int, int | None], Plan] = field(repr=False)
    ranks: tuple[RankRecord, ...]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Read a run folder, also while the run goes on.

        Raises:
            RunError: it is none, holds nothing yet, or what one rank wrote is missing or damaged.
            PlanError: one of its plans is damaged.
        """
        folder = Path(folder)
        with reading(folder, RunError):
            names = sorted(each.name for each in folder.iterdir())
        plans = {
            (int(match[1]), None if match[2] is None else int(match[2])): Plan.load(folder / match[0])
            for match in filter(None, map(_PLAN.fullmatch, names))
        }
        numbers = sorted(int(match[1]) for match in filter(None, map(_ROWS.fullmatch, names)))
        _check_names(folder, names, len(plans), len(numbers))
        run = cls(folder, plans, _ranks(folder, numbers))
        run._check()
        return run

    @property
    def versions(self) -> tuple[int, ...]:
        """The plans that were run by, oldest first."""
        return tuple(sorted({row.version for rank in self.ranks for row in rank.iterations if row.version is not None}))

    def plan(self, version: int, pipeline: int) -> Plan:
        """What that pipeline ran by.

        Raises:
            RunError: the plan is not in the folder.
        """
        for key in ((version, pipeline), (version, None)):
            if key in self.plans:
                return self.plans[key]
        raise RunError(
            f"{self.folder}: has iterations by plan {version} and no {plan_path(self.folder, version, None).name}; "
            f"{_ALL}"
        )

    def time_s(self, version: int) -> float | None:
        """Seconds of an iteration by that plan: the mean of those that count, on the rank where that is longest.

        None where no rank has one that counts.
        """
        counted = [rank.counted(version) for rank in self.ranks]
        return max((fmean(row.time_s for row in rows) for rows in counted if rows), default=None)

    def _check(self) -> None:
        """Refuse a folder that has not what all ranks wrote."""
        numbers = [rank.rank for rank in self.ranks]
        for number in range(numbers[-1]):
            if number not in numbers:
                raise RunError(f"{self.folder}: has no iteration of rank {number}, and has some of others; {_ALL}")
        if not self.versions:
            raise RunError(f"{self.folder}: none of its iterations ran by a plan; look again when one has")
        seats = Counter((rank.pipeline, rank.pipeline_rank) for rank in self.ranks)
        for pipeline, _ in list(seats):
            plans = [self.plan(version, pipeline) for version in self.versions if self._ran(version, pipeline)]
            for number in range(max((len(plan.schedule.ranks) for plan in plans), default=0)):
                if not seats[pipeline, number]:
                    where = f"rank {number} of pipeline {pipeline}"
                    raise RunError(f"{self.folder}: has no iteration of {where}, and has some of others; {_ALL}")

    def _ran(self, version: int, pipeline: int) -> bool:
        return any(rank.pipeline == pipeline and rank.by(version) for rank in self.ranks)


class Measured(NamedTuple):
    """What an iteration took, for the calibration of what its plan was made from."""

    plan: Plan  #: of the pipeline that the others wait for, where there are several
    time_s: float  #: mean of the iterations that count, seconds


def calibration_of(run: Run) -> Measured:
    """The time of an iteration by the newest plan.

    Counted are the iterations that ran as planned, but for the first one by that plan; of several pipelines, which end
    every iteration together, the plan is that of the slowest.

    Raises:
        RunError: no iteration counts.
    """
    version = run.versions[-1]
    time_s = run.time_s(version)
    if time_s is None:
        raise RunError(
            f"{run.folder}: no iteration ran as planned by plan {version} after its first one; let the training run on"
        )
    pipelines = sorted({rank.pipeline for rank in run.ranks if rank.by(version)})
    return Measured(max((run.plan(version, each) for each in pipelines), key=lambda plan: plan.time_s), time_s)


def _check_names(folder: Path, names: Sequence[str], plans: int, ranks: int) -> None:
    if not names:
        raise RunError(f"{folder}: is empty; look again when an iteration has ended by a plan")
    if not plans and not ranks:
        raise RunError(
            f"{folder}: is a folder, and not one that a training run has written; name such a folder, or a file"
        )
    if not ranks:
        raise RunError(f"{folder}: no iteration has ended yet; look again when one has")


def _ranks(folder: Path, numbers: Sequence[int]) -> tuple[RankRecord, ...]:
    """Those of which there is an iteration."""
    ranks = []
    for number in numbers:
        old = iterations_path(folder, number, old=True)
        rows = [*(ITERATIONS.read(old) if old.exists() else []), *ITERATIONS.read(iterations_path(folder, number))]
        path = computations_path(folder, number)
        ran = groupby(COMPUTATIONS.read(path) if path.exists() else [], key=lambda each: each.iteration)
        if rows:
            ranks.append(RankRecord(number, tuple(rows), {iteration: tuple(each) for iteration, each in ran}))
    if not ranks:
        raise RunError(f"{folder}: no iteration has ended yet; look again when one has")
    return tuple(ranks)
