"""`planner budget`: set the deadline or the power budget of a job, or the power budget of all jobs."""

from __future__ import annotations

import click

from perseus_planner.cli import asking, console
from perseus_planner.errors import UsageError


@click.command(
    epilog=console.examples(
        "planner budget --job gpt3 --power 40kW",
        "planner budget --power 1200kW",
        "planner budget --job gpt3 --deadline 5.2s",
        "planner budget --job gpt3 --power none",
    )
)
@click.option("--job", "-j", metavar="JOB", help="Name of a training job.  [default: all jobs together]")
@click.option("--power", metavar="POWER", help="Upper bound on the average power of all its GPUs; none removes it.")
@click.option(
    "--deadline",
    metavar="TIME",
    help="Iteration time to aim for without stragglers; none for that of all clocks at maximum.",
)
@click.option("--none", "neither", is_flag=True, help="Remove the power budget and, for one job, the deadline.")
@asking.service
@console.as_json
def budget(
    job: str | None, power: str | None, deadline: str | None, neither: bool, service: str | None, as_json: bool
) -> None:
    """Set the power or the iteration time of a job, or the power of all jobs together.

    Jobs move along their frontiers to meet it with the least slowdown. What cannot be met is refused, naming the least
    that can.
    """
    from perseus_planner.quantities import DURATION, POWER_BUDGET

    if neither == (power is not None or deadline is not None):
        raise UsageError("give --power, --deadline or both of them, or --none")
    if deadline is not None and job is None:
        raise UsageError("--deadline: is for one job; name it with --job")
    deadline_s = None if deadline in (None, "none") else DURATION.parse(str(deadline), "--deadline")
    power_w = None if power in (None, "none") else POWER_BUDGET.parse(str(power), "--power")
    answers = []
    with asking.open_client(service) as client:
        if deadline is not None or (neither and job is not None):
            answers.append(client.set_deadline(str(job), deadline_s))
        if power is not None or neither:
            answers += client.set_power(power_w, job)
    if as_json:
        from perseus_planner.service.answers import Answers

        asking.print_json(Answers(tuple(answers)))
    elif answers:
        asking.print_answers(answers)
    else:
        click.echo("No job runs; it applies to those that start.")
