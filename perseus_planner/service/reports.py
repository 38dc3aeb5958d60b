"""Which reports count at a given time, and which pipelines and stages of a job they concern."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.service.models import Report  # noqa: TC001 - pydantic reads what a Look has

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.service.models import Place, RegisteredJob, Scope


_FORGOTTEN_AFTER_S = 3600.0
"""For so long a report that is over still keeps earlier observations that arrive late from
counting.
"""
_LOOKED_AFTER_S = 60.0


@dataclass(frozen=True)
class Look:
    """The reports of a job at one time.

    Of the begun reports of one source about one scope, only those with the latest observation last,
    even if they have expired or say that the scope has recovered: an older report that arrives late
    must find them. So what one report changes is found among those about the same.
    """

    active: tuple[Report, ...]  #: Those by which something is slow now
    idle: tuple[Report, ...]  #: Those that may count later, or keep older ones from it
    gone: tuple[Report, ...]  #: The others, which need not be looked at again
    #: When time alone next makes a report begin or expire; infinite for never. Reports that begin
    #: with an iteration are left out.
    next_s: float
    until_s: float  #: Until when `with_report` may follow

    @classmethod
    def at(cls, reports: Iterable[Report], now_s: float, iteration: int | None = None) -> Look:
        """Look at any reports, in any order.

        Args:
            reports: The reports.
            now_s: Seconds since the epoch.
            iteration: The first iteration that can still be changed; None if unknown.
        """
        possible: list[tuple[Report, bool]] = []
        newest_s: dict[tuple[Any, ...], float] = {}
        active: list[Report] = []
        idle: list[Report] = []
        gone: list[Report] = []
        next_s, until_s = math.inf, now_s + _LOOKED_AFTER_S
        for report in reports:
            if report.begins_iteration is None:
                if report.begins_s >= report.expires_s:
                    gone.append(report)
                    continue
                has_begun = now_s >= report.begins_s
            else:
                has_begun = iteration is not None and iteration >= report.begins_iteration
                until_s = -math.inf
            if has_begun and report.observed_s > newest_s.get(report.about, -math.inf):
                newest_s[report.about] = report.observed_s
            possible.append((report, has_begun))
        for report, has_begun in possible:
            if report.observed_s < newest_s.get(report.about, -math.inf):
                gone.append(report)
            elif has_begun and now_s < report.expires_s and report.slowdown != 1.0:
                active.append(report)
                next_s = min(next_s, report.expires_s)
            elif is_over(report, now_s) and over_s(report) < now_s - _FORGOTTEN_AFTER_S:
                gone.append(report)  # by the service's clock: a source's may be hours behind
            else:
                idle.append(report)
                if not has_begun and report.begins_iteration is None:
                    next_s = min(next_s, report.begins_s)
        return cls(tuple(active), tuple(idle), tuple(gone), next_s, min(until_s, next_s))

    def with_report(self, report: Report, now_s: float) -> Look:
        """Return the look with one more report."""
        about = report.about
        same = [each for each in (*self.active, *self.idle) if each.about == about]
        now = Look.at([*same, report], now_s)
        return Look(
            tuple([each for each in self.active if each.about != about]) + now.active,
            tuple([each for each in self.idle if each.about != about]) + now.idle,
            self.gone + now.gone,
            min(self.next_s, now.next_s),
            min(self.until_s, now.until_s),
        )


def parts_concerned(job: RegisteredJob, scope: Scope) -> dict[int, frozenset[int]]:
    """Return the pipelines of `job` in `scope`, each with its stages in `scope`; no stages if they
    are unknown.

    If a rank, GPU or node belongs to several pipelines, `scope.pipeline` restricts it to one of
    them.

    Raises:
        UsageError: If the job has no such part.
    """
    return parts_of(job).of(job, scope)


class Parts:
    """What is known of the parts of a job with these places."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.parts: dict[tuple[str, str, int | None], dict[int, frozenset[int]]] = {}
        self._places_of: dict[str, dict[str, list[Place]]] = {}

    def of(self, job: RegisteredJob, scope: Scope) -> dict[int, frozenset[int]]:
        """Return the pipelines and stages in `scope`, as `parts_concerned` of that job."""
        parts = self.parts.get(scope.part)
        if parts is None:
            parts = self.parts[scope.part] = _parts(job, scope, self)
        return parts

    def places_of(self, kind: str, value: str) -> list[Place]:
        """Return the places of one rank, GPU or node, which has its name with a domain or
        without.
        """
        if kind not in self._places_of:
            by_value: dict[str, list[Place]] = {}
            for place in self.places:
                by_value.setdefault(str(getattr(place, kind)), []).append(place)
            self._places_of[kind] = by_value
        by_value = self._places_of[kind]
        if kind != "node":
            return by_value.get(value, [])
        known, named = _names(value), [node for node in by_value if value in _names(node)]
        return [place for node in {*known, *named} for place in by_value.get(node, [])]


_known: OrderedDict[tuple[int, int], Parts] = OrderedDict()
_KNOWN_JOBS = 2048


def parts_of(job: RegisteredJob) -> Parts:
    """Return what is known of the parts of a job, found once for each."""
    key = (id(job.places), job.pipelines)
    known = _known.get(key)
    if known is None or known.places is not job.places:
        known = _known[key] = Parts(job.places)
        while len(_known) > _KNOWN_JOBS:
            _known.pop(next(iter(_known)), None)
    return known


def _parts(job: RegisteredJob, scope: Scope, known: Parts) -> dict[int, frozenset[int]]:
    if scope.kind == "pipeline":
        parts = {_pipeline(job, scope.value): frozenset[int]()}
    elif scope.kind == "stage":
        parts = {_pipeline_of_stage(job, scope): frozenset({_number("stage", scope.value)})}
    else:
        parts = _held_by(job, scope, known)
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


def _held_by(job: RegisteredJob, scope: Scope, known: Parts) -> dict[int, frozenset[int]]:
    """Return the stages of the ranks in `scope` by pipeline; no stages for a pipeline in which a
    rank's are unknown.
    """
    places = known.places_of(scope.kind, scope.value) if scope.value else []
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
