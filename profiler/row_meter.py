"""Measure one row of a profile: a computation repeated in windows at the current setting of the
GPU.

This follows the good practice of Yang et al., "Accurate and Convenient Energy Measurements for
GPUs" (SC'24): warm up, use windows of seconds, begin each at another phase of the power sensor,
repeat, and watch the temperature. The device is synchronised only at the edges of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.base.prefixes import si
from perseus_planner.gpu import THROTTLE_REASONS
from perseus_planner.gpu.monitor import EnergyCounter, RestingReading
from perseus_planner.gpu.sensor import (
    AVERAGING_S,
    MIN_SAMPLES,
    apart_w,
    chance_w,
    disagreement_text,
)
from perseus_planner.profiles.measurement import Evidence, Measurement

if TYPE_CHECKING:
    from random import Random

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.stage import Block, GpuGroup, Run

TRANSIENT_REASONS = frozenset({"sw-thermal", "hw-thermal", "hw-slowdown", "hw-power-brake"})
"""Throttle reasons that pass, so a window that saw one is measured again. A power cap stays, in
training too.
"""

MIN_WINDOWS = 3
"""A row is the mean of at least this many windows."""

_MAX_ERROR = 0.003  # more windows are measured while a relative standard error is above
_LEAST_ERROR = 2e-4  # relative: clocks and counters are not better
_TWO_SIDED_95 = (
    *(0.0, 0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31),
    *(2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11),
)
"""Quantiles of Student's t for 0 windows, 1 window and so on; the first two have no standard
error.
"""
_OUTLIER = 5.0  # an outlier is further from the median than this many standard deviations
_MIN_OUTLIER = 0.01  # relative: a window this close to the median is never an outlier
_NOTHING = 3.0  # standard errors: a smaller difference of two rows is noise
_MAX_JUMP_C = 8.0  # a window in which the temperature changes by more is not comparable


@dataclass(frozen=True)
class Window:
    """One measuring window: the mean of its repetitions, and samples of the GPU while they ran."""

    time_s: float  #: Time of one repetition, seconds
    energy_j: float  #: Energy of one repetition, joules
    achieved_mhz: float  #: Mean SM clock
    temperature_c: float  #: Highest temperature
    jump_c: float  #: Difference of the highest and the lowest temperature
    throttle: frozenset[str]  #: Throttle reasons that were sampled or counted
    #: Whether the GPU idled in between, as it was faster than when it warmed up.
    has_idled: bool = False

    @property
    def is_throttled(self) -> bool:
        """Whether heat or the power supply slowed the GPU down."""
        return bool(self.throttle & TRANSIENT_REASONS)

    @property
    def is_comparable(self) -> bool:
        """Whether the window can be averaged with others."""
        return not (self.is_throttled or self.has_idled) and self.jump_c <= _MAX_JUMP_C


def subtract(whole: Measurement, part: Measurement) -> Measurement:
    """Return `whole` without `part`, which each repetition of `whole` also ran once; errors add in
    quadrature.

    Where both differ by no more than their errors, next to nothing is left: a time of one standard
    error, at the power of both together.

    Raises:
        GpuError: If no time would be left, or less than no energy, beyond errors.
    """
    assert whole.evidence is not None
    assert part.evidence is not None
    time_error_s = math.hypot(whole.evidence.time_stderr_s, part.evidence.time_stderr_s)
    energy_error_j = math.hypot(whole.evidence.energy_stderr_j, part.evidence.energy_stderr_j)
    # Both rows have errors of their own, so next to nothing may come out below 0.
    time_s = whole.time_s - part.time_s
    energy_j = whole.energy_j - part.energy_j
    is_nothing = abs(time_s) <= _NOTHING * time_error_s
    # Not 0, which a kind has that runs nothing.
    if is_nothing and abs(energy_j) <= _NOTHING * energy_error_j:
        time_s = max(time_s, time_error_s)
        energy_j = max(energy_j, whole.power_w * time_s)
    if time_s <= 0 or energy_j < 0:
        raise GpuError(
            f"at {whole.clock_mhz} both together took {si(whole.time_s, 's')} and "
            f"{si(whole.energy_j, 'J')}, and one alone {si(part.time_s, 's')} and "
            f"{si(part.energy_j, 'J')}; let nothing else run on the GPU, or use longer windows"
        )
    evidence = replace(
        whole.evidence,
        time_stderr_s=time_error_s,
        energy_stderr_j=energy_error_j,
        throttle=_ordered({*whole.evidence.throttle, *part.evidence.throttle}),
    )
    return Measurement(whole.clock_mhz, time_s, energy_j, evidence)


def merge(rows: Sequence[Measurement]) -> Measurement:
    """Return what measurements of one row tell together: their mean, weighted by their windows."""
    evidence = [row.evidence for row in rows if row.evidence is not None]
    windows = [source.windows for source in evidence]
    # A row counts by its windows, which are alike.
    weights = [count / sum(windows) for count in windows]

    def mean(values: Iterable[float]) -> float:
        return math.fsum(map(mul, weights, values))

    return Measurement(
        rows[0].clock_mhz,
        mean(row.time_s for row in rows),
        mean(row.energy_j for row in rows),
        Evidence(
            mean(source.achieved_mhz for source in evidence),
            # Different rows err independently, so errors add as squares.
            math.hypot(*map(mul, weights, (source.time_stderr_s for source in evidence))),
            math.hypot(*map(mul, weights, (source.energy_stderr_j for source in evidence))),
            sum(windows),
            mean(source.temperature_c for source in evidence),
            _ordered({reason for source in evidence for reason in source.throttle}),
            evidence[0].order,
        ),
    )


def without_outliers(windows: Sequence[Window]) -> list[Window]:
    """Return the windows whose time and energy are near the medians, by the median absolute
    deviation (Hampel 1974).
    """
    kept = set(range(len(windows)))
    for values in ([window.time_s for window in windows], [window.energy_j for window in windows]):
        if not values:
            break
        middle = median(values)
        # 1.4826 median deviations of a normal distribution are one standard deviation.
        spread = 1.4826 * median(abs(value - middle) for value in values)
        limit = max(_OUTLIER * spread, _MIN_OUTLIER * middle)
        kept -= {index for index, value in enumerate(values) if abs(value - middle) > limit}
    return [windows[index] for index in sorted(kept)]


def is_enough(windows: Sequence[Window]) -> bool:
    """Return whether there are enough windows, with a small enough standard error."""
    if len(windows) < MIN_WINDOWS:
        return False
    times = [window.time_s for window in windows]
    energies = [window.energy_j for window in windows]
    return all(
        _standard_error(values) <= _MAX_ERROR * fmean(values) for values in (times, energies)
    )


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def mean_of(windows: Sequence[Window], setting: int | None) -> Measurement:
    """Return the mean of `windows` as the row of `setting`; None stands for the clock that was
    achieved.
    """
    times = [window.time_s for window in windows]
    energies = [window.energy_j for window in windows]
    achieved_mhz = fmean(window.achieved_mhz for window in windows)
    evidence = Evidence(
        achieved_mhz,
        max(_standard_error(times), _LEAST_ERROR * fmean(times)),
        max(_standard_error(energies), _LEAST_ERROR * fmean(energies)),
        len(windows),
        fmean(window.temperature_c for window in windows),
        _ordered(frozenset[str]().union(*(window.throttle for window in windows))),
    )
    clock_mhz = round(achieved_mhz) if setting is None else setting
    return Measurement(clock_mhz, fmean(times), fmean(energies), evidence)


def combine(windows: Sequence[Window], replicas: int = 1) -> Window:
    """Return the window of a group of GPUs: the time of the slowest GPU, and the energy of all, in
    the mean of the replicas.
    """
    return Window(
        max(window.time_s for window in windows),
        math.fsum(window.energy_j for window in windows) / replicas,
        fmean(window.achieved_mhz for window in windows),
        max(window.temperature_c for window in windows),
        max(window.jump_c for window in windows),
        frozenset[str]().union(*(window.throttle for window in windows)),
        any(window.has_idled for window in windows),
    )


def slow_replicas(windows: Sequence[Sequence[Window]]) -> dict[int, float]:
    """Return replica -> by which share it is slower than the median of the replicas; of two, than
    the other one.

    A replica counts as slow beyond three errors and one percent. Its error is the standard error of
    its time, widened for few windows as Student's t distribution says, or how far the replicas are
    apart if that is more (by the median deviation), as sound GPUs differ too. A replica that waits
    for others in a collective is never slower.

    Args:
        windows: The windows of all replicas, at one time after another.
    """
    times = [[window.time_s for window in of_replica] for of_replica in zip(*windows, strict=True)]
    if len(windows) < MIN_WINDOWS or len(times) < 2:
        return {}

    def widened(of_replica: Sequence[float]) -> float:
        return _TWO_SIDED_95[len(of_replica)] / 2 * _standard_error(of_replica)

    means = [fmean(of_replica) for of_replica in times]
    # Of two there is no median: the faster one is the measure, and they tell nothing of a spread.
    if len(times) == 2:
        middle = min(means)
        spread = 0.0
    else:
        middle = median(means)
        spread = 1.4826 * median(abs(mean - middle) for mean in means)
    return {
        replica: mean / middle - 1
        for replica, mean in enumerate(means)
        if mean - middle > max(3 * widened(times[replica]), 3 * spread, _MIN_OUTLIER * middle)
    }


def _ordered(reasons: frozenset[str] | set[str]) -> tuple[str, ...]:
    return tuple(reason for reason in THROTTLE_REASONS if reason in reasons)


_MIN_INTERVALS = 10  # a window lasts at least this many intervals of the counter
_MIN_REPETITIONS = 3
# the repetitions of a window are launched in parts, and the GPU is sampled in the middle of each
_PARTS = 4
# of the expected time: below, the GPU had ended all parts when the last one was sampled
_BUSY = 0.9
_WARM_UP = 0.1  # a chunk of the warm-up lasts this fraction of a window
_STABLE = 0.02  # the warm-up ends when two chunks differ by less
_MAX_CHUNKS = 20
_MAX_WINDOWS = 12
_MAX_REJECTED = 5
# a throttle reason is reported if it held for more than this fraction of a window
_THROTTLED = 0.01
_MAX_HEATING = 12  # windows that heat the GPU before the first row
_HEATED_C = 1.0  # heating ends with a window that warms the GPU by no more
_COOL_C = 5.0  # a GPU is cool when it is no more than this warmer than after heating
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
        accepted: list[Window] = []
        rejected: list[Window] = []
        clocks_mhz = []
        self._powers_w = []
        # All GPUs decide by the same gathered windows, so they leave this loop together.
        while len(accepted) < _MAX_WINDOWS and len(rejected) <= _MAX_REJECTED:
            windows, own_window = self._measure_window(run, repetitions, time_s, random.random())
            clocks_mhz.append(own_window.achieved_mhz)
            # The least time so far tells best when the GPU is in the middle of its work.
            time_s = min(time_s, own_window.time_s)
            measured.append(windows)
            # Who is slow is judged anew with each window, also for those before.
            together = self._combine(measured, slow := slow_replicas(measured))
            accepted = [window for window in together if window.is_comparable]
            rejected = [window for window in together if not window.is_comparable]
            # A hot GPU only gets another hot window without a pause.
            if together[-1].is_throttled:
                self.cool_down()
            if is_enough(without_outliers(accepted)):
                break
        self.achieved_mhz = fmean(clocks_mhz)
        if len(self._group.replicas) > 1:
            of_replicas = [
                fmean(window.time_s for window in windows_of)
                for windows_of in zip(*measured, strict=True)
            ]
            self.spreads.append(stdev(of_replicas) / fmean(of_replicas))
        for disagreement in self._group.gather(self._disagreement()):
            if disagreement is not None:
                self.disagreements.setdefault(*disagreement)
        for replica, share in slow.items():
            self.slow[replica] = max(share, self.slow.get(replica, 0.0))
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
                is_launched_ahead = self._gpu.now_s() < middle_s
                if is_launched_ahead:
                    self._gpu.wait(middle_s - self._gpu.now_s())
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
