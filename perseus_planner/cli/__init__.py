"""The `planner` command: `commands.main`, which is loaded when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus_planner.cli.console import Commands


def __getattr__(name: str) -> Commands:
    """Return `main`; rooms that bring commands import `cli.console` without it."""
    if name != "main":
        raise AttributeError(name)
    from perseus_planner.cli.commands import main

    return main
