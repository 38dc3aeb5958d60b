"""`planner job.yaml`: profiles, solves and plans a job in one go."""

from __future__ import annotations

from pathlib import Path

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.plan import plan
from perseus_planner.cli.profiling import profile
from perseus_planner.cli.solve import solve


@click.command(hidden=True)
@click.argument("job", type=console.PATH)
@click.option(
    "--slowdown", default="1.00", show_default=True, metavar="RATIO", help="As for `planner plan`."
)
@click.option("--max-changes", metavar="N", help="As for `planner plan`.")
@click.pass_context
def run_job(context: click.Context, job: Path, slowdown: str, max_changes: str | None) -> None:
    """Profile the stages of a job file, solve for its frontier, and choose a plan, in one go.

    The profile is the one that JOB names; if it is there already, it is not measured again.
    Frontier and plan are written beside it, as frontier.npz and plan.yaml.
    """
    from perseus_planner.plans.settings import read_settings

    named = read_settings(job).profile
    if not isinstance(named, Path):
        raise UsageError(
            f"{job}: has several profiles or none; run `planner profile`, `planner solve` and "
            "`planner plan`"
        )
    frontier, chosen = (named.with_name(name) for name in ("frontier.npz", "plan.yaml"))
    steps: list[tuple[click.Command, list[str]]] = [
        (solve, [str(job), "-o", str(frontier)]),
        (plan, [str(frontier), "--slowdown", slowdown, "-o", str(chosen)]),
    ]
    if max_changes is not None:
        steps[-1][1].extend(["--max-changes", max_changes])
    if named.exists():
        click.echo(f"{click.format_filename(named)} is there; remove it to measure again\n")
    else:
        steps.insert(0, (profile, [str(job)]))
    for command, arguments in steps:
        name = command.name or ""
        click.echo(f"planner {' '.join([name, *arguments])}")
        with command.make_context(name, arguments, parent=context.parent) as one:
            command.invoke(one)
        click.echo()
    click.echo(
        f"Next: planner show {chosen}, and train with planner_runtime(engine, plan={str(chosen)!r})"
    )
