"""The autopilot: learns what clocks cost from the training's own iterations, and decides the
clocks of those ahead.

It orders audits, which are iterations at full clocks (`Autopilot.decide`). When one is due
(`AuditTimes`), and what its time says of those around it (`Audits`), `runtime/guarantee.py` knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.autopilot.job import AutopilotJob, Decision, Phase, RankRow
from perseus_planner.extensions.autopilot.learning import Learner
from perseus_planner.extensions.autopilot.planning import LATE, Costs, Searcher
from perseus_planner.extensions.autopilot.tuning import PlanTuning
from perseus_planner.runtime.guarantee import Guarantee, Judged
from perseus_planner.runtime.options import AutopilotSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.job import RankObservation
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.guarantee import Tuning

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


class _Ran(NamedTuple):
    """What was decided for an iteration that was not observed yet."""

    version: int
    programs: tuple[Integers, ...]
    slowdown: float
    is_planned: bool  #: Whether its clocks are those of a plan, which may be full ones


class _Searched(NamedTuple):
    """When plans were searched, and for what."""

    iteration: int
    rows: float = 0.0  #: how many rows were known
    times_s: Floats | None = None  #: (pipelines, classes, options) seconds of rows


class Autopilot:
    """Decides the clocks of a training job's iterations while it learns what they cost.

    Call `observe` for each iteration that has ended and `decide` for each one ahead, both in order.
    Decisions may be several iterations ahead of observations. Equal calls give equal decisions.

    Args:
        job: the job.
        settings: what it may do.
        prior: a profile of its stages, whose rows are taken as measured until iterations tell
            otherwise.
        tuning: constants of its guarantee on time.
        plan_tuning: constants of its plans and trials.
    """

    tells_busy = True  #: whether `rank_costs` tells computing from waiting

    def __init__(
        self,
        job: AutopilotJob,
        settings: AutopilotSettings | None = None,
        prior: Profile | None = None,
        tuning: Tuning | None = None,
        plan_tuning: PlanTuning | None = None,
    ) -> None:
        self.job = job
        self.settings = settings or AutopilotSettings()
        self._search = Searcher(job, self.settings.max_changes)
        self._learner = Learner(
            job, self._search.keys, self._search.class_rank, prior, learn=self.settings.learn
        )
        self._random = np.random.default_rng([self.settings.seed, 1])
        self._guarantee = Guarantee(
            self.settings.slowdown, self.settings.max_slowdown, self._random, tuning
        )
        self._tuning = plan_tuning or PlanTuning()
        #: iterations that are early; replicas share what they learn
        self._early = max(1, round(self._tuning.early * len(job.modes) / math.sqrt(job.pipelines)))

        # Plans.
        #: the running plan of each group of equal pipelines
        self._plan: dict[tuple[float, ...], Integers] = {}
        #: when fresh plans were solved for last
        self._solved = _Searched(-self._tuning.again)
        #: when plans were polished or solved for last
        self._searched = _Searched(-self._tuning.again)
        #: what the plan would be if all rows cost what is hoped
        self._target: Integers | None = None
        #: how many rows were known when the target was solved for
        self._target_rows = 0.0

        # Trials.
        #: (rank, option) -> the iteration of its last trial
        self._tried: dict[tuple[int, int], int] = {}
        #: the last iteration in which a mode was tried for the first time
        self._costly = -1

        # Decisions and observations.
        self._last = (self._search.full(),) * job.pipelines  #: programs of the last decision
        self._version = 0
        self._ahead: dict[int, _Ran] = {}
        self._observed = -1  #: the last iteration that was observed
        self._replayed_s = 0.0  #: the replayed time at full clocks
        #: how long each pipeline may take beside a slower one
        self._waits_s = (0.0,) * job.pipelines
        #: whether a profile is given, so that nothing has to be measured before a plan
        self._is_given = self._learner.is_ready
        # A prior tells full clocks too, so the first decision may be a plan, and needs a reference.
        if self._is_given:
            self._guarantee.begin(self._at_full_clocks_s())

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
            if any(times_s):
                self._guarantee.forgive()

    def set_clock_change(self, change: ClockChange) -> None:
        """Plan with what setting a clock was measured to cost."""
        self._search.set_clock_change(change)
        self.job = self._learner.job = self._search.job

    def rank_costs(self) -> tuple[tuple[RankRow, ...], ...]:
        """Return for each pipeline what its ranks take and use by the last decision, by what is
        known; were GPUs as fast as at first.

        A GPU that takes longer has become slower. Empty if not every stage was observed at full
        clocks yet.
        """
        if not self._learner.is_ready:
            return ()
        # The factor of each GPU is taken out, so that a GPU that became slower differs from what is
        # told.
        problem = self._search.problem
        ranks = self.job.ranks
        factors = self._learner.times.factor.reshape(self.job.pipelines, ranks)
        full = self._search.full()
        gpus = self.job.gpus_per_stage
        found = []
        # The same rows at the decided clocks and at full ones, so that both carry the same errors.
        for program, costs, rank_factors in zip(
            self._last, self._learner.costs(), factors, strict=True
        ):
            columns = []
            for clocks in (program, full):
                time_s = costs.time_s[problem.member, clocks]
                # Rows are of all GPUs of a stage, and what is returned is of one of them.
                energy_j = time_s * costs.power_w[problem.member, clocks]
                columns.append(np.bincount(problem.rank, time_s, ranks) / rank_factors)
                columns.append(np.bincount(problem.rank, energy_j, ranks) / rank_factors / gpus)
            columns.append(costs.waiting_w / gpus)
            found.append(tuple(RankRow(*row) for row in np.array(columns).T.tolist()))
        return tuple(found)

    def _slowdown(self, replayed_s: float) -> float:
        """Return the agreed slowdown, or that of the pipeline for which others wait, if it is
        larger.
        """
        return max(self.settings.slowdown, max(self._waits_s) / replayed_s)

    def _account(self, observations: Sequence[RankObservation]) -> None:
        """Charge the ledger with what clocks did to an iteration, and leave more time in plans, or
        less, by that.
        """
        iteration = observations[0].iteration
        # All ranks wait for the slowest, so the longest time is that of the iteration.
        time_s = max(seen.time_s for seen in observations)
        ran = self._ahead.pop(iteration, None)
        # Iterations that were never observed would keep an old slowdown in force.
        for earlier in [number for number in self._ahead if number < iteration]:
            del self._ahead[earlier]
        full = all(seen.version == 0 for seen in observations)
        agreed = self.settings.slowdown if ran is None else ran.slowdown
        judged = self._judged(observations, time_s) if self._learner.is_ready else None
        if judged is not None:
            # The replayed time is that of the newest rows, so it is renewed before anything is
            # charged by it.
            self._replayed_s = self._at_full_clocks_s()
            margin = self._guarantee.margin
            # A plan may be full clocks, and then what ran late was not due to clocks.
            if ran is not None and ran.is_planned and ran.version == 0:
                margin.keep_from_ending()
            # A mode that runs for the first time is late by design, and was allowed for.
            elif not full and iteration != self._costly:
                late = judged.ran_s / judged.full_s - agreed
                margin.add(late, is_owed=self._guarantee.is_owed)
        # Ranks account for iterations that are ahead by these terms, so the largest of theirs
        # count.
        now = self._slowdown(self._replayed_s) if self._replayed_s else agreed
        slowdown = max([now, agreed, *(run.slowdown for run in self._ahead.values())])
        self._guarantee.add(
            iteration,
            time_s,
            judged,
            full_clocks=full,
            replayed_s=self._replayed_s,
            slowdown=slowdown,
        )

    def _at_full_clocks_s(self) -> float:
        """Return the seconds of an iteration at full clocks, as replayed from learnt rows."""
        full = self._search.full()
        return max(self._search.replay(full, costs)[0] for costs in self._learner.costs())

    def _judged(self, observations: Sequence[RankObservation], time_s: float) -> Judged | None:
        """Return what is known of the computations of an iteration of so many seconds; None if not
        all were seen.
        """
        starts = self._search.problem.rank_start
        times_s: dict[int, Floats] = {}
        for seen in observations:
            # NaN at first, so that a rank that was not seen is told from one that was.
            ranks_s = times_s.setdefault(seen.pipeline, np.full((2, starts[-1]), np.nan))
            found = self._learner.as_at_full_clocks(seen)
            if found is not None:
                ranks_s[:, starts[seen.rank] : starts[seen.rank + 1]] = found
        if len(times_s) < self.job.pipelines or any(np.isnan(s).any() for s in times_s.values()):
            return None
        # The slowest pipeline decides how long the iteration is, at the clocks that ran and at full
        # ones.
        ran_s, full_s = (
            max(self._search.replayed_s(each[i]) for each in times_s.values()) for i in range(2)
        )
        unexplained = self._learner.common + (time_s - ran_s) / time_s
        return Judged(ran_s, full_s, unexplained)

    def decide(self, iteration: int) -> Decision:
        """Return what all ranks run in `iteration`, which is still ahead."""
        full = (self._search.full(),) * self.job.pipelines
        guarantee = self._guarantee
        # The first iterations measure the reference, unless a profile was given that tells it.
        is_begun = iteration >= guarantee.tuning.references and self._observed >= 0
        is_known = self._learner.is_ready and guarantee.ledger is not None
        if not is_known or not (is_begun or self._is_given):
            return self._decision(iteration, "reference", full)
        # A debt is paid before anything is learnt, so no audit or plan comes before it.
        if guarantee.is_overdrawn:
            return self._decision(iteration, "paying", full)
        if guarantee.is_audit():
            return self._decision(iteration, "audit", full)
        return self._planned(iteration)

    def _planned(self, iteration: int) -> Decision:
        settings = self.settings
        search = self._search
        tuning = self._tuning
        rows = float(self._learner.times.known.sum())
        is_early = iteration < self._early and self._learner.planned_share() < tuning.enough
        # While few rows are known, the doubt of a row's power counts in its favour, so that it is
        # tried.
        optimism = tuning.early_optimism if is_early else tuning.late_optimism
        # Times spread, and the plan must hold in spite of it, so lower clocks are planned longer.
        margin = self._guarantee.margin.start(self._learner.times.spread)
        mean = self._learner.costs()
        plan = self._learner.costs("plan", optimism, margin)
        # The agreed time counts from the replay by the same rows, so that their common error
        # cancels.
        full = search.full()
        reference_s = max(search.replay(full, mean_costs)[0] for mean_costs in mean)
        agreed_s = reference_s * (settings.slowdown + tuning.tight)
        # A pipeline beside a slower one may take as long as that one, which costs nobody time.
        deadlines_s = [max(agreed_s, wait_s) for wait_s in self._waits_s]
        programs, is_due = self._searched_programs(iteration, rows, plan, mean, deadlines_s)
        run = programs
        trials = 0
        if settings.learn:
            # The best that rows may hope for tells which of them to try.
            if is_due:
                self._aim(rows, programs[0], max(deadlines_s), iteration)
            run, trials = self._with_trials(
                iteration, programs, reference_s, margin, is_early=is_early
            )
        # The step from one iteration's last clock to the next one's first is a change of the budget
        # too.
        run = [search.joined(p, before) for p, before in zip(run, self._last, strict=True)]
        time_s = max(
            search.replay(p, mean_costs)[0] for p, mean_costs in zip(run, mean, strict=True)
        )
        # The plan saves, not the trials on top of it, so the saving is told without them.
        saving, error = self._saving(programs[0], mean[0])
        return self._decision(
            iteration,
            "learning" if trials else "following",
            tuple(run),
            trials=trials,
            time_s=time_s * self._guarantee.ratio,
            saving=(saving, error),
        )

    def _searched_programs(
        self,
        iteration: int,
        rows: float,
        plan: Sequence[Costs],
        mean: Sequence[Costs],
        deadlines_s: Sequence[float],
    ) -> tuple[list[Integers], bool]:
        """Return the program of each pipeline for its deadline, by the costs of `plan`, and whether
        they were searched again; between searches the last ones stay.
        """
        programs: list[Integers] = []
        # Later iterations rest longer, so that searching takes a bounded share of the process'
        # time.
        tuning = self._tuning
        rest = max(1, int(iteration * tuning.rest))
        is_grown = rows >= tuning.growth * self._solved.rows
        solve = is_grown or iteration - self._solved.iteration >= tuning.again * rest
        is_due = solve or iteration - self._searched.iteration >= rest or self._is_new(plan)
        # Equal pipelines share a plan, so each group is searched once.
        plans: dict[tuple[float, ...], Integers] = {}
        for pipeline, costs in enumerate(plan):
            group = self._group(pipeline)
            deadline_s = deadlines_s[pipeline]
            if not is_due and group in self._plan:
                plans[group] = self._plan[group]
            elif group not in plans:
                plans[group] = self._best(
                    group, costs, mean[pipeline], deadline_s, iteration, solve=solve
                )
            programs.append(plans[group])
        self._plan = plans
        if is_due:
            times_s = np.array([costs.time_s for costs in plan])
            self._searched = _Searched(iteration, rows, times_s)
        if solve:
            self._solved = self._searched
        return programs, is_due

    def _with_trials(
        self,
        iteration: int,
        programs: Sequence[Integers],
        reference_s: float,
        margin: float,
        *,
        is_early: bool,
    ) -> tuple[list[Integers], int]:
        """Return the programs with trials of rows that are not settled, and how many these are."""
        search = self._search
        # A trial may be longer than a plan, as it runs once and the ledger charges it.
        tuning = self._tuning
        more = tuning.trial if is_early else tuning.late_trial
        trials = 0
        limit_s = reference_s * (self.settings.slowdown + more)
        run = list(programs)
        is_costly = False
        # Two bounds on a trial: what is likely at most, and what is possible if the physical
        # bound fails.
        safe = self._learner.costs("safe", margin=max(margin, 0.0))
        doubt = self._learner.costs("doubt", margin=max(margin, 0.0))
        doubt_s = reference_s * (tuning.doubt if self._trials_seen() else tuning.more_doubt)
        # Full clocks count as settled but in one iteration of so many, which checks them for
        # comparisons.
        settled = self._learner.settled()
        settled[:, 0] = iteration % (tuning.check if is_early else 2 * tuning.check) > 0
        for pipeline, program in enumerate(programs):
            wanted, is_open = self._wanted(program, settled, iteration, pipeline, is_early=is_early)
            # A mode is measured alone, because nothing is known of what it costs, and no other
            # pipeline may be late for it.
            spare_s = 0.0
            if new := self._new_modes(iteration, pipeline):
                wanted = new
                spare_s = self._spare_s()
            most_s = max(limit_s, self._waits_s[pipeline]) + spare_s
            limits = ((safe[pipeline], most_s), (doubt[pipeline], most_s + doubt_s))
            run[pipeline], tried = search.with_trials(
                program, limits, wanted, is_open, settled, self._random
            )
            is_costly |= bool(tried) and spare_s > 0.0
            for rank, option in tried:
                self._tried[rank, option] = iteration
                # Full clocks and rows that are settled teach nothing, so they do not count as
                # trials.
                trials += int(option and (~settled[search.classes[rank], option]).sum())
        if is_costly:
            self._costly = iteration
        return run, trials

    def _new_modes(self, iteration: int, pipeline: int) -> list[list[int]]:
        """Return what each rank should try if one is to run for the first time in a mode: at full
        clocks, of which its others tell. Empty if none is.
        """
        ranks = range(self.job.ranks)
        # One mode at a time, at full clocks, where its own way is known to compare with.
        untried = self._learner.untried()
        due = [
            (rank, mode)
            for mode, classes in enumerate(untried)
            for rank in ranks
            if classes[self._search.classes[rank]].any()
            and not self._was_tried_lately(rank, mode, iteration)
        ]
        # Nothing new before the last costly one was observed, as what it owed is not known until
        # then.
        if not due or iteration % 2 or self._costly > self._observed:
            return []
        # Pipelines begin at different ranks, so that they do not all measure the same.
        at, mode = due[(iteration + pipeline) % len(due)]
        return [[mode] if rank == at else [] for rank in ranks]

    def _spare_s(self) -> float:
        """Return what the first computations in a mode may cost: half of what may be owed."""
        return self._guarantee.spare_s / 2

    def _is_new(self, plan: Sequence[Costs]) -> bool:
        """Whether a row costs something else than when plans were last searched."""
        times_s = np.array([each.time_s for each in plan])
        before_s = self._searched.times_s
        return before_s is None or not np.allclose(
            times_s, before_s, rtol=self._tuning.same, atol=0.0
        )

    def _was_tried_lately(self, rank: int, option: int, iteration: int) -> bool:
        """Whether a rank tried an option so lately that it is not to be tried again yet."""
        last = self._tried.get((rank, option))
        return last is not None and iteration - last < self._tuning.repeat

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
            # A new group has no plan of its own yet, so it begins with that of another.
            before = next(iter(self._plan.values()), search.full())
            solve = solve or bool(self._plan)
        # Rows may have become unusable since, so the running plan is repaired before it competes.
        starts = [search.repaired(before, costs)]
        if solve:
            fresh = search.solve(costs, deadline_s, iteration)
            if fresh is not None:
                # The fresh plan knows nothing of clock changes, so it is polished before it is
                # compared.
                fresh_polishes = self._tuning.fresh
                for again in range(fresh_polishes):
                    fresh, _, _ = search.polish(
                        fresh, costs, deadline_s, fresh_polishes * iteration + again
                    )
                starts.append(fresh)
        best, worth_j = self._polished(starts, costs, deadline_s)
        # If no plan is cheaper than full clocks by what is expected, nothing is risked.
        full = search.full()
        return full if worth_j >= search.replay(full, mean)[1] else best

    def _polished(
        self, starts: Sequence[Integers], costs: Costs, deadline_s: float
    ) -> tuple[Integers, float]:
        """Return the best of programs, each polished, and its joules, with a price on what it is
        late.
        """
        # All starts have one seed, so that they differ by where they begin and not by chance.
        seed = int(self._random.integers(2**31))
        polished = [self._search.polish(start, costs, deadline_s, seed) for start in starts]
        # Lateness has a price and not a limit, as no start may be in time.
        worths_j = [
            joules * (1 + LATE * max(0.0, time_s / deadline_s - 1))
            for _, time_s, joules in polished
        ]
        best = worths_j.index(min(worths_j))
        return polished[best][0], worths_j[best]

    def _aim(self, rows: float, program: Integers, deadline_s: float, iteration: int) -> None:
        """Find what the plan would be if all rows cost what is expected of them, or a little
        less.
        """
        # The target names rows worth a trial, so the doubt of each row's power counts in its
        # favour.
        hopeful = self._learner.costs("mean", 1.0, self._guarantee.margin.value or 0.0)[0]
        if self._target is None or rows >= self._tuning.target_growth * self._target_rows:
            self._target_rows = rows
            self._target = self._search.solve(hopeful, deadline_s, iteration)
        # Rows change between solutions, so the target follows them by polishing.
        self._target, _ = self._polished(
            [program if self._target is None else self._target], hopeful, deadline_s
        )

    def _wanted(
        self,
        program: Integers,
        settled: NDArray[np.bool_],
        iteration: int,
        pipeline: int,
        *,
        is_early: bool,
    ) -> tuple[list[list[int]], NDArray[np.bool_]]:
        """Return the options that each rank should try, those first that the best plan might use;
        and which it may.
        """
        search = self._search
        options = settled.shape[1]
        wanted = []
        is_open = np.zeros((self.job.ranks, options), dtype=bool)
        for rank, classes in enumerate(search.classes):
            first, stop = search.problem.rank_start[rank : rank + 2]
            is_open[rank, 0] = not settled[classes, 0].all() and program[first:stop].all()
            for option in range(1, options):
                # A clock that was tried lately may not be observed yet.
                was_tried = self._was_tried_lately(rank, option, iteration)
                is_open[rank, option] = not was_tried and not settled[classes, option].all()
            # Ranks, pipelines and iterations begin elsewhere in the sweep, so that they measure
            # different rows.
            begin = rank * 5 + pipeline * 3 + iteration
            hoped, some = self._candidates(slice(first, stop), is_open[rank], begin)
            # Early on every rank tries; later only some of them, so that trials fade out.
            if is_early:
                wanted.append(
                    [c for pair in zip_longest(hoped[:4], some[:4]) for c in pair if c is not None]
                )
            elif (iteration + rank) % (2 if iteration < self._early else 8) == 0:
                wanted.append([*hoped[:2], *some[:1]])
            else:
                wanted.append([])
            # Full clocks come first, as lower ones are compared with them.
            if is_open[rank, 0]:
                wanted[-1] = [0, *(c for c in wanted[-1] if c)]
        return wanted, is_open

    def _candidates(
        self, nodes: slice, is_open: NDArray[np.bool_], begin: int
    ) -> tuple[list[int], list[int]]:
        """Return the options that a rank may try: those that the best plan might use, most used
        first, and all others, which begin at a place of their own.
        """
        options = len(is_open)
        # Bit-reversed, so that few trials already spread over all clocks.
        sweep = _bit_reversed(options)
        # The target tells which clocks a plan would use; without one all count alike.
        used = (
            np.bincount(self._target[nodes], minlength=options)
            if self._target is not None
            else sweep
        )
        by_use = np.argsort(-np.asarray(used), kind="stable").tolist()
        hoped = [option for option in by_use if used[option] and is_open[option]]
        turned = [sweep[(begin + step) % options] for step in range(options)]
        some = [option for option in turned if is_open[option] and option not in hoped]
        return hoped, some

    def _saving(self, program: Integers, costs: Costs) -> tuple[float, float]:
        """Return the share of energy that a program saves, and its standard error."""
        member = self._search.problem.member
        rank = self._search.problem.rank
        # Both programs are summed from the same rows, so that the error of their ratio is small.
        energies = []
        for candidate in (program, self._search.full()):
            seconds = np.zeros_like(costs.time_s)
            waiting_s = np.zeros(self.job.ranks)
            computed_s = costs.time_s[member, candidate]
            # A class may run more than once at a clock, so its seconds are added up.
            np.add.at(seconds, (member, candidate), computed_s)
            np.add.at(waiting_s, rank, -computed_s)
            # What a rank does not compute of the iteration it waits, at its own power.
            waiting_s += self._search.replay(candidate, costs)[0]
            rows_s = self._learner.by_row(seconds)
            energies.append(self._learner.powers.energy(rows_s, waiting_s))
        # The gradient of 1 - plan / full carries the covariance of rows into the error of the
        # saving.
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
        # Equal programs keep their number, so ranks need not take them again.
        if any((a != b).any() for a, b in zip(programs, self._last, strict=True)):
            self._version += 1
        self._last = programs
        # Full clocks are version 0 for ranks, whichever decision brought them.
        version = 0 if not any(program.any() for program in programs) else self._version
        agreed = self.settings.slowdown
        # What is agreed is remembered with the decision, as the observation comes iterations later.
        slowdown = self._slowdown(self._replayed_s) if self._replayed_s else agreed
        is_planned = phase in ("learning", "following")
        self._ahead[iteration] = _Ran(version, programs, slowdown, is_planned)
        clocks = tuple(self._search.clocks_mhz(program) for program in programs)
        unknown = int((~self._learner.times.known).sum())
        # A job with one mode sends none, and ranks run in the training's own way.
        several = len(self.job.modes) > 1
        modes = tuple(map(self._search.modes, programs)) if several else ()
        guarantee = self._guarantee
        return Decision(
            iteration,
            version,
            phase,
            clocks,
            guarantee.ledger,
            trials,
            unknown,
            time_s,
            *saving,
            modes,
            untold=guarantee.audits.untold,
            longest=guarantee.longest,
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
