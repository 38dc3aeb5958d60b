"""What the service answers to each request: as JSON, and as the client reads it."""

from __future__ import annotations

import math
from typing import Any

from perseus_planner.extensions.service.models import Answer, Report, Scope

REPORT = {
    "key": "k1",
    "source": "ops",
    "scope": {"kind": "stage", "value": "2", "pipeline": 3},
    "slowdown": 1.2,
    "iteration_s": None,
    "observed_s": 10.0,
    "begins_s": 20.0,
    "begins_iteration": None,
    "expires_s": None,
    "cause": "compute",
}
EFFECT = {
    "job": "gpt3",
    "report": REPORT,
    "version": 7,
    "changed": True,
    "takes_effect": "next iteration",
    "expected_saving_w": 812.5,
    "reason": "pipeline 3 takes 1.2 times as long",
}
STATUS = {
    "job": {
        "name": "gpt3",
        "pipelines": 2,
        "frontier": "0" * 64,
        "ranks": 4,
        "deadline_s": None,
        "max_changes": None,
        "power_w": 5000.0,
        "since_s": 1.0,
        "on_time": None,
    },
    "decision": {
        "targets": [
            {"time_s": 1.2, "slow_stages": {}, "power_w": None},
            {"time_s": 1.0, "slow_stages": {"1": 1.5}, "power_w": 900.0},
        ],
        "of_pipeline": [0, 1],
        "straggler_time_s": 1.2,
        "stragglers": {"1": "k1"},
        "since_s": 5.0,
        "look_again_s": None,
        "reason": "pipeline 1 takes 1.2 times as long",
    },
    "version": 7,
    "promised": 8,
    "taken": {"version": 6, "iteration": 120, "at_s": 9.0},
    "reports": [REPORT],
    "expected_saving_w": 812.5,
    "expected": {"power_w": 900.0, "baseline_power_w": 1000.0, "origin": "simulated"},
    "telemetry": None,
}
KEPT = Report("k1", "ops", Scope("stage", "2", 3), 1.2, None, 10.0, 20.0, None, math.inf, "compute")
ANSWER = Answer(
    "gpt3", KEPT, 7, True, "next iteration", 812.5, "pipeline 3 takes 1.2 times as long"
)


def refused(status: int, message: str) -> tuple[int, Any]:
    return status, {"code": "a_code", "detail": message}


HAPPENED = [{"at_s": 1.0, "text": "1 pipeline aims for 18.03 s"}] * 10 + [
    {"at_s": 2.0, "text": "pipeline 1 is slow"}
]


def api(method: str, path: str, body: Any) -> tuple[int, Any]:
    """The addresses of the API, each with one answer."""
    path = path.partition("?")[0]
    if method == "DELETE" and path.startswith("/v1/jobs/gpt3/reports/"):
        return 200, {**EFFECT, "report": None}
    name, ended = (
        STATUS["job"]["name"],
        {"pipelines": 2, "since_s": 1.0, "ended_s": 9.0, "telemetry": None, "plans": []},
    )
    answers: dict[tuple[str, str], tuple[int, Any]] = {
        ("POST", "/v1/jobs"): (201, {"job": STATUS["job"], "version": 1}),
        ("GET", "/v1/jobs"): (200, {"jobs": [STATUS]}),
        ("GET", "/v1/jobs/gpt3"): (200, STATUS),
        ("GET", "/v1/jobs/gpt3/history"): (200, {"points": [], "events": HAPPENED}),
        ("GET", "/v1/totals"): (200, {"jobs": [{"name": name, **ended}]}),
        ("DELETE", "/v1/jobs/gpt3"): (204, None),
        ("POST", "/v1/jobs/gpt3/reports"): (202, EFFECT),
        ("GET", "/v1/jobs/gpt3/reports"): (200, {"reports": [REPORT]}),
        ("GET", "/v1/jobs/gpt3/plans"): (204, None),
        ("POST", "/v1/jobs/gpt3/taken"): (204, None),
        ("PUT", "/v1/jobs/gpt3/deadline"): (200, {**EFFECT, "report": None}),
        ("PUT", "/v1/jobs/gpt3/power"): (200, {"answers": [{**EFFECT, "report": None}]}),
        ("PUT", "/v1/power"): (200, {"answers": []}),
        ("GET", "/metrics"): (200, "planner_jobs 1\n"),
        ("GET", "/readyz"): (200, {"status": "ok", "version": "0"}),
    }  # fmt: skip
    return answers.get((method, path), refused(404, "there is no such job; see `planner status`"))
