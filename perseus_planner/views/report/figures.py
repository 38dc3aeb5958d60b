"""The figures of a report as files: the same values, drawn by matplotlib, which is imported only when one is drawn."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, chain
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.errors import UsageError
from perseus_planner.views.plotting import clock_label, colours_of, empty_axes
from perseus_planner.views.report.curves import Curve, curves
from perseus_planner.views.report.points import Point, Points, points
from perseus_planner.views.report.timelines import Lane, Timeline, timelines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from perseus_planner.views.report.sources import Sources

_MARKERS = MappingProxyType({"baseline": "s", "plan": "*", "peer": "X", "run": "D", "landmark": "o"})
_WAITING, _UNKNOWN, _CRITICAL = "gainsboro", "darkgrey", "black"
_HEIGHT = 0.8  #: of a bar, where ranks are 1 apart
_COLUMNS = 4  #: of stages beside each other


def draw_points(sources: Sources) -> Figure:
    """The bound, with the points of plans, runs and other planners beside it.

    Raises:
        UsageError: there is no frontier.
    """
    found = points(sources)
    if not found.times_s:
        raise UsageError("--figure points: shows a frontier, and there is none; name one, or add it with --beside")
    figure, axes = empty_axes(8.0, 5.0)
    axes.plot(found.times_s, found.energies_j, label="bound: least energy of any plan")
    for point in found.points:
        axes.plot(point.time_s, point.energy_j, _MARKERS[point.kind], label=_named(point))
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("energy of an iteration, all GPUs (J)")
    axes.set_title("\n".join(["Frontier, and plans beside it", *(f"Left out: {each}" for each in found.left_out)]))
    axes.title.set_fontsize("small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _look_at(axes, found)
    return figure


def _look_at(axes: Axes, found: Points) -> None:
    """Show where the points are; the bound may go on for many times as long."""
    times_s = [point.time_s for point in found.points]
    end_s = min(found.times_s[-1], max(times_s) + 0.5 * (max(times_s) - min(times_s)))
    if end_s > min(times_s):
        near_j = [energy_j for time_s, energy_j in zip(found.times_s, found.energies_j, strict=True) if time_s <= end_s]
        energies_j = [*near_j, *(point.energy_j for point in found.points)]
        axes.set_xlim(min(times_s) - (margin := 0.05 * (end_s - min(times_s))), end_s + margin)
        height_j = max(energies_j) - min(energies_j) or 1.0
        axes.set_ylim(min(energies_j) - 0.05 * height_j, max(energies_j) + 0.05 * height_j)


def _named(point: Point) -> str:
    return f"{point.name} ({point.origin})"


def draw_timelines(sources: Sources, by: str) -> Figure:
    """The pipeline before, as planned and as it ran, to one scale: a row for each rank, coloured by power or by clock.

    Waiting is grey; a black line is below what is on a critical path.

    Args:
        sources: what it is drawn from.
        by: "power" or "clock".

    Raises:
        UsageError: there is no plan, run or frontier.
    """
    found = timelines(sources)
    if not found.timelines:
        raise UsageError(
            "; ".join(found.left_out) or "--figure timeline: shows a plan, a run or a frontier, and there is none"
        )
    control = (sources.any_plan or sources.profile).control  # type: ignore[union-attr]  # what has a timeline has either
    shades = [[_shades(lane, by) for lane in each.lanes] for each in found.timelines]
    known = [shade for each in shades for lane in each for shade in lane if shade is not None]
    colours = colours_of(known or [0])
    figure, rows = _stacked(found.timelines)
    for axes, timeline, values in zip(rows, found.timelines, shades, strict=True):
        _draw_timeline(axes, timeline, values, colours)
    rows[-1].set_xlabel("time (s)")
    label = "power of all GPUs of the rank (W)" if by == "power" else clock_label(control)
    figure.colorbar(colours, ax=rows, label=label)
    _explain(figure, found.timelines)
    return figure


def _stacked(shown: Sequence[Timeline]) -> tuple[Figure, list[Axes]]:
    """Axes below each other, as high as they have ranks, of one time."""
    from matplotlib.figure import Figure

    ranks = [len(each.lanes) for each in shown]
    figure = Figure(figsize=(11.0, 1.2 + sum(0.7 + 0.3 * count for count in ranks)), layout="constrained")
    rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=[count + 1 for count in ranks])
    return figure, list(rows[:, 0])


def _shades(lane: Lane, by: str) -> Sequence[int | None]:
    """By what each bar is coloured; None: it has none."""
    if by == "clock":
        return lane.clocks
    return lane.powers_w or [None] * len(lane.times_us)


def _draw_timeline(
    axes: Axes, timeline: Timeline, shades: Sequence[Sequence[int | None]], colours: ScalarMappable
) -> None:
    for row, (lane, values) in enumerate(zip(timeline.lanes, shades, strict=True)):
        spans = spans_s(lane)
        fill = [_UNKNOWN if value is None else colours.to_rgba(np.array(value)) for value in values]
        place = (row - _HEIGHT / 2, _HEIGHT)
        axes.broken_barh([(0.0, timeline.time_us / 1e6)], place, facecolors=_WAITING)
        axes.broken_barh(spans, place, facecolors=fill, edgecolors="black", linewidth=0.2)
        critical = [span for span, spare in zip(spans, lane.spare_us or (), strict=False) if spare == 0]
        starts, ends = [begin for begin, _ in critical], [begin + length for begin, length in critical]
        axes.hlines([row + _HEIGHT / 2] * len(critical), starts, ends, colors=_CRITICAL, linewidth=2)
    axes.set_xlim(left=0.0)
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(timeline.lanes)))
    axes.set_ylabel("rank")
    axes.set_title(f"{timeline.name}: {timeline.note} ({timeline.origin})", fontsize="small")


def spans_s(lane: Lane) -> list[tuple[float, float]]:
    """(start, duration) of each of its bars, seconds."""
    steps_us = list(accumulate(chain.from_iterable(zip(lane.gaps_us, lane.times_us, strict=True))))
    return [(start / 1e6, time / 1e6) for start, time in zip(steps_us[::2], lane.times_us, strict=True)]


def _explain(figure: Figure, shown: Iterable[Timeline]) -> None:
    """What has no colour of the scale."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [Patch(color=_WAITING, label="waiting")]
    if any(lane.spare_us is not None for each in shown for lane in each.lanes):
        handles.append(Line2D([], [], color=_CRITICAL, linewidth=2, label="on a critical path"))
    handles.append(Patch(color=_UNKNOWN, label="not known, or of fixed time"))
    figure.legend(handles=handles, loc="outside lower right", ncols=3, fontsize="small")


