"""Which reports count at a given time, and which pipelines and stages of a job they concern."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.service.model import Place, RegisteredJob, Report, Scope


def lasting_reports(
    reports: Iterable[Report], now_s: float, iteration: int | None = None
) -> tuple[Report, ...]:
    """Return the reports that count now, may count later, or keep older ones from counting.

    Of the begun reports of one source about one scope, only those with the latest observation last,
    even if they have expired or say that the scope has recovered: an older report that arrives late
    must find them.

    Args:
        reports: Any reports, in any order.
        now_s: Seconds since the epoch.
        iteration: The first iteration that can still be changed; None if unknown.
    """
    lasting = [
        report
        for report in reports
        if report.begins_iteration is not None or report.begins_s < report.expires_s
    ]
    newest_s: dict[tuple[str, Scope], float] = {}
    for report in lasting:
        if _has_begun(report, now_s, iteration):
            about = (report.source, report.scope)
            newest_s[about] = max(report.observed_s, newest_s.get(about, -math.inf))
    return tuple(
        report
        for report in lasting
        if report.observed_s >= newest_s.get((report.source, report.scope), -math.inf)
    )


def active_reports(
    reports: Iterable[Report], now_s: float, iteration: int | None = None
) -> tuple[Report, ...]:
    """Return the reports by which something is slow now; arguments as for `lasting_reports`."""
    return _active(lasting_reports(reports, now_s, iteration), now_s, iteration)


def next_turn_s(reports: Iterable[Report], now_s: float, iteration: int | None = None) -> float:
    """Return when time alone next makes a report begin or expire; infinite for never.

    Arguments as for `lasting_reports`. Reports that begin with an iteration are left out.
    """
    lasting = lasting_reports(reports, now_s, iteration)
    begins_s = [
        report.begins_s
        for report in lasting
        if report.begins_iteration is None and now_s < report.begins_s
    ]
    return min(
        [*begins_s, *(report.expires_s for report in _active(lasting, now_s, iteration))],
        default=math.inf,
    )


def _active(lasting: Iterable[Report], now_s: float, iteration: int | None) -> tuple[Report, ...]:
    return tuple(
        report
        for report in lasting
        if _has_begun(report, now_s, iteration)
        and now_s < report.expires_s
        and report.slowdown != 1.0
    )


def _has_begun(report: Report, now_s: float, iteration: int | None) -> bool:
    if report.begins_iteration is not None:
        return iteration is not None and iteration >= report.begins_iteration
    return now_s >= report.begins_s


def parts_concerned(job: RegisteredJob, scope: Scope) -> dict[int, frozenset[int]]:
    """Return the pipelines of `job` in `scope`, each with its stages in `scope`; no stages if they
    are unknown.

    If a rank, GPU or node belongs to several pipelines, `scope.pipeline` restricts it to one of
    them.

    Raises:
        UsageError: If the job has no such part.
    """
    if scope.kind == "pipeline":
        parts = {_pipeline(job, scope.value): frozenset[int]()}
    elif scope.kind == "stage":
        parts = {_pipeline_of_stage(job, scope): frozenset({_number("stage", scope.value)})}
    else:
        parts = _held_by(job, scope)
    if scope.pipeline is not None:
        parts = {
            pipeline: stages for pipeline, stages in parts.items() if pipeline == scope.pipeline
        }
    if not parts:
        raise UsageError(
            f"scope: {scope.kind} {shown(scope.value)} is not in pipeline {scope.pipeline} of job "
            f"{shown(job.name)}; correct one of them, or leave the pipeline out"
        )
    return parts


def concerned_by(job: RegisteredJob, reports: Iterable[Report]) -> list[Report]:
    """Return those of the reports about GPUs and nodes that `job` has."""
    nodes = {place.node for place in job.places}
    names = {place.gpu for place in job.places}.union(*map(_names, nodes))
    return [
        report
        for report in reports
        if report.scope.value in names or not nodes.isdisjoint(_names(report.scope.value))
    ]


@lru_cache(maxsize=2**16)
def _names(node: str) -> frozenset[str]:
    """Return the names of a node with all of its domain, with a part of it, and without it."""
    parts = node.split(".")
    whole = len(parts) if parts[-1].isdigit() else 1  # an address has no domain
    return frozenset(".".join(parts[:count]) for count in range(whole, len(parts) + 1))


def check_scope(job: RegisteredJob, scope: Scope, stages: int) -> None:
    """Check that a scope exists in a job whose pipelines have this many stages.

    Raises:
        UsageError: If it does not.
    """
    for stage in frozenset().union(*parts_concerned(job, scope).values()):
        if stage >= stages:
            raise UsageError(f"scope: there is no stage {stage}; stages are 0 to {stages - 1}")


def _held_by(job: RegisteredJob, scope: Scope) -> dict[int, frozenset[int]]:
    """Return the stages of the ranks in `scope` by pipeline; no stages for a pipeline in which a
    rank's are unknown.
    """
    places = [place for place in job.places if scope.value and _is_in(place, scope)]
    if not places:
        raise UsageError(
            f"scope: job {shown(job.name)} has no known {scope.kind} {shown(scope.value)}; "
            "register it with the places of its ranks, or report the pipeline"
        )
    held: dict[int, frozenset[int]] = {}
    for place in places:
        held[place.pipeline] = held.get(place.pipeline, frozenset()).union(place.stages)
    unknown = {place.pipeline for place in places if not place.stages}
    return {
        pipeline: frozenset() if pipeline in unknown else stages
        for pipeline, stages in held.items()
    }


def _is_in(place: Place, scope: Scope) -> bool:
    value = str(getattr(place, scope.kind))
    if scope.kind != "node" or not value:
        return value == scope.value
    return value in _names(scope.value) or scope.value in _names(value)


def _pipeline_of_stage(job: RegisteredJob, scope: Scope) -> int:
    if scope.pipeline is not None:
        return _pipeline(job, str(scope.pipeline))
    if job.pipelines > 1:
        raise UsageError(
            f"scope: stage {shown(scope.value)} is in each of {job.pipelines} pipelines; name the "
            "pipeline in which it is slow"
        )
    return 0


def _pipeline(job: RegisteredJob, value: str) -> int:
    number = _number("pipeline", value)
    if number >= job.pipelines:
        raise UsageError(
            f"scope: there is no pipeline {number}; pipelines are 0 to {job.pipelines - 1}"
        )
    return number


def _number(kind: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and str(int(value)) == value):
        raise UsageError(
            f"scope: {kind} {shown(value)} is not a number; write 0 for the first one, 1 for the "
            "next"
        )
    return int(value)


def check_places(job: RegisteredJob, stages: int) -> None:
    """Check the locations of the ranks of a job whose pipelines have this many stages.

    Raises:
        UsageError: If a rank is listed twice, or its pipeline or stage does not exist.
    """
    ranks = [place.rank for place in job.places]
    if len(set(ranks)) < len(ranks):
        raise UsageError("places: a rank is listed twice; list each rank once")
    for place in job.places:
        _check_numbers(f"rank {place.rank}, pipeline", [place.pipeline], job.pipelines)
        _check_numbers(f"rank {place.rank}, stage", place.stages, stages)


def _check_numbers(what: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if number not in range(count):
            raise UsageError(f"places: {what} {number}: does not exist; they are 0 to {count - 1}")


def is_over(report: Report, now_s: float) -> bool:
    """Whether a report has expired, or says that its scope has recovered."""
    has_begun = report.begins_iteration is None and report.begins_s <= now_s
    return report.expires_s <= now_s or (report.slowdown == 1.0 and has_begun)


def over_s(report: Report) -> float:
    """Return when a report that is over ended."""
    return report.begins_s if report.slowdown == 1.0 else report.expires_s
