"""The windows in which a row of a profile is measured, and what several of them, or several rows,
tell together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import fmean, median, stdev

from perseus_planner.base.errors import GpuError
from perseus_planner.base.prefixes import si
from perseus_planner.gpu import THROTTLE_REASONS
from perseus_planner.profiles.measurement import Evidence, Measurement

TRANSIENT_REASONS = frozenset({"sw-thermal", "hw-thermal", "hw-slowdown", "hw-power-brake"})
"""Throttle reasons that pass, so a window that saw one is measured again. A power cap stays, in
training too.
"""

MIN_WINDOWS = 3
"""A row is the mean of at least this many windows."""

_MAX_ERROR = 0.003  #: more windows are measured while a relative standard error is above
_LEAST_ERROR = 2e-4  #: relative: clocks and counters are not better
_OUTLIER = 5.0  #: an outlier is further from the median than this many standard deviations
_MIN_OUTLIER = 0.01  #: relative: a window this close to the median is never an outlier
_NOTHING = 3.0  #: standard errors: a smaller difference of two rows is noise
_MAX_JUMP_C = 8.0  #: a window in which the temperature changes by more is not comparable
_TWO_SIDED_95 = (
    *(0.0, 0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31),
    *(2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11),
)
"""Quantiles of Student's t for 0 windows, 1 window and so on; the first two have no standard
error.
"""


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
