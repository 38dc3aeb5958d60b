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
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.budget import clocks_by_budget
from perseus_planner.solver.clock_problem import (
    ClockProblem,
    ClockState,
    change_cost,
    clock_problem,
    load_state,
    replay,
    replay_changes,
    with_usable,
    with_waves,
)
from perseus_planner.solver.clock_search import Goal, Heat, anneal, max_changes
from perseus_planner.solver.frontier import solve_dag
from perseus_planner.solver.planner import Planner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.autopilot.job import AutopilotJob

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

_EFFORT = 0.15  #: of a search within the switch budget, as the plan is polished next
_WORK = 1_200_000  #: nodes that the polishing of one plan replays
_TRIES = (600, 4000)  #: least and most programs that it tries
#: first and last temperature, and how much too dear a plan may seem, as parts of its energy
_HEAT = (3e-5, 6e-7)
_SLACK = 1e-3
LATE = 200.0  #: an iteration that is later by a part costs so many times that part of its energy
#: most computations of a trial that is not a whole phase, and at most a twelfth of the rank's
_BLOCK = 4
_MOST_TRIALS = 4  #: clocks that are tried on one rank in an iteration


class Costs(NamedTuple):
    """What a search assumes: (classes, clocks) seconds and watts, and (ranks,) watts of waiting."""

    time_s: Floats
    power_w: Floats
    waiting_w: Floats


