"""What `planner show` says of a run: plain values, for its text and its JSON alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from perseus_planner.runs.records import ChangeStatistics, IterationRecord
from perseus_planner.views.plan_summary import summarize_plan
from perseus_planner.views.run_planned import foreseen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import RankRecord, Run

NO_PLAN = "it ran by no plan"
"""Why an iteration did not run as planned where no plan was there."""


@dataclass(frozen=True)
class PlanOfRun:
    """What ran by one plan, means over the iterations that count, all pipelines together.

    Attributes:
        version: of the plan.
        iterations: how many ran by it, on the rank that has most of them.
        counted: how many of them count: they ran as planned and are not the first one.
        time_s: iteration time on the rank where it is longest, seconds; None: none counts.
        planned_time_s: what the plan foresees, of the slowest pipeline.
        energy_j: joules of an iteration over the ranks; None: not known of all.
        planned_energy_j: what the plan foresees for them.
    """

    version: int
    iterations: int
    counted: int
    time_s: float | None
    planned_time_s: float
    energy_j: float | None
    planned_energy_j: float


@dataclass(frozen=True)
class RankOfRun:
    """What one rank did by one plan, means over the iterations that count; None: not known, or none counts.

    Attributes:
        rank: of the job.
        pipeline: it is in.
        pipeline_rank: of that pipeline.
        iterations: how many count.
        busy_s: seconds of computation.
        planned_busy_s: what the plan foresees.
        energy_j: joules of its GPU.
        planned_energy_j: what the plan foresees.
        clock: what was asked for where the achieved clock is known, by time.
        achieved_mhz: what was achieved there.
        changes_asked: clock changes that were asked for, of all these iterations together, as the next three.
        changes_set: those that were made before another clock was asked for.
        changes_late: those of them that were made when the first computation had run for some time (`ran.LATE`).
        changes_overtaken: those that were not made before another clock was asked for.
        planned_late: how many the plan foresees to be late.
        off_clock_s: seconds of computation before the clock was set that was asked for.
        planned_off_clock_s: what the plan foresees.
        latency_p50_s: from when a clock was asked for until it was set, median of the iterations' medians.
        latency_p99_s: median of their 99th percentiles.
        throttled_s: reason -> seconds in which that held the GPU back, where that is more than 0.
        temperature_c: the highest.
    """

    rank: int
    pipeline: int
    pipeline_rank: int
    iterations: int
    busy_s: float | None
    planned_busy_s: float
    energy_j: float | None
    planned_energy_j: float
    clock: float | None
    achieved_mhz: float | None
    changes_asked: int
    changes_set: int
    changes_late: int
    changes_overtaken: int
    planned_late: int
    off_clock_s: float | None
    planned_off_clock_s: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    throttled_s: Mapping[str, float]
    temperature_c: float | None


@dataclass(frozen=True)
class Deviation:
    """Iterations that did not run as planned, for one reason: how often, on which ranks, and the first one."""

    reason: str
    times: int
    ranks: tuple[int, ...]
    first_iteration: int


@dataclass(frozen=True)
class RunSummary:
    """A run beside its plans.

    Attributes:
        schedule: of the plan `version`.
        gpu: that this plan is for.
        control: what is set.
        plan_origin: how its profile came to be, "measured" or "simulated".
        gpu_origin: how energy, clocks and throttling of the run came to be, likewise; None: no GPU was read, or it
            differs from rank to rank. Times are always measured.
        pipelines: how many there are.
        overhead_s: calibrated overhead in its time.
        plans: what ran by each plan, oldest first.
        version: the newest one by which iterations count; the ranks are compared with it.
        ranks: each of them.
        deviations: why iterations did not run as planned, most frequent first.
    """

    schedule: str
    gpu: str | None
    control: str
    plan_origin: str
    gpu_origin: str | None
    pipelines: int
    overhead_s: float
    plans: tuple[PlanOfRun, ...]
    version: int
    ranks: tuple[RankOfRun, ...]
    deviations: tuple[Deviation, ...]


def summarize_run(run: Run) -> RunSummary:
    """What `planner show` says of `run`."""
    version = max((each for each in run.versions if run.time_s(each) is not None), default=run.versions[-1])
    plan = run.plan(version, next(rank.pipeline for rank in run.ranks if rank.iterations_by(version)))
    origins = {rank.iterations[-1].origin for rank in run.ranks}
    return RunSummary(
        schedule=str(plan.schedule),
        gpu=plan.gpu,
        control=plan.control,
        plan_origin=plan.origin,
        gpu_origin=origins.pop() if len(origins) == 1 else None,
        pipelines=len({rank.pipeline for rank in run.ranks}),
        overhead_s=plan.overhead_s,
        plans=tuple(_of_plan(run, each) for each in run.versions),
        version=version,
        ranks=tuple(_ranks(run, version)),
        deviations=_deviations(run),
    )


def _of_plan(run: Run, version: int) -> PlanOfRun:
    ranks = list(_ranks(run, version))
    energies_j = [rank.energy_j for rank in ranks if rank.energy_j is not None]
    return PlanOfRun(
        version=version,
        iterations=max(len(rank.iterations_by(version)) for rank in run.ranks),
        counted=max(rank.iterations for rank in ranks),
        time_s=run.time_s(version),
        planned_time_s=_time_s(run, version),
        energy_j=math.fsum(energies_j) if len(energies_j) == len(ranks) else None,
        planned_energy_j=math.fsum(rank.planned_energy_j for rank in ranks),
    )


def _time_s(run: Run, version: int) -> float:
    """What the plan, or that of the slowest pipeline, foresees."""
    return max(run.plan(version, rank.pipeline).time_s for rank in run.ranks if rank.iterations_by(version))


def _ranks(run: Run, version: int) -> Iterator[RankOfRun]:
    """The ranks that ran by that plan."""
    planned: dict[int, list[_Planned]] = {}
    for rank in run.ranks:
        if rank.iterations_by(version):
            if rank.pipeline not in planned:
                planned[rank.pipeline] = _planned(run.plan(version, rank.pipeline), _time_s(run, version))
            yield _rank(rank, rank.counted(version), planned[rank.pipeline][rank.pipeline_rank])


@dataclass(frozen=True)
class _Planned:
    """What the plan foresees of one rank's iteration."""

    busy_s: float
    energy_j: float
    changes: ChangeStatistics


