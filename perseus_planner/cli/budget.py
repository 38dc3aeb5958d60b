"""`planner budget`: set the deadline or the power budget of a job, or the power budget of all
jobs, also in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import PlannerError, ServiceAway, UsageError
from perseus_planner.cli import asking, console

if TYPE_CHECKING:
    from perseus_planner.service.client.client import Client

_LOOK_S = 1.0  #: between two looks at a file that may be replaced


@click.command(
    epilog=console.examples(
        "planner budget --job gpt3 --power 40kW",
        "planner budget --power 1200kW",
        "planner budget --job gpt3 --deadline 5.2s",
        "planner budget --job gpt3 --power none",
        "planner budget --schedule budget.csv",
        "planner budget --schedule carbon.csv --target 20 --watch",
    )
)
@click.option(
    "--job", "-j", metavar="JOB", help="Name of a training job.  [default: all jobs together]"
)
@click.option(
    "--power",
    metavar="POWER",
    help="Upper bound on the average power of all its GPUs; none removes it.",
)
@click.option(
    "--deadline",
    metavar="TIME",
    help="Iteration time to aim for without stragglers; none for that of all clocks at maximum.",
)
@click.option(
    "--schedule",
    type=console.PATH,
    help="CSV of power budgets with the columns start and power; or of a signal, start and price "
    "(per kWh) or start "
    "and carbon (gCO2/kWh), with --target. Start is such as 2026-11-22T18:00+01:00, or seconds "
    "since the epoch.",
)
@click.option(
    "--target", type=float, metavar="NUMBER", help="What an hour may cost: money, or kg of CO2."
)
@click.option(
    "--watch",
    is_flag=True,
    help="Go on, and take the file of --schedule up again whenever it is replaced.",
)
@click.option(
    "--none",
    "neither",
    is_flag=True,
    help="Remove the power budget and, for one job, the deadline.",
)
@asking.service
@console.as_json
def budget(
    job: str | None,
    power: str | None,
    deadline: str | None,
    schedule: Path | None,
    target: float | None,
    watch: bool,
    neither: bool,
    service: str | None,
    as_json: bool,
) -> None:
    """Set the power or the iteration time of a job, or the power of all jobs together.

    Jobs move along their frontiers to meet it with the least slowdown. What cannot be met is
    refused, naming the least that can. The service keeps a schedule and follows it without you; a
    budget of it that cannot be met when its time has come becomes the least that can. Any other
    budget of the same job, or of all jobs, ends it.
    """
    if schedule is not None:
        if neither or power is not None or deadline is not None:
            raise UsageError(
                "--schedule: says the power by itself; leave out --power, --deadline and --none"
            )
        send = partial(_send, schedule, target, job, as_json=as_json)
        with asking.open_client(service) as client:
            send(client)
            if watch:
                _follow(schedule, partial(send, client))
        return
    if target is not None or watch:
        raise UsageError(
            f"{'--watch' if watch else '--target'}: is for a schedule; name its file with "
            "--schedule"
        )
    from perseus_planner.base.units import DURATION, POWER_BUDGET

    if neither == (power is not None or deadline is not None):
        raise UsageError("give --power, --deadline or both of them, or --none")
    if deadline is not None and job is None:
        raise UsageError("--deadline: is for one job; name it with --job")
    deadline_s = None if deadline in (None, "none") else DURATION.read(str(deadline), "--deadline")
    power_w = None if power in (None, "none") else POWER_BUDGET.read(str(power), "--power")
    answers = []
    with asking.open_client(service) as client:
        if deadline is not None or (neither and job is not None):
            answers.append(client.set_deadline(str(job), deadline_s))
        if power is not None or neither:
            answers += client.set_power(power_w, job)
    _print(answers, as_json=as_json)


def _send(
    path: Path, target: float | None, job: str | None, client: Client, *, as_json: bool
) -> None:
    """Read a schedule, send it, and print what it does now and next."""
    from perseus_planner.base.prefixes import si
    from perseus_planner.service.client.budget_file import read_budgets, split_at

    power_w, later = split_at(read_budgets(path, target), time.time())
    _print(client.set_power(power_w, job, later), as_json=as_json)
    if as_json:
        return
    for step in later[:1]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(step.start_s))
        more = f", and {len(later) - 1} more after that" if len(later) > 1 else ""
        click.echo(
            f"Next: {'no budget' if step.power_w is None else si(step.power_w, 'W')} from "
            f"{at}{more}."
        )
    if not later:
        click.echo("The schedule has no later budget.")


def _follow(path: Path, send: Callable[[], None]) -> None:
    """Send the schedule again whenever its file is replaced; what is wrong with it is printed."""
    from perseus_planner.service.client.budget_file import replaced

    for _ in replaced(path, lambda: time.sleep(_LOOK_S)):
        while True:
            try:
                send()
            except ServiceAway as error:
                click.echo(f"{error}; it is tried again", err=True)
                time.sleep(_LOOK_S)
                continue
            except PlannerError as error:
                click.echo(f"{error}; the schedule before it holds", err=True)
            break


def _print(answers: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        from perseus_planner.service.answers import Answers

        asking.print_json(Answers(tuple(answers)))
    elif answers:
        asking.print_answers(answers)
    else:
        click.echo("No job runs; it applies to those that start.")
