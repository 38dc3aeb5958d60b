"""Rows from windows between updates of the energy counter match what the GPU does."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import TypeVar

import numpy as np
import pytest
from gpu_groups import Member, measured_together
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_gpu import ReplayGpu
from strategies import soaks

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.monitor import EnergyCounter
from perseus_planner.gpu.sensor import MIN_SAMPLES
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import CATALOG, OpCost
from perseus_planner.gpu.simulated.options import SimulationOptions
from perseus_planner.profiler.row_meter import RowMeter
from perseus_planner.profiler.stage import SingleGpu
from perseus_planner.profiler.windows import Window, subtract, without_outliers
from perseus_planner.profiles.estimation import pooled_errors
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile

G = TypeVar("G", bound=ReplayGpu)
WORK = OpCost(flops=1e13, bytes=1e10)


def playing(
    time_s: float = 0.05,
    energy_j: float = 15.0,
    *,
    kind: type[G] = ReplayGpu,  # type: ignore[assignment]
    waiting_w: float = 80.0,
    **options: float,
) -> G:
    """Return a GPU that replays one row."""
    row = (Measurement(1410, time_s, energy_j),)
    return kind(Profile({(0, "F"): row, (0, "B"): row}, waiting_w), 0, **options)


def measuring(gpu: ReplayGpu, *, window_s: float = 5.0) -> RowMeter:
    return RowMeter(gpu, gpu.stage().synchronize, SingleGpu(), window_s, 0.0)


def row_of(gpu: ReplayGpu, **options: float) -> Measurement:
    return measuring(gpu, **options).measure_row(gpu.stage().runs["F"].run, 1410, Random(0))


def evidence_of(row: Measurement) -> Evidence:
    assert row.evidence is not None
    return row.evidence


@settings(max_examples=40)
@given(
    step_s=st.sampled_from((0.02, 0.1, 0.5)),
    time_s=st.sampled_from((0.001, 0.05, 0.1, 1.7)),
    power_w=st.floats(90, 700),
    seed=st.integers(0, 1000),
)
def test_the_interval_of_the_counter_costs_no_accuracy(
    step_s: float, time_s: float, power_w: float, seed: int
):
    row = row_of(playing(time_s, power_w * time_s, step_s=step_s, seed=seed))
    assert row.time_s == pytest.approx(time_s, rel=1e-9)
    # Readings at arbitrary times would be wrong by up to one interval: 0.4 to 10 % of the window.
    assert row.energy_j == pytest.approx(power_w * time_s, rel=4e-4)


class Lagging(ReplayGpu):
    """A GPU whose counter lags by 150 ms."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.shown = [(self._now_s, 0.0)]

    def energy_j(self) -> float:
        return next(
            energy_j
            for time_s, energy_j in reversed(self.shown)
            if time_s <= max(self._now_s - 0.15, 0.0) or time_s == self.shown[0][0]
        )

    def _spend(self, time_s: float, energy_j: float) -> None:
        super()._spend(time_s, energy_j)
        self.shown.append((self._now_s - self._now_s % self._step_s, self._shown_j))


def test_a_row_waits_for_a_counter_that_lags():
    assert row_of(playing(kind=Lagging)).energy_j == pytest.approx(15.0, rel=2e-3)


@pytest.mark.parametrize("step_s", [0.02, 0.1, 0.5])
def test_the_interval_of_the_counter_is_found(step_s: float):
    assert EnergyCounter(playing(step_s=step_s)).interval_s == pytest.approx(step_s, abs=2e-3)


def test_a_counter_that_stands_still_is_an_error():
    gpu = SimulatedGpu(CATALOG["a100-sxm"], options=SimulationOptions(fault=("counter-stuck@1s",)))
    with pytest.raises(GpuError, match=r"energy counter has stood at .* for 5 s.*planner doctor"):
        RowMeter(gpu, lambda: None, SingleGpu(), 5.0, 0.0).measure_row(
            lambda n: gpu.run(WORK, n), 1410, Random(0)
        )


