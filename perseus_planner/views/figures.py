"""Figures: frontiers, iterations as Gantt charts, and curves of computations; matplotlib is loaded
when needed. And what a Gantt chart shows, here and on the page of a report: when each computation
runs, at which clock and power, and its spare time.

A chart of thousands of computations must stay small in a file and quick to draw. So it holds whole
microseconds in plain lists, without an object for each computation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, chain
from math import ceil
from pathlib import Path
from textwrap import fill as fill_lines
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import RunError, UsageError, how_to_install
from perseus_planner.base.files import replacing
from perseus_planner.plans.replay import profile_of_origin
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.views.context import origin_label
from perseus_planner.views.curves import MeasuredCurve, curves_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from perseus_planner.plans.plan import Plan
    from perseus_planner.plans.replay import Span
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runs.records import ComputationRecord
    from perseus_planner.runs.run import RankRecord, Run
    from perseus_planner.schedules.iteration import Iteration
    from perseus_planner.views.frontier import FrontierChart, IterationPoint

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
    #: power of the rank's GPUs while they wait, watts; None if it is not known.
    waiting_w: float | None


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
    # Spare time tells a critical path, as in the plan's own graph.
    spare_us = [round(_US * slack_s) for slack_s in spare_s(plan.iteration, spans)]
    lanes = []
    for program, waiting_w in zip(plan.iteration.programs, plan.rank_waiting_w, strict=True):
        gaps_us, times_us = _gaps_and_times_us(
            [(spans[node].start_s, spans[node].end_s) for node in program]
        )
        # Operations of fixed time have no clock.
        clocks = tuple(plan.clocks.get(plan.iteration.names[node]) for node in program)
        powers_w = tuple(round(spans[node].power_w) for node in program)
        spare = tuple(spare_us[node] for node in program)
        lanes.append(Lane(gaps_us, times_us, clocks, powers_w, spare, None, waiting_w))
    names = plan.iteration.names
    programs = tuple(
        " ".join(names[node] for node in program) for program in plan.iteration.programs
    )
    return GanttChart(
        name, note, origin_label(plan.origin), round(_US * timeline.time_s), tuple(lanes), programs
    )


def spare_s(iteration: Iteration, spans: Sequence[Span]) -> list[float]:
    """Return how much later each node could end, seconds, if the iteration and all other nodes
    take as long as now.
    """
    end_s = max(span.end_s for span in spans)
    # Nothing may end later than the iteration does now.
    latest_s = [end_s] * len(spans)
    # Backward, so that all that wait for a node are known before it.
    for node in reversed(iteration.order):
        start_s = latest_s[node] - spans[node].time_s
        for before, lag_s in iteration.waits[node]:
            latest_s[before] = min(latest_s[before], start_s - lag_s)
    # Rounding of spans may make a slack negative.
    return [max(0.0, latest - span.end_s) for latest, span in zip(latest_s, spans, strict=True)]


def chart_run(name: str, run: Run) -> list[GanttChart]:
    """Return charts of the last iteration that ran as planned on all ranks, one for each pipeline;
    of a run without a plan, that of the last iteration.

    The clocks of nodes may differ, so the times of ranks are not comparable: each rank's times
    count from where its iteration began.

    Raises:
        RunError: If there is no such iteration whose computations all ranks have kept.
    """
    # A run without a plan has no order to have kept, so its last iteration is shown.
    number, version = last_as_planned(run) if run.versions else (last_kept(run), None)
    pipelines = sorted({rank.pipeline for rank in run.ranks})
    by = "without a plan" if version is None else f"by plan {run.plan_name(version)}"
    charts = []
    for pipeline in pipelines:
        ranks = [rank for rank in run.ranks if rank.pipeline == pipeline]
        rows = [next(row for row in rank.iterations if row.iteration == number) for rank in ranks]
        plan = None if version is None else run.plan(version, pipeline)
        # What was achieved is in MHz, also where power limits were set.
        in_mhz = plan is None or plan.control != "power-limit"
        lanes = list[Lane]()
        # Ranks keep times by their own clocks, so each counts from the begin of its iteration.
        programs = list[str]()
        for rank, row in zip(ranks, rows, strict=True):
            records = rank.computations[number]
            waiting_w = None if plan is None else plan.rank_waiting_w[rank.pipeline_rank]
            lanes.append(_recorded_lane(records, row.begin_s, waiting_w, in_mhz))
            programs.append(" ".join(str(record.computation) for record in records))
        note = f"recorded: iteration {number} {by}, each rank from the start of its iteration"
        if len(pipelines) > 1:
            note += f"; pipeline {pipeline}"
        origin = "times measured"
        # Ranks of different origins have none in common to name.
        origins = {row.origin for row in rows}
        of_clocks = origins.pop() if len(origins) == 1 else None
        if of_clocks:
            origin += f", clocks {of_clocks}"
        time_us = round(_US * max(row.time_s for row in rows))
        charts.append(GanttChart(name, note, origin, time_us, tuple(lanes), tuple(programs)))
    return charts


def chart_run_beside_plan(run: Run) -> list[GanttChart]:
    """Return the charts of `chart_run`, each below the chart of its plan.

    Raises:
        RunError: If there is no iteration that can be charted.
    """
    _, version = last_as_planned(run)
    pipelines = sorted({rank.pipeline for rank in run.ranks})
    charts = []
    for pipeline, recorded in zip(pipelines, chart_run("run", run), strict=True):
        plan = run.plan(version, pipeline)
        charts += [chart_plan(f"plan {run.plan_name(version)}", plan, "predicted"), recorded]
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


def last_kept(run: Run) -> int:
    """Return the number of the last iteration whose computations all ranks have kept, of those
    without a deviation if there are any.

    Raises:
        RunError: If there is no such iteration.
    """
    for may_deviate in (False, True):
        kept = set.intersection(
            *(
                {
                    row.iteration
                    for row in rank.iterations
                    if row.iteration in rank.computations and (may_deviate or row.deviation is None)
                }
                for rank in run.ranks
            )
        )
        if kept:
            return max(kept)
    raise RunError(
        f"{run.folder}: no iteration has kept its computations on all ranks; try again in a "
        "minute, or when the training has ended"
    )


def _kept_as_planned(rank: RankRecord) -> set[tuple[int, int]]:
    return {
        (row.iteration, row.version)
        for row in rank.iterations
        if row.version is not None and row.is_as_planned and row.iteration in rank.computations
    }


def _recorded_lane(
    rows: Sequence[ComputationRecord], begin_s: float, waiting_w: float | None, in_mhz: bool
) -> Lane:
    gaps_us, times_us = _gaps_and_times_us(
        [(row.begin_s - begin_s, row.end_s - begin_s) for row in rows]
    )
    achieved = [row.achieved_mhz if in_mhz else None for row in rows]
    # The achieved clock counts where it is known, as a request may be late.
    clocks = tuple(
        row.clock if mhz is None else mhz for row, mhz in zip(rows, achieved, strict=True)
    )
    return Lane(gaps_us, times_us, clocks, None, None, tuple(map(_late_us, rows)), waiting_w)


def _late_us(row: ComputationRecord) -> int | None:
    if row.is_overtaken:
        return NEVER
    # A clock that was set too late, and not one that is a little late as all are.
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
    # Starts and ends are rounded, and lengths follow from them, so that errors never add up.
    starts_us, ends_us = ([round(_US * span[end]) for span in spans_s] for end in (0, 1))
    gaps_us = tuple(start - before for start, before in zip(starts_us, [0, *ends_us], strict=False))
    return gaps_us, tuple(end - start for start, end in zip(starts_us, ends_us, strict=True))


INSTALL = how_to_install("plot")
"""What to do when matplotlib is missing."""
# Keeps the time of day out of the file, so that equal input gives equal bytes.
_METADATA: dict[str, dict[str, None]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
FORMATS = tuple(_METADATA)  #: of figure files, as their names end
_LOOKS = MappingProxyType(
    {
        "plan": ("D", 1),
        "run": ("^", 4),
        "baseline": ("s", 5),
        "peer": ("X", 2),
        "landmark": ("o", 7),
    }
)
"""Kind of point -> its marker and its colour among those of `theme.css`, as in `report.js`; the
first kind lies on top.
"""
_PEERS = (2, 8, 6)  #: colours of other planners, among those of `theme.css`
_TITLE_CHARACTERS = 110  #: of a line above a figure, which more would leave (by hand)
_WAITING = "gainsboro"
_UNKNOWN = "darkgrey"
_CRITICAL = "black"
_LATE = "magenta"
_NEVER_SET = "lime"
_FAR = 1.15  #: of the time of the slowest point, up to which the bound is drawn
_HEIGHT = 0.8  #: of a bar, where ranks are 1 apart
_COLUMNS = 4  #: stages side by side in the figure of curves


def page_file(name: str) -> str:
    """Return the text of a file that pages are made of; the service's dashboard has `theme.css` and
    `charts.js` too.
    """
    return (files("perseus_planner.views") / "web" / name).read_text(encoding="utf-8")


def check_figure_path(path: Path, name: str) -> None:
    """Check early that `save_figure` can write to `path`, which error texts call `name`.

    Raises:
        UsageError: If the path has an unknown ending, or matplotlib is not installed.
    """
    if path.suffix[1:].lower() not in FORMATS:
        endings = ", ".join(f".{ending}" for ending in FORMATS)
        raise UsageError(
            f"{name} {path}: figures are written as {endings}; end the name with one of them"
        )
    try:
        import matplotlib  # noqa: F401  # only to see whether it is installed
    except ImportError as error:
        raise UsageError(f"{name} needs matplotlib, which is not installed; {INSTALL}") from error


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` to `path`, in the format of its ending. Equal figures give equal bytes.

    Raises:
        UsageError: If the file cannot be written.
    """
    from matplotlib import rc_context

    kind = path.suffix[1:].lower()
    with replacing(path, UsageError) as file, rc_context({"svg.hashsalt": "perseus-planner"}):
        figure.savefig(file, format=kind, dpi=150, metadata=_METADATA[kind])


