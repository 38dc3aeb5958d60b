"""What alerts, which name no job, change in the jobs that have their GPUs and nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.errors import PlannerError, shown
from perseus_planner.service.checks import check_report
from perseus_planner.service.transitions import cleared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from perseus_planner.service.model import Report
    from perseus_planner.service.outcomes import Answer
    from perseus_planner.service.state import JobState


@dataclass(frozen=True)
class Alerted:
    """What follows from alerts.

    Attributes:
        answers: of each job that has what they name.
        ignored: key of a report -> why no job, or not every one that it is of, has taken it.
    """

    answers: tuple[Answer, ...]
    ignored: Mapping[str, str]


def concerned(
    jobs: Mapping[str, JobState], reports: Sequence[Report]
) -> tuple[dict[str, list[Report]], dict[str, str]]:
    """Name of a job -> the reports of GPUs and nodes that it has; and why the others are of none, by their keys."""
    holders: dict[tuple[str, str], set[str]] = {(each.scope.kind, each.scope.value): set() for each in reports}
    for name, state in jobs.items():
        for place in state.job.places:
            for named in (("gpu", place.gpu), ("node", place.node)):
                if named in holders:
                    holders[named].add(name)
    found: dict[str, list[Report]] = {}
    ignored = {}
    for report in reports:
        scope = report.scope
        names = holders[scope.kind, scope.value]
        for name in names:
            found.setdefault(name, []).append(report)
        if not names:
            ignored[report.key] = f"no job that runs has {scope.kind} {shown(scope.value)}"
    return dict(sorted(found.items())), ignored


def with_alerts(state: JobState, reports: Iterable[Report], now_s: float) -> tuple[JobState, dict[str, str]]:
    """The job once it knows what alerts say, and what of them it does not take, by their keys.

    One that is known says how slow it is as it says now, and once it has expired, it stays so.
    """
    refused = {}
    for report in reports:
        known = state.reports.get(report.key)
        try:
            if known is not None:
                kept = _said_again(known, report, now_s)
            elif report.key in state.past:
                continue
            else:
                check_report(state, report)
                kept = report
        except PlannerError as error:
            refused[report.key] = str(error)
            continue
        if kept != known:
            state = replace(state, reports={**state.reports, report.key: kept})
    return state, refused


def _said_again(known: Report, report: Report, now_s: float) -> Report:
    if known.expires_s <= now_s:
        return known
    if report.expires_s <= now_s:
        return cleared(replace(known, slowdown=1.0, observed_s=max(known.observed_s, report.observed_s)), now_s)
    return replace(known, slowdown=report.slowdown, cause=report.cause)
