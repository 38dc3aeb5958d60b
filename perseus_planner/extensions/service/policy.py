"""The policy: which reports count at a given time, which pipelines and stages of a job they
concern, and what the pipelines are to do while something in it is slow. Time is an argument.

Which reports count

| a report | counts |
| --- | --- |
| has not begun | not yet; at its iteration if it names one, else at its time |
| has begun | until it expires, unless one of the next lines applies |
| its source has observed it later | no more once the later one has begun, even after that expires |
| expires before it begins | never |
| has slowdown 1 | no; it ends earlier reports of its source about that scope |
| others of the same pipeline differ | the worst one; slow stages each by their worst slowdown |

What they mean for a pipeline. `target` is the deadline of the job, or the time with all clocks at
maximum, but at least `min_time_s` and at most `max_time_s` of that pipeline. T' is the time of the
slowest pipeline.

| known of a pipeline | its iteration takes | its plan is for |
| --- | --- | --- |
| nothing | target | max(target, T'), at most `max_time_s` |
| stages that compute more slowly | target, so slowed | the same, planned anew so slowed |
| a slowdown of all of it | slowdown x target | target |
| an iteration time above its target | that time | target |

A slow rank, GPU or node is slow in all its stages. If communication or data are slow, or the stage
is unknown, the pipeline is slower as in the third line, and its computations take their normal
time. If a pipeline has slow stages and is slower than these explain, it is planned with them for
its target.

When plans change. The wanted time of a pipeline is `min(max(its target, T'), max_time_s)`.

| before, it was planned for | then it is planned for |
| --- | --- |
| longer than wanted | the wanted time, at once |
| less than its target | its target, at once |
| less than wanted | the wanted time, unless one of the following is true of all |

1. It saves nothing.
2. Each plan would be longer by less than `least_rise`.
3. It does not pay: before the report of the slowest pipeline expires (or within `assumed_s`, if it
   does not), fewer iterations are left than changing the plans twice costs. A change is assumed to
   cost what `iterations_lost` iterations save.
4. Stragglers have changed the plans less than `holding_s` ago.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.prefixes import si
from perseus_planner.extensions.service.models import (
    Cause,
    Decision,
    RegisteredJob,
    Report,
    Scope,
    Slowing,
    Target,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.service.curve import Curve, Numbers

_FORGOTTEN_AFTER_S = 3600.0
"""For so long a report that is over still keeps earlier observations that arrive late from
counting.
"""
_LOOKED_AFTER_S = 60.0


_What = tuple[float | None, float | None, Cause, frozenset[int]]
"""What a report says of a pipeline: slowdown, iteration time, cause and stages."""
_Said = tuple[_What, ...]
"""By several reports, the one with the last key first."""


@dataclass(frozen=True)
class Look:
    """The reports of a job at one time.

    Of the begun reports of one source about one scope, only those with the latest observation last,
    even if they have expired or say that the scope has recovered: an older report that arrives late
    must find them. So what one report changes is found among those about the same.
    """

    #: Those that count, may count later or keep older ones from it, by their source and scope
    lasting: Mapping[str, Mapping[Any, tuple[Report, ...]]]
    #: Pipelines that are slow now: what is said of them -> each with those that say it
    active: Mapping[_Said, dict[int, tuple[Report, ...]]]
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
            UsageError: If a report is about what the job does not have; `check_scope` finds that
                when it arrives.
        """
        lasting = {**self.lasting}
        active = {**self.active}
        gone = [*self.gone]
        next_s = self.next_s
        until_s = self.until_s
        # Only what is about the same as a new report can change, so the reports are grouped by
        # that.
        changed: dict[tuple[Any, ...], list[Report]] = {}
        of_pipelines: dict[int, list[tuple[_What, Report]]] = {}
        for report in reports:
            before = self.lasting.get(report.source, {}).get(report.scope.part, ())
            changed.setdefault(report.about, [*before]).append(report)
        for (source, *part), same in changed.items():
            # Of one source about one scope the latest observation that has begun holds; one that
            # begins later does not end it yet.
            begun = [(_has_begun(report, now_s, iteration), report) for report in same]
            newest_s = max((report.observed_s for has, report in begun if has), default=-math.inf)
            slow = list[Report]()
            others = list[Report]()
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
                # Time does not say when an iteration comes, so the next look must be a new one.
                if report.begins_iteration is not None:
                    until_s = -math.inf
            lasting[source] = {**lasting.get(source, {}), tuple(part): (*slow, *others)}
            if slow or active:
                for pipeline, stages in job.parts.of(same[0].scope).items():
                    of_pipelines.setdefault(pipeline, []).extend(
                        ((report.slowdown, report.iteration_s, report.cause, stages), report)
                        for report in slow
                    )
        # A pipeline has one entry in `active`: it leaves that of what was said of it, and what
        # others said goes along.
        for pipeline, pairs in of_pipelines.items():
            for said, those in self.active.items():
                if pipeline in those:
                    pairs_before = zip(said, those[pipeline], strict=True)
                    pairs += [pair for pair in pairs_before if pair[1].about not in changed]
                    rest = {**active.pop(said)}
                    del rest[pipeline]
                    active |= {said: rest} if rest else {}
            if pairs:
                # In one order, so that pipelines of which the same is said share an entry.
                pairs.sort(key=lambda pair: pair[1].key, reverse=True)
                said, reports_now = zip(*pairs, strict=True)
                active[said] = {**active.get(said, {}), pipeline: reports_now}
        return Look(lasting, active, tuple(gone), next_s, min(until_s, next_s))