def draw_curves(sources: Sources) -> Figure:
    """Energy over time of each computation, a drawing for each stage: measured points, their errors and the hull.

    Raises:
        UsageError: there is no profile.
    """
    from matplotlib.figure import Figure

    profile = sources.profile
    if profile is None:
        raise UsageError("--figure curves: shows a profile, and there is none; name one, or add it with --beside")
    rows = ceil(profile.stages / _COLUMNS)
    columns = min(profile.stages, _COLUMNS)
    figure = Figure(figsize=(1.0 + 3.4 * columns, 0.8 + 2.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for curve in curves(profile):
        _draw_curve(grid[curve.stage], curve)
    for stage, axes in enumerate(grid):
        axes.set_visible(stage < profile.stages)
        axes.set_title(f"stage {stage}", fontsize="small")
        axes.grid(alpha=0.3)
        if stage < profile.stages:
            axes.legend(fontsize="x-small")
    figure.supxlabel("time of a computation (s)")
    figure.supylabel("energy (J)")
    figure.suptitle(
        f"{profile.gpu or 'GPU not named'}, {profile.origin}\nall GPUs of a stage; lines: the hull that is planned on",
        fontsize="medium",
    )
    return figure


def _draw_curve(axes: Axes, curve: Curve) -> None:
    of_clock = {point.clock: point for point in curve.points}
    hull = [of_clock[clock] for clock in curve.hull]
    (line,) = axes.plot([point.time_s for point in hull], [point.energy_j for point in hull], linewidth=1)
    axes.errorbar(
        [point.time_s for point in curve.points],
        [point.energy_j for point in curve.points],
        xerr=[point.time_stderr_s or 0.0 for point in curve.points],
        yerr=[point.energy_stderr_j or 0.0 for point in curve.points],
        fmt=".",
        color=line.get_color(),
        label=curve.computation,
    )


FIGURES: Mapping[str, Callable[[Sources], Figure]] = MappingProxyType(
    {
        "points": draw_points,
        "timeline": partial(draw_timelines, by="power"),
        "timeline-clock": partial(draw_timelines, by="clock"),
        "curves": draw_curves,
    }
)
"""By the names that `planner show --figure` knows."""
