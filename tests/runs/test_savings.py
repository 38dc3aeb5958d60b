"""A run in which no clock was lowered has saved nothing, whatever its iterations did; else it has
saved what the same computations would have used at full clocks.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from commands import loaded
from made_runs import BEGIN_NS, EPOCH_NS, ns, write_run
from strategies import smooth_profile, soaks

from perseus_planner import Plan, Run, schedules, solve
from perseus_planner.engines.engine import PipelineRank
from perseus_planner.extensions.service.agent.outbox import added_up
from perseus_planner.extensions.service.metrics import _JOULES, _TELEMETRY
from perseus_planner.extensions.service.tally import add_counters
from perseus_planner.extensions.service.text import _telemetry
from perseus_planner.runs import Account
from perseus_planner.runs.recording import Attempt, RankFiles
from perseus_planner.runs.savings import NOTHING, Cost, RankCosts, Savings
from perseus_planner.runs.status import DeciderStatus
from perseus_planner.runtime.controller.protocol import AttachReply, GpuSample
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.program import Expected, Program
from perseus_planner.runtime.telemetry import Telemetry, common_checkpoint
from perseus_planner.views.run import run_text, summarize_run
from perseus_planner.views.savings import EnergyRates, IterationSize, savings_of
from perseus_planner.views.sources import Sources
from perseus_planner.views.unplanned import summarize_unplanned, unplanned_text

NOTHING_SAVED = "o clock was lowered, nothing was saved"
QUICK, MANY = 50, 500


def full_plan(ranks: int, microbatches: int) -> Plan:
    """Return the plan of all clocks at maximum."""
    frontier = solve(smooth_profile(ranks), schedules.one_f_one_b(ranks, microbatches))
    planner = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    top = max(row.clock_mhz for row in frontier.dag.profile.measurements[0, "F"])
    plan = frontier.plan_of(dict.fromkeys(planner.clocks, top))
    assert plan.energy_j == pytest.approx(plan.baseline_energy_j)
    return plan


PLANS = {(ranks, count): full_plan(ranks, count) for ranks in (1, 2) for count in (2, 3)}


def any_programs(rng: Random, ranks: int, version: int) -> list[Program | None]:
    """Return what ranks may run without a lowered clock: nothing, a plan, or the autopilot's."""
    plan = PLANS[ranks, rng.choice((2, 3))]
    kind = rng.choice(("none", "plan", "old plan", "autopilot"))
    if kind == "none":
        return [None] * ranks
    if kind == "old plan":
        plan = replace(plan, full_clocks=None)
    programs = [Program.of_plan(version, plan, rank) for rank in range(ranks)]
    if kind != "autopilot":
        return [*programs]
    top = programs[0].clocks[0]
    return [replace(each, expected=Expected(each.expected.time_s, top)) for each in programs]


class DrawnRank:
    """One rank of a training that may do anything: in how long and dear iterations, whether they
    deviate, and how many computations run in them.
    """

    def __init__(self, rng: Random, folder: Path, rank: int, ranks: int, attempt: Attempt) -> None:
        seat = PipelineRank(rank, ranks, 0, tuple(range(ranks)))
        files = RankFiles(folder, rank, ranks, attempt)
        self.telemetry = Telemetry(rank, seat, files, offset_ns=lambda: EPOCH_NS)
        self._rng, self._energy_j = rng, 1e5
        origin = rng.choice(("measured", "simulated"))
        self.telemetry.update([], [AttachReply("", "", "", origin), self._sample(BEGIN_NS - 1)])

    def run(self, begin_ns: int, number: int, time_s: float, program: Program | None) -> None:
        rng = self._rng
        count = len(program.computations) if program is not None else rng.randint(1, 6)
        deviation = None
        if rng.random() < 0.2:
            count, deviation = rng.randint(1, 9), "5 microbatches, and the plan has 3"
        at_s = sorted(rng.uniform(0.0, time_s) for _ in range(2 * count))
        spans = [(begin_ns + ns(at_s[2 * i]), begin_ns + ns(at_s[2 * i + 1])) for i in range(count)]
        times = IterationTimes(number, begin_ns, tuple(spans), begin_ns + ns(time_s))
        self._energy_j += rng.uniform(5.0, 50.0) * time_s
        self.telemetry.on_end(number, program, deviation)
        self.telemetry.update([times], [self._sample(times.end_ns)])

    def _sample(self, at_ns: int) -> GpuSample:
        return GpuSample(at_ns, at_ns, self._energy_j, 1410, None, 60.0, {}, 0, 0, None)


