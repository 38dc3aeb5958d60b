"""Runs that were never run: what the ranks of a job would write if they did just what a plan says, or nearly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import clock_calls, replay
from perseus_planner.runtime.controller.protocol import AttachReply, ControlChange, GpuSample
from perseus_planner.runtime.engines.engine import PipelineRank
from perseus_planner.runtime.hook import Program
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.telemetry.telemetry import Telemetry
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.views.plan import summarize_plan

BEGIN_NS = 10**12  #: of the first iteration, on the monotonic clock
EPOCH_NS = 1_700_000_000 * 10**9  #: what is added to that

Edit = Callable[[int, ControlChange], ControlChange | None]


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def as_made(_: int, change: ControlChange) -> ControlChange:
    return change


def any_plan(dag: PipelineDag, rng: Random) -> Plan:
    """A plan of clocks drawn for each computation; what it says of time, energy and bound is nothing."""
    profile, iteration = dag.profile, dag.iteration
    chosen = zip(dag.computations, iteration.keys, strict=True)
    clocks = {str(c): rng.choice(profile.measurements[key]).clock_mhz for c, key in chosen}
    table = {key: {each.clock_mhz: each for each in measured} for key, measured in profile.measurements.items()}
    return Plan(iteration, clocks, table, "", None, "measured", profile.blocking_power_w, *[math.nan] * 6)


def timed(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
    """The iteration of that number as the plan is replayed."""
    spans = replay(plan).spans
    both = [spans[str(computation)] for computation in plan.schedule.ranks[rank]]
    spans_ns = tuple((begin_ns + ns(span.start_s), begin_ns + ns(span.end_s)) for span in both)
    return IterationTimes(number, begin_ns, spans_ns, begin_ns + ns(plan.time_s))


def changes(plan: Plan, rank: int, begin_ns: int) -> list[ControlChange]:
    """What its controller would have done, the place being that of the computation that starts next."""
    spans = replay(plan).spans
    starts_s = [spans[str(computation)].start_s for computation in plan.schedule.ranks[rank]]
    clocks = [plan.clocks[str(computation)] for computation in plan.schedule.ranks[rank]]
    made, before = [], clocks[-1]
    for call in clock_calls(plan):
        if call.rank == rank:
            place = next(place for place, start_s in enumerate(starts_s) if start_s >= call.requested_s)
            times_ns = [begin_ns + ns(each) for each in (call.requested_s, call.start_s, call.end_s)]
            made.append(ControlChange(place, call.clock_mhz, *times_ns, before))
            before = call.clock_mhz
    return made


def write_run(
    folder: Path,
    plan: Plan,
    iterations: int = 4,
    *,
    version: int = 1,
    pipelines: int = 1,
    edit: Edit = as_made,
    first: int = 0,
    deviations: dict[int, str] | None = None,
    origin: str = "simulated",
    own_plans: bool = False,
) -> list[Telemetry]:
    """The folder of a run in which every rank did what the plan says.

    Args:
        folder: of the run.
        plan: that all ran by.
        iterations: how many there were.
        version: of the plan.
        pipelines: alike, one after another.
        edit: iteration and change -> what became of that change; None: it was not made.
        first: number of the first iteration.
        deviations: iteration -> what was not as planned.
        origin: of what the GPUs say.
        own_plans: see `Telemetry`.
    """
    ranks, period_ns, made = len(plan.schedule.ranks), ns(plan.time_s) + 1000, []
    for number in range(pipelines * ranks):
        pipeline, rank = divmod(number, ranks)
        seat = PipelineRank(rank, ranks, pipeline, tuple(range(pipeline * ranks, (pipeline + 1) * ranks)))
        telemetry = Telemetry(number, seat, folder, own_plans=own_plans, offset_ns=lambda: EPOCH_NS)
        program, energy_j = Program(version, plan, rank), summarize_plan(plan).per_rank[rank].energy_j
        watts = energy_j / plan.gpus_per_stage / plan.time_s

        def reading(at_ns: int, watts: float = watts) -> GpuSample:
            return GpuSample(
                at_ns, at_ns, (at_ns - BEGIN_NS) / 1e9 * watts + 1e6, None, watts, 61.0, {"sw-thermal": 7.0}
            )

        telemetry.update([], [AttachReply("", "", "", origin), reading(BEGIN_NS - 1)])
        for i in range(first, first + iterations):
            begin_ns = BEGIN_NS + i * period_ns
            told = [edit(i, change) for change in changes(plan, rank, begin_ns)]
            ran = timed(plan, rank, i, begin_ns)
            telemetry.on_end(i, program, (deviations or {}).get(i))
            telemetry.update([ran], [*filter(None, told), reading(ran.end_ns)])
        telemetry.close()
        made.append(telemetry)
    return made
