"""The policy: what the pipelines of a job are to do while something in it is slow. Time is an
argument.

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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import shown
from perseus_planner.base.prefixes import si
from perseus_planner.service.models import (
    Curve,
    Decision,
    Numbers,
    RegisteredJob,
    Report,
    Slowing,
    Target,
    distinct,
)
from perseus_planner.service.reports import Look, parts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COMPUTING = ("compute", "unknown")
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


@dataclass(frozen=True)
class _Pipeline:
    """What is known about a pipeline."""

    numbers: Curve  #: Its frontier, with its slow stages
    slow_stages: Mapping[int, float]  #: Stage -> slowdown
    own_s: float  #: Time of its plan if it waits for no other pipeline
    takes_s: float  #: Time of its iteration with that plan
    worst: Report | None  #: The report that counts; None if none does

    def wanted_s(self, straggler_time_s: float) -> float:
        """Return the wanted time of its plan beside a straggler."""
        if (
            self.takes_s > self.own_s
        ):  # it is unknown where the time goes, and how slower clocks would affect it
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

    Raises:
        UsageError: If a report concerns what the job does not have; `reports.check_scope` finds
            that when it arrives.
    """
    calm, reported = _pipelines(job, look.active, numbers)
    groups = _groups(job, calm, reported, before)
    pipelines = [group.pipeline for group in groups]
    time_s = max(pipeline.takes_s for pipeline in pipelines)
    calm_s = _own_s(numbers, _target_s(job, numbers))
    power_w = None if job.power_w is None else job.power_w / job.pipelines
    others = _Others(groups, time_s, power_w, job.gpu_power_limit_w, settings, reason)
    held = (
        before is not None
        and before.since_s > job.since_s
        and now_s < before.since_s + settings.holding_s
    )
    refusal = others.refusal(now_s, held)
    targets = others.targets(job.pipelines, bool(refusal), before)
    stragglers = {
        number: pipeline.worst.key
        for number, pipeline in sorted(reported.items())
        if pipeline.worst
    }
    since_s = _since_s(job, before, targets, stragglers, now_s)
    turns_s = [look.next_s]
    if refusal == _HELD:
        turns_s += [since_s + settings.holding_s, others.pays_until_s()]
    return Decision(
        targets,
        time_s,
        stragglers,
        since_s,
        min(turns_s),
        _reason(reported, time_s, calm_s, refusal),
        Target(calm_s, {}, *others.limits_w, reason)
        if any(target.reason == "straggler" for target, _ in distinct(targets))
        else None,
    )


def saving_w(job: RegisteredJob, decision: Decision, numbers: Numbers) -> float:
    """Return the average power that the pipelines of `job` save by a decision, watts.

    It is compared with each pipeline planned for its own target, while the slowest takes the
    decided time. It is computed from `Numbers.bound_j`, which plans come close to, except with a
    switch budget.
    """
    saved_j, target_s = 0.0, _target_s(job, numbers)
    for target, count in distinct(decision.targets):
        own = numbers.slowed(target.slow_stages) if target.slow_stages else numbers
        saved_j += count * _saved_j(own, _own_s(own, target_s), target.time_s)
    return saved_j / decision.straggler_time_s


_SAVES_NOTHING = "that saves nothing"
_HARDLY_LONGER = "their plans would hardly be longer"
_DOES_NOT_PAY = "the report expires too soon for that to pay"
_HELD = "plans were changed a moment ago"


@dataclass(frozen=True)
class _Group:
    """Pipelines of which the same is known, and whose plans were for the same time."""

    pipeline: _Pipeline
    planned_s: float
    numbers: Sequence[int]  #: Of the pipelines

    def target_s(self, straggler_time_s: float, *, is_kept: bool) -> float:
        """Return the time of their plans beside a straggler, slowed down or not."""
        if is_kept:
            return self.pipeline.kept_s(self.planned_s, straggler_time_s)
        return self.pipeline.wanted_s(straggler_time_s)


