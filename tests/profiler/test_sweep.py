"""The sweep measures a GPU at few settings, resets what it sets, and gives a profile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from threading import BrokenBarrierError
from typing import cast

import pytest
from gpu_groups import Member, measured_together
from replay_gpu import ReplayGpu

from perseus_planner import __version__, schedules, solve
from perseus_planner.base.errors import GpuError, GpuNotPermitted, ProfileError, UsageError
from perseus_planner.gpu import Gpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG, OpCost
from perseus_planner.gpu.simulated.options import NOISE, SimulationOptions
from perseus_planner.gpu.wrappers import DryRunGpu
from perseus_planner.profiler.row_meter import RowMeter
from perseus_planner.profiler.simulated_pipeline import profile_simulated
from perseus_planner.profiler.stage import Run, Stage, StageRows, TimedRun, assemble_profile
from perseus_planner.profiler.sweep import SweepSettings, measure_stage
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

A100 = CATALOG["a100-sxm"]
WORK = OpCost(flops=1e13, bytes=1e10)
MEMORY_BOUND = OpCost(flops=1e12, bytes=1e11)
QUICK = SweepSettings(window_s=1.0, cool_down_s=0.0)
FULL = SweepSettings(window_s=1.0, cool_down_s=0.0, full=True)
OBSERVED = SweepSettings(control="observed")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_simulated("simulated:a100-sxm", stages=4)


def quiet(**options: object) -> SimulatedGpu:
    """A simulated GPU without noise."""
    return SimulatedGpu(A100, options=SimulationOptions(noise=0, drift=0, **options))  # type: ignore[arg-type]


def stage_of(gpu: SimulatedGpu, work: OpCost = WORK) -> Stage:
    timed = {"F": TimedRun(partial(gpu.run, work)), "B": TimedRun(partial(gpu.run, work * 2))}
    return Stage(timed, lambda: None, gpu.block)


def watched(
    gpu: SimulatedGpu,
    calls: list[int | None],
    stop_after: int | None = None,
    error: type[BaseException] = RuntimeError,
) -> Stage:
    """Return its stage, which appends the locked clock to `calls` whenever it runs."""

    def run(work: OpCost, repetitions: int) -> None:
        gpu.run(work, repetitions)
        calls.append(gpu.locked_mhz)
        if stop_after is not None and len(calls) > stop_after:
            raise error

    return Stage(
        {"F": TimedRun(partial(run, WORK)), "B": TimedRun(partial(run, WORK * 2))},
        lambda: None,
        gpu.block,
    )


def fastest_s(profile: Profile, stage: int, kind: str) -> float:
    return profile.measurements[stage, kind][0].time_s


def saved(directory: Path, seed: int) -> dict[str, bytes]:
    directory.mkdir()
    profile_simulated(f"simulated:a100-sxm?seed={seed}", stages=2).save(directory / "profile.yaml")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_every_stage_has_both_kinds_at_few_clocks_that_they_share(profile: Profile):
    assert set(profile.measurements) == set(itertools.product(range(4), "FB"))
    for stage in range(4):
        forward, backward = (
            [row.clock_mhz for row in profile.measurements[stage, kind]] for kind in "FB"
        )
        assert forward == backward
        assert set(forward) <= set(A100.clocks_mhz)
        assert forward[0] == A100.clocks_mhz[0]
        assert 5 <= len(forward) <= 12


def test_the_profile_records_how_it_was_measured(profile: Profile):
    assert (profile.origin, profile.gpu, profile.control) == (
        "simulated",
        "simulated a100-sxm",
        "clock",
    )
    assert profile.conditions["planner"] == __version__
    assert profile.conditions["windows"] == "5 s"
    assert profile.conditions["energy counter step"] == "0.100 s"
    assert profile.conditions["measured on"] == "simulated:a100-sxm"
    assert "W at 1410 MHz" in profile.conditions["blocking power"]


def test_equal_seeds_give_equal_files_and_others_do_not(tmp_path: Path):
    first, again, other = (
        saved(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again
    assert first != other


def test_rows_are_what_the_gpu_does_at_that_clock():
    gpu = quiet()
    load = A100.load(WORK)
    for row in measure_stage(gpu, stage_of(gpu), 0).measurements["F"]:
        assert row.time_s == pytest.approx(load.time_s(row.clock_mhz), rel=1e-3)
        assert row.energy_j == pytest.approx(load.energy_j(row.clock_mhz), rel=2e-3)
        assert row.evidence is not None
        assert row.evidence.achieved_mhz == pytest.approx(load.achieved_mhz(row.clock_mhz), abs=1)


@pytest.mark.parametrize("settings", [QUICK, replace(QUICK, saving_within=0.5), OBSERVED])
def test_a_kind_without_work_has_rows_of_nothing(settings: SweepSettings):
    gpu = quiet()
    stage = replace(stage_of(gpu), runs={"F": stage_of(gpu).runs["F"]}, without_work=("B",))
    rows = measure_stage(gpu, stage, 0, settings)
    forward, backward = rows.measurements["F"], rows.measurements["B"]
    assert [row.clock_mhz for row in backward] == [row.clock_mhz for row in forward]
    assert {(row.time_s, row.energy_j) for row in backward} == {(0.0, 0.0)}
    assert all(row.has_work for row in forward)
    assert rows.conditions["without work"] == "B"


class AtRest(SimulatedGpu):
    """A GPU that is at rest while launches find nothing to run, at a clock of its own."""

    def clock_mhz(self) -> int:
        return 600


def test_launches_that_find_nothing_to_run_may_leave_the_gpu_at_any_clock():
    gpu = AtRest(A100, options=SimulationOptions(noise=0, drift=0))
    runs = {kind: TimedRun(lambda times: gpu.wait(times * 10e-6)) for kind in "FB"}
    rows = measure_stage(gpu, Stage(runs, lambda: None, gpu.block), 0, QUICK)
    assert all(row.time_s == pytest.approx(10e-6) for row in rows.measurements["F"])


def test_a_full_sweep_measures_every_clock_in_random_order_and_the_top_one_three_times():
    gpu = quiet()
    clocks: list[int | None] = []
    rows = measure_stage(gpu, watched(gpu, clocks), 0, replace(QUICK, full=True)).measurements
    for kind in "FB":
        assert [row.clock_mhz for row in rows[kind]] == list(A100.clocks_mhz)
    order = [clock for clock, _ in itertools.groupby(clocks)]
    in_order = sorted(rows["F"], key=lambda row: row.evidence.order if row.evidence else -1)
    assert [row.clock_mhz for row in in_order] == list(dict.fromkeys(filter(None, order)))
    top, *others = A100.clocks_mhz
    assert sorted(filter(None, order), reverse=True) == [top] * 3 + others
    assert [at for at, clock in enumerate(order) if clock == top] == [0, len(others) // 2 + 1, 82]
    assert abs(fmean(order[1:41]) - fmean(order[41:])) < 200  # MHz, of 1200


class Warming(SimulatedGpu):
    """A GPU that draws more the longer it runs, up to 4 % more after some minutes."""

    _counted_j = _warm_j = 0.0

    def energy_j(self) -> float:
        """Return the counter."""
        counted_j = super().energy_j()
        warmth = 0.04 * (1 - math.exp(-self.now_s() / 150))
        self._warm_j += (counted_j - self._counted_j) * (1 + warmth)
        self._counted_j = counted_j
        return self._warm_j


def test_the_noise_of_windows_is_no_drift_of_the_gpu():
    """The standard errors of the rows have it already; counted twice, it made margins too wide."""
    shared, errors = [], []
    for seed in range(8):
        noisy = SimulatedGpu(A100, options=SimulationOptions(noise=0.03, drift=0), seed=seed)
        rows = measure_stage(noisy, stage_of(noisy), 0, QUICK)
        shared.append(rows.shared_errors[0])
        top = rows.measurements["B"][0]
        assert top.evidence is not None
        errors.append(top.evidence.time_stderr_s / top.time_s)
    assert fmean(shared) < fmean(errors)


@pytest.mark.parametrize("settings", [QUICK, FULL])
def test_the_error_that_rows_share_covers_the_drift_of_the_gpu(settings: SweepSettings):
    warming = Warming(A100, options=SimulationOptions(noise=0, drift=0))
    steady, warm = (measure_stage(gpu, stage_of(gpu), 0, settings) for gpu in (quiet(), warming))
    assert max(steady.shared_errors) < 5e-4
    error = assemble_profile([warm]).shared_errors(0)[1]
    load = {"F": A100.load(WORK), "B": A100.load(WORK * 2)}
    for kind, rows in warm.measurements.items():
        drift = [row.energy_j / load[kind].energy_j(row.clock_mhz) for row in rows]
        assert max(drift) - min(drift) > 0.01
        assert error > 0.3 * (max(drift) - min(drift))
        assert all(abs(factor / drift[0] - 1) <= 2 * error for factor in drift)


@pytest.mark.parametrize(
    "name",
    ["a100-sxm", *(pytest.param(name, marks=pytest.mark.soak) for name in ("h100-sxm", "a40"))],
)
def test_plans_from_few_clocks_cost_hardly_more_than_plans_from_all(name: str):
    works = [OpCost(1.17e13, 1.3e10), OpCost(1.17e13, 1.28e10), OpCost(1.38e13, 1.7e10)]
    model = CATALOG[name]
    adaptive, full = [], {}
    for number, work in enumerate(works):
        gpu = SimulatedGpu(model, number)
        adaptive.append(measure_stage(gpu, stage_of(gpu, work), number))
        for kind, each in (("F", work), ("B", work * 2)):
            load = model.load(each)
            full[number, kind] = tuple(
                Measurement(clock, load.time_s(clock), load.energy_j(clock))
                for clock in model.clocks_mhz
            )
    few = assemble_profile(adaptive)
    schedule = schedules.one_f_one_b(3, 8)
    found, whole = solve(few, schedule), solve(Profile(full, few.blocking_power_w), schedule)
    for slowdown in (1.0, 1.02, 1.05, 1.1, 1.2):
        real = whole.plan_of(found.plan_for(slowdown * found.baseline_time_s, on_time=None).clocks)
        best = whole.plan_for(max(real.time_s, whole.min_time_s))
        assert real.energy_j <= 1.01 * best.energy_j
        assert real.time_s <= 1.01 * slowdown * whole.baseline_time_s


def test_observing_sets_nothing_and_measures_each_kind_once_at_the_clock_that_the_gpu_runs():
    gpu = quiet(fault=("not-permitted",))
    rows = measure_stage(gpu, stage_of(gpu), 0, OBSERVED)
    achieved = round(A100.load(WORK).achieved_mhz(1410))
    assert {
        kind: [row.clock_mhz for row in table] for kind, table in rows.measurements.items()
    } == {
        "F": [achieved],
        "B": [round(A100.load(WORK * 2).achieved_mhz(1410))],
    }
    assert rows.control == "observed"
    assert rows.blocking_power_w == pytest.approx(A100.blocking().free_power_w(1410), rel=1e-3)
    assert assemble_profile([rows]).control == "observed"


def test_power_limits_are_swept_from_the_one_in_force_down_and_reset():
    gpu = quiet()
    least_w, _ = gpu.power_limits_w
    rows = measure_stage(gpu, stage_of(gpu), 0, replace(QUICK, control="power-limit"))
    limits = [row.clock_mhz for row in rows.measurements["F"]]
    assert limits[0] == gpu.power_limit_w() == 400
    assert all(least_w <= limit <= 400 for limit in limits)
    assert 4 <= len(limits) <= 12
    for row in rows.measurements["F"]:
        assert row.energy_j / row.time_s <= row.clock_mhz * 1.001
    profile = assemble_profile([rows])
    assert profile.control == "power-limit"
    assert gpu.power_limit_w() == 400


def test_a_gpu_that_must_not_be_set_is_an_error():
    gpu = quiet(fault=("not-permitted",))
    with pytest.raises(GpuNotPermitted):
        measure_stage(gpu, stage_of(gpu), 0)


def test_blocking_power_is_the_mean_of_the_highest_and_the_lowest_clock():
    gpu = quiet()
    rows = measure_stage(gpu, stage_of(gpu), 0)
    lowest = rows.measurements["F"][-1].clock_mhz
    powers_w = [A100.blocking().free_power_w(clock) for clock in (1410, lowest)]
    assert rows.blocking_power_w == pytest.approx(sum(powers_w) / 2, rel=2e-3)
    assert (
        rows.conditions["blocking power"]
        == f"{powers_w[0]:.1f} W at 1410 MHz, {powers_w[1]:.1f} W at {lowest} MHz"
    )


def test_the_forward_is_subtracted_from_a_backward_that_runs_it():
    gpu = quiet()
    timed = {
        "F": TimedRun(partial(gpu.run, WORK)),
        "B": TimedRun(partial(gpu.run, WORK * 3), includes="F"),
    }
    rows = measure_stage(gpu, Stage(timed, lambda: None, gpu.block), 0, QUICK).measurements
    apart = quiet()
    twice = measure_stage(apart, stage_of(apart), 0, QUICK).measurements
    table = {row.clock_mhz: row for row in twice["B"]}
    common = [row for row in rows["B"] if row.clock_mhz in table]
    assert len(common) >= 3
    for row in common:
        assert row.time_s == pytest.approx(table[row.clock_mhz].time_s, rel=2e-3)
        assert row.energy_j == pytest.approx(table[row.clock_mhz].energy_j, rel=5e-3)
        assert row.evidence is not None


def test_a_backward_that_seems_to_take_nothing_is_an_error_that_names_it():
    gpu = quiet()
    timed = {
        "F": TimedRun(partial(gpu.run, WORK)),
        "B": TimedRun(partial(gpu.run, WORK * 0.5), includes="F"),
    }
    with pytest.raises(GpuError, match=r"stage 3, B with F: at 1410 .*nothing else run"):
        measure_stage(gpu, Stage(timed, lambda: None, gpu.block), 3, QUICK)


def test_rows_that_were_measured_too_hot_are_measured_again_at_the_end():
    cool, hot = quiet(), quiet(fault=("throttled@0s-60s",))
    expected, found = (measure_stage(each, stage_of(each), 0, FULL) for each in (cool, hot))
    assert "measured while too hot" not in found.conditions
    for kind, rows in expected.measurements.items():
        for row, again in zip(rows, found.measurements[kind], strict=True):
            assert (again.clock_mhz, again.time_s) == (
                row.clock_mhz,
                pytest.approx(row.time_s, rel=1e-6),
            )


@pytest.mark.parametrize("settings", [QUICK, replace(OBSERVED, window_s=1.0, cool_down_s=0.0)])
def test_rows_that_are_still_too_hot_are_refused_unless_they_are_allowed(
    settings: SweepSettings, tmp_path: Path
):
    gpu, rows = quiet(fault=("throttled@0s-100000s",)), tmp_path / "rows.csv"
    with pytest.raises(GpuError) as error:
        measure_stage(gpu, stage_of(gpu), 0, settings, rows_file=rows)
    assert str(error.value).startswith(
        "stage 0: the GPU was too hot (hw-thermal) when these rows were measured twice: F at "
    )
    assert str(error.value).endswith(
        " MHz; cool it and go on with --resume, or keep the rows with --allow-hot "
        "(in Python SweepSettings(allow_hot=True))"
    )
    assert rows.exists()
    allowed = measure_stage(
        gpu, stage_of(gpu), 0, replace(settings, allow_hot=True), rows_file=rows, resume=True
    )
    assert allowed.conditions["measured while too hot"].startswith("F at ")


class Unlockable(SimulatedGpu):
    """A GPU that a host keeps at one clock: locking another one has no effect."""

    def __init__(self, clock_mhz: int) -> None:
        super().__init__(A100, options=SimulationOptions(noise=0, drift=0))
        super().set_clock_mhz(clock_mhz)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Do nothing."""

    def reset_clocks(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("kept_mhz", "locked_mhz", "rows"), [(1410, 690, 2), (900, 690, 2), (210, 210, 28)]
)
def test_locks_without_effect_are_refused(
    kept_mhz: int, locked_mhz: int, rows: int, tmp_path: Path
):
    gpu, kept = Unlockable(kept_mhz), tmp_path / "rows.csv"
    with pytest.raises(GpuError) as error:
        measure_stage(gpu, stage_of(gpu, MEMORY_BOUND), 0, QUICK, rows_file=kept)
    assert str(error.value) == (
        f"simulated:a100-sxm?noise=0&drift=0: its SM clock was locked at {locked_mhz} MHz, and "
        f"under load ran at {kept_mhz} MHz, as when it was locked at 1410 MHz ({kept_mhz} MHz), "
        "so the lock has no effect; see whether Slurm (--gpu-freq), DCGM or a host sets the "
        "clock, or try another back-end (nvml:, zeusd: or command:)"
    )
    assert kept.read_text().count('time_s"') == rows


