"""Rank 0 of a job and the service: what is registered, taken and told, and that nothing of it
ends the training.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from http_stand_in import StandIn, stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import free_port
from noisy_rows import noisy_rows
from service_answers import EFFECT, STATUS, refused
from serving import Serving
from strategies import fixed
from waiting import LONG_S, eventually

from perseus_planner import Frontier, Plan, Profile, schedules, solve
from perseus_planner.base.errors import FrontierError, PlanError, UsageError
from perseus_planner.base.loops import Backoff
from perseus_planner.base.units import ON_TIME
from perseus_planner.extensions.service.agent import agent as agent_module
from perseus_planner.extensions.service.agent.agent import (
    LONGEST_PAUSE_S,
    Agent,
    LearningAgent,
    new_pauses,
)
from perseus_planner.extensions.service.agent.outbox import (
    TTL_S,
    Detection,
    Detections,
    RankLocation,
    ServiceSettings,
    StoreMessages,
)
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runs import Account
from perseus_planner.runs.verdict import StragglerDetection
from perseus_planner.runtime.decider import Learnt, ServiceExchange
from perseus_planner.runtime.job import JobWarnings, TrainingJob
from perseus_planner.runtime.switching import Acceptance, Proposal, Rejection
from perseus_planner.runtime.telemetry import Checkpoint


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Frontier]:
    points = (Measurement(1400, 1.0, 300.0), Measurement(1000, 1.25, 250.0))
    profile = Profile(
        {(stage, kind): points for stage in range(2) for kind in "FB"}, blocking_power_w=70.0
    )
    found = solve(profile, schedules.one_f_one_b(2, 3))
    path = tmp_path_factory.mktemp("frontier") / "frontier.npz"
    found.save(path)
    return path, found


class Service:
    """Behind the stand-in: one job and its versions, which a test adds; long polls are answered at
    once.

    Attributes:
        versions: plan texts of version 1 and those that follow.
        busy: the answer to reports, which are not taken.
        reports: those that were taken.
        own, lease: with plans that wait for a straggler, the job's own plan and how long they hold.
    """

    def __init__(self, first: Plan) -> None:
        self.versions = [first]
        self.is_known = False
        self.refuses: tuple[int, Any] | None = None
        self.busy: tuple[int, Any] | None = None
        self.reports: list[Any] = []
        self.own: Plan | None = None
        self.lease: dict[str, str] = {}

    def __call__(self, method: str, path: str, body: Any) -> tuple[Any, ...]:
        url = urlsplit(path)
        if (method, url.path) == ("POST", "/v1/jobs"):
            if self.refuses is not None:
                return self.refuses
            was_known, self.is_known = self.is_known, True
            return 200 if was_known else 201, {"job": STATUS["job"], "version": len(self.versions)}
        if not self.is_known:
            return refused(404, "no such job")
        if url.path.endswith("/plans"):
            if int(parse_qs(url.query)["after"][0]) >= len(self.versions):
                time.sleep(0.02)  # as a long poll would, much longer
                return 204, None, self.lease
            texts = [each.dumps() for each in (self.versions[-1], self.own) if each is not None]
            plans = {"version": len(self.versions), "plans": texts, "of_pipeline": [0, 0]}
            return 200, {**plans, "own": len(texts) - 1 if len(texts) > 1 else None}, self.lease
        if not url.path.endswith("/reports"):
            return 204, None
        if self.busy is not None:
            return self.busy
        self.reports.append(body)
        return 202, EFFECT


class Training:
    """Stands for the runtime.

    Attributes:
        given: what it was to switch to, with what became of it.
        error: what it raises instead.
    """

    def __init__(self) -> None:
        self.given: list[tuple[dict[int, Plan], Proposal]] = []
        self.error: PlanError | None = None

    def switch_to(self, plan: Any, *, number: int | None = None) -> Proposal:
        if self.error is not None:
            raise self.error
        proposal = Proposal()
        self.given.append((plan, proposal))
        return proposal


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    for name, value in (
        ("_FIRST_PAUSE_S", 0.01),
        ("_ROUND_S", 0.01),
        ("_COUNTS_S", 0.02),
        ("LONGEST_PAUSE_S", 0.05),
        ("_AGAIN_S", 0.0),
    ):
        monkeypatch.setattr(agent_module, name, value)


@pytest.fixture
def job() -> TrainingJob:
    """Of two ranks, which have said where they are."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    for rank in range(2):
        StoreMessages(store).write_location(
            RankLocation(rank, rank, 1 - rank, f"node{rank}", f"GPU-{rank}")
        )
    return TrainingJob(store, 0, 2)


