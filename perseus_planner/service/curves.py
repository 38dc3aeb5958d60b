"""The part of a frontier that the service keeps in memory: its energy curve, without the graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
from pydantic import Field

from perseus_planner.base.errors import InfeasibleDeadline, UsageError
from perseus_planner.service.model import ProfileOrigin, shared

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.solver.frontier import Frontier

Slow = tuple[tuple[int, float], ...]
"""(stage, slowdown), in order of the stages."""


@dataclass(frozen=True)
class Curve:
    """The least energy of one pipeline's iteration for every iteration time; linear between the
    points.
    """

    #: (points,) Iteration times where the slope changes, rising, seconds.
    rising_s: Annotated[tuple[float, ...], Field(alias="times_s")] = field(repr=False)
    #: (points,) The least energy at each, waiting included, joules.
    rising_j: Annotated[tuple[float, ...], Field(alias="energies_j")] = field(repr=False)
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
        count = len(self.rising_s)
        kept = dict.fromkeys(
            np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist()
        )
        return replace(
            self,
            rising_s=tuple(self.rising_s[i] for i in kept),
            rising_j=tuple(self.rising_j[i] for i in kept),
        )

    @property
    def times_s(self) -> NDArray[np.float64]:
        """As `Frontier.times_s`: falling."""
        return np.array(self.rising_s[::-1])

    @property
    def energies_j(self) -> NDArray[np.float64]:
        """As `Frontier.energies_j`."""
        return np.array(self.rising_j[::-1])

    @property
    def min_time_s(self) -> float:
        """As `Frontier.min_time_s`."""
        return self.rising_s[0]

    @property
    def max_time_s(self) -> float:
        """As `Frontier.max_time_s`."""
        return self.rising_s[-1]

    def bound_j(self, deadline_s: float) -> float:
        """Return the least energy of an iteration of that time, as `Frontier.bound_j` up to
        rounding.

        Raises:
            InfeasibleDeadline: If no iteration is that fast.
        """
        times_s, energies_j = self.rising_s, self.rising_j
        if deadline_s < times_s[0]:
            raise InfeasibleDeadline(deadline_s, times_s[0])
        if deadline_s >= times_s[-1]:
            return energies_j[-1] + self.waiting_w * (deadline_s - times_s[-1])
        after = bisect_left(times_s, deadline_s)
        if times_s[after] == deadline_s:
            return energies_j[after]
        before = after - 1
        share = (deadline_s - times_s[before]) / (times_s[after] - times_s[before])
        return energies_j[before] + share * (energies_j[after] - energies_j[before])


class NotSolved(Exception):
    """The pipeline with these slow stages, under its GPUs' power limit, has to be solved before a
    decision.

    Attributes:
        slow: The slow stages.
    """

    def __init__(self, slow: Slow) -> None:
        super().__init__(slow)
        self.slow = slow


@dataclass(frozen=True)
class KnownNumbers(Curve):
    """The `model.Numbers` of a job's frontier, as far as they are known without solving."""

    #: Returns the curve of a pipeline with slow stages; None if it has not been solved.
    solved: Callable[[Slow], Curve | None] = field(repr=False)
    slow: Slow = ()  #: The stages that are slow already

    @classmethod
    def on(
        cls, curve: Curve, solved: Callable[[Slow], Curve | None], slow: Slow = ()
    ) -> KnownNumbers:
        """Return the numbers of a pipeline with this curve, in which these stages are slow."""
        return cls(**shared(Curve, curve), solved=solved, slow=slow)

    def slowed(self, stages: Mapping[int, float]) -> KnownNumbers:
        """Return the numbers of the pipeline in which these stages are slower by these factors.

        Raises:
            NotSolved: If it has not been solved yet.
        """
        slowdowns = dict(self.slow)
        for stage, slowdown in stages.items():
            slowdowns[stage] = slowdowns.get(stage, 1.0) * slowdown
        slow = slow_of(slowdowns)
        if slow == self.slow:
            return self
        curve = self.solved(slow)
        if curve is None:
            raise NotSolved(slow)
        return KnownNumbers.on(curve, self.solved, slow)


def slow_of(stages: Mapping[int, float]) -> Slow:
    """Return slow stages in the form in which they are looked up."""
    return (
        tuple(sorted((stage, slowdown) for stage, slowdown in stages.items() if slowdown != 1.0))
        if stages
        else ()
    )