def _planned(plan: Plan, time_s: float) -> list[_Planned]:
    """By rank of the pipeline, of one GPU each, in iterations of `time_s`, which the slowest pipeline takes."""
    ranks = zip(summarize_plan(plan).per_rank, foreseen(plan), plan.rank_waiting_w, strict=True)
    return [
        _Planned(
            math.fsum(each.duration_s for each in computations),
            (rank.energy_j + waiting_w * (time_s - plan.time_s)) / plan.gpus_per_stage,
            ChangeStatistics.of(computations),
        )
        for rank, computations, waiting_w in ranks
    ]


def _rank(rank: RankRecord, rows: Sequence[IterationRecord], planned: _Planned) -> RankOfRun:
    reasons = dict.fromkeys(reason for row in rows for reason, seconds in row.throttled_s.items() if seconds > 0)
    clocked_s = [row.busy_s if row.achieved_mhz is not None else 0.0 for row in rows]
    return RankOfRun(
        rank=rank.rank,
        pipeline=rank.pipeline,
        pipeline_rank=rank.pipeline_rank,
        iterations=len(rows),
        busy_s=_mean([row.busy_s for row in rows]),
        planned_busy_s=planned.busy_s,
        energy_j=_mean([row.energy_j for row in rows]),
        planned_energy_j=planned.energy_j,
        clock=_weighted([row.clock for row in rows], clocked_s),
        achieved_mhz=_weighted([row.achieved_mhz for row in rows], clocked_s),
        changes_asked=sum(row.changes_asked for row in rows),
        changes_set=sum(row.changes_set for row in rows),
        changes_late=sum(row.changes_late for row in rows),
        changes_overtaken=sum(row.changes_overtaken for row in rows),
        planned_late=planned.changes.changes_late * len(rows),
        off_clock_s=_mean([row.off_clock_s for row in rows]),
        planned_off_clock_s=planned.changes.off_clock_s,
        latency_p50_s=_median([row.latency_p50_s for row in rows]),
        latency_p99_s=_median([row.latency_p99_s for row in rows]),
        throttled_s={reason: fmean(row.throttled_s.get(reason, 0.0) for row in rows) for reason in reasons},
        temperature_c=max((row.temperature_c for row in rows if row.temperature_c is not None), default=None),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _median(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Mean of those that are known, by weight."""
    whole = math.fsum(weights)
    pairs = zip(values, weights, strict=True)
    return math.fsum(value * weight for value, weight in pairs if value is not None) / whole if whole > 0 else None


def _deviations(run: Run) -> tuple[Deviation, ...]:
    found: dict[str, list[tuple[int, int]]] = {}
    for rank in run.ranks:
        for row in rank.iterations:
            if not row.is_as_planned:
                found.setdefault(row.deviation or NO_PLAN, []).append((row.iteration, rank.rank))
    counted = (
        Deviation(reason, len(each), tuple(sorted({rank for _, rank in each})), min(each)[0])
        for reason, each in found.items()
    )
    return tuple(sorted(counted, key=lambda each: (-each.times, each.first_iteration)))
