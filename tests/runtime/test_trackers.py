"""The numbers of each iteration go to the trackers of a training, which it never waits for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LONG_S

from perseus_planner import Profile, solve
from perseus_planner.base.errors import UsageError
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runs.records import IterationRecord
from perseus_planner.runs.values import values_of
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.trackers import Trackers, log_functions


def record(iteration: int, **more: Any) -> IterationRecord:
    known: dict[str, Any] = {
        "version": 1,
        "pipeline": 0,
        "pipeline_rank": 0,
        "begin_s": 10.0 * iteration,
        "end_s": 10.0 * iteration + 8,
        "busy_s": 6.0,
        "energy_j": 800.0,
        "lowered": 2,
        "saved_j": 200.0,
        "next_s": 10.0 * iteration + 10,
        "between_j": 100.0,
        "achieved_mhz": 1200.0,
        "origin": "measured",
    }
    return IterationRecord(iteration=iteration, **{**known, **more})


def test_the_values_are_those_of_the_account():
    assert values_of(record(3)) == {
        "iteration_s": 10.0,
        "gpu_energy_j": 900.0,
        "gpu_power_w": 90.0,
        "gpu_saved_j": 200.0,
        "gpu_clock_mhz": 1200.0,
        "as_planned": 1.0,
        "verdict": "as planned",
    }
    unknown = record(3, energy_j=None, achieved_mhz=None, deviation="it ran 3 computations")
    assert values_of(unknown) == {
        "iteration_s": 10.0,
        "as_planned": 0.0,
        "verdict": "it ran 3 computations",
    }


class Writer:
    """As `torch.utils.tensorboard.SummaryWriter` takes scalars and texts."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))


class WandbRun:
    """As `wandb.Run` takes them."""

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.rows: list[tuple[dict[str, Any], bool]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], commit: bool = True) -> None:
        self.rows.append((row, commit))


class Mlflow:
    """As the module does: the active run is that of a thread."""

    def __init__(self, run_id: str | None) -> None:
        self._local = threading.local()
        self._local.run_id = run_id
        self.logged: list[tuple[Mapping[str, float], int, str]] = []

    def active_run(self) -> Any:
        run_id = getattr(self._local, "run_id", None)
        return run_id and SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_metrics(self, metrics: Mapping[str, float], step: int, run_id: str) -> None:
        self.logged.append((metrics, step, run_id))


def hand(log: Any, *records: IterationRecord) -> list[tuple[str, str]]:
    """Hand records to trackers; return the warnings."""
    warnings: list[tuple[str, str]] = []
    trackers = Trackers(log_functions(log), lambda key, text: warnings.append((key, text)))
    trackers.add(records)
    trackers.close(LONG_S)
    return warnings


def test_each_tracker_gets_them_as_its_client_takes_them():
    writer, run, mlflow = Writer(), WandbRun(), Mlflow("7f")
    seen: list[int] = []
    late = record(5, deviation="late")
    log = [writer, run, mlflow, lambda iteration, values: seen.append(iteration)]
    assert hand(log, record(3), record(4), late) == []
    assert seen == [3, 4, 5]
    assert ("planner/gpu_power_w", 90.0, 4) in writer.scalars
    assert writer.texts == [("planner/verdict", "as planned", 3), ("planner/verdict", "late", 5)]
    assert run.axes == {"planner/iteration": None, "planner/*": "planner/iteration"}
    (row, commits), *_ = run.rows
    assert (row["planner/iteration"], row["planner/gpu_energy_j"], commits) == (3, 900.0, False)
    assert row["planner/verdict"] == "as planned"
    metrics, step, run_id = mlflow.logged[-1]
    assert (metrics["planner/as_planned"], step, run_id) == (0.0, 5, "7f")
    assert "planner/verdict" not in metrics


def test_a_fault_of_a_tracker_keeps_nothing_from_the_others():
    seen: list[int] = []

    def fails(iteration: int, values: Mapping[str, object]) -> None:
        raise ConnectionError("no route to host")

    warnings = hand([fails, lambda iteration, _: seen.append(iteration)], record(3), record(4))
    assert seen == [3, 4]
    assert {key for key, _ in warnings} == {"log/0"}  # JobWarnings gives each key once
    assert warnings[0][1].startswith("log= raised ConnectionError: no route to host; training")


def test_a_tracker_that_hangs_is_left_behind():
    goes_on = threading.Event()
    warnings: list[str] = []
    trackers = Trackers([lambda *_: goes_on.wait()], lambda key, text: warnings.append(text))
    trackers.add([record(number) for number in range(2000)])
    trackers.close(0.0)
    goes_on.set()
    assert warnings[0] == "log= does not keep up, so iterations are left out of it"
    assert warnings[-1].startswith("log= has not ended in 0 s")


def test_what_is_no_tracker_is_refused():
    with pytest.raises(UsageError, match=r"^log=3: is no tracker; give a SummaryWriter"):
        log_functions(3)
    with pytest.raises(UsageError, match=r"^log=mlflow: has no active run; call mlflow.start_run"):
        log_functions(Mlflow(None))
    assert log_functions(None) == ()


def train(log: Any, iterations: int = 6) -> None:
    """Train without an engine, on a simulated GPU."""
    rows = (Measurement(1410, 0.01, 3.0), Measurement(1200, 0.011, 2.5))
    iteration = {"schedule": "whole", "microbatches": 1}
    profile = Profile({(0, "F"): rows}, 0.0, origin="simulated", iteration=iteration)
    plan = solve(profile, "whole", microbatches=1).plan_for(0.011)
    with planner_runtime(gpu="simulated:a100-sxm", plan=plan, log=log) as runtime:
        for _ in range(iterations):
            runtime.end_iteration()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))


def test_every_iteration_of_a_training_arrives(state: None):
    seen: list[tuple[int, str, str]] = []
    training = threading.current_thread().name

    def log(iteration: int, values: Mapping[str, Any]) -> None:
        assert values["iteration_s"] > 0
        seen.append((iteration, values["verdict"], threading.current_thread().name))

    train(log)
    # The first end of an iteration has no begin.
    assert [iteration for iteration, _, _ in seen] == list(range(len(seen)))
    assert len(seen) >= 5
    assert training not in {thread for _, _, thread in seen}
    assert seen[-1][1] == "as planned"


def test_tensorboard_reads_them(state: None, tmp_path: Path):
    writers = pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )
    with writers.SummaryWriter(str(tmp_path / "events")) as writer:
        train(writer)
    found = events.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert len(found.Scalars("planner/iteration_s")) >= 5
    assert "planner/as_planned" in found.Tags()["scalars"]


def test_wandb_takes_them(state: None, tmp_path: Path):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    with wandb.init(mode="offline", dir=tmp_path) as run:
        run.log({"loss": 1.0}, step=0)
        train(run)
        run.log({"loss": 0.5}, step=1)
        assert run.step == 1  # which ours do not move
        run.log({"loss": 0.4}, step=2)
        assert run.summary["planner/iteration_s"] > 0
        assert run.summary["planner/iteration"] >= 4
        assert run.summary["loss"] == 0.5  # of the last row that has ended


def test_mlflow_has_them_in_the_run_of_the_training(
    state: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path / "runs")
    with mlflow.start_run() as run:
        train(mlflow)
    client = mlflow.MlflowClient()
    found = client.get_metric_history(run.info.run_id, "planner/iteration_s")
    assert len(found) >= 5
    assert {metric.step for metric in found} == set(range(len(found)))
    assert len(client.search_runs([run.info.experiment_id])) == 1
