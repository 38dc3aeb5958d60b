"""A sweep with a goal: it goes on until the saving is known, or its time is up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from gpu_groups import Member, measured_together

from perseus_planner import Profile, schedules, solve
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG, OpCost
from perseus_planner.gpu.simulated.options import SimulationOptions
from perseus_planner.profiler.choosing import MAX_SETTINGS, find_doubt, next_setting
from perseus_planner.profiler.simulated_pipeline import profile_simulated
from perseus_planner.profiler.stage import Stage, StageRows, TimedRun
from perseus_planner.profiler.sweep import SweepSettings, measure_stage
from perseus_planner.profiler.windows import merge
from perseus_planner.profiles.measurement import Evidence, Measurement

T = TypeVar("T")
A100 = CATALOG["a100-sxm"]
WORK = OpCost(flops=1e13, bytes=1e10)
GOAL = SweepSettings(window_s=1.0, cool_down_s=0.0, saving_within=0.02)


class WatchedGpu(SimulatedGpu):
    """A noisy GPU that notes the clocks that are set; its clock may go faster."""

    def __init__(self, noise: float = 0.004, faster: float = 1.0) -> None:
        super().__init__(A100, options=SimulationOptions(noise=noise, drift=0))
        self.clocks: list[int] = []
        self.faster = faster

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Note the clock."""
        self.clocks.append(clock_mhz)
        super().set_clock_mhz(clock_mhz)

    def now_s(self) -> float:
        """Return the virtual time."""
        return self.faster * super().now_s()

    def stage(self) -> Stage:
        """Return a stage on this GPU."""
        timed = {"F": TimedRun(partial(self.run, WORK)), "B": TimedRun(partial(self.run, WORK * 2))}
        return Stage(timed, lambda: None, self.block)


def swept(settings: SweepSettings, **options: Any) -> tuple[list[int], StageRows, float]:
    """Return the clocks that a sweep sets, in order, its rows, and its virtual minutes."""
    gpu = WatchedGpu()
    rows = measure_stage(gpu, gpu.stage(), 0, settings, **options)
    return gpu.clocks[1:-1], rows, gpu.now_s() / 60


def test_a_tighter_goal_never_measures_less_and_says_what_it_reached():
    goals = (0.03, 0.015, 0.007)
    sweeps = [swept(replace(GOAL, saving_within=within)) for within in goals]
    for (looser, *_), (tighter, *_) in pairwise(sweeps):
        assert len(looser) < len(tighter)
        # The top clock is measured again when the goal seems to be reached, which differs.
        top = looser[0]
        of_looser, of_tighter = (
            [clock for clock in each if clock != top] for each in (looser, tighter)
        )
        assert of_tighter[: len(of_looser)] == of_looser
        assert min(looser.count(top), tighter.count(top)) >= 2
    for within, (_, rows, _) in zip(goals, sweeps, strict=True):
        assert float(rows.conditions["saving known within"].rstrip("%")) <= 100 * within
    order, rows, _ = sweeps[-1]
    assert len(order) > len(set(order)) >= MAX_SETTINGS
    windows = {
        row.clock_mhz: row.evidence.windows
        for row in rows.measurements["F"]
        if row.evidence is not None
    }
    assert all(windows[clock] >= 3 * order.count(clock) for clock in order)


def test_more_minutes_measure_more_and_are_kept():
    lengths = []
    for minutes in (1.0, 3.0):
        clocks, _, taken = swept(replace(GOAL, saving_within=None, minutes=minutes))
        lengths.append(len(clocks))
        assert 0.6 * minutes < taken <= minutes
    assert lengths[0] < lengths[1]


def test_two_settings_are_measured_in_no_time():
    gpu = WatchedGpu()
    rows = measure_stage(
        gpu, gpu.stage(), 0, SweepSettings(window_s=1.0, minutes=0.01)
    ).measurements
    assert [len(table) for table in rows.values()] == [2, 2]


def test_stages_share_the_minutes_of_their_gpu():
    settings = SweepSettings(window_s=1.0, cool_down_s=0.0, minutes=3.0)
    rows = profile_simulated("simulated:a100-sxm", 2, settings=settings).measurements
    alone = profile_simulated("simulated:a100-sxm", 1, settings=settings).measurements
    assert len(rows[0, "F"]) < len(alone[0, "F"])


def test_noise_of_many_stages_averages_out():
    tight = replace(GOAL, saving_within=0.01)
    assert len(swept(tight, stages=8)[0]) < len(swept(tight)[0])


