"""Reads a run folder: the plans and the rows of an attempt, and the totals of all attempts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import fsum
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from perseus_planner.base.errors import RunError
from perseus_planner.base.files import reading
from perseus_planner.base.tables import WHOLE, make_frame
from perseus_planner.gpu.sensor import MIN_SAMPLES, apart_w, chance_w, disagreement_text
from perseus_planner.plans.calibration import MeasuredPlan
from perseus_planner.plans.plan import Plan
from perseus_planner.runs import recording
from perseus_planner.runs.account import Account, Entry, fold
from perseus_planner.runs.jitter import jitter_of
from perseus_planner.runs.recording import (
    COMPUTATIONS,
    ITERATIONS,
    add_rows,
    attempt_of,
    attempt_path,
    attempts_in,
    ends_whole,
    plan_path,
    ranks_in,
    read_totals,
)
from perseus_planner.runs.status import DeciderStatus, read_status

if TYPE_CHECKING:
    import pandas as pd

    from perseus_planner.runs.records import ComputationRecord, IterationRecord

_PLAN = re.compile(r"plan-([0-9]{1,9})(?:-pipeline-([0-9]{1,9}))?\.yaml")
_REMEDY = (
    "copy the files of all nodes into one folder, or try again when each rank has ended an "
    "iteration"
)
_COMPARED_S = 60.0
"""Shortest time in which counter and sensor of a run are compared, seconds: a hundred readings of
the sensor.
"""
_NOT_YET = "no iteration has ended yet; try again when one has"


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded."""

    rank: int  #: Rank in the whole job
    iterations: tuple[IterationRecord, ...]  #: The iterations in the folder, in order; at least one
    #: Iteration -> its computations, for the last iterations.
    computations: Mapping[int, tuple[ComputationRecord, ...]] = field(repr=False)
    #: Whether another row has no end, because the rank was killed, the disk was full, or it is
    #: being written.
    is_cut_off: bool = False

    @property
    def pipeline(self) -> int:
        """Number of its pipeline."""
        return self.iterations[-1].pipeline

    @property
    def pipeline_rank(self) -> int:
        """Rank in its pipeline."""
        return self.iterations[-1].pipeline_rank

    def counted(self, version: int) -> tuple[IterationRecord, ...]:
        """Return the iterations that ran as planned by a plan, without its first one and those
        that follow an evaluation, which are not typical.
        """
        return tuple(
            row
            for row in self.iterations_by(version)[1:]
            if row.is_as_planned and not row.follows_evaluation
        )

    @property
    def typical(self) -> tuple[IterationRecord, ...]:
        """The iterations without the first one and those that follow an evaluation; all of them
        if there are no others.
        """
        rows = tuple(row for row in self.iterations[1:] if not row.follows_evaluation)
        return rows or self.iterations

    def iterations_by(self, version: int) -> tuple[IterationRecord, ...]:
        """Return the iterations that ran by a plan, as planned or not."""
        return tuple(row for row in self.iterations if row.version == version)

    @property
    def disagreement(self) -> str | None:
        """How far the energy counter and the power sensor of its GPU are apart in all iterations,
        in words; None if they agree, or were compared for less than `_COMPARED_S` seconds.
        """
        # Both must be known of the same iterations.
        compared = [
            (row.time_s, row.energy_j, row.sensor_j)
            for row in self.iterations
            if row.energy_j is not None and row.sensor_j is not None and row.time_s > 0
        ]
        time_s = fsum(row_s for row_s, _, _ in compared)
        # The sensor is read seldom, so a short time tells nothing.
        if len(compared) < MIN_SAMPLES or time_s < _COMPARED_S:
            return None
        counter_w = fsum(energy_j for _, energy_j, _ in compared) / time_s
        sensor_w = fsum(sensor_j for _, _, sensor_j in compared) / time_s
        # Differences of iterations tell how far apart the means may be by chance.
        differences_w = [(sensor_j - energy_j) / row_s for row_s, energy_j, sensor_j in compared]
        doubt_w = chance_w(stdev(differences_w), len(compared))
        if not apart_w(counter_w, sensor_w, doubt_w):
            return None
        return disagreement_text(f"rank {self.rank}", counter_w, sensor_w)

    def account(self, version: int) -> Account:
        """Return the account of the `counted` iterations."""
        rows = self.counted(version)
        return sum((Account.of(row, is_first=self.rank == 0) for row in rows), Account())


