"""Plans from learnt rows: fresh ones from the solver, polished with what changes cost, and
trials that ride on them.

The search has options: a clock and a mode, by number, as in `solver.clock_problem`. Where the job
has one mode, an option is a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from perseus_planner.base.errors import InfeasibleDeadline
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import ClockChange, Measurement, with_fewer_changes
from perseus_planner.profiles.modes import Mode, Modes
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

    from perseus_planner.extensions.autopilot.job import AutopilotJob

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
T = TypeVar("T")
_MOST_TRIALS = 4  #: clocks that are tried on one rank in an iteration


class Costs(NamedTuple):
    """What a search assumes: (classes, options) seconds and watts, and (ranks,) watts of
    waiting.
    """

    time_s: Floats
    power_w: Floats
    waiting_w: Floats


class Limit(NamedTuple):
    """How long an iteration may be at most if rows cost so much."""

    costs: Costs
    most_s: float


class Searcher:
    """Searches programs of one pipeline: the option of each computation, highest clocks first."""

    def __init__(self, job: AutopilotJob, max_changes: int | None) -> None:
        self._max_changes = max_changes
        self.keys = list(dict.fromkeys(sorted(job.iteration.keys)))
        # An option is a clock and a mode in one number, with the mode in the low bits.
        self._bits = (len(job.modes) - 1).bit_length()
        self._mask = (1 << self._bits) - 1
        # The costs come with each search, so the problem is laid out with ones.
        ones = np.ones((len(self.keys), len(job.clocks_mhz) << self._bits))
        tied = _tied(job) if job.shares_microbatch else None
        self.problem = clock_problem(job.iteration, self.keys, ones, ones, self._bits, tied)
        # Without a limit, a change before each computation is the most that there can be.
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
        """Return the program of full clocks, in the first mode."""
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
        """Return the problem with these costs.

        While a clock comes into force, a computation may run at one that is not known in its mode:
        it is taken to be as in the other one.
        """
        time_s = costs.time_s
        if self._bits:
            of_modes = time_s.reshape(len(time_s), -1, 1 << self._bits)
            known = np.where(np.isfinite(of_modes), of_modes, of_modes.min(axis=2, keepdims=True))
            time_s = known.reshape(time_s.shape)
        # Waiting is drawn all the time, so a computation costs what it draws above it.
        cost_j = time_s * (costs.power_w - costs.waiting_w[self.class_rank, None])
        # What may not be planned on must not be cheap.
        cost_j[~np.isfinite(time_s)] = np.inf
        return self.problem._replace(time_s=time_s, cost_j=cost_j)

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
        # A rank has one set of options, those at which all of its classes may be planned on.
        problem = with_usable(with_waves(self._with(costs), clock), self._usable(costs))
        seconds, joules, state = self._replayed(clock, costs, problem)
        # How long each rank waits at the end depends on the program, so it is taken from the one to
        # be polished.
        last = self._change.queue[self._change.queue_start[1:] - 1]
        self._change = self._change._replace(tail_s=np.maximum(0.0, seconds - state.end_s[last]))
        goal = Goal(
            deadline_s,
            self._budget,
            LATE * joules / deadline_s,
            waiting_w=float(costs.waiting_w.sum()),
        )
        # Large programs take longer to replay, so fewer are tried.
        tries = int(np.clip(_WORK // len(clock), *_TRIES))
        # Temperatures are shares of the energy, so that jobs of any size cool alike.
        first_j, last_j, slack_j = (part * joules for part in (*_HEAT, _SLACK))
        heat = Heat(tries, first_j, last_j, slack_j, seed)
        polished = anneal(problem, clock, goal, heat, clock[None], self._change)
        return polished, *self.replay(polished, costs)

    def best_polished(
        self,
        starts: Sequence[Integers],
        costs: Costs,
        deadline_s: float,
        random: np.random.Generator,
    ) -> tuple[Integers, float]:
        """Return the best of programs, each polished, and its joules, with a price on what it is
        late.
        """
        # All starts have one seed, so that they differ by where they begin and not by chance.
        seed = int(random.integers(2**31))
        polished = [self.polish(start, costs, deadline_s, seed) for start in starts]
        # Lateness has a price and not a limit, as no start may be in time.
        worths_j = [
            joules * (1 + LATE * max(0.0, time_s / deadline_s - 1))
            for _, time_s, joules in polished
        ]
        best = worths_j.index(min(worths_j))
        return polished[best][0], worths_j[best]

    def _usable(self, costs: Costs) -> NDArray[np.bool_]:
        """Return whether each rank may be planned on at each option: (ranks, options)."""
        finite = np.isfinite(costs.time_s)
        return np.array([finite[classes].all(axis=0) for classes in self.classes])

    def repaired(self, program: Integers, costs: Costs) -> Integers:
        """Return the program with the next higher clock of the rank wherever one may not be
        planned on.
        """
        usable = self._usable(costs)
        repaired = program.copy()
        for k, (rank, option) in enumerate(zip(self.problem.rank, program, strict=True)):
            mode = option & self._mask
            in_it = usable[rank, mode : option + 1 : self._mask + 1]
            repaired[k] = mode + (np.flatnonzero(in_it).max(initial=0) << self._bits)
        return repaired

    def solve(self, costs: Costs, deadline_s: float, attempt: int) -> Integers | None:
        """Return the plan of the project's solver, as if clock changes cost nothing; None if there
        is none in time.

        Attempts begin with different numbers of changes, so that several of them find different
        plans.
        """
        job = self.job
        # What may not be planned on is left out, so that the solver cannot choose it.
        usable = self._usable(costs)
        table = dict[Key, tuple[Measurement, ...]]()
        for number, key in enumerate(self.keys):
            for m, mode in enumerate(job.modes):
                table[key.in_mode(mode)] = tuple(
                    Measurement(
                        job.clocks_mhz[o >> self._bits], float(costs.time_s[number, o]),
                        float(costs.time_s[number, o] * costs.power_w[number, o]),
                    )
                    for o in np.flatnonzero(usable[self.class_rank[number]]).tolist()
                    if o & self._mask == m
                ) or table[key][:1]  # nothing better than what there is  # fmt: skip
        stages = sorted({key.stage for key in self.keys})
        # The solver has waiting by stage, and costs have it by rank.
        waiting_w = tuple(
            float(costs.waiting_w[job.iteration.schedule.stage_ranks[stage]]) for stage in stages
        )
        try:
            ways = {mode: Mode() for mode in job.modes}
            shared_by = "microbatch" if job.shares_microbatch else "computation"
            modes = Modes(ways, shared_by) if self._bits else None
            frontier = solve_dag(PipelineDag(Profile(table, waiting_w, modes=modes), job.iteration))
            # A deadline below the fastest plan asks for that plan.
            within_s = max(deadline_s, frontier.min_time_s)
            # Modes are chosen for the deadline first, and then clocks with these modes.
            if self._bits:
                frontier = frontier.in_modes(within_s)
                within_s = max(within_s, frontier.min_time_s)
            clocks = Planner(frontier).clocks(within_s)
        except InfeasibleDeadline:
            return None
        if self._max_changes is not None:
            # Attempts begin with a quarter, three eighths or half of the changes, to find different
            # plans.
            levels = sorted({self._max_changes * (2 + attempt % 3) // 8, self._max_changes})
            by_budget = clocks_by_budget(frontier.dag, within_s, clocks, levels, _EFFORT)
            if self._max_changes not in by_budget:
                return None
            clocks = by_budget[self._max_changes]
        number_of = {clock: i << self._bits for i, clock in enumerate(job.clocks_mhz)}
        in_modes = [job.modes.index(key.mode) for key in frontier.dag.iteration.keys]
        plan = np.array([number_of[clock] for clock in clocks]) | in_modes
        # A measurement that stood in for a missing one is no option, so full clocks take its place.
        return np.where(usable[self.problem.rank, plan], plan, 0)

    def clocks_mhz(self, program: Integers) -> tuple[tuple[int, ...], ...]:
        """Return the clock of each rank's computations, MHz."""
        return self._by_rank([self.job.clocks_mhz[o >> self._bits] for o in program.tolist()])

    def modes(self, program: Integers) -> tuple[tuple[str, ...], ...]:
        """Return the mode of each rank's computations."""
        return self._by_rank([self.job.modes[o & self._mask] for o in program.tolist()])

    def _by_rank(self, values: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        return tuple(tuple(values[i:j]) for i, j in pairwise(self.problem.rank_start))

    def joined(self, program: Integers, before: Integers) -> Integers:
        """Return the program with one change less where the step from the one before to it would
        be one too many.
        """
        if self._max_changes is None:
            return program
        joined = program.copy()
        clocks = program >> self._bits
        bits = self._bits
        for rank, (first, stop) in enumerate(pairwise(self.problem.rank_start)):
            # The step from the iteration before is a change too, if the first clock is another one.
            steps = int(clocks[first] != before[first] >> bits)
            if self._changes(program, rank) + steps <= self._max_changes:
                continue
            # One change less within the iteration leaves room for that step.
            most = self._max_changes - 1
            # Clocks are merged upward only, so that the iteration gets no later.
            slower = [-c for c in clocks[first:stop].tolist()]  # a lower number is a higher clock
            fewer = np.negative(with_fewer_changes(slower, most)) << bits
            joined[first:stop] = fewer | program[first:stop] & self._mask
        return joined

    def _changes(self, program: Integers, rank: int) -> int:
        """Return how often a rank changes its clock."""
        return max_changes(self.problem.rank_start, program, rank, rank, self._bits)

    def with_trials(
        self,
        program: Integers,
        limits: Sequence[Limit],
        wanted: Sequence[Sequence[int]],
        is_open: NDArray[np.bool_],
        settled: NDArray[np.bool_],
        random: np.random.Generator,
    ) -> tuple[Integers, list[tuple[int, int]]]:
        """Return the program with trials, and the (rank, option) that are tried.

        Where a wanted clock could take too long, the slowest open one on the way to it that could
        not is tried.

        Args:
            program: the plan.
            limits: of the iteration with trials; each must hold.
            wanted: of each rank, the options to try, best first.
            is_open: (ranks, options) whether an option may be tried.
            settled: (classes, options) whether a trial would tell little more of a row; a trial is
                where it tells of the most others.
            random: the source of chance.
        """
        tried: list[tuple[int, int]] = []
        trial = program.copy()

        def fits(first: int, stop: int, rank: int, option: int) -> bool:
            # A trial must fit with those before it, so it is judged in the program that has them.
            self._try(trial, first, stop, option)
            return self._changes(trial, rank) <= self._budget and all(
                self.replay(trial, limit.costs)[0] <= limit.most_s for limit in limits
            )

        # In random order, so that no rank always has the slack first.
        for rank in random.permutation(self.job.ranks).tolist():
            still_open = is_open[rank].copy()
            for clock in wanted[rank]:
                spots = list(self._spots(trial, rank, clock, random))
                # Where a trial measures the most rows of which little is known, it is worth the
                # most.
                news = {spot: self._news(spot, settled) for spot in spots}
                for spot in sorted(spots, key=lambda spot: -int(news[spot][clock])):
                    deepest = self._deepest(
                        trial, rank, spot, clock, still_open & (news[spot] > 0), fits
                    )
                    if deepest is not None:
                        tried.append((rank, deepest))
                        still_open[deepest] = False
                        break
                # A rank with many trials leaves no slack for the others.
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
        """Set the spot to the open option nearest to a wanted one, in its mode, that fits, and
        return it; None if none does.
        """
        # Only options of the wanted mode, slower than what runs there.
        begin = int(trial[spot[0]])
        first = min(clock, begin + 1 + ((clock - begin - 1) & self._mask))
        # Options nearer to what runs fit more easily, so the one nearest to the wanted one is
        # bisected.
        ahead = [c for c in range(first, clock + 1, self._mask + 1) if is_open[c]]
        # The first `low` fit, as far as is known
        low = 0
        high = len(ahead)
        deepest = None
        kept = trial.copy()
        # The wanted option itself is probed first.
        probe = high - 1
        while low < high:
            if fits(*spot, rank, ahead[probe]):
                low = probe + 1
                deepest = ahead[probe]
            else:
                high = probe
            probe = (low + high) // 2
        # Probes have changed the program, so it is put back before the found option is set.
        trial[:] = kept
        if deepest is not None:
            self._try(trial, *spot, deepest)
        return deepest

    def _try(self, trial: Integers, first: int, stop: int, option: int) -> None:
        """Give computations of a rank an option, and those that share their modes its mode."""
        trial[first:stop] = option
        for k in range(first, stop) if self._bits else ():
            other = self.problem.tied[k]
            while other != k:
                trial[other] = trial[other] & ~self._mask | option & self._mask
                other = self.problem.tied[other]

    def _spots(
        self, program: Integers, rank: int, clock: int, random: np.random.Generator
    ) -> Iterator[tuple[int, int]]:
        """Yield where a rank could try a clock: whole phases, the nearest clock first; at their
        borders; anywhere.
        """
        # A whole phase keeps the number of changes, so it is best where it is short enough.
        first, stop = (int(k) for k in self.problem.rank_start[rank : rank + 2])
        clocks = program >> self._bits
        borders = [
            first,
            *(k for k in range(first + 1, stop) if clocks[k] != clocks[k - 1]),
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
            # At a border of a phase, a block adds one change and not two.
            for begin, end in phases[:3]:
                if end - begin > length:
                    yield from ((begin, begin + length), (end - length, end))
            # Anywhere at last, so that every computation is measured at some time.
            if stop - first > length:
                start = int(random.integers(first, stop - length))
                yield start, start + length


def _tied(job: AutopilotJob) -> Integers:
    """Return `ClockProblem.tied` where a microbatch has one mode in all of a stage."""
    computations = job.iteration.computations
    tied = np.arange(len(computations))
    first = dict[object, int]()
    latest = dict[object, int]()
    for place, (stage, _, microbatch) in enumerate(computations):
        group = stage, microbatch
        if group in latest:
            tied[latest[group]] = place
        latest[group] = place
        tied[place] = first.setdefault(group, place)
    return tied
