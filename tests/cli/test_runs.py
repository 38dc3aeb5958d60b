"""`planner show` and `planner calibrate` of a run folder: what was measured beside what was
planned, and from where.
"""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import made_runs
import pytest
from commands import done, loaded, refused
from made_runs import attempt_in, timed, write_run
from msgspec import structs
from strategies import smooth_profile

from perseus_planner import Plan, Profile
from perseus_planner.base.prefixes import si
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.runs import Run
from perseus_planner.runs.run import calibration_of
from perseus_planner.runtime.controller.protocol import ControlChange
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.sending import Plans
from perseus_planner.views.figures import chart_run_beside_plan, draw_gantt
from perseus_planner.views.predicted import predict_records
from perseus_planner.views.run import run_text, summarize_run


@pytest.fixture
def plan(folder: Path) -> Plan:
    """A plan, and the profile.yaml that it was made from."""
    smooth_profile(3, step_mhz=150).save("profile.yaml")
    done("solve profile.yaml --schedule 1f1b --microbatches 4 -o frontier.npz")
    done("plan frontier.npz --slowdown 1.1 -o plan.yaml")
    return Plan.load("plan.yaml")


def test_show_says_what_ran_beside_what_was_planned(plan: Plan):
    write_run(Path("run"), plan, 4, deviations={3: "3 microbatches, and the plan has 4"})
    text = done("show run")
    assert text == f"{run_text(summarize_run(Run.load('run')))}\n"
    details = text.partition("\nDetails\n\n")[2]
    assert details.startswith(
        f"Run of {plan.schedule} on smooth\n"
        "Run: times measured, energy and clocks simulated. Plan: replayed from a measured "
        "profile.\n\n"
    )
    assert (
        "Not as planned:\n3 on ranks 0, 1, 2, first iteration 3: 3 microbatches, and the plan has "
        "4\n" in text
    )
    cells = details.splitlines()[4].split()
    assert (cells[:3], cells[3], cells[4], cells[5]) == (
        ["1", "4", "2"], f"{plan.time_s:.5f}", f"{plan.time_s:.5f}", "0.00"
    )  # fmt: skip


def test_a_dry_run_says_so_first_and_what_would_have_been_set(plan: Plan):
    write_run(Path("run"), plan, 4, gpu="dry-run:nvml:0")
    clocks = sorted(set(plan.clocks.values()))
    foreseen = 100 * (1 - plan.energy_j / plan.baseline_j(plan.time_s))
    text = done("show run")
    assert text.splitlines()[0] == (
        "Dry run: no clock was set, so nothing was saved. Plan 1 would have set "
        f"{clocks[0]} to {clocks[-1]} MHz, in {sum(plan.changes)} changes per iteration, to save "
        f"{foreseen:.1f} % at {si(plan.time_s, 's', 3)}."
    )
    assert "Clock changes, none of which was made, in all 3 iterations that count:" in text
    for untrue in ("Late:", "overtaken", "than planned", "another machine", "the planned time"):
        assert untrue not in text
    rows = [row for rank in Run.load("run").ranks for row in rank.iterations]
    assert {(row.is_dry_run, row.changes_set, row.saved_j) for row in rows} == {(1, 0, 0.0)}
    assert "run: Dry run: no clock was set" in done("report run -o report.html")
    page = Path("report.html").read_text()
    assert "run: Dry run: no clock was set, so nothing was saved." in page
    write_run(Path("set"), plan, 4, gpu="nvml:0")
    assert "Dry run" not in done("show set") + done("report set -o report.html")


def test_a_dry_run_is_compared_with_full_clocks(plan: Plan):
    """Its computations are shorter than planned, for which no profile is to blame."""
    write_run(Path("run"), plan, 4, gpu="dry-run:nvml:0")
    run = Run.load("run")
    quicker = replace(
        run,
        ranks=tuple(
            replace(
                rank,
                iterations=tuple(replace(row, busy_s=0.4 * row.busy_s) for row in rank.iterations),
            )
            for rank in run.ranks
        ),
    )
    summary = summarize_run(quicker)
    assert (summary.verdict, summary.unlike_plan) == (None, None)
    slower = replace(
        run,
        ranks=tuple(
            replace(
                rank,
                iterations=tuple(
                    replace(row, end_s=row.begin_s + 9 * row.time_s, next_s=None)
                    for row in rank.iterations
                ),
            )
            for rank in run.ranks
        ),
    )
    assert "times the plan's" in (summarize_run(slower).unlike_plan or "")


def test_a_run_whose_gpus_were_not_read_has_hyphens(plan: Plan):
    write_run(Path("run"), plan, 1)
    text = done("show run")
    assert text.partition("Details\n\n")[2].splitlines()[4].split()[3:] == [
        "-", f"{plan.time_s:.5f}", "-", "-", f"{plan.energy_j:.3f}", "-"
    ]  # fmt: skip
    assert "Every iteration ran in the planned order." in text


