"""What `planner show` prints of a training run, by plans or without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out, table
from perseus_planner.plans.replay import ALL_MAXIMUM, profile_of_origin
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.runs.account import Entry, fold
from perseus_planner.runs.recording import attempt_path
from perseus_planner.runs.records import LATE
from perseus_planner.runs.verdict import OFF, rank_names
from perseus_planner.views.context import pipeline_text

if TYPE_CHECKING:
    from perseus_planner.runs.account import Account
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.run import Run
    from perseus_planner.views.run import RankOfRun, RunSummary

_MOST_REASONS = 10  #: why iterations did not run as planned
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


def tables_of_run(summary: RunSummary) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the tables of a run for a page, to three digits: headings and columns."""
    unit, rank = unit_of(summary.context.control), Column("rank", "rank")
    yield "Each plan", lay_out(summary.plans, *_PLANS, digits=3)
    yield (
        f"Ranks by plan {summary.version}, per iteration",
        lay_out(summary.ranks, rank, *_LOAD, digits=3),
    )
    yield (
        f"Clock changes by plan {summary.version}, in all iterations that count",
        lay_out(summary.ranks, rank, *_clock_columns(unit), digits=3),
    )


def run_text(summary: RunSummary) -> str:
    """Return the text that `planner show` prints: the run by plan, its ranks, their clock
    changes, and deviations.
    """
    count = max((rank.ran.windows for rank in summary.ranks), default=0)
    several = [Column("pipeline", "pipeline")] if summary.pipelines > 1 else []
    rank_columns, unit = [Column("rank", "rank"), *several], unit_of(summary.context.control)
    parts = [
        *([] if summary.unlike_plan is None else [f"{summary.unlike_plan}."]),
        *([] if summary.verdict is None else [str(summary.verdict)]),
        f"{_sheet(summary).text()}Ranks by plan {summary.version}, per iteration:",
        table(lay_out(summary.ranks, *rank_columns, *_LOAD)),
        f"Clock changes, in all {count} iterations that count:",
        table(lay_out(summary.ranks, *rank_columns, *_clock_columns(unit))),
        f"Late: set when more than {100 * LATE:g} % of the first computation was over. Overtaken: "
        "not set before another clock\nwas requested. Off clock: share of the computing time "
        "before the clock was set. Delay: from the request until\nthe clock was set.",
        *_deviations_text(summary),
        *_cut_off_text(summary.cut_off),
        *(
            []
            if summary.unlike_plan
            else [
                f"Plan {summary.version} foresees {100 * summary.foreseen_share:.2f} %, without "
                "what passes between iterations."
            ]
        ),
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
    return (
        ", ".join(
            f"{reason} {si(seconds / rank.ran.windows, 's', 3)}"
            for reason, seconds in rank.ran.throttled_s.items()
            if seconds > 0.0
        )
        or None
    )


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
    Column("deg C", "ran.temperature_c", ".0f"),
    Column("  throttled", _throttled, "<"),
)


def _clock_columns(unit: str) -> list[Column]:
    return [
        Column(f"{unit} requested", _clocked("clock_s"), ".0f"),
        Column("MHz achieved", _clocked("achieved_mhz_s"), ".0f"),
        Column("changes", "ran.changes_asked"),
        Column("set", "ran.changes_set"),
        Column("late", "ran.changes_late"),
        Column("planned", lambda rank: rank.planned.changes_late * rank.ran.windows),
        Column("overtaken", "ran.changes_overtaken"),
        Column("off clock %", lambda rank: _share(rank.ran.off_clock_s, rank.ran.busy_s), "%"),
        Column("planned", lambda rank: _share(rank.planned.off_clock_s, rank.planned.busy_s), "%"),
        Column("delay ms p50", lambda rank: _ms(rank.latency_p50_s), ".2f"),
        Column("p99", lambda rank: _ms(rank.latency_p99_s), ".2f"),
    ]


def _clocked(name: str) -> Callable[[RankOfRun], float | None]:
    return lambda rank: _share(getattr(rank.ran, name), rank.ran.clocked_s)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _deviations_text(summary: RunSummary) -> Iterator[str]:
    """Say what ran, and in what time: two statements."""
    deviations = summary.deviations
    if not deviations:
        in_time = summary.verdict is None and summary.current.time_s is not None
        time = f" They took the planned time, up to {100 * OFF:.0f} %." if in_time else ""
        yield f"Every iteration ran as planned.{time}"
        return
    lines = [
        f"{deviation.times} on {rank_names(deviation.ranks)}, first iteration "
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
        yield (f"Not counted: the last row of {rank_names(ranks)}, which was cut off.")


def totals_text(totals: Sequence[Entry], total: Account, baseline: str | None) -> str:
    """Return a table of what each attempt ran and saved against the baseline, if any, with their
    sum at the end.
    """
    attempts = list(fold(replace(entry, version=None) for entry in totals))
    shown = attempts[-_MOST_ATTEMPTS:]
    if (older := attempts[:-_MOST_ATTEMPTS]) != []:
        shown.insert(0, reduce(Entry.__add__, older))
    if len(shown) > 1:
        shown.append(whole := reduce(Entry.__add__, shown))
    else:
        whole = None

    def name(entry: Entry) -> str:
        if entry is whole:
            return "all"
        return "older" if entry.attempt == 0 else attempt_path(Path(), entry.attempt).name

    def if_known(field: str) -> Callable[[Entry], float | None]:
        return lambda entry: getattr(entry, field) if entry.energy_is else None

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
        f"All attempts, energy {total.energy_is or 'unknown'}{saved}:\n",
        table(lay_out(shown, *columns)),
        f"\n{account_text(total, saves=baseline is not None)}",
    ]
    return "\n".join(lines)


def account_text(account: Account, *, saves: bool) -> str:
    """Say what the table of an account leaves out: the other baseline, what passed between
    iterations, and what is not known.
    """
    parts = []
    if saves:
        unlocked = account.unlocked_share
        parts.append(
            "Saved against what the job did before a clock was first set: unknown: a clock "
            "was set within 10 s, or never."
            if unlocked is None
            else "Saved against what the job did before a clock was first set, in as much time: "
            f"{si(account.unlocked_saved_j, 'J')} ({100 * unlocked:.2f} %)."
        )
    if account.gpu_s:
        share = 100 * account.between_s / account.gpu_s
        text = f"Between iterations, as for the optimizer and data: {share:.1f} % of the time"
        if account.energy_j:
            text += f", {100 * account.between_j / account.energy_j:.1f} % of the energy"
        parts.append(f"{text}.")
    if account.pause_s:
        used = f", {si(account.pause_j, 'J')}" if account.energy_is else ""
        parts.append(
            f"Pauses, which are in no other figure: {si(account.pause_s, 's')} of GPUs{used}."
        )
    if account.metered_s < (1 - 1e-9) * account.gpu_s:
        known = 100 * account.metered_s / account.gpu_s
        parts.append(f"The energy of {known:.1f} % of the time is known.")
    return "\n".join(parts)


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
        f"Run of {counted(summary['ranks'], 'rank')}{pipelines}, without a plan.",
        "",
        f"Autopilot: {status}.",
    ]
    if status.reference_s is not None:
        lines.append(
            f"Reference: {si(status.reference_s, 's', 6)} for an iteration at full clocks."
        )
    text = totals_text(summary["totals"], summary["total"], "the last iterations at full clocks")
    return "\n".join([*lines, "", text]) + "\n"
