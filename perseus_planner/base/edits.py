"""Change values of top-level keys in the text of a YAML file, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perseus_planner.base.documents import Document, parse
from perseus_planner.base.errors import PlannerError
from perseus_planner.base.files import read_text


def with_values(document: Document, changes: Mapping[str, Any]) -> str:
    """Return the text of `document`'s file with other values of top-level keys, and no other
    change.

    Args:
        document: the document.
        changes: key -> a number, or a mapping, which is written on the key's line; None to leave
            the key out.

    Raises:
        PlannerError: If the file is written in a way that this cannot change; of the document's
            type of error.
    """
    text = read_text(document.path, document.error)
    # One key after the other: each change moves the places of those behind it.
    for key, value in changes.items():
        text = _with_value(document.path, text, key, value, document.error)
    return text


def _with_value(path: Path, text: str, key: str, value: Any, error: type[PlannerError]) -> str:
    # Parsed for the places of keys; values are replaced in the text, so that comments stay.
    document = parse(path, text, error)
    if value is None and key not in document.values:
        return text
    written = _in_one_line(value)
    changed = _changed_text(document, text, key, None if value is None else written)
    # Read again: the change must be all that differs, or the file is left as it is.
    try:
        values = parse(path, changed, error).values
    except PlannerError:
        values = {}
    wanted = {**document.values, key: value}
    if value is None:
        del wanted[key]
    if values != wanted:
        remedy = "remove it" if value is None else f"write `{key}: {written}`"
        raise error(f"{path}: {key} cannot be written into it; {remedy} yourself")
    return changed


def _in_one_line(value: Any) -> str:
    """Return a value in YAML's flow style, which keeps a mapping on the line of its key."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    # What follows is the end mark that YAML writes after a bare number.
    return text.split("\n")[0]


def _changed_text(document: Document, text: str, key: str, written: str | None) -> str:
    """Return the text with another value of a key, or without its line, as if the old value stood
    on that line alone: whether it did is seen when the text is read again.
    """
    lines = text.splitlines(keepends=True)
    if key not in document.values:
        # A last line without an end would run into the new key.
        if not text.endswith("\n"):
            lines.append("\n")
        return "".join([*lines, f"{key}: {written}\n"])
    start, end = document.span(key)
    if written is None:
        del lines[start.line]
    else:
        line = lines[start.line]
        lines[start.line] = f"{line[: start.column]}{written}{line[end.column :]}"
    return "".join(lines)
