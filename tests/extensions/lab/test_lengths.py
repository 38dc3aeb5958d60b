"""Files of lengths are read strictly, replayed under each policy, and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import done, run
from strategies import smooth_profile

from perseus_planner import Frontier, solve
from perseus_planner.base.file_kinds import kind_of
from perseus_planner.extensions.lab import views
from perseus_planner.extensions.lab.lengths import LENGTH_POLICIES, UnlikeJob, read_lengths
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.schedules import one_f_one_b

STEPS, PIPELINES, MICROBATCHES = 3, 4, 4


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(smooth_profile(2, step_mhz=60), one_f_one_b(2, MICROBATCHES))


@pytest.fixture
def work(folder: Path, frontier: Frontier) -> Path:
    """A working folder with a frontier, a file of work and one of lengths."""
    frontier.save("frontier.npz")
    rng = np.random.default_rng(0)
    columns = ",".join(f"microbatch_{m}" for m in range(MICROBATCHES))
    rows = [f"# of a job\nstep,pipeline,{columns}"]
    sequences = ["step,pipeline,microbatch,length"]
    for step in range(STEPS):
        for pipeline in range(PIPELINES):
            drawn = rng.lognormal(0.0, 0.3, MICROBATCHES).round(4).tolist()
            rows.append(f"{step},{pipeline},{','.join(map(str, drawn))}")
            for microbatch in range(MICROBATCHES):
                place = f"{step},{pipeline},{microbatch}"
                sequences += [f"{place},{length}" for length in rng.integers(1, 4096, 2).tolist()]
    Path("work.csv").write_text("\n".join(rows) + "\n")
    Path("lengths.csv").write_text("\n".join(sequences) + "\n")
    return folder


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("step,pipeline,microbatch,length\n", "lengths"),
        ("\ufeff# of a job\r\n\r\nstep,pipeline,microbatch_0\r\n", "lengths"),
        ("microbatch,step,pipeline,length\n", "lengths"),
        ("tokens\n", "lengths"),
        ("step,rank,length\n", "lengths"),
        (" # per microbatch\nstage,instruction,frequency,time,energy\n", "profile"),
        ("\n" * 5000 + "microbatch\n", "profile"),
    ],
)
def test_a_file_of_lengths_is_known_by_its_header(folder: Path, head: str, kind: str):
    Path("file.csv").write_text(head)
    assert kind_of(Path("file.csv")) == kind


def test_lengths_are_added_up_for_each_microbatch(folder: Path):
    Path("lengths.csv").write_text(
        "step,pipeline,microbatch,length\n7,0,0,100\n7,0,0,300\n7,0,1,49152\n"
    )
    lengths = read_lengths(Path("lengths.csv"))
    packed = 400 + (100**2 + 300**2) / 49152
    long = 49152 + 49152
    mean = (packed + long) / 2
    assert lengths.work.tolist() == [[[pytest.approx(packed / mean), pytest.approx(long / mean)]]]
    assert lengths.of_sequences


def test_plans_of_the_batch_save_the_most_in_no_time(work: Path, frontier: Frontier):
    job = UnlikeJob(frontier, read_lengths(Path("work.csv")))
    came = {name: job.outcome(name) for name in LENGTH_POLICIES}
    full_s = [max(job.full_clocks_s(i)) for i in range(STEPS)]
    assert came["max"].times_s == pytest.approx(full_s, rel=1e-12)
    for name in ("own-time", "one-clock", "batch"):
        assert max(np.divide(came[name].times_s, full_s)) <= 1 + 1e-9
        assert came["batch"].energy_j <= came[name].energy_j < came["max"].energy_j
    assert sum(came["planner-fixed"].times_s) > 1.01 * sum(full_s)
    assert sum(came["on-time"].times_s) < sum(came["planner-fixed"].times_s)
    as_is_s, reordered_s = job.reordered_s()
    assert as_is_s == pytest.approx(sum(full_s))
    assert reordered_s < as_is_s


def test_clocks_that_were_not_measured_run_at_the_next_higher_ones(work: Path, frontier: Frontier):
    rng = np.random.default_rng(0)
    noisy = {
        key: tuple(replace(m, time_s=m.time_s * rng.normal(1.0, 0.01)) for m in rows)
        for key, rows in frontier.profile.measurements.items()
    }
    profile = replace(frontier.profile, measurements=noisy)
    lengths = read_lengths(Path("work.csv")).first(1)
    wary = UnlikeJob(solve(profile, one_f_one_b(2, MICROBATCHES)), lengths).outcome("on-time")
    assert wary.energy_j > 0.0


def test_what_changes_cost_is_caught_up(work: Path, frontier: Frontier):
    profile = replace(frontier.profile, clock_change=ClockChange(0.0045, 0.0009))
    job = UnlikeJob(
        solve(profile, one_f_one_b(2, MICROBATCHES)), read_lengths(Path("work.csv")).first(1)
    )
    full, batch = (job.outcome(name) for name in ("max", "batch"))
    assert batch.energy_j < full.energy_j
    assert batch.times_s[0] < 1.02 * full.times_s[0]


def test_text_and_json_have_a_row_for_each_policy(work: Path):
    text = done("simulate frontier.npz --lengths lengths.csv")
    assert [line.split()[0] for line in text.splitlines()[4:10]] == list(LENGTH_POLICIES)
    assert "Work of a microbatch: tokens + squared lengths / 49152" in text
    content = json.loads(
        done("simulate frontier.npz --lengths work.csv --iterations 2 --policy batch --json")
    )
    assert [each["policy"] for each in content["policies"]] == ["max", "batch"]
    assert content["lengths"]["iterations"] == 2
    assert content["policies"][1]["saved_share"] > 0.05
    assert 0.0 <= content["reordered_share"] < 1.0


def test_show_says_what_it_would_bring_before_any_run(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "_SHOWN_STAGES", (1, 2))
    text = done("show lengths.csv")
    assert text.startswith("Lengths of 3 iterations x 4 pipelines x 4 microbatches\n")
    assert "simulated: no GPU was touched" in text
    content = json.loads(done("show work.csv --json"))
    assert [each["stages"] for each in content["pipelines"]] == [1, 2]
    for each in content["pipelines"]:
        assert each["batch_saved_share"] >= each["one_clock_saved_share"] > 0.0
    result = run("show work.csv --plot figure.png")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: work.csv: has no figure; leave --plot out\n",
    )


REFUSED = {
    "step,pipeline,microbatch\n": (
        "bad.csv, line 1: no column 'length' in the header 'step,pipeline,microbatch'; write "
        "step,pipeline,microbatch,length, or step,pipeline,microbatch_0,microbatch_1 and so on, "
        "separated by commas"
    ),
    "step,pipeline,microbatch,length\n": (
        "bad.csv: has no rows below its header; write what each step had"
    ),
    "step,pipeline,microbatch,length\n0,0,0,-3\n": (
        "bad.csv, line 2, column 'length': '-3' is not a whole number of at least 1"
    ),
    "step,pipeline,microbatch_0\n0,0,nan\n": (
        "bad.csv, line 2, column 'microbatch_0': 'nan' is not a work: write a number of 0 or more"
    ),
    "step,pipeline,microbatch_0\n0,0,0\n": "bad.csv: has no work at all; write numbers above 0",
    "step,pipeline,microbatch_0\n0,0,1\n0,0,1\n": (
        "bad.csv, line 3: this step and pipeline are there twice; keep one of the rows"
    ),
    "step,pipeline,microbatch_0\n0,0,1\n0,1,1\n1,0,1\n": (
        "bad.csv: step 1 has no microbatch 0 of pipeline 1; give all steps the same pipelines and "
        "microbatches"
    ),
    "step,pipeline,microbatch_0\n0,0,1\n": (
        "lengths: have 1 microbatches in an iteration, and the schedule 4; solve for 1"
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_file_is_refused_in_one_line(work: Path, content: str, message: str):
    Path("bad.csv").write_text(content)
    result = run("simulate frontier.npz --lengths bad.csv")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--pipelines 4", "--pipelines: does not go with --lengths; leave it out"),
        ("--csv gpus.csv", "--csv: does not go with --lengths; leave it out"),
        ("--iterations 0", "iterations: 0 is not a whole number of at least 1"),
        (
            "--policy envpipe",
            "policy 'envpipe' does not apply to lengths; choose from max, planner-fixed, on-time, "
            "own-time, one-clock, batch",
        ),
    ],
)
def test_options_of_stragglers_do_not_go_with_lengths(work: Path, options: str, message: str):
    result = run(f"simulate frontier.npz --lengths work.csv {options}")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {message}\n")
