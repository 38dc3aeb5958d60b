"""The offsets between the clocks of ranks, from what each waits for of another.

A computation begins after the one whose output it takes has ended. Forwards so bound the offset of
two clocks from one side, and backwards from the other, as NTP's requests and replies do (Mills,
1991). Bounds add up along ranks; the tightest are those of shortest paths (Floyd and Warshall).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.schedules.schedule import dependency_of

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from perseus_planner.schedules import Schedule

    Floats: TypeAlias = NDArray[np.float64]

_SLACK_S = 2e-6
"""How far bounds may contradict each other: files round times to a microsecond or less."""


@dataclass(frozen=True)
class Offsets:
    """By how much the clock of each rank is ahead of the first one's, seconds."""

    middle_s: tuple[float, ...]
    width_s: tuple[float, ...]  #: the truth is within the middle and plus or minus this


def find_offsets(schedule: Schedule, begins_s: Floats, ends_s: Floats) -> Offsets:
    """Return the offsets of the clocks of a pipeline's ranks.

    Args:
        schedule: what the ranks ran.
        begins_s: (steps, computations) when each computation began by its rank's clock, in the
            order of `schedule.computations()`.
        ends_s: (steps, computations) when it ended.

    Raises:
        UsageError: If no offsets agree with the order: the ranks ran different steps.
    """
    ranks = len(schedule.ranks)
    computations = list(schedule.computations())
    position_of = {computation: number for number, computation in enumerate(computations)}
    rank_of = [rank for rank, row in enumerate(schedule.ranks) for _ in row]
    # A computation without work has no kernels, so when it ran is not known.
    has_work = (ends_s - begins_s).max(axis=0) > 0.0
    # bounds[a, b]: the most by which the clock of b can be ahead of that of a.
    bounds = np.full((ranks, ranks), np.inf)
    np.fill_diagonal(bounds, 0.0)
    for number, computation in enumerate(computations):
        needed = dependency_of(computation, position_of, schedule.stages - 1)
        # On one rank both are of one clock, which tells nothing of offsets.
        if needed is None or rank_of[position_of[needed]] == rank_of[number]:
            continue
        if not has_work[number] or not has_work[position_of[needed]]:
            continue  # when it ran is not recorded
        sender = rank_of[position_of[needed]]
        receiver = rank_of[number]
        # The smallest distance over all steps is the tightest bound.
        ahead_s = float((begins_s[:, number] - ends_s[:, position_of[needed]]).min())
        bounds[sender, receiver] = min(bounds[sender, receiver], ahead_s)
    # What holds between a and b, and b and c, bounds a and c as well.
    for middle in range(ranks):
        through = bounds[:, middle, None] + bounds[None, middle, :]
        bounds = np.minimum(bounds, through)
    # A cycle of negative length has no solution, whatever the offsets are.
    if float(np.diag(bounds).min()) < -_SLACK_S:
        raise UsageError(
            "a rank begins computations before what they wait for has ended, whatever the offsets "
            "of the clocks: the traces are of different steps; trace the same steps on all ranks"
        )
    # The first rank's clock is the reference, so its own row and column bound all others.
    most_s = bounds[0]
    least_s = -bounds[:, 0]
    middle_s = (most_s + least_s) / 2
    width_s = np.maximum(most_s - least_s, 0.0) / 2
    return Offsets(tuple(middle_s.tolist()), tuple(width_s.tolist()))
