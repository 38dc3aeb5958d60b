"""Plans from learnt rows: fresh ones from the solver, polished with what changes cost, and
trials that ride on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import InfeasibleDeadline
from perseus_planner.profiles.measurement import Measurement, with_fewer_changes
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.autopilot.search import anneal, changes_of, layout, replay
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.budget import clocks_by_budget
from perseus_planner.solver.frontier import solve_dag
from perseus_planner.solver.planner import Planner
from perseus_planner.solver.point_problem import point_problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.autopilot.job import AutopilotJob

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

_WORK = 1_200_000  #: nodes that the polishing of one plan replays
_TRIES = (600, 4000)  #: least and most programs that it tries
_HEAT = 3e-5
#: most computations of a trial that is not a whole phase, and at most a twelfth of the rank's
_BLOCK = 4
_MOST_TRIALS = 4  #: clocks that are tried on one rank in an iteration


class Costs(NamedTuple):
    """What a search assumes: (classes, clocks) seconds and watts, and (ranks,) watts of waiting."""

    time_s: Floats
    power_w: Floats
    waiting_w: Floats


class Searcher:
    """Searches programs of one pipeline: (n,) clocks by number, highest first, of the nodes of a
    `Layout`.
    """

    def __init__(self, job: AutopilotJob, max_changes: int | None) -> None:
        self.job, self._max_changes = job, max_changes
        ranks = job.ranks
        self.layout, self._places = layout(
            job.iteration, job.clock_change, job.gpus_per_stage, np.zeros(ranks)
        )
        self.keys = list(dict.fromkeys(sorted(job.iteration.keys)))
        count = len(self._places)
        self._budget = np.full(ranks, count if max_changes is None else max_changes)
        starts = self.layout.rank_start
        self.class_rank = np.zeros(len(self.keys), dtype=np.int64)
        for member, rank in zip(self.layout.member, self.layout.rank, strict=True):
            if member >= 0:
                self.class_rank[member] = rank
        self.classes = [
            sorted({int(c) for c in self.layout.member[first:stop] if c >= 0})
            for first, stop in pairwise(starts)
        ]
        self._tail_s = np.zeros(ranks)

    def set_clock_change(self, change: ClockChange) -> None:
        """Replay and plan with other costs of clock changes from now on."""
        self.job = replace(self.job, clock_change=change)
        self.layout, _ = layout(
            self.job.iteration, change, self.job.gpus_per_stage, np.zeros(self.job.ranks)
        )

    def full(self) -> Integers:
        """Return the program of full clocks."""
        return np.zeros(len(self._places), dtype=np.int64)

    def replay(self, clock: Integers, costs: Costs) -> tuple[float, float]:
        """Return the seconds and joules of an iteration of this program."""
        seconds, joules, _ = self._replayed(clock, costs)
        return seconds, joules

    def _replayed(self, clock: Integers, costs: Costs) -> tuple[float, float, Floats]:
        end_s = np.zeros(len(clock))
        seconds, joules = replay(self.layout, *costs, clock, self._tail_s, end_s)
        return seconds, joules, end_s

    def polish(
        self, clock: Integers, costs: Costs, deadline_s: float, seed: int
    ) -> tuple[Integers, float, float]:
        """Return a program that is better than `clock`, if one is found, its seconds and its
        joules.
        """
        seconds, _, end_s = self._replayed(clock, costs)
        self._tail_s = np.maximum(0.0, seconds - end_s[self.layout.rank_start[1:] - 1])
        usable, counts = self._usable(costs)
        tries = int(np.clip(_WORK // len(clock), *_TRIES))
        polished = anneal(
            self.layout,
            *costs,
            usable,
            counts,
            clock,
            self._tail_s,
            deadline_s,
            self._budget,
            tries,
            _HEAT,
            seed,
        )
        return polished, *self.replay(polished, costs)

    def _usable(self, costs: Costs) -> tuple[Integers, Integers]:
        clocks = len(self.job.clocks_mhz)
        usable, counts = (
            np.zeros((self.job.ranks, clocks), np.int64),
            np.zeros(self.job.ranks, np.int64),
        )
        for rank, classes in enumerate(self.classes):
            good = (
                np.flatnonzero(np.isfinite(costs.time_s[classes]).all(axis=0))
                if classes
                else np.array([0])
            )
            usable[rank, : len(good)], counts[rank] = good, len(good)
        return usable, counts

    def repaired(self, program: Integers, costs: Costs) -> Integers:
        """Return the program with the next higher clock of the rank wherever one may not be
        planned on.
        """
        usable, counts = self._usable(costs)
        repaired = program.copy()
        for k, (rank, clock) in enumerate(
            zip(self.layout.rank.tolist(), program.tolist(), strict=True)
        ):
            good = usable[rank, : counts[rank]]
            repaired[k] = good[good <= clock].max(initial=0)
        return repaired

    def solve(self, costs: Costs, deadline_s: float, attempt: int) -> Integers | None:
        """Return the plan of the project's solver, as if clock changes cost nothing; None if there
        is none in time.

        Attempts begin with different numbers of changes, so that several of them find different
        plans.
        """
        job, table = self.job, {}
        usable, counts = self._usable(costs)
        for number, key in enumerate(self.keys):
            rank = int(self.class_rank[number])
            table[key] = tuple(
                Measurement(
                    job.clocks_mhz[c], float(costs.time_s[number, c]),
                    float(costs.time_s[number, c] * costs.power_w[number, c]),
                )
                for c in usable[rank, : counts[rank]].tolist()
            )  # fmt: skip
        stages = sorted({stage for stage, _ in self.keys})
        waiting_w = tuple(
            float(costs.waiting_w[job.iteration.schedule.stage_ranks[stage]]) for stage in stages
        )
        try:
            dag = PipelineDag(Profile(table, waiting_w), job.iteration)
            frontier = solve_dag(dag)
            within_s = max(deadline_s, frontier.min_time_s)
            clocks = list(Planner(frontier).quick_plan(within_s, polished=True).clocks.values())
        except InfeasibleDeadline:
            return None
        if self._max_changes is not None:
            levels = sorted({self._max_changes * (2 + attempt % 3) // 8, self._max_changes})
            by_budget = clocks_by_budget(dag, point_problem(dag), within_s, clocks, levels)
            if self._max_changes not in by_budget:
                return None
            clocks = by_budget[self._max_changes]
        number_of = {clock: i for i, clock in enumerate(job.clocks_mhz)}
        return self.of_clocks({i: number_of[clock] for i, clock in enumerate(clocks)})

    def of_clocks(self, clock_of: dict[int, int]) -> Integers:
        """Return the program of the clock of each computation, by its place in the iteration."""
        program = self.full()
        for first, stop in pairwise(self.layout.rank_start):
            positions = [k for k in range(first, stop) if self._places[k] in clock_of]
            if positions:
                program[first:stop] = clock_of[
                    self._places[positions[-1]]
                ]  # operations before the first computation
            for k in range(first, stop):
                program[k] = clock_of.get(
                    self._places[k], program[k - 1] if k > first else program[k]
                )
        return program

    def clocks_mhz(self, program: Integers) -> tuple[tuple[int, ...], ...]:
        """Return the clock of each rank's computations, MHz."""
        clocks, computed = self.job.clocks_mhz, self.layout.member >= 0
        return tuple(
            tuple(clocks[c] for c in program[first:stop][computed[first:stop]].tolist())
            for first, stop in pairwise(self.layout.rank_start)
        )

    def joined(self, program: Integers, before: Integers) -> Integers:
        """Return the program with one change less where the step from the one before to it would
        be one too many.
        """
        if self._max_changes is None:
            return program
        joined = program.copy()
        for first, stop in pairwise(self.layout.rank_start):
            steps = int(program[first] != before[first])
            if changes_of(program, first, stop) + steps <= self._max_changes:
                continue
            most = self._max_changes - 1
            slower = [-c for c in program[first:stop].tolist()]  # a lower number is a higher clock
            joined[first:stop] = [-c for c in with_fewer_changes(slower, most)]
        return joined

    def with_trials(
        self,
        program: Integers,
        limits: Sequence[tuple[Costs, float]],
        wanted: Sequence[Sequence[int]],
        is_open: NDArray[np.bool_],
        known: NDArray[np.bool_],
        random: np.random.Generator,
    ) -> tuple[Integers, list[tuple[int, int]]]:
        """Return the program with trials, and the (rank, clock) that are tried.

        Where a wanted clock could take too long, the slowest open one on the way to it that could
        not is tried.

        Args:
            program: the plan.
            limits: what rows may cost, and the longest iteration then, seconds; each must hold.
            wanted: of each rank, the clocks to try, best first.
            is_open: (ranks, clocks) whether a clock may be tried.
            known: (classes, clocks) whether a row was measured; a trial is where it measures the
                most new ones.
            random: the source of chance.
        """
        tried: list[tuple[int, int]] = []
        trial, starts = program.copy(), self.layout.rank_start

        def fits(first: int, stop: int, rank: int, clock: int) -> bool:
            trial[first:stop] = clock
            return bool(
                changes_of(trial, starts[rank], starts[rank + 1]) <= self._budget[rank]
            ) and all(self.replay(trial, costs)[0] <= limit_s for costs, limit_s in limits)

        for rank in random.permutation(self.job.ranks).tolist():
            still_open = is_open[rank].copy()
            for clock in wanted[rank]:
                spots = list(self._spots(trial, rank, clock, random))
                news = {spot: self._news(spot, known) for spot in spots}
                for spot in sorted(spots, key=lambda spot: -int(news[spot][clock])):
                    deepest = self._deepest(
                        trial, rank, spot, clock, still_open & (news[spot] > 0), fits
                    )
                    if deepest is not None:
                        tried.append((rank, deepest))
                        still_open[deepest] = False
                        break
                if int((is_open[rank] & ~still_open).sum()) >= _MOST_TRIALS:
                    break
        return trial, tried

    def _news(self, spot: tuple[int, int], known: NDArray[np.bool_]) -> Integers:
        """Return how many rows that are not measured yet a spot would measure at each clock:
        (clocks,).
        """
        members = np.unique(self.layout.member[spot[0] : spot[1]])
        news: Integers = (~known[members[members >= 0]]).sum(axis=0)
        return news

    def _deepest(
        self,
        trial: Integers,
        rank: int,
        spot: tuple[int, int],
        clock: int,
        is_open: NDArray[np.bool_],
        fits: Callable[[int, int, int, int], bool],
    ) -> int | None:
        """Set the spot to the open clock nearest to a wanted one that fits, and return it; None
        if none does.
        """
        begin = int(trial[spot[0]])
        ahead = (
            [c for c in range(begin + 1, clock + 1) if is_open[c]]
            if clock > begin
            else [clock] * int(is_open[clock])
        )
        low, high = 0, len(ahead)  # the first `low` fit, as far as is known
        deepest = None
        kept = trial[spot[0] : spot[1]].copy()
        probe = high - 1
        while low < high:
            if fits(*spot, rank, ahead[probe]):
                low, deepest = probe + 1, ahead[probe]
            else:
                high = probe
            probe = (low + high) // 2
        trial[spot[0] : spot[1]] = kept if deepest is None else deepest
        return deepest

    def _spots(
        self, program: Integers, rank: int, clock: int, random: np.random.Generator
    ) -> Iterator[tuple[int, int]]:
        """Yield where a rank could try a clock: whole phases, the nearest clock first; at their
        borders; anywhere.
        """
        first, stop = (int(k) for k in self.layout.rank_start[rank : rank + 2])
        borders = [
            first,
            *(k for k in range(first + 1, stop) if program[k] != program[k - 1]),
            stop,
        ]
        phases = sorted(
            pairwise(borders), key=lambda phase: (abs(int(program[phase[0]]) - clock), phase)
        )
        yield from (
            phase
            for phase in phases[:4]
            if phase[1] - phase[0] <= max(_BLOCK * 3, (stop - first) // 4)
        )
        block = min(_BLOCK, max(1, (stop - first) // 12))
        for length in sorted({block, max(1, block // 2)}, reverse=True):
            for begin, end in phases[:3]:
                if end - begin > length:
                    yield from ((begin, begin + length), (end - length, end))
            if stop - first > length:
                start = int(random.integers(first, stop - length))
                yield start, start + length