def test_a_lock_without_effect_is_found_on_one_gpu_of_a_stage():
    def measure(gpu: SimulatedGpu, member: Member) -> StageRows:
        return measure_stage(gpu, stage_of(gpu, MEMORY_BOUND), 0, QUICK, group=member)

    first, second = measured_together(measure, [quiet(), Unlockable(1410)])
    assert isinstance(first, BrokenBarrierError)
    assert "locked at 690 MHz, and under load ran at 1410 MHz" in str(second)


def test_a_dry_run_measures_all_rows_at_one_clock_and_says_so():
    gpu = quiet()
    rows = measure_stage(cast("Gpu", DryRunGpu(gpu)), stage_of(gpu, MEMORY_BOUND), 0, QUICK)
    achieved_mhz = {row.evidence.achieved_mhz for row in rows.measurements["F"] if row.evidence}
    assert len(achieved_mhz) == 1
    assert "nothing is set in a dry run" in rows.conditions["warnings"]


def test_a_power_cap_is_no_lock_without_effect():
    gpu = quiet()
    rows = measure_stage(gpu, stage_of(gpu, OpCost(flops=1e13, bytes=1e9)), 0, FULL)
    evidence = [(row.clock_mhz, row.evidence) for row in rows.measurements["B"] if row.evidence]
    capped = [each for each in evidence if each[1].throttle == ("sw-power-cap",)]
    assert len(capped) >= 3
    assert capped[0][1].achieved_mhz < 0.95 * capped[0][0]


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 3, 50])
def test_clocks_are_reset_after_an_exception_at_any_moment(
    exception: type[BaseException], after: int
):
    gpu = quiet()
    locked: list[int | None] = []
    with pytest.raises(exception):
        measure_stage(gpu, watched(gpu, locked, after, exception), 0, QUICK)
    assert None not in locked
    assert gpu.locked_mhz is None


