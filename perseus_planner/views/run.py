"""A training run beside its plans: the summary of what its ranks recorded, and the records that
a plan predicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from perseus_planner.plans.replay import clock_calls
from perseus_planner.runs.account import Account, Entry
from perseus_planner.runs.records import SetCall, change_statistics, match_changes
from perseus_planner.runs.verdict import Verdict, of_another_machine, verdict_of
from perseus_planner.views.context import Context, context_of_plan
from perseus_planner.views.plan import summarize_plan

if TYPE_CHECKING:
    from perseus_planner.plans.clock_replay import Call
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.records import ComputationRecord
    from perseus_planner.runs.run import Run

NO_PLAN = "no plan was in force"
"""Why an iteration without a plan did not run as planned."""


@dataclass(frozen=True)
class PlanOfRun:
    """The iterations by one plan: means over those that count, all pipelines together."""

    version: int  #: number of the plan
    iterations: int  #: number of iterations by it, on the rank that has most
    #: number of iterations that count: those that ran as planned, without the first one.
    counted: int
    #: seconds from begin to end on the rank where it is longest, or None if no iteration counts.
    time_s: float | None
    planned_time_s: float  #: iteration time by the plan of the slowest pipeline, seconds
    #: energy from begin to end over all ranks, joules, or None if that of a rank is not known.
    energy_j: float | None
    planned_energy_j: float  #: that energy by the plan, joules


@dataclass(frozen=True)
class RankOfRun:
    """One rank by one plan: the account of the iterations that count, and what the plan says of
    one.
    """

    rank: int  #: number of the rank in the job
    pipeline: int  #: number of its pipeline
    pipeline_rank: int  #: number of the rank in that pipeline
    ran: Account  #: the iterations that count
    planned: Account  #: one iteration by the plan, that waits for the slowest pipeline
    #: time from a request until the clock was set, median of the iterations' medians, seconds.
    latency_p50_s: float | None
    latency_p99_s: float | None  #: median of the iterations' 99th percentiles of that time, seconds

    def mean(self, name: str) -> float | None:
        """Return the mean of a sum over the iterations that count; None without any."""
        return getattr(self.ran, name) / self.ran.windows if self.ran.windows else None

    @property
    def busy_s(self) -> float | None:
        """Time of computations, seconds."""
        return self.mean("busy_s")

    @property
    def planned_busy_s(self) -> float:
        """That time by the plan, seconds."""
        return self.planned.busy_s

    @property
    def energy_j(self) -> float | None:
        """Energy of the GPU from begin to end, joules, if it is known for all iterations."""
        if self.ran.metered_s < (1 - 1e-9) * self.ran.gpu_s or not self.ran.windows:
            return None
        return (self.ran.energy_j - self.ran.between_j) / self.ran.windows

    @property
    def planned_energy_j(self) -> float:
        """That energy by the plan, joules."""
        return self.planned.energy_j


@dataclass(frozen=True)
class Deviation:
    """Iterations that did not run as planned, for one reason: how many, on which ranks, and the
    first of them.
    """

    reason: str
    times: int
    ranks: tuple[int, ...]
    first_iteration: int


@dataclass(frozen=True)
class RunSummary:
    """A run beside its plans."""

    context: Context  #: the profile and the iteration of the plan `version`
    #: how energy, clocks and throttling were obtained, "measured" or "simulated", or None if no GPU
    #: was read or the ranks differ. Times are always measured.
    gpu_origin: str | None
    pipelines: int  #: number of pipelines
    plans: tuple[PlanOfRun, ...]  #: the iterations by each plan, oldest plan first
    version: int  #: the newest plan with iterations that count; `ranks` are compared with it
    ranks: tuple[RankOfRun, ...]  #: the ranks
    #: why iterations did not run as planned, most frequent reason first.
    deviations: tuple[Deviation, ...]
    cut_off: tuple[int, ...]  #: ranks whose last row was cut off, and so does not count
    attempt: int  #: number of the attempt that all of this is about
    #: what ran by each plan in each attempt, and what that saved, oldest first.
    totals: tuple[Entry, ...]
    total: Account  #: the sum of all totals
    foreseen_share: float  #: saving by the plan `version`, against the same baseline as `total`
    verdict: Verdict | None  #: why iterations do not take the planned time, if they do not
    #: that the plan `version` is of another machine, in a sentence; None if it is not.
    unlike_plan: str | None

    @property
    def origin(self) -> str:
        """Where the time and the energy of an iteration come from."""
        return f"time measured, energy {self.gpu_origin or 'of unknown origin'}"

    @property
    def pipelines_of_plan(self) -> int:
        """How many of the plan's pipelines the GPUs of the ranks make up."""
        gpus = (self.context.ranks or 1) * self.context.gpus_per_stage
        return max(1, round(len(self.ranks) / gpus))

    @property
    def current(self) -> PlanOfRun:
        """The iterations by the plan `version`."""
        return next(plan for plan in self.plans if plan.version == self.version)


