"""Write docs/commands.md: all options of all commands, as `--help` says them.

python tests/support/command_pages.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from perseus_planner.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"

_HEAD = """# All commands and options

This page is made from the commands' own help by `python tests/support/command_pages.py`.
What each command is for, with examples, stands in the pages before it.
"""


def page_text() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for path, command in _commands(main, ()):
        parts.append(_section(path, command))
    return "\n".join(parts)


def _commands(
    group: click.Group, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield all commands that are no groups, in the order of the help."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _section(path: tuple[str, ...], command: click.Command) -> str:
    """Return the heading, the first sentence and the options of a command."""
    name = " ".join(("planner", *path))
    first = (command.help or "").strip().split("\n\n")[0]
    lines = [f"## {name}", "", _line(first), ""]
    # Some commands make their options when they are asked for; all have --help.
    parameters = command.get_params(click.Context(command))
    options = [each for each in parameters if isinstance(each, click.Option)]
    rows = [_row(option) for option in options if "--help" not in option.opts]
    shown = [row for row in rows if row]
    if shown:
        lines += ["| option | meaning |", "|---|---|", *shown, ""]
    return "\n".join(lines)


def _row(option: click.Option) -> str:
    """Return the row of an option; empty if it is hidden."""
    if option.hidden:
        return ""
    context = click.Context(click.Command("planner"))
    record = option.get_help_record(context)
    assert record is not None
    names, meaning = record
    names = " ".join(names.split()).replace("|", "\\|")
    return f"| `{names}` | {_line(meaning)} |"


def _line(text: str) -> str:
    """Return a text in one line of a table, in which nothing is markup."""
    words = " ".join(text.replace("\b", "").split())
    parts = words.split("`")  # what stands in backticks is code, and stays as it is
    marked = [re.sub(r"([<>*_\[\]])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = marked
    return "`".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
