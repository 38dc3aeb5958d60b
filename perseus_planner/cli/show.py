"""`planner show`: what is in a file or a run folder, as text, as a figure, as a trace."""

from __future__ import annotations

from pathlib import Path

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError


@click.command(
    epilog=console.examples(
        "planner show frontier.npz --plot frontier.png",
        "planner show plan.yaml --plot plan.svg",
        "planner show plan.yaml --trace plan.json",
        "planner show run --plot run.png --trace run.json",
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
    "--trace",
    type=console.PATH,
    callback=console.writable,
    metavar="TRACE",
    help="Timeline of a plan or run to write as well, for Perfetto (ui.perfetto.dev) or chrome://tracing: .json.",
)
@console.as_json
def show(file: Path, plot: Path | None, trace: Path | None, as_json: bool) -> None:
    """Show a frontier, the timeline of a plan, or what a training run measured beside its plan.

    FILE is what `planner solve` or `planner plan` wrote, or the folder that the ranks of a training run wrote. A run
    may go on meanwhile. Its figure is of the last iteration that ran as planned on all ranks, its trace of all whose
    computations were kept.
    """
    if plot is not None:
        from perseus_planner.plotting import check_figure_path

        check_figure_path(plot, "--plot")
    if trace is not None:
        console.refuse_same([file], trace, "--trace")
    if file.is_dir():
        _show_run(file, plot, trace, as_json)
    elif _is_frontier(file):
        _show_frontier(file, plot, trace, as_json)
    else:
        _show_plan(file, plot, trace, as_json)


def _is_frontier(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"  # a zip archive, as .npz is
    except OSError as error:
        from perseus_planner.documents import unreadable

        raise UsageError(unreadable(path, error)) from error


def _show_frontier(file: Path, plot: Path | None, trace: Path | None, as_json: bool) -> None:
    if trace is not None:
        raise UsageError(f"--trace {trace}: {file} is a frontier, which has no timeline; name a plan or a run")
    from perseus_planner.frontier import Frontier
    from perseus_planner.summary import summarize_frontier
    from perseus_planner.tables import frontier_text

    frontier = Frontier.load(file)
    if plot is not None:
        from perseus_planner.plotting import draw_frontier, save_figure

        save_figure(draw_frontier(frontier), plot)
    summary = summarize_frontier(frontier)
    console.report(summary, frontier_text(summary), _written(plot), as_json=as_json)


def _show_plan(file: Path, plot: Path | None, trace: Path | None, as_json: bool) -> None:
    from perseus_planner.plan import Plan
    from perseus_planner.plan_summary import summarize_timeline
    from perseus_planner.tables import timeline_text

    plan = Plan.load(file)
    if plot is not None:
        from perseus_planner.plotting import draw_plan, save_figure

        save_figure(draw_plan(plan), plot)
    if trace is not None:
        from perseus_planner.plan_trace import trace_plan

        trace_plan(plan, trace)
    summary = summarize_timeline(plan)
    console.report(summary, timeline_text(summary), _written(plot, trace), as_json=as_json)


def _show_run(folder: Path, plot: Path | None, trace: Path | None, as_json: bool) -> None:
    from perseus_planner.runs.run import Run
    from perseus_planner.runs.summary import summarize_run
    from perseus_planner.runs.text import run_text

    run = Run.load(folder)
    if plot is not None:
        from perseus_planner.plotting import save_figure
        from perseus_planner.runs.drawing import draw_run

        save_figure(draw_run(run), plot)
    if trace is not None:
        from perseus_planner.runs.trace import trace_run

        trace_run(run, trace)
    summary = summarize_run(run)
    console.report(summary, run_text(summary), _written(plot, trace), as_json=as_json)


def _written(*files: Path | None) -> list[Path]:
    return [file for file in files if file is not None]
