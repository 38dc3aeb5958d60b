"""Plans for a probability: of being on time, or within a power, though the rows of the profile are
uncertain.

A plan's time is compared with that of all clocks at their maximum under the same joint draw, so
that what is common to both cancels out. Plans are made as if computations below the maximum clock
took some standard errors longer than they are expected to; the least such margin is searched with
which a plan is on time in enough draws. The maximum clock takes no margin, so a plan that is no
slower than all clocks at maximum stays possible.

The plans of the search are not polished and have no switch budget; the plan with the margin that is
found has both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleDeadline
from perseus_planner.plans.plan import INTERVAL, WIDER_SAVING, Interval, OnTime
from perseus_planner.plans.replay import time_and_energy
from perseus_planner.profiles.estimation import exact_draws
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.curve import TimeEnergyCurve, fastest_within_power
from perseus_planner.solver.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.estimation import Draws, Estimate, Key
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.schedules.iteration import Iteration

_DRAWS = 500
_ITERATIONS = 100  #: with jitter, of which the mean is taken
_SEARCHES = 8  #: rough plans at most, to find the least margin that is enough
_CLOSE = 0.12  #: part of a margin: closer to the least one is close enough
_FIRST = 1.4  #: margin that is tried after 0, standard errors
_INSIDE = 0.1  #: part of an interval that is left at both ends
_STEP = 1.5  #: from a margin that is not enough to the next one, while none is known to be
_TRIES = 4  #: plans with all effort at most, each with a little more margin
_LEAST = 0.1  #: of that little, standard errors
# No model of a GPU's curves is exact, so intervals are wider than those of the draws: their ends
# are so many times as far from the mean, and at least so far. `python benchmarks/run.py --only 19`
# counts how often the truth is in them.
_WIDER_TIME = 1.25
_LEAST_DOUBT = 7e-4  #: of a ratio or a share
_ROUNDING = 1e-9


class _Drawn(NamedTuple):
    """The clocks of a plan, MHz, replayed under the draws."""

    clocks_mhz: list[int]
    margin: float | None
    time_s: Floats
    energy_j: Floats


class OnTimePlanner:
    """Makes plans for a probability from the rows of one frontier, and remembers them and what it
    solves for them.
    """

    def __init__(self, curve: TimeEnergyCurve) -> None:
        self.curve = curve
        self._planners: dict[float, Planner] = {}
        self._plans: dict[tuple[float, float, float, int | None], Plan] = {}

    def plan(
        self, deadline_s: float, probability: float, tolerance: float, max_changes: int | None
    ) -> Plan:
        """Return the plan of least effective energy that was found to be on time; see
        `Frontier.plan_for`.

        Raises:
            InfeasibleDeadline: If no plan that was found is on time with this probability.
        """
        key = deadline_s, probability, tolerance, max_changes
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        return self._plans[key]

    def _plan(
        self, deadline_s: float, probability: float, tolerance: float, max_changes: int | None
    ) -> Plan:
        ratio = deadline_s / self.curve.baseline_time_s
        limit = ratio if ratio < 1 - _ROUNDING else max(ratio, 1 + tolerance)
        within_s = limit * self._mean.baseline_time_s

        def lateness(drawn: _Drawn) -> float:
            return self._likely_ratio(drawn, probability) / limit - 1 - _ROUNDING

        def is_on_time(drawn: _Drawn) -> bool:
            return lateness(drawn) <= 0.0

        def make(margin: float, *, is_rough: bool) -> _Drawn | None:
            planner = self._planner(margin)
            try:
                if is_rough:
                    return self._replayed(planner.clocks(within_s, is_rough=True), margin)
                return self._replayed_plan(planner.plan(within_s, max_changes), margin)
            except InfeasibleDeadline:
                return None

        is_free = max_changes is None and self.curve.profile.clock_change is None
        rough = _search(partial(make, is_rough=True), lateness)
        enough = min((drawn.margin or 0.0 for drawn in rough if is_on_time(drawn)), default=None)
        tried = list(rough) if is_free else []
        if enough is not None:
            for number in range(_TRIES):
                drawn = make(enough + number * max(_CLOSE * enough, _LEAST), is_rough=False)
                tried += [drawn] if drawn else []
                if drawn and is_on_time(drawn):
                    break
            if enough and not is_free and number == 0:  # few clocks leave time of their own
                tried += filter(None, [make(enough / 2, is_rough=False)])
        on_time = [drawn for drawn in (*tried, self._at_maximum) if is_on_time(drawn)]
        if not on_time:
            least = min((self._likely_ratio(drawn, probability) for drawn in tried), default=1.0)
            raise InfeasibleDeadline(deadline_s, least * self.curve.baseline_time_s)
        best = min(on_time, key=self._effective_j)
        free_best = min(filter(is_on_time, rough), key=self._effective_j, default=self._at_maximum)
        safety_j = float(np.mean(free_best.energy_j - rough[0].energy_j)) if rough else 0.0
        plan = self._plan_of(best)
        certainty = replace(self._certainty(plan, best, probability, safety_j), limit_ratio=limit)
        return replace(plan, deadline_s=max(within_s, plan.time_s), on_time=certainty)

    def plan_within_power(
        self, power_w: float, probability: float, max_changes: int | None
    ) -> Plan:
        """Return the fastest plan found that draws at most `power_w` watts; see
        `Frontier.plan_within_power`.

        Raises:
            InfeasiblePower: If no plan that was found draws that little with this probability.
        """

        def likely_w(plan: Plan) -> float:
            drawn = self._replayed_plan(plan, 0.0)
            return float(np.quantile(drawn.energy_j / drawn.time_s, probability))

        planner = self._planner(0.0)

        def plan_until(deadline_s: float) -> Plan:
            return planner.plan(planner.curve.check_deadline(deadline_s), max_changes)

        plan = fastest_within_power(planner.curve, power_w, plan_until, likely_w)
        drawn = self._replayed_plan(plan, 0.0)
        plan = replace(self._plan_of(drawn), deadline_s=plan.deadline_s)
        certainty = self._certainty(plan, drawn, probability, 0.0)
        return replace(plan, on_time=replace(certainty, limit_power_w=power_w))

    @cached_property
    def _estimate(self) -> Estimate[Profile] | None:
        """What is known of the rows; None if they are exact."""
        return None if self.curve.profile.is_exact else self.curve.profile.estimated()

    @cached_property
    def _draws(self) -> Draws:
        if self._estimate is None:
            return exact_draws(self.curve.profile.measurements)
        return self._estimate.draws(_DRAWS)

    @cached_property
    def _jitter(self) -> Floats | None:
        """How many times as long each computation takes, in each of some iterations."""
        jitter, shape = self.curve.profile.jitter, (len(self.curve.dag.computations), _ITERATIONS)
        return np.exp(jitter * np.random.default_rng(0).standard_normal(shape)) if jitter else None

    @cached_property
    def _baseline(self) -> _Drawn:
        """All clocks at their maximum, in the modes that savings are compared with."""
        dag = self._mean.dag
        if dag.base in (None, dag.iteration):
            return self._at_maximum
        base = PipelineDag(dag.profile, dag.base, dag.base)
        clocks = [row.clock_mhz for row in base.baseline_measurements()]
        return _Drawn(clocks, None, *replay_draws(base, clocks, self._draws, self._jitter))

    @cached_property
    def _at_maximum(self) -> _Drawn:
        """All clocks at their maximum."""
        rows = self._mean.profile.measurements
        clocks = [rows[key][0].clock_mhz for key in self._mean.dag.iteration.keys]
        return self._replayed_plan(self.mean_planner.plan_of(clocks, None), None)

    @property
    def mean_planner(self) -> Planner:
        """That of the expected rows."""
        return self._planner(0.0)

    @cached_property
    def _mean(self) -> TimeEnergyCurve:
        """The curve of the expected times."""
        if self._estimate is None:
            return self.curve
        return TimeEnergyCurve.of(self.curve.dag.with_profile(self._estimate.mean))

    def _planner(self, margin: float) -> Planner:
        """Return the planner for the expected times plus the margin."""
        if margin not in self._planners:
            slower = self.curve.dag.with_profile(self._slower(margin)) if margin else None
            self._planners[margin] = Planner(self._mean, slower)
        return self._planners[margin]

    def _slower(self, margin: float) -> Profile:
        """Return the expected profile with times that are longer by `margin` standard errors
        against the top clock, and jitter.
        """
        longer = {key: np.exp(margin * doubt).tolist() for key, doubt in self._doubts.items()}
        measurements = {
            key: tuple(
                replace(row, time_s=row.time_s * factor)
                for row, factor in zip(rows, longer[key], strict=True)
            )
            for key, rows in self._mean.profile.measurements.items()
        }
        return replace(self._mean.profile, measurements=measurements)

    @cached_property
    def _doubts(self) -> dict[Key, Floats]:
        """(stage, kind) -> the standard error of each row's log time against the top clock, with
        jitter.
        """
        index, doubts = {clock: i for i, clock in enumerate(self._draws.clocks_mhz)}, {}
        for key, rows in self._mean.profile.measurements.items():
            if not rows[0].has_work:
                doubts[key] = np.zeros(len(rows))
                continue
            logs = np.log(self._draws.time_s[key][[index[row.clock_mhz] for row in rows]])
            doubts[key] = np.hypot(np.std(logs - logs[:1], axis=1), self.curve.profile.jitter)
            doubts[key][0] = 0.0
        return doubts

    def _replayed(self, clocks_mhz: list[int], margin: float | None) -> _Drawn:
        """Return the replays of these clocks, as if clock changes cost nothing."""
        return _Drawn(
            clocks_mhz,
            margin,
            *replay_draws(self._mean.dag, clocks_mhz, self._draws, self._jitter),
        )

    def _replayed_plan(self, plan: Plan, margin: float | None) -> _Drawn:
        """Return the replays of a plan's clocks.

        What clock changes cost with the expected times is taken to be the same in all of them.
        """
        drawn = self._replayed([*plan.clocks.values()], margin)
        if plan.clock_change is None:
            return drawn
        expected = self._plan_of(drawn)
        points = [expected.measurement(each) for each in self._mean.dag.computations]
        free_s, free_j = time_and_energy(self._mean.dag, points)
        return drawn._replace(
            time_s=drawn.time_s + (expected.time_s - free_s),
            energy_j=drawn.energy_j + (expected.energy_j - free_j),
        )

    def _plan_of(self, drawn: _Drawn) -> Plan:
        """Return the plan of these clocks with their expected times."""
        plan = self.mean_planner.plan_of(drawn.clocks_mhz, None)
        profile = self.curve.profile
        return replace(plan, profile_digest=profile.digest, remarks=profile.remarks)

    def _likely_ratio(self, drawn: _Drawn, probability: float) -> float:
        """Return the time that the plan keeps with this probability, over that with all clocks
        at their maximum.
        """
        return float(np.quantile(drawn.time_s / self._baseline.time_s, probability))

    def _effective_j(self, drawn: _Drawn) -> float:
        return float(np.mean(drawn.energy_j - self.curve.dag.waiting_w * drawn.time_s))

    def _certainty(self, plan: Plan, drawn: _Drawn, probability: float, safety_j: float) -> OnTime:
        """Return how sure the plan is; a plan without a margin saves `safety_j` more."""
        base, keys = self._baseline, self.curve.dag.iteration.keys
        in_use = set(zip(keys, drawn.clocks_mhz, strict=True))
        interpolated = {} if self._estimate is None else self._estimate.interpolated
        return OnTime(
            probability=probability,
            limit_ratio=None,
            limit_power_w=None,
            margin=drawn.margin,
            time_ratio=_interval(drawn.time_s / base.time_s, _WIDER_TIME),
            saved_share=_interval(1 - drawn.energy_j / base.energy_j, WIDER_SAVING),
            power_w=_interval(drawn.energy_j / drawn.time_s, WIDER_SAVING, plan.power_w),
            safety_share=max(0.0, safety_j / float(np.mean(base.energy_j))),
            points=len(in_use),
            interpolated=sum(clock in interpolated.get(key, ()) for key, clock in in_use),
            has_errors=self._estimate is not None and self._estimate.has_errors,
            jitter=self.curve.profile.jitter,
        )


def _search(
    make: Callable[[float], _Drawn | None], lateness: Callable[[_Drawn], float]
) -> list[_Drawn]:
    """Return the plans that were tried to find the least margin with which one is on time; the
    first has no margin.

    Lateness falls about evenly as the margin grows, so the next margin is where the line through
    two of them says that it is 0, but inside what is left of the interval (regula falsi).
    """
    tried: list[_Drawn] = []
    margin, low, high = 0.0, 0.0, math.inf  #: what is late, and what is not
    late, early = math.inf, -math.inf  #: how late plans with these margins are
    for _ in range(_SEARCHES):
        drawn = make(margin)
        if drawn is None:  # there is no time for such a margin
            high, early = margin, -math.inf
        else:
            tried.append(drawn)
            if lateness(drawn) > 0.0:
                low, late = margin, lateness(drawn)
            else:
                high, early = margin, lateness(drawn)
        if high - low <= _CLOSE * high < math.inf:
            break
        if high == math.inf:
            margin = max(_FIRST, _STEP * low)
        else:
            part = late / (late - early) if early > -math.inf else 0.5
            margin = low + min(max(part, _INSIDE), 1 - _INSIDE) * (high - low)
    return tried


def _interval(values: Floats, wider: float, unit: float = 1.0) -> Interval:
    """Return the interval of what is drawn, widened; the least doubt is in `unit`."""
    mean = float(np.mean(values))
    ends = np.quantile(values, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]) - mean
    low, high = (math.hypot(wider * end, _LEAST_DOUBT * unit) for end in ends.tolist())
    return Interval(mean, mean - low, mean + high)


def replay_draws(
    dag: PipelineDag, clocks_mhz: Sequence[int], draws: Draws, jitter: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the (draws,) seconds of an iteration, and its joules over all GPUs, waiting included.

    Clock changes take no time.

    Args:
        dag: the iteration.
        clocks_mhz: the clock of each computation, by its place in `dag.computations`.
        draws: of the profile's computations.
        jitter: (computations, m) how many times as long they take in m iterations of a run. The
            seconds are the mean of such iterations then.
    """
    iteration, index = dag.iteration, {clock: i for i, clock in enumerate(draws.clocks_mhz)}
    points = [(key, index[clock]) for key, clock in zip(iteration.keys, clocks_mhz, strict=True)]
    effective_j: Floats = np.zeros(1)
    for (key, i), count in Counter(points).items():
        waiting_j = dag.profile.blocking_w(key[0]) * draws.time_s[key][i]
        effective_j = effective_j + count * (draws.energy_j[key][i] - waiting_j)
    for operation in iteration.operations:
        if operation.energy_j is not None:
            effective_j += (
                operation.energy_j - dag.rank_waiting_w[operation.rank] * operation.time_s
            )
    fixed_s = [np.full(1, operation.time_s) for operation in iteration.operations]
    duration_s = [draws.time_s[key][i] for key, i in points]
    time_s = _replayed_s(iteration, duration_s + fixed_s)
    if jitter is not None:
        some = slice(jitter.shape[1])
        jittered_s = np.stack([each_s[some] for each_s in duration_s]) * jitter
        time_s *= np.mean(_replayed_s(iteration, [*jittered_s, *fixed_s])) / np.mean(time_s[some])
    time_s += dag.profile.overhead_s
    return time_s, effective_j + dag.waiting_w * time_s


def _replayed_s(iteration: Iteration, duration_s: Sequence[Floats]) -> Floats:
    """Return the (draws,) seconds until all of an iteration has run, given those of each place."""
    end_s: list[Floats] = [np.zeros(0)] * len(duration_s)
    for place in iteration.order:
        starts_s = [end_s[i] + lag_s if lag_s else end_s[i] for i, lag_s in iteration.waits[place]]
        end_s[place] = (reduce(np.maximum, starts_s) if starts_s else 0.0) + duration_s[place]
    last = set(iteration.order).difference(*iteration.predecessors)
    return reduce(np.maximum, [end_s[place] for place in last])
