"""Which configurations are compared by their exact curves: the best by an objective, and the
frontier of all of them.

Every configuration has a lower bound on its curve, which costs microseconds (`bounds.py`). The
exact curve (`curves.py`) is computed in the order of the bounds, until no bound is below what has
been found: neither for the objective, nor anywhere on the frontier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.prefixes import si
from perseus_planner.extensions.explore.bounds import bound_of
from perseus_planner.extensions.explore.curves import Curve, CurveMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from perseus_planner.extensions.explore.memory import Candidate
    from perseus_planner.extensions.explore.objective import Objective
    from perseus_planner.extensions.explore.operations import System

FIRST = 3
"""Configurations to measure, as no estimate ranks them surely."""
_POINTS = 10  # operating points of a computation while configurations are compared
_GRID = 64  # times at which bounds are compared
_SLOWEST = 6.0  # of the least time, up to which the frontier is explored
_WORTH = 1.3  # of the best value, up to which the best of another tensor degree is worth measuring
_GAIN = 3e-3  # by which a configuration must be able to lower the frontier
_MOST_COMPUTATIONS = 50_000  # of all iterations whose exact curves are computed


@dataclass(frozen=True, eq=False)
class Row:
    """A configuration at one point of its exact time-energy curve."""

    candidate: Candidate  #: The configuration
    curve: Curve  #: All of its curve
    time_s: float  #: Seconds of an iteration
    energy_j: float  #: Joules of an iteration over all GPUs

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the job trains on in a second."""
        return self.candidate.job.tokens / self.time_s

    @property
    def j_per_token(self) -> float:
        """Energy of all GPUs for a token, joules."""
        return self.energy_j / self.candidate.job.tokens

    @property
    def power_w(self) -> float:
        """Mean power over all GPUs, watts."""
        return self.energy_j / self.time_s


def worth_measuring(degrees: Sequence[int], wide: int) -> list[int]:
    """Return which of ranked configurations to measure, by their tensor degrees: the best of each,
    and of the degree that is as wide as a node two.

    What an estimate knows least are the kernels of each tensor degree, whose errors go together.
    """
    chosen: list[int] = []
    for number, degree in enumerate(degrees):
        if sum(degrees[earlier] == degree for earlier in chosen) < 1 + (degree == wide):
            chosen.append(number)
    return chosen[:FIRST]


