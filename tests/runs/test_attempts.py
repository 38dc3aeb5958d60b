"""A run folder used again: attempts never mix, the folder stays small, and its totals miss no
iteration.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from made_runs import attempt_in, write_run
from strategies import smooth_profile

from perseus_planner import Plan, schedules, solve
from perseus_planner.base.errors import RunError
from perseus_planner.runs import Account, IterationRecord, Run, recording
from perseus_planner.runs.account import Entry
from perseus_planner.runs.recording import (
    ATTEMPTS_KEPT,
    ITERATIONS,
    PLANS_KEPT,
    TOTALS,
    Attempt,
    RankFiles,
    add_rows,
    attempt_path,
    attempts_in,
    read_totals,
)
from perseus_planner.views.run import run_text, summarize_run

START = datetime(2026, 1, 1)


def planned(stages: int) -> Plan:
    frontier = solve(smooth_profile(stages, step_mhz=150), schedules.one_f_one_b(stages, 4))
    return frontier.plan_for(1.1 * frontier.baseline_time_s)


@pytest.mark.parametrize(
    ("stages", "pipelines"), [((4, 2), (1, 1)), ((2, 2), (2, 1)), ((2, 2), (1, 1))]
)
def test_the_newest_attempt_is_shown_and_all_are_added_up(
    tmp_path: Path, stages: tuple[int, int], pipelines: tuple[int, int]
):
    plans = [planned(each) for each in stages]
    for plan, count, iterations in zip(plans, pipelines, (9, 3), strict=True):
        write_run(tmp_path, plan, iterations, pipelines=count)
    run = Run.load(tmp_path)
    shown = summarize_run(run)
    assert (len(shown.ranks), shown.pipelines) == (stages[1], 1)
    assert shown.current.planned_energy_j == pytest.approx(plans[1].energy_j, rel=1e-9)
    assert [[row.iteration for row in rank.iterations] for rank in run.ranks] == [
        [0, 1, 2]
    ] * stages[1]
    assert [(each.attempt, each.version, each.iterations) for each in run.totals] == [
        (20260101000000, 1, 9),
        (20260101000001, 1, 3),
    ]
    for total, plan, count in zip(run.totals, plans, pipelines, strict=True):
        energy_j, baseline_j = (
            total.iterations * count * plan.energy_j,
            total.iterations * plan.baseline_j(plan.time_s),
        )
        assert total.energy_j == pytest.approx(energy_j, rel=1e-6)
        assert total.saved_j == pytest.approx(count * baseline_j - energy_j, rel=1e-6)
        assert total.time_s == pytest.approx(total.iterations * plan.time_s, rel=1e-5)
        assert total.metered_s == pytest.approx(total.gpu_s)
        assert total.energy_is == "simulated"
    older = Run.load(attempt_path(tmp_path, run.totals[0].attempt))
    assert (len(older.ranks), older.totals) == (pipelines[0] * stages[0], run.totals[:1])


def test_what_is_printed_of_all_attempts_is_their_sum(tmp_path: Path):
    plan = planned(2)
    for iterations in range(2, 14):
        write_run(tmp_path, plan, iterations)
    *_, old = read_totals(tmp_path, 1)
    assert old.windows == 11, "rows of older attempts are gone"
    run = Run.load(tmp_path)
    lines = run_text(summarize_run(run)).splitlines()
    begin = lines.index(
        "All attempts, energy simulated, saved against all clocks at maximum in as much time:"
    )
    heading, older, *others, whole = [line.split() for line in lines[begin + 2 : -4]]
    assert " ".join(heading) == "attempt iterations time s energy kJ saved kJ saved %"
    assert (older[:2], len(others), whole[:2]) == (["older", "5"], 10, ["all", "90"])
    assert others[-1][:2] == [attempt_in(tmp_path).name, "13"]
    saved_j = plan.baseline_j(plan.time_s) - plan.energy_j
    assert [float(cell) for cell in whole[2:]] == pytest.approx(
        [
            90 * plan.time_s,
            0.09 * plan.energy_j,
            0.09 * saved_j,
            100 * saved_j / plan.baseline_j(plan.time_s),
        ],
        rel=5e-4,
    )
    assert run.total.iterations == 90


def test_iterations_of_unknown_energy_are_told(tmp_path: Path):
    with closing(RankFiles(tmp_path, 0, 1, Attempt.next_in(tmp_path, START))) as files:
        files.save_plan(planned(1), 1, None)
        for row in rows_of(Random(3), 20, 10_000):
            files.add_iteration(
                replace(row, version=1, energy_j=100.0 if row.iteration > 4 else None)
            )
        files.write()
    text = run_text(summarize_run(Run.load(tmp_path)))
    assert text.endswith(" % of the time is known.\n")


def test_an_attempt_without_iterations_shows_the_one_before(tmp_path: Path):
    plan = planned(2)
    write_run(tmp_path, plan, 3)
    RankFiles(tmp_path, 0, 2, Attempt.next_in(tmp_path)).save_plan(plan, 1, None)
    assert len(attempts_in(tmp_path)) == 2
    assert Run.load(tmp_path).attempt == attempts_in(tmp_path)[0]


def test_attempts_rise_even_if_the_clock_was_set_back(tmp_path: Path):
    numbers = []
    same = datetime(2026, 11, 22, 13, 35, 2)
    for now in (same, same, datetime(2020, 1, 1)):
        attempt = Attempt.next_in(tmp_path, now)
        attempt_path(tmp_path, attempt.number).mkdir()
        numbers.append(attempt.number)
    assert numbers == [20261122133502, 20261122133503, 20261122133504]
    assert attempt_in(tmp_path).name == "attempt-20261122T133504"


def rows_of(rng: Random, count: int, switch: int, pipeline: int = 0) -> Iterator[IterationRecord]:
    """Yield rows of a rank whose job switches plans every `switch` iterations; some are not
    metered or not planned.
    """
    for number in range(count):
        begin_s = 1.7e9 + number
        is_metered, is_planned = rng.random() < 0.99, rng.random() < 0.95
        yield IterationRecord(
            iteration=number,
            version=None if number < 10 else 1 + number // switch,
            pipeline=pipeline,
            pipeline_rank=0,
            begin_s=begin_s,
            end_s=begin_s + rng.uniform(0.8, 0.9),
            busy_s=rng.random(),
            energy_j=rng.uniform(100, 200) if is_metered else None,
            saved_j=rng.uniform(-50, 50) if is_planned else None,
            origin="measured" if is_metered else None,
            deviation=None if is_planned else "3 microbatches, and the plan has 4",
        )


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_months_of_iterations_and_restarts_stay_within_the_bound_and_are_all_in_the_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For each rank, two files of rows in each of two attempts, and its totals; for each attempt,
    its plans: an eighth of what is kept elsewhere.
    """
    most_bytes, most_totals, most_plans = 2**17, 125, 8
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(recording, "MAX_BYTES", most_bytes)
    monkeypatch.setattr(recording, "PLANS_KEPT", most_plans)
    monkeypatch.setattr(recording, "MOST_TOTALS", most_totals)
    plan, rng = planned(1), Random(0)
    plan.save(tmp_path / "plan.yaml")
    plan_bytes = (tmp_path / "plan.yaml").stat().st_size
    folder, largest_bytes, every = tmp_path / "run", 0, list[IterationRecord]()
    for ranks, count, switch in (
        (3, 1_000, 7),
        (1, 1_500, 50),
        (3, 60, 6),
        (2, 1_000, 50),
        (3, 600, 40),
    ):
        attempt = Attempt.next_in(folder, START)
        for rank in range(ranks):
            with closing(RankFiles(folder, rank, ranks, attempt)) as files:
                version = None
                for number, row in enumerate(rows_of(rng, count, switch, rank)):
                    if (
                        rank == 0
                        and row.version not in (None, version)
                        and (switch > 7 or row.version % 10 == 0)
                    ):
                        version = row.version
                        files.save_plan(plan, version, None)
                    files.add_iteration(row)
                    every.append(row)
                    if number % 10 == 9:
                        files.write()
                    if number % 100 == 99:
                        largest_bytes = max(largest_bytes, folder_bytes(folder))
                files.write()
    bound_bytes = (
        3 * (ATTEMPTS_KEPT * 2 * most_bytes + 400 * most_totals)
        + ATTEMPTS_KEPT * most_plans * plan_bytes
    )
    assert 5 * most_bytes < largest_bytes <= bound_bytes
    assert len(attempts_in(folder)) == ATTEMPTS_KEPT
    assert len(list(folder.glob("totals-*.csv"))) == 3

    def check(totals: list[Entry]) -> None:
        known = [row for row in every if row.energy_j is not None]
        saved_j = [row.saved_j for row in known if row.saved_j is not None]
        assert math.fsum(each.energy_j for each in totals) == pytest.approx(
            math.fsum(row.energy_j for row in known)
        )
        assert math.fsum(each.saved_j for each in totals) == pytest.approx(math.fsum(saved_j))

    check(list(Run.load(folder).totals))
    of_ranks = []
    for rank in range(3):
        totals = read_totals(folder, rank)
        assert len(list(totals)) <= most_totals
        for number in attempts_in(folder):
            path = attempt_path(folder, number) / f"iterations-{rank}.csv"
            rows = ITERATIONS.read(path) if path.exists() else []
            totals = add_rows(totals, number, rank, rows)
        of_ranks += list(totals)
    check(of_ranks)
    assert of_ranks[0].attempt == 0, "the oldest of too many totals are one"
    whole = sum(of_ranks, Account())
    assert whole.windows == len(every)
    assert whole.gpu_s == pytest.approx(math.fsum(row.time_s for row in every))
    metered_s = math.fsum(row.time_s for row in every if row.energy_j is not None)
    assert whole.metered_s == pytest.approx(metered_s)


