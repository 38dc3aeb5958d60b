"""A profile is checked when it is made, cannot be changed, and loads as it was saved."""

from __future__ import annotations

import dataclasses
import errno
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import ClockChange, Profile

OR_NONE = ", or, if it does not run, as in a frozen stage, give it a row of 0 s and 0 J"
NEEDS_TIME = "is not a time: write finite seconds above 0, such as 0.0512"
NEEDS_ENERGY = "is not an energy: write finite joules of 0 or more, such as 23.8"
NEEDS_CLOCK = "is not a clock: write whole MHz above 0, such as 1410"
NEEDS_STAGE = "is not a stage number: write 0 for the first stage, 1 for the next, and so on"
NEEDS_OVERHEAD = "is not an overhead: write finite seconds, such as 0.12"
NEEDS_CHANGE = "is not a ClockChange; give one, such as ClockChange(call_s=0.006)"
NEEDS_POWER = "is not a power: give finite watts of 0 or more, such as 83.64"


def small(**changes: object) -> Profile:
    options = (Measurement(1410, 0.05, 20.0), Measurement(855, 0.07, 15.0))
    profile = Profile({(0, "F"): options, (0, "B"): options}, 83.64)
    return dataclasses.replace(profile, **changes)


BAD_VALUES = {
    "no measurements": (
        {},
        "has no measurements; give at least one forward and one backward of stage 0",
    ),
    "wrong key": (
        {"0F": ()},
        "measurements: '0F' is not a stage and a kind: write it as (0, 'F') or "
        "(0, 'B'), or with a mode as (0, 'B', 'recompute')",
    ),
    "wrong kind": (
        {(0, "X"): ()},
        "measurements: (0, 'X') is not a stage and a kind: write it as (0, 'F') or "
        "(0, 'B'), or with a mode as (0, 'B', 'recompute')",
    ),
    "wrong stage": ({(-1, "F"): ()}, f"stage: -1 {NEEDS_STAGE}"),
    "no clocks": (
        {(0, "F"): ()},
        "stage 0 forward: has no measurement; give one for each clock, at least one",
    ),
    "clock twice": (
        {
            (3, "B"): (
                Measurement(855, 1.0, 1.0),
                Measurement(1410, 1.0, 1.0),
                Measurement(855, 2.0, 1.0),
            )
        },
        "stage 3 backward: 855 MHz is there twice; keep one measurement of each clock",
    ),
    "no backward": (
        {(0, "F"): (Measurement(855, 1.0, 1.0),)},
        "stage 0 has no backward; measure its backward at one clock or more" + OR_NONE,
    ),
    "half a backward": (
        {(0, kind): (Measurement(855, 1.0, 1.0),) for kind in "FI"},
        "stage 0 has no weight-gradient; measure its weight-gradient at one clock or more"
        + OR_NONE,
    ),
    "half a backward beside a whole one": (
        {(0, kind): (Measurement(855, 1.0, 1.0),) for kind in "FBW"},
        "stage 0 has no input-gradient; measure its input-gradient at one clock or more" + OR_NONE,
    ),
    "a backward in two parts on one stage only": (
        {
            (stage, kind): (Measurement(855, 1.0, 1.0),)
            for stage in range(2)
            for kind in ("FIW", "F")[stage]
        },
        "stage 1 has no backward; measure its backward at one clock or more" + OR_NONE,
    ),
    "no forward beside weight gradients": (
        {(0, kind): (Measurement(855, 1.0, 1.0),) for kind in "IW"},
        "stage 0 has no forward; measure its forward at one clock or more" + OR_NONE,
    ),
    "a variant alone": (
        {(0, kind): (Measurement(855, 1.0, 1.0),) for kind in ("F", "B.sync")},
        "stage 0 has no backward; measure its backward at one clock or more" + OR_NONE,
    ),
    "a suffix in capitals": (
        {(0, "B.Sync"): ()},
        "measurements: (0, 'B.Sync') is not a stage and a kind: write it as (0, 'F') or "
        "(0, 'B'), or with a mode as (0, 'B', 'recompute')",
    ),
    "a word for a kind": (
        {(0, "backward"): ()},
        "measurements: (0, 'backward') is not a stage and a kind: write it as (0, 'F') or "
        "(0, 'B'), or with a mode as (0, 'B', 'recompute')",
    ),
}


