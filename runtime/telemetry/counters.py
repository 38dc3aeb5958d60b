"""What a rank counts from the begin of its training: iterations, how long they took, and what its GPU took meanwhile.

An iteration counts from the end of the one before, so with what lies in between, such as the wait for other pipelines
or the optimizer's step. After a pause, as for an evaluation, it counts from its own begin: no plan is about that.

Ranks keep their counts at the same iterations without asking each other: at multiples of a power of two that follows
from how long iterations take. Where ranks find different powers, the multiples of the greater are the other's too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.runs import IterationRecord

MARK_S = 2.0
"""Seconds between two iterations at which counts are kept, at most; but for iterations that are longer."""
MARKS = 8
"""How many of them are remembered, as ranks are not all equally far."""
PAUSE, PAUSE_S = 2.0, 1.0
"""It is a pause when so many times the iteration that follows, and so many seconds, pass between two iterations."""


@dataclass(frozen=True)
class Counts:
    """What a rank has counted from its first iteration to the end of one.

    Attributes:
        iteration: the number of that one; -1: there was none.
        iterations: how many were timed.
        time_s: how long they took, seconds.
        metered_iterations: those of them of which the energy of its GPU is known.
        metered_s: how long these took, seconds.
        energy_j: of its GPU in these, joules.
        origin: how energy comes to be, "measured" or "simulated"; None: no GPU was read.
        late_changes: clock changes that were made when much of the first computation was over that they were for.
        set_p50_s: from when a clock was asked for until its call returned, seconds: of the medians of the iterations
            since the counts that were kept before, the median; None: none was set.
        set_p99_s: likewise of the 99th percentiles, the greatest.
    """

    iteration: int = -1
    iterations: int = 0
    time_s: float = 0.0
    metered_iterations: int = 0
    metered_s: float = 0.0
    energy_j: float = 0.0
    origin: str | None = None
    late_changes: int = 0
    set_p50_s: float | None = None
    set_p99_s: float | None = None

    def after(self, row: IterationRecord, time_s: float, energy_j: float | None) -> Counts:
        """With one more iteration, from what it counts from to its end; `energy_j` is None where it is not known."""
        is_metered = energy_j is not None
        return replace(
            self,
            iteration=row.iteration,
            iterations=self.iterations + 1,
            time_s=self.time_s + time_s,
            metered_iterations=self.metered_iterations + is_metered,
            metered_s=self.metered_s + (time_s if is_metered else 0.0),
            energy_j=self.energy_j + (energy_j or 0.0),
            origin=row.origin or self.origin,
            late_changes=self.late_changes + row.changes_late,
        )


class Counting:
    """The counts of one rank.

    Attributes:
        marks: those that were kept, the newest last; never changed, but replaced.
    """

    def __init__(self) -> None:
        self.marks: tuple[Counts, ...] = ()
        self._counts = Counts()
        self._recent: list[IterationRecord] = []  #: since the last of the marks

    def add(self, row: IterationRecord, time_s: float, energy_j: float | None) -> None:
        """Count an iteration, as `Counts.after` does."""
        self._counts = self._counts.after(row, time_s, energy_j)
        self._recent.append(row)
        if (row.iteration + 1) % _stride(self._counts.time_s / self._counts.iterations) == 0:
            self._mark()

    def close(self) -> None:
        """There are no more: keep the last counts."""
        if self._recent:
            self._mark()

    def _mark(self) -> None:
        p50_s = [row.latency_p50_s for row in self._recent if row.latency_p50_s is not None]
        p99_s = [row.latency_p99_s for row in self._recent if row.latency_p99_s is not None]
        counts = replace(self._counts, set_p50_s=median(p50_s) if p50_s else None, set_p99_s=max(p99_s, default=None))
        self.marks = (*self.marks, counts)[-MARKS:]
        self._recent = []


def is_pause(between_s: float, iteration_s: float) -> bool:
    """Whether so many seconds before an iteration that takes `iteration_s` are a pause."""
    return between_s > PAUSE * iteration_s + PAUSE_S


def common(of_ranks: Sequence[Sequence[Counts]]) -> list[Counts] | None:
    """The counts of each rank at the newest iteration of which all have kept them; None: there is none."""
    numbers = [{each.iteration: each for each in marks} for marks in of_ranks]
    shared = set(numbers[0]).intersection(*numbers[1:]) if numbers else set()
    return [each[max(shared)] for each in numbers] if shared else None


def _stride(iteration_s: float) -> int:
    """The greatest power of two, up to 1024, whose iterations take `MARK_S` at most; 1 where a single one is longer."""
    return 1 if iteration_s >= MARK_S else 1 << min(10, int(math.log2(MARK_S / max(iteration_s, 1e-9))))