def test_a_rank_goes_on_where_another_one_removes_an_old_attempt_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So a run lost its folder, in 1 of 3 jobs that were started again: rank 0 looked for plans of
    an attempt without any, while the last rank that had rows there removed it.
    """
    for number in range(ATTEMPTS_KEPT):
        attempt_path(tmp_path, 20260101000000 + number).mkdir()
    attempt = Attempt.next_in(tmp_path, START)
    old = attempt_path(tmp_path, attempt.ended[0][0])

    def remove_first(path: Any = ".", *, really: Callable[..., Any]) -> Any:
        if Path(path) == old and old.exists():
            old.rmdir()
        return really(path)

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, partial(remove_first, really=getattr(os, name)))
    with closing(RankFiles(tmp_path, 0, 2, attempt)) as files:
        for row in rows_of(Random(3), 3, 10):
            files.add_iteration(row)
        files.write()
    assert not old.exists()
    assert len(ITERATIONS.read(attempt_path(tmp_path, attempt.number) / "iterations-0.csv")) == 3


def test_a_script_may_change_its_folder_after_training_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    files = RankFiles(Path("run"), 0, 1, Attempt.next_in(Path("run"), START))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    write_rows(files, list(rows_of(Random(3), 3, 10)))
    assert attempts_in(tmp_path / "run") == [20260101000000]


class Killed(Exception):
    """Stands for the end of the process."""


def write_rows(files: RankFiles, rows: list[IterationRecord]) -> int:
    """Write rows in the blocks of a job, until the process ends; return how many were written."""
    written = 0
    with suppress(Killed), closing(files):
        for written in range(0, len(rows), 100):
            for row in rows[written : written + 100]:
                files.add_iteration(row)
            files.write()
        written = len(rows)
    return written


def test_a_rank_killed_before_it_renames_its_rows_counts_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def replace_or_die(
        source: Path, target: Path, really: Callable[..., None] = os.replace
    ) -> None:
        if str(target).endswith(".old.csv"):
            raise Killed
        really(source, target)

    files, rows = (
        RankFiles(tmp_path, 0, 1, Attempt.next_in(tmp_path, START)),
        list(rows_of(Random(1), 9_000, 10_000)),
    )
    files.save_plan(planned(1), 1, None)
    monkeypatch.setattr(os, "replace", replace_or_die)
    written = write_rows(files, rows)
    assert 0 < written < len(rows)
    assert len(TOTALS.read(tmp_path / "totals-0.csv")) == 2  # without a plan, and by plan 1
    assert sum(each.iterations for each in Run.load(tmp_path).totals) == written


def test_a_rank_killed_before_it_deletes_rows_counts_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(_: Path, **__: object) -> None:
        raise Killed

    rows = list(rows_of(Random(1), 300, 10_000))
    for count in range(1, ATTEMPTS_KEPT + 1):
        files = RankFiles(tmp_path, 0, 1, Attempt.next_in(tmp_path, START))
        files.save_plan(planned(1), 1, None)
        assert write_rows(files, rows) == 300
        assert sum(each.iterations for each in Run.load(tmp_path).totals) == 300 * count
    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", die)
            assert (
                write_rows(RankFiles(tmp_path, 0, 1, Attempt.next_in(tmp_path, START)), rows) == 0
            )
        assert (tmp_path / "totals-0.csv").exists()
        assert sum(each.iterations for each in Run.load(tmp_path).totals) == 300 * ATTEMPTS_KEPT, (
            number
        )


def test_fewer_ranks_add_up_the_rows_of_all_ranks_before(tmp_path: Path):
    for ranks in (5, 2, 2):
        attempt = Attempt.next_in(tmp_path, START)
        for rank in range(ranks):
            write_rows(
                RankFiles(tmp_path, rank, ranks, attempt), list(rows_of(Random(rank), 100, 10_000))
            )
    assert len(attempts_in(tmp_path)) == ATTEMPTS_KEPT
    totals = [read_totals(tmp_path, rank) for rank in range(5)]
    assert [sum(each.windows for each in of_rank) for of_rank in totals] == [100] * 5


WRITING = """
import itertools, sys
from pathlib import Path
from perseus_planner.runs import IterationRecord, recording
from perseus_planner.runs.recording import Attempt, RankFiles

