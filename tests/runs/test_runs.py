"""Run folders: what ranks record is read back, also from damaged files; a run by its plan shows
no deviation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import any_plan, attempt_in, write_run
from msgspec import structs
from strategies import any_schedule, drawn, fixed, furnished, smooth_profile

from perseus_planner import Plan, schedules, solve
from perseus_planner.base.errors import RunError
from perseus_planner.base.fields import rules
from perseus_planner.base.units import INDEX
from perseus_planner.gpu.protocol import THROTTLE_REASONS
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.runs import ComputationRecord, IterationRecord, Run
from perseus_planner.runs.recording import COMPUTATIONS, ITERATIONS
from perseus_planner.runs.records import change_statistics
from perseus_planner.runs.run import calibration_of
from perseus_planner.runs.status import DeciderStatus, read_status, save_status
from perseus_planner.runtime.controller.protocol import ControlChange
from perseus_planner.schedules import Computation
from perseus_planner.views.predicted import predict_records
from perseus_planner.views.run import summarize_run

FINITE = st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.integers(0, 10**12)


def numbers_of(kind: type) -> dict[str, st.SearchStrategy[object]]:
    """Return a strategy for each field whose type has a rule."""
    found = {}
    for name, of_field in rules(kind).items():
        numbers = WHOLE if of_field.rule is INDEX else FINITE
        found[name] = st.none() | numbers if of_field.is_optional else numbers
    return found


ROWS = st.builds(
    IterationRecord,
    throttled_s=st.dictionaries(st.sampled_from(THROTTLE_REASONS), FINITE),
    deviation=st.none() | st.text(),
    gpu=st.none() | st.sampled_from(("A100", "a, b")),
    origin=st.sampled_from((None, "measured", "simulated")),
    **numbers_of(IterationRecord),
)
SOME = st.builds(
    ComputationRecord,
    computation=st.builds(
        Computation, st.integers(0, 999), st.sampled_from("FBIW"), st.integers(0, 999)
    ),
    **numbers_of(ComputationRecord),
)


@settings(fixed, max_examples=50)
@given(st.lists(ROWS, max_size=4), st.lists(SOME, max_size=4))
def test_rows_are_read_as_they_were_written(
    tmp_path_factory, rows: list[IterationRecord], some: list[ComputationRecord]
):
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    for table, written in ((ITERATIONS, rows), (COMPUTATIONS, some)):
        path.write_bytes((table.header + "".join(map(table.line, written))).encode())
        assert table.read(path) == written


@pytest.fixture(scope="module")
def plan() -> Plan:
    frontier = solve(smooth_profile(3, step_mhz=150), schedules.one_f_one_b(3, 4))
    return frontier.plan_for(1.12 * frontier.baseline_time_s)


def test_a_file_that_was_cut_off_anywhere_has_the_rows_that_were_whole(plan: Plan, tmp_path: Path):
    write_run(tmp_path, plan, 3)
    for name, table in (("iterations-1.csv", ITERATIONS), ("computations-1.csv", COMPUTATIONS)):
        path = attempt_in(tmp_path) / name
        data, rows = path.read_bytes(), table.read(path)
        assert len(rows) > 2
        data = data[
            : data.index(b"\n", data.index(b"\n", data.index(b"\n") + 1) + 1) + 1
        ]  # the header and two rows
        for length in range(len(data) + 1):
            path.write_bytes(data[:length])
            assert table.read(path) == rows[: max(0, data[:length].count(b"\n") - 1)]


def with_cell(text: str, place: int, cell: str) -> str:
    """Append a row that differs from the first in one cell."""
    cells = text.splitlines()[1].split(",")
    return text + ",".join([*cells[:place], cell, *cells[place + 1 :]]) + "\n"


def test_a_malformed_row_is_refused_with_its_line(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), plan, 2)
    path = attempt_in(Path("run")) / "iterations-1.csv"
    text = path.read_text()
    cells = text.splitlines()[1].split(",")
    changed = "; the file was changed"
    no_row = f"is not a row of {len(cells)} cells{changed}: record it again"
    for wrong, message in (
        (
            text[1:],
            ", line 1: has other columns; read it with the planner that the training ran with",
        ),
        (f"{text}1,2\n", f", line 4: {no_row}"),
        (f'{text}"\n', f", line 4: {no_row}"),
        (
            with_cell(text, 0, "x"),
            f", line 4, column 'iteration': 'x' is not a whole number of 0 or more{changed}",
        ),
        (
            with_cell(text, 0, ""),
            f", line 4, column 'iteration': '' is not a whole number of 0 or more{changed}",
        ),
        (
            with_cell(text, 4, "nan"),
            f", line 4, column 'begin_s': 'nan' is not a finite number{changed}",
        ),
    ):
        path.write_text(wrong)
        with pytest.raises(RunError) as refusal:
            Run.load("run")
        assert str(refusal.value) == f"{path}{message}"


def test_a_run_that_followed_its_plan_shows_no_deviation(plan: Plan, tmp_path: Path):
    for number, each in enumerate((plan, replace(plan, clock_change=ClockChange(2e-3, 0.0, 2)))):
        foretold = replay(each)
        each = replace(each, time_s=foretold.time_s, energy_j=foretold.energy_j)
        write_run(tmp_path / str(number), each, 5)
        shown = summarize_run(Run.load(tmp_path / str(number)))
        (by_plan,) = shown.plans
        assert (by_plan.iterations, by_plan.counted, shown.deviations) == (5, 4, ())
        assert by_plan.time_s == pytest.approx(each.time_s, abs=1e-6)
        assert by_plan.energy_j == pytest.approx(each.energy_j, rel=1e-6)
        assert by_plan.planned_energy_j == pytest.approx(each.energy_j, rel=1e-9)
        for rank, changes in zip(shown.ranks, each.changes, strict=True):
            assert rank.busy_s == pytest.approx(rank.planned_busy_s, abs=1e-6)
            assert rank.energy_j == pytest.approx(rank.planned_energy_j, rel=1e-6)
            ran = rank.ran
            assert (ran.changes_asked, ran.changes_set) == (4 * changes, 4 * changes)
            assert ran.changes_overtaken == ran.changes_late == rank.planned.changes_late == 0
            off_clock_s = rank.mean("off_clock_s")
            assert off_clock_s == pytest.approx(rank.planned.off_clock_s, abs=1e-6)
            assert (off_clock_s > 1e-6) == (changes > 0 and number == 1)
            assert ran.achieved_mhz_s == pytest.approx(ran.clock_s)
        assert shown.verdict is None


def test_a_late_change_and_one_that_was_never_made_are_found(plan: Plan, tmp_path: Path):
    place = {}

    def edit(iteration: int, change: ControlChange) -> ControlChange | None:
        if iteration == 2 and change.position == place["late"]:
            return structs.replace(
                change, begun_ns=change.begun_ns + 3 * 10**7, ended_ns=change.ended_ns + 3 * 10**7
            )
        return None if iteration == 3 and change.position == place["lost"] else change

    ranks = [[str(each) for each in program] for program in plan.schedule.ranks]
    # one that sets its first clock at the begin of each iteration, as a run has no other record of
    # that clock
    rank = next(
        rank for rank, names in enumerate(ranks) if plan.clocks[names[0]] != plan.clocks[names[-1]]
    )
    names = ranks[rank]
    firsts = [i for i in range(1, len(names)) if plan.clocks[names[i]] != plan.clocks[names[i - 1]]]
    place["late"], place["lost"] = firsts[0], firsts[-1]
    write_run(tmp_path, plan, 5, edit=edit)
    run = Run.load(tmp_path)
    rows = run.ranks[rank].iterations
    assert [(row.changes_late, row.changes_overtaken) for row in rows] == [
        (0, 0),
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 0),
    ]
    late = run.ranks[rank].computations[2][place["late"]]
    assert rows[2].off_clock_s == pytest.approx(late.set_end_s - late.begin_s, abs=1e-6)
    assert late.is_late
    assert late.set_end_s - late.asked_s == pytest.approx(0.03, abs=1e-6)
    lost = run.ranks[rank].computations[3][place["lost"]]
    assert lost.is_overtaken
    assert rows[3].off_clock_s >= lost.duration_s - 1e-6


@drawn(3, 25, st.integers(0, 2**32 - 1), st.sampled_from((None, 0.0, 1e-3, 6e-3)))
def test_what_is_foreseen_of_any_plan_is_its_replay(seed: int, call_s: float | None):
    rng = Random(seed)
    dag = furnished(seed, any_schedule(seed, rng.randint(1, 3), rng.randint(1, 4)), 4)
    plan = any_plan(dag, rng)
    if call_s is not None:
        plan = replace(plan, clock_change=ClockChange(call_s, 0.0, rng.randint(1, 3)))
    spans, ranks = replay(plan).spans, predict_records(plan)
    for program, ran in zip(plan.schedule.ranks, ranks, strict=True):
        assert [each.computation for each in ran] == list(program)
        assert [(each.begin_s, each.end_s) for each in ran] == [
            (spans[str(c)].start_s, spans[str(c)].end_s) for c in program
        ]
        assert [each.clock for each in ran] == [plan.clocks[str(c)] for c in program]
        counts = change_statistics(ran)
        assert counts["changes_asked"] == counts["changes_set"] + counts["changes_overtaken"]
        if not call_s:
            names = ("changes_late", "changes_overtaken", "off_clock_s")
            assert [counts[name] for name in names] == [0, 0, 0.0]
    if not call_s:
        assert tuple(change_statistics(ran)["changes_asked"] for ran in ranks) == plan.changes


def test_iterations_count_that_ran_as_planned_by_the_newest_plan_but_for_its_first(
    plan: Plan, tmp_path: Path
):
    slower = replace(plan, time_s=plan.time_s + 1.0)
    write_run(tmp_path, plan, 3)
    first = attempt_in(tmp_path)
    write_run(
        tmp_path, slower, 4, version=2, first=3, deviations={5: "0F9, where the plan has 0F1"}
    )
    (first / "plan-1.yaml").rename(attempt_in(tmp_path) / "plan-1.yaml")
    for number in (0, 2):
        path = attempt_in(tmp_path) / f"iterations-{number}.csv"
        path.write_text((first / path.name).read_text() + path.read_text().split("\n", 1)[1])
    run = Run.load(tmp_path)
    assert run.versions == (1, 2)
    assert [row.iteration for row in run.ranks[0].counted(2)] == [
        4
    ]  # the one after a deviation runs without clocks
    found = calibration_of(run)
    assert found.plan == slower
    assert found.time_s == pytest.approx(slower.time_s, abs=1e-6)
    shown = summarize_run(run)
    assert [(each.version, each.iterations, each.counted) for each in shown.plans] == [
        (1, 3, 2),
        (2, 4, 1),
    ]
    assert [
        (each.reason, each.times, each.ranks, each.first_iteration) for each in shown.deviations
    ] == [
        ("0F9, where the plan has 0F1", 3, (0, 1, 2), 5),
        ("it ran without clocks, because the iteration before was not as planned", 3, (0, 1, 2), 6),
    ]


def test_without_an_iteration_that_counts_nothing_is_calibrated(plan: Plan, folder: Path):
    write_run(Path("run"), plan, 1)
    assert summarize_run(Run.load("run")).plans[0].time_s is None
    with pytest.raises(RunError) as refusal:
        calibration_of(Run.load("run"))
    assert (
        str(refusal.value)
        == "run: no iteration ran as planned by plan 1 after its first one; train for longer"
    )


def test_pipelines_are_distinguished_and_may_have_separate_plans(plan: Plan, tmp_path: Path):
    made = write_run(tmp_path, plan, 3, pipelines=2, own_plans=True)
    attempt = attempt_in(tmp_path)
    assert sorted(path.name for path in attempt.glob("plan*")) == [
        f"plan-1-pipeline-{n}.yaml" for n in range(2)
    ]
    replace(plan, time_s=plan.time_s + 1.0).save(attempt / "plan-1-pipeline-1.yaml")
    run = Run.load(tmp_path)
    assert [(each.rank, each.pipeline, each.pipeline_rank) for each in run.ranks] == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2)
    ]  # fmt: skip
    assert [each.iterations for each in run.ranks] == [each.iterations for each in made]
    assert calibration_of(run).plan == run.plan(1, 1)  # the others wait for the slowest
    shown = summarize_run(run)
    assert shown.plans[0].planned_time_s == plan.time_s + 1.0
    assert (
        shown.ranks[0].planned_energy_j
        > summarize_run_of(plan, tmp_path / "alone").ranks[0].planned_energy_j
    )


def summarize_run_of(plan: Plan, folder: Path):
    write_run(folder, plan, 3)
    return summarize_run(Run.load(folder))


def test_a_folder_that_is_no_whole_run_is_refused(plan: Plan, folder: Path):
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").touch()
    for name in ("early", "header", "rank", "last", "plan", "free"):
        write_run(folder / name, plan, 2)
    for path in attempt_in(folder / "early").glob("iterations*"):
        path.unlink()
    for path in attempt_in(folder / "header").glob("iterations*"):
        path.write_text(ITERATIONS.header)
    write_run(folder / "before", plan, 2)
    attempt_in(folder / "before").rename(folder / "0.1")
    (attempt_in(folder / "rank") / "iterations-1.csv").unlink()
    (attempt_in(folder / "last") / "iterations-2.csv").write_text(ITERATIONS.header + "0,1,0")
    (attempt_in(folder / "plan") / "plan-1.yaml").unlink()
    for path in attempt_in(folder / "free").glob("iterations*"):
        rows = [replace(row, version=None) for row in ITERATIONS.read(path)]
        path.write_text(ITERATIONS.header + "".join(map(ITERATIONS.line, rows)))
    remedy = (
        "copy the files of all nodes into one folder, or try again when each rank has ended "
        "an iteration"
    )
    for name, message in {
        "absent": "no such file; check the path",
        "empty": "is empty; try again when an iteration by a plan has ended",
        "other": "is a folder, but not a run folder; name a folder that a training run has "
        "written, or a file",
        "0.1": (
            "has files of a run of version 0.1, which this one does not read; move them to "
            "another folder, and show them with the planner that the training ran with"
        ),
        "early": "no iteration has ended yet; try again when one has",
        "header": "no iteration has ended yet; try again when one has",
        "rank": f"has no iterations of rank 1, but of other ranks; {remedy}",
        "last": f"has no iterations of rank 2 of pipeline 0, but of other ranks; {remedy}",
        "plan": f"has iterations by plan 1 but no plan-1.yaml; {remedy}",
        "free": "no iteration has run by a plan; try again when one has",
    }.items():
        with pytest.raises(RunError) as refusal:
            Run.load(name)
        assert str(refusal.value) == f"{name}: {message}"


def test_the_status_that_0_3_wrote_is_read(tmp_path: Path):
    (tmp_path / "autopilot.json").write_text(
        '{"phase": "learning", "iteration": 41, "reference_s": 1.25, "saving": 0.1, "owed_s": 0.0,'
        ' "batches": {"waiting": 0.2, "spread": null}}'
    )
    status = read_status(tmp_path)
    assert status == DeciderStatus(
        "learning",
        "learning",
        41,
        1.25,
        {"saving": 0.1, "owed_s": 0.0, "batches.waiting": 0.2, "batches.spread": None},
    )
    newer = replace(status, text="learning, and following")
    save_status(tmp_path, newer)
    assert read_status(tmp_path) == newer
    (tmp_path / "decider.json").write_text('{"phase": "learning"')
    with pytest.raises(RunError, match=r"decider\.json: is damaged"):
        read_status(tmp_path)