def test_a_counter_that_goes_back_is_an_error(monkeypatch: pytest.MonkeyPatch):
    gpu = playing()
    readings = iter([5.0, 5.0, 4.0])
    monkeypatch.setattr(gpu, "energy_j", lambda: next(readings))
    with pytest.raises(GpuError, match=r"went back from 5 J to 4 J.*persistence mode"):
        EnergyCounter(gpu)


def test_a_stage_that_takes_no_time_is_an_error():
    gpu = playing()
    with pytest.raises(GpuError, match="takes no time"):
        measuring(gpu).measure_row(lambda n: None, 1410, Random(0))


@pytest.mark.parametrize(
    ("window_s", "step_s", "least_s"), [(5.0, 0.1, 5.0), (0.2, 0.1, 1.0), (1.0, 0.5, 5.0)]
)
def test_a_window_is_as_long_as_requested_and_at_least_ten_intervals(
    window_s: float, step_s: float, least_s: float
):
    gpu = playing(step_s=step_s)
    meter = measuring(gpu, window_s=window_s)
    calls: list[int] = []

    def run(repetitions: int) -> None:
        calls.append(repetitions)
        gpu.stage().runs["F"].run(repetitions)

    meter.measure_row(run, 1410, Random(0))
    assert sum(calls[-4:]) * 0.05 == pytest.approx(least_s, abs=0.051)