recording.MAX_BYTES = 2**17
files = RankFiles(Path(sys.argv[1]), 0, 1, Attempt.next_in(Path(sys.argv[1])))
for number in itertools.count():
    seat = {"iteration": number, "version": None, "pipeline": 0, "pipeline_rank": 0}
    files.add_iteration(IterationRecord(**seat, begin_s=number, end_s=number + 0.5, busy_s=0.25, energy_j=2.0))
    if number % 10 == 9:
        files.write()
        print(number + 1, flush=True)
"""  # noqa: E501


def test_a_rank_that_is_killed_at_any_moment_leaves_whole_rows_and_their_sum(tmp_path: Path):
    rng = Random(4)
    for attempt in range(6):
        before = sum(each.iterations for each in totals_in(tmp_path))
        least = rng.randrange(1_250)  # far enough for a few new files
        command = [sys.executable, "-c", WRITING, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            told = 0
            for line in process.stdout or ():
                told = int(line)
                if told > least:
                    break
            process.kill()
            told = max([told, *map(int, (process.stdout or io.StringIO()).read().split())])
        totals = totals_in(tmp_path)
        written = sum(each.iterations for each in totals) - before
        assert told <= written <= told + 10, attempt
        assert sum(each.energy_j for each in totals) == 2.0 * (before + written)


def totals_in(folder: Path) -> Sequence[Entry]:
    """Add up what a rank has written, as a run without plans cannot be loaded."""
    totals: Sequence[Entry] = ()
    if folder.exists():
        rows = {
            each: attempt_path(folder, each) / "iterations-0.csv" for each in attempts_in(folder)
        }
        found = {
            each: ITERATIONS.read(path) if path.exists() else [] for each, path in rows.items()
        }
        totals = read_totals(folder, 0)
        for each, added in found.items():
            totals = add_rows(totals, each, 0, added)
    return totals


def test_damaged_rows_of_an_old_attempt_stay_and_are_named(tmp_path: Path):
    plan = planned(2)
    write_run(tmp_path, plan, 3)
    path = attempt_in(tmp_path) / "iterations-1.csv"
    path.write_text(f"{path.read_text()}1,2\n")
    for _ in range(3):
        write_run(tmp_path, plan, 3)
    assert len(attempts_in(tmp_path)) == ATTEMPTS_KEPT + 1
    with pytest.raises(RunError) as refusal:
        Run.load(tmp_path)
    cells = len(ITERATIONS.columns)
    assert str(refusal.value) == (
        f"{path}, line 5: is not a row of {cells} cells; the file was changed: record it again"
    )


def test_a_last_row_that_was_cut_off_is_not_counted_and_known(tmp_path: Path):
    plan = planned(2)
    write_run(tmp_path, plan, 3)
    path = attempt_in(tmp_path) / "iterations-1.csv"
    path.write_bytes(path.read_bytes()[:-7])
    run = Run.load(tmp_path)
    assert [rank.is_cut_off for rank in run.ranks] == [False, True]
    assert [len(rank.iterations) for rank in run.ranks] == [3, 2]
    assert "Not counted: the last row of rank 1, which was cut off.\n" in run_text(
        summarize_run(run)
    )


def test_plans_that_are_no_longer_kept_are_only_in_the_totals(tmp_path: Path):
    plan, files = planned(1), RankFiles(tmp_path, 0, 1, Attempt.next_in(tmp_path, START))
    for number, row in enumerate(rows_of(Random(2), PLANS_KEPT + 16, 10_000)):
        files.save_plan(plan, number + 1, None)
        files.add_iteration(replace(row, version=number + 1))
    files.write()
    files.close()
    run = Run.load(tmp_path)
    assert run.versions == tuple(range(17, PLANS_KEPT + 17))
    assert len(run.totals) == PLANS_KEPT + 16
    assert len(summarize_run(run).plans) == PLANS_KEPT
