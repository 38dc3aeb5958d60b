"""`planner show`: the content of a file or a run folder as text, as a figure, or as a Perfetto
trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.run import Run

#: the keys of `views.report.FIGURES`, which is not loaded for --help
FIGURES = ("points", "timeline", "timeline-clock", "curves")


class _View(NamedTuple):
    """One file: its summary and text, and functions for its figure and its trace (None if it has
    no timeline).
    """

    summary: Any
    text: str
    draw: Callable[[], Figure]
    write_trace: Callable[[Path, tuple[Path, ...]], None] | None


@click.command(
    epilog=console.examples(
        "planner show frontier.npz --plot frontier.png",
        "planner show plan.yaml --plot plan.svg --perfetto plan.json",
        "planner show frontier.npz --beside plan.yaml --plot before-after.pdf --figure timeline",
        "planner show run --plot run.png",
        "planner show profile.yaml --plot curves.png",
    )
)
@click.argument("file", type=console.PATH)
@click.option(
    "--plot",
    type=console.OutputFile(),
    metavar="FIGURE",
    help="Also write a figure: .png, .svg or .pdf.",
)
@click.option(
    "--figure",
    type=click.Choice(FIGURES),
    help="Choose a figure of `planner report`: the frontier with plans and other planners, the "
    "iteration before and "
    "after coloured by power or by clock, or energy over time of each computation.  [default: FILE "
    "alone]",
)
@click.option(
    "--beside",
    type=console.PATH,
    multiple=True,
    help="Add a frontier, plan, run or profile to the --figure; can be repeated. A frontier adds "
    "the iteration with "
    "all clocks at maximum to the --perfetto trace of a plan.",
)
@click.option(
    "--perfetto",
    type=console.OutputFile(".json"),
    metavar="TRACE",
    help="Also write the timeline of a plan or run for Perfetto (ui.perfetto.dev) or "
    "chrome://tracing: .json.",
)
@console.as_json
def show(
    file: Path,
    plot: Path | None,
    figure: str | None,
    beside: tuple[Path, ...],
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Show a profile, a frontier, a plan with its timeline, or a training run beside its plan.

    FILE is a profile, .yaml or .csv, a file that `planner solve`, `planner plan` or
    `planner inference plan` wrote, or a run folder. The run may still be going on. Its figure shows
    the last iteration that ran as planned on all ranks; its trace has all iterations whose
    computations were kept.
    """
    if figure is not None and plot is None:
        raise UsageError("--figure: chooses what --plot draws; add --plot FIGURE")
    if beside and figure is None and perfetto is None:
        raise UsageError("--beside: adds files to --figure or --perfetto; add --figure NAME")
    if plot is not None:
        from perseus_planner.views.figures import check_figure_path

        check_figure_path(plot, "--plot")
    if perfetto is not None:
        console.refuse_same([file, *beside], perfetto, "--perfetto")
    view = _view(file)
    if perfetto is not None and view.write_trace is None:
        raise UsageError(f"--perfetto {perfetto}: {file} has no timeline; name a plan or a run")
    if plot is not None:
        from perseus_planner.views.figures import save_figure

        save_figure(view.draw() if figure is None else _draw(figure, (file, *beside)), plot)
    if perfetto is not None and view.write_trace is not None:
        view.write_trace(perfetto, beside)
    written = [path for path in (plot, perfetto) if path is not None]
    console.report(view.summary, view.text, written, as_json=as_json)


def _draw(name: str, files: tuple[Path, ...]) -> Figure:
    from perseus_planner.views.report import FIGURES
    from perseus_planner.views.sources import read_sources

    return FIGURES[name](read_sources(files))


