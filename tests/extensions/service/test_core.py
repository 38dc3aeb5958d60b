"""The service: what is acknowledged is kept, versions go up, plans follow decisions, and nobody
waits for another.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_rows import noisy_rows, unlike_stages
from services import (
    NOW_S,
    PIPELINES,
    STAGES,
    Clock,
    at_once,
    baseline_s,
    frontier_file,
    job,
    planned,
    report,
    service_at,
    small_frontier,
    versions_told,
)
from strategies import drawn, smooth_profile
from waiting import LONG_S

from perseus_planner import Frontier, Plan, schedules, solve
from perseus_planner.base.errors import (
    FrontierError,
    InfeasibleDeadline,
    InfeasiblePower,
    UsageError,
)
from perseus_planner.base.loops import SteadyClock
from perseus_planner.extensions.service import planning, rows
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.draft import Draft
from perseus_planner.extensions.service.jobs import WRITTEN_AFTER_S
from perseus_planner.extensions.service.models import (
    Conflict,
    Counters,
    Fenced,
    PowerStep,
    Scope,
    StorageError,
    UnknownJob,
    UnknownReport,
)
from perseus_planner.extensions.service.processes import NotPlanned, Processes
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.solving import PlanRequest, curve_of, nearest_plan_text
from perseus_planner.extensions.service.store import Storage
from perseus_planner.profiles.groups import slowed, within_power_limit
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve_dag

PROGRAM = Path(__file__).parents[2] / "support" / "service_program.py"


@dataclass
class Run:
    """A service with one job, and what a test moves."""

    service: Service
    storage: Storage
    clock: Clock
    place: Path


@contextmanager
def running(place: Path, run: Any = at_once, clock: Any = None) -> Iterator[Run]:
    clock = clock or Clock()
    with (
        Storage(place) as storage,
        Service(storage, now_s=clock, run=run, lease_s=math.inf) as service,
    ):
        yield Run(service, storage, clock, place)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path / "service.sqlite") as run:
        run.service.register(job(), frontier_file())
        yield run


@pytest.fixture
def service(one: Run) -> Service:
    return one.service


def plans(service: Service, name: str = "gpt") -> tuple[Plan, ...]:
    found = service.plans(name, 0)
    assert found is not None
    return found.plans


def test_a_job_begins_with_plans_that_are_no_slower_than_all_clocks_at_maximum(service: Service):
    found = service.plans("gpt", 0)
    assert found is not None
    assert (found.version, len(found.texts), found.of_pipeline) == (1, 1, (0,) * PIPELINES)
    assert found.plans[0] == small_frontier().plan_for(small_frontier().baseline_time_s)
    assert service.plans("gpt", 1) is None


def test_a_job_is_registered_once_however_often_it_is_said(service: Service):
    service.set_deadline("gpt", 1.2 * small_frontier().baseline_time_s).result()
    again = service.register(job(), frontier_file())
    planned(service)
    assert (again.is_new, again.version) == (False, 1)
    assert again.job.deadline_s == 1.2 * small_frontier().baseline_time_s


@pytest.mark.parametrize(("other", "step_mhz"), [(job(max_changes=2), 90), (job(), 180)])
def test_another_job_of_the_same_name_is_refused(service: Service, other: Any, step_mhz: int):
    with pytest.raises(
        Conflict, match=r"another job 'gpt' runs, with another frontier or other settings; end that"
    ):
        service.register(other, frontier_file(step_mhz))


def test_the_same_job_registered_by_many_at_once_is_new_to_one(tmp_path: Path):
    with (
        service_at(tmp_path / "service.sqlite", Clock()) as service,
        ThreadPoolExecutor(8) as threads,
    ):
        found = list(threads.map(lambda _: service.register(job(), frontier_file()), range(8)))
        assert sum(each.is_new for each in found) == 1
        assert {each.version for each in found} == {1}


BASELINE_S = baseline_s()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"pipelines": 2}, UsageError, "pipeline 2: does not exist; they are 0 to 1"),
        (
            {"places": (replace(job().places[0], stages=(7,)),)},
            UsageError,
            "stage 7: does not exist",
        ),
        ({"places": job().places[:1] * 2}, UsageError, "a rank is listed twice"),
        (
            {"deadline_s": 0.01 * BASELINE_S},
            InfeasibleDeadline,
            "no plan finishes an iteration within",
        ),
        ({"max_changes": 0, "deadline_s": 0.9999 * BASELINE_S}, InfeasibleDeadline, "no plan"),
        ({"power_w": 1.0}, InfeasiblePower, "no plan draws 1 W or less"),
    ],
)
def test_what_is_no_job_is_refused(service: Service, wrong: Any, error: type[Exception], text: str):
    service.end("gpt").result()
    with pytest.raises(error, match=text):
        service.register(replace(job(), **wrong), frontier_file())
    assert service.jobs() == ()


@pytest.mark.parametrize(
    "file", [lambda: b"", lambda: b"no frontier", lambda: frontier_file()[:-100]]
)
def test_what_is_no_frontier_is_refused_without_a_path_of_this_machine(
    tmp_path: Path, file: Callable[[], bytes]
):
    with (
        service_at(tmp_path / "service.sqlite", Clock()) as service,
        pytest.raises(FrontierError, match=r"^frontier\.npz: "),
    ):
        service.register(job(), file())


def test_beside_a_slow_pipeline_the_others_take_as_long_and_go_back_when_it_recovers(
    service: Service,
):
    calm = plans(service)
    with versions_told(service) as told:
        answer = service.report("gpt", report("a", pipeline=1, slowdown=1.2)).result()
        assert (answer.version, answer.changed, answer.takes_effect) == (2, True, "planning")
        assert answer.expected_saving_w > 0.0
        planned(service)
        beside = small_frontier().plan_beside_straggler(1.2 * BASELINE_S)
        assert plans(service) == (beside, calm[1], beside)
        back = service.report("gpt", report("b", slowdown=1.0, observed_s=NOW_S + 1.0)).result()
        assert (back.version, back.takes_effect) == (3, "next iteration")  # those plans are known
        assert plans(service) == calm
    assert told == {"gpt": [2, 3]}


def test_plans_for_a_probability_keep_deadline_straggler_and_power_in_spite_of_noise(
    tmp_path: Path,
):
    schedule = schedules.one_f_one_b(STAGES, 6)
    truth = solve(unlike_stages(smooth_profile(STAGES), 1), schedule)
    budget_w = 0.85 * truth.plan_for(truth.baseline_time_s).power_w
    for seed in range(3):
        noisy = solve(noisy_rows(truth.profile, 0.005, 12, seed), schedule)
        noisy.save(tmp_path / "frontier.npz")
        with service_at(tmp_path / f"{seed}.sqlite", Clock()) as service:
            service.register(job(on_time=0.95), (tmp_path / "frontier.npz").read_bytes())
            sure = plans(service)[0]
            assert sure == noisy.plan_for(noisy.baseline_time_s, on_time=0.95)
            assert truth.plan_of(sure.clocks).time_s < 1.002 * truth.baseline_time_s
            service.report("gpt", report("a", pipeline=1, slowdown=1.06)).result()
            planned(service)
            beside = truth.plan_of(plans(service)[0].clocks)
            assert 1.03 * truth.baseline_time_s < beside.time_s < 1.061 * truth.baseline_time_s
            service.clear("gpt", "a").result()
            service.set_power("gpt", PIPELINES * budget_w).result()
            planned(service)
            within = plans(service)[0]
            assert 0.97 * budget_w < truth.plan_of(within.clocks).power_w < 1.001 * budget_w
            assert within.on_time is not None


def test_a_job_without_a_plan_that_is_surely_fast_enough_runs_at_maximum(service: Service):
    fast = PlanRequest(service.status("gpt").job.frontier, 0.999 * BASELINE_S, (), None, None, 0.95)
    plan = Plan.loads(nearest_plan_text(fast, frontier_file()))
    assert plan.time_s <= 1.001 * BASELINE_S


def test_a_slow_stage_is_planned_exactly_and_the_others_wait_for_what_that_takes(service: Service):
    slowdowns = {1: 1.3}
    answer = service.report("gpt", report("a", slowdown=1.3, scope=Scope("stage", "1", 2))).result()
    assert (answer.version, answer.takes_effect) == (2, "planning")
    assert answer.reason == "slow stages are solved anew before it is decided"
    planned(service)
    frontier = small_frontier()
    slow = solve_dag(PipelineDag(slowed(frontier.profile, slowdowns), frontier.dag.iteration))
    decision = service.status("gpt").decision
    assert decision.straggler_time_s == max(slow.min_time_s, BASELINE_S)
    assert decision.each[2].slow_stages == slowdowns
    own = slow.plan_until(decision.each[2].time_s)
    beside = frontier.plan_beside_straggler(decision.straggler_time_s)
    assert plans(service) == (beside, beside, own)


def test_a_power_limit_of_its_gpus_has_a_job_planned_again_within_it(tmp_path: Path):
    frontier = small_frontier()
    powers_w = sorted(
        row.energy_j / row.time_s for rows in frontier.profile.measurements.values() for row in rows
    )
    limit_w = powers_w[-3] / 1.03  # caps the clocks that draw most
    limited = solve_dag(
        PipelineDag(within_power_limit(frontier.profile, limit_w), frontier.dag.iteration)
    )
    assert limited.min_time_s > 1.001 * BASELINE_S
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        service.telemetry("gpt", Counters(run="a", iterations=1, time_s=1.0)).result()
        assert service.status("gpt").promised == 1
        service.telemetry(
            "gpt", Counters(run="a", iterations=2, time_s=2.0, gpu_power_limit_w=limit_w)
        ).result()
        planned(service)
        assert plans(service) == (limited.plan_for(limited.baseline_time_s),) * PIPELINES
        version = service.status("gpt").version
        service.telemetry(
            "gpt", Counters(run="a", iterations=3, time_s=3.0, gpu_power_limit_w=0.995 * limit_w)
        ).result()
        assert service.status("gpt").promised == version  # a site may adjust its limit all the time
        service.report("gpt", report("a", slowdown=1.3, scope=Scope("stage", "1", 2))).result()
        planned(service)
        slow = solve_dag(PipelineDag(slowed(limited.profile, {1: 1.3}), limited.dag.iteration))
        assert plans(service)[2] == slow.plan_until(service.status("gpt").decision.each[2].time_s)
        service.clear("gpt", "a").result()
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        planned(service)
        status = service.status("gpt")
        assert (status.job.gpu_power_limit_w, status.decision.each[0].time_s) == (
            limit_w,
            limited.baseline_time_s,
        )
        service.telemetry("gpt", Counters(run="a", iterations=4, time_s=4.0)).result()
        planned(service)
        assert plans(service)[0] == frontier.plan_for(BASELINE_S)


def test_a_power_limit_that_nothing_can_keep_leaves_the_plans_as_they_are(service: Service):
    before = plans(service)
    service.telemetry(
        "gpt", Counters(run="a", iterations=1, time_s=1.0, gpu_power_limit_w=1.0)
    ).result()
    planned(service)
    assert plans(service) == before
    reason = service.status("gpt").decision.reason
    assert reason.startswith(
        "the plans stay unchanged because planning failed: stage 0 forward: draws"
    )


def test_no_plan_is_slower_than_is_of_use(service: Service):
    service.report("gpt", report("a", slowdown=50.0)).result()
    planned(service)
    assert plans(service)[0] == small_frontier().plan_until(small_frontier().max_time_s)
    version = service.status("gpt").version
    answer = service.report("gpt", report("b", slowdown=60.0, source="another")).result()
    assert answer.version == version  # the plans are the same


def test_the_same_report_again_changes_nothing(service: Service):
    first = service.report("gpt", report("a")).result()
    planned(service)
    again = service.report("gpt", report("a", begins_s=NOW_S + 5.0)).result()
    assert (again.version, again.changed, again.report) == (first.version, False, first.report)
    assert again.reason == "the report was received before"
    service.clear("gpt", "a").result()
    assert service.reports("gpt") == ()


@pytest.mark.parametrize(
    ("ttl_s", "how"), [(math.inf, "was cleared"), (60.0, "was cleared"), (0.0, "has expired")]
)
def test_the_key_of_a_report_that_is_over_is_refused_and_not_dropped_as_a_success(
    one: Run, ttl_s: float, how: str
):
    service = one.service
    service.report("gpt", report("a", expires_s=NOW_S + (ttl_s or 60.0))).result()
    one.clock.now_s += 90.0 if ttl_s == 0.0 else 30.0
    service.tick()
    if ttl_s:
        service.clear("gpt", "a").result()
    one.clock.now_s += 1000.0
    service.tick()
    now_s = one.clock.now_s
    for new in (
        report("a", observed_s=now_s, begins_s=now_s, expires_s=now_s + (ttl_s or 60.0)),
        report("a", pipeline=2, observed_s=now_s, begins_s=now_s, expires_s=math.inf),
    )[: 2 if ttl_s else 1]:
        with pytest.raises(Conflict, match=f"report 'a' {how}, .* another key"):
            service.report("gpt", new).result()
    assert service.reports("gpt") == ()


def test_a_deadline_beyond_the_least_energy_stops_there_and_says_so(service: Service):
    """As the command `planner plan --deadline` does on the same frontier."""
    frontier = small_frontier()
    late_s = 1.2 * frontier.least_energy_time_s
    assert late_s < frontier.max_time_s
    answer = service.set_deadline("gpt", late_s).result()
    planned(service)
    assert plans(service) == (frontier.plan_for(late_s),) * PIPELINES
    stops = f": the least energy, as {late_s:.4g} s would be slower and cost more"
    assert answer.reason.endswith(stops)
    status = service.status("gpt")
    assert status.state.text.endswith(stops)
    assert status.job.deadline_s == late_s
    # A wide power budget of the job changes nothing in it, and a straggler is waited for.
    service.set_power("gpt", 10.0 * drawn_w(service)).result()
    planned(service)
    assert plans(service) == (frontier.plan_for(late_s),) * PIPELINES
    assert service.status("gpt").decision.reason.endswith(stops)
    service.report("gpt", report("slow", slowdown=1.1)).result()
    planned(service)
    assert service.status("gpt").decision.targets[0].time_s < late_s
    assert plans(service)[0].time_s > frontier.least_energy_time_s


def test_a_job_registered_with_a_deadline_beyond_the_least_energy_stops_there(tmp_path: Path):
    late_s = 1.2 * small_frontier().least_energy_time_s
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        service.register(job(deadline_s=late_s), frontier_file())
        assert plans(service) == (small_frontier().plan_for(late_s),) * PIPELINES
        assert "would be slower and cost more" in service.status("gpt").decision.reason


@pytest.mark.parametrize(
    "other",
    [
        report("a", slowdown=1.7),
        report("a", pipeline=2),
        report("a", source="another"),
        report("a", cause="data"),
    ],
)
def test_another_report_of_the_same_key_is_refused(service: Service, other: Any):
    service.report("gpt", report("a")).result()
    with pytest.raises(
        Conflict,
        match="report 'a' differs from what was received with that key; give another report "
        "another key",
    ):
        service.report("gpt", other).result()


def test_what_a_source_observed_later_counts_in_whatever_order_it_comes(service: Service):
    service.report("gpt", report("new", slowdown=1.0, observed_s=NOW_S)).result()
    late = service.report("gpt", report("old", slowdown=1.5, observed_s=NOW_S - 10.0)).result()
    assert not late.changed
    assert "its source has observed the scope later" in late.reason
    assert service.reports("gpt") == ()


def test_a_cleared_report_keeps_older_ones_from_counting(one: Run):
    one.service.report("gpt", report("new", slowdown=1.2, observed_s=NOW_S)).result()
    one.service.clear("gpt", "new").result()
    one.service.report("gpt", report("old", slowdown=1.5, observed_s=NOW_S - 10.0)).result()
    assert one.service.reports("gpt") == ()
    one.clock.now_s += 7200.0
    one.service.report("gpt", report("c", pipeline=2)).result()
    assert [each.key for each in one.service.reports("gpt")] == ["c"]  # and is forgotten in the end
    one.service.report("gpt", report("older", slowdown=1.5, observed_s=NOW_S - 20.0)).result()
    assert [each.key for each in one.service.reports("gpt")] == ["c", "older"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (report("a", pipeline=PIPELINES), "there is no pipeline 3; pipelines are 0 to 2"),
        (
            report("a", scope=Scope("stage", str(STAGES), 0)),
            "there is no stage 2; stages are 0 to 1",
        ),
        (report("a", scope=Scope("node", "elsewhere")), "has no known node 'elsewhere'"),
    ],
)
def test_a_report_that_says_nothing_of_the_job_is_refused(service: Service, wrong: Any, text: str):
    with pytest.raises(UsageError, match=text):
        service.report("gpt", wrong).result()
    assert service.status("gpt").promised == 1


def test_what_one_source_sends_leaves_room_for_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("perseus_planner.extensions.service.checks._MOST_OF_A_SOURCE", 3)
    for number in range(3):
        service.report(
            "gpt", report(f"{number}", source="noisy", begins_s=NOW_S + 1e6 + number)
        ).result()
    with pytest.raises(Conflict, match="has 3 reports, 3 of them by 'noisy'; clear some"):
        service.report("gpt", report("more", source="noisy")).result()
    assert service.report("gpt", report("honest")).result().report is not None
    service.clear("gpt", "0").result()
    assert service.report("gpt", report("more", source="noisy")).result().report is not None


def test_what_is_not_there_is_said_to_be_unknown(service: Service):
    for call in (service.status, service.reports, lambda job: service.end(job).result()):
        with pytest.raises(UnknownJob, match="no job 'other' runs here"):
            call("other")
    for call in (
        lambda: service.plans("other", 0),
        lambda: service.report("other", report("a")).result(),
        lambda: service.clear("other", "a").result(),
        lambda: service.set_deadline("other", 1.0).result(),
        lambda: service.set_power("other", 1.0).result(),
        lambda: service.taken("other", 1, 1).result(),
    ):
        with pytest.raises(UnknownJob, match="no job 'other' runs here"):
            call()
    with pytest.raises(UnknownReport, match="job 'gpt' has no report 'a'"):
        service.clear("gpt", "a").result()


def test_time_alone_makes_reports_begin_and_end(one: Run):
    one.service.report(
        "gpt", report("a", slowdown=1.2, begins_s=NOW_S + 10.0, expires_s=NOW_S + 1000.0)
    ).result()
    assert one.service.tick() == NOW_S + 10.0
    assert one.service.status("gpt").promised == 1
    assert [each.key for each in one.service.reports("gpt")] == ["a"]  # it is to count
    one.clock.now_s = NOW_S + 10.0
    assert one.service.tick() <= NOW_S + 1000.0
    planned(one.service)
    assert one.service.status("gpt").version == 2
    one.clock.now_s = NOW_S + 1000.0
    assert one.service.tick() == math.inf
    assert one.service.status("gpt").version == 3
    assert one.service.reports("gpt") == ()


def test_a_report_begins_at_its_iteration_as_far_as_the_job_has_told(one: Run):
    one.service.report("gpt", report("a", slowdown=1.2, begins_iteration=100)).result()
    assert one.service.tick() == math.inf  # nobody knows when that is
    one.service.taken("gpt", 1, 50).result()
    look_s = one.service.tick()
    assert look_s == pytest.approx(NOW_S + 49 * BASELINE_S)
    one.clock.now_s = look_s + 1e-3
    one.service.tick()
    assert one.service.status("gpt").promised == 2


def test_a_deadline_moves_all_pipelines_and_back(service: Service):
    calm = plans(service)
    answer = service.set_deadline("gpt", 1.1 * BASELINE_S).result()
    assert (answer.report, answer.version) == (None, 2)
    planned(service)
    assert plans(service) == (small_frontier().plan_until(1.1 * BASELINE_S),) * PIPELINES
    service.set_deadline("gpt", None).result()
    assert plans(service) == calm
    with pytest.raises(InfeasibleDeadline):
        service.set_deadline("gpt", 1e-6).result()
    assert service.status("gpt").job.deadline_s is None


def drawn_w(service: Service) -> float:
    """What all jobs draw by their newest plans, all pipelines of each at the pace of the
    slowest, watts.
    """
    found = 0.0
    for status in service.jobs():
        of = plans(service, status.job.name)
        found += sum(plan.energy_j for plan in of) / max(plan.time_s for plan in of)
    return found


def test_what_could_not_be_planned_for_a_job_that_has_ended_is_not_held_against_the_next_one(
    tmp_path: Path,
):
    fails, begun, go_on = (threading.Event() for _ in range(3))

    def run(function: Any, *arguments: Any) -> Any:
        if function is planning.nearest_plan_text and fails.is_set():
            begun.set()
            assert go_on.wait(LONG_S)
            fails.clear()
            raise NotPlanned("killed")
        return function(*arguments)

    with service_at(tmp_path / "service.sqlite", Clock(), run=run) as service:
        service.register(job(), frontier_file())
        budget_w = 0.85 * drawn_w(service)
        fails.set()
        service.set_power("gpt", budget_w).result()
        assert begun.wait(LONG_S)
        service.end("gpt").result()
        service.register(job(power_w=budget_w), frontier_file())
        go_on.set()
        planned(service)
        assert drawn_w(service) <= budget_w
        assert "planning failed" not in service.status("gpt").decision.reason


def test_a_power_budget_of_all_jobs_is_kept_by_all_together_and_lifted(service: Service):
    service.register(job("bloom", deadline_s=1.05 * BASELINE_S), frontier_file())
    before, before_w = plans(service), drawn_w(service)
    answers = service.set_power(None, 0.85 * before_w).result()
    assert [each.job for each in answers] == ["gpt", "bloom"]
    planned(service)
    assert drawn_w(service) <= 0.85 * before_w
    assert service.power_budget.power_w == 0.85 * before_w
    with pytest.raises(InfeasiblePower):
        service.register(job("third"), frontier_file())
    with pytest.raises(InfeasiblePower) as refused:
        service.set_power(None, 1.0).result()
    service.set_power(
        None, refused.value.least_power_w * (1 + 1e-9)
    ).result()  # the least that was named is feasible
    planned(service)
    assert drawn_w(service) <= refused.value.least_power_w * (1 + 1e-9)
    service.end("bloom").result()  # its power is for the others
    planned(service)
    assert plans(service) == before
    service.set_power(None, None).result()
    assert plans(service) == before


def test_a_power_budget_of_all_jobs_is_set_and_stays_while_no_job_runs(service: Service):
    budget_w = 0.85 * drawn_w(service)
    service.set_power(None, budget_w).result()
    service.end("gpt").result()
    assert service.set_power(None, 0.5 * budget_w).result() == ()
    assert service.set_power(None, budget_w).result() == ()
    service.register(job(), frontier_file())
    planned(service)
    assert drawn_w(service) <= budget_w


def test_a_power_budget_of_a_job_is_its_own(service: Service):
    service.register(job("bloom"), frontier_file())
    (answer,) = service.set_power("gpt", 0.8 * drawn_w(service) / 2).result()
    assert answer.job == "gpt"
    planned(service)
    status = {each.job.name: each for each in service.jobs()}
    assert (
        status["gpt"].decision.straggler_time_s
        > BASELINE_S
        == status["bloom"].decision.straggler_time_s
    )
    with pytest.raises(InfeasiblePower):
        service.set_power("gpt", 1.0).result()
    service.set_power("gpt", None).result()
    assert service.status("gpt").decision.straggler_time_s == BASELINE_S


def test_which_version_a_job_runs_by_is_noted_and_never_goes_back(service: Service):
    with pytest.raises(Conflict, match="job 'gpt' has no version 2 of its plans; the newest is 1"):
        service.taken("gpt", 2, 10).result()
    service.set_deadline("gpt", 1.1 * BASELINE_S).result()
    planned(service)
    service.taken("gpt", 2, 20).result()
    service.taken("gpt", 1, 10).result()
    taken = service.status("gpt").taken
    assert taken is not None
    assert (taken.version, taken.iteration) == (2, 20)
    assert service.set_deadline("gpt", 1.1 * BASELINE_S).result().takes_effect == "already"


def test_those_who_wait_are_told_that_a_job_has_ended(service: Service):
    with versions_told(service) as told:
        service.end("gpt").result()
    assert told == {"gpt": [1]}
    assert service.jobs() == ()
    assert service.register(job(max_changes=4), frontier_file()).is_new


def test_a_status_has_what_counts_when_it_is_asked_for(one: Run):
    one.service.report("gpt", report("a", begins_s=NOW_S + 10.0, expires_s=NOW_S + 20.0)).result()
    for passed_s, keys in ((5.0, ["a"]), (15.0, ["a"]), (20.0, [])):
        one.clock.now_s = NOW_S + passed_s
        assert [each.key for each in one.service.status("gpt").reports] == keys
    one.service.telemetry("gpt", Counters(run="run", iterations=1, time_s=1.0)).result()
    assert one.service.status("gpt").telemetry is not None


def test_of_a_job_that_is_there_the_registration_is_not_written_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    written: list[Any] = []
    write_json = rows.write_json
    monkeypatch.setattr(
        rows, "write_json", lambda value, **how: written.append(value) or write_json(value, **how)
    )
    service.report("gpt", report("a")).result()
    assert written
    assert not any("places" in each for each in written)


def test_a_listener_that_fails_harms_nobody(service: Service, caplog: pytest.LogCaptureFixture):
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    service.on_version = fail
    with versions_told(service) as told:
        service.set_deadline("gpt", 1.1 * BASELINE_S).result()
        planned(service)
    service.taken("gpt", 2, 1).result()  # after what failed
    assert told == {"gpt": [2]}
    assert "An action after a committed change has failed" in caplog.text


class Slow:
    """Plans when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.let.set()
        self.begun = threading.Event()

    def __call__(self, function: Any, *arguments: Any) -> Any:
        self.begun.set()
        assert self.let.wait(LONG_S)
        return function(*arguments)