def _has_begun(report: Report, now_s: float, iteration: int | None) -> bool | None:
    """Whether a report has begun; None if it never counts."""
    if report.begins_iteration is not None:
        return iteration is not None and iteration >= report.begins_iteration
    return None if report.begins_s >= report.expires_s else now_s >= report.begins_s


def check_scope(job: RegisteredJob, scope: Scope, stages: int) -> None:
    """Check that a scope exists in a job whose pipelines have this many stages.

    Raises:
        UsageError: If it does not.
    """
    for stage in frozenset().union(*job.parts.of(scope).values()):
        if stage >= stages:
            raise UsageError(f"scope: there is no stage {stage}; stages are 0 to {stages - 1}")


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


_COMPUTING = ("compute", "thermal", "unknown")
_ROUNDING = 1e-9  #: a saving below this share of the energy is a rounding error


@dataclass(frozen=True)
class PolicySettings:
    """When pipelines are slowed down. They are always sped up at once."""

    least_rise: float = 0.01  #: The least relative change of a plan's time
    holding_s: float = 30.0  #: How long after a change pipelines are not slowed down again, seconds
    #: How long something is assumed to stay slow if its report does not expire, seconds.
    assumed_s: float = 3600.0
    #: The assumed cost of a change, in iterations' worth of the energy that it saves.
    iterations_lost: float = 1.0


@dataclass(frozen=True, eq=False)
class _Pipeline:
    """What is known about a pipeline."""

    numbers: Curve  #: Its frontier, with its slow stages
    slow_stages: Mapping[int, float]  #: Stage -> slowdown
    own_s: float  #: Time of its plan if it waits for no other pipeline
    takes_s: float  #: Time of its iteration with that plan
    worst: int | None = None  #: Index of the report that counts; None if none makes it slow

    def wanted_s(self, straggler_time_s: float) -> float:
        """Return the wanted time of its plan beside a straggler."""
        # It is unknown where the time goes, and how slower clocks would affect it.
        if self.takes_s > self.own_s:
            return self.own_s
        return min(straggler_time_s, self.numbers.max_time_s)

    def kept_s(self, planned_s: float, straggler_time_s: float) -> float:
        """Return the time of its plan if it is not slowed down to save energy, after a plan of
        `planned_s`.
        """
        return min(max(planned_s, self.own_s), self.wanted_s(straggler_time_s))


