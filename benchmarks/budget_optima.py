"""Number 21: small plans with few clock changes beside the proved optimum.

The optimum is that of a mixed-integer program, which HiGHS solves apart from the solver: each
computation has one of its rows, each rank changes its clock at most so often, and an iteration that
lasts until the deadline takes the least energy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from data import CASES, STAGES, MissingError, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, Profile, schedules, solve

_CHANGES = (2, 4)
_COLUMNS = {
    "changes": ("changes", "d"),
    "cases": ("cases with a proved optimum", "d"),
    "short": ("of its saving missed, mean %", ".2f"),
    "most": ("most %", ".2f"),
}
_LIMIT = 0.3  #: percent of the saving, mean
_BELOW = 0.1  #: percent; HiGHS proves an optimum to a few parts in 100,000 of the energy
_SIZES = ((3, 4), (4, 4))  #: stages and microbatches
_CLOCKS = 8
_SLOWEST = 1.15
_LIMIT_S = 60.0
_GAP = 2e-5  #: relative; closer to its bound an optimum counts as proved


def measure(size: Size) -> Section:
    """Plan each drawn pipeline with each number of changes, and compare with the optimum."""
    rows = list(_rows(size))
    return Section(
        21,
        "Few clock changes beside the optimum",
        f"Replayed from the measured profiles; 3 and 4 stages drawn from "
        f"unlike ones (time, energy and slope changed by up to 5 %), 4 microbatches, {_CLOCKS} "
        f"clocks, 1F1B, a deadline of 1.00x to {_SLOWEST}x; clock changes free. Plans are as "
        "measured (`on_time=None`). Savings are those of an iteration that lasts until the "
        "deadline, compared with all clocks at maximum.",
        [Table(_COLUMNS, rows)],
        [
            Check("no plan misses its deadline", not any(row["late"] for row in rows)),
            Check("no plan is below the optimum", all(row["least"] >= -_BELOW for row in rows)),
            *(
                Check(
                    f"{row['changes']} changes: {row['short']:.2f} % of the saving is missed in "
                    f"the mean (limit {_LIMIT} %)",
                    row["short"] <= _LIMIT,
                )
                for row in rows
                if size == Size()
            ),
        ],
        [f"A case counts if HiGHS proves its optimum within {_LIMIT_S:g} s."],
    )


def _rows(size: Size) -> Iterator[dict[str, Any]]:
    cases = list(_drawn(size.budget_cases))
    for changes in _CHANGES:
        short, late = [], False
        for frontier, deadline_s in cases:
            best_j = _least_j(frontier, deadline_s, changes)
            if best_j is None:
                continue
            plan = frontier.plan_until(deadline_s, max_changes=changes, on_time=None)
            late = late or plan.time_s > deadline_s
            waiting_w = frontier.dag.waiting_w
            spent_j = plan.energy_j + waiting_w * (deadline_s - plan.time_s)
            full_j = frontier.baseline_energy_j + waiting_w * (
                deadline_s - frontier.baseline_time_s
            )
            short.append(100 * (spent_j - best_j) / (full_j - best_j))
        yield {
            "changes": changes,
            "cases": len(short),
            "short": fmean(short),
            "most": max(short),
            "least": min(short),
            "late": late,
        }


def _drawn(cases: int) -> Iterator[tuple[Frontier, float]]:
    """Yield so many small pipelines of the measured profiles, each with a deadline in seconds."""
    random = np.random.default_rng(0)
    for number in range(cases):
        case, (stages, microbatches) = CASES[number // 2 % len(CASES)], _SIZES[number % 2]
        whole = unlike_stages(profile_of(case), number)
        some = sorted(random.choice(STAGES, stages, replace=False).tolist())
        frontier = solve(_part(whole, some), schedules.one_f_one_b(stages, microbatches))
        yield frontier, random.uniform(1.0, _SLOWEST) * frontier.baseline_time_s


def _part(profile: Profile, stages: list[int]) -> Profile:
    """Return the profile of some stages at a few clocks."""
    measurements = {}
    for (stage, kind), rows in profile.measurements.items():
        if stage in stages:
            kept = [round(i * (len(rows) - 1) / (_CLOCKS - 1)) for i in range(_CLOCKS)]
            measurements[stages.index(stage), kind] = tuple(rows[i] for i in kept)
    return replace(profile, measurements=measurements)


def _least_j(frontier: Frontier, deadline_s: float, changes: int) -> float | None:
    """Return the least energy of an iteration that lasts until the deadline, over all plans with
    at most so many changes, joules; None if it is not proved in a minute.

    Raises:
        MissingError: If there is no scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise MissingError("no HiGHS: install scipy") from None
    dag, keys = frontier.dag, frontier.dag.iteration.keys
    rows = [frontier.profile.measurements[key] for key in keys]
    clocks = [row.clock_mhz for row in rows[0]]
    n, k = len(keys), len(clocks)
    changed, end = n * k, n * k + n  # the variables: n x k choices, n changes after, n ends
    entries: list[dict[int, float]] = []
    limits: list[tuple[float, float]] = []

    def add(entry: dict[int, float], low: float, high: float) -> None:
        entries.append(entry)
        limits.append((low, high))

    for place, waits in enumerate(dag.iteration.waits):
        times = {place * k + i: -row.time_s for i, row in enumerate(rows[place])}
        add({place * k + i: 1.0 for i in range(k)}, 1.0, 1.0)
        for other, lag_s in (*waits, (None, 0.0)):
            before = {} if other is None else {end + other: -1.0}
            add({end + place: 1.0, **before, **times}, lag_s, np.inf)
    for program in dag.iteration.programs:
        for place, following in zip(program, (*program[1:], program[0]), strict=True):
            for i in range(k):
                clock = {place * k + i: -1.0, following * k + i: 1.0}
                add({changed + place: 1.0, **clock}, 0.0, np.inf)
        add({changed + place: 1.0 for place in program}, 0.0, changes)
    matrix = np.zeros((len(entries), end + n))
    for line, entry in zip(matrix, entries, strict=True):
        line[list(entry)] = list(entry.values())
    cost_j = [
        row.energy_j - frontier.profile.blocking_w(key.stage) * row.time_s
        for key, of_key in zip(keys, rows, strict=True)
        for row in of_key
    ]
    found = milp(
        np.concatenate([cost_j, np.zeros(2 * n)]),
        constraints=LinearConstraint(matrix, *np.transpose(limits)),
        bounds=Bounds(0, np.repeat([1.0, deadline_s - frontier.profile.overhead_s], [end, n])),
        integrality=np.repeat([1, 0, 0], [n * k, n, n]),
        options={"mip_rel_gap": _GAP, "time_limit": _LIMIT_S},
    )
    return float(found.fun) + dag.waiting_w * deadline_s if found.status == 0 else None
