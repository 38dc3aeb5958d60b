"""Frontier and plan files come back as they were, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import dags, deadline_s, fixed, shares, smooth_profile
from validators import same

from perseus_planner import Frontier, Plan
from perseus_planner.dag import PipelineDag
from perseus_planner.errors import FrontierError, PlanError
from perseus_planner.frontier import solve, trace
from perseus_planner.schedules import one_f_one_b

MAKE = """
import sys
sys.path.insert(0, sys.argv[1])
from strategies import smooth_profile
from perseus_planner import schedules, solve
frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 3))
frontier.save("frontier.npz")
frontier.plan_for(1.07 * frontier.baseline_time_s).save("plan.yaml")
"""


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    """Two stages, three microbatches, a smooth profile."""
    return solve(smooth_profile(2), one_f_one_b(2, 3))


@pytest.fixture
def plan(frontier: Frontier) -> Plan:
    """A plan between the ends."""
    return frontier.plan_for(1.07 * frontier.baseline_time_s)


@settings(fixed, max_examples=40)
@given(dag=dags(12), share=shares())
def test_a_saved_frontier_loads_as_it_was_and_plans_alike(dag: PipelineDag, share: float, tmp_path_factory):
    path, again = (tmp_path_factory.mktemp("frontier") / name for name in ("f.npz", "again.npz"))
    frontier = trace(dag)
    frontier.save(path)
    loaded = Frontier.load(path)
    assert same(loaded, frontier)
    at_s = deadline_s(frontier, share)
    assert loaded.bound_j(at_s) == frontier.bound_j(at_s)
    assert loaded.plan_for(at_s) == frontier.plan_for(at_s)
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


@settings(fixed, max_examples=40)
@given(dag=dags(12), share=shares())
def test_a_saved_plan_loads_as_it_was(dag: PipelineDag, share: float, tmp_path_factory):
    path, again = (tmp_path_factory.mktemp("plan") / name for name in ("p.yaml", "again.yaml"))
    frontier = trace(dag)
    plan = frontier.plan_for(deadline_s(frontier, share))
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("deadline_s", [1, np.float64(0.9), np.float32(0.9)])
def test_deadlines_of_any_number_type_give_the_same_file(frontier: Frontier, folder: Path, deadline_s):
    for name, asked_s in (("typed.yaml", deadline_s), ("plain.yaml", float(deadline_s))):
        solve(frontier.profile, frontier.schedule).plan_for(asked_s).save(name)
    assert (folder / "typed.yaml").read_bytes() == (folder / "plain.yaml").read_bytes()


def test_two_processes_write_the_same_bytes(tmp_path: Path, frontier: Frontier, plan: Plan):
    frontier.save(tmp_path / "frontier.npz")
    plan.save(tmp_path / "plan.yaml")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", MAKE, str(Path(__file__).parent)]
        subprocess.run(command, cwd=tmp_path / name, check=True, timeout=100)
        for file in ("frontier.npz", "plan.yaml"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / file).read_bytes()


def test_a_plan_reads_well(plan: Plan, folder: Path):
    plan.save("plan.yaml")
    lines = (folder / "plan.yaml").read_text().splitlines()
    assert lines[:2] == ["format: perseus-planner/plan", "version: 1"]
    assert {"gpu: smooth", "origin: measured", "schedule: 1f1b", "blocking_power_w: 83.64"} <= set(lines)
    assert f"time_s: {plan.time_s}" in lines
    clock = plan.clocks["1B2"]
    assert any(line.startswith("- {1F0: ") and line.endswith(f"1B2: {clock}}}") for line in lines)


def test_what_cannot_be_written_says_so(frontier: Frontier, plan: Plan, folder: Path):
    for saved, error in ((frontier, FrontierError), (plan, PlanError)):
        with pytest.raises(error) as caught:
            saved.save("none/file")
        assert str(caught.value) == "none/file: cannot be written: No such file or directory; check the folder"
    assert list(folder.iterdir()) == []
