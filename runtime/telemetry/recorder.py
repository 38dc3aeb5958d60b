"""Writes what a rank measures into the run folder, for as long as it can be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.runs.recording import RankFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runtime.hook import Program

_PERIOD_S = 30
"""How often the computations are replaced. All ranks do it at the same time by the clock of their node, so that their
files hold the same iterations even when iterations are short."""


class RunRecorder:
    """Writes the `RankFiles` of one rank and never raises: if the folder cannot be written, it warns once and stops.

    Args:
        folder: The run folder.
        rank: Rank in the whole job.
        pipeline_rank: Rank in the pipeline.
        own_plans: Whether each pipeline writes its plans; otherwise the job's first rank writes the common ones.
        warn: Called with the reason when writing stops.
    """

    def __init__(
        self, folder: Path, rank: int, pipeline_rank: int, *, own_plans: bool, warn: Callable[[str], None] | None
    ) -> None:
        self._folder, self._warn, self._own_plans = folder, warn, own_plans
        self._files: RankFiles | None = RankFiles(folder, rank)
        self._writes_plans = (pipeline_rank if own_plans else rank) == 0
        self._version = 0  #: of the plan that was written last
        self._period: int | None = None

    def add(self, record: IterationRecord, program: Program | None, computations: Sequence[ComputationRecord]) -> None:
        """Write an iteration that has ended; `computations` are those of the last iterations."""
        if program is not None and program.version != self._version and self._writes_plans:
            self._version = program.version
            pipeline = record.pipeline if self._own_plans else None
            self._write(lambda files: files.save_plan(program.plan, program.version, pipeline))
        self._write(lambda files: files.add_iteration(record))
        period = int(record.end_s // _PERIOD_S)
        if period != self._period and self._period is not None:
            self.replace_computations(computations)
        self._period = period

    def replace_computations(self, computations: Sequence[ComputationRecord]) -> None:
        """Replace the computations in the folder."""
        if computations:
            self._write(lambda files: files.replace_computations(computations))

    def _write(self, write: Callable[[RankFiles], None]) -> None:
        if self._files is None:
            return
        try:
            write(self._files)
        except (OSError, PlannerError) as error:
            self._files = None
            if self._warn is not None:
                reason = error.strerror if isinstance(error, OSError) else error
                self._warn(f"{self._folder}: recording stops: {reason}; training goes on without recording")
