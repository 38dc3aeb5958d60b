"""A second sweep measures what a plan uses and its neighbours, and joins it to the profile."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import done
from noisy_rows import noisy_rows
from refusals import refusal
from replay_gpu import ReplayGpu
from strategies import smooth_profile

from perseus_planner import Plan, schedules, solve
from perseus_planner.base.errors import ProfileError, UsageError
from perseus_planner.plans.again import clocks_in_use, with_neighbours
from perseus_planner.profiler.again import MEASURED_AGAIN, Again
from perseus_planner.profiler.simulated_pipeline import profile_simulated
from perseus_planner.profiler.stage import StageRows, TimedRun, assemble_profile
from perseus_planner.profiler.sweep import SweepSettings, measure_stage
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.profiles import Profile

STAGES = 2
SCHEDULE = schedules.one_f_one_b(STAGES, 4)
QUICK = SweepSettings(window_s=0.2, cool_down_s=0.0)


@cache
def truth() -> Profile:
    return smooth_profile(STAGES)


@cache
def first() -> Profile:
    return assemble_profile([swept(stage, 0) for stage in range(STAGES)])


@cache
def plan() -> Plan:
    frontier = solve(first(), SCHEDULE)
    return frontier.plan_for(1.02 * frontier.baseline_time_s)


def swept(stage: int, seed: int, again: Again | None = None) -> StageRows:
    gpu = ReplayGpu(truth(), stage, 0.02, seed=10 * seed + stage)
    return measure_stage(gpu, gpu.stage(), stage, QUICK, again=again)


@cache
def second() -> Profile:
    again = Again(plan(), first())
    return assemble_profile([swept(stage, 1, again) for stage in range(STAGES)])


def test_it_measures_the_clocks_that_a_plan_uses_most_and_their_neighbours_alone():
    possible = [row.clock_mhz for row in truth().measurements[0, "F"]]
    counts: dict[Key, Counter[int]] = {}
    for computation in plan().iteration.computations:
        own = counts.setdefault(plan().key(computation), Counter())
        own[plan().clocks[str(computation)]] += 1
    for key, rows in second().measurements.items():
        measured = {row.clock_mhz for row in rows}
        used = {clock for clock, _ in counts[key].most_common(2)}
        assert used | {possible[0]} <= measured
        beside = {possible[0]}
        for clock in used:
            place = possible.index(clock)
            beside |= set(possible[max(0, place - 1) : place + 2])
        assert measured == beside


def test_neighbours_end_with_the_possible_clocks():
    assert with_neighbours([30], [30, 20, 10]) == (30, 20)
    assert with_neighbours([10], [10, 20, 30]) == (30, 20, 10)
    assert with_neighbours([15], [10, 20, 30]) == (30,)
    assert with_neighbours([], [10, 20]) == (20,)


def test_joined_rows_have_the_windows_of_both_sweeps_and_their_weighted_mean():
    joined = Again(plan(), first()).joined(second())
    for key, rows in joined.measurements.items():
        before = {row.clock_mhz: row for row in first().measurements[key]}
        now = {row.clock_mhz: row for row in second().measurements[key]}
        assert {row.clock_mhz for row in rows} == before.keys() | now.keys()
        for row in rows:
            own = [of[row.clock_mhz] for of in (before, now) if row.clock_mhz in of]
            evidence = [each.evidence for each in own if each.evidence is not None]
            assert row.evidence is not None
            assert row.evidence.windows == sum(each.windows for each in evidence)
            pairs = zip(own, evidence, strict=True)
            mean_s = sum(each.time_s * of.windows for each, of in pairs) / row.evidence.windows
            assert row.time_s == pytest.approx(mean_s)
    assert "for a plan" in joined.conditions[MEASURED_AGAIN]


def test_new_rows_come_after_all_others_in_the_order_of_measurement():
    joined = Again(plan(), first()).joined(second())
    for key, rows in joined.measurements.items():
        before = {row.clock_mhz for row in first().measurements[key]}
        orders = {row.clock_mhz: row.evidence.order for row in rows if row.evidence is not None}
        last = max(order or 0 for clock, order in orders.items() if clock in before)
        assert all((orders[clock] or 0) > last for clock in orders.keys() - before)


def test_rows_measured_again_are_less_in_doubt():
    joined = Again(plan(), first()).joined(second())
    used = clocks_in_use(plan())

    def doubt(profile: Profile) -> float:
        draws = profile.estimated().draws(400)
        place = {clock: i for i, clock in enumerate(draws.clocks_mhz)}
        logs = [
            math.log(draws.time_s[key][place[clock]].std() / draws.time_s[key][place[clock]].mean())
            for key, clocks in used.items()
            for clock in clocks
            if clock in place
        ]
        return sum(logs) / len(logs)

    assert doubt(joined) < doubt(first()) - 0.1


def test_sweeps_that_differ_at_full_clocks_share_an_error():
    faster = {
        key: tuple(replace(row, time_s=0.97 * row.time_s) for row in rows)
        for key, rows in second().measurements.items()
    }
    joined = Again(plan(), first()).joined(replace(second(), measurements=faster))
    alike = Again(plan(), first()).joined(second())
    for stage in range(STAGES):
        # Two values that are 3 % apart have this standard deviation.
        assert joined.shared_errors(stage)[0] == pytest.approx(0.03 / math.sqrt(2), rel=0.3)
        assert alike.shared_errors(stage)[0] < 0.01


def test_rows_without_standard_errors_give_way():
    bare = {
        key: tuple(replace(row, evidence=None) for row in rows)
        for key, rows in first().measurements.items()
    }
    joined = Again(plan(), replace(first(), measurements=bare)).joined(second())
    for key, rows in second().measurements.items():
        found = {row.clock_mhz: row.time_s for row in joined.measurements[key]}
        assert all(found[row.clock_mhz] == row.time_s for row in rows)


def test_a_joined_profile_can_be_saved_loaded_and_planned(tmp_path: Path):
    joined = Again(plan(), first()).joined(second())
    joined.save(tmp_path / "profile.yaml")
    loaded = Profile.load(tmp_path / "profile.yaml")
    assert loaded == joined
    frontier = solve(loaded, SCHEDULE)
    assert frontier.plan_for(frontier.baseline_time_s).time_s <= frontier.baseline_time_s * 1.0001


def test_an_interrupted_sweep_goes_on_with_what_is_left(tmp_path: Path):
    again = Again(plan(), first())
    gpu = ReplayGpu(truth(), 0, seed=3)
    stage = gpu.stage()
    calls = 0

    def breaking(run: TimedRun, repetitions: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise KeyboardInterrupt
        run.run(repetitions)

    runs = {kind: TimedRun(partial(breaking, run)) for kind, run in stage.runs.items()}
    kept = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        measure_stage(gpu, replace(stage, runs=runs), 0, QUICK, rows_file=kept, again=again)
    assert kept.exists()
    with pytest.raises(ProfileError, match="measured with settings"):
        measure_stage(gpu, stage, 0, QUICK, rows_file=kept, resume=True)
    measured = measure_stage(gpu, stage, 0, QUICK, rows_file=kept, resume=True, again=again)
    wanted = again.settings_of(0, ["F", "B"], gpu.supported_clocks_mhz)
    found = {
        kind: tuple(row.clock_mhz for row in rows) for kind, rows in measured.measurements.items()
    }
    assert found == wanted


def test_a_backward_that_includes_its_forward_has_the_forward_measured_too():
    again = Again(plan(), first())
    gpu = ReplayGpu(truth(), 0, seed=4)
    stage = gpu.stage()

    def both(repetitions: int) -> None:
        for kind in "FB":
            stage.runs[kind].run(repetitions)

    runs = {"F": stage.runs["F"], "B": TimedRun(both, includes="F")}
    rows = measure_stage(gpu, replace(stage, runs=runs), 0, QUICK, again=again).measurements
    forward, backward = ({row.clock_mhz for row in rows[kind]} for kind in "FB")
    assert backward <= forward
    assert backward == set(again.settings_of(0, ["B"], gpu.supported_clocks_mhz)["B"])


def test_what_does_not_belong_together_is_refused():
    other = profile_simulated("simulated:a100-sxm", 1, settings=QUICK)
    assert "runs F of stage 1, which the profile does not have" in refusal(
        UsageError, lambda: Again(plan(), other)
    )
    again = Again(plan(), first())
    assert "differ from those of the profile in gpu" in refusal(
        UsageError, lambda: again.joined(replace(second(), gpu="another"))
    )


def test_a_plan_is_told_what_measuring_again_would_save():
    noisy = noisy_rows(smooth_profile(4), 0.01, 12, 0)
    frontier = solve(noisy, schedules.one_f_one_b(4, 8))
    plan = frontier.plan_for(frontier.baseline_time_s)
    told = frontier.measuring_again(plan)
    assert told is not None
    assert told == frontier.measuring_again(plan)
    assert 0 < told.rows < sum(map(len, noisy.measurements.values()))
    assert plan.on_time is not None
    assert 0.0 <= told.more_share <= plan.on_time.safety_share


@pytest.mark.parametrize(
    ("saves_more", "costs_then", "told"),
    [(0.01, 0.0, 0.003), (0.01, 0.002, 0.001), (0.002, 0.0, 0.002), (-0.01, 0.0, 0.0)],
)
def test_measuring_again_gains_at_most_what_being_sure_costs(
    saves_more: float, costs_then: float, told: float, monkeypatch: pytest.MonkeyPatch
):
    """Within a switch budget, plans of two searches differ by more than a margin costs."""
    frontier = solve(noisy_rows(smooth_profile(4), 0.01, 12, 0), schedules.one_f_one_b(4, 8))
    plan = frontier.plan_for(frontier.baseline_time_s)
    assert plan.on_time is not None
    sure = replace(plan.on_time, safety_share=0.003)
    saved = replace(sure.saved_share, expected=sure.saved_share.expected + saves_more)
    surer = replace(sure, saved_share=saved, safety_share=costs_then)
    after = SimpleNamespace(
        baseline_time_s=frontier.baseline_time_s,
        max_time_s=frontier.max_time_s,
        plan_until=lambda _: replace(plan, on_time=surer),
    )
    monkeypatch.setattr("perseus_planner.solver.frontier.solve_dag", lambda _: after)
    again = frontier.measuring_again(replace(plan, on_time=sure))
    assert again is not None
    assert again.more_share == pytest.approx(told, abs=1e-9)


@pytest.mark.parametrize("what", ["as measured", "without errors", "large"])
def test_nothing_is_told_where_nothing_is_known(what: str, monkeypatch: pytest.MonkeyPatch):
    noisy = noisy_rows(smooth_profile(4), 0.01, 12, 0, states_errors=what != "without errors")
    frontier = solve(noisy, schedules.one_f_one_b(4, 8))
    on_time = None if what == "as measured" else 0.95
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=on_time)
    if what == "large":
        monkeypatch.setattr("perseus_planner.solver.frontier._MOST_AGAIN", 63)
    assert frontier.measuring_again(plan) is None


def test_the_commands_measure_again_and_plan_from_what_was_joined(tmp_path: Path):
    profile, frontier, chosen = (tmp_path / name for name in ("p.yaml", "f.npz", "plan.yaml"))
    profiling = f"profile --stages 2 -o {profile} --gpu"
    solving = f"solve {profile} --schedule 1f1b --microbatches 4 -o {frontier}"
    planning = f"plan {frontier} --slowdown 1.00 -o {chosen}"
    noisy = "simulated:a100-sxm?noise=0.1"
    done(f"{profiling} {noisy}")
    done(solving)
    assert "rows again, its own and their neighbours" in done(planning)
    before = Profile.load(profile)
    # The stages are those of the profile, and need no option.
    done(f"profile -o {profile} --gpu '{noisy}&seed=1' --for {chosen}")
    after = Profile.load(profile)
    assert after.conditions[MEASURED_AGAIN].endswith("for a plan")
    assert after.digest != before.digest
    done(solving)
    done(planning)
    assert Plan.load(chosen).profile_digest == after.digest
