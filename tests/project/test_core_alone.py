"""The core works without any extension, and with each of them deleted: copies of the package, from
which their folders are gone, do what the demo does and train by a plan. In every run the copy
without all extensions does so, and the others show their help; the soak has them train too.

`make core-alone` runs the tests of the core in such a copy too.
"""

from __future__ import annotations

import json
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
from strategies import soaks

NAMES = [room.partition(".")[2] for room in EDGE]
ALL = "all"

#: Runs commands, and then trains on two ranks of torch pipelining on emulated GPUs, once for each
#: of the given arguments of `planner_runtime`; all in one process and those that it forks, as each
#: start would import the same again. What a rank says of its training goes to a file.
PROGRAM = """
import json
import os
import sys
import traceback
from pathlib import Path
import perseus_planner
from perseus_planner.cli import main

folder, commands, trainings = sys.argv[1], *map(json.loads, sys.argv[2:])
assert perseus_planner.__file__.startswith(folder), perseus_planner.__file__
for words in commands:
    main(words, standalone_mode=False)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from perseus_planner.runtime import planner_runtime

def train(rank, port, options):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.manual_seed(rank)
    stage = pipelining.PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    with planner_runtime(schedule, gpu="emulated:a100-sxm", **options) as runtime:
        for _ in range(6):
            x = torch.ones(8, 8)
            schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
        problem = runtime.problem
    assert problem is None, problem
    dist.barrier()
    dist.destroy_process_group()
    return "trained"

for name, (port, options) in trainings.items():
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(LOCAL_RANK=str(rank))
            try:
                said = train(rank, port, options)
            except BaseException:
                said = traceback.format_exc()
            Path(folder, f"{name}-{rank}.txt").write_text(said)
            os._exit(0)
    for rank in ranks:
        os.waitpid(rank, 0)
"""


@pytest.fixture(scope="module")
def copy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A copy of the package without an extension, or without all."""
    folder = tmp_path_factory.mktemp(f"without-{request.param}")
    for name in FOLDERS:
        # Without what other processes are just writing, which is gone a moment later.
        passing = shutil.ignore_patterns("*.pyc.*", ".kernels-*")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=passing)
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


def trained(folder: Path, name: str) -> list[str]:
    """Return what the two ranks of a training have said."""
    return [(folder / f"{name}-{rank}.txt").read_text() for rank in range(2)]


def gone_of(copy: Path) -> str:
    """Return the name of the extension that a copy is without, or that it is without all."""
    return copy.name.removeprefix("without-")[:-1]


@pytest.mark.parametrize("copy", [ALL, *NAMES], indirect=True)
def test_help_names_the_commands_that_are_there(copy: Path):
    done = run(copy, "-m", "perseus_planner", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(
        f"\n  {name}" in done.stdout for name in ("profile", "solve", "plan", "run", "reset")
    )
    there = {"explore": "explore", "service": "serve", "lab": "simulate", "inference": "inference"}
    gone = gone_of(copy)
    for extension, command in there.items():
        is_there = gone not in (ALL, extension)
        assert (f"\n  {command} " in done.stdout) == is_there, (extension, done.stdout)


PLAN = [
    ["profile", "--gpu", "simulated:a100-sxm", "--stages", "2", "-o", "two.yaml"],
    ["solve", "two.yaml", "--schedule", "1f1b", "--microbatches", "4", "-o", "two.npz"],
    ["plan", "two.npz", "--slowdown", "1.00", "-o", "two-plan.yaml"],
]


@pytest.mark.parametrize("copy", [ALL, *soaks(*NAMES)], indirect=True)
def test_the_demo_runs_and_its_plan_trains_two_ranks(copy: Path):
    """Without a plan, the training says which extension is missing."""
    (copy / "demo").mkdir()
    commands = demo_commands()
    assert len(commands) == 4
    learns = gone_of(copy) not in (ALL, "autopilot")
    trainings = {"planned": (free_port(), {"plan": "two-plan.yaml"})}
    if not learns:
        trainings["unplanned"] = (free_port(), {})
    done = run(copy, "-c", PROGRAM, str(copy), json.dumps(commands + PLAN), json.dumps(trainings))
    assert done.returncode == 0, done.stderr
    assert (copy / "demo" / "report.html").stat().st_size > 10_000
    assert trained(copy, "planned") == ["trained"] * 2
    told = (
        "the extension 'autopilot' learns clocks while training runs without a plan, and it is not"
    )
    for text in [] if learns else trained(copy, "unplanned"):
        assert told in text
        assert "or give planner_runtime a plan" in text
