"""`planner inference` plans pools, and refuses what it cannot plan in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from browsing import barriers, chromium, opened
from commands import done, refusal
from inference_cases import PROFILE, RATES, steady, write_trace

from perseus_planner.base.errors import PlanError
from perseus_planner.extensions.inference.command import inference
from perseus_planner.extensions.inference.plan import POLICIES, read_plan, save_plan

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
    plan = read_plan(Path("pools.yaml"))
    assert plan["policies"]["planner"]["energy_j"] == sum(
        epoch["energy_j"] for epoch in plan["epochs"]
    )
    save_plan(plan, Path("again.yaml"))
    assert Path("again.yaml").read_bytes() == Path("pools.yaml").read_bytes()


def test_the_json_has_pools_policies_and_the_bound(folder: Path):
    found = json.loads(done(f"{PLAN} --gpus 16 --epoch 10min -o pools.yaml --json"))
    (epoch,) = found["epochs"]
    assert epoch["energy_j"] == pytest.approx(600 * epoch["power_w"])
    assert epoch["bound_j"] <= epoch["energy_j"]
    assert sum(pool["instances"] * pool["tensor_degree"] for pool in epoch["pools"]) <= 16
    assert (
        {each["policy"]: each["saved_share"] for each in found["policies"]}["planner"]
        == found["saved_share"]
        > 0
    )
    assert found["files"] == ["pools.yaml"]


def test_periods_of_a_trace_pay_for_their_changes(folder: Path):
    found = json.loads(
        done(
            "inference plan inference.csv --trace trace.csv --gpus 16 --epoch 1min -o p.yaml --json"
        )
    )
    assert [epoch["start_s"] for epoch in found["epochs"]] == [0, 60, 120, 180, 240]
    assert all(epoch["change_j"] == 0 for epoch in found["epochs"])  # a steady trace needs none


def test_a_replay_has_a_row_for_each_policy_and_a_figure(folder: Path):
    text = done("inference simulate inference.csv trace.csv --gpus 16 --plot replay.png")
    assert text.startswith("3,000 requests in 5 min on 16 GPUs\n")
    assert Path("replay.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(
        done("inference simulate inference.csv trace.csv --gpus 16 --prediction perfect --json")
    )
    assert [each["policy"] for each in found["policies"]] == list(POLICIES)
    planner = found["policies"][-1]
    assert planner["saved_share"] == pytest.approx(
        1 - planner["energy_j"] / found["policies"][0]["energy_j"]
    )
    assert sum(period["requests"] for period in planner["periods"]) == found["requests"] == 3000
    assert sum(period["power_w"] for period in planner["periods"]) * 300 == pytest.approx(
        planner["energy_j"], rel=1e-3
    )


def test_a_policy_that_cannot_serve_the_trace_is_left_out_with_the_reason(folder: Path):
    rows = PROFILE.replace("4096,100,2,1980,3000,1000,200", "4096,100,2,1980,3000,,200")
    Path("inference.csv").write_text(rows)
    found = json.loads(done("inference simulate inference.csv trace.csv --gpus 16 --json"))
    assert found["left_out"] == [
        "highest clock, largest tensor degree: class 4096/100: no configuration meets its "
        "latency objective; measure a higher clock or tensor degree, or loosen the objective"
    ]
    assert {each["saved_share"] for each in found["policies"]} == {None}


def test_show_and_report_take_a_plan(folder: Path):
    text = done(f"{PLAN} --gpus 16 -o 'po<b>ols.yaml'").partition("Wrote")[0]
    assert text == done("show 'po<b>ols.yaml'")
    assert refusal("show 'po<b>ols.yaml' --plot pools.svg") == (
        2,
        "",
        "Error: po<b>ols.yaml: has no figure; leave --plot out\n",
    )
    found = json.loads(done("report 'po<b>ols.yaml' --price 0.2 --pue 1.5 -o page.html --json"))
    baseline_j = found["plan"]["policies"][0]["energy_j"]
    assert found["saved"]["kwh"] == pytest.approx(
        1.5 * (baseline_j - found["plan"]["energy_j"]) / 3.6e6
    )
    assert found["saved"]["usd"] == pytest.approx(0.2 * found["saved"]["kwh"])
    page = Path("page.html").read_text()
    assert "<title>Pools for inference: po&lt;b&gt;ols.yaml</title>" in page
    assert "script-src 'none'" in page
    message = "Error: a plan for inference has a report of its own; name it alone\n"
    assert refusal("report 'po<b>ols.yaml' 'po<b>ols.yaml' -o page.html") == (2, "", message)


def test_the_page_has_no_barrier_and_fits_a_phone(folder: Path):
    phone = {"width": 390, "height": 800}
    done("inference plan inference.csv --trace trace.csv --gpus 16 --epoch 2min -o pools.yaml")
    done("report pools.yaml -o page.html")
    with (
        chromium() as browser,
        opened(
            browser, (folder / "page.html").as_uri(), color_scheme="dark", viewport=phone
        ) as page,
    ):
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert barriers(page) == []


@pytest.mark.parametrize("command", inference.commands.values(), ids=lambda command: command.name)
def test_help_describes_every_option(command: click.Command):
    assert [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ] == []
    assert "Usage: " in done(f"inference {command.name} --help")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--policy best", "'best' is not one of 'highest', 'clock', 'degree', "),
        ("--chunk 0", "0 is not in the range x>=1"),
        ("--epoch 0.5s", "settings: an epoch has 1 s or more\n"),
    ],
)
def test_a_wrong_replay_is_refused(folder: Path, options: str, problem: str):
    command = f"inference simulate inference.csv trace.csv --gpus 16 {options}"
    status, output, text = refusal(command)
    assert (status, output) == (2, "")
    assert problem in text


def test_a_changed_file_is_refused(folder: Path):
    done(f"{PLAN} --gpus 16 -o pools.yaml")
    Path("pools.yaml").write_text(
        Path("pools.yaml").read_text().replace("instances: 2", "instances: 1")
    )
    with pytest.raises(PlanError, match="does not match the content"):
        read_plan(Path("pools.yaml"))
    Path("pools.yaml").write_text(
        Path("pools.yaml").read_text().replace("classes:\n", "classes:\n  1: [1, 1]\n")
    )
    with pytest.raises(PlanError, match="does not match the content"):
        read_plan(Path("pools.yaml"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rates rates.csv --trace trace.csv --gpus 8", "give one of --trace and --rates"),
        (
            "--rates rates.csv --gpus 3",
            "no pools on 3 GPUs carry this load within the latency objectives: 5 GPUs would; give "
            "that many or more",
        ),
        (
            "--rates rates.csv --gpus 8 --input-bounds 256",
            "--input-bounds: '256' are not the most tokens of short and medium; write two, such as "
            "256,1024",
        ),
        (
            "--rates rates.csv --gpus 8 --new-instance 1s",
            "costs of changes: a new instance costs no less than re-sharding, and that than a "
            "clock",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, options: str, message: str):
    assert refusal(f"inference plan inference.csv {options} -o p.yaml") == (
        2,
        "",
        f"Error: {message}\n",
    )