def test_nobody_waits_for_plans_that_are_being_made(tmp_path: Path):
    slow = Slow()
    with service_at(tmp_path / "service.sqlite", Clock(), run=slow) as service:
        service.register(job(), frontier_file())
        service.register(job("bloom"), frontier_file())
        slow.let.clear()
        slow.begun.clear()
        first = service.report("gpt", report("a", slowdown=1.2)).result()
        assert slow.begun.wait(LONG_S)
        # What comes meanwhile joins it: one version has it all.
        second = service.report("gpt", report("b", pipeline=2, slowdown=1.4)).result()
        assert (first.version, second.version, second.takes_effect) == (2, 2, "planning")
        assert service.report("bloom", report("a")).result().version == 2
        assert service.plans("gpt", 1) is None
        assert service.status("gpt").promised == 2
        slow.let.set()
        planned(service)
        status = service.status("gpt")
        assert status.version == 2
        assert status.decision.stragglers == {1: "a", 2: "b"}
        assert plans(service)[0] == small_frontier().plan_beside_straggler(1.4 * BASELINE_S)


def test_jobs_whose_slow_stages_are_solved_take_turns(tmp_path: Path):
    slow, solved = Slow(), list[str]()

    def run_one(function: Any, *arguments: Any) -> Any:
        if function is planning.curve_of and arguments[1]:
            solved.append(of_frontier[arguments[0]])
        return slow(function, *arguments)

    with service_at(tmp_path / "service.sqlite", Clock(), run=run_one) as service:
        of_frontier = {
            service.register(job("gpt"), frontier_file()).job.frontier: "gpt",
            service.register(job("bloom"), frontier_file(180)).job.frontier: "bloom",
        }
        slow.let.clear()
        slow.begun.clear()
        for pipeline, slowdown in enumerate((1.1, 1.2, 1.3)):
            scope = Scope("stage", "1", pipeline)
            service.report(
                "gpt", report(f"a{pipeline}", slowdown=slowdown, source=f"{pipeline}", scope=scope)
            ).result()
        assert slow.begun.wait(LONG_S)
        service.report("bloom", report("b", scope=Scope("stage", "0", 0))).result()
        slow.let.set()
        planned(service)
        assert sorted(solved) == ["bloom", "gpt", "gpt", "gpt"]
        assert solved[-1] == "gpt"