def draw_frontier(chart: FrontierChart) -> Figure:
    """Draw the bound as a curve, with the points beside it.

    Raises:
        UsageError: If the chart has no frontier.
    """
    from matplotlib.figure import Figure

    if not chart.times_s:
        # Other planners and points have a meaning beside a bound only.
        raise UsageError("--figure points: needs a frontier; name one, or add it with --beside")
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    # The bound may go on to many times the iteration time: its part near the points is drawn.
    end_s = _FAR * max(point.time_s for point in chart.points)
    count = sum(time_s <= end_s for time_s in chart.times_s)
    label = "bound: least energy of any plan"
    series = _series_colours()
    # The first kind lies on top, so that the own plan is never hidden.
    kinds = list(_LOOKS)
    bound = series[_LOOKS["landmark"][1]]
    axes.plot(chart.times_s[:count], chart.energies_j[:count], color=bound, label=label, zorder=1)
    peers = [point.name for point in chart.points if point.kind == "peer"]
    for point in sorted(chart.points, key=lambda point: kinds.index(point.kind)):
        # Other planners differ by colour, as they have one marker.
        marker, colour = _LOOKS[point.kind]
        if point.kind == "peer":
            colour = _PEERS[peers.index(point.name) % len(_PEERS)]
        axes.plot(
            point.time_s,
            point.energy_j,
            marker,
            color=series[colour],
            label=_label(point),
            zorder=3 + len(kinds) - kinds.index(point.kind),
        )
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("energy per iteration, all GPUs (J)")
    axes.set_title(_wrapped(chart.title, *(f"Left out: {reason}" for reason in chart.left_out)))
    axes.title.set_fontsize("small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _series_colours() -> dict[int, str]:
    """Return number of a series -> its colour on the pages, by the light theme, which is first."""
    series = re.findall(r"--series-(\d): (#[0-9a-f]{6})", page_file("theme.css"))
    return {int(number): colour for number, colour in reversed(series)}


def _wrapped(*lines: str) -> str:
    """Return a title none of whose lines leaves the figure."""
    parts = chain.from_iterable(line.splitlines() for line in lines)
    return "\n".join(fill_lines(part, _TITLE_CHARACTERS) for part in parts)


def _label(point: IterationPoint) -> str:
    return f"{point.name} ({point.origin})"


def draw_gantt(charts: Sequence[GanttChart], control: str, by: str = "clock") -> Figure:
    """Draw iterations below each other on one time axis: a row for each rank, a bar for each
    computation.

    Waiting is grey. A black line below a bar marks a critical path. A magenta line through a bar
    ends where its clock was set late; a green one means that its clock was never set.

    Args:
        charts: the iterations, at least one.
        control: what is set, as in a profile; labels the colour scale.
        by: what the bars are coloured by, "power" or "clock".
    """
    shades = [[_shades(lane, by) for lane in chart.lanes] for chart in charts]
    # All charts share one scale, so that colours can be compared between them.
    known_shades = [
        shade for of_chart in shades for lane in of_chart for shade in lane if shade is not None
    ]
    colours = _colour_scale(known_shades or [0])
    figure, rows = _stack_axes(charts)
    for axes, chart, values in zip(rows, charts, shades, strict=True):
        _draw_chart(axes, chart, values, colours)
    # The longest chart sets the axis, so that lengths can be compared as well.
    last_us = max(
        max(chart.time_us, *(sum(lane.gaps_us + lane.times_us) for lane in chart.lanes))
        for chart in charts
    )
    rows[-1].set_xlim(0.0, last_us / 1e6)
    rows[-1].set_xlabel("time (s)")
    clock = {"clock": "clock", "power-limit": "power limit", "observed": "observed clock"}[control]
    label = (
        "power of all GPUs of the rank (W)" if by == "power" else f"{clock} ({unit_of(control)})"
    )
    figure.colorbar(colours, ax=rows, label=label)
    _add_legend(figure, [lane for chart in charts for lane in chart.lanes])
    return figure


def _colour_scale(values: Collection[float]) -> ScalarMappable:
    """Return a scale from the lowest to the highest of `values`, in the colours of the pages."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    # The light theme comes first in the file.
    stops = re.findall(r"--scale-\d: (#[0-9a-f]{6})", page_file("theme.css"))[:5]
    map_ = LinearSegmentedColormap.from_list("planner", stops)
    # One value alone would be a scale without length.
    return ScalarMappable(Normalize(min(values), max(max(values), min(values) + 1)), map_)


def _stack_axes(charts: Sequence[GanttChart]) -> tuple[Figure, list[Axes]]:
    """Return axes below each other that share their time axis, as high as their charts have
    ranks.
    """
    from matplotlib.figure import Figure

    ranks = [len(chart.lanes) for chart in charts]
    figure = Figure(
        figsize=(11.0, 1.2 + sum(0.7 + 0.3 * count for count in ranks)), layout="constrained"
    )
    rows = figure.subplots(
        len(charts), 1, sharex=True, squeeze=False, height_ratios=[count + 1 for count in ranks]
    )
    return figure, list(rows[:, 0])


def _shades(lane: Lane, by: str) -> Sequence[int | None]:
    """Return the values that the bars are coloured by; None for a bar without one."""
    if by == "clock":
        return lane.clocks
    return lane.powers_w or [None] * len(lane.times_us)


def _draw_chart(
    axes: Axes, chart: GanttChart, shades: Sequence[Sequence[int | None]], colours: ScalarMappable
) -> None:
    for row, (lane, values) in enumerate(zip(chart.lanes, shades, strict=True)):
        spans = spans_s(lane)
        # Bars without a value stay on the chart, in a colour that the scale does not have.
        fill = [_UNKNOWN if value is None else colours.to_rgba(np.array(value)) for value in values]
        extent = (row - _HEIGHT / 2, _HEIGHT)
        # Waiting is behind all bars, so it shows where none is.
        axes.broken_barh([(0.0, chart.time_us / 1e6)], extent, facecolors=_WAITING)
        axes.broken_barh(spans, extent, facecolors=fill, edgecolors="black", linewidth=0.2)
        # Bars are small in large pipelines, so marks are lines across them.
        critical = [
            span for span, spare in zip(spans, lane.spare_us or (), strict=False) if spare == 0
        ]
        _draw_lines(axes, row + _HEIGHT / 2, critical, _CRITICAL)
        late = list(zip(spans, lane.late_us or (), strict=False))
        _draw_lines(
            axes,
            row,
            [(span[0], us / 1e6) for span, us in late if us is not None and us != NEVER],
            _LATE,
        )
        _draw_lines(axes, row, [span for span, us in late if us == NEVER], _NEVER_SET)
    # Rank 0 on top, with room below for the line of a critical path.
    axes.set_ylim(len(chart.lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(chart.lanes)))
    axes.set_ylabel("rank")
    title = _wrapped(f"{chart.name}, {chart.note} ({chart.origin})")
    axes.set_title(title, fontsize="small")


def _draw_lines(axes: Axes, row: float, spans: Sequence[tuple[float, float]], colour: str) -> None:
    ends = [start + length for start, length in spans]
    axes.hlines([row] * len(spans), [start for start, _ in spans], ends, colors=colour, linewidth=2)


def spans_s(lane: Lane) -> list[tuple[float, float]]:
    """Return (start, duration) of each bar of the lane, seconds."""
    steps_us = list(accumulate(chain.from_iterable(zip(lane.gaps_us, lane.times_us, strict=True))))
    return [
        (start / 1e6, time / 1e6) for start, time in zip(steps_us[::2], lane.times_us, strict=True)
    ]


def _add_legend(figure: Figure, lanes: Iterable[Lane]) -> None:
    """Explain what the colour scale does not."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [Patch(color=_WAITING, label="waiting")]
    # Only what the charts have is explained; 0 stands for any clock that was set late.
    late = {
        us if us == NEVER else 0 for lane in lanes for us in lane.late_us or () if us is not None
    }
    lines = {
        "on a critical path": (_CRITICAL, any(lane.spare_us is not None for lane in lanes)),
        "until its clock was set, late": (_LATE, 0 in late),
        "its clock was never set": (_NEVER_SET, NEVER in late),
    }
    handles += [
        Line2D([], [], color=colour, linewidth=2, label=text)
        for text, (colour, used) in lines.items()
        if used
    ]
    handles.append(Patch(color=_UNKNOWN, label="unknown, or of fixed time"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize="small")


def draw_curves(profile: Profile) -> Figure:
    """Draw energy over time of each computation, in axes for each stage: measured points, their
    errors and the hull.
    """
    from matplotlib.figure import Figure

    stages = profile.stages
    # As many columns as fit beside each other on a page.
    rows = ceil(stages / _COLUMNS)
    columns = min(stages, _COLUMNS)
    figure = Figure(figsize=(1.0 + 3.4 * columns, 0.8 + 2.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for curve in curves_of(profile):
        _draw_curve(grid[curve.stage], curve)
    # The grid has places for stages that do not exist.
    for stage, axes in enumerate(grid):
        axes.set_visible(stage < stages)
        axes.set_title(f"stage {stage}", fontsize="small")
        axes.grid(alpha=0.3)
        if stage < stages:
            axes.legend(fontsize="x-small")
    figure.supxlabel("time of a computation (s)")
    figure.supylabel("energy (J)")
    figure.suptitle(
        f"{profile.gpu or 'unknown GPU'}, {profile_of_origin(profile.origin)}\n"
        "all GPUs of a stage; lines: the hull that plans use",
        fontsize="medium",
    )
    return figure


def _draw_curve(axes: Axes, curve: MeasuredCurve) -> None:
    # The hull is what plans use; points above it are drawn too.
    by_clock = {point.clock: point for point in curve.points}
    hull = [by_clock[clock] for clock in curve.hull]
    (line,) = axes.plot(
        [point.time_s for point in hull], [point.energy_j for point in hull], linewidth=1
    )
    axes.errorbar(
        [point.time_s for point in curve.points],
        [point.energy_j for point in curve.points],
        xerr=[point.time_stderr_s or 0.0 for point in curve.points],
        yerr=[point.energy_stderr_j or 0.0 for point in curve.points],
        fmt=".",
        color=line.get_color(),
        label=curve.computation,
    )
