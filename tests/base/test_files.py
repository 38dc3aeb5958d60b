"""Frontier and plan files come back as they were, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from refusals import refusal
from strategies import deadline_s, drawn, problems, shares, smooth_profile
from validators import check_replay, same

from perseus_planner import Frontier, Plan
from perseus_planner.base.errors import FrontierError, PlanError, PlannerError
from perseus_planner.base.files import write_file
from perseus_planner.plans.plan import _digest
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import one_f_one_b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant
from perseus_planner.solver.frontier import solve, solve_dag

ROOT = Path(__file__).parents[2]
MAKE = """
import sys
sys.path[:0] = sys.argv[1:]
from effort import reduce_effort
from strategies import smooth_profile
from perseus_planner import schedules, solve
reduce_effort()
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


@drawn(12, 100, dag=problems(12), share=shares())
def test_a_saved_frontier_loads_as_it_was_and_plans_alike(
    dag: PipelineDag, share: float, tmp_path_factory
):
    path, again = (tmp_path_factory.mktemp("frontier") / name for name in ("f.npz", "again.npz"))
    frontier = solve_dag(dag)
    frontier.save(path)
    loaded = Frontier.load(path)
    assert same(loaded, frontier)
    at_s = deadline_s(frontier, share)
    assert loaded.bound_j(at_s) == frontier.bound_j(at_s)
    assert loaded.plan_for(at_s, on_time=None) == frontier.plan_for(at_s, on_time=None)
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


@drawn(12, 100, dag=problems(12), share=shares())
def test_a_saved_plan_loads_as_it_was(dag: PipelineDag, share: float, tmp_path_factory):
    path, again = (tmp_path_factory.mktemp("plan") / name for name in ("p.yaml", "again.yaml"))
    frontier = solve_dag(dag)
    plan = frontier.plan_for(deadline_s(frontier, share), on_time=None)
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    check_replay(loaded)
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_a_plan_file_holds_only_the_parts_of_an_iteration_that_are_not_defaults(
    frontier: Frontier, folder: Path
):
    points = smooth_profile(2).measurements
    profile = Profile(
        {**points, (1, "B.sync"): points[1, "B"]}, (83.64, 70.0), overhead_s=0.5, gpus_per_stage=8
    )
    all_of_it = solve(
        profile,
        frontier.schedule,
        transfer=Transfer(0.004, (0.002,)),
        operations=[
            FixedOperation("step", "end", 0.25, 30.5, where=(1,)),
            FixedOperation("load", "before F", 0.125),
        ],
        variants=[Variant("B.sync", "last", stages=(1,))],
    )
    for name, each in (("plain", frontier), ("all", all_of_it)):
        each.plan_for(each.baseline_time_s).save(f"{name}.yaml")
    plain, furnished = (
        yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("plain", "all")
    )
    assert set(furnished) - set(plain) == {"kinds", "operations", "waits"}
    assert furnished["kinds"] == {"1B2": "B.sync"}
    assert furnished["operations"] == {
        **{f"{stage}load{m}": [stage, 0.125, None] for stage in range(2) for m in range(3)},
        "1step": [1, 0.25, 30.5],
    }
    assert furnished["waits"]["1F0"] == {"1load0": 0.0, "0F0": 0.004}
    assert furnished["waits"]["0B2"] == {"0B1": 0.0, "1B2": 0.002}
    assert (
        furnished["blocking_power_w"],
        furnished["overhead_s"],
        furnished["gpus_per_stage"],
    ) == (
        [83.64, 70.0],
        0.5,
        8,
    )
    assert "1B.sync" in furnished["measurements"]


