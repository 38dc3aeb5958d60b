"""What the first rank of a pipeline decides of each batch: its clocks, by the laws that all ranks
of the pipeline have learnt, and not more time than is agreed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.runtime.autopilot.job import Ledger
from perseus_planner.runtime.batches.exchange import Batch, OwnTime, RankLaws, Slowest, runs_of
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.solver.batch import BatchPlanner

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.autopilot.job import AutopilotSettings
    from perseus_planner.runtime.batches.laws import Key
    from perseus_planner.solver.batch import Law

    Floats = NDArray[np.float64]

_REFERENCES = 3  #: iterations at full clocks before the first plan, which tell how long they are
_REMEMBERED = 20  #: of them
_BURST = 0.04  #: what may be owed, as a share of an iteration
_MOST = 0.02  #: what one iteration is charged at most, likewise
_AUDIT = 64  #: one iteration of so many is at full clocks, and tells again how long they are


class Leader:
    """Decides the clocks of one pipeline.

    What an iteration takes is compared with what it had taken at full clocks: the time of the
    slowest pipeline by the laws, times what iterations at full clocks took over theirs. What is
    longer is owed (`Ledger`), and while one pipeline owes more than agreed, all run at full clocks.

    Args:
        profile: The cost of clocks.
        settings: What may be done.
        is_whole: Whether the iteration is one computation, without a pipeline. It contains the wait
            for the others, so nothing is told of how long this rank computes.
    """

    def __init__(self, profile: Profile, settings: AutopilotSettings, *, is_whole: bool) -> None:
        self._profile, self._settings, self._is_whole = profile, settings, is_whole
        self._told: tuple[RankLaws, ...] = ()
        self._planner: BatchPlanner | None = None
        self._orders: tuple[tuple[Computation, ...], ...] = ()
        self._laws: dict[Key, Law] = {}
        self._ratios: deque[float] = deque(maxlen=_REMEMBERED)  #: of times at full clocks
        self._ledger: Ledger | None = None
        self._ratio = {
            (key, row.clock_mhz): row.time_s / rows[0].time_s
            for key, rows in profile.measurements.items()
            for row in rows
        }

    @property
    def is_ready(self) -> bool:
        """Whether all ranks of the pipeline have told their laws."""
        return self._planner is not None

    @property
    def status(self) -> AutopilotStatus:
        """What is known, for the record of the run."""
        ledger = self._ledger
        if self._planner is None:
            return AutopilotStatus("watching")
        if ledger is None or len(self._ratios) < _REFERENCES:
            return AutopilotStatus("reference")
        phase = "paying" if ledger.is_overdrawn else "following"
        return AutopilotStatus(
            phase, ledger.last, ledger.reference_s, owed_s=ledger.owed_s, burst_s=ledger.burst_s
        )

    def learn(self, told: tuple[RankLaws, ...]) -> None:
        """Take in what all ranks of the pipeline have learnt.

        Raises:
            PlannerError: If the ranks cannot be planned.
        """
        if told == self._told:
            return
        self._told, self._planner = told, None
        self._orders = tuple(rank.computations() for rank in told)
        self._laws = {key: law for rank in told for key, law in rank.by_key().items()}
        self._planner = BatchPlanner(
            self._profile,
            Schedule("as trained", self._orders),
            self._laws,
            max_changes=self._settings.max_changes,
        )

    def own(self, iteration: int, work: Floats | None) -> OwnTime:
        """Return what this pipeline tells the others of an iteration.

        Raises:
            PlannerError: If the work cannot be planned.
        """
        if work is None:
            return OwnTime()
        row = tuple(work[0].tolist()) if self._is_whole else ()
        if self._planner is None:
            return OwnTime(work=row)
        ledger = self._ledger
        pays = ledger is not None and ledger.is_overdrawn
        pays |= len(self._ratios) < _REFERENCES or iteration % _AUDIT == 0
        return OwnTime(self._planner.full_clocks_s(work), pays, row)

    def decide(self, work: Floats | None, slowest: Slowest) -> Batch:
        """Return what the ranks of the pipeline are told of a batch.

        Args:
            work: (microbatches, numbers) of the batch; None if it is not known.
            slowest: The slowest pipeline.

        Raises:
            PlannerError: If the work cannot be planned.
        """
        if work is None:
            return Batch()
        if self._planner is None or not slowest.time_s:
            return Batch(tuple(map(tuple, work.tolist())))
        if slowest.pays:
            return self._batch(work, slowest.time_s)
        plan = self._planner.plan(work, slowest.time_s * self._settings.slowdown)
        return self._batch(work, max(plan.time_s, slowest.time_s), plan.clocks_mhz)

    def account(self, iteration: int, time_s: float, slowest: Slowest) -> None:
        """Note how long an iteration took.

        Args:
            iteration: Its number.
            time_s: Its time, seconds.
            slowest: What it was decided by.
        """
        if not slowest.time_s:
            return
        if slowest.pays and (slowest.is_whole or iteration >= _AUDIT):
            self._ratios.append(time_s / slowest.time_s)
        if not self._ratios:
            return
        reference_s, settings = slowest.time_s * median(self._ratios), self._settings
        ledger = self._ledger or Ledger(
            reference_s, settings.slowdown, settings.max_slowdown, _BURST * reference_s
        )
        most_s = _MOST * reference_s
        longer_s = 0.0 if slowest.pays else min(max(time_s - reference_s, -most_s), most_s)
        self._ledger = ledger.add(reference_s + longer_s, longer_s=longer_s)

    def _batch(
        self,
        work: Floats,
        time_s: float,
        clocks_mhz: Sequence[Sequence[int]] | None = None,
    ) -> Batch:
        """Return what ranks are told of clocks, None for full ones, and an iteration time."""
        rows, busy_s, full_j = work.tolist(), [], []
        profile = self._profile
        for rank, order in enumerate(self._orders):
            clocks = [None] * len(order) if clocks_mhz is None else clocks_mhz[rank]
            rank_s = rank_j = 0.0
            for (stage, kind, microbatch), clock in zip(order, clocks, strict=True):
                law, row = self._laws[stage, kind], profile.measurements[stage, kind][0]
                full_s = law.fixed_s + sum(
                    slope_s * each
                    for slope_s, each in zip(law.per_work_s, rows[microbatch], strict=True)
                )
                ratio = 1.0 if clock is None else self._ratio.get(((stage, kind), clock), 1.0)
                rank_s += full_s * ratio
                rank_j += full_s * (row.energy_j / row.time_s - profile.blocking_w(stage))
            waiting_w = fmean(profile.blocking_w(c.stage) for c in order)
            busy_s.append(rank_s)
            full_j.append((rank_j + waiting_w * time_s) / profile.gpus_per_stage)
        return Batch(
            tuple(map(tuple, rows)),
            () if clocks_mhz is None else tuple(map(runs_of, clocks_mhz)),
            time_s,
            () if self._is_whole else tuple(busy_s),
            tuple(full_j),
        )
