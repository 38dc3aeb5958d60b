"""A Perfetto trace has the replay or the run to the nanosecond, and keeps the rules of its
readers.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from commands import done, refusal
from made_runs import any_plan, attempt_in, write_run
from strategies import drawn, jobs, smooth_profile
from trace_rules import ReadTrace, integral

from perseus_planner import Plan, schedules, solve
from perseus_planner.base.errors import RunError, UsageError
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.runs import Run
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import FixedOperation
from perseus_planner.views.traces import total, trace_plan, trace_run


@pytest.fixture(scope="module")
def plan() -> Plan:
    frontier = solve(
        smooth_profile(3, step_mhz=150),
        schedules.one_f_one_b(3, 4),
        operations=[FixedOperation("optimizer", "end", 0.01)],
    )
    return frontier.plan_for(1.1 * frontier.baseline_time_s)


def read(plan: Plan, folder: Path) -> ReadTrace:
    trace_plan(plan, folder / "plan.json")
    return ReadTrace(folder / "plan.json")


def recorded(folder: Path, stages: int, microbatches: int, iterations: int, **options) -> Run:
    frontier = solve(
        smooth_profile(stages, step_mhz=150), schedules.one_f_one_b(stages, microbatches)
    )
    write_run(folder, frontier.plan_for_least_energy(), iterations, **options)
    return Run.load(folder)


def replayed(plan: Plan) -> Plan:
    """`plan` with the time and energy that it replays to."""
    timeline = replay(plan)
    return replace(
        plan,
        time_s=timeline.time_s,
        energy_j=timeline.energy_j,
        bound_j=0.0,
        deadline_s=timeline.time_s,
    )


def numbered(plan: Plan) -> Plan:
    return replace(replayed(plan), baseline_time_s=1.0, baseline_energy_j=1.0)


@drawn(4, 40, jobs())
def test_any_plan_is_a_trace_that_readers_take_and_power_adds_up_to_its_energy(dag: PipelineDag):
    plan = numbered(any_plan(dag, Random(len(dag.computations))))
    plan = numbered(
        replace(plan, overhead_s=dag.profile.overhead_s, gpus_per_stage=dag.profile.gpus_per_stage)
    )
    with TemporaryDirectory() as folder:
        trace = read(plan, Path(folder))
    spans = replay(plan).spans
    drawn = {
        event["name"]: (start, end) for row in trace.slices.values() for start, end, event in row
    }
    for name, span in spans.items():
        assert drawn[name] == (round(span.start_s * 1e9), round(span.end_s * 1e9))
    powers = [steps for (_, name, _), steps in trace.counters.items() if name.endswith("power")]
    whole_w, *ranks_w = powers
    last_s = max(span.end_s for span in spans.values())
    after_j = math.fsum(plan.rank_waiting_w) * max(
        0.0, last_s - plan.time_s
    )  # where the overhead is below 0
    # Every border is rounded, by at most half a nanosecond.
    most_w = max([span.power_w for span in spans.values()] + list(plan.rank_waiting_w))
    off_j = 2e-9 * most_w * len(spans) + 1e-9 * plan.energy_j
    assert integral(whole_w) == pytest.approx(plan.energy_j + after_j, abs=off_j)
    assert math.fsum(map(integral, ranks_w)) == pytest.approx(plan.energy_j + after_j, abs=off_j)
    joules = math.fsum(
        float(event["args"]["joules"]) for row in trace.slices.values() for _, _, event in row
    )
    assert joules == pytest.approx(plan.energy_j + after_j, rel=1e-9, abs=off_j)


def test_a_slice_says_what_ran_at_which_clock_for_how_many_joules(plan: Plan, tmp_path: Path):
    trace = read(plan, tmp_path)
    rows = {
        thread: {event["name"]: event for _, _, event in row}
        for (_, thread), row in trace.slices.items()
    }
    assert list(rows) == ["rank 0", "rank 1", "rank 2"]
    for rank, program in enumerate(plan.schedule.ranks):
        for computation in program:
            event, measured = rows[f"rank {rank}"][str(computation)], plan.measurement(computation)
            args = event["args"]
            assert event["cat"] == "computation"
            assert (args["stage"], args["kind"], args["microbatch"]) == computation
            assert args["clock_mhz"] == plan.clocks[str(computation)]
            assert float(args["joules"]) == pytest.approx(measured.energy_j, rel=1e-12)
            assert float(args["watts"]) == pytest.approx(
                measured.energy_j / measured.time_s, rel=1e-9
            )
    optimizer = rows["rank 1"]["1optimizer"]
    assert optimizer["cat"] == "operation of fixed time"
    assert set(optimizer["args"]) == {"joules", "watts"}
    waiting = rows["rank 0"]["waiting"]
    assert (waiting["cat"], waiting["cname"], float(waiting["args"]["watts"])) == (
        "waiting",
        "grey",
        83.64,
    )


def test_each_transfer_is_an_arrow_between_the_computations_of_two_ranks(
    plan: Plan, tmp_path: Path
):
    (flows,) = read(plan, tmp_path).flows.values()
    found = {(name, before["name"], after["name"]) for name, (*_, before), (*_, after) in flows}
    expected = set()
    for microbatch in range(4):
        for stage in range(2):
            forward, backward = (
                f"{name} of microbatch {microbatch}" for name in ("activations", "gradients")
            )
            expected.add((forward, f"{stage}F{microbatch}", f"{stage + 1}F{microbatch}"))
            expected.add((backward, f"{stage + 1}B{microbatch}", f"{stage}B{microbatch}"))
    assert found == expected
    assert len(flows) == len(expected)


def test_the_clock_is_a_counter_that_holds_during_each_computation(plan: Plan, tmp_path: Path):
    trace = read(plan, tmp_path)
    ((process, _), *_) = trace.slices
    for rank, program in enumerate(plan.schedule.ranks):
        steps = trace.counters[process, f"rank {rank} clock", "MHz"]
        begins = {
            event["name"]: start_ns for start_ns, _, event in trace.slices[process, f"rank {rank}"]
        }
        for computation in program:
            held = [mhz for at_ns, mhz in steps if at_ns <= begins[str(computation)]][-1]
            assert held == plan.clocks[str(computation)]
    limited = read(replace(plan, control="power-limit"), tmp_path)
    assert {unit for _, name, unit in limited.counters if name.endswith("limit")} == {"W"}


def test_the_baseline_is_beside_the_plan(folder: Path):
    frontier = solve(smooth_profile(2, step_mhz=150), schedules.one_f_one_b(2, 3))
    frontier.save("frontier.npz")
    plan = frontier.plan_for(1.1 * frontier.baseline_time_s)
    plan.save("plan.yaml")
    done("show plan.yaml --perfetto plan.json --beside frontier.npz")
    trace = ReadTrace(Path("plan.json"))
    first, second = trace.processes.values()
    assert second == f"all clocks at maximum: {first}"
    whole_w = [trace.counters[process, "pipeline power", "W"] for process in (first, second)]
    assert integral(whole_w[0]) == pytest.approx(plan.energy_j, rel=1e-6)
    assert integral(whole_w[1]) == pytest.approx(plan.baseline_energy_j, rel=1e-6)
    assert {mhz for _, mhz in trace.counters[second, "rank 1 clock", "MHz"]} == {1410.0}
    assert len(trace.flows[first]) == len(trace.flows[second]) == 6


def test_rows_are_full_from_the_start_to_the_end_of_the_iteration(plan: Plan, tmp_path: Path):
    overhead = replayed(replace(plan, overhead_s=0.125))
    for each in (plan, overhead):
        trace = read(each, tmp_path)
        for row in trace.slices.values():
            assert (
                sum(end - start for start, end, _ in row)
                == round(each.time_s * 1e9)
                == trace.end_ns
            )
    last = [row[-1][2]["name"] for row in trace.slices.values()]
    assert last == ["calibrated overhead"] * 3


def test_the_trace_says_where_its_numbers_come_from_and_their_baseline(plan: Plan, tmp_path: Path):
    trace = read(plan, tmp_path)
    assert list(trace.processes.values()) == [
        "1f1b, 3 stages x 4 microbatches. Replayed from a measured profile"
    ]
    assert trace.about["origin"] == "Replayed from a measured profile"
    assert trace.about["baseline"] == "all clocks at maximum"
    for name in (
        "time_s",
        "energy_j",
        "baseline_time_s",
        "baseline_energy_j",
        "profile_digest",
        "gpu",
    ):
        assert trace.about[name] == getattr(plan, name)


def test_a_power_limit_is_not_called_a_clock_and_a_tensor_group_is_said(plan: Plan, tmp_path: Path):
    trace = read(replace(plan, control="power-limit", gpus_per_stage=8), tmp_path)
    assert list(trace.threads.values()) == ["rank 0 (8 GPUs)", "rank 1 (8 GPUs)", "rank 2 (8 GPUs)"]
    assert (
        trace.slices[next(iter(trace.processes.values())), "rank 0 (8 GPUs)"][0][2]["args"][
            "power_limit_w"
        ]
        > 0
    )


def test_clock_changes_that_take_time_are_in_it(plan: Plan, tmp_path: Path):
    costly = replayed(replace(plan, clock_change=ClockChange(20e-3, 5e-3, 8)))
    assert costly.energy_j != plan.energy_j
    (whole_w, *_) = read(costly, tmp_path).counters.values()
    assert integral(whole_w) == pytest.approx(costly.energy_j, rel=1e-8)


def test_equal_plans_give_equal_files_and_a_failure_leaves_the_old_one(plan: Plan, tmp_path: Path):
    file = tmp_path / "plan.json"
    trace_plan(plan, file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        trace_plan(replace(plan, baseline_energy_j=math.nan), file)
    assert file.read_bytes() == before
    trace_plan(plan, file)
    assert file.read_bytes() == before
    with pytest.raises(
        UsageError,
        match=r"plan\.json: cannot be written: No such file or directory; check the folder",
    ):
        trace_plan(plan, tmp_path / "absent/plan.json")


def test_a_sum_begins_when_all_are_known():
    summed = total([[(0, 1.0), (5, 2.0), (9, 2.0)], [(3, 10.0), (5, 20.0)]])
    assert summed == [(3, 11.0), (5, 22.0), (9, 22.0)]


def test_a_run_is_what_each_rank_measured_of_the_iterations_it_kept(tmp_path: Path):
    deviations = {3: "3 microbatches, not 4"}
    run = recorded(tmp_path / "run", 3, 4, 5, pipelines=2, origin="measured", deviations=deviations)
    trace_run(run, tmp_path / "run.json")
    trace = ReadTrace(tmp_path / "run.json")
    source = (
        "Run: times measured, energy and clocks measured. Plan: replayed from a measured profile"
    )
    assert list(trace.processes.values()) == [f"pipeline 0. {source}", f"pipeline 1. {source}"]
    assert trace.about["origin"] == source
    first = min(run.ranks[0].computations)
    for rank in run.ranks:
        process = f"pipeline {rank.pipeline}. {source}"
        name = f"rank {rank.pipeline_rank}" + (
            "" if rank.rank < 3 else f" (of the job: {rank.rank})"
        )
        row = [each for each in trace.slices[process, name] if each[2]["cat"] == "computation"]
        ran = [each for number in sorted(rank.computations) for each in rank.computations[number]]
        zero_s = next(each.begin_s for each in rank.iterations if each.iteration == first)
        for (start_ns, end_ns, event), each in zip(row, ran, strict=True):
            assert event["name"] == str(each.computation)
            assert (start_ns / 1e9, end_ns / 1e9) == pytest.approx(
                (each.begin_s - zero_s, each.end_s - zero_s), abs=1e-6
            )
            args = event["args"]
            assert (args["iteration"], args.get("clock_mhz")) == (each.iteration, each.clock)
            (row_of,) = (row for row in rank.iterations if row.iteration == each.iteration)
            assert args.get("not_as_planned") == row_of.deviation
            assert ("planned_joules" in args) == row_of.is_as_planned
        for iteration in rank.iterations:
            if iteration.iteration in rank.computations:
                begin_ns, end_ns = (
                    round((at - zero_s) * 1e9) for at in (iteration.begin_s, iteration.end_s)
                )
                power_w = trace.counters[process, f"rank {rank.pipeline_rank} power", "W"]
                assert integral(power_w, begin_ns, end_ns) == pytest.approx(
                    iteration.energy_j, rel=1e-5
                )
        clocks = [
            mhz for _, mhz in trace.counters[process, f"rank {rank.pipeline_rank} clock", "MHz"]
        ]
        assert set(clocks) == {each.clock for each in ran} - {None}
        assert (process, "pipeline power", "W") in trace.counters


def test_ranks_whose_clocks_differ_are_each_on_its_own(tmp_path: Path):
    run = recorded(tmp_path / "run", 2, 2, 3)
    trace_run(run, tmp_path / "one.json")
    one, *others = run.ranks
    shift_s = 1000.0  # of the clock of the first rank's node
    rows = [
        replace(row, begin_s=row.begin_s + shift_s, end_s=row.end_s + shift_s)
        for row in one.iterations
    ]
    ran = {
        number: tuple(
            replace(each, begin_s=each.begin_s + shift_s, end_s=each.end_s + shift_s)
            for each in computed
        )
        for number, computed in one.computations.items()
    }
    trace_run(
        replace(run, ranks=(replace(one, iterations=tuple(rows), computations=ran), *others)),
        tmp_path / "b.json",
    )
    first, second = ReadTrace(tmp_path / "one.json"), ReadTrace(tmp_path / "b.json")
    for row, other in zip(first.slices.values(), second.slices.values(), strict=True):
        assert [each[:2] for each in row if each[2]["cat"] == "computation"] == [
            pytest.approx(each[:2], abs=1000) for each in other if each[2]["cat"] == "computation"
        ]


def test_a_run_without_energy_or_with_overlapping_times_is_still_a_trace(tmp_path: Path):
    run = recorded(tmp_path / "run", 2, 2, 3)
    one, *others = run.ranks
    rows = [replace(row, energy_j=None) for row in one.iterations]
    longer = {
        number: tuple(replace(each, end_s=each.end_s + 0.4 * each.duration_s) for each in computed)
        for number, computed in one.computations.items()
    }
    trace_run(
        replace(run, ranks=(replace(one, iterations=tuple(rows), computations=longer), *others)),
        tmp_path / "c",
    )
    trace = ReadTrace(tmp_path / "c")
    assert [name for _, name, _ in trace.counters if name.endswith("power")] == ["rank 1 power"]


def test_a_run_of_which_nothing_was_kept_is_refused(tmp_path: Path):
    recorded(tmp_path / "run", 2, 2, 3)
    (attempt_in(tmp_path / "run") / "computations-1.csv").unlink()
    with pytest.raises(RunError) as refused:
        trace_run(Run.load(tmp_path / "run"), tmp_path / "run.json")
    assert str(refused.value) == (
        f"{tmp_path}/run: there is no iteration whose computations all ranks have kept; try again "
        "in a minute, or when the training has ended"
    )
    assert not (tmp_path / "run.json").exists()


def test_show_writes_traces_of_plans_and_runs_beside_what_it_says(folder: Path):
    smooth_profile(2, step_mhz=150).save("profile.yaml")
    done("solve profile.yaml --schedule 1f1b --microbatches 2 -o frontier.npz")
    done("plan frontier.npz --slowdown 1.1 -o plan.yaml")
    assert done("show plan.yaml --perfetto plan.json").endswith("\nWrote plan.json\n")
    assert json.loads(done("show plan.yaml --plot a.svg --perfetto b.json --json"))["files"] == [
        "a.svg",
        "b.json",
    ]
    assert Path("plan.json").read_bytes() == Path("b.json").read_bytes()
    write_run(Path("run"), Plan.load("plan.yaml"), 3)
    assert done("show run --perfetto run.json").endswith("\nWrote run.json\n")
    assert ReadTrace(Path("run.json")).end_ns > ReadTrace(Path("plan.json")).end_ns
    for command, message in {
        "show plan.yaml --perfetto plan.yaml": "--perfetto plan.yaml: must end in .json; rename it",
        "show plan.yaml --perfetto absent/a.json": (
            "--perfetto absent/a.json: there is no folder absent; make it, or name another"
        ),
        "show frontier.npz --perfetto a.json": (
            "--perfetto a.json: frontier.npz has no timeline; name a plan or a run"
        ),
    }.items():
        assert refusal(command) == (2, "", f"Error: {message}\n")
    assert not Path("a.json").exists()
