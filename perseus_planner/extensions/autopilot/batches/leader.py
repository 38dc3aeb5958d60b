"""What the first rank of a pipeline decides of each batch: its clocks, by the laws that all ranks
of the pipeline have learnt, and not more time than is agreed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from perseus_planner.extensions.autopilot.batches.exchange import (
    Batch,
    OwnTime,
    RankLaws,
    RankPlan,
    Slowest,
)
from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, margin_of
from perseus_planner.extensions.autopilot.job import CHANGE
from perseus_planner.extensions.autopilot.status import AutopilotStatus, BatchStatus
from perseus_planner.runtime.decider import Learnt
from perseus_planner.runtime.guarantee import Ledger, Reference, is_drawn
from perseus_planner.runtime.sending import runs_of
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.schedule import grid_text
from perseus_planner.solver.frontier import solve_dag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.batches.solver import BatchPlan, Law
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.options import AutopilotSettings

    Floats = NDArray[np.float64]

MOST_COUNTS = 32
"""Numbers of microbatches for which clocks follow; with others, iterations run at full clocks."""


@dataclass(frozen=True)
class Tuning:
    """The constants of plans of the batch. All are by hand: benchmark 32 checks them together."""

    #: Iterations at full clocks before the first plan, which tell how long they are.
    references: int = 3
    #: How many of them are remembered, and iterations that tell how wrong work is.
    remembered: int = 20
    #: What may be owed before clocks are full, a share of an iteration: as the autopilot has it.
    burst: float = 0.04
    #: What one iteration is charged at most, a share of an iteration, unless the one before was as
    #: late: one outlier is not owed.
    most_charged: float = 0.02
    #: One iteration of so many is at full clocks, and tells again how long they are.
    audit_of: int = 64


_TUNING = Tuning()
_CAME = 8  #: iterations of which the others are told how they came, and which wait for theirs
_SHOWN = 256  #: iterations that tell how unequal batches are
_ORDERED = 16  #: in one iteration of so many, other orders are looked at
#: Standard deviation of the times of microbatches up to which a static plan is made to compare
#: with; at 5 % it saves half as much and is late (benchmark 32)
_ALIKE = 0.03
#: Computations of an iteration up to which that is done, as it takes longer than an iteration then
_COMPARED = 256
_OUTLIER = 0.2  #: logarithm of a factor, beyond which it counts as that


@dataclass(frozen=True)
class Ran:
    """What is known of an iteration that has ended."""

    iteration: int  #: Its number
    time_s: float  #: How long it took, seconds
    slowest: Slowest  #: What it was decided by
    work: Floats | None = None  #: (microbatches, numbers) of this pipeline; None without the below
    #: For each computation of this rank, the seconds that it had taken at full clocks, as it came,
    #: and by its law.
    at_full_clocks_s: tuple[tuple[float, float], ...] = ()


class Leader:
    """Decides the clocks of one pipeline.

    What an iteration takes is compared with what it had taken at full clocks: the time of the
    slowest pipeline as its computations came, times what iterations at full clocks took over
    theirs. So clocks are charged with what clocks did, and not with work that was told wrong, whose
    error is another one in each iteration: what computations of the last iterations at lower clocks
    took longer on the whole is the clocks'. What is longer is owed (`Ledger`), and while one
    pipeline owes more than agreed, all run at full clocks. Where it is not known in time how
    computations came, and without a pipeline, the time by the laws counts.

    `account` may be called by another thread than the rest.

    Args:
        profile: The cost of clocks.
        settings: What may be done.
        is_whole: Whether the iteration is one computation, without a pipeline. It contains the wait
            for the others, so nothing is told of how long this rank computes.
    """

    def __init__(self, profile: Profile, settings: AutopilotSettings, *, is_whole: bool) -> None:
        self._profile = profile
        self._settings = settings
        self._is_whole = is_whole
        self._told: tuple[RankLaws, ...] = ()
        #: of all ranks, by the number of microbatches
        self._orders: dict[int, tuple[tuple[Computation, ...], ...]] = {}
        self._planners: dict[int, BatchPlanner | None] = {}  #: None if there can be none
        self._laws: dict[Key, Law] = {}
        self._ran: deque[Ran] = deque()  #: that is not looked at yet
        self._pending: dict[int, Ran] = {}  #: that waits for what the others tell
        self._came: deque[tuple[int, float]] = deque(maxlen=_CAME)
        #: (microbatches, 2) logarithms of how much longer forwards and the rest came, at full
        #: clocks and at lower ones
        self._errors: tuple[deque[Floats], deque[Floats]] = (
            deque(maxlen=_TUNING.remembered),
            deque(maxlen=_TUNING.remembered),
        )
        #: ratios of times at full clocks, by laws and as computations came
        self._by_law = Reference(_TUNING.remembered)
        self._as_come = Reference(_TUNING.remembered)
        self._ledger: Ledger | None = None
        self._late_s = 0.0  #: by how much the last one at lower clocks was longer than agreed
        #: waiting and spread of an iteration; slowest time, and that in the best orders
        self._unequal: deque[tuple[float, float]] = deque(maxlen=_SHOWN)
        self._ordered: deque[tuple[float, float]] = deque(maxlen=_SHOWN)
        self._static: deque[bool] = deque(maxlen=_SHOWN)  #: whether an iteration ran by that plan

    @property
    def is_ready(self) -> bool:
        """Whether all ranks of the pipeline have told their laws."""
        return bool(self._told)

    @property
    def learnt(self) -> Learnt | None:
        """What a service is told; None before it is known what the ranks run."""
        planner = next((each for each in self._planners.values() if each is not None), None)
        if planner is None:
            return None
        dag = planner.dag.with_profile(self._profile)
        return Learnt.of(dag, grid_text(dag.iteration.schedule))

    @property
    def status(self) -> AutopilotStatus:
        """What is known, for the record of the run."""
        ledger = self._ledger
        if not self._planners:
            return AutopilotStatus("watching")
        if ledger is None or len(self._by_law) < _TUNING.references:
            return AutopilotStatus("reference")
        phase = "paying" if ledger.is_overdrawn else "following"
        return AutopilotStatus(
            phase,
            ledger.last,
            ledger.reference_s,
            owed_s=ledger.owed_s,
            burst_s=ledger.burst_s,
            batches=self._batch_status,
        )

    @property
    def _batch_status(self) -> BatchStatus | None:
        unequal = list(self._unequal)
        ordered = list(self._ordered)
        if not unequal:
            return None
        # Waiting is unequal work between pipelines, and spread is that within the first one.
        waiting, spread = map(fmean, zip(*unequal, strict=True))
        if self._is_whole:
            return BatchStatus(waiting)
        # Sums and not means of ratios, so that long iterations count by their length.
        as_is_s, ordered_s = map(sum, zip(*ordered, strict=True)) if ordered else (0.0, 0.0)
        order = max(0.0, 1.0 - ordered_s / as_is_s) if as_is_s else None
        error = self.error if any(self._errors) else None
        static = fmean(self._static) if self._static else None
        return BatchStatus(waiting, spread, error, order, static)

    @property
    def error(self) -> float:
        """By how much the work of microbatches was off, as `margin_of` takes it: what the forward
        and the backward of each have in common.
        """
        shared, _ = self._spread
        return math.sqrt(max(shared, 0.0))

    @property
    def _spread(self) -> tuple[float, float]:
        """The variance of logarithms that forward and backward of a microbatch have in common, and
        that of each by itself.
        """
        errors = [each for alike in self._errors for each in alike]
        if not errors:
            return 0.0, 0.0
        (forward, shared), (_, backward) = np.cov(np.concatenate(errors).T, bias=True).tolist()
        return shared, max((forward + backward) / 2 - shared, 0.0)

    def learn(self, told: tuple[RankLaws, ...]) -> None:
        """Take in what all ranks of the pipeline have learnt."""
        # Laws are told again without news, and planners take long to lay out.
        if told == self._told:
            return
        laws = {key: law for rank in told for key, law in rank.by_key().items()}
        # Planners hold the laws in their scales, so other laws need other planners.
        if laws != self._laws:
            self._planners.clear()
        self._told = told
        self._laws = laws
        # A number of microbatches can be planned only if all ranks have told what they run then.
        orders = [rank.by_microbatches() for rank in told]
        everywhere = orders[0].keys() & set.intersection(*map(set, orders))
        self._orders = {count: tuple(rank[count] for rank in orders) for count in everywhere}

    def lacks(self, work: Floats | None) -> bool:
        """Whether there is nothing yet to plan so many microbatches by."""
        return work is not None and len(work) not in self._planners

    def prepare(self, work: Floats | None) -> None:
        """Lay out what plans as many microbatches, or else another number of them that was told.

        That takes up to a second, and some where batches are alike, so it is done after an
        iteration was decided, one at a time.

        Raises:
            PlannerError: If the ranks cannot be planned.
        """
        wanted = [count for count in self._orders if count not in self._planners]
        if not wanted or len(self._planners) == MOST_COUNTS:
            return
        # What this batch needs comes first; the other numbers are laid out before they are asked
        # for.
        count = len(work) if work is not None and len(work) in wanted else wanted[0]
        # Set before the attempt, so that what cannot be planned is not tried again with each batch.
        self._planners[count] = None
        schedule = Schedule("as trained", self._orders[count])
        most = self._settings.max_changes
        # Jitter is what computations differ by besides their work, as learnt, and plans leave room
        # for it.
        profile = dataclasses.replace(
            self._profile,
            jitter=math.sqrt(self._spread[1]),
            clock_change=self._profile.clock_change or CHANGE,
        )
        dag = PipelineDag.from_schedule(profile, schedule)
        planner = BatchPlanner(dag, self._laws, max_changes=most)
        if work is not None and len(work) == count and not self._is_whole:
            static_mhz = self._static_mhz(planner, work)
            if static_mhz is not None:
                planner = BatchPlanner(dag, self._laws, max_changes=most, static_mhz=static_mhz)
        self._planners[count] = planner

    def _static_mhz(self, planner: BatchPlanner, work: Floats) -> list[int] | None:
        """Return the clocks of the static plan that is on time for microbatches that differ as
        little as these; None if they differ by more.
        """
        took_s = planner.microbatch_s(work)
        spread = float(took_s.std() / took_s.mean())
        dag = planner.dag
        if spread > _ALIKE or len(dag.computations) > _COMPARED:
            return None
        # Jitter of the static plan is all by which its computations differ.
        jitter = math.sqrt(spread**2 + max(self._spread[0], 0.0) + self._spread[1])
        # Changes are free there, as plans within a budget take long; the planner merges them.
        profile = dataclasses.replace(dag.profile, jitter=jitter, clock_change=None)
        frontier = solve_dag(dag.with_profile(profile))
        return list(frontier.plan_until(frontier.baseline_time_s).clocks.values())

    def order_of(self, work: Floats) -> tuple[int, ...]:
        """Return the order of microbatches in which an iteration is shortest; as they are, before
        that can be told. May be called by another thread than the rest.

        Raises:
            UsageError: If the work cannot be planned.
        """
        planner = self._planners.get(len(work))
        return tuple(range(len(work))) if planner is None else planner.best_order(work)

    def account(self, ran: Ran) -> None:
        """Note an iteration that has ended."""
        self._ran.append(ran)

    def own(self, iteration: int, work: Floats | None) -> OwnTime:
        """Return what this pipeline tells the others of an iteration.

        Raises:
            PlannerError: If the work cannot be planned.
        """
        self._look()
        came = tuple(self._came)
        if work is None:
            return OwnTime(came=came)
        # Without a pipeline, the slowest rank's work is what its time tells a law of.
        row = tuple(work[0].tolist()) if self._is_whole else ()
        planner = self._planners.get(len(work))
        # Without a planner the time is not known, and 0 says so to the others.
        if planner is None:
            return OwnTime(work=row, came=came)
        ledger = self._ledger
        pays = ledger is not None and ledger.is_overdrawn
        # Audits are drawn by the number alone, so that pipelines agree without a word.
        pays |= len(self._by_law) < _TUNING.references or is_drawn(iteration, _TUNING.audit_of)
        own = OwnTime(planner.full_clocks_s(work), pays, row, came)
        # Orders are looked at now and then only, as each look replays many of them.
        if iteration % _ORDERED or self._is_whole:
            return own
        ordered = work[list(planner.best_order(work))]
        return replace(own, ordered_s=planner.full_clocks_s(ordered))

    def decide(self, work: Floats | None, slowest: Slowest) -> Batch:
        """Return what the ranks of the pipeline are told of a batch.

        Args:
            work: (microbatches, numbers) of the batch; None if it is not known.
            slowest: The slowest pipeline.

        Raises:
            PlannerError: If the work cannot be planned.
        """
        # What the others told settles older iterations before the new one is decided.
        self._settle(slowest.came)
        if work is None:
            return Batch()
        planner = self._planners.get(len(work))
        # Without the slowest time there is no target, so ranks run at full clocks.
        if planner is None or not slowest.time_s:
            return Batch(tuple(map(tuple, work.tolist())))
        took_s = planner.microbatch_s(work)
        self._unequal.append(
            (1.0 - slowest.mean_s / slowest.time_s, float(took_s.std() / took_s.mean()))
        )
        if slowest.ordered_s:
            self._ordered.append((slowest.time_s, slowest.ordered_s))
        # All run at full clocks if one pipeline pays, as all wait for it.
        if slowest.pays:
            return self._batch(planner, work, slowest.time_s)
        # Aimed earlier by what the work was off lately, as a target is met on the whole only then.
        target_s = slowest.time_s * self._agreed(slowest) * (1.0 - margin_of(self.error))
        plan = planner.plan(work, target_s)
        self._static.append(plan.is_static)
        # This pipeline waits for the slowest, so the iteration never ends before that one.
        return self._batch(planner, work, max(plan.time_s, slowest.time_s), plan)

    def _agreed(self, slowest: Slowest) -> float:
        """Return how long an iteration may take, as a multiple of that at full clocks."""
        return max(self._settings.slowdown, slowest.slowdown)

    def _look(self) -> None:
        """Look at iterations that have ended since."""
        while self._ran:
            ran = self._ran.popleft()
            if not ran.slowest.time_s:
                continue
            self._pending[ran.iteration] = ran
            if ran.work is None:
                continue
            planner = self._planners.get(len(ran.work))
            if planner is not None:
                order = self._orders[len(ran.work)][0]
                came_s = self._came_s(planner, order, ran.work, ran)
                self._came.append((ran.iteration, came_s))

    def _came_s(
        self, planner: BatchPlanner, order: tuple[Computation, ...], work: Floats, ran: Ran
    ) -> float:
        """Return the seconds of this pipeline at full clocks, as its computations came: those of
        this rank tell the work of all.
        """
        # Forwards and the rest err apart from each other, as the work tells them by different laws.
        came_s, told_s = np.zeros((2, 2, len(work)))  # of forwards and the rest
        for c, each in zip(order, ran.at_full_clocks_s, strict=True):
            place = int(c.kind != "F"), c.microbatch
            came_s[place] += each[0]
            told_s[place] += max(each[1], 1e-9)
        # A law may say almost nothing of a computation, so logarithms are clipped.
        with np.errstate(divide="ignore"):
            logs = np.clip(np.log(came_s / told_s), -_OUTLIER, _OUTLIER)
        # Full and lower clocks err by different amounts, so each is compared with its own.
        alike = self._errors[not ran.slowest.pays]
        alike.append(logs.T)
        # What all of the last ones took longer is due to clocks or laws, and not to this batch.
        usual = math.exp(float(np.median(np.concatenate(alike))))
        factor = came_s.sum(axis=0) / told_s.sum(axis=0) / usual
        return planner.full_clocks_s(work, factor)

    def _settle(self, came: tuple[tuple[int, float], ...]) -> None:
        """Charge iterations of which all have told how they came, or for which it is too late."""
        longest_s = dict(came)
        last = max(self._pending, default=0)
        for iteration, ran in list(self._pending.items()):
            if iteration in longest_s:
                self._charge(ran, longest_s[iteration], self._as_come)
            elif ran.work is None or iteration <= last - _CAME:
                self._charge(ran, ran.slowest.time_s, self._by_law)
            else:
                continue
            del self._pending[iteration]

    def _charge(self, ran: Ran, full_s: float, ratios: Reference) -> None:
        """Add an iteration to the ledger, given its time at full clocks without all that is not
        computed.
        """
        slowest = ran.slowest
        settings = self._settings
        # The reference must not begin with an iteration whose slowest pipeline may not have told.
        if slowest.pays and (slowest.is_whole or ran.iteration >= _TUNING.audit_of):
            self._by_law.add(ran.time_s / slowest.time_s)
            if ratios is self._as_come:
                ratios.add(ran.time_s / full_s)
        # Without a reference at full clocks, nothing can be charged.
        if ratios.value is None:
            return
        reference_s = full_s * ratios.value
        ledger = self._ledger or Ledger(
            reference_s, settings.slowdown, settings.max_slowdown, _TUNING.burst * reference_s
        )
        agreed = self._agreed(slowest)
        most_s = _TUNING.most_charged * reference_s
        # Full clocks are not longer by definition, whatever they took.
        longer_s = 0.0
        if not slowest.pays:
            late_s = ran.time_s - agreed * reference_s
            before_s = self._late_s
            self._late_s = late_s
            # An outlier is charged in part only, unless the one before was as late.
            late_s = min(max(late_s, -most_s), max(most_s, before_s))
            longer_s = (agreed - 1.0) * reference_s + late_s
        # A budget or a deadline may allow more now than when the ledger began.
        ledger = dataclasses.replace(ledger, slowdown=agreed)
        self._ledger = ledger.add(reference_s + longer_s, longer_s=longer_s)

    def _batch(
        self, planner: BatchPlanner, work: Floats, time_s: float, plan: BatchPlan | None = None
    ) -> Batch:
        """Return what ranks are told of a plan, None for full clocks, and an iteration time."""
        rows = work.tolist()
        ranks = []
        # All ranks need to know when full clocks would start and end, to tell how late they are.
        full = planner.plan_of(work, None, time_s)
        for rank in range(len(self._orders[len(work)])):
            at_full_clocks = full.times(rank)
            full_us = _us(at_full_clocks.start_s), _us(at_full_clocks.end_s)
            told = RankPlan(full_us=full_us)
            if plan is not None:
                clocks = runs_of(plan.clocks_mhz[rank])
                times = plan.times(rank)
                # A static plan keeps its clocks, as it was compared.
                latest_us = () if plan.is_static else tuple(map(_us, times.latest_end_s))
                told = RankPlan(clocks, full_us, _us(times.start_s), latest_us)
            ranks.append(told)
        return Batch(tuple(map(tuple, rows)), time_s, tuple(ranks))


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
