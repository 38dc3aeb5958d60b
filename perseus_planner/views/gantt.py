"""An iteration as a Gantt chart: when each computation runs, at which clock and power, and its
spare time.

A chart of thousands of computations must stay small in a file and quick to draw. So it holds whole
microseconds in plain lists, without an object for each computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.errors import RunError
from perseus_planner.views.context import origin_label
from perseus_planner.views.run import predict_records

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.plans.replay import Span
    from perseus_planner.runs.records import ComputationRecord
    from perseus_planner.runs.run import RankRecord, Run
    from perseus_planner.schedules.iteration import Iteration

_US = 1e6
NEVER = -1
"""In `Lane.late_us`, a computation whose clock was never set."""


@dataclass(frozen=True)
class Lane:
    """One rank's iteration; each list has an entry for every computation and operation, in the
    order they run.
    """

    #: time from the end of the previous entry until this one begins; the first counts from the
    #: start of the iteration. Below 0 if measured times overlap.
    gaps_us: tuple[int, ...]
    times_us: tuple[int, ...]  #: how long it runs
    #: its clock, MHz, or its power limit, watts; None if it has no clock or it is not known.
    clocks: tuple[int | None, ...]
    #: average power of all GPUs of the rank while it runs, watts, or None if not known.
    powers_w: tuple[int | None, ...] | None
    #: how much later it could end without making the iteration longer; 0 on a critical path. None
    #: if not known.
    spare_us: tuple[int, ...] | None
    #: how long after its start its clock was set, if that was late; `NEVER` if another clock was
    #: requested first; None if it was in time. None instead of a list if not known.
    late_us: tuple[int | None, ...] | None
    waiting_w: float  #: power of the rank's GPUs while they wait, watts


@dataclass(frozen=True)
class GanttChart:
    """One iteration."""

    name: str  #: what the iteration is of, such as the name of a plan
    note: str  #: what kind of iteration it is
    origin: str  #: where its times and powers come from
    time_us: int  #: iteration time
    lanes: tuple[Lane, ...]  #: one for each rank
    #: the names of what each rank runs, such as "0F0 0F1 0B0", separated by spaces.
    programs: tuple[str, ...]


def chart_plan(name: str, plan: Plan, note: str) -> GanttChart:
    """Return the chart of a plan's replay."""
    timeline = plan.timeline
    spans = list(timeline.spans.values())
    spare_us = [round(_US * slack_s) for slack_s in spare_s(plan.iteration, spans)]
    lanes = []
    for program, waiting_w in zip(plan.iteration.programs, plan.rank_waiting_w, strict=True):
        gaps_us, times_us = _gaps_and_times_us(
            [(spans[place].start_s, spans[place].end_s) for place in program]
        )
        clocks = tuple(plan.clocks.get(plan.iteration.names[place]) for place in program)
        powers_w = tuple(round(spans[place].power_w) for place in program)
        spare = tuple(spare_us[place] for place in program)
        lanes.append(Lane(gaps_us, times_us, clocks, powers_w, spare, None, waiting_w))
    names = plan.iteration.names
    programs = tuple(
        " ".join(names[place] for place in program) for program in plan.iteration.programs
    )
    return GanttChart(
        name, note, origin_label(plan.origin), round(_US * timeline.time_s), tuple(lanes), programs
    )


def spare_s(iteration: Iteration, spans: Sequence[Span]) -> list[float]:
    """Return how much later each node could end, seconds, if the iteration and all other nodes
    take as long as now.
    """
    end_s = max(span.end_s for span in spans)
    latest_s = [end_s] * len(spans)
    for place in reversed(iteration.order):
        start_s = latest_s[place] - spans[place].time_s
        for other, lag_s in iteration.waits[place]:
            latest_s[other] = min(latest_s[other], start_s - lag_s)
    return [max(0.0, latest - span.end_s) for latest, span in zip(latest_s, spans, strict=True)]