def test_a_service_whose_changes_cannot_be_written_says_so_until_they_can(
    one: Run, monkeypatch: pytest.MonkeyPatch
):
    """Something small was written in the meantime, which said nothing of what failed."""
    execute, free = one.storage.execute, [400]

    def full(statement: str, *values: Any) -> list[Any]:
        if sum(len(each) for each in values if isinstance(each, str)) > free[0]:
            raise sqlite3.OperationalError("database or disk is full")
        return execute(statement, *values)

    monkeypatch.setattr(one.storage, "execute", full)
    assert one.service.problem is None
    for _ in range(2):
        with pytest.raises(StorageError, match="database or disk is full; check that"):
            one.service.report("gpt", report("a")).result()
        assert one.service.next_tick_s() == -math.inf
        one.storage.commit(Draft())
        with pytest.raises(StorageError):
            one.service.tick()
        assert "disk is full" in str(one.service.problem)
    assert one.service.status("gpt").reports == ()
    free[0] = 10**9
    one.service.tick()
    assert one.service.problem is None
    assert one.service.report("gpt", report("a")).result().changed


def test_a_service_whose_log_is_not_the_one_at_its_path_acknowledges_nothing(one: Run):
    """What was acknowledged since was in that log alone, and lost at the next start."""
    one.place.with_name("service.sqlite-wal").unlink()
    with pytest.raises(Fenced, match="-wal: was removed or replaced while the"):
        one.service.report("gpt", report("a")).result()
    with pytest.raises(Fenced):
        one.service.tick()
    assert "was removed or replaced" in str(one.service.problem)


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_a_service_whose_file_is_not_the_one_at_its_path_acknowledges_nothing(one: Run, way: str):
    """It is on disk for nobody, as a restore by `mv` put another file there."""
    if way == "removed":
        one.place.unlink()
    else:
        shutil.copy(one.place, one.place.with_name("backup"))
        one.place.with_name("backup").replace(one.place)
    with pytest.raises(Fenced, match="was removed or replaced while the service wrote it"):
        one.service.report("gpt", report("a")).result()
    with pytest.raises(Fenced):
        one.service.tick()


