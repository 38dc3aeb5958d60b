"""Each example runs on the CPU with real ranks; its losses are those of a training without a profile and a plan."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from launching import EXAMPLES, deepspeed, ended, torchrun

from perseus_planner.plan import Plan
from perseus_planner.profiles import Profile
from perseus_planner.runs import Run

ENGINES = {"torch": "torch", "deepspeed": "deepspeed", "megatron": "megatron.core"}


def losses(said: str) -> list[str]:
    return re.findall(r"step \d+: loss \d+\.\d+", said)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(300)
def test_an_example_profiles_plans_and_trains_as_it_would_without(engine: str, tmp_path: Path) -> None:
    _need(engine)
    example = [str(EXAMPLES / f"train_{engine}.py"), "--gpu", "simulated:a100-sxm"]
    # With and without at once; test_profile_pipeline.py and the runtime's tests compare more of torch's schedules.
    ways = [[], ["--no-plan"]] if engine != "torch" else [[]]
    launchers = [deepspeed if engine == "deepspeed" and not way else torchrun for way in ways]
    starting = [launch(2, tmp_path, *example, *way) for launch, way in zip(launchers, ways, strict=True)]
    everyone = [ended(each) for each in starting]
    assert [each.code for each in everyone] == [0] * len(ways), [each.complained for each in everyone]
    assert {len(losses(each.said)) for each in everyone} == {4}
    assert len({tuple(losses(each.said)) for each in everyone}) == 1
    profile = Profile.load(tmp_path / "profile.yaml")
    assert (profile.stages, profile.origin, profile.gpu) == (2, "simulated", "simulated a100-sxm")
    assert set(profile.measurements) == {(stage, kind) for stage in (0, 1) for kind in "FB"}
    assert profile.measurements[1, "F"][0].time_s > profile.measurements[0, "F"][0].time_s  # the head and the loss
    assert_ran_as_planned(tmp_path)


def assert_ran_as_planned(folder: Path) -> None:
    plan, run = Plan.load(folder / "plan.yaml"), Run.load(folder / "run")
    assert len(run.ranks) == len(plan.schedule.ranks) == 2
    for rank, order in zip(run.ranks, plan.schedule.ranks, strict=True):
        assert len(rank.iterations) == 3
        for iteration in rank.iterations:
            assert iteration.is_as_planned
            ran = [(each.computation, each.clock) for each in rank.computations[iteration.iteration]]
            assert ran == [(each, plan.clocks[str(each)]) for each in order]


def _need(engine: str) -> None:
    """Skip where it is not installed; found, not imported, for an import takes seconds and warns."""
    from importlib.util import find_spec

    top, *_ = ENGINES[engine].split(".")
    for name in ("torch", top):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.timeout(300)
def test_the_job_of_the_examples_is_profiled_by_a_rank_for_each_stage(tmp_path: Path) -> None:
    _need("torch")
    for name in ("job.yaml", "stages.py", "gpt.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    command = torchrun(2, tmp_path, "-m", "perseus_planner", "profile", "job.yaml", "--stages", "2", "--split-backward")
    result = ended(command)
    assert result.code == 0, result.complained
    assert result.said.startswith("Profile of 2 stages, simulated a100-sxm (simulated: no GPU was touched); blocking")
    assert result.said.endswith("\nWrote profile.yaml\nWrote profile.csv\n")
    assert {kind for _, kind in Profile.load(tmp_path / "profile.yaml").measurements} == set("FBIW")
