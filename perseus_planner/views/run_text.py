"""What `planner show` prints of a training run, by plans or without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Column, Sheet, lay_out, table
from perseus_planner.plans.replay import ALL_MAXIMUM, profile_of_origin
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.runs.recording import attempt_path
from perseus_planner.runs.records import LATE
from perseus_planner.runs.tables import Total
from perseus_planner.views.context import pipeline_text

if TYPE_CHECKING:
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.run import Run
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
        lay_out(summary.plans, *_PLANS),
        "All figures are means over the iterations that count: those that ran as planned, without "
        "the first one by each plan.",
    )


def run_text(summary: RunSummary) -> str:
    """Return the text that `planner show` prints: the run by plan, its ranks, their clock
    changes, and deviations.
    """
    counted = max((rank.iterations for rank in summary.ranks), default=0)
    several = [Column("pipeline", "pipeline")] if summary.pipelines > 1 else []
    rank_columns, unit = [Column("rank", "rank"), *several], unit_of(summary.context.control)
    parts = [
        *([] if summary.unlike_plan is None else [f"{summary.unlike_plan}."]),
        f"{_sheet(summary).text()}Ranks by plan {summary.version}, per iteration:",
        table(lay_out(summary.ranks, *rank_columns, *_LOAD)),
        f"Clock changes, in all {counted} iterations that count:",
        table(lay_out(summary.ranks, *rank_columns, *_clock_columns(unit))),
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
        f"{profile_of_origin(summary.context.origin)}"
    )


def _off(name: str) -> Callable[[Any], str | None]:
    """Return the function that writes the deviation of a field from what was planned, percent."""

    def write(row: Any) -> str | None:
        value, planned = getattr(row, name), getattr(row, f"planned_{name}")
        if value is None or not planned:
            return None
        text = f"{100 * (value / planned - 1):+.2f}"
        return text if float(text) else "0.00"

    return write


def _throttled(rank: RankOfRun) -> str | None:
    reasons = rank.throttled_s.items()
    return ", ".join(f"{reason} {si(seconds, 's', 3)}" for reason, seconds in reasons) or None


_ENERGY = (
    Column("energy {}", "energy_j", "J"),
    Column("planned", "planned_energy_j", "J"),
    Column("off %", _off("energy_j")),
)
_PLANS = (
    Column("plan", "version"),
    Column("iterations", "iterations"),
    Column("counted", "counted"),
    Column("time {}", "time_s", "s"),
    Column("planned", "planned_time_s", "s"),
    Column("off %", _off("time_s")),
    *_ENERGY,
)
_LOAD = (
    Column("busy {}", "busy_s", "s"),
    Column("planned", "planned_busy_s", "s"),
    Column("off %", _off("busy_s")),
    *_ENERGY,
    Column("deg C", "temperature_c", ".0f"),
    Column("  throttled", _throttled, "<"),
)


def _clock_columns(unit: str) -> list[Column]:
    return [
        Column(f"{unit} requested", "clock", ".0f"),
        Column("MHz achieved", "achieved_mhz", ".0f"),
        Column("changes", "changes_asked"),
        Column("set", "changes_set"),
        Column("late", "changes_late"),
        Column("planned", "planned_late"),
        Column("overtaken", "changes_overtaken"),
        Column("off clock %", lambda rank: _share(rank.off_clock_s, rank.busy_s), "%"),
        Column("planned", lambda rank: _share(rank.planned_off_clock_s, rank.planned_busy_s), "%"),
        Column("delay ms p50", lambda rank: _ms(rank.latency_p50_s), ".2f"),
        Column("p99", lambda rank: _ms(rank.latency_p99_s), ".2f"),
    ]


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _deviations_text(deviations: tuple[Deviation, ...]) -> Iterator[str]:
    if not deviations:
        yield "Every iteration ran as planned."
        return
    lines = [
        f"{deviation.times} on rank{'s' * (len(deviation.ranks) > 1)} "
        f"{_listed(deviation.ranks)}, first iteration "
        f"{deviation.first_iteration}: {deviation.reason}"
        for deviation in deviations[:_MOST_REASONS]
    ]
    if (rest := deviations[_MOST_REASONS:]) != ():
        lines.append(
            f"and {sum(deviation.times for deviation in rest)} for {len(rest)} more reasons"
        )
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
    if len(shown) > 1:
        shown = [*shown, total]

    def name(each: Total) -> str:
        if each is total and len(shown) > 1:
            return "all"
        return "older" if each.attempt == 0 else attempt_path(Path(), each.attempt).name

    def if_known(field: str) -> Callable[[Total], float | None]:
        return lambda each: getattr(each, field) if each.origin else None

    columns = [
        Column("attempt", name, "<"),
        Column("iterations", "iterations"),
        Column("time {}", "time_s", "s"),
        Column("energy {}", if_known("energy_j"), "J"),
    ]
    if baseline is not None:
        columns.append(Column("saved {}", if_known("saved_j"), "J"))
        columns.append(Column("saved %", if_known("saved_share"), "%"))
    saved = "" if baseline is None else f", saved against {baseline} in as much time"
    lines = [
        f"All attempts, energy {total.origin or 'unknown'}{saved}:\n",
        table(lay_out(shown, *columns)),
    ]
    if total.metered_iterations < total.iterations:
        lines.append(
            f"\nThe energy of {total.metered_iterations} of {total.iterations} iterations is known."
        )
    return "\n".join(lines)


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return ", ".join(map(str, ranks[:_MOST_RANKS])) + more


def summarize_unplanned(run: Run, status: AutopilotStatus) -> dict[str, Any]:
    """Return the summary of a run without a plan."""
    return {
        "ranks": len(run.ranks),
        "pipelines": len({rank.pipeline for rank in run.ranks}),
        "autopilot": status,
        "total": run.total,
        "totals": run.totals,
    }


def unplanned_text(summary: dict[str, Any]) -> str:
    """Return the text that `planner show` prints of it."""
    status = summary["autopilot"]
    pipelines = f", {summary['pipelines']} pipelines" if summary["pipelines"] > 1 else ""
    lines = [
        f"Run of {summary['ranks']} ranks{pipelines}, without a plan.",
        "",
        f"Autopilot: {status}.",
    ]
    if status.reference_s is not None:
        lines.append(
            f"Reference: {si(status.reference_s, 's', 6)} for an iteration at full clocks."
        )
    text = totals_text(summary["totals"], summary["total"], "the last iterations at full clocks")
    return "\n".join([*lines, "", text]) + "\n"
