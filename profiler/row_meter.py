"""Measure one row of a profile: a computation repeated in windows at the current setting of the
GPU. What windows tell together is in `windows.py`.

This follows the good practice of Yang et al., "Accurate and Convenient Energy Measurements for
GPUs" (SC'24): warm up, use windows of seconds, begin each at another phase of the power sensor,
repeat, and watch the temperature. The device is synchronised only at the edges of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu.monitor import EnergyCounter, RestingReading
from perseus_planner.gpu.sensor import (
    AVERAGING_S,
    MIN_SAMPLES,
    apart_w,
    chance_w,
    disagreement_text,
)
from perseus_planner.profiler.windows import (
    MIN_WINDOWS,
    Window,
    combine,
    is_enough,
    mean_of,
    slow_replicas,
    without_outliers,
)

if TYPE_CHECKING:
    from random import Random

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.stage import Block, GpuGroup, Run
    from perseus_planner.profiles.measurement import Measurement

_MIN_INTERVALS = 10  #: a window lasts at least this many intervals of the counter
_MIN_REPETITIONS = 3
#: the repetitions of a window are launched in parts, and the GPU is sampled in the middle of each
_PARTS = 4
#: of the expected time: below, the GPU had ended all parts when the last one was sampled
_BUSY = 0.9
_WARM_UP = 0.1  #: a chunk of the warm-up lasts this fraction of a window
_STABLE = 0.02  #: the warm-up ends when two chunks differ by less
_MAX_CHUNKS = 20
_MAX_WINDOWS = 12
_MAX_REJECTED = 5
#: a throttle reason is reported if it held for more than this fraction of a window
_THROTTLED = 0.01
_MAX_HEATING = 12  #: windows that heat the GPU before the first row
_HEATED_C = 1.0  #: heating ends with a window that warms the GPU by no more
_COOL_C = 5.0  #: a GPU is cool when it is no more than this warmer than after heating
_POLL_S = 0.5


class RowMeter:
    """Measures rows on one GPU, in step with all GPUs that hold its stage.

    The caller sets the clock or the power limit that a row is measured at.

    Attributes:
        counter: The energy counter.
        window_s: The length of a window, seconds.
        achieved_mhz: The mean SM clock of this GPU while the last row was measured; 0 before the
            first.
        spreads: How far the replicas were apart in each row, a relative standard deviation; empty
            if there is one.
        slow: Slow replica -> by which share it was slower at most, see `slow_replicas`.
        disagreements: GPU of the group -> how far its energy counter and its power sensor were
            apart in a row, in words.

    Args:
        gpu: The GPU.
        synchronize: Returns when the GPU has finished everything that was launched.
        group: The GPUs that measure in step. They decide together which windows count and how many
            there are.
        window_s: The minimum length of a window, seconds. It is raised to ten intervals of the
            energy counter.
        cool_down_s: The longest wait for the GPU to cool down, seconds.

    Raises:
        GpuError: If the energy counter cannot be used.
    """

    def __init__(
        self,
        gpu: Gpu,
        synchronize: Callable[[], None],
        group: GpuGroup,
        window_s: float,
        cool_down_s: float,
    ) -> None:
        self._gpu = gpu
        self._synchronize = synchronize
        self._group = group
        self._cool_down_s = cool_down_s
        self._heated_c = gpu.temperature_c()
        self.achieved_mhz = 0.0
        self.spreads: list[float] = []
        self.slow: dict[int, float] = {}
        self.disagreements: dict[str, str] = {}
        self._powers_w: list[tuple[float, float]] = []  #: by counter and sensor, in this row
        #: after the last window, as long as nothing has run since
        self._rest: RestingReading | None = None
        self.counter = EnergyCounter(gpu)
        self.window_s = max(group.gather(max(window_s, _MIN_INTERVALS * self.counter.interval_s)))

    def heat(self, run: Run) -> None:
        """Run until the GPU gets no warmer, for a limited time.

        Training runs on a warm GPU, which draws more than a cool one and is slower under a power
        cap; and rows must be comparable. `cool_down` goes back to the temperature that is reached
        here.

        Raises:
            GpuError: If the GPU cannot be read, or `run` takes no time.
        """
        # All GPUs of the group repeat as often, or their collectives would not meet.
        repetitions = math.ceil(self.window_s / max(self._group.gather(self._warm_up(run))))
        for _ in range(_MAX_HEATING):
            before_c = self._gpu.temperature_c()
            self._time(run, repetitions)
            self._heated_c = self._gpu.temperature_c()
            if max(self._group.gather(self._heated_c - before_c)) <= _HEATED_C:
                break

    def measure_row(self, run: Run, setting: int | None, random: Random) -> Measurement:
        """Measure `run` at the current setting.

        Windows are measured until three or more agree; those far from the median are left out. A
        window in which the GPU was throttled by heat is measured again after a cool-down. If too
        few others can be had, such windows count, and the row's evidence names the reason: training
        would be throttled too.

        Args:
            run: The computation.
            setting: The clock in MHz or power limit in watts that is set. None if nothing is set:
                the row then gets the clock that was achieved.
            random: Draws when windows begin. It must be in the same state on all GPUs of the group.

        Raises:
            GpuError: If the GPU cannot be read, or `run` takes no time.
        """
        time_s = self._warm_up(run)
        repetitions = max(
            _MIN_REPETITIONS, math.ceil(self.window_s / max(self._group.gather(time_s)))
        )
        measured: list[list[Window]] = []  # of each replica
        slow: dict[int, float] = {}
        accepted: list[Window] = []
        rejected: list[Window] = []
        clocks_mhz: list[float] = []
        self._powers_w = []
        # All GPUs decide by the same gathered windows, so they leave this loop together.
        while len(accepted) < _MAX_WINDOWS and len(rejected) <= _MAX_REJECTED:
            windows, own_window = self._measure_window(run, repetitions, time_s, random.random())
            clocks_mhz.append(own_window.achieved_mhz)
            # The least time so far tells best when the GPU is in the middle of its work.
            time_s = min(time_s, own_window.time_s)
            measured.append(windows)
            # Who is slow is judged anew with each window, also for those before.
            slow = slow_replicas(measured)
            together = self._combine(measured, slow)
            accepted = [window for window in together if window.is_comparable]
            rejected = [window for window in together if not window.is_comparable]
            # A hot GPU only gets another hot window without a pause.
            if together[-1].is_throttled:
                self.cool_down()
            if is_enough(without_outliers(accepted)):
                break
        self.achieved_mhz = fmean(clocks_mhz)
        self._note_replicas(measured, slow)
        for disagreement in self._group.gather(self._disagreement()):
            if disagreement is not None:
                self.disagreements.setdefault(*disagreement)
        # Too few good windows: hot ones count as well, and the evidence names the reason.
        enough = accepted if len(accepted) >= MIN_WINDOWS else accepted + rejected
        return mean_of(without_outliers(enough), setting)

    def measure_blocking_w(self, block: Block | None) -> float | None:
        """Measure the power of a replica's GPUs while they are blocked on their neighbours, watts
        in all.

        A GPU that waits in a receive is not idle: the kernel that polls for the message keeps the
        clock up, so the power depends on the clock too.

        Args:
            block: Blocks this GPU; None if the stage has no neighbour, and then nothing is
                measured.

        Raises:
            GpuError: If the energy counter cannot be used.
        """
        if block is None:
            return None
        # The wait lasts one window, and begins at an update of the counter.
        time_s, energy_j = self._measure_energy(partial(block, self.window_s), 0.0)
        return self._of_replica(energy_j / time_s)

    def measure_rest_w(self) -> float:
        """Measure the power of a replica's GPUs at rest, watts in all."""
        return self._of_replica(self.counter.wait_for_rest().rest_w)

    def cool_down(self) -> None:
        """Wait until the GPU is about as cool as after `heat`, for a limited time."""
        give_up_s = self._gpu.now_s() + self._cool_down_s
        self._rest = None  # a cooling GPU draws less and less
        # Not as cool as at rest: rows are those of a GPU as warm as training leaves it.
        while (
            self._gpu.now_s() < give_up_s and self._gpu.temperature_c() > self._heated_c + _COOL_C
        ):
            self._gpu.wait(min(_POLL_S, self._cool_down_s))

    def _of_replica(self, power_w: float) -> float:
        """Return the power of a replica's GPUs, watts in all, in the mean of the replicas."""
        return math.fsum(self._group.gather(power_w)) / len(self._group.replicas)

    def _combine(
        self, measured: Sequence[Sequence[Window]], slow: Mapping[int, float]
    ) -> list[Window]:
        """Return the windows of the stage: without slow replicas, unless there are only two, of
        which neither is known to be right.
        """
        replicas = range(len(self._group.replicas))
        kept = [replica for replica in replicas if len(replicas) == 2 or replica not in slow]
        return [combine([windows[replica] for replica in kept], len(kept)) for windows in measured]

    def _note_replicas(
        self, measured: Sequence[Sequence[Window]], slow: Mapping[int, float]
    ) -> None:
        """Note how far the replicas were apart in a row, and which of them were slow."""
        if len(self._group.replicas) > 1:
            times_s = [
                fmean(window.time_s for window in windows_of)
                for windows_of in zip(*measured, strict=True)
            ]
            self.spreads.append(stdev(times_s) / fmean(times_s))
        for replica, share in slow.items():
            self.slow[replica] = max(share, self.slow.get(replica, 0.0))

    def _disagreement(self) -> tuple[str, str] | None:
        """Return this GPU, and how far its counter and its sensor were apart in the row; None if
        they agree, or too little is known.
        """
        if len(self._powers_w) < MIN_SAMPLES:
            return None
        # Two meters of one power should agree, but for chance.
        counter_w = fmean(by_counter for by_counter, _ in self._powers_w)
        by_sensor = [sensor_w for _, sensor_w in self._powers_w]
        sensor_w = fmean(by_sensor)
        if not apart_w(counter_w, sensor_w, chance_w(stdev(by_sensor), len(by_sensor))):
            return None
        return self._gpu.text, disagreement_text(self._gpu.text, counter_w, sensor_w)

    def _power_w(self) -> float | None:
        try:
            return self._gpu.power_w()
        except GpuNotSupported:
            return None

    def _warm_up(self, run: Run) -> float:
        """Run until the time of a repetition is stable on all GPUs of the group; return it for
        this GPU, seconds.
        """
        before_s = math.inf
        repetitions = 1
        for _ in range(_MAX_CHUNKS):
            own_s = self._time(run, repetitions)
            # The slowest GPU counts, so that all of the group repeat as often.
            chunk_s = max(self._group.gather(own_s))
            if chunk_s <= 0:
                raise GpuError(
                    f"{self._gpu.name}: the computation takes no time; measure a stage that runs "
                    "on this GPU"
                )
            time_s = chunk_s / repetitions
            # Of this chunk: the number of repetitions may grow for one that never comes.
            own_repetition_s = own_s / repetitions
            long_s = _WARM_UP * self.window_s
            if chunk_s < long_s:
                # Short chunks say little: they grow at most tenfold at a time, as the first ones
                # may be slow.
                repetitions = math.ceil(min(10.0, 1.1 * long_s / chunk_s) * repetitions)
            elif abs(time_s - before_s) <= _STABLE * time_s:
                break
            before_s = time_s
        return own_repetition_s

    def _time(self, run: Run, repetitions: int) -> float:
        self._rest = None
        self._synchronize()
        begin_s = self._gpu.now_s()
        run(repetitions)
        self._synchronize()
        return self._gpu.now_s() - begin_s

    def _measure_window(
        self, run: Run, repetitions: int, time_s: float, phase: float
    ) -> tuple[list[Window], Window]:
        """Return one window of each replica and that of this GPU, where a repetition is expected to
        take `time_s`.
        """
        samples: list[tuple[int, float, frozenset[str]]] = []
        powers_w: list[float] = []
        # Counters of throttling see what falls between two samples.
        throttled_s = self._throttled_s()

        def work() -> None:
            begin_s = self._gpu.now_s()
            launched = 0
            for part in _parts(repetitions):
                run(part)
                # The GPU may lag far behind the launches: sample it when it should be in the middle
                # of this part.
                middle_s = begin_s + (launched + part / 2) * time_s
                launched += part
                ahead_s = middle_s - self._gpu.now_s()
                is_launched_ahead = ahead_s > 0
                if is_launched_ahead:
                    self._gpu.wait(ahead_s)
                samples.append(
                    (self._gpu.clock_mhz(), self._gpu.temperature_c(), self._throttle_reasons())
                )
                # Where launches wait for the GPU, it idles now. And in the first second, the sensor
                # may average over what was before the window.
                power_w = self._power_w()
                is_late_enough = self._gpu.now_s() - begin_s >= AVERAGING_S
                if power_w is not None and is_launched_ahead and is_late_enough:
                    powers_w.append(power_w)

        spent_s, energy_j = self._measure_energy(work, phase)
        # A reason that held for a moment changes no mean.
        counted = {
            reason
            for reason, after_s in self._throttled_s().items()
            if after_s - throttled_s.get(reason, 0.0) > _THROTTLED * spent_s
        }
        clocks, temperatures, reasons = zip(*samples, strict=True)
        own_window = Window(
            spent_s / repetitions,
            energy_j / repetitions,
            fmean(clocks),
            max(temperatures),
            max(temperatures) - min(temperatures),
            frozenset(counted.union(*reasons)),
            has_idled=spent_s / repetitions < _BUSY * time_s,
        )
        # A GPU that has idled was sampled at rest.
        if not own_window.has_idled:
            self._powers_w += [(energy_j / spent_s, power_w) for power_w in powers_w]
        windows = self._group.gather(own_window)
        size = self._group.size
        # Windows come replica by replica, as `GpuGroup.gather` says.
        starts = range(0, len(windows), size)
        return [combine(windows[start : start + size]) for start in starts], own_window

    def _measure_energy(self, action: Callable[[], None], phase: float) -> tuple[float, float]:
        """Return the seconds and joules of `action`, begun `phase` of an interval after an
        update of the counter.
        """
        self._synchronize()
        # What was read after the last window still holds if nothing has run since: it saves a wait.
        before = self._rest or self.counter.wait_for_rest()
        # Another phase of the counter for each window, so that its step averages out.
        self._gpu.wait(phase * self.counter.interval_s)
        self._group.gather(None)  # all GPUs begin together
        begin_s = self._gpu.now_s()
        action()
        self._synchronize()
        end_s = self._gpu.now_s()
        after = self.counter.wait_for_rest()
        self._rest = after
        # The counter is read at rest on both sides: what was drawn there is not of the action.
        at_rest_j = before.rest_w * (begin_s - before.time_s) + after.rest_w * (
            after.time_s - end_s
        )
        return end_s - begin_s, max(0.0, after.energy_j - before.energy_j - at_rest_j)

    def _throttle_reasons(self) -> frozenset[str]:
        try:
            return self._gpu.throttle_reasons()
        except GpuNotSupported:
            return frozenset()

    def _throttled_s(self) -> Mapping[str, float]:
        try:
            return self._gpu.throttled_s()
        except GpuNotSupported:
            return {}


def _parts(repetitions: int) -> Iterator[int]:
    parts = min(_PARTS, repetitions)
    yield from (
        (number + 1) * repetitions // parts - number * repetitions // parts
        for number in range(parts)
    )
