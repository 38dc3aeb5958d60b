"""Alerts as Alertmanager posts them, over HTTP, to a service with jobs that have what they name,
or have not.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from command_options import ROOT
from documents import blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from service_stand_in import asking, opened
from services import NOW_S, Clock, frontier_file, job, planned, report, service_at
from strategies import fixed

from perseus_planner.extensions.service.access import TOKENS_VARIABLE, Access, Limits, read_tokens
from perseus_planner.extensions.service.alerts import read_alert
from perseus_planner.extensions.service.models import Place, Scope
from perseus_planner.extensions.service.service import Service

httpx = pytest.importorskip("httpx")


def moment(at_s: float) -> str:
    """As Alertmanager writes times."""
    return (
        datetime.fromtimestamp(at_s, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


#: What an Alertmanager 0.25.0 posted by the rule and the configuration of alerts.py; GPU and times
#: are those of tests.
FIRING = {
    "status": "firing",
    "labels": {
        "DCGM_FI_DRIVER_VERSION": "550.90.07",
        "Hostname": "node1",
        "UUID": "GPU-2",
        "alertname": "GpuSlowed",
        "device": "nvidia3",
        "gpu": "3",
        "instance": "127.0.0.1:9400",
        "job": "dcgm",
        "modelName": "NVIDIA H100 80GB HBM3",
    },
    "annotations": {"cause": "compute", "slowdown": "1.4042553191489362"},
    "startsAt": moment(NOW_S - 60),
    "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "http://vm:9992/graph?g0.expr=1980+%2F+avg_over_time%28DCGM_FI_DEV_SM_CLOCK%5B2m%5D%29&g0.tab=1",
    "fingerprint": "bdb64e6c59aa1c2a",
}
RESOLVED = {**FIRING, "status": "resolved", "endsAt": moment(NOW_S - 1)}


def body(*alerts: Any) -> dict[str, Any]:
    return {
        "receiver": "planner",
        "status": "firing",
        "alerts": list(alerts),
        "groupLabels": {"alertname": "GpuSlowed"},
        "commonLabels": {"DCGM_FI_DRIVER_VERSION": "550.90.07", "alertname": "GpuSlowed"},
        "commonAnnotations": {"cause": "compute"},
        "externalURL": "http://vm:9993",
        "version": "4",
        "groupKey": '{}:{alertname="GpuSlowed"}',
        "truncatedAlerts": 0,
    }


def alert(labels: Any, annotations: Any, **fields: Any) -> dict[str, Any]:
    return {**FIRING, "labels": labels, "annotations": annotations, **fields}


@contextmanager
def served(place: Path) -> Iterator[tuple[Service, Clock, Callable[..., httpx.Response]]]:
    """A service with the job `gpt`, three pipelines of two stages on a node each, its clock, and
    what asks it.
    """
    clock = Clock()
    with (
        service_at(place, clock) as service,
        asking(service) as ask,
    ):
        service.register(job(), frontier_file())
        yield service, clock, ask


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Service, Clock, Callable[..., httpx.Response]]]:
    with served(tmp_path / "service.sqlite") as running:
        yield running


def posted(ask: Callable[..., httpx.Response], *alerts: Any) -> dict[str, Any]:
    answer = ask("POST", "/v1/alerts", json=body(*alerts))
    assert answer.status_code == 200, answer.text
    return answer.json()


def slowdowns(service: Service, name: str = "gpt") -> list[float | None]:
    return [each.slowdown for each in service.reports(name)]


def test_an_alert_is_a_report_of_the_gpu_that_it_names_until_it_is_resolved(running):
    service, _, ask = running
    found = posted(ask, FIRING)
    assert found["ignored"] == []
    assert [(each["job"], each["version"], each["changed"]) for each in found["answers"]] == [
        ("gpt", 2, True)
    ]
    planned(service)  # a slow stage is solved first
    (kept,) = service.reports("gpt")
    assert (kept.scope, kept.slowdown, kept.cause) == (
        Scope("gpu", "GPU-2"),
        1.4042553191489362,
        "compute",
    )
    assert service.status("gpt").decision.each[1].slow_stages == {0: kept.slowdown}
    found = posted(ask, RESOLVED)
    assert [(each["version"], each["changed"]) for each in found["answers"]] == [(3, True)]
    assert service.reports("gpt") == ()
    assert service.status("gpt").decision.each[1].slow_stages == {}


def test_every_job_that_has_what_an_alert_names_is_told(running):
    service, _, ask = running
    elsewhere = replace(job("bloom"), places=(Place(0, 1, (0, 1), "node1", "GPU-77"),))
    service.register(elsewhere, frontier_file())
    found = posted(ask, alert({"node": "node1"}, {"score": "0.8"}, fingerprint="1"), FIRING)
    assert [each["job"] for each in found["answers"]] == ["bloom", "gpt"]
    assert (slowdowns(service), slowdowns(service, "bloom")) == ([1.25, 1.4042553191489362], [1.25])


def test_what_no_job_has_and_what_says_too_little_harm_no_other_alert(
    running, caplog: pytest.LogCaptureFixture
):
    service, _, ask = running
    unknown = alert(
        {"alertname": "A", "UUID": "GPU-of-others"}, {"slowdown": "1.2"}, fingerprint="1"
    )
    found = posted(
        ask, unknown, alert({"alertname": "B", "node": "node0"}, {}, fingerprint="2"), FIRING, "x"
    )
    assert [each["job"] for each in found["answers"]] == ["gpt"]
    assert [(each["index"], each["name"]) for each in found["ignored"]] == [
        (0, "A"),
        (1, "B"),
        (3, "unnamed"),
    ]
    assert found["ignored"][0]["problem"] == "no running job has gpu 'GPU-of-others'"
    assert slowdowns(service) == [1.4042553191489362]
    first = "3 of 4 alerts are ignored, first one of the rule 'A': no running job has gpu"
    assert first in caplog.text
    counted = ask("GET", "/metrics").text
    assert 'planner_alerts_total{outcome="reported"} 1.0\n' in counted
    assert 'planner_alerts_total{outcome="ignored"} 3.0\n' in counted


def test_ten_thousand_alerts_of_no_use_are_one_line_of_the_log(
    running, caplog: pytest.LogCaptureFixture
):
    _, _, ask = running
    assert len(posted(ask, *[None] * 10_000)["ignored"]) == 10_000
    assert len(caplog.records) == 1


def test_a_job_that_has_too_many_reports_says_so_and_others_are_told(
    running, monkeypatch: pytest.MonkeyPatch
):
    service, _, ask = running
    service.register(job("bloom"), frontier_file())
    service.report("gpt", report("one")).result()
    monkeypatch.setattr("perseus_planner.extensions.service.checks._MOST_REPORTS", 1)
    found = posted(ask, FIRING)
    assert [each["problem"] for each in found["ignored"]] == [
        "job 'gpt' has 1 reports, 0 of them by 'alertmanager, bdb64e6c59aa1c2a'; clear some"
    ]
    assert (slowdowns(service), slowdowns(service, "bloom")) == ([1.3], [1.4042553191489362])


@pytest.mark.parametrize(
    ("alert", "text"),
    [
        (
            alert({"node": "n"}, {}),
            "has no slowdown; give its rule an annotation with the time over the normal time",
        ),
        (
            alert({"node": "n"}, {"slowdown": "much"}),
            "slowdown: 'much' is not a slowdown: give how many times as long it takes",
        ),
        (
            alert({"node": "n"}, {"slowdown": "1e7"}),
            "alert.slowdown: Input should be less than or equal to 1000000",
        ),
        (
            alert({"node": "n"}, {"score": "0"}),
            "score: '0' is not a slowdown: give how many times as long it takes",
        ),
        (
            alert({"gpu": "3"}, {"slowdown": "1.2"}),
            "names neither a GPU nor a node; keep the label UUID, Hostname",
        ),
        (alert({"node": "n\n"}, {"slowdown": "1.2"}), "alert.scope.value: String should match"),
        (
            alert({"node": "n"}, {"slowdown": "1.2", "cause": "bad"}),
            "alert.cause: Input should be 'compute', 'communication'",
        ),
        (
            alert({"node": "n"}, {"slowdown": "1.2"}, status="other"),
            "alert.status: Input should be 'firing' or 'resolved'",
        ),
        (
            alert({"node": "n"}, {"slowdown": "1.2"}, startsAt="now"),
            "alert.startsAt: Input should be a valid datetime",
        ),
        (
            alert({"node": "n"}, {"slowdown": "2"}, startsAt="2026-13-01T00:00:00Z"),
            "alert.startsAt: Input should be a valid datetime or date, month value",
        ),
        (
            alert({"node": "n"}, {}, status="resolved", endsAt=None),
            "alert.endsAt: Input should be a valid datetime",
        ),
        (alert([], {"slowdown": "1.2"}), "alert.labels: Input should be an object"),
        ("x", "alert: Input should be an object"),
    ],
)
def test_an_alert_that_says_too_little_says_what_is_missing(alert: Any, text: str):
    found = read_alert(alert, NOW_S)
    assert isinstance(found, str)
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("labels", "scope"),
    [
        ({"Hostname": "node07", "instance": "10.1.2.3:9400"}, Scope("node", "node07")),
        ({"node": "k8s-7", "instance": "10.1.2.3:9400"}, Scope("node", "k8s-7")),
        ({"instance": "[fe80::7]:9400"}, Scope("node", "fe80::7")),
        ({"instance": "node07"}, Scope("node", "node07")),
        ({"UUID": "", "Hostname": "node07"}, Scope("node", "node07")),
    ],
)
def test_an_alert_without_a_gpu_is_of_its_node(labels: dict[str, str], scope: Scope):
    assert read_alert(alert(labels, {"score": "0.8"}), NOW_S).scope == scope


@pytest.mark.parametrize(
    ("labels", "annotations", "slowdown"),
    [
        ({}, {"score": "0.8"}, 1.25),
        ({}, {"score": "1.2"}, 1.0),
        ({}, {"slowdown": "0.97"}, 1.0),
        ({"slowdown": "2"}, {"slowdown": "3"}, 2.0),
    ],
)
def test_an_alert_says_how_slow_as_a_degree_or_as_a_score(
    labels: Any, annotations: Any, slowdown: float
):
    assert read_alert(alert({"node": "n", **labels}, annotations), NOW_S).slowdown == slowdown


def test_times_are_the_same_however_they_are_written():
    texts = (
        "2026-05-04T12:00:10.5Z",
        "2026-05-04T14:00:10.500000000+02:00",
        "2026-05-04T07:00:10.50-05:00",
    )
    assert len({read_alert({**FIRING, "startsAt": text}, 2e9).key for text in texts}) == 1


def test_an_alert_that_says_another_degree_is_the_same_and_one_that_was_cleared_stays_so(running):
    service, clock, ask = running
    for slowdown in ("1.3", "1.6", "1.3", "1.2"):
        clock.now_s += 300
        posted(ask, {**FIRING, "annotations": {"slowdown": slowdown}})
        assert slowdowns(service) == [float(slowdown)]
    (kept,) = service.reports("gpt")
    service.clear("gpt", kept.key).result()
    assert posted(ask, FIRING)["answers"][0]["changed"] is False
    assert slowdowns(service) == []
    again = {**FIRING, "startsAt": moment(clock.now_s - 1)}
    assert posted(ask, again)["answers"][0]["changed"] is True
    assert slowdowns(service) == [1.4042553191489362]


SECOND = {**FIRING, "startsAt": moment(NOW_S - 30), "annotations": {"slowdown": "1.7"}}
SECOND_OVER = {**SECOND, "status": "resolved", "endsAt": moment(NOW_S - 10)}
FIRST_OVER = {**RESOLVED, "endsAt": moment(NOW_S - 40)}


@pytest.mark.parametrize("ahead_h", [0, -5])
def test_in_whatever_order_deliveries_come_the_last_state_of_an_alert_counts(
    tmp_path: Path, ahead_h: int
):
    """Prometheus' clock may be hours behind; both of two Alertmanagers deliver."""
    with served(tmp_path / "service.sqlite") as (service, _, ask):
        for said, left in (
            ((FIRING, FIRST_OVER, SECOND), [1.7]),
            ((FIRING, FIRST_OVER, SECOND, SECOND_OVER), []),
        ):
            for number, order in enumerate(permutations(said)):
                name = f"job-{len(said)}-{number}"
                service.register(job(name), frontier_file())
                for each in (*order, *order[::-1]):
                    posted(ask, shifted(each, 3600.0 * ahead_h))
                assert slowdowns(service, name) == left, order
                service.end(name).result()


