"""The energy of a pipeline's frontier, as the policy and the dashboard need it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from perseus_planner.base.errors import InfeasibleDeadline, UsageError
from perseus_planner.extensions.service.models import ProfileOrigin

if TYPE_CHECKING:
    from perseus_planner.solver.frontier import Frontier


Slow = tuple[tuple[int, float], ...]
"""(stage, slowdown), in order of the stages."""


@dataclass(frozen=True)
class Curve:
    """The least energy of one pipeline's iteration for every iteration time; linear between the
    points.
    """

    #: (points,) Iteration times where the slope changes, rising, seconds.
    times_s: tuple[float, ...] = field(repr=False)
    #: (points,) The least energy at each, waiting included, joules.
    energies_j: tuple[float, ...] = field(repr=False)
    baseline_time_s: float  #: With all clocks at maximum, seconds.
    baseline_j: float  #: Energy of such an iteration, joules.
    waiting_w: float  #: Power of all GPUs of the pipeline while they wait, watts.
    stages: int
    gpus: int
    origin: ProfileOrigin  #: Origin of the profile.

    @classmethod
    def of(cls, frontier: Frontier) -> Curve:
        """Return the curve of `frontier`.

        Raises:
            UsageError: If its modes are tied to each other, so that it is a bound alone.
        """
        if frontier.dag.has_tied_modes:
            raise UsageError(
                "modes: those of this frontier are tied to each other, and the service plans along "
                "frontiers alone; train with plan=, or without a memory limit and shared modes"
            )
        return cls(
            # The frontier begins at its slow end; here times rise, for `bisect`.
            tuple(frontier.times_s[::-1].tolist()),
            tuple(frontier.energies_j[::-1].tolist()),
            frontier.baseline_time_s,
            frontier.baseline_energy_j,
            frontier.dag.waiting_w,
            frontier.schedule.stages,
            len(frontier.schedule.ranks) * frontier.profile.gpus_per_stage,
            cast("ProfileOrigin", frontier.profile.origin),
        )

    def thinned(self, most: int) -> Curve:
        """Return the curve with at most `most` points, 2 or more: both ends and evenly spaced
        others.
        """
        count = len(self.times_s)
        # Rounding may give one point twice.
        kept = dict.fromkeys(
            np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist()
        )
        return replace(
            self,
            times_s=tuple(self.times_s[i] for i in kept),
            energies_j=tuple(self.energies_j[i] for i in kept),
        )

    @property
    def min_time_s(self) -> float:
        """As `Frontier.min_time_s`."""
        return self.times_s[0]

    @property
    def max_time_s(self) -> float:
        """As `Frontier.max_time_s`."""
        return self.times_s[-1]

    @property
    def least_energy_time_s(self) -> float:
        """As `Frontier.least_energy_time_s`: slower iterations of a pipeline that waits for no
        other cost more energy.
        """
        return self.times_s[self.energies_j.index(min(self.energies_j))]

    def bound_j(self, deadline_s: float) -> float:
        """Return the least energy of an iteration of that time, as `Frontier.bound_j` up to
        rounding.

        Raises:
            InfeasibleDeadline: If no iteration is that fast.
        """
        times_s = self.times_s
        energies_j = self.energies_j
        if deadline_s < times_s[0]:
            raise InfeasibleDeadline(deadline_s, times_s[0])
        # Past the slow end, iterations wait: nothing saves more.
        if deadline_s >= times_s[-1]:
            return energies_j[-1] + self.waiting_w * (deadline_s - times_s[-1])
        after = bisect_left(times_s, deadline_s)
        if times_s[after] == deadline_s:
            return energies_j[after]
        before = after - 1
        share = (deadline_s - times_s[before]) / (times_s[after] - times_s[before])
        return energies_j[before] + share * (energies_j[after] - energies_j[before])


class NotSolved(Exception):
    """The pipeline with these slow stages (`slow`), under its GPUs' power limit, has to be solved
    before a decision.
    """

    def __init__(self, slow: Slow) -> None:
        super().__init__(slow)
        self.slow = slow


@dataclass(frozen=True)
class Numbers(Curve):
    """What the policy needs of a job's frontier."""

    #: Returns the curve of the pipeline in which these stages are slower by these factors; raises
    #: `NotSolved` if it has not been solved.
    slowed: Callable[[Mapping[int, float]], Curve] = field(repr=False)
