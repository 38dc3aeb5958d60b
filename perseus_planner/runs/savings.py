"""What a rank saves in an iteration: what it used, beside the same computations at full clocks in
as much time.

Rows say what each computation takes and uses at its clock and at full clocks. The GPU that trains
is not exactly the one of the rows, and its work may vary, so rows only tell ratios. An iteration of
`time_s` seconds, whose computations ran for `ran_s`, uses by the rows

    at its clocks     C = scale * sum(w * energy) + waiting_w * (time_s - sum(w * time))
    at full clocks    F = scale * sum(w * full_j) + waiting_w * (time_s - sum(w * full_s))

with w = ran_s / time of each computation, so it has saved `energy_j * (F / C - 1)`. Where no clock
was lowered, F is C, and nothing was saved, whatever was measured.

`scale` and `waiting_w` are learnt from the energies of iterations, by least squares with the rows
as the first guess (Bayesian linear regression of two coefficients).

This is of one rank and iteration. `account` adds them up, and has the 95 % interval of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.profiles.measurement import nearest_clock
from perseus_planner.profiles.modes import OWN

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.keys import Key
    from perseus_planner.schedules import Computation

UNLIKE_ROWS = 2.0
"""Iterations that take this many times as long as rows say, or as short, are not what rows are of:
nothing is stated of them."""
_STALL = 3.0  #: times as long as the rank's others: what is beyond them is waiting, not work
_SCALE_DOUBT = 0.05  #: relative standard deviation of a GPU's energy beside its rows
_WAITING_DOUBT = 0.1  #: relative standard deviation of a profile's blocking power
#: least standard deviation of a profile's blocking power, of the watts while a GPU computes: also
#: where a profile says 0
_LEAST_DOUBT = 0.03
_NOISE = 0.02  #: relative standard deviation of the energy of an iteration beside its computations
_MOST_MISS = 3.0  #: standard deviations for which one iteration counts at most
_DRIFT = 0.001  #: relative drift of a GPU's power from an iteration to the next
_ROW_ERROR = 0.01  #: relative standard error of the energy of a row that says none
_INTERVAL_ERRORS = 2 * 1.645  #: standard errors in a plan's interval of 90 %


class Cost(NamedTuple):
    """What rows say of a computation, or of all of an iteration together, on one GPU."""

    time_s: float  #: Seconds at its clock
    energy_j: float  #: Joules at its clock
    full_s: float  #: Seconds at full clocks, in the training's own way
    full_j: float  #: Joules at full clocks

    @property
    def at_full_clocks(self) -> Cost:
        """The same, had its clock not been lowered."""
        return Cost(self.full_s, self.full_j, self.full_s, self.full_j)

    @property
    def is_lowered(self) -> bool:
        """Whether rows tell it from the same at full clocks."""
        return self[:2] != self[2:]


@dataclass(frozen=True)
class RankCosts:
    """What rows say of an iteration of a rank, on one of its GPUs."""

    each: tuple[Cost, ...]  #: Of each computation, in order; or one of all of them together
    waiting_w: float  #: Watts of a GPU that waits
    time_s: float  #: Seconds of the iteration
    #: Standard error of what is saved in such an iteration, joules: this GPU's part of that of the
    #: whole pipeline, as errors of rows are common to GPUs.
    error_j: float = 0.0
    waiting_error_w: float = 0.0  #: Standard error of `waiting_w`

    @cached_property
    def is_lowered(self) -> bool:
        """Whether a computation runs at a lower clock, or in another mode."""
        return any(cost.is_lowered for cost in self.each)

    def lowered_where(self, are_lowered: Sequence[bool]) -> RankCosts:
        """Return the costs with all other computations at full clocks."""
        if len(self.each) != len(are_lowered) or all(are_lowered):
            return self
        pairs = zip(self.each, are_lowered, strict=True)
        return replace(
            self, each=tuple(cost if is_low else cost.at_full_clocks for cost, is_low in pairs)
        )


class Saved(NamedTuple):
    """What an iteration of a rank has saved."""

    saved_j: float = 0.0  #: Joules
    error_j: float = (
        0.0  #: Its standard error, as far as iterations share it: of rows and of waiting
    )
    noise_j: float = 0.0  #: The standard error that is its own


NOTHING = Saved()
"""What is saved where no clock was lowered."""


def plan_costs(
    plan: Plan, computations: Sequence[Computation], clocks: Sequence[int], rank: int
) -> RankCosts:
    """Return what the rows of a plan say of a rank of its pipeline at some clocks, the plan's or
    higher ones.
    """
    # A plan has numbers of all GPUs of a stage, and an account is of one.
    waiting_w = plan.rank_waiting_w[rank]
    gpus = plan.gpus_per_stage
    ranks = len(plan.schedule.ranks)
    rows = [
        _rows(plan, computation, clock)
        for computation, clock in zip(computations, clocks, strict=True)
    ]
    # Plans of 0.3 have the energy of full clocks only for the whole iteration.
    if plan.full_clocks is None:
        rows = [_whole_cost(plan, rows, rank)]
    costs_of_one = tuple(Cost(c.time_s, c.energy_j / gpus, c.full_s, c.full_j / gpus) for c in rows)
    # Errors of rows are common to all GPUs, so each has its part of them.
    error_j = _saving_error_j(plan) / (ranks * gpus)
    return profile_costs(costs_of_one, waiting_w / gpus, plan.time_s, error_j)


def profile_costs(
    each: tuple[Cost, ...], waiting_w: float, time_s: float, error_j: float | None = None
) -> RankCosts:
    """Return what a profile says, whose blocking power was measured apart from training.

    Args:
        each: As in `RankCosts`.
        waiting_w: The blocking power of one GPU, watts.
        time_s: Seconds of the iteration.
        error_j: As in `RankCosts`; None if the profile does not tell.
    """
    # Rows without work draw nothing, so the blocking power alone bounds the doubt.
    busy_s = math.fsum(cost.time_s for cost in each)
    watts = math.fsum(cost.energy_j for cost in each) / busy_s if busy_s else 0.0
    doubt_w = max(_WAITING_DOUBT * waiting_w, _LEAST_DOUBT * watts)
    # A profile without errors counts as if each row had a usual one.
    if error_j is None:
        # Computations of one row share its error, so rows are told apart by their ratio.
        rows = {(cost.energy_j / cost.full_j) for cost in each if cost.is_lowered and cost.full_j}
        lowered_j = math.fsum(cost.energy_j for cost in each if cost.is_lowered)
        error_j = _ROW_ERROR * math.sqrt(2.0 / max(1, len(rows))) * lowered_j
    return RankCosts(each, waiting_w, time_s, error_j, doubt_w)


def _rows(plan: Plan, computation: Computation, clock: int) -> Cost:
    """Return the rows of a computation at a clock, and at full clocks where the plan has them."""
    # The plan's own clock, or the next lower one that has a row.
    key = plan.key(computation)
    points = dict(plan.measurements[key])
    # Full clocks are in the training's own way, whatever mode the plan has chosen.
    full = None
    if plan.full_clocks is not None:
        full = plan.full_clocks[key.in_mode(OWN)]
        # A clock may have been raised to the highest, which the plan itself does not have.
        if key in plan.full_clocks:
            points.setdefault(full.clock_mhz, plan.full_clocks[key])
    point = points[nearest_clock(points, clock)]
    at_full = point if full is None else full
    return Cost(point.time_s, point.energy_j, at_full.time_s, at_full.energy_j)


def _whole_cost(plan: Plan, rows: Sequence[Cost], rank: int) -> Cost:
    """Return the costs of an iteration of a rank by a plan of 0.3, which only has the energy of its
    baseline: the rank's part of it, by its energy.
    """
    time_s = math.fsum(row.time_s for row in rows)
    energy_j = math.fsum(row.energy_j for row in rows)
    waiting_w = math.fsum(plan.rank_waiting_w)
    # Waiting is drawn in both, so what is left is what computing takes.
    baseline_j = plan.baseline_energy_j - waiting_w * plan.baseline_time_s
    own_j = plan.energy_j - waiting_w * plan.time_s
    all_j = math.fsum(
        plan.measurement(computation).energy_j for computation in plan.schedule.computations()
    )
    # A rank's part of what is saved is that of its energy.
    part = energy_j / all_j if all_j > 0.0 else 0.0
    saved_j = baseline_j - own_j
    # A plan at full clocks saves nothing, whatever rounding says.
    if abs(saved_j) <= 1e-9 * plan.baseline_energy_j:
        saved_j = 0.0
    return Cost(time_s, energy_j, time_s, energy_j + part * saved_j)


def _saving_error_j(plan: Plan) -> float:
    """Return the standard error of what an iteration of a plan saves, joules: by the plan's own
    interval, or as if each row had `_ROW_ERROR`.
    """
    # The plan's interval knows how certain its rows are.
    if plan.on_time is not None:
        share = plan.on_time.saved_share
        return (share.high - share.low) / _INTERVAL_ERRORS * plan.baseline_energy_j
    # Computations of one row share its error, so energies are added up by row first.
    of_rows: dict[tuple[Key, int], float] = {}
    for computation in plan.schedule.computations():
        point = plan.measurement(computation)
        row = (plan.key(computation), point.clock_mhz)
        of_rows[row] = of_rows.get(row, 0.0) + point.energy_j
    # The rows at full clocks are as uncertain as those at the plan's.
    return _ROW_ERROR * math.sqrt(2.0 * math.fsum(energy_j**2 for energy_j in of_rows.values()))


@dataclass
class Savings:
    """What the iterations of one rank have saved, one after the other."""

    _scale: float = 1.0  #: joules of this GPU over those of the rows
    _waiting_w: float = 0.0
    _known: RankCosts | None = None  #: whose first guess was taken
    #: Covariance of scale and waiting watts.
    _covariance: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0))

    def add(
        self,
        costs: RankCosts,
        ran_s: Sequence[float],
        time_s: float,
        energy_j: float,
        lowered_share: float = 1.0,
    ) -> Saved | None:
        """Return what an iteration has saved; None if it is not what the rows are of.

        Args:
            costs: What rows say of it.
            ran_s: Seconds of each of its computations.
            time_s: Seconds of the iteration.
            energy_j: Joules of the GPU in it.
            lowered_share: Where `costs` are of all computations together: the share of their time
                in which clocks were as requested.
        """
        # Where no clock was lowered nothing was saved, whatever was measured.
        if not (costs.is_lowered and energy_j > 0.0):
            return NOTHING
        # Work varies, so each computation counts by how long it ran beside its row.
        works = _works(costs.each, ran_s)
        expected_s = math.fsum(cost.time_s for cost in costs.each)
        busy_s = math.fsum(map(_product, works, (cost.time_s for cost in costs.each)))
        # Another time than rows say means other work, of which ratios may not hold.
        if not (_is_near(busy_s, expected_s) and _is_near(time_s, costs.time_s)):
            return None
        busy_j = math.fsum(map(_product, works, (cost.energy_j for cost in costs.each)))
        waited_s = max(0.0, time_s - busy_s)
        # Scale and waiting are learnt before they are used, as this iteration tells of them too.
        self._learn(costs, busy_j, waited_s, energy_j)
        # A scale far from 1 means that rows are of another GPU.
        if not 1.0 / UNLIKE_ROWS <= self._scale <= UNLIKE_ROWS:
            return None
        full_j = math.fsum(map(_product, works, (cost.full_j for cost in costs.each)))
        full_s = math.fsum(map(_product, works, (cost.full_s for cost in costs.each)))
        # What rows say of the iteration as it ran.
        own_j = self._scale * busy_j + self._waiting_w * waited_s
        longer_j = self._scale * (full_j - busy_j)
        # At full clocks computations end earlier, and GPUs wait for the rest of the time.
        shorter_s = max(0.0, time_s - full_s) - waited_s  # that GPUs would wait longer
        if own_j <= 0.0:
            return None
        # The ratio carries what was measured beyond the rows over to both sides.
        ratio = energy_j / own_j * lowered_share
        saved_j = (longer_j + self._waiting_w * shorter_s) * ratio
        waiting_error_j = math.sqrt(max(0.0, self._covariance[2])) * abs(shorter_s) * ratio
        # Errors of rows and of waiting have nothing in common.
        error_j = math.hypot(costs.error_j, waiting_error_j)
        return Saved(saved_j, error_j, abs(saved_j * (energy_j / own_j - 1.0)))

    def _learn(self, costs: RankCosts, busy_j: float, waited_s: float, energy_j: float) -> None:
        # Rows of another plan bring another guess of waiting.
        if self._known is None or costs.waiting_w != self._known.waiting_w:
            # The rows are new, or know more of waiting by now.
            self._known = costs
            self._waiting_w = costs.waiting_w
            self._covariance = (
                max(self._covariance[0], _SCALE_DOUBT**2),
                0.0,
                costs.waiting_error_w**2,
            )
        scale, common, waiting = self._covariance
        # A GPU drifts with temperature, so what is known of it fades.
        scale += (_DRIFT * self._scale) ** 2
        # The gain of the Kalman filter: how much a miss moves each of both.
        gain = (scale * busy_j + common * waited_s, common * busy_j + waiting * waited_s)
        variance = gain[0] * busy_j + gain[1] * waited_s + (_NOISE * energy_j) ** 2
        if variance == 0.0:  # a rank without work, whose GPU drew nothing
            return
        miss_j = energy_j - self._scale * busy_j - self._waiting_w * waited_s
        # One iteration moves them by a few errors at most, as it may hold a pause.
        most_j = _MOST_MISS * math.sqrt(variance)
        miss_j = min(max(miss_j, -most_j), most_j)
        self._scale += gain[0] * miss_j / variance
        # A waiting GPU never draws less than nothing.
        self._waiting_w = max(0.0, self._waiting_w + gain[1] * miss_j / variance)
        self._covariance = (
            scale - gain[0] * gain[0] / variance,
            common - gain[0] * gain[1] / variance,
            waiting - gain[1] * gain[1] / variance,
        )


def _works(costs: Sequence[Cost], ran_s: Sequence[float]) -> list[float]:
    """Return the work of each computation beside its row's; a stall is none, and neither is what
    runs where rows have no work.
    """
    # Costs of all computations together are compared with their sum.
    if len(costs) != len(ran_s):
        time_s = costs[0].time_s
        return [math.fsum(ran_s) / time_s if time_s else 0.0]
    works = [
        each_s / cost.time_s if cost.time_s else 0.0
        for cost, each_s in zip(costs, ran_s, strict=True)
    ]
    having = [work for work, cost in zip(works, costs, strict=True) if cost.time_s]
    # The lower median, as stalls make works larger only.
    usual = median_low(having) if having else 0.0
    return [usual if work > _STALL * usual else work for work in works]


def _is_near(seconds: float, expected_s: float) -> bool:
    return expected_s / UNLIKE_ROWS <= seconds <= UNLIKE_ROWS * expected_s


def _product(one: float, other: float) -> float:
    return one * other
