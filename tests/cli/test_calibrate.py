"""`planner calibrate` makes predicted times agree with measured ones by changing one number of a
file.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import done, loaded, refused
from noisy_rows import unlike_stages
from strategies import few_and_many, smooth_profile, soaks

from perseus_planner import Frontier, Plan, Profile
from perseus_planner.plans.job import Correction, Job
from perseus_planner.plans.replay import replay
from perseus_planner.solver.frontier import solve_dag

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


@pytest.mark.parametrize("extra_s", [0.125, -0.25, 0.0, 2e-6])
def test_the_plan_is_predicted_to_take_what_was_measured(work: Path, extra_s: float):
    plan = Plan.load("plan.yaml")
    done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + extra_s!r}s -o profile.yaml")
    assert Profile.load("profile.yaml").overhead_s == pytest.approx(extra_s, abs=1e-9)
    assert again(plan).time_s == pytest.approx(plan.time_s + extra_s, abs=1e-9)


def test_a_second_measurement_replaces_the_first_whatever_plan_it_is_of(work: Path):
    plan = Plan.load("plan.yaml")
    done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + 0.5}s -o profile.yaml")
    first = (work / "profile.yaml").read_text()
    done("solve profile.yaml --schedule 1f1b --microbatches 4 -o again.npz")
    done("plan again.npz --slowdown 1.1 -o later.yaml")
    later = Plan.load("later.yaml")
    assert later.overhead_s == pytest.approx(0.5, abs=1e-9)
    for name in ("plan.yaml", "later.yaml"):  # made without an overhead, and with the first one
        (work / "profile.yaml").write_text(first)
        replayed_s = replay(Plan.load(name)).time_s - Plan.load(name).overhead_s
        found = loaded(
            f"calibrate profile.yaml {name} --measured {replayed_s + 0.125!r}s -o profile.yaml"
        )
        assert found["overhead_before_s"] == pytest.approx(0.5, abs=1e-9)
        assert found["overhead_s"] == pytest.approx(0.125, abs=1e-9)
        assert found["predicted_before_s"] == pytest.approx(replayed_s + 0.5, abs=1e-9)
        assert found["predicted_s"] == pytest.approx(found["measured_s"], abs=1e-9)
        assert Profile.load("profile.yaml").overhead_s == found["overhead_s"]


def test_a_job_keeps_its_own_overhead_and_its_comments(work: Path):
    plan = Plan.load("of-job-1.yaml")
    (work / "job.yaml").write_text(
        JOB.replace("version: 1\n", "version: 1\noverhead_s: 7.5 # of last night\n")
    )
    done(f"calibrate job.yaml of-job-1.yaml --measured {plan.time_s + 0.5}s -o job.yaml")
    assert (work / "job.yaml").read_text() == JOB.replace(
        "version: 1\n", "version: 1\noverhead_s: 0.5 # of last night\n"
    )
    assert {profile.overhead_s for profile in Job.load("job.yaml").profiles} == {0.5}
    assert Profile.load("profile.yaml").overhead_s == 0.0


def test_it_says_the_old_and_the_new_predicted_time_and_changes_nothing_else(work: Path):
    plan = Plan.load("plan.yaml")
    before = {file: file.read_text() for file in work.glob("*.*[lv]")}
    text = done(f"calibrate profile.yaml plan.yaml --measured {plan.time_s + 0.5}s -o profile.yaml")
    assert text == (
        f"Iteration time: {plan.time_s + 0.5:.6g} s measured, {plan.time_s:.6g} s replayed.\n"
        "Overhead: 0 s before, 0.5 s now.\n"
        f"Predicted iteration time of this plan: {plan.time_s:.6g} s before, "
        f"{plan.time_s + 0.5:.6g} s now.\n"
        "Warning: 37 % of the iteration is overhead, which counts as equal for all plans. If "
        "computations really "
        "take longer, slower plans are later than predicted; calibrate a job file by three plans "
        "or more, of different "
        "times, to see it.\n"
        "Existing frontiers and plans do not include it; make them again with `planner solve` and "
        "`planner plan`.\n"
        "\nWrote profile.yaml\n"
    )
    before[work / "profile.yaml"] += "overhead_s: 0.5\n"
    assert {file: file.read_text() for file in before} == before


OTHER = (
    "{}: is not the profile that the plan was made from, which has the digest {}; name the "
    "profile.yaml, or the job "
    "file, that it was made from without further options"
)


def test_a_plan_of_another_profile_is_refused(work: Path):
    digests = {name: Plan.load(name).profile_digest[:12] for name in ("plan.yaml", "of-job-0.yaml")}
    replace(smooth_profile(2, step_mhz=150), blocking_power_w=50.0).save("other.yaml")
    for name, plan in (
        ("other.yaml", "plan.yaml"),
        ("profile.yaml", "of-job-0.yaml"),
        ("job.yaml", "plan.yaml"),
    ):
        expected = OTHER.format(name, digests[plan])
        assert refused(f"calibrate {name} {plan} --measured 3s") == expected


REFUSED = {
    "calibrate profile.yaml plan.yaml --measured 1ms": (
        "--measured: 1 ms is less than half of the {:.6g} s of the replay; give the mean time of "
        "an iteration with "
        "this plan, on the GPUs that were profiled"
    ),
    "calibrate profile.yaml plan.yaml --measured 5m": (
        "--measured: 300 s is more than twice the {:.6g} s of the replay; give the mean time of an "
        "iteration with "
        "this plan, on the GPUs that were profiled"
    ),
    "calibrate profile.yaml plan.yaml --measured soon": (
        "--measured: 'soon' is not a duration: write seconds above 0, or "
        "a number with us, ms, s, m, h or d, such as 2.95s"
    ),
    "calibrate profile.csv plan.yaml --measured 3s": (
        "profile.csv: a CSV does not hold an overhead; name a profile.yaml, or a job file"
    ),
    "calibrate absent.yaml plan.yaml --measured 3s": "absent.yaml: no such file; check the path",
    "calibrate profile.yaml absent.yaml --measured 3s": "absent.yaml: there is no such plan or run "
    "folder; name the folder that the training was given as `record`",
    "calibrate flow.yaml plan.yaml --measured 1s": (
        "flow.yaml: overhead_s cannot be written into it; write `overhead_s: {overhead!r}` yourself"
    ),
}


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line(work: Path, command: str, message: str):
    content = (work / "profile.yaml").read_text()
    (work / "flow.yaml").write_text("{" + ", ".join(content.splitlines()) + "}\n")
    time_s = Plan.load("plan.yaml").time_s
    assert refused(command) == message.format(time_s, overhead=round(1 - time_s, 9))


TRUTHS = {
    "nothing else": Correction(),
    "latency": Correction(0.0015),
    "factor": Correction(0.0, {"B": 1.3, "F": 1.3}),
    "a factor of each kind": Correction(0.0, {"B": 1.6, "F": 1.2}),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job and six plans of it."""
    folder = tmp_path_factory.mktemp("planned")
    unlike_stages(smooth_profile(4, step_mhz=90), 3).save(folder / "profile.yaml")
    (folder / "job.yaml").write_text(
        "format: perseus-planner/job\nversion: 1\nprofile: profile.yaml\nschedule: "
        "1f1b\nmicrobatches: 6 # few\n"
    )
    frontier = solve_dag(Job.load(folder / "job.yaml").dags()[0])
    for slowdown in (1.0, 1.05, 1.1, 1.2, 1.4):
        plan = frontier.plan_until(slowdown * frontier.baseline_time_s)
        plan.save(folder / f"plan-{slowdown}.yaml")
    one_kind = {c: 1410 if "F" in c else 1050 for c in plan.clocks}
    frontier.plan_of(one_kind).save(folder / "forward.yaml")
    return folder


