"""The autopilot in the noise of real training, in virtual time, beside a twin at full clocks under
the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from autopilot_world import REAL, Physics, World
from strategies import smooth_profile
from virtual_training import job_of, train

from perseus_planner.runtime.autopilot import Autopilot, AutopilotSettings
from perseus_planner.runtime.autopilot.learning import Learner
from perseus_planner.runtime.autopilot.planning import Searcher
from perseus_planner.runtime.autopilot.rows import TimeRows
from perseus_planner.runtime.guarantee import Audits, Ledger

TRUTH = smooth_profile(2, step_mhz=90)


def twin(physics: Physics, iterations: int) -> list[float]:
    world = World(TRUTH, job_of(TRUTH, 6).iteration, physics, seed=1)
    return [world.run(world.full()).time_s for _ in range(iterations)]


@pytest.mark.parametrize("noise", ["real", "loader", "pauses", "outliers"])
def test_it_saves_energy_within_the_agreed_time_whatever_the_noise(noise: str):
    physics = {
        "real": REAL,
        "loader": Physics(loader=0.05),
        "pauses": Physics(pauses=0.02),
        "outliers": Physics(outliers=0.003),
    }[noise]
    done, full_s = train(TRUTH, 40, late=2, physics=physics), sum(twin(physics, 40))
    assert sum(ran.time_s for ran in done.ran) < 1.004 * full_s
    last = [each.saving for each in done.decisions[30:] if each.phase != "audit"]
    assert np.mean(last) > 0.015
    phases = [each.phase for each in done.decisions]
    assert phases.count("paying") <= 1


def test_iterations_that_are_longer_while_clocks_are_planned_are_paid_for():
    """As no computation tells it from data that became longer, audits do."""

    quiet = Physics(jitter=0.003)
    run = World.run

    def slower(self: World, programs: object, *given: object) -> object:
        full = all(c == 1410 for pipeline in programs for rank in pipeline for c in rank)
        self.slowdown[:] = 1.0 if full else 1.03
        return run(self, programs, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "run", slower)
        done = train(TRUTH, 150, physics=quiet)
    ratio = sum(ran.time_s for ran in done.ran) / sum(twin(quiet, 150))
    assert ratio < 1 + 0.005 + 0.04 / 150 + 0.002
    assert [each.phase for each in done.decisions].count("paying") > 75


def test_audits_are_sure_only_of_what_is_more_than_noise():
    random = np.random.default_rng(2)
    for longer, found in ((0.0, False), (0.03, True)):
        audits, owed = Audits(), 0.0
        for number in range(120):
            full = number % 20 < 2
            unexplained = random.normal(0.0, 0.003) + (0.0 if full else longer)
            owed += audits.add(unexplained, full_clocks=full)
        assert (audits.longer > 0.0) == found
        assert owed == pytest.approx(longer * 108, rel=0.15)


def longer_share(effect: Callable[[int], float], seed: int) -> tuple[float, float]:
    """By how much 2,000 iterations are longer by their clocks, as a share, if `effect` shows in
    audits alone, and the share of audits; in noise of .5 %, where every tenth waits for data.
    """
    random, audits = np.random.default_rng(seed), Audits()
    ledger = Ledger(1.0, 1.0, max_slowdown=0.005, burst_s=0.04)
    late, due, longer_s, audited = int(random.integers(10)), 0, 0.0, 0
    for number in range(2000):
        if not ledger.is_overdrawn and not due and random.random() < audits.share:
            due = 2
        full = ledger.is_overdrawn or due > 0
        if due and not ledger.is_overdrawn:
            due, audited = due - 1, audited + 1
        clocks_s, effect_s = (0.0, 0.0) if full else (0.0025, effect(number))
        noise_s = random.normal(0.0, 0.005) + 0.05 * (number % 10 == late)
        owed_s = clocks_s + audits.add(noise_s + effect_s, full_clocks=full)
        ledger = ledger.add(1.0 + noise_s + clocks_s + effect_s, full_clocks=full, longer_s=owed_s)
        longer_s += clocks_s + effect_s
    return longer_s / 2000, audited / 2000


@pytest.mark.parametrize(
    "effect",
    [
        pytest.param(lambda _: 0.005, id="half a percent"),
        pytest.param(lambda _: 0.01, id="1 percent"),
        pytest.param(lambda _: 0.03, id="3 percent"),
        pytest.param(lambda number: 1e-5 * number, id="more and more"),
        pytest.param(lambda number: 0.02 * (number > 1000), id="2 percent from the middle on"),
    ],
)
def test_what_only_audits_show_is_at_most_the_bound_and_a_fifth_of_a_percent_in_expectation(
    effect: Callable[[int], float],
):
    shares = [longer_share(effect, seed)[0] for seed in range(60)]
    assert 0.003 < np.mean(shares) < 0.005 + 0.002


def test_audits_take_less_than_1_percent_where_nothing_is_longer_but_for_noise():
    found = [longer_share(lambda _: 0.0, seed) for seed in range(60)]
    assert np.mean([audits for _, audits in found]) < 0.01
    assert min(longer for longer, _ in found) > 0.0023  # hardly any is forced to full clocks


def test_noise_is_that_of_most_times_and_is_forgotten():
    rows, random = TimeRows((1410, 1365), [0], 1), np.random.default_rng(1)
    for sigma in (0.05, 0.004):
        for _ in range(150):
            misses = random.normal(0.0, sigma, 40)
            misses[::10] += random.exponential(0.1, 4)
            rows.add_noise(misses)
        assert rows.noise == pytest.approx(sigma, rel=0.3)
    assert rows.tail > 5 * rows.noise


def test_a_first_time_far_over_the_bound_is_asked_for_again():
    job = job_of(TRUTH, 6)
    search = Searcher(job, 8)
    learner = Learner(job, search.keys, search.class_rank, None, learn=True)
    world = World(TRUTH, job.iteration, Physics(jitter=0.0))
    for _ in range(2):
        learner.observe(world.run(world.full()).observations)
    program = [list(clocks) for clocks in world.full()[0]]
    program[0][5] = 1230
    row, clock = search.keys.index((0, "F")), job.clocks_mhz.index(1230)

    def learn_with(longer: float) -> None:
        seen = world.run([program]).observations
        place = next(i for i, (r, _) in enumerate(learner._programs[0]) if r == row and i >= 5)
        ran = list(seen[0].computations)
        ran[place] = ran[place]._replace(
            end_s=ran[place].begin_s + longer * (ran[place].end_s - ran[place].begin_s),
            clock_mhz=1230,
            change_s=None,
            changed_mhz=None,
        )
        learner.observe([seen[0]._replace(computations=tuple(ran)), *seen[1:]])

    learn_with(4.0)
    assert not learner.times.known[row, clock]
    learn_with(1.0)
    assert learner.times.known[row, clock]
    _, beta = learner.times.bound()
    assert beta == 1.0


def test_a_row_changes_when_most_of_its_last_times_do_and_not_by_a_few_long_ones():
    job = job_of(TRUTH, 6)
    search = Searcher(job, 8)
    learner = Learner(job, search.keys, search.class_rank, None, learn=True)
    world, row = World(TRUTH, job.iteration, Physics(tails=0.1)), search.keys.index((0, "F"))

    def learn_with(longer: float, times: int) -> float:
        seen = world.run(world.full()).observations
        ran = list(seen[0].computations)
        places = [i for i, (r, _) in enumerate(learner._programs[0]) if r == row]
        for place in places[:times]:
            duration_s = ran[place].end_s - ran[place].begin_s
            ran[place] = ran[place]._replace(end_s=ran[place].begin_s + longer * duration_s)
        learner.observe([seen[0]._replace(computations=tuple(ran)), *seen[1:]])
        return float(np.exp(learner.times.mean[row, 0]) * learner.times.factor[0])

    known_s = [learn_with(1.0, 0) for _ in range(10)][-1]
    assert learn_with(1.11, 4) == pytest.approx(known_s, rel=0.01)  # 4 of its 6
    assert learn_with(1.0, 0) == pytest.approx(known_s, rel=0.01)
    for _ in range(10):
        longer_s = learn_with(1.11, 6)
    assert longer_s == pytest.approx(1.11 * known_s, rel=0.01)


def test_a_noisy_start_is_forgotten():
    job = job_of(TRUTH, 6)
    pilot = Autopilot(job, AutopilotSettings())
    noisy, quiet = (World(TRUTH, job.iteration, Physics(jitter), seed=1) for jitter in (0.3, 0.003))
    for number in range(200):
        decision = pilot.decide(number)
        world = noisy if number < 8 else quiet
        clocks = decision.clocks if decision.version else world.full()
        ran = world.run(clocks, [decision.version])
        pilot.observe([seen._replace(iteration=number) for seen in ran.observations])
    assert decision.saving > 0.035


def test_rows_that_seem_fast_by_chance_are_put_right_beside_full_clocks():
    job = job_of(TRUTH, 6)
    search = Searcher(job, 8)
    learner = Learner(job, search.keys, search.class_rank, None, learn=True)
    world, lower = World(TRUTH, job.iteration, Physics(), seed=2), job.clocks_mhz[3]

    def lowered(first: int) -> list[list[int]]:
        return [[*rank[:first], *[lower] * (len(rank) - first)] for rank in world.full()[0]]

    for _ in range(2):
        learner.observe(world.run(world.full()).observations)
    for _ in range(20):
        learner.observe(world.run([lowered(0)]).observations)
    true = learner.times.mean[:, 3] - learner.times.mean[:, 0]
    learner.times.mean[:, 3] -= 0.008
    for _ in range(30):
        learner.observe(world.run([lowered(4)]).observations)
    found = learner.times.mean[:, 3] - learner.times.mean[:, 0]
    assert np.mean(found - true) == pytest.approx(0.0, abs=1e-3)


def test_a_few_long_computations_of_a_gpu_do_not_make_it_slower():
    job = job_of(TRUTH, 6)
    search = Searcher(job, 8)
    learner = Learner(job, search.keys, search.class_rank, None, learn=True)
    world = World(TRUTH, job.iteration, Physics(tails=0.1))
    full, lower = world.full()[0], job.clocks_mhz[3:]
    for _ in range(10):
        learner.observe(world.run([full]).observations)
    ranks = [full[0], [*full[1][:4], *(4 * lower)[: len(full[1]) - 4]]]
    seen = world.run([ranks]).observations
    ran = [
        each._replace(end_s=each.begin_s + 1.2 * (each.end_s - each.begin_s))
        for each in seen[1].computations
    ]
    learner.observe([seen[0], seen[1]._replace(computations=tuple(ran))])
    assert learner.times.factor.tolist() == [1.0, 1.0]
    for _ in range(4):
        learner.observe(
            [
                each._replace(
                    computations=tuple(
                        c._replace(end_s=c.begin_s + 1.2**each.rank * (c.end_s - c.begin_s))
                        for c in each.computations
                    )
                )
                for each in world.run([full]).observations
            ]
        )
    assert learner.times.factor == pytest.approx([1.0, 1.2], rel=0.02)


def test_the_ledger_is_not_overdrawn_by_data_that_become_longer():
    longer = replace(REAL, growth=0.5)
    done = train(TRUTH, 40, physics=longer)
    assert "paying" not in [each.phase for each in done.decisions]
