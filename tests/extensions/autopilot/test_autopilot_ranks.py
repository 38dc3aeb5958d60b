"""Training without a plan as a whole: real engines, real ranks, the autopilot's process, and
emulated GPUs.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import run
from launching import results_of

from perseus_planner import Profile

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        ("torch", 2),
        pytest.param(
            *("deepspeed", 4),  # two data-parallel pipelines
            marks=[
                pytest.mark.soak,
                pytest.mark.skipif(
                    find_spec("deepspeed") is None, reason="deepspeed is not installed"
                ),
            ],
        ),
    ],
)
def test_training_learns_what_clocks_cost_and_its_results_stay_the_same(
    engine: str, ranks: int, tmp_path: Path
):
    imports = ["deepspeed.pipe"] if engine == "deepspeed" else []
    for result in results_of("autopilot_programs:learns", ranks, tmp_path, engine, imports=imports):
        assert result["equal"]
        assert result["phases"][:1] == ["watching"]
        assert "reference" in result["phases"]
        assert result["warnings"] == []
        assert result["state"]
    profile = Profile.load(tmp_path / "run" / "autopilot.yaml")
    assert profile.origin == "simulated"
    assert profile.gpu == "simulated a100-sxm slower=1000000"
    assert max(map(len, profile.measurements.values())) > 1
    assert all(row.evidence is not None for rows in profile.measurements.values() for row in rows)
    shown = run(f"show {tmp_path / 'run'}")
    who = "2 ranks" if ranks == 2 else "4 ranks, 2 pipelines"
    assert f"Run of {who}, without a plan." in shown.stdout, shown.stderr
    assert "energy simulated, saved against all clocks at maximum" in shown.stdout
    status = json.loads(run(f"show {tmp_path / 'run'} --json").stdout)["autopilot"]
    assert status["reference_s"] > 0.0
    refused = run(f"calibrate {tmp_path / 'run' / 'autopilot.yaml'} {tmp_path / 'run'}")
    assert "was trained without a plan" in refused.stderr


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
