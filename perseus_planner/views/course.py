"""The course of a run without a plan: time, energy and clock of its iterations, one after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.runs.records import IterationRecord
    from perseus_planner.runs.run import Run

MOST_POINTS = 400
"""Most points of a curve, which is about as many as a screen tells apart (by hand)."""


@dataclass(frozen=True)
class RunCourse:
    """The iterations of the newest attempt that its folder holds; each list has an entry for a
    point, which is the mean of `each` iterations.
    """

    each: int  #: number of successive iterations of a point; the last one may have fewer
    iterations: tuple[int, ...]  #: number of the first iteration of each point
    times_s: tuple[float, ...]  #: seconds of an iteration, on the slowest rank
    #: joules of an iteration on all GPUs; None where that of a rank is not known.
    energies_j: tuple[float | None, ...]
    #: mean clock that was requested, over ranks and time; None where none was.
    clocks: tuple[float | None, ...]
    reference_s: float | None  #: seconds of an iteration at full clocks; None if it is not known


def course_of(run: Run) -> RunCourse:
    """Return the course of what all ranks of a run have recorded."""
    by_rank = [{row.iteration: row for row in rank.iterations} for rank in run.ranks]
    # Ranks may have kept different iterations, and a point needs all of them.
    common = sorted(set.intersection(*map(set, by_rank)))
    # So many iterations share a point that a long run has no more points than can be seen.
    per_point = max(1, math.ceil(len(common) / MOST_POINTS))
    groups = [common[first : first + per_point] for first in range(0, len(common), per_point)]
    rows = [[[rank[number] for rank in by_rank] for number in group] for group in groups]
    return RunCourse(
        per_point,
        tuple(group[0] for group in groups),
        # An iteration is as long as on its slowest rank.
        tuple(fmean(max(row.time_s for row in ranks) for ranks in point) for point in rows),
        tuple(_mean([_energy_j(ranks) for ranks in point]) for point in rows),
        tuple(_mean([_clock(ranks) for ranks in point]) for point in rows),
        None if run.decider is None else run.decider.reference_s,
    )


def _energy_j(ranks: Sequence[IterationRecord]) -> float | None:
    energies_j = [row.energy_j for row in ranks if row.energy_j is not None]
    return math.fsum(energies_j) if len(energies_j) == len(ranks) else None


def _clock(ranks: Sequence[IterationRecord]) -> float | None:
    return _mean([row.clock for row in ranks])


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None
