"""Number 21: plans with few clock changes beside the trivial ones, on equal and unlike stages."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from budget_optima import drawn, least_j
from data import STAGES, Case, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table

from perseus_planner import Frontier, Plan, schedules, solve
from perseus_planner.plans.replay import end_times

NUMBER = 21  #: of this section
_CHANGES = (2, 4, 8)
_ENDS = (
    1,
    2,
    4,
    8,
)  #: computations that a trivial plan runs fast at the begin and end of a rank's program
_SEED = 0
_ROUNDING_J = 1e-9  #: part of the energy
_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "slowdown": ("deadline", ".4f"),
    "trivial": ("trivial plan, %", ".1f"),
    "share_2": ("2 changes, %", ".1f"),
    "share_4": ("4 changes, %", ".1f"),
    "share_8": ("8 changes, %", ".1f"),
}
_SMALL = (2, 4)  #: changes of the small cases
_SMALL_COLUMNS = {
    "changes": ("changes", "d"),
    "cases": ("cases with a proved optimum", "d"),
    "short": ("of its saving missed, mean %", ".2f"),
    "most": ("most %", ".2f"),
}
_MOST_SHORT = 0.3  #: percent, mean
_BELOW = 0.1  #: percent; HiGHS proves an optimum to a few parts in 100,000 of the energy


def measure(size: Size) -> Section:
    """Plan in every cell: profile, microbatches, deadline, and number of changes."""
    rows = [row for case in size.cases for row in _rows_of(case, size)]
    small = list(_small(size))
    return Section(
        NUMBER,
        "Few clock changes beside trivial plans",
        f"Replayed from the measured profiles; {STAGES} stages, 1F1B, clock changes free. Share "
        "of the unlimited plan's saving, compared with all clocks at maximum, in an iteration "
        "that lasts until the deadline. The second table is of 3 and 4 stages drawn from unlike "
        "ones, 4 microbatches and 8 clocks, beside the optimum that HiGHS proves. All plans are as "
        "measured (`on_time=None`).",
        [Table(_COLUMNS, rows), Table(_SMALL_COLUMNS, small)],
        [
            Check("no plan misses its deadline", not any(row["late"] for row in rows)),
            Check("no plan saves less than the trivial one", not any(row["below"] for row in rows)),
            Check(
                "no plan is below a proved optimum", all(row["least"] >= -_BELOW for row in small)
            ),
            *(
                Check(
                    f"{row['changes']} changes: {row['short']:.2f} % of the saving is missed in "
                    f"the mean (limit {_MOST_SHORT} %)",
                    row["short"] <= _MOST_SHORT,
                )
                for row in small
                if size == Size()
            ),
        ],
        [
            "*Unlike stages*: each stage's time, energy and slope of both changed by up to 5 %, "
            f"seed {_SEED}.",
            f"*Trivial plan*, with two changes: the fastest clock for the first and last {_ENDS} "
            "computations of each rank, whichever is best, and between them one clock, rank by "
            "rank from the last the cheapest one in time.",
        ],
    )


def _small(size: Size) -> Iterator[dict[str, Any]]:
    """Yield what plans miss of the best saving, for each number of changes."""
    cases = list(drawn(size.budget_cases))
    for changes in _SMALL:
        short = []
        for frontier, deadline_s in cases:
            best_j = least_j(frontier, deadline_s, changes)
            if best_j is not None:
                plan = frontier.plan_until(deadline_s, max_changes=changes, on_time=None)
                saved_j = _saved_j(frontier, plan, deadline_s)
                most_j = frontier.baseline_energy_j - best_j
                short.append(100 * (1 - saved_j / most_j))
        yield {
            "changes": changes,
            "cases": len(short),
            "short": fmean(short),
            "most": max(short),
            "least": min(short),
        }


def _rows_of(case: Case, size: Size) -> Iterator[dict[str, Any]]:
    profiles = {
        case.name: profile_of(case),
        f"{case.name}, unlike stages": unlike_stages(profile_of(case), _SEED),
    }
    for name, profile in profiles.items():
        for microbatches in size.cell_microbatches:
            frontier = solve(profile, schedules.one_f_one_b(STAGES, microbatches))
            for slowdown in size.cell_slowdowns:
                yield {"profile": name, "microbatches": microbatches, "slowdown": slowdown} | _row(
                    frontier, slowdown
                )


def _row(frontier: Frontier, slowdown: float) -> dict[str, Any]:
    deadline_s = slowdown * frontier.baseline_time_s
    most_j = _saved_j(frontier, frontier.plan_until(deadline_s, on_time=None), deadline_s)
    plans = [
        frontier.plan_until(deadline_s, max_changes=changes, on_time=None) for changes in _CHANGES
    ]
    saved_j = [_saved_j(frontier, plan, deadline_s) for plan in plans]
    trivial_j = max(_saved_j(frontier, plan, deadline_s) for plan in _trivial(frontier, deadline_s))
    shares = {
        f"share_{changes}": 100 * each_j / most_j
        for changes, each_j in zip(_CHANGES, saved_j, strict=True)
    }
    return shares | {
        "trivial": 100 * trivial_j / most_j,
        "late": any(plan.time_s > deadline_s for plan in plans),
        "below": min(saved_j) < trivial_j - _ROUNDING_J * frontier.baseline_energy_j,
    }


def _trivial(frontier: Frontier, deadline_s: float) -> Iterator[Plan]:
    """Yield a plan for each number of fast computations; all clocks stay at maximum where no
    other is in time.
    """
    dag, profile = frontier.dag, frontier.profile
    rows = [{m.clock_mhz: m for m in profile.measurements[key]} for key in dag.iteration.keys]
    place_of = {computation: place for place, computation in enumerate(dag.computations)}

    def cost_j(place: int, mhz: int) -> float:
        return (
            rows[place][mhz].energy_j
            - profile.blocking_w(dag.computations[place].stage) * rows[place][mhz].time_s
        )

    for ends in _ENDS:
        clocks = [max(row) for row in rows]
        for rank in reversed(dag.schedule.ranks):
            between = [place_of[computation] for computation in rank[ends : len(rank) - ends]]
            known = set.intersection(*(set(rows[place]) for place in between)) if between else set()
            for mhz in sorted(known, key=lambda mhz: sum(cost_j(place, mhz) for place in between)):
                before = [clocks[place] for place in between]
                for place in between:
                    clocks[place] = mhz
                durations_s = [row[clock].time_s for row, clock in zip(rows, clocks, strict=True)]
                if max(end_times(dag, durations_s)) + profile.overhead_s <= deadline_s:
                    break
                for place, clock in zip(between, before, strict=True):
                    clocks[place] = clock
        yield frontier.plan_of(
            {str(c): clock for c, clock in zip(dag.computations, clocks, strict=True)}
        )


def _saved_j(frontier: Frontier, plan: Plan, deadline_s: float) -> float:
    """Return the energy saved in an iteration that lasts until the deadline, against one at
    maximum clocks, joules.
    """
    return frontier.baseline_energy_j - (
        plan.energy_j + frontier.dag.waiting_w * (deadline_s - plan.time_s)
    )