@dataclass(frozen=True)
class Run:
    """What all ranks of a job recorded: its newest attempt that has iterations, and the totals of
    all attempts.
    """

    folder: Path  #: The run folder, or that of one attempt, which is then read instead
    #: (version, pipeline) -> plan; the pipeline is None if all pipelines run by one plan.
    plans: Mapping[tuple[int, int | None], Plan] = field(repr=False)
    ranks: tuple[RankRecord, ...]  #: The ranks of the attempt, in order
    attempt: int  #: Number of the attempt
    #: What ran by each plan in each attempt, oldest first.
    totals: tuple[Entry, ...] = field(repr=False)
    #: What the decider knew last; None if the attempt was trained by plans.
    decider: DeciderStatus | None = None

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Read a run folder; the run may still go on.

        Raises:
            RunError: If it is not a run folder, has no iterations yet, or the files of a rank are
                missing or damaged.
            PlanError: If a plan is damaged.
        """
        folder = Path(folder)
        with reading(folder, RunError):
            # The folder may be a run's, or that of one of its attempts.
            attempt = attempt_of(folder.resolve())
            if attempt is None:
                _check_names(folder)
            root = folder if attempt is None else folder.resolve().parent
            attempts = attempts_in(root) if attempt is None else [attempt]
            rows = {
                number: _rows(folder if attempt else attempt_path(root, number))
                for number in attempts
            }
        # The newest attempt may not have ended an iteration yet.
        with_rows = [number for number in attempts if rows[number]]
        if not with_rows:
            raise RunError(f"{folder}: {_NOT_YET}")
        newest = with_rows[-1]
        path = folder if attempt else attempt_path(root, newest)
        # Plans belong to the attempt, as numbers of plans begin anew in each.
        plans = {
            (int(match[1]), None if match[2] is None else int(match[2])): Plan.load(path / match[0])
            for match in filter(None, map(_PLAN.fullmatch, sorted(os.listdir(path))))
        }
        ranks = tuple(_rank(path, rank, rank_rows) for rank, rank_rows in rows[newest].items())
        run = cls(
            folder, plans, ranks, newest, _totals(root, rows, only=attempt), read_status(path)
        )
        # Files of some nodes may be missing, and sums over the others would be wrong.
        run._check()
        return run

    @property
    def total(self) -> Account:
        """The sum of all totals: what the job ran, used and saved since it began to record."""
        return sum(self.totals, Account())

    @property
    def is_dry_run(self) -> bool:
        """Whether the ranks set no clocks in their last iterations."""
        return any(rank.iterations[-1].is_dry_run for rank in self.ranks)

    @property
    def disagreements(self) -> tuple[str, ...]:
        """On which ranks the energy counter and the power sensor disagree, in sentences."""
        return tuple(rank.disagreement for rank in self.ranks if rank.disagreement is not None)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the plans that iterations ran by, oldest first; without plans that are no
        longer kept.
        """
        # A plan that is not kept any more cannot be shown, though iterations ran by it.
        kept = {version for version, _ in self.plans}
        oldest = min(kept) if len(kept) >= recording.PLANS_KEPT else 0
        used_versions = {
            row.version for rank in self.ranks for row in rank.iterations if row.version is not None
        }
        return tuple(sorted(version for version in used_versions if version >= oldest))

    def plan_name(self, version: int) -> str:
        """Return what a plan is called: as its service counts it, where plans of one have come."""
        # The service counts plans over all jobs; without one a version is a number of this run.
        rows = [row for rank in self.ranks for row in rank.iterations]
        numbers = [row.service_version for row in rows if row.version == version]
        number = next((number for number in numbers if number is not None), None)
        if number is not None:
            return str(number)
        is_served = any(row.service_version is not None for row in rows)
        return f"own {version}" if is_served else str(version)

    @property
    def newest_version(self) -> int:
        """Version of the newest plan that iterations ran by.

        Raises:
            RunError: If the attempt was trained without a plan.
        """
        if not self.versions:
            raise RunError(
                f"{self.folder}: was trained without a plan, so there is none beside which to see "
                "it; `planner show` and `planner report` say what it learnt and saved"
            )
        return self.versions[-1]

    def plan(self, version: int, pipeline: int) -> Plan:
        """Return the plan of a version that a pipeline ran by.

        Raises:
            RunError: If the plan is not in the folder.
        """
        for key in ((version, pipeline), (version, None)):
            if key in self.plans:
                return self.plans[key]
        raise RunError(
            f"{self.folder}: has iterations by plan {version} but no "
            f"{plan_path(self.folder, version, None).name}; {_REMEDY}"
        )

    def time_s(self, version: int) -> float | None:
        """Return the seconds of an iteration by a plan: the mean of the `counted` ones, on the
        slowest rank.

        None if no rank has such an iteration.
        """
        # Ranks wait for each other, so the slowest one decides.
        counted = [rank.counted(version) for rank in self.ranks]
        return max((fmean(row.time_s for row in rows) for rows in counted if rows), default=None)

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame with a row for each iteration of each rank, with the fields of
        `IterationRecord`.

        Raises:
            UsageError: If pandas is not installed.
        """
        rows = [
            {"rank": rank.rank, **ITERATIONS.cells(row)}
            for rank in self.ranks
            for row in rank.iterations
        ]
        frame = make_frame(rows, {"version": WHOLE})
        texts = ("deviation", "origin", "gpu")
        # Columns of objects, where numbers may be missing, would not add up.
        unknown = [
            name for name in frame.columns if frame[name].dtype == object and name not in texts
        ]
        return frame.astype(dict.fromkeys(unknown, float))

    def _check(self) -> None:
        """Refuse a folder that lacks files of some ranks."""
        # Ranks are numbered without a gap, so a hole is a missing file.
        numbers = [rank.rank for rank in self.ranks]
        for number in range(numbers[-1]):
            if number not in numbers:
                raise RunError(
                    f"{self.folder}: has no iterations of rank {number}, but of other ranks; "
                    f"{_REMEDY}"
                )
        if not self.versions and self.decider is None:
            raise RunError(f"{self.folder}: no iteration has run by a plan; try again when one has")
        # Several ranks may share a place in a pipeline, and one of them must be there.
        rank_counts = Counter((rank.pipeline, rank.pipeline_rank) for rank in self.ranks)
        for pipeline, _ in list(rank_counts):
            plans = [
                self.plan(version, pipeline)
                for version in self.versions
                if self._ran(version, pipeline)
            ]
            for number in range(max((len(plan.schedule.ranks) for plan in plans), default=0)):
                if not rank_counts[pipeline, number]:
                    where = f"rank {number} of pipeline {pipeline}"
                    raise RunError(
                        f"{self.folder}: has no iterations of {where}, but of other ranks; "
                        f"{_REMEDY}"
                    )

    def _ran(self, version: int, pipeline: int) -> bool:
        return any(rank.pipeline == pipeline and rank.iterations_by(version) for rank in self.ranks)


def calibration_of(run: Run) -> MeasuredPlan:
    """Return the time of an iteration by the newest plan, and the jitter of its computations.

    Only iterations that ran as planned count, without the first one by that plan. If there are
    several pipelines, which end every iteration together, the plan is that of the slowest.

    Raises:
        RunError: If no iteration counts.
    """
    version = run.newest_version
    time_s = run.time_s(version)
    if time_s is None:
        raise RunError(
            f"{run.folder}: no iteration ran as planned by plan {run.plan_name(version)} after its "
            "first one; train for longer"
        )
    pipelines = sorted({rank.pipeline for rank in run.ranks if rank.iterations_by(version)})
    plans = [run.plan(version, pipeline) for pipeline in pipelines]
    plan = max(plans, key=lambda plan: plan.time_s)
    recorded = {
        rank.rank: {
            row.iteration: rank.computations.get(row.iteration, ()) for row in rank.counted(version)
        }
        for rank in run.ranks
    }
    return MeasuredPlan(plan, time_s, str(run.folder), jitter_of(recorded))


def _check_names(folder: Path) -> None:
    names = os.listdir(folder)
    if not names:
        raise RunError(f"{folder}: is empty; try again when an iteration by a plan has ended")
    if any(_PLAN.fullmatch(name) or name.startswith("iterations-") for name in names):
        raise RunError(
            f"{folder}: has files of a run of version 0.1, which this one does not read; move "
            "them to another folder, and show them with the planner that the training ran with"
        )
    if not attempts_in(folder):
        raise RunError(
            f"{folder}: is a folder, but not a run folder; name a folder that a training run has "
            "written, or a file"
        )


def _rows(attempt: Path) -> dict[int, list[IterationRecord]]:
    """Return rank -> its rows, for ranks that have some."""
    by_rank = {}
    for rank in ranks_in(attempt):
        # The older file first, so that rows are in order.
        paths = [recording.iterations_path(attempt, rank, old=old) for old in (True, False)]
        rows = [row for path in paths if path.exists() for row in ITERATIONS.read(path)]
        if rows:
            by_rank[rank] = rows
    return by_rank


def _rank(attempt: Path, number: int, rows: Sequence[IterationRecord]) -> RankRecord:
    path = recording.computations_path(attempt, number)
    groups = groupby(
        COMPUTATIONS.read(path) if path.exists() else [], key=lambda each: each.iteration
    )
    computations = {iteration: tuple(group) for iteration, group in groups}
    path = recording.iterations_path(attempt, number)
    return RankRecord(number, tuple(rows), computations, path.exists() and not ends_whole(path))


def _totals(
    folder: Path, rows: Mapping[int, Mapping[int, Sequence[IterationRecord]]], only: int | None
) -> tuple[Entry, ...]:
    """Return the totals of all ranks in all attempts, or in one; `rows` are attempt -> rank ->
    its rows.
    """
    # A rank may have totals alone, once its rows were added up.
    totals: list[Entry] = []
    for rank in sorted(
        {*ranks_in(folder), *(rank for by_rank in rows.values() for rank in by_rank)}
    ):
        of_rank = read_totals(folder, rank)
        for attempt, by_rank in rows.items():
            # Rows that are in the totals already are not added again.
            of_rank = add_rows(of_rank, attempt, rank, by_rank.get(rank, ()))
        totals += (total for total in of_rank if only in (None, total.attempt))
    return fold(totals)
