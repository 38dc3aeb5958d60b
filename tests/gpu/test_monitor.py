"""Windows of a `Monitor` say what GPUs used, and how wrong that may be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from queue import Queue
from random import Random
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from fake_nvml import StandIn
from waiting import LONG_S

from perseus_planner import Monitor
from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    UsageError,
)
from perseus_planner.gpu import Gpu, open_gpu
from perseus_planner.gpu.host import host_counters
from perseus_planner.gpu.monitor import GpuEnergy, PowerSample
from perseus_planner.gpu.protocol import RealGpu

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
    import zeus.monitor

    theirs = zeus.monitor.ZeusMonitor(gpu_indices=[0, 1])
    nvml.set("now_s", LATER_S)
    theirs.begin_window("window", sync_execution=False)
    monitor.begin_window("window")
    nvml.set("now_s", LATER_S + 12.34)
    ours = monitor.end_window("window")
    result = theirs.end_window("window", sync_execution=False)
    assert [gpu.energy_j for gpu in ours.gpus] == pytest.approx(
        [result.gpu_energy[0], result.gpu_energy[1]]
    )
    assert ours.energy_j == ours.total_energy == pytest.approx(result.total_energy)
    assert ours.gpu_energy == pytest.approx(result.gpu_energy)


def test_named_windows_begin_and_end_once(monitor: Monitor):
    monitor.begin_window("epoch")
    with pytest.raises(UsageError, match=r"^window 'epoch': has begun already; end it first$"):
        monitor.begin_window("epoch")
    monitor.end_window("epoch")
    with pytest.raises(UsageError, match=r"^window 'epoch': has not begun; begin and end each"):
        monitor.end_window("epoch")


def test_a_window_shorter_than_the_step_of_the_counter_says_so():
    with open_gpu("simulated:a100-sxm?step=0.1") as gpu, Monitor(gpu) as monitor:
        with monitor.window() as short:
            gpu.wait(0.05)
        with monitor.window() as long:
            gpu.wait(5.0)
        assert [window.gpus[0].is_resolved for window in (short, long)] == [False, True]
        assert short.error_j > 0


def test_a_window_reads_each_gpu_once_at_each_edge(nvml: StandIn, monitor: Monitor):
    """Its cost is that of two calls a GPU: 50 us of CPU with one, 220 us with eight."""
    nvml.fail("nvmlDeviceGetPowerUsage", 3)
    window = monitor.window().begin()
    nvml.fail("nvmlDeviceGetFieldValues", 3)
    assert window.end().energy_j >= 0  # nothing else was read


KILLED = """
import os, signal, sys
from perseus_planner import Monitor
monitor = Monitor("emulated:a100-sxm/73", log="windows.csv")
for name in ("first", "second"):
    monitor.begin_window(name)
    monitor.end_window(name)
monitor.begin_window("third")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_log_survives_sigkill(tmp_path: Path):
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
        assert killed.returncode == -9
    header, *rows = (tmp_path / "windows.csv").read_text().splitlines()
    assert header == "window,time (s),energy (J),energy of emulated:a100-sxm/73 (J)"
    assert [row.split(",")[0] for row in rows] == ["first", "second"] * 2
    assert all(float(row.split(",")[2]) >= 0 for row in rows)