def test_clocks_are_reset_after_a_sweep_and_when_its_watcher_raises():
    def give_up(done: int, total: int) -> None:
        raise InterruptedError

    gpu = quiet()
    measure_stage(gpu, stage_of(gpu), 0, QUICK)
    assert gpu.locked_mhz is None
    with pytest.raises(InterruptedError):
        measure_stage(gpu, stage_of(gpu), 0, QUICK, progress=give_up)
    assert gpu.locked_mhz is None


def test_progress_rises_to_the_total_of_each_stage():
    calls: list[tuple[int, int]] = []
    profile = profile_simulated("simulated:a100-sxm", 1, progress=lambda *call: calls.append(call))
    done = [done for done, _ in calls]
    assert all(done <= total for done, total in calls)
    assert calls[-1] == (sum(map(len, profile.measurements.values())),) * 2
    assert done[0] == 1
    assert done == sorted(done)


def rows_of(
    stage: int,
    *,
    power_w: float | None = 80.0,
    gpus: int = 1,
    control: str = "clock",
    **conditions: str,
) -> StageRows:
    row = (Measurement(1410, 0.1, 30.0),)
    return StageRows(
        stage,
        {"F": row, "B": row},
        power_w,
        gpus,
        f"GPU {stage % 2}",
        "measured",
        control,
        conditions=conditions,
    )