def test_an_interrupted_sweep_goes_on_to_the_same_goal(tmp_path: Path):
    gpu, kept = WatchedGpu(), tmp_path / "rows.csv"

    def stop(done: int, total: int) -> None:
        if done == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_stage(gpu, gpu.stage(), 0, GOAL, rows_file=kept, progress=stop)
    before = set(gpu.clocks)
    gpu.clocks.clear()
    rows = measure_stage(gpu, gpu.stage(), 0, GOAL, rows_file=kept, resume=True)
    assert len(rows.measurements["F"]) == len(before | set(gpu.clocks))
    assert float(rows.conditions["saving known within"].rstrip("%")) <= 2.0


def test_gpus_that_share_a_stage_measure_alike_though_their_clocks_differ():
    def measure(gpu: WatchedGpu, member: Member) -> StageRows:
        settings = SweepSettings(window_s=1.0, cool_down_s=0.0, minutes=2.0)
        return measure_stage(gpu, gpu.stage(), 0, settings, group=member)

    gpus = WatchedGpu(), WatchedGpu(faster=1.3)
    assert {type(each) for each in measured_together(measure, gpus)} == {StageRows}
    assert gpus[0].clocks == gpus[1].clocks


def test_what_is_left_after_all_clocks_ends_the_sweep():
    # The counter is good to 0.02 % at best, so the goal cannot be reached; every row ends with 48
    # windows or more.
    table = {
        clock: Measurement(
            clock, 1400 / clock, 200 + clock / 10, Evidence(clock, 1e-3, 0.1, 48, 60.0)
        )
        for clock in (1400, 1300, 1200)
    }
    assert find_doubt((1400, 1300, 1200), {"F": table, "B": table}, 80.0).setting is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    settings, noise, stages = A100.clocks_mhz[:36:2], 0.006, 2
    loads = {kind: A100.load(work) for kind, work in (("F", WORK), ("B", WORK * 2))}
    truth = {
        kind: {
            clock: Measurement(clock, load.time_s(clock), load.energy_j(clock))
            for clock in settings
        }
        for kind, load in loads.items()
    }
    schedule = schedules.one_f_one_b(stages, 4)
    best = solve(_profile([truth] * stages), schedule)
    covered = []
    for seed in range(30):
        random = np.random.default_rng([seed, 5])

        def noisy(row: Measurement, random: np.random.Generator = random) -> Measurement:
            time_s, energy_j = (
                np.exp(noise * random.standard_normal(2)) * (row.time_s, row.energy_j)
            ).tolist()
            return replace(
                row,
                time_s=time_s,
                energy_j=energy_j,
                evidence=Evidence(row.clock_mhz, noise * time_s, noise * energy_j, 5, 60.0),
            )

        seen = [
            {k: {each: noisy(of[each]) for each in settings[::3]} for k, of in truth.items()}
            for _ in range(stages)
        ]
        share = np.mean([find_doubt(settings, rows, 80.0, stages=stages).share for rows in seen])
        found = solve(_profile(seen).estimated(settings).mean, schedule)
        plan = found.plan_until(1.05 * found.baseline_time_s)
        saved, real = plan.energy_j / found.baseline_energy_j, best.plan_of(plan.clocks)
        covered.append(abs(saved - real.energy_j / best.baseline_energy_j) <= share)
    assert sum(covered) >= 0.9 * len(covered)


def _profile(stages: list[dict[str, dict[int, Measurement]]]) -> Profile:
    rows = {
        (stage, kind): tuple(table[clock] for clock in sorted(table, reverse=True))
        for stage, kinds in enumerate(stages)
        for kind, table in kinds.items()
    }
    return Profile(rows, 80.0)


def test_rows_that_are_measured_again_are_merged_by_their_windows():
    one = Measurement(1400, 1.0, 100.0, Evidence(1400, 0.04, 4.0, 4, 50.0, ("hw-thermal",)))
    other = Measurement(1400, 1.3, 130.0, Evidence(1385, 0.03, 3.0, 8, 56.0))
    both = merge([one, other])
    assert (both.clock_mhz, both.time_s, both.energy_j) == (
        1400,
        pytest.approx(1.2),
        pytest.approx(120.0),
    )
    assert both.evidence is not None
    assert (both.evidence.windows, both.evidence.temperature_c) == (12, pytest.approx(54.0))
    assert both.evidence.time_stderr_s == pytest.approx(np.hypot(0.04 / 3, 0.03 * 2 / 3))
    assert both.evidence.throttle == ("hw-thermal",)


def test_the_first_clocks_are_those_of_a_sweep_without_a_goal():
    plain, goal = swept(replace(GOAL, saving_within=None))[0], swept(GOAL)[0]
    assert len(goal) > 6
    common = min(len(plain), len(goal)) - 1  # each ends with the top clock
    assert plain[:common] == goal[:common]
    assert next_setting(A100.clocks_mhz, {"F": {}, "B": {}}, 80.0) == plain[0]