def test_two_runs_are_laid_side_by_side(plan: Plan):
    write_run(Path("before"), plan, 4, gpu="dry-run:nvml:0")
    write_run(Path("after"), plan, 6)
    text = done("show before after")
    lines = {line[:26].strip(): line.split() for line in text.splitlines()}
    assert text.startswith("before beside after\n")
    assert lines["iterations"] == ["iterations", "4", "6", "+2"]
    assert lines["saved %"][2] == "0.00"
    assert float(lines["saved %"][3]) > 0.0
    assert "before is a dry run: it set no clock." in text
    found = loaded("show before after")
    assert (found["first"]["name"], found["second"]["total"]["iterations"]) == ("before", 6)
    assert found["second"]["iteration_s"] == pytest.approx(plan.time_s, abs=1e-6)


def test_only_runs_are_laid_side_by_side_and_only_as_text(plan: Plan):
    write_run(Path("run"), plan, 4)
    for arguments, what in (
        ("show run plan.yaml", "plan.yaml: is a plan; name the folder of a run"),
        ("show plan.yaml run", "plan.yaml: is not a run folder"),
        ("show run run --plot run.png", "run: two runs are shown side by side as text alone"),
    ):
        assert what in refused(arguments)


def test_plans_are_counted_as_their_service_counts_them(plan: Plan):
    write_run(Path("run"), plan, 3, version=2, service_version=7)
    text = done("show run")
    assert "\nRanks by plan 7, per iteration:" in text
    assert "Foreseen by plan 7: " in text
    summary = summarize_run(Run.load("run"))
    assert (summary.version, summary.current.name) == (2, "7")
    sent = Plans(plan, {1: plan}, 7)
    assert Plans.loads(sent.dumps()).number == 7
    assert Plans.loads(sent.dumps()).by_pipeline.keys() == {1}
    assert Plans.loads(Plans(plan, {}).dumps()).number is None


@pytest.mark.parametrize("origin", ["measured", "simulated"])
def test_as_json_it_says_the_same_in_si_units(plan: Plan, origin: str):
    write_run(Path("run"), plan, 3, origin=origin)
    found = loaded("show run")
    assert found == json.loads(json.dumps({**asdict(summarize_run(Run.load("run"))), "files": []}))
    assert (found["gpu_origin"], found["context"]["origin"], found["version"]) == (
        origin,
        "measured",
        1,
    )
    assert found["plans"][0]["time_s"] == pytest.approx(plan.time_s, abs=1e-6)


def test_the_figure_has_the_plan_above_the_run_with_late_changes_marked(plan: Plan):
    def edit(iteration: int, change: ControlChange) -> ControlChange | None:
        late_ns = 5 * 10**7 if iteration == 3 else 0
        return structs.replace(
            change, begun_ns=change.begun_ns + late_ns, ended_ns=change.ended_ns + late_ns
        )

    write_run(Path("run"), plan, 4, edit=edit)
    assert done("show run --plot run.png").endswith("\nWrote run.png\n")
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")
    run = Run.load("run")
    planned, recorded, scale = draw_gantt(chart_run_beside_plan(run), plan.control).axes
    assert planned.get_title() == "plan 1, predicted (replayed, measured profile)"
    assert recorded.get_title().startswith("run, recorded: iteration 3 by plan 1, ")
    assert scale.get_ylabel() == "clock (MHz)"
    for rank, predicted in enumerate(predict_records(plan)):
        begin_s = run.ranks[rank].iterations[3].begin_s
        real = run.ranks[rank].computations[3]
        for axes, records, zero_s in ((planned, predicted, 0.0), (recorded, real, begin_s)):
            drawn = bars(axes, rank)
            assert drawn == [
                pytest.approx((each.begin_s - zero_s, each.end_s - zero_s), abs=1e-6)
                for each in records
            ]
    late = sum(each.is_late for rank in run.ranks for each in rank.computations[3])
    assert late > 0
    assert sum(len(each.get_segments()) for each in lines(recorded, "magenta")) == late
    assert sum(len(each.get_segments()) for each in lines(planned, "magenta")) == 0


def bars(axes: Any, row: int) -> list[tuple[float, float]]:
    """The bars of a row, in front of its background."""
    found = [each.get_paths() for each in axes.collections if each.get_paths()]
    of_row = [
        paths
        for paths in found
        if len(paths[0].vertices) > 2 and round(paths[0].vertices[:, 1].mean()) == row
    ]
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in of_row[-1]]


def lines(axes: Any, colour: str) -> list[Any]:
    """The collections of lines of that colour."""
    from matplotlib.colors import same_color

    return [
        each
        for each in axes.collections
        if hasattr(each, "get_segments") and same_color(each.get_color(), colour)
    ]


def test_a_run_of_which_no_iteration_was_kept_cannot_be_drawn_but_shown(plan: Plan):
    write_run(Path("run"), plan, 3)
    (attempt_in(Path("run")) / "computations-1.csv").unlink()
    done("show run")
    assert refused("show run --plot run.png") == (
        "run: no iteration that ran as planned on all ranks has kept its computations on all of "
        "them; try again in a minute, or when the training has ended"
    )


