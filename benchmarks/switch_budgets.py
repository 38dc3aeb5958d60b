"""Number 8: the saving that is left when the clock changes of a GPU are limited."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from data import STAGES, Case, Size, frontier_of, profile_of
from results import Check, Section, Table

from perseus_planner import Frontier, Plan, schedules, solve
from perseus_planner.profiles.groups import on_each_gpu
from perseus_planner.profiles.measurement import ClockChange

NUMBER = 8  #: of this section
_BUDGETS = (0, 2, 4, 8, 16, 32, None)
#: percent of the unlimited saving to reach with at most 8 changes, by profile and slowdown
_LIMITS = {
    ("gpt3-175b", 1.02): 86.0,
    ("gpt3-175b", 1.05): 90.0,
    ("gpt3-175b", 1.10): 92.0,
    ("bloom", 1.02): 50.0,
    ("bloom", 1.05): 55.0,
    ("bloom", 1.10): 70.0,
}
_LIMITED_AT = (96, 8)  #: microbatches and changes
_CHANGE = ClockChange(call_s=0.0045, settle_s=0.0009)
_COST_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "gpus": ("GPUs per stage", "d"),
    "slowdown": ("deadline", ".2f"),
    "changes": ("most changes of a GPU", "d"),
    "saving": ("saving, changes counted, %", ".2f"),
    "free": ("saving if changes cost nothing, %", ".2f"),
    "free_changes": ("changes then", "d"),
    "free_time": ("of the free plan: time, x deadline", ".4f"),
    "seconds": ("seconds to plan", ".1f"),
}
_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "slowdown": ("deadline", ".2f"),
    "budget": ("changes allowed", ""),
    "changes": ("most changes of a GPU", "d"),
    "saving": ("saving, %", ".2f"),
    "share": ("of the unlimited saving, %", ".1f"),
    "share_own": ("at the plans' own times, %", ".1f"),
    "seconds": ("seconds to plan", ".2f"),
}


def measure(size: Size) -> Section:
    """Plan with every budget for every deadline."""
    costly = [
        _costly(case, slowdown, gpus, size)
        for case in size.cases
        for slowdown in size.costly_slowdowns
        for gpus in (1, 8)
    ]
    rows = [
        row
        for case in size.cases
        for slowdown in size.budget_slowdowns
        for row in _rows(case, slowdown, size)
    ]
    return Section(
        NUMBER,
        "Switch budgets",
        f"Replayed from the measured profiles; {STAGES} stages, 1F1B, clock changes free in the "
        "first table; plans are as measured (`on_time=None`). Changes are per GPU and "
        "iteration, with the change back to the first clock. "
        "To reach with 8 changes at 1.02 / 1.05 / 1.10x and 96 microbatches: 86 / 90 / 92 % of "
        "the unlimited saving (GPT-3 A100), 50 / 55 / 70 % (Bloom A40).",
        [Table(_COLUMNS, rows), Table(_COST_COLUMNS, costly)],
        [
            *_checks(rows),
            Check(
                "no plan misses its deadline because of its changes",
                not any(r["late"] for r in costly),
            ),
        ],
        [
            "*Saving*: compared with all clocks at maximum, for an iteration that lasts until the "
            "deadline, where finished GPUs wait; its share is that of the unlimited plan's "
            "saving. *At the plans' own times* compares both plans at the time that each takes.",
            f"The second table: a call that sets a clock takes {_CHANGE.call_s * 1e3:g} ms and "
            f"the clock settles {_CHANGE.settle_s * 1e3:g} ms later, as reported of an A800; "
            f"calls of a node's {_CHANGE.gpus_per_node} GPUs run one after another, so a stage of "
            "8 GPUs takes 8 calls. The planner chooses how many changes to make. *Of the free "
            "plan*: the plan made as if changes were free, replayed with their cost.",
            "*Seconds to plan*: after the unlimited plan is known and compiled code is loaded.",
        ],
    )


def _rows(case: Case, slowdown: float, size: Size) -> Iterator[dict[str, Any]]:
    frontier = frontier_of(case, size.budget_microbatches)
    deadline_s = slowdown * frontier.baseline_time_s
    unlimited = frontier.plan_until(deadline_s, on_time=None)
    frontier.plan_until(1.001 * deadline_s, max_changes=2, on_time=None)
    most_j, most_own_j = _saved_j(frontier, unlimited, deadline_s), unlimited.saving_j
    for budget in _BUDGETS:
        begin_s = time.perf_counter()
        plan = frontier.plan_until(deadline_s, max_changes=budget, on_time=None)
        seconds = time.perf_counter() - begin_s
        saved_j = _saved_j(frontier, plan, deadline_s)
        yield {
            "model": case.model,
            "profile": case.name,
            "microbatches": size.budget_microbatches,
            "slowdown": slowdown,
            "budget": "unlimited" if budget is None else str(budget),
            "late": plan.time_s > deadline_s,
            "changes": max(plan.changes),
            "saved_j": saved_j,
            "saving": 100 * saved_j / frontier.baseline_energy_j,
            "share": 100 * saved_j / most_j,
            "share_own": 100 * plan.saving_j / most_own_j,
            "seconds": seconds,
        }


def _costly(case: Case, slowdown: float, gpus: int, size: Size) -> dict[str, Any]:
    """Plan where clock changes cost time, without a limit."""
    profile = on_each_gpu(replace(profile_of(case), clock_change=_CHANGE), gpus)
    frontier = solve(profile, schedules.one_f_one_b(STAGES, size.budget_microbatches))
    free_plan = frontier_of(case, size.budget_microbatches).plan_until(
        slowdown * frontier.baseline_time_s, on_time=None
    )
    deadline_s = slowdown * frontier.baseline_time_s
    begin_s = time.perf_counter()
    plan = frontier.plan_until(deadline_s, on_time=None)
    seconds = time.perf_counter() - begin_s
    as_free = frontier.plan_of(free_plan.clocks)
    return {
        "profile": case.name,
        "microbatches": size.budget_microbatches,
        "gpus": gpus,
        "slowdown": slowdown,
        "changes": max(plan.changes),
        "saving": 100 * _saved_j(frontier, plan, deadline_s) / frontier.baseline_energy_j,
        "free": 100 * free_plan.saving_j / free_plan.baseline_energy_j,
        "free_changes": max(free_plan.changes),
        "free_time": as_free.time_s / deadline_s,
        "late": plan.time_s > deadline_s,
        "seconds": seconds,
    }


def _saved_j(frontier: Frontier, plan: Plan, deadline_s: float) -> float:
    """Return the energy saved in an iteration that lasts until the deadline, against one at
    maximum clocks, joules.
    """
    return frontier.baseline_energy_j - (
        plan.energy_j + frontier.dag.waiting_w * (deadline_s - plan.time_s)
    )


def _checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    yield Check("no plan misses its deadline", not any(row["late"] for row in rows))
    within = all(
        row["budget"] == "unlimited" or row["changes"] <= int(row["budget"]) for row in rows
    )
    yield Check("no plan changes clocks more often than allowed", within)
    pairs = [(a, b) for a, b in pairwise(rows) if b["budget"] != "0"]
    yield Check(
        "no larger budget saves less",
        all(a["saved_j"] <= b["saved_j"] * (1 + 1e-12) for a, b in pairs),
    )
    for row in rows:
        limit = _LIMITS.get((row["model"], row["slowdown"]))
        if limit is not None and (row["microbatches"], row["budget"]) == (
            _LIMITED_AT[0],
            str(_LIMITED_AT[1]),
        ):
            found = min(row["share"], row["share_own"])
            where = f"{row['profile']} at {row['slowdown']:.2f}x with {row['budget']} changes"
            yield Check(f"{where}: {found:.1f} % (limit {limit} %)", found >= limit)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a figure of the share of the saving over the budget, a line for each profile and
    deadline.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    marks = [str(budget) if budget is not None else "unlimited" for budget in _BUDGETS]
    for profile, line in (("gpt3-175b", "-"), ("bloom", "--")):
        for slowdown in sorted({row["slowdown"] for row in rows}):
            of_line = {
                r["budget"]: r for r in rows if (r["model"], r["slowdown"]) == (profile, slowdown)
            }
            if of_line:
                label = f"{of_line['0']['profile']}, {slowdown:.2f}x"
                axes.plot(
                    marks, [of_line[mark]["share"] for mark in marks], f"o{line}", label=label
                )
    axes.set_xlabel("clock changes allowed per GPU and iteration")
    axes.set_ylabel("share of the unlimited saving, %")
    sizes = f"{STAGES} stages, {rows[0]['microbatches']} microbatches"
    axes.set_title(f"Replayed from measured profiles, {sizes}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
