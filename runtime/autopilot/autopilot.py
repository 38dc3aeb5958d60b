"""The autopilot: learns what clocks cost from the training's own iterations, and decides the clocks of those ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from perseus_planner.errors import UsageError
from perseus_planner.plans.replay import end_times
from perseus_planner.profiles.clock_changes import with_fewer_changes
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.autopilot.job import AutopilotJob, AutopilotSettings
from perseus_planner.runtime.autopilot.ledger import Ledger
from perseus_planner.runtime.autopilot.observations import RankObservation, time_at_last_clock
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.solve import solve_dag

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan

Phase: TypeAlias = Literal["reference", "learning", "following", "audit", "paying"]
Key: TypeAlias = "tuple[int, str]"
Clocks: TypeAlias = "tuple[tuple[int, ...], ...]"

_REFERENCES = 2  #: iterations at full clocks before the first trial
_BURST = 0.005  #: what the ledger may owe, as a share of the reference
_TRIAL = 0.003  #: how much longer an iteration with trials may be, as a share of the reference
_IDLE_SHARE = 0.2  #: of the highest power, while a GPU waits, before anything is known of it
_GUESSED_W = 400.0  #: the highest power, likewise


@dataclass(frozen=True)
class Decision:
    """What the ranks of all pipelines run in one iteration.

    Attributes:
        iteration: its number, from 0.
        version: the number of the program: 0 for full clocks, and equal for equal clocks one after the other.
        phase: "reference" while nothing but full clocks was run, "learning" with trials, "following" without,
            "audit" for an iteration at full clocks that checks the reference, "paying" for one that pays the ledger.
        clocks: for each pipeline and rank, the clock of each computation in the order of its program, MHz.
        ledger: the ledger after the iterations that were observed; None before the first one. A rank takes its
            reference and limits, with `Ledger.renewed`.
        trials: number of operating points that the iteration runs though they were not measured.
        unknown: number of operating points that a plan might use and that were not measured yet.
        time_s: the expected time of the iteration, seconds; None before the first one was observed.
        saving: energy saved by the plan, as a share of that of an iteration at full clocks.
        saving_stderr: its standard error.
    """

    iteration: int
    version: int
    phase: Phase
    clocks: tuple[Clocks, ...] = field(repr=False)
    ledger: Ledger | None
    trials: int = 0
    unknown: int = 0
    time_s: float | None = None
    saving: float = 0.0
    saving_stderr: float = 0.0


class Autopilot:
    """Decides the clocks of a training job's iterations while it learns what they cost.

    Call `observe` for each iteration that has ended and `decide` for each one ahead. Decisions may be several
    iterations ahead of observations. Equal calls give equal decisions.

    Args:
        job: the job.
        settings: what it may do.
        prior: a profile of its stages, whose rows are taken as measured until iterations tell otherwise.
    """

    def __init__(
        self, job: AutopilotJob, settings: AutopilotSettings | None = None, prior: Profile | None = None
    ) -> None:
        self.job, self.settings, self.prior = job, settings or AutopilotSettings(), prior
        self._keys = [
            [job.iteration.keys[place] for place in program if place < len(job.iteration.keys)]
            for program in job.iteration.programs
        ]
        self._log_times: dict[tuple[Key, int], list[float]] = {}
        self._ledger: Ledger | None = None
        self._iteration_s: list[float] = []
        self._version, self._last = 0, self._full()
        self._decided = 0

    def observe(self, observations: Sequence[RankObservation]) -> None:
        """Learn from what ranks observed of one iteration; ranks that observed nothing may be left out.

        Raises:
            UsageError: If the observations are of more than one iteration, or a rank's do not fit its program.
        """
        if len({seen.iteration for seen in observations}) > 1:
            raise UsageError("observations: are of more than one iteration; give those of one at a time")
        for seen in observations:
            self._learn_times(seen)
        if observations:
            time_s = max(seen.time_s for seen in observations)
            full = all(seen.version == 0 for seen in observations)
            if full:
                self._iteration_s.append(time_s)
            if self._ledger is None:
                limits = (self.settings.slowdown, self.settings.max_slowdown, _BURST * time_s)
                self._ledger = Ledger(time_s, *limits)
            self._ledger = self._ledger.add(time_s, full_clocks=full)

    def _learn_times(self, seen: RankObservation) -> None:
        keys = self._keys[seen.rank]
        if seen.computations and len(seen.computations) != len(keys):
            raise UsageError(
                f"observations, rank {seen.rank}: has {len(seen.computations)} computations and its program "
                f"{len(keys)}; give one for each, or none"
            )
        if seen.throttled_s > 0.0:
            return
        for key, each in zip(keys, seen.computations, strict=False):
            known = {clock: math.exp(_mean(logs)) for (other, clock), logs in self._log_times.items() if other == key}
            found = time_at_last_clock(each, known)
            if found is not None:
                self._log_times.setdefault((key, found[0]), []).append(math.log(found[1]))

    def decide(self, iteration: int) -> Decision:
        """Return what all ranks run in `iteration`."""
        top = self.job.clocks_mhz[0]
        if (
            self._ledger is None
            or self._decided < _REFERENCES
            or any((k, top) not in self._log_times for k in self._all)
        ):
            self._decided += 1
            return self._decision(iteration, "reference", self._full())
        if self._ledger.is_overdrawn:
            return self._decision(iteration, "paying", self._full())
        plan = self._plan()
        clocks, trials = self._with_trials(plan, iteration) if self.settings.learn else (self._of_plan(plan), 0)
        saving = plan.saving_j / plan.baseline_energy_j
        phase: Phase = "learning" if trials else "following"
        return self._decision(iteration, phase, clocks, trials=trials, time_s=plan.time_s, saving=saving)

    @property
    def _all(self) -> set[Key]:
        return set(self.job.iteration.keys)

    def _full(self) -> Clocks:
        return tuple((self.job.clocks_mhz[0],) * len(keys) for keys in self._keys)

    def _decision(
        self,
        iteration: int,
        phase: Phase,
        clocks: Clocks,
        *,
        trials: int = 0,
        time_s: float | None = None,
        saving: float = 0.0,
    ) -> Decision:
        if clocks != self._last:
            self._version += 1
            self._last = clocks
        version = 0 if clocks == self._full() else self._version
        unknown = len(self._all) * len(self.job.clocks_mhz) - len(self._log_times)
        every = (clocks,) * self.job.pipelines
        return Decision(iteration, version, phase, every, self._ledger, trials, unknown, time_s, saving)

    def _plan(self) -> Plan:
        dag = PipelineDag(self.learned(), self.job.iteration)
        frontier = solve_dag(dag)
        deadline_s = max(frontier.baseline_time_s * self.settings.slowdown, frontier.min_time_s)
        return frontier.plan_for(deadline_s, max_changes=self.settings.max_changes)

    def _of_plan(self, plan: Plan) -> Clocks:
        return tuple(tuple(plan.clocks[str(c)] for c in program) for program in plan.schedule.ranks)

    def _with_trials(self, plan: Plan, iteration: int) -> tuple[Clocks, int]:
        """Return the plan's clocks with a trial on each rank where it surely fits, and how many there are."""
        clocks = [list(rank) for rank in self._of_plan(plan)]
        limit_s = plan.baseline_time_s * (self.settings.slowdown + _TRIAL)
        trials = 0
        dag = PipelineDag(plan_profile := self.learned(), self.job.iteration)
        for rank, keys in enumerate(self._keys):
            wanted = [c for c in self.job.clocks_mhz if any((key, c) not in self._log_times for key in keys)]
            if not wanted or not self._fits(dag, clocks, limit_s):
                continue
            clock = wanted[(iteration * 7 + rank * 3) % len(wanted)]
            kept = list(clocks[rank])
            begin = (len(keys) - 4) // 2
            clocks[rank][max(begin, 0) : begin + 4] = [clock] * len(kept[max(begin, 0) : begin + 4])
            most = self.settings.max_changes
            within = most is None or tuple(clocks[rank]) == with_fewer_changes(clocks[rank], most)
            if within and self._fits(dag, clocks, limit_s):
                trials += len({key for key in keys if (key, clock) not in self._log_times})
            else:
                clocks[rank] = kept
        del plan_profile
        return tuple(tuple(rank) for rank in clocks), trials

    def _fits(self, dag: PipelineDag, clocks: Sequence[Sequence[int]], limit_s: float) -> bool:
        durations_s = [
            self._at_most_s(key, clock)
            for keys, rank in zip(self._keys, clocks, strict=True)
            for key, clock in zip(keys, rank, strict=True)
        ]
        return max(end_times(dag, durations_s)) <= limit_s

    def _at_most_s(self, key: Key, clock: int) -> float:
        """Return the time of a row if it was measured, else the longest it can be: a clock bounds it from above."""
        times = {c: math.exp(_mean(logs)) for (other, c), logs in self._log_times.items() if other == key}
        return times[clock] if clock in times else min(t * c / clock for c, t in times.items() if c > clock)

    def learned(self) -> Profile:
        """Return what was learnt as a profile, with standard errors.

        Raises:
            UsageError: If no iteration was observed yet.
        """
        if self._ledger is None:
            raise UsageError("the autopilot has not observed an iteration; nothing is known yet")
        top, table = self.job.clocks_mhz[0], dict[Key, list[Measurement]]()
        for (key, clock), logs in self._log_times.items():
            time_s = math.exp(_mean(logs))
            energy_j = _GUESSED_W * (0.3 + 0.7 * (clock / top) ** 2) * time_s
            error = time_s * _stderr(logs)
            evidence = Evidence(clock, error, 0.05 * energy_j, len(logs), 0.0)
            table.setdefault(key, []).append(Measurement(clock, time_s, energy_j, evidence))
        measurements: Mapping[Key, tuple[Measurement, ...]] = {key: tuple(rows) for key, rows in table.items()}
        return Profile(
            measurements,
            _IDLE_SHARE * _GUESSED_W,
            gpu=self.job.gpu,
            gpus_per_stage=self.job.gpus_per_stage,
            conditions={"learnt": "while training"},
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stderr(values: Sequence[float]) -> float:
    mean = _mean(values)
    spread = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return math.sqrt(spread / len(values))
