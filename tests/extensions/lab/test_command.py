"""`planner simulate` says what the library says, as text, JSON and CSV, and refuses bad input in
one line.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from commands import done, run
from strategies import smooth_profile

from perseus_planner import Frontier, solve
from perseus_planner.extensions.lab.command import simulate as command
from perseus_planner.extensions.lab.lengths import LENGTH_POLICIES
from perseus_planner.extensions.lab.policies import POLICIES
from perseus_planner.extensions.lab.replay import Cluster, simulate
from perseus_planner.extensions.lab.stragglers import read_stragglers
from perseus_planner.extensions.lab.views import cluster_text, summarize_cluster
from perseus_planner.schedules import Computation, Schedule, one_f_one_b

STRAGGLERS = "start,end,slowdown,pipeline,stage\n5,40,1.2,0,\n20,30,1.3,2,1\n90,,1.05,1,\n"
SIMULATE = (
    "simulate frontier.npz --pipelines 3 --iterations 100 --stragglers slow.csv --reaction-delay 2s"
)
DEFAULT = ("max", "one-clock", "per-stage", "envpipe", "planner-fixed", "planner")


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(replace(smooth_profile(2, step_mhz=120), gpus_per_stage=4), one_f_one_b(2, 3))


@pytest.fixture
def work(folder: Path, frontier: Frontier) -> Path:
    """A working folder with a frontier and a file of stragglers."""
    frontier.save("frontier.npz")
    Path("slow.csv").write_text(STRAGGLERS)
    return folder


def test_it_offers_every_policy():
    choice = next(option.type for option in command.params if option.name == "policies")
    assert tuple(dict.fromkeys((*POLICIES, *LENGTH_POLICIES))) == tuple(choice.choices)


def test_text_and_json_are_what_the_library_says(work: Path, frontier: Frontier):
    cluster = Cluster(frontier, 3, 100, read_stragglers(Path("slow.csv"), 3, 2), 2.0)
    summary = summarize_cluster(cluster, [simulate(cluster, name) for name in DEFAULT], 1.0)
    assert done(SIMULATE) == f"{cluster_text(summary)}\n"
    expected = json.loads(json.dumps(summary, default=asdict))
    assert json.loads(done(f"{SIMULATE} --json")) == {**expected, "files": []}


def test_the_text_names_its_baseline_and_how_it_came_to_be(work: Path):
    text = done(f"{SIMULATE} --policy planner --slowdown 1.1")
    assert text.startswith(
        "Cluster of 24 GPUs: 3 pipelines x 2 ranks x 4 GPUs, each pipeline 1f1b, 2 stages x 3 "
        "microbatches on smooth\n"
        "Replayed from a measured profile, in simulated time: 100 iterations, 3 stragglers; "
        "policies learn of them "
        "2 s late.\n\npolicy"
    )
    assert [line.split()[0] for line in text.splitlines()[4:6]] == ["max", "planner"]
    assert text.endswith(
        "without stragglers; the target is 1.1x.\n"
        "Baseline of every saving: all clocks at maximum (max) with the same stragglers, for as "
        "many iterations.\n\n"
    )


def test_savings_are_against_maximum_with_the_same_stragglers(work: Path):
    content = json.loads(
        done(f"{SIMULATE} --json --policy envpipe --policy planner --policy envpipe")
    )
    maximum, envpipe, ours = content["policies"]
    assert [each["policy"] for each in content["policies"]] == ["max", "envpipe", "planner"]
    assert (maximum["saved_j"], maximum["saved_share"]) == (0.0, 0.0)
    for each in (envpipe, ours):
        assert each["saved_share"] == (maximum["energy_j"] - each["energy_j"]) / maximum["energy_j"]
        assert each["time_ratio"] == each["iteration_s"] / content["baseline_time_s"] > 1


def test_the_csv_has_a_row_for_each_policy_and_gpu_and_adds_up(work: Path):
    content = json.loads(done(f"{SIMULATE} --json --csv gpus.csv --policy planner"))
    assert content["files"] == ["gpus.csv"]
    rows = list(csv.DictReader(Path("gpus.csv").read_text().splitlines()))
    expected = [
        (policy, str(pipeline), str(rank), str(gpu))
        for policy in ("max", "planner")
        for pipeline in range(3)
        for rank in range(2)
        for gpu in range(4)
    ]
    assert [(row["policy"], row["pipeline"], row["rank"], row["gpu"]) for row in rows] == expected
    for each in content["policies"]:
        mine = [row for row in rows if row["policy"] == each["policy"]]
        assert math.isclose(
            math.fsum(float(row["energy_j"]) for row in mine), each["energy_j"], rel_tol=1e-12
        )
        idle_s = math.fsum(float(row["idle_s"]) for row in mine)
        assert math.isclose(idle_s, each["idle_share"] * 24 * each["time_s"], rel_tol=1e-9)
        for row in mine:
            assert math.isclose(
                float(row["busy_s"]) + float(row["idle_s"]), each["time_s"], rel_tol=1e-12
            )


def test_a_policy_that_does_not_apply_is_left_out_unless_it_is_asked_for(work: Path):
    order = tuple(
        tuple(Computation(s, kind, m) for kind in "FB" for m in range(2)) for s in range(2)
    )
    other = solve(smooth_profile(2, step_mhz=120), Schedule("all-forward", order))
    other.save("other.npz")
    text = done("simulate other.npz --pipelines 2 --iterations 5")
    left_out = next(line for line in text.splitlines() if line.startswith("Left out: "))
    assert left_out.startswith("Left out: envpipe: EnvPipe's rule is for 1F1B only")
    assert "\nenvpipe" not in text
    result = run("simulate other.npz --pipelines 2 --policy envpipe")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: EnvPipe's rule is for 1F1B only")


REFUSED = {
    f"{SIMULATE} --pipelines 2": "slow.csv, line 3, column 'pipeline': there is no pipeline 2; "
    "pipelines are 0 to 1",
    f"{SIMULATE} --iterations 0": "iterations: 0 is not a whole number of at least 1",
    f"{SIMULATE} --reaction-delay soon": (
        "--reaction-delay: 'soon' is not a duration: write seconds of 0 or more, or "
        "a number with us, ms, s, m, h or d, such as 1.5ms or 30m"
    ),
    f"{SIMULATE} --slowdown 5%": (
        "--slowdown: '5%' is not a slowdown: write a number above 0, where 1 is as fast as all "
        "clocks at maximum, such as 1.05"
    ),
    "simulate frontier.npz": (
        "--pipelines: is missing; give the number of data-parallel pipelines, or --lengths with a "
        "file that has them"
    ),
    f"{SIMULATE} --policy batch": (
        "policy 'batch' is unknown; choose from max, one-clock, per-stage, envpipe, planner-fixed, "
        "planner"
    ),
    f"{SIMULATE} --csv slow.csv": "--csv slow.csv: is the file that is read; name another",
}


@pytest.mark.parametrize(("line", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line(work: Path, line: str, message: str):
    result = run(line)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {message}\n")


def test_no_delay_is_a_delay(work: Path):
    assert "0 s late" in done(f"{SIMULATE} --reaction-delay 0 --policy max")
