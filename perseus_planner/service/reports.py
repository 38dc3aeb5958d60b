"""Which reports count at a time, and which pipelines and stages of a job they mean; pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perseus_planner.service.model import Job, Report, Scope


def lasting_reports(reports: Iterable[Report], now_s: float, iteration: int | None = None) -> tuple[Report, ...]:
    """Those that count now, may count later, or keep older ones from counting; the others can be forgotten.

    At most those stay of one source about one scope that it observed last of what has begun, even if they have expired
    or say that it has recovered: an older report that arrives late must find them.

    Args:
        reports: any, in any order.
        now_s: seconds since the epoch.
        iteration: the first one that can still be changed; None: not known.
    """
    known = [each for each in reports if each.begins_iteration is not None or each.begins_s < each.expires_s]
    newest_s: dict[tuple[str, Scope], float] = {}
    for each in known:
        if _has_begun(each, now_s, iteration):
            about = (each.source, each.scope)
            newest_s[about] = max(each.observed_s, newest_s.get(about, -math.inf))
    return tuple(each for each in known if each.observed_s >= newest_s.get((each.source, each.scope), -math.inf))


def active_reports(reports: Iterable[Report], now_s: float, iteration: int | None = None) -> tuple[Report, ...]:
    """Those that say that something is slow now; arguments as for `lasting_reports`."""
    return _active(lasting_reports(reports, now_s, iteration), now_s, iteration)


def next_turn_s(reports: Iterable[Report], now_s: float, iteration: int | None = None) -> float:
    """When time alone next makes one of them count or no longer count; infinite: never.

    Arguments as for `lasting_reports`. What begins at an iteration does not begin at a time.
    """
    lasting = lasting_reports(reports, now_s, iteration)
    begins_s = [each.begins_s for each in lasting if each.begins_iteration is None and now_s < each.begins_s]
    return min([*begins_s, *(each.expires_s for each in _active(lasting, now_s, iteration))], default=math.inf)


def _active(lasting: Iterable[Report], now_s: float, iteration: int | None) -> tuple[Report, ...]:
    return tuple(
        each
        for each in lasting
        if _has_begun(each, now_s, iteration) and now_s < each.expires_s and each.slowdown != 1.0
    )


def _has_begun(report: Report, now_s: float, iteration: int | None) -> bool:
    if report.begins_iteration is not None:
        return iteration is not None and iteration >= report.begins_iteration
    return now_s >= report.begins_s


def meant(job: Job, scope: Scope) -> dict[int, frozenset[int]]:
    """The pipelines of `job` that are meant, each with those of its stages that are; none: not known which.

    Of a rank, GPU or node that is several pipelines' only the part in `scope.pipeline` is meant, if that is given.

    Raises:
        UsageError: the job has no such thing.
    """
    if scope.kind == "pipeline":
        places = {_pipeline(job, scope.value): frozenset[int]()}
    elif scope.kind == "stage":
        places = {_pipeline_of_stage(job, scope): frozenset({_number("stage", scope.value)})}
    else:
        places = _held_by(job, scope)
    if scope.pipeline is not None:
        places = {pipeline: stages for pipeline, stages in places.items() if pipeline == scope.pipeline}
    if not places:
        raise UsageError(
            f"scope: {scope.kind} {shown(scope.value)} is not in pipeline {scope.pipeline} of job {shown(job.name)}; "
            "correct one of them, or leave the pipeline out"
        )
    return places


def check_scope(job: Job, scope: Scope, stages: int) -> None:
    """Refuse a scope that means nothing in a job whose pipelines have so many stages.

    Raises:
        UsageError: it means nothing, or a stage that is not there.
    """
    for stage in frozenset().union(*meant(job, scope).values()):
        if stage >= stages:
            raise UsageError(f"scope: there is no stage {stage}; stages are 0 to {stages - 1}")


def _held_by(job: Job, scope: Scope) -> dict[int, frozenset[int]]:
    """The stages of the ranks that are there; where one does not know its own, none of that pipeline."""
    found = [place for place in job.places if scope.value and str(getattr(place, scope.kind)) == scope.value]
    if not found:
        raise UsageError(
            f"scope: job {shown(job.name)} knows of no {scope.kind} {shown(scope.value)}; register it with the places "
            "of its ranks, or report the pipeline"
        )
    held: dict[int, frozenset[int]] = {}
    for place in found:
        held[place.pipeline] = held.get(place.pipeline, frozenset()).union(place.stages)
    unknown = {place.pipeline for place in found if not place.stages}
    return {pipeline: frozenset() if pipeline in unknown else stages for pipeline, stages in held.items()}


def _pipeline_of_stage(job: Job, scope: Scope) -> int:
    if scope.pipeline is not None:
        return _pipeline(job, str(scope.pipeline))
    if job.pipelines > 1:
        raise UsageError(
            f"scope: stage {shown(scope.value)} is in each of {job.pipelines} pipelines; say in which one it is slow"
        )
    return 0


def _pipeline(job: Job, value: str) -> int:
    number = _number("pipeline", value)
    if number >= job.pipelines:
        raise UsageError(f"scope: there is no pipeline {number}; pipelines are 0 to {job.pipelines - 1}")
    return number


def _number(kind: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and str(int(value)) == value):
        raise UsageError(f"scope: {kind} {shown(value)} is no number; write 0 for the first one, 1 for the next")
    return int(value)