def _groups(
    job: RegisteredJob,
    calm: _Pipeline,
    reported: Mapping[int, _Pipeline],
    before: Decision | None,
) -> list[_Group]:
    members: dict[tuple[int, float], list[int]] = {}
    for number in range(job.pipelines):
        pipeline = reported.get(number, calm)
        planned_s = pipeline.own_s if before is None else before.targets[number].time_s
        members.setdefault((id(pipeline), planned_s), []).append(number)
    return [
        _Group(reported.get(numbers[0], calm), planned_s, numbers)
        for (_, planned_s), numbers in members.items()
    ]


@dataclass(frozen=True)
class _Others:
    """Whether to slow pipelines down beside one that takes `time_s`.

    Each pipeline may draw `power_w`, and each GPU `gpu_power_limit_w`.
    """

    groups: Sequence[_Group]
    time_s: float
    power_w: float | None
    gpu_power_limit_w: float | None
    settings: PolicySettings
    reason: Slowing | None

    @property
    def limits_w(self) -> tuple[float | None, float | None]:
        return self.power_w, self.gpu_power_limit_w

    @cached_property
    def times_s(self) -> list[tuple[_Group, float, float]]:
        """Each group with its kept and its wanted time."""
        return [
            (
                group,
                group.target_s(self.time_s, is_kept=True),
                group.target_s(self.time_s, is_kept=False),
            )
            for group in self.groups
        ]

    def targets(
        self, pipelines: int, are_kept: bool, before: Decision | None
    ) -> tuple[Target, ...]:
        """Return the target of each pipeline. Equal ones are one object, that of the decision
        before if it had such a target.
        """
        known = [] if before is None else [target for target, _ in distinct(before.targets)]
        found: list[Any] = [None] * pipelines
        for group, kept_s, wanted_s in self.times_s:
            time_s = kept_s if are_kept else wanted_s
            reason = "straggler" if time_s > group.pipeline.own_s else self.reason
            target = Target(time_s, group.pipeline.slow_stages, *self.limits_w, reason)
            same = next((each for each in known if each == target), None)
            if same is None:
                known.append(target)
            for number in group.numbers:
                found[number] = same or target
        return tuple(found)

    def refusal(self, now_s: float, held: bool) -> str | None:
        """Return why no pipeline is slowed down although some could be; None to use the wanted
        times.
        """
        if all(kept_s == wanted_s for _, kept_s, wanted_s in self.times_s):
            return None
        spent_j, saved_j = self._spent_and_saved_j()
        if saved_j <= _ROUNDING * spent_j:
            return _SAVES_NOTHING
        most = 1.0 + self.settings.least_rise
        if all(wanted_s < kept_s * most for _, kept_s, wanted_s in self.times_s):
            return _HARDLY_LONGER
        if now_s >= self.pays_until_s():
            return _DOES_NOT_PAY
        return _HELD if held else None

    def _spent_and_saved_j(self) -> tuple[float, float]:
        """Return the energy of an iteration of all pipelines without slowing down, and what that
        would save.
        """
        spent_j = saved_j = 0.0
        for group, kept_s, wanted_s in self.times_s:
            numbers, count = group.pipeline.numbers, len(group.numbers)
            spent_j += count * numbers.bound_j(kept_s)
            saved_j += count * _saved_j(numbers, kept_s, wanted_s)
        return spent_j, saved_j

    def pays_until_s(self) -> float:
        """Return until when slowing down pays; after that, the report expires before both
        changes are paid off.
        """
        both_changes_s = 2.0 * self.settings.iterations_lost * self.time_s
        pipelines = (group.pipeline for group in self.groups)
        slowest = (pipeline.worst for pipeline in pipelines if pipeline.takes_s == self.time_s)
        expires_s = max((worst.expires_s for worst in slowest if worst), default=math.inf)
        if expires_s == math.inf and self.settings.assumed_s <= both_changes_s:
            return -math.inf
        return expires_s - both_changes_s


def _target_s(job: RegisteredJob, numbers: Curve) -> float:
    return numbers.baseline_time_s if job.deadline_s is None else job.deadline_s


def _own_s(numbers: Curve, target_s: float) -> float:
    return min(max(target_s, numbers.min_time_s), numbers.max_time_s)


