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
from waiting import LONG_S

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("sqlalchemy")

from perseus_planner import Profile, Run
from perseus_planner.gpu import open_gpu
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.attachment import control_of, power_limits
from perseus_planner.service.client import Client


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
    assert set(learnt.measurements) == {(0, "F")}
    shown = done(f"show {run}")
    assert "Run of 2 ranks, 2 pipelines, without a plan." in shown
    assert json.loads(done(f"show {run} --json"))["autopilot"]["reference_s"] > 0.0
    done(f"report {run} -o {tmp_path / 'report.html'}")
    assert "autopilot" in (tmp_path / "report.html").read_text()


def test_a_gpu_whose_clocks_cannot_be_locked_gets_power_limits():
    text = "simulated:a100-sxm?fault=not-supported:clocks"
    with open_gpu(text) as gpu:
        (smallest_w, largest_w), limits = gpu.power_limits_w, power_limits(gpu)
    assert limits[0] == int(largest_w)
    assert smallest_w <= limits[-1] < smallest_w / 0.95 + 1
    assert [control_of(each) for each in (text, "simulated:a100-sxm")] == ["power-limit", "clock"]


def test_a_gpu_that_is_lost_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path))
    gpu = "emulated:a100-sxm/0?call=0&fault=lost@1s"
    with planner_runtime(gpu=gpu, state=None, dry_run=False) as runtime:
        deadline_s = time.monotonic() + LONG_S
        while runtime.problem is None and time.monotonic() < deadline_s:
            with runtime.iteration():
                time.sleep(0.001)  # an iteration
    assert "it fell off the bus" in str(runtime.problem)
    assert "training goes on at the GPU's default clocks" in caplog.text


def test_iterations_that_the_caller_shows_are_those_that_are_recorded(tmp_path: Path):
    with planner_runtime(gpu="simulated:a100-sxm", record=tmp_path, state=None) as runtime:
        with pytest.raises(ArithmeticError), runtime.iteration():
            raise ArithmeticError
        for _ in range(3):
            runtime.end_iteration()
    (rank,) = Run.load(tmp_path).ranks
    assert [row.iteration for row in rank.iterations] == [0, 1, 2]
