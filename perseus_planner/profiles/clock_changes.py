"""Clock changes: how many a rank makes, how long it holds a clock, and what one change costs.

Iterations repeat, so the first computation of a rank follows its last one in all counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Count, Wait


@dataclass(frozen=True)
class ClockChange(Checked, error=ProfileError, prefix="clock_change, "):
    """The cost of setting the clock of one GPU.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: how long the call holds the driver's lock, seconds, 0 or more. A node has one such lock:
    #: calls for its GPUs run one after another.
    call_s: Wait
    #: from the return of the call until the GPU runs at the new clock, seconds, 0 or more.
    settle_s: Wait = 0.0
    gpus_per_node: Count = 8  #: number of GPUs that share a lock; ranks fill nodes in order

    def node_of_rank(self, ranks: int, gpus_per_rank: int) -> list[int]:
        """Return the node of each of `ranks` ranks with that many GPUs; the first one if a rank
        is on several.
        """
        return [rank * gpus_per_rank // self.gpus_per_node for rank in range(ranks)]

    def calls_per_change(self, gpus_per_rank: int) -> int:
        """Return how many calls on one node a change of a rank's clock takes."""
        return min(gpus_per_rank, self.gpus_per_node)


def changes_per_rank(clocks_mhz: Sequence[int | None]) -> int:
    """Return how often a rank changes its clock in an iteration, including the change back for the
    next iteration.

    Args:
        clocks_mhz: the clock of each computation and operation of the rank, in program order; None
            for one without a clock, before which nothing changes.
    """
    clocks = [clock for clock in clocks_mhz if clock is not None]
    return sum(clock != before for before, clock in zip(clocks[-1:] + clocks, clocks, strict=False))


def with_fewer_changes(clocks: Sequence[int], max_changes: int) -> tuple[int, ...]:
    """Return clocks of a rank with at most so many changes in an iteration, none of them below the
    given one.

    Neighbours are merged into the higher of their clocks, those first that are raised least:
    computations times MHz. At the end one clock is left, the highest. A higher clock, or power
    limit, is taken to be faster, so no computation takes longer, and an iteration keeps the
    deadline that it was planned for, at some energy.

    Args:
        clocks: the clock of each computation of the rank, in program order: MHz, or watts of a
            power limit.
        max_changes: how many changes are allowed, 0 or more, with the change back for the next
            iteration.
    """
    merged = list(clocks)
    segments = [[i] for i in range(len(merged))]  # in program order; the first one follows the last

    def cost(at: int) -> int:
        before, after = segments[at - 1], segments[at]
        raise_by = merged[before[0]] - merged[after[0]]
        return abs(raise_by) * len(after if raise_by > 0 else before)

    while len(segments) > max(1, max_changes):
        at = min(range(len(segments)), key=cost)  # neighbours at one clock first: they cost nothing
        joined = segments[at] + segments[at - 1]
        highest = max(merged[i] for i in joined)
        for i in joined:
            merged[i] = highest
        segments[at - 1] = joined
        del segments[at]
    return tuple(merged)
