"""Jitter: how much the time of a computation varies from one iteration to the next in a run.

It has three parts. Each computation varies by itself. All computations of a GPU vary together in an
iteration, as its clock and heat do. And a few computations take much longer, as hosts and networks
stall them. A plan is late by all three, and each in another way: what computations have in common
does not average out along a path, and an iteration waits for its longest tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import FACTOR, Rule

if TYPE_CHECKING:
    from perseus_planner.profiles.smoothing import Floats

_PART = Rule(
    float, False, "a part of all computations: give one above 0 and up to 1, such as 0.01", most=1.0
)


@dataclass(frozen=True)
class Tail(Checked, error=ProfileError, prefix="jitter_tail, "):
    """The computations that take much longer than usual.

    Raises:
        ProfileError: If a value is out of range.
    """

    share: Annotated[float, _PART]  #: of all computations, above 0 and up to 1
    factor: Annotated[float, FACTOR]  #: how many times as long they take, in the mean


@dataclass(frozen=True)
class Jitter:
    """The jitter of a run: three parts, which are independent of each other."""

    own: float = 0.0  #: relative standard deviation of each computation by itself
    #: relative standard deviation of what all computations of a GPU have in common in an iteration.
    common: float = 0.0
    tail: Tail | None = None  #: the computations that take much longer; None if there are none

    def __bool__(self) -> bool:
        return self.own > 0.0 or self.common > 0.0 or self.tail is not None

    @property
    def steady(self) -> float:
        """The relative standard deviation of a computation that is none of the tail."""
        return math.hypot(self.own, self.common)

    def draw(self, rank_of: Sequence[int], iterations: int) -> Floats:
        """Return (computations, iterations) how many times as long each computation takes.

        Equal jitters give equal draws.

        Args:
            rank_of: the rank of each computation.
            iterations: how many iterations are drawn.
        """
        random = np.random.default_rng(0)
        shape = (len(rank_of), iterations)
        logs = self.own * random.standard_normal(shape)
        if self.common:
            of_rank = self.common * random.standard_normal((max(rank_of) + 1, iterations))
            logs += of_rank[list(rank_of)]
        factors: Floats = np.exp(logs)
        if self.tail is not None:
            factors[random.random(shape) < self.tail.share] *= self.tail.factor
        return factors
