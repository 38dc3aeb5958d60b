"""The sweep measures what the simulated GPU does, and leaves a profile that can be planned on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from perseus_planner.errors import GpuError, ProfileError, UsageError
from perseus_planner.gpu.simulated import CATALOGUE, NOISE, SimulatedGpu, Work
from perseus_planner.measurement import Measurement
from perseus_planner.profiler.sweep import Stage, sweep, sweep_simulated
from perseus_planner.profiles import Profile

A100 = CATALOGUE["a100-sxm"]
WORK = Work(flops=1e13, bytes=1e10)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return sweep_simulated("simulated:a100-sxm", stages=4)


def saved(directory: Path, seed: int) -> dict[str, bytes]:
    directory.mkdir()
    sweep_simulated("simulated:a100-sxm", stages=2, seed=seed).save(directory / "profile.yaml")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def stage_of(gpu: SimulatedGpu, work: Work = WORK) -> Stage:
    return Stage(forward=lambda n: gpu.run(work, n), backward=lambda n: gpu.run(work * 2, n))


def fastest_s(profile: Profile, stage: int, kind: str) -> float:
    return profile.measurements[stage, kind][0].time_s


def test_every_stage_has_both_kinds_from_the_top_clock_down(profile: Profile) -> None:
    assert set(profile.measurements) == set(itertools.product(range(4), "FB"))
    for rows in profile.measurements.values():
        assert [row.clock_mhz for row in rows] == list(A100.clocks_mhz[: len(rows)])


def test_the_profile_says_that_it_is_simulated(profile: Profile) -> None:
    assert (profile.origin, profile.gpu) == ("simulated", "simulated a100-sxm")


def test_equal_seeds_give_equal_files_and_others_do_not(tmp_path: Path) -> None:
    first, again, other = (saved(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert first == again
    assert first != other


def test_a_saved_profile_loads_as_it_was(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.yaml")
    assert Profile.load(tmp_path / "profile.yaml") == profile


def test_rows_are_what_the_gpu_does_at_that_clock() -> None:
    gpu = SimulatedGpu(A100)
    for row in sweep(gpu, [stage_of(gpu)], gpu.block).measurements[0, "F"]:
        clock = A100.achieved_clock_mhz(WORK, row.clock_mhz)
        time_s = A100.time_s(WORK, clock)
        assert row.time_s == pytest.approx(time_s, rel=NOISE)
        assert row.energy_j == pytest.approx(time_s * A100.power_w(WORK, clock), rel=2 * NOISE)


def test_a_lower_clock_is_never_faster_beyond_noise(profile: Profile) -> None:
    for rows in profile.measurements.values():
        for above, below in itertools.pairwise(rows):
            assert below.time_s > above.time_s * (1 - 2 * NOISE)
        assert rows[-1].time_s > 1.2 * rows[0].time_s


def test_the_power_limit_makes_a_plateau_on_top(profile: Profile) -> None:
    for rows in profile.measurements.values():
        assert rows[4].time_s == pytest.approx(rows[0].time_s, rel=2 * NOISE)
        assert rows[4].energy_j == pytest.approx(rows[0].energy_j, rel=4 * NOISE)
        assert rows[-1].energy_j < 0.9 * rows[0].energy_j


def test_the_descent_goes_past_the_least_energy_and_ends_before_the_lowest_clock(profile: Profile) -> None:
    for rows in profile.measurements.values():
        least = min(range(len(rows)), key=lambda i: rows[i].energy_j)
        assert 5 <= len(rows) - 1 - least < 20
        assert len(rows) < len(A100.clocks_mhz)


def test_work_that_always_saves_at_a_lower_clock_is_measured_at_every_clock() -> None:
    gpu = SimulatedGpu(A100)
    profile = sweep(gpu, [stage_of(gpu, Work(flops=1e9, bytes=1e11))], gpu.block)
    assert len(profile.measurements[0, "F"]) == len(A100.clocks_mhz)


def test_average_power_lies_between_static_and_limit_and_above_blocking(profile: Profile) -> None:
    assert A100.static_power_w < profile.blocking_power_w
    for row in itertools.chain.from_iterable(profile.measurements.values()):
        assert profile.blocking_power_w < row.energy_j / row.time_s <= A100.power_limit_w * (1 + 1e-9)


def test_blocking_power_is_measured_on_the_waiting_gpu(profile: Profile) -> None:
    assert profile.blocking_power_w == pytest.approx(A100.blocking_power_w, rel=NOISE)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_the_head_makes_the_last_stage_slowest_and_the_embedding_the_first_slower(profile: Profile, kind: str) -> None:
    first, second, third, last = (fastest_s(profile, stage, kind) for stage in range(4))
    assert third == pytest.approx(second, rel=2 * NOISE)
    assert second < first < 1.05 * second
    assert 1.1 * second < last < 1.3 * second


def test_a_backward_takes_twice_its_forward(profile: Profile) -> None:
    for stage in range(4):
        assert fastest_s(profile, stage, "B") == pytest.approx(2 * fastest_s(profile, stage, "F"), rel=2 * NOISE)


def test_windows_are_long_enough_for_the_energy_counter() -> None:
    gpu = SimulatedGpu(A100)
    windows_s: list[float] = []

    def run(repetitions: int) -> None:
        start_s = gpu.now_s()
        gpu.run(WORK, repetitions)
        windows_s.append(gpu.now_s() - start_s)

    rows = sweep(gpu, [Stage(run, run)], gpu.block).measurements
    measured_s = windows_s[1::2]
    assert len(measured_s) == sum(map(len, rows.values()))
    assert min(measured_s) > 5.0 * (1 - 2 * NOISE)


def test_progress_rises_to_the_total() -> None:
    calls: list[tuple[int, int]] = []
    rows = sweep_simulated(
        "simulated:a100-sxm", 1, progress=lambda done, total: calls.append((done, total))
    ).measurements
    done = [d for d, _ in calls]
    assert {total for _, total in calls} == {2 * len(A100.clocks_mhz)}
    assert done == sorted(done)
    assert done[0] == 1
    assert done[-1] == calls[-1][1]
    assert len(calls) == sum(map(len, rows.values())) + 1


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_clocks_are_reset_after_an_exception_in_the_middle_of_a_sweep(exception: type[BaseException]) -> None:
    gpu = SimulatedGpu(A100)
    locked: list[int | None] = []

    def backward(repetitions: int) -> None:
        gpu.run(WORK, repetitions)
        locked.append(gpu.locked_mhz)
        if len(locked) == 5:
            raise exception

    with pytest.raises(exception):
        sweep(gpu, [Stage(stage_of(gpu).forward, backward)], gpu.block)
    assert locked == [1410, 1410, 1395, 1395, 1380]
    assert gpu.locked_mhz is None


def test_clocks_are_reset_after_a_sweep_and_when_its_watcher_raises() -> None:
    gpu = SimulatedGpu(A100)

    def give_up(done: int, total: int) -> None:
        raise InterruptedError

    sweep(gpu, [stage_of(gpu)], gpu.block)
    assert gpu.locked_mhz is None
    with pytest.raises(InterruptedError):
        sweep(gpu, [stage_of(gpu)], gpu.block, give_up)
    assert gpu.locked_mhz is None


@pytest.mark.parametrize("stages", [0, -1, True, 2.0, "4"])
def test_a_count_of_stages_that_is_none_is_refused(stages: int) -> None:
    with pytest.raises(UsageError, match="give a whole number of at least 1"):
        sweep_simulated("simulated:a100-sxm", stages)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(GpuError, match="simulated:a100-sxm"):
        sweep_simulated("simulated:a1000", 4)


def test_a_sweep_of_no_stages_is_refused() -> None:
    gpu = SimulatedGpu(A100)
    with pytest.raises(ProfileError, match="no measurements"):
        sweep(gpu, [], gpu.block)


def test_one_stage_has_both_embedding_and_head() -> None:
    one = sweep_simulated("simulated:a100-sxm", 1)
    four = sweep_simulated("simulated:a100-sxm", 4)
    assert one.stages == 1
    assert fastest_s(one, 0, "F") > fastest_s(four, 3, "F")
    assert isinstance(one.measurements[0, "F"][0], Measurement)


def test_the_halves_of_a_backward_are_measured_where_asked_for():
    whole, split = (sweep_simulated("simulated:a100-sxm", stages=2, split_backward=each) for each in (False, True))
    assert {kind for _, kind in whole.measurements} == {"F", "B"}
    assert {kind for _, kind in split.measurements} == {"F", "B", "I", "W"}
    for stage in range(2):
        halves_s = sum(split.measurements[stage, kind][0].time_s for kind in "IW")
        assert halves_s == pytest.approx(split.measurements[stage, "B"][0].time_s, rel=4 * NOISE)
