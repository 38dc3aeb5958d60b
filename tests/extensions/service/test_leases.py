"""Leases both ways: plans for a straggler end without the service, and jobs that are not heard of
give their share of the power back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from services import NOW_S, PIPELINES, Clock, at_once, frontier_file, job, planned, report
from services import small_frontier as frontier

from perseus_planner import Plan
from perseus_planner.extensions.service.jobs import LEASE_S
from perseus_planner.extensions.service.metrics import Metrics
from perseus_planner.extensions.service.models import Conflict, Counters
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage
from perseus_planner.extensions.service.text import jobs_text

JOB_LEASE_S = 180.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, clock: Clock):
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once, lease_s=JOB_LEASE_S) as opened,
    ):
        opened.register(job(), frontier_file())
        yield opened


def own_plan(service: Service) -> Plan | None:
    plans = service.plans("gpt", 0)
    assert plans is not None
    return None if plans.own is None else Plan.loads(plans.texts[plans.own])


def test_plans_for_a_straggler_hold_until_its_report_expires_and_at_most_a_minute(
    service: Service, clock: Clock
):
    calm = frontier().plan_for(frontier().baseline_time_s)
    assert (service.lease_s("gpt"), own_plan(service)) == (None, None)
    service.report("gpt", report("a", expires_s=NOW_S + 100.0)).result()
    planned(service)
    assert (service.lease_s("gpt"), own_plan(service)) == (LEASE_S, calm)
    clock.now_s += 70.0
    assert service.lease_s("gpt") == pytest.approx(30.0)
    service.report("gpt", report("b", observed_s=NOW_S + 70.0, expires_s=NOW_S + 170.0)).result()
    assert service.lease_s("gpt") == LEASE_S  # it was renewed, and no plan has changed
    service.report("gpt", report("c", slowdown=1.0, observed_s=NOW_S + 71.0)).result()
    assert (service.lease_s("gpt"), own_plan(service)) == (None, None)


def test_the_own_plan_keeps_the_deadline_and_the_power_budget_that_hold_now(service: Service):
    service.report("gpt", report("a", slowdown=1.5)).result()
    planned(service)
    slower_s = 1.1 * frontier().baseline_time_s
    service.set_deadline("gpt", slower_s).result()
    planned(service)
    assert own_plan(service) == frontier().plan_for(slower_s)
    budget_w = 0.9 * PIPELINES * frontier().plan_for(slower_s).power_w
    service.set_power("gpt", budget_w).result()
    planned(service)
    own = own_plan(service)
    assert own is not None
    assert PIPELINES * own.power_w <= budget_w


def test_a_target_says_why_it_is_that(service: Service):
    def reasons() -> list[str | None]:
        planned(service)
        return [each.reason for each in service.pipelines("gpt")[1]]

    assert reasons() == [None] * 3
    service.report("gpt", report("a", slowdown=1.5)).result()
    assert reasons() == ["straggler", None, "straggler"]
    service.clear("gpt", "a").result()
    power_w = service.status("gpt").expected.power_w
    service.set_power("gpt", 0.8 * power_w).result()
    assert reasons() == ["job budget"] * 3
    service.set_power(None, 0.7 * power_w).result()
    assert reasons() == ["cluster budget"] * 3
    service.set_power(None, None).result()
    service.set_power("gpt", None).result()
    service.set_deadline("gpt", 1.1 * frontier().baseline_time_s).result()
    assert reasons() == ["deadline"] * 3


def test_a_job_that_is_not_heard_of_gives_its_power_back_until_it_is(
    service: Service, clock: Clock
):
    """A dead job kept its share, and the other ran slower for ever."""
    service.register(job("dead"), frontier_file())
    full_w = service.status("gpt").expected.power_w
    service.set_power(None, 1.5 * full_w).result()
    planned(service)
    shared_s = service.status("gpt").decision.each[0].time_s
    assert shared_s > frontier().baseline_time_s
    service.telemetry("dead", Counters(run="a", iterations=5, time_s=5.0)).result()
    for _ in range(4):  # the other one asks for plans every 50 s
        clock.now_s += 50.0
        service.plans("gpt", 9)
        service.tick()
    planned(service)
    dead, alive = service.jobs()
    assert (dead.silent_since_s, alive.silent_since_s) == (clock.now_s, None)
    assert alive.decision.each[0].time_s == frontier().baseline_time_s
    assert dead.telemetry is not None
    assert dead.telemetry.iterations == 5
    assert service.history("dead").events[-1].text.startswith("not heard of for its lease")
    service.telemetry("dead", Counters(run="a", iterations=6, time_s=6.0)).result()
    service.set_deadline("gpt", None).result()  # waits until what came before is written
    planned(service)
    dead, alive = service.jobs()
    assert dead.silent_since_s is None
    assert alive.decision.each[0].time_s == shared_s


def test_a_job_that_draws_more_than_its_budget_for_a_minute_is_said_to(
    service: Service, clock: Clock
):
    power_w = service.status("gpt").expected.power_w
    service.set_power("gpt", 0.9 * power_w).result()
    planned(service)
    drawn = [(30, 0.915), (60, 0.93), (90, 0.93), (119, 0.93), (120, 0.93), (150, 0.9)]
    time_s = energy_j = before_s = 0.0
    since = []
    for at_s, ratio in drawn:
        clock.now_s = NOW_S + at_s
        time_s, energy_j = float(at_s), energy_j + (at_s - before_s) * ratio * power_w
        before_s = at_s
        metered = {"gpu_s": time_s, "metered_s": time_s, "energy_j": energy_j}
        metered |= {"time_s": time_s, "windows": at_s, "energy_is": "simulated"}
        service.telemetry("gpt", Counters(run="a", iterations=at_s, **metered)).result()
        service.set_deadline("gpt", None).result()  # waits until what came before is written
        since.append(service.status("gpt").over_budget_since_s)
    assert since == [None] * 4 + [NOW_S + 60, None]
    texts = [each.text for each in service.history("gpt").events]
    assert any(each.startswith("over its power budget of") for each in texts)
    assert texts[-1] == "within its power budget again"


def test_a_job_that_is_silent_for_long_is_ended_and_its_totals_and_events_stay(tmp_path: Path):
    clock = Clock()

    def run(forget_s: float) -> Service:
        given = {"lease_s": JOB_LEASE_S, "forget_s": forget_s}
        return Service(storage, now_s=clock, run=at_once, **given)

    with Storage(tmp_path / "service.sqlite") as storage, run(1000.0) as service:
        service.register(job("dead"), frontier_file())
        service.register(job("heard"), frontier_file())
        for _ in range(11):
            clock.now_s += 100.0
            service.plans("heard", 0)
            service.tick()
        assert [status.job.name for status in service.jobs()] == ["dead", "heard"]
    clock.now_s += 1000.0  # the service was away, and so could hear of nobody
    with Storage(tmp_path / "service.sqlite") as storage, run(1000.0) as service:
        service.tick()
        assert len(service.jobs()) == 2
        text = jobs_text(service.jobs())  # apart from those that are heard of
        assert text.index("heard ") < text.index("\n\nNot heard of:\n") < text.index("dead ")
        metrics = Metrics(service, lambda: 0, lambda: None).text().decode()
        assert "\nplanner_jobs 1.0\n" in metrics
        assert "\nplanner_silent_jobs 1.0\n" in metrics
        service.plans("heard", 0)
        clock.now_s += JOB_LEASE_S
        service.plans("heard", 0)
        service.tick()
        assert [status.job.name for status in service.jobs()] == ["heard"]
        (ended,) = [totals for totals in service.totals() if totals.ended_s is not None]
        assert ended.name == "dead"
        assert ended.events[-1].text.startswith("not heard of for its lease")


def test_a_job_that_is_silent_loses_its_name_to_another_one(tmp_path: Path):
    clock = Clock()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once, lease_s=JOB_LEASE_S) as service,
    ):
        service.register(job(), frontier_file())
        service.report("gpt", report("a")).result()
        with pytest.raises(Conflict):
            service.register(job(), frontier_file(180))
        clock.now_s += JOB_LEASE_S
        service.tick()
        assert service.status("gpt").silent_since_s is not None
        assert not service.register(job(), frontier_file()).is_new  # it is the same one
        assert len(service.reports("gpt")) == 1
        clock.now_s += JOB_LEASE_S
        service.tick()
        assert service.register(job(), frontier_file(180)).is_new
        assert service.reports("gpt") == ()
        assert [totals.name for totals in service.totals() if totals.ended_s] == ["gpt"]
