"""Make plans from a frontier: one measured clock per computation, within a deadline and a switch
budget.

If the profile has the cost of a clock change, plans with few and with many changes are replayed
with that cost and compared; plans that it makes late are made again for an earlier deadline.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import baseline_name, replay, time_and_energy
from perseus_planner.profiles.measurement import nearest_clock
from perseus_planner.profiles.modes import OWN
from perseus_planner.profiles.sharding import TORCH
from perseus_planner.solver.budget import clocks_by_budget, clocks_within_budget
from perseus_planner.solver.labels import MOST_NODES, LabelSearch
from perseus_planner.solver.network import Guides
from perseus_planner.solver.point_problem import (
    PRICE_ROUNDING,
    PointProblem,
    compute_ends,
    find_windows,
    point_bound_gain_j,
    point_problem,
)
from perseus_planner.solver.polish import polish
from perseus_planner.solver.rounding import ANCHOR_SPAN, Anchor, round_plan

if TYPE_CHECKING:
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.measurement import ClockChange, Measurement, OperatingPoint
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.curve import TimeEnergyCurve
    from perseus_planner.solver.network import Integers
    from perseus_planner.solver.point_problem import Window

_MADE_WITH = f"Python {platform.python_version()}, numpy {np.__version__}"
#: numbers of changes that are tried, beside any number, if changes cost time
_LEVELS = (0, 2, 4, 8, 16, 32)
#: relaxed solutions of which the bound for operating points is made; nodes of them all
_BOUND_GUIDES = (5, 10_000)
_QUICK = 0.1  #: part of the effort of a rough plan
_QUICK_ANCHORS = 4  #: relaxed solutions near the deadline that it begins with, at most
_RETRIES = 3  #: how often a plan that clock changes make late is made again for an earlier deadline


class Planner:
    """Makes plans along one time-energy curve, and remembers them.

    Args:
        curve: the curve.
        slower: the same iteration with other times, for which plans are made instead, guided by the
            relaxed solutions of `curve`, which fit closely while the times are nearly alike.
            Bounds are those of `curve`. They are rounded with a tenth of the effort, and polished:
            that loses a thousandth of the saving.
    """

    def __init__(self, curve: TimeEnergyCurve, slower: PipelineDag | None = None) -> None:
        self.curve = curve
        self.dag = slower or curve.dag
        self.profile = self.dag.profile
        self._effort = 1.0 if slower is None else _QUICK
        self._plans: dict[tuple[float, int | None], Plan] = {}
        self._chosen: dict[tuple[float, float, bool], Integers] = {}
        self._known: dict[float, tuple[int, ...]] = {}
        # Deadline -> the levels of changes that were searched, and what was found for them.
        self._by_budget: dict[float, tuple[tuple[int, ...], dict[int, list[int]]]] = {}

    def keep(self, deadline_s: float, clocks: Sequence[int]) -> None:
        """Take the clock of each computation, MHz, as a plan for a deadline, if it is a better one
        than is found.
        """
        self._known[deadline_s] = tuple(clocks)

    def plan(self, deadline_s: float, max_changes: int | None) -> Plan:
        """Return the plan of the least effective energy that was found.

        Args:
            deadline_s: seconds, including the overhead; at least what the fastest points of the
                planned iteration take, which is `curve.min_time_s` if no slower one was given.
            max_changes: most clock changes per rank and iteration; None for any number.

        Raises:
            InfeasibleBudget: If no plan found within the switch budget meets the deadline.
            InfeasibleDeadline: If no choice of clocks does, or none because of the cost of clock
                changes.
        """
        key = deadline_s, max_changes
        if key not in self._plans:
            if deadline_s < self._min_time_s:
                raise InfeasibleDeadline(deadline_s, self._min_time_s)
            make = self._plan if self.profile.clock_change is None else self._plan_with_costs
            self._plans[key] = make(*key)
        return self._plans[key]

    def _plan(self, deadline_s: float, max_changes: int | None) -> Plan:
        """Return the plan if clock changes cost nothing."""
        clocks = self.clocks(deadline_s)
        if max_changes is not None:
            # The search within a budget knows no overhead, which its answer gets back below.
            within_s = self._replayed_s(deadline_s)
            try:
                clocks = self._without_idle_changes(
                    clocks_within_budget(self.dag, within_s, clocks, max_changes)
                )
            except InfeasibleBudget as error:
                least_s = error.least_time_s + self.profile.overhead_s
                raise _infeasible(deadline_s, max_changes, least_s) from None
        plan = self.plan_of(clocks, deadline_s)
        # A plan never misses its deadline: whatever found the clocks, the replay has the last word.
        if plan.time_s > deadline_s:
            raise AssertionError(
                f"a plan of {plan.time_s} s for a deadline of {deadline_s} s: please report this"
            )
        return plan

    def _plan_with_costs(self, deadline_s: float, max_changes: int | None) -> Plan:
        """Return the plan if clock changes take time: the best one of few and of many changes, each
        made again for an earlier deadline while that may pay.
        """
        levels: list[int | None] = [
            level for level in _LEVELS if max_changes is None or level < max_changes
        ]
        levels.append(max_changes)
        # The searches take changes as free: only the replay tells how late a plan really is.
        plans = self._candidates(deadline_s, deadline_s, levels)
        best = self._best(plans.values(), deadline_s)
        # Level -> the deadlines that it was made for, one more for each retry.
        aims = {level: [deadline_s] for level, _ in plans}
        while True:
            # Worth a retry: late, cheaper than the best plan in time, and not tried too often.
            late = [
                (level, plan)
                for (level, _), plan in plans.items()
                if plan.time_s > deadline_s
                and (best is None or self._effective_j(plan) < self._effective_j(best))
                and len(aims[level]) <= _RETRIES
            ]
            if not late:
                break
            level, plan = min(late, key=lambda entry: self._effective_j(entry[1]))  # most promising
            # Each plan is late by another time: a second and a third one get room for that.
            aims[level].append(aims[level][-1] - len(aims[level]) * (plan.time_s - deadline_s))
            # Both plans of the level go; one of them that is in time stays as `best`.
            plans = {key: plan for key, plan in plans.items() if key[0] != level}
            # An aim before the fastest time leaves the level without a plan.
            if aims[level][-1] >= self._min_time_s:
                plans |= self._candidates(aims[level][-1], deadline_s, [level])
                best = self._best([*plans.values(), *([best] if best else [])], deadline_s)
        return best or self._fastest_with_costs(deadline_s, levels)

    def _fastest_with_costs(self, deadline_s: float, levels: Sequence[int | None]) -> Plan:
        """Return the best plan in time of those that aim at the least time of all."""
        # Plans that aim at the fastest time of all have the most room for changes.
        plans = self._candidates(self._min_time_s, deadline_s, levels).values()
        best = self._best(plans, deadline_s)
        if best is not None:
            return best
        least_s = min((plan.time_s for plan in plans), default=math.inf)
        if levels[-1] is None:
            raise InfeasibleDeadline(deadline_s, least_s)
        raise _infeasible(deadline_s, levels[-1], least_s)

    def _best(self, plans: Iterable[Plan], deadline_s: float) -> Plan | None:
        fitting = [plan for plan in plans if plan.time_s <= deadline_s]
        return min(fitting, key=self._effective_j, default=None)

    def _candidates(
        self, aim_s: float, deadline_s: float, levels: Sequence[int | None]
    ) -> dict[tuple[int | None, bool], Plan]:
        """Return plans that would meet `aim_s` if clock changes cost nothing, replayed with their
        cost.

        Args:
            aim_s: seconds.
            deadline_s: the deadline that the plans state, seconds.
            levels: the most changes of each plan; None for any number.

        Returns:
            (level, whether faster clocks are requested early) -> plan, for the levels at which one
            was found.
        """
        unlimited = self.clocks(aim_s)
        # Nobody can change a clock more often than there are computations.
        counts = [len(unlimited) if level is None else level for level in levels]
        clocks_by_level: dict[int | None, list[int]] = {}
        # Only the last level may be unlimited, and that plan is there already.
        if levels[-1] is None:
            clocks_by_level[None] = unlimited
            counts.pop()
        # One search for all levels, as each begins with the plan of the level before.
        if counts:
            budgets = self.clocks_by_budget(aim_s, counts)
            clocks_by_level |= {
                level: budgets[n] for level, n in zip(levels, counts, strict=False) if n in budgets
            }
        plans = {
            (level, False): self.plan_of(clocks, deadline_s)
            for level, clocks in clocks_by_level.items()
        }
        # A faster clock that comes late costs time, and so may be worth the energy of asking early.
        if self.profile.clock_change is not None:
            early = {
                level: self._faster_early(clocks, self.profile.clock_change)
                for level, clocks in clocks_by_level.items()
            }
            plans |= {
                (level, True): self.plan_of(clocks, deadline_s) for level, clocks in early.items()
            }
        return plans

    def _faster_early(self, clocks: Sequence[int], change: ClockChange) -> list[int]:
        """Return the same clocks, but each faster one also for what runs just before, so that it is
        in force in time.

        No rank changes its clock more often than before.
        """
        keys = self.dag.iteration.keys
        changed = list(clocks)
        # From the request until the clock is in force: all calls of a change, then settling.
        latency_s = (
            change.calls_per_change(self.profile.gpus_per_stage) * change.call_s + change.settle_s
        )
        for program in self.dag.iteration.programs:
            places = [place for place in program if place < len(keys)]
            for number, place in enumerate(places):
                # -1 before the first one is the last one, as iterations repeat
                before = number - 1
                left_s = latency_s
                run_mhz = clocks[places[before]]
                mhz = clocks[place]
                table = self._table[keys[place]]
                # Only a clock that shortens this computation is worth asking for early.
                if run_mhz not in table or table[mhz].time_s >= table[run_mhz].time_s:
                    continue
                # Go back until the latency is covered, through the last clock segment alone: so no
                # change is added.
                while (
                    left_s > 0.0
                    and before > number - len(places)
                    and clocks[places[before]] == run_mhz
                ):
                    key = keys[places[before]]
                    if mhz not in self._table[key]:
                        break
                    changed[places[before]] = mhz
                    # It still runs at the clock before, as the new one is not in force yet.
                    left_s -= self._table[key][run_mhz].time_s
                    before -= 1
        return changed

    def _effective_j(self, plan: Plan) -> float:
        return plan.energy_j - self.dag.waiting_w * plan.time_s

    def clocks(self, deadline_s: float, *, is_rough: bool = False) -> list[int]:
        """Return the clock of each computation of `dag.computations`, MHz, without a switch budget,
        if clock changes cost nothing.

        A rough plan is not polished, and takes a tenth of the effort.
        """
        points = self.points(deadline_s, is_rough=is_rough)
        clocks = self._without_idle_changes([point.clock_mhz for point in points])
        if (kept := self._known.get(deadline_s)) is None:
            return clocks
        return min(clocks, list(kept), key=lambda choice: self._cost(choice, deadline_s))

    def clocks_by_budget(self, deadline_s: float, levels: Sequence[int]) -> dict[int, list[int]]:
        """Return number of changes -> such clocks within this switch budget, for each of the levels
        within which a plan was found.

        Raises:
            InfeasibleDeadline: If no clocks at all meet the deadline.
        """
        if deadline_s < self._min_time_s:
            raise InfeasibleDeadline(deadline_s, self._min_time_s)
        searched, found = self._by_budget.get(deadline_s, ((), {}))
        # Levels are searched in turn, so a series begins as every shorter one does.
        if searched[: len(levels)] != tuple(levels):
            unlimited = self.clocks(deadline_s)
            # The search within a budget knows no overhead.
            within_s = self._replayed_s(deadline_s)
            found = clocks_by_budget(self.dag, within_s, unlimited, levels)
            self._by_budget[deadline_s] = (tuple(levels), found)
        return {
            level: self._without_idle_changes(found[level]) for level in levels if level in found
        }

    def _without_idle_changes(self, clocks: list[int]) -> list[int]:
        """Return the clocks, where computations without work keep the clock of what runs before
        them on their rank, so that no clock is changed for them.
        """
        keys = self.dag.iteration.keys
        if all(map(self.profile.has_work, set(keys))):
            return clocks
        kept = list(clocks)
        for program in self.dag.iteration.programs:
            computed = [place for place in program if place < len(keys)]
            busy = [place for place in computed if self.profile.has_work(keys[place])]
            if not busy:  # the rank has no work at all
                for place in computed:
                    kept[place] = max(self._table[keys[place]])
                continue
            clock = clocks[busy[-1]]  # of the iteration before
            for place in computed:
                if self.profile.has_work(keys[place]):
                    clock = clocks[place]
                # Where this clock was not measured, the computation keeps its own.
                elif clock in self._table[keys[place]]:
                    kept[place] = clock
        return kept

    def _cost(self, clocks: Sequence[int], deadline_s: float) -> tuple[bool, float]:
        """Return whether an iteration at these clocks is late, and its effective energy, joules."""
        keys = self.dag.iteration.keys
        points = [self._table[key][clock] for key, clock in zip(keys, clocks, strict=True)]
        time_s, energy_j = time_and_energy(self.dag, points)
        return time_s > deadline_s, energy_j - self.dag.waiting_w * time_s

    def points(self, deadline_s: float, *, is_rough: bool = False) -> list[OperatingPoint]:
        """Return the operating points of such clocks, in their modes where these are open."""
        effort = _QUICK if is_rough else self._effort
        chosen = self._choose(deadline_s, effort, is_polished=not is_rough)
        rank_in_class = chosen - self._points.point_start[self._points.member]
        index = dict(zip(self.dag.order, rank_in_class.tolist(), strict=True))
        return [
            self.dag.points[key][index[place]] for place, key in enumerate(self.dag.iteration.keys)
        ]

    def _choose(self, deadline_s: float, effort: float, *, is_polished: bool) -> Integers:
        """Return the point of each computation in `dag.order`."""
        key = deadline_s, effort, is_polished
        if key not in self._chosen:
            problem = self._points
            within_s = self._replayed_s(deadline_s)
            # Beyond this time nothing saves any more, so there is nothing to search.
            if deadline_s >= self._max_time_s:
                chosen = problem.point_start[problem.member + 1] - 1  # the slowest of each
            elif is_polished:
                # Remembered by itself: a rough plan is this one, not polished.
                rounded = self._choose(deadline_s, effort, is_polished=False)
                chosen = polish(problem, within_s, rounded)
                # Labels reach what local moves do not, but only small problems are searched so.
                if len(chosen) <= MOST_NODES:
                    search = LabelSearch(self.dag, problem, within_s, effort)
                    chosen = search.improve(chosen)
            else:
                # A rough plan begins with the nearest relaxed solutions alone.
                anchors = self._anchors(within_s, None if effort == 1.0 else _QUICK_ANCHORS)
                chosen = round_plan(problem, within_s, anchors, self._at_maximum_clock, effort)
            self._chosen[key] = chosen
        return self._chosen[key]

    @cached_property
    def _points(self) -> PointProblem:
        return point_problem(self.dag)

    @cached_property
    def _at_maximum_clock(self) -> Integers:
        """(n,) in `dag.order`, the cheapest point that is no slower than the maximum clock."""
        # Points rise in time and fall in cost, so the last one that is no slower is the cheapest.
        last = {
            key: sum(point.time_s <= self.profile.measurements[key][0].time_s for point in points)
            - 1
            for key, points in self.dag.points.items()
            if key in self.profile.measurements
        }
        above = np.array(
            [last.get(self.dag.keys[place], 0) for place in self.dag.order], dtype=np.int64
        )
        return np.add(self._points.point_start[self._points.member], above)

    def point_bound_j(self, deadline_s: float) -> float:
        """Return a bound on the energy of an iteration of that time that runs at operating
        points alone, joules.
        """
        curve = self.curve
        guides = self.curve.guides
        within_s = self._replayed_s(deadline_s)
        # All flow enters where nothing is waited for: those prices sum to that of the iteration's
        # time.
        sources = np.diff(self._points.before_start) == 0
        bounds_j = [curve.bound_j(deadline_s)]
        # Each guide takes a pass over all nodes, so large problems get fewer.
        count = max(1, min(_BOUND_GUIDES[0], _BOUND_GUIDES[1] // len(sources)))
        # Relaxed solutions near the deadline give the tightest bounds, as a rule.
        for i in np.argsort(np.abs(guides.time_s - within_s), kind="stable")[:count].tolist():
            at_s = float(guides.time_s[i])
            price_w = guides.price_w[i].astype(np.float64)
            # Ticks round, so a guide may lie a hair outside the curve.
            guide_s = min(max(at_s + self.profile.overhead_s, curve.min_time_s), curve.max_time_s)
            later_s = deadline_s - guide_s
            price_of_all_w = float(price_w[sources].sum())
            # The flow of one time bounds all others, along the tangent there: a second more is
            # worth the flow's price, and all GPUs draw waiting power in it.
            tangent_j = curve.bound_j(guide_s) + (self.dag.waiting_w - price_of_all_w) * later_s
            # Prices are 32-bit numbers: the slope of the tangent is off by so much.
            rounding_j = PRICE_ROUNDING * price_of_all_w * abs(later_s)
            bounds_j.append(
                tangent_j - rounding_j + point_bound_gain_j(self._points, self._windows, price_w)
            )
        return max(bounds_j)

    @cached_property
    def _ends_s(self) -> tuple[float, float]:
        """The replayed time with the fastest points, and with the slowest ones, seconds."""
        if self.dag is self.curve.dag:
            return self.curve.replayed_ends_s
        start = self._points.point_start
        member = self._points.member
        end_s = np.empty(len(member))
        fastest_s = compute_ends(self._points, start[member], end_s)
        slowest_s = compute_ends(self._points, start[member + 1] - 1, end_s)
        return fastest_s, slowest_s

    @property
    def _min_time_s(self) -> float:
        return self._ends_s[0] + self.profile.overhead_s

    @property
    def _max_time_s(self) -> float:
        return self._ends_s[1] + self.profile.overhead_s

    @cached_property
    def _guides(self) -> Guides:
        """The guides of the curve, stretched to the times of the slower iteration."""
        guides = self.curve.guides
        first_s, last_s = self.curve.replayed_ends_s
        if self.dag is self.curve.dag or first_s == last_s:
            return guides
        # The fast and the slow end are mapped to those of the slower iteration, straight between.
        per_s = (self._ends_s[1] - self._ends_s[0]) / (last_s - first_s)
        time_s = self._ends_s[0] + (guides.time_s - first_s) * per_s
        # Each end stays the same part of its iteration.
        longer = time_s / guides.time_s
        return Guides(time_s, guides.end_s * longer[:, None], guides.price_w)

    @cached_property
    def _windows(self) -> list[Window]:
        ranks = self.dag.iteration.rank_of
        return find_windows(self._points, [ranks[place] for place in self.dag.order])

    def _replayed_s(self, deadline_s: float) -> float:
        """Return the longest replayed time that, with the overhead, rounds to at most
        `deadline_s`.
        """
        overhead_s = self.profile.overhead_s
        # A sum that is half a unit in the last place above the deadline still rounds to it;
        # fractions keep this exact.
        within_s = float(
            Fraction(deadline_s) + Fraction(math.ulp(deadline_s)) / 2 - Fraction(overhead_s)
        )
        # Rounding to a float here, or a tie there, may have gone up.
        while within_s + overhead_s > deadline_s:
            within_s = math.nextafter(within_s, 0.0)
        return within_s

    def _anchors(self, within_s: float, most: int | None) -> list[Anchor]:
        """Return a relaxed solution at a replayed time, between the two next to it, and the
        nearest ones to it, `most` of them or all.
        """
        guides = self._guides
        fastest_s, slowest_s = self._ends_s
        # Ticks round, so the first and the last guide may lie outside of what replays.
        times_s = np.clip(guides.time_s, fastest_s, slowest_s)
        # Times fall, so it is their negatives that are sorted.
        before = min(max(int(np.searchsorted(-times_s, -within_s)), 1), len(times_s) - 1)
        # 0 at the slower guide, 1 at the faster one.
        part = (times_s[before - 1] - within_s) / max(
            times_s[before - 1] - times_s[before], math.ulp(within_s)
        )
        part = min(max(part, 0.0), 1.0)
        # Precedence is linear in the ends, so a mean of two relaxed solutions is feasible as well.
        between = (
            (1 - part) * guide[before - 1] + part * guide[before]
            for guide in (guides.end_s, guides.price_w)
        )
        distance = np.abs(times_s / within_s - 1)
        # One that is at the time itself is the first anchor already.
        near = [
            i
            for i in np.argsort(distance, kind="stable")[:most].tolist()
            if 0.0 < distance[i] <= ANCHOR_SPAN
        ]
        return [
            Anchor(within_s, *between),
            *(Anchor(float(times_s[i]), guides.end_s[i], guides.price_w[i]) for i in near),
        ]

    def plan_of(self, clocks: Sequence[int], deadline_s: float | None) -> Plan:
        """Return the replayed plan of one clock (MHz) per computation; without a deadline, its
        time is its deadline.
        """
        keys = self.dag.iteration.keys
        curve = self.curve
        points = [self._table[key][clock] for key, clock in zip(keys, clocks, strict=True)]
        time_s, energy_j = time_and_energy(self.dag, points)
        plan = Plan(
            iteration=self.dag.iteration,
            clocks={
                str(c): point.clock_mhz
                for c, point in zip(self.dag.computations, points, strict=True)
            },
            measurements=self._used(clocks),
            profile_digest=self.profile.digest,
            gpu=self.profile.gpu,
            origin=self.profile.origin,
            blocking_power_w=self.profile.blocking_power_w,
            deadline_s=time_s if deadline_s is None else deadline_s,
            time_s=time_s,
            energy_j=energy_j,
            # A plan at the fastest time may be a rounding error below it, where no bound is.
            bound_j=curve.bound_j(max(time_s, curve.min_time_s)),
            baseline_time_s=curve.baseline_time_s,
            baseline_energy_j=curve.baseline_energy_j,
            gpus_per_stage=self.profile.gpus_per_stage,
            control=self.profile.control,
            overhead_s=self.profile.overhead_s,
            clock_change=self.profile.clock_change,
            torch=self.profile.conditions.get(TORCH),
            baseline=baseline_name(self.profile),
            remarks=self.profile.remarks,
            full_clocks=self._full_clocks,
            made_with=_MADE_WITH,
        )
        if plan.clock_change is None:
            return plan
        # With changes that take time, the replay of these says time and energy.
        timeline = replay(plan)
        time_s = timeline.time_s
        bound_j = curve.bound_j(max(timeline.time_s, curve.min_time_s))
        deadline_s = time_s if deadline_s is None else deadline_s
        return replace(
            plan, deadline_s=deadline_s, time_s=time_s, energy_j=timeline.energy_j, bound_j=bound_j
        )

    @cached_property
    def _table(self) -> dict[Key, dict[int, Measurement]]:
        used = set(self.dag.iteration.keys)
        return {
            key: {m.clock_mhz: m for m in rows}
            for key, rows in self.profile.measurements.items()
            if key in used
        }

    @cached_property
    def _full_clocks(self) -> dict[Key, Measurement]:
        """The `Plan.full_clocks` of each plan."""
        rows = {}
        for key in self._table:
            own_key = key.in_mode(OWN)
            known = own_key if own_key in self.profile.measurements else key
            rows[own_key] = self.profile.measurements[known][0]
        return rows

    def _used(self, clocks: Sequence[int]) -> Mapping[Key, Mapping[int, Measurement]]:
        """Return the `Plan.measurements` of a plan of these clocks, highest clocks first."""
        used: dict[Key, set[int]] = {key: set() for key in self._table}
        keys = self.dag.iteration.keys
        ranks = self.dag.iteration.rank_of
        for key, clock in zip(keys, clocks, strict=True):
            used[key].add(clock)
        # Where changes take time, a computation may begin at the clock of any other on its rank.
        if self.profile.clock_change is not None:
            # Each computation needs rows for all clocks of its rank, or the nearest that it has.
            on_rank: dict[int, set[int]] = {}
            for rank, clock in zip(ranks, clocks, strict=False):
                on_rank.setdefault(rank, set()).add(clock)
            for rank, key in set(zip(ranks, keys, strict=False)):
                used[key] |= {nearest_clock(self._table[key], clock) for clock in on_rank[rank]}
        return {
            key: {clock: self._table[key][clock] for clock in sorted(used[key], reverse=True)}
            for key in used
        }


def _infeasible(deadline_s: float, max_changes: int, least_s: float) -> InfeasibleBudget:
    return InfeasibleBudget(deadline_s, max_changes, least_s if least_s < math.inf else None)
