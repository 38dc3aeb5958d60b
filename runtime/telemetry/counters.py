"""Adds up the iterations of a rank since its training began, and writes its part of the run folder.

Ranks keep checkpoints of their accounts at the same iterations without communicating: at multiples
of a power of two that follows from how long iterations take. If ranks arrive at different powers,
the multiples of the greater one are multiples of the smaller one too.

A recorder writes them, and all else that a rank measures, into the run folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.base.errors import PlannerError
from perseus_planner.runs.account import Account

if TYPE_CHECKING:
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.recording import RankFiles
    from perseus_planner.runs.records import ComputationRecord, IterationRecord
    from perseus_planner.runtime.hook import Program


CHECKPOINT_S = 2.0
"""Longest time between two checkpoints, in seconds, unless a single iteration is longer."""
CHECKPOINTS = 8
"""How many checkpoints are kept, because ranks are not all equally far."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The account of a rank from its first iteration to the end of one, and how it is then."""

    account: Account = field(default_factory=Account)
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
    gpu: str | None = None  #: Name of the GPU
    planned_gpu: str | None = None  #: Name of that which the plan is of

    @property
    def iteration(self) -> int:
        """Number of the last iteration; -1 if there was none."""
        last = self.account.last_iteration
        return -1 if last is None else last


class Checkpoints:
    """Adds up the iterations of one rank.

    Args:
        is_first: Whether it is the first rank of the job.

    Attributes:
        kept: The last checkpoints, the newest last. A new tuple replaces it; it is never changed.
        site_limit_w: As in `Checkpoint`, to be kept with the next of them.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.kept: tuple[Checkpoint, ...] = ()
        self.site_limit_w: float | None = None
        self._is_first, self._account = is_first, Account()
        self._recent: list[IterationRecord] = []  #: since the last checkpoint
        self._off_plan_since_s: float | None = None
        self._planned_gpu: str | None = None

    def add(self, record: IterationRecord, planned_gpu: str | None = None) -> None:
        """Add an iteration; `planned_gpu` is the name of the GPU that its plan is of."""
        self._account += Account.of(record, is_first=self._is_first)
        self._recent.append(record)
        self._planned_gpu = planned_gpu
        self._off_plan_since_s = (
            None if record.is_as_planned else self._off_plan_since_s or record.begin_s
        )
        if (record.iteration + 1) % _stride(self._account.gpu_s / self._account.windows) == 0:
            self.keep()

    def keep(self) -> None:
        """Keep a checkpoint, unless nothing was added since the last one."""
        if not self._recent:
            return
        p50_s, p99_s = (
            [value for row in self._recent if (value := getattr(row, name)) is not None]
            for name in ("latency_p50_s", "latency_p99_s")
        )
        checkpoint = Checkpoint(
            account=self._account,
            set_p50_s=median(p50_s) if p50_s else None,
            set_p99_s=max(p99_s, default=None),
            off_plan_since_s=self._off_plan_since_s,
            site_limit_w=self.site_limit_w,
            gpu=self._recent[-1].gpu,
            planned_gpu=self._planned_gpu,
        )
        self.kept = (*self.kept, checkpoint)[-CHECKPOINTS:]
        self._recent = []


def common_checkpoint(of_ranks: Sequence[Sequence[Checkpoint]]) -> list[Checkpoint] | None:
    """Return the checkpoint of each rank at the newest iteration that all have one of; None if
    there is none.
    """
    by_iteration = [{kept.iteration: kept for kept in of_rank} for of_rank in of_ranks]
    shared = set(by_iteration[0]).intersection(*by_iteration[1:]) if by_iteration else set()
    return [kept[max(shared)] for kept in by_iteration] if shared else None


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
