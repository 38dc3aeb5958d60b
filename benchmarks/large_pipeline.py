"""Number 4: a pipeline of twice the stages and many microbatches, each in a separate process.

Run as a program, this file measures one pipeline and prints JSON; `measure` runs it so.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from certificates import is_convex, worst_certificate
from data import CASES, MissingError, Size, profile_of
from results import Check, Section, Table

from perseus_planner import Profile, schedules, solve
from perseus_planner.profiles.measurement import Measurement

_COLUMNS = {
    "stages": ("stages", ""),
    "computations": ("computations", "d"),
    "breakpoints": ("breakpoints", "d"),
    "solve_s": ("whole frontier, s", ".2f"),
    "peak_gb": ("peak memory, GB", ".2f"),
    "plan_s": ("a plan at 1.00, s", ".2f"),
    "gap": ("it above the bound, %", ".3f"),
    "plan_peak_gb": ("peak with the plan, GB", ".2f"),
    "certificate": ("bound to certificates, relative", ".1e"),
}
_SEED = 1
_SPREAD = 0.05
_CERTIFIED = 5


def measure(size: Size) -> Section:
    """Solve the large pipeline twice: with stages that all differ, and with stages that are copies."""
    stages, microbatches = size.large
    rows = [_in_a_process(stages, microbatches, variant) for variant in ("scaled", "tiled")]
    worst = max(row["certificate"] for row in rows)
    return Section(
        4,
        f"{stages} stages x {microbatches} microbatches",
        f"Time and memory (peak resident set of the whole process) measured on this machine, each in a process of its "
        f"own after a small solve that loads the compiled code. The profile is simulated: the {CASES[0].name} stages "
        f"repeated, and in the first row each stage's seconds and joules times a factor in {1 - _SPREAD:.2f} to "
        f"{1 + _SPREAD:.2f} (seed {_SEED}). To reach: 20 s and 2 GB.",
        [Table(_COLUMNS, rows)],
        [
            Check("both frontiers are convex, their times fall", all(row["convex"] for row in rows)),
            Check(
                f"at {_CERTIFIED} times along each the bound equals its certificates to {worst:.1e} (limit 1e-9)",
                worst <= 1e-9,
            ),
            Check("both plans at 1.00 meet their deadline", all(row["in_time"] for row in rows)),
            Check("neither plan is below its bound", min(row["gap"] for row in rows) >= -1e-10),
        ],
    )


def _in_a_process(stages: int, microbatches: int, variant: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), str(stages), str(microbatches), variant]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _repeated(stages: int, variant: str) -> Profile:
    """The stages of the first measured profile over and over, scaled or as they are."""
    profile, draw = profile_of(CASES[0]), random.Random(_SEED)
    table = {}
    for stage in range(stages):
        factor = draw.uniform(1 - _SPREAD, 1 + _SPREAD) if variant == "scaled" else 1.0
        for kind in "FB":
            points = profile.measurements[stage % profile.stages, kind]
            table[stage, kind] = tuple(Measurement(m.clock_mhz, m.time_s * factor, m.energy_j * factor) for m in points)
    return Profile(table, profile.blocking_power_w, profile.gpu, "simulated")


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def _measured(stages: int, microbatches: int, variant: str) -> dict[str, Any]:
    profile = _repeated(stages, variant)
    _ = solve(profile, schedules.one_f_one_b(stages, 1)).energies_j
    begin_s = time.perf_counter()
    frontier = solve(profile, schedules.one_f_one_b(stages, microbatches))
    _ = frontier.energies_j
    solve_s, peak_gb = time.perf_counter() - begin_s, _peak_gb()
    begin_s = time.perf_counter()
    plan = frontier.plan_for(frontier.baseline_time_s)
    plan_s, plan_peak_gb = time.perf_counter() - begin_s, _peak_gb()
    return {
        "stages": {"scaled": "all different", "tiled": "copies of 8"}[variant],
        "computations": len(frontier.dag.computations),
        "breakpoints": len(frontier.times),
        "solve_s": solve_s,
        "peak_gb": peak_gb,
        "plan_s": plan_s,
        "plan_peak_gb": plan_peak_gb,
        "gap": 100 * (plan.energy_j / plan.bound_j - 1),
        "in_time": plan.time_s <= plan.deadline_s,
        "convex": is_convex(frontier),
        "certificate": worst_certificate(frontier, _CERTIFIED),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(_measured(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
    except MissingError as error:
        sys.exit(str(error))
