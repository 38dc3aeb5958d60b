"""Number 34: recompute as a mode, within memory for all activations down to hardly any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from data import Case, Size, profile_of
from recomputed import KEEP, recomputed
from results import Check, Section, Table

from perseus_planner import Frontier, solve
from perseus_planner.base.errors import InfeasibleDeadline
from perseus_planner.profiles.modes import OWN
from perseus_planner.solver.modes import ModeProblem, baseline

NUMBER = 34
_INPUT = 1 / 20  #: of a microbatch's activations, which recompute keeps
_LIMITS = (1.4, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, None)  #: microbatches of activations; None for any
_MICROBATCHES = 24
_COLUMNS = {
    "profile": ("profile", ""),
    "limit": ("limit", ""),
    "used": ("used", ".2f"),
    "kept": ("kept, %", ".0f"),
    "base": ("1.00x is", ""),
    "clocks": ("saved by clocks alone, %", ".2f"),
    "saved": ("saved, %", ".2f"),
    "gap": ("above the bound, %", ".2f"),
    "fastest": ("fastest, x", ".3f"),
    "seconds": ("solve and plan, s", ".1f"),
}


def measure(size: Size) -> Section:
    """Return what is saved at 1.00x for each memory limit."""
    microbatches = min(_MICROBATCHES, 2 * size.microbatches[0])
    limits = _LIMITS if len(size.cases) > 1 else (_LIMITS[1], None)
    rows = [row for case in size.cases for row in _rows(case, microbatches, limits)]
    by_case = [[row for row in rows if row["profile"] == case.name] for case in size.cases]
    same = [
        (one, other)
        for of_case in by_case
        for one, other in pairwise(of_case)
        if one["base"] == other["base"]
    ]
    return Section(
        number=NUMBER,
        title="Recompute as a mode, by memory",
        how=f"*Replayed* from measured profiles: 8 stages, {microbatches} microbatches, 1F1B, at "
        "the time of the fastest single mode that fits, all clocks at maximum (1.00x).",
        tables=[Table(_COLUMNS, rows)],
        checks=[
            Check(
                "plans are within memory",
                all(row["limit"] == "none" or row["used"] <= float(row["limit"]) for row in rows),
            ),
            Check(
                "modes and clocks save no less than clocks alone",
                all(row["saved"] >= row["clocks"] - 0.01 for row in rows),
            ),
            Check(
                "more memory saves no less (within 0.1 points)",
                all(other["saved"] >= one["saved"] - 0.1 for one, other in same),
            ),
            Check("no plan is below its bound", all(row["gap"] >= -1e-6 for row in rows)),
        ],
        notes=[
            "Measured are forward and backward without recompute. A backward with recompute is "
            "taken to be that backward and one forward at the same clock: *simulated* to that "
            "extent. It is the training's own way; the other mode keeps activations.",
            f"Memory is counted in activations of one microbatch in one stage, and recompute keeps "
            f"{_INPUT:g} of them until its backward, which then takes the rest: an assumption, "
            "alike for all stages.",
            "Modes are chosen for each microbatch of each stage, and clocks for each computation. "
            "The bound holds for any such choice; where it is percents away, that is partly the "
            "bound's distance, partly the choice's.",
        ],
    )


def _rows(
    case: Case, microbatches: int, limits: tuple[float | None, ...]
) -> Iterator[dict[str, Any]]:
    for limit in limits:
        begin_s = time.perf_counter()
        profile = recomputed(profile_of(case), limit, _INPUT)
        frontier = solve(profile, "1f1b", microbatches=microbatches)
        plan = frontier.plan_until(frontier.baseline_time_s, on_time=None)
        seconds = time.perf_counter() - begin_s
        base = {key.mode for key in baseline(frontier.dag).iteration.keys}.pop()
        modes = tuple(key.mode for key in plan.iteration.keys)
        alone = _single(frontier, base).plan_until(frontier.baseline_time_s, on_time=None)
        counted = ModeProblem(_with_limit(frontier, 1e6).dag)  # counts without a limit as well
        yield {
            "profile": case.name,
            "limit": "none" if limit is None else f"{limit:g}",
            "used": max(counted._taken(row, modes) for row in counted.memory_rows),
            "kept": 100 * modes.count(KEEP) / len(modes),
            "base": "recompute" if base == OWN else "keep",
            "clocks": 100 * (1 - alone.energy_j / frontier.baseline_energy_j),
            "saved": 100 * plan.saving_j / plan.baseline_energy_j,
            "gap": 100 * (plan.energy_j / plan.bound_j - 1),
            "fastest": _fastest_s(frontier) / frontier.baseline_time_s,
            "seconds": seconds,
        }


def _with_limit(frontier: Frontier, limit: float) -> Frontier:
    modes = frontier.profile.modes
    assert modes is not None
    profile = replace(frontier.profile, modes=replace(modes, memory_bytes=limit))
    return replace(frontier, dag=frontier.dag.with_profile(profile))


def _single(frontier: Frontier, mode: str) -> Frontier:
    """Return the frontier of one mode for all."""
    rows = {
        key.in_mode(OWN): points
        for key, points in frontier.profile.measurements.items()
        if key.mode == mode
    }
    profile = replace(frontier.profile, measurements=rows, modes=None)
    return solve(profile, frontier.schedule)


def _fastest_s(frontier: Frontier) -> float:
    try:
        return frontier.plan_until(frontier.min_time_s, on_time=None).time_s
    except InfeasibleDeadline as error:
        return error.least_time_s
