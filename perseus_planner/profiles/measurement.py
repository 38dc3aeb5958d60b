"""Measurements of one computation at one clock, the operating points that are worth choosing, and
what a change of the clock costs.

A GPU that is done early waits at the blocking power P, so a clock at which a computation takes t
seconds and e joules adds its effective energy e - P * t to an iteration of a given length (Perseus,
SOSP'24). Clocks are compared by that energy: one that is slower and takes more raw energy may still
be the better one.

Iterations repeat, so the first computation of a rank follows its last one in all counts of clock
changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import (
    TIME,
    Celsius,
    ClockMhz,
    ComputedSeconds,
    Count,
    Joules,
    Rule,
    Wait,
)

_ACHIEVED = Rule(float, False, "a clock: write MHz above 0, such as 1395")


@dataclass(frozen=True)
class Evidence(Checked, error=ProfileError):
    """How a measurement was made; plans do not depend on it.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: the SM clock at which the GPU ran, MHz, mean over the windows.
    achieved_mhz: Annotated[float, _ACHIEVED]
    time_stderr_s: Wait  #: standard error of the time, seconds
    energy_stderr_j: Joules  #: standard error of the energy, joules
    windows: Count  #: number of measuring windows
    temperature_c: Celsius  #: core temperature, degrees Celsius, mean over the windows
    #: the reasons of `gpu.THROTTLE_REASONS` that were seen, in their order.
    throttle: tuple[str, ...] = ()
    #: how many rows of the sweep were measured before it, as errors of rows that are measured one
    #: after another may go together; None if it is not known.
    order: int | None = None


@dataclass(frozen=True)
class Measurement(Checked, error=ProfileError):
    """One computation at one clock.

    A computation without work, such as the backward of a frozen stage, takes 0 s and 0 J.

    Raises:
        ProfileError: If a value is out of range, or an energy is used in no time.
    """

    #: the SM clock that was set, MHz, above 0; in a profile of power limits the limit, watts.
    clock_mhz: ClockMhz
    time_s: ComputedSeconds  #: its duration, seconds, above 0; or 0 if it has no work
    energy_j: Joules  #: the energy that the GPU used for it, joules, 0 or more
    #: how it was measured, if that is known; measurements that differ only in it are equal.
    evidence: Evidence | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        # As it was given: the rule would have made 0 of what is wrong.
        given_s = self.time_s
        super().__post_init__()
        if self.energy_j:
            TIME.check(given_s, "time_s", ProfileError)

    @property
    def has_work(self) -> bool:
        """Whether it takes time."""
        return self.time_s > 0.0

    @property
    def power_w(self) -> float:
        """The mean power meanwhile, watts; 0 of a computation without work."""
        return self.energy_j / self.time_s if self.has_work else 0.0


def nearest_clock(measured: Collection[int], clock_mhz: int) -> int:
    """Return `clock_mhz` if it was measured, else the next lower clock that was, else the lowest
    one.
    """
    if clock_mhz in measured:
        return clock_mhz
    # A lower clock is slower than the one that was asked for, and draws less: no plan is late by
    # surprise.
    return max(
        (measured_mhz for measured_mhz in measured if measured_mhz < clock_mhz),
        default=min(measured),
    )


@dataclass(frozen=True)
class ClockChange(Checked, error=ProfileError, prefix="clock_change, "):
    """The cost of setting the clock of one GPU.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: how long the call holds the driver's lock, seconds, 0 or more. A node has one such lock:
    #: calls for its GPUs run one after another.
    call_s: Wait
    #: from the return of the call until the GPU runs at the new clock, seconds, 0 or more.
    settle_s: Wait = 0.0
    gpus_per_node: Count = 8  #: number of GPUs that share a lock; ranks fill nodes in order

    def node_of_rank(self, ranks: int, gpus_per_rank: int) -> list[int]:
        """Return the node of each of `ranks` ranks with that many GPUs; the first one if a rank
        is on several.
        """
        return [rank * gpus_per_rank // self.gpus_per_node for rank in range(ranks)]

    def calls_per_change(self, gpus_per_rank: int) -> int:
        """Return how many calls on one node a change of a rank's clock takes."""
        return min(gpus_per_rank, self.gpus_per_node)


def changes_per_rank(clocks_mhz: Sequence[int | None]) -> int:
    """Return how often a rank changes its clock in an iteration, including the change back for the
    next iteration.

    Args:
        clocks_mhz: the clock of each computation and operation of the rank, in program order; None
            for one without a clock, before which nothing changes.
    """
    clocks = [clock for clock in clocks_mhz if clock is not None]
    # The last clock of an iteration stands before the first one: iterations repeat.
    return sum(clock != before for before, clock in zip(clocks[-1:] + clocks, clocks, strict=False))


def with_fewer_changes(clocks: Sequence[int], max_changes: int) -> tuple[int, ...]:
    """Return clocks of a rank with at most so many changes in an iteration, none of them below the
    given one.

    Neighbours are merged into the higher of their clocks, those first that are raised least:
    computations times MHz. At the end one clock is left, the highest. A higher clock, or power
    limit, is taken to be faster, so no computation takes longer, and an iteration keeps the
    deadline that it was planned for, at some energy.

    Args:
        clocks: the clock of each computation of the rank, in program order: MHz, or watts of a
            power limit.
        max_changes: how many changes are allowed, 0 or more, with the change back for the next
            iteration.
    """
    merged = list(clocks)
    # Iterations repeat, so the last segment and the first one are neighbours as well.
    segments = [[i] for i in range(len(merged))]  # in program order; the first one follows the last

    def cost(at: int) -> int:
        before = segments[at - 1]
        after = segments[at]
        # Only the lower of two neighbours is raised, so the cost is its length times the
        # difference.
        raise_by = merged[before[0]] - merged[after[0]]
        return abs(raise_by) * len(after if raise_by > 0 else before)

    while len(segments) > max(1, max_changes):
        at = min(range(len(segments)), key=cost)  # neighbours at one clock first: they cost nothing
        joined = segments[at] + segments[at - 1]
        highest = max(merged[i] for i in joined)
        for i in joined:
            merged[i] = highest
        segments[at - 1] = joined
        del segments[at]
    return tuple(merged)


Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class OperatingPoint:
    """One clock of a computation, with its cost to an iteration of a given length."""

    clock_mhz: int  #: the SM clock, MHz
    time_s: float  #: measured duration, seconds
    energy_j: float  #: measured energy, joules
    #: energy less what the GPU would draw if it waited for that long, joules; may be negative.
    effective_j: float
    mode: str = "own"  #: in which it runs


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
    return undominated(points)


def undominated(points: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """Return the points that are left of `pareto_front`, of one mode or of several."""
    order = sorted(points, key=lambda point: (point.time_s, point.effective_j, -point.clock_mhz))
    kept: list[OperatingPoint] = []
    # In the order of time, a point is worth its time if it costs less than all faster ones.
    for point in order:
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
            # The last point is above the line from the one before it to this one, so it is no
            # vertex.
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
