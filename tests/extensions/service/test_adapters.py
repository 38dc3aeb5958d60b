"""What the runtime and other tools detect becomes reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from command_options import ROOT
from documents import blocks
from http_stand_in import stand_in
from resiliency_report import Report
from service_answers import EFFECT

from perseus_planner.extensions.service.agent.outbox import TTL_S, Detection, Detections
from perseus_planner.extensions.service.client import Client
from perseus_planner.extensions.service.models import ReportRequest, Scope, from_json
from perseus_planner.runs.verdict import StragglerDetection


def rank(source: str, number: int, **fields: Any) -> ReportRequest:
    return ReportRequest(source, Scope("rank", str(number)), cause="compute", **fields)


def test_the_runtimes_own_finding_is_about_its_rank():
    for found, slowdown in ((1.2, 1.2), (1.0, 1.0), (0.9, 1.0)):
        detections = Detections(lambda: 7.0)
        detections.add(Detection(5, StragglerDetection(found, "throttled: 80 % of the time")))
        (report,) = detections.due()
        assert replace(report, key=None) == rank(
            "perseus-planner runtime, rank 5", 5, slowdown=slowdown, ttl_s=TTL_S, observed_s=7.0
        )


def test_the_documented_lines_report_the_slow_gpus_of_nvidias_resiliency_extension():
    page = ROOT / "docs" / "integrations" / "resiliency.md"
    (block,) = (block for block in blocks(page) if "def report_slow_gpus" in block.text)
    names: dict[str, Any] = {}
    exec(block.text, names)
    report = Report({0: 1.0, 1: 0.52, 2: 0.96, 3: math.nan, 4: 1.0000001})
    with stand_in(lambda *_: (202, EFFECT)) as service, Client(service.address) as client:
        names["report_slow_gpus"](client, "gpt3", report, ttl_s=60.0)
        (sent,) = service.asked
    assert sent.path == "/v1/jobs/gpt3/reports"
    expected = rank("nvidia-resiliency-ext", 1, score=0.52, ttl_s=60.0)
    assert from_json(ReportRequest, json.dumps(sent.body)) == expected
