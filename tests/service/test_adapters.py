"""What others say of slow ranks, as they say it, becomes reports; what they do not say does not."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from http_stand_in import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from resiliency_report import Report
from service_answers import EFFECT
from strategies import fixed

from perseus_planner.base.errors import PlannerError, ServiceAway, UsageError
from perseus_planner.runs.straggler import StragglerDetection
from perseus_planner.service.client import Client
from perseus_planner.service.model import Scope
from perseus_planner.service.schemas import ReportRequest
from perseus_planner.service.sources import (
    Feed,
    resiliency_reports,
    straggling_report,
)


def rank(source: str, number: int, **fields: Any) -> ReportRequest:
    return ReportRequest(source, Scope("rank", str(number)), cause="compute", **fields)


def test_the_runtimes_own_finding_is_about_its_rank():
    assert straggling_report(
        StragglerDetection(1.2, "throttled: sw-thermal 80 % of the time"), 5, key="k", ttl_s=9.0
    ) == rank("perseus-planner runtime, rank 5", 5, slowdown=1.2, key="k", ttl_s=9.0)
    assert straggling_report(StragglerDetection(1.0, "it has recovered"), 5).slowdown == 1.0


# NVIDIA's resiliency extension


def test_slow_gpus_of_a_resiliency_report_are_reported_by_their_score():
    report = Report({0: 1.0, 1: 0.52, 2: 0.99, 3: float("nan"), 4: 1.0000001}, {3: 0.8, 1: 0.9})
    source = "nvidia-resiliency-ext"
    expected = [rank(source, 1, score=0.52, ttl_s=60.0), rank(source, 3, score=0.8, ttl_s=60.0)]
    assert resiliency_reports(report, ttl_s=60.0) == expected
    as_json = json.loads(
        json.dumps(
            {"gpu_relative_perf_scores": {"1": 0.52}, "gpu_individual_perf_scores": {"3": 0.8}}
        )
    )
    assert resiliency_reports(as_json, ttl_s=60.0) == expected
    assert resiliency_reports(report, slow=2.0) == []


def test_a_gpu_that_was_slow_is_reported_once_more_when_it_is_not():
    report = Report({0: 1.0, 1: 0.98, 2: 0.9, 3: float("nan")})
    source = "nvidia-resiliency-ext"
    assert resiliency_reports(report, before={1, 2, 3}) == [
        rank(source, 1, slowdown=1.0),
        rank(source, 2, score=0.9),
    ]


@settings(fixed, max_examples=100)
@given(
    st.dictionaries(st.integers(0, 99), st.floats(0.0, 1.5) | st.just(math.nan)),
    st.dictionaries(st.integers(0, 99), st.floats(0.0, 1.0)),
    st.sets(st.integers(0, 99)),
    st.floats(1.0, 3.0),
)
def test_every_rank_whose_score_is_known_is_slow_or_recovered_or_not_of_interest(
    relative: dict[int, float], individual: dict[int, float], before: set[int], slow: float
):
    reports = {
        int(each.scope.value): each
        for each in resiliency_reports(Report(relative, individual), before=before, slow=slow)
    }
    for number in set(relative) | set(individual):
        known = relative.get(number, math.nan)
        score = known if known > 0.0 else individual.get(number, math.nan)
        if not score > 0.0:
            assert number not in reports
        elif score * slow < 1.0:
            assert reports[number].score == score
        else:
            assert (number in reports) == (number in before)
            assert number not in reports or reports[number].slowdown == 1.0


@pytest.mark.parametrize("report", [{"gpu_relative_perf_scores": [0.5]}, None, Report({0: "fast"})])  # type: ignore[dict-item]
def test_what_is_no_resiliency_report_is_refused(report: Any):
    with pytest.raises(UsageError, match="give the report of generate_report"):
        resiliency_reports(report)


def answers(*said: tuple[int, Any]) -> Any:
    """One after another, and then that it was taken."""
    left = list(said)
    return lambda *_: left.pop(0) if left else (202, EFFECT)


def test_a_callback_of_the_resiliency_extension_needs_two_lines():
    reports = [
        Report({0: 1.0, 1: 0.5}),
        Report({0: 1.0, 1: 0.5}),
        Report({0: 1.0, 1: 0.9}),
        Report({0: 1.0, 1: 0.99}),
    ]
    full = (503, {"code": "unavailable", "detail": "full"})
    with stand_in(answers(full)) as service, Client(service.address) as client:
        feed = Feed(client, "gpt3", resiliency_reports, ttl_s=60.0)
        for report in reports:
            with suppress(PlannerError):  # the first is not taken
                feed(report)
        said = [
            (each.path, each.body.get("score"), each.body.get("slowdown")) for each in service.asked
        ]
        path = "/v1/jobs/gpt3/reports"
        assert said == [(path, 0.5, None), (path, 0.5, None), (path, 0.9, None), (path, None, 1.0)]


def test_what_could_not_be_said_of_a_recovery_is_said_the_next_time():
    away = (503, {"code": "unavailable", "detail": "full"})
    with stand_in(answers((202, EFFECT), away)) as service, Client(service.address) as client:
        feed = Feed(client, "gpt3", resiliency_reports)
        feed(Report({1: 0.5}))
        with pytest.raises(ServiceAway):
            feed(Report({1: 1.0}))
        assert [each.version for each in feed(Report({1: 1.0}))] == [EFFECT["version"]]
        assert feed(Report({1: 1.0})) == []
        assert [each.body.get("slowdown") for each in service.asked] == [None, 1.0, 1.0]
