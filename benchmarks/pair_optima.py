"""Number 51: plans of overlapped pairs beside their bounds and the proved optimum.

The relaxed bound lets a computation have any mixture of two neighbouring clocks, as it does a pair.
HiGHS gives a bound of its own on plans with one clock for each computation and each pair
(`small_optima.py`), so what lies between the two bounds is proved to be out of reach.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from data import CASES, Case, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table
from small_optima import least_j

from perseus_planner import Profile, schedules
from perseus_planner.schedules import Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import pair_kind
from perseus_planner.solver.frontier import solve_dag

NUMBER = 51
_OVERLAP = (
    0.8  #: of the time of its halves that a pair takes; assumed, as their joules are added up
)
_LIMIT_S = 40.0  #: of HiGHS, for each problem
_ASKED = 0.15  #: percent above the bound, of 4 ranks x 8 microbatches
_PROVED = 0.001  #: percent of energy between HiGHS's best and its bound from which it is proved
_SHAPES = (
    # Ranks, virtual stages, microbatches, clocks of each computation (0: all)
    (2, 1, 3, 4),
    (2, 1, 4, 4),
    (2, 2, 2, 4),
    (4, 1, 4, 4),
    (4, 1, 8, 0),
    (2, 2, 8, 0),
    (4, 2, 8, 0),
)
_SLOWDOWNS = (1.001, 1.05)
_MOST_EXACT = 48  #: computations up to which HiGHS is asked
_COLUMNS = {
    "case": ("profile", ""),
    "shape": ("ranks x stages x microbatches", ""),
    "computations": ("computations and pairs", "d"),
    "pairs": ("pairs", "d"),
    "clocks": ("clocks of each, mean", ".1f"),
    "slowdown": ("deadline", ".3f"),
    "relaxed": ("plan above the relaxed bound, % of energy", ".3f"),
    "reach": ("of that, proved out of reach", ".3f"),
    "certain": ("plan above the higher bound", ".3f"),
    "above": ("above the best that HiGHS found", ".4f"),
    "proved": ("that above its own bound", ".4f"),
}


def measure(size: Size) -> Section:
    """Plan each problem, and compare with the optimum."""
    is_whole = size == Size()
    shapes = _SHAPES if is_whole else _SHAPES[:1]
    rows = [
        _row(case, shape, slowdown)
        for case in (CASES if is_whole else CASES[:1])
        for shape in shapes
        for slowdown in _SLOWDOWNS
    ]
    exact = [row for row in rows if row["above"] is not None]
    proved = [row for row in exact if row["proved"] <= _PROVED]
    checks = [
        Check("no plan misses its deadline", not any(row["late"] for row in rows)),
        Check(
            "no plan is below a bound",
            all(row["above"] >= -row["proved"] - 1e-6 for row in exact),
        ),
        Check(
            f"where the optimum is proved, plans are {max(row['above'] for row in proved):.3f} % "
            "above it at worst (limit 0.05 %)",
            max(row["above"] for row in proved) <= 0.05,
        ),
    ]
    wide = [row for row in rows if row["ranks"] == 4 and row["microbatches"] == 8]
    for name, shape in dict.fromkeys((row["case"], row["shape"]) for row in wide):
        worst = max(row["certain"] for row in wide if (row["case"], row["shape"]) == (name, shape))
        text = f"{name}, {shape}: {worst:.3f} % above the higher bound at worst, asked {_ASKED:g}"
        checks.append(Check(text, worst <= _ASKED))
    return Section(
        NUMBER,
        "Overlapped pairs beside their bounds",
        "Replayed from measured profiles with unlike stages; a pair takes 0.8 of the time of its "
        "halves and their joules. Plans are as measured (`on_time=None`), clock changes are free. "
        "Energies are those of an iteration that lasts until the deadline.",
        [Table(_COLUMNS, rows)],
        checks,
        [f"{len(proved)} of {len(exact)} optima are proved by HiGHS within {_LIMIT_S:g} s each."],
    )


def _row(case: Case, shape: tuple[int, int, int, int], slowdown: float) -> dict[str, Any]:
    ranks, virtual, microbatches, clocks = shape
    schedule = schedules.combined_1f1b(ranks, virtual, microbatches)
    profile = _with_pairs(_of_stages(case, ranks * virtual, clocks), schedule)
    dag = PipelineDag.from_schedule(profile, schedule)
    frontier = solve_dag(dag)
    deadline_s = slowdown * frontier.baseline_time_s
    plan = frontier.plan_until(deadline_s, on_time=None)
    whole_j = plan.energy_j
    row = {
        "case": case.name,
        "shape": f"{ranks} x {virtual} x {microbatches}",
        "ranks": ranks,
        "microbatches": microbatches,
        "computations": len(dag.keys),
        "pairs": len(schedule.pairs),
        "clocks": float(np.mean([len(dag.points[key]) for key in dag.keys])),
        "slowdown": slowdown,
        "relaxed": 100 * (whole_j - plan.bound_j) / whole_j,
        "reach": None,
        "certain": 100 * (whole_j - plan.bound_j) / whole_j,
        "above": None,
        "proved": None,
        "late": plan.time_s > deadline_s,
    }
    if len(dag.keys) > _MOST_EXACT:
        return row
    best_j, bound_j = least_j(dag, deadline_s - dag.profile.overhead_s, _LIMIT_S)
    # HiGHS counts no waiting, which is the same for all plans that last until the deadline.
    waiting_j = dag.waiting_w * plan.time_s
    return {
        **row,
        "reach": 100 * (bound_j + waiting_j - plan.bound_j) / whole_j,
        "certain": 100 * (whole_j - max(plan.bound_j, bound_j + waiting_j)) / whole_j,
        "above": 100 * (whole_j - waiting_j - best_j) / whole_j,
        "proved": 100 * (best_j - bound_j) / whole_j,
    }


def _of_stages(case: Case, stages: int, clocks: int) -> Profile:
    """Return unlike stages with few clocks: the highest, the lowest and some between."""
    whole = unlike_stages(profile_of(case), 0)
    rows = {key: each for key, each in whole.measurements.items() if key[0] < stages}
    if clocks:
        rows = {
            key: tuple(each[i] for i in np.linspace(0, len(each) - 1, clocks).round().astype(int))
            for key, each in rows.items()
        }
    return replace(whole, measurements=rows)


def _with_pairs(profile: Profile, schedule: Schedule) -> Profile:
    """Return the profile with a row for each pair, at the clocks that both halves have."""
    rows = dict(profile.measurements)
    for forward, backward in schedule.pairs:
        ones = {row.clock_mhz: row for row in rows[forward.stage, forward.kind]}
        others = {row.clock_mhz: row for row in rows[backward.stage, backward.kind]}
        rows[backward.stage, pair_kind(forward, backward)] = tuple(
            replace(
                ones[mhz],
                time_s=_OVERLAP * (ones[mhz].time_s + others[mhz].time_s),
                energy_j=ones[mhz].energy_j + others[mhz].energy_j,
            )
            for mhz in sorted(ones.keys() & others.keys(), reverse=True)
        )
    return replace(profile, measurements=rows)
