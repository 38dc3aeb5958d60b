"""Profiles of sharded stages, and other releases of torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import done, loaded

from perseus_planner import Plan, Profile, solve_dag
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.sharding import difference, remark
from perseus_planner.schedules import one_f_one_b
from perseus_planner.schedules.dag import PipelineDag

ROWS = (Measurement(1400, 1.0, 100.0), Measurement(1000, 1.2, 80.0))
PROFILE = Profile({(0, "F"): ROWS, (0, "B"): ROWS, (1, "F"): ROWS, (1, "B"): ROWS}, 30.0)
CONDITIONS = {"torch": "2.13.0+cu130", "sharded": "by fully_shard"}


def plan_of(profile: Profile) -> Plan:
    frontier = solve_dag(PipelineDag.from_schedule(profile, one_f_one_b(2, 4)))
    return frontier.plan_until(frontier.baseline_time_s)


@pytest.mark.parametrize(
    ("profiled", "trained"),
    [
        ("2.13.0", "2.15.0+cu132"),
        ("2.15.1", "2.14.1"),
        ("2.9.1", "2.10.0"),
        ("2.6.0", "3.0.0"),
    ],
)
def test_a_profile_does_not_carry_over_to_another_way_to_gather_and_reduce(
    profiled: str, trained: str
) -> None:
    assert difference(profiled, trained) == (
        f"its sharded stages were profiled with torch {profiled} and train with torch {trained}, "
        "which gathers weights and reduces gradients at other moments"
    )


@pytest.mark.parametrize(
    ("profiled", "trained"),
    [
        ("2.13.0", "2.14.1"),
        ("2.15.0", "2.16.0"),
        ("2.6.0", "2.9.1"),
        (None, "2.15.0"),
        ("2.13.0", None),
        ("a build of ours", "2.15.0"),
    ],
)
def test_a_profile_carries_over_or_is_not_known_to_differ(
    profiled: str | None, trained: str | None
) -> None:
    assert difference(profiled, trained) is None


@pytest.mark.parametrize(
    ("version", "releases"),
    [
        ("2.9.1", "below 2.10"),
        ("2.13.0", "2.10 or later and below 2.15"),
        ("2.15.0", "2.15 or later"),
    ],
)
def test_a_profile_says_with_which_torch_it_is_to_be_used(version: str, releases: str) -> None:
    assert remark({**CONDITIONS, "torch": version}) == (
        f"Its sharded stages were profiled with torch {version}: train with torch {releases}, or "
        "profile again, as others gather weights and reduce gradients at other moments."
    )
    assert remark({"torch": version}) is None
    assert remark({"sharded": "by fully_shard"}) is None


def test_a_plan_names_the_torch_of_its_profile_and_older_files_name_none(tmp_path: Path) -> None:
    plan = plan_of(replace(PROFILE, conditions=CONDITIONS))
    assert plan.torch == "2.13.0+cu130"
    assert Plan.loads(plan.dumps()) == plan
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    older = plan_of(PROFILE)
    assert older.torch is None
    older.save(tmp_path / "older.yaml")
    assert "torch" not in (tmp_path / "older.yaml").read_text()
    assert Plan.load(tmp_path / "older.yaml") == older


def test_solve_says_which_torch_to_train_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replace(PROFILE, conditions=CONDITIONS).save("profile.yaml")
    command = "solve profile.yaml --schedule 1f1b --microbatches 4 -o frontier.npz"
    assert f"{remark(CONDITIONS)}\n" in done(command)
    assert remark(CONDITIONS) in loaded(command)["remarks"]


def test_solve_and_plan_say_that_torch_refuses_1f1b_with_few_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.yaml")
    expected = (
        "torch.distributed.pipelining refuses 1F1B with fewer microbatches (1) than stages (2); "
        "other engines run it.\n"
    )
    solve = "solve profile.yaml --schedule {} --microbatches {} -o frontier.npz"
    assert expected in done(solve.format("1f1b", 1))
    assert expected in done("plan frontier.npz --slowdown 1.0 -o plan.yaml")
    assert "refuses 1F1B" not in done(solve.format("gpipe", 1))
    assert "refuses 1F1B" not in done(solve.format("1f1b", 2))
