"""`planner explore` prints what to measure, and writes a job file that can be planned on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import done, refusal

from perseus_planner.extensions.explore.transformer import PRESETS
from perseus_planner.plans.job import Job

SMALL = "explore small.yaml --gpus 8 --gpu a100-sxm --batch 32"
SMALLEST = "explore small.yaml --gpus 2 --gpu a100-sxm --batch 8"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shape = PRESETS["gpt3-1.3b"]
    Path("small.yaml").write_text(
        "format: perseus-planner/transformer\nversion: 1\nlayers: 8\n"
        f"hidden: {shape.hidden}\nheads: {shape.heads}\nvocabulary: 50257\nsequence: 2048\n"
    )
    return tmp_path


def test_it_names_the_first_three_and_their_frontier(folder: Path):
    text = done(f"{SMALL} --tokens 1B")
    assert "SIMULATED: estimates do not rank with certainty. Measure these:" in text
    assert text.count("t1-p1-d8-mb") >= 2
    assert "Where the energy of number 1 goes at full clocks: arithmetic " in text
    assert "Not tried: " in text
    assert re.search(r" [1-7] of 8 ", text)  # rows of fewer GPUs than asked for
    assert "iteration s  tokens/s  mJ/token  W/GPU" in text
    assert (
        "1,000,000,000 tokens (nodes draw 1,500 to 2,000 W beside their GPUs, PUE 1.2, both "
        "assumed unless given):" in text
    )


def test_the_json_holds_rows_and_forecasts_in_si_units(folder: Path):
    found = json.loads(done(f"{SMALL} --tokens 1e9 --pue 1.0 --json"))
    assert (found["model"], found["gpu"], found["origin"]) == ("small", "a100-sxm", "simulated")
    assert len(found["first"]) == 3
    first = found["first"][0]
    assert first["tokens_per_s"] == pytest.approx(32 * 2048 / first["time_s"])
    assert first["forecast"]["hours"] == pytest.approx(1e9 / first["tokens_per_s"] / 3600)
    frontier = found["frontier"]
    assert [row["time_s"] for row in frontier] == sorted(row["time_s"] for row in frontier)
    assert [row["j_per_token"] for row in frontier] == sorted(
        (r["j_per_token"] for r in frontier), reverse=True
    )


def test_the_job_of_a_row_takes_its_time(folder: Path):
    found = json.loads(done(f"{SMALL} --schedule interleaved-1f1b --job 2 -o job.yaml --json"))
    row = found["first"][1]
    job = Job.load("job.yaml")
    assert sum(job.counts) == row["data_degree"]
    assert (len(job.schedule.ranks), job.schedule.stages) == (
        row["ranks"],
        row["ranks"] * row["virtual_stages"],
    )
    assert job.tokens_per_iteration == 32 * 2048
    time_s = json.loads(done("solve job.yaml -o frontier.npz --json"))["baseline_time_s"]
    assert time_s == pytest.approx(row["time_s"], rel=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--deadline 1s --least-energy",
            "give one of --deadline, --power-budget and --least-energy, or none for the fastest",
        ),
        (
            "--schedule 1f2b",
            "--schedule: '1f2b' is not explored; give 1f1b or interleaved-1f1b or zb-h1",
        ),
        (
            "--tokens many",
            "--tokens: 'many' is not a number of tokens: write one above 0, such as 26e9, 26B or "
            "1.4T",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, options: str, message: str):
    assert refusal(f"{SMALL} {options}") == (2, "", f"Error: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("gpt3-1.3 --gpus 8", "model 'gpt3-1.3': there is no such model; did you mean gpt3-1.3b?"),
        (
            "org/Llama-3-8B --gpus 8",
            "model 'org/Llama-3-8B': there is no such model; did you mean llama3-8b?",
        ),
        (
            ". --gpus 8",
            "model '.': is a folder without a config.json; give its config.json, a .yaml file "
            f"with its dimensions, or one of {', '.join(PRESETS)}",
        ),
    ],
)
def test_what_cannot_be_explored_is_refused_with_the_nearest_that_can(
    folder: Path, options: str, message: str
):
    assert refusal(f"explore {options} --gpu a100-sxm") == (2, "", f"Error: {message}\n")


@pytest.mark.parametrize(
    ("option", "what"),
    [("--deadline 1ms", "is that fast"), ("--power-budget 100W", "draws that little")],
)
def test_the_least_deadline_or_power_that_is_named_can_be_met(folder: Path, option: str, what: str):
    status, _, error = refusal(f"{SMALLEST} {option}")
    assert (status, error.partition("; give ")[0]) == (
        2,
        f"Error: {option.split()[0]}: no configuration {what}",
    )
    least = error.partition("; give ")[2].removesuffix(" or more\n")
    assert done(f"{SMALLEST} {option.split()[0]} {least}")


def test_a_configuration_that_is_not_there_is_not_written(folder: Path):
    only = "explore small.yaml --gpus 1 --gpu a100-sxm --batch 1 --recompute none"
    message = "--job: is 3, but only 1 configuration is worth measuring; give 1"
    assert refusal(f"{only} --job 3 -o job.yaml") == (2, "", f"Error: {message}\n")
    assert not Path("job.yaml").exists()
    done(f"{only} --job 1 -o job.yaml")


def test_a_system_file_says_what_the_gpu_is(folder: Path):
    Path("system.yaml").write_text(
        "format: perseus-planner/system\nversion: 1\ngpu: a100-sxm\nkernels:\n"
        "- {hidden: 2048, heads: 16, sequence: 2048, vocabulary: 50304, microbatch: 4,\n"
        "   layer_forward_s: 0.02, layer_backward_s: 0.04, head_s: 0.02}\n"
    )
    options = "explore small.yaml --gpus 8 --batch 32 --system system.yaml"
    found = json.loads(done(f"{options} --json"))
    assert found["origin"] == "estimated from measured kernels"
    assert "t1-p1-d8-mb4-1f1b-none" not in [row["configuration"] for row in found["first"]]
    message = "Error: --gpu: is h100-sxm, but system.yaml is of a100-sxm; leave it out\n"
    assert refusal(f"{options} --gpu h100-sxm") == (2, "", message)
    Path("system.yaml").write_text(
        "format: perseus-planner/system\nversion: 1\ngpu: a100-sxm\nlaunch_s: -1\n"
    )
    status, _, error = refusal(options)
    assert status == 2
    assert error.startswith("Error: system.yaml, line 4, key 'launch_s': -1 ")
