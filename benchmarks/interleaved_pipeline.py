"""Interleaved 1F1B of 8 ranks x 4 virtual stages x 64 microbatches: its whole frontier, and a plan.

Run as a program, this file measures and prints JSON.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from certificates import is_convex, worst_certificate
from data import CASES, STAGES, Case, profile_of
from timing import seconds

from perseus_planner import Profile, schedules, solve
from perseus_planner.profiles import Measurement

_VIRTUAL_STAGES = 4
_MICROBATCHES = 64
_REPETITIONS = 3
_CERTIFIED = 5
_SEED = 1
_SPREAD = 0.05


def measured() -> list[dict[str, Any]]:
    """Seconds of the whole frontier, a row for each measured profile cut equally and unequally."""
    return [_row(case, cut) for case in CASES for cut in ("equal parts", "unequal parts")]


def split(profile: Profile, cut: str) -> Profile:
    """Each stage in `_VIRTUAL_STAGES` parts, its times and energies divided among them.

    Unequal parts each have a factor in 0.95 to 1.05 as well, so that no two stages are alike.
    """
    draw = random.Random(_SEED)
    table = {}
    for part in range(_VIRTUAL_STAGES):
        for (stage, kind), points in profile.measurements.items():
            factor = draw.uniform(1 - _SPREAD, 1 + _SPREAD) if cut == "unequal parts" else 1.0
            table[part * profile.stages + stage, kind] = tuple(
                Measurement(m.clock_mhz, factor * m.time_s / _VIRTUAL_STAGES, factor * m.energy_j / _VIRTUAL_STAGES)
                for m in points
            )
    return Profile(table, profile.blocking_power_w, profile.gpu, "simulated")


def _row(case: Case, cut: str) -> dict[str, Any]:
    profile = split(profile_of(case), cut)
    _ = solve(profile, schedules.interleaved_1f1b(STAGES, _VIRTUAL_STAGES, STAGES)).energies_j  # compiles
    schedule = schedules.interleaved_1f1b(STAGES, _VIRTUAL_STAGES, _MICROBATCHES)
    taken_s = seconds(lambda: solve(profile, schedule).energies_j, _REPETITIONS)
    frontier = solve(profile, schedule)
    begin_s = time.perf_counter()
    plan = frontier.plan_for(frontier.baseline_time_s)
    return {
        "profile": case.name,
        "stages": cut,
        "computations": len(frontier.dag.computations),
        "breakpoints": len(frontier.times),
        "solve_s": taken_s,
        "plan_s": time.perf_counter() - begin_s,
        "saved_percent": 100 * plan.saving_j / plan.baseline_energy_j,
        "above_bound_percent": 100 * (plan.energy_j / plan.bound_j - 1),
        "convex": is_convex(frontier),
        "certificate": worst_certificate(frontier, _CERTIFIED),
    }


if __name__ == "__main__":
    print(json.dumps(measured(), indent=1))
