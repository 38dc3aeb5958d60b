"""`planner solve` gives the same for a job file, for the same flags and for the same calls in
Python.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import done, loaded, refused
from strategies import smooth_profile

from perseus_planner import Frontier, schedules, solve
from perseus_planner.profiles.groups import on_each_gpu, slowed
from perseus_planner.schedules.pipeline import FixedOperation, Transfer
from perseus_planner.views.frontier import frontier_text, summarize_frontier

HEAD = "format: perseus-planner/job\nversion: 1\nprofile: four.yaml\n"
JOB = f"""{HEAD}schedule: interleaved-1f1b
microbatches: 4
ranks: 2
virtual_stages: 2
stages: 4
tensor_parallel: 2
transfer: {{forward_s: 0.0015, backward_s: 0.0015}}
slow_stages: {{1: 1.15, 3: 1.05}}
blocking_power_w: 50
overhead_s: -0.25
"""
FLAGS = (
    "--schedule interleaved-1f1b --microbatches 4 --ranks 2 --virtual-stages 2 --stages 4 "
    "--tensor-parallel 2 --transfer 1.5ms --slow 1=1.15 --slow 3=1.05 --blocking-power 50W "
    "--overhead=-250ms"
)

CAPS_W = 250  #: a power limit of each GPU that the highest clocks of some stages are above


@pytest.fixture
def work(folder: Path) -> Path:
    """A working folder with profiles, a text grid and a job file."""
    smooth_profile(4, step_mhz=150).save("four.yaml")
    schedules.save_grid(schedules.gpipe(4, 3), "order.csv")
    (folder / "job.yaml").write_text(JOB)
    return folder


def test_a_job_file_flags_and_calls_give_the_same_file(work: Path):
    done("solve job.yaml -o of-job.npz")
    done(f"solve four.yaml {FLAGS} -o of-flags.npz")
    profile = smooth_profile(4, step_mhz=150)
    profile = replace(profile, blocking_power_w=50.0, overhead_s=-0.25)
    profile = slowed(on_each_gpu(profile, 2), {1: 1.15, 3: 1.05})
    schedule = schedules.interleaved_1f1b(2, 2, 4)
    solve(profile, schedule, transfer=Transfer(0.0015, 0.0015)).save("of-calls.npz")
    files = [(work / f"of-{name}.npz").read_bytes() for name in ("job", "flags", "calls")]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--microbatches 2", "microbatches: 2"),
        ("--schedule order.csv", "schedule: order.csv"),
        ("--schedule zbv --ranks 2", "schedule: zbv\nranks: 2"),
        ("--tensor-parallel 3", "tensor_parallel: 3"),
        ("--transfer 0", "transfer: {}"),
        ("--slow 0=2", "slow_stages: {0: 2}"),
        ("--blocking-power 0.07kW", "blocking_power_w: 70"),
        ("--overhead 1s", "overhead_s: 1"),
        (f"--gpu-power-limit {CAPS_W}W", f"gpu_power_limit_w: {CAPS_W}"),
    ],
)
def test_a_flag_replaces_the_key_of_its_name(work: Path, flag: str, key: str):
    rest = {
        "schedule": "1f1b",
        "microbatches": "3",
        "transfer": "{forward_s: 0.1}",
        "slow_stages": "{1: 1.15}",
    }
    text = HEAD + "".join(f"{name}: {value}\n" for name, value in rest.items())
    if "zbv" in flag:  # it has input and weight gradients
        profile = smooth_profile(4, step_mhz=150)
        halves = {
            (stage, half): rows
            for (stage, kind), rows in profile.measurements.items()
            for half in "IW"
        }
        type(profile)({**profile.measurements, **halves}, 83.64).save("four.yaml")
    (work / "first.yaml").write_text(text)
    named = {line.split(":")[0] for line in key.splitlines()}
    kept = [line for line in text.splitlines() if line.split(":")[0] not in named]
    (work / "second.yaml").write_text("\n".join([*kept, key]))
    done(f"solve first.yaml {flag} -o flag.npz")
    done("solve second.yaml -o key.npz")
    done("solve first.yaml -o neither.npz")
    flagged, keyed, neither = (
        (work / f"{name}.npz").read_bytes() for name in ("flag", "key", "neither")
    )
    assert flagged == keyed != neither


def test_kinds_of_replicas_have_a_frontier_each_and_it_says_for_how_many(work: Path):
    (work / "job.yaml").write_text(
        f"{JOB}replicas:\n- count: 3\n- {{count: 1, slow_stages: {{0: 1.3}}}}\n"
    )
    text = done("solve job.yaml -o out.npz")
    each = [Frontier.load(f"out-{number}.npz") for number in (0, 1)]
    assert each[0].profile != each[1].profile
    assert not (work / "out.npz").exists()
    texts = "\n".join(frontier_text(summarize_frontier(frontier)) for frontier in each)
    assert text == f"{texts}\nWrote out-0.npz, for 3 pipelines\nWrote out-1.npz, for 1 pipeline\n"
    found = loaded("solve job.yaml -o out.npz")
    assert (found["counts"], found["files"]) == ([3, 1], ["out-0.npz", "out-1.npz"])
    assert [part["min_time_s"] for part in found["frontiers"]] == [
        frontier.min_time_s for frontier in each
    ]


def test_replicas_that_are_alike_have_one_frontier(work: Path):
    (work / "job.yaml").write_text(f"{JOB}replicas: 5\n")
    assert done("solve job.yaml -o out.npz").endswith("\nWrote out.npz, for 5 pipelines\n")
    assert loaded("solve job.yaml -o out.npz")["counts"] == [5]


def test_the_text_says_what_the_numbers_include(work: Path):
    (work / "job.yaml").write_text(
        JOB + "operations:\n- {name: load, when: before F, time_s: 0.01, where: [0]}\n"
    )
    _, counted, _ = (text := done("solve job.yaml -o out.npz")).splitlines()[1:4]
    assert text.startswith(
        "Frontier of interleaved-1f1b, 2 ranks x 2 virtual stages x 4 microbatches on smooth; 32 "
        "comp"
    )
    wanted = (
        "2 GPUs per stage, 4 operations of fixed time, transfers of up to 1.5 ms, -0.25 s of "
        "calibrated overhead"
    )
    assert counted == f"Included: {wanted}."
    assert f"\nIncluded: {wanted}.\n" in done("plan out.npz --slowdown 1 -o plan.yaml")


def test_the_help_names_every_schedule(work: Path):
    # A name may be parted where it has a hyphen.
    text = re.sub(r"-\s+", "-", done("solve --help"))
    assert all(name in text for name in schedules.NAMES)


SOLVE = "solve four.yaml --schedule 1f1b --microbatches 3 -o new.npz"
REFUSED = {
    "solve four.yaml --microbatches 3 -o new.npz": (
        "no schedule is given; give --schedule, or schedule in a job file: "
        f"{', '.join(schedules.NAMES)}, or a text grid"
    ),
    "solve four.yaml --schedule 1f1b -o new.npz": (
        "the number of microbatches of an iteration is missing; give --microbatches, or "
        "microbatches in a job file"
    ),
    f"{SOLVE} --schedule 1f1": "there is no schedule '1f1'; did you mean 1f1b?",
    f"{SOLVE} --schedule absent.csv": "absent.csv: no such file; check the path",
    f"{SOLVE} --ranks 0": "ranks: 0 is not a whole number of at least 1",
    f"{SOLVE} --ranks 2": (
        "the profile has 4 stages and the schedule 2; profile the stages of this schedule, or make "
        "the schedule for 4"
    ),
    f"{SOLVE} --virtual-stages 2": "schedule 1f1b: has 1 stage per rank, not 2; leave virtual "
    "stages out",
    f"{SOLVE} --tensor-parallel 0": "tensor_parallel: 0 is not a whole number of at least 1",
    f"{SOLVE} --transfer soon": (
        "--transfer: 'soon' is not a duration: write seconds of 0 or more, or "
        "a number with us, ms, s, m, h or d, such as 1.5ms or 30m"
    ),
    f"{SOLVE} --overhead=--5ms": (
        "--overhead: '--5ms' is not a duration: write seconds, or a number with us, ms, s, m, h or "
        "d, such as 120ms"
    ),
    f"{SOLVE} --slow 3": "--slow: '3' is not a slow stage: write stage and slowdown, such as "
    "3=1.15",
    f"{SOLVE} --slow 3=0": "--slow: '3=0' is not a slow stage: write stage and slowdown, such as "
    "3=1.15",
    f"{SOLVE} --slow 3=1.1 --slow 3=1.2": "--slow: stage 3 is given twice; keep one",
    f"{SOLVE} --slow 4=1.1": "slow stage 4: does not exist; stages are 0 to 3",
    "solve job.yaml -o job.yaml": "--output job.yaml: must end in .npz; rename it",
    "solve bad.yaml -o new.npz": "bad.yaml, line 4: unknown key 'microbatchs'; did you mean "
    "'microbatches'?",
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_options_are_refused_in_one_line(work: Path, command: str, message: str):
    (work / "bad.yaml").write_text(f"{HEAD}microbatchs: 3\n")
    assert refused(command) == message


def test_the_installed_command_solves_a_job(work: Path):
    planner = "from perseus_planner.cli import main; main()"
    command = [sys.executable, "-c", planner, "solve", "job.yaml", "-o", "out.npz", "--json"]
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["context"]["ranks"] == 2


def test_operations_of_a_job_are_those_of_the_calls(work: Path):
    text = (
        f"{HEAD}schedule: 1f1b\nmicrobatches: 2\noperations:\n- {{name: optimizer, when: end, "
        f"time_s: 0.5}}\n"
    )
    (work / "job.yaml").write_text(text)
    done("solve job.yaml -o of-job.npz")
    fixed = [FixedOperation("optimizer", "end", 0.5)]
    solve(smooth_profile(4, step_mhz=150), schedules.one_f_one_b(4, 2), operations=fixed).save(
        "of-calls.npz"
    )
    assert (work / "of-job.npz").read_bytes() == (work / "of-calls.npz").read_bytes()


def test_microbatches_that_are_no_multiple_of_the_ranks_go_in_groups_of_another_size(work: Path):
    command = (
        "solve four.yaml --schedule interleaved-1f1b --microbatches 5 --ranks 2 "
        "--virtual-stages 2 -o g.npz"
    )
    assert "give a group of 3" in refused(command)
    done(f"{command} --microbatch-group 3")
    assert Frontier.load("g.npz").schedule == schedules.interleaved_1f1b(2, 2, 5, group=3)
    refused("solve four.yaml --schedule gpipe --microbatches 5 --microbatch-group 3 -o g.npz")


def test_a_profile_of_the_halves_of_a_backward_plans_a_zero_bubble_schedule(work: Path):
    done("profile --gpu simulated:a100-sxm --stages 2 --split-backward -o split.yaml")
    done("solve split.yaml --schedule zb-h1 --microbatches 4 -o zero.npz")
    assert Frontier.load("zero.npz").schedule == schedules.zb_h1(2, 4)