def shifted(alert: dict[str, Any], by_s: float) -> dict[str, Any]:
    """As a Prometheus says it whose clock is so much ahead."""
    times = {
        name: alert[name] for name in ("startsAt", "endsAt") if not alert[name].startswith("0001")
    }
    parsed = {
        name: datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        for name, text in times.items()
    }
    return {**alert, **{name: moment(at_s + by_s) for name, at_s in parsed.items()}}


def test_a_clock_that_was_ahead_and_is_set_right_does_not_keep_its_alerts_from_counting(running):
    service, clock, ask = running
    posted(ask, shifted(RESOLVED, 7200), shifted(FIRING, 7200))  # in that order; it stays resolved
    assert slowdowns(service) == []
    clock.now_s += 600
    posted(ask, {**FIRING, "startsAt": moment(clock.now_s - 5)})
    assert slowdowns(service) == [1.4042553191489362]


def test_an_old_alert_that_was_resolved_long_ago_by_a_slow_clock_does_not_come_back(running):
    service, clock, ask = running
    behind = (shifted(RESOLVED, -36_000), shifted(FIRING, -36_000))
    for each in behind:
        posted(ask, each)
        clock.now_s += 1800
    service.tick()
    posted(ask, behind[1])
    assert slowdowns(service) == []