def _saved_j(numbers: Curve, from_s: float, to_s: float) -> float:
    """Return what a plan of `to_s` saves against one of `from_s` if both then wait for a slower
    pipeline, joules.
    """
    if from_s == to_s:
        return 0.0
    most_s = numbers.max_time_s
    waiting_w = (
        numbers.bound_j(2.0 * most_s) - numbers.bound_j(most_s)
    ) / most_s  # beyond it a plan only waits
    return numbers.bound_j(from_s) - numbers.bound_j(to_s) + waiting_w * (to_s - from_s)


def _pipelines(
    job: RegisteredJob, active: Sequence[Report], numbers: Numbers
) -> tuple[_Pipeline, dict[int, _Pipeline]]:
    """Return a pipeline of which nothing is reported, and those of which something is."""
    concerning: dict[int, list[tuple[Report, frozenset[int]]]] = {}
    parts = parts_of(job)
    for report in active:
        for pipeline, stages in parts.of(job, report.scope).items():
            concerning.setdefault(pipeline, []).append((report, stages))
    target_s = _target_s(job, numbers)
    calm_s = _own_s(numbers, target_s)
    calm = _Pipeline(numbers, {}, calm_s, calm_s, None)
    return calm, {
        number: _reported(reports, calm, numbers, target_s)
        for number, reports in concerning.items()
    }


def _reported(
    reports: Sequence[tuple[Report, frozenset[int]]],
    calm: _Pipeline,
    profiled: Numbers,
    target_s: float,
) -> _Pipeline:
    """Return a pipeline with its reports, each given with the stages that it concerns."""
    slow: dict[int, float] = {}
    # (how bad it is, key to break ties, report)
    of_stages: tuple[float, str, Report | None] = (0.0, "", None)
    of_all: tuple[float, str, Report | None] = (0.0, "", None)
    for report, stages in reports:
        if report.slowdown is not None and stages and report.cause in _COMPUTING:
            slow |= {stage: max(report.slowdown, slow.get(stage, 1.0)) for stage in stages}
            if (report.slowdown, report.key) > of_stages[:2]:
                of_stages = report.slowdown, report.key, report
        else:
            time_s = report.iteration_s or calm.own_s * (report.slowdown or 1.0)
            if (time_s, report.key) > of_all[:2]:
                of_all = time_s, report.key, report
    slow = dict(sorted(slow.items()))
    numbers = profiled.slowed(slow) if slow else calm.numbers
    own_s = _own_s(numbers, target_s)
    takes_s = max(own_s, of_all[0])
    return _Pipeline(numbers, slow, own_s, takes_s, of_all[2] if takes_s > own_s else of_stages[2])


def _since_s(
    job: RegisteredJob,
    before: Decision | None,
    targets: Sequence[Target],
    stragglers: Mapping[int, str],
    now_s: float,
) -> float:
    """Return since when stragglers determine the times of the plans; a new deadline of the job
    does not count.
    """
    if before is None:
        return job.since_s
    pairs = zip(targets, before.targets, strict=True)
    as_before = all(now is old or now.time_s == old.time_s for now, old in pairs)
    return before.since_s if as_before or not (stragglers or before.stragglers) else now_s


def _reason(
    reported: Mapping[int, _Pipeline], time_s: float, calm_s: float, refusal: str | None
) -> str:
    """Explain a decision to people, by nothing that changes while the decision does not."""
    slow = [
        (pipeline.takes_s, -number, pipeline.worst)
        for number, pipeline in reported.items()
        if pipeline.worst
    ]
    if not slow:
        return f"nothing is reported slow: iterations take {si(time_s, 's', 6)}"
    _, number, report = max(slow, key=lambda each: each[:2])
    measure = "" if report.slowdown is None else f"{report.slowdown:.4g}x, "
    culprit = f"pipeline {-number} ({measure}reported by {shown(report.source)})"
    if time_s <= calm_s:
        return f"{culprit} is slow, but iterations still take {si(time_s, 's', 6)}"
    text = f"iterations take {si(time_s, 's', 6)} because of {culprit}"
    return (
        f"{text}, and plans are for that"
        if refusal is None
        else f"{text}, but nothing is slowed down: {refusal}"
    )
