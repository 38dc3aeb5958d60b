"""Profiles with modes: their two files, and what is wrong in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recomputed import recomputed
from strategies import smooth_profile

from perseus_planner import Profile
from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.keys import Key

CSV = """stage,instruction,mode,frequency,time,energy
0,forward,own,1410,0.066,26.3
0,backward,,1410,0.198,79.0
0,forward,keep,1410,0.066,26.3
0,backward,keep,1410,0.132,52.7
"""
YAML = """format: perseus-planner/profile
version: 1
measurements: p.csv
blocking_power_w: 80
"""


def test_a_profile_with_modes_is_the_same_after_its_files(folder: Path) -> None:
    profile = recomputed(smooth_profile(2, 135), 3.0)
    profile.save("p.yaml")
    again = Profile.load("p.yaml")
    assert again == profile
    assert (again.digest, again.modes) == (profile.digest, profile.modes)
    assert profile.digest != replace(profile, modes=replace(profile.modes, change_s=1.0)).digest


def test_a_table_alone_has_the_modes_of_its_rows(folder: Path) -> None:
    Path("p.csv").write_text(CSV)
    profile = Profile.load("p.csv", 80.0)
    assert profile.modes is not None
    assert list(profile.modes.ways) == ["own", "keep"]
    assert set(profile.measurements) == {
        Key(0, kind, mode) for kind in "FB" for mode in ("own", "keep")
    }


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ("3", "p.yaml, line 5, key 'modes': 3 does not describe modes; write the keys ways, "
         "shared_by, change_s, memory_bytes, may_reorder"),
        ("{ways: {}}", "p.yaml, line 5, key 'modes': modes, ways: {} is not a mapping of modes: "
         "write `recompute: {}`"),
        ("{ways: {keep: {wide: 1}}}", "p.yaml, line 5, key 'modes': modes, ways, keep: "
         "{'wide': 1} is not a mode; write it with the keys sets, kept_bytes, backward_bytes, "
         "reorders"),
        ("{ways: {keep: {kept_bytes: -1}}}", "p.yaml, line 5, key 'modes': modes, ways, keep, "
         "kept_bytes: -1 is not a number of bytes: give one of 0 or more, such as 40e9"),
        ("{ways: {keep: {reorders: 1}}}", "p.yaml, line 5, key 'modes': modes, ways, keep, "
         "reorders: 1 is not true or false; write one of them"),
        ("{ways: {keep: {}}, shared_by: node}", "p.yaml, line 5, key 'modes': modes, shared_by: "
         "'node' is unknown: give computation or microbatch or stage or pipeline"),
        ("{ways: {keep: {}, fast: {}}}", "p.yaml, line 5, modes: stage 0 has no forward in the "
         "mode fast; measure each computation in every mode, or leave the mode out"),
        ("{ways: {keep: {kept_bytes: [1, 2]}}}", "p.yaml, line 5, modes: [1.0, 2.0] has 2 numbers "
         "of bytes for 1 stages; give one for each, or one for all"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_modes_is_said_with_its_line(
    modes: str, message: str, folder: Path
) -> None:
    Path("p.csv").write_text(CSV)
    Path("p.yaml").write_text(f"{YAML}modes: {modes}\n")
    with pytest.raises(ProfileError) as raised:
        Profile.load("p.yaml")
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,forward,Keep it,1065,0.07,25\n", "is not the name of a mode: write lower-case letters"),
        ("0,forward,keep,1410,0.07,25\n", "0 forward@keep at 1410 MHz is on line 4 too"),
        ("0,forward@keep,keep,1065,0.07,25\n", "'forward@keep' is not an instruction"),
    ],
)
def test_a_wrong_row_is_refused(row: str, message: str, folder: Path) -> None:
    Path("p.csv").write_text(CSV + row)
    with pytest.raises(ProfileError, match=message):
        Profile.load("p.csv", 80.0)
