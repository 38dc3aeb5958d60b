"""Number 3: how far the energy of executable plans is above the bound."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from data import STAGES, Case, Size, frontier_of
from results import Check, Section, Table

_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "slowdown": ("deadline", ".2f"),
    "saving": ("saving, %", ".2f"),
    "gap": ("plan at its own time, %", ".3f"),
    "gap_full": ("plan at the deadline, %", ".3f"),
}
_MOST, _MEAN = 0.5, 0.15  #: percent; the mean of 24 microbatches and more


def measure(size: Size) -> Section:
    """Plan for every deadline."""
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
        "the replayed time with all clocks at their maximum. Plans are as measured "
        "(`on_time=None`).",
        [Table(_COLUMNS, rows)],
        checks,
        [
            "*At its own time*: the plan's energy over the bound at the time that the plan takes. "
            "*At the deadline*, the stricter one: the energy of an iteration that "
            "lasts until the deadline, where finished GPUs wait at the blocking power, over the "
            "bound there.",
        ],
    )


def _rows(case: Case, microbatches: int, size: Size) -> Iterable[dict[str, Any]]:
    frontier = frontier_of(case, microbatches)
    blocked_w = case.blocking_power_w * STAGES
    for slowdown in size.slowdowns:
        deadline_s = min(slowdown * frontier.baseline_time_s, frontier.max_time_s)
        plan, bound_j = frontier.plan_until(deadline_s, on_time=None), frontier.bound_j(deadline_s)
        until_j = plan.energy_j + blocked_w * (deadline_s - plan.time_s)
        yield {
            "profile": case.name,
            "microbatches": microbatches,
            "slowdown": slowdown,
            "deadline_s": deadline_s,
            "time_s": plan.time_s,
            "saving": 100 * plan.saving_j / plan.baseline_energy_j,
            "gap": 100 * (plan.energy_j / plan.bound_j - 1),
            "gap_full": 100 * (until_j / bound_j - 1),
        }