def test_stages_are_assembled_in_any_order():
    profile = assemble_profile(
        [rows_of(2, power_w=90.0), rows_of(0), rows_of(1)], conditions={"date": "2026-01-01"}
    )
    assert profile.stages == 3
    assert profile.blocking_power_w == (80.0, 80.0, 90.0)
    assert (profile.gpu, profile.origin) == ("GPU 0 + GPU 1", "measured")
    assert profile.conditions["date"] == "2026-01-01"


def test_conditions_that_stages_share_appear_once():
    stages = [rows_of(0, driver="595", windows="5 s"), rows_of(1, driver="595", windows="10 s")]
    conditions: Mapping[str, str] = assemble_profile(stages).conditions
    assert conditions["driver"] == "595"
    assert conditions["windows"] == "stage 0: 5 s; stage 1: 10 s"


def test_a_stage_without_a_neighbour_gets_the_mean_power_of_the_others():
    stages = [
        rows_of(0, power_w=160.0, gpus=2),
        rows_of(1, power_w=None, gpus=2),
        rows_of(2, power_w=200.0, gpus=2),
    ]
    profile = assemble_profile(stages)
    assert profile.blocking_power_w == (160.0, 180.0, 200.0)
    assert profile.gpus_per_stage == 2
    assert assemble_profile(stages, blocking_power_w=70.0).blocking_power_w == 140.0