def decide(
    job: RegisteredJob,
    look: Look,
    numbers: Numbers,
    before: Decision | None,
    now_s: float,
    settings: PolicySettings = PolicySettings(),
    *,
    reason: Slowing | None = None,
) -> Decision:
    """Decide what the pipelines of a job are to do now.

    The decision stays the same until `look_again_s`, unless a report, the iteration or the deadline
    of the job changes.

    Args:
        job: Its deadline is the iteration time to aim for; one that cannot be met becomes the least
            that can. Its pipelines share its power equally; `power.shares` has chosen a deadline
            for which that suffices.
        look: Its reports.
        numbers: Of a pipeline as profiled. `slowed` is called repeatedly, so it should cache its
            results.
        before: The last decision; None for the first.
        now_s: Seconds since the epoch.
        settings: When to slow down.
        reason: Why the job's own target is not the time of all clocks at maximum; None if it is.
    """
    # Pipelines of which the same is known are one case: thousands of pipelines are decided at the
    # cost of a few.
    aim_s = target_s(job, numbers)
    calm_s = own_s(numbers, aim_s)
    calm = _Pipeline(numbers, {}, calm_s, calm_s)
    reported = [
        (_reported(said, numbers, calm_s, aim_s), members) for said, members in look.active.items()
    ]
    earlier = (0,) * job.pipelines if before is None else before.of_pipeline
    groups = _groups(calm, reported, earlier, before)
    # The slowest pipeline sets the time of all: the others wait for it at the end of an iteration.
    time_s = max(group.pipeline.takes_s for group in groups)
    power_w = None if job.power_w is None else job.power_w / job.pipelines
    stragglers = dict[int, str]()
    expire_s = list[float]()
    for pipeline, members in reported:
        worst = pipeline.worst
        if worst is not None:
            keys = map(attrgetter("key"), map(itemgetter(worst), members.values()))
            stragglers |= zip(members, keys, strict=True)
            # Only reports that set the time count here: when the last of them expires, slowing down
            # ends.
            if pipeline.takes_s == time_s:
                expire_s += [reports[worst].expires_s for reports in members.values()]
    times_s = [
        (group, group.pipeline.kept_s(group.planned_s, time_s), group.pipeline.wanted_s(time_s))
        for group in groups
    ]
    pays_until_s = _pays_until_s(time_s, max(expire_s, default=math.inf), settings)
    # The first plans of a job hold nothing up: nothing was changed for them.
    held = (
        before is not None
        and before.since_s > job.since_s
        and now_s < before.since_s + settings.holding_s
    )
    refusal = _refusal(times_s, settings.least_rise, now_s < pays_until_s, held)
    target_of: dict[tuple[Any, ...], Target] = {}
    asked_of_group: dict[Any, tuple[Any, ...]] = {}
    has_moved = False
    for group, kept_s, wanted_s in times_s:
        time_is_s = kept_s if refusal else wanted_s
        why = "straggler" if time_is_s > group.pipeline.own_s else reason
        slow = group.pipeline.slow_stages
        asked = (time_is_s, *slow.items())
        asked_of_group[group.pipeline, group.earlier] = asked
        target_of[asked] = Target(time_is_s, slow, power_w, job.gpu_power_limit_w, why)
        has_moved |= time_is_s != group.planned_s
    # Sorted by time, so that equal decisions compare equal whatever order their reports came in.
    index_of = {asked: index for index, asked in enumerate(sorted(target_of))}
    targets = tuple(map(target_of.__getitem__, index_of))
    index_of_group = {group: index_of[asked] for group, asked in asked_of_group.items()}
    # With one target every index is 0. Else all start as calm ones, by the target that they had
    # before, and those with reports follow.
    of_pipeline = [0] * job.pipelines
    if len(targets) > 1:
        of_calm = [
            index_of_group.get((calm, index), 0)
            for index in range(len(before.targets) if before else 1)
        ]
        of_pipeline = list(map(of_calm.__getitem__, earlier))
        for pipeline, members in reported:
            of_members = [index_of_group.get((pipeline, index), 0) for index in range(len(of_calm))]
            for number in members:
                of_pipeline[number] = of_members[earlier[number]]
    since_s = job.since_s if before is None else before.since_s
    # not by a deadline of the job
    if before is not None and has_moved and (stragglers or before.stragglers):
        since_s = now_s
    look_again_s = look.next_s
    # Time alone lifts this refusal, as holding ends, or makes it another, as it does not pay any
    # more.
    if refusal == _HELD:
        look_again_s = min(look_again_s, since_s + settings.holding_s, pays_until_s)
    waits = any(target.reason == "straggler" for target in targets)
    return Decision(
        targets,
        tuple(of_pipeline),
        time_s,
        stragglers,
        since_s,
        look_again_s,
        _reason(reported, time_s, calm_s, refusal),
        Target(calm_s, {}, power_w, job.gpu_power_limit_w, reason) if waits else None,
    )


