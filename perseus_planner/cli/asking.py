"""What the commands share that ask the planner's service: where it is, and how its answers are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import click

service = click.option(
    "--service",
    metavar="ADDRESS",
    help="Where the service is: http://host:port, https://host:port or unix:/path.  [default: PLANNER_SERVICE, or this "
    "machine]",
)
job = click.option("--job", "-j", required=True, metavar="JOB", help="The name of the training job.")


def say(answers: Sequence[Any]) -> None:
    """Print answers of the service as text."""
    from perseus_planner.views.service_text import answer_text

    click.echo("\n".join(map(answer_text, answers)))


def print_json(content: Any) -> None:
    """Print values as JSON; what is infinite, a time that never comes, as null."""
    click.echo(json.dumps(_plain(content), indent=2, allow_nan=False))


def _plain(content: Any) -> Any:
    if is_dataclass(content) and not isinstance(content, type):
        return _plain(asdict(content))
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [_plain(each) for each in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
