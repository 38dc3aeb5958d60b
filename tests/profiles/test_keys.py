"""The keys of a profile: stage, kind and mode, and what (stage, kind) alone finds."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from refusals import refusal

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.keys import ByKey, Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

ROWS = (Measurement(1410, 1.0, 300.0), Measurement(1200, 1.1, 250.0))
SLOW = (Measurement(1410, 2.0, 500.0),)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Key(0, "F"), "0F"),
        (Key(12, "B.sync"), "12B.sync"),
        (Key(3, "B", "recompute"), "3B@recompute"),
        (Key(3, "W.pair-0", "ctas-4"), "3W.pair-0@ctas-4"),
    ],
)
def test_a_key_comes_back_from_its_text_and_from_its_name(key: Key, text: str) -> None:
    assert str(key) == text
    assert Key.parse(text) == key
    assert Key.named(key.stage, key.name) == key


@pytest.mark.parametrize(
    "text",
    ["", "B", "3", "3X", "3B.", "3B.Sync", "3B.sync ", "-3B", "3B0", "3B@", "3B@A", "3B@a@b"],
)
def test_other_text_is_not_a_key(text: str) -> None:
    assert (
        refusal(ProfileError, Key.parse, text)
        == f"{text!r} is not a stage and a kind; write them as 3B, or 3B.sync"
    )


def test_other_text_is_not_a_name() -> None:
    assert (
        refusal(ProfileError, Key.named, 0, "B@") == "'B@' is not a kind; write it as B, or B.sync"
    )


def test_a_stage_and_a_kind_find_what_is_in_the_trainings_own_way() -> None:
    found = ByKey({(0, "F"): 1, Key(0, "F", "keep"): 2})
    assert list(found) == [Key(0, "F"), Key(0, "F", "keep")]
    assert found[0, "F"] == found[Key(0, "F")] == found[0, "F", "own"] == 1
    assert found[0, "F", "keep"] == 2
    assert (0, "F") in found
    assert (0, "B") not in found
    assert found.get((0, "B")) is None
    assert not hasattr(found, "__setitem__")


def test_a_profile_is_made_of_pairs_and_of_keys_alike() -> None:
    pairs = Profile({(0, "F"): ROWS, (0, "B"): SLOW}, 80.0)
    keys = Profile({Key(0, "B"): SLOW, Key(0, "F"): ROWS}, 80.0)
    assert pairs == keys
    assert pairs.digest == keys.digest
    assert pairs.measurements[0, "B"] == SLOW
    # A row that is changed in a copy replaces that of the same key.
    changed = replace(pairs, measurements={**pairs.measurements, (0, "B"): ROWS})
    assert dict(changed.measurements) == {Key(0, "F"): ROWS, Key(0, "B"): ROWS}


def test_a_key_is_the_pair_that_users_write_and_in_another_mode_is_no_pair() -> None:
    key = Key(3, "B")
    other = Key(3, "B", "keep")
    assert key == (3, "B")
    assert key == (3, "B")
    assert {key: 1}[3, "B"] == {(3, "B"): 1}[key] == 1
    assert other != (3, "B")
    assert other != (3, "B")
    assert other != key
    assert len({key, other, (3, "B")}) == 2
    assert sorted([(3, "F"), other, (2, "F"), key]) == [(2, "F"), other, key, (3, "F")]
    stage, kind = other
    assert (stage, kind) == (other.stage, other.kind) == (3, "B")
    for made in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert made == other
        assert made.mode == "keep"
    assert (repr(key), repr(other)) == ("Key(3, 'B')", "Key(3, 'B', 'keep')")


def test_users_may_loop_over_pairs_and_copy_rows_as_before() -> None:
    rows = {(0, "F"): ROWS, (0, "B"): SLOW, (0, "F@keep"): ROWS, (0, "B@keep"): ROWS}
    profile = Profile(rows, 80.0)
    assert {kind for (_, kind), _ in profile.measurements.items()} == {"F", "B"}
    assert {key.mode for key in profile.measurements} == {"own", "keep"}
    copied = dict(profile.measurements)
    assert copied[0, "B"] == SLOW
    assert profile.measurements[0, "B@keep"] == profile.measurements[0, "B", "keep"] == ROWS


@pytest.mark.parametrize("key", [(0, "X"), (0, "B@KEEP"), (0, "B", "KEEP"), (0,), "0B", (0, 1)])
def test_what_is_no_key_is_refused(key: object) -> None:
    said = refusal(ProfileError, Profile, {(0, "F"): ROWS, key: ROWS}, 80.0)
    assert "is not a stage and a kind" in said or "is not a kind" in said
