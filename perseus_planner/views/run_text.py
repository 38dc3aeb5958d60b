"""What `planner show` prints of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Sheet, column, quantities, table
from perseus_planner.plans.replay import ALL_MAXIMUM
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.runs.recording import attempt_path
from perseus_planner.runs.records import LATE
from perseus_planner.runs.tables import Total
from perseus_planner.views.context import pipeline_text

if TYPE_CHECKING:
    from perseus_planner.views.run import Deviation, RankOfRun, RunSummary

_MOST_REASONS = 10  #: why iterations did not run as planned
_MOST_RANKS = 8  #: listed for one reason
_MOST_ATTEMPTS = 10  #: in a table; older ones are added up


def _sheet(summary: RunSummary) -> Sheet:
    """Return a table of the recorded iterations beside what was planned, a row for each plan."""
    pipelines = f", {summary.pipelines} pipelines" if summary.pipelines > 1 else ""
    overhead_s = summary.context.overhead_s
    overhead = (
        f" The planned time includes {si(overhead_s, 's', 6)} of calibrated overhead."
        if overhead_s
        else ""
    )
    return Sheet(
        f"Run of {pipeline_text(summary.context)}{pipelines}",
        f"{run_origin_text(summary)}.{overhead}",
        list(_plan_columns(summary)),
        "All figures are means over the iterations that count: those that ran as planned, without "
        "the first one by each plan.",
    )


def run_text(summary: RunSummary) -> str:
    """Return the text that `planner show` prints: the run by plan, its ranks, their clock
    changes, and deviations.
    """
    counted = max((rank.iterations for rank in summary.ranks), default=0)
    parts = [
        *([] if summary.unlike_plan is None else [f"{summary.unlike_plan}."]),
        f"{_sheet(summary).text()}Ranks by plan {summary.version}, per iteration:",
        table(list(_load_columns(summary))),
        f"Clock changes, in all {counted} iterations that count:",
        table(list(_clock_columns(summary))),
        f"Late: set when more than {100 * LATE:g} % of the first computation was over. Overtaken: "
        "not set before another clock\nwas requested. Off clock: share of the computing time "
        "before the clock was set. Delay: from the request until\nthe clock was set.",
        *(
            []
            if summary.unlike_plan and not summary.deviations
            else _deviations_text(summary.deviations)
        ),
        *_cut_off_text(summary.cut_off),
        totals_text(
            summary.totals, summary.total, ALL_MAXIMUM if summary.unlike_plan is None else None
        ),
    ]
    return "\n\n".join(parts) + "\n"


def run_origin_text(summary: RunSummary) -> str:
    """Say where the numbers of the run and of its plan come from."""
    read = {
        None: "no GPU was read",
        "measured": "energy and clocks measured",
        "simulated": "energy and clocks simulated",
    }
    return (
        f"Run: times measured, {read[summary.gpu_origin]}. Plan: replayed from a "
        f"{summary.context.origin} profile"
    )


def _plan_columns(summary: RunSummary) -> Iterator[list[str]]:
    plans = summary.plans
    yield column("plan", [str(plan.version) for plan in plans])
    yield column("iterations", [str(plan.iterations) for plan in plans])
    yield column("counted", [str(plan.counted) for plan in plans])
    times_s = [plan.time_s for plan in plans], [plan.planned_time_s for plan in plans]
    yield from quantities(["time {}", "planned"], "s", *times_s)
    yield column("off %", [_off(plan.time_s, plan.planned_time_s) for plan in plans])
    energies_j = [plan.energy_j for plan in plans], [plan.planned_energy_j for plan in plans]
    yield from quantities(["energy {}", "planned"], "J", *energies_j)
    yield column("off %", [_off(plan.energy_j, plan.planned_energy_j) for plan in plans])


def _rank_columns(summary: RunSummary) -> Iterator[list[str]]:
    yield column("rank", [str(rank.rank) for rank in summary.ranks])
    if summary.pipelines > 1:
        yield column("pipeline", [str(rank.pipeline) for rank in summary.ranks])


def _load_columns(summary: RunSummary) -> Iterator[list[str]]:
    ranks = summary.ranks
    yield from _rank_columns(summary)
    busy_s = [rank.busy_s for rank in ranks], [rank.planned_busy_s for rank in ranks]
    yield from quantities(["busy {}", "planned"], "s", *busy_s)
    yield column("off %", [_off(rank.busy_s, rank.planned_busy_s) for rank in ranks])
    energies_j = [rank.energy_j for rank in ranks], [rank.planned_energy_j for rank in ranks]
    yield from quantities(["energy {}", "planned"], "J", *energies_j)
    yield column("off %", [_off(rank.energy_j, rank.planned_energy_j) for rank in ranks])
    yield column(
        "deg C",
        ["-" if rank.temperature_c is None else f"{rank.temperature_c:.0f}" for rank in ranks],
    )
    yield ["  throttled", *(f"  {_throttled(rank)}" for rank in ranks)]


def _clock_columns(summary: RunSummary) -> Iterator[list[str]]:
    ranks = summary.ranks
    yield from _rank_columns(summary)
    yield column(
        f"{unit_of(summary.context.control)} requested", [_clock(rank.clock) for rank in ranks]
    )
    yield column("MHz achieved", [_clock(rank.achieved_mhz) for rank in ranks])
    yield column("changes", [str(rank.changes_asked) for rank in ranks])
    yield column("set", [str(rank.changes_set) for rank in ranks])
    yield column("late", [str(rank.changes_late) for rank in ranks])
    yield column("planned", [str(rank.planned_late) for rank in ranks])
    yield column("overtaken", [str(rank.changes_overtaken) for rank in ranks])
    yield column("off clock %", [_share(rank.off_clock_s, rank.busy_s) for rank in ranks])
    yield column(
        "planned", [_share(rank.planned_off_clock_s, rank.planned_busy_s) for rank in ranks]
    )
    yield column("delay ms p50", [_ms(rank.latency_p50_s) for rank in ranks])
    yield column("p99", [_ms(rank.latency_p99_s) for rank in ranks])


def _deviations_text(deviations: tuple[Deviation, ...]) -> Iterator[str]:
    if not deviations:
        yield "Every iteration ran as planned."
        return
    lines = [
        f"{each.times} on rank{'s' * (len(each.ranks) > 1)} {_listed(each.ranks)}, first iteration "
        f"{each.first_iteration}: {each.reason}"
        for each in deviations[:_MOST_REASONS]
    ]
    if (rest := deviations[_MOST_REASONS:]) != ():
        lines.append(f"and {sum(each.times for each in rest)} for {len(rest)} more reasons")
    yield "\n".join(["Not as planned:", *lines])


def _cut_off_text(ranks: tuple[int, ...]) -> Iterator[str]:
    if ranks:
        yield (
            f"Not counted: the last row of rank{'s' * (len(ranks) > 1)} {_listed(ranks)}, which "
            "was cut off."
        )


def totals_text(totals: Sequence[Total], total: Total, baseline: str | None) -> str:
    """Return a table of what each attempt ran and saved against the baseline, if any, with their
    sum at the end.
    """
    attempts = [
        reduce(Total.plus, group) for _, group in groupby(totals, key=lambda each: each.attempt)
    ]
    shown = attempts[-_MOST_ATTEMPTS:]
    if (older := attempts[:-_MOST_ATTEMPTS]) != []:
        shown.insert(0, reduce(Total.plus, older))
    names = [
        "older" if each.attempt == 0 else attempt_path(Path(), each.attempt).name for each in shown
    ]
    if len(shown) > 1:
        names, shown = [*names, "all"], [*shown, total]
    columns = [
        ["attempt", *names],
        column("iterations", [str(each.iterations) for each in shown]),
        *quantities(["time {}"], "s", [each.time_s for each in shown]),
    ]
    energies_j = [each.energy_j if each.origin else None for each in shown]
    if baseline is None:
        columns += quantities(["energy {}"], "J", energies_j)
    else:
        saved_j = [each.saved_j if each.origin else None for each in shown]
        columns += quantities(["energy {}", "saved {}"], "J", energies_j, saved_j)
        columns.append(
            column(
                "saved %",
                [f"{100 * each.saved_share:.2f}" if each.origin else "-" for each in shown],
            )
        )
    saved = "" if baseline is None else f", saved against {baseline} in as much time"
    lines = [f"All attempts, energy {total.origin or 'unknown'}{saved}:\n", table(columns)]
    if total.metered_iterations < total.iterations:
        lines.append(
            f"\nThe energy of {total.metered_iterations} of {total.iterations} iterations is known."
        )
    return "\n".join(lines)


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return ", ".join(map(str, ranks[:_MOST_RANKS])) + more


def _off(value: float | None, planned: float) -> str:
    """Write the deviation of `value` from what was planned, percent."""
    if value is None or not planned:
        return "-"
    text = f"{100 * (value / planned - 1):+.2f}"
    return text if float(text) else "0.00"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.2f}"


def _clock(clock: float | None) -> str:
    return "-" if clock is None else f"{clock:.0f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


def _throttled(rank: RankOfRun) -> str:
    return (
        ", ".join(f"{reason} {si(seconds, 's', 3)}" for reason, seconds in rank.throttled_s.items())
        or "-"
    )
