"""Run the planner command in the process of the test."""

from __future__ import annotations

import shlex

from click.testing import CliRunner, Result

from perseus_planner.cli import main


def run(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command))


def done(command: str) -> str:
    """Return what a command prints; it must succeed and print nothing on stderr."""
    result = run(command)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refusal(command: str) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it prints on stdout and stderr."""
    result = run(command)
    return result.exit_code, result.stdout, result.stderr