def test_a_service_that_has_nothing_to_write_finds_that_another_has_opened_its_database(
    one: Run, monkeypatch: pytest.MonkeyPatch
):
    with Storage(one.place):
        one.service.tick()  # something was written a moment ago
        monkeypatch.setattr(one.storage, "checked_after_s", -1.0)
        with pytest.raises(Fenced, match="another service has opened it"):
            one.service.tick()
        assert "another service has opened it" in str(one.service.problem)


def test_a_report_counts_for_its_time_although_the_clock_of_the_machine_is_set(tmp_path: Path):
    wall, uptime = Clock(), Clock()
    uptime.now_s = 50.0
    monotonic = SteadyClock(wall_s=wall, monotonic_s=uptime)
    slow = report("a", observed_s=NOW_S, expires_s=NOW_S + 600.0)

    def is_slow(service: Service) -> bool:
        service.tick()
        planned(service)
        return bool(service.status("gpt").decision.stragglers)

    with service_at(tmp_path / "service.sqlite", monotonic) as service:
        service.register(job(), frontier_file())
        uptime.now_s += 100.0
        service.report("gpt", replace(slow, observed_s=monotonic(), begins_s=monotonic())).result()
        planned(service)
        for step_s in (-3600.0, 7200.0, -3600.0 - 30.0):
            wall.now_s += step_s
            assert is_slow(service)
    wall.now_s = NOW_S - 365 * 86400.0  # nothing that was left of its time is lost or added
    again = SteadyClock(wall_s=wall, monotonic_s=uptime)
    for passed_s, slow_now in ((0.0, True), (490.0, True), (20.0, False)):
        uptime.now_s += passed_s
        with service_at(tmp_path / "service.sqlite", again) as service:
            assert is_slow(service) is slow_now


