"""CSV files of stragglers are read as written, and refused with file, line, column and remedy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.lab.stragglers import (
    UNDISTURBED,
    Condition,
    Straggler,
    condition_of,
    read_stragglers,
)

HEADER = "start,end,slowdown,pipeline,stage\n"
NEEDS_START = "is not a start: write finite seconds of 0 or more, such as 120.5"
NEEDS_END = (
    "is not an end: write finite seconds above 0, such as 180, or nothing for one that stays"
)
NEEDS_SLOWDOWN = "is not a slowdown: write how many times as long it takes, 1 or more, such as 1.15"
NEEDS_PIPELINE = "is not a pipeline: write 0 for the first one, 1 for the next, and so on"
NEEDS_STAGE = "is not a stage: write 0 for the first one, or nothing for the whole pipeline"
NEEDS_CELLS = "where the header has 5; give each column one cell, with a point as decimal mark"

BAD_ROWS = {
    "negative start": ("-1,2,1.1,0,", f"column 'start': '-1' {NEEDS_START}"),
    "empty start": (",2,1.1,0,", f"column 'start': '' {NEEDS_START}"),
    "start with a unit": ("1s,2,1.1,0,", f"column 'start': '1s' {NEEDS_START}"),
    "end that is NaN": ("1,nan,1.1,0,", f"column 'end': 'nan' {NEEDS_END}"),
    "infinite end": ("1,inf,1.1,0,", f"column 'end': 'inf' {NEEDS_END}"),
    "end at the start": (
        "1.5,1.5,1.1,0,",
        "column 'end': '1.5' is not after the start '1.5'; correct one of them",
    ),
    "end before the start": (
        "3,2,1.1,0,",
        "column 'end': '2' is not after the start '3'; correct one of them",
    ),
    "slowdown below 1": ("1,2,0.9,0,", f"column 'slowdown': '0.9' {NEEDS_SLOWDOWN}"),
    "slowdown of zero": ("1,2,0,0,", f"column 'slowdown': '0' {NEEDS_SLOWDOWN}"),
    "slowdown in per cent": ("1,2,115%,0,", f"column 'slowdown': '115%' {NEEDS_SLOWDOWN}"),
    "no pipeline": ("1,2,1.1,,", f"column 'pipeline': '' {NEEDS_PIPELINE}"),
    "fractional pipeline": ("1,2,1.1,0.5,", f"column 'pipeline': '0.5' {NEEDS_PIPELINE}"),
    "pipeline that is not there": (
        "1,2,1.1,4,",
        "column 'pipeline': there is no pipeline 4; pipelines are 0 to 3",
    ),
    "negative stage": ("1,2,1.1,0,-1", f"column 'stage': '-1' {NEEDS_STAGE}"),
    "stage in words": ("1,2,1.1,0,all", f"column 'stage': 'all' {NEEDS_STAGE}"),
    "stage that is not there": (
        "1,2,1.1,0,2",
        "column 'stage': there is no stage 2; stages are 0 to 1",
    ),
    "decimal comma": ("1,2,1,1,0,", f"has 6 cells {NEEDS_CELLS}"),
}

BAD_FILES = {
    "empty": (
        b"",
        f"slow.csv: is empty; write the header {HEADER.strip()} and a row for each straggler",
    ),
    "no slowdown": (
        b"start,end,pipeline,stage\n",
        "slow.csv, line 1: no column 'slowdown' in the header 'start,end,pipeline,stage'; write "
        f"{HEADER.strip()}, separated by commas",
    ),
    "two ends": (
        b"start,end,slowdown,end,pipeline,stage\n",
        "slow.csv, line 1: column 'end' is there twice; keep one of them",
    ),
}


def written(text: str | bytes) -> Path:
    path = Path("slow.csv")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def message_of(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_stragglers(path, 4, 2)
    return str(caught.value)


def test_stragglers_are_read_in_order(folder: Path):
    text = "\ufeffnote,start , end,slowdown,pipeline,stage\na,0,2.5,1.1,3,\n\nb, 7,,2,0, 1\n"
    expected = (Straggler(0.0, 2.5, 1.1, 3), Straggler(7.0, math.inf, 2.0, 0, 1))
    assert read_stragglers(written(text), 4, 2) == expected


def test_a_file_may_have_no_straggler(folder: Path):
    assert read_stragglers(written(HEADER), 4, 2) == ()


@pytest.mark.parametrize(("row", "complaint"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_wrong_row_is_refused_with_its_line(folder: Path, row: str, complaint: str):
    separator = " " if complaint.startswith("has") else ""
    place = "slow.csv, line 3:" if separator else "slow.csv, line 3, "
    assert message_of(written(f"{HEADER}1,2,1.5,3,1\n{row}\n")) == f"{place}{separator}{complaint}"


@pytest.mark.parametrize(("data", "complaint"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_malformed_file_is_refused(folder: Path, data: bytes, complaint: str):
    assert message_of(written(data)) == complaint.rstrip("\n")


def test_a_missing_file_is_refused(folder: Path):
    assert message_of(Path("slow.csv")) == "slow.csv: no such file; check the path"
    assert message_of(folder) == f"{folder}: is a folder; name the file in it"


def test_slowdowns_of_the_same_stage_are_multiplied():
    whole, first = Straggler(0, 1, 1.5, 0), Straggler(0, 1, 1.25, 0, stage=0)
    second = Straggler(0, 1, 2.0, 0, stage=1)
    assert condition_of([]) == UNDISTURBED
    assert condition_of([Straggler(0, 1, 1.0, 0), Straggler(0, 1, 1.0, 0, stage=1)]) == UNDISTURBED
    assert condition_of([second, whole, first, whole, second]) == Condition(
        2.25, ((0, 1.25), (1, 4.0))
    )
