"""Training without a plan as a whole: real engines, real ranks, the autopilot's process, and
emulated GPUs.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from browsing import IMPACTS, barriers, chromium, opened
from commands import done, run
from launching import results_of
from runtime_training import plan_of
from strategies import soaks

from perseus_planner import Profile, Run
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules import combined_1f1b

pytest.importorskip("torch")


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Train by torch without a plan, once for all tests that look at the run."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, results_of("autopilot_programs:learns", 2, folder, "torch")


def test_training_learns_what_clocks_cost_and_its_results_stay_the_same(
    trained: tuple[Path, list[dict[str, Any]]],
):
    folder, results = trained
    _check_learnt(folder, results, "2 ranks")


@pytest.mark.soak
def test_pairs_are_learnt_and_planned(tmp_path: Path):
    results = results_of("autopilot_programs:learns", 2, tmp_path, "pairs")
    _check_learnt(tmp_path, results, "2 ranks")
    learnt = tmp_path / "run" / "autopilot.yaml"
    assert {*Profile.load(learnt).measurements} == {
        Key(stage, kind) for stage in range(2) for kind in ("F", "B", "B.pair")
    }
    recorded = (tmp_path / "run").glob("*/computations-1.csv")
    assert any("(1F1;1B0)OVERLAP_F_B" in file.read_text() for file in recorded)
    frontier = tmp_path / "pairs.npz"
    done(f"solve {learnt} --schedule {tmp_path / 'pairs.csv'} -o {frontier}")
    planned = run(f"plan {frontier} -o {tmp_path / 'plan.yaml'}")
    assert planned.exit_code == 0, planned.stderr
    _check_pairs_followed(tmp_path)


def test_a_plan_with_pairs_is_followed_and_shown(tmp_path: Path):
    schedule = combined_1f1b(2, 1, 4)
    plan_of(schedule, gpu="simulated a100-sxm slower=1000000").save(tmp_path / "plan.yaml")
    _check_pairs_followed(tmp_path)


def _check_pairs_followed(folder: Path) -> None:
    """Train by `plan.yaml`: all iterations run in its order, and commands name both of a pair."""
    ranks = results_of("autopilot_programs:follows_pairs", 2, folder)
    assert [rank["warnings"] for rank in ranks] == [[], []]
    ran = Run.load(folder / "planned")
    iterations = [row for rank in ran.ranks for row in rank.iterations]
    assert len(iterations) == 2 * 6
    assert [row.deviation for row in iterations if row.deviation] == []
    assert all(row.planned_s is not None for row in iterations)
    shown = run(f"show {folder / 'planned'}")
    assert shown.exit_code == 0, shown.stderr
    shown = run(f"show {folder / 'plan.yaml'}")
    assert "P forward and backward overlapped" in shown.stdout, shown.output


@pytest.mark.soak
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_two_pipelines_of_deepspeed_learn_too(tmp_path: Path):
    results = results_of(
        "autopilot_programs:learns", 4, tmp_path, "deepspeed", imports=["deepspeed.pipe"]
    )
    _check_learnt(tmp_path, results, "4 ranks, 2 pipelines")


def _check_learnt(folder: Path, results: list[dict[str, Any]], who: str) -> None:
    for result in results:
        assert result["equal"]
        assert result["phases"][:1] == ["watching"]
        assert "reference" in result["phases"]
        assert result["warnings"] == []
        assert result["state"]
    profile = Profile.load(folder / "run" / "autopilot.yaml")
    assert profile.origin == "simulated"
    assert profile.gpu == "simulated a100-sxm slower=1000000"
    assert max(map(len, profile.measurements.values())) > 1
    assert all(row.evidence is not None for rows in profile.measurements.values() for row in rows)
    shown = run(f"show {folder / 'run'}")
    assert f"Run of {who}, without a plan." in shown.stdout, shown.stderr
    assert "energy simulated, saved against all clocks at maximum" in shown.stdout
    status = json.loads(run(f"show {folder / 'run'} --json").stdout)["decider"]
    assert status["reference_s"] > 0.0
    refused = run(f"calibrate {folder / 'run' / 'autopilot.yaml'} {folder / 'run'}")
    assert "was trained without a plan" in refused.stderr


def test_a_report_shows_a_run_without_a_plan_as_it_ran(
    trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path
):
    folder = trained[0] / "run"
    ran = Run.load(folder)
    reported = run(f"report {folder} -o {tmp_path / 'report.html'}")
    assert f"{folder.name}: Run of 2 ranks, without a plan." in reported.stdout, reported.stderr
    content = json.loads(run(f"report {folder} -o {tmp_path / 'again.html'} --json").stdout)
    # What nobody planned has no section.
    assert (content["runs"], content["savings"], content["ranks"]) == ({}, [], [])
    assert content["where"]["iterations"] == []
    (course,) = content["courses"]
    assert course["each"] == 1
    assert course["iterations"] == [row.iteration for row in ran.ranks[0].iterations]
    slowest_s = [
        max(row.time_s for row in rows)
        for rows in zip(*(rank.iterations for rank in ran.ranks), strict=True)
    ]
    assert course["times_s"] == pytest.approx(slowest_s)
    own_j = [row.energy_j for row in ran.ranks[0].iterations]
    other_j = [row.energy_j for row in ran.ranks[1].iterations]
    assert course["energies_j"] == [
        None if None in pair else pytest.approx(sum(pair))
        for pair in zip(own_j, other_j, strict=True)
    ]
    (recorded,) = content["iterations"]
    last = max(ran.ranks[0].computations)
    assert recorded["note"].startswith(f"recorded: iteration {last} without a plan")
    names = [[str(each.computation) for each in rank.computations[last]] for rank in ran.ranks]
    assert [each.split() for each in recorded["programs"]] == names
    learnt = Profile.load(folder / "autopilot.yaml")
    assert len(content["curves"]) == len(learnt.measurements)
    html = (tmp_path / "report.html").read_text()
    for heading in ("Energy of a training run", "Recorded run without a plan", "as learnt"):
        assert heading in html
    for heading in ("Where the energy goes", "Clock changes of each GPU", "planned</th>"):
        assert heading not in html
    without_state = tmp_path / "run"
    shutil.copytree(folder, without_state)
    (without_state / "autopilot.yaml").unlink()
    content = json.loads(run(f"report {without_state} -o {tmp_path / 'again.html'} --json").stdout)
    assert (content["context"], content["curves"]) == (None, [])
    assert len(content["iterations"]) == 1


@pytest.mark.parametrize("theme", ["light", *soaks("dark")])
def test_the_page_of_a_run_without_a_plan_has_all_figures_and_no_barrier(
    theme: str, trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path
):
    path = tmp_path / "report.html"
    done(f"report {trained[0] / 'run'} -o {path}")
    with chromium() as browser, opened(browser, path.as_uri(), color_scheme=theme) as page:
        page.locator("#curve-0 svg").wait_for()
        assert page.locator("[data-course] svg[role=img]").count() == 3
        assert page.locator("#timelines .timeline").count() == 1
        first = page.locator("#timelines canvas").first
        first.focus()
        page.keyboard.press("ArrowRight")
        status = page.locator("#timelines .readout").first
        assert status.inner_text().startswith("Rank 0, 0F0: forward of microbatch 0, stage 0")
        page.locator("[data-course] summary").first.click()
        rows = page.locator("[data-course]").first.locator("tbody tr")
        assert rows.count() >= len(Run.load(trained[0] / "run").ranks[0].iterations)
        assert barriers(page, IMPACTS) == []


# in real time: with other work on the processors, trials of a mode may take minutes
@pytest.mark.soak
@pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
def test_the_modes_that_it_decides_are_what_runs_and_losses_stay_the_same(
    engine: str, tmp_path: Path
):
    pytest.importorskip(engine)
    imports = ["deepspeed.pipe"] if engine == "deepspeed" else []
    program = "autopilot_programs:learns_modes"
    for result in results_of(program, 2, tmp_path, engine, imports=imports):
        assert result["equal"]
        assert result["ran"] == result["decided"]
        kept = [any(each) for each in result["decided"]]
        assert any(kept)
        assert not kept[0]
        assert "learning" in result["phases"]
        assert result["warnings"] == []
        assert "modes: this rank has of-1, own, and others have of-0, own" in result["refused"]


@pytest.mark.parametrize(
    "names", [["1f1b", "dry"], pytest.param(["zbv"], marks=pytest.mark.soak)], ids=" and ".join
)
def test_all_schedules_and_other_numbers_of_microbatches_are_learnt_by_watching(
    names: list[str], tmp_path: Path
):
    for result in results_of("autopilot_programs:references", 2, tmp_path, *names):
        for name in names:
            found = result[name]
            assert found["planned"] == ([4, 8, 4] if name == "1f1b" else [4])
            assert found["was locked"] == (name != "dry")
            assert (found["after"], found["warnings"]) == (None, [])


@pytest.mark.soak
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_what_megatron_runs_is_learnt_by_watching(tmp_path: Path):
    for result in results_of("megatron_programs:learned", 2, tmp_path):
        assert result["megatron"] == {
            "planned": [4],
            "was locked": True,
            "after": None,
            "warnings": [],
        }