def test_schedules_follow_the_clock_of_the_machine_whenever_it_is_set(tmp_path: Path):
    """A start a year ahead used up all of a schedule, and an NTP step moved it."""
    wall, uptime = Clock(), Clock()
    steps = (PowerStep(NOW_S + 3600.0, 5e6), PowerStep(NOW_S + 7200.0, 4e6))

    @contextmanager
    def serving() -> Iterator[Service]:
        clock = SteadyClock(wall_s=wall, monotonic_s=uptime)
        with (
            Storage(tmp_path / "service.sqlite") as storage,
            Service(storage, now_s=clock, wall_s=wall, run=at_once) as service,
        ):
            yield service

    def budgets(service: Service) -> tuple[float | None, float | None]:
        planned(service)
        service.tick()
        return service.power_budget.power_w, service.status("gpt").job.power_w

    with serving() as service:
        service.register(job(), frontier_file())
        service.set_power(None, 6e6, steps).result()
        service.set_power("gpt", 6e6, steps).result()
        for ahead_s, power_w in ((0.0, 6e6), (3600.0, 5e6), (7300.0, 4e6), (10.0, 6e6)):
            wall.now_s = NOW_S + ahead_s
            assert budgets(service) == (power_w, power_w)
    for ahead_s, power_w in ((365 * 86400.0, 4e6), (5.0, 6e6), (3605.0, 5e6)):
        wall.now_s = NOW_S + ahead_s
        with serving() as service:
            assert budgets(service) == (power_w, power_w)
            assert [each.power_w for each in service.power_budget.schedule] == [
                each.power_w for each in steps if (each.power_w or 0.0) < power_w
            ]
            wall.now_s += 30.0
            uptime.now_s += 30.0