def chart_run(name: str, run: Run) -> list[GanttChart]:
    """Return charts of the last iteration that ran as planned on all ranks, one for each pipeline.

    The clocks of nodes may differ, so the times of ranks are not comparable: each rank's times
    count from where its iteration began.

    Raises:
        RunError: If there is no such iteration whose computations all ranks have kept.
    """
    number, version = last_as_planned(run)
    pipelines = sorted({rank.pipeline for rank in run.ranks})
    charts = []
    for pipeline in pipelines:
        ranks = [rank for rank in run.ranks if rank.pipeline == pipeline]
        rows = [next(row for row in rank.iterations if row.iteration == number) for rank in ranks]
        records = [rank.computations[number] for rank in ranks]
        note = (
            f"recorded: iteration {number} by plan {version}, each rank from the start of its "
            "iteration"
        )
        if len(pipelines) > 1:
            note += f"; pipeline {pipeline}"
        origins = {row.origin for row in rows}
        origin = "times measured" + "".join(
            f", clocks {clock_origin}"
            for clock_origin in origins
            if clock_origin and len(origins) == 1
        )
        time_s, begins_s = max(row.time_s for row in rows), [row.begin_s for row in rows]
        places = [rank.pipeline_rank for rank in ranks]
        charts.append(
            _chart_records(
                (name, note, origin), run.plan(version, pipeline), places, records, begins_s, time_s
            )
        )
    return charts


def chart_run_beside_plan(run: Run) -> list[GanttChart]:
    """Return the charts of `chart_run`, each below the chart of the records that its plan predicts.

    Raises:
        RunError: If there is no iteration that can be charted.
    """
    _, version = last_as_planned(run)
    charts = []
    for pipeline, recorded in zip(
        sorted({rank.pipeline for rank in run.ranks}), chart_run("run", run), strict=True
    ):
        plan = run.plan(version, pipeline)
        records = predict_records(plan)
        head, begins_s = (
            (f"plan {version}", "predicted", origin_label(plan.origin)),
            [0.0] * len(records),
        )
        charts += [
            _chart_records(head, plan, range(len(records)), records, begins_s, plan.time_s),
            recorded,
        ]
    return charts


def last_as_planned(run: Run) -> tuple[int, int]:
    """Return number and plan of the last iteration that ran as planned everywhere and that all
    ranks have kept.

    Raises:
        RunError: If there is no such iteration.
    """
    kept = set.intersection(*map(_kept_as_planned, run.ranks))
    if not kept:
        raise RunError(
            f"{run.folder}: no iteration that ran as planned on all ranks has kept its "
            "computations on all of them; try again in a minute, or when the training has ended"
        )
    return max(kept)


def _kept_as_planned(rank: RankRecord) -> set[tuple[int, int]]:
    return {
        (row.iteration, row.version)
        for row in rank.iterations
        if row.version is not None and row.is_as_planned and row.iteration in rank.computations
    }


def _chart_records(
    head: tuple[str, str, str],
    plan: Plan,
    ranks: Sequence[int],
    records: Sequence[Sequence[ComputationRecord]],
    begins_s: Sequence[float],
    time_s: float,
) -> GanttChart:
    lanes = tuple(
        _recorded_lane(rows, begin_s, plan.rank_waiting_w[rank], plan.control != "power-limit")
        for rank, rows, begin_s in zip(ranks, records, begins_s, strict=True)
    )
    programs = tuple(" ".join(str(row.computation) for row in rows) for rows in records)
    return GanttChart(*head, round(_US * time_s), lanes, programs)


def _recorded_lane(
    rows: Sequence[ComputationRecord], begin_s: float, waiting_w: float, in_mhz: bool
) -> Lane:
    gaps_us, times_us = _gaps_and_times_us(
        [(row.begin_s - begin_s, row.end_s - begin_s) for row in rows]
    )
    achieved = [row.achieved_mhz if in_mhz else None for row in rows]
    clocks = tuple(
        row.clock if mhz is None else mhz for row, mhz in zip(rows, achieved, strict=True)
    )
    return Lane(gaps_us, times_us, clocks, None, None, tuple(map(_late_us, rows)), waiting_w)


def _late_us(row: ComputationRecord) -> int | None:
    if row.is_overtaken:
        return NEVER
    return (
        round(_US * (row.set_end_s - row.begin_s))
        if row.is_late and row.set_end_s is not None
        else None
    )


def _gaps_and_times_us(
    spans_s: Sequence[tuple[float, float]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return gaps and times in whole microseconds whose sums are never off by more than half a
    microsecond.
    """
    starts_us, ends_us = ([round(_US * span[end]) for span in spans_s] for end in (0, 1))
    gaps_us = tuple(start - before for start, before in zip(starts_us, [0, *ends_us], strict=False))
    return gaps_us, tuple(end - start for start, end in zip(starts_us, ends_us, strict=True))
