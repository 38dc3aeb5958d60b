"""Plans of one clock for each rank that are on time in spite of what is uncertain, found by search
on the draws.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.exchanges import Path, Replay, exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.solver.drawn_plans import Drawn, DrawnPlans, Lateness
    from perseus_planner.solver.network import Integers


class _Load(NamedTuple):
    """All that a rank runs in an iteration, at one clock, by the expected rows."""

    time_s: float
    effective_j: float  #: without what the GPU would draw waiting in that time
    clock_mhz: int


class SteadySearch:
    """Searches the plans of one clock for each rank. What is chosen is the number of an option of
    each rank, 0 at its highest clock.

    Args:
        plans: replays them under the draws.
    """

    def __init__(self, plans: DrawnPlans) -> None:
        self._plans = plans

    @property
    def has_plans(self) -> bool:
        """Whether each rank has a clock at which all that it runs was measured."""
        return bool(self._loads)

    def best(self, lateness: Lateness) -> Drawn:
        """Return the best plan found; a late one if none is on time.

        It begins with the slowest common pace that is on time, and with all clocks at their
        maximum. Then each rank in turn gets its slowest clock that is on time, those first that
        have most to save.
        """
        full = [0] * len(self._loads)
        fastest = self._plans.at_maximum
        # A rank whose computations have other highest clocks takes the highest that all have.
        if self._plans.changes(fastest.clocks_mhz) > 0:
            fastest = self._drawn(full)
        # From full clocks, the ranks with most to save take the slack; from a common pace it is
        # shared.
        starts = (full, self._slowest_pace(lateness))
        candidates = [fastest] + [
            self._drawn(self._slowed(start, lateness))
            for start in starts
            if self._is_on_time(start, lateness)
        ]
        on_time = [drawn for drawn in candidates if lateness(drawn.time_s) <= 0.0]
        return min(on_time or [fastest], key=self._plans.effective_j)

    def exchanged(self, start: Drawn, lateness: Lateness) -> Drawn:
        """Return the plan after a local search over the clocks of one rank and of two at a time.

        Args:
            start: a plan of one clock for each rank, on time.
            lateness: how late a plan of such seconds is; at most 0 if it is on time.
        """
        clocks_mhz = [[load.clock_mhz for load in of_rank] for of_rank in self._loads]
        exchanges = _Exchanges(self._plans, start, clocks_mhz, lateness)
        chosen = exchange(
            exchanges.start, exchanges.options_j(), exchanges.replay, exchanges.are_on_time
        )
        return exchanges.drawn(chosen)

    def _drawn(self, chosen: Sequence[int]) -> Drawn:
        iteration = self._plans.mean.dag.iteration
        ranks = iteration.rank_of[: len(iteration.keys)]  # operations come last
        clocks_mhz = [self._loads[rank][chosen[rank]].clock_mhz for rank in ranks]
        return self._plans.replayed(clocks_mhz, 0.0)

    def _is_on_time(self, chosen: Sequence[int], lateness: Lateness) -> bool:
        return bool(lateness(self._drawn(chosen).time_s) <= 0.0)

    def _slowest_pace(self, lateness: Lateness) -> list[int]:
        """Return the options of the slowest common pace that is on time, of the fastest one if
        none is.
        """
        # A pace is a time within which every rank runs its load; only these times change what fits.
        paces_s = sorted({load.time_s for of_rank in self._loads for load in of_rank})
        slowest = _last_where(
            lambda number: self._is_on_time(self._at_pace(paces_s[number]), lateness),
            0,
            len(paces_s) - 1,
        )
        return self._at_pace(paces_s[slowest])

    def _at_pace(self, pace_s: float) -> list[int]:
        """Return the slowest option of each rank within a pace, its fastest where none is."""
        # Loads are sorted by time, so as many as are within the pace come first.
        within = [sum(load.time_s <= pace_s for load in of_rank) for of_rank in self._loads]
        return [max(0, count - 1) for count in within]

    def _slowed(self, start: Sequence[int], lateness: Lateness) -> list[int]:
        """Return the options after each rank in turn got its slowest one that is on time."""
        # What each rank saves between its clock here and its slowest one.
        gain_j = [
            of_rank[option].effective_j - of_rank[-1].effective_j
            for of_rank, option in zip(self._loads, start, strict=True)
        ]
        chosen = list(start)
        for rank in sorted(range(len(chosen)), key=lambda rank: -gain_j[rank]):
            chosen[rank] = self._slowest_of_rank(chosen, rank, lateness)
        return chosen

    def _slowest_of_rank(self, chosen: Sequence[int], rank: int, lateness: Lateness) -> int:
        """Return the slowest option of one rank that is on time with those of all others."""

        def is_on_time(option: int) -> bool:
            return self._is_on_time([*chosen[:rank], option, *chosen[rank + 1 :]], lateness)

        return _last_where(is_on_time, chosen[rank], len(self._loads[rank]) - 1)

    @cached_property
    def _loads(self) -> list[list[_Load]]:
        """Of each rank, those of its clocks that no other beats, the fastest first; none if some
        rank has no clock at which all that it runs was measured.
        """
        loads = []
        iteration = self._plans.mean.dag.iteration
        for program in iteration.programs:
            # How often each computation runs on the rank; operations have no clock.
            counts = Counter(iteration.keys[i] for i in program if i < len(iteration.keys))
            of_rank = self._loads_at_each_clock(counts)
            if not of_rank:
                return []
            loads.append(_undominated(of_rank))
        return loads

    def _loads_at_each_clock(self, counts: Counter[Key]) -> list[_Load]:
        """Return the load of so many of each computation, at each clock that all were measured
        at.
        """
        profile = self._plans.mean.profile
        tables = {key: {row.clock_mhz: row for row in profile.measurements[key]} for key in counts}
        clocks = set.intersection(*map(set, tables.values()))
        loads = []
        for mhz in clocks:
            rows = [(count, key, tables[key][mhz]) for key, count in counts.items()]
            load_s = math.fsum(count * row.time_s for count, _, row in rows)
            load_j = math.fsum(
                count * (row.energy_j - profile.blocking_w(key.stage) * row.time_s)
                for count, key, row in rows
            )
            loads.append(_Load(load_s, load_j, mhz))
        return loads


class _Exchanges:
    """What `exchange` is told of an iteration: options, what they cost, and whether they are on
    time.

    Args:
        plans: replays plans under the draws.
        start_plan: a plan of one clock for each rank.
        clocks_mhz: of each rank, the clocks to choose from.
        lateness: how late a plan of such seconds is; at most 0 if it is on time.
    """

    def __init__(
        self,
        plans: DrawnPlans,
        start_plan: Drawn,
        clocks_mhz: Sequence[Sequence[int]],
        lateness: Lateness,
    ) -> None:
        self._plans = plans
        self._margin = start_plan.margin
        self._lateness = lateness
        iteration = plans.mean.dag.iteration
        self._keys = iteration.keys
        self._ranks = iteration.rank_of[: len(self._keys)]
        # The computations of each rank; operations have no clock.
        self._places = [
            [place for place in program if place < len(self._keys)]
            for program in iteration.programs
        ]
        start_mhz = [start_plan.clocks_mhz[of_rank[0]] for of_rank in self._places]
        # A plan may have a clock that another one beats.
        self._options_mhz = [
            sorted({mhz, *of_rank}, reverse=True)
            for mhz, of_rank in zip(start_mhz, clocks_mhz, strict=True)
        ]
        #: the option of each rank in that plan
        self.start = [
            of_rank.index(mhz) for of_rank, mhz in zip(self._options_mhz, start_mhz, strict=True)
        ]

    def options_j(self) -> list[list[float]]:
        """Return the effective joules of each option of each rank."""
        costs_j = self._plans.costs_j
        return [
            [sum(costs_j[self._keys[place]][mhz] for place in places) for mhz in options]
            for places, options in zip(self._places, self._options_mhz, strict=True)
        ]

    def drawn(self, chosen: Sequence[int]) -> Drawn:
        """Return the plan of these options, replayed."""
        clocks_mhz = [self._options_mhz[rank][chosen[rank]] for rank in self._ranks]
        return self._plans.replayed(clocks_mhz, self._margin)

    def replay(self, chosen: Sequence[int]) -> Replay:
        """Return whether these options are on time, and the longest path of each case: of the
        draws, and behind them of the iterations with jitter.
        """
        plans = self._plans
        drawn = self.drawn(chosen)
        cases = np.arange(plans.replay.count)
        paths = plans.replay.longest_paths(drawn.clocks_mhz, cases)
        time_s = paths.time_s
        on_path = paths.on_path
        if plans.jitter is not None:
            jittered = plans.replay.longest_paths(drawn.clocks_mhz)
            time_s = np.concatenate([time_s, jittered.time_s])
            # Their paths are as long as they are with jitter.
            jittered.on_path[: len(self._keys)] *= plans.jitter
            on_path = np.concatenate([on_path, jittered.on_path], axis=1)
            cases = np.concatenate([cases, plans.replay.jittered_draws])
        option_s = [
            self._path_s(places, options, on_path, cases)
            for places, options in zip(self._places, self._options_mhz, strict=True)
        ]
        own_s = sum(of_rank[i] for of_rank, i in zip(option_s, chosen, strict=True))
        is_on_time = bool(self._lateness(drawn.time_s) <= 0.0)
        return Replay(is_on_time, Path(time_s - own_s, option_s))

    def are_on_time(self, case_s: Floats) -> npt.NDArray[np.bool_]:
        """Return which of some plans are on time, of their (plans, cases) seconds."""
        draws = self._plans.replay.count
        time_s = case_s[:, :draws]
        if self._plans.jitter is not None:
            # Jitter enters as one factor, as in a replay.
            with_s = case_s[:, draws:]
            some_s = time_s[:, : with_s.shape[1]]
            time_s = time_s * (np.mean(with_s, axis=1) / np.mean(some_s, axis=1))[:, None]
        lateness = self._lateness(time_s + self._plans.mean.profile.overhead_s)
        is_on_time: npt.NDArray[np.bool_] = lateness <= 0.0
        return is_on_time

    def _path_s(
        self, places: Sequence[int], clocks: Sequence[int], on_path: Floats, cases: Integers
    ) -> Floats:
        """Return the (clocks, cases) seconds of places on a path, at each of some clocks."""
        by_key: dict[Key, list[int]] = {}
        for place in places:
            by_key.setdefault(self._keys[place], []).append(place)
        rows = [self._plans.draw_row[mhz] for mhz in clocks]
        seconds: Floats = np.zeros((len(clocks), len(cases)))
        for key, of_key in by_key.items():
            seconds += on_path[of_key].sum(axis=0) * self._plans.case_s(key, cases)[rows]
        return seconds


def _undominated(loads: Sequence[_Load]) -> list[_Load]:
    """Return the loads that no other one beats, the fastest first; the one at the highest clock
    stays, with which all plans are compared.
    """
    kept = [max(loads, key=lambda load: load.clock_mhz)]
    for load in sorted(loads):
        if load.time_s > kept[-1].time_s and load.effective_j < kept[-1].effective_j:
            kept.append(load)
    return kept


def _last_where(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last number up to `high` for which this holds, by halving; `low` is taken to be
    one.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