@pytest.mark.parametrize(("measurements", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_bad_profile_made_in_python_is_refused(measurements, message: str):
    assert refusal(ProfileError, Profile, measurements, 80.0) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1410.0, 1.0, 1.0), f"clock_mhz: 1410.0 {NEEDS_CLOCK}"),
        ((True, 1.0, 1.0), f"clock_mhz: True {NEEDS_CLOCK}"),
        ((1410, "1.0", 1.0), f"time_s: '1.0' {NEEDS_TIME}"),
        ((1410, float("nan"), 1.0), f"time_s: nan {NEEDS_TIME}"),
        ((1410, 0, 1.0), f"time_s: 0 {NEEDS_TIME}"),
        ((1410, 10**400, 1.0), f"time_s: 100000000000000000...0000000000000000000 {NEEDS_TIME}"),
        ((1410, 1.0, -1e-9), f"energy_j: -1e-09 {NEEDS_ENERGY}"),
        ((1410, 1.0, None), f"energy_j: None {NEEDS_ENERGY}"),
    ],
)
def test_a_bad_measurement_made_in_python_is_refused(values, message: str):
    assert refusal(ProfileError, Measurement, *values) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocking_power_w": None}, f"blocking_power_w: None {NEEDS_POWER}"),
        ({"blocking_power_w": (80.0, -1)}, f"blocking_power_w: -1 {NEEDS_POWER}"),
        ({"blocking_power_w": {}}, f"blocking_power_w: {{}} {NEEDS_POWER}"),
        (
            {"blocking_power_w": (80.0, 81.0)},
            "blocking_power_w: has 2 numbers for 1 stages; give one for each, or one for all",
        ),
        (
            {"blocking_power_w": []},
            "blocking_power_w: has 0 numbers for 1 stages; give one for each, or one for all",
        ),
        ({"gpus_per_stage": 0}, "gpus_per_stage: 0 is not a whole number of at least 1"),
        ({"gpus_per_stage": 2.0}, "gpus_per_stage: 2.0 is not a whole number of at least 1"),
        ({"overhead_s": math.nan}, f"overhead_s: nan {NEEDS_OVERHEAD}"),
        ({"overhead_s": -math.inf}, f"overhead_s: -inf {NEEDS_OVERHEAD}"),
        ({"overhead_s": "0.1"}, f"overhead_s: '0.1' {NEEDS_OVERHEAD}"),
        ({"overhead_s": True}, f"overhead_s: True {NEEDS_OVERHEAD}"),
        ({"clock_change": 0.01}, f"clock_change: 0.01 {NEEDS_CHANGE}"),
        ({"gpu": ""}, "gpu: '' is not the name of a GPU: give one line of text, or leave it out"),
        (
            {"origin": "fitted"},
            "origin: 'fitted' is unknown: give measured or simulated or traced or unknown",
        ),
    ],
)
def test_a_profile_of_unknown_kind_is_refused(changes: dict[str, object], message: str):
    assert refusal(ProfileError, small, **changes) == message


def test_a_profile_cannot_be_changed():
    options = {(0, kind): (Measurement(1410, 0.05, 20.0),) for kind in "FB"}
    profile = Profile(options, 80.0)
    options.clear()
    assert profile.stages == 1
    with pytest.raises(TypeError):
        profile.measurements[0, "F"] = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.blocking_power_w = 0.0


def test_measurements_stand_in_pipeline_order_with_the_highest_clock_first():
    options = tuple(Measurement(clock, 1.0, 0.0) for clock in (855, 1410, 1200))
    profile = Profile({(stage, kind): options for stage in (1, 0) for kind in "BF"}, 0.0)
    assert list(profile.measurements) == [Key(0, "F"), Key(0, "B"), Key(1, "F"), Key(1, "B")]
    assert [option.clock_mhz for option in profile.measurements[1, "B"]] == [1410, 1200, 855]


