"""The features of the stand-in for NVML that other tests rely on."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from fake_nvml import StandIn

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu import open_gpu


def test_settings_of_all_gpus_queue_behind_one_lock(nvml: StandIn):
    nvml.set("latency_us_nvmlDeviceSetGpuLockedClocks", 20_000)
    with open_gpu("nvml:0") as first, open_gpu("nvml:1") as second:
        threads = [
            threading.Thread(target=gpu.set_clock_mhz, args=(1200,)) for gpu in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    one, other = sorted(nvml.settings(), key=lambda setting: setting.ended_s)
    assert {one.gpu, other.gpu} == {0, 1}
    assert other.ended_s - one.ended_s >= 0.02


def test_a_process_killed_while_it_sets_a_clock_leaves_the_lock_to_others(nvml: StandIn):
    nvml.set("latency_us_nvmlDeviceSetGpuLockedClocks", 60_000_000, gpu=0)
    script = (
        "from perseus_planner.gpu import open_gpu\nwith open_gpu('nvml:0') as gpu: "
        "gpu.set_clock_mhz(1200)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd="/", env=nvml.environment()
    ) as killed:
        while nvml.calls("nvmlDeviceSetGpuLockedClocks", 0) == 0 and killed.poll() is None:
            pass
        killed.kill()
    with open_gpu("nvml:1") as gpu:
        gpu.set_clock_mhz(900)
    assert (nvml.locked_mhz(0), nvml.locked_mhz(1)) == (None, (900, 900))


def test_some_calls_can_be_made_to_fail(nvml: StandIn):
    with open_gpu("nvml:0") as gpu:
        gpu.temperature_c()
        nvml.fail("nvmlDeviceGetTemperatureV", 999, gpu=0, after=1, times=2)
        outcomes = []
        for _ in range(5):
            try:
                outcomes.append(gpu.temperature_c())
            except GpuError:
                outcomes.append(None)
        assert outcomes == [40.0, None, None, 40.0, 40.0]


def test_power_follows_the_lock_and_the_limit(nvml: StandIn):
    nvml.add("* idle_w 50", "* w_per_mhz 0.25")
    with open_gpu("nvml:0") as gpu:
        gpu.set_clock_mhz(1200)
        assert gpu.power_w() == 350.0
        gpu.set_power_limit_w(200.0)
        assert (gpu.clock_mhz(), gpu.power_w(), gpu.throttle_reasons()) == (
            600,
            200.0,
            {"sw-power-cap"},
        )
        gpu.reset_power_limit()
        gpu.reset_clocks()
        assert (gpu.clock_mhz(), gpu.power_w(), gpu.throttle_reasons()) == (
            1980,
            545.0,
            frozenset(),
        )


def test_energy_is_counted_through_a_change_of_the_clock_and_said_in_steps(nvml: StandIn):
    nvml.add("* idle_w 50", "* w_per_mhz 0.25", "* energy_step_ms 500", "* now_s 100")
    with open_gpu("nvml:0") as gpu:
        gpu.set_clock_mhz(1200)
        start_j = gpu.energy_j()
        readings = []
        for now_s in (100.4, 100.5, 100.9, 102):
            nvml.set("now_s", now_s)
            readings.append(gpu.energy_j() - start_j)
            if now_s == 102:
                gpu.set_clock_mhz(600)
        nvml.set("now_s", 103)
        readings.append(gpu.energy_j() - start_j)
    assert readings == pytest.approx([0.0, 175.0, 175.0, 700.0, 900.0])
