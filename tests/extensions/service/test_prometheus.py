"""A real Prometheus scrapes a real service as `docs/operating.md` says, and answers the queries of
the Grafana dashboard for each job; the documented rules are ones that it takes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_options import ROOT
from documents import blocks
from launching import free_port
from services import NOW_S, Clock, at_once, frontier_file, job, report, service_at, serving
from waiting import LONG_S, eventually

from perseus_planner.extensions.service.access import TOKENS_VARIABLE, read_tokens
from perseus_planner.extensions.service.metrics import Metrics
from perseus_planner.extensions.service.models import Counters
from perseus_planner.extensions.service.serve import Address
from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage

parser = pytest.importorskip("prometheus_client.parser")
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
    address = f"127.0.0.1:{free_port()}"
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
            service.set_power(name, 1e6).result()
        service.set_power(None, 1e7).result()
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
        headers = {"Authorization": f"Bearer {TOKEN}"}
        text = httpx.get(f"{url}/metrics", headers=headers, timeout=LONG_S).text
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


ALERTS = ROOT / "deploy" / "alerts.yaml"


def recorded(service: Service, problem: str | None = None) -> dict[str, float]:
    """The series of a service, as Prometheus scrapes them under the name of our example."""
    metrics = Metrics(service, lambda: 0, lambda: problem)
    found = {}
    for family in parser.text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = {"job": "planner", "instance": "planner:8400", **sample.labels}
            inside = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            found[f"{sample.name}{{{inside}}}"] = sample.value
    return found


def test_each_alert_fires_on_recorded_series_and_none_on_those_of_a_service_that_is_well(
    tmp_path: Path, promtool: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    with (
        Storage(tmp_path / "service.sqlite") as storage,
        Service(storage, now_s=clock, run=at_once, lease_s=180.0) as service,
    ):
        for name in ("well", "late", "off", "over", "silent"):
            service.register(job(name), frontier_file())
        well = service.status("well").expected
        service.set_power(None, 6.0 * well.baseline_power_w).result()

        def send(name: str, power: float = 0.5, **fields: Any) -> None:
            time_s = clock.now_s - NOW_S
            used_j = power * time_s * well.baseline_power_w
            sums = {"time_s": time_s, "gpu_s": time_s, "metered_s": time_s, "energy_j": used_j}
            sent = Counters(run="a", iterations=int(time_s), energy_is="measured", **sums, **fields)
            service.telemetry(name, sent).result()

        clock.now_s += 61.0
        for name in ("well", "late", "off", "over", "silent"):
            send(name)
        calm = [recorded(service)] * 2
        # There before the first alert, so that an increase sees that one too.
        received = {name: value for name, value in calm[0].items() if "planner_alerts" in name}
        assert [*received.values()] == [0.0, 0.0]
        assert len([name for name in received if 'outcome="ignored"' in name]) == 1
        slower = {"verdict": "6 % slower than planned: all wait.", "time_over_planned": 1.06}
        service.set_power("over", 0.99 * well.baseline_power_w).result()
        for _ in range(2):
            clock.now_s += 100.0
            send("well")
            send("late", **slower)
            send("off", unlike_plan="another machine.")
            send("over", power=9.0)
            service.tick()
        before = recorded(service)
        with monkeypatch.context() as broken:
            broken.setattr(storage, "commit", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                service.set_deadline("well", 9.0).result()
        ill = [before, recorded(service, "the disk is full")]
        assert {each.job.name: each.state.name for each in service.jobs()} == {
            "well": "fine",
            "late": "late",
            "off": "off plan",
            "over": "over budget",
            "silent": "not heard of",
        }
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    of_jobs = {"Late": "late", "OffPlan": "off", "OverBudget": "over", "Silent": "silent"}
    jobs = {f"PlannerJob{end}": name for end, name in of_jobs.items()}
    made = {  # what cannot be recorded here
        "PlannerDatabaseSlow": {'planner_database_lag_seconds{job="planner"}': 3.0},
        "PlannerManyFiles": {
            'process_open_fds{job="planner"}': 900.0,
            'process_max_fds{job="planner"}': 1024.0,
        },
    }
    by_series = {"PlannerNotReady", "PlannerCommitsFail", "PlannerOverBudget", *jobs}
    growing = {'planner_alerts_total{job="planner",outcome="ignored"}': 1.0}
    scenes: list[tuple[list[dict[str, float]], set[str]]] = [
        (calm, set()),
        (ill, by_series),
        ([{}, {}], {"PlannerAway"}),
        ([{**calm[0], next(iter(growing)): 0.0}, {**calm[1], **growing}], {"PlannerAlertsIgnored"}),
        *(([{**calm[0], **series}] * 2, {name}) for name, series in made.items()),
    ]
    assert set.union(*(names for _, names in scenes)) == {rule["alert"] for rule in rules}
    tests = []
    for (first, second), names in scenes:
        series = [
            {"series": name, "values": f"{first.get(name, 0.0)}x7 {value}x30"}
            for name, value in second.items()
        ]
        samples = []
        for name in sorted(names):
            labels = {"alertname": name} | ({"training_job": jobs[name]} if name in jobs else {})
            inside = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
            samples.append({"labels": f"{{{inside}}}", "value": 1})
        query = 'sum by (alertname, training_job) (ALERTS{alertstate="firing"})'
        expected = [{"expr": query, "eval_time": "16m", "exp_samples": samples}]
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": expected})
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yaml")
    pages = (ROOT / "docs" / "alerts.md").read_text()
    for rule in rules:
        name = rule["alert"]
        assert f"\n## {name}\n" in pages
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/alerts.md#{name.lower()}")
