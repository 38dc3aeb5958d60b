"""`planner estimate` makes a profile from dimensions, and marks it as simulated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from commands import done, refusal

from perseus_planner import Profile
from perseus_planner.extensions.explore.calibration import estimate
from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.operations import SYSTEMS, stage_totals, with_link
from perseus_planner.extensions.explore.transformer import PRESETS
from perseus_planner.profiles.measurement import Measurement

GPT = "estimate --model gpt3-1.3b --gpu a100-sxm -o new.yaml"
DIMENSIONS = """format: perseus-planner/transformer
version: 1
layers: 4
hidden: 512
heads: 8
vocabulary: 1000
sequence: 256
"""


def write(path: Path, preset: str) -> None:
    document = {"format": "perseus-planner/transformer", "version": 1, **asdict(PRESETS[preset])}
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def test_the_profile_is_that_of_python_and_can_be_planned_on(folder: Path):
    done(
        f"{GPT} --layers 5,7,6,6 --tensor-parallel 2 --microbatch 4 --sequence 1024 --recompute "
        "full --link 250"
    )
    shape = replace(
        PRESETS["gpt3-1.3b"], tensor_degree=2, microbatch=4, sequence=1024, recomputation="full"
    )
    job = Configuration(shape, (5, 7, 6, 6), 1, 1)
    profile = Profile.load("new.yaml")
    assert profile == estimate(job, with_link(SYSTEMS["a100-sxm"], 250e9))
    assert (profile.origin, profile.gpus_per_stage) == ("simulated", 2)
    assert "nothing was measured" in profile.conditions["estimate"]
    done("solve new.yaml --schedule 1f1b --microbatches 8 -o frontier.npz")
    assert "simulated" in done("plan frontier.npz --slowdown 1 -o plan.yaml")


def test_zero_bubble_schedules_can_be_planned_on_a_split_backward(folder: Path):
    done(f"{GPT} --stages 2 --split-backward")
    assert {key.kind for key in Profile.load("new.yaml").measurements} == set("FBIW")
    done("solve new.yaml --schedule zb-h1 --microbatches 4 -o frontier.npz")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_of_dimensions_says_what_a_preset_says(folder: Path, preset: str):
    write(folder / "mine.yaml", preset)
    done(f"estimate --model {preset} --gpu h100-sxm --stages 8 -o preset.yaml")
    done("estimate --model mine.yaml --gpu simulated:h100-sxm --stages 8 -o own.yaml")
    assert Profile.load("own.yaml") == Profile.load("preset.yaml")


def test_a_file_may_leave_out_what_follows_from_the_rest(folder: Path):
    (folder / "mine.yaml").write_text(DIMENSIONS)
    done("estimate --model mine.yaml --gpu a40 --stages 2 -o short.yaml")
    (folder / "mine.yaml").write_text(
        f"{DIMENSIONS}kv_heads: 8\nhead_size: 64\nffn: 2048\ntensor_degree: 1\n"
    )
    done("estimate --model mine.yaml --gpu a40 --stages 2 -o long.yaml")
    assert Profile.load("short.yaml") == Profile.load("long.yaml")


def test_it_says_what_each_stage_does_and_that_it_is_simulated(folder: Path):
    text = done(f"{GPT} --stages 4 --tensor-parallel 2")
    assert "SIMULATED" in text.splitlines()[1]
    assert "Not calibrated" in text
    assert text.endswith("Wrote new.yaml\nWrote new.csv\n")
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [
        [str(s), "6", word] for s in range(4) for word in ("forward", "backward")
    ]


def test_the_json_holds_the_same_in_si_units(folder: Path):
    found = json.loads(done(f"{GPT} --stages 4 --tensor-parallel 2 --json"))
    profile, shape = Profile.load("new.yaml"), replace(PRESETS["gpt3-1.3b"], tensor_degree=2)
    assert (found["origin"], found["parameters"], found["files"]) == (
        "simulated",
        shape.parameters,
        ["new.yaml", "new.csv"],
    )
    works = stage_totals(shape, (6,) * 4)
    for row in found["computations"]:
        kind = row["instruction"][0].upper()
        top = profile.measurements[row["stage"], kind][0]
        assert (row["flops"], row["bytes"]) == (
            works[row["stage"]][kind].flops,
            works[row["stage"]][kind].bytes,
        )
        assert (row["time_s"], row["energy_j"]) == (top.time_s, pytest.approx(top.energy_j / 2))
    both_s = [
        profile.measurements[s, "F"][0].time_s + profile.measurements[s, "B"][0].time_s
        for s in range(4)
    ]
    assert found["imbalance"] == pytest.approx(max(both_s) / min(both_s))
    forward = found["efficiencies"][0]
    rows = [row for row in found["computations"] if row["instruction"] == "forward"]
    flops = sum(row["flops"] for row in rows)
    assert forward["flops_per_j"] == pytest.approx(flops / sum(row["energy_j"] for row in rows))
    assert forward["flops_per_s"] == pytest.approx(flops / sum(row["time_s"] for row in rows))


def twice(name: str, target: str) -> None:
    """Write profile `name` to `target` with twice the time and three times the energy."""
    profile = Profile.load(name)
    table = {
        key: tuple(Measurement(row.clock_mhz, 3 * row.time_s, 2 * row.energy_j) for row in rows)
        for key, rows in profile.measurements.items()
    }
    replace(profile, measurements=table, blocking_power_w=77.0, origin="measured").save(target)


def assert_near(profile: Profile, other: Profile) -> None:
    for key, rows in other.measurements.items():
        wanted = [pytest.approx(value) for row in rows for value in (row.time_s, row.energy_j)]
        # Calibrated stages have rows beyond the clock of the power limit as well.
        same = profile.measurements[key][-len(rows) :]
        assert [row.clock_mhz for row in same] == [row.clock_mhz for row in rows]
        assert [value for row in same for value in (row.time_s, row.energy_j)] == wanted


@pytest.mark.parametrize(("file", "power_w"), [("measured.yaml", 77.0), ("measured.csv", None)])
def test_a_measured_stage_calibrates(folder: Path, file: str, power_w: float | None):
    origin = "of unknown origin" if power_w is None else "measured"
    done(f"{GPT} --stages 4")
    twice("new.yaml", "measured.yaml")
    text = done(f"{GPT} --stages 4 --calibrate {file} -o own.yaml")
    assert f"Calibrated by stage 1 of {file} ({origin})." in text
    own, measured = Profile.load("own.yaml"), Profile.load("measured.yaml")
    assert_near(own, measured)
    assert own.blocking_power_w == (power_w or SYSTEMS["a100-sxm"].gpu.blocking_power_w)
    assert own.origin == "simulated"


def test_a_system_file_of_measured_kernels_is_that_of_explore(folder: Path):
    entry = "hidden: 2048, heads: 16, vocabulary: 50257, sequence: 2048"
    times = "layer_forward_s: 0.01, layer_backward_s: 0.02, head_s: 0.03"
    (folder / "system.yaml").write_text(
        "format: perseus-planner/system\nversion: 1\ngpu: a100-sxm\nkernels:\n"
        f"- {{{entry}, {times}}}\n"
    )
    options = "--model gpt3-1.3b --system system.yaml --stages 4"
    found = json.loads(done(f"estimate {options} -o own.yaml --json"))
    seconds = {(r["stage"], r["instruction"]): r["time_s"] for r in found["computations"]}
    assert seconds[1, "forward"] == pytest.approx(6 * 0.01)
    assert seconds[1, "backward"] == pytest.approx(6 * 0.02)
    for change in ("--microbatch 2", "--attention plain", "--recompute full"):
        found = json.loads(done(f"estimate {options} {change} -o own.yaml --json"))
        assert found["computations"][2]["time_s"] != pytest.approx(6 * 0.01, rel=0.01)


NAMES = ", ".join(PRESETS)
GPUS = ", ".join(SYSTEMS)
REFUSED = {
    GPT: "give either --stages, the number of stages, --layers, the layers of each, or --layout",
    f"{GPT} --stages 4 --layers 12,12": (
        "give either --stages, the number of stages, --layers, the layers of each, or --layout"
    ),
    f"{GPT} --stages 25": "stages is 25; give a whole number from 1 to the 24 layers of the model",
    f"{GPT} --layers twelve": "--layers: 'twelve' is not a whole number of at least 1",
    f"{GPT} --stages 4 --power-limit 50W": (
        "a100-sxm: a power limit of 50 W is out of range; give one from 100 to 400 W"
    ),
    f"{GPT} --stages 4 --link nan": "link: nan is not a bandwidth; give one above 0",
    f"{GPT} --stages 4 --gpu nvml:0": f"--gpu: there is no GPU 'nvml:0'; choose one of: {GPUS}",
    f"{GPT} --stages 4 --model gpt5": (
        "model 'gpt5': there is no such model; give its config.json, a .yaml file with its "
        f"dimensions, or one of {NAMES}"
    ),
    f"{GPT} --stages 2 --model odd.yaml": (
        "odd.yaml, line 5, key 'heads': 7 does not divide hidden of 512; give head_size too"
    ),
    f"{GPT} --stages 2 --model zero.yaml": "zero.yaml, line 4, hidden: 0 is not a whole number of "
    "at least 1",
    f"{GPT} --stages 2 --model word.yaml": "word.yaml, line 5, heads: 'eight' is not a whole "
    "number of at least 1",
    f"{GPT} --stages 2 --model more.yaml": (
        "more.yaml, line 8: unknown key 'headsize'; did you mean 'head_size'?"
    ),
    f"{GPT} --stages 2 --model none.yaml": "none.yaml: has no key 'sequence'; add it",
    f"{GPT} --stages 4 --calibrate old.yaml -o old.yaml": "--output old.yaml: is the file that is "
    "read; name another",
    f"{GPT} --stages 4 --calibrate old.csv -o old.yaml": "--output old.csv: is the file that is "
    "read; name another",
    f"{GPT} --stages 4 --model zero.yaml -o zero.yaml": "--output zero.yaml: is the file that is "
    "read; name another",
}


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line(folder: Path, command: str, message: str):
    done("estimate --model gpt3-1.3b --gpu a100-sxm --stages 4 -o old.yaml")
    changes = {
        "odd": ("heads: 8", "heads: 7"),
        "zero": ("hidden: 512", "hidden: 0"),
        "word": ("heads: 8", "heads: eight"),
        "more": ("sequence: 256\n", "sequence: 256\nheadsize: 64\n"),
        "none": ("sequence: 256\n", ""),
    }
    for name, (old, new) in changes.items():
        (folder / f"{name}.yaml").write_text(DIMENSIONS.replace(old, new))
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert refusal(command) == (2, "", f"Error: {message}\n")
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
