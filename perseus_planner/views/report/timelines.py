"""An iteration to scale: when each computation runs, at which clock and power, and how much later it could end.

Thousands of computations must be small in a file and quick to draw: whole microseconds, in lists without an object for
each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.cluster.baselines import all_maximum
from perseus_planner.errors import RunError
from perseus_planner.plans.replay import Span, replay
from perseus_planner.views.report.points import BEFORE
from perseus_planner.views.report.savings import replayed
from perseus_planner.views.run_drawing import last_as_planned
from perseus_planner.views.run_summary import summarize_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import RankRecord, Run
    from perseus_planner.schedules.iteration import Iteration
    from perseus_planner.views.report.sources import Sources

_US = 1e6


@dataclass(frozen=True)
class Lane:
    """One rank's iteration; a number for each of what it runs, in the order it runs in.

    Attributes:
        gaps_us: how long after the end of the one before it begins; the first after the iteration's begin. Below 0
            where measured times overlap.
        times_us: how long it runs.
        clocks: MHz, or watts of a power limit; None: it has none, or it is not known.
        powers_w: average watts meanwhile of all GPUs of the rank; None: not known.
        spare_us: how much later it could end without the iteration taking longer; 0: it is on a critical path. None:
            not known.
        waiting_w: what its GPUs draw while it waits.
    """

    gaps_us: tuple[int, ...]
    times_us: tuple[int, ...]
    clocks: tuple[int | None, ...]
    powers_w: tuple[int | None, ...] | None
    spare_us: tuple[int, ...] | None
    waiting_w: float


@dataclass(frozen=True)
class Timeline:
    """One iteration: its name, what it is, where its times and powers are from, its length, and a lane for each rank.

    `programs` are the names of what each rank runs, such as "0F0 0F1 0B0", with a space between.
    """

    name: str
    note: str
    origin: str
    time_us: int
    lanes: tuple[Lane, ...]
    programs: tuple[str, ...]


@dataclass(frozen=True)
class Timelines:
    """Those of a report, and what was left out and why."""

    timelines: tuple[Timeline, ...]
    left_out: tuple[str, ...]


def timelines(sources: Sources) -> Timelines:
    """The pipeline before, as planned, and as it ran."""
    found, left_out = list(_before(sources)), []
    found += [of_plan(name, plan, "as planned") for name, plan in sources.plans.items()]
    for name, run in sources.runs.items():
        try:
            found.append(of_run(name, run))
        except RunError as error:
            left_out.append(str(error))
    if sources.plans and sources.frontier is None:
        left_out.append("The pipeline before, all clocks at maximum: a plan alone does not know it; name the frontier")
    return Timelines(tuple(found), tuple(left_out))


def _before(sources: Sources) -> Iterator[Timeline]:
    if sources.frontier is not None:
        plan = sources.frontier.plan_of(all_maximum(sources.frontier.dag))
        yield of_plan(BEFORE, plan, "before: the baseline of every saving")


def of_plan(name: str, plan: Plan, note: str) -> Timeline:
    """A plan, replayed."""
    timeline = replay(plan)
    spans = list(timeline.spans.values())
    spare_us = [round(_US * each) for each in spare_s(plan.iteration, spans)]
    lanes = []
    for program, waiting_w in zip(plan.iteration.programs, plan.rank_waiting_w, strict=True):
        gaps_us, times_us = _gaps_and_times_us([(spans[place].start_s, spans[place].end_s) for place in program])
        clocks = tuple(plan.clocks.get(plan.iteration.names[place]) for place in program)
        powers_w = tuple(round(spans[place].power_w) for place in program)
        spare = tuple(spare_us[place] for place in program)
        lanes.append(Lane(gaps_us, times_us, clocks, powers_w, spare, waiting_w))
    names = plan.iteration.names
    programs = tuple(" ".join(names[place] for place in program) for program in plan.iteration.programs)
    return Timeline(name, note, replayed(plan.origin), round(_US * timeline.time_s), tuple(lanes), programs)


def spare_s(iteration: Iteration, spans: Sequence[Span]) -> list[float]:
    """How much later each node could end, seconds, without the last one ending later; all others as long as now."""
    end_s = max(span.end_s for span in spans)
    latest_s = [end_s] * len(spans)
    for place in reversed(iteration.order):
        start_s = latest_s[place] - (spans[place].end_s - spans[place].start_s)
        for other, lag_s in iteration.waits[place]:
            latest_s[other] = min(latest_s[other], start_s - lag_s)
    return [max(0.0, latest - span.end_s) for latest, span in zip(latest_s, spans, strict=True)]


def of_run(name: str, run: Run) -> Timeline:
    """The last iteration that ran as planned on all ranks, of the first pipeline; each rank from where it began.

    Raises:
        RunError: there is none whose computations all ranks have kept.
    """
    number, version = last_as_planned(run)
    first = run.ranks[0].pipeline
    ranks = [rank for rank in run.ranks if rank.pipeline == first]
    plan = run.plan(version, first)
    in_mhz = plan.control != "power-limit"
    lanes = tuple(_ran(rank, number, plan.rank_waiting_w[rank.pipeline_rank], in_mhz) for rank in ranks)
    rows = [row for rank in ranks for row in rank.iterations if row.iteration == number]
    programs = tuple(" ".join(str(each.computation) for each in rank.computations[number]) for rank in ranks)
    note = f"as it ran: iteration {number} by plan {version}, each rank from where it began it"
    if summarize_run(run).pipelines > 1:
        note += f"; pipeline {first}"
    clocks = {row.origin for row in rows}
    origin = "times measured" + "".join(f", clocks {each}" for each in clocks if each and len(clocks) == 1)
    return Timeline(name, note, origin, round(_US * max(row.time_s for row in rows)), lanes, programs)


def _ran(rank: RankRecord, number: int, waiting_w: float, in_mhz: bool) -> Lane:
    begin_s = next(row.begin_s for row in rank.iterations if row.iteration == number)
    ran = rank.computations[number]
    gaps_us, times_us = _gaps_and_times_us([(each.begin_s - begin_s, each.end_s - begin_s) for each in ran])
    achieved = [each.achieved_mhz if in_mhz else None for each in ran]
    clocks = tuple(each.clock if mhz is None else mhz for each, mhz in zip(ran, achieved, strict=True))
    return Lane(gaps_us, times_us, clocks, None, None, waiting_w)


def _gaps_and_times_us(spans_s: Sequence[tuple[float, float]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Whole microseconds whose sums are never off by more than half of one."""
    starts_us, ends_us = ([round(_US * span[end]) for span in spans_s] for end in (0, 1))
    gaps_us = tuple(start - before for start, before in zip(starts_us, [0, *ends_us], strict=False))
    return gaps_us, tuple(end - start for start, end in zip(starts_us, ends_us, strict=True))
