"""Plans with a switch budget: against every choice of clocks where these are few, and certificates where they are not."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import effective_j, end_times_s, every_choice
from strategies import dag, dags, deadline_s, fixed, pipeline, pipelines, shares, smooth_profile

from perseus_planner import Profile, budget
from perseus_planner.dag import PipelineDag
from perseus_planner.errors import InfeasibleBudget, InfeasibleDeadline, UsageError
from perseus_planner.frontier import Frontier, solve, trace
from perseus_planner.iteration import Iteration, Operation
from perseus_planner.plan import Plan
from perseus_planner.profiles import Measurement
from perseus_planner.schedules import Computation, Schedule, one_f_one_b

EFFORT = (3_000_000, 500, 10_000)  #: of a search in tests where it need not be the best


def changes_and_dwell(problem: PipelineDag, clocks: list[int], times_s: list[float]) -> tuple[int, float]:
    """The most clock changes of a rank, and the shortest time that a clock is held, seconds."""
    end_s = end_times_s(problem, times_s)
    start_s = [end - time for end, time in zip(end_s, times_s, strict=True)]
    place, most, held_s = 0, 0, [math.inf]
    for rank in problem.schedule.ranks:
        mine = range(place, place + len(rank))
        begins = [start_s[i] for i, j in zip(mine, [mine[-1], *mine], strict=False) if clocks[i] != clocks[j]]
        if begins:
            held_s += [b - a for a, b in zip(begins, [*begins[1:], begins[0] + max(end_s)], strict=True)]
        place, most = place + len(rank), max(most, len(begins))
    return most, min(held_s)


def spent_j(plan: Plan, problem: PipelineDag) -> float:
    """Effective energy of a plan, joules."""
    power_w = problem.profile.blocking_power_w
    points = [plan.measurement(computation) for computation in problem.computations]
    return math.fsum(point.energy_j - power_w * point.time_s for point in points)


def check(plan: Plan, problem: PipelineDag, deadline: float, most: int | None, dwell_s: float = 0.0) -> None:
    """The plan keeps to deadline, budget and dwell; all found without the planner's own replay."""
    clocks = [plan.clocks[str(computation)] for computation in problem.computations]
    times_s = [plan.measurement(computation).time_s for computation in problem.computations]
    changes, held_s = changes_and_dwell(problem, clocks, times_s)
    assert max(plan.changes) == changes
    assert most is None or changes <= most
    assert dwell_s == 0 or held_s >= dwell_s * (1 - 1e-9)
    assert plan.time_s == max(end_times_s(problem, times_s)) <= deadline


def scale_j(problem: PipelineDag) -> float:
    return math.fsum(max(map(abs, each)) for each in effective_j(problem))


class Tried:
    """A problem with all its choices of measured clocks, tried one by one."""

    def __init__(self, problem: PipelineDag) -> None:
        self.problem, self.frontier = problem, trace(problem)
        points = [problem.profile.measurements[key] for key in problem.keys]
        choice, self.times_s, self.costs_j = every_choice(problem)
        told = [
            changes_and_dwell(
                problem,
                [points[i][j].clock_mhz for i, j in enumerate(row)],
                [points[i][j].time_s for i, j in enumerate(row)],
            )
            for row in choice.T.tolist()
        ]
        self.changes, self.held_s = np.array(told).T

    def wasted_j(self, deadline: float, most: int, dwell_s: float) -> float:
        """By how much the plan misses the best choice; fails where it is none, or refused though there is one."""
        fits = (self.changes <= most) & ((self.held_s >= dwell_s * (1 + 1e-9)) | (dwell_s == 0))
        in_time = fits & (self.times_s <= deadline)
        if not in_time.any():
            with pytest.raises(InfeasibleBudget) as caught:
                self.frontier.plan_for(deadline, max_changes=most, min_dwell_s=dwell_s)
            assert caught.value.least_time_s >= self.times_s[fits].min() if fits.any() else math.inf
            return 0.0
        plan = self.frontier.plan_for(deadline, max_changes=most, min_dwell_s=dwell_s)
        check(plan, self.problem, deadline, most, dwell_s)
        missed_j = spent_j(plan, self.problem) - self.costs_j[in_time].min()
        assert missed_j >= -1e-12 * scale_j(self.problem)
        return max(0.0, missed_j - 1e-12 * scale_j(self.problem))


def small_problems(seed: int, count: int) -> list[PipelineDag]:
    """Graphs and pipelines with at most 2048 choices of clocks."""
    rng, problems = Random(seed), []
    shapes = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)]
    while len(problems) < count:
        graph = dag(rng.getrandbits(32), rng.randint(2, 7), 4)
        lined = PipelineDag.from_schedule(*pipeline(rng.getrandbits(32), *rng.choice(shapes), 4))
        for problem in (graph, lined):
            if 2 <= math.prod(len(problem.profile.measurements[key]) for key in problem.keys) <= 2048:
                problems.append(problem)
    return problems[:count]


def tried_at_random(seed: int, count: int) -> list[float]:
    rng, wasted_j = Random(seed), []
    for problem in small_problems(seed, count):
        tried = Tried(problem)
        for deadline in (rng.uniform(tried.times_s.min(), tried.times_s.max()), float(rng.choice(tried.times_s))):
            held_s = [0.0, *tried.held_s[np.isfinite(tried.held_s)].tolist()]
            dwell_s = max(0.0, rng.choice([0.0, 0.9999 * rng.choice(held_s)]))
            wasted_j.append(tried.wasted_j(deadline, rng.randint(0, 4), dwell_s))
    return wasted_j


def test_plans_of_the_smallest_problems_are_the_best_there_are():
    assert max(tried_at_random(1, 60)) == 0


def test_without_trying_all_choices_most_are_the_best_still(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget, "_FEW", 0)
    monkeypatch.setattr(budget, "_EFFORT", EFFORT)
    assert np.mean(np.array(tried_at_random(2, 60)) == 0) >= 0.9
