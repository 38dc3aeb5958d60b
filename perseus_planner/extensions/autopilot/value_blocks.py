"""Blocks of iterations at one value each, and how planned ones are compared with those at full
clocks around them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.extensions.autopilot.value_curves import OUTLIER, clipped

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.job import RankObservation

SETTLING = 1
"""Iterations after a change that are not measured, unless there are no others."""


class Power(NamedTuple):
    """What a rank drew in a block."""

    watts: float
    seconds: float  #: in which it was measured


class Reading(NamedTuple):
    """An energy counter at the end of an iteration."""

    iterations: int  #: that were counted so far
    energy_j: float  #: of all of them
    time_s: float  #: of the last one


@dataclass
class Block:
    """Iterations at one value, one after another."""

    index: int  #: position of the value, 0 for the highest
    first: int  #: the number of the first iteration
    end: int  #: the number after the last one; `first` before there is one
    is_settled: bool = False  #: whether iterations are past those that settle after the change
    logs: list[float] = field(default_factory=list)  #: of the seconds of those that are measured
    #: pipeline -> its counter after each of those
    metered: dict[int, list[Reading]] = field(default_factory=dict)

    @classmethod
    def empty(cls, index: int, first: int) -> Block:
        """Return a block that begins with an iteration which did not run yet."""
        return cls(index, first, first)

    @property
    def iterations(self) -> int:
        """How many iterations it has, also those that were not observed."""
        return self.end - self.first

    def add(self, iteration: int) -> None:
        """Go on with an iteration."""
        self.end = iteration + 1
        # Iterations up to here settle after the change, and count only if there are no others.
        if not self.is_settled and iteration >= self.first + SETTLING:
            self.is_settled = True
            self.logs.clear()
            self.metered.clear()

    def measure(self, time_s: float, observations: Sequence[RankObservation]) -> None:
        """Count what ranks observed of the last iteration."""
        self.logs.append(math.log(time_s))
        for seen in observations:
            readings = self.metered.setdefault(seen.pipeline, [])
            readings.append(Reading(*seen.metered, seen.time_s))

    def level(self, noise: float) -> float:
        """Return the mean of the logarithms, given their standard deviation; an outlier counts
        as three of these.
        """
        middle = median(self.logs)
        most = OUTLIER * noise
        return middle + fmean(clipped(log - middle, most) for log in self.logs)

    def power(self) -> Power | None:
        """Return what a rank drew in the mean; None if it was not measured."""
        watts = []
        seconds = 0.0
        for readings in self.metered.values():
            begin = readings[0]
            end = readings[-1]
            iterations = end.iterations - begin.iterations
            # A counter that stood still, or began anew, tells nothing.
            if iterations > 0 and end.energy_j > begin.energy_j:
                seconds = iterations * fmean(reading.time_s for reading in readings[1:])
                watts.append((end.energy_j - begin.energy_j) / seconds)
        return Power(fmean(watts), seconds) if watts else None


@dataclass(frozen=True)
class Comparison:
    """Blocks at full clocks before and after planned ones, with which these are compared."""

    begin: float  #: level of the one before
    end: float  #: level of the one after
    #: the variance that `middle` adds to a sum of comparisons, over that of one iteration. Each
    #: block at full clocks ends one comparison and begins the next one, so errors of neighbours go
    #: together: this is twice the variance of one `middle` alone.
    per_noise: float
    powers: tuple[Power, ...]  #: what was drawn in those that were measured

    @classmethod
    def of(cls, before: Block, after: Block, noise: float) -> Comparison:
        """Return the comparison with two blocks at full clocks, in noise of this standard
        deviation.
        """
        powers = (before.power(), after.power())
        return cls(
            before.level(noise),
            after.level(noise),
            0.5 / len(before.logs) + 0.5 / len(after.logs),
            tuple(power for power in powers if power is not None),
        )

    @property
    def middle(self) -> float:
        """The level of both: their mean, which cancels a steady drift."""
        return (self.begin + self.end) / 2

    @property
    def drift(self) -> float:
        """The variance of where between both ends a steady drift stood: that of a uniform share."""
        return (self.end - self.begin) ** 2 / 12

    @property
    def watts(self) -> float:
        """What a rank drew in the mean of both."""
        return fmean(power.watts for power in self.powers)
