"""Figures of a frontier and of a plan. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.errors import UsageError
from perseus_planner.files import replacing
from perseus_planner.plans.replay import Timeline, replay
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.views.tables import origin_text

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.frontier import Frontier

# What keeps the time of day out of the file, so that equal input gives equal bytes.
_METADATA: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
FORMATS = tuple(_METADATA)  #: of figure files, as their names end
_COLOURS = "plasma"  #: the brighter, the faster
_HEIGHT = 0.8  #: of a bar, where stages are 1 apart


def check_figure_path(path: Path, name: str) -> None:
    """Refuse early what `save_figure` could not write; `name` is what to call the path.

    Raises:
        UsageError: the name ends with no known format, or matplotlib is not installed.
    """
    if path.suffix[1:].lower() not in FORMATS:
        known = ", ".join(f".{each}" for each in FORMATS)
        raise UsageError(f"{name} {path}: figures are written as {known}; end the name with one of them")
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        remedy = "install it with: pip install 'perseus-planner[plot]'"
        raise UsageError(f"{name} needs matplotlib, which is not installed; {remedy}") from error


def draw_frontier(frontier: Frontier) -> Figure:
    """The bound as a curve, with all clocks at maximum, the fastest point and that of least energy marked."""
    figure, axes = empty_axes(7.0, 4.5)
    axes.plot(frontier.times_s, frontier.energies_j, label="bound: least energy of any plan")
    axes.plot(frontier.baseline_time_s, frontier.baseline_energy_j, "s", label="all clocks at maximum")
    for time_s, marker, label in (
        (frontier.min_time_s, ">", "fastest"),
        (frontier.least_energy_time_s, "o", "least energy"),
    ):
        axes.plot(time_s, frontier.bound_j(time_s), marker, label=label)
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("energy of an iteration, all GPUs (J)")
    axes.set_title(_title(f"Frontier of {frontier.schedule}", frontier.profile.origin))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_plan(plan: Plan) -> Figure:
    """One iteration as a Gantt chart: a row per rank, a bar per computation, coloured by clock; waiting is blank."""
    colours = colours_of(plan.clocks.values())
    figure, axes = empty_axes(10.0, 1.6 + 0.4 * len(plan.schedule.ranks))
    timeline = replay(plan)
    for row, rank in enumerate(plan.schedule.ranks):
        _draw_operations(axes, plan, timeline, row)
        names = [str(computation) for computation in rank]
        spans = [timeline.spans[name] for name in names]
        bars = [(span.start_s, span.end_s - span.start_s) for span in spans]
        fill = colours.to_rgba(np.array([plan.clocks[name] for name in names]))
        axes.broken_barh(bars, (row - _HEIGHT / 2, _HEIGHT), facecolors=fill, edgecolors="black", linewidth=0.3)
    axes.set_xlim(0, max(timeline.time_s, *(span.end_s for span in timeline.spans.values())))
    axes.set_ylim(len(plan.schedule.ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(plan.schedule.ranks)))
    axes.set_xlabel("time (s)")
    axes.set_ylabel("rank")
    axes.set_title(_title(f"{plan.schedule}: {plan.time_s:.4g} s, {plan.energy_j:.5g} J", plan.origin))
    figure.colorbar(colours, ax=axes, label=clock_label(plan.control))
    return figure


def colours_of(clocks: Collection[float]) -> ScalarMappable:
    """A scale from the lowest of `clocks` to the highest; one clock alone gets a scale as well."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(min(clocks), max(max(clocks), min(clocks) + 1)), _COLOURS)


def clock_label(control: str) -> str:
    """What such a scale shows."""
    label = {"clock": "clock", "power-limit": "power limit", "observed": "observed clock"}[control]
    return f"{label} ({unit_of(control)})"


def _draw_operations(axes: Axes, plan: Plan, timeline: Timeline, row: int) -> None:
    """Fixed operations, in grey."""
    spans = [timeline.spans[str(each)] for each in plan.iteration.operations if each.rank == row]
    bars = [(span.start_s, span.end_s - span.start_s) for span in spans]
    if bars:
        axes.broken_barh(bars, (row - _HEIGHT / 2, _HEIGHT), facecolors="lightgrey", edgecolors="black", linewidth=0.3)


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` to `path`, in the format that its name ends with; equal figures give equal bytes.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib import rc_context

    kind = path.suffix[1:].lower()
    with replacing(path, UsageError) as file, rc_context({"svg.hashsalt": "perseus-planner"}):
        figure.savefig(file, format=kind, dpi=150, metadata=_METADATA[kind])


def empty_axes(width_in: float, height_in: float) -> tuple[Figure, Axes]:
    """A figure of that size, inches, and what to draw on."""
    # Not through pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.subplots()


def _title(what: str, origin: str) -> str:
    return f"{what}\n{origin_text(origin)}"
