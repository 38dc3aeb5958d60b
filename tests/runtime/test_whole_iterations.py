"""Real data-parallel ranks train at one clock for whole iterations."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from launching import results_of
from waiting import LONG_S

pytest.importorskip("torch")

from perseus_planner.base.errors import UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.whole import search
from perseus_planner.runtime.whole.session import _settable

TOP_MHZ = 1410


def test_data_parallel_ranks_find_a_lower_clock_together_and_compute_the_same(tmp_path: Path):
    everyone = results_of("whole_programs:data_parallel", 2, tmp_path)
    for each in everyone:
        assert (each["equal"], each["after"], each["problem"], each["warnings"]) == (
            True,
            None,
            None,
            [],
        )
        assert each["reference_s"] > 0.0
        assert each["state"]
        assert min(filter(None, each["values"])) < TOP_MHZ
    # A value that ends soon may be seen on one rank alone, between two iterations of the other.
    low, high = sorted(len({*each["values"]}) for each in everyone)
    assert high - low <= 1
    differing = sum(
        one != other for one, other in zip(*(each["values"] for each in everyone), strict=True)
    )
    assert differing <= len(everyone[0]["values"]) // 3


def test_a_gpu_whose_clocks_cannot_be_locked_gets_power_limits():
    with open_gpu("simulated:a100-sxm?fault=not-supported:clocks") as gpu:
        values, unit, set_value = _settable(gpu)
        smallest_w, largest_w = gpu.power_limits_w
        assert (values[0], unit) == (int(largest_w), "W")
        assert smallest_w <= values[-1] < smallest_w / 0.95 + 1
        set_value(values[3])
        assert gpu.power_limit_w() == values[3]
    with open_gpu("simulated:a100-sxm") as gpu:
        assert _settable(gpu)[:2] == (list(gpu.supported_clocks_mhz), "MHz")


def test_a_gpu_that_is_lost_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(search, "WINDOW_S", 0.1)
    with planner_runtime(gpu="emulated:a100-sxm/0?call=0&fault=lost@1s", state=None) as runtime:
        deadline_s = time.monotonic() + LONG_S
        while runtime.problem is None and time.monotonic() < deadline_s:
            with runtime.iteration():
                time.sleep(0.001)  # an iteration
    assert "it fell off the bus" in str(runtime.problem)
    goes_on, reset = (
        record.message for record in caplog.records if record.levelno == logging.WARNING
    )
    assert goes_on.endswith("; training goes on without setting clocks, and tries again later")
    assert "emulated:a100-sxm/0" in reset


def test_what_is_for_pipelines_is_refused_without_an_engine():
    with (
        pytest.raises(UsageError, match="plan= is for pipelines"),
        planner_runtime(gpu="cuda", plan="plan.yaml"),
    ):
        pass
    with (
        planner_runtime(gpu="simulated:a100-sxm", state=None) as runtime,
        pytest.raises(UsageError, match="plans are for pipel"),
    ):
        runtime.switch_to("plan.yaml")
