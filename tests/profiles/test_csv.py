"""Every malformed profile CSV is refused, with its line and the remedy."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refusal

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile

HEADER = "stage,instruction,frequency,time,energy\n"
ROWS = "0,forward,1410,0.05,20\n0,backward,1410,0.1,40\n"
GOOD = HEADER + ROWS
NEEDS_TIME = "is not a time: write finite seconds above 0, such as 0.0512"
NEEDS_ENERGY = "is not an energy: write finite joules of 0 or more, such as 23.8"
NEEDS_CLOCK = "is not a clock: write whole MHz above 0, such as 1410"
NEEDS_STAGE = "is not a stage number: write 0 for the first stage, 1 for the next, and so on"
NEEDS_POWER = "is not a power: give finite watts of 0 or more, such as 83.64"
NEEDS_CELLS = "give each column one cell, with a point as decimal mark"


def message_of(path: str, blocking_power_w: float | None = None) -> str:
    return refusal(ProfileError, Profile.load, path, blocking_power_w)


BAD_ROWS = {
    "time that is no number": (
        "0,forward,1395,fast,20",
        f"line 4, column 'time': 'fast' {NEEDS_TIME}",
    ),
    "empty time": ("0,forward,1395,,20", f"line 4, column 'time': '' {NEEDS_TIME}"),
    "NaN time": ("0,forward,1395,nan,20", f"line 4, column 'time': 'nan' {NEEDS_TIME}"),
    "infinite time": ("0,forward,1395,inf,20", f"line 4, column 'time': 'inf' {NEEDS_TIME}"),
    "overflowing time": ("0,forward,1395,1e999,20", f"line 4, column 'time': '1e999' {NEEDS_TIME}"),
    "zero time": ("0,forward,1395,0.0,20", f"line 4, column 'time': '0.0' {NEEDS_TIME}"),
    "negative time": ("0,forward,1395,-0.05,20", f"line 4, column 'time': '-0.05' {NEEDS_TIME}"),
    "digits grouped by underscores": (
        "0,forward,1395,1_0,20",
        f"line 4, column 'time': '1_0' {NEEDS_TIME}",
    ),
    "quoted decimal comma": (
        '0,forward,1395,"0,05",20',
        f"line 4, column 'time': '0,05' {NEEDS_TIME}",
    ),
    "negative energy": ("0,forward,1395,0.05,-1", f"line 4, column 'energy': '-1' {NEEDS_ENERGY}"),
    "NaN energy": ("0,forward,1395,0.05,NaN", f"line 4, column 'energy': 'NaN' {NEEDS_ENERGY}"),
    "infinite energy": (
        "0,forward,1395,0.05,-inf",
        f"line 4, column 'energy': '-inf' {NEEDS_ENERGY}",
    ),
    "energy with a unit": (
        "0,forward,1395,0.05,20 J",
        f"line 4, column 'energy': '20 J' {NEEDS_ENERGY}",
    ),
    "fractional clock": (
        "0,forward,1395.5,0.05,20",
        f"line 4, column 'frequency': '1395.5' {NEEDS_CLOCK}",
    ),
    "zero clock": ("0,forward,0,0.05,20", f"line 4, column 'frequency': '0' {NEEDS_CLOCK}"),
    "negative clock": (
        "0,forward,-1395,0.05,20",
        f"line 4, column 'frequency': '-1395' {NEEDS_CLOCK}",
    ),
    "clock in words": ("0,forward,max,0.05,20", f"line 4, column 'frequency': 'max' {NEEDS_CLOCK}"),
    "negative stage": ("-1,forward,1395,0.05,20", f"line 4, column 'stage': '-1' {NEEDS_STAGE}"),
    "fractional stage": (
        "0.5,forward,1395,0.05,20",
        f"line 4, column 'stage': '0.5' {NEEDS_STAGE}",
    ),
    "stage by name": (
        "first,forward,1395,0.05,20",
        f"line 4, column 'stage': 'first' {NEEDS_STAGE}",
    ),
    "unknown instruction": (
        "0,optimizer,1395,0.05,20",
        "line 4, column 'instruction': 'optimizer' is not an instruction: write forward or "
        "backward (or input-gradient, weight-gradient; with a suffix such as backward.sync)",
    ),
    "suffix in capitals": (
        "0,backward.Sync,1395,0.05,20",
        "line 4, column 'instruction': 'backward.Sync' is not an instruction: write forward or "
        "backward (or input-gradient, weight-gradient; with a suffix such as backward.sync)",
    ),
    "empty suffix": (
        "0,B.,1395,0.05,20",
        "line 4, column 'instruction': 'B.' is not an instruction: write forward or backward "
        "(or input-gradient, weight-gradient; with a suffix such as backward.sync)",
    ),
    "duplicate row of a variant": (
        "0,backward.sync,1395,0.05,20\n0,B.sync,1395,0.06,21",
        "line 5: stage 0 backward.sync at 1395 MHz is on line 4 too; keep one of them",
    ),
    "duplicate row": (
        "0,F,1410,0.06,21",
        "line 4: stage 0 forward at 1410 MHz is on line 2 too; keep one of them",
    ),
    "too few cells": (
        "0,forward,1395,0.05",
        f"line 4: has 4 cells where the header has 5; {NEEDS_CELLS}",
    ),
    "decimal comma": (
        "0,forward,1395,0,05,20",
        f"line 4: has 6 cells where the header has 5; {NEEDS_CELLS}",
    ),
    "NUL byte": (
        "0,for\0ward,1395,0.05,20",
        "line 4: has a NUL byte, so the file is damaged or not text; write it again",
    ),
    "open quote": ('0,"forward,1395,0.05,20', "line 4: unexpected end of data; correct its quotes"),
    "old line end": (
        "0,forward,1395,0.05,20\r0,forward,1380,0.06,19",
        "line 4: has a carriage return in the middle; end rows with a line feed",
    ),
    "endless line": ("9" * 70000, "line 4: is longer than 65536 bytes; write one row a line"),
    "long text": (
        f"0,forward,1395,{'x' * 200},20",
        f"line 4, column 'time': '{'x' * 37}...{'x' * 38}' {NEEDS_TIME}",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_refused_with_its_line_and_remedy(folder: Path, row: str, message: str):
    (folder / "p.csv").write_text(GOOD + row + "\n")
    assert message_of("p.csv", 80.0) == f"p.csv, {message}"


BAD_TABLES = {
    "empty": (
        "",
        f"p.csv: is empty; write the header {HEADER.strip()} and a row for each measurement",
    ),
    "header only": (
        HEADER,
        "p.csv: has no measurements; give at least one forward and one backward of stage 0",
    ),
    "missing column": (
        "stage,instruction,frequency,time\n0,forward,1410,0.05\n",
        "p.csv, line 1: no column 'energy' in the header 'stage,instruction,frequency,time'; "
        "write stage,instruction,frequency,time,energy, separated by commas",
    ),
    "semicolons": (
        GOOD.replace(",", ";"),
        "p.csv, line 1: no column 'stage', 'instruction', 'frequency', 'time', 'energy' in the "
        "header 'stage;instruction;frequency;time;energy'; write "
        "stage,instruction,frequency,time,energy, separated by commas",
    ),
    "no header": (
        ROWS,
        "p.csv, line 1: no column 'stage', 'instruction', 'frequency', 'time', 'energy' in the "
        "header '0,forward,1410,0.05,20'; write stage,instruction,frequency,time,energy, "
        "separated by commas",
    ),
    "column twice": (
        "stage,instruction,frequency,time,energy,time\n",
        "p.csv, line 1: column 'time' is there twice; keep one of them",
    ),
    "no backward": (
        HEADER + "0,forward,1410,0.05,20\n",
        "p.csv: stage 0 has no backward; measure its backward at one clock or more, or, if it does "
        "not run, as in a frozen stage, give it a row of 0 s and 0 J",
    ),
    "no forward": (
        GOOD + "1,backward,1410,0.1,40\n",
        "p.csv: stage 1 has no forward; measure its forward at one clock or more, or, if it does "
        "not run, as in a frozen stage, give it a row of 0 s and 0 J",
    ),
    "half a backward": (
        GOOD + "1,forward,1410,0.1,40\n1,W,1410,0.1,40\n",
        "p.csv: stage 1 has no input-gradient; measure its input-gradient at one clock or more, "
        "or, if it does not run, as in a frozen stage, give it a row of 0 s and 0 J",
    ),
    "hole": (
        GOOD + "2,forward,1410,0.05,20\n2,backward,1410,0.1,40\n",
        "p.csv: stage 1 is missing though there is a stage 2; measure it, or number the stages "
        "from 0",
    ),
    "stages from 1": (
        GOOD.replace("\n0,", "\n1,"),
        "p.csv: stage 0 is missing though there is a stage 1; measure it, or number the stages "
        "from 0",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_a_bad_csv_is_refused_with_its_remedy(folder: Path, text: str, message: str):
    (folder / "p.csv").write_text(text)
    assert message_of("p.csv", 80.0) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            HEADER.encode("utf-16"),
            "p.csv, line 1: has a NUL byte, so the file is damaged or not text; write it again",
        ),
        (
            GOOD.encode() + b"0,forw\xe4rts,1,1,1\n",
            "p.csv, line 4: is not UTF-8 text; save the file as UTF-8",
        ),
    ],
    ids=["UTF-16", "Latin-1"],
)
def test_a_csv_that_is_not_utf8_is_refused(folder: Path, data: bytes, message: str):
    (folder / "p.csv").write_bytes(data)
    assert message_of("p.csv", 80.0) == message


def test_a_missing_file_and_a_folder_are_refused(folder: Path):
    (folder / "sub.csv").mkdir()
    (folder / "sub.yaml").mkdir()
    assert message_of("none.csv") == "none.csv: no such file; check the path"
    assert message_of("none.yaml") == "none.yaml: no such file; check the path"
    assert message_of("sub.csv") == "sub.csv: is a folder; name the file in it"
    assert message_of("sub.yaml") == "sub.yaml: is a folder; name the file in it"


def test_a_file_below_a_file_is_refused(folder: Path):
    (folder / "p.csv").write_text(GOOD)
    expected = "p.csv/q.csv: cannot be read: Not a directory; check the path and its permissions"
    assert message_of("p.csv/q.csv", 80.0) == expected


@pytest.mark.parametrize("power_w", [-1.0, float("nan"), float("inf"), "80", True])
def test_an_invalid_blocking_power_is_refused(folder: Path, power_w: float):
    (folder / "p.csv").write_text(GOOD)
    assert message_of("p.csv", power_w) == f"blocking_power_w: {power_w!r} {NEEDS_POWER}"


def test_a_csv_without_blocking_power_says_how_to_give_it(folder: Path):
    (folder / "p.csv").write_text(GOOD)
    expected = (
        "p.csv: a CSV does not hold the blocking power, what a GPU draws while it waits; "
        "give it with --blocking-power W (in Python blocking_power_w=), or load "
    )
    assert message_of("p.csv") == expected + "the profile.yaml that holds it"
    (folder / "p.yaml").touch()
    assert message_of("p.csv") == expected + "p.yaml, which holds it"


def test_a_file_of_another_kind_is_refused_for_its_header(folder: Path):
    (folder / "p.csv").write_text("a,b\n1,2\n")
    assert message_of("p.csv").startswith("p.csv, line 1: no column 'stage', 'instruction', ")


def test_a_wrong_header_is_found_before_the_rest_is_read(folder: Path):
    os.mkfifo("p.csv")
    # Open for both, so that opening does not wait; a second read would wait until the time limit.
    descriptor = os.open("p.csv", os.O_RDWR)
    try:
        os.write(descriptor, b"stage,instruction,clock,time,energy\n")
        assert message_of("p.csv", 80.0).startswith(
            "p.csv, line 1: no column 'frequency' in the header"
        )
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("start", ["", "wrong,header\n", GOOD])
def test_two_gigabytes_that_are_no_profile_are_not_read_into_memory(folder: Path, start: str):
    with (folder / "p.csv").open("w") as file:
        file.write(start)
        file.truncate(2 * 2**30)
    tracemalloc.start()
    try:
        message_of("p.csv", 80.0)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        GOOD.replace(",", " , ").replace("forward", "F").replace("backward", "B"),
        GOOD.replace("\n", "\n\n"),
        "energy,host,time,stage,frequency,instruction\n40,a,0.1,0,1410,backward\n20,b,0.05,0,1410,forward\n",
    ],
    ids=[
        "byte order mark",
        "CRLF",
        "spaces and short kinds",
        "empty lines",
        "other columns in another order",
    ],
)
def test_a_csv_is_read_however_it_was_written(folder: Path, text: str):
    (folder / "p.csv").write_bytes(GOOD.encode())
    (folder / "q.csv").write_bytes(text.encode())
    profile, again = (Profile.load(name, 80.0) for name in ("p.csv", "q.csv"))
    assert again == profile
    assert again.digest == profile.digest
    assert profile.measurements[0, "B"] == (Measurement(1410, 0.1, 40.0),)


EVIDENCE = Evidence(1391.5, 2e-5, 0.01, 3, 61.25, ("sw-power-cap", "hw-thermal"), order=7)


def test_evidence_comes_back_from_the_table_and_changes_no_identity(folder: Path):
    rows = (Measurement(1410, 0.05, 20.0, EVIDENCE), Measurement(1395, 0.06, 19.0))
    bare = Profile({(0, "F"): rows[1:], (0, "B"): rows[1:]}, 85.0)
    profile = Profile({(0, "F"): rows, (0, "B"): (replace(rows[1], evidence=EVIDENCE),)}, 85.0)
    profile.save("p.yaml")
    again = Profile.load("p.yaml")
    assert again == profile
    assert [row.evidence for row in again.measurements[0, "F"]] == [EVIDENCE, None]
    assert Profile.load("p.csv", 85.0).digest == profile.digest != bare.digest
    assert (
        replace(profile, measurements={**profile.measurements, (0, "B"): rows[1:]}).digest
        == profile.digest
    )


def test_a_profile_without_evidence_has_the_documented_columns_alone(folder: Path):
    row = (Measurement(1410, 0.05, 20.0),)
    Profile({(0, "F"): row, (0, "B"): row}, 85.0).save("p.yaml")
    assert Path("p.csv").read_text().splitlines()[0] == HEADER.strip()


@pytest.mark.parametrize(
    ("control", "column"), [("power-limit", "power_limit"), ("observed", "observed_frequency")]
)
def test_the_third_column_names_the_control(folder: Path, control: str, column: str):
    row = (Measurement(400, 0.05, 20.0),)
    profile = Profile({(0, "F"): row, (0, "B"): row}, 85.0, control=control)
    profile.save("p.yaml")
    assert Path("p.csv").read_text().splitlines()[0] == f"stage,instruction,{column},time,energy"
    assert "control" not in Path("p.yaml").read_text()
    assert Profile.load("p.yaml") == profile == Profile.load("p.csv", 85.0)
    assert profile.digest != replace(profile, control="clock").digest


BAD_CONTROLS = {
    "two controls": (
        "stage,instruction,frequency,power_limit,time,energy\n",
        "p.csv, line 1: has the columns 'frequency' and 'power_limit'; keep the one that was set",
    ),
    "no watts": (
        "stage,instruction,power_limit,time,energy\n0,forward,low,0.05,20\n",
        "p.csv, line 2, column 'power_limit': 'low' is not a power limit: write whole watts above "
        "0, such as 250",
    ),
    "evidence that is none": (
        "stage,instruction,frequency,time,energy,achieved_frequency,time_stderr,energy_stderr,windows,temperature\n"
        "0,forward,1410,0.05,20,1400,0.001,0.1,none,61\n",
        "p.csv, line 2, column 'windows': 'none' is not a whole number of at least 1",
    ),
    "a limit twice": (
        "stage,instruction,power_limit,time,energy\n0,forward,250,0.05,20\n0,forward,250,0.05,20\n",
        "p.csv, line 3: stage 0 forward at 250 W is on line 2 too; keep one of them",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_CONTROLS.values(), ids=BAD_CONTROLS.keys())
def test_a_bad_knob_or_evidence_is_refused_with_its_remedy(folder: Path, text: str, message: str):
    (folder / "p.csv").write_text(text)
    assert message_of("p.csv", 85.0) == message
