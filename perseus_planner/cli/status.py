"""`planner status`: show the jobs of the service and what it has decided."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import asking, console

if TYPE_CHECKING:
    from perseus_planner.service.answers import Event, JobTotals

_EVENTS = 10  #: that are shown, the latest
_LOOK_S = 1.0  #: between two looks of --watch
_CLEAR = "\033[2J\033[H"  #: clears a terminal


@click.command(
    epilog=console.examples(
        "planner status", "planner status gpt3 --watch", "planner status --totals"
    )
)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--watch", is_flag=True, help="Print again whenever something has changed, until interrupted."
)
@click.option(
    "--totals",
    is_flag=True,
    help="Show what every job ran, used and saved, also of jobs that have ended, and leave.",
)
@asking.service
@console.as_json
def status(job: str | None, watch: bool, totals: bool, service: str | None, as_json: bool) -> None:
    """Show the jobs of the service, or one of them with its reports and what its pipelines do."""
    if totals and (job is not None or watch):
        raise UsageError("--totals: is of all jobs, once; leave out the name of a job and --watch")
    before = None
    with asking.open_client(service) as client:
        while not totals:
            found = client.jobs() if job is None else (client.status(job),)
            if found != before:
                events = () if job is None or as_json else client.history(job).events[-_EVENTS:]
                _print(
                    found,
                    events,
                    in_full=job is not None,
                    as_json=as_json,
                    clear=watch and sys.stdout.isatty(),
                )
            if not watch:
                return
            before = found
            time.sleep(_LOOK_S)
        _print_totals(client.totals(), as_json=as_json)


def _print_totals(jobs: Sequence[JobTotals], *, as_json: bool) -> None:
    from perseus_planner.service.answers import Totals
    from perseus_planner.views.service_text import totals_text

    if as_json:
        asking.print_json(Totals(tuple(jobs)))
    else:
        click.echo(console.printable(totals_text(jobs)))


def _print(
    jobs: Sequence[Any], events: Sequence[Event], *, in_full: bool, as_json: bool, clear: bool
) -> None:
    from perseus_planner.service.answers import Jobs
    from perseus_planner.views.service_text import jobs_text, status_text

    if as_json:
        asking.print_json(jobs[0] if in_full else Jobs(tuple(jobs)))
        return
    text = console.printable(status_text(jobs[0], events) if in_full else jobs_text(jobs))
    click.echo(_CLEAR + text if clear else text)
