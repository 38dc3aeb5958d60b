"""The core works without any extension, and with each of them deleted: copies of the package, from
which their folders are gone, do what the demo does and train by a plan.

`make core-alone` runs the tests of the core in such a copy too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import EDGE, EXTENSIONS, FOLDERS, ROOT
from launching import free_port

NAMES = [room.partition(".")[2] for room in EDGE]
ALL = "all"

#: two ranks of torch pipelining on emulated GPUs; the arguments are those of `planner_runtime`.
TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
import perseus_planner
from perseus_planner.runtime import planner_runtime

assert perseus_planner.__file__.startswith(sys.argv[1]), perseus_planner.__file__
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
stage = pipelining.PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
options = {"gpu": "emulated:a100-sxm", **eval(sys.argv[2])}
with planner_runtime(schedule, **options) as runtime:
    for _ in range(6):
        x = torch.ones(8, 8)
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
    problem = runtime.problem
assert problem is None, problem
dist.barrier()
dist.destroy_process_group()
print("trained", rank)
"""


@pytest.fixture(scope="module", params=[ALL, *NAMES])
def copy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A copy of the package without an extension, or without all."""
    folder = tmp_path_factory.mktemp(f"without-{request.param}")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    extensions = folder / FOLDERS[0] / EXTENSIONS
    shutil.rmtree(extensions if request.param == ALL else extensions / request.param)
    yield folder
    shutil.rmtree(folder)


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def demo_commands() -> list[list[str]]:
    """Return the commands of `planner` in the target `demo` of the Makefile."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    return [
        line.split()[1:] for line in lines if re.match(r"\t\$\(BIN\)/planner \w+ .*demo/", line)
    ]


def train(folder: Path, options: dict[str, object]) -> list[subprocess.CompletedProcess[str]]:
    """Train on two ranks; return how they ended."""
    (folder / "training.py").write_text(TRAINING)
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "training.py", str(folder), repr(options)],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "XDG_STATE_HOME": str(folder / "state"),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    for process in started:
        stdout, stderr = process.communicate(timeout=300)
        ended.append(subprocess.CompletedProcess((), process.returncode, stdout, stderr))
    return ended


def test_help_names_the_commands_that_are_there(copy: Path):
    done = run(copy, "-m", "perseus_planner", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(
        f"\n  {name}" in done.stdout for name in ("profile", "solve", "plan", "run", "reset")
    )
    there = {"explore": "explore", "service": "serve", "lab": "simulate", "inference": "inference"}
    gone = copy.name.removeprefix("without-")[:-1]
    for extension, command in there.items():
        is_there = gone not in (ALL, extension)
        assert (f"\n  {command} " in done.stdout) == is_there, (extension, done.stdout)


def test_the_demo_runs_and_its_plan_trains_two_ranks(copy: Path):
    (copy / "demo").mkdir()
    commands = demo_commands()
    assert len(commands) == 4
    for words in commands:
        done = run(copy, "-m", "perseus_planner", *words)
        assert done.returncode == 0, done.stderr
    assert (copy / "demo" / "report.html").stat().st_size > 10_000
    for words in (
        ("profile", "--gpu", "simulated:a100-sxm", "--stages", "2", "-o", "two.yaml"),
        ("solve", "two.yaml", "--schedule", "1f1b", "--microbatches", "4", "-o", "two.npz"),
        ("plan", "two.npz", "--slowdown", "1.00", "-o", "two-plan.yaml"),
    ):
        done = run(copy, "-m", "perseus_planner", *words)
        assert done.returncode == 0, done.stderr
    ended = train(copy, {"plan": "two-plan.yaml"})
    assert [each.returncode for each in ended] == [0, 0], ended
    assert "trained 1" in ended[1].stdout


def test_training_without_a_plan_says_which_extension_is_missing(copy: Path):
    gone = copy.name.removeprefix("without-")[:-1]
    if gone not in (ALL, "autopilot"):
        pytest.skip("the autopilot is there")
    ended = train(copy, {})
    assert all(each.returncode == 1 for each in ended)
    told = (
        "the extension 'autopilot' learns clocks while training runs without a plan, and it is not"
    )
    assert all(told in each.stderr for each in ended), ended[0].stderr
    assert all("or give planner_runtime a plan" in each.stderr for each in ended)
