"""Number 1: the time of solving the whole exact frontier of a measured profile."""

from __future__ import annotations

from typing import Any

from certificates import POINTS, is_convex, worst_certificate
from data import STAGES, Case, Size, frontier_of, profile_of
from results import Check, Section, Table
from timing import median_ms, seconds

from perseus_planner import Frontier, schedules, solve

_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "computations": ("computations", "d"),
    "breakpoints": ("breakpoints", "d"),
    "median_ms": ("median, ms", ".1f"),
    "least_ms": ("least, ms", ".1f"),
    "certificate": ("bound to certificates, relative", ".1e"),
}


def whole_frontier(case: Case, microbatches: int) -> Frontier:
    """Compute all breakpoints of a profile and their energies; this is timed."""
    frontier = solve(profile_of(case), schedules.one_f_one_b(STAGES, microbatches))
    _ = frontier.energies_j
    return frontier


def measure(size: Size) -> Section:
    """Time every case and prove its frontier optimal at some points."""
    rows: list[dict[str, Any]] = []
    convex = True
    for case in size.cases:
        for microbatches in size.microbatches:
            frontier = frontier_of(case, microbatches)
            taken_s = seconds(
                lambda case=case, m=microbatches: whole_frontier(case, m), size.repetitions
            )  # type: ignore[misc]
            convex = convex and is_convex(frontier)
            row = {
                "profile": case.name,
                "microbatches": microbatches,
                "computations": len(frontier.dag.computations),
                "breakpoints": len(frontier.times),
                "median_ms": median_ms(taken_s),
                "least_ms": 1e3 * taken_s[0],
                "certificate": worst_certificate(frontier),
            }
            rows.append(row)
    worst = max(row["certificate"] for row in rows)
    return Section(
        1,
        "The whole frontier",
        f"Time measured on this machine, {size.repetitions} calls of `solve` after a first one in "
        f"the same process, schedule and all energies included; {STAGES} stages, 1F1B, measured "
        "profiles. To reach: 250 ms at 96.",
        [Table(_COLUMNS, rows)],
        [
            Check("every frontier is convex, its times fall", convex),
            Check(
                f"at {POINTS} times along each frontier the bound equals a feasible relaxed plan "
                f"and a dual flow, both evaluated apart from the solver, to {worst:.1e} (limit "
                "1e-9)",
                worst <= 1e-9,
            ),
        ],
    )
