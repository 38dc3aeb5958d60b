"""`planner inference profile` writes what `planner inference plan` reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import done, refusal, run
from inference_cases import VLLM
from waiting import calmly

GPU = "emulated:a100-sxm/71?slower=10"
SERVER = Path(__file__).parents[2] / "support" / "completions_server.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    Path("rates.csv").write_text("input,output,requests_per_s,tokens_per_s\n32,4,1,36\n")


def test_pools_are_planned_on_what_was_measured():
    with subprocess.Popen(
        [sys.executable, str(SERVER), GPU], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        text = done(
            f"inference profile {address} --gpu {GPU} --class 32/4 --concurrency 2 --rate 5 "
            "--at 1410,705 --window 0.4s -o inference.csv"
        )
        process.terminate()
    title, _, heads, *rows = text.splitlines()
    assert title == "Requests on 1 GPU, simulated; tokens/J is also tokens/s per W"
    assert heads.split()[:4] == ["class", "load", "MHz", "J/request"]
    assert [row.split()[:3] for row in rows[:2]] == [["32/4", "2", "1410"], ["32/4", "5/s", "1410"]]
    plan = json.loads(
        done(
            "inference plan inference.csv --rates rates.csv --gpus 8 --ttft 10s -o pools.yaml "
            "--json"
        )
    )
    (pool,) = plan["epochs"][0]["pools"]
    assert pool["tensor_degree"] == 1
    assert plan["saved_share"] >= 0


def test_results_of_another_program_become_a_profile():
    Path("a.json").write_text(json.dumps(VLLM))
    done("inference read 1410@300W=a.json -o inference.csv")
    Path("rates.csv").write_text("input,output,requests_per_s,tokens_per_s\n256,100,2,712\n")
    plan = json.loads(
        done("inference plan inference.csv --rates rates.csv --gpus 1 -o pools.yaml --json")
    )
    assert plan["epochs"][0]["power_w"] == pytest.approx(300.0)
    message = "Error: 'a.json' is no result; write MHZ=FILE or MHZ@WATTS=FILE\n"
    assert refusal("inference read a.json -o b.csv") == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "--class 32 -o a.csv",
            "--class: '32' is not a class; write input/output tokens, as 256/100",
        ),
        ("--class 32/4 --api-key @key -o a.csv", "key: no such file; check the path"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments: str, problem: str):
    command = f"inference profile http://127.0.0.1:9 --gpu emulated:a100-sxm/0 {arguments}"
    assert refusal(command) == (2, "", f"Error: {problem}\n")
    assert [file.name for file in Path().glob("*.csv")] == ["rates.csv"]


def test_what_is_odd_in_the_answers_of_a_server_is_said_once():
    calmly(check_what_is_odd)


def check_what_is_odd() -> None:
    with subprocess.Popen(
        [sys.executable, str(SERVER), GPU, "hidden=12", "cached=32"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        result = run(
            f"inference profile {address} --gpu {GPU} --class 64/24 --concurrency 1 --at 1410,705 "
            "--window 1.5s -o inference.csv"
        )
        process.terminate()
    assert result.exit_code == 0
    events, cached = result.stderr.splitlines()
    assert events.startswith("planner: class 64/24: answers of 24 tokens had 12 events with text: ")
    said = re.fullmatch(
        r"planner: class 64/24: (\d+) % of the input tokens came from the server's cache, which "
        "cost nothing; the cost of an input token is that of the others",
        cached,
    )
    assert said is not None
    assert int(said[1]) == pytest.approx(50, abs=8)
