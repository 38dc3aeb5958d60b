"""Every call of a kernel in small solves, plans and searches, beside the same in plain Python: all
that it returns and all that it has written are equal, bit by bit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import plain_kernels
import pytest
from strategies import any_schedule, extras, furnished, job, soaks

from perseus_planner.base.errors import PlannerError
from perseus_planner.extensions.autopilot.batches import solver as batch_solver
from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, Law
from perseus_planner.extensions.autopilot.job import AutopilotJob
from perseus_planner.extensions.autopilot.planning import Costs, Searcher
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.profiles.modes import OWN
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver import budget, drawn_plans, drawn_replay, kernels, polish, rounding
from perseus_planner.solver.frontier import solve_dag
from perseus_planner.solver.point_problem import compute_ends, point_problem

pytestmark = pytest.mark.needs("autopilot")

#: So little that plain Python is fast enough; the search of training has its own.
EFFORTS = (
    (polish, "_MOVES", (40, 2000)),
    (rounding, "_EFFORT", (1000, 15, 40)),
    (rounding, "_ANCHOR_EFFORT", (200, 4, 8)),
    (rounding, "_FEW", 2**6),
    (budget, "_EFFORT", budget.Tries(1000, 60, 120)),
    (budget, "_REPEATS", budget.Repeats(1, 1)),
    (batch_solver, "_FEW", 2**6),
)


def copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        make = getattr(value, "_make", tuple)
        return make(map(copied, value))
    return value


def bits(value: Any) -> Any:
    """What a value holds: numbers of an array as bytes, so that -0 is not 0."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, tuple):
        return [*map(bits, value)]
    return float(value).hex() if isinstance(value, float) else value


def doors() -> dict[str, Callable[..., Any]]:
    """All kernels by the names of their Python functions."""
    declared = {function.__code__ for function, _ in kernels.DECLARED}
    return {
        each.__name__: each
        for name, module in [*sys.modules.items()]
        if name.startswith("perseus_planner.")
        for each in vars(module).values()
        if getattr(getattr(each, "__wrapped__", None), "__code__", None) in declared
    }


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have each call of a kernel from Python compared; count them."""
    for module, name, value in EFFORTS:
        monkeypatch.setattr(module, name, value)
    counts = Counter[str]()

    def comparing(door: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            own = copied(arguments)
            with np.errstate(all="ignore"):
                wanted = plain(*own)
            found = door(*arguments)
            assert bits(found) == bits(None if wanted is None else type(found)(wanted))
            assert bits(arguments) == bits(own)
            counts[door.__name__] += 1
            return found

        return call

    for name, door in doors().items():
        both = comparing(door, getattr(plain_kernels, name))
        for module in [*sys.modules.values()]:
            if module.__name__.startswith("perseus_planner.") and vars(module).get(name) is door:
                monkeypatch.setattr(module, name, both)
    return counts


@pytest.mark.parametrize("seed", [*range(2, 5), *soaks(*range(5, 40))])
def test_frontiers_and_plans(compared: Counter[str], seed: int):
    dag = job(seed, 1 + seed % 3, 2 + seed % 4, 4)
    frontier = solve_dag(dag)
    for most in (None, 0, 3):
        try:
            frontier.plan_until(1.1 * frontier.baseline_time_s, max_changes=most, on_time=None)
        except PlannerError:
            continue  # too few changes for its deadline
    if seed == 2:
        called = {"_grow_tree", "_advance", "compute_ends", "_fill_exactly", "_improve_guide"}
        called |= {"_anneal_starts", "_anneal_clocks", "max_changes", "replay"}
        assert called <= {*compared}


@pytest.mark.parametrize("seed", [2, *soaks(3, 4)])
def test_plans_on_time(compared: Counter[str], seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drawn_plans, "_DRAWS", 12)
    monkeypatch.setattr(drawn_plans, "_ITERATIONS", 8)
    monkeypatch.setattr(drawn_replay, "_AT_A_TIME", 5)  # the last few are fewer
    dag = job(seed, 1 + seed % 3, 2 + seed % 4, 4)
    dag = dag.with_profile(replace(dag.profile, gpu_spread=0.05, jitter=0.1))
    frontier = solve_dag(dag)
    for most in (None, 2):
        frontier.plan_until(1.1 * frontier.baseline_time_s, max_changes=most)
    assert compared["replay_all"] > 0
    if seed == 2:  # where a plan is late without repairs
        assert compared["mark_longest"] > 0


@pytest.mark.parametrize("seed", [*range(4), *soaks(*range(4, 40))])
def test_searches_of_training(compared: Counter[str], seed: int, monkeypatch: pytest.MonkeyPatch):
    """With one mode and with two, with options that may not be planned on, and with ties."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("perseus_planner.extensions.autopilot.planning._TRIES", (150, 150))
    iteration = furnished(seed, any_schedule(seed, 2, 3), 4).iteration
    modes = (OWN, "other")[: 1 + seed % 2]
    change = ClockChange(0.0045, 0.0009)
    clocks_mhz = (1410, 1200, 1000, 900)
    searcher = Searcher(
        AutopilotJob(
            iteration, clocks_mhz, 1, change, modes=modes, shares_microbatch=seed % 4 == 3
        ),
        (None, 3)[seed % 2],
    )
    shape = len(searcher.keys), len(clocks_mhz) * len(modes)
    time_s = 0.05 + 0.1 * np.sort(rng.random(shape), axis=1)
    time_s[:, 1:][rng.random((shape[0], shape[1] - 1)) < 0.2] = np.inf
    power_w = 300.0 - 200.0 * np.sort(rng.random(shape), axis=1)
    costs = Costs(time_s, power_w, np.full(len(iteration.schedule.ranks), 80.0))
    searcher.polish(searcher.full(), costs, 10.0, seed + 1)
    assert compared["_anneal_clocks"] > 0
    assert compared["_replay_changes"] > 0


@pytest.mark.parametrize("seed", [*range(1, 3), *soaks(*range(3, 30))])
def test_plans_of_the_batch(compared: Counter[str], seed: int):
    rng = np.random.default_rng(seed)
    schedule = any_schedule(seed, 2, 3)
    profile = replace(furnished(seed, schedule, 4).profile, jitter=0.01)
    dag = PipelineDag.from_schedule(profile, schedule, **extras(seed, schedule))
    laws = {
        key: Law(0.1 * rows[0].time_s, (rows[0].time_s,))
        for key, rows in profile.measurements.items()
    }
    work = rng.uniform(0.3, 1.7, (schedule.microbatches, 1))
    for most in (None, 2):
        planner = BatchPlanner(dag, laws, max_changes=most)
        planner.best_order(work)
        plan = planner.plan(work, 1.1 * planner.full_clocks_s(work), effort=8)
        factor = rng.uniform(0.97, 1.05, len(dag.computations))
        planner.replay(plan, factor, ClockChange(0.0045, 0.0009), is_catching_up=True)
    if seed == 1:
        assert {"_makespans", "_latest_ends", "_merge", "_lower"} <= {*compared}


def test_all_choices_of_few(compared: Counter[str]):
    for seed in range(4):
        problem = point_problem(job(seed, 1, 1, 3))
        fastest = problem.point_start[problem.member]
        fastest_s = compute_ends(problem, fastest, np.empty(len(fastest)))
        rounding.try_all_points(problem, 1.2 * fastest_s)
    assert compared["_try_all"] == 4


def test_every_kernel_has_its_like():
    assert {name for name in doors() if not hasattr(plain_kernels, name)} == set()
