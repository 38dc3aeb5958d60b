"""What has happened to a job: told in words, kept over restarts, and never more than so much."""

from __future__ import annotations

import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_options import ROOT
from services import NOW_S, Clock, frontier_file, job, planned, report, service_at
from waiting import LONG_S

pytest.importorskip("fastapi")
pytest.importorskip("fastapi")
parser = pytest.importorskip("prometheus_client.parser")

from perseus_planner.extensions.service.events import EVENTS, with_events  # noqa: E402
from perseus_planner.extensions.service.metrics import Metrics  # noqa: E402
from perseus_planner.extensions.service.models import Counters, PowerStep  # noqa: E402
from perseus_planner.extensions.service.service import Service  # noqa: E402
from perseus_planner.extensions.service.tally import POINTS, Tally, add_counters, with_point  # noqa: E402


def texts(service: Service) -> list[str]:
    return [event.text for event in service.history("gpt").events]


def tally_at(at_s: float, before: Tally | None = None) -> Tally:
    number = 1 if before is None else before.iterations + 1
    sent = Counters(
        run="run",
        iterations=number,
        windows=number,
        time_s=2.0 * number,
        gpu_s=2.0 * number,
        metered_s=2.0 * number,
        energy_j=900.0 * number,
        judged_j=900.0 * number,
        lowered=number,
        saved_j=100.0 * number,
        energy_is="measured",
    )
    tally = add_counters(before, sent, at_s)
    assert tally is not None
    return tally


def test_what_happens_to_a_job_is_told_in_words_and_outlives_the_service(tmp_path: Path):
    clock, place = Clock(), tmp_path / "service.sqlite"
    with service_at(place, clock) as service:
        service.register(job(), frontier_file())
        calm_s = service.pipelines("gpt")[1][0].target_s
        clock.now_s += 60.0
        service.report("gpt", report("k", pipeline=1, slowdown=1.15, source="dcgm")).result()
        planned(service)
        service.taken("gpt", 2, 1200).result()
        clock.now_s += 60.0
        service.clear("gpt", "k").result()
        planned(service)
        service.set_deadline("gpt", 1.1 * calm_s).result()
        service.set_power("gpt", 1e6).result()
        registered, slow, taken, clear, deadline, power = texts(service)
    assert registered == "registered with 3 pipelines of 2 GPUs"
    assert slow == f"pipeline 1 slow 1.15x (dcgm), 2 others aim for {1.15 * calm_s:.4g} s"
    assert taken == "version 2 of the plans runs from iteration 1,200"
    assert clear.startswith("pipeline 1 not slow any more")
    assert deadline.startswith(f"deadline set to {1.1 * calm_s:.4g} s")
    assert power == "power budget 1 MW"
    with service_at(place, clock) as service:
        events = service.history("gpt").events
        assert [event.text for event in events][:3] == [registered, slow, taken]
        assert [event.at_s for event in events][:2] == [NOW_S, NOW_S + 60.0]
        assert service.status("gpt").gpus == 6


def test_an_event_tells_what_plans_are_to_be_for_and_why_and_not_that_anything_runs(
    tmp_path: Path,
):
    held = threading.Event()
    held.set()

    def run(function: Any, *arguments: Any) -> Any:
        assert held.wait(LONG_S)
        return function(*arguments)

    with service_at(tmp_path / "s.sqlite", Clock(), run=run) as service:
        service.register(job(), frontier_file())
        held.clear()
        service.set_power(None, 0.85 * service.status("gpt").expected.power_w).result()
        target_s = service.status("gpt").decision.straggler_time_s
        assert texts(service)[-1] == (
            f"pipelines 0, 1, 2 aim for {target_s:.4g} s, to keep the power budget of all jobs"
        )
        held.set()


def test_a_job_was_registered_when_it_is_said_to_run_since(tmp_path: Path):
    """Its first plans take seconds."""
    clock = Clock()

    def run(function: Any, *arguments: Any) -> Any:
        clock.now_s += 2.0
        return function(*arguments)

    with service_at(tmp_path / "s.sqlite", clock, run=run) as service:
        service.register(job(), frontier_file())
        (registered,) = service.history("gpt").events
        assert registered.at_s == service.status("gpt").job.since_s == NOW_S


