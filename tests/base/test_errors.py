"""Errors quote little of a file, and nothing that a terminal would obey."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from perseus_planner import Profile
from perseus_planner.base.errors import (
    QUOTED,
    InfeasibleDeadline,
    ProfileError,
    UsageError,
    printable,
    shown,
)
from perseus_planner.base.tables import CsvFile
from perseus_planner.base.units import CLOCK, DURATION
from perseus_planner.extensions.inference.workload import read_trace

VALUES = st.recursive(
    st.text(max_size=300) | st.integers() | st.floats() | st.none(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=90), inner),
    max_leaves=30,
)


@given(value=VALUES)
def test_what_is_shown_of_a_value_is_short_and_printable(value: object):
    text = shown(value)
    assert len(text) <= QUOTED
    assert text.isprintable()


@given(text=st.text(max_size=3000), most=st.integers(2, 300))
def test_what_is_printed_of_a_text_is_its_beginning_on_one_line(text: str, most: int):
    found = printable(text, most)
    assert len(found) <= most
    assert found.isprintable()
    words = "".join(each if each.isprintable() else " " for each in text).split()
    assert " ".join(words).startswith(found.removesuffix("…"))


def test_a_short_text_is_printed_whole():
    assert printable("no such\n\tmodel") == "no such model"
    assert printable("x" * QUOTED) == "x" * QUOTED
    assert printable("x" * 1000) == "x" * (QUOTED - 1) + "…"


EVIL = "\x1b[2J\x07" + "x" * 5000


@pytest.mark.parametrize("name", ["header.csv", "cell.csv", "trace.csv", "key.yaml", "tag.yaml"])
def test_files_are_quoted_by_one_rule(tmp_path: Path, name: str):
    path = tmp_path / name
    if name == "header.csv":
        path.write_text(f"{EVIL},{EVIL}\n1,2\n")
        table = CsvFile(path, UsageError)
        text = refusal(UsageError, table.refuse_twice, table.header)
    elif name == "cell.csv":
        path.write_text(f"stage,instruction,frequency,time,energy\n{EVIL},forward,1410,.05,20\n")
        text = refusal(ProfileError, Profile.load, path, 80.0)
    elif name == "trace.csv":
        path.write_text(f"time,input_tokens,output_tokens\n{EVIL},1,1\n")
        text = refusal(UsageError, read_trace, path)
    elif name == "key.yaml":
        path.write_text(f'format: perseus-planner/profile\nversion: 1\n"{"x" * 900}": 1\n')
        text = refusal(ProfileError, Profile.load, path)
    else:
        path.write_text(f"format: !!{'x' * 900} 1\n")
        text = refusal(ProfileError, Profile.load, path)
    assert text.isprintable()
    assert text.count("x") - str(path).count("x") <= QUOTED


def test_a_quantity_that_is_none_is_quoted_so_too():
    text = refusal(UsageError, DURATION.read, EVIL, "--deadline")
    assert len(text) < 400
    assert text.isprintable()


@pytest.mark.parametrize(
    ("text", "clock_mhz"),
    [
        ("1410", 1410),
        ("1410.0", 1410),
        ("1410.000", 1410),
        (" 1410.0 ", 1410),
        ("1410.5", None),
        ("1410.0.0", None),
        ("1.41e3", None),
        (".0", None),
        ("0.0", None),
        ("-1410.0", None),
        ("1_410.0", None),
        ("inf", None),
    ],
)
def test_a_whole_number_may_have_a_point_and_zeros(text: str, clock_mhz: int | None):
    assert CLOCK.parse(text) == clock_mhz


@pytest.mark.parametrize(
    ("least_s", "said"), [(3.5065605622, "3.50657 s"), (1.0000001, "1.00001 s"), (9.5, "9.5 s")]
)
def test_the_least_time_is_rounded_up_by_no_more_than_the_last_digit(least_s: float, said: str):
    assert f"the fastest takes {said}; ask for" in str(InfeasibleDeadline(1.0, least_s))
