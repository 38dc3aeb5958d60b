"""Polishing: never late, never dearer, and near the best choice from any start."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from strategies import fixed, graph, problems, shares

from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.planner import polish
from perseus_planner.solver.point_problem import PointProblem, compute_ends, point_problem
from perseus_planner.solver.rounding import try_all_points

pytestmark = pytest.mark.usefixtures("full_effort")


def fastest(problem: PointProblem) -> np.ndarray:
    return problem.point_start[problem.member]


def ends_s(problem: PointProblem, chosen: np.ndarray) -> float:
    return compute_ends(problem, chosen, np.empty(len(chosen)))


@fixed
@given(dag=problems(12), share=shares())
def test_a_polished_plan_is_in_time_and_costs_no_more(dag: PipelineDag, share: float):
    problem = point_problem(dag)
    fastest_s, slowest_s = (
        ends_s(problem, each)
        for each in (fastest(problem), problem.point_start[problem.member + 1] - 1)
    )
    deadline_s = max(fastest_s + share * (slowest_s - fastest_s), fastest_s)
    found = polish(problem, deadline_s, fastest(problem))
    assert ends_s(problem, found) <= deadline_s
    assert problem.cost_j[found].sum() <= problem.cost_j[fastest(problem)].sum()
    assert (
        (found >= problem.point_start[problem.member])
        & (found < problem.point_start[problem.member + 1])
    ).all()
    again = polish(problem, deadline_s, found)
    assert ends_s(problem, again) <= deadline_s
    assert problem.cost_j[again].sum() <= problem.cost_j[found].sum()


def test_it_comes_near_the_best_choice_from_the_fastest_one():
    rng, missed = Random(7), []
    for _ in range(100):
        problem = point_problem(graph(rng.getrandbits(32), rng.randint(3, 6), 4))
        deadline_s = rng.uniform(1.0, 1.6) * ends_s(problem, fastest(problem))
        costs_j = [
            problem.cost_j[chosen].sum()
            for chosen in (
                polish(problem, deadline_s, fastest(problem)),
                try_all_points(problem, deadline_s),
                fastest(problem),
            )
        ]
        missed.append((costs_j[0] - costs_j[1]) / max(costs_j[2] - costs_j[1], 1e-9))
    assert np.mean(np.array(missed) < 1e-9) >= 0.8
    assert np.mean(missed) <= 0.05


def test_a_plan_that_fits_its_deadline_to_the_last_bit_is_polished_too():
    improved = 0
    for seed in range(40):
        problem = point_problem(graph(seed, 8, 5))
        deadline_s = ends_s(problem, fastest(problem))
        found = polish(problem, deadline_s, fastest(problem))
        assert ends_s(problem, found) <= deadline_s
        best_j = problem.cost_j[try_all_points(problem, deadline_s)].sum()
        improved += bool(problem.cost_j[found].sum() == pytest.approx(best_j, rel=1e-9))
    assert improved >= 36
