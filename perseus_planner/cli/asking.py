"""What the commands that ask the service share: its address, and how its answers are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

service = click.option(
    "--service",
    metavar="ADDRESS",
    help="Address of the service: http://host:port, https://host:port or unix:/path.  "
    "[default: PLANNER_SERVICE, or this machine]",
)
job = click.option("--job", "-j", required=True, metavar="JOB", help="Name of the training job.")


def print_answers(answers: Sequence[Any]) -> None:
    """Print answers of the service as text."""
    from perseus_planner.views.service_text import answer_text

    click.echo("\n".join(map(answer_text, answers)))


def print_json(value: Any) -> None:
    """Print a value of `service.schemas` or `service.model` as JSON."""
    from perseus_planner.service.schemas import to_json

    click.echo(to_json(value, indent=2))