@pytest.mark.parametrize(
    "type_of", [float, np.float64, np.float32, Fraction], ids=lambda each: each.__name__
)
def test_numbers_of_any_type_beside_a_schedule_give_the_same_files(
    folder: Path, type_of: Callable[[float], object]
):
    number = type_of(0.25)
    frontier = solve(
        smooth_profile(2),
        one_f_one_b(2, 3),
        transfer=Transfer(number, [number]),
        operations=[
            FixedOperation("step", "end", number, number),
            FixedOperation("load", "start", number),
        ],
    )
    plan = frontier.plan_for(frontier.baseline_time_s)
    frontier.save("f.npz")
    plan.save("p.yaml")
    assert Plan.load("p.yaml") == plan
    assert Frontier.load("f.npz").dag == frontier.dag
    assert set(yaml.safe_load((folder / "p.yaml").read_text())["operations"]["0step"]) == {0, 0.25}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kinds", {"1B2": "I"}),
        ("kinds", {"1B2": 7}),
        ("operations", {"step": [0, 1.0, None]}),
        ("operations", {"0step": [0, 1.0]}),
        ("operations", {"0step": [5, 1.0, None]}),
        ("operations", {"0step": [0, -1.0, None]}),
        ("operations", {"0step": [0, 1.0, None]}),  # waits are said of others only
        ("operations", None),
        ("waits", {}),
        ("waits", {"0F0": {"9F9": 0.0}}),
        ("waits", []),
        ("overhead_s", "soon"),
        ("blocking_power_w", [83.64, "much"]),
        ("blocking_power_w", [83.64]),
        ("gpus_per_stage", [8]),
    ],
)
def test_a_plan_file_with_a_malformed_iteration_is_refused(
    plan: Plan, folder: Path, key: str, value: object
):
    plan.save("plan.yaml")
    content = yaml.safe_load((folder / "plan.yaml").read_text())
    names = plan.iteration.names
    waits = {
        name: dict.fromkeys((names[other] for other in before), 0.25)
        for name, before in zip(names, plan.iteration.predecessors, strict=True)
    }
    content = {**content, "waits": waits, key: value}
    del content["digest"], content["format"], content["version"]
    document = {
        "format": "perseus-planner/plan",
        "version": 1,
        "digest": _digest(content),
        **content,
    }
    (folder / "changed.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(PlanError) as caught:
        Plan.load("changed.yaml")
    assert str(caught.value).startswith("changed.yaml: is not a plan: ")
    assert str(caught.value).endswith("; make it again with `planner plan`")


def test_a_plan_file_of_0_2_is_read_if_it_asks_for_no_least_time_at_a_clock(
    plan: Plan, folder: Path
):
    plan.save("new.yaml")
    content = yaml.safe_load((folder / "new.yaml").read_text())
    head = {name: content.pop(name) for name in ("format", "version")}
    del content["digest"]
    for name, min_dwell_s in (("old.yaml", 0.0), ("held.yaml", 0.05)):
        content["min_dwell_s"] = min_dwell_s
        document = {**head, "digest": _digest(content), **content}
        (folder / name).write_text(yaml.safe_dump(document, sort_keys=False))
    assert Plan.load("old.yaml") == plan
    sent = json.loads(plan.dumps())
    assert Plan.loads(json.dumps({**sent, "min_dwell_s": 0.0})) == plan
    assert refusal(PlanError, Plan.load, "held.yaml") == (
        "held.yaml: min_dwell_s: plans keep no least time at a clock any more; plan again with "
        "--max-changes"
    )


@pytest.mark.parametrize("deadline_s", [1, np.float64(0.9), np.float32(0.9)])
def test_deadlines_of_any_number_type_give_the_same_file(
    frontier: Frontier, folder: Path, deadline_s
):
    for name, asked_s in (("typed.yaml", deadline_s), ("plain.yaml", float(deadline_s))):
        solve(frontier.profile, frontier.schedule).plan_for(asked_s).save(name)
    assert (folder / "typed.yaml").read_bytes() == (folder / "plain.yaml").read_bytes()


def test_two_processes_write_the_same_bytes(tmp_path: Path, frontier: Frontier, plan: Plan):
    frontier.save(tmp_path / "frontier.npz")
    plan.save(tmp_path / "plan.yaml")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        folders = [ROOT / "tests" / "support", ROOT / "benchmarks"]
        command = [sys.executable, "-c", MAKE, *map(str, folders)]
        subprocess.run(command, cwd=tmp_path / name, check=True, timeout=300)
        for file in ("frontier.npz", "plan.yaml"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / file).read_bytes()


def test_a_plan_reads_well(plan: Plan, folder: Path):
    plan.save("plan.yaml")
    lines = (folder / "plan.yaml").read_text().splitlines()
    assert lines[:2] == ["format: perseus-planner/plan", "version: 1"]
    assert {"gpu: smooth", "origin: measured", "schedule: 1f1b", "blocking_power_w: 83.64"} <= set(
        lines
    )
    assert f"time_s: {plan.time_s}" in lines
    clock = plan.clocks["1B2"]
    assert any(line.startswith("- {1F0: ") and line.endswith(f"1B2: {clock}}}") for line in lines)


def test_a_file_that_cannot_be_written_is_refused(frontier: Frontier, plan: Plan, folder: Path):
    for saved, error in ((frontier, FrontierError), (plan, PlanError)):
        assert (
            refusal(error, saved.save, "none/file")
            == "none/file: cannot be written: No such file or directory; check the folder"
        )
    assert list(folder.iterdir()) == []


def test_writing_a_file_never_changes_the_umask_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    called: list[int] = []
    umask = os.umask
    monkeypatch.setattr(os, "umask", lambda mask: called.append(mask) or umask(mask))
    write_file(tmp_path / "file", "content", PlannerError)
    assert called == []
