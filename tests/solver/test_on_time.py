"""Plans for a probability keep their word on simulated truth, where plans from the rows alone do
not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from noisy_rows import noisy_rows, unlike_stages
from refusals import refusal
from strategies import deadline_s, drawn, few_and_many, pipelines, shares, smooth_profile, soaks

from perseus_planner import schedules, solve
from perseus_planner.base.errors import (
    InfeasibleBudget,
    InfeasibleDeadline,
    InfeasibleError,
    InfeasiblePower,
    UsageError,
)
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import replay
from perseus_planner.profiler.simulated_pipeline import profile_simulated
from perseus_planner.profiles.estimation import Draws, exact_draws
from perseus_planner.profiles.measurement import ClockChange, Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Schedule
from perseus_planner.solver.drawn_plans import DrawnPlans, clock_segments
from perseus_planner.solver.drawn_replay import DrawnReplay
from perseus_planner.solver.frontier import Frontier
from perseus_planner.solver.repairs import Repairs

SCHEDULE = schedules.one_f_one_b(4, 8)
SLOWDOWNS = (1.0, 1.02, 1.1)


@cache
def truth(seed: int) -> Frontier:
    # The GPUs that run are those that were profiled; others have tests of their own.
    same_gpus = replace(smooth_profile(4), gpu_spread=0.0)
    return solve(unlike_stages(same_gpus, seed), SCHEDULE)


@cache
def measured(seed: int, noise: float = 0.005, clocks: int | None = None) -> Frontier:
    return solve(noisy_rows(truth(seed).profile, noise, clocks, seed), SCHEDULE)


def late(seed: int, plan: Plan, slowdown: float) -> float:
    """How much longer the plan really takes than allowed, over the time with all clocks at
    maximum.
    """
    return truth(seed).plan_of(plan.clocks).time_s / truth(seed).baseline_time_s - slowdown


def saved(seed: int, plan: Plan) -> float:
    real = truth(seed).plan_of(plan.clocks)
    return real.saving_j / real.baseline_energy_j


def time_ratio(plan: Plan, draws: Draws, longer: np.ndarray | None = None) -> np.ndarray:
    """Return the plan's time under each draw, over that with all clocks at maximum."""
    dag = truth(0).dag
    top = [row.clock_mhz for row in dag.baseline_measurements()]
    replay = DrawnReplay(dag, draws, longer)
    plan_s, top_s = (replay.replay(clocks)[0] for clocks in ([*plan.clocks.values()], top))
    return plan_s / top_s


