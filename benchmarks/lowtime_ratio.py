"""Number 2: lowtime and this planner on the same profile, schedule and machine."""

from __future__ import annotations

import math
import statistics
from typing import Any

from data import STAGES, Case, Size, frontier_of
from frontier_times import whole_frontier
from lowtime_runs import (
    LowtimeRun,
    fits_of,
    lowtime_run,
    require_lowtime,
    same_plans,
    same_problem,
)
from lowtime_walk import LOWTIME_VERSION, Fits
from results import Check, Section, Table
from timing import median_ms, seconds

from perseus_planner import Frontier

_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "lowtime_points": ("lowtime: points", "d"),
    "lowtime_s": ("lowtime, s", ".1f"),
    "breakpoints": ("ours: breakpoints", "d"),
    "median_ms": ("ours: median, ms", ".1f"),
    "ratio": ("ratio", ".0f"),
    "above_median": ("lowtime's plans above the bound at their time: median, %", ".2f"),
    "above_most": ("most, %", ".2f"),
    "same_problem_ms": ("lowtime's problem by our solver, ms", ".0f"),
    "same_plans": ("plans of that equal to lowtime's, %", ".1f"),
}
_LEAST = -1e-12  #: rounding of floats may put a plan this far below the bound, relative


def measure(size: Size) -> Section:
    """Run both solvers, and compare every plan of lowtime with the bound.

    Raises:
        MissingError: If lowtime cannot be loaded.
    """
    require_lowtime()
    rows = [
        _row(case, microbatches, size)
        for case in size.cases
        for microbatches in size.lowtime_microbatches
    ]
    least = min(row["above_least"] for row in rows)
    return Section(
        2,
        f"Against lowtime {LOWTIME_VERSION}",
        f"Times measured on this machine in one run; {STAGES} stages, 1F1B, the same measured "
        f"profiles, precedences and blocking power; lowtime's tau {size.lowtime_unit_s * 1e3:g} "
        "ms. For lowtime, one call of its solver counts, without fitting its curves or building "
        f"its graph; for ours, the median of {size.repetitions} calls as in number 1, with its "
        "graph. To reach: 2000 at 24.",
        [Table(_COLUMNS, rows)],
        [
            Check(
                "no plan of lowtime, replayed from the measured points of its clocks, is below "
                f"our bound at its time (least {least:+.1e} relative)",
                least >= _LEAST,
            )
        ],
        [
            "lowtime's options are made as in Zeus' example: blocking energy subtracted, then "
            "dominated options removed, then `ExponentialModel(search_strategy='best')`. Its "
            "frontier spans the same clocks as ours.",
            "lowtime gives a point per tau, this planner the breakpoints of an exact curve. The "
            "last two columns are our solver on lowtime's problem, its fitted curves at whole "
            "multiples of tau, and the share of the plans made from that solution by lowtime's "
            "choice of clocks whose replayed time and energy equal those of lowtime's plans.",
        ],
    )


def _row(case: Case, microbatches: int, size: Size) -> dict[str, Any]:
    frontier, run = (
        frontier_of(case, microbatches),
        lowtime_run(case, microbatches, size.lowtime_unit_s),
    )
    ours_s = seconds(lambda: whole_frontier(case, microbatches), size.repetitions)
    fits = fits_of(case, size.lowtime_unit_s)
    same_problem(fits, microbatches)
    same_s = seconds(lambda: same_problem.__wrapped__(fits, microbatches), 3)
    above = above_bound(frontier, run)
    return {
        "profile": case.name,
        "microbatches": microbatches,
        "lowtime_points": len(run.plans),
        "lowtime_s": run.solve_s,
        "breakpoints": len(frontier.times),
        "median_ms": median_ms(ours_s),
        "ratio": 1e3 * run.solve_s / median_ms(ours_s),
        "above_least": min(above),
        "above_median": 100 * statistics.median(above),
        "above_most": 100 * max(above),
        "same_problem_ms": median_ms(same_s),
        "same_plans": 100 * _share_of_same_plans(run, fits, frontier),
    }


def _share_of_same_plans(run: LowtimeRun, fits: Fits, frontier: Frontier) -> float:
    """Return the share of plans from the exact solution of lowtime's problem that replay like
    lowtime's plans.
    """
    units = [round(plan.claimed_s / fits.unit_s) for plan in run.plans]
    same = [
        math.isclose(ours.time_s, theirs.time_s)
        and math.isclose(ours.effective_j, theirs.effective_j)
        for ours, theirs in zip(same_plans(fits, frontier.dag, units), run.plans, strict=True)
    ]
    return sum(same) / len(same)


def above_bound(frontier: Frontier, run: LowtimeRun) -> list[float]:
    """Return how far the replayed energy of each plan is above the bound at its replayed time,
    relative.
    """
    blocked_w = frontier.profile.blocking_power_w * frontier.profile.stages
    return [
        (plan.effective_j + blocked_w * plan.time_s)
        / frontier.bound_j(max(plan.time_s, frontier.min_time_s))
        - 1
        for plan in run.plans
    ]
