"""The traced steps for Perfetto (ui.perfetto.dev), on one clock, without their operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.views.traces import PerfettoTrace, Slice

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.extensions.traces.job import TracedJob


def write_timeline(job: TracedJob, path: Path) -> None:
    """Write a process for each pipeline, a thread for each rank, a slice for each computation.

    Raises:
        UsageError: If the file cannot be written.
    """
    trace = PerfettoTrace(job.pipelines)
    for pipeline in range(job.pipelines):
        trace.begin(f"pipeline {pipeline}, as traced", job.workers[pipeline])
        # Each pipeline begins at 0, as their clocks are not aligned with each other.
        zero_s = float(job.begins_s[pipeline].min())
        behind = 0
        for rank, row in enumerate(job.schedule.ranks):
            slices = []
            for step in range(job.steps):
                for number, computation in enumerate(row, behind):
                    begin_s = float(job.begins_s[pipeline, step, number]) - zero_s
                    end_s = float(job.ends_s[pipeline, step, number]) - zero_s
                    details = {
                        "stage": computation.stage,
                        "kind": computation.kind,
                        "microbatch": computation.microbatch,
                        "step": step,
                    }
                    begin_ns = round(1e9 * begin_s)
                    # Rounding must not make a slice end before it begins.
                    end_ns = max(begin_ns, round(1e9 * end_s))
                    slices.append(Slice(str(computation), "computation", begin_ns, end_ns, details))
            trace.add_slices(rank, slices)
            behind += len(row)
    trace.write(path, {"what": f"traced steps of {job.schedule}", "origin": "traced"})