class Moving(Clock):
    """A clock that is a little later each time that somebody looks at it."""

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def test_a_budget_of_all_jobs_begins_when_it_is_due_while_jobs_are_silent(tmp_path: Path):
    """The moment was compared with a clock that had been read before it."""
    clock = Moving()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once, lease_s=math.inf) as service,
    ):
        service.register(job(), frontier_file())
        service.set_power(None, 6e6, (PowerStep(NOW_S + 3600.0, 5e6),)).result()
        service.tick()
        clock.now_s = NOW_S + 3599.0
        assert NOW_S + 3599.9 < service.tick() < NOW_S + 3600.1
        assert service.power_budget.power_w == 6e6
        clock.now_s = NOW_S + 3600.0
        service.tick()
        assert service.power_budget.power_w == 5e6
        assert service.tick() == math.inf


def test_speeding_up_does_not_wait_for_plans_that_are_being_made(tmp_path: Path):
    slow = Slow()
    with service_at(tmp_path / "service.sqlite", Clock(), run=slow) as service:
        service.register(job(), frontier_file())
        calm = plans(service)
        slow.let.clear()
        service.report("gpt", report("a", slowdown=1.2)).result()
        cleared = service.clear("gpt", "a").result()
        assert (cleared.version, cleared.takes_effect) == (2, "next iteration")
        assert plans(service) == calm
        slow.let.set()
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        assert service.status("gpt").version == 2


def test_where_planning_fails_plans_stay_as_they_were_and_later_ones_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    error: list[Exception] = []

    def failing(function: Any, *arguments: Any) -> Any:
        if error:
            raise error[0]
        return function(*arguments)

    with service_at(tmp_path / "service.sqlite", Clock(), run=failing) as service:
        service.register(job(), frontier_file())
        calm = plans(service)
        for each in (NotPlanned("killed twice"), MemoryError("no room")):
            error[:] = [each]
            answer = service.report(
                "gpt", report(repr(each), slowdown=1.1 + 0.1 * len(repr(each)), source=repr(each))
            ).result()
            planned(service)
            status = service.status("gpt")
            assert status.version == answer.version
            assert status.decision.reason.startswith(
                "the plans stay unchanged because planning failed: "
            )
            assert plans(service) == calm
        assert (
            "Planning failed for job 'gpt'" in caplog.text
        )  # a MemoryError is no error of the planner's own
        error.clear()
        service.report("gpt", report("more", slowdown=9.0)).result()
        planned(service)
        assert plans(service) != calm


def test_what_cannot_be_written_is_not_acknowledged_and_not_done(
    one: Run, monkeypatch: pytest.MonkeyPatch
):
    def full(self: Storage, change: Draft) -> None:
        raise StorageError("disk full")

    one.service.report("gpt", report("later", begins_s=NOW_S + 10.0)).result()
    before = one.service.status("gpt")
    with monkeypatch.context() as patch, versions_told(one.service) as told:
        patch.setattr(Storage, "commit", full)
        with pytest.raises(StorageError, match="disk full"):
            one.service.report("gpt", report("a")).result()
        one.clock.now_s += 10.0
        with pytest.raises(StorageError, match="disk full"):
            one.service.tick()
    assert told == {}
    assert one.service.status("gpt") == before
    one.service.tick()  # what was due then is done now
    assert one.service.status("gpt").promised == 2
    assert (
        one.service.report("gpt", report("a", slowdown=1.0)).result().reason
        != "the report was received before"
    )