class Queueing(ReplayGpu):
    """A GPU that runs what is launched while the host waits or synchronises."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.left: list[list[float]] = []  #: seconds, watts
        self.sampled: list[float] = []  #: seconds of work that were left when the clock was read
        self.synchronised = 0

    def _run(self, kind: str, repetitions: int) -> None:
        row = self._rows[kind][1410]
        self.left.append([repetitions * row.time_s, row.energy_j / row.time_s])

    def _synchronize(self) -> None:
        self.synchronised += 1
        for time_s, power_w in self.left:
            self._spend(time_s, power_w * time_s)
        self.left = []

    def wait(self, duration_s: float) -> None:
        while self.left and duration_s > 0:
            piece_s = min(self.left[0][0], duration_s)
            self._spend(piece_s, self.left[0][1] * piece_s)
            self.left[0][0] -= piece_s
            duration_s -= piece_s
            if self.left[0][0] <= 1e-12:
                self.left.pop(0)
        if duration_s > 0:
            super().wait(duration_s)

    def clock_mhz(self) -> int:
        self.sampled.append(sum(time_s for time_s, _ in self.left))
        return 1410


def test_a_gpu_that_lags_behind_the_host_is_sampled_while_it_works_and_never_idles():
    gpu = playing(kind=Queueing)
    measured = row_of(gpu)
    assert measured.time_s == pytest.approx(0.05, rel=1e-9)
    assert measured.energy_j == pytest.approx(15.0, rel=4e-4)
    assert len(gpu.sampled) == 4 * evidence_of(measured).windows
    assert all(0.3 < left_s < 1.0 for left_s in gpu.sampled)  # half of a part of 1.25 s


def test_the_device_is_synchronised_at_the_edges_of_windows_only():
    gpu = playing(kind=Queueing)
    meter = measuring(gpu)
    meter.heat(gpu.stage().runs["F"].run)
    before = gpu.synchronised
    meter._measure_energy(lambda: gpu.stage().runs["F"].run(100), 0.5)
    assert gpu.synchronised - before == 2


class Cooling(ReplayGpu):
    """A GPU that draws less the longer it rests, and is hot at first if a test says so."""

    rested_s = hot_for_s = 0.0

    def wait(self, duration_s: float) -> None:
        self.rested_s += duration_s
        self._spend(duration_s, (80.0 + 100.0 * math.exp(-self.rested_s / 20.0)) * duration_s)

    def temperature_c(self) -> float:
        return 90.0 if self.rested_s < self.hot_for_s else 50.0


@pytest.mark.parametrize("what", ["heating", "cooling down"])
def test_what_the_gpu_does_between_two_windows_is_in_neither(what: str):
    gpu = playing(kind=Cooling, waiting_w=100.0)
    stage = gpu.stage()
    run = stage.runs["F"].run
    meter = RowMeter(gpu, stage.synchronize, SingleGpu(), 5.0, 120.0)
    meter.heat(run)
    meter.measure_row(run, 1410, Random(0))
    if what == "heating":
        meter.heat(run)
    else:
        gpu.rested_s, gpu.hot_for_s = 0.0, 60.0
        meter.cool_down()
        assert gpu.temperature_c() == 50.0
    assert meter.measure_blocking_w(stage.block) == pytest.approx(100.0, rel=1e-3)


def test_windows_begin_at_other_phases_of_the_counter_and_again_at_the_same_for_the_same_seed():
    def phases(seed: int) -> list[float]:
        gpu = playing()
        begins: list[float] = []
        meter = measuring(gpu)

        def run(repetitions: int) -> None:
            begins.append(gpu.now_s() % 0.1)
            gpu.stage().runs["F"].run(repetitions)

        meter.measure_row(run, 1410, Random(seed))
        return begins[-12::4]

    first, again, other = phases(1), phases(1), phases(2)
    assert first == again
    assert first != other
    assert min(abs(one - two) for one, two in pairwise(sorted(first))) > 1e-3


@pytest.mark.parametrize("noise", [0.001, 0.003, 0.005, 0.01, 0.02])
def test_the_truth_is_within_two_standard_errors_that_rows_share_in_95_percent(noise: float):
    rows = [row_of(playing(noise=noise, seed=seed)) for seed in range(400)]
    assert all(3 <= evidence_of(row).windows <= 12 for row in rows)
    for quantity, truth in (("time_s", 0.05), ("energy_j", 15.0)):
        error, (variances,) = pooled_errors([rows], quantity)
        assert error is not None
        deviations = [getattr(row, quantity) / truth - 1 for row in rows] / np.sqrt(variances)
        assert 0.93 <= np.mean(np.abs(deviations) <= 2 * error) <= 0.97
        assert error == pytest.approx(np.sqrt(np.mean(deviations**2)), rel=0.1)


@pytest.mark.parametrize("seed", [0, *soaks(*range(1, 5))])
def test_outliers_are_left_out(seed: int):
    row = row_of(playing(noise=0.002, outliers=0.15, seed=seed))
    assert row.time_s == pytest.approx(0.05, rel=0.005)
    assert row.energy_j == pytest.approx(15.0, rel=0.005)


def test_windows_that_differ_by_little_are_not_outliers():
    windows = [
        Window(time_s, 1.0, 1410, 50, 0, frozenset()) for time_s in (1.0, 1.0, 1.0, 1.005, 1.3)
    ]
    assert without_outliers(windows) == windows[:4]


def hot(*spans: str) -> SimulatedGpu:
    faults = tuple(f"throttled@{span}" for span in spans)
    return SimulatedGpu(
        CATALOG["a100-sxm"], options=SimulationOptions(noise=0, drift=0, fault=faults)
    )


def row_on(gpu: SimulatedGpu, work: OpCost = WORK) -> Measurement:
    gpu.set_clock_mhz(1110)
    return RowMeter(gpu, lambda: None, SingleGpu(), 5.0, 5.0).measure_row(
        lambda n: gpu.run(work, n), 1110, Random(0)
    )


def test_windows_in_which_the_gpu_was_too_hot_are_measured_again():
    cool, was_hot = row_on(hot()), row_on(hot("6s-20s"))
    assert was_hot.time_s == pytest.approx(cool.time_s, rel=1e-6)
    assert evidence_of(was_hot).throttle == evidence_of(cool).throttle == ()


def test_a_row_of_a_gpu_that_is_always_too_hot_names_the_reason():
    row = row_on(hot("0s-1000s"))
    assert "hw-thermal" in evidence_of(row).throttle
    assert row.time_s > 1.2 * row_on(hot()).time_s


def test_a_power_cap_is_recorded_and_accepted():
    gpu = SimulatedGpu(CATALOG["a100-sxm"], options=SimulationOptions(noise=0, drift=0))
    row = RowMeter(gpu, lambda: None, SingleGpu(), 5.0, 5.0).measure_row(
        lambda n: gpu.run(WORK, n), 1410, Random(0)
    )
    evidence = evidence_of(row)
    assert evidence.throttle == ("sw-power-cap",)
    assert evidence.windows == 3
    assert evidence.achieved_mhz < 1400


def test_a_hot_gpu_cools_down_for_a_limited_time(monkeypatch: pytest.MonkeyPatch):
    gpu = playing()
    meter = RowMeter(gpu, gpu.stage().synchronize, SingleGpu(), 5.0, 3.0)
    temperatures = iter([60.0, 58.0, 54.0])
    monkeypatch.setattr(gpu, "temperature_c", lambda: next(temperatures))
    begin_s = gpu.now_s()
    meter.cool_down()
    assert gpu.now_s() - begin_s == pytest.approx(1.0)
    monkeypatch.setattr(gpu, "temperature_c", lambda: 90.0)
    meter.cool_down()
    assert gpu.now_s() - begin_s == pytest.approx(4.0)


def test_the_gpu_is_warm_before_the_first_row():
    gpu = SimulatedGpu(CATALOG["a100-sxm"])
    meter = RowMeter(gpu, lambda: None, SingleGpu(), 5.0, 5.0)
    cold_c = gpu.temperature_c()
    meter.heat(lambda n: gpu.run(WORK, n))
    warm_c = gpu.temperature_c()
    gpu.run(WORK, 100)
    assert warm_c > cold_c + 10
    assert gpu.temperature_c() <= warm_c + 3


def test_subtracted_rows_add_their_errors_in_quadrature():
    both = Measurement(1410, 0.15, 40.0, Evidence(1400, 3e-4, 0.03, 4, 60, ("sw-power-cap",)))
    one = Measurement(1410, 0.05, 15.0, Evidence(1405, 4e-4, 0.04, 3, 55, ("hw-thermal",)))
    rest = subtract(both, one)
    assert (rest.clock_mhz, rest.time_s, rest.energy_j) == (
        1410,
        pytest.approx(0.10),
        pytest.approx(25.0),
    )
    evidence = evidence_of(rest)
    assert evidence.time_stderr_s == pytest.approx(5e-4)
    assert evidence.energy_stderr_j == pytest.approx(0.05)
    assert evidence.throttle == ("sw-power-cap", "hw-thermal")
    with pytest.raises(GpuError, match="nothing else run"):
        subtract(one, both)


@given(st.floats(-1.5, 1.5), st.floats(-1.5, 1.5))
def test_a_difference_within_its_errors_is_next_to_nothing(times: float, energies: float):
    evidence = Evidence(1400, 3e-4, 0.03, 4, 60, ())
    one = Measurement(1410, 0.05, 15.0, evidence)
    both = Measurement(1410, 0.05 + times * 3e-4, 15.0 + energies * 0.03, evidence)
    rest = subtract(both, one)
    assert 0 < rest.time_s <= 1.5 * 3e-4
    assert rest.energy_j > 0
    assert rest.power_w >= both.power_w * (1 - 1e-9)  # a GPU that computes draws no less


def measure_counted(gpu: ReplayGpu, member: Member) -> tuple[Measurement, list[int]]:
    """Return the row of a group, and how often the computation was repeated in each call."""
    calls: list[int] = []

    def run(repetitions: int) -> None:
        calls.append(repetitions)
        gpu.stage().runs["F"].run(repetitions)

    meter = RowMeter(gpu, gpu.stage().synchronize, member, 5.0, 0.0)
    return meter.measure_row(run, 1410, Random(0)), calls


def test_a_group_takes_the_time_of_its_slowest_gpu_and_the_energy_of_all():
    gpus = [playing(0.05, 15.0), playing(0.06, 12.0, step_s=0.5), playing(0.04, 20.0, noise=0.004)]
    first, second, third = measured_together(measure_counted, gpus)
    assert first == second == third
    row, _ = first
    assert {evidence_of(each) for each, _ in (first, second, third)} == {evidence_of(row)}
    assert row.time_s == pytest.approx(0.06, rel=1e-9)
    assert row.energy_j == pytest.approx(47.0, rel=0.005)


@pytest.mark.parametrize(
    ("times_s", "slow", "time_s"),
    [
        pytest.param([0.05, 0.06], {1: 0.2}, 0.06, id="of two neither is known to be right"),
        pytest.param([0.05, 0.05, 0.06], {2: 0.2}, 0.05, id="a straggler is left out"),
        pytest.param([0.05, 0.0502, 0.0504], {}, 0.0504, id="sound GPUs differ"),
        pytest.param([0.04, 0.05, 0.06, 0.07], {}, 0.07, id="as far apart as all are"),
    ],
)
def test_replicas_give_the_time_of_the_slowest_and_their_mean_energy(
    times_s: list[float], slow: dict[int, float], time_s: float
) -> None:
    """Replicas are pairs of GPUs of 15 J, 21 J and so on."""

    def measure(gpu: ReplayGpu, member: Member) -> tuple[Measurement, dict[int, float]]:
        meter = RowMeter(gpu, gpu.stage().synchronize, member, 5.0, 0.0)
        return meter.measure_row(gpu.stage().runs["F"].run, 1410, Random(0)), meter.slow

    gpus = [
        playing(each_s, 7.5 + 3.0 * number)
        for number, each_s in enumerate(times_s)
        for _ in range(2)
    ]
    rows = measured_together(measure, gpus, len(times_s))
    assert len({repr(row) for row in rows}) == 1
    row, found = rows[0]
    assert row.time_s == pytest.approx(time_s, rel=1e-6)
    assert found == {replica: pytest.approx(share, rel=1e-3) for replica, share in slow.items()}
    kept = [15.0 + 6.0 * n for n in range(len(times_s)) if n not in slow or len(times_s) == 2]
    assert row.energy_j == pytest.approx(fmean(kept), rel=0.005)


def test_an_outlier_on_one_gpu_is_an_outlier_of_the_group():
    gpus = [playing(0.05, 15.0), playing(0.05, 15.0, outliers=0.2, seed=4)]
    (row, calls), (_, others) = measured_together(measure_counted, gpus)
    assert calls == others != []
    assert row.energy_j == pytest.approx(30.0, rel=0.01)


class Queued(ReplayGpu):
    """A GPU of 300 W to which work is launched ahead; its sensor shows a share of the power."""

    share = 1.0
    _left_s = 0.0

    def launch(self, repetitions: int) -> None:
        self._left_s += 0.05 * repetitions

    def wait(self, duration_s: float) -> None:
        working_s = min(duration_s, self._left_s)
        self._work(working_s)
        super().wait(duration_s - working_s)

    def finish(self) -> None:
        self._work(self._left_s)

    def power_w(self) -> float:
        return self.share * 300.0 if self._left_s > 0 else super().power_w()

    def _work(self, time_s: float) -> None:
        self._spend(time_s, 300.0 * time_s)
        self._left_s -= time_s


@pytest.mark.parametrize(("share", "said"), [(0.57, "43% apart"), (0.93, None), (1.0, None)])
def test_a_row_whose_counter_and_sensor_disagree_is_said(share: float, said: str | None):
    gpu = playing(kind=Queued)
    gpu.share = share
    meter = RowMeter(gpu, gpu.finish, SingleGpu(), 5.0, 0.0)
    row = meter.measure_row(gpu.launch, 1410, Random(0))
    assert row.energy_j == pytest.approx(15.0, rel=1e-3)
    assert len(meter._powers_w) >= MIN_SAMPLES
    texts = list(meter.disagreements.values())
    assert len(texts) == (said is not None)
    assert all(said in text for text in texts if said is not None)


def test_a_gpu_that_idles_when_it_is_sampled_raises_no_alarm():
    """Simulated GPUs and whoever waits for the GPU in each computation."""
    gpu = playing()
    meter = measuring(gpu)
    meter.measure_row(gpu.stage().runs["F"].run, 1410, Random(0))
    assert meter.disagreements == {}
