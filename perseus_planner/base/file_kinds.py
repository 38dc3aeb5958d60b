"""Tell what kind of file of the planner's stands at a path, by how it begins."""

from __future__ import annotations

import re
from pathlib import Path

from perseus_planner.base.documents import parse
from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.base.files import read_text, reading

_FORMAT = re.compile(rb"""^format\s*:\s*["']?perseus-planner/([a-z]+)\b""", re.MULTILINE)
_HEAD_BYTES = 4096
#: the header of a table, behind blank lines and comments
_HEADER = re.compile(rb"(?:\xef\xbb\xbf)?(?:[ \t\r]*(?:#.*)?\n)*(?![ \t\r]*#)(.*)")
#: What is in the header of a table -> its kind. The first that is found decides: the marks of
#: lengths, such as `step`, stand in other tables, too, so they come last.
_TABLES = {
    r"\bslowdown\b": "stragglers",
    r"^start\b.*\b(power|price|carbon)\b": "budget",
    r"\btensor_degree\b": "serving",
    r"\brequests_per_s\b": "rates",
    r"\b(input_tokens|ContextTokens)\b": "trace",
    r"\b(microbatch|lengths?\b|tokens\b|step\b)": "lengths",
}


def kind_of(path: Path) -> str | None:
    """Return what kind of file of the planner's stands at `path`, judged by how it begins.

    Returns:
        "run" for a folder, or "kareus" if plans of Kareus are below it; "frontier" for an archive;
        "lengths" for a CSV whose header has steps, microbatches or lengths, other kinds of tables
        by their headers, "profile" for any other; "page" for HTML; for a YAML file the last part
        of its `format`, such as "profile", "plan" or "job", or None if it has none.

    Raises:
        UsageError: If the file cannot be read.
    """
    if path.is_dir():
        # Any file of Kareus below it tells; `next` does not look for a second one.
        return "kareus" if next(path.rglob("freqs_pipeline_*.py"), None) else "run"
    with reading(path, UsageError), path.open("rb") as file:
        # The beginning is enough for all kinds but a foreign YAML file: plans can be large.
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PK"):  # a zip archive, as .npz is
        return "frontier"
    if head.lower().startswith(b"<!doctype html"):
        return "page"
    if path.suffix.lower() == ".csv":
        header = _HEADER.match(head)
        return _kind_of_table("" if header is None else header[1].decode(errors="replace"))
    # The planner writes it first. A plan can be large, so it is not parsed for this.
    format_match = _FORMAT.search(head)
    if format_match is not None:
        return format_match[1].decode()
    # Written by hand, the key may stand anywhere.
    try:
        name = parse(path, read_text(path, PlannerError), PlannerError).values.get("format")
    except PlannerError:
        return None
    return name.removeprefix("perseus-planner/") if isinstance(name, str) else None


def _kind_of_table(header: str) -> str:
    for mark, kind in _TABLES.items():
        if re.search(mark, header):
            return kind
    return "profile"
