"""One clock for whole iterations, in virtual time: the least energy, and never slower than the
ledger allows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import drawn, soaks
from whole_world import CLOCKS, TOP_MHZ, World, noise, pilot_of, trained

from perseus_planner import Profile, solve
from perseus_planner.base.errors import ProfileError
from perseus_planner.extensions.autopilot.job import ComputationObservation, RankObservation
from perseus_planner.extensions.autopilot.value_blocks import Block, Comparison


@pytest.mark.parametrize("memory", [0.2, 0.6, 0.97])
@pytest.mark.parametrize("slowdown", [1.0, 1.05, 1.2])
@pytest.mark.parametrize("seed", [0, *soaks(1, 2)])
def test_the_search_comes_close_to_the_least_energy(memory: float, slowdown: float, seed: int):
    world = World(memory, seed=seed)
    found = trained(world, 1500, slowdown)
    top_j = world.cost_j(TOP_MHZ)
    reached, best = (
        1.0 - world.cost_j(c) / top_j for c in (found.best_mhz, world.best_mhz(slowdown))
    )
    assert reached >= best - 0.005
    clock = found.best_mhz
    assert found.effect == pytest.approx((world.time_s(clock) / world.top_s, reached), abs=0.02)
    assert sum(world.times_s) <= (slowdown + 0.005) * sum(world.top_times_s)


def test_the_search_pays_little_where_every_clock_is_too_slow():
    world = World(0.0)
    trained(world, 600, 1.0)
    assert sum(world.times_s) <= 1.001 * sum(world.top_times_s)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A job in which up to 30 % of clocks are slower than physics allows, and that changes its
    size once.
    """
    slow = set(draw(st.lists(st.sampled_from(CLOCKS[1:]), max_size=len(CLOCKS) * 3 // 10)))
    by, size = draw(st.floats(1.0, 1.4)), draw(st.sampled_from([1.0, 0.8, 1.3, 2.5]))
    step = draw(st.integers(1, 400))

    def factor(iteration: int, clock: int) -> float:
        return (by if clock in slow else 1.0) * (size if iteration >= step else 1.0)

    jitter = draw(st.sampled_from([0.0, 0.003, 0.01]))
    return World(
        draw(st.floats(0.0, 1.0)), jitter=jitter, factor=factor, seed=draw(st.integers(0, 99))
    )


@drawn(10, 100, worlds(), st.sampled_from([1.0, 1.05]), anew=True)
def test_whatever_the_physics_a_rank_owes_no_more_than_the_burst_and_one_iteration(
    world: World, slowdown: float
):
    found = trained(world, 500, slowdown)
    assert found.owed_s <= found.burst_s + found.excess_s


@drawn(10, 100, worlds(), st.sampled_from([1.0, 1.05, 1.2]), anew=True)
def test_with_the_right_reference_training_is_as_fast_as_agreed(world: World, slowdown: float):
    world.jitter, physics = 0.0, world.factor
    world.factor = lambda _, clock: physics(0, clock)
    found = trained(world, 500, slowdown)
    allowed_s = (slowdown + 0.005) * sum(world.top_times_s) + found.burst_s + found.excess_s
    assert sum(world.times_s) <= allowed_s * (1.0 + 1e-9)


def test_a_job_that_has_changed_is_measured_anew():
    world = World(0.6, factor=lambda iteration, _: 2.5 if iteration >= 700 else 1.0)
    found = trained(world, 1800, 1.05)
    assert found.reference_s == pytest.approx(2.5 * world.top_s, rel=0.01)
    assert found.best_mhz < TOP_MHZ


def test_the_next_start_begins_at_the_best_value_and_learns_if_the_job_is_another(tmp_path: Path):
    first = trained(World(0.6), 1000, 1.05)
    first.pilot.learned().save(tmp_path / "autopilot.yaml")
    prior = Profile.load(tmp_path / "autopilot.yaml")
    assert prior == first.pilot.learned()
    again = trained(World(0.6, seed=1), 60, 1.05, prior=prior)
    begin = next(each for each in again.decisions if each.phase != "reference")
    assert abs(begin.clocks[0][0][0] - first.best_mhz) <= 15
    other = World(0.0)  # to which 60 % of its time was learnt not to depend on the clock
    found = trained(other, 1000, 1.05, prior=prior)
    assert abs(found.best_mhz - other.best_mhz(1.05)) <= 15
    assert sum(other.times_s) <= 1.055 * sum(other.top_times_s)


def test_what_was_learnt_can_be_planned_with():
    learnt = trained(World(0.6), 1000, 1.05).pilot.learned()
    frontier = solve(learnt, "whole", microbatches=1)
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s)
    assert plan.energy_j < frontier.baseline_energy_j
    with pytest.raises(ProfileError, match="stage 0 has no backward"):
        replace(learnt, iteration={})


def test_without_energy_nothing_but_the_highest_value_is_used():
    world = World(0.6)
    world.counter_j = lambda: 0.0  # type: ignore[method-assign]
    assert {decision.version for decision in trained(world, 100, 1.2).decisions} == {0}


def test_a_pause_of_training_is_no_iteration_and_an_unknown_clock_tells_nothing():
    world = World(0.0)
    pilot = pilot_of(world, 1.0)

    def run(number: int, time_s: float, clock: int | None) -> None:
        ran = (ComputationObservation(0.0, time_s, clock),)
        pilot.observe([RankObservation(0, 0, number, 0, time_s, ran, 100.0)])

    pilot.decide(0)
    times_s = [0.5] * 6 + [600.0, 0.5, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5]
    for number, time_s in enumerate(times_s):
        run(number, time_s, None if time_s == 0.4 else TOP_MHZ)
        decision = pilot.decide(number + 2)
    assert decision.ledger is not None
    assert decision.ledger.reference_s == pytest.approx(0.5, rel=1e-4)
    assert decision.ledger.owed_s <= 0.0


def test_the_error_of_a_comparison_is_what_it_adds_to_a_sum_of_many():
    """Each block at full clocks is the end of one comparison and the begin of the next one."""
    draws = np.random.default_rng(0)
    comparisons, noise = 50, 0.01
    sums, middles = [], []
    for _ in range(1000):
        logs = draws.normal(0.0, noise, (comparisons + 1, 4)).tolist()
        blocks = [Block(0, 0, 4, logs=of_block) for of_block in logs]
        # So much noise that no iteration counts as an outlier.
        of_run = [Comparison.of(*both, 100 * noise) for both in pairwise(blocks)]
        sums.append(sum(each.middle for each in of_run))
        middles.append(of_run[0].middle)
    expected = noise**2 * of_run[0].per_noise
    assert np.var(sums) / comparisons == pytest.approx(expected, rel=0.15)
    # Of one alone, it is half of that.
    assert np.var(middles) == pytest.approx(expected / 2, rel=0.15)


def test_an_iteration_that_settles_is_left_out_though_the_next_one_was_not_seen():
    pilot = pilot_of(World(0.0), 1.0)
    # The iterations 1 to 7 were not observed.
    for number, time_s in ((0, 1.0), (8, 0.5), (9, 0.5)):
        ran = (ComputationObservation(0.0, time_s, TOP_MHZ),)
        pilot.observe([RankObservation(0, 0, number, 0, time_s, ran)])
        pilot.decide(number + 2)
    assert pilot.reference_s == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("lengths 5", 0.8),
        ("lengths 15", 0.55),
        *((kind, 0.8) for kind in ("tails", "loader", "drift")),
    ],
)
def test_what_iterations_have_in_common_hides_nothing_and_forces_nothing(kind: str, least: float):
    world = World(0.6, factor=noise(kind, 1))
    found = trained(world, 3000, 1.05)
    top_j = world.ranks * world.power_w(TOP_MHZ) * sum(world.top_times_s)
    best = 1.0 - world.cost_j(world.best_mhz(1.05)) / world.cost_j(TOP_MHZ)
    assert 1.0 - world.energy_j / top_j >= least * best
    assert sum(world.times_s) <= 1.051 * sum(world.top_times_s)
    assert found.forced <= (0.1 if "lengths" in kind else 0.02) * 3000
    longest = found.decisions[-1].longest
    assert longest is not None
    assert sum(world.times_s) / sum(world.top_times_s) - 1.0 <= longest + 0.002 <= 0.06


@pytest.mark.parametrize("change", [2_000, *soaks(100, 20_000)])
def test_a_change_is_learnt_as_soon_late_as_early(change: int):
    """Lower clocks take 4 % more from an iteration on; what was agreed is kept from there on."""
    slower = 1.04
    world = World(
        0.6, factor=lambda i, clock: slower if i >= change and clock < TOP_MHZ else 1.0, seed=1
    )
    trained(world, change + 1200, 1.05)
    times_s, top_times_s = world.times_s[change:], world.top_times_s[change:]
    assert sum(times_s) <= 1.06 * sum(top_times_s)
    assert sum(times_s[-600:]) <= 1.055 * sum(top_times_s[-600:])
