"""Writes run folders as if ranks had followed a plan exactly, or nearly."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from random import Random

from perseus_planner.engines.engine import PipelineRank
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import clock_calls, replay
from perseus_planner.runs.recording import Attempt, RankFiles, attempt_path, attempts_in
from perseus_planner.runtime.controller.protocol import AttachReply, ControlChange, GpuSample
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.sending import Plans
from perseus_planner.runtime.telemetry import Telemetry
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.views.plan import summarize_plan

BEGIN_NS = 10**12  #: of the first iteration, on the monotonic clock
EPOCH_NS = 1_700_000_000 * 10**9  #: what is added to that

Edit = Callable[[int, ControlChange], ControlChange | None]
Times = Callable[[Plan, int, int, int], IterationTimes]


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def as_made(_: int, change: ControlChange) -> ControlChange:
    return change


def any_plan(dag: PipelineDag, rng: Random) -> Plan:
    """Return a plan with drawn clocks; its time, energy and bound are undefined."""
    profile, iteration = dag.profile, dag.iteration
    chosen = zip(dag.computations, iteration.keys, strict=True)
    clocks = {str(c): rng.choice(profile.measurements[key]).clock_mhz for c, key in chosen}
    table = {
        key: {each.clock_mhz: each for each in measured}
        for key, measured in profile.measurements.items()
    }
    return Plan(
        iteration,
        clocks,
        table,
        "",
        None,
        "measured",
        profile.blocking_power_w,
        *[math.nan] * 6,
        full_clocks={key: measured[0] for key, measured in profile.measurements.items()},
    )


def timed(plan: Plan, rank: int, number: int, begin_ns: int) -> IterationTimes:
    """Return the times of an iteration as the plan is replayed."""
    spans = replay(plan).spans
    both = [spans[str(computation)] for computation in plan.schedule.ranks[rank]]
    spans_ns = tuple((begin_ns + ns(span.start_s), begin_ns + ns(span.end_s)) for span in both)
    return IterationTimes(number, begin_ns, spans_ns, begin_ns + ns(plan.time_s))


def changes(plan: Plan, rank: int, begin_ns: int) -> list[ControlChange]:
    """Return the changes that a controller would have made, for the position of the computation
    that starts next.
    """
    spans = replay(plan).spans
    starts_s = [spans[str(computation)].start_s for computation in plan.schedule.ranks[rank]]
    clocks = [plan.clocks[str(computation)] for computation in plan.schedule.ranks[rank]]
    made, before = [], clocks[-1]
    for call in clock_calls(plan):
        if call.rank == rank:
            place = next(
                place for place, start_s in enumerate(starts_s) if start_s >= call.requested_s
            )
            times_ns = [
                begin_ns + ns(each) for each in (call.requested_s, call.start_s, call.end_s)
            ]
            made.append(ControlChange(place, call.clock_mhz, *times_ns, before))
            before = call.clock_mhz
    return made


def attempt_in(folder: Path) -> Path:
    """Return the folder of the newest attempt."""
    return attempt_path(folder, attempts_in(folder)[-1])


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
    gpu: str = "",
    service_version: int | None = None,
    times: Times | None = None,
) -> list[Telemetry]:
    """Write an attempt in which every rank follows the plan.

    Args:
        folder: The run folder.
        plan: The plan of all ranks.
        iterations: Number of iterations.
        version: Version of the plan.
        pipelines: Number of equal pipelines.
        edit: (iteration, change) -> the change as it was made, or None if it was not made.
        first: Number of the first iteration.
        deviations: Iteration -> what was not as planned.
        origin: Origin of the GPUs' readings.
        own_plans: See `Telemetry`.
        gpu: What the controller has opened on each rank.
        service_version: What a service counts the plan by.
        times: What `timed` is given -> the times of an iteration on a rank; None for `timed`.
    """
    ranks, period_ns, made = len(plan.schedule.ranks), ns(plan.time_s) + 1000, []
    attempt = Attempt.next_in(folder, datetime(2026, 1, 1))
    for number in range(pipelines * ranks):
        pipeline, rank = divmod(number, ranks)
        seat = PipelineRank(
            rank, ranks, pipeline, tuple(range(pipeline * ranks, (pipeline + 1) * ranks))
        )
        files = RankFiles(folder, number, pipelines * ranks, attempt)
        telemetry = Telemetry(number, seat, files, own_plans=own_plans, offset_ns=lambda: EPOCH_NS)
        program, energy_j = (
            Program.of_plan(version, plan, rank, Plans(plan, {}, service_version)),
            summarize_plan(plan).per_rank[rank].energy_j,
        )
        watts = energy_j / plan.gpus_per_stage / plan.time_s

        def reading(at_ns: int, watts: float = watts) -> GpuSample:
            return GpuSample(
                at_ns,
                at_ns,
                (at_ns - BEGIN_NS) / 1e9 * watts + 1e6,
                None,
                watts,
                61.0,
                {"sw-thermal": 7.0},
                0,
                0,
                None,
            )

        telemetry.update([], [AttachReply(gpu, "", "", origin), reading(BEGIN_NS - 1)])
        for i in range(first, first + iterations):
            begin_ns = BEGIN_NS + i * period_ns
            edited = [edit(i, change) for change in changes(plan, rank, begin_ns)]
            ran = (times or timed)(plan, rank, i, begin_ns)
            telemetry.on_end(i, program, (deviations or {}).get(i))
            telemetry.update([ran], [*filter(None, edited), reading(ran.end_ns)])
        telemetry.close()
        made.append(telemetry)
    return made
