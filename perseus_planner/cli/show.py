"""`planner show`: what is in a file or a run folder, as text, as a figure, as a Perfetto trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure

#: of views/report/figures.py, which is not loaded for --help
FIGURES = ("points", "timeline", "timeline-clock", "curves")


class _Shown(NamedTuple):
    """What `show` says of one file."""

    summary: Any
    text: str
    draw: Callable[[], Figure]  #: the figure of this file alone
    perfetto: Callable[[Path], None] | None  #: None: it has no timeline


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
    type=console.PATH,
    callback=console.writable,
    metavar="FIGURE",
    help="Figure to write as well: .png, .svg or .pdf.",
)
@click.option(
    "--figure",
    type=click.Choice(FIGURES),
    help="Which figure of `planner report`: the frontier with plans and other planners beside it, the iteration before "
    "and after coloured by power or by clock, or energy over time of each computation.  [default: FILE alone]",
)
@click.option(
    "--beside",
    type=console.PATH,
    multiple=True,
    metavar="FILE",
    help="What --figure is to show as well: a frontier, plans, runs, or the profile.",
)
@click.option(
    "--perfetto",
    type=console.PATH,
    callback=console.writable,
    metavar="TRACE",
    help="Timeline of a plan or run to write as well, for Perfetto (ui.perfetto.dev) or chrome://tracing: .json.",
)
@console.as_json
def show(
    file: Path, plot: Path | None, figure: str | None, beside: tuple[Path, ...], perfetto: Path | None, as_json: bool
) -> None:
    """Show a profile, a frontier, the timeline of a plan, or what a training run measured beside its plan.

    FILE is a profile.yaml, what `planner solve` or `planner plan` wrote, or the folder that the ranks of a training run
    wrote. A run may go on meanwhile. Its figure is of the last iteration that ran as planned on all ranks, its trace of
    all whose computations were kept.
    """
    if figure is not None and plot is None:
        raise UsageError("--figure: says what --plot draws; give --plot FIGURE with it")
    if beside and figure is None:
        raise UsageError("--beside: is for --figure; give --figure with it")
    if plot is not None:
        from perseus_planner.views.plotting import check_figure_path

        check_figure_path(plot, "--plot")
    if perfetto is not None:
        console.refuse_same([file, *beside], perfetto, "--perfetto")
    shown = _reader(file)(file)
    if perfetto is not None and shown.perfetto is None:
        raise UsageError(f"--perfetto {perfetto}: {file} has no timeline; name a plan or a run")
    if plot is not None:
        from perseus_planner.views.plotting import save_figure

        save_figure(shown.draw() if figure is None else _figure(figure, (file, *beside)), plot)
    if perfetto is not None and shown.perfetto is not None:
        shown.perfetto(perfetto)
    written = [each for each in (plot, perfetto) if each is not None]
    console.report(shown.summary, shown.text, written, as_json=as_json)


def _figure(name: str, files: tuple[Path, ...]) -> Figure:
    from perseus_planner.views.report.figures import FIGURES
    from perseus_planner.views.report.sources import read_sources

    return FIGURES[name](read_sources(files))


def _reader(path: Path) -> Callable[[Path], _Shown]:
    """Return the function that reads this kind of file; `Plan.load` says why it refuses any other file."""
    from perseus_planner.documents import kind_of

    return {"run": _run, "frontier": _frontier, "profile": _profile}.get(kind_of(path) or "", _plan)


def _profile(file: Path) -> _Shown:
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.views.summary import summarize_profile
    from perseus_planner.views.tables import profile_text

    profile = Profile.load(file)
    summary = summarize_profile(profile)

    def draw() -> Figure:
        from perseus_planner.views.report.figures import draw_curves
        from perseus_planner.views.report.sources import Sources

        return draw_curves(Sources(profile))

    return _Shown(summary, profile_text(summary), draw, None)


def _frontier(file: Path) -> _Shown:
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.views.summary import summarize_frontier
    from perseus_planner.views.tables import frontier_text

    frontier = Frontier.load(file)
    summary = summarize_frontier(frontier)

    def draw() -> Figure:
        from perseus_planner.views.plotting import draw_frontier

        return draw_frontier(frontier)

    return _Shown(summary, frontier_text(summary), draw, None)


def _plan(file: Path) -> _Shown:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.views.plan_summary import summarize_timeline
    from perseus_planner.views.plan_trace import trace_plan
    from perseus_planner.views.tables import timeline_text

    plan = Plan.load(file)
    summary = summarize_timeline(plan)

    def draw() -> Figure:
        from perseus_planner.views.plotting import draw_plan

        return draw_plan(plan)

    return _Shown(summary, timeline_text(summary), draw, lambda path: trace_plan(plan, path))


def _run(folder: Path) -> _Shown:
    from perseus_planner.runs.run import Run
    from perseus_planner.views.run_summary import summarize_run
    from perseus_planner.views.run_text import run_text
    from perseus_planner.views.run_trace import trace_run

    run = Run.load(folder)
    summary = summarize_run(run)

    def draw() -> Figure:
        from perseus_planner.views.run_drawing import draw_run

        return draw_run(run)

    return _Shown(summary, run_text(summary), draw, lambda path: trace_run(run, path))