@pytest.fixture
def several(folder: Path, planned: Path) -> str:
    """Return the names of these plans, in the current folder."""
    shutil.copytree(planned, folder, dirs_exist_ok=True)
    return " ".join([*sorted(path.name for path in folder.glob("plan-*")), "forward.yaml"])


def true_times_s(plans: str, overhead_s: float, correction: Correction) -> list[float]:
    """Return how long the plans take if the job is really so."""
    truth = solve_dag(Job.load("job.yaml", overhead_s=overhead_s, correction=correction).dags()[0])
    return [truth.plan_of(Plan.load(name).clocks).time_s for name in plans.split()]


def calibrating(plans: str, times_s: Sequence[float]) -> str:
    """Return the command that calibrates the job by the times of plans."""
    measured = " ".join(f"--measured {time_s!r}s" for time_s in times_s)
    return f"calibrate job.yaml {plans} {measured} -o job.yaml"


@pytest.mark.parametrize("name", TRUTHS)
def test_several_plans_say_what_iterations_really_wait_for(several: str, name: str):
    truth = TRUTHS[name]
    times_s = true_times_s(several, 0.05, truth)
    found = loaded(calibrating(several, times_s))
    assert found["hop_latency_s"] == pytest.approx(truth.hop_latency_s, abs=1e-8)
    assert found["time_factors"] == pytest.approx(dict(truth.time_factors), rel=1e-6)
    assert found["overhead_s"] == pytest.approx(0.05, abs=1e-6)
    assert found["left_out_error"] < 1e-6
    assert [each["predicted_s"] for each in found["plans"]] == pytest.approx(times_s, rel=1e-7)
    again = solve_dag(Job.load("job.yaml").dags()[0])
    made = again.plan_until(1.1 * again.baseline_time_s)
    made.save("again.yaml")
    assert true_times_s("again.yaml", 0.05, truth) == pytest.approx([made.time_s], rel=1e-7)


