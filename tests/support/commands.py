"""The command as tests run it: in this process, with what it prints on either stream."""

from __future__ import annotations

import shlex

from click.testing import CliRunner, Result

from perseus_planner.cli import main


def run(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command))


def done(command: str) -> str:
    """What a command prints that must be done without a complaint."""
    result = run(command)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refusal(command: str) -> tuple[int, str, str]:
    """Exit code, and what is on either stream."""
    result = run(command)
    return result.exit_code, result.stdout, result.stderr
