"""`planner inference` plans pools, and refuses what it cannot plan in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import done, refusal
from inference_cases import PROFILE, RATES, steady, write_trace

from perseus_planner.errors import PlanError
from perseus_planner.inference.plan import InferencePlan

PLAN = "inference plan inference.csv --rates rates.csv"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("inference.csv").write_text(PROFILE)
    Path("rates.csv").write_text(RATES)
    write_trace(Path("trace.csv"), steady(300))
    return tmp_path


def test_the_plan_is_a_table_and_a_file(folder: Path):
    text = done(f"{PLAN} --gpus 16 -o pools.yaml")
    assert "highest clock, largest tensor degree" in text
    assert "The plan is proved to be the best." in text
    plan = InferencePlan.load("pools.yaml")
    assert plan.energy_j == plan.policies["planner"].energy_j
    plan.save("again.yaml")
    assert Path("again.yaml").read_bytes() == Path("pools.yaml").read_bytes()


def test_the_json_has_pools_policies_and_the_bound(folder: Path):
    found = json.loads(done(f"{PLAN} --gpus 16 --epoch 10min -o pools.yaml --json"))
    (epoch,) = found["epochs"]
    assert epoch["energy_j"] == pytest.approx(600 * epoch["power_w"])
    assert epoch["bound_j"] <= epoch["energy_j"]
    assert sum(pool["gpus"] for pool in epoch["pools"]) <= 16
    assert {each["policy"]: each["saved_share"] for each in found["policies"]}["planner"] == found["saved_share"] > 0
    assert found["files"] == ["pools.yaml"]


def test_periods_of_a_trace_pay_for_their_changes(folder: Path):
    found = json.loads(done("inference plan inference.csv --trace trace.csv --gpus 16 --epoch 1min -o p.yaml --json"))
    assert [epoch["start_s"] for epoch in found["epochs"]] == [0, 60, 120, 180, 240]
    assert all(epoch["change_j"] == 0 for epoch in found["epochs"])  # a steady trace needs none


def test_a_changed_file_is_refused(folder: Path):
    done(f"{PLAN} --gpus 16 -o pools.yaml")
    Path("pools.yaml").write_text(Path("pools.yaml").read_text().replace("instances: 2", "instances: 1"))
    with pytest.raises(PlanError, match="does not match the content"):
        InferencePlan.load("pools.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rates rates.csv --trace trace.csv --gpus 8", "give one of --trace and --rates"),
        (
            "--rates rates.csv --gpus 3",
            "no pools on 3 GPUs carry this load within the latency objectives: 5 GPUs would; give that many or more",
        ),
        (
            "--rates rates.csv --gpus 8 --input-bounds 256",
            "--input-bounds: '256' are not the most tokens of short and medium; write two, such as 256,1024",
        ),
        (
            "--rates rates.csv --gpus 8 --new-instance 1s",
            "costs of changes: a new instance costs no less than re-sharding, and that than a clock",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, options: str, message: str):
    assert refusal(f"inference plan inference.csv {options} -o p.yaml") == (2, "", f"Error: {message}\n")
