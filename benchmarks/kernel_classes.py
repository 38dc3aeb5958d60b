"""Number 50: how much of the time of public GPU traces has a class, and whether names drawn by time
have the right one.

The traces are not committed. Name a folder with those of HolisticTraceAnalysis (tests/data) and of
TraceLens (tests/traces):

    PLANNER_TRACES=traces python benchmarks/run.py --only 50

Names were drawn in proportion to their share of a file's time, with the seed 55, and judged by
hand: `kernel_names.csv` beside this file.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from data import MissingError, Size
from results import Check, Section, Table

from perseus_planner.extensions.traces.classes import CLASSES, OTHER, kernel_class

NUMBER = 50
JUDGED = Path(__file__).resolve().with_name("kernel_names.csv")
_ENOUGH = 0.95  #: of a file's kernel time
_RIGHT = 0.97  #: of the judged names


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Event] = []  # noqa: N815 - the file's name
    deviceProperties: list[dict[str, Any]] = []  # noqa: N815


def measure(size: Size) -> Section:
    """Classify all kernels; raise MissingError if there are no traces."""
    root = os.environ.get("PLANNER_TRACES")
    paths = sorted(Path(root).rglob("*.json*")) if root else []
    if not paths:
        raise MissingError(
            "no public traces: put those of HolisticTraceAnalysis and TraceLens into a folder, and "
            "name it in PLANNER_TRACES"
        )
    rows = [row for path in paths for row in _rows(path)]
    enough = sum(row["known"] >= 100 * _ENOUGH for row in rows)
    judged = list(_judged())
    right = sum(row["class"] == row["judged"] for row in judged)
    wrong = [row for row in judged if row["class"] != row["judged"]]
    columns = {
        "file": ("file", ""),
        "gpu": ("GPU", ""),
        "ms": ("kernels, ms", ".1f"),
        "known": ("with a class, %", ".1f"),
        **{name: (f"{name}, %", ".1f") for name in CLASSES},
    }
    return Section(
        NUMBER,
        "Classes of kernels in public traces",
        "Time of kernels, copies and fills by the class of their names.",
        [
            Table(columns, rows),
            Table(
                {"name": ("name", ""), "class": ("class", ""), "judged": ("by hand", "")},
                [{**row, "name": row["name"][:80]} for row in wrong],
            ),
        ],
        [
            Check(
                f"{enough} of {len(rows)} files have a class for 95 % of their time, asked 95 %",
                enough >= _ENOUGH * len(rows),
            ),
            Check(
                f"{right} of {len(judged)} names drawn by time have the class judged by hand, "
                "asked 97 %",
                right >= _RIGHT * len(judged),
            ),
        ],
        [
            "Files without kernels are left out. Patterns were made on these files, so the share "
            "is of names that were seen. The 100 names are a second draw, after two wrong ones of "
            "a first draw of 100 were mended.",
            "A kernel that belongs to no class by right, as one that spins, is judged unknown.",
        ],
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    try:
        trace = msgspec.json.decode(content, type=_Trace)
    except msgspec.ValidationError:
        return  # not a trace
    of_class: Counter[str] = Counter()
    for event in trace.traceEvents:
        category = event.cat.lower()
        if event.ph == "X" and category.removeprefix("gpu_") in ("kernel", "memcpy", "memset"):
            of_class[kernel_class(event.name, category)] += event.dur
    total_us = sum(of_class.values())
    if total_us:
        shares = {name: 100 * of_class[name] / total_us for name in CLASSES}
        gpu = next((str(each.get("name", "")) for each in trace.deviceProperties), "")
        known = 100 - shares[OTHER]
        yield {"file": path.name, "gpu": gpu, "ms": total_us / 1e3, "known": known, **shares}


def _judged() -> Iterator[dict[str, str]]:
    with JUDGED.open(newline="") as file:
        for row in csv.DictReader(file):
            yield {**row, "class": kernel_class(row["name"], row["category"])}