def test_what_has_not_changed_is_no_event(tmp_path: Path):
    with service_at(tmp_path / "s.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        service.register(job(), frontier_file())
        service.set_deadline("gpt", None).result()
        service.tick()
        state = service._writer.jobs["gpt"]
    assert len(state.events) == 1
    assert with_events(state, state, NOW_S) is state


def test_a_report_that_says_what_was_said_is_no_event(tmp_path: Path):
    """Probes say again and again that a pipeline is slow: that left no room for anything else."""
    with service_at(tmp_path / "s.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        for key, slowdown in (("a", 1.2), ("b", 1.2), ("c", 1.3), ("d", 1.3)):
            service.report(
                "gpt", report(key, pipeline=1, slowdown=slowdown, source="dcgm")
            ).result()
            planned(service)
        assert service.status("gpt").decision.stragglers == {1: "d"}
        _, first, second = texts(service)
    assert first.startswith("pipeline 1 slow 1.2x (dcgm)")
    assert second.startswith("pipeline 1 slow 1.3x (dcgm)")


def test_events_are_bounded(tmp_path: Path):
    with service_at(tmp_path / "s.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        for number in range(EVENTS + 5):
            service.set_power("gpt", 1e6 + 1e4 * number).result()
        found = texts(service)
    assert len(found) == EVENTS
    assert found[-1] == f"power budget {(1e6 + 1e4 * (EVENTS + 4)) / 1e6:.4g} MW"


@pytest.mark.parametrize("count", [1, 2, POINTS, POINTS + 1, 1000, 5000])
def test_points_are_bounded_and_cover_all_of_the_job(count: int):
    points: Any = ()
    tally = tally_at(NOW_S)
    for number in range(count):
        tally = tally_at(NOW_S + 5.0 * number, tally)
        points = with_point(points, tally)
    times_s = [point.at_s - NOW_S for point in points]
    assert min(count, POINTS // 2) <= len(points) <= POINTS
    assert (times_s[0], times_s[-1]) == (0.0, 5.0 * (count - 1))
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert all(gap_s > 0.0 for gap_s in gaps_s)
    assert max(gaps_s, default=0.0) <= 4 * max(5.0, times_s[-1] / POINTS)


def test_telemetry_leaves_points(tmp_path: Path):
    clock, place = Clock(), tmp_path / "service.sqlite"
    with service_at(place, clock) as service:
        service.register(job(), frontier_file())
        assert service.history("gpt").points == ()
        for number in (1, 2):
            clock.now_s += 10.0
            sent = Counters(run="run", iterations=number, time_s=2.0 * number, waiting=(0.25, 1.0))
            service.telemetry("gpt", sent).result()
        (first, second) = service.history("gpt").points
    assert (first.at_s, second.at_s) == (NOW_S + 10.0, NOW_S + 20.0)
    assert (second.iteration_s, second.power_w, second.saved_j) == (2.0, None, None)
    with service_at(place, clock) as service:
        assert service.history("gpt").points == (first, second)
        assert service.history("gpt").waiting == (0.25, 1.0)


def test_every_metric_of_the_grafana_dashboard_is_exported(tmp_path: Path):
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    with service_at(tmp_path / "s.sqlite", Clock()) as service:
        service.register(job(), frontier_file())
        service.taken("gpt", 1, 0).result()
        sent = Counters(
            run="run",
            iterations=1,
            time_s=2.0,
            gpu_s=2.0,
            metered_s=2.0,
            energy_j=900.0,
            judged_j=900.0,
            energy_is="measured",
            set_p50_s=0.01,
            set_p99_s=0.02,
        )
        service.telemetry("gpt", sent).result()
        service.set_power("gpt", 1e6).result()
        service.set_power(None, 1e7).result()
        text = Metrics(service, lambda: 0, lambda: None).text().decode()
    families = list(parser.text_string_to_metric_families(text))
    exported = {sample.name for family in families for sample in family.samples}
    exported |= {
        f"{family.name}_{end}" for family in families for end in ("total", "bucket")
    }  # no request yet
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    named = {name for query in queries for name in re.findall(r"planner_\w+", query)}
    assert len(named) > 15
    assert named - exported == set()
    assert all(query.count("(") == query.count(")") for query in queries)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    covered = [
        (column, row)
        for x, y, w, h in places
        for column in range(x, x + w)
        for row in range(y, y + h)
    ]
    assert len(covered) == len(set(covered))  # no panel lies on another
    assert max(column for column, _ in covered) < 24


def test_the_budgets_of_a_job_are_kept_with_the_moments_when_they_were_set(tmp_path: Path):
    clock = Clock()
    with service_at(tmp_path / "s.sqlite", clock) as service:
        service.register(job(), frontier_file())
        assert service.history("gpt").budgets == ()
        steps = []
        for power_w in (5000.0, 6000.0, None):
            clock.now_s += 10.0
            service.set_power("gpt", power_w).result()
            steps.append(PowerStep(clock.now_s, power_w))
        service.set_power("gpt", None).result()  # which changes nothing
        assert service.history("gpt").budgets == tuple(steps)
    with service_at(tmp_path / "s.sqlite", clock) as service:
        assert service.history("gpt").budgets == tuple(steps)
