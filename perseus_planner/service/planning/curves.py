"""What the service keeps in memory of a frontier: its curve of energy, not its graph."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.errors import InfeasibleDeadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from perseus_planner.solver.frontier import Frontier

Slow = tuple[tuple[int, float], ...]
"""(stage, how many times as long it takes), in the order of the stages."""


@dataclass(frozen=True)
class Curve:
    """The least energy of one pipeline's iteration for every iteration time.

    Attributes:
        rising_s: (points,) where its slope changes, rising from the least iteration time, seconds.
        rising_j: (points,) the bound at each of them, waiting included, joules.
        baseline_time_s: with all clocks at their maximum, seconds.
        baseline_j: the energy of such an iteration, joules.
        waiting_w: what all GPUs of the pipeline draw while they wait, watts.
        stages: how many the pipeline has.
        gpus: how many it has.
        origin: of the profile, "measured" or "simulated".
    """

    rising_s: tuple[float, ...] = field(repr=False)
    rising_j: tuple[float, ...] = field(repr=False)
    baseline_time_s: float
    baseline_j: float
    waiting_w: float
    stages: int
    gpus: int
    origin: str

    @classmethod
    def of(cls, frontier: Frontier) -> Curve:
        """That of `frontier`."""
        return cls(
            tuple(frontier.times_s[::-1].tolist()),
            tuple(frontier.energies_j[::-1].tolist()),
            frontier.baseline_time_s,
            frontier.baseline_energy_j,
            frontier.dag.waiting_w,
            frontier.schedule.stages,
            len(frontier.schedule.ranks) * frontier.profile.gpus_per_stage,
            frontier.profile.origin,
        )

    def thinned(self, most: int) -> Curve:
        """The same with `most` of its points at most, 2 or more: both ends, and others evenly taken."""
        count = len(self.rising_s)
        kept = dict.fromkeys(np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist())
        return replace(
            self, rising_s=tuple(self.rising_s[i] for i in kept), rising_j=tuple(self.rising_j[i] for i in kept)
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
        """As `Frontier.bound_j`, but for rounding.

        Raises:
            InfeasibleDeadline: no iteration is that fast.
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
    """The pipeline with these slow stages has not been solved yet; whoever decides must wait.

    Attributes:
        slow: its slow stages.
    """

    def __init__(self, slow: Slow) -> None:
        super().__init__(slow)
        self.slow = slow


@dataclass(frozen=True)
class KnownNumbers:
    """A job's frontier as the policy asks for it (`model.Numbers`), as far as it is known without solving anything.

    Attributes:
        curve: of a pipeline as profiled.
        solved: looks up the curve of a pipeline with slow stages; None where it has not been solved.
        slow: the stages that are slow in `curve` already.
    """

    curve: Curve
    solved: Callable[[Slow], Curve | None] = field(repr=False)
    slow: Slow = ()

    @property
    def baseline_time_s(self) -> float:
        """As `Frontier.baseline_time_s`."""
        return self.curve.baseline_time_s

    @property
    def min_time_s(self) -> float:
        """As `Frontier.min_time_s`."""
        return self.curve.min_time_s

    @property
    def max_time_s(self) -> float:
        """As `Frontier.max_time_s`."""
        return self.curve.max_time_s

    def bound_j(self, deadline_s: float) -> float:
        """As `Curve.bound_j`."""
        return self.curve.bound_j(deadline_s)

    def slowed(self, stages: Mapping[int, float]) -> KnownNumbers:
        """Of the pipeline in which these stages are so many times slower.

        Raises:
            NotSolved: that has not been solved yet.
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
        return KnownNumbers(curve, self.solved, slow)


def slow_of(stages: Mapping[int, float]) -> Slow:
    """Slow stages in the one way in which they are looked up."""
    return tuple(sorted((stage, slowdown) for stage, slowdown in stages.items() if slowdown != 1.0)) if stages else ()
