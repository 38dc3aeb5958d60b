"""What others say of slow ranks, as they say it, becomes reports; what they do not say does not."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from http_stand_in import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from service_answers import EFFECT
from strategies import fixed

from perseus_planner.base.errors import PlannerError, ServiceAway, UsageError
from perseus_planner.cli import main
from perseus_planner.runs.straggler import StragglerDetection
from perseus_planner.service.client import Client
from perseus_planner.service.model import Scope
from perseus_planner.service.schemas import ReportRequest
from perseus_planner.service.sources import (
    Feed,
    megatron_reports,
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


@dataclass(frozen=True)
class Report:
    """As nvidia-resiliency-ext's attribution/straggler/reporting.py has it."""

    gpu_relative_perf_scores: dict[int, float]
    gpu_individual_perf_scores: dict[int, float] = field(default_factory=dict)
    section_relative_perf_scores: dict[str, dict[int, float]] = field(default_factory=dict)
    section_individual_perf_scores: dict[str, dict[int, float]] = field(default_factory=dict)
    rank_to_node: dict[int, str] = field(default_factory=dict)
    gather_on_rank0: bool = True
    rank: int | None = None


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


# Megatron

LINE = (
    " [2026-05-04 12:00:10] | MnRtt/Rnk: 101.20ms/3 | MxRtt/Rnk: 121.61ms/7 | MnPwr/Rnk: "
    "301.51W/7 | MxPwr/Rnk: 402.22W/3 | MnTmp/Rnk: 44.00C/1 | MxTmp/Rnk: 83.00C/7 | MnUtl/Rnk: "
    "97.00%/7 | MxUtl/Rnk: 100.00%/0 | MnClk/Rnk: 1170.00MHz/7 | MxClk/Rnk: 1980.00MHz/0 | "
    "MnDRtt/Rnk: 0.34ms/2 | MxDRtt/Rnk: 1.10ms/5 | MnEtpt/Rnk: 205.00TF/7 | MxEtpt/Rnk: 246.00TF/3"
)
NOON_S = datetime(2026, 5, 4, 12, 0, 10).astimezone().timestamp()  # the log has its node's time


def test_the_slowest_rank_of_megatrons_line_is_reported_against_the_fastest():
    expected = rank("megatron", 7, score=205.0 / 246.0, observed_s=NOON_S, ttl_s=60.0)
    assert megatron_reports(LINE, ttl_s=60.0) == [expected]
    assert megatron_reports(f"INFO:megatron.core.utils:{LINE.strip()}\n", ttl_s=60.0) == [expected]
    assert megatron_reports(LINE, slow=1.3) == []


def test_ranks_that_were_slow_recover_when_a_line_shows_it():
    even = LINE.replace("205.00TF", "240.00TF")
    assert megatron_reports(even) == []
    assert megatron_reports(even, before={7, 2}) == [
        rank("megatron", number, slowdown=1.0, observed_s=NOON_S) for number in (2, 7)
    ]
    # Of a rank that the line does not name, nothing is known while another one is slow.
    assert [
        (each.scope.value, each.slowdown) for each in megatron_reports(LINE, before={2, 3})
    ] == [
        ("3", 1.0),
        ("7", None),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        " iteration 10/ 100 | elapsed time per iteration (ms): 540.1 |",
        LINE[:-10],
        LINE.replace("205.00", "0.00"),
        "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 205.00TF/7, 210.00TF/1,",
        LINE.replace("205.00", "inf"),
    ],
)
def test_other_lines_of_the_log_say_nothing(line: str):
    assert megatron_reports(line, before={1}) == []


def test_the_line_is_what_megatron_logs():
    found = find_spec("megatron")
    if found is None:
        pytest.skip("megatron-core is not installed")
    (folder,) = found.submodule_search_locations or ()
    source = (Path(folder) / "core" / "utils.py").read_text()  # to import it takes long
    for text in (
        "now = f\"[{datetime.now().strftime('%Y-%m-%d %H:%M:%S')}]\"",
        'f"{now} | "\n',
        'f"MnRtt/Rnk: {o_dt.min_elapsed} | "',
        'f"MnEtpt/Rnk: {min_flops:.2f}TF/{min_frank} | "',
        'f"MxEtpt/Rnk: {max_flops:.2f}TF/{max_frank}"',
    ):
        assert text in source


def test_the_command_follows_megatrons_log():
    log = "".join(
        f"{line}\n"
        for line in ("begin", LINE, LINE, LINE.replace("205.00TF", "240.00TF"), LINE[:40])
    )
    with stand_in(lambda *_: (202, EFFECT)) as service:
        command = [
            "straggler",
            "--job",
            "gpt3",
            "--megatron-log",
            "--ttl",
            "10m",
            "--service",
            service.address,
        ]
        result = CliRunner().invoke(main, command, input=log)
        assert (result.exit_code, result.stderr) == (0, "")
        said = [
            (each.path, each.body["scope"]["value"], each.body.get("slowdown"))
            for each in service.asked
        ]
        path = "/v1/jobs/gpt3/reports"
        assert said == [(path, "7", None), (path, "7", None), (path, "7", 1.0)]
        assert {each.body["ttl_s"] for each in service.asked} == {600.0}


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
    full = (503, {"error": {"code": "unavailable", "message": "full"}})
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
    away = (503, {"error": {"code": "unavailable", "message": "full"}})
    with stand_in(answers((202, EFFECT), away)) as service, Client(service.address) as client:
        feed = Feed(client, "gpt3", resiliency_reports)
        feed(Report({1: 0.5}))
        with pytest.raises(ServiceAway):
            feed(Report({1: 1.0}))
        assert [each.version for each in feed(Report({1: 1.0}))] == [EFFECT["version"]]
        assert feed(Report({1: 1.0})) == []
        assert [each.body.get("slowdown") for each in service.asked] == [None, 1.0, 1.0]
