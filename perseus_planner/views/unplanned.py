"""A training run without a plan, such as one that learns alone: its summary, and what
`planner show` and a page say of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, lay_out
from perseus_planner.runs.account import Account, Entry, SavedInterval
from perseus_planner.views.accounts import (
    NOTHING_SET,
    attempts_table,
    clocked,
    off_clock_share,
    throttled,
    totals_text,
)

if TYPE_CHECKING:
    from perseus_planner.runs.run import Run
    from perseus_planner.runs.status import DeciderStatus

_MOSTLY = 0.5  #: share of the time of which an energy must be known for a mean of all of it


@dataclass(frozen=True)
class UnplannedRank:
    """One rank of a run without a plan: the account of its iterations in the folder."""

    rank: int  #: number of the rank in the job
    pipeline: int  #: number of its pipeline
    pipeline_rank: int  #: number of the rank in that pipeline
    ran: Account  #: its iterations, without the first one and those that follow evaluations

    def mean(self, name: str) -> float | None:
        """Return the mean of a sum of the account over its iterations; None without any."""
        return getattr(self.ran, name) / self.ran.windows if self.ran.windows else None

    @property
    def energy_j(self) -> float | None:
        """Energy of the GPU in an iteration, with what passes until the next, joules, if it is
        known for most of the time.
        """
        ran = self.ran
        if not ran.windows or ran.metered_s < _MOSTLY * ran.gpu_s:
            return None
        return ran.energy_j * ran.gpu_s / ran.metered_s / ran.windows


@dataclass(frozen=True)
class UnplannedRun:
    """A run without a plan, as it ran."""

    ranks: int  #: number of ranks
    pipelines: int  #: number of pipelines
    #: what its decider knew last; None if it has recorded nothing yet
    decider: DeciderStatus | None
    gpu: str | None  #: name of the first rank's GPU; None if it is not known
    gpu_origin: str | None  #: as in `RunSummary`
    total: Account  #: the sum of all totals
    saving: SavedInterval | None  #: what was saved in all; None if that is not known
    totals: tuple[Entry, ...]  #: what ran in each attempt, and what that saved, oldest first
    disagreements: tuple[str, ...]  #: as in `RunSummary`
    per_rank: tuple[UnplannedRank, ...]  #: what each rank ran in the newest attempt
    #: that no clock was set, in a sentence; None if it was no dry run.
    dry_run: str | None = None


def summarize_unplanned(run: Run) -> UnplannedRun:
    """Return the summary of a run without a plan."""
    # One origin can be named only if all ranks have it.
    origins = {rank.iterations[-1].origin for rank in run.ranks}
    return UnplannedRun(
        dry_run=f"{NOTHING_SET}; it learns full clocks alone" if run.is_dry_run else None,
        ranks=len(run.ranks),
        pipelines=len({rank.pipeline for rank in run.ranks}),
        decider=run.decider,
        gpu=next((rank.iterations[-1].gpu for rank in run.ranks), None),
        gpu_origin=origins.pop() if len(origins) == 1 else None,
        total=run.total,
        saving=run.total.saving,
        totals=run.totals,
        disagreements=run.disagreements,
        per_rank=tuple(
            UnplannedRank(
                rank.rank,
                rank.pipeline,
                rank.pipeline_rank,
                # The first iteration and those after evaluations are not typical.
                sum(
                    (Account.of(row, is_first=rank.rank == 0) for row in rank.typical),
                    Account(),
                ),
            )
            for rank in run.ranks
        ),
    )


def decider_text(status: DeciderStatus | None) -> str:
    """Say what a decider knew last, after its name."""
    if status is None:
        return "Nothing is known of what decides the clocks"
    return f"{status.name[:1].upper()}{status.name[1:]}: {status}"


def unplanned_text(summary: UnplannedRun) -> str:
    """Return the text that `planner show` prints of it."""
    status = summary.decider
    pipelines = f", {summary.pipelines} pipelines" if summary.pipelines > 1 else ""
    lines = list[str]()
    if summary.dry_run is not None:
        lines += [f"{summary.dry_run}.", ""]
    lines += [
        f"Run of {counted(summary.ranks, 'rank')}{pipelines}, without a plan.",
        "",
        f"{decider_text(status)}.",
    ]
    if status is not None and status.reference_s is not None:
        lines.append(
            f"Reference: {si(status.reference_s, 's', 6)} for an iteration at full clocks."
        )
    lines += summary.disagreements
    lines += ["", totals_text(summary.totals, summary.total, saves=True)]
    return "\n".join(lines) + "\n"


def tables_of_unplanned(summary: UnplannedRun, unit: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the tables of a run without a plan for a page, to three digits: headings and columns.

    Args:
        summary: The run.
        unit: The unit of its clocks.
    """
    # Only jobs of several pipelines need a column for them.
    several = [Column("pipeline", "pipeline")] if summary.pipelines > 1 else []
    rank = [Column("rank", "rank"), *several]
    mean = [
        Column("window {}", lambda row: row.mean("gpu_s"), "s"),
        Column("busy {}", lambda row: row.mean("busy_s"), "s"),
        Column("energy {}", "energy_j", "J"),
        Column("deg C", "ran.temperature_c", ".0f"),
        Column("  throttled", throttled, "<"),
    ]
    # Without a plan there is nothing beside which these could stand.
    changes = [
        Column(f"{unit} requested", clocked("clock_s"), ".0f"),
        Column("MHz achieved", clocked("achieved_mhz_s"), ".0f"),
        Column("iterations with lower clocks", "ran.lowered"),
        Column("changes", "ran.changes_asked"),
        Column("set", "ran.changes_set"),
        Column("late", "ran.changes_late"),
        Column("overtaken", "ran.changes_overtaken"),
        Column("off clock %", lambda row: off_clock_share(row.ran), "%"),
    ]
    yield "Ranks, per iteration", lay_out(summary.per_rank, *rank, *mean, digits=3)
    yield "Clocks and their changes", lay_out(summary.per_rank, *rank, *changes, digits=3)
    attempts, columns = attempts_table(summary.totals, saves=True)
    yield "All attempts", lay_out(attempts, *columns, digits=3)
