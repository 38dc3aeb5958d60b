"""Training without a plan as a whole: real engines, real ranks, the autopilot's process, and emulated GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import results_of

from perseus_planner import Profile

pytest.importorskip("torch")


@pytest.mark.parametrize(
    "engine",
    [
        "torch",
        pytest.param(
            "deepspeed",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
        ),
    ],
)
def test_training_learns_what_clocks_cost_and_its_results_stay_the_same(engine: str, tmp_path: Path):
    imports = ["deepspeed.pipe"] if engine == "deepspeed" else []
    for result in results_of("learning_programs:learns", 2, tmp_path, engine, imports=imports):
        assert result["equal"]
        assert result["phases"][:1] == ["watching"]
        assert "reference" in result["phases"]
        assert result["warnings"] == []
        assert result["state"]
    profile = Profile.load(tmp_path / "autopilot.yaml")
    assert profile.gpu == "simulated a100-sxm slower=300000"
    assert max(map(len, profile.measurements.values())) > 1
    assert all(row.evidence is not None for rows in profile.measurements.values() for row in rows)
