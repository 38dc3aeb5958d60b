"""The folder that `planner trace` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import write_file
from perseus_planner.schedules.schedule import save_grid

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.extensions.traces.analysis import Analysis
    from perseus_planner.extensions.traces.job import TracedJob
    from perseus_planner.extensions.traces.saving import Saving


def write_job(
    folder: Path,
    job: TracedJob,
    seen: Analysis,
    saving: Saving | None,
    summary: dict[str, Any],
) -> list[Path]:
    """Write what a trace showed, and return the files: the grid, the page, the timeline, and the
    profile if there is one.
    """
    from perseus_planner.extensions.traces.page import page
    from perseus_planner.extensions.traces.timeline import write_timeline

    folder.mkdir(parents=True, exist_ok=True)
    grid = folder / "schedule.csv"
    save_grid(job.schedule, grid)
    written = [grid]
    # Without a saving there is no profile, as times of hosts tell none.
    if saving is not None:
        profile = folder / "profile.yaml"
        saving.profile.save(profile)
        written += [profile, folder / "profile.csv"]
    html = folder / "page.html"
    write_file(html, page(job, saving, summary), UsageError)
    perfetto = folder / "perfetto.json"
    write_timeline(job, perfetto)
    return [*written, html, perfetto]
