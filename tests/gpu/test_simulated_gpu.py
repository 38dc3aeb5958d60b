"""A simulated GPU follows its physics, the `Gpu` protocol and its options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.simulated.gpu import COUNTED, SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG, REFERENCE_C, GpuModel, Load, OpCost
from perseus_planner.gpu.simulated.options import SimulationOptions, format_options, parse_options

A100, H100 = CATALOG["a100-sxm"], CATALOG["h100-sxm"]
DENSE = OpCost(flops=1e13, bytes=1e9)
MEMORY = OpCost(flops=1e9, bytes=1e11)
EXACT = SimulationOptions(noise=0.0, step_s=0.0, drift=0.0)  # nothing but the physics

models = st.sampled_from(list(CATALOG.values()))
works = st.builds(OpCost, flops=st.floats(1e9, 1e14), bytes=st.floats(1e6, 1e11))
faults = st.sampled_from(
    [
        "not-permitted",
        "not-supported:energy",
        "lost@30s",
        "lost@7calls",
        "throttled@1s-2min",
        "counter-stuck@500ms",
    ]
)
conditions = st.builds(
    SimulationOptions,
    slower=st.floats(1e-3, 10),
    call_s=st.none() | st.floats(0, 1),
    noise=st.floats(0, 0.2),
    outliers=st.floats(0, 1),
    step_s=st.floats(0, 1),
    air_c=st.floats(0, 60),
    drift=st.floats(0, 3),
    fault=st.lists(faults, max_size=3).map(tuple),
)


def spent(gpu: SimulatedGpu, action: Callable[[], None]) -> tuple[float, float]:
    """Return the time and energy that `action` takes on `gpu`."""
    start_s, start_j = gpu.now_s(), gpu.energy_j()
    action()
    return gpu.now_s() - start_s, gpu.energy_j() - start_j


def opened(text: str) -> SimulatedGpu:
    with open_gpu(text) as gpu:
        assert isinstance(gpu, SimulatedGpu)
        return gpu


# Opening


def test_a_gpu_is_opened_by_its_text():
    with open_gpu("simulated:a100-sxm") as gpu:
        protocol: Gpu = gpu
        assert (protocol.name, protocol.origin) == ("simulated a100-sxm", "simulated")
        assert (protocol.text, protocol.uuid) == ("simulated:a100-sxm", "simulated-a100-sxm-seed-0")
        assert protocol.supported_clocks_mhz[:2] == (1410, 1395)
        assert protocol.supported_clocks_mhz[-1] == 210
        assert protocol.power_limits_w == (100.0, 400.0)
        assert protocol.power_limit_w() == 400.0
        assert not protocol.keeps_settings
        assert protocol.warnings() == ()


@pytest.mark.parametrize(
    "name",
    [
        *("v100", "a100-pcie", "a100-sxm", "a40", "l40s", "h100-sxm", "h200", "b200"),
        *("h100-nvl", "h20", "gb200", "b300", "gb300", "mi300x"),
    ],
)
def test_the_catalogue_has(name: str):
    assert opened(f"simulated:{name}").name == f"simulated {name}"


@given(st.sampled_from(list(CATALOG)), st.integers(-(10**6), 10**6), conditions)
def test_its_text_opens_an_equal_one(name: str, seed: int, options: SimulationOptions):
    gpu = SimulatedGpu(CATALOG[name], seed, options)
    again = opened(gpu.text)
    assert (again.model, again.seed, again.options) == (gpu.model, gpu.seed, gpu.options)
    assert parse_options(f"simulated:?{format_options(seed, options)}") == (seed, options)
    assert again.options.faults == gpu.options.faults


KNOWN = ", ".join(f"simulated:{name}" for name in CATALOG)
SHARE = "a noise: write a share from 0 to 0.2, such as 0.01"
NEEDS_DURATION = (
    "is not a duration: write seconds of 0 or more, or a number with us, ms, s, m, h "
    "or d, such as 1.5ms or 30m"
)
FAULTS = (
    "not-permitted, not-supported:energy, lost@30s, lost@200calls, throttled@30s-60s, "
    "counter-stuck@30s"
)


@pytest.mark.parametrize(
    ("which", "wrong"),
    [
        (
            "a100",
            "there is no simulated GPU 'a100'; did you mean simulated:a100-pcie or "
            "simulated:a100-sxm?",
        ),
        ("p4", f"there is no simulated GPU 'p4'; choose one of: {KNOWN}"),
        ("", f"there is no simulated GPU ''; choose one of: {KNOWN}"),
        (
            "v100?speed=3",
            "option 'speed' is unknown; choose from: seed, slower, call, noise, outliers, step, "
            "air, drift, fault",
        ),
        ("v100?", None),
        ("v100?noise", f"'' is not {SHARE}"),
        ("v100?noise=0.3", f"'0.3' is not {SHARE}"),
        ("v100?noise=nan", f"'nan' is not {SHARE}"),
        ("v100?noise=0&noise=0", "option 'noise' is repeated; write it once"),
        ("v100?seed=1.5", "'1.5' is not a seed: write a whole number, such as 3"),
        (
            "v100?outliers=2",
            "'2' is not a share of outliers: write a number from 0 to 1, such as 0.05",
        ),
        (
            "v100?air=61",
            "'61' is not an air temperature: write degrees Celsius from 0 to 60, such as 30",
        ),
        (
            "v100?drift=-1",
            "'-1' is not a multiple of the drift: write a number from 0 to 3, such as 0",
        ),
        (
            "v100?step=1 week",
            f"time: '1 week' {NEEDS_DURATION}",
        ),
        ("v100?fault=fire", f"fault 'fire' is unknown; write one of: {FAULTS}"),
        ("v100?fault=lost", f"fault 'lost' is unknown; write one of: {FAULTS}"),
        (
            "v100?fault=lost@soon",
            f"time: 'soon' {NEEDS_DURATION}",
        ),
        (
            "v100?fault=throttled@60s-30s",
            "fault 'throttled@60s-30s' ends before it begins; write the earlier time first",
        ),
        (
            "v100?fault=not-supported:fans",
            "fault 'not-supported:fans': 'fans' is unknown; write one of: clocks, power-limit, "
            "energy, power, temperature, throttle",
        ),
    ],
)
def test_what_cannot_be_opened_is_refused_with_what_can(which: str, wrong: str | None):
    if wrong is None:
        opened(f"simulated:{which}")
        return
    with pytest.raises(GpuError) as refusal:
        opened(f"simulated:{which}")
    assert str(refusal.value) == f"GPU 'simulated:{which}': {wrong}"


# Setting


def test_without_a_lock_the_highest_clock_runs():
    gpu = SimulatedGpu(A100, options=EXACT)
    gpu.set_clock_mhz(210)
    gpu.reset_clocks()
    gpu.wait(0.01)
    time_s, _ = spent(gpu, lambda: gpu.run(DENSE))
    assert time_s == pytest.approx(A100.load(DENSE).time_s(1410))


def test_setting_takes_as_long_as_was_measured():
    gpu = SimulatedGpu(A100)
    calls_ms = sorted(
        1e3 * spent(gpu, action)[0]
        for action in 1000 * [lambda: gpu.set_clock_mhz(900), gpu.reset_clocks]
    )
    assert calls_ms[1000] == pytest.approx(
        4.5, rel=0.15
    )  # few calls take about as long, so it is known the worst
    assert sum(calls_ms) / 2000 == pytest.approx(6.0, rel=0.05)
    assert calls_ms[1980] == pytest.approx(13.0, rel=0.05)


def test_the_clock_follows_a_little_after_the_call():
    gpu = SimulatedGpu(A100, options=EXACT)
    gpu.set_clock_mhz(1200)
    gpu.wait(1.0)
    gpu.set_clock_mhz(600)
    seen = []
    for _ in range(6):
        gpu.wait(2e-4)
        seen.append(gpu.clock_mhz())
    assert seen == [1200] * 4 + [600] * 2


# Measuring


@given(models, st.integers(), conditions, st.lists(st.tuples(works, st.integers(1, 4)), max_size=5))
def test_time_rises_and_the_energy_counter_never_falls(
    model: GpuModel, seed: int, options: SimulationOptions, jobs: list[tuple[OpCost, int]]
):
    gpu = SimulatedGpu(model, seed, replace(options, fault=()))
    for work, repetitions in jobs:
        for action in (
            partial(gpu.run, work, repetitions),
            partial(gpu.block, 0.1),
            partial(gpu.wait, 0.1),
        ):
            time_s, energy_j = spent(gpu, action)
            assert time_s > 0
            assert energy_j >= 0


@given(models, works, st.integers(), st.data())
def test_average_power_lies_between_static_and_limit(
    model: GpuModel, work: OpCost, seed: int, data: st.DataObject
):
    gpu = SimulatedGpu(model, seed, SimulationOptions(step_s=0.0, drift=0.0))
    gpu.set_clock_mhz(data.draw(st.sampled_from(model.clocks_mhz)))
    gpu.set_power_limit_w(limit_w := data.draw(st.floats(*model.power_limits_w)))
    gpu.wait(0.01)
    time_s, energy_j = spent(gpu, lambda: gpu.run(work, 3))
    assert model.static_power_w * (1 - 1e-9) < energy_j / time_s <= limit_w * (1 + 1e-9)


@given(models, works, st.data())
def test_without_noise_it_does_what_the_physics_say(
    model: GpuModel, work: OpCost, data: st.DataObject
):
    gpu, load = SimulatedGpu(model, options=EXACT), model.load(work)
    clock = data.draw(st.sampled_from(model.clocks_mhz))
    gpu.set_clock_mhz(clock)
    gpu.wait(0.01)
    time_s, energy_j = spent(gpu, lambda: gpu.run(work, 3))
    assert time_s == pytest.approx(3 * load.time_s(clock), rel=1e-6)
    assert energy_j == pytest.approx(3 * load.energy_j(clock), rel=1e-6)
    assert gpu.clock_mhz() == round(load.achieved_mhz(clock))
    assert gpu.throttle_reasons() == (
        {"sw-power-cap"} if load.achieved_mhz(clock) < clock else set()
    )


def test_a_load_runs_as_it_is_and_under_a_limit_that_is_set_too():
    load = Load(0.01, 50.0, 80.0, 0.1, 0.05, 900.0, 1e-3, power_limit_w=250.0)
    gpu = SimulatedGpu(A100, options=EXACT)
    assert spent(gpu, lambda: gpu.run(load, 10)) == pytest.approx(
        (10 * load.time_s(1410), 10 * load.energy_j(1410))
    )
    gpu.set_power_limit_w(150.0)
    gpu.wait(0.01)
    time_s, energy_j = spent(gpu, lambda: gpu.run(load, 10))
    assert time_s > 10 * load.time_s(1410)
    assert energy_j / time_s == pytest.approx(150.0, rel=1e-3)


def deviations(gpu: SimulatedGpu, repetitions: int, calls: int = 400) -> list[float]:
    """Return the relative deviations of times from those of the model."""
    once_s = gpu.model.load(MEMORY).time_s(1410)
    return [
        spent(gpu, lambda: gpu.run(MEMORY, repetitions))[0] / (repetitions * once_s) - 1
        for _ in range(calls)
    ]


@pytest.mark.parametrize(
    ("repetitions", "expected"), [(1, 0.01), (4, 0.005), (16, 0.0025), (400, 0.0025)]
)
def test_noise_falls_with_repetition_but_not_for_ever(repetitions: int, expected: float):
    found = deviations(SimulatedGpu(A100, options=SimulationOptions(drift=0.0)), repetitions)
    assert math.sqrt(sum(each**2 for each in found) / len(found)) == pytest.approx(
        expected, rel=0.15
    )
    assert max(map(abs, found)) <= 3 * expected


def test_noise_does_not_lift_the_power_above_the_limit():
    gpu = SimulatedGpu(A100, options=SimulationOptions(noise=0.05, step_s=0.0, drift=0.0))
    powers_w = []
    for _ in range(100):
        time_s, energy_j = spent(gpu, lambda: gpu.run(DENSE))
        powers_w.append(energy_j / time_s)
    assert max(powers_w) == pytest.approx(400.0)
    assert min(powers_w) < 390.0


def test_so_many_calls_are_outliers_as_were_asked_for():
    gpu = SimulatedGpu(A100, options=SimulationOptions(noise=0.0, outliers=0.1, drift=0.0))
    odd = [each for each in deviations(gpu, 1, calls=1000) if each > 1e-6]
    assert 70 <= len(odd) <= 130
    assert min(odd) >= 0.05 - 1e-9
    assert max(odd) <= 0.30


def test_equal_seeds_give_equal_numbers_and_others_do_not():
    first, again, other = SimulatedGpu(A100, 7), SimulatedGpu(A100, 7), SimulatedGpu(A100, 8)
    for gpu in (first, again, other):
        gpu.set_clock_mhz(900)
        gpu.run(DENSE, 3)
        gpu.block(1.0)
    assert (first.now_s(), first.energy_j()) == (again.now_s(), again.energy_j())
    assert first.now_s() != other.now_s()
    assert first.energy_j() != other.energy_j()


@given(st.permutations([(work, clock) for work in (DENSE, MEMORY) for clock in (1410, 900, 600)]))
def test_noise_follows_from_what_is_run_and_how_often_not_from_what_was_run_between(
    order: list[tuple[OpCost, int]],
):
    def measured(jobs: list[tuple[OpCost, int]]) -> dict[tuple[OpCost, int], tuple[float, float]]:
        gpu = SimulatedGpu(A100, 3, SimulationOptions(step_s=0.0, drift=0.0))
        found = {}
        for work, clock in jobs:
            gpu.set_clock_mhz(clock)
            gpu.wait(0.01)
            found[work, clock] = spent(gpu, lambda work=work: gpu.run(work, 2))  # type: ignore[misc]
        return found

    for job, numbers in measured(sorted(order, key=str)).items():
        assert measured(order)[job] == pytest.approx(numbers, rel=1e-9)


def test_the_energy_counter_moves_in_steps():
    gpu = opened("simulated:a100-sxm?step=100ms")
    shown = []
    for _ in range(1000):
        gpu.wait(1e-3)
        shown.append(gpu.energy_j())
    moved = [
        index for index, (before, after) in enumerate(itertools.pairwise(shown)) if after != before
    ]
    assert {second - first for first, second in itertools.pairwise(moved)} <= {99, 100, 101}
    assert len(moved) in (9, 10)
    assert shown[moved[5] + 1] - shown[moved[5]] == pytest.approx(0.1 * A100.idle_power_w)


@given(
    st.floats(0.01, 0.5),
    st.integers(0, 100),
    st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=10),
)
def test_the_energy_counter_is_never_more_than_a_step_behind(
    step_s: float, seed: int, waits_s: list[float]
):
    stepping = SimulatedGpu(A100, seed, SimulationOptions(step_s=step_s, drift=0.0))
    exact = SimulatedGpu(A100, seed, SimulationOptions(step_s=0.0, drift=0.0))
    for wait_s in waits_s:
        for gpu in (stepping, exact):
            gpu.block(wait_s)
        behind_j = exact.energy_j() - stepping.energy_j()
        assert -1e-9 <= behind_j <= step_s * 1.1 * A100.blocking_power_w


def test_an_a100_shows_the_power_of_the_moment_and_an_h100_the_average_of_a_second():
    a100, h100 = (SimulatedGpu(model, options=EXACT) for model in (A100, H100))
    for gpu in (a100, h100):
        gpu.block(5.0)
        gpu.wait(0.25)
    assert a100.power_w() == A100.idle_power_w
    assert h100.power_w() == pytest.approx(0.75 * H100.blocking_power_w + 0.25 * H100.idle_power_w)
    h100.wait(1.0)
    assert h100.power_w() == pytest.approx(H100.idle_power_w)


def test_it_warms_up_and_then_draws_more():
    gpu = SimulatedGpu(A100, options=SimulationOptions(noise=0.0, step_s=0.0, drift=1.0))
    cold_c = gpu.temperature_c()
    gpu.set_clock_mhz(900)
    windows_j = [spent(gpu, lambda: gpu.run(DENSE, 50))[1] for _ in range(50)]
    warm_c = gpu.temperature_c()
    assert cold_c == round(30.0 + A100.warming_k_per_w * A100.idle_power_w)
    assert warm_c == pytest.approx(30.0 + A100.warming_k_per_w * gpu.power_w(), abs=1.0)
    assert windows_j == sorted(windows_j)
    assert 1.005 < windows_j[-1] / windows_j[0] < 1.05
    gpu.wait(300.0)
    assert gpu.temperature_c() == cold_c


def test_a_gpu_in_hot_air_slows_down_so_that_it_gets_no_hotter():
    gpu = opened("simulated:a100-sxm?air=60&noise=0")
    hottest_c, reasons = 0.0, set()
    for _ in range(100):
        gpu.run(DENSE, 50)
        hottest_c = max(hottest_c, gpu.temperature_c())
        reasons |= gpu.throttle_reasons()
    assert A100.slowdown_c - 1 <= hottest_c <= A100.slowdown_c + 2
    assert reasons == {"sw-power-cap", "sw-thermal"}
    assert gpu.throttled_s()["sw-thermal"] > 0.5 * gpu.now_s()
    assert gpu.clock_mhz() < A100.load(DENSE).achieved_mhz(1410) - 100


def test_throttled_seconds_are_those_in_which_the_limit_held():
    gpu = SimulatedGpu(A100, options=EXACT)
    capped_s, _ = spent(gpu, lambda: gpu.run(DENSE, 10))
    gpu.run(MEMORY, 10)
    assert set(gpu.throttled_s()) == set(COUNTED)
    assert gpu.throttled_s()["sw-power-cap"] == pytest.approx(capped_s)
    assert gpu.throttle_reasons() == set()


def test_waiting_for_a_message_draws_a_little_less_at_a_lower_clock():
    gpu = SimulatedGpu(A100, options=EXACT)
    powers_w = {}
    for clock in (1410, 900, 210):
        gpu.set_clock_mhz(clock)
        gpu.wait(0.01)
        time_s, energy_j = spent(gpu, lambda: gpu.block(2.0))
        assert time_s == pytest.approx(2.0)
        powers_w[clock] = energy_j / time_s
    assert powers_w[1410] == pytest.approx(A100.blocking_power_w)
    assert A100.static_power_w < powers_w[210] < powers_w[900] < powers_w[1410]


# Faults


@pytest.mark.parametrize(
    "action",
    [
        lambda gpu: gpu.set_clock_mhz(900),
        lambda gpu: gpu.reset_clocks(),
        lambda gpu: gpu.set_power_limit_w(300.0),
        lambda gpu: gpu.reset_power_limit(),
    ],
)
def test_nothing_may_be_set_where_it_is_not_permitted(action: Callable[[SimulatedGpu], None]):
    gpu = opened("simulated:a100-sxm?fault=not-permitted")
    with pytest.raises(
        GpuNotPermitted, match="does not let this process set anything, as its fault says; open it"
    ):
        action(gpu)
    gpu.run(DENSE, 10)
    assert gpu.energy_j() > 0


READINGS: Mapping[str, Callable[[SimulatedGpu], object]] = {
    "clocks": lambda gpu: gpu.supported_clocks_mhz,
    "power-limit": lambda gpu: gpu.power_limits_w,
    "energy": lambda gpu: gpu.energy_j(),
    "power": lambda gpu: gpu.power_w(),
    "temperature": lambda gpu: gpu.temperature_c(),
    "throttle": lambda gpu: (gpu.throttle_reasons(), gpu.throttled_s()),
}


@pytest.mark.parametrize("missing", READINGS)
def test_what_is_not_supported_is_refused_and_nothing_else(missing: str):
    gpu = opened(f"simulated:a100-sxm?fault=not-supported:{missing}")
    for function, reading in READINGS.items():
        if function == missing:
            with pytest.raises(
                GpuNotSupported, match=f"does not support {missing}, as its fault says"
            ):
                reading(gpu)
        else:
            reading(gpu)


def test_a_gpu_is_lost_at_its_moment_even_in_the_middle_of_work():
    gpu = opened("simulated:a100-sxm?fault=lost@30s")
    gpu.run(DENSE, 100)
    with pytest.raises(
        GpuLost, match="simulated a100-sxm is lost: it fell off the bus, as its fault says"
    ):
        gpu.run(DENSE, 1000)
    assert gpu.now_s() == pytest.approx(30.0)
    for use in (
        *READINGS.values(),
        lambda gpu: gpu.run(DENSE),
        lambda gpu: gpu.wait(1.0),
        SimulatedGpu.reset_clocks,
    ):
        with pytest.raises(GpuLost):
            use(gpu)
    gpu.close()


def test_a_gpu_is_lost_after_so_many_calls():
    gpu = opened("simulated:a100-sxm?fault=lost@3calls")
    for _ in range(3):
        gpu.clock_mhz()
    with pytest.raises(GpuLost):
        gpu.clock_mhz()


def test_a_throttled_gpu_runs_slower_for_a_while_and_says_so():
    gpu = opened("simulated:a100-sxm?noise=0&drift=0&fault=throttled@30s-60s")
    gpu.set_clock_mhz(900)
    gpu.wait(0.01)
    free_s, _ = spent(gpu, lambda: gpu.run(DENSE, 10))
    gpu.wait(31.0 - gpu.now_s())
    slow_s, _ = spent(gpu, lambda: gpu.run(DENSE, 10))
    assert gpu.clock_mhz() == 630
    assert gpu.throttle_reasons() == {"hw-thermal"}
    assert slow_s / free_s == pytest.approx(
        A100.load(DENSE).time_s(630) / A100.load(DENSE).time_s(900)
    )
    assert gpu.throttled_s()["hw-thermal"] == pytest.approx(slow_s)
    gpu.run(DENSE, 1000)
    assert gpu.throttle_reasons() == set()
    assert gpu.throttled_s()["hw-thermal"] == pytest.approx(29.0, abs=0.1)
    assert gpu.clock_mhz() == 900


def test_a_stuck_counter_stands_still_from_its_moment_on():
    gpu = opened("simulated:a100-sxm?fault=counter-stuck@2s&step=0")
    gpu.block(1.0)
    assert gpu.energy_j() > 0
    gpu.block(1.5)
    stuck_j = gpu.energy_j()
    gpu.block(10.0)
    assert gpu.energy_j() == stuck_j
    assert stuck_j == pytest.approx(2.0 * A100.blocking_power_w, rel=0.1)


# Physics


@given(models, works)
def test_a_lower_clock_is_never_faster_and_never_draws_more(model: GpuModel, work: OpCost):
    load = model.load(work)
    clocks = [load.achieved_mhz(clock) for clock in model.clocks_mhz]
    for above, below in itertools.pairwise(clocks):
        assert load.free_time_s(above) <= load.free_time_s(below) * (1 + 1e-7)
        assert load.free_power_w(above) >= load.free_power_w(below) * (1 - 1e-7)


@given(models, works, st.data())
def test_the_clock_falls_only_as_far_as_the_power_limit_asks(
    model: GpuModel, work: OpCost, data: st.DataObject
):
    limit_w = data.draw(st.floats(*model.power_limits_w))
    load = replace(model.load(work), power_limit_w=limit_w)
    for clock in model.clocks_mhz:
        achieved = load.achieved_mhz(clock)
        assert load.free_power_w(achieved) <= limit_w
        assert achieved == clock or load.free_power_w(achieved + 1e-5 * clock) > limit_w


def test_dense_work_has_a_plateau_on_top_and_memory_bound_work_has_none():
    dense, memory = A100.load(DENSE), A100.load(MEMORY)
    assert len({round(dense.achieved_mhz(clock), 2) for clock in A100.clocks_mhz[:8]}) == 1
    assert [memory.achieved_mhz(clock) for clock in A100.clocks_mhz] == list(A100.clocks_mhz)


def test_memory_bound_work_hardly_slows_down_and_dense_work_does():
    loads = [A100.load(work) for work in (MEMORY, OpCost(1e13, 1e6))]
    slowdowns = [load.free_time_s(705) / load.free_time_s(1410) for load in loads]
    assert slowdowns == pytest.approx([1.0, 2.0], rel=0.01)


@given(models)
def test_energy_is_least_near_the_voltage_ridge_for_dense_work(model: GpuModel):
    best = min(model.clocks_mhz, key=model.load(DENSE).energy_j)
    assert best == pytest.approx(model.ridge_mhz, abs=15.0)


@given(models)
def test_power_rises_more_steeply_above_the_ridge(model: GpuModel):
    load = model.load(DENSE)
    slopes = {
        low: load.free_power_w(low + 1) - load.free_power_w(low)
        for low in range(900, model.clocks_mhz[0])
    }
    below = [slope for low, slope in slopes.items() if low + 1 < model.ridge_mhz]
    above = [slope for low, slope in slopes.items() if low >= model.ridge_mhz]
    assert min(above) > 2 * max(below)


@given(models)
def test_the_catalogue_is_sound(model: GpuModel):
    least_w, greatest_w = model.power_limits_w
    assert list(model.clocks_mhz) == sorted(set(model.clocks_mhz), reverse=True)
    assert model.idle_power_w < model.static_power_w < min(model.blocking_power_w, least_w)
    assert model.power_limit_w == greatest_w
    dense = model.load(OpCost(1e14, 0.0))
    assert 0.75 < dense.achieved_mhz(model.clocks_mhz[0]) / model.clocks_mhz[0] < 0.95
    assert 0 < REFERENCE_C < model.slowdown_c


def test_work_adds_up():
    assert OpCost(1.0, 2.0) + OpCost(3.0, 5.0) * 2 == OpCost(7.0, 12.0)


@given(models, works, st.floats(1e-3, 10), st.data())
def test_a_slowed_gpu_takes_so_many_times_as_long_at_the_same_power(
    model: GpuModel, work: OpCost, slower: float, data: st.DataObject
):
    clock = data.draw(st.sampled_from(model.clocks_mhz))
    spans = []
    for times in (1.0, slower):
        gpu = SimulatedGpu(model, options=replace(EXACT, slower=times))
        gpu.set_clock_mhz(clock)
        gpu.wait(0.01)
        spans.append(spent(gpu, lambda gpu=gpu: gpu.run(work)))  # type: ignore[misc]
    (plain_s, plain_j), (slow_s, slow_j) = spans
    assert slow_s == pytest.approx(slower * plain_s, rel=1e-6)
    assert slow_j == pytest.approx(slower * plain_j, rel=1e-6)


def test_a_slowed_gpu_does_not_pass_for_one_of_the_real_kind():
    plain, slowed = opened("simulated:a100-sxm"), opened("simulated:a100-sxm?slower=2000")
    assert slowed.text == "simulated:a100-sxm?slower=2000"
    assert (slowed.name, slowed.uuid) == (
        "simulated a100-sxm slower=2000",
        "simulated-a100-sxm-seed-0-slower-2000",
    )
    assert {plain.name, plain.uuid}.isdisjoint({slowed.name, slowed.uuid})


def test_a_call_takes_as_long_as_is_asked_for():
    gpu = opened("simulated:a100-sxm?call=20ms")
    assert spent(gpu, lambda: gpu.set_clock_mhz(900))[0] == pytest.approx(0.02)
    assert spent(gpu, gpu.reset_clocks)[0] == pytest.approx(0.02)
