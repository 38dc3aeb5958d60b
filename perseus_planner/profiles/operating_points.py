"""Operating points: the measured clocks of a computation that are worth choosing.

A GPU that is done early waits at the blocking power P, so a clock at which a computation takes t
seconds and e joules adds its effective energy e - P * t to an iteration of a given length (Perseus,
SOSP'24). Clocks are compared by that energy: one that is slower and takes more raw energy may still
be the better one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from perseus_planner.profiles.measurement import Measurement

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class OperatingPoint:
    """One clock of a computation, with its cost to an iteration of a given length."""

    clock_mhz: int  #: the SM clock, MHz
    time_s: float  #: measured duration, seconds
    energy_j: float  #: measured energy, joules
    #: energy less what the GPU would draw if it waited for that long, joules; may be negative.
    effective_j: float


def pareto_front(
    measurements: Iterable[Measurement], blocking_power_w: float
) -> tuple[OperatingPoint, ...]:
    """Return the points that no other point beats in both time and effective energy, fastest first.

    Time strictly rises and effective energy strictly falls along the result, which has at least one
    point. Of equal points the one with the highest clock is kept, which an uncontrolled GPU reaches
    first.
    """
    points = [
        OperatingPoint(m.clock_mhz, m.time_s, m.energy_j, m.energy_j - blocking_power_w * m.time_s)
        for m in measurements
    ]
    points.sort(key=lambda point: (point.time_s, point.effective_j, -point.clock_mhz))
    kept: list[OperatingPoint] = []
    for point in points:
        if not kept or point.effective_j < kept[-1].effective_j:
            kept.append(point)
    return tuple(kept)


def lower_hull(points: Iterable[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Return the lower convex hull of points whose first coordinate rises (Andrew 1979, the lower
    chain).

    Args:
        points: (time, cost), cost falling; the hull of whole numbers is exact.

    Returns:
        Its vertices, from first to last; cost falls ever less steeply along them.
    """
    hull: list[tuple[Number, Number]] = []
    for x, y in points:
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