def saving_w(job: RegisteredJob, decision: Decision, numbers: Numbers) -> float:
    """Return the average power that the pipelines of `job` save by a decision, watts.

    It is compared with each pipeline planned for its own target, while the slowest takes the
    decided time. It is computed from `Numbers.bound_j`, which plans come close to, except with a
    switch budget.
    """
    saved_j = 0.0
    aim_s = target_s(job, numbers)
    for index, target in enumerate(decision.targets):
        numbers_then = numbers.slowed(target.slow_stages) if target.slow_stages else numbers
        count = decision.of_pipeline.count(index)
        saved_j += count * _saved_j(numbers_then, own_s(numbers_then, aim_s), target.time_s)
    return saved_j / decision.straggler_time_s


_SAVES_NOTHING = "that saves nothing"
_HARDLY_LONGER = "their plans would hardly be longer"
_DOES_NOT_PAY = "the report expires too soon for that to pay"
_HELD = "plans were changed a moment ago"


_Reported = Sequence[tuple[_Pipeline, Mapping[int, tuple[Report, ...]]]]
"""Pipelines of which the same is reported: what is known of them, and the reports on each."""


class _Group(NamedTuple):
    """Pipelines of which the same is known, and which had the same target."""

    pipeline: _Pipeline
    earlier: int  #: Index of that target
    planned_s: float  #: Its time
    size: int


def _groups(
    calm: _Pipeline, reported: _Reported, earlier: Sequence[int], before: Decision | None
) -> list[_Group]:
    sizes: dict[tuple[_Pipeline, int], int] = {}
    calm_sizes = Counter(earlier)
    for pipeline, members in reported:
        counts = Counter(map(earlier.__getitem__, members))
        # Counter drops what falls to 0, so a target that only slow pipelines had makes no calm
        # group.
        calm_sizes -= counts
        sizes |= {(pipeline, index): size for index, size in counts.items()}
    sizes |= {(calm, index): size for index, size in calm_sizes.items()}
    return [
        _Group(*key, key[0].own_s if before is None else before.targets[key[1]].time_s, size)
        for key, size in sizes.items()
    ]


def _refusal(
    times_s: Sequence[tuple[_Group, float, float]], least_rise: float, pays: bool, held: bool
) -> str | None:
    """Return why no pipeline is slowed down although some could be, from the kept and the wanted
    time of each group; None to use the wanted times.
    """
    if all(kept_s == wanted_s for _, kept_s, wanted_s in times_s):
        return None
    spent_j = saved_j = 0.0  # of an iteration of all pipelines, without slowing down and with it
    for group, kept_s, wanted_s in times_s:
        numbers = group.pipeline.numbers
        spent_j += group.size * numbers.bound_j(kept_s)
        saved_j += group.size * _saved_j(numbers, kept_s, wanted_s)
    # The first reason that holds is the one that people are told.
    if saved_j <= _ROUNDING * spent_j:
        return _SAVES_NOTHING
    if all(wanted_s < kept_s * (1.0 + least_rise) for _, kept_s, wanted_s in times_s):
        return _HARDLY_LONGER
    if not pays:
        return _DOES_NOT_PAY
    return _HELD if held else None


