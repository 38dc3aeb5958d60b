"""Run the planner command in the process of the test."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

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


def contents() -> dict[Path, bytes | None]:
    """Return the files in the current folder with their content, and the folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in Path().iterdir()}


def loaded(command: str) -> Any:
    """Return what a command prints as JSON."""
    return json.loads(done(f"{command} --json"))


def refused(command: str) -> str:
    """Return why a command is refused: in one line on stderr. Nothing is printed, and the current
    folder stays as it is.
    """
    before = contents()
    code, stdout, stderr = refusal(command)
    assert (code, stdout) == (2, ""), stdout
    assert contents() == before
    assert stderr.startswith("Error: "), stderr
    assert stderr.count("\n") == 1, stderr
    return stderr.removeprefix("Error: ").removesuffix("\n")
