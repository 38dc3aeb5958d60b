"""Large iterations have coarse slopes: their bound is a bound still, and hardly lower."""

from __future__ import annotations

import numpy as np
import pytest
from noisy_rows import unlike_stages
from oracles import all_choices, waiting_w
from strategies import drawn, graphs, shares, smooth_profile

from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver import network
from perseus_planner.solver.frontier import Frontier, solve, solve_dag

pytestmark = pytest.mark.usefixtures("full_effort")


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch):
    """Every iteration is large."""
    monkeypatch.setattr(network, "_MOST_EXACT", 0)


def below(exact: Frontier, rough: Frontier, share: float) -> float:
    """By how much the coarse bound is below the exact one, as a part of it."""
    deadline_s = exact.min_time_s + share * (exact.max_time_s - exact.min_time_s)
    return 1 - rough.bound_j(max(deadline_s, exact.min_time_s)) / exact.bound_j(
        max(deadline_s, exact.min_time_s)
    )


@drawn(10, 100, dag=graphs(7, max_options=4), share=shares())
def test_the_bound_is_not_above_the_best_choice_or_the_exact_bound(dag: PipelineDag, share: float):
    exact = solve_dag(dag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_MOST_EXACT", 0)
        rough = solve_dag(dag)
        deadline_s = exact.min_time_s + share * (exact.max_time_s - exact.min_time_s)
        bound_j = rough.bound_j(max(deadline_s, exact.min_time_s))
    assert (rough.min_time_s, rough.max_time_s) == (exact.min_time_s, exact.max_time_s)
    times_s, costs_j = all_choices(dag)
    within = times_s <= max(deadline_s, exact.min_time_s)
    scale_j = np.abs(costs_j).max() + waiting_w(dag) * times_s.max()
    assert bound_j <= (costs_j[within] + waiting_w(dag) * deadline_s).min() + 1e-9 * scale_j
    assert bound_j <= exact.bound_j(max(deadline_s, exact.min_time_s)) + 1e-9 * scale_j


def test_the_bound_of_a_pipeline_is_hardly_lower(coarse: None, monkeypatch: pytest.MonkeyPatch):
    profile = unlike_stages(smooth_profile(8), 1)
    rough = solve(profile, "1f1b", microbatches=24)
    _ = rough.scaled
    monkeypatch.undo()
    exact = solve(profile, "1f1b", microbatches=24)
    losses = [below(exact, rough, share) for share in np.linspace(0, 1, 40)]
    assert min(losses) >= -1e-12
    assert max(losses) <= 3e-4
    assert len(rough.times) < len(exact.times) / 3


def test_plans_of_a_large_iteration_are_as_near_to_the_bound_as_others():
    frontier = solve(unlike_stages(smooth_profile(16), 2), "1f1b", microbatches=130)
    assert frontier.scaled.power_unit_w > 0.1, "the slopes are exact"
    for slowdown in (1.0, 1.05):
        plan = frontier.plan_until(slowdown * frontier.baseline_time_s, on_time=None)
        assert plan.bound_j <= plan.energy_j <= 1.006 * plan.bound_j