def _pays_until_s(time_s: float, expires_s: float, settings: PolicySettings) -> float:
    """Return until when slowing down beside pipelines that take `time_s` pays; after that, the
    reports that they rest on expire, the last at `expires_s`, before both changes are paid off.
    """
    both_changes_s = 2.0 * settings.iterations_lost * time_s
    if expires_s == math.inf and settings.assumed_s <= both_changes_s:
        return -math.inf
    return expires_s - both_changes_s


def target_s(job: RegisteredJob, numbers: Curve) -> float:
    """Return the iteration time that a job aims for."""
    return numbers.baseline_time_s if job.deadline_s is None else job.deadline_s


def own_s(numbers: Curve, aim_s: float) -> float:
    """Return the time of a pipeline's plan if it waits for no other one, aiming for `aim_s`."""
    return min(max(aim_s, numbers.min_time_s), numbers.max_time_s)


def _saved_j(numbers: Curve, from_s: float, to_s: float) -> float:
    """Return what a plan of `to_s` saves against one of `from_s` if both then wait for a slower
    pipeline, joules.
    """
    if from_s == to_s:
        return 0.0
    waited_j = numbers.waiting_w * (to_s - from_s)
    return numbers.bound_j(from_s) - numbers.bound_j(to_s) + waited_j


def _reported(said: Sequence[_What], profiled: Numbers, calm_s: float, aim_s: float) -> _Pipeline:
    """Return a pipeline of which this is reported."""
    slow: dict[int, float] = {}
    # How bad each report is
    of_stages = [0.0] * len(said)
    of_all = [0.0] * len(said)
    for index, (slowdown, iteration_s, cause, stages) in enumerate(said):
        # Slow computations of known stages can be planned around; all else only makes the iteration
        # longer.
        if slowdown is not None and stages and cause in _COMPUTING:
            slow |= {stage: max(slowdown, slow.get(stage, 1.0)) for stage in stages}
            of_stages[index] = slowdown
        else:
            of_all[index] = iteration_s or calm_s * (slowdown or 1.0)
    slow = dict(sorted(slow.items()))
    numbers = profiled.slowed(slow) if slow else profiled
    plan_s = own_s(numbers, aim_s)
    takes_s = max(plan_s, *of_all)
    # What makes the pipeline slower than its own plan is named first, as the others wait for that.
    how_bad = of_all if takes_s > plan_s else of_stages
    worst = how_bad.index(max(how_bad))
    return _Pipeline(numbers, slow, plan_s, takes_s, worst if how_bad[worst] else None)


def _reason(reported: _Reported, time_s: float, calm_s: float, refusal: str | None) -> str:
    """Explain a decision to people, by nothing that changes while the decision does not."""
    # Of the slowest pipelines the one with the lowest number, so that the text stays the same while
    # the decision does.
    _, number, report = min(
        [
            (-pipeline.takes_s, min(members), members[min(members)][pipeline.worst])
            for pipeline, members in reported
            if pipeline.worst is not None
        ],
        default=(0.0, 0, None),
    )
    if report is None:
        return f"nothing is reported slow: iterations take {si(time_s, 's', 4)}"
    measure = "" if report.slowdown is None else f"{report.slowdown:.4g}x, "
    culprit = f"pipeline {number} ({measure}reported by {shown(report.source)})"
    if time_s <= calm_s:
        return f"{culprit} is slow, but iterations still take {si(time_s, 's', 4)}"
    text = f"iterations take {si(time_s, 's', 4)} because of {culprit}"
    return (
        f"{text}, and plans are for that"
        if refusal is None
        else f"{text}, but nothing is slowed down: {refusal}"
    )