def test_it_says_what_several_plans_show(several: str):
    times_s = true_times_s(several, 0.3, TRUTHS["factor"])
    text = done(calibrating(several, times_s)).splitlines()
    assert text[0].startswith(
        f"Iteration time, mean of 6 plans: {sum(times_s) / 6:.6g} s measured, "
    )
    assert text[1:3] == [
        "Overhead: 0 s before, 0.3 s now.",
        "Computations take longer than profiled: backwards 1.3x, forwards 1.3x.",
    ]
    assert text[3].startswith("Predicted iteration time of these plans: ")
    assert text[4] == "From the other plans, the time of a plan is predicted within 0.00 %, mean."
    assert text[5].startswith(
        "Warning: 12 % of the iteration is overhead, which counts as equal for all plans. "
    )
    content = Path("job.yaml").read_text()
    assert content.splitlines()[-3:] == [
        "microbatches: 6 # few",
        "overhead_s: 0.3",
        "correction: {time_factors: {B: 1.3, F: 1.3}}",
    ]


def test_a_later_calibration_begins_anew_and_one_plan_changes_only_the_overhead(several: str):
    def calibrate(overhead_s: float, truth: str, plans: str) -> str:
        done(calibrating(plans, true_times_s(plans, overhead_s, TRUTHS[truth])))
        return Path("job.yaml").read_text().split("few\n")[1]

    calibrate(0.3, "a factor of each kind", several)
    one = calibrate(0.2, "a factor of each kind", "plan-1.1.yaml")  # made before the correction
    assert one == "overhead_s: 0.2\ncorrection: {time_factors: {B: 1.6, F: 1.2}}\n"
    assert (
        calibrate(0.125, "latency", several)
        == "overhead_s: 0.125\ncorrection: {hop_latency_s: 0.0015}\n"
    )
    assert calibrate(0.125, "nothing else", several) == "overhead_s: 0.125\n"


@pytest.mark.parametrize("noise", [0.01, *soaks(0.001)])
@few_and_many("seeds", 1, 4)
def test_noise_alone_gives_no_correction_that_predicts_worse(
    several: str, noise: float, seeds: int
):
    truth = true_times_s(several, 0.05, Correction())
    for seed in range(seeds):
        errors = np.random.default_rng(seed).normal(0.0, noise, 6)
        times_s = np.array(truth) * np.exp(errors)
        found = loaded(calibrating(several, times_s.tolist()))
        assert found["left_out_error"] < 2.5 * noise
        assert [each["predicted_s"] for each in found["plans"]] == pytest.approx(
            truth, rel=2 * noise
        )
        Path("job.yaml").write_text(Path("job.yaml").read_text().split("overhead_s")[0])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "the measured time of an iteration is missing; give it with --measured TIME, or give "
        "the folder of a run "
             "instead of plan-1.05.yaml"),
        ("--measured 2s --measured 3s", "--measured: 3 times for 2 plans; give one for each"),
        ("--measured 1ms", "plan-1.05.yaml: 1 ms is less than half of the {:.6g} s of the replay; "
        "give the mean "
                           "time of an iteration with this plan, on the GPUs that were profiled"),
    ],
)  # fmt: skip
def test_a_time_is_given_for_each_plan(several: str, more: str, message: str):
    expected = message.format(Plan.load("plan-1.05.yaml").time_s)
    command = f"calibrate job.yaml plan-1.0.yaml plan-1.05.yaml --measured 2s {more}"
    assert refused(command) == expected