class Search:
    """Which exact curves are computed. Configurations go by their numbers in `found`."""

    found: list[Candidate]  #: The configurations to compare
    curves: dict[int, Curve]  #: Exact curves, by configuration

    def __init__(self, found: list[Candidate], system: System, objective: Objective) -> None:
        """Bound all configurations, and compute no exact curve yet.

        Args:
            found: One configuration or more.
            system: The GPUs.
            objective: What is best.
        """
        self.found = found
        self.maker = CurveMaker(system, _POINTS)
        self.curves = {}
        self._objective = objective
        self._exact_values: dict[int, tuple[float, float]] = {}
        bounds = [bound_of(candidate, self.maker.operating) for candidate in found]
        fastest_s = min(bound.least_s for bound in bounds)
        # A deadline may lie beyond what is compared otherwise.
        slowest_s = max(_SLOWEST * fastest_s, objective.deadline_s or 0.0)
        self._grid_s = np.geomspace(fastest_s, slowest_s, _GRID)
        bounds_j = np.array([bound.at(self._grid_s) for bound in bounds])
        # An iteration may always take longer at no more energy than a shorter one.
        self._least_j = np.minimum.accumulate(bounds_j, axis=1)
        # The least of all exact curves at each time of the grid.
        self._envelope_j = np.full(_GRID, np.inf)
        # A bound has a value by the objective like a curve, so both can be ranked.
        self._bound_values = [
            objective.value(_bound_curve(bound.least_s, self._grid_s, row))
            for bound, row in zip(bounds, bounds_j, strict=True)
        ]
        self._order = sorted(range(len(found)), key=self._bound_values.__getitem__)

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Compute exact curves until no bound is below what was found.

        Args:
            progress: Called before each with their number, and that of configurations.
        """
        computed = 0
        while computed < _MOST_COMPUTATIONS:
            number = self._next()
            if number is None:
                return
            progress(len(self.curves), len(self.found))
            computed += self.maker.size(self.found[number].job)
            curve = self._solve(number)
            at_grid_j = curve.at(self._grid_s)
            # Slower than its least energy a job waits, or runs at its least energy: it does the
            # latter.
            self._envelope_j = np.minimum(self._envelope_j, np.minimum.accumulate(at_grid_j))

    def solve_again(self, maker: CurveMaker) -> None:
        """Compute the curves of the first and of the frontier once more by `maker`, and forget
        the others.
        """
        on_frontier = [number for _, _, number in self._frontier()]
        kept = dict.fromkeys([*self.first(), *on_frontier])
        self.maker = maker
        self.curves = {}
        self._exact_values = {}
        for number in kept:
            self._solve(number)

    def _solve(self, number: int) -> Curve:
        curve = self.maker.exact(self.found[number])
        self.curves[number] = curve
        self._exact_values[number] = self._objective.value(curve)
        return curve

    def _next(self) -> int | None:
        """Return the configuration whose bound is best, if it can still be among the first, or
        on the frontier.
        """
        unsolved = [number for number in self._order if number not in self.curves]
        if not unsolved:
            return None
        # The nearest bound may beat what was found, so it is next.
        nearest = unsolved[0]
        exact = self._exact_values.values()
        if not exact or self._bound_values[nearest] < min(exact):
            return nearest
        of_another = self._near_of_another_degree(unsolved)
        if of_another is not None:
            return of_another
        # Too few are known to measure three.
        if len(self.first()) < FIRST and math.isfinite(self._bound_values[nearest][0]):
            return nearest
        return self._below_envelope()

    def _near_of_another_degree(self, unsolved: Sequence[int]) -> int | None:
        """Return the best of a tensor degree that would be worth measuring if it met its bound, the
        best bound first; None if there is none.
        """
        # In the order of the bounds, so the first of each degree is its best.
        best: dict[int, int] = {}
        for number in unsolved:
            best.setdefault(self._degree(number), number)
        worth = (number for number in best.values() if number in self._picked(number))
        return next(worth, None)

    def _below_envelope(self) -> int | None:
        """Return the configuration whose bound is farthest below all exact curves at some time;
        None if none is by enough.
        """
        # Bounds are infinite where an iteration is too short, and so are curves.
        with np.errstate(invalid="ignore"):
            shares = 1 - self._least_j / self._envelope_j
        gains = np.where(np.isfinite(self._least_j), shares, -np.inf).max(axis=1)
        gains[list(self.curves)] = -np.inf
        most = int(np.argmax(gains))
        return most if gains[most] > _GAIN else None

    def first(self) -> list[int]:
        """Return the configurations to measure."""
        chosen = list(dict.fromkeys([*self._picked(), *self._ranked()]))
        return sorted(chosen[:FIRST], key=self._value)

    def _picked(self, *others: int) -> list[int]:
        """Return which of those near the best are worth measuring, if others meet their bounds."""
        ranked = self._ranked(*others)
        values = [self._value(number)[0] for number in ranked]
        near = [
            number
            for number, value in zip(ranked, values, strict=True)
            if value <= _WORTH * values[0]
        ]
        wide = self.maker.system.gpus_per_node
        return [near[k] for k in worth_measuring([self._degree(number) for number in near], wide)]

    def _ranked(self, *others: int) -> list[int]:
        """Return what the objective allows of exact curves and of others, the best first."""
        allowed = [
            number for number in (*self.curves, *others) if math.isfinite(self._value(number)[0])
        ]
        return sorted(allowed, key=self._value)

    def _value(self, number: int) -> tuple[float, float]:
        """Return the value of the exact curve, or of the bound if there is none."""
        return self._exact_values.get(number, self._bound_values[number])

    def _degree(self, number: int) -> int:
        return self.found[number].job.shape.tensor_degree

    def rows(self) -> tuple[Row, ...]:
        """Return `first` at the best points of their curves."""
        curves = [(self.found[number], self.curves[number]) for number in self.first()]
        return tuple(
            Row(candidate, curve, *point)
            for candidate, curve in curves
            if (point := self._objective.point(curve)) is not None
        )

    def gap(self) -> float:
        """Return by what share a configuration without an exact curve may be better than the best
        one.
        """
        best = min(self._exact_values.values())[0]
        others = [
            value[0] for number, value in enumerate(self._bound_values) if number not in self.curves
        ]
        return max(0.0, 1 - min(others, default=best) / best)

    def out_of_reach(self) -> str:
        """Return why there is no first configuration, and the least deadline or power with one."""
        least = min(self._exact_values.values())[1] * 1.0005  # four digits of it are no less
        option, problem, unit = (
            ("--deadline", "is that fast", "s")
            if self._objective.deadline_s is not None
            else ("--power-budget", "draws that little", "W")
        )
        return (
            f"{option}: no configuration {problem}; give {si(least, unit).replace(' ', '')} or more"
        )

    def frontier(self) -> tuple[Row, ...]:
        """Return the points of all curves that no other point beats in both time and energy,
        fastest first.
        """
        return tuple(
            Row(self.found[number], self.curves[number], time_s, energy_j)
            for time_s, energy_j, number in self._frontier()
        )

    def _frontier(self) -> list[tuple[float, float, int]]:
        """Return time, energy and configuration of the points of the frontier, fastest first."""
        points = sorted(point for number in self.curves for point in self._points(number))
        # Sorted by time, so a point stays only if it is cheaper than all faster ones.
        kept: list[tuple[float, float, int]] = []
        for point in points:
            if not kept or point[1] < kept[-1][1] * (1 - 1e-9):
                kept.append(point)
        return kept

    def _points(self, number: int) -> list[tuple[float, float, int]]:
        """Return time, energy and configuration at the times of the grid that its curve reaches,
        and at its fastest.
        """
        curve = self.curves[number]
        times_s = np.append(self._grid_s, curve.times_s[0])
        energies_j = np.append(curve.at(self._grid_s), curve.energies_j[0])
        return [
            (time_s, energy_j, number)
            for time_s, energy_j in zip(times_s.tolist(), energies_j.tolist(), strict=True)
            if math.isfinite(energy_j)
        ]


def _bound_curve(
    least_s: float, grid_s: NDArray[np.float64], bounds_j: NDArray[np.float64]
) -> Curve:
    """Return the bound as a curve; between its least time and the next time of the grid it may
    be as low as there.
    """
    finite = np.isfinite(bounds_j)
    times_s = grid_s[finite]
    energies_j = bounds_j[finite]
    if len(times_s) == 0 or least_s >= times_s[0]:
        return Curve(times_s, energies_j)
    return Curve(np.insert(times_s, 0, least_s), np.insert(energies_j, 0, energies_j[0]))