def plan_at(seed: int, slowdown: float, clocks: int | None = None, **limits: object) -> Plan:
    frontier = measured(seed, clocks=clocks)
    return frontier.plan_until(slowdown * frontier.baseline_time_s, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("clocks", [12, *soaks(None)])
@few_and_many("seeds", 1, 3)
def test_plans_are_on_time_where_those_from_the_rows_are_late(clocks: int | None, seeds: int):
    raw, sure = [], []
    for seed in range(seeds):
        for slowdown in SLOWDOWNS:
            raw.append(late(seed, plan_at(seed, slowdown, clocks, on_time=None), slowdown))
            sure.append(
                late(seed, plan_at(seed, slowdown, clocks, on_time=0.95), max(slowdown, 1.001))
            )
    assert max(raw) > 0.003
    assert max(sure) < 0.001


@few_and_many("seeds", 1, 3)
def test_a_highest_clock_that_was_hot_one_of_three_times_makes_no_plan_late(seeds: int):
    hot = np.array([1.01, 1.0, 1.0])
    late_by: dict[float, list[float]] = {0.0: [], float(hot.std(ddof=1)): []}
    for seed in range(seeds):
        rows = measured(seed, 0.001, 12).profile
        measurements = {
            key: (replace(top, time_s=hot.mean() * top.time_s), *others)
            for key, (top, *others) in rows.measurements.items()
        }
        for error, found in late_by.items():
            profile = replace(rows, measurements=measurements, shared_time_error=error)
            frontier = solve(profile, SCHEDULE)
            plans = (
                frontier.plan_until(x * frontier.baseline_time_s, on_time=0.95) for x in SLOWDOWNS
            )
            found += [
                late(seed, plan, max(x, 1.001)) for x, plan in zip(SLOWDOWNS, plans, strict=True)
            ]
    unknown, known = map(max, late_by.values())
    assert known < 0.001 < unknown


@pytest.mark.parametrize("jitter", [0.03, *soaks(0.013)])
def test_plans_are_on_time_in_the_mean_with_the_jitter_of_a_run(jitter: float):
    draws = exact_draws(truth(0).profile.measurements)
    shape = len(truth(0).dag.computations), 1000
    longer = np.exp(jitter * np.random.default_rng(3).standard_normal(shape))

    def late_by(of: Frontier, known: float, slowdown: float) -> float:
        frontier = solve(replace(of.profile, jitter=known), SCHEDULE)
        plan = frontier.plan_until(slowdown * frontier.baseline_time_s, on_time=0.95)
        assert plan.on_time is not None
        assert plan.on_time.jitter == known
        return float(time_ratio(plan, draws, longer)[0]) - max(slowdown, 1.001)

    assert max(late_by(measured(0), jitter, slowdown) for slowdown in SLOWDOWNS) < 0.001
    assert 0.0 < late_by(truth(0), jitter, 1.0) + 0.001 < 0.002
    assert late_by(measured(0), 0.0, 1.0) > 0.002


@pytest.mark.parametrize("seed", [0, *soaks(1, 2)])
def test_savings_are_as_promised_and_mostly_kept(seed: int):
    for slowdown in SLOWDOWNS:
        plan = plan_at(seed, slowdown, on_time=0.95)
        best = truth(seed).plan_until(slowdown * truth(seed).baseline_time_s, on_time=None)
        assert plan.on_time is not None
        promised, real = plan.on_time.saved_share, saved(seed, plan)
        assert promised.low <= real <= promised.high
        assert abs(promised.expected - real) < 0.006
        assert real > 0.6 * best.saving_j / best.baseline_energy_j


@pytest.mark.parametrize("overhead_s", [0.05, *soaks(0.0)])
def test_twice_the_jitter_keeps_most_of_the_saving(overhead_s: float):
    """Many repairs are needed, of what is late in a few of the iterations with jitter."""
    stages = unlike_stages(replace(smooth_profile(8), gpu_spread=0.01), 0)
    profile = replace(stages, overhead_s=overhead_s)

    def saving(jitter: float) -> float:
        frontier = solve(replace(profile, jitter=jitter), schedules.one_f_one_b(8, 24))
        plan = frontier.plan_for(frontier.baseline_time_s)
        return 1.0 - plan.energy_j / plan.baseline_energy_j

    quiet = saving(0.01)
    assert quiet > 0.05
    assert saving(0.02) > 0.8 * quiet


@pytest.mark.parametrize("probability", [0.95, *soaks(0.6)])
def test_as_many_new_draws_are_on_time_as_the_probability_says(probability: float):
    plan = plan_at(0, 1.02, on_time=probability)
    ratio = time_ratio(plan, measured(0).profile.estimated().draws(2000, seed=9))
    assert np.mean(ratio <= 1.02) > probability - 0.03
    assert plan.on_time is not None
    assert plan.on_time.time_ratio.expected == pytest.approx(ratio.mean(), abs=2e-4)


def test_a_higher_probability_costs_more():
    sure, surer = (plan_at(1, 1.05, on_time=probability).on_time for probability in (0.5, 0.99))
    assert sure is not None
    assert surer is not None
    assert surer.time_ratio.expected < sure.time_ratio.expected
    assert sure.safety_share < surer.safety_share


@drawn(
    1,
    2,
    slowdown=st.sampled_from(SLOWDOWNS),
    quiet=st.floats(0.0005, 0.002),
    loud=st.floats(0.015, 0.02),
)
def test_less_noise_saves_more_on_average(slowdown: float, quiet: float, loud: float):
    of_noise = []
    for noise in (quiet, loud):
        frontiers = [measured(seed, noise) for seed in range(3)]
        plans = [
            each.plan_until(slowdown * each.baseline_time_s, on_time=0.95) for each in frontiers
        ]
        of_noise.append(np.mean([saved(seed, plan) for seed, plan in enumerate(plans)]))
    assert of_noise[0] > of_noise[1] + 0.002


def test_rows_without_noise_give_the_plans_of_the_rows():
    exact = truth(2)
    for slowdown in SLOWDOWNS:
        plain = exact.plan_until(slowdown * exact.baseline_time_s, on_time=None)
        assert exact.plan_until(slowdown * exact.baseline_time_s) == plain


@cache
def on_other_gpus() -> Frontier:
    return solve(replace(truth(0).profile, gpu_spread=0.01), SCHEDULE)


def ratios_on_other_gpus(plan: Plan, seed: int, count: int = 1000) -> np.ndarray:
    """Return the times of a plan on GPUs whose rows are off together, the top clock's too, over
    those with all clocks at maximum.
    """
    rows, random = exact_draws(truth(0).profile.measurements), np.random.default_rng(seed)
    longer = np.exp(0.01 * random.standard_normal((truth(0).profile.stages, count)))
    time_s = {key: table * longer[key[0]] for key, table in rows.time_s.items()}
    energy_j = {key: table * longer[key[0]] for key, table in rows.energy_j.items()}
    return time_ratio(plan, Draws(rows.clocks_mhz, time_s, energy_j))


@pytest.mark.parametrize("slowdown", [1.0, *soaks(1.05)])
def test_plans_are_on_time_on_other_gpus(slowdown: float):
    frontier = on_other_gpus()
    plan = frontier.plan_until(slowdown * frontier.baseline_time_s)
    ratio = ratios_on_other_gpus(plan, seed=5)
    assert np.mean(ratio <= max(slowdown, 1.001)) > 0.92
    assert np.mean(ratio) < slowdown + 1.5e-4
    assert plan.on_time is not None
    assert plan.on_time.time_ratio.expected < slowdown + 5e-5
    assert (plan.on_time.gpu_spread, plan.on_time.is_spread_assumed) == (0.01, False)
    assert plan.energy_j < 0.99 * plan.baseline_energy_j
    same = truth(0).plan_until(slowdown * truth(0).baseline_time_s, on_time=None)
    assert np.mean(ratios_on_other_gpus(same, seed=5) <= max(slowdown, 1.001)) < 0.8


def test_one_spread_is_assumed_of_measured_rows_and_none_of_exact_ones():
    rows = replace(measured(0).profile, gpu_spread=None)
    assert rows.assumed_spread == 0.01
    assert replace(truth(0).profile, gpu_spread=None).assumed_spread == 0.0
    assert replace(rows, gpu_spread=0.0).assumed_spread == 0.0


def test_solve_and_plan_have_one_baseline():
    frontier = measured(0)
    plan = plan_at(0, 1.02)
    base = plan.baseline_time_s, plan.baseline_energy_j
    assert base == (frontier.baseline_time_s, frontier.baseline_energy_j)
    assert plan.deadline_s == 1.02 * frontier.baseline_time_s
    assert plan.on_time is not None
    mean = frontier.profile.estimated().mean
    replay = DrawnReplay(frontier.dag.with_profile(mean), exact_draws(mean.measurements))
    expected = replay.replay([row.clock_mhz for row in frontier.dag.baseline_measurements()])[0]
    assert plan.on_time.time_scale * expected[0] == pytest.approx(base[0], rel=1e-9)


def test_one_clock_for_each_gpu_never_falls_back_to_full_clocks():
    frontier = solve(replace(truth(0).profile, jitter=0.015), SCHEDULE)
    saved_shares = []
    for slowdown in (1.0, 1.02, 1.1):
        plan = frontier.plan_until(slowdown * frontier.baseline_time_s, max_changes=0)
        saved_shares.append(1 - plan.energy_j / plan.baseline_energy_j)
    assert saved_shares[0] >= 0.0
    assert saved_shares[1] > 0.01
    assert saved_shares == sorted(saved_shares)


@pytest.mark.parametrize("most", [4, *soaks(2, 8)])
def test_a_switch_budget_keeps_most_of_the_saving_where_gpus_differ(most: int):
    """Late plans are repaired by segments; without that, full clocks were all that was on time."""
    profile = profile_simulated("simulated:a100-sxm", 4)
    frontier = solve(profile, schedules.one_f_one_b(4, 16))
    deadline_s = frontier.baseline_time_s
    free, plan = (frontier.plan_for(deadline_s, max_changes=changes) for changes in (None, most))
    assert max(plan.changes) <= most
    assert plan.on_time is not None
    assert plan.on_time.time_ratio.expected <= 1.00005
    assert plan.saving_j > 0.9 * free.saving_j


@cache
def two_stages() -> Frontier:
    """Stages alike; some clocks below the top clock are expected to be faster than it."""
    profile = profile_simulated("simulated:a100-sxm", 2)
    return solve(profile, schedules.one_f_one_b(2, 4))


@pytest.mark.parametrize("most", [2, 4])
def test_a_switch_budget_keeps_most_of_the_saving_of_a_small_pipeline(most: int):
    """All clocks at maximum were a rounding error late for plans with margins, so none was made."""
    frontier = two_stages()
    deadline_s = frontier.baseline_time_s
    plan = frontier.plan_for(deadline_s, max_changes=most)
    measured_plan = frontier.plan_for(deadline_s, max_changes=most, on_time=None)
    assert plan.saving_j > 0.9 * measured_plan.saving_j


def test_full_clocks_are_no_later_than_their_own_time():
    planner = two_stages()._on_time_planner
    assert planner._planner(0.7)._min_time_s <= two_stages().baseline_time_s


@pytest.mark.parametrize("in_segments", [False, True])
def test_clocks_that_are_expected_to_be_faster_than_full_clocks_are_repaired(in_segments: bool):
    plans = DrawnPlans(two_stages())
    lateness = partial(plans.lateness, ratio=1.0, probability=0.95, tolerance=0.001)
    rows = plans.mean.profile.measurements
    clocks = [rows[key][1].clock_mhz for key in plans.mean.dag.iteration.keys]
    drawn = plans.replayed(clocks, 0.0)
    assert plans.expected_ratio(drawn.time_s) < 1.0
    assert lateness(drawn.time_s) > 0.0
    repaired = Repairs(plans).repaired(drawn, 1.0, lateness, math.inf, in_segments=in_segments)
    assert lateness(repaired.time_s) <= 0.0


@drawn(2, 20, problem=pipelines(3, 4), most=st.integers(1, 4), share=shares())
def test_repairs_keep_to_the_switch_budget(
    problem: tuple[Profile, Schedule], most: int, share: float
):
    frontier = solve(replace(problem[0], gpu_spread=0.02), problem[1])
    rows = [row for of_key in frontier.profile.measurements.values() for row in of_key]
    # Nothing is estimated from rows without energy, and some profiles save most below this time.
    if min(row.energy_j for row in rows) == 0.0 or frontier.max_time_s < frontier.baseline_time_s:
        return
    deadline_s = frontier.baseline_time_s * (1 + share / 10)
    plan = frontier.plan_for(min(deadline_s, frontier.max_time_s), max_changes=most)
    assert max(plan.changes) <= most


def of_one_stage(highest_mhz: int, lowest_mhz: int) -> Frontier:
    """One rank with jitter, whose backward passes have other clocks than its forward passes."""
    points = {
        (0, "F"): (Measurement(1000, 1.0, 20.0), Measurement(900, 1.2, 15.0)),
        (0, "B"): (Measurement(highest_mhz, 2.0, 40.0), Measurement(lowest_mhz, 2.2, 33.0)),
    }
    return solve(Profile(points, 1.0, jitter=0.05), schedules.one_f_one_b(1, 2))


def test_a_rank_without_a_clock_that_all_it_runs_was_measured_at_needs_changes():
    frontier = of_one_stage(950, 850)
    assert refusal(InfeasibleBudget, frontier.plan_until, 6.6, max_changes=0) == (
        "no plan found finishes an iteration within 6.6 s with at most 0 clock changes per GPU: "
        "some GPU has no clock at which all that it runs was measured; allow more changes"
    )
    assert frontier.plan_until(6.6, max_changes=4).changes == (4,)


def test_full_clocks_that_differ_on_a_rank_count_as_changes():
    frontier = of_one_stage(900, 800)
    with pytest.raises(InfeasibleBudget) as refused:
        frontier.plan_until(6.0, max_changes=0)
    least_s = refused.value.least_time_s
    assert 6.4 <= least_s < 6.41
    assert frontier.plan_until(least_s, max_changes=0).changes == (0,)
    assert frontier.plan_until(6.0, max_changes=4).changes == (4,)


@pytest.mark.parametrize(
    ("clocks", "runs"),
    [
        ([5], [[0]]),
        ([5, 5, 5], [[0, 1, 2]]),
        ([5, 7, 7], [[0], [1, 2]]),
        ([5, 7, 7, 5], [[3, 0], [1, 2]]),
        ([5, 7, 5, 7], [[0], [1], [2], [3]]),
    ],
)
def test_segments_of_a_rank_go_on_in_the_next_iteration(clocks: list[int], runs: list[list[int]]):
    assert clock_segments(range(len(clocks)), clocks) == runs


def test_clocks_that_were_not_measured_are_used_and_counted():
    plan = plan_at(0, 1.05, 12, on_time=0.9)
    rows = measured(0, clocks=12).profile.measurements
    known = {(key, row.clock_mhz) for key, each in rows.items() for row in each}
    in_use = {
        (key, clock) for key, clock in zip(plan.iteration.keys, plan.clocks.values(), strict=True)
    }
    assert plan.on_time is not None
    assert (plan.on_time.points, plan.on_time.interpolated) == (len(in_use), len(in_use - known))
    assert 0 < plan.on_time.interpolated < plan.on_time.points


def test_a_plan_states_its_profile_and_replays_to_its_time():
    plan = plan_at(0, 1.0, on_time=0.95)
    timeline = replay(plan)
    assert plan.profile_digest == measured(0).profile.digest
    assert (plan.time_s, plan.energy_j) == pytest.approx(
        (timeline.time_s, timeline.energy_j), rel=1e-12
    )
    assert plan.time_s <= plan.deadline_s == plan.baseline_time_s
    assert plan.on_time is not None
    assert plan.on_time.limit_ratio == 1.001
    assert plan_at(0, 1.0, on_time=0.95, tolerance=0.01).on_time.limit_ratio == 1.01  # type: ignore[union-attr]


def test_without_tolerance_no_slower_than_all_clocks_at_maximum_is_still_possible():
    plan = plan_at(0, 1.0, on_time=0.99, tolerance=0.0)
    assert late(0, plan, 1.0) < 0.001
    assert plan.on_time is not None
    assert plan.on_time.limit_ratio == 1.0


def test_an_iteration_faster_than_all_clocks_at_maximum_is_refused():
    frontier = measured(0)
    fast_s = max(frontier.min_time_s, 0.9999 * frontier.baseline_time_s)
    with pytest.raises(InfeasibleDeadline) as caught:
        frontier.plan_until(fast_s, on_time=0.95)
    assert caught.value.least_time_s == pytest.approx(frontier.baseline_time_s, rel=2e-3)


def test_switch_budgets_are_kept():
    for most in (0, 4):
        plan = plan_at(0, 1.05, on_time=0.95, max_changes=most)
        assert max(plan.changes) <= most
        assert late(0, plan, 1.05) < 0.001
        assert saved(0, plan) > 0.03


def test_the_cost_of_clock_changes_is_included():
    frontier = solve(replace(measured(0).profile, clock_change=ClockChange(2e-3, 1e-3)), SCHEDULE)
    plan = frontier.plan_until(1.05 * frontier.baseline_time_s, on_time=0.95)
    assert plan.on_time is not None
    assert plan.on_time.time_ratio.expected == pytest.approx(
        plan.time_s / plan.baseline_time_s, abs=2e-3
    )
    costing = solve(replace(truth(0).profile, clock_change=frontier.profile.clock_change), SCHEDULE)
    assert costing.plan_of(plan.clocks).time_s < 1.051 * costing.baseline_time_s


def test_power_stays_within_the_budget():
    frontier = measured(0)
    budget_w = 0.8 * frontier.plan_until(frontier.baseline_time_s, on_time=None).power_w
    plan = frontier.plan_within_power(budget_w, on_time=0.95)
    real = truth(0).plan_of(plan.clocks)
    assert 0.97 * budget_w < real.power_w < 1.001 * budget_w
    assert plan.on_time is not None
    assert (plan.on_time.limit_ratio, plan.on_time.limit_power_w) == (None, budget_w)
    assert plan.on_time.power_w.low < real.power_w < plan.on_time.power_w.high
    with pytest.raises(InfeasiblePower):
        frontier.plan_within_power(10.0, on_time=0.95)


def test_plans_beside_stragglers_and_of_least_energy_are_as_sure():
    frontier = measured(0)
    beside = frontier.plan_beside_straggler(1.04 * frontier.baseline_time_s, on_time=0.95)
    assert beside == frontier.plan_until(1.04 * frontier.baseline_time_s, on_time=0.95)
    fastest = frontier.plan_beside_straggler(0.5 * frontier.baseline_time_s, on_time=0.95)
    assert fastest == frontier.plan_until(frontier.baseline_time_s, on_time=0.95)
    frugal = frontier.plan_for_least_energy(on_time=0.95)
    assert frugal.on_time is not None
    assert frugal.on_time.limit_ratio == pytest.approx(
        frontier.least_energy_time_s / frontier.baseline_time_s
    )


@drawn(2, 8, problem=pipelines(3, 3), share=shares(), jitter=st.sampled_from((0.0, 0.02)))
def test_any_profile_has_plans_that_are_on_time_in_expectation(
    problem: tuple[Profile, Schedule], share: float, jitter: float
):
    frontier = solve(replace(problem[0], jitter=jitter), problem[1])
    if any(row.energy_j == 0.0 for rows in frontier.profile.measurements.values() for row in rows):
        return
    at_s = deadline_s(frontier, share)
    try:
        plan = frontier.plan_until(at_s, on_time=0.9)
    except InfeasibleError as error:
        assert at_s < frontier.baseline_time_s, error  # noqa: PT017  # which ones are refused
        return
    if plan.on_time is None:
        assert frontier.profile.is_exact
        assert not jitter
        return
    assert plan.on_time.limit_ratio is not None
    assert plan.time_s <= plan.on_time.limit_ratio * plan.baseline_time_s * (1 + 1e-9)
    assert plan.energy_j >= plan.bound_j - 1e-9 * (plan.baseline_energy_j + abs(plan.energy_j))


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (
            {"on_time": 1.0},
            "on_time: 1.0 is not a probability: give a number above 0 and up to 0.99, such as 0.95",
        ),
        (
            {"on_time": 0.0},
            "on_time: 0.0 is not a probability: give a number above 0 and up to 0.99, such as 0.95",
        ),
        (
            {"on_time": 0.9, "tolerance": -0.1},
            "tolerance: -0.1 is not a share: give a number of 0 or more, such as 0.001",
        ),
    ],
)
def test_other_probabilities_are_refused(limits: dict[str, float], text: str):
    assert refusal(UsageError, plan_at, 0, 1.0, **limits) == text