@pytest.mark.parametrize(
    ("stages", "refusal"),
    [
        ([], "no stage was measured; give at least one"),
        ([rows_of(0), rows_of(2)], "stage 1 is missing though there is a stage 2"),
        ([rows_of(0), rows_of(0)], "stage 0 was measured twice; give it once"),
        (
            [rows_of(0), rows_of(1, control="observed")],
            "stage 0 and stage 1 differ in control; measure both alike",
        ),
        (
            [rows_of(0), rows_of(1, gpus=2)],
            "stage 0 and stage 1 differ in gpus; measure both alike",
        ),
        ([rows_of(0, power_w=None)], "give it with --blocking-power W"),
    ],
)
def test_stages_that_do_not_fit_together_are_refused(stages: list[StageRows], refusal: str):
    with pytest.raises(ProfileError, match=refusal):
        assemble_profile(stages)


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        (
            {"control": "voltage"},
            "control: 'voltage' is unknown; choose one of: clock, power-limit, observed",
        ),
        ({"window_s": 0.0}, "window_s: 0.0 is not a time"),
        ({"cool_down_s": -1.0}, "cool_down_s: -1.0 is not a wait"),
        ({"seed": 1.5}, "seed: 1.5 is not a whole number of 0 or more"),
        ({"minutes": 0.0}, "minutes: 0.0 is not a number of minutes above 0, such as 30"),
        ({"saving_within": -0.1}, "saving_within: -0.1 is not a share: give a number of 0 or more"),
        ({"minutes": 5.0, "full": True}, "minutes and saving_within choose what is measured; "),
        ({"saving_within": 0.01, "control": "observed"}, "leave out --full and --observe"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, object], refusal: str):
    with pytest.raises(UsageError, match=refusal):
        SweepSettings(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [0, -1, True, 2.0, "4"])
