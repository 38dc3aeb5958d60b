"""Operating points of computations on one system: their clocks, times and energies, the times at
full clocks of stages, and the hulls of what runs one after the other.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.extensions.explore.operations import Phases
from perseus_planner.profiles.measurement import Measurement, lower_hull

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.extensions.explore.configuration import Configuration, Floats
    from perseus_planner.extensions.explore.operations import System


def points_of(phases: Phases, system: System, count: int = 0) -> Floats:
    """Return clocks (MHz), seconds and joules of a computation on one GPU, highest clock first.

    A clock that the power limit does not allow is none: the lowest clock above what the limit
    allows stands for all of them, with the time and energy of what is achieved.

    Args:
        phases: The computation.
        system: The GPU.
        count: Number of points to keep, evenly spaced down to the one of least effective energy; 0
            for all.
    """
    gpu = system.gpu
    clocks = np.array(gpu.clocks_mhz, dtype=float)
    if phases == Phases():  # an empty stage
        return np.stack([clocks, *np.zeros((2, len(clocks)))])
    load = phases.load(system)
    # Clocks above what the power limit allows are all achieved as one, for which the lowest stands.
    top_mhz = load.achieved_mhz(clocks[0])
    set_mhz = clocks[max(0, np.count_nonzero(clocks > top_mhz) - 1) :]
    achieved: Any = np.minimum(set_mhz, top_mhz)
    times_s: Any = load.free_time_s(achieved)
    energies_j: Any = load.free_power_w(achieved) * times_s
    places = np.arange(len(set_mhz))
    # Points that are slower than that of least effective energy are never part of a plan.
    if count:
        least = int(np.argmin(energies_j - gpu.blocking_power_w * times_s))
        places = np.unique(np.linspace(0, least, count).round().astype(int))
    return np.stack([set_mhz, times_s, energies_j])[:, places]


def measurements_of(phases: Phases, system: System, count: int = 0) -> tuple[Measurement, ...]:
    """Return the operating points of a computation as rows of a profile, highest clock first."""
    rows = points_of(phases, system, count).T.tolist()
    return tuple(Measurement(int(clock), time_s, energy_j) for clock, time_s, energy_j in rows)


class OperatingPoints:
    """The operating points of computations on one system; each is found once."""

    def __init__(self, system: System, count: int = 0) -> None:
        """Find points on `system`, so many of a computation; 0 for all."""
        self.system = system
        self._points = cache(lambda phases: points_of(phases, system, count))
        self._hull = cache(self._hull_of)

    def top_s(self, stages: Sequence[Mapping[str, Phases]], kinds: str) -> Floats:
        """Return the seconds of computations of these kinds, together, of each stage at the top
        clock: (stages,).
        """
        # Stages of equal layers are one object, so each is added up once.
        alike = {id(stage): stage for stage in stages}
        times_s = {
            key: sum(self._points(stage[kind])[1, 0] for kind in kinds)
            for key, stage in alike.items()
        }
        return np.array([times_s[id(stage)] for stage in stages])

    def ends_s(self, job: Configuration, stages: Sequence[Mapping[str, Phases]]) -> Floats:
        """Return the seconds of each rank after its last computation: (ranks,)."""
        both_s = np.bincount(job.stage_ranks, self.top_s(stages, "FB"))
        return job.end_s(self.system, both_s.astype(float))

    def hull(self, computations: tuple[Phases, ...]) -> Floats:
        """Return the lower convex hull of computations that run one after the other: (2, points)
        seconds, rising, and joules less what waiting for that long would take, falling.
        """
        return self._hull(computations)

    def _hull_of(self, computations: tuple[Phases, ...]) -> Floats:
        # A sum of hulls has the segments of all, the steepest first.
        if len(computations) > 1:
            hulls = [self._hull((computation,)) for computation in computations]
            steps = np.concatenate([np.diff(hull) for hull in hulls], axis=1)
            order = np.argsort(steps[1] / steps[0], kind="stable")
            first = sum(hull[:, :1] for hull in hulls)
            return np.cumsum(np.hstack([first, steps[:, order]]), axis=1)
        _, times_s, energies_j = self._points(*computations)
        effective_j = energies_j - self.system.gpu.blocking_power_w * times_s
        # Of equal times the cheapest first, so that the others drop out.
        order = np.lexsort((effective_j, times_s))
        front: list[tuple[float, float]] = []
        for time_s, joules in zip(
            times_s[order].tolist(), effective_j[order].tolist(), strict=True
        ):
            # A point that is slower and not cheaper is never part of a plan.
            if not front or joules < front[-1][1]:
                front.append((time_s, joules))
        return np.array(lower_hull(front)).T
