"""The time-energy curve of one computation: which of its measured clocks are worth choosing.

A GPU that is done early waits at the blocking power P, so what a choice of e joules and t seconds adds to an
iteration of given length is its effective energy e - P * t (Perseus, SOSP'24). Only then are choices
compared: one that is both slower and, by raw energy, worse may still be the better one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.profiles.measurement import Measurement


@dataclass(frozen=True)
class OperatingPoint:
    """One clock of a computation, with what it costs an iteration of given length.

    Attributes:
        clock_mhz: the SM clock, MHz.
        time_s: measured duration, seconds.
        energy_j: measured energy, joules.
        effective_j: energy less what the GPU would draw if it waited for that long, joules; may be negative.
    """

    clock_mhz: int
    time_s: float
    energy_j: float
    effective_j: float


def pareto_front(measurements: Iterable[Measurement], blocking_power_w: float) -> tuple[OperatingPoint, ...]:
    """The options that no other one beats in both time and effective energy, fastest first.

    Time rises and effective energy falls strictly along the result, which has at least one option. Of equal
    ones the highest clock stays, the first that a GPU that is left alone would run at.
    """
    options = [
        OperatingPoint(m.clock_mhz, m.time_s, m.energy_j, m.energy_j - blocking_power_w * m.time_s)
        for m in measurements
    ]
    options.sort(key=lambda option: (option.time_s, option.effective_j, -option.clock_mhz))
    kept: list[OperatingPoint] = []
    for option in options:
        if not kept or option.effective_j < kept[-1].effective_j:
            kept.append(option)
    return tuple(kept)


def lower_hull(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lower convex hull of points whose first coordinate rises (Andrew 1979, the lower chain), exactly.

    Args:
        points: (time, cost) as whole numbers, cost falling.

    Returns:
        Its vertices, from first to last; cost falls ever less steeply along them.
    """
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
