"""What the service refuses before it does anything: jobs that are none, reports that contradict, numbers of no use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perseus_planner.errors import InfeasibleDeadline, UsageError, shown
from perseus_planner.quantities import CHANGES, COUNT, TIME, WAIT
from perseus_planner.service.model import Conflict, Job, Report
from perseus_planner.service.reports import check_scope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.state import JobState

_LONGEST_NAME = 255
_MOST_REPORTS = 4096


def check_job(job: Job) -> None:
    """Refuse what is no job, whatever its frontier.

    Raises:
        UsageError: a value is of no use.
    """
    _check_name("name", job.name)
    if COUNT.accept(job.pipelines) is None:
        raise UsageError(f"pipelines: {shown(job.pipelines)} is not {COUNT.wanted}")
    if job.max_changes is not None and CHANGES.accept(job.max_changes) is None:
        raise UsageError(f"max_changes: {shown(job.max_changes)} is not {CHANGES.wanted}")
    if WAIT.accept(job.min_dwell_s) is None:
        raise UsageError(f"min_dwell_s: {shown(job.min_dwell_s)} is not {WAIT.wanted}")
    check_positive("deadline_s", job.deadline_s)
    check_positive("power_w", job.power_w)


def check_places(job: Job, curve: Curve) -> None:
    """Refuse ranks that are not in the job.

    Raises:
        UsageError: a rank is there twice, or is in a pipeline or stage that is not there.
    """
    ranks = [place.rank for place in job.places]
    if len(set(ranks)) < len(ranks):
        raise UsageError("places: a rank is there twice; give each rank once")
    for place in job.places:
        _check_numbers(f"rank {place.rank}, pipeline", [place.pipeline], job.pipelines)
        _check_numbers(f"rank {place.rank}, stage", place.stages, curve.stages)


def check_positive(name: str, value: float | None) -> None:
    """Refuse what is no number above 0.

    Raises:
        UsageError: it is none.
    """
    if value is not None and TIME.accept(value) is None:
        raise UsageError(f"{name}: {shown(value)} is not a finite number above 0; write one, or null for none")


def check_deadline(deadline_s: float | None, curve: Curve) -> None:
    """Refuse a deadline that no plan meets.

    Raises:
        InfeasibleDeadline: there is none; names the least.
    """
    if deadline_s is not None and deadline_s < curve.min_time_s:
        raise InfeasibleDeadline(deadline_s, curve.min_time_s)


def check_report(state: JobState, report: Report) -> None:
    """Refuse a report that says nothing of the job, or one too many.

    Raises:
        UsageError: the job has not what it is about, or a time is none.
        Conflict: too many reports count.
    """
    _check_name("key", report.key)
    check_scope(state.job, report.scope, state.curve.stages)
    if not (math.isfinite(report.observed_s) and math.isfinite(report.begins_s)) or math.isnan(report.expires_s):
        raise UsageError(f"report {shown(report.key)}: a time is no finite number; give seconds since the epoch")
    if len(state.reports) >= _MOST_REPORTS:
        raise Conflict(f"job {shown(state.job.name)} has {len(state.reports)} reports; clear some")


def check_same(known: Report, report: Report) -> None:
    """Refuse a report with the key of another one. Times may differ, as they count from when it was received.

    Raises:
        Conflict: it is another report.
    """
    if any(
        getattr(known, name) != getattr(report, name)
        for name in ("source", "scope", "slowdown", "iteration_s", "cause")
    ):
        raise Conflict(f"report {shown(report.key)} said something else before; give another report a key of its own")


def _check_name(what: str, name: str) -> None:
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()):
        raise UsageError(f"{what}: {shown(name)} is no name; write 1 to {_LONGEST_NAME} printable characters")


def _check_numbers(what: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if number not in range(count):
            raise UsageError(f"places: {what} {number}: there is none; they are 0 to {count - 1}")
