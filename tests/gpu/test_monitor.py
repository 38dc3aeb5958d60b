"""Windows of a `Monitor` say what GPUs used, and how wrong that may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from queue import Queue
from random import Random

import pytest
from fake_nvml import StandIn
from waiting import LONG_S

from perseus_planner import Monitor
from perseus_planner.base.errors import GpuError, GpuLost, UsageError
from perseus_planner.gpu.monitor import PowerSample

COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
#: far after now on any machine, so that the counter of the stand-in never goes back
LATER_S = 1_000_000_000


@pytest.fixture
def monitor(nvml: StandIn) -> Iterator[Monitor]:
    """Two GPUs of 300 W whose counters move every 100 ms."""
    nvml.add("* power_w 300", "* energy_step_ms 100")
    with closing(Monitor()) as opened:
        yield opened


def measured_j(
    nvml: StandIn, monitor: Monitor, begin_s: float, end_s: float
) -> tuple[float, float]:
    """Return the joules and their error of a window between two times of the stand-in."""
    nvml.set("now_s", begin_s)
    with monitor.window() as window:
        nvml.set("now_s", end_s)
    return window.energy_j, window.error_j


def test_the_energy_is_as_wrong_as_the_window_says_at_most(nvml: StandIn, monitor: Monitor):
    random, wrong = Random(1), []
    now_s = float(LATER_S)
    for _ in range(40):
        now_s, long_s = now_s + 1 + random.random(), random.uniform(0.05, 3)
        energy_j, error_j = measured_j(nvml, monitor, now_s, now_s + long_s)
        now_s += long_s
        wrong.append(abs(energy_j - 600 * long_s) / error_j)
    assert 0.3 < max(wrong) <= 1  # and the error is not stated far too large


def test_windows_nest_and_overlap(nvml: StandIn, monitor: Monitor):
    nvml.set("now_s", LATER_S)
    first, second = monitor.window("first"), monitor.window("second")
    with monitor.window("whole") as whole:
        first.begin()
        nvml.set("now_s", LATER_S + 10)
        second.begin()
        nvml.set("now_s", LATER_S + 20)
        first.end()
        nvml.set("now_s", LATER_S + 50)
        second.end()
    assert [window.energy_j for window in (first, second, whole)] == [600 * 20, 600 * 40, 600 * 50]
    assert [gpu.energy_j for gpu in whole.gpus] == [300 * 50] * 2
    assert {gpu.source for gpu in whole.gpus} == {"counter"}
    assert [gpu.gpu for gpu in whole.gpus] == list(monitor.gpus)


def test_a_gpu_without_a_counter_is_sampled(nvml: StandIn):
    without_counter(nvml, gpu=1)
    nvml.add("0 power_w 100", "1 power_w 250", "* energy_step_ms 10")
    samples: Queue[PowerSample] = Queue()
    with Monitor(["nvml:0", "nvml:1"], on_sample=samples.put, sample_s=0.005) as monitor:
        with monitor.window() as steady:
            wait_for_samples(samples)
        with monitor.window() as changing:
            wait_for_samples(samples)
            nvml.set("power_w", 350, gpu=1)
            wait_for_samples(samples)
    counted, sampled = steady.gpus
    assert (counted.source, sampled.source) == ("counter", "samples")
    assert sampled.energy_j == pytest.approx(250 * sampled.time_s)
    assert (sampled.error_j, sampled.peak_w, counted.peak_w) == (pytest.approx(0), 250, 100)
    assert sampled.average_w == pytest.approx(250)
    _, sampled = changing.gpus
    assert 250 < sampled.average_w < 350 == sampled.peak_w
    assert 0 < sampled.error_j < 50 * sampled.time_s
    assert changing.energy_j == sum(gpu.energy_j for gpu in changing.gpus)


def without_counter(nvml: StandIn, gpu: int | str = "*") -> None:
    """Let a GPU have no energy counter, neither as a function nor as a field."""
    nvml.fail(COUNTER, 3, gpu=gpu)
    nvml.fail("nvmlDeviceGetFieldValues", 3, gpu=gpu)


def wait_for_samples(samples: Queue[PowerSample]) -> None:
    """Return when both GPUs have been sampled several times more."""
    samples.queue.clear()
    for _ in range(16):
        samples.get(timeout=LONG_S)


def test_the_device_is_synchronised_only_where_that_is_asked_for(monitor: Monitor):
    edges = []
    with Monitor("nvml:0", synchronize=lambda: edges.append("edge")) as asked, asked.window():
        assert edges == ["edge"]
    assert edges == ["edge", "edge"]


def test_a_window_is_read_after_it_has_ended(monitor: Monitor):
    window = monitor.window("epoch")
    with pytest.raises(
        UsageError, match=r"^window 'epoch': has not begun; begin and end each window once$"
    ):
        window.end()
    with (
        window,
        pytest.raises(
            UsageError, match=r"^window 'epoch': has not ended; read it after its `with` block$"
        ),
    ):
        _ = window.energy_j
    with pytest.raises(UsageError, match=r"^window 'epoch': has ended already"):
        window.end()
    with pytest.raises(UsageError, match=r"^window 'epoch': has begun already"):
        window.begin()


def test_what_cannot_be_measured_is_an_error(nvml: StandIn):
    with pytest.raises(UsageError, match=r"^there is no GPU to measure; name one, such as nvml:0"):
        Monitor([])
    with Monitor("nvml:0") as monitor, monitor.window() as window:
        nvml.fail(COUNTER, 15)
        with pytest.raises(GpuLost):
            window.end()
        nvml.heal()
    without_counter(nvml)
    with Monitor("nvml:0", sample_s=0.005) as monitor:
        window = monitor.window().begin()
        nvml.fail("nvmlDeviceGetPowerUsage", 15)
        with pytest.raises(GpuLost):  # whoever samples first: the thread or the edge
            window.end()


def test_a_counter_that_goes_back_is_an_error(nvml: StandIn, monitor: Monitor):
    window = monitor.window().begin()
    nvml.set("energy_mj", 1000)
    with pytest.raises(GpuError, match="its energy counter went back from"):
        window.end()


def test_energy_is_that_of_zeus(nvml: StandIn, monitor: Monitor):
    zeus = pytest.importorskip("zeus.monitor", reason="zeus is not installed")
    theirs = zeus.ZeusMonitor(gpu_indices=[0, 1])
    nvml.set("now_s", LATER_S)
    theirs.begin_window("window", sync_execution=False)
    with monitor.window() as ours:
        nvml.set("now_s", LATER_S + 12.34)
    result = theirs.end_window("window", sync_execution=False)
    assert [gpu.energy_j for gpu in ours.gpus] == pytest.approx(
        [result.gpu_energy[0], result.gpu_energy[1]]
    )
    assert ours.energy_j == pytest.approx(result.total_energy)
