"""`planner warm-up` compiles all that other commands need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import done
from strategies import smooth_profile

PROGRAM = """
import sys

from perseus_planner.cli import main
from perseus_planner.solver.kernels import when_compiling

compiled = []
main(["warm-up"], standalone_mode=False)
with when_compiling(lambda: compiled.append(1)):
    for command in (
        "solve profile.yaml --schedule 1f1b --microbatches 8 -o f.npz",
        "plan f.npz --slowdown 1.0 -o p.yaml",
        "plan f.npz --slowdown 1.1 --max-changes 8 --on-time 95% -o p.yaml",
        "simulate f.npz --pipelines 2 --iterations 10",
    ):
        main(command.split(), standalone_mode=False)
rooms = [room for name, room in sys.modules.items() if name.startswith("perseus_planner.solver.")]
kernels = {each for room in rooms for each in vars(room).values() if hasattr(each, "signatures")}
print(len(compiled), [each.__name__ for each in kernels if len(each.signatures) > 1])
"""


@pytest.mark.needs("autopilot")
def test_after_it_nothing_is_compiled_and_nothing_was_twice(folder: Path):
    smooth_profile(2).save("profile.yaml")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    # `_anneal` of clocks is there for changes that cost time and for those that cost nothing.
    assert ran.stdout.splitlines()[-1] == "0 ['_anneal']"


def test_it_says_that_all_is_compiled_if_it_is(folder: Path):
    done("warm-up")
    assert done("warm-up") == "Everything is compiled already.\n"
