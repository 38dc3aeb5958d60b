"""Plans for a probability: of being on time, or within a power, though the rows of the profile are
uncertain.

A plan's time is compared with that of all clocks at their maximum under the same joint draw, so
that what is common to both cancels out. A draw has times of the rows, and a factor for each GPU on
all of its rows, the maximum clock's too: a job runs on other GPUs than those that were profiled,
and which stage is the slowest is uncertain as well.

Plans are made as if computations below the maximum clock took some standard errors longer than they
are expected to. The maximum clock takes no margin, so a plan that is no slower than all clocks at
maximum stays possible. A plan that is late in too many draws, or in their mean, is repaired: what
is on the longest path of late draws gets faster clocks. Within a switch budget whole clock segments
do, so a repair adds no change; and the plans of all smaller budgets are candidates too. These are
made for a series of deadlines alone, and repaired for the ones between in the same order, so that a
deadline which is a little later never gets a worse plan.

Expected times and energies are scaled by two numbers, near 1, such that an iteration with all
clocks at their maximum takes what it takes with the measured rows: there is one baseline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline
from perseus_planner.base.prefixes import si
from perseus_planner.plans.plan import INTERVAL, WIDER_SAVING, Interval, OnTime
from perseus_planner.plans.replay import time_and_energy
from perseus_planner.profiles.estimation import Draws, exact_draws, on_other_gpus
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.budget import budget_levels
from perseus_planner.solver.curve import TimeEnergyCurve, fastest_within_power
from perseus_planner.solver.drawn_replay import DrawnReplay
from perseus_planner.solver.exchanges import Path, Replay, exchange
from perseus_planner.solver.modes import baseline
from perseus_planner.solver.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.estimation import Estimate
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.solver.network import Integers

_DRAWS = 500
_ITERATIONS = 100  #: with jitter, of which the mean is taken
_MARGINS = (0.0, 0.7, 1.4)  #: of the plans that are repaired where late, standard errors
# Plans within a switch budget are made for multiples of this part of the baseline. Plans of two
# searches differ by up to .2 points of saving, and such a step is worth more (`python
# benchmarks/run.py --only 52`).
_STEP = 0.005
# Rounds at most, in each of which what makes a plan late gets faster. It is a guard alone: each
# round sets some faster clock, so rounds end. With 60, GPT-3 at 2 % jitter, which needs more, had
# no plan on time but all clocks at maximum.
_REPAIRS = 2_000
_LATEST = 64  #: draws that a round looks at
_AT_ONCE = 0.1  #: of the computations that may get faster in a round
_LEAST_J = 1e-12  #: of what a faster operating point costs
# No model of a GPU's curves is exact, so intervals are wider than those of the draws: their ends
# are so many times as far from the mean, and at least so far. `python benchmarks/run.py --only 19`
# counts how often the truth is in them.
_WIDER_TIME = 1.25
_LEAST_DOUBT = 7e-4  #: of a ratio or a share
_ROUNDING = 1e-9
# No draw is faster than all clocks at maximum, so a mean of exactly 1 would allow no draw that is
# slower. A mean that is 1.0000 in the digits that are printed does.
_EXPECTED = 4.9e-5
_SCALINGS = 20  #: rounds at most, to find the scale of times
_SAME = 1e-13  #: relative
_HAIR = 2e-13  #: relative: more than `_SAME` and the rounding of a sum of times


class _Drawn(NamedTuple):
    """The clocks of a plan, MHz, replayed under the draws."""

    clocks_mhz: list[int]
    margin: float | None
    time_s: Floats
    energy_j: Floats


class _Late(NamedTuple):
    """Cases in which a plan is late, of the draws and of iterations with jitter."""

    time_s: dict[Key, Floats]  #: (clocks, cases) seconds at each clock of the draws, without jitter
    #: (computations, cases) how late the case is, times the jitter there, where the computation is
    #: on its longest path; else 0
    weight: Floats


class _Move(NamedTuple):
    """A faster clock for one computation, or for places of one segment, in which a rank keeps its
    clock.
    """

    score: float  #: lateness that it takes away, for the effective energy that it costs
    places: tuple[int, ...]  #: the computations that get it; the first one breaks ties
    to_mhz: int  #: the faster clock
    owner: int  #: no two moves of one owner go together: the computation, or the segment's rank


class _Step(NamedTuple):
    """Two deadlines of the series that plans within a switch budget are made for, as parts of the
    baseline.
    """

    begin: float  #: before the deadline that is asked for
    end: float  #: that deadline, or after it


class OnTimePlanner:
    """Makes plans for a probability from the rows of one frontier, and remembers them and what it
    solves for them.
    """

    def __init__(self, curve: TimeEnergyCurve) -> None:
        self.curve = curve
        self._planners: dict[float, Planner] = {}
        self._plans: dict[tuple[float, float, float, int | None], Plan] = {}
        self._within: dict[tuple[float, float, float, int | None], list[_Drawn]] = {}

    def plan(
        self, deadline_s: float, probability: float, tolerance: float, max_changes: int | None
    ) -> Plan:
        """Return the plan of least effective energy that was found to be on time; see
        `Frontier.plan_for`.

        Raises:
            InfeasibleDeadline: If no plan that was found is on time with this probability;
                `InfeasibleBudget` if only all clocks at maximum are, which have more changes.
        """
        key = deadline_s, probability, tolerance, max_changes
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        return self._plans[key]

    def _plan(
        self, deadline_s: float, probability: float, tolerance: float, max_changes: int | None
    ) -> Plan:
        """Return what `plan` does: made with several margins, repaired where late, the cheapest
        one.
        """
        # Times count relative to the baseline under the same draw, so common errors cancel out.
        ratio = deadline_s / self.curve.baseline_time_s
        lateness = partial(
            self._lateness, ratio=ratio, probability=probability, tolerance=tolerance
        )

        def is_on_time(drawn: _Drawn) -> bool:
            return bool(lateness(drawn.time_s) <= 0.0)

        in_segments = max_changes is not None or self.curve.profile.clock_change is not None
        step = _step_of(ratio) if in_segments else _Step(ratio, ratio)
        tried: list[_Drawn] = []

        def repair(candidates: Iterable[_Drawn]) -> None:
            for drawn in candidates:
                # What costs more than a plan that is on time need not become so.
                most_j = min(map(self._effective_j, filter(is_on_time, tried)), default=math.inf)
                repaired = self._repaired(
                    drawn, step.begin, lateness, most_j, in_segments=in_segments
                )
                tried.append(repaired)

        # Where highest clocks differ on a rank, full clocks have changes too.
        has_full_clocks = (
            max_changes is None or self._changes(self._at_maximum.clocks_mhz) <= max_changes
        )
        if in_segments:
            made = self._made_within(step.end, probability, tolerance, max_changes)
            # Plans of one clock for each rank are the same in all budgets, and come first: their
            # search must not depend on what a larger budget finds.
            changes = [self._changes(drawn.clocks_mhz) for drawn in made]
            # The fewer clocks there are, the more one of them is worth: these are searched for each
            # deadline.
            if step.end != ratio and self._paces:
                tried.append(self._steady(lateness))
            repair(drawn for drawn, count in zip(made, changes, strict=True) if count == 0)
            start = min(filter(is_on_time, tried), key=self._effective_j, default=None)
            if start is not None and self._paces:
                tried.append(self._exchanged(start, lateness))
            # Between two deadlines of the series the plan for the earlier one is a candidate.
            if step.end != ratio:
                with suppress(InfeasibleDeadline):
                    earlier_s = step.begin * self.curve.baseline_time_s
                    plan = self.plan(earlier_s, probability, tolerance, max_changes)
                    margin = None if plan.on_time is None else plan.on_time.margin
                    tried.append(self._replayed_plan(plan, margin))
            repair(drawn for drawn, count in zip(made, changes, strict=True) if count > 0)
        else:
            # Rough plans with a few margins are repaired; the best margin gets all effort once.
            made = self._made(deadline_s, _MARGINS, is_rough=True)
            repair(made)
            in_time = list(filter(is_on_time, tried))
            if in_time:
                best_margin = min(in_time, key=self._effective_j).margin or 0.0
                repair(self._made(deadline_s, [best_margin], is_rough=False))
        # The plan without a margin: what safety costs is told against it.
        unsafe = next((drawn for drawn in reversed(made) if not drawn.margin), self._at_maximum)
        if step.end != ratio:
            # That was made for a later deadline: it has to be expected at this one.
            unsafe = self._repaired(
                unsafe,
                step.begin,
                lambda time_s: self._expected_ratio(time_s) / ratio - _EXPECTED - 1,
                math.inf,
                in_segments=in_segments,
            )
        # All clocks at maximum are a candidate too, and always on time for the baseline's own
        # deadline.
        candidates = [*tried, self._at_maximum] if has_full_clocks else tried
        on_time = list(filter(is_on_time, candidates))
        if not on_time:
            # The refusal names the least time that any of these plans keeps.
            ratios = [float(self._likely_ratio(drawn.time_s, probability)) for drawn in tried]
            if max_changes is not None and not has_full_clocks:
                least_s = min(ratios) * self.curve.baseline_time_s if ratios else None
                raise InfeasibleBudget(deadline_s, max_changes, least_s)
            least_s = min(ratios, default=1.0) * self.curve.baseline_time_s
            raise InfeasibleDeadline(deadline_s, least_s)
        best = min(on_time, key=self._effective_j)
        safety_j = float(np.mean(best.energy_j - unsafe.energy_j))
        plan = self._plan_of(best)
        certainty = replace(
            self._certainty(plan, best, probability, safety_j),
            limit_ratio=_limit_of(ratio, tolerance),
            expected_limit_ratio=ratio,
        )
        # The expected time may be a hair above the deadline (`_EXPECTED`): no plan states one it
        # misses.
        plan = replace(plan, deadline_s=max(deadline_s, plan.time_s), on_time=certainty)
        return self._with_remark(plan)

    def _made(self, within_s: float, margins: Iterable[float], *, is_rough: bool) -> list[_Drawn]:
        """Return the plan without a switch budget for each margin that there is time for."""
        made = []
        for margin in margins:
            with suppress(InfeasibleDeadline):
                clocks = self._planner(margin).clocks(within_s, is_rough=is_rough)
                made.append(self._replayed(clocks, margin))
        return made

    def _made_within(
        self, ratio: float, probability: float, tolerance: float, max_changes: int | None
    ) -> list[_Drawn]:
        """Return the plan of one clock for each rank, and plans within a switch budget, or such as
        the cost of clock changes allows, for each margin that there is time for; those of the
        smallest budget first.

        The plans of a smaller budget are among those of a larger one.
        """
        key = ratio, probability, tolerance, max_changes
        if key not in self._within:
            made = []
            if self._paces:
                lateness = partial(
                    self._lateness, ratio=ratio, probability=probability, tolerance=tolerance
                )
                made.append(self._steady(lateness))
            within_s = ratio * self.curve.baseline_time_s
            self._within[key] = made + self._made_in_segments(within_s, max_changes)
        return self._within[key]

    def _made_in_segments(self, within_s: float, max_changes: int | None) -> list[_Drawn]:
        """Return what `_made_within` does, without the plan of one clock for each rank."""
        if self.curve.profile.clock_change is not None:
            made = []
            for margin in _MARGINS:
                with suppress(InfeasibleDeadline):
                    plan = self._planner(margin).plan(within_s, max_changes)
                    made.append(self._replayed_plan(plan, margin))
            return made
        assert max_changes is not None
        levels = budget_levels(max_changes)
        by_margin = {}
        for margin in _MARGINS:
            with suppress(InfeasibleDeadline):
                by_margin[margin] = self._planner(margin).clocks_by_budget(within_s, levels)
        made = [
            self._replayed(by_level[level], margin)
            for level in levels
            for margin, by_level in by_margin.items()
            if level in by_level
        ]
        # A plan without a budget may be within it by itself.
        free = self._made(within_s, by_margin, is_rough=False)
        return made + [drawn for drawn in free if self._changes(drawn.clocks_mhz) <= max_changes]

    def _changes(self, clocks: Sequence[int]) -> int:
        """Return the most clock changes of a rank in an iteration."""
        iteration = self._mean.dag.iteration
        counts = [
            len(_segments([place for place in program if place < len(clocks)], clocks))
            for program in iteration.programs
        ]
        return max((count for count in counts if count > 1), default=0)

    def _lateness(
        self, time_s: Floats, *, ratio: float, probability: float, tolerance: float
    ) -> Floats:
        """Return how late plans of (..., draws) seconds are, (...,), at most 0 for one that is on
        time: the worse of its likely time against the limit and its mean against the deadline
        itself, of which what is expected takes no tolerance.
        """
        limit = _limit_of(ratio, tolerance)
        likely = self._likely_ratio(time_s, probability) / limit - _ROUNDING
        expected = self._expected_ratio(time_s) / ratio - _EXPECTED
        late: Floats = np.maximum(likely, expected) - 1
        return late

    def _with_remark(self, plan: Plan) -> Plan:
        """Return the plan with a remark, if it takes less than the bound of the measured rows."""
        measured_j = self.curve.bound_j(max(plan.time_s, self.curve.min_time_s))
        if plan.energy_j >= measured_j * (1 - _ROUNDING):
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
            drawn = self._replayed_plan(plan, 0.0)
            # What the plan draws no more than, with this probability.
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
    def estimate(self) -> Estimate[Profile] | None:
        """What is known of the rows; None if they are exact."""
        return None if self.curve.profile.is_exact else self.curve.profile.estimated()

    @cached_property
    def _draws(self) -> Draws:
        """What times and energies may really be, scaled as the expected ones."""
        iteration = self.curve.dag.iteration
        spread = self.curve.profile.assumed_spread
        rows = exact_draws(self.curve.profile.measurements)
        if self.estimate is not None:
            # Scaled like the expected rows, or draws would have another baseline.
            drawn = self.estimate.draws(_DRAWS)
            longer, dearer = self._scales
            rows = Draws(
                drawn.clocks_mhz,
                {key: longer * table for key, table in drawn.time_s.items()},
                {key: dearer * table for key, table in drawn.energy_j.items()},
            )
        pairs = zip(iteration.keys, iteration.rank_of, strict=False)  # operations come last
        # All stages of a rank run on its GPUs, and share the factor of these.
        gpu_of = {key.stage: rank for key, rank in pairs}
        return on_other_gpus(rows, gpu_of, spread, _DRAWS)

    @cached_property
    def _jitter(self) -> Floats | None:
        """How many times as long each computation takes, in each of some iterations."""
        jitter = self.curve.profile.all_jitter
        count = len(self.curve.dag.computations)
        rank_of = self.curve.dag.iteration.rank_of[:count]
        return jitter.draw(rank_of, _ITERATIONS) if jitter else None

    @cached_property
    def _replay(self) -> DrawnReplay:
        """The iteration under the draws."""
        return DrawnReplay(self._mean.dag, self._draws, self._jitter)

    @cached_property
    def _baseline_replay(self) -> DrawnReplay:
        """The iteration that savings are compared with, under the draws."""
        dag = self._mean.dag
        if dag.base in (None, dag.iteration):
            return self._replay
        return DrawnReplay(PipelineDag(dag.profile, dag.base, dag.base), self._draws, self._jitter)

    @cached_property
    def _jittered_baseline_s(self) -> Floats:
        """Seconds of each iteration with jitter, with all clocks at their maximum."""
        seconds = self._baseline_replay.jittered_s(self._baseline.clocks_mhz)
        return seconds + self._mean.profile.overhead_s

    @cached_property
    def _baseline(self) -> _Drawn:
        """All clocks at their maximum, in the modes that savings are compared with."""
        replay = self._baseline_replay
        if replay is self._replay:
            return self._at_maximum
        clocks = [row.clock_mhz for row in replay.dag.baseline_measurements()]
        return _Drawn(clocks, None, *replay.replay(clocks))

    @cached_property
    def _at_maximum(self) -> _Drawn:
        """All clocks at their maximum."""
        rows = self._mean.profile.measurements
        clocks = [rows[key][0].clock_mhz for key in self._mean.dag.iteration.keys]
        if self.curve.profile.clock_change is None:
            return self._replayed(clocks, None)
        return self._replayed_plan(self.mean_planner.plan_of(clocks, None), None)

    @property
    def mean_planner(self) -> Planner:
        """That of the expected rows."""
        return self._planner(0.0)

    @cached_property
    def _mean(self) -> TimeEnergyCurve:
        """The curve of the expected times."""
        if self.estimate is None:
            return self.curve
        profile = _scaled(self.estimate.mean, *self._scales)
        return TimeEnergyCurve.of(self.curve.dag.with_profile(profile))

    @cached_property
    def _scales(self) -> tuple[float, float]:
        """What expected times and energies are multiplied by for the baseline of measured rows."""
        if self.estimate is None:
            return 1.0, 1.0
        # A hair earlier: a search that adds up in another order must not find all clocks at maximum
        # late for the baseline's own deadline.
        wanted_s = self.curve.baseline_time_s * (1 - _HAIR)
        wanted_j = self.curve.baseline_energy_j
        overhead_s = self.curve.profile.overhead_s
        base = baseline(self.curve.dag.with_profile(self.estimate.mean))
        rows = base.baseline_measurements()
        longer = 1.0
        # Newton's method: transfers and other fixed times do not scale, so once is not enough.
        for _ in range(_SCALINGS):
            scaled = [replace(row, time_s=longer * row.time_s) for row in rows]
            time_s, energy_j = time_and_energy(base, scaled)
            if abs(time_s - wanted_s) <= _SAME * wanted_s:
                break
            # At most halved in a step, where fixed times leave little to scale.
            longer *= max(0.5, 1 + (wanted_s - time_s) / (time_s - overhead_s))
        # Only rows scale: what is drawn while waiting follows from the times.
        dearer = 1 + (wanted_j - energy_j) / sum(row.energy_j for row in rows)
        return longer, dearer if dearer > 0.0 else 1.0

    def _planner(self, margin: float) -> Planner:
        """Return the planner for the expected times plus the margin."""
        if margin not in self._planners:
            slower = self.curve.dag.with_profile(self._slower(margin)) if margin else None
            self._planners[margin] = Planner(self._mean, slower)
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
            for key, rows in self._mean.profile.measurements.items()
        }
        return replace(self._mean.profile, measurements=measurements)

    @cached_property
    def _doubts(self) -> dict[Key, Floats]:
        """(stage, kind) -> the standard error of each row's log time against that of an iteration
        with all clocks at their maximum, with jitter.
        """
        base = np.log(self._at_maximum.time_s)
        # Tails are too rare for a margin on all computations: repairs find those that are late.
        steady = self.curve.profile.all_jitter.steady
        index = {clock: i for i, clock in enumerate(self._draws.clocks_mhz)}
        doubts: dict[Key, Floats] = {}
        for key, rows in self._mean.profile.measurements.items():
            if not rows[0].has_work:
                doubts[key] = np.zeros(len(rows))
                continue
            # Against the baseline of the same draw: what is common to both is no doubt.
            logs = np.log(self._draws.time_s[key][[index[row.clock_mhz] for row in rows]])
            doubts[key] = np.hypot(np.std(logs - base, axis=1), steady)
            # The maximum clock takes no margin, so a plan at full clocks stays possible.
            doubts[key][0] = 0.0
        return doubts

    def _repaired(
        self,
        drawn: _Drawn,
        ratio: float,
        lateness: Callable[[Floats], Floats],
        most_j: float,
        *,
        in_segments: bool,
    ) -> _Drawn:
        """Return the plan with faster clocks for what makes it late; as it is if it is on time.

        Slack is the difference of two long paths, of which the uncertainty is a share of their
        whole length, however short the computation is that uses the slack. A margin on that
        computation's time alone would have to be many times as large. So the computations that are
        on the longest path in late draws get the next faster of their operating points, those
        first that cost the least energy for the time that they save, until the plan is on time.

        Args:
            drawn: the plan.
            ratio: over the baseline; draws count by how much later than this they are.
            lateness: how late a plan of such seconds is; at most 0 if it is on time.
            most_j: effective energy from which on a plan is not worth more repairs, joules.
            in_segments: whether whole clock segments get faster, which adds no clock change.
        """
        faster = self._faster_segments if in_segments else self._faster_points
        clocks = list(drawn.clocks_mhz)
        margin = drawn.margin
        for _ in range(_REPAIRS):
            if lateness(drawn.time_s) <= 0.0 or self._effective_j(drawn) >= most_j:
                break
            moves = faster(clocks, self._late(drawn, ratio))
            if not moves:
                break
            moved = set[int]()
            for move in moves:
                if move.owner not in moved:
                    moved.add(move.owner)
                    for place in move.places:
                        clocks[place] = move.to_mhz
            drawn = self._replayed(clocks, margin)
            if self.curve.profile.clock_change is not None:
                drawn = self._replayed_plan(self._plan_of(drawn), margin)
        return drawn

    def _faster_points(self, clocks: Sequence[int], late: _Late) -> list[_Move]:
        """Return the moves of a round, of single computations to their next faster operating
        point, as `_faster_segments` does.
        """
        numbers = self._replay.numbers(clocks)
        by_number = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[by_number])) + 1
        scores = np.zeros(len(numbers))
        to_mhz = np.zeros(len(numbers), dtype=np.int64)
        # Computations of one point have one next faster point.
        for places in np.split(by_number, ends):
            key = self._mean.dag.iteration.keys[places[0]]
            at_mhz = clocks[places[0]]
            time_s = late.time_s[key]
            left = places
            # What is expected to be faster may be slower where the plan is late; full clocks are
            # what lateness is counted from.
            for mhz in self._faster[key].get(at_mhz, ()):
                less_s = time_s[self._draw_row[at_mhz]] - time_s[self._draw_row[mhz]]
                cost_j = self._costs_j[key][mhz] - self._costs_j[key][at_mhz]
                scores[left] = late.weight[left] @ less_s / max(cost_j, _LEAST_J)
                to_mhz[left] = mhz
                left = left[scores[left] <= 0.0]
        # Places rise, and break ties.
        order = np.argsort(-scores, kind="stable")[: _in_a_round(int((scores > 0.0).sum()))]
        return [
            _Move(score, (place,), mhz, place)
            for score, place, mhz in zip(
                scores[order].tolist(), order.tolist(), to_mhz[order].tolist(), strict=True
            )
        ]

    def _faster_segments(self, clocks: Sequence[int], late: _Late) -> list[_Move]:
        """Return the moves of a round: of those that take lateness away the part that cost the
        least energy for it, these first.

        What gets a faster clock is a whole segment, in which a rank keeps its clock, or the
        computation at one end of it, which joins the segment beside it. Two such moves of a rank
        could add a change: an end that joins a segment which gets another clock itself would be a
        segment of its own.

        Args:
            clocks: of each computation, MHz.
            late: when the plan of these clocks is late.
        """
        iteration = self._mean.dag.iteration
        keys = iteration.keys
        moves = []
        for rank, program in enumerate(iteration.programs):
            # Fixed operations have no clock, and end no segment.
            own = [place for place in program if place < len(keys)]
            segments = _segments(own, clocks)
            for number, segment in enumerate(segments):
                at_mhz = clocks[segment[0]]
                of_keys = {keys[place] for place in segment}
                common = set.intersection(*(set(self._costs_j[key]) for key in of_keys))
                tried = [(segment, sorted(common))]
                # The segments before and after it; iterations follow each other, so all have both.
                if len(segments) > 1:
                    before = clocks[segments[number - 1][0]]
                    after = clocks[segments[(number + 1) % len(segments)][0]]
                    tried += [([segment[0]], [before]), ([segment[-1]], [after])]
                # Of the clocks of the whole segment, the next one that is faster is enough.
                for places, clocks_mhz in tried:
                    faster = [mhz for mhz in clocks_mhz if mhz > at_mhz]
                    moves += self._first_move(places, at_mhz, faster, late, rank)
        return _in_order(moves)[: _in_a_round(len(moves))]

    def _first_move(
        self, places: Sequence[int], at_mhz: int, faster: Sequence[int], late: _Late, owner: int
    ) -> list[_Move]:
        """Return the move of places to the first of some faster clocks that takes lateness away, if
        there is one.
        """
        # Where a place is on no longest path, it takes none away.
        if not late.weight[places].any():
            return []
        by_key: dict[Key, list[int]] = {}
        for place in places:
            by_key.setdefault(self._mean.dag.iteration.keys[place], []).append(place)
        # Seconds at each clock, times lateness.
        late_s = sum(
            late.time_s[key] @ late.weight[of_key].sum(axis=0) for key, of_key in by_key.items()
        )
        for to_mhz in faster:
            costs = [(self._costs_j[key], len(of_key)) for key, of_key in by_key.items()]
            if any(to_mhz not in costs_j for costs_j, _ in costs):
                continue
            cost_j = sum(count * (costs_j[to_mhz] - costs_j[at_mhz]) for costs_j, count in costs)
            gain = float(late_s[self._draw_row[at_mhz]] - late_s[self._draw_row[to_mhz]])
            if gain > 0.0:
                return [_Move(gain / max(cost_j, _LEAST_J), tuple(places), to_mhz, owner)]
        return []

    @cached_property
    def _draw_row(self) -> dict[int, int]:
        """Clock -> its row in the draws."""
        return {clock: row for row, clock in enumerate(self._draws.clocks_mhz)}

    def _late(self, drawn: _Drawn, ratio: float) -> _Late:
        """Return the cases in which a plan is later than `ratio` times the baseline, the worst ones
        of the draws and all with jitter.
        """
        clocks = drawn.clocks_mhz
        # How late each draw is; the worst ones stand for all, as each is replayed again.
        excess = np.maximum(0.0, drawn.time_s / self._baseline.time_s - ratio)
        cases = np.argsort(-excess, kind="stable")[:_LATEST]
        cases = cases[excess[cases] > 0.0]
        on_path = self._replay.longest_paths(clocks, cases).on_path[: len(clocks)]
        weight = on_path * excess[cases]
        if self._jitter is not None:
            # What is late with jitter alone is late in iterations that have their own longest path,
            # and not in the draws that are the latest by their rows.
            paths = self._replay.longest_paths(clocks)
            with_s = paths.time_s + self._mean.profile.overhead_s
            excess = np.maximum(0.0, with_s / self._jittered_baseline_s - ratio)
            jittered = paths.on_path[: len(clocks)] * excess * self._jitter
            weight = np.concatenate([weight, jittered], axis=1)
            cases = np.concatenate([cases, self._replay.jittered_draws])
        return _Late({key: self._case_s(key, cases) for key in self._replay.keys}, weight)

    def _case_s(self, key: Key, cases: Integers) -> Floats:
        """Return the (clocks, cases) seconds that a computation takes in some draws."""
        rows = self._draws.time_s[key]
        # Exact rows have one draw that holds for all cases.
        return rows[:, cases] if rows.shape[1] > 1 else np.repeat(rows, len(cases), axis=1)

    def _steady(self, lateness: Callable[[Floats], Floats]) -> _Drawn:
        """Return the best plan found with one clock for each rank, by local search on the draws.

        It begins with the slowest common pace that is on time, and with all clocks at their
        maximum. Then each rank in turn gets its slowest clock that is on time, those first that
        have most to save.
        """
        options = self._paces
        iteration = self._mean.dag.iteration
        keys = iteration.keys
        rank_of = iteration.rank_of

        def drawn_of(chosen: Sequence[int]) -> _Drawn:
            clocks = [options[rank][chosen[rank]][2] for rank in rank_of[: len(keys)]]
            return self._replayed(clocks, 0.0)

        def slowest(low: int, high: int, chosen_of: Callable[[int], list[int]]) -> int:
            """Return the last number that is on time, where `low` is, by halving."""
            while low < high:
                middle = (low + high + 1) // 2
                if lateness(drawn_of(chosen_of(middle)).time_s) <= 0.0:
                    low = middle
                else:
                    high = middle - 1
            return low

        # A pace is a time within which every rank runs its load; only these times change what fits.
        loads_s = sorted({load_s for rank_options in options for load_s, _, _ in rank_options})

        def at_pace(number: int) -> list[int]:
            within_s = loads_s[number]
            # The slowest clock within the pace, or the fastest one where none is.
            return [
                max(0, sum(load_s <= within_s for load_s, _, _ in rank_options) - 1)
                for rank_options in options
            ]

        def with_rank(chosen: Sequence[int], rank: int, number: int) -> list[int]:
            return [*chosen[:rank], number, *chosen[rank + 1 :]]

        fastest = self._at_maximum
        # A rank whose computations have other highest clocks takes the highest that all have.
        if self._changes(fastest.clocks_mhz) > 0:
            fastest = drawn_of([0] * len(options))
        candidates = [fastest]
        # From full clocks, the ranks with most to save take the slack; from a common pace it is
        # shared.
        for start in ([0] * len(options), at_pace(slowest(0, len(loads_s) - 1, at_pace))):
            if lateness(drawn_of(start).time_s) > 0.0:
                continue
            # What each rank saves between its clock here and its slowest one.
            gain_j = [
                rank_options[option][1] - rank_options[-1][1]
                for rank_options, option in zip(options, start, strict=True)
            ]
            chosen = list(start)
            for rank in sorted(range(len(options)), key=lambda rank: -gain_j[rank]):
                of_rank = partial(with_rank, tuple(chosen), rank)
                chosen[rank] = slowest(chosen[rank], len(options[rank]) - 1, of_rank)
            candidates.append(drawn_of(chosen))
        on_time = [drawn for drawn in candidates if lateness(drawn.time_s) <= 0.0]
        return min(on_time or [fastest], key=self._effective_j)

    def _exchanged(self, start: _Drawn, lateness: Callable[[Floats], Floats]) -> _Drawn:
        """Return a plan of one clock for each rank after a local search on the draws.

        Args:
            start: such a plan, on time.
            lateness: how late a plan of such seconds is; at most 0 if it is on time.
        """
        keys = self._mean.dag.iteration.keys
        count = self._replay.count
        places = [[i for i in rank if i < len(keys)] for rank in self._mean.dag.iteration.programs]
        start_mhz = [start.clocks_mhz[of_rank[0]] for of_rank in places]
        # A plan may have a clock that another one beats.
        options = [
            sorted({mhz, *(option[2] for option in of_rank)}, reverse=True)
            for mhz, of_rank in zip(start_mhz, self._paces, strict=True)
        ]
        rank_of = self._mean.dag.iteration.rank_of[: len(keys)]

        def drawn_of(chosen: Sequence[int]) -> _Drawn:
            return self._replayed([options[rank][chosen[rank]] for rank in rank_of], start.margin)

        def replay(chosen: Sequence[int]) -> Replay:
            drawn = drawn_of(chosen)
            cases = np.arange(count)
            paths = self._replay.longest_paths(drawn.clocks_mhz, cases)
            time_s = paths.time_s
            on_path = paths.on_path
            if self._jitter is not None:
                # The iterations with jitter follow the draws, and their paths are as long as they
                # are with it.
                jittered = self._replay.longest_paths(drawn.clocks_mhz)
                time_s = np.concatenate([time_s, jittered.time_s])
                jittered.on_path[: len(keys)] *= self._jitter
                on_path = np.concatenate([on_path, jittered.on_path], axis=1)
                cases = np.concatenate([cases, self._replay.jittered_draws])
            option_s = [
                self._path_s(of_rank, clocks, on_path, cases)
                for of_rank, clocks in zip(places, options, strict=True)
            ]
            own_s = sum(of_rank[i] for of_rank, i in zip(option_s, chosen, strict=True))
            return Replay(bool(lateness(drawn.time_s) <= 0.0), Path(time_s - own_s, option_s))

        def are_on_time(case_s: Floats) -> npt.NDArray[np.bool_]:
            time_s = case_s[:, :count]
            if self._jitter is not None:
                # Jitter enters as one factor, as in a replay.
                with_s = case_s[:, count:]
                some_s = time_s[:, : with_s.shape[1]]
                time_s = time_s * (np.mean(with_s, axis=1) / np.mean(some_s, axis=1))[:, None]
            is_on_time: npt.NDArray[np.bool_] = (
                lateness(time_s + self._mean.profile.overhead_s) <= 0.0
            )
            return is_on_time

        options_j = [
            [sum(self._costs_j[keys[place]][mhz] for place in of_rank) for mhz in clocks]
            for of_rank, clocks in zip(places, options, strict=True)
        ]
        chosen = [clocks.index(mhz) for clocks, mhz in zip(options, start_mhz, strict=True)]
        return drawn_of(exchange(chosen, options_j, replay, are_on_time))

    def _path_s(
        self, places: Sequence[int], clocks: Sequence[int], on_path: Floats, cases: Integers
    ) -> Floats:
        """Return the (clocks, cases) seconds of places on a path, at each of some clocks."""
        by_key: dict[Key, list[int]] = {}
        for place in places:
            by_key.setdefault(self._mean.dag.iteration.keys[place], []).append(place)
        rows = [self._draw_row[mhz] for mhz in clocks]
        seconds: Floats = np.zeros((len(clocks), len(cases)))
        for key, of_key in by_key.items():
            seconds += on_path[of_key].sum(axis=0) * self._case_s(key, cases)[rows]
        return seconds

    @cached_property
    def _paces(self) -> list[list[tuple[float, float, int]]]:
        """For each rank, the (seconds, effective joules, clock) of all that it runs at one clock,
        fastest first, without those that are dominated; none if some rank has no clock at which
        all that it runs was measured.
        """
        dag = self._mean.dag
        profile = self._mean.profile
        options = []
        tables = {
            key: {row.clock_mhz: row for row in profile.measurements[key]}
            for key in set(dag.iteration.keys)
        }
        for program in dag.iteration.programs:
            # How often each computation runs on the rank.
            counts = Counter(dag.iteration.keys[i] for i in program if i < len(dag.iteration.keys))
            # One clock for the whole rank must have been measured for all that it runs.
            clocks = set.intersection(*(set(tables[key]) for key in counts))
            if not clocks:
                return []
            top = max(clocks)
            loads = []
            for mhz in clocks:
                rows = [(count, key, tables[key][mhz]) for key, count in counts.items()]
                load_s = math.fsum(count * row.time_s for count, _, row in rows)
                # Effective energy: without what the GPU would draw waiting in that time.
                load_j = math.fsum(
                    count * (row.energy_j - profile.blocking_w(key.stage) * row.time_s)
                    for count, key, row in rows
                )
                loads.append((load_s, load_j, mhz))
            # The top clock stays, with which all plans are compared.
            kept = [next(load for load in loads if load[2] == top)]
            for load in sorted(loads):
                if load[0] > kept[-1][0] and load[1] < kept[-1][1]:
                    kept.append(load)
            options.append(kept)
        return options

    @cached_property
    def _costs_j(self) -> dict[Key, dict[int, float]]:
        """(stage, kind) -> clock -> effective joules of the expected rows."""
        profile = self._mean.profile
        return {
            key: {
                row.clock_mhz: row.energy_j - profile.blocking_w(key.stage) * row.time_s
                for row in profile.measurements[key]
            }
            for key in set(self._mean.dag.iteration.keys)
        }

    @cached_property
    def _faster(self) -> dict[Key, dict[int, tuple[int, ...]]]:
        """(stage, kind) -> clock below the top clock -> the next faster operating point, if there
        is one, and the top clock.
        """
        steps: dict[Key, dict[int, tuple[int, ...]]] = {}
        for key in set(self._mean.dag.iteration.keys):
            top, *rows = self._mean.profile.measurements[key]
            points = self._mean.dag.points[key]
            steps[key] = {}
            for row in rows:
                quicker = [point for point in points if point.time_s < row.time_s * (1 - _SAME)]
                # The slowest of the faster points is the smallest step. The top clock need not be
                # an operating point, but all clocks at maximum must stay in reach.
                step = [max(quicker, key=lambda point: point.time_s).clock_mhz] if quicker else []
                steps[key][row.clock_mhz] = (*step, top.clock_mhz)
        return steps

    def _replayed(self, clocks_mhz: list[int], margin: float | None) -> _Drawn:
        """Return the replays of these clocks, as if clock changes cost nothing."""
        return _Drawn(clocks_mhz, margin, *self._replay.replay(clocks_mhz))

    def _replayed_plan(self, plan: Plan, margin: float | None) -> _Drawn:
        """Return the replays of a plan's clocks.

        What clock changes cost with the expected times is taken to be the same in all of them.
        """
        drawn = self._replayed([*plan.clocks.values()], margin)
        if plan.clock_change is None:
            return drawn
        expected = self._plan_of(drawn)
        # The same clocks with free changes: the difference is what changes cost.
        points = [expected.measurement(computation) for computation in self._mean.dag.computations]
        free_s, free_j = time_and_energy(self._mean.dag, points)
        return drawn._replace(
            time_s=drawn.time_s + (expected.time_s - free_s),
            energy_j=drawn.energy_j + (expected.energy_j - free_j),
        )

    def _plan_of(self, drawn: _Drawn) -> Plan:
        """Return the plan of these clocks with their expected times."""
        plan = self.mean_planner.plan_of(drawn.clocks_mhz, None)
        profile = self.curve.profile
        return replace(
            plan,
            profile_digest=profile.digest,
            remarks=profile.remarks,
            baseline_time_s=self.curve.baseline_time_s,
            baseline_energy_j=self.curve.baseline_energy_j,
        )

    def _expected_ratio(self, time_s: Floats) -> Floats:
        """Return the mean of (..., draws) seconds over those with all clocks at their maximum."""
        mean: Floats = np.mean(time_s / self._baseline.time_s, axis=-1)
        return mean

    def _likely_ratio(self, time_s: Floats, probability: float) -> Floats:
        """Return what (..., draws) seconds keep with this probability, over those with all clocks
        at their maximum.
        """
        likely: Floats = np.quantile(time_s / self._baseline.time_s, probability, axis=-1)
        return likely

    def _effective_j(self, drawn: _Drawn) -> float:
        return float(np.mean(drawn.energy_j - self.curve.dag.waiting_w * drawn.time_s))

    def _certainty(self, plan: Plan, drawn: _Drawn, probability: float, safety_j: float) -> OnTime:
        """Return how sure the plan is; a plan without a margin saves `safety_j` more."""
        base = self._baseline
        keys = self.curve.dag.iteration.keys
        # The rows that the plan stands on, each once, however often it runs.
        in_use = set(zip(keys, drawn.clocks_mhz, strict=True))
        # Rows that no sweep has measured are told from all others.
        interpolated = {} if self.estimate is None else self.estimate.interpolated
        profile = self.curve.profile
        # Of a trace only the rows at the highest clock were seen, whatever errors others have.
        is_traced = profile.origin == "traced"
        highest = {key: rows[0].clock_mhz for key, rows in profile.measurements.items()}
        unseen = sum(
            clock in interpolated.get(key, ()) or (is_traced and clock != highest[key])
            for key, clock in in_use
        )
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
            interpolated=unseen,
            has_errors=self.estimate is not None and self.estimate.has_errors,
            jitter=self.curve.profile.jitter,
            jitter_common=self.curve.profile.jitter_common,
            jitter_tail=self.curve.profile.jitter_tail,
            gpu_spread=self.curve.profile.assumed_spread,
            is_spread_assumed=self.curve.profile.gpu_spread is None,
            time_scale=self._scales[0],
        )


def _scaled(profile: Profile, longer: float, dearer: float) -> Profile:
    """Return the profile with times and energies that are multiplied."""
    measurements = {
        key: tuple(
            replace(row, time_s=longer * row.time_s, energy_j=dearer * row.energy_j) for row in rows
        )
        for key, rows in profile.measurements.items()
    }
    return replace(profile, measurements=measurements)


def _step_of(ratio: float) -> _Step:
    """Return the step of the series that a deadline lies in, or ends."""
    end = math.ceil(ratio / _STEP - _ROUNDING)
    is_end = abs(ratio - end * _STEP) <= _ROUNDING
    return _Step((end - 1) * _STEP, ratio if is_end else end * _STEP)


def _limit_of(ratio: float, tolerance: float) -> float:
    """Return what a likely time may be, over the baseline: the tolerance is for deadlines no
    earlier than that alone.
    """
    return ratio if ratio < 1 - _ROUNDING else max(ratio, 1 + tolerance)


def _in_a_round(moves: int) -> int:
    """Return how many of some moves a round makes: a part of them at a time, as each faster clock
    may move the longest path elsewhere.
    """
    return math.ceil(moves * _AT_ONCE)


def _in_order(moves: list[_Move]) -> list[_Move]:
    """Return the moves, the best first; places break ties, so that equal input gives an equal
    plan.
    """
    return sorted(moves, key=lambda move: (-move.score, move.places))


def _segments(places: Sequence[int], clocks: Sequence[int]) -> list[list[int]]:
    """Return the runs of equal clocks of a rank, in order; iterations follow each other, so the
    last run goes on in the first one if their clocks are equal.
    """
    segments: list[list[int]] = []
    for place in places:
        if segments and clocks[segments[-1][-1]] == clocks[place]:
            segments[-1].append(place)
        else:
            segments.append([place])
    if len(segments) > 1 and clocks[segments[-1][-1]] == clocks[segments[0][0]]:
        segments[0] = segments.pop() + segments[0]
    return segments


def _interval(values: Floats, wider: float, unit: float = 1.0) -> Interval:
    """Return the interval of what is drawn, widened; the least doubt is in `unit`."""
    mean = float(np.mean(values))
    ends = np.quantile(values, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]) - mean
    # The model's own doubt is independent of the draws', so both add as squares.
    low, high = (math.hypot(wider * end, _LEAST_DOUBT * unit) for end in ends.tolist())
    return Interval(mean, mean - low, mean + high)
