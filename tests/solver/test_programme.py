"""A programme's bound is one, also where the solver stops at its limit."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_planner.base.errors import PlannerError
from perseus_planner.solver.programme import Programme

pytest.importorskip("scipy")


def covering(*, whole: bool, size: int) -> Programme:
    """A programme that takes a while: the least cost that covers rows drawn at random."""
    random = np.random.default_rng(0)
    programme = Programme("scipy is missing")
    variables = [
        programme.add(cost, 1.0, whole=whole) for cost in random.uniform(0.1, 1.0, size).tolist()
    ]
    for _ in range(size):
        some = random.choice(variables, 30, replace=False).tolist()
        factors = dict(zip(some, random.uniform(0.0, 1.0, len(some)).tolist(), strict=True))
        programme.limit(factors, np.inf, 0.5 * sum(factors.values()))
    return programme


def test_without_whole_variables_a_solver_that_stops_at_its_limit_gives_no_bound():
    programme = covering(whole=False, size=600)
    with pytest.raises(PlannerError, match="no solution was found"):
        programme.solve(limit_s=1e-9)


def test_a_point_at_which_the_solver_stopped_is_no_bound(monkeypatch: pytest.MonkeyPatch):
    """Were releases of scipy to return the point of a linear programme that they stop at."""
    from scipy import optimize

    def stopped(costs: np.ndarray, **_: object) -> optimize.OptimizeResult:
        return optimize.OptimizeResult(x=np.ones(len(costs)), fun=costs.sum(), status=1)

    monkeypatch.setattr(optimize, "milp", stopped)
    with pytest.raises(PlannerError, match="no solution was found in the 5 s"):
        covering(whole=False, size=40).solve(limit_s=5.0)


def test_the_bound_is_the_least_cost_without_whole_variables_and_below_it_with_them():
    continuous = covering(whole=False, size=40).solve()
    whole = covering(whole=True, size=40).solve(gap=0.05)
    assert continuous is not None
    assert whole is not None
    exact = covering(whole=True, size=40).solve()
    assert exact is not None
    costs = np.random.default_rng(0).uniform(0.1, 1.0, 40)
    assert continuous.bound == pytest.approx(costs @ continuous.x, rel=1e-6)
    assert continuous.bound <= whole.bound * (1 + 1e-6)
    assert whole.bound <= costs @ exact.x * (1 + 1e-6)
