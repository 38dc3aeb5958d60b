"""How long another build of the planner takes to solve and plan the same iterations, beside this
one.

Run as a program, with the checkout of the other build:
`python benchmarks/walk_builds.py CHECKOUT -o walk-builds.md`. Each build solves
in turn, in a process of its own, so that both have the same machine. Not a part of `run.py`, as it
needs the other checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SIZES = ((8, 24), (16, 128), (32, 256), (64, 256))  #: stages, microbatches
_REPETITIONS = 2  #: of each build, unless asked for others; the faster run counts
_CASE = 1  #: the A40 profile
_SLOWDOWN = 1.02  #: of the plans


def _solve(stages: int, microbatches: int) -> dict[str, Any]:
    """Solve with the build that this process imports, after a small one that loads its code."""
    import hashlib

    from data import CASES
    from large_pipeline import repeated

    from perseus_planner import Frontier, schedules, solve

    profile = repeated(stages, "scaled", CASES[_CASE])
    small = solve(profile, schedules.one_f_one_b(stages, 2))
    small.plan_until(_SLOWDOWN * small.baseline_time_s, on_time=None)
    small.plan_until(_SLOWDOWN * small.baseline_time_s)
    schedule = schedules.one_f_one_b(stages, microbatches)
    begin_s = time.process_time()
    frontier = solve(profile, schedule)
    taken_s = time.process_time() - begin_s
    with tempfile.TemporaryDirectory() as folder:
        frontier.save(Path(folder) / "frontier.npz")
        loaded = Frontier.load(Path(folder) / "frontier.npz")
    begin_s = time.process_time()
    loaded.plan_until(_SLOWDOWN * loaded.baseline_time_s, on_time=None)
    plan_s = time.process_time() - begin_s
    begin_s = time.process_time()
    loaded.plan_until(_SLOWDOWN * loaded.baseline_time_s)
    default_s = time.process_time() - begin_s
    content = frontier.times.tobytes() + frontier.powers.tobytes()
    return {
        "solve_s": taken_s,
        "plan_s": plan_s,
        "default_s": default_s,
        "breakpoints": len(frontier.times),
        "unit_w": frontier.scaled.power_unit_w,
        "digest": hashlib.sha256(content).hexdigest(),
    }


def _in_build(checkout: Path, stages: int, microbatches: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--solve", f"{stages}x{microbatches}"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _table(other: Path, name: str, sizes: list[tuple[int, int]], repetitions: int) -> str:
    own = Path(__file__).resolve().parents[1]
    lines = [
        "# Solving beside another build",
        "",
        f"`python benchmarks/walk_builds.py CHECKOUT --name {name}`. 1F1B on the A40 profile, "
        "simulated: its stages repeated, each one's seconds and joules times a factor in 0.95 to "
        "1.05. CPU seconds measured on this "
        f"machine, the fastest of {repetitions} runs of each build, which take turns. Plans are "
        f"for {_SLOWDOWN:g}x, as measured; *default plan*: one that is on time with 95 %, in CPU "
        "seconds, and *beside it* over those of a plan as measured.",
        "",
        "| stages x microbatches | breakpoints | step of prices, W | "
        f"solve: {name}, s | this, s | ratio | plan from a loaded frontier: {name}, s | this, s | "
        f"ratio | default plan: {name}, s | this, s | ratio | beside it: {name} | this | "
        "frontiers |",
        "|---|" + "---:|" * 13 + "---|",
    ]
    for stages, microbatches in sizes:
        runs = [
            [_in_build(build, stages, microbatches) for build in (other, own)]
            for _ in range(repetitions)
        ]
        is_equal = len({run["digest"] for pair in runs for run in pair}) == 1
        cells = [f"{stages} x {microbatches}", runs[0][1]["breakpoints"]]
        cells.append(f"{runs[0][1]['unit_w']:.3g}")
        for what in ("solve_s", "plan_s", "default_s"):
            other_s, own_s = (min(run[i][what] for run in runs) for i in range(2))
            cells += [f"{other_s:.2f}", f"{own_s:.2f}", f"{own_s / other_s:.2f}"]
        for i in range(2):
            beside = min(run[i]["default_s"] for run in runs) / min(
                run[i]["plan_s"] for run in runs
            )
            cells.append(f"{beside:.2f}")
        cells.append("equal, bit for bit" if is_equal else "DIFFER")
        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def _size(text: str) -> tuple[int, int]:
    stages, _, microbatches = text.partition("x")
    return int(stages), int(microbatches)


def main() -> None:
    """Compare the builds, or solve one iteration with this process's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--name", default="other", help="of the other build")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--size", action="append", type=_size, help="such as 16x128")
    parser.add_argument("--repetitions", type=int, default=_REPETITIONS, metavar="N")
    parser.add_argument("--solve", type=_size, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.solve:
        print(json.dumps(_solve(*arguments.solve)))
        return
    if arguments.checkout is None:
        parser.error("CHECKOUT: is missing; name the checkout of the other build")
    sizes = arguments.size or list(_SIZES)
    other = arguments.checkout.resolve()
    table = _table(other, arguments.name, sizes, arguments.repetitions)
    if arguments.output:
        arguments.output.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
