"""A power budget over jobs, against a solver that knows nothing of prices, against trying all,
and by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from strategies import fixed, smooth_profile

from perseus_planner import schedules
from perseus_planner.base.errors import InfeasibleDeadline, InfeasiblePower
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.jobs import Share
from perseus_planner.extensions.service.power import Demand, shares
from perseus_planner.solver.frontier import Frontier, solve


@dataclass(frozen=True, eq=False)
class Line:
    """A frontier of a few points; beyond them pipelines wait."""

    times_s: np.ndarray
    energies_j: np.ndarray
    waiting_w: float

    def bound_j(self, deadline_s: float) -> float:
        if deadline_s < self.times_s[0]:
            raise InfeasibleDeadline(deadline_s, float(self.times_s[0]))
        waited_s = max(deadline_s - self.times_s[-1], 0.0)
        return (
            float(np.interp(deadline_s, self.times_s, self.energies_j)) + self.waiting_w * waited_s
        )


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Convex, of up to five pieces; so much waiting power that the slow end need not be the
    frugal one.
    """
    steps = draw(
        st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 500.0)), min_size=1, max_size=5)
    )
    steps.sort(key=lambda step: step[1])  # from the slow end on, ever more is saved by a second
    waiting_w, slowest_j = draw(st.floats(0.0, 300.0)), draw(st.floats(1.0, 2000.0))
    slowest_s = sum(seconds for seconds, _ in steps) + draw(st.floats(0.1, 3.0))
    times_s = slowest_s - np.cumsum([0.0, *(seconds for seconds, _ in steps)])
    effective_j = slowest_j + np.cumsum([0.0, *(seconds * watts for seconds, watts in steps)])
    return Line(times_s[::-1], (effective_j + waiting_w * times_s)[::-1], waiting_w)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    line = draw(lines())
    fastest_s, slowest_s = float(line.times_s[0]), float(line.times_s[-1])
    time_s = fastest_s + draw(st.sampled_from((0.0, 0.0, 0.3, 1.0, 1.5))) * (slowest_s - fastest_s)
    return Demand(line, draw(st.integers(1, 4)), draw(st.integers(1, 64)), time_s)


def drawn_w(found: Sequence[Share]) -> float:
    return math.fsum(each.power_w for each in found)


def slowdown(found: Sequence[Share], jobs: Sequence[Demand]) -> float:
    return sum(job.gpus * share.time_s / job.time_s for share, job in zip(found, jobs, strict=True))


def least_w(job: Demand) -> float:
    """The power of a piece of the frontier is least at one of its ends."""
    later_s = [float(time_s) for time_s in job.frontier.times_s if time_s > job.time_s]
    return min(job.draws_w(time_s) for time_s in (job.time_s, *later_s))


def budget_w(jobs: Sequence[Demand], share: float) -> float:
    """From what all draw at least to what they draw without a budget; never below that for a
    rounding error.
    """
    return sum(least_w(job) * (1 - share) + job.draws_w(job.time_s) * share for job in jobs) * (
        1 + 1e-12
    )


def by_scipy(power_w: float, jobs: Sequence[Demand]) -> float:
    """The least slowdown, over iterations per second; power is given as the greatest of its
    linear pieces.
    """
    slowest_s = [max(job.time_s, float(job.frontier.times_s[-1])) for job in jobs]
    scales = np.array([1.0 / job.time_s for job in jobs])
    bounds = [(job.time_s / slow_s, 1.0) for job, slow_s in zip(jobs, slowest_s, strict=True)]

    def watts(rates: np.ndarray) -> float:
        return sum(
            job.draws_w(max(1.0 / f, job.time_s))
            for f, job in zip(rates * scales, jobs, strict=True)
        )

    gpus = np.array([job.gpus for job in jobs], dtype=float)
    found = minimize(
        lambda rates: float(np.sum(gpus / rates)) / gpus.sum(),
        np.array([low + 1e-3 * (high - low) for low, high in bounds]),
        jac=lambda rates: -gpus / rates**2 / gpus.sum(),
        bounds=bounds,
        constraints={"type": "ineq", "fun": lambda rates: (power_w - watts(rates)) / power_w},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 300},
    )
    return float(np.sum(gpus / found.x)) if watts(found.x) <= power_w * (1 + 1e-9) else math.inf


@fixed
@given(jobs=st.lists(demands(), min_size=1, max_size=4), share=st.floats(0.02, 1.0))
def test_no_other_solver_finds_less_slowdown(jobs: list[Demand], share: float):
    power_w = budget_w(jobs, share)
    found = shares(power_w, jobs)
    assert drawn_w(found) <= power_w
    assert slowdown(found, jobs) <= by_scipy(power_w, jobs) * (1 + 1e-7)


@fixed
@given(jobs=st.lists(demands(), min_size=1, max_size=3), share=st.floats(0.0, 1.0))
def test_nothing_that_was_tried_is_better(jobs: list[Demand], share: float):
    power_w = budget_w(jobs, share)
    found = shares(power_w, jobs)
    ends_s = [max(job.time_s, float(job.frontier.times_s[-1])) for job in jobs]
    grids = [
        np.linspace(job.time_s, end_s, 13).tolist() for job, end_s in zip(jobs, ends_s, strict=True)
    ]
    tables = [
        [Share(time_s, job.draws_w(time_s)) for time_s in grid]
        for job, grid in zip(jobs, grids, strict=True)
    ]
    fitting = [slowdown(tried, jobs) for tried in product(*tables) if drawn_w(tried) <= power_w]
    assert slowdown(found, jobs) <= min(fitting, default=math.inf) * (1 + 1e-9)


