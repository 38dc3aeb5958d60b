"""Number 45: plans of small problems beside the proved optimum.

The optimum is that of a mixed-integer program, which HiGHS solves apart from the solver: each
computation has one of its operating points, and an iteration that lasts until the deadline takes
the least energy.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from data import CASES, STAGES, MissingError, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, schedules
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve_dag

NUMBER = 45
_COLUMNS = {
    "number": ("problem", "d"),
    "schedule": ("schedule", ""),
    "computations": ("computations", "d"),
    "points": ("operating points of each, mean", ".1f"),
    "slowdown": ("deadline", ".2f"),
    "relaxed": ("plan above its relaxed bound, % of energy", ".3f"),
    "above": ("above the best that HiGHS found", ".4f"),
    "proved": ("that above its own bound", ".4f"),
    "plan_s": ("planning, CPU s", ".2f"),
}
_PROBLEMS = 40
_SHAPES = (
    ("1f1b", 2, 8),
    ("1f1b", 4, 8),
    ("1f1b", 8, 4),
    ("1f1b", 6, 5),
    ("1f1b", 3, 6),
    ("gpipe", 4, 6),
    ("1f1b", 4, 4),
    ("interleaved", 4, 4),
)  #: schedule, stages, microbatches
_CLOCKS = (4, 6, 8, 12, 24)
_SLOWDOWNS = (1.0, 1.01, 1.03, 1.06, 1.1, 1.2)
_LIMIT = 0.05  #: percent of the energy of an iteration
_LIMIT_S = 60.0  #: of HiGHS, for each problem
_GAP = 3e-5  #: relative; closer to its bound an optimum counts as proved
_PROVED = 0.01  #: percent of the energy of an iteration: likewise


def measure(size: Size) -> Section:
    """Plan each drawn problem, and compare with the optimum."""
    rows = [_row(number) for number in range(_PROBLEMS if size == Size() else 2)]
    proved = [row for row in rows if row["proved"] <= _PROVED]
    worst = max(row["above"] for row in rows)
    return Section(
        NUMBER,
        "Small problems beside the optimum",
        "Replayed from the measured profiles; stages drawn from unlike ones (time, energy and "
        "slope changed by up to 5 %), clocks drawn too, up to 64 computations, clock changes free. "
        "Plans are as measured (`on_time=None`). Energies are those of an iteration that lasts "
        "until the deadline; negative ones are better than what HiGHS found.",
        [Table(_COLUMNS, rows)],
        [
            Check("no plan misses its deadline", not any(row["late"] for row in rows)),
            Check("no plan is below a bound", all(r["above"] >= -r["proved"] - 1e-6 for r in rows)),
            Check(
                f"plans are {worst:.3f} % above the best known at worst (limit {_LIMIT} %)",
                worst <= _LIMIT,
            ),
        ],
        [f"{len(proved)} of {len(rows)} optima are proved by HiGHS within {_LIMIT_S:g} s each."],
    )


def _row(number: int) -> dict[str, Any]:
    frontier, name, slowdown = _drawn(number)
    dag, deadline_s = frontier.dag, slowdown * frontier.baseline_time_s
    began_s = time.process_time()
    plan = frontier.plan_until(deadline_s, on_time=None)
    plan_s = time.process_time() - began_s
    within_s = deadline_s - dag.profile.overhead_s
    spent_j = plan.energy_j - dag.waiting_w * plan.time_s
    best_j, bound_j = _least_j(dag, within_s)
    whole_j = plan.energy_j
    return {
        "number": number,
        "schedule": name,
        "computations": len(dag.keys),
        "points": float(np.mean([len(dag.points[key]) for key in dag.keys])),
        "slowdown": slowdown,
        "relaxed": 100 * (plan.energy_j - plan.bound_j) / whole_j,
        "above": 100 * (spent_j - best_j) / whole_j,
        "proved": 100 * (best_j - bound_j) / whole_j,
        "plan_s": plan_s,
        "late": plan.time_s > deadline_s,
    }


def _drawn(number: int) -> tuple[Frontier, str, float]:
    """Return the frontier of a drawn problem, its name, and a deadline as a multiple of its
    baseline.
    """
    random = np.random.default_rng([number, 52])
    kind, stages, microbatches = _SHAPES[number // 2 % len(_SHAPES)]
    whole = unlike_stages(profile_of(CASES[number % 2]), number)
    some = sorted(random.choice(STAGES, stages, replace=False).tolist())
    clocks = int(random.choice(_CLOCKS))
    measurements = {}
    for (stage, of_kind), rows in whole.measurements.items():
        if stage in some:
            lower = random.choice(np.arange(1, len(rows)), min(clocks, len(rows)) - 1, False)
            kept = sorted({0, *lower.tolist()})
            measurements[some.index(stage), of_kind] = tuple(rows[i] for i in kept)
    profile = replace(whole, measurements=measurements)
    if kind == "interleaved":
        schedule = schedules.interleaved_1f1b(stages // 2, 2, microbatches)
    elif kind == "gpipe":
        schedule = schedules.gpipe(stages, microbatches)
    else:
        schedule = schedules.one_f_one_b(stages, microbatches)
    dag = PipelineDag.from_schedule(profile, schedule)
    name = f"{kind} {stages} x {microbatches}"
    return solve_dag(dag), name, float(random.choice(_SLOWDOWNS))


def _least_j(dag: PipelineDag, within_s: float) -> tuple[float, float]:
    """Return the least effective energy that HiGHS finds, and its bound, joules.

    Raises:
        MissingError: If there is no scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        raise MissingError("no HiGHS: install scipy") from None
    points = [dag.points[key] for key in dag.keys]
    first = np.cumsum([0, *map(len, points)]).tolist()
    ends, count = first[-1], len(points)  # the variables: choices, then ends
    entries: list[tuple[int, int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(entry: dict[int, float], least: float, most: float) -> None:
        entries.extend((len(low), variable, value) for variable, value in entry.items())
        low.append(least)
        high.append(most)

    for place, waits in enumerate(dag.iteration.waits):
        choices = range(first[place], first[place + 1])
        add(dict.fromkeys(choices, 1.0), 1.0, 1.0)
        takes = {
            i: -point.time_s / within_s for i, point in zip(choices, points[place], strict=True)
        }
        add({ends + place: 1.0, **takes}, 0.0, np.inf)
        for other, lag_s in waits:
            add({ends + place: 1.0, ends + other: -1.0, **takes}, lag_s / within_s, np.inf)
    lines, variables, values = zip(*entries, strict=True)
    cost_j = np.array([point.effective_j for own in points for point in own])
    unit_j = float(np.abs(cost_j).max())
    found = milp(
        np.concatenate([cost_j / unit_j, np.zeros(count)]),
        constraints=LinearConstraint(
            coo_array((values, (lines, variables)), shape=(len(low), ends + count)).tocsr(),
            low,
            high,
        ),
        bounds=Bounds(0, 1),
        integrality=np.repeat([1, 0], [ends, count]),
        options={"mip_rel_gap": _GAP, "time_limit": _LIMIT_S},
    )
    return float(found.fun) * unit_j, float(found.mip_dual_bound) * unit_j