@contextmanager
def running(
    address: str, job: TrainingJob, training: Training, path: Path, plan: Plan | None
) -> Iterator[None]:
    served = ServiceSettings(address, "gpt3", path, 8)
    served.check()
    agent = Agent(served, job, 2, plan, training.switch_to, JobWarnings(job))
    agent.start()
    try:
        yield
    finally:
        agent.close()


@contextmanager
def followed(
    job: TrainingJob, frontier: tuple[Path, Frontier], refuses: tuple[int, Any] | None = None
) -> Iterator[tuple[Service, Training, StandIn]]:
    """Run the agent of a job that began without a plan, beside a service that may refuse it."""
    path, found = frontier
    service, training = Service(found.plan_for(found.baseline_time_s)), Training()
    service.refuses = refuses
    with stand_in(service) as http, running(http.address, job, training, path, None):
        yield service, training, http


def detect(job: TrainingJob, rank: int, slowdown: float) -> None:
    StoreMessages(job.store).write_detection(Detection(rank, StragglerDetection(slowdown, "why")))


def bodies(service: StandIn, method: str, ending: str) -> list[Any]:
    return [
        each.body
        for each in list(service.asked)
        if each.method == method and each.path.endswith(ending)
    ]


def test_the_job_is_registered_followed_and_ended(
    job: TrainingJob, frontier: tuple[Path, Frontier]
):
    path, found = frontier
    first, second = found.plan_for(found.baseline_time_s), found.plan_for(found.max_time_s)
    service, training = Service(first), Training()
    with stand_in(service) as http, running(http.address, job, training, path, first):
        eventually(lambda: training.given)
        ((plans, proposal),) = training.given
        assert plans == {0: first, 1: first}
        assert bodies(http, "POST", "/taken") == []
        proposal.settle(Acceptance(2, 17))
        eventually(lambda: bodies(http, "POST", "/taken") == [{"version": 1, "iteration": 17}])
        service.versions.append(second)
        eventually(lambda: len(training.given) == 2)
        training.given[1][1].settle(Acceptance(3, 40))
        eventually(lambda: bodies(http, "POST", "/taken")[1:] == [{"version": 2, "iteration": 40}])
        (sent,) = bodies(http, "POST", "/v1/jobs")
    assert base64.b64decode(sent.pop("frontier")) == path.read_bytes()
    assert sent == {
        "name": "gpt3",
        "pipelines": 2,
        "places": [
            {"rank": 0, "pipeline": 0, "stages": [1], "node": "node0", "gpu": "GPU-0"},
            {"rank": 1, "pipeline": 1, "stages": [0], "node": "node1", "gpu": "GPU-1"},
        ],
        "max_changes": 8,
        "on_time": None,
    }
    assert [each.path for each in http.asked if each.method == "DELETE"] == ["/v1/jobs/gpt3"]