def drawn_run(rng: Random, folder: Path) -> tuple[list[Telemetry], bool]:
    """Write a run of one to three attempts; return its newest ranks, and whether it had a plan."""
    ranks, made, has_plan = rng.choice((1, 2)), list[DrawnRank](), False
    for _ in range(rng.randint(1, 3)):
        attempt, has_plan = Attempt.next_in(folder), False
        made = [DrawnRank(rng, folder, rank, ranks, attempt) for rank in range(ranks)]
        programs = [any_programs(rng, ranks, version) for version in (1, 2)]
        begin_ns, growth = BEGIN_NS, rng.choice((1.0, 1.0, 0.9, 1.2))
        usual_s = rng.choice((0.02, 1.0, 8.0))
        for number in range(rng.randint(3, 40)):
            # A ramp-up, lengths, outliers, a stage that sleeps less from the 20th on, pauses.
            time_s = usual_s * growth ** min(number, 12) * rng.uniform(0.7, 1.4)
            time_s *= rng.choice((1.0, 1.0, 1.0, 0.1, 9.0)) * (0.5 if number > 20 else 1.0)
            for rank, each in enumerate(made):
                program = programs[number > 9][rank] if rng.random() < 0.9 else None
                has_plan |= program is not None and program.expected.plan is not None
                each.run(begin_ns, number, time_s, program)
            begin_ns += ns(time_s + rng.choice((0.0, 0.1 * time_s, 5 * time_s + 3.0)))
        for rank, each in enumerate(made):
            if rank == 0 and not has_plan:
                files = RankFiles(folder, 0, ranks, attempt)
                files.save_status(DeciderStatus("watching", "watching"))
            each.telemetry.close()
    return [each.telemetry for each in made], has_plan


def check_nothing_saved(rng: Random, folder: Path) -> None:
    ranks, _ = drawn_run(rng, folder)
    for telemetry in ranks:
        for row in telemetry.iterations:
            assert row.lowered == 0
            assert row.saved_j == (None if row.energy_j is None else 0.0)
    run = Run.load(folder)
    assert (run.total.saved_j, run.total.lowered, run.total.saved_within_j) == (0.0, 0, 0.0)
    assert [entry.saved_share for entry in run.totals if entry.energy_is] == [
        0.0 for entry in run.totals if entry.energy_is
    ]
    if run.versions:
        summary = summarize_run(run)
        text, total = run_text(summary), summary.total
        savings = savings_of(Sources(runs={"run": run}), EnergyRates(), IterationSize())
        assert all(abs(each.saved_j) < 1e-6 and each.per_run.gpu_j == 0.0 for each in savings)
    else:
        found = summarize_unplanned(run)
        text, total = unplanned_text(found), found.total
    if total.energy_is is not None and not (run.versions and summary.unlike_plan):
        assert NOTHING_SAVED in text
    printed = loaded(f"show {folder}")
    assert printed["total"]["saved_j"] == 0.0
    assert printed["saving"] in (
        None,
        {"saved_j": 0.0, "within_j": 0.0, "share": 0.0, "within_share": 0.0},
    )
    kept = common_checkpoint([rank.checkpoints for rank in ranks])
    assert kept is not None
    tally = add_counters(None, added_up("run", kept, [Account()] * len(kept)), 0.0)
    assert tally is not None
    assert tally.saved_j == 0.0
    assert tally.points[-1].saved_j in (None, 0.0)
    if tally.energy_is is not None:
        assert NOTHING_SAVED in _telemetry(tally, saves=True)
    status = SimpleNamespace(telemetry=tally, unlike_plan=None)
    metrics = {name: value(status) for name, _, value in (*_TELEMETRY, *_JOULES)}
    assert metrics["planner_job_saved_joules"] in (None, 0.0)
    assert metrics["planner_job_baseline_joules"] == metrics["planner_job_energy_joules"]


