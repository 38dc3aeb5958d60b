"""Which reports of a job count at a given time, and of which pipelines and stages they say what.
Time is an argument.

| a report | counts |
| --- | --- |
| has not begun | not yet; at its iteration if it names one, else at its time |
| has begun | until it expires, unless one of the next lines applies |
| its source has observed it later | no more once the later one has begun, even after that expires |
| expires before it begins | never |
| has slowdown 1 | no; it ends earlier reports of its source about that scope |
| others of the same pipeline differ | the worst one; slow stages each by their worst slowdown |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perseus_planner.extensions.service.models import Cause, RegisteredJob, Report, Scope

_FORGOTTEN_AFTER_S = 3600.0
"""For so long a report that is over still keeps earlier observations that arrive late from
counting.
"""
_LOOKED_AFTER_S = 60.0

_What = tuple[float | None, float | None, Cause, frozenset[int]]
"""What a report says of a pipeline: slowdown, iteration time, cause and stages."""
Said = tuple[_What, ...]
"""By several reports, the one with the last key first."""
Active = dict[Said, dict[int, tuple[Report, ...]]]
"""What is said of pipelines -> each of them with the reports that say it, in that order."""
_Pair = tuple[_What, Report]


@dataclass(frozen=True)
class Look:
    """The reports of a job at one time.

    Of the begun reports of one source about one scope, only those with the latest observation last,
    even if they have expired or say that the scope has recovered: an older report that arrives late
    must find them. So what one report changes is found among those about the same.
    """

    #: Those that count, may count later or keep older ones from it, by their source and scope
    lasting: Mapping[str, Mapping[Any, tuple[Report, ...]]]
    active: Active  #: Pipelines that are slow now
    gone: tuple[Report, ...]  #: The others, which need not be looked at again
    #: When time alone next makes a report begin or expire; infinite for never. Reports that begin
    #: with an iteration are left out.
    next_s: float
    #: Until when `with_reports` may follow; -infinite if a report begins with an iteration
    until_s: float

    @classmethod
    def empty(cls, now_s: float) -> Look:
        """Return the look at no reports."""
        return cls({}, {}, (), math.inf, now_s + _LOOKED_AFTER_S)

    def with_reports(
        self,
        job: RegisteredJob,
        reports: Iterable[Report],
        now_s: float,
        iteration: int | None = None,
    ) -> Look:
        """Return the look with more reports of a job, in any order.

        Args:
            job: The job, which has what they are about.
            reports: The reports.
            now_s: Seconds since the epoch.
            iteration: The first iteration that can still be changed; None if unknown.

        Raises:
            UsageError: If a report is about what the job does not have; `Parts.check` finds that
                when it arrives.
        """
        # Only what is about the same as a new report can change, so the reports are grouped by
        # that.
        same_of: dict[tuple[Any, ...], list[Report]] = {}
        for report in reports:
            before = self.lasting.get(report.source, {}).get(report.scope.part, ())
            same_of.setdefault(report.about, [*before]).append(report)
        judged = {about: _judged(same, now_s, iteration) for about, same in same_of.items()}
        lasting = {**self.lasting}
        pairs_of: dict[int, list[_Pair]] = {}
        for (source, *part), each in judged.items():
            lasting[source] = {**lasting.get(source, {}), tuple(part): (*each.slow, *each.others)}
            # Also where nothing is slow now: older reports of it may have made pipelines slow.
            if each.slow or self.active:
                for pipeline, stages in job.parts.of(each.scope).items():
                    pairs_of.setdefault(pipeline, []).extend(
                        ((report.slowdown, report.iteration_s, report.cause, stages), report)
                        for report in each.slow
                    )
        next_s = min(self.next_s, *(each.next_s for each in judged.values()), math.inf)
        # Time does not say when an iteration comes, so the next look must be a new one.
        waits = any(each.names_iteration for each in judged.values())
        return Look(
            lasting,
            _regrouped(self.active, pairs_of, judged.keys()),
            (*self.gone, *(report for each in judged.values() for report in each.gone)),
            next_s,
            -math.inf if waits else min(self.until_s, next_s),
        )


class _Judged(NamedTuple):
    """What becomes of the reports of one source about one scope."""

    scope: Scope
    slow: Sequence[Report]  #: Those that count
    others: Sequence[Report]  #: Those that may count later, or keep older ones from it
    gone: Sequence[Report]
    next_s: float  #: When time alone next makes one begin or expire; infinite for never
    names_iteration: bool  #: Whether one begins with an iteration


def _judged(same: Sequence[Report], now_s: float, iteration: int | None) -> _Judged:
    """Judge reports of one source about one scope: the latest observation that has begun holds; one
    that begins later does not end it yet.
    """
    begun = [(_has_begun(report, now_s, iteration), report) for report in same]
    newest_s = max((report.observed_s for has, report in begun if has), default=-math.inf)
    slow = list[Report]()
    others = list[Report]()
    gone = list[Report]()
    next_s = math.inf
    for has_begun, report in begun:
        if has_begun is None or report.observed_s < newest_s:
            gone.append(report)
        elif has_begun and now_s < report.expires_s and report.slowdown != 1.0:
            slow.append(report)
            next_s = min(next_s, report.expires_s)
        elif is_over(report, now_s) and over_s(report) < now_s - _FORGOTTEN_AFTER_S:
            gone.append(report)  # by the service's clock: a source's may be hours behind
        else:
            others.append(report)
            if not has_begun and report.begins_iteration is None:
                next_s = min(next_s, report.begins_s)
    names_iteration = any(report.begins_iteration is not None for report in same)
    return _Judged(same[0].scope, slow, others, gone, next_s, names_iteration)


def _regrouped(
    active: Active, pairs_of: Mapping[int, list[_Pair]], judged: Collection[tuple[Any, ...]]
) -> Active:
    """Return the slow pipelines by what is said of them.

    Args:
        active: The same before.
        pairs_of: What the judged reports say now of each pipeline that they concern; what others
            say of these pipelines is added.
        judged: What the judged reports are about.
    """
    regrouped: Active = {}
    for said, members in active.items():
        staying = members
        leaving = members.keys() & pairs_of.keys()
        if leaving:
            staying = {**members}
        for pipeline in leaving:
            pairs = zip(said, staying.pop(pipeline), strict=True)
            pairs_of[pipeline].extend(pair for pair in pairs if pair[1].about not in judged)
        if staying:
            regrouped[said] = staying
    joining: Active = {}
    for pipeline, now in pairs_of.items():
        if now:
            # In one order, so that pipelines of which the same is said share an entry.
            now.sort(key=lambda pair: pair[1].key, reverse=True)
            said, reports = zip(*now, strict=True)
            joining.setdefault(said, {})[pipeline] = reports
    return regrouped | {said: regrouped.get(said, {}) | these for said, these in joining.items()}


def _has_begun(report: Report, now_s: float, iteration: int | None) -> bool | None:
    """Whether a report has begun; None if it never counts."""
    if report.begins_iteration is not None:
        return iteration is not None and iteration >= report.begins_iteration
    return None if report.begins_s >= report.expires_s else now_s >= report.begins_s


def is_over(report: Report, now_s: float) -> bool:
    """Whether a report has expired, or says that its scope has recovered."""
    has_begun = report.begins_iteration is None and report.begins_s <= now_s
    return report.expires_s <= now_s or (report.slowdown == 1.0 and has_begun)


def over_s(report: Report) -> float:
    """Return when a report that is over ended."""
    return report.begins_s if report.slowdown == 1.0 else report.expires_s
