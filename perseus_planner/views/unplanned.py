"""A training run without a plan: what the autopilot knew last, and what it saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import si
from perseus_planner.views.run_text import totals_text

if TYPE_CHECKING:
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.run import Run


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
    """Return the text that `planner show` prints."""
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
