"""Mixed-integer programmes, built row by row and solved exactly by HiGHS, which scipy brings."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_planner.base.errors import PlannerError, UsageError

if TYPE_CHECKING:
    from perseus_planner.solver.network import Floats

# Of the status of scipy's `milp`.
_STOPPED = 1  #: it stopped at its limit
_INFEASIBLE = 2  #: no point meets all rows


class Solved(NamedTuple):
    """The best point of a programme."""

    x: Floats  #: (n,) value of each variable
    bound: float  #: that no point costs less than


class Row(NamedTuple):
    """A limit: the sum of some variables, each times its factor, is from `least` to `most`."""

    factors: Mapping[int, float]
    most: float
    least: float = -math.inf


class Programme:
    """A mixed-integer programme: the least cost within rows.

    Args:
        missing: What is said where scipy is not installed.
    """

    def __init__(self, missing: str) -> None:
        self._missing = missing
        self._costs = list[float]()
        self._least = list[float]()
        self._most = list[float]()
        self._whole = list[bool]()
        self._rows = list[Row]()

    def add(
        self,
        cost: float = 0.0,
        most: float = math.inf,
        least: float = 0.0,
        *,
        whole: bool = False,
    ) -> int:
        """Add a variable from `least` to `most`, and return its number."""
        self._costs.append(cost)
        self._least.append(least)
        self._most.append(most)
        self._whole.append(whole)
        return len(self._costs) - 1

    def limit(self, factors: Mapping[int, float], most: float, least: float = -math.inf) -> None:
        """Add a row."""
        self._rows.append(Row(factors, most, least))

    def solve(
        self,
        objective: Mapping[int, float] | None = None,
        more: Sequence[Row] = (),
        gap: float = 0.0,
        limit_s: float | None = None,
    ) -> Solved | None:
        """Return the best point, and a bound on its cost; None if no point meets all rows.

        Args:
            objective: Cost of each variable that has one; None for those that were added.
            more: Rows for this time alone.
            gap: By how much the cost may be above the bound, relative.
            limit_s: How long it may take, seconds; None for any time.

        Raises:
            UsageError: If scipy is not installed.
            PlannerError: If neither a point nor a bound is found within `limit_s`.
        """
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise UsageError(self._missing) from error
        costs = np.array(self._costs)
        if objective is not None:
            costs = np.zeros(len(self._costs))
            costs[list(objective)] = list(objective.values())
        # HiGHS is exact to absolute numbers, so the largest cost is 1.
        unit = float(np.abs(costs).max()) or 1.0
        rows = [*self._rows, *more]
        values = [factor for row in rows for factor in row.factors.values()]
        # Row and column of each factor.
        places = (
            [number for number, row in enumerate(rows) for _ in row.factors],
            [variable for row in rows for variable in row.factors],
        )
        matrix = csr_array((values, places), shape=(len(rows), len(costs)))
        options: dict[str, Any] = {"mip_rel_gap": gap}
        if limit_s is not None:
            options["time_limit"] = limit_s
        with _without_output():
            solution = milp(
                costs / unit,
                integrality=self._whole,
                bounds=Bounds(self._least, self._most),
                constraints=LinearConstraint(
                    matrix, [row.least for row in rows], [row.most for row in rows]
                ),
                options=options,
            )
        has_whole = any(self._whole)
        # Without whole variables the cost of the best point is the bound, and that of any other
        # point, at which the solver may have stopped, is none.
        is_unproved = solution.status == _STOPPED and not has_whole
        if solution.x is None or is_unproved:
            # Without a limit of time, no point means that there is none.
            if limit_s is None or solution.status == _INFEASIBLE:
                return None
            raise PlannerError(f"no solution was found in the {limit_s:g} s that it may take")
        bound = solution.mip_dual_bound if has_whole else solution.fun
        return Solved(solution.x, float(bound) * unit)


@contextmanager
def _without_output() -> Iterator[None]:
    """Drop what C code prints: releases of HiGHS print a line of their own now and then, into
    what may be JSON.
    """
    if sys.stdout is None:  # closed by the shell
        yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
