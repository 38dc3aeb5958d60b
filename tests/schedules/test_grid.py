"""Schedules as text grids: read, written, and refused with the line, the cell and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from strategies import fixed

from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules import (
    NAMES,
    Schedule,
    generate,
    gpipe,
    grid_text,
    load_grid,
    one_f_one_b,
    parse_grid,
    save_grid,
    zb_h1,
)


def flaw_of(text: str) -> str:
    return refusal(ScheduleError, parse_grid, text, "grid", "grid.csv")


@fixed
@given(name=st.sampled_from(tuple(NAMES)), ranks=st.integers(1, 5), rounds=st.integers(2, 4))
def test_a_schedule_reads_back_from_its_text(name: str, ranks: int, rounds: int):
    virtual = None if NAMES[name].virtual_stages else 3
    schedule = generate(name, ranks=ranks, microbatches=ranks * rounds, virtual_stages=virtual)
    text = grid_text(schedule)
    assert parse_grid(text, name, "grid.csv") == schedule
    assert parse_grid(text.replace(",", " "), name, "grid.csv") == schedule
    assert (
        parse_grid(text.replace(",", "\t,\t,").replace("\n", "\r\n\r\n"), name, "grid.csv")
        == schedule
    )


def test_a_schedule_is_written_as_torch_writes_it():
    assert grid_text(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_file_reads_back_and_gives_the_schedule_its_name(folder: Path):
    save_grid(zb_h1(3, 5), "mine.csv")
    schedule = load_grid("mine.csv")
    assert (schedule.name, schedule.ranks) == ("mine", zb_h1(3, 5).ranks)
    assert [file.name for file in folder.iterdir()] == ["mine.csv"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(folder: Path):
    save_grid(gpipe(1, 1), "mine.csv")
    assert (
        refusal(ScheduleError, save_grid, gpipe(2, 2), "missing/mine.csv")
        == "missing/mine.csv: cannot be written: No such file or directory; check the folder"
    )
    assert load_grid("mine.csv").ranks == gpipe(1, 1).ranks
    assert [file.name for file in folder.iterdir()] == ["mine.csv"]


def test_blank_cells_comments_and_overlapped_pairs_are_read():
    text = "# DualPipeV\n0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,,0B0,\n\n  # of one rank\n,, 1B1 ,0B1\n"
    # Both lines hold stages 0 and 1, so they are no two ranks.
    assert flaw_of(text).startswith("grid.csv, line 5, cell 3: stage 1 is on rank 0 too")
    joined = text.replace("\n\n  # of one rank\n", "")
    schedule = parse_grid(joined, "v", "grid.csv")
    assert list(map(schedule.text_of, schedule.ranks[0])) == [
        "0F0",
        "0F1",
        "1F0",
        "(1F1;1B0)OVERLAP_F_B",
        "0B0",
        "1B1",
        "0B1",
    ]
    assert [str(each) for each in schedule.one_by_one.ranks[0]][3:5] == ["1F1", "1B0"]
    assert parse_grid(grid_text(schedule), "v", "grid.csv") == schedule


def test_a_byte_order_mark_is_read_over(folder: Path):
    Path("mine.csv").write_bytes(b"\xef\xbb\xbf" + grid_text(gpipe(2, 2)).encode())
    assert load_grid("mine.csv").ranks == gpipe(2, 2).ranks


STAGES_OF_FOUR = grid_text(one_f_one_b(4, 5))

REFUSALS = {
    "": "grid.csv: is empty; write one line per rank, such as 0F0,0F1,0B0,0B1",
    "# nothing\n\n": "grid.csv: is empty; write one line per rank, such as 0F0,0F1,0B0,0B1",
    "0F0,0B0\n,,\n": "grid.csv, line 2: runs nothing; give each rank at least one computation",
    "0F0,oops,0B0": "grid.csv, line 1, cell 2: 'oops' is not a computation; write stage, kind (F, "
    "B, I or W) and "
    "microbatch, e.g. 3F17",
    "0F0 1F0,0B0": "grid.csv, line 1, cell 1: '0F0 1F0' is not a computation; write stage, kind "
    "(F, B, I or W) and "
    "microbatch, e.g. 3F17",
    "0F0,(0B0;oops)OVERLAP_F_B": "grid.csv, line 1, cell 2: 'oops' is not a computation; write "
    "stage, kind (F, B, I or "
    "W) and microbatch, e.g. 3F17",
    "0F0,0SEND_F0\n1RECV_F0,1F0\n": "grid.csv, line 1, cell 2: '0SEND_F0' is communication, not a "
    "computation; "
    'dump the schedule with format="compute_only"',
    "0UNSHARD,0F0,0B0": "grid.csv, line 1, cell 1: '0UNSHARD' is communication, not a computation; "
    'dump the schedule with format="compute_only"',
    "0F0,0B0,0REDUCE_GRAD": "grid.csv, line 1, cell 3: '0REDUCE_GRAD' is communication, not a "
    "computation; "
    'dump the schedule with format="compute_only"',
    "0F0,,0B0,,0F0": "grid.csv, line 1, cell 5: 0F0 is there twice; keep one",
    "0F0 0B0\n# b\n1F0 1B0 0F1": "grid.csv, line 3, cell 3: stage 0 is on rank 0 too; keep a stage "
    "on one rank",
    "0F0,0B0\n\n2F0,2B0": "grid.csv, line 3, cell 1: stage 1 is missing though there is stage 2; "
    "number them from 0 "
    "without a hole",
    "0F0,0B0,,0F2,0B2": "grid.csv, line 1, cell 4: microbatch 1 is missing though there is "
    "microbatch 2; number them "
    "from 0 without a hole",
    "0F0,0B0\n1F0,1I0,1W0,1B0": "grid.csv, line 2, cell 2: 1I0 is a part of 1B0, which is present "
    "too; keep one of "
    "them",
    STAGES_OF_FOUR.replace(
        "3B4", ""
    ): "grid.csv, line 3, cell 10: 2B4 can never run: it waits for 3B4 or 3I4, and "
    "both are missing; add one",
    STAGES_OF_FOUR.replace(
        "1F3", ""
    ): "grid.csv, line 3, cell 6: 2F3 can never run: it waits for 1F3, which is missing; add it",
    STAGES_OF_FOUR.replace(
        "3F2,3B2", "3B2,,3F2"
    ): "grid.csv, line 4, cell 5: 3B2 can never run: it waits for 3F2, "
    "which comes after it on the same rank; move 3F2 before it",
    STAGES_OF_FOUR.replace("2F1,2B0", "2B0,2F1").replace(
        "3B0,3F1", "3F1,3B0"
    ): "grid.csv, line 3, cell 2: 2B0 can "
    "never run: it waits for 3B0, which comes after 3F1, which in the end waits for it; reorder "
    "them",
    "0F0,,0F1,0B1\n1F0,1F1,1B0,1B1": "grid.csv, line 1, cell 1: 0F0 has no backward; add 0B0, or "
    "0I0 and 0W0",
    "0F0,0I0\n1F0,1B0": "grid.csv, line 1, cell 2: 0I0 is only half a backward; add 0W0",
}


@pytest.mark.parametrize(("text", "message"), REFUSALS.items(), ids=range(len(REFUSALS)))
def test_a_malformed_grid_is_refused_with_its_line_and_cell(text: str, message: str):
    assert flaw_of(text) == message


def test_the_parts_of_an_overlapped_pair_are_in_one_cell():
    assert flaw_of("0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,1B1,0B1,(0F1;0B0)OVERLAP_F_B") == (
        "grid.csv, line 1, cell 7: 0F1 is there twice; keep one"
    )
    assert flaw_of("0F0,1F0,1F1,(0F1;1B0)OVERLAP_F_B,1B1,0B0,0B1") == (
        "grid.csv, line 1, cell 3: 1F1 can never run: it waits for 0F1, which comes after it on "
        "the same rank; move 0F1 before it"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,\xff", "mine.csv, line 1: is not UTF-8 text; save the file as UTF-8"),
        (b"0F0,0B0\n\n\xff", "mine.csv, line 3: is not UTF-8 text; save the file as UTF-8"),
        (
            b" " * (64 * 2**20 + 1),
            "mine.csv: is larger than 64 MiB; name the text grid of a schedule",
        ),
        (b"", "mine.csv: is empty; write one line per rank, such as 0F0,0F1,0B0,0B1"),
    ],
    ids=["no text", "no text further on", "too large", "empty"],
)
def test_an_unreadable_grid_file_is_refused(content: bytes, message: str, folder: Path):
    Path("mine.csv").write_bytes(content)
    assert refusal(ScheduleError, load_grid, "mine.csv") == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.csv", "missing.csv: no such file; check the path"),
        (".", ".: is a folder; name the file in it"),
        ("a\0b", "'a\\x00b': is not a path; check it"),
    ],
)
def test_a_path_that_cannot_be_read_is_refused(path: str, message: str, folder: Path):
    assert refusal(ScheduleError, load_grid, path) == message


CELLS = st.sampled_from(
    ["", " ", "0F0", "0B0", "0I0", "0W0", "1F0", "1B0", "0F1", "0B1", "1F1", "1B1", "#", "0SEND_F0"]
)


@fixed
@given(rows=st.lists(st.lists(CELLS, max_size=8), max_size=3), between=st.sampled_from(", "))
def test_any_grid_is_a_schedule_or_refused_by_line(rows: list[list[str]], between: str):
    text = "\n".join(between.join(row) for row in rows)
    try:
        schedule = parse_grid(text, "grid", "grid.csv")
    except ScheduleError as error:
        said = str(error)
        assert said.startswith(("grid.csv, line ", "grid.csv: is empty"))
    else:
        assert sorted(map(str, schedule.computations())) == sorted(
            cell for row in rows for cell in row if cell.strip()
        )


@fixed
@given(text=st.text(alphabet="0123FBIW,;() \n\t#\0\u0663OVERLAP_", max_size=60))
def test_any_text_is_a_schedule_or_refused(text: str):
    try:
        assert isinstance(parse_grid(text, "grid", "grid.csv"), Schedule)
    except ScheduleError as error:
        assert str(error).startswith("grid.csv")  # noqa: PT017
