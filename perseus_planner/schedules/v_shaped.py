"""Schedules with V-shaped stages, ZBV and DualPipeV: of R ranks, rank r holds the stages r and 2
R - 1 - r.
"""

from __future__ import annotations

from collections import deque

from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules.generators import check_sizes
from perseus_planner.schedules.schedule import Computation, Schedule


class _Rank:
    """The order of one rank while it is built; microbatches are numbered as they come.

    Attributes:
        down: its stage on the way to the bottom of the V, where microbatches start.
        up: its stage on the way back.
        order: its computations so far.
        pending: weight gradients that are still to run, oldest first.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.order: list[Computation] = []
        self.pending: deque[Computation] = deque()
        self._next: dict[tuple[int, str], int] = {}

    def started(self, stage: int) -> int:
        """Return how many forwards of `stage` are in the order."""
        return self._next.get((stage, "F"), 0)

    def run(self, stage: int, kind: str) -> None:
        """Add the next microbatch's F, B or I of `stage`; after I, its W is pending."""
        counter = stage, "F" if kind == "F" else "B"
        microbatch = self._next.get(counter, 0)
        self._next[counter] = microbatch + 1
        self.order.append(Computation(stage, kind, microbatch))
        if kind == "I":
            self.pending.append(Computation(stage, "W", microbatch))

    def run_weights(self, stage: int | None = None) -> None:
        """Add the oldest pending weight gradient, of `stage` if it is given; do nothing if none
        is pending.
        """
        weights = next(
            (pending for pending in self.pending if stage in (None, pending.stage)), None
        )
        if weights is not None:
            self.pending.remove(weights)
            self.order.append(weights)

    def run_parts(self, stage: int) -> None:
        """Add the next I of `stage` and its W right after it."""
        self.run(stage, "I")
        self.run_weights(stage)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V, in the order of torch's ScheduleZBVZeroBubble: two stages per rank, backwards in two
    parts.

    Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24, section 6. If F, I and W take equally
    long, a rank that has started does not wait before its end. A rank keeps the activations of at
    most `2 * ranks` forwards, each with half the layers of a stage of 1F1B.

    Fewer than `2 * ranks - 1` microbatches run in the order of that many, with the missing ones
    left out.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    ranks, microbatches = check_sizes(ranks=ranks, microbatches=microbatches)
    (padded, _) = check_sizes(microbatches=max(microbatches, 2 * ranks - 1), ranks=ranks)
    orders = (_zbv_rank(rank, ranks, padded) for rank in range(ranks))
    return Schedule(
        "zbv",
        tuple(
            tuple(computation for computation in order if computation.microbatch < microbatches)
            for order in orders
        ),
    )


def _zbv_rank(rank: int, ranks: int, microbatches: int) -> list[Computation]:
    here = _Rank(rank, ranks)
    down, up = here.down, here.up
    for _ in range(2 * (ranks - rank) - 1):  # until the first microbatch is back from the bottom
        here.run(down, "F")
    for _ in range(rank):
        here.run(up, "F")
        here.run(down, "F")
    for _ in range(ranks - rank):  # until its gradient has come all the way round
        here.run(up, "F")
        here.run_parts(up)
    while here.started(up) < microbatches:
        if here.started(down) < microbatches:
            here.run(down, "F")
        here.run_parts(down)
        here.run(up, "F")
        here.run_parts(up)
    for _ in range(rank):  # now other ranks wait for input gradients, but none for weight gradients
        here.run(down, "I")
        here.run(up, "I")
    for _ in range(ranks - rank):
        here.run(down, "I")
        here.run_weights(down)
    for stage in (up, down):
        for _ in [computation for computation in here.pending if computation.stage == stage]:
            here.run_weights(stage)
    return here.order


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV, in the order of torch's ScheduleDualPipeV: two stages per rank, most backwards
    whole.

    DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1) cut in half by Qi et al. ("DualPipe
    could be better without the Dual", 2025). In its middle a forward and a backward overlap on one
    GPU; here they come one after the other, the forward first, which is how torch runs them by
    default. A rank keeps the activations of at most `2 * ranks + 1` forwards.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, the iteration is too large, or
            there are fewer microbatches than the `2 * ranks` stages.
    """
    ranks, microbatches = check_sizes(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe-v on {ranks} ranks has {2 * ranks} stages and needs as many microbatches, "
            f"not {microbatches}; give {2 * ranks} or more, or take zbv"
        )
    return Schedule(
        "dualpipe-v", tuple(_dualpipe_rank(rank, ranks, microbatches) for rank in range(ranks))
    )


def _dualpipe_rank(rank: int, ranks: int, microbatches: int) -> tuple[Computation, ...]:
    here = _Rank(rank, ranks)
    down, up = here.down, here.up
    behind = ranks - 1 - rank  # number of ranks between this one and the bottom of the V
    for _ in range(2 * behind):
        here.run(down, "F")
    for _ in range(rank + 1):
        here.run(down, "F")
        here.run(up, "F")
    for _ in range(behind):
        here.run_parts(up)
        here.run(up, "F")
    for _ in range(microbatches - ranks - behind):
        here.run(down, "F")
        here.run(up, "B")
        here.run(up, "F")
        here.run(down, "B")
    for _ in range(behind):
        here.run(up, "B")
        here.run(up, "F")
        here.run(down, "B")
    # The second half of the last backwards delay their weight gradients to when there is nothing
    # else to do.
    for step in range(2 * (rank + 1)):
        here.run(down if step % 2 else up, "B" if step <= rank else "I")
    for _ in range(behind):
        here.run_weights()
        here.run(down, "I")
    for _ in range(rank + 1):
        here.run_weights()
    return tuple(here.order)
