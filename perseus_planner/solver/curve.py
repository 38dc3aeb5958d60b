"""The exact time-energy curve of an iteration, and the fastest plan within a power along it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import (
    InfeasibleBudget,
    InfeasibleDeadline,
    InfeasiblePower,
    ProfileError,
)
from perseus_planner.base.prefixes import si
from perseus_planner.base.units import TIME
from perseus_planner.plans.replay import end_times, time_and_energy
from perseus_planner.solver.modes import baseline
from perseus_planner.solver.network import Guides, Integers, ScaledNetwork, scaled_network

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules import Schedule
    from perseus_planner.schedules.dag import PipelineDag

_PARTS = 64  #: parts of the curve; there is a guide at each end of one
# Times the fastest one, where most plans are asked for; parts of it
_NEAR = 1.3
_NEAR_PARTS = 52


@dataclass(frozen=True, eq=False, repr=False)
class TimeEnergyCurve:
    """The least energy of an iteration for every iteration time, as an exact, convex,
    piecewise-linear curve.

    An iteration that takes T seconds costs sum(e_i - P * t_i) + P * S * T joules: e_i and t_i of
    the chosen clocks, P the blocking power of a rank, S the number of ranks. In the relaxed problem
    a computation may also run between two measured clocks; its least energy is a bound that no plan
    of the same time can be below.
    """

    dag: PipelineDag  #: the iteration
    #: (points,) replayed times at which the slope changes, falling, in ticks of `scaled.tick_s`.
    #: All times in seconds include the profile's `overhead_s`.
    times: Integers = field(repr=False)
    #: (points,) minus the slope of effective energy below each time, in units of
    #: `scaled.power_unit_w`.
    powers: Integers = field(repr=False)
    guides: Guides = field(repr=False)  #: relaxed solutions along it

    @classmethod
    def of(cls, dag: PipelineDag, progress: Callable[[int, int], None] | None = None) -> Self:
        """Compute the curve of any graph of computations, from its slow end to its fast one, by
        minimum cuts.

        Args:
            dag: the computations.
            progress: called with (parts done, all parts) from time to time.

        Raises:
            ProfileError: If the overhead leaves nothing of an iteration, or the measurements cannot
                be scaled.
        """
        # Loaded here, as whoever looks at a frontier does not need it.
        from perseus_planner.solver.mincut import slowest_tree, walk

        scaled = scaled_network(dag)
        fastest_s = _replayed_s(dag, 0)
        if fastest_s + dag.profile.overhead_s <= 0:
            raise ProfileError(
                f"overhead_s: {si(dag.profile.overhead_s, 's', 6)} leave nothing of an iteration "
                f"that replays to {si(fastest_s, 's', 6)} at its fastest; calibrate with an "
                "iteration of this schedule"
            )
        tree = slowest_tree(scaled.network)
        slowest = int(tree.event[scaled.network.sink])
        fastest = int(fastest_s / scaled.tick_s)
        # Guides are dense near the fast end, where most plans are asked for.
        near = min(_NEAR * fastest, slowest)
        far_parts = _PARTS - _NEAR_PARTS
        if near == slowest:
            far_parts = 0
        ends = np.interp(range(_PARTS), [0, far_parts, _PARTS], [slowest, near, fastest])
        targets = ends.astype(np.int64).tolist()
        count = len(dag.keys)
        times = [slowest]
        powers = [0]
        guides: list[tuple[float, NDArray[Any], NDArray[Any]]] = []
        # The last target, 0, is out of reach: the walk stops at the fast end by itself.
        for part, step in enumerate(walk(scaled.network, [slowest, *targets[1:], 0], tree)):
            # Each step begins with the point where the one before ended.
            times[-1:] = step.times
            powers[-1:] = step.powers
            # Odd event nodes are ends. A guide only guides, so 32 bits are enough.
            end_s = np.asarray(
                step.state.event[1 : 2 * count : 2] * scaled.tick_s, dtype=np.float32
            )
            price_w = np.asarray(step.state.flow[:count] * scaled.power_unit_w, dtype=np.float32)
            guides.append((times[-1] * scaled.tick_s, end_s, price_w))
            if progress is not None and part > 0:
                progress(part, _PARTS)
        as_array = np.array([times, powers], dtype=np.int64)
        # Where the walk only stopped, the slope is the same, and the point is none of the curve.
        bends = np.diff(as_array[1], prepend=0) != 0
        bends[[0, -1]] = True
        curve = cls(
            dag,
            as_array[0, bends],
            as_array[1, bends],
            Guides(*map(np.array, zip(*guides, strict=True))),
        )
        vars(curve)["scaled"] = scaled  # laid out once
        return curve

    @property
    def profile(self) -> Profile:
        """The measurements that it was computed from."""
        return self.dag.profile

    @property
    def schedule(self) -> Schedule:
        """The schedule that it was computed from."""
        return self.dag.schedule

    @cached_property
    def min_time_s(self) -> float:
        """The least iteration time of any choice of clocks, seconds."""
        return self.replayed_ends_s[0] + self._overhead_s

    @cached_property
    def max_time_s(self) -> float:
        """The longest useful iteration time: beyond it effective energy no longer falls,
        seconds.
        """
        return self.replayed_ends_s[1] + self._overhead_s

    @cached_property
    def least_energy_time_s(self) -> float:
        """The iteration time at which a pipeline that does not wait for others needs the least
        energy, seconds.
        """
        return float(self.times_s[int(np.argmin(self.energies_j))])

    @property
    def baseline_time_s(self) -> float:
        """The iteration time with all clocks at their maximum, seconds."""
        return self._baseline[0]

    @property
    def baseline_energy_j(self) -> float:
        """The energy of that iteration over all GPUs, joules, waiting included."""
        return self._baseline[1]

    @cached_property
    def times_s(self) -> NDArray[np.float64]:
        """(points,) iteration times at which the slope changes, falling from `max_time_s` to
        `min_time_s`, seconds.
        """
        times_s: NDArray[np.float64] = np.clip(
            self.times * self.scaled.tick_s + self._overhead_s, self.min_time_s, self.max_time_s
        )
        # Ticks round; the ends are exactly what replays. Of a single point, it is the fast one.
        times_s[0] = self.max_time_s
        times_s[-1] = self.min_time_s
        return times_s

    @cached_property
    def energies_j(self) -> NDArray[np.float64]:
        """(points,) `bound_j` at each of `times_s`."""
        return self._effective_j + self.dag.waiting_w * self.times_s

    def bound_j(self, deadline_s: float) -> float:
        """Return the least relaxed energy of an iteration of that time over all GPUs, joules,
        waiting included.

        Raises:
            InfeasibleDeadline: If no iteration is that fast.
            UsageError: If `deadline_s` is not a time.
        """
        deadline_s = self.check_deadline(deadline_s)
        within_s = min(max(deadline_s, self.times_s[-1]), self.times_s[0])
        # Times fall, so their negatives are sorted; this is the fastest point that is no faster
        # than the deadline.
        point = int(np.searchsorted(-self.times_s, -within_s, side="right")) - 1
        saved_s = self.times_s[point] - within_s
        # At a point itself nothing is added, and the fast end has no finite slope.
        slope_w = int(self.powers[point]) * self.scaled.power_unit_w if saved_s else 0.0
        return float(self._effective_j[point] + slope_w * saved_s + self.dag.waiting_w * deadline_s)

    def check_deadline(self, deadline_s: float) -> float:
        """Return `deadline_s` if an iteration can be that fast.

        Raises:
            InfeasibleDeadline: If no iteration is that fast.
            UsageError: If `deadline_s` is not a time.
        """
        deadline_s = TIME.check(deadline_s, "deadline_s")
        if deadline_s < self.min_time_s:
            raise InfeasibleDeadline(deadline_s, self.min_time_s)
        return deadline_s

    @cached_property
    def scaled(self) -> ScaledNetwork:
        """The network in whole numbers, and its units."""
        return scaled_network(self.dag)

    @cached_property
    def replayed_ends_s(self) -> tuple[float, float]:
        """The replayed time with the fastest points, and with the slowest ones of the Pareto
        front, seconds.
        """
        return _replayed_s(self.dag, 0), _replayed_s(self.dag, -1)

    @cached_property
    def _baseline(self) -> tuple[float, float]:
        dag = baseline(self.dag)
        return time_and_energy(dag, dag.baseline_measurements())

    @property
    def _overhead_s(self) -> float:
        return self.profile.overhead_s

    @cached_property
    def _effective_j(self) -> NDArray[np.float64]:
        """(points,) least relaxed effective energy at `times_s`, joules; summed as whole numbers
        from the slow end.
        """
        slowest_j = math.fsum(self.dag.points[key][-1].effective_j for key in self.dag.keys)
        unit_j = self.scaled.tick_s * self.scaled.power_unit_w
        added = [0.0]
        total = 0
        # Python's whole numbers do not overflow: 64 bits hold a time or a power, not their product.
        for power, ticks in zip(
            self.powers[:-1].tolist(), (-np.diff(self.times)).tolist(), strict=True
        ):
            total += power * ticks
            added.append(total * unit_j)
        return slowest_j + np.array(added)


def _replayed_s(dag: PipelineDag, end: int) -> float:
    """Return the seconds of an iteration of the fastest points, at 0, or the slowest, at -1."""
    return max(end_times(dag, [dag.points[key][end].time_s for key in dag.iteration.keys]))


def fastest_within_power(
    curve: TimeEnergyCurve,
    power_w: float,
    plan_until: Callable[[float], Plan],
    power_of: Callable[[Plan], float],
) -> Plan:
    """Return the fastest plan found whose power, as `power_of` tells it in watts, is at most
    `power_w`.

    Args:
        curve: that of the plans.
        power_w: watts.
        plan_until: makes a plan for a deadline, seconds, within a switch budget.
        power_of: tells the power of a plan, watts.

    Raises:
        InfeasiblePower: If no plan found draws that little; names the least power found.
    """

    def plan_near(deadline_s: float) -> Plan:
        try:
            return plan_until(deadline_s)
        except InfeasibleBudget as error:  # the fastest plan found that the budget allows
            return plan_until(error.least_time_s)

    target_w = power_w
    while True:
        deadline_s = _fastest_within(curve, target_w)
        if deadline_s is None:
            # Not even the bound is that frugal: only a plan at the least average power may still
            # be.
            frugal = plan_near(float(curve.times_s[np.argmin(curve.energies_j / curve.times_s)]))
            if power_of(frugal) <= power_w:
                return frugal
            raise InfeasiblePower(power_w, power_of(frugal))
        plan = plan_near(deadline_s)
        excess_w = power_of(plan) - power_w
        if excess_w <= 0.0:
            return plan
        target_w -= max(excess_w, 1e-4 * power_w)  # lower the bound by the plan's excess


def _fastest_within(curve: TimeEnergyCurve, power_w: float) -> float | None:
    """Return the least time whose bound, as an average power, is at most `power_w`, or None if
    there is none.
    """
    average_w = curve.energies_j / curve.times_s
    fitting = np.flatnonzero(average_w <= power_w)
    if len(fitting) == 0:
        return None
    point = int(fitting[-1])  # the fastest one; the line from it to the next crosses the budget
    if point == len(curve.times_s) - 1:
        return curve.min_time_s
    slow_s, fast_s = curve.times_s[point : point + 2]
    slow_j, fast_j = curve.energies_j[point : point + 2]
    slope_w = (fast_j - slow_j) / (fast_s - slow_s)
    # Energy is straight in time here: solve energy = power * time.
    crossing_s = (slow_j - slope_w * slow_s) / (power_w - slope_w)
    return float(min(max(crossing_s, fast_s), slow_s))
