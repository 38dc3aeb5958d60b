"""The autopilot: learns what clocks cost from the training's own iterations, and decides the
clocks of those ahead.

It orders audits, which are iterations at full clocks (`Autopilot.decide`). When one is due
(`AuditTimes`), and what its time says of those around it (`Audits`), `runtime/guarantee.py` knows.
What rows cost, `Learner` knows. Which plan each pipeline runs, `RunningPlans` does; which operating
points ranks try beside it, `Trials`. `Searcher` finds the programs of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.autopilot.job import AutopilotJob, Decision, Phase, RankRow
from perseus_planner.extensions.autopilot.learning import Learner
from perseus_planner.extensions.autopilot.planning import Searcher
from perseus_planner.extensions.autopilot.running_plans import Outlook, RunningPlans
from perseus_planner.extensions.autopilot.trials import Trials
from perseus_planner.extensions.autopilot.tuning import PlanTuning
from perseus_planner.runtime.guarantee import Guarantee, Judged
from perseus_planner.runtime.options import AutopilotSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.job import RankObservation
    from perseus_planner.extensions.autopilot.planning import Costs
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.guarantee import Tuning

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


class _Ran(NamedTuple):
    """What was decided for an iteration that was not observed yet."""

    version: int  #: as `Decision.version`
    slowdown: float  #: that was agreed
    is_planned: bool  #: whether its clocks are those of a plan, which may be full ones


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
        # One source of chance for all, so that equal calls give equal decisions.
        random = np.random.default_rng([self.settings.seed, 1])
        self._guarantee = Guarantee(
            self.settings.slowdown, self.settings.max_slowdown, random, tuning
        )
        self._tuning = plan_tuning or PlanTuning()
        #: iterations that are early; replicas share what they learn
        self._early = max(1, round(self._tuning.early * len(job.modes) / math.sqrt(job.pipelines)))
        self._plans = RunningPlans(self._search, self._learner, self._tuning, random)
        self._trials = Trials(
            self._search,
            self._learner,
            self._guarantee,
            self.settings.slowdown,
            self._tuning,
            random,
        )

        # Decisions and observations.
        self._last = (self._search.full(),) * job.pipelines  #: programs of the last decision
        self._version = 0  #: how often programs have changed
        self._ahead: dict[int, _Ran] = {}  #: by the number of the iteration
        self._observed = -1  #: the last iteration that was observed
        self._replayed_s = 0.0  #: the replayed time at full clocks; 0 before it is known
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
        self.job = self._search.job
        self._learner.set_job(self.job)

    def rank_costs(self) -> tuple[tuple[RankRow, ...], ...]:
        """Return for each pipeline what its ranks take and use by the last decision, as far as is
        known, if GPUs are as fast as at first.

        A GPU that takes longer has become slower. Empty if not every stage was observed at full
        clocks yet.
        """
        if not self._learner.is_ready:
            return ()
        job = self.job
        # The factor of each GPU is taken out, so that a GPU that became slower differs from what is
        # told.
        factors = self._learner.times.factor.reshape(job.pipelines, job.ranks)
        full = self._search.full()
        of_pipelines = []
        for program, costs, factor in zip(self._last, self._learner.costs(), factors, strict=True):
            # The same rows at the decided clocks and at full ones, so that both carry the same
            # errors.
            busy_s, busy_j = self._by_rank(program, costs)
            full_s, full_j = self._by_rank(full, costs)
            # Rows are of all GPUs of a stage, and what is returned is of one of them.
            gpus = job.gpus_per_stage
            rows = [
                busy_s / factor,
                busy_j / factor / gpus,
                full_s / factor,
                full_j / factor / gpus,
                costs.waiting_w / gpus,
            ]
            of_pipelines.append(tuple(RankRow(*row) for row in np.array(rows).T.tolist()))
        return tuple(of_pipelines)

    def _by_rank(self, program: Integers, costs: Costs) -> tuple[Floats, Floats]:
        """Return the seconds and the joules of each rank's computations: (ranks,) each."""
        problem = self._search.problem
        time_s = costs.time_s[problem.member, program]
        energy_j = time_s * costs.power_w[problem.member, program]
        busy_s = np.zeros(self.job.ranks)
        busy_j = np.zeros(self.job.ranks)
        np.add.at(busy_s, problem.rank, time_s)
        np.add.at(busy_j, problem.rank, energy_j)
        return busy_s, busy_j

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
        # Ranks whose ledgers forced full clocks say so, whatever was decided.
        full_clocks = all(seen.version == 0 for seen in observations)
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
            elif not full_clocks and iteration != self._trials.costly_iteration:
                late = judged.ran_s / judged.full_s - agreed
                margin.add(late, is_owed=self._guarantee.is_owed)
        # Ranks account for iterations that are ahead by these terms, so the largest of theirs
        # count.
        now = self._slowdown(self._replayed_s) if self._replayed_s else agreed
        ahead = [decided.slowdown for decided in self._ahead.values()]
        self._guarantee.add(
            iteration,
            time_s,
            judged,
            full_clocks=full_clocks,
            replayed_s=self._replayed_s,
            slowdown=max(now, agreed, *ahead),
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
        #: of each pipeline, the seconds of computations as they ran, and as at full clocks
        times_s: dict[int, Floats] = {}
        for seen in observations:
            # NaN at first, so that a rank that was not seen is told from one that was.
            both_s = times_s.setdefault(seen.pipeline, np.full((2, starts[-1]), np.nan))
            of_rank = self._learner.as_at_full_clocks(seen)
            if of_rank is not None:
                both_s[:, starts[seen.rank] : starts[seen.rank + 1]] = of_rank
        is_incomplete = any(np.isnan(both_s).any() for both_s in times_s.values())
        if is_incomplete or len(times_s) < self.job.pipelines:
            return None
        # The slowest pipeline decides how long the iteration is, at the clocks that ran and at full
        # ones.
        ran_s = max(self._search.replayed_s(as_ran_s) for as_ran_s, _ in times_s.values())
        full_s = max(self._search.replayed_s(at_full_s) for _, at_full_s in times_s.values())
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
        """Return the plans of an iteration, with trials if any row is worth one."""
        search = self._search
        # Mean costs are what is expected; planned ones are safer, where times spread.
        expected = self._learner.costs()
        outlook = self._outlook(iteration, expected)
        # The doubt of a row's power counts in its favour, while few rows are known even more, so
        # that it is tried.
        tuning = self._tuning
        optimism = tuning.early_optimism if outlook.is_early else tuning.late_optimism
        costs = self._learner.costs("plan", optimism, outlook.margin)
        plans, is_searched = self._plans.programs(outlook, costs, expected)
        programs = plans
        trials = 0
        if self.settings.learn:
            # The best that rows may hope for tells which of them to try.
            if is_searched:
                self._trials.aim(outlook, plans[0])
            programs, trials = self._trials.add(outlook, plans)
        # The step from one iteration's last clock to the next one's first is a change of the budget
        # too.
        joined = [
            search.joined(program, before)
            for program, before in zip(programs, self._last, strict=True)
        ]
        time_s = max(
            search.replay(program, of_pipeline)[0]
            for program, of_pipeline in zip(joined, expected, strict=True)
        )
        return self._decision(
            iteration,
            "learning" if trials else "following",
            tuple(joined),
            trials=trials,
            time_s=time_s * self._guarantee.ratio,
            # The plan saves, not the trials on top of it, so the saving is told without them.
            saving=self._saving(plans[0], expected[0]),
        )

    def _outlook(self, iteration: int, expected: Sequence[Costs]) -> Outlook:
        """Return what is known of an iteration ahead, where rows cost what is expected."""
        tuning = self._tuning
        # Early by its number, and while few rows may be planned on.
        is_among_first = iteration < self._early
        is_early = is_among_first and self._learner.planned_share() < tuning.enough
        turn = tuning.turn if is_among_first else tuning.late_turn
        # The agreed time counts from the replay by the same rows, so that their common error
        # cancels.
        full = self._search.full()
        reference_s = max(self._search.replay(full, costs)[0] for costs in expected)
        agreed_s = reference_s * (self.settings.slowdown + tuning.tight)
        return Outlook(
            iteration=iteration,
            observed=self._observed,
            is_early=is_early,
            turn=1 if is_early else turn,
            measured_rows=int(self._learner.times.known.sum()),
            # Times spread, and the plan must hold in spite of it, so lower clocks are planned
            # longer.
            margin=self._guarantee.margin.start(self._learner.times.spread),
            reference_s=reference_s,
            waits_s=self._waits_s,
            # A pipeline beside a slower one may take as long as that one, which costs nobody time.
            deadlines_s=tuple(max(agreed_s, wait_s) for wait_s in self._waits_s),
        )

    def _saving(self, program: Integers, costs: Costs) -> tuple[float, float]:
        """Return the share of energy that a program saves, and its standard error."""
        # Both programs are summed from the same rows, so that the error of their ratio is small.
        plan_j, plan_slope = self._energy(program, costs)
        full_j, full_slope = self._energy(self._search.full(), costs)
        # The gradient of 1 - plan / full carries the covariance of rows into the error of the
        # saving.
        slope = plan_slope / full_j - full_slope * (plan_j / full_j**2)
        return 1 - plan_j / full_j, math.sqrt(self._learner.powers.variance(slope))

    def _energy(self, program: Integers, costs: Costs) -> tuple[float, Floats]:
        """Return the joules of an iteration of this program, and how they grow with each learnt
        power.
        """
        problem = self._search.problem
        computed_s = costs.time_s[problem.member, program]
        # A class may run more than once at a clock, so its seconds are added up.
        options_s = np.zeros_like(costs.time_s)
        np.add.at(options_s, (problem.member, program), computed_s)
        # What a rank does not compute of the iteration it waits, at its own power.
        waiting_s = np.zeros(self.job.ranks)
        np.add.at(waiting_s, problem.rank, -computed_s)
        waiting_s += self._search.replay(program, costs)[0]
        return self._learner.powers.energy(self._learner.by_row(options_s), waiting_s)

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
        """Return the decision that pipelines run these programs, and remember it."""
        # Equal programs keep their number, so ranks need not take them again.
        if any((a != b).any() for a, b in zip(programs, self._last, strict=True)):
            self._version += 1
        self._last = programs
        # Full clocks are version 0 for ranks, whichever decision brought them.
        version = 0 if not any(program.any() for program in programs) else self._version
        # What is agreed is remembered with the decision, as the observation comes iterations later.
        slowdown = self.settings.slowdown
        if self._replayed_s:
            slowdown = self._slowdown(self._replayed_s)
        is_planned = phase in ("learning", "following")
        self._ahead[iteration] = _Ran(version, slowdown, is_planned)
        # A job with one mode sends none, and ranks run in the training's own way.
        modes: tuple[tuple[tuple[str, ...], ...], ...] = ()
        if len(self.job.modes) > 1:
            modes = tuple(self._search.modes(program) for program in programs)
        saved, saved_error = saving
        return Decision(
            iteration=iteration,
            version=version,
            phase=phase,
            clocks=tuple(self._search.clocks_mhz(program) for program in programs),
            ledger=self._guarantee.ledger,
            trials=trials,
            unknown=int((~self._learner.times.known).sum()),
            time_s=time_s,
            saving=saved,
            saving_stderr=saved_error,
            modes=modes,
            untold=self._guarantee.audits.untold,
            longest=self._guarantee.longest,
        )

    def learned(self) -> Profile:
        """Return what was learnt as a profile: measured rows, with standard errors.

        Times are those of the first pipeline's GPUs.

        Raises:
            UsageError: If not every stage was observed at full clocks yet.
        """
        return self._learner.profile()
