"""A run as plain text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.runs.records import LATE
from perseus_planner.views.columns import column, numbers, table
from perseus_planner.views.tables import origin_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perseus_planner.views.run_summary import Deviation, RankOfRun, RunSummary

_MOST = 10  #: reasons why iterations did not run as planned that are listed
_RANKS = 8  #: ranks that are listed of one


def run_text(summary: RunSummary) -> str:
    """What ran beside what was planned."""
    gpu = f" on {summary.gpu}" if summary.gpu else ""
    pipelines = f", {summary.pipelines} pipelines" if summary.pipelines > 1 else ""
    overhead = (
        f" Of the planned time, {summary.overhead_s:.6g} s are calibrated overhead." if summary.overhead_s else ""
    )
    parts = [
        f"Run of {summary.schedule}{gpu}{pipelines}\n{sources_text(summary)}.{overhead}",
        table(list(_plan_columns(summary))),
        "Counted are iterations that ran as planned, but for the first one by each plan; all figures are means over "
        f"these.\nRanks by plan {summary.version}, an iteration of each:",
        table(list(_load_columns(summary))),
        f"Clock changes, in all {max((rank.iterations for rank in summary.ranks), default=0)} iterations that count:",
        table(list(_clock_columns(summary))),
        f"Late: set when more than {100 * LATE:g} % of the first computation was over. Overtaken: not set before "
        "another one was\nasked for. Off clock: share of the computing time before the clock was set. Delay: from "
        "asking to set.",
        *_deviations_text(summary.deviations),
    ]
    return "\n\n".join(parts) + "\n"


def sources_text(summary: RunSummary) -> str:
    """Where the numbers come from."""
    read = {
        None: "no GPU was read",
        "measured": "energy and clocks measured",
        "simulated": "energy and clocks simulated",
    }
    return f"Run: times measured, {read[summary.gpu_origin]}. Plan: {_lower(origin_text(summary.plan_origin))}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _plan_columns(summary: RunSummary) -> Iterator[list[str]]:
    plans = summary.plans
    yield column("plan", [str(plan.version) for plan in plans])
    yield column("iterations", [str(plan.iterations) for plan in plans])
    yield column("counted", [str(plan.counted) for plan in plans])
    yield column("seconds", numbers([plan.time_s for plan in plans]))
    yield column("planned", numbers([plan.planned_time_s for plan in plans]))
    yield column("off %", [_off(plan.time_s, plan.planned_time_s) for plan in plans])
    yield column("joules", numbers([plan.energy_j for plan in plans]))
    yield column("planned", numbers([plan.planned_energy_j for plan in plans]))
    yield column("off %", [_off(plan.energy_j, plan.planned_energy_j) for plan in plans])


def _seat_columns(summary: RunSummary) -> Iterator[list[str]]:
    yield column("rank", [str(rank.rank) for rank in summary.ranks])
    if summary.pipelines > 1:
        yield column("pipeline", [str(rank.pipeline) for rank in summary.ranks])


def _load_columns(summary: RunSummary) -> Iterator[list[str]]:
    ranks = summary.ranks
    yield from _seat_columns(summary)
    yield column("busy s", numbers([rank.busy_s for rank in ranks]))
    yield column("planned", numbers([rank.planned_busy_s for rank in ranks]))
    yield column("off %", [_off(rank.busy_s, rank.planned_busy_s) for rank in ranks])
    yield column("joules", numbers([rank.energy_j for rank in ranks]))
    yield column("planned", numbers([rank.planned_energy_j for rank in ranks]))
    yield column("off %", [_off(rank.energy_j, rank.planned_energy_j) for rank in ranks])
    yield column("deg C", ["-" if rank.temperature_c is None else f"{rank.temperature_c:.0f}" for rank in ranks])
    yield ["  throttled", *(f"  {_throttled(rank)}" for rank in ranks)]


def _clock_columns(summary: RunSummary) -> Iterator[list[str]]:
    ranks = summary.ranks
    yield from _seat_columns(summary)
    yield column(f"{unit_of(summary.control)} asked", [_clock(rank.clock) for rank in ranks])
    yield column("MHz achieved", [_clock(rank.achieved_mhz) for rank in ranks])
    yield column("changes", [str(rank.changes_asked) for rank in ranks])
    yield column("set", [str(rank.changes_set) for rank in ranks])
    yield column("late", [str(rank.changes_late) for rank in ranks])
    yield column("planned", [str(rank.planned_late) for rank in ranks])
    yield column("overtaken", [str(rank.changes_overtaken) for rank in ranks])
    yield column("off clock %", [_share(rank.off_clock_s, rank.busy_s) for rank in ranks])
    yield column("planned", [_share(rank.planned_off_clock_s, rank.planned_busy_s) for rank in ranks])
    yield column("delay ms p50", [_ms(rank.latency_p50_s) for rank in ranks])
    yield column("p99", [_ms(rank.latency_p99_s) for rank in ranks])


def _deviations_text(deviations: tuple[Deviation, ...]) -> Iterator[str]:
    if not deviations:
        yield "Every iteration ran as planned."
        return
    lines = [
        f"{each.times} on rank{'s' * (len(each.ranks) > 1)} {_listed(each.ranks)}, first iteration "
        f"{each.first_iteration}: {each.reason}"
        for each in deviations[:_MOST]
    ]
    if len(deviations) > _MOST:
        lines.append(f"and {sum(each.times for each in deviations[_MOST:])} for {len(deviations) - _MOST} more reasons")
    yield "\n".join(["Not as planned:", *lines])


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return ", ".join(map(str, ranks[:_RANKS])) + more


def _off(value: float | None, planned: float) -> str:
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
    return ", ".join(f"{reason} {seconds:.3g} s" for reason, seconds in rank.throttled_s.items()) or "-"
