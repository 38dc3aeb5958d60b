"""Counts the iterations of a rank since its training began: how long they took, and what its GPU
used meanwhile.

An iteration counts from the end of the one before it, so it includes what lies between, such as the
optimizer's step or the wait for other pipelines. After a pause, for example an evaluation, it
counts from its own begin, because plans do not cover pauses.

Ranks keep checkpoints of their counts at the same iterations without communicating: at multiples of
a power of two that follows from how long iterations take. If ranks arrive at different powers, the
multiples of the greater one are multiples of the smaller one too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.runs import IterationRecord

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
