"""What the commands share that ask the planner's service: where it is, and how its answers are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from perseus_planner.runtime.service.outcomes import Answer

service = click.option(
    "--service",
    metavar="ADDRESS",
    help="Where the service is: http://host:port, https://host:port or unix:/path.  [default: PLANNER_SERVICE, or this "
    "machine]",
)
job = click.option("--job", "-j", required=True, metavar="JOB", help="The name of the training job.")


def print_json(content: Any) -> None:
    """Print values as JSON; what is infinite, a time that never comes, as null."""
    click.echo(json.dumps(_plain(content), indent=2, allow_nan=False))


def answer_text(answer: Answer) -> str:
    """What follows from a request."""
    version = f"version {answer.version} of its plans"
    effect = {
        "planning": f"{version} is being planned",
        "next iteration": f"{version} is taken at the next iteration",
        "already": f"it runs by {version}",
    }.get(answer.takes_effect, f"{version}: {answer.takes_effect}")
    changed = effect if answer.changed else f"nothing changes; {effect}"
    key = f"\nReport {answer.report.key}" if answer.report is not None else ""
    saving = f"expected to save {answer.expected_saving_w:.4g} W"
    return f"Job {answer.job}: {changed}; {saving}\n{answer.reason}{key}"


def moment(since_epoch_s: float) -> str:
    """A time of this machine's clock, to the second; only the time of day for one of today."""
    then = datetime.fromtimestamp(since_epoch_s).astimezone()
    return f"{then:%H:%M:%S}" if then.date() == datetime.now().astimezone().date() else f"{then:%Y-%m-%d %H:%M:%S}"


def _plain(content: Any) -> Any:
    if is_dataclass(content) and not isinstance(content, type):
        return _plain(asdict(content))
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [_plain(each) for each in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
