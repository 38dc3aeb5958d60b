"""What has happened to a job: an event in words for each change that matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import si
from perseus_planner.service.answers import Event

if TYPE_CHECKING:
    from perseus_planner.service.model import Report
    from perseus_planner.service.state import JobState

EVENTS = 100
"""How many events of a job are kept, the latest."""
_NAMED = 3  #: pipelines that an event names; more are counted


def with_events(before: JobState | None, after: JobState, now_s: float) -> JobState:
    """Return the state `after` with an event for what differs from `before`, if that is worth
    telling.
    """
    text = "; ".join(_changes(before, after))
    if not text:
        return after
    return replace(after, events=(*after.events, Event(now_s, text))[-EVENTS:])


def _changes(before: JobState | None, after: JobState) -> list[str]:
    job = after.job
    if before is None or before.job.pipelines != job.pipelines:  # it was started again with others
        return [
            f"registered with {_counted(job.pipelines, 'pipeline')} of "
            f"{_counted(after.curve.gpus, 'GPU')}"
        ]
    found = []
    if job.deadline_s != before.job.deadline_s:
        found.append(
            "deadline removed"
            if job.deadline_s is None
            else f"deadline set to {_time(job.deadline_s)}"
        )
    if job.power_w != before.job.power_w:
        found.append(
            "power budget removed"
            if job.power_w is None
            else f"power budget {si(job.power_w, 'W')}"
        )
    if job.gpu_power_limit_w != before.job.gpu_power_limit_w:
        limit_w = job.gpu_power_limit_w
        found.append(
            f"GPUs are limited to {si(limit_w, 'W')}"
            if limit_w
            else "no power limit is set on the GPUs any more"
        )
    if after.decision is not before.decision:
        found += _stragglers(before, after)
        if after.published.version > before.published.version and after.planned is before.planned:
            found.append(after.decision.reason)  # planning failed
    if after.taken is not None and (
        before.taken is None or after.taken.version > before.taken.version
    ):
        found.append(
            f"version {after.taken.version} of the plans runs from iteration "
            f"{after.taken.iteration:,}"
        )
    return found


def _stragglers(before: JobState, after: JobState) -> list[str]:
    """Say which pipelines are slow, or not any more, and to what iteration time the others move."""
    was, now = before.decision.stragglers, after.decision.stragglers
    slow: dict[str, list[int]] = {}
    for pipeline, key in now.items():
        if was.get(pipeline) != key:
            slow.setdefault(key, []).append(pipeline)
    found = [_slow(after.reports, key, pipelines) for key, pipelines in slow.items()]
    recovered = [pipeline for pipeline in was if pipeline not in now]
    if recovered:
        found.append(f"{_pipelines(recovered)} not slow any more")
    moved: dict[float, list[int]] = {}
    pairs = zip(before.decision.targets, after.decision.targets, strict=True)
    for pipeline, (old, new) in enumerate(pairs):
        if new.time_s != old.time_s and pipeline not in now:
            moved.setdefault(new.time_s, []).append(pipeline)
    for time_s, pipelines in moved.items():
        whom = f"{len(pipelines)} others" if found and len(pipelines) > 1 else _pipelines(pipelines)
        found.append(f"{whom} moved to {_time(time_s)}")
    return [", ".join(found)] if found else []


def _slow(reports: Mapping[str, Report], key: str, pipelines: list[int]) -> str:
    report = reports.get(key)
    if report is None:
        return f"{_pipelines(pipelines)} slow"
    measure = (
        f"iterations of {_time(report.iteration_s)}"
        if report.slowdown is None
        else f"{report.slowdown:.4g}x"
    )
    part = "" if report.scope.kind == "pipeline" else f"{report.scope.kind} {report.scope.value}: "
    return f"{part}{_pipelines(pipelines)} slow {measure} ({report.source})"


def _pipelines(numbers: list[int]) -> str:
    if len(numbers) > _NAMED:
        return f"{len(numbers)} pipelines"
    return f"pipeline{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _time(time_s: float | None) -> str:
    return "-" if time_s is None else si(time_s, "s")
