"""Compares the power sensor of a GPU with its energy counter.

Both are said to be right within 5 %, and often they are not: an idle GPU was seen whose counter
rose by 187 J in 5 s in which its sensor showed 327 J, and there are GPUs whose sensor looks at a
quarter of the time only (Yang et al., "Accurate and Convenient Energy Measurements for GPUs",
SC'24). Which one is right only a meter can tell. So where they are further apart than what is known
of sensors explains, a result says so, and its error covers the difference.
"""

from __future__ import annotations

import math

from perseus_planner.base.prefixes import si

AVERAGING_S = 1.0
"""Longest time over which a sensor averages, seconds: that of NVML's power on most GPUs since
Ampere. Others look for 25 ms in each 100 ms.
"""

COMPARED_S = 5.0
"""Shortest time that is compared, seconds: in a shorter one, what the sensor averages over and the
steps of the counter are a large part.
"""

TOLERANCE = 0.15
"""How far apart counter and sensor may be, as a share of the larger one. The makers say 5 % for
each; the rest is for GPUs that look at a part of the time.
"""

OFFSET_W = 5.0
"""How far apart they may be besides, watts: sensors of idle GPUs are off by some watts."""

_CHANCE = 4.0
"""Standard errors of the sensor's mean that are chance. Samples of a load that comes and goes
scatter.
"""

MIN_SAMPLES = 8
"""With fewer samples of the power nothing is said."""

_MAX_GAP = 0.25  #: longest time without a sample, as a share of all; a longer one may hide a change


class PowerSamples:
    """Samples of the power of one GPU in one window, added up."""

    def __init__(self) -> None:
        self.highest_w = 0.0
        self._lowest_w = math.inf
        self._count = 0
        self._sum_w = 0.0
        # For the scatter of the samples, without keeping them: a window may last for days.
        self._squares = 0.0
        self._first_s = math.nan
        self._last: tuple[float, float] | None = None
        self._gap_s = 0.0
        self._energy_j = 0.0

    def add(self, time_s: float, power_w: float) -> None:
        """Add a sample that was taken after all others."""
        if self._last is None:
            self._first_s = time_s
        else:
            last_s, last_w = self._last
            passed_s = time_s - last_s
            # The trapezoid rule, as times between samples are drawn and differ.
            self._energy_j += passed_s * (power_w + last_w) / 2
            self._gap_s = max(self._gap_s, passed_s)
        self._last = time_s, power_w
        self._count += 1
        self._sum_w += power_w
        self._squares += power_w**2
        self.highest_w = max(self.highest_w, power_w)
        self._lowest_w = min(self._lowest_w, power_w)

    def mean_w(self, begin_s: float, end_s: float) -> float | None:
        """Return the mean power of a window, watts; None if the samples do not cover it."""
        if self._last is None or self._count < MIN_SAMPLES:
            return None
        last_s, _ = self._last
        # The window's ends count as gaps, too: nobody looked there either.
        gap_s = max(self._gap_s, self._first_s - begin_s, end_s - last_s)
        if gap_s > _MAX_GAP * (end_s - begin_s) or last_s <= self._first_s:
            return None
        return self._energy_j / (last_s - self._first_s)

    def doubt_w(self, time_s: float) -> float:
        """Return how far the mean over `time_s` seconds may be off without a fault, watts: by
        chance, and as the sensor averages over what was before the window.
        """
        mean_w = self._sum_w / self._count
        # Rounding may make the variance of a steady power a little negative.
        variance = max(0.0, self._squares / self._count - mean_w**2)
        return (
            chance_w(math.sqrt(variance), self._count)
            + AVERAGING_S * (self.highest_w - self._lowest_w) / time_s
        )


def chance_w(deviation_w: float, count: int) -> float:
    """Return how far the mean of so many samples may be off by chance, watts.

    Args:
        deviation_w: Their standard deviation, watts.
        count: How many there are.
    """
    return _CHANCE * deviation_w / math.sqrt(count)


def apart_w(counter_w: float, sensor_w: float, doubt_w: float = 0.0) -> float:
    """Return by how many watts counter and sensor disagree, or 0 if it may be no fault.

    Args:
        counter_w: Mean power by the counter, watts.
        sensor_w: Mean power by the sensor over the same time, watts.
        doubt_w: By how many watts they may be apart for another known reason.
    """
    difference_w = abs(counter_w - sensor_w)
    # Errors of the two are of different causes, so all that is known is added up.
    allowed_w = TOLERANCE * max(counter_w, sensor_w) + OFFSET_W + doubt_w
    return difference_w if difference_w > allowed_w else 0.0


def disagreement_text(gpu: str, counter_w: float, sensor_w: float) -> str:
    """Return the sentence that says so."""
    share = 1 - min(counter_w, sensor_w) / max(counter_w, sensor_w)
    return (
        f"{gpu}: its energy counter says {si(counter_w, 'W')} on average and its power sensor "
        f"{si(sensor_w, 'W')}, {share:.0%} apart, so its energy may be wrong by as much; compare "
        "with a meter of the node, and try another driver"
    )