@pytest.mark.parametrize("seed", [0, *soaks(*range(1, 5))])
def test_a_run_in_which_no_clock_was_lowered_has_saved_nothing_by_every_figure(
    seed: int, tmp_path: Path
):
    for number in range(QUICK // 5):
        rng = Random(1000 * seed + number)
        check_nothing_saved(rng, tmp_path / str(number))


@pytest.mark.soak
def test_500_runs_in_which_no_clock_was_lowered_have_saved_nothing(tmp_path: Path):
    for number in range(MANY - QUICK):
        check_nothing_saved(Random(10_000 + number), tmp_path / str(number))


COSTS = RankCosts((Cost(0.2, 20.0, 0.1, 30.0), Cost(0.1, 30.0, 0.1, 30.0)), 50.0, 0.4)


def test_a_saving_is_what_rows_say_of_the_same_work_in_as_much_time():
    saved = Savings().add(COSTS, (0.2, 0.1), 0.4, 55.0)
    # At full clocks it computes for 0.1 s less and waits for 0.1 s more: 60 J and 10 J.
    assert saved is not None
    assert saved.saved_j == pytest.approx(15.0)
    twice = Savings().add(COSTS, (0.4, 0.2), 0.7, 2 * 50.0 + 50.0 * 0.1)
    assert twice is not None
    assert twice.saved_j == pytest.approx(30.0)
    assert Savings().add(replace(COSTS, each=COSTS.each[1:]), (0.3,), 0.4, 55.0) == NOTHING


def test_a_stall_is_waiting_and_an_iteration_far_off_its_rows_says_nothing():
    saved = Savings().add(COSTS, (0.2, 0.5), 0.7, 55.0 + 20.0)
    assert saved is not None
    assert saved.saved_j == pytest.approx(15.0, rel=0.15)
    assert Savings().add(COSTS, (20.0, 10.0), 40.0, 5500.0) is None
    assert Savings().add(COSTS, (0.2, 0.1), 4.0, 235.0) is None


def test_waiting_power_is_learnt_where_iterations_wait_for_unlike_times():
    savings, costs = Savings(), replace(COSTS, waiting_error_w=10.0)
    rng = Random(3)
    first = last = None
    for _ in range(60):
        waited_s = rng.choice((0.05, 0.3))
        energy_j = (1.02 * 50.0 + 70.0 * waited_s) * rng.gauss(1.0, 0.01)
        last = savings.add(costs, (0.2, 0.1), 0.3 + waited_s, energy_j)
        first = first or last
    assert first is not None
    assert last is not None
    assert last.error_j < 0.3 * first.error_j
    # 10.2 J less for computing, and 70 W for 0.1 s more of waiting.
    assert last.saved_j == pytest.approx(10.2 + 7.0, abs=0.5)


def test_a_gpu_that_does_not_follow_its_clocks_has_saved_nothing(tmp_path: Path):
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    plan = frontier.plan_for(1.1 * frontier.baseline_time_s)
    write_run(tmp_path / "followed", plan, 4)
    write_run(tmp_path / "not", plan, 4, edit=lambda _i, _change: None)
    followed, ignored = (Run.load(tmp_path / name).total for name in ("followed", "not"))
    assert followed.saved_share == pytest.approx(
        1 - plan.energy_j / plan.baseline_j(plan.time_s), abs=0.01
    )
    assert ignored.saved_j < 0.35 * followed.saved_j


NEW = ("follows_evaluation", "precedes_evaluation", "lowered", "saved_j")
NEW = (*NEW, "saved_error_j", "saved_noise_j", "judged_j", "saved_variance_j2")


def as_of_03(path: Path) -> None:
    """Rewrite rows or totals as 0.3 had them."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    is_totals = path.name.startswith("totals")
    kept = [name for name in header if name not in NEW or (is_totals and name == "saved_j")]
    more = ("unlocked_j", "unlocked_saved_j") if is_totals else ("baseline_j", "unlocked_j")
    place = kept.index("energy_j") + 1
    names = [*kept[:place], *more, *kept[place:]]
    lines = []
    for row in rows:
        values = {**dict(zip(header, row, strict=True)), **dict.fromkeys(more, "200.0")}
        values["saved_j"] = "99.0"
        lines.append(",".join(values[name] for name in names))
    path.write_text("\n".join([",".join(names), *lines, ""]))


def test_a_run_that_0_3_recorded_is_shown_and_what_it_saved_is_not_known(tmp_path: Path):
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    plan = replace(frontier.plan_for(1.1 * frontier.baseline_time_s), full_clocks=None)
    for _ in range(4):
        write_run(tmp_path, plan, 4)
    now = Run.load(tmp_path).total
    for path in [*tmp_path.glob("*/iterations-*.csv"), *tmp_path.glob("totals-*.csv")]:
        as_of_03(path)
    run = Run.load(tmp_path)
    assert now.saved_share is not None
    assert (run.total.saved_j, run.total.saved_share) == (0.0, None)
    assert (run.total.energy_j, run.total.time_s) == (now.energy_j, now.time_s)
    assert "What was saved is not known" in run_text(summarize_run(run))
    assert savings_of(Sources(runs={"run": run}), EnergyRates(), IterationSize()) == ()


def test_a_plan_of_0_3_has_saved_what_its_baseline_says(tmp_path: Path):
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 4))
    plan = frontier.plan_for(1.1 * frontier.baseline_time_s)
    shares = []
    for name, each in (("new", plan), ("old", replace(plan, full_clocks=None))):
        each.save(tmp_path / f"{name}.yaml")
        write_run(tmp_path / name, Plan.load(tmp_path / f"{name}.yaml"), 4)
        shares.append(Run.load(tmp_path / name).total.saved_share)
    assert "full_clocks" not in (tmp_path / "old.yaml").read_text()
    assert shares[1] == pytest.approx(shares[0], abs=0.005)


def test_a_row_after_an_evaluation_is_a_pause(tmp_path: Path):
    plan = PLANS[2, 2]
    (telemetry, _) = write_run(tmp_path, plan, 4)
    rows = list(telemetry.iterations)
    usual = sum((Account.of(row, is_first=True) for row in rows), Account())
    rows[1] = replace(rows[1], precedes_evaluation=1)
    rows[2] = replace(rows[2], follows_evaluation=1, energy_j=1e6, end_s=rows[2].end_s + 9.0)
    seen = sum((Account.of(row, is_first=True) for row in rows), Account())
    assert (seen.iterations, seen.windows) == (usual.iterations - 1, usual.windows - 1)
    assert seen.mean_iteration_s == pytest.approx(usual.mean_iteration_s, rel=1e-3)
    assert seen.pause_j > 1e6
    assert seen.energy_j < usual.energy_j


def test_a_computation_without_work_saves_and_costs_nothing():
    """Such as the backward of a frozen stage, whose row is 0 s and 0 J."""
    idle = Cost(0.0, 0.0, 0.0, 0.0)
    frozen = replace(COSTS, each=(*COSTS.each, idle))
    with_it = Savings().add(frozen, (0.2, 0.1, 1e-5), 0.4, 55.0)
    without = Savings().add(COSTS, (0.2, 0.1), 0.4, 55.0)
    assert with_it is not None
    assert without is not None
    assert with_it.saved_j == pytest.approx(without.saved_j)
    alone = replace(COSTS, each=(idle,))
    assert Savings().add(alone, (1e-5,), 0.4, 20.0) == NOTHING