def summarize_run(run: Run) -> RunSummary:
    """Summarize a run."""
    version = max(
        (number for number in run.versions if run.time_s(number) is not None),
        default=run.newest_version,
    )
    plan = run.plan(
        version, next(rank.pipeline for rank in run.ranks if rank.iterations_by(version))
    )
    origins = {rank.iterations[-1].origin for rank in run.ranks}
    ranks = {number: tuple(_ranks(run, number)) for number in run.versions}
    plans = tuple(_plan(run, *of_plan) for of_plan in ranks.items())
    accounts = {rank.rank: rank.ran for rank in ranks[version]}
    return RunSummary(
        context=context_of_plan(plan),
        gpu_origin=origins.pop() if len(origins) == 1 else None,
        pipelines=len({rank.pipeline for rank in run.ranks}),
        plans=plans,
        version=version,
        ranks=ranks[version],
        deviations=_deviations(run),
        cut_off=tuple(rank.rank for rank in run.ranks if rank.is_cut_off),
        attempt=run.attempt,
        totals=run.totals,
        total=run.total,
        foreseen_share=1.0 - plan.energy_j / plan.baseline_j(plan.time_s),
        verdict=verdict_of(accounts),
        unlike_plan=of_another_machine(
            accounts, plan.gpu, [rank.iterations[-1].gpu for rank in run.ranks]
        ),
    )


def _plan(run: Run, version: int, ranks: Sequence[RankOfRun]) -> PlanOfRun:
    energies_j = [rank.energy_j for rank in ranks if rank.energy_j is not None]
    return PlanOfRun(
        version=version,
        iterations=max(len(rank.iterations_by(version)) for rank in run.ranks),
        counted=max(rank.ran.windows for rank in ranks),
        time_s=run.time_s(version),
        planned_time_s=_planned_time_s(run, version),
        energy_j=math.fsum(energies_j) if len(energies_j) == len(ranks) else None,
        planned_energy_j=math.fsum(rank.planned_energy_j for rank in ranks),
    )


def _planned_time_s(run: Run, version: int) -> float:
    """Return the planned iteration time of the slowest pipeline, seconds."""
    return max(
        run.plan(version, rank.pipeline).time_s for rank in run.ranks if rank.iterations_by(version)
    )


def _ranks(run: Run, version: int) -> Iterator[RankOfRun]:
    """Summarize the ranks that have iterations by that plan."""
    planned: dict[int, list[Account]] = {}
    for rank in run.ranks:
        if rank.iterations_by(version):
            if rank.pipeline not in planned:
                planned[rank.pipeline] = _planned_ranks(
                    run.plan(version, rank.pipeline), _planned_time_s(run, version)
                )
            latencies_s = (
                [
                    value
                    for row in rank.counted(version)
                    if (value := getattr(row, name)) is not None
                ]
                for name in ("latency_p50_s", "latency_p99_s")
            )
            yield RankOfRun(
                rank.rank,
                rank.pipeline,
                rank.pipeline_rank,
                rank.account(version),
                planned[rank.pipeline][rank.pipeline_rank],
                *(median(values_s) if values_s else None for values_s in latencies_s),
            )


def _planned_ranks(plan: Plan, time_s: float) -> list[Account]:
    """Return the account of an iteration of each rank of a pipeline by the plan, as one GPU, where
    the slowest pipeline takes `time_s`.
    """
    ranks = zip(
        summarize_plan(plan).per_rank, predict_records(plan), plan.rank_waiting_w, strict=True
    )
    planned = []
    for rank, computations, waiting_w in ranks:
        changes = change_statistics(computations)
        energy_j = rank.energy_j + waiting_w * (time_s - plan.time_s)
        planned.append(
            Account(
                windows=1,
                gpu_s=time_s,
                busy_s=math.fsum(computation.duration_s for computation in computations),
                energy_j=energy_j / plan.gpus_per_stage,
                changes_late=changes["changes_late"],
                off_clock_s=changes["off_clock_s"],
            )
        )
    return planned


def _deviations(run: Run) -> tuple[Deviation, ...]:
    by_reason: dict[str, list[tuple[int, int]]] = {}
    for rank in run.ranks:
        for row in rank.iterations:
            if not row.is_as_planned:
                by_reason.setdefault(row.deviation or NO_PLAN, []).append(
                    (row.iteration, rank.rank)
                )
    counted = (
        Deviation(reason, len(rows), tuple(sorted({rank for _, rank in rows})), min(rows)[0])
        for reason, rows in by_reason.items()
    )
    return tuple(sorted(counted, key=lambda each: (-each.times, each.first_iteration)))


def predict_records(plan: Plan) -> tuple[tuple[ComputationRecord, ...], ...]:
    """Predict the computations of each rank; times are seconds after the start of the iteration,
    number 0.
    """
    spans, calls = plan.timeline.spans, clock_calls(plan)
    ranks = []
    for number, program in enumerate(plan.schedule.ranks):
        spans_s = [
            (spans[str(computation)].start_s, spans[str(computation)].end_s)
            for computation in program
        ]
        clocks = [plan.clocks[str(computation)] for computation in program]
        of_rank = [call for call in calls if call.rank == number]
        previous = [clocks[-1], *(call.clock_mhz for call in of_rank)]
        changes = [
            _change(call, spans_s, before) for call, before in zip(of_rank, previous, strict=False)
        ]
        asked_s = min([0.0, *(call.requested_s for call in of_rank)])
        ranks.append(
            match_changes(
                0, program, clocks, spans_s, changes, first_asked_s=asked_s, in_force=clocks[-1]
            )
        )
    return tuple(ranks)


def _change(call: Call, spans_s: Sequence[tuple[float, float]], before: int) -> SetCall:
    # A rank asks for the clock of its next computation.
    place = next(place for place, (start_s, _) in enumerate(spans_s) if start_s >= call.requested_s)
    return SetCall(place, call.clock_mhz, call.requested_s, call.start_s, call.end_s, before)
