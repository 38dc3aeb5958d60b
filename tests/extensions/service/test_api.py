"""The service over HTTP: what each address does, and how it refuses what it cannot do."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_stand_in import LEAST_S, LEAST_W, NOW_S, StandIn, asking, opened

from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import sha256
from perseus_planner.extensions.service.access import Limits
from perseus_planner.extensions.service.bodies import read_registration
from perseus_planner.extensions.service.models import (
    Place,
    Registration,
    Scope,
    StorageError,
    Taken,
    from_json,
    to_json,
)

httpx = pytest.importorskip("httpx")

FRONTIER = b"PK frontier"
JOB = {"name": "gpt3", "frontier": base64.b64encode(FRONTIER).decode(), "pipelines": 3}
SLOW = {"source": "ops", "scope": {"kind": "pipeline", "value": 1}, "slowdown": 1.2, "key": "r1"}


def talk(
    service: StandIn,
    conversation: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]],
    **options: Any,
) -> None:
    async def run() -> None:
        async with opened(service, **options) as client:
            await conversation(client)

    asyncio.run(run())


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., httpx.Response]]:
    """Asks a service that has the job."""
    with asking(StandIn()) as ask:
        assert ask("POST", "/v1/jobs", json=JOB).status_code == 201
        yield ask


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    content = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (content["status"], content["title"]) == (answer.status_code, answer.reason_phrase)
    return answer.status_code, content["code"], content["detail"]


def test_a_job_is_registered_once_and_known_until_it_ends():
    service = StandIn()
    places = [
        {"rank": 4, "pipeline": 1, "stages": [0, 2], "node": "n1", "gpu": "GPU-1"},
        {"rank": 0, "pipeline": 0, "stages": []},
    ]
    full = {
        **JOB,
        "places": places,
        "deadline_s": 2,
        "max_changes": 8,
        "power_w": 5e3,
    }

    with asking(service) as ask:
        first = ask("POST", "/v1/jobs", json=full)
        assert first.status_code == 201
        kept = service.kept["gpt3"]
        assert kept.places == (Place(4, 1, (0, 2), "n1", "GPU-1"), Place(0, 0, ()))
        assert (kept.frontier, kept.deadline_s, kept.max_changes) == (sha256(FRONTIER), 2.0, 8)
        assert (kept.power_w, kept.since_s) == (5e3, NOW_S)
        again = ask("POST", "/v1/jobs", json=full)
        assert (again.status_code, again.json()) == (200, first.json())
        other = ask("POST", "/v1/jobs", json={**full, "pipelines": 4})
        assert refusal(other)[:2] == (409, "conflict")
        listed = ask("GET", "/v1/jobs")
        assert [each["job"] for each in listed.json()["jobs"]] == [first.json()["job"]]
        status = ask("GET", "/v1/jobs/gpt3").json()
        assert (status["job"]["ranks"], status["version"], status["taken"]) == (2, 1, None)
        assert status["decision"]["look_again_s"] is None  # never
        target = {
            "time_s": 1.0,
            "slow_stages": {"0": 1.5},
            "power_w": None,
            "gpu_power_limit_w": None,
            "reason": None,
        }
        assert status["decision"]["targets"][0] == target
        assert ask("DELETE", "/v1/jobs/gpt3").status_code == 204
        assert refusal(ask("GET", "/v1/jobs/gpt3"))[:2] == (404, "not_found")

    assert service.kept == {}


@pytest.mark.parametrize("path", ["", "/gpt3", "/gpt3/frontier"])
def test_a_page_is_sent_compressed_to_who_can_read_that_and_only_if_it_is_another_one(path: str):
    with asking(StandIn()) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        for refused in ("identity", "br, deflate"):
            plain = ask("GET", f"/v1/jobs{path}", headers={"Accept-Encoding": refused})
            assert "Content-Encoding" not in plain.headers
        zipped = ask("GET", f"/v1/jobs{path}", headers={"Accept-Encoding": "br, gzip;q=0.5"})
        assert zipped.headers["Content-Encoding"] == "gzip"
        assert zipped.headers["Vary"] == "Accept-Encoding"
        assert plain.json() == zipped.json()
        same = ask("GET", f"/v1/jobs{path}", headers={"If-None-Match": plain.headers["ETag"]})
        assert (same.status_code, same.content, same.headers["ETag"]) == (
            304,
            b"",
            plain.headers["ETag"],
        )


def test_the_page_of_all_jobs_follows_every_change():
    with asking(StandIn()) as ask:
        known = {"If-None-Match": ask("GET", "/v1/jobs").headers["ETag"]}
        ask("POST", "/v1/jobs", json=JOB)
        begun = ask("GET", "/v1/jobs", headers=known)
        assert [each["reports"] for each in begun.json()["jobs"]] == [[]]
        ask("POST", "/v1/jobs/gpt3/reports", json=SLOW)
        reported = ask("GET", "/v1/jobs", headers={"If-None-Match": begun.headers["ETag"]})
        assert [each["key"] for each in reported.json()["jobs"][0]["reports"]] == ["r1"]
        assert reported.json()["jobs"] == [ask("GET", "/v1/jobs/gpt3").json()]
        ask("DELETE", "/v1/jobs/gpt3")
        assert ask("GET", "/v1/jobs", headers=known).status_code == 304


def test_a_report_is_answered_with_what_follows():
    service = StandIn()

    with asking(service) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        sent = {**SLOW, "in_s": 10, "ttl_s": 60.0, "cause": "compute", "observed_s": 990}
        answer = ask("POST", "/v1/jobs/gpt3/reports", json=sent)
        assert answer.status_code == 202
        content = answer.json()
        kept = content.pop("report")
        assert content == {
            "job": "gpt3",
            "version": 2,
            "changed": True,
            "takes_effect": "next iteration",
            "expected_saving_w": 12.5,
            "reason": "it is slow",
        }
        assert (kept["begins_s"], kept["expires_s"], kept["observed_s"]) == (
            NOW_S + 10,
            NOW_S + 70,
            990.0,
        )
        assert ask("GET", "/v1/jobs/gpt3/reports").json() == {"reports": [kept]}
        cleared = ask("DELETE", "/v1/jobs/gpt3/reports/r1")
        assert (cleared.status_code, cleared.json()["report"]) == (200, kept)
        assert refusal(ask("DELETE", "/v1/jobs/gpt3/reports/r1"))[:2] == (404, "not_found")


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({"score": 0.8}, {"slowdown": 1.25, "iteration_s": None}),
        ({"iteration_s": 3}, {"slowdown": None, "iteration_s": 3.0}),
        (
            {"slowdown": 1},
            {"slowdown": 1.0, "expires_s": math.inf, "begins_s": NOW_S, "observed_s": NOW_S},
        ),
        ({"slowdown": 2, "at_iteration": 70}, {"begins_iteration": 70}),
        ({"slowdown": 2, "scope": {"kind": "rank", "value": "17"}}, {"scope": Scope("rank", "17")}),
        (
            {"slowdown": 2, "scope": {"kind": "stage", "value": 2, "pipeline": 1}},
            {"scope": Scope("stage", "2", 1)},
        ),
        (
            {"slowdown": 2, "scope": {"kind": "node", "value": "knöten 7"}},
            {"scope": Scope("node", "knöten 7")},
        ),
    ],
)
def test_a_report_says_how_slow_in_one_of_three_ways(sent, found):
    service = StandIn()

    with asking(service) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        whole = {"source": "ops", "scope": {"kind": "pipeline", "value": 0}, **sent}
        assert ask("POST", "/v1/jobs/gpt3/reports", json=whole).status_code == 202

    (report,) = service.of_job["gpt3"].values()
    assert {name: getattr(report, name) for name in found} == found


def test_the_key_of_a_report_may_stand_in_a_header():
    service = StandIn()
    without = {name: value for name, value in SLOW.items() if name != "key"}

    with asking(service) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        path = "/v1/jobs/gpt3/reports"
        ask("POST", path, json=without, headers={"Idempotency-Key": "h1"})
        ask("POST", path, json=SLOW, headers={"Idempotency-Key": "r1"})
        assert list(service.of_job["gpt3"]) == ["h1", "r1"]
        other = ask("POST", path, json=SLOW, headers={"Idempotency-Key": "h2"})
        assert refusal(other) == (
            422,
            "invalid",
            "key: differs from the header Idempotency-Key; send one of them",
        )
        first, second = [ask("POST", path, json=without).json()["report"]["key"] for _ in range(2)]
        assert first != second


def test_what_a_job_has_taken_and_what_is_wanted_of_it_is_told():
    service = StandIn()

    with asking(service) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        told = ask("POST", "/v1/jobs/gpt3/taken", json={"version": 1, "iteration": 40})
        assert told.status_code == 204
        assert ask("GET", "/v1/jobs/gpt3").json()["taken"] == {
            "version": 1,
            "iteration": 40,
            "at_s": NOW_S,
        }
        answer = ask("PUT", "/v1/jobs/gpt3/deadline", json={"deadline_s": 2.5})
        assert (answer.json()["version"], answer.json()["report"]) == (2, None)
        assert ask("GET", "/v1/jobs/gpt3").json()["job"]["deadline_s"] == 2.5
        for path in ("/v1/jobs/gpt3/power", "/v1/power"):
            answers = ask("PUT", path, json={"power_w": LEAST_W}).json()["answers"]
            assert [each["job"] for each in answers] == ["gpt3"]
            refused = ask("PUT", path, json={"power_w": 99})
            assert refusal(refused)[:2] == (409, "infeasible")
            assert refused.json()["least_power_w"] == LEAST_W
        assert ask("PUT", "/v1/power", json={"power_w": None}).status_code == 200

    assert service.taken_by == {"gpt3": Taken(1, 40, NOW_S)}


def test_a_deadline_that_no_plan_keeps_is_refused_with_the_least_that_one_does(ask):
    too_short = ask("PUT", "/v1/jobs/gpt3/deadline", json={"deadline_s": LEAST_S / 2})
    assert refusal(too_short)[:2] == (409, "infeasible")
    assert too_short.json()["least_deadline_s"] == LEAST_S
    not_known = ask("PUT", "/v1/jobs/gpt3/deadline", json={"deadline_s": LEAST_S})
    assert refusal(not_known)[:2] == (409, "infeasible")
    assert set(not_known.json()) == {"title", "status", "detail", "code"}


def test_plans_come_with_equal_ones_once():
    with asking(StandIn()) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        everyone = ask("GET", "/v1/jobs/gpt3/plans", params={"after": 0, "wait_s": 0})
        plans = ["plan 1 of the straggler\n", "plan 1 “of the others”\n"]
        assert everyone.json() == {
            "version": 1,
            "plans": plans,
            "of_pipeline": [0, 1, 1],
            "own": None,
        }
        nothing = ask("GET", "/v1/jobs/gpt3/plans?after=1&wait_s=0.01")
        assert (nothing.status_code, nothing.content) == (204, b"")


def test_a_poll_waits_for_the_next_version_of_its_job_alone(ask):
    service = StandIn()

    async def conversation(client: httpx.AsyncClient) -> None:
        for name in ("gpt3", "other"):
            await client.post("/v1/jobs", json={**JOB, "name": name})
        poll = "/v1/jobs/{}/plans?after=1&wait_s=30"
        polls = {
            name: asyncio.create_task(client.get(poll.format(name))) for name in ("gpt3", "other")
        }
        await waiting(client, 2)
        await client.post("/v1/jobs/gpt3/reports", json=SLOW)
        assert (await polls["gpt3"]).json()["version"] == 2
        assert not polls["other"].done()
        await client.delete("/v1/jobs/other")
        assert refusal(await polls["other"])[:2] == (404, "not_found")

    talk(service, conversation)


async def waiting(client: httpx.AsyncClient, count: int) -> None:
    """Until so many wait."""
    while f"planner_http_waiting {count}.0" not in (await client.get("/metrics")).text:
        await asyncio.sleep(0)


def test_a_thousand_polls_take_no_thread_and_all_hear_of_a_version():
    async def conversation(client: httpx.AsyncClient) -> None:
        await client.post("/v1/jobs", json=JOB)
        path = "/v1/jobs/gpt3/plans?after=1&wait_s=60"
        await waiting(client, 0)
        threads = threading.active_count()
        polls = [asyncio.create_task(client.get(path)) for _ in range(1000)]
        await waiting(client, 1000)
        assert threading.active_count() <= threads + 1  # that of the metrics
        await client.post("/v1/jobs/gpt3/reports", json=SLOW)
        assert {answer.json()["version"] for answer in await asyncio.gather(*polls)} == {2}

    talk(StandIn(), conversation)


def test_no_more_wait_than_may(ask):
    async def conversation(client: httpx.AsyncClient) -> None:
        await client.post("/v1/jobs", json=JOB)
        polls = [
            asyncio.create_task(client.get("/v1/jobs/gpt3/plans?after=1&wait_s=30"))
            for _ in range(2)
        ]
        await waiting(client, 2)
        refused = await client.get("/v1/jobs/gpt3/plans?after=1&wait_s=30")
        assert refusal(refused)[:2] == (503, "unavailable")
        assert refused.headers["Retry-After"] == "1"
        await client.post("/v1/jobs/gpt3/reports", json=SLOW)
        await asyncio.gather(*polls)
        assert (await client.get("/v1/jobs/gpt3/plans")).status_code == 200

    talk(StandIn(), conversation, limits=Limits(waiting=2))


def test_the_service_is_told_of_time_when_it_asked_to_be_and_after_what_may_change_that():
    service = StandIn()
    service.ticks = [NOW_S + 0.02, NOW_S + 0.01]

    async def conversation(client: httpx.AsyncClient) -> None:
        while service.calls.count("tick") < 3:
            await asyncio.sleep(0.001)
        await client.post("/v1/jobs", json=JOB)
        while service.calls.count("tick") < 4:
            await asyncio.sleep(0.001)

    talk(service, conversation)


@pytest.mark.filterwarnings("default")
def test_a_service_that_cannot_go_on_says_so_and_goes_on_when_it_can(caplog):
    service = StandIn()
    service.failure = StorageError("service.sqlite: the disk is full; free some")

    async def conversation(client: httpx.AsyncClient) -> None:
        while (unwell := await client.get("/healthz")).status_code == 200:
            await asyncio.sleep(0.001)
        assert refusal(unwell)[:2] == (503, "unavailable")
        assert "the disk is full" in refusal(unwell)[2]
        assert refusal(await client.get("/v1/jobs"))[0] == 503
        service.failure = None
        await client.post("/v1/jobs", json=JOB)
        while (await client.get("/healthz")).status_code != 200:
            await asyncio.sleep(0.001)

    talk(service, conversation)
    assert len(caplog.records) == 1


def test_a_fault_of_the_service_is_no_secret_told_to_the_client():
    service = StandIn()

    with asking(service) as ask:
        service.failure = RuntimeError("password")
        status, code, message = refusal(ask("GET", "/v1/jobs"))
        assert (status, code) == (500, "fault")
        assert "password" not in message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"null", 422),
        (b'"text"', 422),
        (b"\xff{}", 422),
        (b'{"source": "\xff"}', 422),
        (b'{"source": "\\ud800"}', 422),
        (b"[" * 60_000, 422),
        (b'{"a":' * 10_000, 422),
        (b'{"slowdown": ' + b"9" * 5_000 + b"}", 422),
        (b'{"slowdown": NaN}', 422),
    ],
)
def test_a_body_that_is_none_is_refused(body, status, ask):
    answer = ask(
        "POST", "/v1/jobs/gpt3/reports", content=body, headers={"Content-Type": "application/json"}
    )
    assert refusal(answer)[0] == status


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"slowdown": 0.99}, "body.slowdown: Input should be greater than or equal to 1"),
        ({"slowdown": float("nan")}, "body.slowdown: Input should be a finite number"),
        ({"slowdown": float("inf")}, "body.slowdown: Input should be a finite number"),
        ({"slowdown": 10**400}, "body.slowdown"),
        ({"slowdown": "1.2"}, "body.slowdown: Input should be a valid number"),
        ({"slowdown": True}, "body.slowdown: Input should be a valid number"),
        ({"slowdown": None, "score": 0.0}, "body.score: Input should be greater than or equal to"),
        ({"slowdown": None, "score": 1.01}, "body.score: Input should be less than or equal to 1"),
        (
            {"slowdown": None, "iteration_s": float("inf")},
            "body.iteration_s: Input should be a finite number",
        ),
        (
            {"slowdown": None},
            "a report says how slow in one way: give a slowdown, an iteration time or a score",
        ),
        (
            {"score": 0.5},
            "a report says how slow in one way: give a slowdown, an iteration time or a score",
        ),
        ({"in_s": -1}, "body.in_s: Input should be greater than or equal to 0"),
        (
            {"in_s": 1, "at_iteration": 3},
            "a report begins after a time or with an iteration; give one of the two",
        ),
        ({"at_iteration": 2.0}, "body.at_iteration: Input should be a valid integer"),
        ({"at_iteration": 2**70}, "body.at_iteration"),
        ({"ttl_s": 0}, "body.ttl_s: Input should be greater than 0"),
        (
            {"cause": "magic"},
            "body.cause: Input should be 'compute', 'communication', 'data', 'thermal' or "
            "'unknown'",
        ),
        ({"key": "a/b"}, "body.key: String should match pattern"),
        ({"key": ""}, "body.key: String should match pattern"),
        ({"source": "a\nb"}, "body.source: String should match pattern"),
        ({"scope": {"kind": "pipeline"}}, "body.scope.value: Field required"),
        ({"scope": {"kind": "city", "value": 1}}, "body.scope.kind: Input should be"),
        ({"scope": [1]}, "body.scope: Input should be an object"),
    ],
)
def test_a_report_that_is_none_is_refused_with_its_first_flaw(changes, complaint, ask):
    body = json.dumps({**SLOW, **changes})
    answer = ask(
        "POST", "/v1/jobs/gpt3/reports", content=body, headers={"Content-Type": "application/json"}
    )
    status, code, message = refusal(answer)
    assert (status, code, message[: len(complaint)]) == (422, "invalid", complaint)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"frontier": "é"}, "body.frontier: Data should be valid base64"),
        ({"frontier": "UEs=\n!"}, "body.frontier: Data should be valid base64"),
        (
            {"frontier": base64.b64encode(b"damaged").decode()},
            "frontier.npz: is not a frontier file",
        ),
        ({"frontier": None}, "give a frontier, or all of profile_csv, profile_yaml and schedule"),
        ({"schedule": "1f1b"}, "frontier: leave out profile_csv"),
        ({"pipelines": 0}, "body.pipelines: Input should be greater than or equal to 1"),
        ({"pipelines": 10**9}, "body.pipelines: Input should be less than or equal to 65536"),
        ({"power_w": 0}, "body.power_w: Input should be greater than 0"),
        ({"deadline_s": -1.0}, "body.deadline_s: Input should be greater than 0"),
        ({"max_changes": -1}, "body.max_changes: Input should be greater than or equal to 0"),
        ({"on_time": 1.0}, "body.on_time: Input should be less than or equal to 0.99"),
        *(
            ({"name": name}, "body.name: String should match pattern")
            for name in ("", ".", "..", "a/b", "a\0", "ä", "x" * 129, "../../etc/passwd", "a\n")
        ),
    ],
)
def test_a_job_that_is_none_is_refused(changes, complaint, ask):
    status, code, message = refusal(ask("POST", "/v1/jobs", json={**JOB, **changes}))
    assert (status, code, message[: len(complaint)]) == (422, "invalid", complaint)


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "a%00b", "%ff", "%20", "x" * 200, "a%0a"])
@pytest.mark.parametrize("rest", ["", "/reports", "/plans"])
def test_a_name_in_an_address_is_never_a_path(name, rest, ask):
    assert refusal(ask("GET", f"/v1/jobs/{name}{rest}"))[0] in (404, 422)


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("after=-1", "query.after"),
        ("after=x", "query.after"),
        ("after=" + "9" * 5_000, "query.after"),
        ("wait_s=61", "query.wait_s"),
        ("wait_s=nan", "query.wait_s"),
        ("wait_s=inf", "query.wait_s"),
        ("wait_s=-1", "query.wait_s"),
    ],
)
def test_a_poll_that_is_none_is_refused(query, place, ask):
    status, code, message = refusal(ask("GET", f"/v1/jobs/gpt3/plans?{query}"))
    assert (status, code, message.partition(":")[0]) == (422, "invalid", place)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v2/jobs", 404),
        ("PATCH", "/v1/jobs", 405),
        ("POST", "/v1/jobs/gpt3", 405),
        ("PUT", "/v1/jobs/gpt3/reports", 405),
        ("POST", "/v1/power", 405),
        ("BREW", "/v1/jobs", 405),
        ("GET", "/v1/jobs/other/plans", 404),
    ],
)
def test_what_is_not_there_is_refused_in_the_same_shape(method, path, status, ask):
    answer = ask(method, path)
    assert refusal(answer)[0] == status


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/jobs", "GET, POST"),
        ("/v1/jobs/gpt3", "DELETE, GET"),
        ("/v1/power", "GET, PUT"),
        ("/metrics", "GET"),
    ],
)
def test_a_method_that_an_address_does_not_take_is_refused_with_those_that_it_does(
    path, methods, ask
):
    assert ask("PATCH", path).headers["Allow"] == methods


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def ask_fresh() -> Iterator[Callable[..., httpx.Response]]:
    with asking(StandIn()) as ask:
        yield ask


@given(
    st.sampled_from(sorted({*JOB, *SLOW, "places", "in_s", "ttl_s", "observed_s", "profile_csv"})),
    JSON,
)
def test_any_value_in_any_field_is_taken_or_refused(ask_fresh, field, value):
    for path, body in (("/v1/jobs", JOB), ("/v1/jobs/gpt3/reports", SLOW)):
        content = json.dumps({**body, field: value})
        answer = ask_fresh(
            "POST", path, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (200, 201, 202, 400, 404, 409, 422)


def test_metrics_count_requests_by_route_and_show_jobs():
    with asking(StandIn()) as ask:
        ask("POST", "/v1/jobs", json=JOB)
        for name in ("a", "b", "gpt3"):
            ask("GET", f"/v1/jobs/{name}")
        ask("GET", "/elsewhere")
        ask("BREW", "/v1/jobs")
        lines = ask("GET", "/metrics").text.splitlines()
        assert (
            'planner_http_requests_total{method="GET",route="/v1/jobs/{job}",status="404"} 2.0'
            in lines
        )
        assert (
            'planner_http_requests_total{method="GET",route="/v1/jobs/{job}",status="200"} 1.0'
            in lines
        )
        assert 'planner_http_requests_total{method="GET",route="other",status="404"} 1.0' in lines
        assert not any("BREW" in line for line in lines)
        assert 'planner_job_version{training_job="gpt3"} 1.0' in lines
        assert 'planner_job_expected_saving_watts{training_job="gpt3"} 12.5' in lines
        assert "planner_jobs 1.0" in lines
        assert not any(line.startswith("planner_job_version_taken{") for line in lines)
        assert not any(line.startswith("python_") for line in lines)  # of its own registry alone


PLACE = Place(3, 0, (0, 1), 'node] "places":[}', "GPU-é")
LARGE = Registration("large", 3, b"file", (*(replace(PLACE, rank=rank) for rank in range(2100)),))
SENT = to_json(LARGE, without_defaults=True)


@pytest.mark.parametrize(
    "body",
    [
        SENT,
        json.dumps(json.loads(SENT)).encode(),
        to_json(replace(LARGE, places=())),
        to_json(replace(LARGE, places=LARGE.places[:1000])),
        b'{"new":{"places":[1,2]},' + SENT[1:],
        b'{"new":{"places":[{"rank":1,"pipeline":0,"stages":[]}]},' + to_json(LARGE)[1:],
        b'{"new":{"places":[{"rank":1,"pipeline":0,"stages":[]}]},"name":"a","pipelines":1,'
        b'"frontier":""}',
        SENT[:-1] + b',"places":[]}',
    ],
)
def test_a_large_registration_is_read_as_any_other(body: bytes):
    assert read_registration(body) == from_json(Registration, body)


@pytest.mark.parametrize(
    "body",
    [
        SENT[:-2],
        SENT[:-1],
        SENT.replace(b"node]", b"node\xff", 1),
        SENT.replace(b"},{", b"}{", 1),
        SENT.replace(b"},{", b"},,{", 1),
        SENT.replace(b'"frontier":', b'"frontiers":'),
        b"[" * 10_000,
        b'{"places":[' + b"[" * 10_000,
    ],
)
def test_what_is_no_registration_is_refused_as_any_other(body: bytes):
    with pytest.raises((ValueError, UsageError)) as wanted:
        from_json(Registration, body)
    with pytest.raises(type(wanted.value)) as refused:
        read_registration(body)
    assert str(refused.value) == str(wanted.value)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (SENT.replace(b'"rank":2099', b'"rank":-1'), "places.2099.rank: Input should be greater"),
        (
            SENT.replace(b'"stages":[0,1]', b'"stages":[0,"1"]', 1),
            "places.0.stages.1: Input should be a valid integer",
        ),
        (SENT.replace(b'"pipelines":3', b'"pipelines":2'), "more than 2,048 for 2 pipelines; list"),
        (b'{"places":[%b{}]}' % (b"{}," * 9), "places.0.rank: Field required"),
        (SENT[:-1] + b',"new":[%b0]}' % (b"[]," * 2**16), "the body: has 65,541 lists and objects"),
        (
            SENT.replace(b'"rank":0', b'"new":[%b0],"rank":0' % (b"0," * 2**19), 1),
            "places.0: is larger than a place can be",
        ),
    ],
)
def test_a_registration_is_refused_by_the_first_place_that_is_wrong(body: bytes, complaint: str):
    with pytest.raises((ValueError, UsageError)) as refused:
        read_registration(body)
    assert complaint in str(refused.value)


def test_a_registration_is_refused_for_what_is_beside_its_places(ask):
    places = [{"rank": rank, "pipeline": 0, "stages": [0]} for rank in range(2)]
    answer = ask("POST", "/v1/jobs", json=JOB | {"places": places, "pipelines": "two"})
    status, code, message = refusal(answer)
    assert (status, code) == (422, "invalid")
    assert message.startswith("body.pipelines: ")
