"""`planner trace`: what it prints and writes, and what the other commands do with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import done, loaded, refused
from made_traces import Made

from perseus_planner import Plan, Profile
from perseus_planner.base.errors import PlanError
from perseus_planner.runtime.sending import Plans
from perseus_planner.schedules.generators import generate
from perseus_planner.schedules.schedule import load_grid

FOUR = generate("1f1b", ranks=4, microbatches=8)
MADE = Made(FOUR, (0.020, 0.021, 0.022, 0.030), jitter=0.005)


@pytest.fixture
def traced(folder: Path) -> Path:
    MADE.write(folder)
    return folder


def test_a_saving_is_printed_and_what_is_written_can_be_solved(traced: Path):
    said = done("trace rank0.json rank1.json rank2.json rank3.json -o job")
    assert "Bottleneck: rank 3 (stage 3): computes " in said
    assert "A plan at the same speed would save " in said
    assert (
        "Known: clock assumed: 1335 MHz, of 1410 at most; power assumed: 360 W computing;" in said
    )
    job = traced / "job"
    assert {path.name for path in job.iterdir()} == {
        "schedule.csv",
        "profile.yaml",
        "profile.csv",
        "page.html",
        "perfetto.json",
    }
    assert load_grid(job / "schedule.csv").ranks == FOUR.ranks
    profile = Profile.load(job / "profile.yaml")
    assert profile.origin == "traced"
    assert profile.jitter == pytest.approx(0.005, rel=0.3)
    done("solve job/profile.yaml --schedule job/schedule.csv -o frontier.npz")
    planned = done("plan frontier.npz --slowdown 1.00 --as-measured -o plan.yaml")
    assert "Replayed from a traced profile" in planned
    summary = loaded("trace rank0.json rank1.json rank2.json rank3.json")
    saving = summary["saving"]
    # The clock that is named is that of the rows.
    assert "clock assumed: 1335 MHz, of 1410 at most" in saving["known"]
    assert {rows[0].clock_mhz for rows in profile.measurements.values()} == {1335}
    plan = Plan.load("plan.yaml")
    saved = 1 - plan.energy_j / plan.baseline_energy_j
    assert saved == pytest.approx(saving["middle_share"], abs=0.002)
    assert saving["least_share"] < saved < saving["most_share"]


def test_a_plan_of_a_trace_says_what_was_seen_and_has_one_interval(traced: Path):
    done("trace rank0.json rank1.json rank2.json rank3.json -o job")
    done("solve job/profile.yaml --schedule job/schedule.csv -o frontier.npz")
    said = done("plan frontier.npz --slowdown 1.00 -o plan.yaml")
    plan = Plan.load("plan.yaml")
    assert plan.on_time is not None
    # Only the highest clock was traced.
    points = {
        (plan.key(computation), plan.measurement(computation).clock_mhz)
        for computation in plan.schedule.computations()
    }
    unseen = sum(clock != 1335 for _, clock in points)
    assert 0 < unseen < len(points)
    assert (plan.on_time.points, plan.on_time.interpolated) == (len(points), unseen)
    assert f"{unseen} of its {len(points)} operating points were not measured" in said
    assert "90 % interval" not in said
    assert said.count("is expected to save ") == 1
    assert "power assumed: 360 W computing" in said


def test_the_interval_is_said_wherever_the_profile_is_used(traced: Path):
    done("trace rank0.json rank1.json rank2.json rank3.json -o job")
    wanted = "a plan at the same speed is expected to save"
    assert wanted in done("show job/profile.yaml")
    assert wanted in done("solve job/profile.yaml --schedule job/schedule.csv -o frontier.npz")
    done("plan frontier.npz --slowdown 1.00 --as-measured -o plan.yaml")
    assert wanted in done("show plan.yaml")
    done("report frontier.npz plan.yaml -o report.html")
    assert wanted in Path("report.html").read_text()


def test_a_plan_of_it_is_applied_only_if_it_is_trusted(traced: Path):
    done("trace rank0.json rank1.json rank2.json rank3.json -o job")
    done("solve job/profile.yaml --schedule job/schedule.csv -o frontier.npz")
    done("plan frontier.npz --slowdown 1.00 --as-measured -o plan.yaml")
    text = (
        "the plan is of a traced profile, which was seen at one clock and is estimated at all "
        "others, so it may be late: profile the stages with `planner profile`, or train without a "
        "plan, and the autopilot learns one; or apply it with --trust-traced (in Python "
        "trust_traced=True)"
    )
    assert refused("run --plan plan.yaml -- true") == text
    plans = Plans.load("plan.yaml")
    with pytest.raises(PlanError) as refusal:
        plans.check_trusted(False)
    assert str(refusal.value) == text
    plans.check_trusted(True)
    Plans(replace(plans.of_pipeline(0), origin="measured"), {}).check_trusted(False)


def test_the_page_shows_the_iteration_above_the_plan_and_loads_nothing(traced: Path):
    done("trace rank0.json rank1.json rank2.json rank3.json -o job")
    page = (traced / "job" / "page.html").read_text()
    assert page.index("As it ran") < page.index("As a plan would run it")
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert "<script" not in page
    assert page.count("<title>0F0, ") == 2
    slices = json.loads((traced / "job" / "perfetto.json").read_text())["traceEvents"]
    assert sum(each["ph"] == "X" for each in slices) == MADE.steps * len(list(FOUR.computations()))


def test_an_unknown_gpu_is_asked_for(folder: Path):
    replace(MADE, device="Some Accelerator").write(folder)
    files = "rank0.json rank1.json rank2.json rank3.json"
    assert refused(f"trace {files}").startswith(
        "--gpu: is missing, and the GPU 'Some Accelerator' is not known; give its kind, one of v100"
    )
    assert "a40" in done(f"trace {files} --gpu a40 -o job") or Path("job").is_dir()
    replace(MADE, device=None).write(folder)
    assert refused(f"trace {files}").startswith("--gpu: is missing, and the traces name no GPU;")


def test_traces_of_hosts_have_no_saving(folder: Path):
    replace(MADE, has_kernels=False).write(folder)
    said = done("trace rank0.json rank1.json rank2.json rank3.json -o job")
    assert "would save" not in said
    assert "There are no kernels in these traces" in said
    assert not (folder / "job" / "profile.yaml").exists()
    assert (folder / "job" / "schedule.csv").exists()


def test_unlike_microbatches_have_no_plan(folder: Path):
    replace(MADE, jitter=0.2).write(folder)
    said = done("trace rank0.json rank1.json rank2.json rank3.json")
    assert "would save" not in said
    assert "Let clocks follow each batch" in said


def test_a_second_trace_at_a_lower_clock_replaces_what_is_assumed(folder: Path):
    MADE.write(folder)
    slower = folder / "slower"
    slower.mkdir()
    # .8 of the time follows the clock, at 80 % of 1335 MHz.
    times_s = tuple(time_s * (0.8 / 0.8 + 0.2) for time_s in MADE.forward_s)
    replace(MADE, forward_s=times_s, truth={}).write(slower)
    files = "rank0.json rank1.json rank2.json rank3.json"
    given = " ".join(f"--slower slower/rank{rank}.json" for rank in range(4))
    clock = 0.8 * 1339.5
    summary = loaded(f"trace {files} {given} --slower-clock {clock}")
    (found,) = [each for each in summary["saving"]["known"] if "second trace" in each]
    assert found.startswith("0.80 of the time follows the clock")
    without = loaded(f"trace {files}")["saving"]
    with_it = summary["saving"]
    assert with_it["most_share"] - with_it["least_share"] < (
        without["most_share"] - without["least_share"]
    )
    assert refused(f"trace {files} {given}").startswith("--slower-clock: is missing; give the clo")
    assert refused(f"trace {files} --slower-clock 1000") == (
        "--slower-clock: is of --slower; name its traces too"
    )
    assert refused(f"trace {files} {given} --slower-clock 1400").startswith(
        "--slower-clock: 1400 MHz is not below the traced clock of 1340 MHz by 5 % or more"
    )


def test_kinds_of_files_are_not_mixed(traced: Path):
    Path("table.csv").write_text("stage,step,kind,start,duration\n0,0,F,0,1\n")
    assert refused("trace rank0.json table.csv") == (
        "some FILEs are traces of PyTorch's profiler and some are tables; name one kind"
    )
