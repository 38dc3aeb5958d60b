"""A training run without a plan: what the autopilot knew last, and what it saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.quantities import si
from perseus_planner.views.run_text import totals_text

if TYPE_CHECKING:
    from perseus_planner.runs.autopilot import AutopilotStatus
    from perseus_planner.runs.run import Run
    from perseus_planner.runs.totals import Total


@dataclass(frozen=True)
class UnplannedSummary:
    """A training run without a plan.

    Attributes:
        ranks: number of its ranks.
        pipelines: number of its pipelines.
        autopilot: what the autopilot knew last.
        total: what all attempts ran, used and saved, against iterations at full clocks.
        totals: the same, by attempt.
    """

    ranks: int
    pipelines: int
    autopilot: AutopilotStatus
    total: Total
    totals: tuple[Total, ...]


def summarize_unplanned(run: Run, status: AutopilotStatus) -> UnplannedSummary:
    """Return the summary of a run without a plan."""
    pipelines = {rank.pipeline for rank in run.ranks}
    return UnplannedSummary(len(run.ranks), len(pipelines), status, run.total, run.totals)


def unplanned_text(summary: UnplannedSummary) -> str:
    """Return the text that `planner show` prints."""
    status = summary.autopilot
    pipelines = f", {summary.pipelines} pipelines" if summary.pipelines > 1 else ""
    lines = [f"Run of {summary.ranks} ranks{pipelines}, without a plan.", "", f"Autopilot: {status}."]
    if status.reference_s is not None:
        lines.append(f"Reference: {si(status.reference_s, 's', 6)} for an iteration at full clocks.")
    text = totals_text(summary.totals, summary.total, "the last iterations at full clocks")
    return "\n".join([*lines, "", text]) + "\n"
