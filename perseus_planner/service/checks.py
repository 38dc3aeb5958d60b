"""Checks of jobs and reports before the service acts on them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from perseus_planner.base.errors import InfeasibleDeadline, UsageError, shown
from perseus_planner.base.units import CHANGES, COUNT, PROBABILITY, TIME
from perseus_planner.service.model import Conflict, RegisteredJob, Report
from perseus_planner.service.reports import check_scope

if TYPE_CHECKING:
    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.state import JobState

_LONGEST_NAME = 255
_MOST_REPORTS = 4096


def check_job(job: RegisteredJob) -> None:
    """Check the values of a job that do not depend on its frontier.

    Raises:
        UsageError: If a value cannot be used.
    """
    _check_name("name", job.name)
    COUNT.check(job.pipelines, "pipelines")
    if job.max_changes is not None:
        CHANGES.check(job.max_changes, "max_changes")
    check_positive("deadline_s", job.deadline_s)
    check_positive("power_w", job.power_w)
    if job.on_time is not None:
        PROBABILITY.check(job.on_time, "on_time")


def check_places(job: RegisteredJob, curve: Curve) -> None:
    """Check the locations of a job's ranks.

    Raises:
        UsageError: If a rank is listed twice, or its pipeline or stage does not exist.
    """
    ranks = [place.rank for place in job.places]
    if len(set(ranks)) < len(ranks):
        raise UsageError("places: a rank is listed twice; list each rank once")
    for place in job.places:
        _check_numbers(f"rank {place.rank}, pipeline", [place.pipeline], job.pipelines)
        _check_numbers(f"rank {place.rank}, stage", place.stages, curve.stages)


def check_positive(name: str, value: float | None) -> None:
    """Check that a value is None or a number above 0.

    Raises:
        UsageError: If it is neither.
    """
    if value is not None and TIME.accept(value) is None:
        raise UsageError(
            f"{name}: {shown(value)} is not a finite number above 0; give one, or null for no limit"
        )


def check_deadline(deadline_s: float | None, curve: Curve) -> None:
    """Check that a plan can meet a deadline.

    Raises:
        InfeasibleDeadline: If none can; names the least deadline.
    """
    if deadline_s is not None and deadline_s < curve.min_time_s:
        raise InfeasibleDeadline(deadline_s, curve.min_time_s)


def check_report(state: JobState, report: Report) -> None:
    """Check a new report of a job.

    Raises:
        UsageError: If the job does not have the scope, or a time is not finite.
        Conflict: If the job has too many reports.
    """
    _check_name("key", report.key)
    check_scope(state.job, report.scope, state.curve.stages)
    if not (math.isfinite(report.observed_s) and math.isfinite(report.begins_s)) or math.isnan(
        report.expires_s
    ):
        raise UsageError(
            f"report {shown(report.key)}: a time is not finite; give seconds since the epoch"
        )
    if len(state.reports) >= _MOST_REPORTS:
        raise Conflict(f"job {shown(state.job.name)} has {len(state.reports)} reports; clear some")


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


def _check_name(what: str, name: str) -> None:
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()):
        raise UsageError(
            f"{what}: {shown(name)} is not a name; write 1 to {_LONGEST_NAME} printable characters"
        )


def _check_numbers(what: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if number not in range(count):
            raise UsageError(f"places: {what} {number}: does not exist; they are 0 to {count - 1}")