def test_numpy_numbers_become_plain_ones():
    option = Measurement(np.int64(1410), np.float32(0.5), np.float64(-0.0))
    assert [repr(value) for value in dataclasses.astuple(option)[:3]] == ["1410", "0.5", "0.0"]


def test_the_digest_changes_with_every_value():
    options = {(0, kind): (Measurement(1410, 0.05, 20.0),) for kind in "FB"}
    changed = {**options, (0, "B"): (Measurement(1410, 0.05, np.nextafter(20.0, 21.0)),)}
    variants = [
        *(
            {},
            {"blocking_power_w": 83.65},
            {"blocking_power_w": (83.64,)},
            {"gpu": "A100"},
            {"origin": "simulated"},
        ),
        *({"gpus_per_stage": 2}, {"overhead_s": 1e-9}, {"overhead_s": -1e-9}),
        *(
            {"clock_change": ClockChange(0.01)},
            {"clock_change": ClockChange(0.01, 0.01)},
            {"clock_change": ClockChange(0.01, 0.0, 4)},
        ),
    ]
    profiles = [small(**changes) for changes in variants] + [
        Profile(options, 83.64),
        Profile(changed, 83.64),
    ]
    assert len({profile.digest for profile in profiles}) == len(profiles)


def test_a_profile_of_parts_and_variants_stands_in_their_order():
    options = (Measurement(1410, 1.0, 0.0),)
    kinds = ("W.b", "W", "I.sync", "W.a", "B", "F.re-compute_1", "I", "F")
    profile = Profile({(0, kind): options for kind in kinds}, 0.0)
    assert [key.kind for key in profile.measurements] == [
        "F",
        "F.re-compute_1",
        "B",
        "I",
        "I.sync",
        "W",
        "W.a",
        "W.b",
    ]
    assert Profile({(0, kind): options for kind in "FIW"}, 0.0).stages == 1


def test_each_stage_waits_at_its_own_power_or_all_at_one():
    points = {(stage, kind): (Measurement(1410, 1.0, 0.0),) for stage in range(2) for kind in "FB"}
    each, all_alike = Profile(points, [np.float32(70.5), 80]), Profile(points, 75)
    assert repr(each.blocking_power_w) == "(70.5, 80.0)"
    assert [each.blocking_w(stage) for stage in range(2)] == [70.5, 80.0]
    assert [all_alike.blocking_w(stage) for stage in range(2)] == [75.0, 75.0]


@pytest.mark.parametrize("overhead_s", [-0.5, np.float32(-0.5), Fraction(-1, 2), np.float64(-0.5)])
def test_less_may_have_been_measured_than_replayed(overhead_s):
    assert repr(small(overhead_s=overhead_s).overhead_s) == "-0.5"


def profiles() -> st.SearchStrategy[Profile]:
    times_s = st.floats(0, exclude_min=True, allow_infinity=False)
    options = st.builds(
        Measurement, st.integers(1, 3000), times_s, st.floats(0, allow_infinity=False)
    )
    choices = st.lists(
        options, min_size=1, max_size=4, unique_by=lambda option: option.clock_mhz
    ).map(tuple)
    kinds = st.sampled_from(
        (("F", "B"), ("F", "I", "W"), ("F", "B", "I", "W"), ("F", "F.recompute", "B", "B.sync"))
    )
    powers_w, waits_s = st.floats(0, allow_infinity=False), st.floats(0, 1e300)

    def of(kinds_of: list[tuple[str, ...]]) -> st.SearchStrategy[Profile]:
        keys = [(stage, kind) for stage, kinds in enumerate(kinds_of) for kind in kinds]
        return st.builds(
            Profile,
            st.fixed_dictionaries(dict.fromkeys(keys, choices)),
            powers_w | st.tuples(*[powers_w] * len(kinds_of)),
            st.none() | st.text(min_size=1).filter(str.isprintable),
            st.sampled_from(["measured", "simulated", "unknown"]),
            st.integers(1, 64),
            st.just(0.0) | st.floats(allow_infinity=False, allow_nan=False),
            st.none() | st.builds(ClockChange, waits_s, waits_s, st.integers(1, 16)),
        )

    return st.lists(kinds, min_size=1, max_size=3).flatmap(of)


