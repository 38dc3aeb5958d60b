"""`planner inference profile` writes what `planner inference plan` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import done, refusal

SERVING = """
from perseus_planner.gpu.simulated.emulated import open_emulated
from perseus_planner.gpu.simulated.model import OpCost

def generate(batch, input_tokens, output_tokens):
    with open_emulated("a100-sxm/0?slower=60") as gpu:
        for step in range(output_tokens):
            gpu.run(OpCost(1e9, 4e8) if step else OpCost(6e9, 1e6) * (batch * input_tokens))
            yield
"""
MEASURE = "inference profile tiny_model:generate --gpu emulated:a100-sxm/0?slower=60 --class 32/4"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    Path("tiny_model.py").write_text(SERVING)
    Path("rates.csv").write_text("input,output,requests_per_s,tokens_per_s\n32,4,1,36\n")


def test_pools_are_planned_on_what_was_measured():
    text = done(f"{MEASURE} --at 1410,705 --window 0.1s --windows 1 -o inference.csv")
    title, _, heads, *rows = text.splitlines()
    assert title == "Requests on 1 GPU, simulated; tokens/J is also tokens/s per W"
    assert heads.split()[:4] == ["class", "batch", "MHz", "J/request"]
    assert [row.split()[:3] for row in rows[:2]] == [["32/4", "1", "1410"], ["32/4", "1", "705"]]
    plan = json.loads(
        done(
            "inference plan inference.csv --rates rates.csv --gpus 8 --ttft 10s -o pools.yaml "
            "--json"
        )
    )
    (pool,) = plan["epochs"][0]["pools"]
    assert pool["tensor_degree"] == 1
    assert plan["saved_share"] >= 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "--class 32 -o a.csv",
            "--class: '32' is not a class; write input/output tokens, as 256/100",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments: str, problem: str):
    command = f"inference profile tiny_model:generate --gpu emulated:a100-sxm/0 {arguments}"
    assert refusal(command) == (2, "", f"Error: {problem}\n")
    assert [file.name for file in Path().glob("*.csv")] == ["rates.csv"]