def test_a_saved_frontier_has_what_it_takes(tmp_path: Path):
    frontier = measured(0, clocks=12)
    frontier.save(tmp_path / "frontier.npz")
    again = Frontier.load(tmp_path / "frontier.npz")
    before, after = (
        [row.evidence for rows in each.profile.measurements.values() for row in rows]
        for each in (frontier, again)
    )
    assert before == after
    assert None not in before
    plan = again.plan_until(again.baseline_time_s, on_time=0.95)
    assert plan == plan_at(0, 1.0, 12, on_time=0.95)
    assert again.plan_until(again.baseline_time_s, on_time=0.95) is plan


def test_a_frontier_of_rows_without_errors_has_none(tmp_path: Path):
    key = (1, "B")
    rows = measured(0, clocks=12).profile.measurements
    mixed = {**rows, key: tuple(replace(row, evidence=None) for row in rows[key])}
    for measurements, found in ((truth(0).profile.measurements, 0), (mixed, len(rows) - 1)):
        frontier = solve(replace(truth(0).profile, measurements=measurements), SCHEDULE)
        frontier.save(tmp_path / "frontier.npz")
        again = Frontier.load(tmp_path / "frontier.npz").profile
        assert sum(each[0].evidence is not None for each in again.measurements.values()) == found


def test_a_plan_on_time_comes_back_as_it_was(tmp_path: Path):
    plan = plan_at(0, 1.02, on_time=0.95)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan == Plan.loads(plan.dumps())


def lateness(seed: int, plan: Plan, slowdown: float) -> np.ndarray:
    """Return how much longer than allowed the plan takes under each draw, over the time with all
    clocks at maximum.
    """
    draws = measured(seed).profile.estimated().draws(500)
    return np.maximum(0.0, time_ratio(plan, draws) - slowdown)


@drawn(
    1,
    3,
    seed=st.integers(0, 2),
    slowdown=st.sampled_from((1.001, 1.02, 1.05, 1.1)),
    less=st.floats(0.5, 0.95),
    more=st.floats(0.5, 0.99),
)
def test_more_certainty_is_never_later(seed: int, slowdown: float, less: float, more: float):
    less, more = sorted((less, more))
    sure, surer = (plan_at(seed, slowdown, on_time=each) for each in (less, more))
    late_by, later_by = lateness(seed, surer, slowdown), lateness(seed, sure, slowdown)
    assert np.mean(late_by > 1e-9) <= 1 - more + 2e-3
    assert np.mean(late_by) <= np.mean(later_by) + 1e-9
