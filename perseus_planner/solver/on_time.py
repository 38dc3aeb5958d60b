"""Plans for a probability: of being on time, or within a power, though the rows of the profile are
uncertain.

Plans are replayed under draws of what is uncertain (`drawn_plans.py`). They are made as if
computations below the maximum clock took some standard errors longer than they are expected to. The
maximum clock takes no margin, so a plan that is no slower than all clocks at maximum stays
possible. A plan that is late in too many draws, or in their mean, is repaired (`repairs.py`).

Within a switch budget, or where clock changes cost time, plans of one clock for each rank are
candidates too (`steady.py`), and the plans of all smaller budgets. These are made for a series of
deadlines alone, and repaired for the ones between in the same order, so that a deadline which is a
little later never gets a worse plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline
from perseus_planner.base.prefixes import si
from perseus_planner.solver.budget import budget_levels
from perseus_planner.solver.certainty import certainty_of
from perseus_planner.solver.curve import TimeEnergyCurve, fastest_within_power
from perseus_planner.solver.drawn_plans import EXPECTED, ROUNDING, DrawnPlans, limit_of
from perseus_planner.solver.planner import Planner
from perseus_planner.solver.repairs import Repairs
from perseus_planner.solver.steady import SteadySearch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.estimation import Estimate
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.solver.drawn_plans import Drawn, Lateness

_MARGINS = (0.0, 0.7, 1.4)  #: of the plans that are repaired where late, standard errors
# Plans within a switch budget are made for multiples of this part of the baseline. Plans of two
# searches differ by up to .2 points of saving, and such a step is worth more (`python
# benchmarks/run.py --only 52`).
_STEP = 0.005


class _Request(NamedTuple):
    """What a plan is asked for: the arguments of `OnTimePlanner.plan`."""

    deadline_s: float
    probability: float
    tolerance: float
    max_changes: int | None


class _Step(NamedTuple):
    """Two deadlines of the series that plans within a switch budget are made for, as parts of the
    baseline.
    """

    begin: float  #: before the deadline that is asked for
    end: float  #: that deadline, or after it


class _Tried:
    """The plans that were tried for a deadline.

    Args:
        lateness: how late a plan of such seconds is.
        effective_j: what is least in the best plan.
    """

    def __init__(self, lateness: Lateness, effective_j: Callable[[Drawn], float]) -> None:
        self.lateness = lateness
        self.plans: list[Drawn] = []
        self._effective_j = effective_j

    def is_on_time(self, drawn: Drawn) -> bool:
        """Return whether a plan is."""
        return bool(self.lateness(drawn.time_s) <= 0.0)

    def best(self) -> Drawn | None:
        """Return the best plan that is on time, if there is one."""
        return min(filter(self.is_on_time, self.plans), key=self._effective_j, default=None)

    def least_j(self) -> float:
        """Return its effective energy, infinite if there is none."""
        best = self.best()
        return math.inf if best is None else self._effective_j(best)


class OnTimePlanner:
    """Makes plans for a probability from the rows of one frontier, and remembers them and what it
    solves for them.
    """

    def __init__(self, curve: TimeEnergyCurve) -> None:
        self.curve = curve
        self._drawn = DrawnPlans(curve)
        self._repairs = Repairs(self._drawn)
        self._steady = SteadySearch(self._drawn)
        self._planners: dict[float, Planner] = {}
        self._plans: dict[_Request, Plan] = {}
        self._within: dict[tuple[float, float, float, int | None], list[Drawn]] = {}

    @property
    def estimate(self) -> Estimate[Profile] | None:
        """What is known of the rows; None if they are exact."""
        return self._drawn.estimate

    @property
    def mean_planner(self) -> Planner:
        """That of the expected rows."""
        return self._drawn.mean_planner

    def plan(
        self, deadline_s: float, probability: float, tolerance: float, max_changes: int | None
    ) -> Plan:
        """Return the plan of least effective energy that was found to be on time; see
        `Frontier.plan_for`.

        Raises:
            InfeasibleDeadline: If no plan that was found is on time with this probability;
                `InfeasibleBudget` if only all clocks at maximum are, which have more changes.
        """
        request = _Request(deadline_s, probability, tolerance, max_changes)
        if request not in self._plans:
            self._plans[request] = self._plan(request)
        return self._plans[request]

    def _plan(self, request: _Request) -> Plan:
        """Return what `plan` does: plans made with several margins, repaired where late, of which
        the cheapest one is taken.
        """
        # Times count relative to the baseline under the same draw, so common errors cancel out.
        ratio = request.deadline_s / self.curve.baseline_time_s
        lateness = self._lateness(ratio, request)
        tried = _Tried(lateness, self._drawn.effective_j)
        if request.max_changes is not None or self.curve.profile.clock_change is not None:
            unsafe = self._try_in_segments(tried, ratio, request)
        else:
            unsafe = self._try_freely(tried, ratio, request)
        best = self._best_of(tried, request)
        # What safety costs is told against the plan without a margin.
        safety_j = float(np.mean(best.energy_j - unsafe.energy_j))
        plan = self._drawn.plan_of(best)
        certainty = replace(
            certainty_of(self._drawn, plan, best, request.probability, safety_j),
            limit_ratio=limit_of(ratio, request.tolerance),
            expected_limit_ratio=ratio,
        )
        # The expected time may be a hair above the deadline (`EXPECTED`): no plan states one it
        # misses.
        stated_s = max(request.deadline_s, plan.time_s)
        return self._with_remark(replace(plan, deadline_s=stated_s, on_time=certainty))

    def _lateness(self, ratio: float, request: _Request) -> Lateness:
        """Return how late plans are for so many times the baseline."""
        return partial(
            self._drawn.lateness,
            ratio=ratio,
            probability=request.probability,
            tolerance=request.tolerance,
        )

    def _try_freely(self, tried: _Tried, ratio: float, request: _Request) -> Drawn:
        """Try plans of any number of changes; return the one without a margin."""
        # Rough plans with a few margins are repaired; the best margin gets all effort once.
        rough = self._made(request.deadline_s, _MARGINS, is_rough=True)
        self._repair(tried, rough, ratio, in_segments=False)
        best = tried.best()
        if best is not None:
            made = self._made(request.deadline_s, [best.margin or 0.0], is_rough=False)
            self._repair(tried, made, ratio, in_segments=False)
        return self._without_margin(rough)

    def _try_in_segments(self, tried: _Tried, ratio: float, request: _Request) -> Drawn:
        """Try plans within a switch budget, or such as the cost of clock changes allows; return
        the one without a margin.
        """
        step = _step_of(ratio)
        is_between = step.end != ratio
        made = self._made_within(step.end, request)
        counts = [self._drawn.changes(drawn.clocks_mhz) for drawn in made]
        # Plans of one clock for each rank are the same in all budgets, and come first: their
        # search must not depend on what a larger budget finds.
        steady = [drawn for drawn, count in zip(made, counts, strict=True) if count == 0]
        # The fewer clocks there are, the more one of them is worth: these are searched for each
        # deadline.
        if is_between and self._steady.has_plans:
            tried.plans.append(self._steady.best(tried.lateness))
        self._repair(tried, steady, step.begin, in_segments=True)
        start = tried.best()
        if start is not None:
            tried.plans.append(self._steady.exchanged(start, tried.lateness))
        # Between two deadlines of the series the plan for the earlier one is a candidate.
        if is_between:
            tried.plans += self._earlier(step, request)
        changing = [drawn for drawn, count in zip(made, counts, strict=True) if count > 0]
        self._repair(tried, changing, step.begin, in_segments=True)
        unsafe = self._without_margin(made)
        if is_between:
            # That was made for a later deadline: it has to be expected at this one.
            def expected_lateness(time_s: Floats) -> Floats:
                return self._drawn.expected_ratio(time_s) / ratio - EXPECTED - 1

            unsafe = self._repairs.repaired(
                unsafe, step.begin, expected_lateness, math.inf, in_segments=True
            )
        return unsafe

    def _repair(
        self, tried: _Tried, made: Iterable[Drawn], ratio: float, *, in_segments: bool
    ) -> None:
        """Try plans, repaired where late; draws count by how much later than `ratio` they are."""
        for drawn in made:
            # What costs more than a plan that is on time need not become so.
            most_j = tried.least_j()
            tried.plans.append(
                self._repairs.repaired(
                    drawn, ratio, tried.lateness, most_j, in_segments=in_segments
                )
            )

    def _earlier(self, step: _Step, request: _Request) -> list[Drawn]:
        """Return the plan for the deadline of the series before, if there is one."""
        earlier_s = step.begin * self.curve.baseline_time_s
        try:
            plan = self.plan(*request._replace(deadline_s=earlier_s))
        except InfeasibleDeadline:
            return []
        margin = None if plan.on_time is None else plan.on_time.margin
        return [self._drawn.replayed_plan(plan, margin)]

    def _without_margin(self, made: Sequence[Drawn]) -> Drawn:
        """Return the last plan without a margin, or all clocks at maximum."""
        without = (drawn for drawn in reversed(made) if not drawn.margin)
        return next(without, self._drawn.at_maximum)

    def _best_of(self, tried: _Tried, request: _Request) -> Drawn:
        """Return the best plan on time.

        Raises:
            InfeasibleDeadline: If there is none; names the least time that a plan keeps.
        """
        most = request.max_changes
        full = self._drawn.at_maximum
        # Where highest clocks differ on a rank, full clocks have changes too.
        is_within = most is None or self._drawn.changes(full.clocks_mhz) <= most
        ratios = [
            float(self._drawn.likely_ratio(drawn.time_s, request.probability))
            for drawn in tried.plans
        ]
        # All clocks at maximum are a candidate too, and always on time for the baseline's own
        # deadline.
        if is_within:
            tried.plans.append(full)
        best = tried.best()
        if best is not None:
            return best
        if most is not None and not is_within:
            least_s = min(ratios) * self.curve.baseline_time_s if ratios else None
            raise InfeasibleBudget(request.deadline_s, most, least_s)
        least_s = min(ratios, default=1.0) * self.curve.baseline_time_s
        raise InfeasibleDeadline(request.deadline_s, least_s)

    def _made(self, within_s: float, margins: Iterable[float], *, is_rough: bool) -> list[Drawn]:
        """Return the plan without a switch budget for each margin that there is time for."""
        made = []
        for margin in margins:
            with suppress(InfeasibleDeadline):
                clocks = self._planner(margin).clocks(within_s, is_rough=is_rough)
                made.append(self._drawn.replayed(clocks, margin))
        return made

    def _made_within(self, ratio: float, request: _Request) -> list[Drawn]:
        """Return the plan of one clock for each rank, and plans within a switch budget, or such as
        the cost of clock changes allows, for each margin that there is time for; those of the
        smallest budget first.

        The plans of a smaller budget are among those of a larger one.
        """
        key = (ratio, *request[1:])
        if key not in self._within:
            made = []
            if self._steady.has_plans:
                made.append(self._steady.best(self._lateness(ratio, request)))
            within_s = ratio * self.curve.baseline_time_s
            self._within[key] = made + self._made_in_segments(within_s, request.max_changes)
        return self._within[key]

    def _made_in_segments(self, within_s: float, max_changes: int | None) -> list[Drawn]:
        """Return what `_made_within` does, without the plan of one clock for each rank."""
        if self.curve.profile.clock_change is not None:
            made = []
            for margin in _MARGINS:
                with suppress(InfeasibleDeadline):
                    plan = self._planner(margin).plan(within_s, max_changes)
                    made.append(self._drawn.replayed_plan(plan, margin))
            return made
        assert max_changes is not None
        levels = budget_levels(max_changes)
        by_margin = {}
        for margin in _MARGINS:
            with suppress(InfeasibleDeadline):
                by_margin[margin] = self._planner(margin).clocks_by_budget(within_s, levels)
        made = [
            self._drawn.replayed(by_level[level], margin)
            for level in levels
            for margin, by_level in by_margin.items()
            if level in by_level
        ]
        # A plan without a budget may be within it by itself.
        free = self._made(within_s, by_margin, is_rough=False)
        return made + [
            drawn for drawn in free if self._drawn.changes(drawn.clocks_mhz) <= max_changes
        ]

    def _with_remark(self, plan: Plan) -> Plan:
        """Return the plan with a remark, if it takes less than the bound of the measured rows."""
        measured_j = self.curve.bound_j(max(plan.time_s, self.curve.min_time_s))
        if plan.energy_j >= measured_j * (1 - ROUNDING):
            return plan
        # `planner solve` knows the measured rows alone, and its reader would wonder.
        why = (
            f"It takes less than {si(measured_j, 'J', 6)}, the bound of the measured rows: its "
            "operating points are estimates from all rows."
        )
        return replace(plan, remarks=(*plan.remarks, why))

    def plan_within_power(
        self, power_w: float, probability: float, max_changes: int | None
    ) -> Plan:
        """Return the fastest plan found that draws at most `power_w` watts; see
        `Frontier.plan_within_power`.

        Raises:
            InfeasiblePower: If no plan that was found draws that little with this probability.
        """

        def likely_w(plan: Plan) -> float:
            drawn = self._drawn.replayed_plan(plan, 0.0)
            # What the plan draws no more than, with this probability.
            return float(np.quantile(drawn.energy_j / drawn.time_s, probability))

        planner = self._planner(0.0)

        def plan_until(deadline_s: float) -> Plan:
            return planner.plan(planner.curve.check_deadline(deadline_s), max_changes)

        plan = fastest_within_power(planner.curve, power_w, plan_until, likely_w)
        drawn = self._drawn.replayed_plan(plan, 0.0)
        plan = replace(self._drawn.plan_of(drawn), deadline_s=plan.deadline_s)
        certainty = certainty_of(self._drawn, plan, drawn, probability, 0.0)
        return replace(plan, on_time=replace(certainty, limit_power_w=power_w))

    def _planner(self, margin: float) -> Planner:
        """Return the planner for the expected times plus the margin."""
        if margin == 0.0:
            return self.mean_planner
        if margin not in self._planners:
            slower = self.curve.dag.with_profile(self._slower(margin))
            self._planners[margin] = Planner(self._drawn.mean, slower)
        return self._planners[margin]

    def _slower(self, margin: float) -> Profile:
        """Return the expected profile with times that are longer by `margin` standard errors, and
        jitter; those of the top clock stay.
        """
        # Doubts are standard errors of logarithms, so a margin is a factor.
        longer = {key: np.exp(margin * doubt).tolist() for key, doubt in self._doubts.items()}
        measurements = {
            key: tuple(
                replace(row, time_s=row.time_s * factor)
                for row, factor in zip(rows, longer[key], strict=True)
            )
            for key, rows in self._drawn.mean.profile.measurements.items()
        }
        return replace(self._drawn.mean.profile, measurements=measurements)

    @cached_property
    def _doubts(self) -> dict[Key, Floats]:
        """(stage, kind) -> the standard error of each row's log time against that of an iteration
        with all clocks at their maximum, with jitter.
        """
        base = np.log(self._drawn.at_maximum.time_s)
        # Tails are too rare for a margin on all computations: repairs find those that are late.
        steady = self.curve.profile.all_jitter.steady
        index = {clock: i for i, clock in enumerate(self._drawn.draws.clocks_mhz)}
        doubts: dict[Key, Floats] = {}
        for key, rows in self._drawn.mean.profile.measurements.items():
            if not rows[0].has_work:
                doubts[key] = np.zeros(len(rows))
                continue
            # Against the baseline of the same draw: what is common to both is no doubt.
            logs = np.log(self._drawn.draws.time_s[key][[index[row.clock_mhz] for row in rows]])
            doubts[key] = np.hypot(np.std(logs - base, axis=1), steady)
            # The maximum clock takes no margin, so a plan at full clocks stays possible.
            doubts[key][0] = 0.0
        return doubts


def _step_of(ratio: float) -> _Step:
    """Return the step of the series that a deadline lies in, or ends."""
    end = math.ceil(ratio / _STEP - ROUNDING)
    is_end = abs(ratio - end * _STEP) <= ROUNDING
    return _Step((end - 1) * _STEP, ratio if is_end else end * _STEP)
