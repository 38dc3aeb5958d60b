"""Writes what a rank measures into the run folder, for as long as it can be written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError

if TYPE_CHECKING:
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.recording import RankFiles
    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runtime.hook import RankProgram

WRITTEN_AFTER_S = 5.0
"""How long rows may wait in memory; a killed rank loses them."""
_PERIOD_S = 30
"""How often the computations are replaced. All ranks do it at the same time by the clock of their
node, so that their files hold the same iterations even when iterations are short."""


class RunRecorder:
    """Writes the `RankFiles` of one rank and never raises: if the folder cannot be written, it
    warns once and stops.

    Args:
        files: The files of the rank.
        writes_plans: Whether this rank writes the plans: those of its pipeline, or those of all.
        own_plans: Whether each pipeline has its own plans.
        warn: Called with the reason when writing stops.
        now_s: Returns seconds by a clock that is never set.
    """

    def __init__(
        self,
        files: RankFiles,
        *,
        writes_plans: bool,
        own_plans: bool,
        warn: Callable[[str], None] | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files: RankFiles | None = files
        self._folder, self._warn, self._now_s = files.folder, warn, now_s
        self._writes_plans, self._own_plans = writes_plans, own_plans
        self._version = 0  #: of the plan that was written last
        self._period: int | None = None
        self._status: AutopilotStatus | None = None  #: not written yet
        self._write_s = now_s()  #: when rows are written next; the first one at once

    def add(
        self,
        record: IterationRecord,
        program: RankProgram | None,
        computations: Sequence[ComputationRecord],
    ) -> None:
        """Take an iteration that has ended; `computations` are those of the last iterations."""
        plan = None if program is None else program.plan
        if (
            program is not None
            and plan is not None
            and program.version != self._version
            and self._writes_plans
        ):
            self._version = program.version
            pipeline = record.pipeline if self._own_plans else None
            self._do(lambda files: files.save_plan(plan, program.version, pipeline))
        if self._files is not None:
            self._files.add_iteration(record)
        period = int(record.end_s // _PERIOD_S)
        if period != self._period and self._period is not None:
            self._replace_computations(computations)
        self._period = period

    def take_status(self, status: AutopilotStatus) -> None:
        """Take what the autopilot knows, which is written with the next rows."""
        self._status = status

    def write_if_due(self) -> None:
        """Write the rows that wait, every few seconds."""
        if self._now_s() >= self._write_s and self._files is not None and self._files.has_rows:
            self._do(lambda files: files.write())
            self._write_status()
            self._write_s = self._now_s() + WRITTEN_AFTER_S

    def close(self, computations: Sequence[ComputationRecord]) -> None:
        """Write everything that is left."""
        self._do(lambda files: files.write())
        self._write_status()
        self._replace_computations(computations)
        self._do(lambda files: files.close())

    def _write_status(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            self._do(lambda files: files.save_autopilot(status))

    def _replace_computations(self, computations: Sequence[ComputationRecord]) -> None:
        if computations:
            self._do(lambda files: files.replace_computations(computations))

    def _do(self, write: Callable[[RankFiles], None]) -> None:
        if self._files is None:
            return
        try:
            write(self._files)
        except (OSError, PlannerError) as error:
            self._files.close()
            self._files = None
            if self._warn is not None:
                reason = error.strerror if isinstance(error, OSError) else error
                self._warn(
                    f"{self._folder}: recording stops: {reason}; training goes on without recording"
                )
