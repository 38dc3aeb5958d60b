"""A job that goes on with another frontier: its reports and totals stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from services import (
    PIPELINES,
    Clock,
    baseline_s,
    frontier_file,
    job,
    planned,
    report,
    service_at,
    serving,
)

from perseus_planner.base.errors import ServiceRefusal
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import Conflict, Counters, Registration
from perseus_planner.extensions.service.serve import Address

pytest.importorskip("httpx")


def test_a_job_goes_on_with_another_frontier_and_keeps_its_reports_and_totals(tmp_path: Path):
    place = tmp_path / "service.sqlite"
    with service_at(place, Clock()) as service:
        first = service.register(job(), frontier_file(180))
        service.report("gpt", report("r1")).result()
        planned(service)
        service.set_deadline("gpt", 1.1 * baseline_s()).result()
        planned(service)
        service.telemetry("gpt", Counters(run="run", iterations=7, time_s=7.0)).result()
        before, told = service.status("gpt"), service.history("gpt").events
        with pytest.raises(Conflict):
            service.register(job(), frontier_file(90))
        again = service.register(job(), frontier_file(90), take_over=True)
        planned(service)
        after = service.status("gpt")
        assert (first.is_new, again.is_new) == (True, False)
        assert service.history("gpt").events[: len(told)] == told
        assert after.version > before.version
        assert after.job.frontier != before.job.frontier
        assert (after.job.since_s, after.job.deadline_s) == (before.job.since_s, 1.1 * baseline_s())
        assert [each.key for each in after.reports] == ["r1"]
        assert after.decision.stragglers == {1: "r1"}
        assert after.telemetry is not None
        assert after.telemetry.iterations == 7
        assert (
            service.register(job(), frontier_file(90), take_over=True).version == after.version
        )  # nothing changes
        texts = service.plans("gpt", 0)
    with service_at(place, Clock()) as service:
        assert service.status("gpt").decision == after.decision
        assert service.plans("gpt", 0) == texts
        with pytest.raises(Exception, match="has no frontier"):
            service._storage.frontier(before.job.frontier)


def test_who_has_seen_later_versions_hears_of_a_job_that_was_registered_anew(tmp_path: Path):
    """Its versions begin at 1 again, and a watcher heard nothing until there were as many."""
    with (
        service_at(tmp_path / "service.sqlite") as service,
        serving(service, Address(port=0)) as url,
        Client(url) as client,
    ):
        for _ in range(2):
            client.register(Registration("gpt", PIPELINES, frontier_file()))
            plans = client.plans("gpt", after=5)
            client.end("gpt")
        assert plans is not None
        assert plans.version == 1


def test_a_registration_over_http_takes_over(tmp_path: Path):
    with (
        service_at(tmp_path / "service.sqlite") as service,
        serving(service, Address(port=0)) as url,
        Client(url) as client,
    ):
        client.register(Registration("gpt", PIPELINES, frontier_file(180)))
        with pytest.raises(ServiceRefusal, match="another job 'gpt' runs"):
            client.register(Registration("gpt", PIPELINES, frontier_file(90)))
        registered = client.register(Registration("gpt", 1, frontier_file(90), take_over=True))
        assert (registered.job.pipelines, registered.version, registered.is_new) == (1, 2, False)
