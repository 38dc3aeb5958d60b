"""`planner calibrate` makes predicted times agree with measured ones by changing one number of a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import done, refusal
from strategies import smooth_profile

from perseus_planner import Frontier, Plan, Profile
from perseus_planner.jobs.job import Job
from perseus_planner.plans.replay import replay

JOB = """# the job that runs tonight
format: perseus-planner/job
version: 1
profile: profile.yaml  # beside it
schedule: 1f1b
microbatches: 4
tensor_parallel: 2
replicas:
- count: 3
- {count: 1, slow_stages: {0: 1.2}}
"""


@pytest.fixture
def work(folder: Path) -> Path:
    """Create a working folder with a profile, a job, and a plan for each."""
    smooth_profile(2, step_mhz=150).save("profile.yaml")
    (folder / "job.yaml").write_text(JOB)
    done("solve profile.yaml --schedule 1f1b --microbatches 4 -o frontier.npz")
    done("plan frontier.npz --slowdown 1.05 -o plan.yaml")
    done("solve job.yaml -o of-job.npz")
    done("plan of-job-0.npz of-job-1.npz --replicas 3,1 --slowdown 1.05 -o of-job.yaml")
    return folder


def again(plan: Plan) -> Plan:
    """Make the same plan from the current profile."""
    done("solve profile.yaml --schedule 1f1b --microbatches 4 -o again.npz")
    return Frontier.load("again.npz").plan_of(plan.clocks)


@pytest.mark.parametrize("extra_s", [0.125, -0.25, 0.0])
def test_the_plan_is_predicted_to_take_what_was_measured(work: Path, extra_s: float):
    plan = Plan.load("plan.yaml")
    done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + extra_s!r}s")
    assert Profile.load("profile.yaml").overhead_s == pytest.approx(extra_s, abs=1e-9)
    assert again(plan).time_s == pytest.approx(plan.time_s + extra_s, abs=1e-9)


def test_a_second_measurement_replaces_the_first_whatever_plan_it_is_of(work: Path):
    plan = Plan.load("plan.yaml")
    done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + 0.5}s")
    first = (work / "profile.yaml").read_text()
    done("solve profile.yaml --schedule 1f1b --microbatches 4 -o again.npz")
    done("plan again.npz --slowdown 1.1 -o later.yaml")
    later = Plan.load("later.yaml")
    assert later.overhead_s == pytest.approx(0.5, abs=1e-9)
    for name in ("plan.yaml", "later.yaml"):  # made without an overhead, and with the first one
        (work / "profile.yaml").write_text(first)
        replayed_s = replay(Plan.load(name)).time_s - Plan.load(name).overhead_s
        found = json.loads(done(f"calibrate profile.yaml {name} --measured {replayed_s + 0.125!r}s --json"))
        assert found["overhead_before_s"] == pytest.approx(0.5, abs=1e-9)
        assert found["overhead_s"] == pytest.approx(0.125, abs=1e-9)
        assert found["predicted_before_s"] == pytest.approx(replayed_s + 0.5, abs=1e-9)
        assert found["predicted_s"] == pytest.approx(found["measured_s"], abs=1e-9)
        assert Profile.load("profile.yaml").overhead_s == found["overhead_s"]


def test_nothing_else_in_the_files_changes(work: Path):
    plan = Plan.load("plan.yaml")
    before = {file: file.read_text() for file in work.glob("*.*[lv]")}
    done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + 0.5}s")
    changed = [file.name for file, text in before.items() if file.read_text() != text]
    assert changed == ["profile.yaml"]
    assert (work / "profile.yaml").read_text() == before[work / "profile.yaml"] + "overhead_s: 0.5\n"


def test_a_small_overhead_stays_a_number(work: Path):
    plan = Plan.load("plan.yaml")
    done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + 2e-6!r}s")
    assert Profile.load("profile.yaml").overhead_s == pytest.approx(2e-6, abs=1e-9)


def test_a_job_keeps_its_own_overhead_and_its_comments(work: Path):
    plan = Plan.load("of-job-1.yaml")
    (work / "job.yaml").write_text(JOB.replace("version: 1\n", "version: 1\noverhead_s: 7.5 # of last night\n"))
    done(f"calibrate job.yaml of-job-1.yaml --measured {plan.time_s + 0.5}s")
    assert (work / "job.yaml").read_text() == JOB.replace(
        "version: 1\n", "version: 1\noverhead_s: 0.5 # of last night\n"
    )
    assert {profile.overhead_s for profile in Job.load("job.yaml").profiles} == {0.5}
    assert Profile.load("profile.yaml").overhead_s == 0.0


def test_it_says_the_old_and_the_new_predicted_time(work: Path):
    plan = Plan.load("plan.yaml")
    text = done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + 0.5}s")
    assert text == (
        f"Iteration time: {plan.time_s + 0.5:.6g} s measured, {plan.time_s:.6g} s replayed.\n"
        "Overhead: 0 s before, 0.5 s now.\n"
        f"Predicted iteration time of this plan: {plan.time_s:.5f} s before, {plan.time_s + 0.5:.5f} s now.\n"
        "Existing frontiers and plans do not include it; make them again with `planner solve` and `planner plan`.\n"
        "\nWrote profile.yaml\n"
    )


OTHER = (
    "{}: is not the profile that the plan was made from, which has the digest {}; name the profile.yaml, or the job "
    "file, that it was made from without further options"
)


def test_a_plan_of_another_profile_is_refused(work: Path):
    digests = {name: Plan.load(name).profile_digest[:12] for name in ("plan.yaml", "of-job-0.yaml")}
    replace(smooth_profile(2, step_mhz=150), blocking_power_w=50.0).save("other.yaml")
    for name, plan in (("other.yaml", "plan.yaml"), ("profile.yaml", "of-job-0.yaml"), ("job.yaml", "plan.yaml")):
        before = (work / name).read_bytes()
        expected = (2, "", f"Error: {OTHER.format(name, digests[plan])}\n")
        assert refusal(f"calibrate {name} {plan} --measured 3s") == expected
        assert (work / name).read_bytes() == before


REFUSED = {
    "calibrate profile.yaml plan.yaml --measured 1ms": (
        "--measured: 0.001 s is less than half of the {:.6g} s of the replay; give the mean time of an iteration with "
        "this plan"
    ),
    "calibrate profile.yaml plan.yaml --measured soon": (
        "--measured: 'soon' is not a duration: write seconds above 0, or a number with ms, s or min, such as 2.95s"
    ),
    "calibrate profile.csv plan.yaml --measured 3s": (
        "profile.csv: a CSV does not hold an overhead; name a profile.yaml, or a job file"
    ),
    "calibrate absent.yaml plan.yaml --measured 3s": "absent.yaml: no such file; check the path",
    "calibrate profile.yaml absent.yaml --measured 3s": "absent.yaml: no such file; check the path",
    "calibrate flow.yaml plan.yaml --measured 3s": (
        "flow.yaml: overhead_s cannot be written into it; write `overhead_s: {overhead!r}` yourself"
    ),
}


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line(work: Path, command: str, message: str):
    content = (work / "profile.yaml").read_text()
    (work / "flow.yaml").write_text("{" + ", ".join(content.splitlines()) + "}\n")
    time_s = Plan.load("plan.yaml").time_s
    before = {file: file.read_bytes() for file in work.iterdir()}
    expected = message.format(time_s, overhead=round(3 - time_s, 9))
    assert refusal(command) == (2, "", f"Error: {expected}\n")
    assert {file: file.read_bytes() for file in work.iterdir()} == before