@fixed
@given(jobs=st.lists(demands(), min_size=1, max_size=4), share=st.floats(0.0, 0.999))
def test_the_budget_is_used_up_if_anyone_is_slowed_down(jobs: list[Demand], share: float):
    power_w = budget_w(jobs, share)
    found = shares(power_w, jobs)
    for job, each in zip(jobs, found, strict=True):
        assert each.time_s >= job.time_s
        assert each.power_w == job.draws_w(each.time_s)
    if slowdown(found, jobs) > sum(job.gpus for job in jobs):
        assert drawn_w(found) == pytest.approx(power_w, rel=1e-9)


@fixed
@given(
    jobs=st.lists(demands(), min_size=1, max_size=4),
    share=st.floats(0.01, 1.0),
    wider=st.floats(1.0, 2.0),
)
def test_more_power_slows_nobody_down(jobs: list[Demand], share: float, wider: float):
    less, more = (
        shares(power_w, jobs) for power_w in (budget_w(jobs, share), budget_w(jobs, share) * wider)
    )
    assert all(a.time_s >= b.time_s for a, b in zip(less, more, strict=True))
    assert (
        shares(None, jobs)
        == shares(1e99, jobs)
        == tuple(Share(job.time_s, job.draws_w(job.time_s)) for job in jobs)
    )


@fixed
@given(jobs=st.lists(demands(), min_size=1, max_size=4), share=st.floats(0.01, 0.99))
def test_what_is_refused_names_the_least_that_is_not(jobs: list[Demand], share: float):
    frugal_w = sum(map(least_w, jobs))
    with pytest.raises(InfeasiblePower) as refused:
        shares(frugal_w * share, jobs)
    assert refused.value.least_power_w == pytest.approx(frugal_w, rel=1e-12)
    assert drawn_w(shares(refused.value.least_power_w, jobs)) <= refused.value.least_power_w


@fixed
@given(job=demands(), share=st.floats(0.001, 0.999), others=st.lists(demands(), max_size=2))
def test_a_job_with_a_budget_of_its_own_keeps_it(job: Demand, share: float, others: list[Demand]):
    own_w = budget_w([job], share)
    capped = Demand(job.frontier, job.pipelines, job.gpus, job.time_s, own_w)
    found = shares(None, [capped, *others])
    assert found[0].power_w <= own_w
    assert found[0].time_s == pytest.approx(shares(own_w, [job])[0].time_s, rel=1e-9)
    assert found[1:] == shares(None, others)
    both_w = budget_w([job, *others], 0.5)
    within = shares(max(both_w, drawn_w(found) * 0.5 + both_w * 0.5), [capped, *others])
    assert within[0].power_w <= own_w
    with pytest.raises(InfeasiblePower):
        shares(
            None, [Demand(job.frontier, job.pipelines, job.gpus, job.time_s, least_w(job) * share)]
        )


def test_by_hand_the_job_with_fewer_gpus_gives_way():
    """Each draws 100 J / t. Slowed to t, the price of a watt is GPUs * t * t / 100: t is as 1 to
    sqrt(GPUs).
    """
    line = Line(np.array([1.0, 4.0]), np.array([100.0, 100.0]), 0.0)
    small, large = shares(150.0, [Demand(line, 1, 1, 1.0), Demand(line, 1, 4, 1.0)])
    assert (small.time_s, large.time_s) == (pytest.approx(2.0), pytest.approx(1.0))
    small, large = shares(75.0, [Demand(line, 1, 1, 1.0), Demand(line, 1, 4, 1.0)])
    assert (small.time_s, large.time_s) == (pytest.approx(4.0), pytest.approx(2.0))


def test_no_jobs_fit_in_any_budget():
    assert shares(1.0, []) == shares(None, []) == ()


@cache
def solved(slowdown: int) -> Frontier:
    return solve(smooth_profile(2 + slowdown, 60), schedules.one_f_one_b(2 + slowdown, 4))


@pytest.mark.parametrize("slack", [1.0, 1.03, 5.0])
def test_shares_of_real_frontiers_are_those_of_the_fastest_plans_within_power(slack: float):
    frontier = solved(0)
    job = Demand(Curve.of(frontier), 3, 12, slack * frontier.min_time_s)
    for share in (0.0, 0.2, 0.9):
        power_w = budget_w([job], share)
        (found,) = shares(power_w, [job])
        assert found.power_w <= power_w
        if slack == 1.0:
            within = frontier.plan_within_power(power_w / 3 * 1.001)
            assert found.time_s == pytest.approx(within.time_s, rel=0.02)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_real_frontiers_share_as_no_other_solver_does_better(share: float):
    jobs = [
        Demand(Curve.of(solved(number)), 2, 8 * (number + 1), solved(number).min_time_s)
        for number in range(3)
    ]
    power_w = budget_w(jobs, share)
    assert slowdown(shares(power_w, jobs), jobs) <= by_scipy(power_w, jobs) * (1 + 1e-7)
