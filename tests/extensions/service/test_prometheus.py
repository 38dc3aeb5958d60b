"""A real Prometheus scrapes a real service as `docs/operating.md` says, and answers the queries of
the Grafana dashboard for each job; the documented rules are ones that it takes.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_options import ROOT
from documents import blocks
from services import frontier_file, job, report, service_at, serving
from waiting import LONG_S, eventually

from perseus_planner.extensions.service.access import TOKENS_VARIABLE, read_tokens
from perseus_planner.extensions.service.models import Counters
from perseus_planner.extensions.service.serve import Address

httpx = pytest.importorskip("httpx")

TOKEN = "0123456789abcdef"


@pytest.fixture
def promtool() -> Callable[..., str]:
    """Runs promtool, and returns what it says."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")

    def run(*arguments: object, text: str | None = None) -> str:
        command = ["promtool", *map(str, arguments)]
        ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LONG_S)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    return run


def documented(page: str, title: str) -> Any:
    """The YAML block of that title on a page."""
    (block,) = (each for each in blocks(ROOT / "docs" / page) if each.title == title)
    return yaml.safe_load(block.text)


def counters(iterations: int) -> Counters:
    return Counters(
        run="run",
        iterations=iterations,
        time_s=2.0 * iterations,
        windows=iterations,
        gpu_s=2.0 * iterations,
        metered_s=2.0 * iterations,
        energy_j=900.0 * iterations,
        judged_j=900.0 * iterations,
        lowered=iterations,
        saved_j=100.0 * iterations,
        energy_is="measured",
        set_p50_s=0.01,
        set_p99_s=0.02,
        changes_late=iterations,
    )


def test_prometheus_answers_each_query_of_the_dashboard_for_each_job(
    tmp_path: Path, promtool: Callable[..., str]
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token = tmp_path / "token"
    token.write_text(TOKEN)
    configuration = documented("operating.md", "prometheus.yaml")
    (scraped,) = configuration["scrape_configs"]
    scraped["authorization"]["credentials_file"] = str(token)
    configuration["global"] = {"scrape_interval": "200ms"}
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    tokens = read_tokens(None, {TOKENS_VARIABLE: f"{TOKEN} read prometheus"})
    with (
        service_at(tmp_path / "service.sqlite") as service,
        serving(service, Address(port=0), tokens) as url,
    ):
        for name in ("bloom", "gpt"):
            service.register(job(name), frontier_file())
            now_s = service.now_s()
            service.report(name, report("r", observed_s=now_s, begins_s=now_s)).result()
            service.taken(name, 1, 0).result()
        (static,) = scraped["static_configs"]
        static["targets"] = [url.removeprefix("http://")]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        promtool("check", "config", tmp_path / "prometheus.yaml")
        command = [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
        with (
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
            httpx.Client(base_url=f"http://{address}", timeout=LONG_S) as client,
        ):

            def answer(path: str, **parameters: str) -> Any:
                assert process.poll() is None, process.stderr.read()
                try:
                    said = client.get(f"/api/v1/{path}", params=parameters)
                except httpx.TransportError:  # it starts
                    return []
                if said.status_code == 503:  # likewise
                    return []
                assert said.status_code == 200, said.text
                found = said.json()["data"]
                return found["result"] if path == "query" else found

            def count(query: str) -> int:
                return sum(int(each["value"][1]) for each in answer("query", query=query))

            try:
                counted = "planner_job_iterations_total"
                for iterations in (1, 20):  # an increase needs two scrapes
                    for name in ("bloom", "gpt"):
                        service.telemetry(name, counters(iterations)).result()
                    eventually(lambda most=2 * iterations: count(counted) == most)
                for query in queries:
                    expression = query.replace("$job", "bloom|gpt")
                    found = eventually(lambda text=expression: answer("query", query=text))
                    if "training_job" in query:
                        assert not any(each["value"][1] == "NaN" for each in found), expression
                    if "training_job" in query and not query.startswith("sum("):
                        jobs = {each["metric"]["training_job"] for each in found}
                        assert jobs == {"bloom", "gpt"}, expression
                named = answer(
                    "label/training_job/values", **{"match[]": "planner_job_version"}
                )  # the dashboard's list of jobs
                assert named == ["bloom", "gpt"]
            finally:
                process.terminate()
        text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    assert promtool("check", "metrics", text=text) == ""


EXPORTED = {
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_MEM_CLOCK",
    "DCGM_FI_DEV_MEMORY_TEMP",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
}
"""What dcgm-exporter 4.5.3-4.8.2 exports of clocks, heat and power by default
(etc/default-counters.csv); none of its other fields is one of `FIELDS`.
"""

FIELDS = {
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 112,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": 1422,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": 1423,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": 1424,
}
"""What DCGM 4.6.0 calls its fields of clocks event reasons (dcgmlib/dcgm_fields.h). Up to 3.3.9,
field 112 is called DCGM_FI_DEV_CLOCK_THROTTLE_REASONS.
"""

PROMETHEUS_TYPES = {"gauge", "counter", "histogram", "summary", "label"}
"""The types that dcgm-exporter takes in the second column of its file."""


def test_the_documented_rule_needs_what_the_exporter_has_and_the_line_that_is_to_be_added():
    (added,) = (each for each in blocks(ROOT / "docs/api.md") if each.title == "dcgm-counters.csv")
    lines = [[cell.strip() for cell in line.split(",")] for line in added.text.splitlines()]
    for name, kind, _ in lines:  # the exporter refuses a line of another number of cells
        assert name in FIELDS
        assert kind in PROMETHEUS_TYPES
    rules = yaml.safe_dump(documented("api.md", "planner-rules.yaml"))
    needed = set(re.findall(r"DCGM_\w+", rules))
    assert needed <= EXPORTED | {name for name, _, _ in lines}
    assert needed - EXPORTED == {name for name, _, _ in lines}


def test_the_documented_rule_fires_for_a_gpu_that_is_throttled_and_not_for_a_planned_one(
    tmp_path: Path, promtool: Callable[..., str]
):
    """Series as DCGM's exporter has them; the clock falls from 1980 MHz, reason 32 is heat."""
    rules = documented("api.md", "planner-rules.yaml")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))

    def series(name: str, gpu: str, value: int) -> dict[str, str]:
        labels = f'UUID="{gpu}",Hostname="node1",instance="node1:9400",job="dcgm"'
        return {"series": f"DCGM_FI_DEV_{name}{{{labels}}}", "values": f"{value}x20"}

    gpus = {
        "GPU-hot": (1320, 32),
        "GPU-planned": (1320, 2),
        "GPU-at-its-board-limit": (1320, 0x200),
        "GPU-braked": (990, 128 + 1),
    }
    ((rule,),) = (group["rules"] for group in rules["groups"])
    fired = [
        {
            "exp_labels": {
                "UUID": gpu,
                "Hostname": "node1",
                "instance": "node1:9400",
                "job": "dcgm",
            },
            "exp_annotations": {"slowdown": slowdown, "cause": "compute"},
        }
        for gpu, slowdown in (("GPU-hot", "1.5"), ("GPU-braked", "2"))
    ]
    test = {
        "interval": "15s",
        "input_series": [
            series(name, gpu, value)
            for gpu, values in gpus.items()
            for name, value in zip(("SM_CLOCK", "CLOCKS_EVENT_REASONS"), values, strict=True)
        ],
        "alert_rule_test": [
            {"eval_time": "4m", "alertname": rule["alert"], "exp_alerts": fired},
            {"eval_time": "30s", "alertname": rule["alert"], "exp_alerts": []},
        ],
    }
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]})
    )
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yaml")
