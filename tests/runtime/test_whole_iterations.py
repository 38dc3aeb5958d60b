"""Real data-parallel ranks train at one clock for whole iterations."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import done
from launching import results_of
from serving import Serving
from strategies import smooth_profile

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("fastapi")

from perseus_planner import Profile, Run, solve
from perseus_planner.base.errors import PlanError, UsageError
from perseus_planner.extensions.service.client import Client
from perseus_planner.gpu import open_gpu
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime import Options, planner_runtime
from perseus_planner.runtime.attachment import control_of, power_limits


@pytest.mark.needs("autopilot")
def test_data_parallel_ranks_find_a_lower_clock_together_and_compute_the_same(tmp_path: Path):
    server, run = Serving(tmp_path), tmp_path / "run"
    server.start()
    try:
        with Client(server.address) as client, ThreadPoolExecutor(1) as pool:
            training = pool.submit(
                results_of, "whole_programs:data_parallel", 2, tmp_path, server.address
            )
            try:
                while not training.done() and not any(each.telemetry for each in client.jobs()):
                    time.sleep(0.1)  # between two looks
                status = client.status("ddp")
            finally:
                (tmp_path / "stop").touch()
            everyone = training.result()
    finally:
        server.end(signal.SIGTERM)
    assert (status.job.pipelines, status.job.ranks) == (2, 2)
    assert status.autopilot is not None
    for rank, each in enumerate(everyone):
        assert each | {"iterations": 0, "warnings": []} == {
            **{"equal": True, "after": None, "pipeline": rank, "recorded": True, "state": True},
            **{"iterations": 0, "warnings": []},
        }
    warned = [text for each in everyone for text in each["warnings"]]
    assert any("the clock controller" in text for text in warned)
    assert all("the clock controller" in text or "set again" in text for text in warned)
    recorded = Run.load(run)
    assert [len(rank.iterations) for rank in recorded.ranks] == [everyone[0]["iterations"]] * 2
    learnt = Profile.load(run / "autopilot.yaml")
    assert set(learnt.measurements) == {Key(0, "F")}
    shown = done(f"show {run}")
    assert "Run of 2 ranks, 2 pipelines, without a plan." in shown
    assert json.loads(done(f"show {run} --json"))["decider"]["reference_s"] > 0.0
    done(f"report {run / 'autopilot.yaml'} -o {tmp_path / 'report.html'}")


def test_a_gpu_whose_clocks_cannot_be_locked_gets_power_limits():
    text = "simulated:a100-sxm?fault=not-supported:clocks"
    with open_gpu(text) as gpu:
        (smallest_w, largest_w), limits = gpu.power_limits_w, power_limits(gpu)
    assert limits[0] == int(largest_w)
    assert smallest_w <= limits[-1] < smallest_w / 0.95 + 1
    assert [control_of(each) for each in (text, "simulated:a100-sxm")] == ["power-limit", "clock"]


@pytest.mark.needs("autopilot")
def test_iterations_that_the_caller_shows_run_by_a_plan_and_are_recorded_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    rows = (Measurement(1410, 0.01, 3.0), Measurement(1200, 0.011, 2.5))
    iteration = {"schedule": "whole", "microbatches": 1}
    profile = Profile({(0, "F"): rows}, 0.0, origin="simulated", iteration=iteration)
    plan, run = solve(profile, "whole", microbatches=1).plan_for(0.011), tmp_path / "run"
    with planner_runtime(gpu="simulated:a100-sxm", plan=plan, record=run) as runtime:
        with pytest.raises(ArithmeticError), runtime.iteration():
            raise ArithmeticError
        for _ in range(6):
            runtime.end_iteration()
            time.sleep(0.01)  # an iteration
    (rank,) = Run.load(run).ranks
    assert [row.is_as_planned for row in rank.iterations] == [False, *[True] * 5]
    done(f"report {run} -o {tmp_path / 'report.html'}")
    assert "0F0" in (tmp_path / "report.html").read_text()
    other = solve(smooth_profile(1), "1f1b", microbatches=2).plan_for_least_energy()
    said = r"training without a pipeline runs on rank 0 of the pipeline: computation 2 is missing"
    with (
        pytest.raises(PlanError, match=said),
        planner_runtime(gpu="simulated:a100-sxm", plan=other),
    ):
        pass


def test_options_are_one_value_or_keywords_and_keywords_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    rows = (Measurement(1410, 0.01, 3.0), Measurement(1200, 0.011, 2.5))
    iteration = {"schedule": "whole", "microbatches": 1}
    profile = Profile({(0, "F"): rows}, 0.0, origin="simulated", iteration=iteration)
    plan = solve(profile, "whole", microbatches=1).plan_for(0.011)
    given = Options(plan=plan, gpu="no-such-gpu", record=tmp_path / "run")
    with planner_runtime(options=given, gpu="simulated:a100-sxm") as runtime:
        runtime.end_iteration()
        runtime.end_iteration()
    (rank,) = Run.load(tmp_path / "run").ranks
    assert len(rank.iterations) == 1
    with (
        pytest.raises(TypeError, match="slodown"),
        planner_runtime(slodown=1.1),  # type: ignore[call-arg]
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"slowdown: 0\.9 is not a slowdown"),
        planner_runtime(options=Options(slowdown=0.9)),
    ):
        pass