def _view(path: Path) -> _View:
    """Read any kind of file; `Plan.load` says why it refuses a file that is not recognized."""
    from perseus_planner.base.documents import kind_of

    readers = {
        "run": _run_view,
        "frontier": _frontier_view,
        "profile": _profile_view,
        "inference": _pools_view,
    }
    kind = kind_of(path)
    if kind is None and path.suffix.lower() not in (".yaml", ".yml"):
        raise UsageError(
            f"{path}: is not a file of the planner; name a profile, a frontier, a plan or a run "
            "folder"
        )
    return readers.get(kind or "", _plan_view)(path)


def _profile_view(file: Path) -> _View:
    from dataclasses import replace

    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.views.profiles import profile_text, summarize_profile

    beside = next(
        (path for path in map(file.with_suffix, (".yaml", ".yml")) if path.exists()), None
    )
    is_table = (
        file.suffix.lower() == ".csv" and beside is None
    )  # which does not hold the power of a waiting GPU
    profile = Profile.load(file, blocking_power_w=0.0) if is_table else Profile.load(beside or file)
    summary = summarize_profile(profile)
    if is_table:
        summary = replace(summary, context=replace(summary.context, blocking_power_w=None))

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_curves

        return draw_curves(profile)

    return _View(summary, profile_text(summary), draw, None)


def _frontier_view(file: Path) -> _View:
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.views.frontier import chart_frontier, frontier_text, summarize_frontier

    frontier = Frontier.load(file)
    summary = summarize_frontier(frontier)

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_frontier

        return draw_frontier(chart_frontier(frontier))

    return _View(summary, frontier_text(summary), draw, None)


def _plan_view(file: Path) -> _View:
    from perseus_planner.base.prefixes import si
    from perseus_planner.plans.plan import Plan
    from perseus_planner.views.plan import summarize_timeline, timeline_text
    from perseus_planner.views.traces import trace_plan

    plan = Plan.load(file)
    summary = summarize_timeline(plan)

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_gantt
        from perseus_planner.views.gantt import chart_plan

        chart = chart_plan(
            str(plan.schedule), plan, f"{si(plan.time_s, 's')}, {si(plan.energy_j, 'J', 5)}"
        )
        return draw_gantt([chart], plan.control)

    def write_trace(path: Path, beside: tuple[Path, ...]) -> None:
        from perseus_planner.cluster.baselines import all_maximum
        from perseus_planner.views.sources import read_sources

        frontier = read_sources((file, *beside)).frontier if beside else None
        trace_plan(
            plan, path, None if frontier is None else frontier.plan_of(all_maximum(frontier.dag))
        )

    return _View(summary, timeline_text(summary), draw, write_trace)


def _pools_view(file: Path) -> _View:
    from perseus_planner.inference.plan import InferencePlan
    from perseus_planner.views.inference import plan_figure, plan_text, plan_view

    summary = plan_view(InferencePlan.load(file))
    return _View(summary, plan_text(summary), lambda: plan_figure(summary), None)


def _run_view(folder: Path) -> _View:
    from perseus_planner.runs.run import Run
    from perseus_planner.views.run import summarize_run
    from perseus_planner.views.run_text import run_text
    from perseus_planner.views.traces import trace_run

    run = Run.load(folder)
    if run.autopilot is not None and not run.versions:
        return _unplanned_view(run, run.autopilot)
    summary = summarize_run(run)

    def draw() -> Figure:
        from perseus_planner.views.figures import draw_gantt
        from perseus_planner.views.gantt import chart_run_beside_plan

        return draw_gantt(chart_run_beside_plan(run), summary.context.control)

    return _View(summary, run_text(summary), draw, lambda path, _: trace_run(run, path))


def _unplanned_view(run: Run, status: AutopilotStatus) -> _View:
    from perseus_planner.views.run_text import summarize_unplanned, unplanned_text

    summary = summarize_unplanned(run, status)

    def draw() -> Figure:
        raise UsageError(
            f"{run.folder}: was trained without a plan, so there is no figure of it; leave --plot "
            "out"
        )

    return _View(summary, unplanned_text(summary), draw, None)