def test_calibrate_takes_the_time_from_a_run(plan: Plan):
    slow = replace(plan, time_s=plan.time_s + 0.25)
    write_run(Path("run"), slow, 3)
    found = loaded("calibrate profile.yaml run -o profile.yaml")
    assert (
        found["measured_s"]
        == calibration_of(Run.load("run")).time_s
        == pytest.approx(slow.time_s, abs=1e-6)
    )
    assert Profile.load("profile.yaml").overhead_s == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("tails", [0.0, 0.1])
def test_calibrate_takes_the_jitter_of_computations_from_a_run(
    plan: Plan, tails: float, monkeypatch: pytest.MonkeyPatch
):
    rng = Random(1)

    def longer() -> float:
        if tails:
            return 1 + 0.1 * rng.expovariate(1.0) * (rng.random() < tails)
        return 50.0 if rng.random() < 1e-3 else rng.lognormvariate(0.0, 0.03)

    def jittered(*args: Any) -> IterationTimes:
        times = timed(*args)
        spans_ns = tuple(
            (begin, begin + round((end - begin) * longer())) for begin, end in times.spans_ns
        )
        return replace(times, spans_ns=spans_ns)

    monkeypatch.setattr(made_runs, "timed", jittered)
    write_run(Path("run"), plan, 9)
    assert "\nJitter of computations: " in done("calibrate profile.yaml run -o profile.yaml")
    profile = Profile.load("profile.yaml")
    jitter = profile.jitter
    if tails:
        # Most times are equal, so all that are longer are a tail.
        assert jitter < 0.005
        assert profile.jitter_tail is not None
        assert profile.jitter_tail.share == pytest.approx(tails, rel=0.5)
        assert profile.jitter_tail.factor == pytest.approx(1.1, rel=0.03)
    else:
        assert jitter == pytest.approx(0.03, rel=0.15)
    done("solve profile.yaml --schedule 1f1b --microbatches 4 -o frontier.npz")
    text = done("plan frontier.npz --slowdown 1.00 -o plan.yaml")
    assert "jitter" not in text
    sure = Plan.load("plan.yaml").on_time
    assert sure is not None
    assert (sure.jitter, sure.jitter_tail) == (jitter, profile.jitter_tail)


def test_what_a_run_cannot_calibrate_is_refused(plan: Plan):
    write_run(Path("run"), plan, 1)
    Path("empty").mkdir()
    quick = replace(plan, time_s=plan.time_s / 4)
    write_run(Path("quick"), quick, 3)
    write_run(Path("other"), replace(plan, profile_digest="f" * 64), 3)
    for command, message in {
        "calibrate profile.yaml plan.yaml": (
            "the measured time of an iteration is missing; give it with --measured TIME, or give "
            "the folder of a run instead of plan.yaml"
        ),
        "calibrate profile.yaml run --measured 3s": (
            "run: is a run, which contains the measured times; leave out --measured"
        ),
        "calibrate profile.yaml run": (
            "run: no iteration ran as planned by plan 1 after its first one; train for longer"
        ),
        "calibrate profile.yaml empty": "empty: is empty; try again when an iteration by a plan "
        "has ended",
        "calibrate profile.yaml quick": (
            f"quick: {si(quick.time_s, 's', 6)} is less than half of the {plan.time_s:.6g} s of "
            "the replay; give the mean time of an iteration with this plan, on the GPUs that were "
            "profiled"
        ),
        "calibrate profile.yaml other": (
            "profile.yaml: is not the profile that the plan was made from, which has the digest "
            "ffffffffffff; name the profile.yaml, or the job file, that it was made from without "
            "further options"
        ),
    }.items():
        assert refused(command) == message


def test_the_cost_of_clock_changes_is_predicted(plan: Plan):
    costly = replace(plan, clock_change=ClockChange(20e-3, 0.0, 1))
    write_run(Path("run"), costly, 3)
    shown = summarize_run(Run.load("run"))
    assert any(rank.planned.changes_late for rank in shown.ranks)
    assert [rank.mean("changes_late") for rank in shown.ranks] == [
        rank.planned.changes_late for rank in shown.ranks
    ]


def test_each_iteration_of_each_gpu_is_a_row_of_a_table(plan: Plan):
    write_run(Path("run"), plan, 4, deviations={3: "late"})
    assert done("show run --csv power.csv").endswith("Wrote power.csv\n")
    with open("power.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["iteration"], row["rank"]) for row in rows] == [
        (str(iteration), str(rank)) for iteration in range(4) for rank in range(3)
    ]
    for row in rows[:-3]:  # of the last iteration the end is not known
        power_w = float(row["gpu_energy_j"]) / float(row["iteration_s"])
        assert float(row["gpu_power_w"]) == pytest.approx(power_w)
    assert {row["verdict"] for row in rows[:9]} == {"as planned"}
    assert rows[-1]["verdict"] == "late"
    assert refused("show plan.yaml --csv power.csv") == (
        "--csv power.csv: plan.yaml has no iterations; name a run folder"
    )
