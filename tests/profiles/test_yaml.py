"""Every malformed profile YAML is refused, with its line and the remedy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from refusals import refusal

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.profiles import ClockChange, Profile

GOOD = "stage,instruction,frequency,time,energy\n0,forward,1410,0.05,20\n0,backward,1410,0.1,40\n"
YAML = "format: perseus-planner/profile\nversion: 1\nmeasurements: p.csv\nblocking_power_w: 83.64\n"
NEEDS_POWER = "is not a power: give finite watts of 0 or more, such as 83.64"


def message_of(path: str) -> str:
    return refusal(ProfileError, Profile.load, path)


BAD_YAMLS = {
    "empty": ("", "p.yaml: is empty; write one `key: value` a line"),
    "list": ("- 1\n", "p.yaml: is not a mapping; write one `key: value` a line"),
    "no format": (
        "version: 1\n",
        "p.yaml: has no key 'format'; write `format: perseus-planner/profile`",
    ),
    "wrong format": (
        YAML.replace("profile", "plan"),
        "p.yaml, line 1, key 'format': 'perseus-planner/plan' is not 'perseus-planner/profile'; "
        "name a file of that format",
    ),
    "no version": (
        YAML.replace("version: 1\n", ""),
        "p.yaml: has no key 'version'; write `version: 1`",
    ),
    "later version": (
        YAML.replace("version: 1", "version: 2\nnew: key"),
        "p.yaml, line 2, key 'version': 2 cannot be read: this planner reads version 1; "
        "use the planner that wrote the file, or write it again with this one",
    ),
    "version yes": (
        YAML.replace("version: 1", "version: yes"),
        "p.yaml, line 2, key 'version': True cannot be read: this planner reads version 1; "
        "use the planner that wrote the file, or write it again with this one",
    ),
    "misspelt key": (
        YAML + "blocking_power: 70\n",
        "p.yaml, line 5: unknown key 'blocking_power'; did you mean 'blocking_power_w'?",
    ),
    "unknown key": (
        YAML + "zebra: 70\n",
        "p.yaml, line 5: unknown key 'zebra'; remove it; known keys are blocking_power_w, "
        "clock_change, conditions, format, gpu, gpu_spread, gpus_per_stage, iteration, jitter, "
        "jitter_common, jitter_tail, measurements, modes, origin, overhead_s, shared_energy_error, "
        "shared_time_error, version",
    ),
    "key twice": (
        YAML + "blocking_power_w: 70\n",
        "p.yaml, line 5: key 'blocking_power_w' stands on line 4 too; keep one",
    ),
    "no blocking power": (
        YAML.replace("blocking_power_w: 83.64\n", ""),
        "p.yaml: has no key 'blocking_power_w'; add it",
    ),
    "nothing but format": (
        "format: perseus-planner/profile\nversion: 1\n",
        "p.yaml: has no key 'blocking_power_w', 'measurements'; add it",
    ),
    "power as text": (
        YAML.replace("83.64", "'83.64'"),
        f"p.yaml, line 4, key 'blocking_power_w': '83.64' {NEEDS_POWER}",
    ),
    "power NaN": (
        YAML.replace("83.64", ".nan"),
        f"p.yaml, line 4, key 'blocking_power_w': nan {NEEDS_POWER}",
    ),
    "negative power": (
        YAML.replace("83.64", "-1"),
        f"p.yaml, line 4, key 'blocking_power_w': -1 {NEEDS_POWER}",
    ),
    "conditions that are none": (
        YAML + "conditions: [cold]\n",
        "p.yaml, line 5, key 'conditions': ['cold'] is not a mapping of texts: write `name: text`, "
        "one on each line",
    ),
    "gpu of two lines": (
        YAML + 'gpu: "A100\\e[2J"\n',
        "p.yaml, line 5, key 'gpu': 'A100\\x1b[2J' is not the name of a GPU: give one line of "
        "text, or leave it out",
    ),
    "unknown origin": (
        YAML + "origin: guessed\n",
        "p.yaml, line 5, key 'origin': 'guessed' is unknown: give measured or simulated or "
        "traced or unknown",
    ),
    "power of a stage as text": (
        YAML.replace("83.64", "[80, x]"),
        f"p.yaml, line 4, key 'blocking_power_w': 'x' {NEEDS_POWER}",
    ),
    "powers of too many stages": (
        YAML.replace("83.64", "[80, 81]"),
        "p.yaml, line 4, blocking_power_w: has 2 numbers for 1 stages; give one for each, or one "
        "for all",
    ),
    "no GPU in a stage": (
        YAML + "gpus_per_stage: 0\n",
        "p.yaml, line 5, key 'gpus_per_stage': 0 is not a whole number of at least 1",
    ),
    "overhead as text": (
        YAML + "overhead_s: 5ms\n",
        "p.yaml, line 5, key 'overhead_s': '5ms' is not an overhead: write finite seconds, such as "
        "0.12",
    ),
    "clock change without a call": (
        f"{YAML}clock_change: {{settle_s: 0.01}}\n",
        "p.yaml, line 5, clock_change: has no key 'call_s'; add it",
    ),
    "clock change with a wait": (
        f"{YAML}clock_change: {{call_s: 0.01, wait_s: 1}}\n",
        "p.yaml, line 5: unknown key 'wait_s' of clock_change; remove it; known keys are call_s, "
        "gpus_per_node, settle_s",
    ),
    "clock change that never settles": (
        f"{YAML}clock_change: {{call_s: 0, settle_s: .inf}}\n",
        "p.yaml, line 5, key 'settle_s' of clock_change: inf is not a wait: give finite seconds "
        "of 0 or more, such as 0.002",
    ),
    "clock change as a number": (
        YAML + "clock_change: 0.01\n",
        "p.yaml, line 5, key 'clock_change': 0.01 is not a mapping; write it with the keys "
        "call_s, settle_s, gpus_per_node",
    ),
    "clock change below 0": (
        YAML + "clock_change:\n  call_s: -0.01\n",
        "p.yaml, line 6, key 'call_s' of clock_change: -0.01 is not a wait: give finite seconds "
        "of 0 or more, such as 0.002",
    ),
    "object": (
        YAML + "gpu: !!python/object/apply:os.system [exit 1]\n",
        "p.yaml, line 5, column 6: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'; write plain values, without tags such "
        "as !!python/object",
    ),
    "broken syntax": (
        YAML + "gpu: [A100\norigin: measured\n",
        "p.yaml, line 6, column 7: is not valid YAML: did not find expected ',' or ']'; correct "
        "that line",
    ),
    "impossible date": (
        YAML + "gpu: 2001-99-99\n",
        "p.yaml: is not valid YAML: month must be in 1..12; correct that line",
    ),
    "deep nesting": (
        YAML + "gpu: " + "[" * 200000,
        "p.yaml: is nested more than 20 levels deep; write one `key: value` a line",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_YAMLS.values(), ids=BAD_YAMLS.keys())
def test_a_bad_yaml_is_refused_with_its_remedy(folder: Path, text: str, message: str):
    (folder / "p.csv").write_text(GOOD)
    (folder / "p.yaml").write_text(text)
    assert message_of("p.yaml") == message


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../p.csv", "sub/p.csv", "..", ".", '"sub\\\\p.csv"', '""', "7"]
)
def test_measurements_elsewhere_than_beside_the_yaml_are_refused(folder: Path, name: str):
    (folder / "p.csv").write_text(GOOD)
    (folder / "p.yaml").write_text(YAML.replace("p.csv", name))
    message = message_of("p.yaml")
    assert message.startswith("p.yaml, line 3, key 'measurements': ")
    assert message.endswith(" is not a plain file name: name a CSV in the same folder")


def test_measurements_that_are_not_there_are_refused(folder: Path):
    (folder / "p.yaml").write_text(YAML)
    expected = (
        "p.yaml, line 3, key 'measurements': p.csv does not exist; put the CSV beside the YAML"
    )
    assert message_of("p.yaml") == expected


def test_a_yaml_that_is_not_utf8_is_refused(folder: Path):
    (folder / "p.yaml").write_bytes(YAML.encode() + b"gpu: \xff\n")
    assert message_of("p.yaml") == "p.yaml, line 5: is not UTF-8 text; save the file as UTF-8"


def test_a_yaml_of_two_gigabytes_is_not_read(folder: Path):
    (folder / "p.yaml").touch()
    os.truncate("p.yaml", 2 * 2**30)
    expected = "p.yaml: is larger than 64 MiB; name a file that the planner wrote"
    assert message_of("p.yaml") == expected


def test_a_yaml_says_all_that_is_not_in_the_table(folder: Path):
    (folder / "p.csv").write_text(
        GOOD + "1,F,1410,0.05,20\n1,I,1410,0.05,20\n1, weight-gradient ,1410,0.05,20\n"
    )
    rest = "gpus_per_stage: 4\noverhead_s: -0.5\nclock_change: {call_s: 0.01}\n"
    (folder / "p.yaml").write_text(YAML.replace("83.64", "[80, 81.5]") + rest)
    profile = Profile.load("p.yaml")
    assert profile.blocking_power_w == (80.0, 81.5)
    assert (profile.gpus_per_stage, profile.overhead_s, profile.clock_change) == (
        4,
        -0.5,
        ClockChange(0.01, 0.0),
    )
    assert list(map(str, profile.measurements)) == ["0F", "0B", "1F", "1I", "1W"]
    assert Profile.load("p.yaml", blocking_power_w=10) == dataclasses.replace(
        profile, blocking_power_w=10.0
    )


def test_a_yaml_carries_the_power_and_an_argument_replaces_it(folder: Path):
    (folder / "p.csv").write_text(GOOD)
    (folder / "p.yaml").write_text(YAML + "gpu: NVIDIA A40\norigin: simulated\n")
    profile = Profile.load("p.yaml")
    assert (profile.blocking_power_w, profile.gpu, profile.origin) == (
        83.64,
        "NVIDIA A40",
        "simulated",
    )
    assert Profile.load("p.yaml", blocking_power_w=10) == dataclasses.replace(
        profile, blocking_power_w=10.0
    )