def zone(folder: Path, name: str, what: str, energy_uj: int) -> Path:
    (folder / name).mkdir()
    (folder / name / "name").write_text(f"{what}\n")
    (folder / name / "max_energy_range_uj").write_text("1000000000\n")
    (folder / name / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / name / "energy_uj"


def test_the_host_is_measured_too(nvml: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PLANNER_POWERCAP", str(tmp_path))
    nvml.add("* power_w 300", "* energy_step_ms 100")
    with pytest.raises(GpuNotSupported, match="has no energy counters of processors"):
        Monitor("nvml:0", host=True)
    first = zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    memory = zone(tmp_path, "intel-rapl:0:0", "dram", 5_000_000)
    with Monitor("nvml:0", host=True) as monitor:
        nvml.set("now_s", LATER_S)
        window = monitor.window().begin()
        first.write_text("1000000")  # it began again: 2 J
        second.write_text("3000000")
        memory.write_text("6000000")
        nvml.set("now_s", LATER_S + 10)
        window.end()
    assert [(gpu.gpu, gpu.energy_j) for gpu in window.gpus[1:]] == [
        ("cpu", pytest.approx(5.0)),
        ("dram", pytest.approx(1.0)),
    ]
    assert window.energy_j == pytest.approx(3006.0)
    assert window.total_energy == pytest.approx(3000.0)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(GpuNotPermitted, match="may be read by root alone; run `chmod a"):
        host_counters()


def refused(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))


class Base:
    """What the callbacks of both libraries come from; they call each event that there is."""


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for transformers and lightning, as far as callbacks need them."""
    for name, attribute in (
        ("transformers", "TrainerCallback"),
        ("lightning", ""),
        ("lightning.pytorch", ""),
        ("lightning.pytorch.callbacks", "Callback"),
    ):
        module = ModuleType(name)
        if attribute:
            setattr(module, attribute, Base)
        monkeypatch.setitem(sys.modules, name, module)


def test_callbacks_log_the_energy(nvml: StandIn, libraries: None):
    from perseus_planner.gpu import lightning_callback, transformers_callback

    nvml.add("* power_w 300", "* energy_step_ms 100")
    hugging = transformers_callback.EnergyCallback("nvml:0")
    lightning = lightning_callback.EnergyCallback("nvml:0")
    lightning.setup(None, None, stage="fit")
    evaluated = {"eval_loss": 1.0}
    hugging.on_log(None, SimpleNamespace(log_history=[{}]), None, logs=evaluated)  # and before
    assert evaluated == {"eval_loss": 1.0}
    hugging.on_train_begin(None, None, None)
    nvml.set("now_s", LATER_S)
    hugging.on_log(None, SimpleNamespace(log_history=[{}]), None, logs={})
    state, logs = SimpleNamespace(log_history=[{"loss": 1.0}]), {"loss": 1.0}
    nvml.set("now_s", LATER_S + 10)
    hugging.on_log(None, state, None, logs=logs)
    hugging.on_train_end(None, None, None)
    hugging.on_log(None, state, None, logs={"eval_loss": 1.0})  # `Trainer.evaluate()`, afterwards
    assert logs == state.log_history[0]
    assert logs["energy_j"] == pytest.approx(3000.0)

    logged: dict[str, float] = {}
    lightning.on_train_epoch_start(None, None)
    nvml.set("now_s", LATER_S + 30)
    lightning.on_train_epoch_end(None, SimpleNamespace(log_dict=logged.update))
    lightning.teardown(None, None, stage="fit")
    assert logged["energy_j"] == pytest.approx(6000.0)


def test_a_monitor_that_is_not_strict_leaves_out_what_cannot_be_read(nvml: StandIn):
    nvml.add("* power_w 300", "* energy_step_ms 10")
    with Monitor(strict=False) as monitor:
        nvml.set("now_s", LATER_S)
        window = monitor.window().begin()
        nvml.set("now_s", LATER_S + 10)
        nvml.fail("*", 15, gpu=1)
        window.end()
    assert list(window.gpu_energy) == [0]
    assert window.energy_j == pytest.approx(3000.0)
    (why,) = window.unknown.values()
    assert "fallen off" in why


def test_the_log_of_windows_says_why_it_cannot_be_written(nvml: StandIn, tmp_path: Path):
    nvml.add("* energy_step_ms 10")
    with pytest.raises(UsageError, match=r"nowhere/log.csv: cannot be written: No such file"):
        Monitor("nvml:0", log=tmp_path / "nowhere" / "log.csv")
    with Monitor("nvml:0", log="/dev/null") as monitor:
        window = monitor.window().begin()
        assert monitor._log is not None
        monitor._log = (-1, "log.csv")
        with pytest.raises(UsageError, match=r"^log.csv: the log of windows cannot be written"):
            window.end()
    assert window.energy_j >= 0


class SteppedGpu(RealGpu):
    """A GPU whose time goes on by a step whenever its sensor is read."""

    text = uuid = "stepped:0"
    name = "stepped"

    def __init__(self, counter_w: float, sensor_w: Callable[[float], float]) -> None:
        self._time_s = 0.0
        self._counter_w = counter_w
        self._sensor_w = sensor_w

    def now_s(self) -> float:
        return self._time_s

    def wait(self, duration_s: float) -> None:
        self._time_s += max(duration_s, 0.01)

    def energy_j(self) -> float:
        return self._counter_w * self._time_s

    def power_w(self) -> float:
        self._time_s += 0.1
        return self._sensor_w(self._time_s)


def stepped_window(gpu: SteppedGpu, samples: int) -> GpuEnergy:
    seen: Queue[PowerSample] = Queue()
    with Monitor(cast("Gpu", gpu), sample_s=0.001, on_sample=seen.put) as monitor:
        window = monitor.window().begin()
        for _ in range(samples):
            seen.get(timeout=LONG_S)
        window.end()
    (energy,) = window.gpus
    assert window.warnings == energy.warnings
    return energy


def test_a_sensor_that_disagrees_is_said():
    """What ML.ENERGY's users saw of an idle GPU: 187 J by the counter, 327 J by the sensor."""
    energy = stepped_window(SteppedGpu(187 / 5, lambda _: 327 / 5), 60)
    (warning,) = energy.warnings
    assert "says 37.4 W on average and its power sensor 65.4 W, 43% apart" in warning
    assert energy.error_j == pytest.approx(28.0 * energy.time_s, rel=0.01)
    assert energy.sensor_w == pytest.approx(65.4)


def bursts(now_s: float) -> float:
    return 400.0 if now_s % 2.0 < 1.0 else 150.0


@pytest.mark.parametrize(
    ("counter_w", "sensor_w", "samples"),
    [
        (300.0, lambda _: 290.0, 200),
        (300.0, lambda _: 330.0, 200),
        (30.0, lambda _: 36.0, 200),
        (275.0, bursts, 200),
        (300.0, lambda _: 600.0, 20),  # too short to say
    ],
)
def test_sensors_as_they_are_raise_no_alarm(counter_w, sensor_w, samples: int):
    assert stepped_window(SteppedGpu(counter_w, sensor_w), samples).warnings == ()
