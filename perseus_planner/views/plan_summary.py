"""What a command says of a plan: plain values, for its text and its JSON alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.plans.replay import Timeline, replay
from perseus_planner.views.summary import longest_lag_s, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.replicas import Replicas


@dataclass(frozen=True)
class RankSummary:
    """What one rank's GPUs do in an iteration of a plan.

    Attributes:
        rank: its number.
        lowest_clock_mhz: the lowest clock in use.
        highest_clock_mhz: the highest clock in use.
        clock_changes: how often the clock changes from one computation to the next, and back for the next iteration.
        busy_s: seconds spent on computations and fixed operations.
        energy_j: joules, waiting included.
    """

    rank: int
    lowest_clock_mhz: int
    highest_clock_mhz: int
    clock_changes: int
    busy_s: float
    energy_j: float


@dataclass(frozen=True)
class BesideStraggler:
    """A plan against all clocks at maximum where both wait for a straggler, joules of such an iteration."""

    straggler_time_s: float
    energy_j: float
    baseline_energy_j: float
    saved_j: float
    saved_share: float


@dataclass(frozen=True)
class PlanSummary:
    """A plan; fields as `Plan` has them.

    `operations` counts those of fixed time and `longest_lag_s` is the longest transfer. `time_ratio`, `saved_j` and
    `saved_share` are against all clocks at maximum, `above_bound_share` is over `bound_j`; `most_changes` is that of
    the rank that changes its clock most often.
    """

    origin: str
    gpu: str | None
    schedule: str
    stages: int
    ranks: int
    microbatches: int
    operations: int
    longest_lag_s: float
    gpus_per_stage: int
    control: str
    blocking_power_w: float | tuple[float, ...]
    overhead_s: float
    deadline_s: float
    time_s: float
    energy_j: float
    power_w: float
    bound_j: float
    above_bound_share: float
    baseline_time_s: float
    baseline_energy_j: float
    time_ratio: float
    saved_j: float
    saved_share: float
    most_changes: int
    per_rank: tuple[RankSummary, ...]
    beside_straggler: BesideStraggler | None


@dataclass(frozen=True)
class PlansSummary:
    """Plans of pipelines that wait for each other, one for each kind; all numbers are of all pipelines together.

    `saved_j` and `saved_share` are against all clocks at maximum; `plans` are those of each kind.
    """

    pipelines: int
    time_s: float
    energy_j: float
    baseline_time_s: float
    baseline_energy_j: float
    time_ratio: float
    saved_j: float
    saved_share: float
    plans: tuple[PlanSummary, ...]


@dataclass(frozen=True)
class ComputationSummary:
    """A computation, or a fixed operation, on the time axis: seconds from the start of the iteration, average watts.

    A fixed operation has no clock.
    """

    computation: str
    rank: int
    clock_mhz: int | None
    start_s: float
    end_s: float
    power_w: float


@dataclass(frozen=True)
class TimelineSummary(PlanSummary):
    """A plan with its `computations`, rank by rank in the order they run in, and then its fixed operations."""

    computations: tuple[ComputationSummary, ...]


def summarize_plan(plan: Plan, straggler_time_s: float | None = None) -> PlanSummary:
    """What `planner plan` says; `straggler_time_s` is what the plan was made for, if it was."""
    timeline = replay(plan)
    beside = None if straggler_time_s is None else _beside(plan, straggler_time_s)
    return PlanSummary(
        origin=plan.origin,
        gpu=plan.gpu,
        schedule=plan.schedule.name,
        stages=plan.schedule.stages,
        ranks=len(plan.schedule.ranks),
        microbatches=plan.schedule.microbatches,
        operations=len(plan.iteration.operations),
        longest_lag_s=longest_lag_s(plan.iteration),
        gpus_per_stage=plan.gpus_per_stage,
        control=plan.control,
        blocking_power_w=plan.blocking_power_w,
        overhead_s=plan.overhead_s,
        deadline_s=plan.deadline_s,
        time_s=plan.time_s,
        energy_j=plan.energy_j,
        power_w=plan.power_w,
        bound_j=plan.bound_j,
        above_bound_share=share(plan.energy_j - plan.bound_j, plan.bound_j),
        baseline_time_s=plan.baseline_time_s,
        baseline_energy_j=plan.baseline_energy_j,
        time_ratio=plan.time_s / plan.baseline_time_s,
        saved_j=plan.saving_j,
        saved_share=share(plan.saving_j, plan.baseline_energy_j),
        most_changes=max(plan.changes),
        per_rank=tuple(_rank(plan, timeline, number) for number in range(len(plan.schedule.ranks))),
        beside_straggler=beside,
    )


def summarize_plans(replicas: Replicas, plans: Sequence[Plan], straggler_time_s: float | None = None) -> PlansSummary:
    """What `planner plan` says of several frontiers; `plans` are those of each of `replicas.frontiers`."""
    time_s, energy_j = replicas.time_and_energy(plans)
    saved_j = replicas.baseline_energy_j - energy_j
    return PlansSummary(
        pipelines=sum(replicas.counts),
        time_s=time_s,
        energy_j=energy_j,
        baseline_time_s=replicas.baseline_time_s,
        baseline_energy_j=replicas.baseline_energy_j,
        time_ratio=time_s / replicas.baseline_time_s,
        saved_j=saved_j,
        saved_share=share(saved_j, replicas.baseline_energy_j),
        plans=tuple(summarize_plan(plan, straggler_time_s) for plan in plans),
    )


def summarize_timeline(plan: Plan) -> TimelineSummary:
    """What `planner show` says of a plan."""
    computations = tuple(
        ComputationSummary(name, rank, plan.clocks.get(name), span.start_s, span.end_s, span.power_w)
        for rank, (name, span) in zip(plan.iteration.rank_of, replay(plan).spans.items(), strict=True)
    )
    return TimelineSummary(**vars(summarize_plan(plan)), computations=computations)


def _rank(plan: Plan, timeline: Timeline, number: int) -> RankSummary:
    clocks = [plan.clocks[str(computation)] for computation in plan.schedule.ranks[number]]
    spans = [timeline.spans[plan.iteration.names[place]] for place in plan.iteration.programs[number]]
    busy_s = math.fsum(span.end_s - span.start_s for span in spans)
    busy_j = math.fsum(span.power_w * (span.end_s - span.start_s) for span in spans)
    energy_j = busy_j + plan.rank_waiting_w[number] * (timeline.time_s - busy_s)
    return RankSummary(number, min(clocks), max(clocks), plan.changes[number], busy_s, energy_j)


def _beside(plan: Plan, straggler_time_s: float) -> BesideStraggler:
    waiting_w = math.fsum(plan.rank_waiting_w)
    energy_j = plan.energy_j + waiting_w * max(0.0, straggler_time_s - plan.time_s)
    baseline_j = plan.baseline_energy_j + waiting_w * max(0.0, straggler_time_s - plan.baseline_time_s)
    saved_j = baseline_j - energy_j
    return BesideStraggler(straggler_time_s, energy_j, baseline_j, saved_j, share(saved_j, baseline_j))
