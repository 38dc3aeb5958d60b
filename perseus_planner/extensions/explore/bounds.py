"""Lower bounds on time and energy of an iteration, in microseconds each.

A rank runs M forwards and M backwards in whatever time the pipeline leaves it. Four ranks and six
microbatches under 1F1B, where rank 1 has w = 2 ranks after it:

    rank 0  F1 F2 F3 F4  .  .  . B1 F5 B2 F6 B3  . B4  . B5  . B6
    rank 1   . F1 F2 F3  .  . B1 F4 B2 F5 B3 F6 B4  . B5  . B6  .
    rank 2   .  . F1 F2  . B1 F3 B2 F4 B3 F5 B4 F6 B5  . B6  .  .
    rank 3   .  .  . F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6  .  .  .
                  [ wait 1  ]                   [ wait 2  ]

Outside: before F1 of rank 1, rank 0 has to run a forward, and after B6 of rank 1 a backward.

Waits: between F1 and B1 of rank 1, each of the w ranks after it runs a forward and a backward. So
they do between F6 and B6. Rank 1 itself runs w forwards in the first wait, F2 and F3, and w
backwards in the second one, B4 and B5. So both waits are at least as long as the forwards and
backwards of the ranks after it, and the second one is also at least as long as what runs in it.

Rest: the other M - w forwards and backwards share what remains of the time, evenly, as the hull of
their times and energies is convex. What runs in the waits takes at least its least energy.

Under ZB-H1 waits are the same. Under other schedules, and with so few microbatches that a rank has
no such waits, all M share the time outside. That bounds ranks with waits too, so the larger of both
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from perseus_planner.extensions.explore.configuration import Configuration, Floats
    from perseus_planner.extensions.explore.memory import Candidate
    from perseus_planner.extensions.explore.operations import Phases
    from perseus_planner.extensions.explore.points import OperatingPoints


class BoundParts(NamedTuple):
    """What bounds the energy of ranks with equal computations, counted twice, as without and with
    the waits of their schedule: (2, ranks) each.
    """

    fixed_s: Floats  #: Seconds of an iteration in which the rank runs nothing that is counted
    shared: Floats  #: Microbatches that share the rest of the time
    slow: Floats  #: Microbatches that run while it waits, at their least energy


@dataclass(frozen=True, eq=False)
class Bound:
    """A lower bound on time and energy of iterations of a whole job."""

    least_s: float  #: Seconds
    gpus_per_rank: float  #: GPUs of all pipelines that a rank stands for
    blocking_w: float  #: Power of all of them while they wait
    #: The hull of computations that run one after the other; see `OperatingPoints`.
    hull_of: Callable[[tuple[Phases, ...]], Floats]
    #: By the computations of a microbatch, those of the ranks that have them.
    parts: Mapping[tuple[Phases, ...], BoundParts]

    def at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the least joules at each of `times_s`; infinite where that is too short."""
        # Floats of the least time may differ in the last bits.
        is_enough = times_s >= self.least_s * (1 - 1e-9)
        if not is_enough.any():
            return np.full(len(times_s), np.inf)
        total_j = np.zeros(len(times_s))
        # Ranks with equal computations have equal hulls, so each group is looked up once.
        for computations, parts in self.parts.items():
            total_j += self._above_waiting_j(computations, parts, times_s)
        # Energies are above waiting, which all GPUs draw for the whole time.
        energy_j = self.gpus_per_rank * total_j + self.blocking_w * times_s
        return np.where(is_enough, energy_j, np.inf)

    def _above_waiting_j(
        self, computations: tuple[Phases, ...], parts: BoundParts, times_s: Floats
    ) -> Floats:
        """Return the least joules above waiting of ranks with equal computations, on one GPU of
        each, together: (times,).
        """
        hull_s, hull_j = self.hull_of(computations)
        # Times are a third axis, behind the two counts and the ranks.
        fixed_s = parts.fixed_s[..., np.newaxis]
        shared = parts.shared[..., np.newaxis]
        slow = parts.slow[..., np.newaxis]
        # What the pipeline leaves of the time is shared evenly, which is best on a convex hull.
        microbatch_s = (times_s - fixed_s) / shared
        microbatch_j = np.interp(microbatch_s, hull_s, hull_j)
        bounds_j = microbatch_j * shared + slow * hull_j[-1]
        # Each of the two counts is a bound by itself, so the larger one holds.
        of_ranks_j: Floats = bounds_j.max(axis=0)
        total_j: Floats = of_ranks_j.sum(axis=0)
        return total_j


