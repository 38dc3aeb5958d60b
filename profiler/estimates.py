"""What windows say together: which of them count, their mean and its error; a window of a group of GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.gpu import THROTTLE_REASONS
from perseus_planner.profiles.measurement import Evidence, Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

SPOILING = frozenset({"sw-thermal", "hw-thermal", "hw-slowdown", "hw-power-brake"})
"""Throttle reasons that pass, so that a window that saw one is measured again. A power cap stays, and is what training
would see too."""

LEAST_WINDOWS = 3
"""A row is the mean of no fewer."""

_ERROR = 0.003  # more windows are measured while a relative standard error is above
_OUTLIER = 5.0  # standard deviations, estimated from the median deviation, from the median
_LEAST_OUTLIER = 0.01  # relative: windows as close as this are no outliers, however alike the others are
_JUMP_C = 8.0  # a window in which the temperature changes by more is spoiled


@dataclass(frozen=True)
class Window:
    """One window: time and energy of one repetition, and what the GPU said in its middle.

    Attributes:
        time_s: seconds of one repetition.
        energy_j: joules of one repetition.
        achieved_mhz: mean SM clock.
        temperature_c: highest temperature.
        jump_c: by how much the temperature changed.
        throttle: reasons that were seen or counted.
    """

    time_s: float
    energy_j: float
    achieved_mhz: float
    temperature_c: float
    jump_c: float
    throttle: frozenset[str]

    @property
    def held_back(self) -> bool:
        """Whether the GPU was too hot, or failed to be fed."""
        return bool(self.throttle & SPOILING)

    @property
    def clean(self) -> bool:
        """Whether it can be compared with others."""
        return not self.held_back and self.jump_c <= _JUMP_C


def less(whole: Measurement, part: Measurement) -> Measurement:
    """What remains of `whole`, each repetition of which also runs `part` once; their errors add in quadrature.

    Raises:
        GpuError: nothing remains.
    """
    time_s, energy_j = whole.time_s - part.time_s, whole.energy_j - part.energy_j
    if time_s <= 0 or energy_j < 0:
        raise GpuError(
            f"at {whole.clock_mhz} both together took {whole.time_s:.4g} s and {whole.energy_j:.4g} J, and one alone "
            f"{part.time_s:.4g} s and {part.energy_j:.4g} J; let nothing else run on the GPU, or take longer windows"
        )
    assert whole.evidence is not None
    assert part.evidence is not None
    evidence = Evidence(
        whole.evidence.achieved_mhz,
        math.hypot(whole.evidence.time_stderr_s, part.evidence.time_stderr_s),
        math.hypot(whole.evidence.energy_stderr_j, part.evidence.energy_stderr_j),
        whole.evidence.windows,
        whole.evidence.temperature_c,
        _ordered({*whole.evidence.throttle, *part.evidence.throttle}),
    )
    return Measurement(whole.clock_mhz, time_s, energy_j, evidence)


def without_outliers(windows: Sequence[Window]) -> list[Window]:
    """Those whose time and energy are near the medians, by the median absolute deviation (Hampel 1974)."""
    kept = set(range(len(windows)))
    for values in ([window.time_s for window in windows], [window.energy_j for window in windows]):
        if not values:
            break
        middle = median(values)
        # 1.4826 median deviations of a normal distribution are one standard deviation.
        spread = 1.4826 * median(abs(value - middle) for value in values)
        limit = max(_OUTLIER * spread, _LEAST_OUTLIER * middle)
        kept -= {place for place, value in enumerate(values) if abs(value - middle) > limit}
    return [windows[place] for place in sorted(kept)]


def agree(windows: Sequence[Window]) -> bool:
    """Whether they are enough, and their means certain enough."""
    if len(windows) < LEAST_WINDOWS:
        return False
    times, energies = [window.time_s for window in windows], [window.energy_j for window in windows]
    return all(_error(values) <= _ERROR * fmean(values) for values in (times, energies))


def _error(values: Sequence[float]) -> float:
    """Standard error of their mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def row_of(windows: Sequence[Window], setting: int | None) -> Measurement:
    """Their mean, with its error; of no setting: at the clock that was achieved."""
    times, energies = [window.time_s for window in windows], [window.energy_j for window in windows]
    achieved_mhz = fmean(window.achieved_mhz for window in windows)
    evidence = Evidence(
        achieved_mhz,
        _error(times),
        _error(energies),
        len(windows),
        fmean(window.temperature_c for window in windows),
        _ordered(frozenset[str]().union(*(window.throttle for window in windows))),
    )
    clock_mhz = round(achieved_mhz) if setting is None else setting
    return Measurement(clock_mhz, fmean(times), fmean(energies), evidence)


def together(windows: Sequence[Window]) -> Window:
    """The window of a group: it lasts as long as its slowest GPU, and takes the energy of all."""
    return Window(
        max(window.time_s for window in windows),
        math.fsum(window.energy_j for window in windows),
        fmean(window.achieved_mhz for window in windows),
        max(window.temperature_c for window in windows),
        max(window.jump_c for window in windows),
        frozenset[str]().union(*(window.throttle for window in windows)),
    )


def _ordered(reasons: frozenset[str] | set[str]) -> tuple[str, ...]:
    return tuple(reason for reason in THROTTLE_REASONS if reason in reasons)
