"""The simulated GPU behaves as the physics in its docstring says, and as a `Gpu` must."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.errors import GpuError
from perseus_planner.gpu import Gpu, locked_clock, open_gpu
from perseus_planner.gpu.simulated import CATALOGUE, NOISE, GpuModel, SimulatedGpu, Work

A100 = CATALOGUE["a100-sxm"]
DENSE = Work(flops=1e13, bytes=1e9)

models = st.sampled_from(list(CATALOGUE.values()))
works = st.builds(Work, flops=st.floats(1e9, 1e14), bytes=st.floats(1e6, 1e11))


def achieved(model: GpuModel, work: Work) -> list[int]:
    """The achieved clock for every supported clock requested, highest request first."""
    return [model.achieved_clock_mhz(work, clock) for clock in model.clocks_mhz]


def spent(gpu: Gpu, action: Callable[[], None]) -> tuple[float, float]:
    """Seconds and joules that pass on `gpu` during `action`."""
    start_s, start_j = gpu.now_s(), gpu.energy_j()
    action()
    return gpu.now_s() - start_s, gpu.energy_j() - start_j


def test_a_gpu_is_opened_by_its_text() -> None:
    gpu: Gpu = open_gpu("simulated:a100-sxm")
    assert (gpu.name, gpu.origin) == ("simulated a100-sxm", "simulated")
    assert gpu.supported_clocks_mhz[:2] == (1410, 1395)
    assert gpu.supported_clocks_mhz[-1] == 210


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("simulated:a100", "there is no simulated GPU 'a100'"),
        ("simulated:", "there is no simulated GPU ''"),
        ("a100-sxm", "there is no back-end 'a100-sxm'"),
        ("", "there is no back-end ''"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_known_ones(text: str, wrong: str) -> None:
    with pytest.raises(GpuError) as refusal:
        open_gpu(text)
    assert str(refusal.value) == f"GPU {text!r}: {wrong}; choose one of: simulated:a100-sxm"


@pytest.mark.parametrize(("clock_mhz", "nearest"), [(1000, 1005), (1500, 1410), (0, 210)])
def test_an_unsupported_clock_is_refused_with_the_nearest(clock_mhz: int, nearest: int) -> None:
    gpu = SimulatedGpu(A100)
    with pytest.raises(GpuError, match=f"cannot run at {clock_mhz} MHz; the nearest supported clock is {nearest} MHz"):
        gpu.set_clock_mhz(clock_mhz)
    assert gpu.locked_mhz is None


def test_without_a_lock_the_highest_clock_runs() -> None:
    free, locked = SimulatedGpu(A100), SimulatedGpu(A100)
    locked.set_clock_mhz(210)
    locked.reset_clocks()
    with locked_clock(free, 1410):
        expected = spent(free, lambda: free.run(DENSE))
    assert spent(locked, lambda: locked.run(DENSE)) == expected


def test_a_locked_clock_holds_inside_the_block_only() -> None:
    gpu = SimulatedGpu(A100)
    with locked_clock(gpu, 900):
        assert gpu.locked_mhz == 900
    assert gpu.locked_mhz is None


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_clocks_are_reset_when_the_block_raises(exception: type[BaseException]) -> None:
    gpu = SimulatedGpu(A100)
    with pytest.raises(exception), locked_clock(gpu, 900):
        raise exception
    assert gpu.locked_mhz is None


def test_clocks_are_reset_when_the_call_that_locks_them_is_interrupted() -> None:
    class Interrupted(SimulatedGpu):
        def set_clock_mhz(self, clock_mhz: int) -> None:
            super().set_clock_mhz(clock_mhz)
            raise KeyboardInterrupt

    gpu = Interrupted(A100)
    with pytest.raises(KeyboardInterrupt), locked_clock(gpu, 900):
        pass
    assert gpu.locked_mhz is None


@given(models, st.integers(), st.lists(st.tuples(works, st.integers(1, 4))))
def test_time_and_the_energy_counter_only_rise(model: GpuModel, seed: int, jobs: list[tuple[Work, int]]) -> None:
    gpu = SimulatedGpu(model, seed)
    for work, repetitions in jobs:
        for action in (partial(gpu.run, work, repetitions), partial(gpu.block, 0.1)):
            time_s, energy_j = spent(gpu, action)
            assert time_s > 0
            assert energy_j > 0


@given(models, works, st.integers(), st.data())
def test_average_power_lies_between_static_and_limit(
    model: GpuModel, work: Work, seed: int, data: st.DataObject
) -> None:
    gpu = SimulatedGpu(model, seed)
    gpu.set_clock_mhz(data.draw(st.sampled_from(model.clocks_mhz)))
    time_s, energy_j = spent(gpu, lambda: gpu.run(work, 3))
    assert model.static_power_w < energy_j / time_s <= model.power_limit_w * (1 + 1e-9)


def test_noise_does_not_lift_the_power_above_the_limit() -> None:
    at_limit = replace(A100, power_limit_w=A100.power_w(DENSE, 1200))
    gpu = SimulatedGpu(at_limit)
    time_s, energy_j = spent(gpu, lambda: gpu.run(DENSE, 100))
    assert at_limit.achieved_clock_mhz(DENSE, 1410) == 1200
    assert at_limit.power_limit_w * (1 - NOISE / 2) < energy_j / time_s < at_limit.power_limit_w * (1 - NOISE / 10)


@given(models, works, st.integers())
def test_noise_stays_within_its_bound(model: GpuModel, work: Work, seed: int) -> None:
    gpu = SimulatedGpu(model, seed)
    clock = model.achieved_clock_mhz(work, model.clocks_mhz[0])
    time_s, _ = spent(gpu, lambda: gpu.run(work))
    assert time_s == pytest.approx(model.time_s(work, clock), rel=NOISE * 1.001)


def test_equal_seeds_give_equal_numbers_and_others_do_not() -> None:
    first, again, other = SimulatedGpu(A100, 7), SimulatedGpu(A100, 7), SimulatedGpu(A100, 8)
    for gpu in (first, again, other):
        gpu.run(DENSE, 3)
        gpu.block(1.0)
    assert (first.now_s(), first.energy_j()) == (again.now_s(), again.energy_j())
    assert first.now_s() != other.now_s()
    assert first.energy_j() != other.energy_j()


@given(models, works)
def test_a_lower_clock_is_never_faster_and_never_draws_more(model: GpuModel, work: Work) -> None:
    clocks = achieved(model, work)
    for above, below in itertools.pairwise(clocks):
        assert model.time_s(work, above) <= model.time_s(work, below)
        assert model.power_w(work, above) >= model.power_w(work, below)


@given(models, works)
def test_the_clock_falls_only_as_far_as_the_power_limit_asks(model: GpuModel, work: Work) -> None:
    for requested, clock in zip(model.clocks_mhz, achieved(model, work), strict=True):
        assert model.power_w(work, clock) <= model.power_limit_w
        between = [c for c in model.clocks_mhz if clock < c <= requested]
        assert all(model.power_w(work, c) > model.power_limit_w for c in between)


def test_dense_work_has_a_plateau_on_top_and_memory_bound_work_has_none() -> None:
    assert len(set(achieved(A100, DENSE)[:8])) == 1
    assert achieved(A100, Work(flops=1e9, bytes=1e10)) == list(A100.clocks_mhz)


def test_memory_bound_work_hardly_slows_down_and_dense_work_does() -> None:
    slowdowns = [A100.time_s(work, 705) / A100.time_s(work, 1410) for work in (Work(1e9, 1e10), Work(1e13, 1e6))]
    assert slowdowns == pytest.approx([1.0, 2.0], rel=0.01)


def test_energy_is_least_at_the_voltage_ridge_for_dense_work() -> None:
    energies = {clock: A100.time_s(DENSE, clock) * A100.power_w(DENSE, clock) for clock in A100.clocks_mhz}
    assert min(energies, key=lambda clock: energies[clock]) == A100.ridge_mhz


@given(models)
def test_power_rises_more_steeply_above_the_ridge(model: GpuModel) -> None:
    powers = {clock: model.power_w(DENSE, clock) for clock in model.clocks_mhz}
    pairs = list(itertools.pairwise(model.clocks_mhz))
    slopes = {low: (powers[high] - powers[low]) / (high - low) for high, low in pairs}
    below = [slope for low, slope in slopes.items() if low < model.ridge_mhz]
    above = [slope for low, slope in slopes.items() if low >= model.ridge_mhz]
    assert min(above) > 2 * max(below)


def test_waiting_draws_the_blocking_power_at_any_clock() -> None:
    gpu = SimulatedGpu(A100)
    for clock in (1410, 210):
        with locked_clock(gpu, clock):
            time_s, energy_j = spent(gpu, lambda: gpu.block(2.0))
        assert time_s == pytest.approx(2.0)
        assert energy_j == pytest.approx(2.0 * A100.blocking_power_w, rel=NOISE * 1.001)


def test_work_adds_up() -> None:
    assert Work(1.0, 2.0) + Work(3.0, 5.0) * 2 == Work(7.0, 12.0)
