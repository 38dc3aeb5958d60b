"""Frameworks on top of the engines: torchtitan and Automodel by their schedule, Megatron-Bridge
by its callbacks.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ranks, results_of

from perseus_planner.runs import Run

pytest.importorskip("torch")

STEPS = 3


@pytest.mark.parametrize("framework", ["torchtitan", "automodel"])
def test_the_example_of_a_framework_trains_by_a_plan_with_the_same_results(
    framework: str, tmp_path: Path
):
    everyone = results_of(f"integration_programs:{framework}", 2, tmp_path)
    assert everyone == [{"1f1b": True, "interleaved-1f1b": True}] * 2
    for name in ("1f1b", "interleaved-1f1b"):
        for rank in Run.load(tmp_path / f"run-{name}").ranks:
            assert [row.is_as_planned for row in rank.iterations] == [True] * STEPS


def test_megatron_bridge_trains_by_a_plan_and_goes_on_after_an_evaluation(tmp_path: Path):
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    everyone = ranks("megatron_programs:bridge", 2, tmp_path, str(tmp_path / "state"))
    assert [each.code for each in everyone] == [0, 0], [each.stderr for each in everyone]
    for rank in Run.load(tmp_path / "run").ranks:
        assert [row.is_as_planned for row in rank.iterations] == [True] * STEPS
