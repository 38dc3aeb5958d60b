"""`planner status`: what the service knows of jobs, and has decided."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.cli import asking, console

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOK_S = 1.0  #: between two looks of --watch
_CLEAR = "\033[2J\033[H"  #: what empties a terminal


@click.command(epilog=console.examples("planner status", "planner status gpt3 --watch"))
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--watch", is_flag=True, help="Go on until interrupted, and print whenever something has changed.")
@asking.service
@console.as_json
def status(job: str | None, watch: bool, service: str | None, as_json: bool) -> None:
    """Show the jobs that the service knows, or one of them with what is slow and what its pipelines do."""
    from perseus_planner.service.client.client import Client

    before = None
    with Client(service) as client:
        while True:
            found = _found(client, job)
            if found != before:
                _print(found, in_full=job is not None, as_json=as_json, anew=watch and sys.stdout.isatty())
            if not watch:
                return
            before = found
            time.sleep(_LOOK_S)


def _found(client: Any, job: str | None) -> tuple[Any, ...]:
    return client.jobs() if job is None else (client.status(job),)


def _print(jobs: Sequence[Any], *, in_full: bool, as_json: bool, anew: bool) -> None:
    from perseus_planner.views.service_text import jobs_text, status_text

    if as_json:
        asking.print_json(jobs[0] if in_full else {"jobs": jobs})
        return
    text = status_text(jobs[0]) if in_full else jobs_text(jobs)
    click.echo(_CLEAR + text if anew else text)
