"""Number 20: plans above two bounds where every stage is unlike the others."""

from __future__ import annotations

import time
from functools import cache
from statistics import fmean
from typing import Any

from data import STAGES, Case, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, schedules, solve

_COLUMNS = {
    "profile": ("profile", ""),
    "slowdown": ("deadline", ".2f"),
    "relaxed": ("above the relaxed bound, mean %", ".3f"),
    "most": ("worst %", ".3f"),
    "points": ("above the bound for measured clocks, mean %", ".3f"),
    "most_points": ("worst %", ".3f"),
    "plan_s": ("plan, CPU s at most", ".2f"),
}
_MICROBATCHES = 24
_SLOWDOWNS = (1.00, 1.02, 1.05, 1.10)
_LIMIT = 0.4  #: percent above the bound for measured clocks, mean
_ROUNDING = 1e-10  #: percent


def measure(size: Size) -> Section:
    """Plan for every deadline on data sets of unlike stages."""
    _above(_frontier(size.cases[0], 0), 1.2)  # loads the compiled code
    rows = [_row(case, slowdown, size) for case in size.cases for slowdown in _SLOWDOWNS]
    points = fmean(row["points"] for row in rows)
    least = min(min(row["least_points"], row["relaxed"] - row["points"]) for row in rows)
    return Section(
        20,
        "Plans above two bounds, on unlike stages",
        f"Simulated from the measured profiles; {STAGES} stages, 1F1B, {_MICROBATCHES} "
        "microbatches; every stage's time, energy, and slope of both over the clock changed by up "
        f"to 5 %; {size.noise_seeds} data sets, seeds from 0. Plans are as measured "
        "(`on_time=None`). The energy is that of an iteration that lasts until the deadline. "
        "Number 3 has the profiles as they are.",
        [Table(_COLUMNS, rows)],
        [
            Check(
                "no plan is below the bound for measured clocks, which is not below the relaxed "
                "one",
                least >= -_ROUNDING,
            ),
            *(
                [Check(f"{points:.2f} % above it (limit {_LIMIT} %)", points <= _LIMIT)]
                if size == Size()
                else []
            ),
        ],
        [
            "*Plan*: CPU time of a plan for a new deadline; the frontier is solved before.",
        ],
    )


def _row(case: Case, slowdown: float, size: Size) -> dict[str, Any]:
    found = [_above(_frontier(case, seed), slowdown) for seed in range(size.noise_seeds)]
    relaxed, points, plan_s = zip(*found, strict=True)
    return {
        "profile": case.name,
        "slowdown": slowdown,
        "relaxed": fmean(relaxed),
        "most": max(relaxed),
        "points": fmean(points),
        "most_points": max(points),
        "least_points": min(points),
        "plan_s": max(plan_s),
    }


@cache
def _frontier(case: Case, seed: int) -> Frontier:
    return solve(
        unlike_stages(profile_of(case), seed), schedules.one_f_one_b(STAGES, _MICROBATCHES)
    )


def _above(frontier: Frontier, slowdown: float) -> tuple[float, float, float]:
    """Return by how many % a plan is above the relaxed bound and the one for measured clocks,
    and its CPU seconds.
    """
    deadline_s = min(slowdown * frontier.baseline_time_s, frontier.max_time_s)
    begin_s = time.process_time()
    plan = frontier.plan_until(deadline_s, on_time=None)
    plan_s = time.process_time() - begin_s
    energy_j = plan.energy_j + frontier.dag.waiting_w * (deadline_s - plan.time_s)
    bounds_j = frontier.bound_j(deadline_s), frontier.point_bound_j(deadline_s)
    relaxed, points = (100 * (energy_j / bound_j - 1) for bound_j in bounds_j)
    return relaxed, points, plan_s
