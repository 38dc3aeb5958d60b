"""Plans of small problems against every possible choice of clocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from oracles import all_choices, effective_j, waiting_w
from strategies import any_schedule, few_and_many, furnished, graph, pipeline

from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver import rounding
from perseus_planner.solver.frontier import Frontier, solve_dag
from perseus_planner.solver.point_problem import compute_ends, point_problem
from perseus_planner.solver.rounding import try_all_points

pytestmark = pytest.mark.usefixtures("full_effort")


def graphs(rng: Random, largest: int, max_options: int) -> Iterator[PipelineDag]:
    """Computations anyhow connected."""
    while True:
        yield graph(rng.getrandbits(32), rng.randint(2, largest), max_options)


def pipelines(rng: Random, largest: int, max_options: int) -> Iterator[PipelineDag]:
    """1F1B of every shape of at most so many computations."""
    shapes = [
        (stages, count)
        for stages in range(1, 5)
        for count in range(1, 5)
        if 2 * stages * count <= largest
    ]
    while True:
        yield PipelineDag.from_schedule(
            *pipeline(rng.getrandbits(32), *rng.choice(shapes), max_options)
        )


def jobs(rng: Random, largest: int, max_options: int) -> Iterator[PipelineDag]:
    """Any schedule of at most so many computations, with transfers, fixed operations and
    variants.
    """
    while True:
        seed = rng.getrandbits(32)
        schedule = any_schedule(seed, rng.randint(1, 2), rng.randint(1, 3))
        if len(tuple(schedule.computations())) <= largest:
            yield furnished(seed, schedule, max_options)


KINDS = pytest.mark.parametrize("kind", [graphs, pipelines, jobs])


class Tried:
    """A problem with all its choices of clocks, tried one by one.

    Attributes:
        frontier: of the problem.
        exact_s: the iteration times of all choices, up to where effective energy stops falling.
    """

    def __init__(self, problem: PipelineDag) -> None:
        self.frontier: Frontier = solve_dag(problem)
        self._times_s, self._costs_j = all_choices(problem)
        self.exact_s = self._times_s[self._times_s <= self.frontier.max_time_s]
        self._scale_j = math.fsum(max(map(abs, each)) for each in effective_j(problem))

    def wasted(self, deadline_s: float) -> float:
        """By how much the plan misses the best choice, in the range of effective energy from
        fastest to cheapest.

        0 where it is as good. Fails where it is better, which cannot be.
        """
        plan = self.frontier.plan_until(deadline_s, on_time=None)
        missed_j = (
            plan.energy_j
            - waiting_w(self.frontier.dag) * plan.time_s
            - self._costs_j[self._times_s <= deadline_s].min()
        )
        assert missed_j >= -1e-12 * self._scale_j
        range_j = self._costs_j[self._times_s == self._times_s.min()].min() - self._costs_j.min()
        return float(missed_j / range_j) if missed_j > 1e-12 * self._scale_j else 0.0

    def wasted_anywhere(self, rng: Random) -> float:
        """At a deadline between the ends of the frontier."""
        return self.wasted(rng.uniform(self.frontier.min_time_s, self.frontier.max_time_s))

    def wasted_where_one_fits_exactly(self, rng: Random) -> float:
        """At a deadline that is the iteration time of some choice, to the last bit."""
        return self.wasted(float(rng.choice(self.exact_s)))

    def wasted_alone(self) -> float:
        """By how much the plan of least energy misses the least there is, in the range of all
        energies there are.
        """
        waiting = waiting_w(self.frontier.dag)
        energies_j = self._costs_j + waiting * self._times_s
        least_j, most_j = float(energies_j.min()), float(energies_j.max())
        missed_j = self.frontier.plan_for_least_energy(on_time=None).energy_j - least_j
        scale_j = self._scale_j + waiting * self._times_s.max()
        assert missed_j >= -1e-12 * scale_j
        return missed_j / (most_j - least_j) if missed_j > 1e-12 * scale_j else 0.0


def check(wasted: list[float], optimal: float, most: float) -> None:
    """At least that part is optimal, and none is further off."""
    assert np.mean(np.array(wasted) == 0) >= optimal
    assert max(wasted) <= most


@KINDS
@few_and_many("count", 12, 80)
def test_plans_of_the_smallest_problems_are_optimal(kind, count: int):
    rng = Random(1)
    problems = kind(rng, 6, 4)
    for _ in range(count):
        tried = Tried(next(problems))
        assert tried.wasted_anywhere(rng) == 0
        assert tried.wasted_where_one_fits_exactly(rng) == 0
        for deadline_s in (
            tried.frontier.min_time_s,
            tried.frontier.max_time_s,
            3 * tried.frontier.max_time_s,
        ):
            assert tried.wasted(deadline_s) == 0


@KINDS
@few_and_many("count", 12, 80)
def test_most_plans_of_the_least_energy_have_the_least_possible(kind, count: int):
    problems = kind(Random(4), 6, 4)
    wasted = [Tried(next(problems)).wasted_alone() for _ in range(count)]
    check(wasted, optimal=0.95, most=0.3)


@KINDS
@few_and_many("count", 10, 70)
def test_without_trying_all_choices_most_are_optimal_still(
    kind, count: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rounding, "_FEW", 0)
    rng = Random(2)
    problems = kind(rng, 6, 4)
    tried = [Tried(next(problems)) for _ in range(count)]
    check([each.wasted_anywhere(rng) for each in tried], optimal=0.97, most=0.2)
    check([each.wasted_where_one_fits_exactly(rng) for each in tried], optimal=0.94, most=0.6)
    check([each.wasted(each.frontier.max_time_s) for each in tried], optimal=1, most=0)


@KINDS
@few_and_many("count", 4, 25)
def test_plans_of_problems_too_large_to_try_all_choices_are_near_the_best_one(kind, count: int):
    rng = Random(3)
    problems, tried = kind(rng, 9, 8), []
    while len(tried) < count:
        problem = next(problems)
        worthwhile = math.prod(len(problem.points[key]) for key in problem.keys)
        measured = math.prod(
            len(problem.profile.measurements[key]) for key in problem.iteration.keys
        )
        if worthwhile > rounding._FEW and measured <= 2**18:
            tried.append(Tried(problem))
    check([each.wasted_anywhere(rng) for each in tried], optimal=0.65, most=0.02)
    check([each.wasted_where_one_fits_exactly(rng) for each in tried], optimal=0.65, most=0.2)


def test_a_plan_costs_no_more_than_a_known_one_however_badly_the_search_is_guided(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rounding, "_FEW", 0)
    for effort in ("_ANCHOR_EFFORT", "_EFFORT"):
        monkeypatch.setattr(rounding, effort, (0, 1, 1))
    rng = Random(5)
    problems = graphs(rng, 6, 4)
    for _ in range(50):
        dag = next(problems)
        problem, count = point_problem(dag), len(dag.order)
        fastest_s = compute_ends(problem, problem.point_start[problem.member], np.empty(count))
        deadline_s = rng.uniform(1.0, 2.0) * fastest_s
        known = try_all_points(problem, deadline_s)
        hurry = rounding.Anchor(
            deadline_s, np.zeros(count), np.full(count, 1e6)
        )  # time at any price
        found = rounding.round_plan(problem, deadline_s, [hurry], known)
        assert problem.cost_j[found].sum() == pytest.approx(problem.cost_j[known].sum(), rel=1e-12)
