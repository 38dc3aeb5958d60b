"""The examples run on the CPU with real ranks; profiling and plans do not change their losses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import EXAMPLES, by_themselves, ended, ranks, started

from perseus_planner.cli import main
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs import Run

ROOT = EXAMPLES.parent
ENGINES = {
    "torch": (),
    "deepspeed": ("deepspeed.pipe",),
    "megatron": ("megatron.core.models.gpt", "megatron.core.pipeline_parallel"),
}  #: engine -> modules of it that its example imports


def losses(output: str) -> list[str]:
    return re.findall(r"step \d+: loss \d+\.\d+", output)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_profiles_plans_and_trains_with_the_same_losses(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need(engine)
    example = [str(EXAMPLES / f"train_{engine}.py"), "--gpu", "emulated:a100-sxm"]
    # runtime/test_unmodified.py starts ranks with each launcher; here it would take long to import
    # engines again.
    outputs = [
        _forked(
            engine, tmp_path, [*example, "--local_rank=0"] if engine == "deepspeed" else example
        )
    ]
    if engine != "torch":  # tests of the profiler and of the runtime compare more torch schedules
        outputs.append(_forked(engine, tmp_path, [*example, "--no-plan"]))
    assert {len(losses(each)) for each in outputs} == {4}
    assert len({tuple(losses(each)) for each in outputs}) == 1
    profile = Profile.load(tmp_path / "trained" / "profile.yaml")
    assert (profile.stages, profile.origin, profile.gpu) == (
        2,
        "simulated",
        "simulated a100-sxm slower=50000",
    )
    assert set(profile.measurements) == {Key(stage, kind) for stage in (0, 1) for kind in "FB"}
    assert (
        profile.measurements[1, "F"][0].time_s > profile.measurements[0, "F"][0].time_s
    )  # the head and the loss
    assert_ran_as_planned(tmp_path / "trained")
    assert (
        "so that iterations take longer than planned, and much longer while it is busy.\n"
        in outputs[0]
    )
    _, _, next_steps = outputs[0].partition(
        "Wrote trained/profile.yaml, trained/frontier.npz, trained/plan.yaml and the folder "
        "trained/run. Next:\n"
    )
    commands = re.findall("^  planner (.*)", next_steps, re.MULTILINE)
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert CliRunner().invoke(main, command.split()).exit_code == 0


def assert_ran_as_planned(folder: Path) -> None:
    plan, run = Plan.load(folder / "plan.yaml"), Run.load(folder / "run")
    assert len(run.ranks) == len(plan.schedule.ranks) == 2
    time_s = run.time_s(run.newest_version)
    assert time_s is not None
    assert plan.time_s < time_s
    for rank, order in zip(run.ranks, plan.schedule.ranks, strict=True):
        assert len(rank.iterations) == 3
        for iteration in rank.iterations:
            assert iteration.is_as_planned
            ran = [
                (each.computation, each.clock) for each in rank.computations[iteration.iteration]
            ]
            assert ran == [(each, plan.clocks[str(each)]) for each in order]


def _forked(engine: str, folder: Path, script: Sequence[str]) -> str:
    """Return what two ranks print that are forked from a process with the engine imported."""
    everyone = ranks("script", 2, folder, *script, imports=ENGINES[engine])
    assert [each.code for each in everyone] == [0, 0], [each.stderr for each in everyone]
    return "".join(each.stdout for each in everyone)


def _need(engine: str) -> None:
    """Skip if the engine is not installed. It is only looked up: importing it takes seconds and
    warns.
    """
    from importlib.util import find_spec

    for name in ("torch", engine):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone from which nothing is installed."""
    for name in ("perseus_planner", "profiler", "runtime", "examples"):
        # With what is compiled, so that no process has to do that again, and without what other
        # processes are just writing, which is gone a moment later.
        left = ("profile.*", "frontier.npz", "plan.yaml", "run", "*.pyc.*", ".kernels-*")
        ignored = shutil.ignore_patterns(*left)
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    return tmp_path


def test_the_job_of_the_examples_is_profiled_in_a_bare_clone_by_a_rank_for_each_stage(
    clone: Path,
) -> None:
    _need("torch")
    found = ended(
        started(["-c", "import perseus_planner.runtime.hook as hook; print(hook.__file__)"], clone)
    )
    assert found.stdout == f"{clone}/perseus_planner/runtime/hook.py\n"
    command = ["-m", *["perseus_planner", "profile", "examples/job.yaml", "--stages", "2"]]
    # test_unmodified.py starts ranks with torchrun, which would import torch once more here.
    everyone = by_themselves(2, clone, *command, "--split-backward")
    assert [each.code for each in everyone] == [0, 0], [each.stderr for each in everyone]
    output = "".join(each.stdout for each in everyone)
    assert output.startswith(
        "Profile of 2 stages, simulated a100-sxm (simulated: no GPU was touched); blocking"
    )
    assert output.endswith("\nWrote examples/profile.yaml\nWrote examples/profile.csv\n")
    assert {
        key.kind for key in Profile.load(clone / "examples" / "profile.yaml").measurements
    } == set("FBIW")


def test_the_job_of_the_examples_is_profiled_in_one_process_from_another_folder(
    folder: Path,
) -> None:
    _need("torch")
    options = ["--observe", "-o", "profile.yaml"]
    command = ["-m", "perseus_planner", "profile", str(EXAMPLES / "job.yaml"), *options]
    result = ended(started(command, folder))
    # A busy machine takes so long that it says how far it is.
    said = [line for line in result.stderr.splitlines() if not line.startswith("Profiling: ")]
    assert (result.code, said) == (0, [])
    assert Profile.load(folder / "profile.yaml").stages == 4
