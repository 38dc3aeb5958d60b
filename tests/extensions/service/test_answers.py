"""What the answer to a report says at once, what it waits for, and what it says of a report that
begins later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_stand_in import stand_in
from services import NOW_S, Clock, frontier_file, job, planned, report, service_at, serving

from perseus_planner.base.errors import ServiceRefusal
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import ReportRequest, Scope
from perseus_planner.extensions.service.serve import Address
from perseus_planner.extensions.service.service import JOB_LEASE_S, Service
from perseus_planner.extensions.service.store import Storage
from perseus_planner.extensions.service.text import answer_text

pytest.importorskip("httpx")

SLOW_STAGE = ReportRequest("ops", Scope("stage", "1", 1), slowdown=1.31, cause="compute", key="k")


class Held:
    """Solves and plans nothing until it is let go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def __call__(self, function: Any, *arguments: Any) -> Any:
        assert self.goes_on.wait(300.0)
        return function(*arguments)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        yield service


def test_what_slow_stages_save_is_said_when_they_are_solved_and_not_before(tmp_path: Path):
    held = Held()
    held.goes_on.set()
    with service_at(tmp_path / "service.sqlite", run=held) as service:
        service.register(job(), frontier_file())
        held.goes_on.clear()
        with serving(service, Address(port=0)) as url, Client(url) as client:
            early = client.report("gpt", SLOW_STAGE)
            assert (early.version, early.takes_effect, early.expected_saving_w) == (
                2,
                "planning",
                None,
            )
            assert "is being planned; the saving is not known yet" in answer_text(early)
            threading.Timer(0.1, held.goes_on.set).start()
            waited = client.report("gpt", SLOW_STAGE, wait_s=60.0)
            status = client.status("gpt")
    assert (waited.version, waited.takes_effect) == (2, "next iteration")
    assert waited.expected_saving_w == status.expected_saving_w > 0.0
    assert waited.reason == status.decision.reason


def test_an_answer_that_waits_in_vain_says_what_is_known(tmp_path: Path):
    held = Held()
    held.goes_on.set()
    with service_at(tmp_path / "service.sqlite", run=held) as service:
        service.register(job(), frontier_file())
        held.goes_on.clear()
        with serving(service, Address(port=0)) as url, Client(url) as client:
            assert client.report("gpt", SLOW_STAGE, wait_s=0.05).expected_saving_w is None
        held.goes_on.set()
        planned(service)


def test_who_waits_for_the_answer_to_a_report_is_not_the_job(tmp_path: Path):
    clock = Clock()
    held = Held()
    held.goes_on.set()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=held, lease_s=JOB_LEASE_S) as service,
    ):
        service.register(job(), frontier_file())
        clock.now_s += JOB_LEASE_S
        service.tick()
        assert service.status("gpt").state.name == "not heard of"
        held.goes_on.clear()
        with serving(service, Address(port=0)) as url, Client(url) as client:
            assert client.report("gpt", SLOW_STAGE, wait_s=0.05).takes_effect == "planning"
            service.clear("gpt", "k").result()  # waits until what came before is written
            assert service.status("gpt").state.name == "not heard of"
            client.plans("gpt")
            service.set_deadline("gpt", None).result()  # likewise
            assert service.status("gpt").state.name != "not heard of"
        held.goes_on.set()
        planned(service)


def test_a_report_that_begins_later_says_when_and_what_holds_until_then(service: Service):
    calm = service.status("gpt").decision.reason
    in_ten = service.report("gpt", report("a", begins_s=NOW_S + 10.0)).result()
    assert (in_ten.changed, in_ten.reason) == (False, f"it begins in 10 s; until then {calm}")
    unknown = service.report("gpt", report("b", begins_iteration=50, source="other")).result()
    assert unknown.reason.startswith(
        "it begins with iteration 50, and the job has not reported its iteration yet; until "
    )
    service.taken("gpt", 1, 10).result()
    iteration_s = service.status("gpt").decision.straggler_time_s
    known = service.report("gpt", report("c", begins_iteration=50, source="third")).result()
    assert known.reason.startswith(
        f"it begins with iteration 50, in about {39 * iteration_s:.3g} s; until then "
    )
    begun = service.report("gpt", report("d", begins_iteration=5, source="fourth")).result()
    assert begun.changed
    assert begun.reason.startswith("iterations take ")


@pytest.mark.parametrize(
    ("name", "least"), [("least_power_w", 858.9), ("least_deadline_s", 0.65), ("other", None)]
)
def test_the_least_that_is_feasible_is_a_number_for_programs(name: str, least: float | None):
    refused = {"code": "infeasible", "detail": "too little", name: least}
    with (
        stand_in(lambda *_: (409, refused)) as stand,
        Client(stand.address) as client,
        pytest.raises(ServiceRefusal) as error,
    ):
        client.set_power(10.0)
    assert (error.value.code, error.value.least) == ("infeasible", least)