@given(profile=profiles())
def test_a_saved_profile_loads_as_it_was_and_saves_to_the_same_bytes(
    profile: Profile, tmp_path_factory
):
    with pytest.MonkeyPatch.context() as patch:  # whatever its rows are, they are kept
        patch.setattr("perseus_planner.profiles.profiles.find_doubts", lambda *_, **__: [])
        patch.setattr("perseus_planner.profiles.profiles.power_problem", lambda *_, **__: None)
        check_round_trip(profile, tmp_path_factory)


def check_round_trip(profile: Profile, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("profile")
    profile.save(folder / "p.yaml")
    written = [(folder / name).read_bytes() for name in ("p.csv", "p.yaml")]
    again = Profile.load(folder / "p.yaml")
    assert again == profile
    assert again.digest == profile.digest
    again.save(folder / "p.yaml")
    assert [(folder / name).read_bytes() for name in ("p.csv", "p.yaml")] == written


def test_a_saved_profile_of_all_there_can_be_reads_well(folder: Path):
    options = (Measurement(1410, 0.05, 20.0),)
    Profile(
        {
            (stage, kind): options
            for stage, kinds in enumerate((("F", "B", "B.sync"), ("F", "I", "W")))
            for kind in kinds
        },
        (83.64, 70.0),
        gpus_per_stage=8,
        overhead_s=-0.25,
        clock_change=ClockChange(0.01, 0.005),
    ).save("p.yaml")
    assert (folder / "p.yaml").read_text() == (
        "format: perseus-planner/profile\nversion: 1\nmeasurements: p.csv\n"
        "blocking_power_w:\n- 83.64\n- 70.0\ngpu: null\norigin: unknown\ngpus_per_stage: "
        "8\noverhead_s: -0.25\n"
        "clock_change:\n  call_s: 0.01\n  settle_s: 0.005\n  gpus_per_node: 8\n"
    )
    words = [line.split(",")[:2] for line in (folder / "p.csv").read_text().splitlines()[1:]]
    assert words == [
        *(["0", "forward"], ["0", "backward"], ["0", "backward.sync"]),
        *(["1", "forward"], ["1", "input-gradient"], ["1", "weight-gradient"]),
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "p.csv",
            "p.csv: a profile is saved as YAML with a CSV beside it; end the name with .yaml",
        ),
        (
            "none/p.yaml",
            "none/p.yaml: cannot be written: No such file or directory; check the folder",
        ),
    ],
)
def test_a_profile_that_cannot_be_saved_says_why(folder: Path, path: str, message: str):
    assert refusal(ProfileError, small().save, path) == message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("taken", ["p.yaml", "p.csv"])
def test_a_profile_that_cannot_be_saved_leaves_neither_file(folder: Path, taken: str):
    (folder / taken).mkdir()
    message = f"{taken}: is a folder; name another file"
    assert refusal(ProfileError, small().save, "p.yaml") == message
    assert [path.name for path in folder.iterdir()] == [taken]


def test_a_full_disk_leaves_neither_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Profile) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Profile, "_csv", full)
    said = refusal(ProfileError, small().save, "p.yaml")
    assert said == "p.csv: cannot be written: No space left on device; check the folder"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "power_w", "clocks_mhz"),
    [
        ("gpt3-175b+a100_sxm_bf16", 83.64, range(1410, 840, -15)),
        ("bloom+a40_bf16", 70.38, range(1740, 840, -15)),
    ],
)
def test_measured_profiles_load_whole(
    measured_data: Path, name: str, power_w: float, clocks_mhz: range
):
    profile = Profile.load(
        measured_data / "perseus_sosp24" / "stage_profile" / f"{name}.csv", power_w
    )
    assert profile.stages == 8
    for options in profile.measurements.values():
        assert [option.clock_mhz for option in options] == list(clocks_mhz)
