"""The `planner` command.

Each command imports what it needs when it runs, so that `planner --help` answers at once.
Exit codes: 0 done; 1 a fault of the planner; 2 something that the user can correct; 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path

import click

from perseus_planner import __version__
from perseus_planner.cli import console
from perseus_planner.cli.budget import budget
from perseus_planner.cli.calibrate import calibrate
from perseus_planner.cli.doctor import doctor
from perseus_planner.cli.estimate import estimate
from perseus_planner.cli.plan import plan
from perseus_planner.cli.profiling import profile
from perseus_planner.cli.report import report
from perseus_planner.cli.reset import reset
from perseus_planner.cli.serve import serve
from perseus_planner.cli.simulate import simulate
from perseus_planner.cli.solve import solve
from perseus_planner.cli.status import status
from perseus_planner.cli.straggler import straggler
from perseus_planner.errors import UsageError


@click.group(
    cls=console.Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=console.examples(
        "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml",
        "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
        "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
        "planner show plan.yaml",
    ),
)
@click.version_option(__version__, message="planner %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Plan one GPU clock per computation of pipeline-parallel training: the same speed, the least energy.

    Profile the stages, solve for the frontier of time and energy, and take the plan that you need from it. Each command
    explains itself with --help.
    """
    if context.invoked_subcommand not in ("doctor", "reset"):  # they look themselves, and say what they find
        _reset_what_is_left()


main.add_command(profile)
main.add_command(estimate)
main.add_command(solve)
main.add_command(plan)


@main.command(
    epilog=console.examples(
        "planner show frontier.npz --plot frontier.png",
        "planner show plan.yaml --plot plan.svg",
        "planner show run --plot run.png",
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
@console.as_json
def show(file: Path, plot: Path | None, as_json: bool) -> None:
    """Show a frontier, the timeline of a plan, or what a training run measured beside its plan.

    FILE is what `planner solve` or `planner plan` wrote, or the folder that the ranks of a training run wrote. A run
    may go on meanwhile. Its figure is of the last iteration that ran as planned on all ranks.
    """
    if plot is not None:
        from perseus_planner.plotting import check_figure_path

        check_figure_path(plot, "--plot")
    if file.is_dir():
        _show_run(file, plot, as_json)
    else:
        show_one = _show_frontier if _is_frontier(file) else _show_plan
        show_one(file, plot, as_json)


main.add_command(report)
main.add_command(calibrate)
main.add_command(simulate)
main.add_command(straggler)
main.add_command(status)
main.add_command(budget)
main.add_command(doctor)
main.add_command(reset)
main.add_command(serve)


def _reset_what_is_left() -> None:
    """Reset GPUs that processes which were killed have left set on this node; said on stderr."""
    from perseus_planner.gpu.holding.folder import has_records

    if not has_records():
        return
    from perseus_planner.errors import GpuError
    from perseus_planner.gpu.holding.journal import recover

    try:
        for recovery in recover():
            record, problem = recovery.record, recovery.problem
            done = "is reset" if problem is None else f"cannot be reset: {problem}"
            click.echo(f"planner: GPU {record.gpu} ({record.name}), left set by {record.owner}, {done}", err=True)
    except GpuError as error:
        click.echo(f"planner: {error}", err=True)


def _is_frontier(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"  # a zip archive, as .npz is
    except OSError as error:
        from perseus_planner.documents import unreadable

        raise UsageError(unreadable(path, error)) from error


def _show_frontier(file: Path, plot: Path | None, as_json: bool) -> None:
    from perseus_planner.frontier import Frontier
    from perseus_planner.summary import summarize_frontier
    from perseus_planner.tables import frontier_text

    frontier = Frontier.load(file)
    if plot is not None:
        from perseus_planner.plotting import draw_frontier, save_figure

        save_figure(draw_frontier(frontier), plot)
    summary = summarize_frontier(frontier)
    console.report(summary, frontier_text(summary), [plot] if plot else [], as_json=as_json)


def _show_plan(file: Path, plot: Path | None, as_json: bool) -> None:
    from perseus_planner.plan import Plan
    from perseus_planner.plan_summary import summarize_timeline
    from perseus_planner.tables import timeline_text

    plan = Plan.load(file)
    if plot is not None:
        from perseus_planner.plotting import draw_plan, save_figure

        save_figure(draw_plan(plan), plot)
    summary = summarize_timeline(plan)
    console.report(summary, timeline_text(summary), [plot] if plot else [], as_json=as_json)


def _show_run(folder: Path, plot: Path | None, as_json: bool) -> None:
    from perseus_planner.runs.run import Run
    from perseus_planner.runs.summary import summarize_run
    from perseus_planner.runs.text import run_text

    run = Run.load(folder)
    if plot is not None:
        from perseus_planner.plotting import save_figure
        from perseus_planner.runs.drawing import draw_run

        save_figure(draw_run(run), plot)
    summary = summarize_run(run)
    console.report(summary, run_text(summary), [plot] if plot else [], as_json=as_json)
