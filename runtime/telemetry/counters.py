"""Counts the iterations of a rank since its training began: how long they took, and what its GPU
used meanwhile.

An iteration counts from the end of the one before it, so it includes what lies between, such as the
optimizer's step or the wait for other pipelines. After a pause, for example an evaluation, it
counts from its own begin, because plans do not cover pauses.

Ranks keep checkpoints of their counts at the same iterations without communicating: at multiples of
a power of two that follows from how long iterations take. If ranks arrive at different powers, the
multiples of the greater one are multiples of the smaller one too.

A recorder writes them, and all else that a rank measures, into the run folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError

if TYPE_CHECKING:
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.recording import RankFiles
    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runtime.hook import Program


CHECKPOINT_S = 2.0
"""Longest time between two checkpoints, in seconds, unless a single iteration is longer."""
CHECKPOINTS = 8
"""How many checkpoints are kept, because ranks are not all equally far."""
PAUSE, PAUSE_S = 2.0, 1.0
"""The time between two iterations is a pause if it is longer than `PAUSE` times the second one
plus `PAUSE_S`.
"""


@dataclass(frozen=True)
class Counts:
    """What a rank has counted from its first iteration to the end of one."""

    iteration: int = -1  #: Number of the last iteration; -1 if there was none
    iterations: int = 0  #: Number of iterations that were timed
    time_s: float = 0.0  #: How long they took, in seconds
    metered_iterations: int = 0  #: Number of iterations for which the energy of the GPU is known
    metered_s: float = 0.0  #: How long the metered iterations took, in seconds
    energy_j: float = 0.0  #: Energy of the GPU in the metered iterations, in joules
    origin: str | None = None  #: "measured" or "simulated"; None if no GPU was read
    #: Clock changes that were made late in the first computation that they were for.
    late_changes: int = 0
    #: Seconds from a clock request to the return of the call that sets it: the median, over the
    #: iterations since the previous checkpoint, of their medians. None if no clock was set.
    set_p50_s: float | None = None
    #: The same for the 99th percentiles, of which the greatest is taken.
    set_p99_s: float | None = None
    #: Since when the rank has not followed its plan, in seconds since the epoch; None if its last
    #: iteration ran as planned.
    off_plan_since_s: float | None = None
    #: Power limit of the GPU in watts if something else has set it below the default; None if not.
    site_limit_w: float | None = None

    def plus(self, record: IterationRecord, time_s: float, energy_j: float | None) -> Counts:
        """Return the counts with one more iteration; `energy_j` is None if it is not known."""
        is_metered = energy_j is not None
        off_plan_since_s = None if record.is_as_planned else self.off_plan_since_s or record.begin_s
        return replace(
            self,
            iteration=record.iteration,
            iterations=self.iterations + 1,
            time_s=self.time_s + time_s,
            metered_iterations=self.metered_iterations + is_metered,
            metered_s=self.metered_s + (time_s if is_metered else 0.0),
            energy_j=self.energy_j + (energy_j or 0.0),
            origin=record.origin or self.origin,
            late_changes=self.late_changes + record.changes_late,
            off_plan_since_s=off_plan_since_s,
        )


class IterationCounter:
    """Counts the iterations of one rank.

    Attributes:
        checkpoints: The last counts that were kept, the newest last. A new tuple replaces it; it is
            never changed.
        site_limit_w: As in `Counts`, to be kept with the next of them.
    """

    def __init__(self) -> None:
        self.checkpoints: tuple[Counts, ...] = ()
        self._counts = Counts()
        self._recent: list[IterationRecord] = []  #: since the last checkpoint
        self.site_limit_w: float | None = None

    def add(self, record: IterationRecord, time_s: float, energy_j: float | None) -> None:
        """Count an iteration, as `Counts.plus` does."""
        self._counts = self._counts.plus(record, time_s, energy_j)
        self._recent.append(record)
        if (record.iteration + 1) % _stride(self._counts.time_s / self._counts.iterations) == 0:
            self._keep_checkpoint()

    def close(self) -> None:
        """Keep the last counts."""
        if self._recent:
            self._keep_checkpoint()

    def _keep_checkpoint(self) -> None:
        p50_s = [
            record.latency_p50_s for record in self._recent if record.latency_p50_s is not None
        ]
        p99_s = [
            record.latency_p99_s for record in self._recent if record.latency_p99_s is not None
        ]
        counts = replace(
            self._counts,
            set_p50_s=median(p50_s) if p50_s else None,
            set_p99_s=max(p99_s, default=None),
            site_limit_w=self.site_limit_w,
        )
        self.checkpoints = (*self.checkpoints, counts)[-CHECKPOINTS:]
        self._recent = []


def is_pause(between_s: float, iteration_s: float) -> bool:
    """Whether `between_s` seconds before an iteration of `iteration_s` seconds are a pause."""
    return between_s > PAUSE * iteration_s + PAUSE_S


def common_counts(of_ranks: Sequence[Sequence[Counts]]) -> list[Counts] | None:
    """Return the counts of each rank at the newest iteration that all have a checkpoint of; None
    if there is none.
    """
    by_iteration = [
        {counts.iteration: counts for counts in checkpoints} for checkpoints in of_ranks
    ]
    shared = set(by_iteration[0]).intersection(*by_iteration[1:]) if by_iteration else set()
    return [counts[max(shared)] for counts in by_iteration] if shared else None


def _stride(iteration_s: float) -> int:
    """Return the greatest power of two, up to 1024, of which that many iterations take at most
    `CHECKPOINT_S`.
    """
    return (
        1
        if iteration_s >= CHECKPOINT_S
        else 1 << min(10, int(math.log2(CHECKPOINT_S / max(iteration_s, 1e-9))))
    )


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
        program: Program | None,
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
