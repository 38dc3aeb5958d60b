"""Number 4: pipelines of many stages and microbatches, each in a separate process.

Run as a program, this file measures one pipeline and prints JSON; `measure` runs it so.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from certificates import is_convex, worst_certificate
from data import CASES, Case, MissingError, Size, profile_of
from noisy_plans import default_plan
from results import Check, Section, Table

from perseus_planner import Frontier, Profile, schedules, solve
from perseus_planner.profiles.measurement import Measurement

_SLOWDOWN = 1.1
_COLUMNS = {
    "size": ("stages x microbatches", ""),
    "stages": ("stages", ""),
    "breakpoints": ("breakpoints", "d"),
    "unit_w": ("step of prices, W", ".3g"),
    "solve_s": ("whole frontier, CPU s", ".2f"),
    "plan_s": ("a plan at 1.00 as measured, CPU s", ".2f"),
    "default_s": ("a default one, CPU s", ".2f"),
    "straggler_s": (f"loaded, a plan beside a straggler of {_SLOWDOWN:.1f}x, CPU s", ".2f"),
    "peak_gb": ("peak memory, GB", ".2f"),
    "gap": ("plan above the bound, %", ".3f"),
    "certificate": ("bound to certificates, relative", ".1e"),
}
_SEED = 1
_SPREAD = 0.05
_CERTIFIED = 5
_LIMITS_S = {(16, 256): 4.0, (32, 256): 15.0, (64, 256): 60.0}  #: CPU seconds of frontier and plan
_MOST_GB = 1.0


def measure(size: Size) -> Section:
    """Solve large pipelines whose stages all differ, and one whose stages are copies."""
    kinds = [
        (*size.large[0], "tiled"),
        *((stages, microbatches, "scaled") for stages, microbatches in size.large),
    ]
    rows = [_in_a_process(*kind) for kind in kinds]
    exact = [row["certificate"] for row in rows if row["unit_w"] < 1e-3]
    coarse = [row["certificate"] for row in rows if row["unit_w"] >= 1e-3]
    return Section(
        4,
        "Large pipelines",
        "CPU time and memory (peak resident set of the whole process, plan included) measured on "
        "this machine, each in a process of its own after a small one that loads the compiled "
        f"code. The profile is simulated: the {CASES[0].name} stages repeated; where all differ, "
        f"each stage's seconds and joules times a factor in {1 - _SPREAD:.2f} to "
        f"{1 + _SPREAD:.2f} (seed {_SEED}). To reach: "
        + ", ".join(f"{limit:g} s for {a} x {b}" for (a, b), limit in _LIMITS_S.items())
        + f", and {_MOST_GB:g} GB. Distances to the bound, and times beside a straggler, are of "
        "plans as measured (`on_time=None`).",
        [Table(_COLUMNS, rows)],
        [
            Check("the frontiers are convex, their times fall", all(row["convex"] for row in rows)),
            Check(
                f"at {_CERTIFIED} times along each the bound equals its certificates to "
                f"{max(exact, default=0.0):.1e} (limit 1e-9), where prices are coarse to "
                f"{max(coarse, default=0.0):.1e} (limit 5e-4)",
                max(exact, default=0.0) <= 1e-9 and max(coarse, default=0.0) <= 5e-4,
            ),
            Check("the plans meet their deadlines", all(row["in_time"] for row in rows)),
            Check("no plan is below its bound", min(row["gap"] for row in rows) >= -1e-10),
            Check(
                f"no process takes more than {_MOST_GB:g} GB",
                max(row["peak_gb"] for row in rows) <= _MOST_GB,
            ),
        ],
    )


def _in_a_process(stages: int, microbatches: int, variant: str) -> dict[str, Any]:
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        str(stages),
        str(microbatches),
        variant,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def repeated(stages: int, variant: str, case: Case = CASES[0]) -> Profile:
    """The stages of a measured profile over and over, scaled or as they are."""
    profile, draw = profile_of(case), random.Random(_SEED)
    table = {}
    for stage in range(stages):
        factor = draw.uniform(1 - _SPREAD, 1 + _SPREAD) if variant == "scaled" else 1.0
        for kind in "FB":
            points = profile.measurements[stage % profile.stages, kind]
            table[stage, kind] = tuple(
                Measurement(m.clock_mhz, m.time_s * factor, m.energy_j * factor) for m in points
            )
    return Profile(table, profile.blocking_power_w, profile.gpu, "simulated")


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def _measured(stages: int, microbatches: int, variant: str) -> dict[str, Any]:
    profile = repeated(stages, variant)
    small = solve(profile, schedules.one_f_one_b(stages, 2))  # loads the compiled code
    default_plan(small, small.baseline_time_s)
    begin_s = time.process_time()
    frontier = solve(profile, schedules.one_f_one_b(stages, microbatches))
    _ = frontier.energies_j
    solve_s = time.process_time() - begin_s
    begin_s = time.process_time()
    plan = frontier.plan_until(frontier.baseline_time_s, on_time=None)
    plan_s = time.process_time() - begin_s
    begin_s = time.process_time()
    default = default_plan(frontier, frontier.baseline_time_s)
    default_s = time.process_time() - begin_s
    with tempfile.TemporaryDirectory() as folder:
        frontier.save(Path(folder) / "frontier.npz")
        loaded = Frontier.load(Path(folder) / "frontier.npz")
    begin_s = time.process_time()
    beside = loaded.plan_beside_straggler(_SLOWDOWN * loaded.baseline_time_s, on_time=None)
    return {
        "size": f"{stages} x {microbatches}",
        "stages": {"scaled": "all different", "tiled": "copies of 8"}[variant],
        "breakpoints": len(frontier.times),
        "unit_w": frontier.scaled.power_unit_w,
        "solve_s": solve_s,
        "plan_s": plan_s,
        "default_s": default_s,
        "straggler_s": time.process_time() - begin_s,
        "peak_gb": _peak_gb(),
        "gap": 100 * (plan.energy_j / plan.bound_j - 1),
        "in_time": all(each.time_s <= each.deadline_s for each in (plan, default, beside)),
        "convex": is_convex(frontier),
        "certificate": worst_certificate(frontier, _CERTIFIED),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(_measured(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
    except MissingError as error:
        sys.exit(str(error))
