"""An account is the sum of its parts, however a run is cut, and travels and is kept as it is."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import write_run
from strategies import fixed, smooth_profile

from perseus_planner import Run, schedules, solve
from perseus_planner.base.wires import decode, encode
from perseus_planner.extensions.service.agent.outbox import added_up, told
from perseus_planner.extensions.service.tally import add_counters
from perseus_planner.runs import Account, IterationRecord
from perseus_planner.runs.account import SUMS, Entry, fold
from perseus_planner.runs.recording import TOTALS, add_rows
from perseus_planner.runtime.telemetry import Checkpoint, common_checkpoint
from perseus_planner.views.run import run_text, summarize_run, totals_text
from perseus_planner.views.savings import EnergyRates, IterationSize, savings_of
from perseus_planner.views.sources import Sources

SOME_S, SOME_J = st.floats(0.001, 10.0), st.none() | st.floats(0.0, 1e4)


@st.composite
def rows_of_rank(draw: st.DrawFn) -> list[IterationRecord]:
    """Return what a rank may record: plans, deviations, pauses, energies that are not known."""
    rows, at_s = list[IterationRecord](), 100.0
    for number in range(draw(st.integers(1, 6))):
        end_s = at_s + draw(SOME_S)
        next_s = draw(st.none() | st.just(end_s + draw(st.floats(0.0, 30.0))))
        version = draw(st.sampled_from((None, 1, 2)))
        rows.append(
            IterationRecord(
                iteration=number,
                version=version,
                pipeline=0,
                pipeline_rank=0,
                begin_s=at_s,
                end_s=end_s,
                busy_s=draw(SOME_S),
                planned_s=draw(st.none() | SOME_S),
                planned_busy_s=draw(st.none() | SOME_S),
                energy_j=draw(SOME_J),
                between_j=draw(SOME_J),
                lowered=draw(st.integers(0, 3)),
                saved_j=draw(st.none() | st.floats(-1e3, 1e3)),
                saved_error_j=draw(st.floats(0.0, 10.0)),
                saved_noise_j=draw(st.floats(0.0, 10.0)),
                next_s=next_s,
                deviation=draw(st.none() | st.just("another order")),
                origin=draw(st.sampled_from((None, "measured", "simulated"))),
                clock=draw(st.none() | st.floats(200.0, 2000.0)),
                achieved_mhz=draw(st.none() | st.floats(200.0, 2000.0)),
                changes_asked=draw(st.integers(0, 5)),
                throttled_s=draw(st.dictionaries(st.sampled_from(("hw-thermal",)), SOME_S)),
                temperature_c=draw(st.none() | st.floats(20.0, 90.0)),
                host_load=draw(st.none() | st.floats(0.0, 3.0)),
            )
        )
        at_s = end_s if next_s is None else next_s
    return rows


RUNS = st.lists(rows_of_rank(), min_size=1, max_size=4)


def same(one: Account, other: Account) -> None:
    for column in fields(Account):
        expected = getattr(one, column.name)
        if column.name in SUMS or column.name == "throttled_s":
            expected = pytest.approx(expected, rel=1e-9, abs=1e-6)
        assert getattr(other, column.name) == expected, column.name


@settings(fixed, max_examples=30)
@given(RUNS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_parts_sum_to_the_whole_for_any_cut_of_a_run(
    ranks: list[list[IterationRecord]], parts: int, rng: Random
):
    windows = [
        Entry.of(row, is_first=rank == 0, attempt=rank % 2, version=row.version)
        for rank, rows in enumerate(ranks)
        for row in rows
    ]
    whole = sum(windows, Account())
    of_versions = fold(windows)
    same(whole, sum(of_versions, Account()))
    assert len(of_versions) == len({each.key for each in windows})
    same(whole, sum(fold(windows, parts), Account()))
    rng.shuffle(windows)
    cut = [sum(windows[place::parts], Account()) for place in range(parts)]
    same(whole, sum(reversed(cut), Account()))
    rest = sum(cut[1:], Account())
    for name in SUMS:
        assert getattr(whole.since(cut[0]), name) == pytest.approx(
            getattr(rest, name), rel=1e-9, abs=1e-6
        )
    assert whole.iterations == len(ranks[0])
    assert whole.windows == sum(map(len, ranks))
    passed_s = sum((row.next_s or row.end_s) - row.begin_s for rows in ranks for row in rows)
    assert whole.gpu_s + whole.pause_s == pytest.approx(passed_s)
    assert whole.metered_s <= whole.gpu_s * (1 + 1e-9)


@settings(fixed, max_examples=40)
@given(RUNS)
def test_an_account_is_kept_and_travels_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[list[IterationRecord]]
):
    kept, path = (), tmp_path_factory.getbasetemp() / "totals.csv"
    for rows in ranks:
        kept = add_rows(kept, 7, 0, rows)
        kept = add_rows(kept, 7, 0, rows)  # which were added before
    path.write_text(TOTALS.header + "".join(map(TOTALS.line, kept)))
    assert tuple(TOTALS.read(path)) == kept
    checkpoint = Checkpoint(account=sum(kept, Account()), set_p50_s=0.01)
    sent = encode([told(checkpoint)])
    assert decode(sent, tuple[Checkpoint, ...]) == (checkpoint,)


def test_joules_of_a_part_of_the_time_stand_beside_that_part():
    part = Entry(attempt=1, iterations=2, time_s=4.0, windows=4, gpu_s=8.0, metered_s=6.0)
    part = replace(part, energy_j=600.0, energy_is="simulated")
    text = totals_text([part], part, saves=False)
    heading, row = text.splitlines()[2:4]
    assert heading.split("  ")[-1].strip() == "of time %"
    assert row.split()[-2:] == ["600.000", "75.00"]
    assert "Energies are those of the time for which they are known.\n" in text
    whole = replace(part, metered_s=8.0)
    assert "of time" not in totals_text([whole], whole, saves=False)


def test_the_service_and_what_is_shown_and_reported_of_a_run_are_one_account(tmp_path: Path):
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    plan = frontier.plan_for(frontier.baseline_time_s)
    ranks = write_run(tmp_path, plan, 6, pipelines=2, deviations={3: "another order"})
    kept = common_checkpoint([rank.checkpoints for rank in ranks])
    assert kept is not None
    tally = add_counters(None, added_up("run", kept, [Account()] * 4), 0.0)
    assert tally is not None
    run = Run.load(tmp_path)
    same(run.total, tally)
    shown = summarize_run(run)
    assert shown.total == run.total
    sources = Sources(frontier=frontier, runs={"run": run})
    (saving,) = savings_of(sources, EnergyRates(), IterationSize())
    assert saving.saved_share == pytest.approx(tally.saved_share)
    assert saving.energy_j * tally.iterations == pytest.approx(tally.energy_j)
    assert saving.window_s * tally.iterations == pytest.approx(tally.time_s)
    assert f" {100 * tally.saved_share:.2f}\n" in run_text(shown)
    assert f"({100 * tally.saved_share:.2f} % ± " in run_text(shown)
    assert tally.saving == shown.saving
    assert (tally.iterations, tally.windows, tally.as_planned) == (6, 24, 16)
