"""Number 3: how far the energy of executable plans is above the bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from data import STAGES, Case, MissingError, Size, dag_of, frontier_of
from lowtime_runs import Replayed, fits_of, lowtime_run, same_plans, same_problem
from results import Check, Section, Table

_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "slowdown": ("deadline", ".2f"),
    "saving": ("saving, %", ".2f"),
    "gap": ("plan at its own time, %", ".3f"),
    "gap_full": ("plan at the deadline, %", ".3f"),
    "lowtime": ("lowtime, %", ".3f"),
}
_MOST, _MEAN = 0.5, 0.15  #: percent; the mean of 24 microbatches and more


def measure(size: Size) -> Section:
    """Plan for every deadline, and compare with lowtime's plans."""
    rows = [row for case in size.cases for m in size.microbatches for row in _rows(case, m, size)]
    checks = [
        Check(
            "no plan is past its deadline", all(row["time_s"] <= row["deadline_s"] for row in rows)
        ),
        Check(
            "no plan is below its bound",
            min(min(row["gap"], row["gap_full"]) for row in rows) >= -1e-10,
        ),
    ]
    worst = max(row["gap_full"] for row in rows)
    checks.append(Check(f"at most {worst:.3f} % above (limit {_MOST} %)", worst <= _MOST))
    large = [row["gap_full"] for row in rows if row["microbatches"] >= 24]
    if large:
        text = f"24 microbatches and more: {fmean(large):.3f} % in the mean (limit {_MEAN} %)"
        checks.append(Check(text, fmean(large) <= _MEAN))
    return Section(
        3,
        "Plans above the bound",
        f"Replayed from the measured profiles; {STAGES} stages, 1F1B. Deadlines are multiples of "
        "the replayed time with all clocks at their maximum. Plans are as "
        "measured (`on_time=None`).",
        [Table(_COLUMNS, rows)],
        checks,
        [
            "*At its own time*: the plan's energy over the bound at the time that the plan takes. "
            "*At the deadline*, the stricter one, and all columns after it: the energy of an "
            "iteration that lasts until the deadline, where finished GPUs wait at the blocking "
            "power, over the bound there.",
            "*lowtime*: the cheapest of its plans whose replayed time meets the deadline; a dash "
            f"if no plan does. For {', '.join(map(str, size.lowtime_microbatches))} microbatches "
            "they are from the run of number 2; for more from the exact solution of the same "
            f"fitted problem (tau {size.lowtime_unit_s * 1e3:g} ms) with lowtime's choice of "
            "clocks.",
        ],
    )


def _rows(case: Case, microbatches: int, size: Size) -> Iterable[dict[str, Any]]:
    frontier = frontier_of(case, microbatches)
    blocked_w = case.blocking_power_w * STAGES
    for slowdown in size.slowdowns:
        deadline_s = min(slowdown * frontier.baseline_time_s, frontier.max_time_s)
        plan, bound_j = frontier.plan_until(deadline_s, on_time=None), frontier.bound_j(deadline_s)

        def above(
            effective_j: float | None, deadline_s: float = deadline_s, bound_j: float = bound_j
        ) -> float | None:
            return (
                None
                if effective_j is None
                else 100 * ((effective_j + blocked_w * deadline_s) / bound_j - 1)
            )

        yield {
            "profile": case.name,
            "microbatches": microbatches,
            "slowdown": slowdown,
            "deadline_s": deadline_s,
            "time_s": plan.time_s,
            "saving": 100 * plan.saving_j / plan.baseline_energy_j,
            "gap": 100 * (plan.energy_j / plan.bound_j - 1),
            "gap_full": above(plan.energy_j - blocked_w * plan.time_s),
            "lowtime": above(_lowtime(case, microbatches, size, deadline_s)),
        }


def _lowtime(case: Case, microbatches: int, size: Size, deadline_s: float) -> float | None:
    """Return the least effective energy of lowtime's plans that meet the deadline, joules, or
    None.
    """
    try:
        plans = _lowtime_plans(case, microbatches, size)
    except MissingError:
        return None
    return min((plan.effective_j for plan in plans if plan.time_s <= deadline_s), default=None)


@cache
def _lowtime_plans(case: Case, microbatches: int, size: Size) -> Sequence[Replayed]:
    if microbatches in size.lowtime_microbatches:
        return lowtime_run(case, microbatches, size.lowtime_unit_s).plans
    fits = fits_of(case, size.lowtime_unit_s)
    frontier = same_problem(fits, microbatches)
    units = range(round(frontier.max_time_s), round(frontier.min_time_s) - 1, -1)
    return list(same_plans(fits, dag_of(case, microbatches), units))