def test_without_the_service_a_plan_for_a_straggler_ends_and_is_taken_again_when_it_is_back(
    job: TrainingJob,
    frontier: tuple[Path, Frontier],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """The straggler may have recovered meanwhile, and then the job would be slow for ever."""
    now_s = [0.0]  # of leases, which no pause of this process ends
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def passes(holds: Callable[[], bool]) -> bool:
        now_s[0] += 0.1
        return holds()

    def lapses() -> int:
        return sum("silent while plans waited" in each.getMessage() for each in caplog.records)

    path, found = frontier
    own, slow = found.plan_for(found.baseline_time_s), found.plan_for(found.max_time_s)
    service, training = Service(slow), Training()
    service.own, service.lease = own, {"Planner-Lease": "0.3"}

    def given() -> list[Plan]:
        return [plans[1] for plans, _ in training.given]

    with stand_in(service) as http, running(http.address, job, training, path, own):
        for _ in range(5):
            asked = len(bodies(http, "GET", "after=1&wait_s=1.0"))
            # Who asks for the second time has taken the answer to the first.
            eventually(
                lambda asked=asked: len(bodies(http, "GET", "after=1&wait_s=1.0")) > asked + 1
            )
            now_s[0] += 0.2
        assert given() == [slow]  # every answer renews it
        service.is_known, service.refuses = False, refused(503, "away")
        eventually(lambda: passes(lambda: given() == [slow, own]))
        assert training.given[-1][0] == {0: own, 1: own}
        training.given[-1][1].settle(Acceptance(9, 40))
        service.is_known, service.refuses = True, None
        eventually(lambda: given() == [slow, own, slow])
        assert bodies(http, "POST", "/taken") == []  # that of version 1 is not taken yet
        assert lapses() == 1
        training.given[-1][1].settle(Acceptance(10, 50))
        service.is_known, service.refuses = False, refused(503, "away")
        eventually(lambda: passes(lambda: given()[3:] == [own]))
        eventually(lambda: lapses() == 2)  # once for each lapse


def test_without_the_service_plans_for_a_budget_or_a_deadline_stay(
    job: TrainingJob, frontier: tuple[Path, Frontier]
):
    with followed(job, frontier) as (service, training, http):
        eventually(lambda: bodies(http, "GET", "after=1&wait_s=30.0"))
        service.is_known, service.refuses = False, refused(503, "away")
        tries = len(http.asked)
        eventually(lambda: len(http.asked) > tries + 20)
        assert len(training.given) == 1


def test_findings_of_all_ranks_are_told_once_and_again_to_a_service_that_has_forgotten(
    job: TrainingJob, frontier: tuple[Path, Frontier]
):

    def told(http: StandIn) -> list[tuple[str, float]]:
        return [
            (each["scope"]["value"], each["slowdown"]) for each in bodies(http, "POST", "/reports")
        ]

    with followed(job, frontier) as (service, training, http):
        detect(job, 1, 1.3)
        eventually(lambda: told(http) == [("1", 1.3)])
        detect(job, 0, 1.1)
        detect(job, 0, 1.0)
        eventually(lambda: told(http)[-1:] == [("0", 1.0)])
        before = len(told(http))
        service.is_known = False
        eventually(lambda: len(told(http)) > before)
        assert told(http)[before:] == [("1", 1.3)]
        keys = [
            each["key"]
            for each in bodies(http, "POST", "/reports")
            if each["scope"]["value"] == "1"
        ]
        assert len(set(keys)) == 1
        assert {each["ttl_s"] for each in bodies(http, "POST", "/reports")} == {TTL_S}
        assert len(training.given) >= 1


@pytest.mark.parametrize(
    "busy", [(429, "<html>slow down</html>"), refused(429, "too many"), refused(503, "full")]
)
def test_a_recovery_that_finds_the_service_busy_is_sent_again(
    job: TrainingJob, frontier: tuple[Path, Frontier], busy: tuple[int, Any]
):
    with followed(job, frontier) as (service, _, http):
        detect(job, 1, 1.3)
        eventually(lambda: bodies(http, "POST", "/reports"))
        service.busy = busy
        detect(job, 1, 1.0)
        eventually(lambda: len(bodies(http, "POST", "/reports")) > 3)
        service.busy = None
        eventually(lambda: [each["slowdown"] for each in service.reports] == [1.3, 1.0])


def test_what_ranks_have_counted_is_told_together_and_at_last(
    job: TrainingJob, frontier: tuple[Path, Frontier]
):
    messages = StoreMessages(job.store)

    def at(iterations: int, is_first: bool = True) -> Checkpoint:
        account = Account(
            iterations=iterations * is_first,
            windows=iterations,
            metered_s=2.0 * iterations,
            energy_j=100.0,
            energy_is="simulated",
            last_iteration=iterations - 1,
        )
        return Checkpoint(account=account)

    def told(http: StandIn) -> list[tuple[int, float]]:
        return [
            (each["iterations"], each["energy_j"]) for each in bodies(http, "POST", "/telemetry")
        ]

    with followed(job, frontier) as (service, _, http):
        messages.write_checkpoints(0, [at(8), at(16)])
        messages.write_checkpoints(1, [at(8, False)])
        eventually(lambda: told(http)[-1:] == [(8, 200.0)])
        messages.write_checkpoints(1, [at(8, False), at(16, False)])
        eventually(lambda: told(http)[-1:] == [(16, 200.0)])
        service.is_known = False  # it is told all of the run once more when it knows the job again
        before = len(told(http))
        eventually(lambda: service.is_known and told(http)[before + 1 :])
        assert told(http)[-1] == (16, 200.0)
        for rank in range(2):
            messages.write_checkpoints(rank, [at(16, rank == 0), at(17, rank == 0)])
    sent = bodies(http, "POST", "/telemetry")
    assert told(http)[-1] == (17, 200.0)
    assert http.asked[-1].method == "DELETE"
    assert len({each["run"] for each in sent}) == 1
    assert {each["energy_is"] for each in sent} == {"simulated"}


def test_a_service_that_is_killed_and_started_again_is_said_to_be_back_within_5_s(
    job: TrainingJob,
    frontier: tuple[Path, Frontier],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    pytest.importorskip("fastapi")
    monkeypatch.undo()  # the pauses that users have
    pauses_s, next_s = list[float](), Backoff.next_s
    monkeypatch.setattr(
        Backoff, "next_s", lambda pauses: pauses_s.append(next_s(pauses)) or pauses_s[-1]
    )
    path, _ = frontier
    service, training = Serving(tmp_path), Training()
    service.start()
    try:
        with running(service.address, job, training, path, None):
            eventually(lambda: training.given)
            caplog.clear()  # on a slow machine the first answer may have been late
            for number in range(1, 3):
                service.end(signal.SIGKILL)
                eventually(lambda number=number: len(caplog.records) == 2 * number - 1)
                service.start()
                failed = len(pauses_s)
                eventually(lambda number=number: len(caplog.records) == 2 * number)
                # Each of two threads may have asked before it was back, and asks again after one
                # pause.
                assert len(pauses_s) - failed <= 2
        assert max(pauses_s) <= LONGEST_PAUSE_S < 5.0
    finally:
        service.end(signal.SIGTERM)
    away, back, again, at_last = [record.getMessage() for record in caplog.records]
    assert away.startswith("planner, rank 0: ")
    assert away.endswith("; training continues with its plan")
    assert again.endswith("; training continues with its plan")
    assert back == at_last == f"planner, rank 0: the service at {service.address} answers again"


def test_a_service_that_comes_late_and_goes_is_told_of_each_time(
    job: TrainingJob,
    frontier: tuple[Path, Frontier],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    path, found = frontier
    service, training = Service(found.plan_for(found.baseline_time_s)), Training()
    tries, next_s = [0], Backoff.next_s

    def counted(pauses: Backoff) -> float:
        tries[0] += 1
        return next_s(pauses)

    monkeypatch.setattr(Backoff, "next_s", counted)
    port = free_port()
    with running(f"http://127.0.0.1:{port}", job, training, path, None):
        eventually(lambda: caplog.records)
        with stand_in(service, port):
            eventually(lambda: len(training.given) == 1)
            eventually(lambda: len(caplog.records) == 2)
        before = tries[0]
        eventually(lambda: tries[0] > before + 3)
        service.versions.append(found.plan_for(found.max_time_s))
        with stand_in(service, port):
            eventually(lambda: len(training.given) == 2)
            eventually(lambda: len(caplog.records) == 4)
    for away, back in (
        caplog.records[:2],
        caplog.records[2:4],
    ):  # and another if the end of the second is noticed
        assert away.levelno == back.levelno == logging.WARNING
        assert away.getMessage().startswith("planner, rank 0: ")
        assert f"the service at http://127.0.0.1:{port}" in away.getMessage()
        assert away.getMessage().endswith("; training continues with its plan")
        assert (
            back.getMessage()
            == f"planner, rank 0: the service at http://127.0.0.1:{port} answers again"
        )


def test_plans_that_are_not_taken_are_told_of_once_and_proposed_again(
    job: TrainingJob, frontier: tuple[Path, Frontier], caplog: pytest.LogCaptureFixture
):
    with followed(job, frontier) as (service, training, http):
        for number in range(2):
            eventually(lambda number=number: len(training.given) > number)
            training.given[number][1].settle(Rejection("rank 1 has not answered"))
        eventually(lambda: len(training.given) > 2)
        training.given[2][1].settle(Acceptance(4, 90))
        eventually(lambda: bodies(http, "POST", "/taken") == [{"version": 1, "iteration": 90}])
        training.error = PlanError("it is for other ranks")
        service.versions.append(frontier[1].plan_for(frontier[1].max_time_s))
        eventually(lambda: any("after=2" in each.path for each in list(http.asked)))
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "the service's plans were not taken: rank 1 has not answered"
    )


def test_a_refused_registration_is_told_of_and_tried_again(
    job: TrainingJob, frontier: tuple[Path, Frontier], caplog: pytest.LogCaptureFixture
):
    with followed(job, frontier, refused(409, "another job of that name runs")) as (
        service,
        training,
        http,
    ):
        eventually(lambda: len(bodies(http, "POST", "/v1/jobs")) > 2)
        service.refuses = None
        eventually(lambda: training.given)
    (record,) = caplog.records
    assert (
        "refused: another job of that name runs; training continues with its plan"
        in record.getMessage()
    )


def test_leaving_does_not_wait_for_a_service_that_is_silent(
    job: TrainingJob, frontier: tuple[Path, Frontier], monkeypatch: pytest.MonkeyPatch
):
    path, _ = frontier
    monkeypatch.setattr(Agent._client, "__defaults__", (LONG_S,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with running(f"http://127.0.0.1:{silent.getsockname()[1]}", job, Training(), path, None):
            eventually(lambda: select([silent], [], [], 0.0)[0])  # it is asked
        asking = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("perseus-planner service")
        ]
    assert asking  # still
    assert all(thread.daemon for thread in asking)


def learnt(rows: int) -> Learnt:
    grid = schedules.grid_text(schedules.one_f_one_b(2, 3))
    return Learnt(f"table of {rows} rows", "yaml", grid, rows, time_s=1.0)


def test_while_a_job_is_registered_again_with_what_it_has_learnt_stragglers_are_heard_of(
    job: TrainingJob,
):
    go_on, away, slow_s = threading.Event(), threading.Event(), [1.0]

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        url = urlsplit(path)
        if (method, url.path) == ("POST", "/v1/jobs"):
            if "20" in body["profile_csv"]:
                if not away.is_set():
                    away.set()
                    return refused(503, "it is too busy")
                assert go_on.wait(300)
            return 201, {"job": STATUS["job"], "version": 1}
        if url.path.endswith("/plans"):
            time.sleep(0.02)  # as a long poll would, much longer
            return 204, None
        if url.path.endswith("/pipelines"):
            one = {
                "time_s": 1.0,
                "energy_j": 1.0,
                "target_s": slow_s[0],
                "slow_stages": {},
                "report": None,
            }
            return 200, {"version": 1, "pipelines": [{"pipeline": 0, **one}]}
        return 204, None

    exchange = ServiceExchange()
    exchange.learnt = learnt(10)
    with stand_in(answers) as service:
        agent = LearningAgent(
            ServiceSettings(service.address, "gpt3", None), job, 1, exchange, JobWarnings(job)
        )
        agent.start()
        try:
            eventually(lambda: len(bodies(service, "POST", "/v1/jobs")) == 1)
            exchange.learnt = learnt(20)
            eventually(away.is_set)
            exchange.learnt = learnt(30)
            eventually(lambda: len(bodies(service, "POST", "/v1/jobs")) == 3)
            slow_s[0] = 1.3
            eventually(lambda: exchange.waits_s == (1.3,))
            slow_s[0] = 1.0
            eventually(lambda: exchange.waits_s == ())
            go_on.set()
            exchange.learnt = learnt(50)
            eventually(lambda: len(bodies(service, "POST", "/v1/jobs")) == 4)
        finally:
            go_on.set()
            agent.close()
    sent = [each["profile_csv"] for each in bodies(service, "POST", "/v1/jobs")]
    assert sent == [
        f"table of {rows} rows" for rows in (10, 20, 20, 50)
    ]  # until it is answered, the same


def test_a_job_that_is_registered_when_its_training_has_ended_is_ended_too(
    job: TrainingJob, frontier: tuple[Path, Frontier], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent_module, "_END_S", 0.01)
    path, found = frontier
    known, asked, go_on = (
        Service(found.plan_for(found.baseline_time_s)),
        threading.Event(),
        threading.Event(),
    )

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) == ("POST", "/v1/jobs"):
            asked.set()
            assert go_on.wait(300)
        return known(method, path, body)

    with stand_in(answers) as service:
        with running(service.address, job, Training(), path, None):
            assert asked.wait(300)
        assert bodies(service, "DELETE", "/gpt3") == []
        go_on.set()
        eventually(lambda: len(bodies(service, "DELETE", "/gpt3")) == 1)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (
            {"name": None},
            UsageError,
            "needs job=, a name for this training; give it to planner_runtime",
        ),
        ({"frontier": None}, UsageError, "needs frontier=, the file that `planner solve` wrote"),
        (
            {"is_learning": True},
            UsageError,
            "frontier= is for training with plan=; without a plan the frontier is learnt",
        ),
        ({"frontier": "absent.npz"}, FrontierError, "absent.npz: no such file"),
        ({"address": "host:80"}, UsageError, "the service's address 'host:80' is malformed"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    frontier: tuple[Path, Frontier], fields: dict[str, Any], error: type[Exception], text: str
):
    given = {"address": "http://127.0.0.1:1", "name": "gpt3", "frontier": frontier[0], **fields}
    with pytest.raises(error, match=text):
        ServiceSettings(**given).check()


def test_a_rank_without_the_packages_of_a_service_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    from perseus_planner.runtime import session

    agent = "perseus_planner.extensions.service.agent"
    for name in [name for name in sys.modules if name.startswith(agent)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perseus_planner.extensions.service.client", None)
    with pytest.raises(UsageError) as refused:
        session._service_link(SimpleNamespace(service="http://127.0.0.1:1"), None, None)
    assert str(refused.value) == (
        "service='http://127.0.0.1:1' needs perseus_planner.extensions.service.client, which is "
        "not installed; run `pip install '.[service]'` in your clone of perseus-planner on every "
        "rank"
    )


# What they are made of


def test_pauses_double_up_to_the_longest_and_begin_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(random, "random", lambda: 1.0)
    pauses = new_pauses()
    assert [pauses.next_s() for _ in range(8)] == [
        0.5,
        1.0,
        2.0,
        LONGEST_PAUSE_S,
        LONGEST_PAUSE_S,
        4.0,
        4.0,
        4.0,
    ]
    pauses.reset()
    assert pauses.next_s() == 0.5
    monkeypatch.setattr(random, "random", lambda: 0.0)
    assert new_pauses().next_s() == 0.25


@settings(fixed, max_examples=100)
@given(
    st.lists(
        st.tuples(st.just("found"), st.integers(0, 3), st.sampled_from((1.0, 1.2, 1.5)))
        | st.tuples(st.just("told"), st.just(0), st.just(0.0))
        | st.tuples(st.just("pass"), st.just(0), st.sampled_from((1.0, 0.5 * TTL_S)))
        | st.tuples(st.just("forgotten"), st.just(0), st.just(0.0)),
        max_size=20,
    )
)
def test_the_service_knows_the_last_finding_of_each_rank_whenever_all_is_told(
    acts: list[tuple[str, int, float]],
):
    now_s = [0.0]
    findings, last = Detections(lambda: now_s[0]), {}
    known: dict[str, tuple[float, float, float]] = {}  # scope -> slowdown, observed, expires
    for act, rank, number in [*acts, ("told", 0, 0.0)]:
        now_s[0] += 1e-3
        if act == "found":
            findings.add(Detection(rank, StragglerDetection(number, "why")))
            last[str(rank)] = number
        elif act == "pass":
            now_s[0] += number
        elif act == "forgotten":
            known = {}
            findings.send_again()
        else:
            for request in findings.due():
                assert request.slowdown is not None
                assert request.observed_s is not None
                if request.observed_s > known.get(request.scope.value, (0, -1.0, 0))[1]:
                    known[request.scope.value] = (
                        request.slowdown,
                        request.observed_s,
                        now_s[0] + TTL_S,
                    )
                findings.sent(request)
            assert findings.due() == []
            standing = {
                scope: slowdown
                for scope, (slowdown, _, until_s) in known.items()
                if slowdown > 1 and until_s > now_s[0]
            }
            assert standing == {scope: slowdown for scope, slowdown in last.items() if slowdown > 1}


def test_a_finding_that_is_numbered_but_not_yet_written_is_read_later():
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    messages = StoreMessages(store)
    assert messages.new_detections() == []
    assert store.add("findings", 1) == 1
    messages.write_detection(Detection(3, StragglerDetection(1.2, "late")))
    assert messages.new_detections() == [Detection(3, StragglerDetection(1.2, "late"))]
    store.set("findings/1", json.dumps({"rank": 2, "straggling": {"slowdown": 1.1, "reason": "r"}}))
    assert messages.new_detections() == [Detection(2, StragglerDetection(1.1, "r"))]
    assert messages.new_detections() == []


def test_a_job_that_starts_with_a_plan_for_a_probability_asks_for_such_plans(
    frontier: tuple[Path, Frontier],
):
    path, found = frontier
    served = ServiceSettings("http://localhost:1", "gpt3", path)
    noisy = solve(noisy_rows(found.profile, 0.005, None, 1), found.schedule)
    plan = noisy.plan_until(1.05 * noisy.baseline_time_s, on_time=0.9)
    asked = served.registration([], 1, plan)
    assert (asked.on_time, asked.deadline_s) == (
        0.9,
        pytest.approx(1.05 * found.baseline_time_s, rel=1e-12),
    )
    as_fast = served.registration([], 1, found.plan_until(found.baseline_time_s))
    assert (as_fast.on_time, as_fast.deadline_s) == (None, None)
    assert served.registration([], 1, None).on_time == ON_TIME
