"""A profile is valid from birth, cannot be changed, and comes back from its files as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.errors import ProfileError
from perseus_planner.profiles import Measurement, Profile

NEEDS_TIME = "is not a time: write finite seconds above 0, such as 0.0512"
NEEDS_ENERGY = "is not an energy: write finite joules of 0 or more, such as 23.8"
NEEDS_CLOCK = "is not a clock: write whole MHz above 0, such as 1410"
NEEDS_STAGE = "is not a stage number: write 0 for the first stage, 1 for the next, and so on"
NEEDS_POWER = "is not a power: give finite watts of 0 or more, such as 83.64"


def small(**changes: object) -> Profile:
    options = (Measurement(1410, 0.05, 20.0), Measurement(855, 0.07, 15.0))
    profile = Profile({(0, "F"): options, (0, "B"): options}, 83.64)
    return dataclasses.replace(profile, **changes)


BAD_VALUES = {
    "no measurements": ({}, "has no measurements; give at least one forward and one backward of stage 0"),
    "wrong key": (
        {"0F": ()},
        "measurements: '0F' is not a stage and a kind: write it as (0, 'F') or (0, 'B')",
    ),
    "wrong kind": (
        {(0, "X"): ()},
        "measurements: (0, 'X') is not a stage and a kind: write it as (0, 'F') or (0, 'B')",
    ),
    "wrong stage": ({(-1, "F"): ()}, f"stage: -1 {NEEDS_STAGE}"),
    "no clocks": ({(0, "F"): ()}, "stage 0 forward: has no measurement; give one for each clock, at least one"),
    "clock twice": (
        {(3, "B"): (Measurement(855, 1.0, 1.0), Measurement(1410, 1.0, 1.0), Measurement(855, 2.0, 1.0))},
        "stage 3 backward: 855 MHz is there twice; keep one measurement of each clock",
    ),
    "no backward": (
        {(0, "F"): (Measurement(855, 1.0, 1.0),)},
        "stage 0 has no backward; measure its backward at one clock or more",
    ),
}


@pytest.mark.parametrize(("measurements", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_bad_profile_made_in_python_is_refused(measurements, message: str):
    with pytest.raises(ProfileError) as caught:
        Profile(measurements, 80.0)
    assert str(caught.value) == message


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
    with pytest.raises(ProfileError) as caught:
        Measurement(*values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocking_power_w": None}, f"blocking_power_w: None {NEEDS_POWER}"),
        ({"gpu": ""}, "gpu: '' is not the name of a GPU: give one line of text, or leave it out"),
        ({"origin": "fitted"}, "origin: 'fitted' is unknown: give measured or simulated"),
    ],
)
def test_a_profile_of_unknown_kind_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(ProfileError) as caught:
        small(**changes)
    assert str(caught.value) == message


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
    assert list(profile.measurements) == [(0, "F"), (0, "B"), (1, "F"), (1, "B")]
    assert [option.clock_mhz for option in profile.measurements[1, "B"]] == [1410, 1200, 855]


def test_numpy_numbers_become_plain_ones():
    option = Measurement(np.int64(1410), np.float32(0.5), np.float64(-0.0))
    assert [repr(value) for value in dataclasses.astuple(option)] == ["1410", "0.5", "0.0"]


def test_the_digest_changes_with_every_value():
    options = {(0, kind): (Measurement(1410, 0.05, 20.0),) for kind in "FB"}
    changed = {**options, (0, "B"): (Measurement(1410, 0.05, np.nextafter(20.0, 21.0)),)}
    variants = [{}, {"blocking_power_w": 83.65}, {"gpu": "A100"}, {"origin": "simulated"}]
    profiles = [small(**changes) for changes in variants] + [Profile(options, 83.64), Profile(changed, 83.64)]
    assert len({profile.digest for profile in profiles}) == len(profiles)


def profiles() -> st.SearchStrategy[Profile]:
    times_s = st.floats(0, exclude_min=True, allow_infinity=False)
    options = st.builds(Measurement, st.integers(1, 3000), times_s, st.floats(0, allow_infinity=False))
    choices = st.lists(options, min_size=1, max_size=4, unique_by=lambda option: option.clock_mhz).map(tuple)
    stages = st.integers(1, 3).flatmap(
        lambda count: st.fixed_dictionaries({(stage, kind): choices for stage in range(count) for kind in "FB"})
    )
    gpus = st.none() | st.text(min_size=1).filter(str.isprintable)
    return st.builds(
        Profile, stages, st.floats(0, allow_infinity=False), gpus, st.sampled_from(["measured", "simulated"])
    )


@given(profile=profiles())
def test_a_saved_profile_loads_as_it_was_and_saves_to_the_same_bytes(profile: Profile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    profile.save(folder / "p.yaml")
    written = [(folder / name).read_bytes() for name in ("p.csv", "p.yaml")]
    again = Profile.load(folder / "p.yaml")
    assert again == profile
    assert again.digest == profile.digest
    again.save(folder / "p.yaml")
    assert [(folder / name).read_bytes() for name in ("p.csv", "p.yaml")] == written


def test_a_saved_profile_reads_well(folder: Path):
    small(gpu="NVIDIA A100-SXM4-80GB").save("p.yaml")
    assert (folder / "p.yaml").read_text() == (
        "format: perseus-planner/profile\nversion: 1\nmeasurements: p.csv\n"
        "blocking_power_w: 83.64\ngpu: NVIDIA A100-SXM4-80GB\norigin: measured\n"
    )
    assert (folder / "p.csv").read_text() == (
        "stage,instruction,frequency,time,energy\n0,forward,1410,0.05,20.0\n0,forward,855,0.07,15.0\n"
        "0,backward,1410,0.05,20.0\n0,backward,855,0.07,15.0\n"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("p.csv", "p.csv: a profile is saved as YAML with a CSV beside it; end the name with .yaml"),
        ("none/p.yaml", "none/p.csv: cannot be written: No such file or directory; check the folder"),
    ],
)
def test_a_profile_that_cannot_be_saved_says_why(folder: Path, path: str, message: str):
    with pytest.raises(ProfileError) as caught:
        small().save(path)
    assert str(caught.value) == message
    assert list(folder.iterdir()) == []


def test_a_failed_save_leaves_no_temporary_file(folder: Path):
    (folder / "p.yaml").mkdir()
    with pytest.raises(ProfileError) as caught:
        small().save("p.yaml")
    assert str(caught.value) == "p.yaml: cannot be written: Is a directory; check the folder"
    assert sorted(path.name for path in folder.iterdir()) == ["p.csv", "p.yaml"]


@pytest.mark.parametrize(
    ("name", "power_w", "clocks_mhz"),
    [("gpt3-175b+a100_sxm_bf16", 83.64, range(1410, 840, -15)), ("bloom+a40_bf16", 70.38, range(1740, 840, -15))],
)
def test_measured_profiles_load_whole(measured_data: Path, name: str, power_w: float, clocks_mhz: range):
    profile = Profile.load(measured_data / "perseus_sosp24" / "stage_profile" / f"{name}.csv", power_w)
    assert profile.stages == 8
    for options in profile.measurements.values():
        assert [option.clock_mhz for option in options] == list(clocks_mhz)
