"""Writes what a rank measures into the run's folder, for as long as that goes well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError
from perseus_planner.runs.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runtime.program import Program

_EVERY_S = 30
"""How often the computations are replaced. All ranks do it in the same moment, by the clock of their node: that is how
they have the same iterations where iterations are short."""


class Recorder:
    """One rank's `Recording` that never raises: where the folder cannot be written, that is said once, and all is over.

    Args:
        folder: of the run.
        rank: of the whole job.
        pipeline_rank: of its pipeline.
        own_plans: whether each pipeline writes down its own plan; else the job's first rank writes the one of all.
        say: is told why nothing is written any more.
    """

    def __init__(
        self, folder: Path, rank: int, pipeline_rank: int, *, own_plans: bool, say: Callable[[str], None] | None
    ) -> None:
        self._folder, self._say, self._own_plans = folder, say, own_plans
        self._recording: Recording | None = Recording(folder, rank)
        self._keeps_plans = (pipeline_rank if own_plans else rank) == 0
        self._version = 0  #: of the plan that was written last
        self._slot: int | None = None

    def write(self, row: IterationRecord, program: Program | None, computations: Sequence[ComputationRecord]) -> None:
        """An iteration has ended; `computations` are those of the last ones."""
        if program is not None and program.version != self._version and self._keeps_plans:
            self._version = program.version
            pipeline = row.pipeline if self._own_plans else None
            self._do(lambda recording: recording.keep_plan(program.plan, program.version, pipeline))
        self._do(lambda recording: recording.add(row))
        slot = int(row.end_s // _EVERY_S)
        if slot != self._slot and self._slot is not None:
            self.keep(computations)
        self._slot = slot

    def keep(self, computations: Sequence[ComputationRecord]) -> None:
        """Replace the computations that are kept."""
        if computations:
            self._do(lambda recording: recording.keep(computations))

    def _do(self, write: Callable[[Recording], None]) -> None:
        if self._recording is None:
            return
        try:
            write(self._recording)
        except (OSError, PlannerError) as error:
            self._recording = None
            if self._say is not None:
                why = error.strerror if isinstance(error, OSError) else error
                self._say(f"{self._folder}: no more is recorded there: {why}; the training goes on without")