class Searcher:
    """Searches programs of one pipeline: the clock of each computation by number, highest first."""

    def __init__(self, job: AutopilotJob, max_changes: int | None) -> None:
        self._max_changes = max_changes
        self.keys = list(dict.fromkeys(sorted(job.iteration.keys)))
        tables = np.ones((2, len(self.keys), len(job.clocks_mhz)))
        self.problem = clock_problem(job.iteration, self.keys, *tables)
        self._budget = len(self.problem.node) if max_changes is None else max_changes
        self.class_rank = np.zeros(len(self.keys), dtype=np.int64)
        self.class_rank[self.problem.member] = self.problem.rank
        self.classes = [np.flatnonzero(self.class_rank == rank) for rank in range(job.ranks)]
        self.job = job
        self.set_clock_change(job.clock_change)

    def set_clock_change(self, change: ClockChange) -> None:
        """Replay and plan with other costs of clock changes from now on."""
        self.job = replace(self.job, clock_change=change)
        self._change = change_cost(self.job.iteration, change, self.job.gpus_per_stage)

    def full(self) -> Integers:
        """Return the program of full clocks."""
        return np.zeros(len(self.problem.node), dtype=np.int64)

    def replay(self, clock: Integers, costs: Costs) -> tuple[float, float]:
        """Return the seconds of an iteration of this program, and its joules but for those of
        fixed operations beyond waiting.
        """
        seconds, joules, _ = self._replayed(clock, costs, self._with(costs))
        return seconds, joules

    def replayed_s(self, times_s: Floats) -> float:
        """Return the seconds of an iteration whose computations take so long: (m,)."""
        state, _ = load_state(self.problem, self.full())
        state.duration_s[self.problem.node] = times_s
        return replay(self.problem, state)

    def _with(self, costs: Costs) -> ClockProblem:
        """Return the problem with these costs."""
        cost_j = costs.time_s * (costs.power_w - costs.waiting_w[self.class_rank, None])
        cost_j[~np.isfinite(costs.time_s)] = np.inf
        return self.problem._replace(time_s=costs.time_s, cost_j=cost_j)

    def _replayed(
        self, clock: Integers, costs: Costs, problem: ClockProblem
    ) -> tuple[float, float, ClockState]:
        state, _ = load_state(problem, clock)
        seconds, spent_j = replay_changes(problem, state, self._change)
        return seconds, spent_j + float(costs.waiting_w.sum()) * seconds, state

    def polish(
        self, clock: Integers, costs: Costs, deadline_s: float, seed: int
    ) -> tuple[Integers, float, float]:
        """Return a program that is better than `clock`, if one is found, its seconds and its
        joules.
        """
        problem = with_usable(with_waves(self._with(costs), clock), self._usable(costs))
        seconds, joules, state = self._replayed(clock, costs, problem)
        last = self._change.queue[self._change.queue_start[1:] - 1]
        self._change = self._change._replace(tail_s=np.maximum(0.0, seconds - state.end_s[last]))
        goal = Goal(
            deadline_s,
            self._budget,
            LATE * joules / deadline_s,
            waiting_w=float(costs.waiting_w.sum()),
        )
        tries = int(np.clip(_WORK // len(clock), *_TRIES))
        first_j, last_j, slack_j = (part * joules for part in (*_HEAT, _SLACK))
        heat = Heat(tries, first_j, last_j, slack_j, seed)
        polished = anneal(problem, clock, goal, heat, clock[None], self._change)
        return polished, *self.replay(polished, costs)

    def _usable(self, costs: Costs) -> NDArray[np.bool_]:
        """Return whether each rank may be planned on at each clock: (ranks, clocks)."""
        finite = np.isfinite(costs.time_s)
        return np.array([finite[classes].all(axis=0) for classes in self.classes])

    def repaired(self, program: Integers, costs: Costs) -> Integers:
        """Return the program with the next higher clock of the rank wherever one may not be
        planned on.
        """
        usable, repaired = self._usable(costs), program.copy()
        for k, (rank, clock) in enumerate(zip(self.problem.rank, program, strict=True)):
            repaired[k] = np.flatnonzero(usable[rank, : clock + 1]).max(initial=0)
        return repaired

    def solve(self, costs: Costs, deadline_s: float, attempt: int) -> Integers | None:
        """Return the plan of the project's solver, as if clock changes cost nothing; None if there
        is none in time.

        Attempts begin with different numbers of changes, so that several of them find different
        plans.
        """
        job, table, usable = self.job, {}, self._usable(costs)
        for number, key in enumerate(self.keys):
            table[key] = tuple(
                Measurement(
                    job.clocks_mhz[c], float(costs.time_s[number, c]),
                    float(costs.time_s[number, c] * costs.power_w[number, c]),
                )
                for c in np.flatnonzero(usable[self.class_rank[number]]).tolist()
            )  # fmt: skip
        stages = sorted({stage for stage, _ in self.keys})
        waiting_w = tuple(
            float(costs.waiting_w[job.iteration.schedule.stage_ranks[stage]]) for stage in stages
        )
        try:
            dag = PipelineDag(Profile(table, waiting_w), job.iteration)
            frontier = solve_dag(dag)
            within_s = max(deadline_s, frontier.min_time_s)
            clocks = Planner(frontier).clocks(within_s)
        except InfeasibleDeadline:
            return None
        if self._max_changes is not None:
            levels = sorted({self._max_changes * (2 + attempt % 3) // 8, self._max_changes})
            by_budget = clocks_by_budget(dag, within_s, clocks, levels, _EFFORT)
            if self._max_changes not in by_budget:
                return None
            clocks = by_budget[self._max_changes]
        number_of = {clock: i for i, clock in enumerate(job.clocks_mhz)}
        return np.array([number_of[clock] for clock in clocks])

    def clocks_mhz(self, program: Integers) -> tuple[tuple[int, ...], ...]:
        """Return the clock of each rank's computations, MHz."""
        return tuple(
            tuple(self.job.clocks_mhz[c] for c in program[first:stop].tolist())
            for first, stop in pairwise(self.problem.rank_start)
        )

    def joined(self, program: Integers, before: Integers) -> Integers:
        """Return the program with one change less where the step from the one before to it would
        be one too many.
        """
        if self._max_changes is None:
            return program
        joined = program.copy()
        starts = self.problem.rank_start
        for rank, (first, stop) in enumerate(pairwise(starts)):
            steps = int(program[first] != before[first])
            if max_changes(starts, program, rank, rank) + steps <= self._max_changes:
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
        settled: NDArray[np.bool_],
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
            settled: (classes, clocks) whether a trial would tell little more of a row; a trial is
                where it tells of the most others.
            random: the source of chance.
        """
        tried: list[tuple[int, int]] = []
        trial, starts = program.copy(), self.problem.rank_start

        def fits(first: int, stop: int, rank: int, clock: int) -> bool:
            trial[first:stop] = clock
            return max_changes(starts, trial, rank, rank) <= self._budget and all(
                self.replay(trial, costs)[0] <= limit_s for costs, limit_s in limits
            )

        for rank in random.permutation(self.job.ranks).tolist():
            still_open = is_open[rank].copy()
            for clock in wanted[rank]:
                spots = list(self._spots(trial, rank, clock, random))
                news = {spot: self._news(spot, settled) for spot in spots}
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

    def _news(self, spot: tuple[int, int], settled: NDArray[np.bool_]) -> Integers:
        """Return how many rows that are not settled a spot would measure: (clocks,)."""
        members = np.unique(self.problem.member[spot[0] : spot[1]])
        news: Integers = (~settled[members]).sum(axis=0)
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
        first, stop = (int(k) for k in self.problem.rank_start[rank : rank + 2])
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