def test_what_is_no_group_of_alerts_is_refused_and_a_large_one_is_taken(tmp_path: Path):
    tokens = read_tokens(
        None, {TOKENS_VARIABLE: "0123456789abcdef report prometheus\nfedcba9876543210 read eve"}
    )

    async def conversation(service: Service) -> None:
        async with opened(service, Access(tokens), Limits(alerts_bytes=2**20)) as client:

            async def post(token: str, content: Any) -> int:
                headers = {"Authorization": f"Bearer {token}"}
                return (await client.post("/v1/alerts", json=content, headers=headers)).status_code

            assert [
                await post("0123456789abcdef", each)
                for each in ([], {}, {"alerts": {}}, {"alerts": None})
            ] == [422] * 4
            assert await post("fedcba9876543210", body(FIRING)) == 403
            many = [
                {**FIRING, "fingerprint": str(number)} for number in range(400)
            ]  # more than other bodies may have
            assert await post("0123456789abcdef", body(*many)) == 200
            assert await post("0123456789abcdef", body(*many * 9)) == 413
            assert len(service.reports("gpt")) == 400

    with service_at(tmp_path / "service.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        asyncio.run(conversation(service))


def test_the_rule_and_the_configuration_that_are_shown_fit_together():
    rules, configuration = (
        yaml.safe_load(block.text)
        for block in blocks(ROOT / "docs" / "api.md")
        if block.title in ("planner-rules.yaml", "alertmanager.yaml")
    )
    ((rule,),) = (group["rules"] for group in rules["groups"])
    assert set(FIRING["annotations"]) == set(rule["annotations"])
    (receiver,) = configuration["receivers"]
    assert receiver["webhook_configs"][0]["url"].endswith("/v1/alerts")
    assert configuration["route"]["receiver"] == receiver["name"]


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ("node1.cluster.example", "node1"),
        ("node1", "node1.cluster.example"),
        ("node1.cluster", "node1.cluster.example"),
        ("10.1.2.3", "10.1.2.3"),
    ],
)
@pytest.mark.parametrize("by", ["alert", "report"])
def test_a_node_is_known_with_its_domain_and_without(running, known: str, said: str, by: str):
    service, _, ask = running
    places = (Place(0, 1, (0,), known), Place(1, 2, (0,), "node10"), Place(2, 0, (0,), "10.1"))
    service.register(replace(job("named"), places=places), frontier_file())
    if by == "alert":
        posted(ask, alert({"node": said}, {"slowdown": "1.5"}))
    else:
        service.report("named", report("r", scope=Scope("node", said), slowdown=1.5)).result()
    planned(service)
    slow = {
        place: each.slow_stages for place, each in enumerate(targets(service)) if each.slow_stages
    }
    assert slow == {1: {0: 1.5}}


def targets(service: Service) -> Any:
    return service.status("named").decision.each


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(fixed, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(sorted(FIRING)), JUNK), max_size=3), JUNK)
def test_whatever_an_alert_holds_it_is_a_report_or_a_problem(
    changes: list[tuple[str, Any]], junk: Any
):
    changed = copy.deepcopy(FIRING) | dict(changes)
    for found in (read_alert(each, NOW_S) for each in (changed, junk)):
        if isinstance(found, str):
            assert found
        else:
            assert re.fullmatch(r"[!-.0-~]{1,256}", found.key)
            assert found.observed_s <= NOW_S


def test_alerts_survive_the_service(tmp_path: Path):
    with TemporaryDirectory() as folder:
        place = Path(folder) / "service.sqlite"
        with served(place) as (service, _, ask):
            posted(ask, FIRING)
            planned(service)
            before = service.status("gpt")
        with service_at(place, Clock()) as service:
            assert service.status("gpt") == before
