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


def test_the_examples_of_frameworks_train_by_a_plan_with_the_same_results(tmp_path: Path):
    everyone = results_of("integration_programs:examples", 2, tmp_path)
    names = ("1f1b", "interleaved-1f1b")
    for framework in ("torchtitan", "automodel"):
        assert [rank[framework] for rank in everyone] == [dict.fromkeys(names, True)] * 2
        for name in names:
            for rank in Run.load(tmp_path / f"{framework}-{name}").ranks:
                assert [row.is_as_planned for row in rank.iterations] == [True] * STEPS


def test_megatron_bridge_trains_by_a_plan_and_goes_on_after_an_evaluation(tmp_path: Path):
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    everyone = ranks("megatron_programs:bridge", 2, tmp_path, str(tmp_path / "state"))
    assert [each.code for each in everyone] == [0, 0], [each.stderr for each in everyone]
    for rank in Run.load(tmp_path / "run").ranks:
        assert [row.is_as_planned for row in rank.iterations] == [True] * STEPS
