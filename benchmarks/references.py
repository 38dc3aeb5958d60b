"""Number 6: comparison with the frontiers of the Perseus artifact and the plans of EnvPipe."""

from __future__ import annotations

from typing import Any

import numpy as np
from data import STAGES, Case, Size, dag_of, envpipe_points, frontier_of, reference_frontier
from lowtime_runs import fits_of, require_lowtime, same_plans, same_problem
from results import Check, Section, Table

_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "points": ("points", "d"),
    "impossible": ("faster than any clocks", "d"),
    "against_bound": ("its energy to our bound at its times, %", ""),
    "same": ("its energy to its problem solved by us, relative", ".1e"),
    "late": ("replayed: time to printed, %", ""),
    "energy": ("replayed: energy to printed, %", ""),
    "above": ("replayed: above our bound, %", ""),
}
_ENVPIPE_COLUMNS = {
    "profile": ("EnvPipe on", ""),
    "microbatches": ("microbatches", "d"),
    "slowdown": ("time to all clocks at maximum", ".4f"),
    "saving": ("saving, %", ".2f"),
    "bound_saving": ("saving at our bound, %", ".2f"),
    "plan_saving": ("of our plan, %", ".2f"),
    "above": ("EnvPipe above the bound, %", ".2f"),
}
_TOLERANCE = 1e-5  #: between two fits of one curve, relative
_WRITTEN = 1e-4  #: relative precision of EnvPipe's written times


def measure(size: Size) -> Section:
    """Compare each reference frontier with ours, solve its problem, and replay its plans.

    Raises:
        MissingError: If lowtime, whose fits are needed, cannot be loaded.
    """
    require_lowtime()
    rows = [_row(case, m, size) for case in size.cases for m in size.reference_microbatches]
    envpipe = [row for case in size.cases for row in _envpipe_rows(case, size)]
    least, worst = min(row["above_least"] for row in rows), max(row["same"] for row in rows)
    return Section(
        6,
        "Against the reference frontiers and EnvPipe",
        "Replayed: the frontiers are those of the Perseus artifact, emulated by its authors from "
        f"the measured profiles; {STAGES} stages, 1F1B. Ranges are least / median / most, over "
        f"all points, and for replayed plans over {size.reference_points} evenly spaced ones.",
        [Table(_COLUMNS, rows), Table(_ENVPIPE_COLUMNS, envpipe)],
        [
            Check(
                "our solver on the reference's own problem (its fits, whole ticks) gives its "
                f"energies to {worst:.1e} at every point (limit {_TOLERANCE:.0e})",
                worst <= _TOLERANCE,
            ),
            Check(
                "no replayed plan of the reference is below our bound at its time (least "
                f"{least:+.1e} relative)",
                least >= -1e-12,
            ),
            Check(
                "EnvPipe's plans are not below our bound",
                min(row["above"] for row in envpipe) >= -100 * _WRITTEN,
            ),
        ],
        [
            "The reference's printed energies differ from ours, and can be below our bound, for "
            "three reasons. Its energy comes from a fitted exponential, not from the chosen "
            "clocks. It rounds the time of every computation down to its tick (1 ms; 0.1 ms on "
            "the A40), so its printed times are too short, and its fastest are faster than any "
            "clocks. It removes options that are dominated in time and energy before it subtracts "
            "the blocking energy, so it loses slow clocks that pay, and its frontier ends earlier.",
            "Replayed times are longer than printed where rounding down shortened them, and "
            "shorter where clocks are far apart: each computation gets the next faster one, which "
            "costs energy and leaves slack.",
            "The artifact has no plans for these frontiers, so they are reconstructed: its "
            "problem is solved exactly, each computation gets the slowest clock whose rounded "
            "time fits, as in lowtime, and the plan is replayed from the measured points. Number "
            "2 shows how well such plans match lowtime's.",
            "Above our bound is at the replayed time of each plan; GPUs wait at the blocking power "
            "until its end.",
        ],
    )


def _row(case: Case, microbatches: int, size: Size) -> dict[str, Any]:
    frontier, points = frontier_of(case, microbatches), reference_frontier(case, microbatches)
    blocked_w = case.blocking_power_w * STAGES
    fits = fits_of(case, case.reference_unit_s, filter_first=True)
    theirs = same_problem(fits, microbatches)
    units = [round(time_s / fits.unit_s) for time_s, _ in points]
    same = [
        abs(theirs.bound_j(unit) / energy_j - 1)
        for unit, (_, energy_j) in zip(units, points, strict=True)
    ]
    possible = [(time_s, energy_j) for time_s, energy_j in points if time_s >= frontier.min_time_s]
    against = [100 * (energy_j / frontier.bound_j(time_s) - 1) for time_s, energy_j in possible]
    sampled = np.unique(
        np.linspace(0, len(points) - 1, size.reference_points).round().astype(int)
    ).tolist()
    plans = list(same_plans(fits, dag_of(case, microbatches), [units[i] for i in sampled]))
    energies_j = [plan.effective_j + blocked_w * plan.time_s for plan in plans]
    above = [
        energy_j / frontier.bound_j(max(plan.time_s, frontier.min_time_s)) - 1
        for plan, energy_j in zip(plans, energies_j, strict=True)
    ]
    return {
        "profile": case.name,
        "microbatches": microbatches,
        "points": len(points),
        "impossible": len(points) - len(possible),
        "against_bound": _spread(against),
        "same": max(same),
        "late": _spread(
            [100 * (plan.time_s / points[i][0] - 1) for plan, i in zip(plans, sampled, strict=True)]
        ),
        "energy": _spread(
            [100 * (e / points[i][1] - 1) for e, i in zip(energies_j, sampled, strict=True)]
        ),
        "above": _spread([100 * value for value in above]),
        "above_least": min(above),
    }


def _spread(values: list[float]) -> str:
    return " / ".join(
        f"{value:+.2f}" for value in (min(values), float(np.median(values)), max(values))
    )


def _envpipe_rows(case: Case, size: Size) -> list[dict[str, Any]]:
    rows = []
    for microbatches, written_s, energy_j in envpipe_points(case):
        if microbatches not in size.reference_microbatches:
            continue
        frontier = frontier_of(case, microbatches)
        time_s = (
            max(written_s, frontier.min_time_s)
            if written_s >= frontier.min_time_s * (1 - _WRITTEN)
            else written_s
        )
        bound_j, plan = frontier.bound_j(time_s), frontier.plan_until(time_s, on_time=None)
        row = {
            "profile": case.name,
            "microbatches": microbatches,
            "slowdown": written_s / frontier.baseline_time_s,
            "saving": 100 * (1 - energy_j / frontier.baseline_energy_j),
            "bound_saving": 100 * (1 - bound_j / frontier.baseline_energy_j),
            "plan_saving": 100 * plan.saving_j / plan.baseline_energy_j,
            "above": 100 * (energy_j / bound_j - 1),
        }
        rows.append(row)
    return rows
