"""What the commands that ask the service share: its address, and how its answers are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError, how_to_install
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.service.client.client import Client

service = click.option(
    "--service",
    metavar="ADDRESS",
    help="Address of the service: http://host:port, https://host:port or unix:/path.  "
    "[default: PLANNER_SERVICE, or this machine]",
)
job = click.option("--job", "-j", required=True, metavar="JOB", help="Name of the training job.")


def open_client(address: str | None) -> Client:
    """Return a client of the service at `address`, as for `Client`.

    Raises:
        UsageError: If the address is malformed, or a package of the extra `service` is not
            installed.
    """
    try:
        from perseus_planner.service.client.client import Client
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; {how_to_install('service')}") from error
    return Client(address)


def print_answers(answers: Sequence[Any]) -> None:
    """Print answers of the service as text."""
    from perseus_planner.views.service_text import answer_text

    click.echo(console.printable("\n".join(map(answer_text, answers))))


def print_json(value: Any) -> None:
    """Print a value of `service.schemas` or `service.model` as JSON."""
    from perseus_planner.service.schemas import to_json

    click.echo(console.printable(to_json(value, indent=2).decode()))
