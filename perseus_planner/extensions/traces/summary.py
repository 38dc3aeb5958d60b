"""What `planner trace` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out

if TYPE_CHECKING:
    from perseus_planner.extensions.traces.analysis import Analysis
    from perseus_planner.extensions.traces.job import TracedJob
    from perseus_planner.extensions.traces.saving import Saving

_FEW = 16
"""Workers up to which each has a row; of more, the means of the ranks are shown: a terminal's
height, by hand."""


def summarize_trace(job: TracedJob, seen: Analysis, saving: Saving | None) -> dict[str, Any]:
    """Return what traces show, as plain values."""
    summary: dict[str, Any] = {
        "schedule": str(job.schedule),
        "gpu": job.gpu if saving is None else saving.gpu.name,
        "pipelines": job.pipelines,
        "steps": seen.steps,
        "times": "of GPUs" if job.has_gpu_times else "of hosts",
        "iteration_s": seen.iteration_s,
        "iteration_deviation": seen.iteration_deviation,
        "bubble_share": seen.bubble_share,
        "even_bubble_share": seen.even_bubble_share,
        "bottleneck": seen.bottleneck,
        "jitter": seen.jitter,
        "replay_error": seen.replay_error,
        # Times of one clock have no width of alignment, and those of hosts cannot be aligned.
        "alignment_width_s": None if job.widths_s is None else float(job.widths_s.max()),
        "slow_workers": [
            {"worker": use.worker, "stages": use.stages, "slowdown": use.slowdown}
            for use in seen.slow
        ],
        "slow_cost": seen.slow_cost,
        "ranks": [
            {
                "worker": use.worker,
                "pipeline": use.pipeline,
                "rank": use.rank,
                "stages": use.stages,
                "busy_share": use.busy_share,
                "bubble_share": use.bubble_share,
                "host_share": use.host_share,
                "slowdown": use.slowdown,
            }
            for use in seen.ranks
        ],
        "kernel_shares": dict(job.kernel_shares),
        "remarks": list(seen.remarks),
        "saving": None,
    }
    if saving is not None:
        summary["saving"] = {
            "least_share": saving.least,
            "middle_share": saving.middle,
            "most_share": saving.most,
            "power_w": saving.power_w,
            "saved_w": saving.middle * saving.power_w,
            "time_ratio": saving.time_ratio,
            "known": list(saving.gpu.sources),
        }
    return summary


def saving_sentence(saving: dict[str, Any]) -> str:
    """Return the saving as a sentence."""
    return (
        f"A plan at the same speed would save {100 * saving['least_share']:.0f} to "
        f"{100 * saving['most_share']:.0f} % (middle {100 * saving['middle_share']:.0f}) of the "
        f"GPUs' energy, {si(saving['saved_w'], 'W', 3)} of {si(saving['power_w'], 'W', 3)}."
    )


def rank_sheet(summary: dict[str, Any]) -> Sheet:
    """Return the table of the ranks, with what is to be said about the iteration."""
    rows = summary["ranks"]
    notes = []
    # More rows than a terminal shows are told as means over pipelines.
    if len(rows) > _FEW:
        notes.append(f"Means over {counted(summary['pipelines'], 'pipeline')}.")
        rows = [_mean(rows, rank) for rank in sorted({row["rank"] for row in rows})]
    columns = lay_out(
        rows,
        Column("worker", "worker", "<"),
        Column("stages", "stages"),
        Column("busy %", "busy_share", "%"),
        Column("bubble %", "bubble_share", "%"),
        Column("waits for host %", "host_share", "%"),
        Column("x peers", "slowdown", ".2f"),
        digits=3,
    )
    return Sheet(
        f"{summary['schedule']}, {counted(summary['steps'], 'step')}, "
        f"{counted(summary['pipelines'], 'pipeline')}",
        f"Times {summary['times']}, as traced. An iteration takes {si(summary['iteration_s'], 's')}"
        f" ({100 * summary['iteration_deviation']:.1f} % deviation), computations vary by "
        f"{100 * summary['jitter']:.1f} %.",
        columns,
        notes,
    )


def _mean(rows: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    rows_of_rank = [row for row in rows if row["rank"] == rank]
    mean = {"worker": f"rank {rank}", "stages": rows_of_rank[0]["stages"]}
    for name in ("busy_share", "bubble_share", "host_share", "slowdown"):
        # A share of the host is known only where kernels were traced.
        values = [row[name] for row in rows_of_rank if row[name] is not None]
        mean[name] = sum(values) / len(values) if values else None
    return mean


def trace_text(summary: dict[str, Any]) -> str:
    """Return the text that `planner trace` prints."""
    lines = [
        f"Bubbles: {100 * summary['bubble_share']:.1f} % of the GPUs' time; "
        f"{100 * summary['even_bubble_share']:.1f} % if all stages took equally long.",
        f"Bottleneck: {summary['bottleneck']}.",
    ]
    shares = summary["kernel_shares"]
    if shares:
        parts = ", ".join(f"{100 * share:.0f} % {name}" for name, share in shares.items())
        lines.append(f"Kernels: {parts} of their time, without communication.")
    saving = summary["saving"]
    if saving is not None:
        lines.append(saving_sentence(saving))
        lines.append(f"Known: {'; '.join(saving['known'])}.")
        lines.append(
            "An expectation from one clock: planner profile, or the autopilot, measures the others."
        )
    lines.extend(summary["remarks"])
    return rank_sheet(summary).text() + "\n" + "\n".join(lines) + "\n"