def test_a_number_of_stages_out_of_range_is_refused(stages: int):
    with pytest.raises(UsageError, match="give a whole number of at least 1"):
        profile_simulated("simulated:a100-sxm", stages)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_the_head_makes_the_last_stage_slowest_and_the_embedding_the_first_slower(kind: str):
    exact = profile_simulated("simulated:a100-sxm?noise=0&drift=0", stages=4)
    first, second, third, last = (fastest_s(exact, stage, kind) for stage in range(4))
    assert third == pytest.approx(second, rel=1e-4)
    assert second < first < 1.05 * second
    assert 1.1 * second < last < 1.3 * second


def test_the_halves_of_a_backward_are_measured_on_request():
    split = profile_simulated("simulated:a100-sxm", stages=2, split_backward=True)
    assert {key.kind for key in split.measurements} == {"F", "B", "I", "W"}
    for stage in range(2):
        halves_s = sum(fastest_s(split, stage, kind) for kind in "IW")
        assert halves_s == pytest.approx(fastest_s(split, stage, "B"), rel=NOISE)


def test_a_sweep_of_few_clocks_reproduces_a_measured_profile(measured_data: Path):
    path = measured_data / "perseus_sosp24" / "stage_profile" / "gpt3-175b+a100_sxm_bf16.csv"
    whole = Profile.load(path, blocking_power_w=83.64)
    gpu = ReplayGpu(whole, 0, noise=0.003, outliers=0.05, seed=5)
    rows = measure_stage(gpu, gpu.stage(), 0)
    assert rows.blocking_power_w == pytest.approx(83.64, rel=0.01)
    for kind, table in rows.measurements.items():
        assert len(table) <= 12
        truth = {row.clock_mhz: row for row in whole.measurements[0, kind]}
        for row in table:
            assert row.time_s == pytest.approx(truth[row.clock_mhz].time_s, rel=0.01)
            assert row.energy_j == pytest.approx(truth[row.clock_mhz].energy_j, rel=0.01)


class Hiccups(RowMeter):
    """A meter whose counter stands still for the backward at one clock."""

    times = 1

    def measure_row(self, run: Run, setting: int | None, random: Random) -> Measurement:
        row = super().measure_row(run, setting, random)
        if setting != 1410 or row.time_s < 0.05 or not self.times:
            return row
        Hiccups.times -= 1
        return replace(row, energy_j=0.0)


@pytest.mark.parametrize("times", [1, 3])
def test_a_row_that_cannot_be_true_is_measured_again_and_then_refused(
    monkeypatch: pytest.MonkeyPatch, times: int
):
    monkeypatch.setattr("perseus_planner.profiler.sweep.RowMeter", Hiccups)
    monkeypatch.setattr(Hiccups, "times", times)
    gpu = quiet()
    sweep = partial(measure_stage, gpu, stage_of(gpu), 0, replace(QUICK, saving_within=None))
    # The highest clock is measured three times, of which the mean counts.
    if times == 1:
        rows = sweep().measurements["B"]
        assert rows[0].power_w > rows[-1].power_w > 0
        return
    Hiccups.times = 1000
    with pytest.raises(GpuError, match=r"stage 0 backward at 1410 MHz: 0 J in .* did not move"):
        sweep()
    assert gpu.locked_mhz is None