@contextmanager
def full_disk() -> Iterator[None]:
    """No change of a service can be written in the block."""

    def full(self: Storage, change: Draft) -> None:
        raise StorageError("disk full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "commit", full)
        yield


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_counts_that_could_not_be_written_are_written_later(tmp_path: Path, *, ends: bool):
    """They were forgotten, unless the job sent more."""
    place = tmp_path / "service.sqlite"
    names = [f"job{number}" for number in range(3)]
    with running(place) as run:
        for name in names:
            run.service.register(job(name), frontier_file())
            run.service.telemetry(name, Counters(run="a", iterations=7, time_s=7.0)).result()
        run.clock.now_s += WRITTEN_AFTER_S
        with full_disk(), pytest.raises(StorageError, match="disk full"):
            run.service.tick()
        if not ends:
            run.service.tick()
            left = tmp_path / "left"  # what a service that is killed now leaves
            shutil.copytree(tmp_path, left, ignore=lambda *_: ["left"])
            place = left / place.name
    with running(place) as run:
        found = [each.telemetry for each in run.service.jobs()]
        assert [each and each.iterations for each in found] == [7, 7, 7]


def test_plans_that_cannot_be_written_are_written_later(one: Run, monkeypatch: pytest.MonkeyPatch):
    commit, refused = Storage.commit, threading.Event()

    def full_once(self: Storage, change: Draft) -> None:
        is_version = any(
            after and after.published.version == 2 for after in change.changed.values()
        )
        if is_version and not refused.is_set():
            refused.set()
            raise StorageError("disk full")
        commit(self, change)

    monkeypatch.setattr(Storage, "commit", full_once)
    one.service.report("gpt", report("a")).result()
    assert refused.wait(LONG_S)
    while math.isinf(one.service.tick()):  # until the thread has put down when to try again
        pass
    one.clock.now_s += 1.0
    one.service.tick()
    planned(one.service)
    assert one.service.status("gpt").version == 2


def test_reports_that_come_together_are_written_together(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    commit, commits, go = Storage.commit, [], threading.Event()

    def slow(self: Storage, change: Draft) -> None:
        commits.append(change)
        assert go.wait(LONG_S)
        commit(self, change)

    monkeypatch.setattr(Storage, "commit", slow)
    names = [f"s{number}" for number in range(40)]
    later = {"begins_s": NOW_S + 1e6}
    answers = []
    for name in names:
        answers.append(service.report("gpt", report(name, source=name, **later)))
        while not commits:  # the first one is being written, so that the others have to wait
            pass
    go.set()
    assert all(each.result().version == 1 for each in answers)
    assert len(commits) == 2
    assert {each.key for each in service.reports("gpt")} == set(names)


def test_a_job_that_ends_as_another_takes_its_name_leaves_it_nothing(
    one: Run, monkeypatch: pytest.MonkeyPatch
):
    """Both were written in one transaction: the new job had the old one's reports and accounts
    after a restart.
    """
    service = one.service
    service.report("gpt", report("old", begins_s=NOW_S + 1e6)).result()
    service.telemetry("gpt", Counters(run="a", iterations=7, time_s=7.0)).result()
    one.clock.now_s += WRITTEN_AFTER_S
    service.tick()
    commit, commits, go = Storage.commit, [], threading.Event()

    def slow(self: Storage, change: Draft) -> None:
        commits.append(change)
        assert go.wait(LONG_S)
        commit(self, change)

    with (
        versions_told(service) as told,
        ThreadPoolExecutor(1) as threads,
        ExitStack() as stack,
    ):
        stack.callback(go.set)
        monkeypatch.setattr(Storage, "commit", slow)
        first = service.report("gpt", report("waits", begins_s=NOW_S + 1e6))
        while not commits:  # so that the end and the new job wait for each other
            pass
        end = service.end("gpt")
        # Its plans are those of the old job, which runs until then, and its version is 1 too.
        new = threads.submit(
            service.register, job(max_changes=2), frontier_file(180), take_over=True
        )
        while service.writing.waiting < 3:
            pass
        go.set()
        first.result()
        end.result()
        assert new.result().is_new
    assert len(commits) == 2
    assert told == {"gpt": [1, 1]}  # that it has ended, and that there is another
    expected = service.plans("gpt", 0)
    with running(one.place, clock=one.clock) as again:
        (status,) = again.service.jobs()
        assert (status.reports, status.telemetry) == ((), None)
        assert again.service.plans("gpt", 0) == expected
        (_, ended) = again.service.totals()
        assert ended.telemetry is not None
        assert ended.telemetry.iterations == 7


def test_a_service_that_does_not_run_says_so(tmp_path: Path):
    with Storage(tmp_path / "service.sqlite") as storage:
        service = Service(storage, run=at_once)
        with pytest.raises(
            UsageError, match=r"the service does not run; use it inside `with Service"
        ):
            service.register(job(), frontier_file())
        with service:
            service.register(job(), frontier_file())
        with pytest.raises(UsageError, match="the service does not run"):
            service.report("gpt", report("a")).result()
        assert service.status("gpt").version == 1


KEYS = st.sampled_from([f"k{number}" for number in range(6)])
SCOPES = st.one_of(
    st.builds(Scope, st.just("pipeline"), st.integers(0, PIPELINES - 1).map(str)),
    st.builds(
        Scope, st.just("stage"), st.integers(0, STAGES - 1).map(str), st.integers(0, PIPELINES - 1)
    ),
    st.builds(Scope, st.sampled_from(["rank", "node"]), st.sampled_from(["0", "1", "node1"])),
)


@dataclass(frozen=True)
class Said:
    """A report, in seconds from when it is sent."""

    key: str
    source: str
    scope: Scope
    slowdown: float
    observed_s: float
    begins_s: float
    lasts_s: float

    def __call__(self, service: Service, clock: Clock) -> object:
        times = {
            "observed_s": clock.now_s - self.observed_s,
            "begins_s": clock.now_s + self.begins_s,
        }
        end = {"expires_s": clock.now_s + self.begins_s + self.lasts_s, "scope": self.scope}
        return service.report(
            "gpt", report(self.key, 0, self.slowdown, self.source, **times, **end)
        ).result()


@dataclass(frozen=True)
class Asked:
    """A call of the service."""

    method: str
    arguments: tuple[Any, ...]

    def __call__(self, service: Service, clock: Clock) -> object:
        answer = getattr(service, self.method)(*self.arguments)
        return answer.result() if isinstance(answer, Future) else answer


@dataclass(frozen=True)
class Passed:
    """Time goes by."""

    seconds: float

    def __call__(self, service: Service, clock: Clock) -> object:
        clock.now_s += self.seconds
        return service.tick() > clock.now_s


def asked(method: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Asked]:
    return st.builds(Asked, st.just(method), st.tuples(*arguments))


DEADLINES = st.none() | st.sampled_from([0.5, 1.02, 1.1]).map(lambda share: share * BASELINE_S)
POWERS = st.none() | st.sampled_from([10.0, 1500.0, 1700.0])
SAID = st.builds(
    Said,
    KEYS,
    st.sampled_from(["ops", "agent"]),
    SCOPES,
    st.sampled_from([1.0, 1.1, 1.3]),
    st.sampled_from([0.0, 30.0]),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from([60.0, 600.0, math.inf]),
)
GPT = st.just("gpt")
COMMANDS = st.one_of(
    SAID,
    SAID,
    st.builds(Passed, st.sampled_from([1.0, 40.0, 200.0, 5000.0])),
    asked("clear", GPT, KEYS),
    asked("set_deadline", GPT, DEADLINES),
    asked("set_power", st.sampled_from([None, "gpt"]), POWERS),
    asked("taken", GPT, st.integers(1, 3), st.integers(0, 50)),
    asked("end", st.just("bloom")),
    asked(
        "register", st.just(job("bloom", deadline_s=1.05 * BASELINE_S)), st.builds(frontier_file)
    ),
)


def outcome(command: Any, run: Run) -> object:
    """What a command comes to once all that it promised is there."""
    try:
        answer = command(run.service, run.clock)
    except (Conflict, UnknownJob, InfeasibleDeadline, InfeasiblePower, UsageError) as error:
        answer = error
    planned(run.service)
    return type(answer).__name__ if not isinstance(answer, Exception) else repr(answer)


def known(service: Service) -> object:
    """All that the service knows but the numbers of versions."""
    return [
        (replace(status, version=0, promised=0, taken=None), plans(service, status.job.name))
        for status in service.jobs()
    ], service.power_budget.power_w


def copied(place: Path, to: Path) -> Path:
    """What a service that is killed now leaves on the disk."""
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{place}{suffix}", f"{to}{suffix}")
    return to


@drawn(
    5, 40, before=st.lists(COMMANDS, max_size=8), after=st.lists(COMMANDS, max_size=4), anew=True
)
def test_a_service_that_was_killed_goes_on_as_one_that_was_not(before: list[Any], after: list[Any]):
    with TemporaryDirectory() as folder, ExitStack() as stack:
        first = stack.enter_context(running(Path(folder) / "first.sqlite"))
        told = stack.enter_context(versions_told(first.service))
        first.service.register(job(), frontier_file())
        for command in before:
            outcome(command, first)
        # The same clock, but one that each moves for itself.
        clock = Clock()
        clock.now_s = first.clock.now_s
        second = stack.enter_context(
            running(copied(first.place, Path(folder) / "second.sqlite"), clock=clock)
        )
        planned(second.service)
        assert known(second.service) == known(first.service)
        versions = {status.job.name: status.version for status in first.service.jobs()}
        for command in after:
            assert outcome(command, second) == outcome(command, first)
            assert known(second.service) == known(first.service)
        for status in second.service.jobs():
            assert status.version >= versions.get(status.job.name, 1) or status.job.name == "bloom"
        assert told["gpt"] == list(range(1, len(told["gpt"]) + 1))


@drawn(2, 15, before=st.lists(COMMANDS, max_size=8), anew=True)
def test_a_service_that_is_killed_before_it_has_planned_publishes_what_was_promised(
    before: list[Any],
):
    never = Slow()
    with TemporaryDirectory() as folder:
        place = Path(folder) / "service.sqlite"
        with running(place, never) as run:
            run.service.register(job(), frontier_file())
            never.let.clear()
            promised = 1
            for command in before:
                if isinstance(command, Said):
                    promised = max(promised, getattr(quiet(command, run), "version", 1))
                    status = run.service.status("gpt")
                    assert status.promised == max(promised, status.version)
            wanted = run.service.status("gpt")
            copy = copied(place, Path(folder) / "copy.sqlite")
            never.let.set()
        with running(copy) as again:
            planned(again.service)
            status = again.service.status("gpt")
            assert status.version == promised
            assert status.reports == wanted.reports


def quiet(command: Any, run: Run) -> object:
    try:
        return command(run.service, run.clock)
    except (Conflict, UsageError):
        return None


def one_life(place: Path, seed: int, lives_s: float) -> tuple[set[str], int]:
    """The keys that a process was told are kept, and the highest version it saw, before it was
    killed.
    """
    command = [sys.executable, str(PROGRAM), str(place), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        killer = threading.Timer(lives_s, os.kill, (process.pid, signal.SIGKILL))
        killer.start()
        lines = process.stdout.readlines()
        killer.join()
    assert process.returncode == -signal.SIGKILL
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # cut short by the kill, so nobody was told
    keys = {line.split()[1] for line in lines if line.startswith("kept")}
    return keys, max(
        (int(line.split()[1]) for line in lines if line.startswith("version")), default=1
    )


def survive(place: Path, kills: int) -> int:
    """Kill the service so many times; how many reports it had acknowledged."""
    rng, version, acknowledged = random.Random(6), 1, 0
    with running(place) as run:
        run.service.register(job(), frontier_file())
    for kill in range(kills):
        keys, seen = one_life(place, kill, rng.uniform(0.0, 0.6))
        acknowledged += len(keys)
        clock = Clock()
        with running(place, clock=clock) as run:
            there = run.service.status("gpt")
            assert there.version >= max(seen, version)
            version = there.version
            assert keys <= {each.key for each in run.service.reports("gpt")}
            planned(run.service)
            assert run.service.status("gpt").version in (there.promised, there.version)
            for key in list(run.service._writer.jobs["gpt"].reports):
                run.service.clear("gpt", key).result()
            clock.now_s += 1e5  # all is forgotten
            run.service.report(
                "gpt",
                report(
                    f"end of {kill}", slowdown=1.0, begins_s=clock.now_s, observed_s=clock.now_s
                ),
            ).result()
            version = run.service.status("gpt").version
    return acknowledged


def test_no_acknowledged_report_is_lost_when_the_service_is_killed(tmp_path: Path):
    assert survive(tmp_path / "service.sqlite", kills=3) > 0


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_no_acknowledged_report_is_lost_in_200_kills(tmp_path: Path):
    assert survive(tmp_path / "service.sqlite", kills=200) > 1000


def children() -> list[psutil.Process]:
    """The processes that this one has started to plan."""
    found = list[psutil.Process]()
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "spawn_main" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_processes_plan_are_replaced_when_killed_and_end_with_the_service(tmp_path: Path):
    clock = Clock()
    with Storage(tmp_path / "service.sqlite") as storage:
        with Service(storage, now_s=clock) as service:
            service.register(job(), frontier_file())
            assert plans(service)[0] == small_frontier().plan_for(BASELINE_S)
            (first,) = children()
            first.kill()
            service.report("gpt", report("a", slowdown=1.2)).result()
            planned(service)
            assert plans(service)[0] == small_frontier().plan_beside_straggler(1.2 * BASELINE_S)
            (second,) = children()
            assert second.pid != first.pid
            assert second.nice() >= psutil.Process().nice()
        assert psutil.wait_procs([second], timeout=LONG_S)[1] == []


def test_errors_come_back_from_another_process_as_they_are():
    with (
        Processes(1) as processes,
        pytest.raises(FrontierError, match=r"^frontier\.npz: is not a frontier file"),
    ):
        processes.run(curve_of, "digest", (), None, b"no frontier")
    with pytest.raises(NotPlanned, match="the service is ending"):
        processes.run(curve_of, "digest", (), None, b"")


def test_a_call_goes_to_the_new_pool_if_another_thread_ends_the_old_one_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
):
    submit = ProcessPoolExecutor.submit
    pools: list[ProcessPoolExecutor] = []

    def ended_before(pool: ProcessPoolExecutor, *call: Any) -> Any:
        pools.append(pool)
        if len(pools) == 1:
            processes.restart()  # as another thread does after a call that took too long
        return submit(pool, *call)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", ended_before)
    with Processes(1) as processes:
        assert processes.run(abs, -3) == 3
    first, second = pools
    assert first is not second


@settings(max_examples=50)
@given(share=st.floats(0.0, 1.5))
def test_a_curve_is_that_of_its_frontier(share: float):
    frontier: Frontier = small_frontier()
    curve = Curve.of(frontier)
    assert (curve.min_time_s, curve.max_time_s) == (frontier.min_time_s, frontier.max_time_s)
    assert (curve.stages, curve.gpus, curve.waiting_w) == (STAGES, STAGES, frontier.dag.waiting_w)
    assert list(curve.times_s) == frontier.times_s[::-1].tolist()
    assert list(curve.energies_j) == frontier.energies_j[::-1].tolist()
    deadline_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
    assert curve.bound_j(deadline_s) == pytest.approx(frontier.bound_j(deadline_s), rel=1e-9)
    with pytest.raises(InfeasibleDeadline):
        curve.bound_j(math.nextafter(frontier.min_time_s, 0.0))
