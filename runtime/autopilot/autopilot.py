"""The autopilot: learns what clocks cost from the training's own iterations, and decides the
clocks of those ahead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.runtime.autopilot.job import (
    AutopilotJob,
    AutopilotSettings,
    Decision,
    Ledger,
    Phase,
)
from perseus_planner.runtime.autopilot.learning import Learner
from perseus_planner.runtime.autopilot.planning import LATE, Costs, Searcher

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.autopilot.job import RankObservation

    Integers = NDArray[np.int64]

_REFERENCES = 2  #: iterations at full clocks before the first trial
_AUDIT, _LEAST_AUDIT = (
    200,
    8,
)  #: iterations between two at full clocks that check the reference, and after events
_BURST = 0.005  #: what the ledger may owe, as a share of the reference
_TIGHT = 0.0005  #: how much longer than agreed a plan may be, as a share of the reference
_TRIAL, _LATE_TRIAL = 0.0028, 0.0014  #: likewise with trials, early and later
_EARLY, _ENOUGH = (
    36,
    0.75,
)  #: early are so many iterations of one pipeline, and until so many rows may be planned on
_LATE = (
    0.003  #: how much longer than replayed iterations may be before plans are made shorter for it
)
_MOST_SHORTER = 0.0015  #: how much shorter at most, as a share of the reference
_REMEMBERED = 20  #: iterations from which it is known how much longer they are than replayed
_DOUBT, _MORE_DOUBT = (
    0.01,
    0.002,
)  #: how much longer it may be if rows are over the bound; and while trials are ahead
#: relative change of the replayed time at full clocks that is an event, as a GPU that became slower
_EVENT = 0.01
_AGAIN = (
    4  #: iterations between two solutions for the same rows, whose powers are known better by then
)
_REPEAT = 6  #: iterations before a trial is tried again
_GROWTH, _TARGET_GROWTH = 1.25, 1.6  #: how many more rows are worth a new plan, or a new target


class _Ran(NamedTuple):
    """What was decided for an iteration that was not observed yet."""

    version: int
    programs: tuple[Integers, ...]
    slowdown: float


class Autopilot:
    """Decides the clocks of a training job's iterations while it learns what they cost.

    Call `observe` for each iteration that has ended and `decide` for each one ahead, both in order.
    Decisions may be several iterations ahead of observations. Equal calls give equal decisions.

    Args:
        job: the job.
        settings: what it may do.
        prior: a profile of its stages, whose rows are taken as measured until iterations tell
            otherwise.
    """

    def __init__(
        self,
        job: AutopilotJob,
        settings: AutopilotSettings | None = None,
        prior: Profile | None = None,
    ) -> None:
        self.job, self.settings = job, settings or AutopilotSettings()
        self._search = Searcher(job, self.settings.max_changes)
        self._learner = Learner(
            job, self._search.keys, self._search.class_rank, prior, learn=self.settings.learn
        )
        self._early = max(
            1, round(_EARLY / math.sqrt(job.pipelines))
        )  # replicas share what they learn
        self._random = np.random.default_rng([self.settings.seed, 1])
        self._ledger: Ledger | None = None
        self._plan: dict[
            tuple[float, ...], Integers
        ] = {}  # the running plan of each group of equal pipelines
        self._target: Integers | None = (
            None  # what the plan would be if all rows cost what is hoped
        )
        self._solved_rows = self._target_rows = (
            0.0  # how many rows were known when they were solved for
        )
        self._last = (self._search.full(),) * job.pipelines
        self._version = 0
        self._ahead: dict[int, _Ran] = {}
        self._tried: dict[
            tuple[int, int], int
        ] = {}  # (rank, clock) -> the iteration of its last trial
        # Medians, as a pause in an iteration says nothing of the others.
        self._full_s: deque[float] = deque(
            maxlen=_REMEMBERED
        )  # iterations at full clocks since the last event
        self._replayed_s = 0.0  # the replayed time at full clocks when the last of them ended
        self._full_ratio = 1.0  # the reference over the replayed time at full clocks
        self._lates: deque[float] = deque(
            [0.0] * 4, maxlen=_REMEMBERED
        )  # how much larger that is under plans
        self._waits_s = (
            0.0,
        ) * job.pipelines  # how long each pipeline may take beside a slower one
        self._observed = -1
        self._audited = self._audits_due = 0

    def observe(self, observations: Sequence[RankObservation]) -> None:
        """Learn from what ranks observed of one iteration; ranks that observed nothing may be left
        out.

        Raises:
            UsageError: If the observations are of more than one iteration, or a rank's do not fit
                its program.
        """
        if len({seen.iteration for seen in observations}) > 1:
            raise UsageError(
                "observations: are of more than one iteration; give those of one at a time"
            )
        if observations:
            self._learner.observe(observations)
            self._account(observations)
            self._observed = observations[0].iteration

    def wait_for(self, times_s: Sequence[float]) -> None:
        """Let pipelines take longer than agreed from the next decision on, because all wait for a
        slower one.

        What the ledger owes by now is forgotten if one may: the slower pipeline owes it.

        Args:
            times_s: for each pipeline, the seconds of an iteration that it may take, as replayed
                from the learnt profile; 0 for as long as agreed.
        """
        if tuple(times_s) != self._waits_s:
            self._waits_s = tuple(times_s)
            if self._ledger is not None and any(times_s):
                self._ledger = replace(self._ledger, owed_s=min(0.0, self._ledger.owed_s))

    def set_clock_change(self, change: ClockChange) -> None:
        """Plan with what setting a clock was measured to cost."""
        self._search.set_clock_change(change)
        self.job = self._learner.job = self._search.job

    def busy_s(self) -> tuple[tuple[float, ...], ...]:
        """Return the seconds that each pipeline's ranks compute by the last decision, were GPUs as
        fast as at first.

        A GPU that takes longer has become slower. Empty if not every stage was observed at full
        clocks yet.
        """
        if not self._learner.is_ready:
            return ()
        problem, ranks = self._search.problem, self.job.ranks
        factors = self._learner.times.factor.reshape(self.job.pipelines, ranks)
        return tuple(
            tuple(
                (
                    np.bincount(problem.rank, costs.time_s[problem.member, program], ranks)
                    / rank_factors
                ).tolist()
            )
            for program, costs, rank_factors in zip(
                self._last, self._learner.costs(), factors, strict=True
            )
        )

    def _slowdown(self, replayed_s: float) -> float:
        """Return the agreed slowdown, or that of the pipeline for which others wait, if it is
        larger.
        """
        return max(self.settings.slowdown, max(self._waits_s) / replayed_s)

    def _account(self, observations: Sequence[RankObservation]) -> None:
        """Add an iteration to the ledger, and learn how much longer iterations are than replayed
        ones.
        """
        iteration, time_s = observations[0].iteration, max(seen.time_s for seen in observations)
        ran = self._ahead.pop(iteration, None)
        for earlier in [number for number in self._ahead if number < iteration]:
            del self._ahead[earlier]
        full = all(seen.version == 0 for seen in observations)
        if not self._learner.is_ready:
            limits = self.settings.slowdown, self.settings.max_slowdown, _BURST * time_s
            self._ledger = (self._ledger or Ledger(time_s, *limits)).add(
                time_s, full_clocks=full, iteration=iteration
            )
            return
        costs = self._learner.costs()
        clean = not any(seen.throttled_s for seen in observations)
        replayed_s = max(
            self._search.replay(self._search.full(), pipeline_costs)[0] for pipeline_costs in costs
        )
        is_event = self._is_event(replayed_s, iteration)
        if full and clean:
            self._full_s.append(time_s)
            self._replayed_s = replayed_s
        reference_s = median(self._full_s) if self._full_s else replayed_s * self._full_ratio
        self._full_ratio = reference_s / replayed_s
        if (
            not full
            and clean
            and ran is not None
            and all(seen.version == ran.version for seen in observations)
        ):
            planned_s = max(
                self._search.replay(p, pipeline_costs)[0]
                for p, pipeline_costs in zip(ran.programs, costs, strict=True)
            )
            self._lates.append(time_s / planned_s / self._full_ratio - 1)
        limits = self.settings.slowdown, self.settings.max_slowdown, _BURST * reference_s
        # Ranks account for iterations that are ahead by these terms, so the largest of theirs
        # count.
        ahead = [run.slowdown for run in (ran, *self._ahead.values()) if run is not None]
        slowdown = max([self._slowdown(replayed_s), *ahead])
        ledger = replace(self._ledger or Ledger(reference_s, *limits), slowdown=slowdown)
        self._ledger = ledger.add(time_s, full_clocks=full, iteration=iteration).corrected(
            reference_s, _BURST * reference_s, 1 if is_event else 0
        )

    def _is_event(self, replayed_s: float, iteration: int) -> bool:
        """Return whether iterations take another time than before, for example because a GPU has
        become slower.

        The reference is what iterations at full clocks took, and not what replays of learnt rows
        say, which err. It follows them only after an event, and until it is measured again.
        """
        times = self._learner.times
        limit = max(_EVENT, 4 * times.noise / math.sqrt(float(times.count[:, 0].min())))
        if not self._replayed_s or abs(replayed_s / self._replayed_s - 1) <= limit:
            return False
        self._full_s.clear()
        self._replayed_s = replayed_s
        if (
            iteration - self._audited >= _LEAST_AUDIT
        ):  # else it waits, so that a noisy job is not only audited
            self._audits_due = _REFERENCES
        return True

    def decide(self, iteration: int) -> Decision:
        """Return what all ranks run in `iteration`, which is still ahead."""
        full = (self._search.full(),) * self.job.pipelines
        if (
            not self._learner.is_ready
            or iteration < _REFERENCES
            or self._ledger is None
            or self._observed < 0
        ):
            return self._decision(iteration, "reference", full)
        if self._ledger.is_overdrawn:
            return self._decision(iteration, "paying", full)
        if self._audits_due or iteration - self._audited >= _AUDIT:
            self._audited, self._audits_due = iteration, max(0, self._audits_due - 1)
            return self._decision(iteration, "audit", full)
        return self._planned(iteration)

    def _planned(self, iteration: int) -> Decision:
        settings, search = self.settings, self._search
        rows = float(self._learner.times.known.sum())
        is_early = iteration < self._early and self._learner.planned_share() < _ENOUGH
        optimism = 1.0 if is_early else 0.3
        mean, plan = self._learner.costs(), self._learner.costs("plan", optimism)
        full = search.full()
        reference_s = max(search.replay(full, mean_costs)[0] for mean_costs in mean)
        agreed_s = reference_s * (settings.slowdown + _TIGHT - self._shorter)
        deadlines_s = [max(agreed_s, wait_s) for wait_s in self._waits_s]
        programs: list[Integers] = []
        solve = rows >= _GROWTH * self._solved_rows or iteration % _AGAIN == 0
        plans: dict[tuple[float, ...], Integers] = {}
        for pipeline, costs in enumerate(plan):
            group, deadline_s = self._group(pipeline), deadlines_s[pipeline]
            if group not in plans:
                plans[group] = self._best(
                    group, costs, mean[pipeline], deadline_s, iteration, solve=solve
                )
            programs.append(plans[group])
        self._plan = plans
        if solve:
            self._solved_rows = rows
        more = _TRIAL if is_early else _LATE_TRIAL
        trials, limit_s = 0, reference_s * (settings.slowdown + more - self._shorter)
        run = list(programs)
        if settings.learn:
            self._aim(mean, rows, programs[0], max(deadlines_s), iteration)
            safe, doubt = self._learner.costs("safe"), self._learner.costs("doubt")
            doubt_s = reference_s * (_DOUBT if self._trials_seen() else _MORE_DOUBT)
            for pipeline, program in enumerate(programs):
                wanted, is_open = self._wanted(iteration, pipeline, is_early=is_early)
                most_s = max(limit_s, self._waits_s[pipeline])
                limits = ((safe[pipeline], most_s), (doubt[pipeline], most_s + doubt_s))
                known = self._learner.times.known
                run[pipeline], tried = search.with_trials(
                    program, limits, wanted, is_open, known, self._random
                )
                for rank, clock in tried:
                    self._tried[rank, clock] = iteration
                    trials += int((~known[search.classes[rank], clock]).sum())
        run = [search.joined(p, before) for p, before in zip(run, self._last, strict=True)]
        time_s = max(
            search.replay(p, mean_costs)[0] for p, mean_costs in zip(run, mean, strict=True)
        )
        saving, error = self._saving(programs[0], mean[0])
        return self._decision(
            iteration,
            "learning" if trials else "following",
            tuple(run),
            trials=trials,
            time_s=time_s * self._full_ratio * (1 + self._late),
            saving=(saving, error),
        )

    @property
    def _late(self) -> float:
        return median(self._lates)

    @property
    def _shorter(self) -> float:
        """By how much plans are made shorter because iterations are longer than replayed, as a
        share of the reference.

        A plan that is much shorter than an iteration at full clocks does not exist.
        """
        return min(max(0.0, self._late - _LATE), _MOST_SHORTER)

    def _trials_seen(self) -> bool:
        """Whether all trials so far were observed."""
        return max(self._tried.values(), default=-1) <= self._observed

    def _group(self, pipeline: int) -> tuple[float, ...]:
        """Pipelines with equal groups have equal plans."""
        ranks = self.job.ranks
        factors = self._learner.times.factor[pipeline * ranks : (pipeline + 1) * ranks].tolist()
        return (*(round(factor, 2) for factor in factors), self._waits_s[pipeline])

    def _best(
        self,
        group: tuple[float, ...],
        costs: Costs,
        mean: Costs,
        deadline_s: float,
        iteration: int,
        *,
        solve: bool,
    ) -> Integers:
        """Return the best of the running plan, polished, and a fresh one, polished too."""
        search = self._search
        before = self._plan.get(group)
        if before is None:
            before = next(iter(self._plan.values()), search.full())
            solve = solve or bool(self._plan)
        starts = [search.repaired(before, costs)]
        if solve:
            fresh = search.solve(costs, deadline_s, iteration)
            starts += [] if fresh is None else [fresh]
        best, worth_j = self._polished(starts, costs, deadline_s)
        full = search.full()
        return full if worth_j >= search.replay(full, mean)[1] else best

    def _polished(
        self, starts: Sequence[Integers], costs: Costs, deadline_s: float
    ) -> tuple[Integers, float]:
        """Return the best of programs, each polished, and its joules, with a price on what it is
        late.
        """
        seed = int(self._random.integers(2**31))
        polished = [self._search.polish(start, costs, deadline_s, seed) for start in starts]
        worths_j = [
            joules * (1 + LATE * max(0.0, time_s / deadline_s - 1))
            for _, time_s, joules in polished
        ]
        best = worths_j.index(min(worths_j))
        return polished[best][0], worths_j[best]

    def _aim(
        self,
        mean: Sequence[Costs],
        rows: float,
        program: Integers,
        deadline_s: float,
        iteration: int,
    ) -> None:
        """Find what the plan would be if all rows cost what is expected of them, or a little
        less.
        """
        hopeful = self._learner.costs("mean", 1.0)[0]
        if self._target is None or rows >= _TARGET_GROWTH * self._target_rows:
            self._target_rows = rows
            self._target = self._search.solve(hopeful, deadline_s, iteration)
        self._target, _ = self._polished(
            [program if self._target is None else self._target], hopeful, deadline_s
        )

    def _wanted(
        self, iteration: int, pipeline: int, *, is_early: bool
    ) -> tuple[list[list[int]], NDArray[np.bool_]]:
        """Return the clocks that each rank should try, those first that the best plan might use;
        and which it may.
        """
        known, search = self._learner.times.known, self._search
        clocks = len(self.job.clocks_mhz)
        sweep = _bit_reversed(clocks)
        wanted, is_open = [], np.zeros((self.job.ranks, clocks), dtype=bool)
        for rank, classes in enumerate(search.classes):
            first, stop = search.problem.rank_start[rank : rank + 2]
            for clock in range(clocks):
                recent = iteration - self._tried.get((rank, clock), -_REPEAT) < _REPEAT
                is_open[rank, clock] = not recent and not known[classes, clock].all()
            used = (
                np.bincount(self._target[first:stop], minlength=clocks)
                if self._target is not None
                else sweep
            )
            hoped = [
                c
                for c in np.argsort(-np.asarray(used), kind="stable").tolist()
                if used[c] and is_open[rank, c]
            ]
            begin = (rank * 5 + pipeline * 3 + iteration) % clocks
            turned = [sweep[(begin + i) % clocks] for i in range(clocks)]
            some = [c for c in turned if is_open[rank, c] and c not in hoped]
            if is_early:
                wanted.append(
                    [c for pair in zip_longest(hoped[:4], some[:4]) for c in pair if c is not None]
                )
            elif (iteration + rank) % (2 if iteration < self._early else 8) == 0:
                wanted.append([*hoped[:2], *some[:1]])
            else:
                wanted.append([])
        return wanted, is_open

    def _saving(self, program: Integers, costs: Costs) -> tuple[float, float]:
        """Return the share of energy that a program saves, and its standard error."""
        member, rank = self._search.problem.member, self._search.problem.rank
        energies = []
        for candidate in (program, self._search.full()):
            seconds, waiting_s = np.zeros_like(costs.time_s), np.zeros(self.job.ranks)
            computed_s = costs.time_s[member, candidate]
            np.add.at(seconds, (member, candidate), computed_s)
            np.add.at(waiting_s, rank, -computed_s)
            waiting_s += self._search.replay(candidate, costs)[0]
            energies.append(self._learner.powers.energy(seconds, waiting_s))
        (plan_j, plan_slope), (full_j, full_slope) = energies
        slope = plan_slope / full_j - full_slope * (plan_j / full_j**2)
        return 1 - plan_j / full_j, math.sqrt(self._learner.powers.variance(slope))

    def _decision(
        self,
        iteration: int,
        phase: Phase,
        programs: tuple[Integers, ...],
        *,
        trials: int = 0,
        time_s: float | None = None,
        saving: tuple[float, float] = (0.0, 0.0),
    ) -> Decision:
        if any((a != b).any() for a, b in zip(programs, self._last, strict=True)):
            self._version += 1
        self._last = programs
        version = 0 if not any(program.any() for program in programs) else self._version
        agreed = self.settings.slowdown
        slowdown = self._slowdown(self._replayed_s) if self._replayed_s else agreed
        self._ahead[iteration] = _Ran(version, programs, slowdown)
        clocks = tuple(self._search.clocks_mhz(program) for program in programs)
        unknown = int((~self._learner.times.known).sum())
        return Decision(
            iteration, version, phase, clocks, self._ledger, trials, unknown, time_s, *saving
        )

    def learned(self) -> Profile:
        """Return what was learnt as a profile: measured rows, with standard errors.

        Times are those of the first pipeline's GPUs.

        Raises:
            UsageError: If not every stage was observed at full clocks yet.
        """
        return self._learner.profile()


def _bit_reversed(count: int) -> list[int]:
    """Return 0 to `count` - 1 in the order of their reversed bits, so that any few of them are
    spread out.
    """
    bits = max(1, (count - 1).bit_length())
    order = sorted(range(2**bits), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [i for i in order if i < count]
