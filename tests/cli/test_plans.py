"""`planner plan` of several frontiers plans them to one deadline, and passes on the switch
budget.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import done, loaded, refusal, refused, run
from noisy_rows import noisy_rows, unlike_stages
from strategies import smooth_profile

from perseus_planner import Frontier, Plan, schedules, solve
from perseus_planner.base.prefixes import si
from perseus_planner.base.units import ON_TIME
from perseus_planner.profiles.groups import slowed
from perseus_planner.solver.replicas import Replicas
from perseus_planner.views.plan import plans_text, summarize_plans

BOTH = "plan fast.npz slow.npz -o plan.yaml"


@pytest.fixture
def frontiers(folder: Path) -> tuple[Frontier, Frontier]:
    """Of a pipeline, and of one with a slow stage; fast.npz and slow.npz."""
    profile, schedule = smooth_profile(2, step_mhz=150), schedules.one_f_one_b(2, 4)
    both = solve(profile, schedule), solve(slowed(profile, {1: 1.2}), schedule)
    both[0].save("fast.npz")
    both[1].save("slow.npz")
    return both


TARGETS = {
    "--deadline 1.01s": lambda replicas: replicas.plans_for(1.01),
    "--slowdown 1.05": lambda replicas: replicas.plans_for(1.05 * replicas.baseline_time_s),
    "--straggler-time 2.9s": lambda replicas: replicas.plans_for(2.9),
    "--straggler-time 1ms": lambda replicas: replicas.plans_for(replicas.min_time_s),
    "--least-energy": lambda replicas: replicas.plans_for(
        replicas.least_energy_time_s * (1 + 1e-9)
    ),
}


@pytest.mark.parametrize("target", TARGETS)
def test_several_frontiers_have_the_library_s_plans(
    frontiers: tuple[Frontier, Frontier], target: str
):
    replicas = Replicas(frontiers, (3, 1))
    found = loaded(f"{BOTH} {target} --replicas 3,1")
    plans = tuple(Plan.load(f"plan-{number}.yaml") for number in (0, 1))
    assert plans == TARGETS[target](replicas)
    assert (found["counts"], found["files"], found["pipelines"]) == (
        [3, 1],
        ["plan-0.yaml", "plan-1.yaml"],
        4,
    )
    assert (found["time_s"], found["energy_j"]) == replicas.time_and_energy(plans)
    assert [part["energy_j"] for part in found["plans"]] == [plan.energy_j for plan in plans]


@pytest.mark.parametrize("target", ["--slowdown 105", "--deadline 2min"])
def test_a_deadline_beyond_the_least_energy_stops_there_and_says_so(
    frontiers: tuple[Frontier, Frontier], target: str
):
    ended = run(f"plan fast.npz {target} -o plan.yaml")
    assert (ended.exit_code, Plan.load("plan.yaml")) == (0, frontiers[0].plan_for_least_energy())
    least_s = frontiers[0].least_energy_time_s
    assert (
        f"planner: the plan takes {least_s:.6g} s, where an iteration needs the least energy: "
        in ended.stderr
    )
    assert ended.stderr.endswith("if others wait until then anyway, give --straggler-time\n")
    done(f"plan fast.npz --straggler-time {2 * least_s}s -o beside.yaml")
    assert Plan.load("beside.yaml").time_s > least_s


def test_one_count_each_is_the_default(frontiers: tuple[Frontier, Frontier]):
    found = loaded(f"{BOTH} --slowdown 1")
    plans = Replicas(frontiers).plans_for(frontiers[1].baseline_time_s)
    time_s = max(plan.time_s for plan in plans)
    waiting_j = math.fsum(2 * 83.64 * (time_s - plan.time_s) for plan in plans)
    assert (found["counts"], found["pipelines"], found["time_s"]) == ([1, 1], 2, time_s)
    assert found["energy_j"] == pytest.approx(
        math.fsum(plan.energy_j for plan in plans) + waiting_j, rel=1e-12
    )


def test_the_text_ends_with_all_pipelines_together(frontiers: tuple[Frontier, Frontier]):
    text = done(f"{BOTH} --replicas 3,1 --slowdown 1")
    replicas = Replicas(frontiers, (3, 1))
    together = summarize_plans(replicas, replicas.plans_for(replicas.baseline_time_s))
    assert (
        text
        == f"{plans_text(together)}\nWrote plan-0.yaml, for 3 pipelines\nWrote plan-1.yaml, for 1 "
        "pipeline\n"
    )
    assert "\nAll 4 pipelines together, each waiting for the slowest: " in text


def test_a_frontier_alone_keeps_the_name_of_its_plan(frontiers: tuple[Frontier, Frontier]):
    text = done("plan fast.npz --replicas 8 --least-energy -o plan.yaml")
    assert text.endswith("\nWrote plan.yaml, for 8 pipelines\n")
    assert Plan.load("plan.yaml") == frontiers[0].plan_for_least_energy()


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ("--max-changes 0", {"max_changes": 0}),
        ("--max-changes 4", {"max_changes": 4}),
        ("", {}),
    ],
)
@pytest.mark.parametrize("command", ["plan fast.npz -o plan.yaml", BOTH])
def test_the_switch_budget_is_passed_on(
    frontiers: tuple[Frontier, Frontier],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: str,
    budget: dict[str, float],
):
    passed = []
    plan_until = Frontier.plan_until

    def noted(self: Frontier, deadline_s: float, **given: Any) -> Plan:
        passed.append(given)
        return plan_until(self, deadline_s)

    monkeypatch.setattr(Frontier, "plan_until", noted)
    done(f"{command} --slowdown 1.1 {options}")
    assert passed == [budget] * (1 + (command == BOTH))


ALONE = "plan fast.npz --slowdown 1 -o plan.yaml"
COUNTS = "is not a whole number of at least 1"
REFUSED = {
    f"{BOTH} --least-energy --replicas 3": "replicas: 1 counts for 2 kinds of pipelines; give one "
    "for each",
    f"{BOTH} --least-energy --replicas 3,no": f"--replicas: 'no' {COUNTS}",
    f"{BOTH} --least-energy --replicas 3,0": f"--replicas: '0' {COUNTS}",
    f"{BOTH} --power-budget 1kW": (
        "--power-budget cannot be given with several frontiers; give --deadline or --slowdown "
        "instead"
    ),
    f"{BOTH} --slowdown 1 --output fast.npz/plan.yaml": (
        "--output fast.npz/plan.yaml: there is no folder fast.npz; make it, or name another"
    ),
    "plan fast.npz kind-0.yaml --slowdown 1 -o kind.yaml": (
        "--output kind-0.yaml: is the file that is read; name another"
    ),
    "plan fast.npz slow.npz --slowdown 1 -o folder.yaml": "--output folder-1.yaml: is a folder; "
    "name a file in it",
    **{
        f"{ALONE} --on-time {text}": f"--on-time: {text!r} is not a certainty: write a percentage "
        "above 0% and up to 99%, such as 95%"
        for text in ("100%", "0%", "0.95", "sure")
    },
    "plan fast.npz --power-budget 1kW --tolerance 0.1% -o plan.yaml": "--tolerance: applies to a "
    "time; leave out --tolerance, or give --slowdown instead",
    **{
        f"{ALONE} --as-measured {option} {text}": f"{option}: applies to plans with a "
        "margin; leave out this option, or --as-measured"
        for option, text in (("--tolerance", "0.1%"), ("--on-time", "95%"))
    },
    f"{ALONE} --on-time 95% --tolerance 0.001": "--tolerance: '0.001' is not a tolerance: write a "
    "percentage of 0% or more, such as 0.1%",
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_options_are_refused_in_one_line(
    frontiers: tuple[Frontier, Frontier], folder: Path, command: str, message: str
):
    (folder / "kind-0.yaml").write_text("")
    (folder / "folder-1.yaml").mkdir()
    assert refused(command) == message


def test_a_deadline_that_the_slow_one_misses_names_the_least_of_all(
    frontiers: tuple[Frontier, Frontier],
):
    deadline_s = (frontiers[0].min_time_s + frontiers[1].min_time_s) / 2
    status, _, complaint = refusal(f"{BOTH} --deadline {deadline_s}s")
    least = complaint.removesuffix(" s; ask for that or more\n").split()[-1]
    assert (status, float(least)) == (2, pytest.approx(frontiers[1].min_time_s, rel=1e-5))
    done(f"{BOTH} --deadline {least}s")


def test_a_negative_number_of_changes_is_misuse(frontiers: tuple[Frontier, Frontier]):
    status, text, complaint = refusal(f"{BOTH} --slowdown 1 --max-changes=-1")
    assert (status, text) == (2, "")
    assert complaint.endswith(
        "Error: Invalid value for '--max-changes': -1 is not in the range x>=0.\n"
    )


def test_a_plan_can_be_made_for_a_probability(folder: Path):
    profile = noisy_rows(unlike_stages(smooth_profile(2), 1), 0.005, 12, 1)
    frontier = solve(profile, schedules.one_f_one_b(2, 4))
    frontier.save("frontier.npz")
    found = loaded("plan frontier.npz --slowdown 1.05 --on-time 90% -o plan.yaml")
    plan = frontier.plan_for(1.05 * frontier.baseline_time_s, on_time=0.9)
    assert Plan.load("plan.yaml") == plan
    sure = plan.on_time
    assert sure is not None
    assert found["on_time"]["saved_share"]["low"] == sure.saved_share.low
    text = done("plan frontier.npz --slowdown 1.05 --on-time 90% -o plan.yaml")
    assert (
        f"It is expected at {sure.time_ratio.expected:.4f}x (at most 1.0500x) and takes at most "
        "1.0500x the time of all clocks at maximum with a probability of 90 % or more.\n" in text
    )
    assert (
        f"90 % intervals: {sure.time_ratio.low:.4f}x to {sure.time_ratio.high:.4f}x the time of "
        f"all clocks at maximum, {100 * sure.saved_share.low:.2f} to "
        f"{100 * sure.saved_share.high:.2f} % of its energy saved.\n"
    ) in text
    assert f"To be that sure costs {100 * sure.safety_share:.2f} % of that energy, " in text
    assert (
        f"{sure.interpolated} of its {sure.points} operating points were not measured but "
        "estimated.\n" in text
    )
    assert "no standard errors" not in text
    assert text.count("Jitter of computations is left out; `planner calibrate` takes") == 1
    text = done("plan frontier.npz --power-budget 420.5W --on-time 90% -o plan.yaml")
    sure = Plan.load("plan.yaml").on_time
    assert sure is not None
    assert (
        f"It is expected at {sure.time_ratio.expected:.4f}x the time of all clocks at maximum and "
        f"{si(sure.power_w.expected, 'W', 6)} if GPUs differ as they may, saves "
        f"{100 * sure.saved_share.expected:.2f} % then, and draws at most 420.5 W with a "
        "probability of 90 % or more.\n" in text
    )


def test_a_slowdown_that_no_plan_keeps_is_refused_as_a_slowdown(folder: Path):
    noisy_frontier().save("frontier.npz")
    exact = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    exact.save("exact.npz")
    status, text, complaint = refusal("plan frontier.npz --slowdown 0.9 -o plan.yaml")
    assert (status, text) == (2, "")
    assert complaint.endswith(
        "--slowdown 0.9: no plan is that fast: the fastest takes 1.0000x the time of all clocks "
        "at maximum; ask for that or more\n"
    )
    # What is named can be typed.
    complaint = refusal("plan exact.npz --slowdown 0.5 -o plan.yaml")[2]
    least = complaint.split(" takes ")[1].split("x")[0]
    done(f"plan exact.npz --slowdown {least} -o plan.yaml")


def noisy_frontier() -> Frontier:
    profile = noisy_rows(smooth_profile(2), 0.005, 12, 1)
    return solve(profile, schedules.one_f_one_b(2, 4))


def test_what_counts_as_no_slower_can_be_chosen(folder: Path):
    frontier = noisy_frontier()
    frontier.save("frontier.npz")
    done("plan frontier.npz --slowdown 1 --tolerance 0.5% -o plan.yaml")
    plan = frontier.plan_until(frontier.baseline_time_s, tolerance=0.005)
    assert Plan.load("plan.yaml") == plan
    assert plan.on_time is not None
    assert (plan.on_time.probability, plan.on_time.limit_ratio) == (ON_TIME, 1.005)


def test_only_rows_that_scatter_or_have_errors_take_a_margin(folder: Path):
    noisy = noisy_frontier()
    bare = {
        key: tuple(replace(row, evidence=None) for row in rows)
        for key, rows in noisy.profile.measurements.items()
    }
    scattered = solve(replace(noisy.profile, measurements=bare), noisy.schedule)
    exact = solve(smooth_profile(2), noisy.schedule)
    for frontier, is_exact in ((noisy, False), (scattered, False), (exact, True)):
        frontier.save("frontier.npz")
        believed = frontier.plan_for(frontier.baseline_time_s, on_time=None)
        done("plan frontier.npz --slowdown 1 -o plan.yaml")
        assert (Plan.load("plan.yaml") == believed) is is_exact
        assert frontier.least_deadline_s() == (
            frontier.min_time_s if is_exact else frontier.baseline_time_s
        )
        done("plan frontier.npz --slowdown 1 --as-measured -o plan.yaml")
        assert Plan.load("plan.yaml") == believed


@pytest.mark.parametrize("kind", ["straggler", "budget"])
def test_plans_of_every_kind_keep_their_word(folder: Path, kind: str):
    truth, late = solve(unlike_stages(smooth_profile(2), 1), schedules.one_f_one_b(2, 4)), []
    for seed in range(5):
        frontier = solve(noisy_rows(truth.profile, 0.005, 12, seed), truth.dag.schedule)
        frontier.save("frontier.npz")
        time_s = 1.04 * frontier.baseline_time_s
        target = (
            f"--straggler-time {time_s!r}"
            if kind == "straggler"
            else f"--deadline {time_s!r} --max-changes 2"
        )
        done(f"plan frontier.npz {target} --on-time 95% -o plan.yaml")
        real = truth.plan_of(Plan.load("plan.yaml").clocks)
        assert real.saving_j > 0
        late.append(real.time_s / truth.baseline_time_s - 1.04)
    assert max(late) < 0.001