def bound_of(candidate: Candidate, points: OperatingPoints) -> Bound:
    """Return a lower bound on the time of an iteration, and on the energy of the whole job.

    Args:
        candidate: The configuration.
        points: The operating points that computations may have.
    """
    job = candidate.job
    stages = job.stage_phases(points.system, candidate.times)
    ranks = job.ranks
    microbatches = job.microbatches
    # A rank computes all its stages for every microbatch, at full clocks at best.
    stages_s = points.top_s(stages, job.kinds)
    microbatch_s = np.bincount(job.stage_ranks, stages_s).astype(float)
    outside_s = _outside_s(job, stages, points)
    # What a rank runs while it waits is not counted in the rest of its time.
    waits = _waits(job)
    waited_s = _waited_s(job, stages, points, waits, microbatch_s)
    without_waits_s = microbatches * microbatch_s
    with_waits_s = waited_s + (microbatches - waits) * microbatch_s
    least_s = outside_s + np.maximum(without_waits_s, with_waits_s)
    # Both counts of each rank: without waits, and with them.
    none = np.zeros(ranks)
    fixed_s = np.array([outside_s, outside_s + waited_s])
    shared = np.array([none + microbatches, microbatches - waits])
    slow = np.array([none, waits])
    parts = {
        _computations(stages[some[0] :: ranks], job.kinds): BoundParts(
            fixed_s[:, some], shared[:, some], slow[:, some]
        )
        for some in _alike_ranks(stages, ranks)
    }
    return Bound(
        float(least_s.max()),
        gpus_per_rank=job.gpus / ranks,
        blocking_w=job.gpus * points.system.gpu.blocking_power_w,
        hull_of=points.hull,
        parts=parts,
    )


def _outside_s(
    job: Configuration, stages: Sequence[Mapping[str, Phases]], points: OperatingPoints
) -> Floats:
    """Return the seconds of an iteration before the first and after the last computation of each
    rank: (ranks,).
    """
    hop_s = job.transfer_s(points.system)
    forward_s = points.top_s(stages[: job.ranks], "F")
    end_s = points.ends_s(job, stages)
    # After its last backward the ranks before it run one each, and then have an end of their own.
    # With split backwards, gradients of weights may be left until then, so this is not known.
    if job.kinds == "FB":
        backward_s = points.top_s(stages[: job.ranks], "B")
        back_s = np.cumsum(backward_s + hop_s) - backward_s - hop_s
        end_s = back_s + np.maximum.accumulate(end_s - back_s)
    # Before its first forward the ranks before it run one each.
    outside_s: Floats = end_s + np.cumsum(forward_s + hop_s) - forward_s - hop_s
    return outside_s


def _waits(job: Configuration) -> NDArray[np.int64]:
    """Return how many computations of a kind each rank runs in a wait, which is the number of ranks
    after it: (ranks,); 0 where it is not known that ranks wait so.
    """
    after = np.arange(job.ranks)[::-1]
    waits_so = job.schedule in ("1f1b", "zb-h1") and job.microbatches > after + 1
    return np.where(waits_so, after, 0)


def _waited_s(
    job: Configuration,
    stages: Sequence[Mapping[str, Phases]],
    points: OperatingPoints,
    waits: NDArray[np.int64],
    microbatch_s: Floats,
) -> Floats:
    """Return the least seconds of both waits of each rank together: (ranks,).

    Args:
        job: The configuration.
        stages: The computations of its stages.
        points: Their operating points.
        waits: (ranks,) how many computations of a kind each rank runs in a wait.
        microbatch_s: (ranks,) seconds of all its computations of one.
    """
    # A forward and a backward on each rank after it, and a transfer before and after.
    hop_s = job.transfer_s(points.system)
    trip_s = points.top_s(stages[-job.ranks :], job.kinds[:2])
    after = np.arange(job.ranks)[::-1]
    wait_s = (trip_s.sum() - np.cumsum(trip_s) + 2 * hop_s * after) * (waits > 0)
    # The second wait is no shorter than what runs in it, which is all but forwards.
    forward_s = points.top_s(stages[: job.ranks], "F")
    inside_s = waits * (microbatch_s - forward_s)
    waited_s: Floats = wait_s + np.maximum(wait_s, inside_s)
    return waited_s


def _computations(stages: Sequence[Mapping[str, Phases]], kinds: str) -> tuple[Phases, ...]:
    """Return the computations of a microbatch on a rank with these stages."""
    return tuple(phases[kind] for phases in stages for kind in kinds)


def _alike_ranks(stages: Sequence[object], ranks: int) -> list[list[int]]:
    """Return the ranks that have the same stages, together: these share one hull."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in range(ranks):
        alike.setdefault(tuple(map(id, stages[rank::ranks])), []).append(rank)
    return list(alike.values())
