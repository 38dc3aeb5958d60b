"""What is checked of reports that are sent, and which jobs those of alerts concern."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from perseus_planner.base.errors import PlannerError, shown
from perseus_planner.extensions.service.jobs import JobState, look_at
from perseus_planner.extensions.service.models import Conflict, Report

# Of a job: what one source sends leaves room
_MOST_REPORTS = 8192
_MOST_OF_A_SOURCE = 1024


def check_report(state: JobState, report: Report, now_s: float) -> None:
    """Check a new report of a job.

    Raises:
        UsageError: If the job does not have the scope, or a time is not finite.
        Conflict: If the job has too many reports, or too many of that source.
    """
    state.registered.parts.check(report.scope, state.curve.stages)
    look = state.look or look_at(state, now_s)
    of_source = sum(map(len, look.lasting.get(report.source, {}).values()))
    if of_source >= _MOST_OF_A_SOURCE or len(state.reports) >= _MOST_REPORTS:
        raise Conflict(
            f"job {shown(state.job.name)} has {len(state.reports)} reports, {of_source} of them by "
            f"{shown(report.source)}; clear some"
        )


def check_counts(known: Report, report: Report, now_s: float) -> None:
    """Check that a report with a known key may still count: it must not seem to be taken once that
    one is over.

    Args:
        known: The report that was received with that key.
        report: The one that is sent now.
        now_s: Seconds since the epoch.

    Raises:
        Conflict: If the known one was cleared or has expired.
    """
    if known.expires_s <= now_s:
        # Clearing sets the end of a report, and a new one is to hold for longer than that.
        was_cut = known.expires_s - known.begins_s < report.expires_s - report.begins_s
        how = "was cleared" if was_cut else "has expired"
        raise Conflict(
            f"report {shown(report.key)} {how}, and a key counts once; give a new report another "
            "key"
        )


def check_same(known: Report, report: Report) -> None:
    """Check that a report with a known key is the same report. Its times may differ, as they count
    from its arrival.

    Raises:
        Conflict: If it is another report.
    """
    if any(
        getattr(known, name) != getattr(report, name)
        for name in ("source", "scope", "slowdown", "iteration_s", "cause")
    ):
        raise Conflict(
            f"report {shown(report.key)} differs from what was received with that key; give "
            "another report another key"
        )


def jobs_concerned(
    jobs: Mapping[str, JobState], reports: Sequence[Report]
) -> tuple[dict[str, list[Report]], dict[str, str]]:
    """Return the reports that concern each job, and why the others concern none, by their keys."""
    of_jobs: dict[str, list[Report]] = {}
    for name, state in sorted(jobs.items()):
        parts = state.registered.parts
        concerned = [report for report in reports if parts.places_of(report.scope)]
        if concerned:
            of_jobs[name] = concerned
    taken = {report.key for concerned in of_jobs.values() for report in concerned}
    return of_jobs, {
        report.key: f"no running job has {report.scope.kind} {shown(report.scope.value)}"
        for report in reports
        if report.key not in taken
    }


def with_alerts(
    state: JobState, reports: Iterable[Report], now_s: float
) -> tuple[JobState, dict[str, str]]:
    """Add the reports of alerts to a job.

    Returns:
        The new state, and the reasons for the reports that the job refuses, by their keys.
    """
    refused = {}
    for report in reports:
        before = state.reports.get(report.key)
        # Alertmanager repeats an alert until it is resolved: one that is over or withdrawn here
        # must not come back to life.
        if report.key in state.past or (before is not None and before.expires_s <= now_s):
            continue
        if before is None:
            # One alert that does not fit this job must not keep the others from it.
            try:
                check_report(state, report, now_s)
            except PlannerError as error:
                refused[report.key] = str(error)
                continue
        elif report.expires_s > now_s:
            # A repeated alert may be worse now. Its times stay those of its first arrival.
            report = replace(before, slowdown=report.slowdown, cause=report.cause)
        if report != before:
            state = state.with_report(report, now_s)
    return state, refused
