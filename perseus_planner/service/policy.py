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
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.base.errors import shown
from perseus_planner.base.prefixes import si
from perseus_planner.service.model import (
    Decision,
    Numbers,
    RegisteredJob,
    Report,
    Slowing,
    Target,
)
from perseus_planner.service.reports import active_reports, next_turn_s, parts_concerned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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

    numbers: Numbers  #: Its frontier, with its slow stages
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
    reports: Iterable[Report],
    numbers: Numbers,
    before: Decision | None,
    now_s: float,
    settings: PolicySettings = PolicySettings(),
    *,
    iteration: int | None = None,
    reason: Slowing | None = None,
) -> Decision:
    """Decide what the pipelines of a job are to do now.

    The decision stays the same until `look_again_s`, unless a report, the iteration or the deadline
    of the job changes.

    Args:
        job: Its deadline is the iteration time to aim for; one that cannot be met becomes the least
            that can. Its pipelines share its power equally; `power.shares` has chosen a deadline
            for which that suffices.
        reports: All known reports, in any order. `reports.lasting_reports` of them are enough.
        numbers: Of a pipeline as profiled. `slowed` is called repeatedly, so it should cache its
            results.
        before: The last decision; None for the first.
        now_s: Seconds since the epoch.
        settings: When to slow down.
        iteration: The first iteration that can still be changed; None if unknown, so that no report
            that waits for an iteration has begun.
        reason: Why the job's own target is not the time of all clocks at maximum; None if it is.

    Raises:
        UsageError: If a report concerns what the job does not have; `reports.check_scope` finds
            that when it arrives.
    """
    reports = tuple(reports)
    pipelines = _pipelines(job, active_reports(reports, now_s, iteration), numbers)
    time_s = max(pipeline.takes_s for pipeline in pipelines)
    planned_s = (
        [target.time_s for target in before.targets]
        if before
        else [pipeline.own_s for pipeline in pipelines]
    )
    calm_s = _own_s(numbers, _target_s(job, numbers))
    power_w = None if job.power_w is None else job.power_w / job.pipelines
    others = _Others(
        pipelines, time_s, tuple(planned_s), power_w, job.gpu_power_limit_w, settings, reason
    )
    held = (
        before is not None
        and before.since_s > job.since_s
        and now_s < before.since_s + settings.holding_s
    )
    refusal = others.refusal(now_s, held)
    targets = others.targets(others.kept_s if refusal else others.wanted_s)
    stragglers = {
        number: pipeline.worst.key for number, pipeline in enumerate(pipelines) if pipeline.worst
    }
    since_s = _since_s(job, before, targets, stragglers, now_s)
    turns_s = [next_turn_s(reports, now_s, iteration)]
    if refusal == _HELD:
        turns_s += [since_s + settings.holding_s, others.pays_until_s()]
    return Decision(
        targets,
        time_s,
        stragglers,
        since_s,
        min(turns_s),
        _reason(pipelines, time_s, calm_s, refusal),
        Target(calm_s, {}, *others.limits_w, reason)
        if any(target.reason == "straggler" for target in targets)
        else None,
    )


def saving_w(job: RegisteredJob, decision: Decision, numbers: Numbers) -> float:
    """Return the average power that the pipelines of `job` save by a decision, watts.

    It is compared with each pipeline planned for its own target, while the slowest takes the
    decided time. It is computed from `Numbers.bound_j`, which plans come close to, except with a
    switch budget.
    """
    saved_j, target_s = 0.0, _target_s(job, numbers)
    for (time_s, slow), count in Counter(
        (target.time_s, tuple(target.slow_stages.items())) for target in decision.targets
    ).items():
        own = numbers.slowed(dict(slow)) if slow else numbers
        saved_j += count * _saved_j(own, _own_s(own, target_s), time_s)
    return saved_j / decision.straggler_time_s


_SAVES_NOTHING = "that saves nothing"
_HARDLY_LONGER = "their plans would hardly be longer"
_DOES_NOT_PAY = "the report expires too soon for that to pay"
_HELD = "plans were changed a moment ago"


@dataclass(frozen=True)
class _Others:
    """Whether to slow pipelines down beside one that takes `time_s`, after plans of `planned_s`.

    Each pipeline may draw `power_w`, and each GPU `gpu_power_limit_w`.
    """

    pipelines: Sequence[_Pipeline]
    time_s: float
    planned_s: tuple[float, ...]
    power_w: float | None
    gpu_power_limit_w: float | None
    settings: PolicySettings
    reason: Slowing | None

    @property
    def limits_w(self) -> tuple[float | None, float | None]:
        return self.power_w, self.gpu_power_limit_w

    @cached_property
    def wanted_s(self) -> tuple[float, ...]:
        return tuple(pipeline.wanted_s(self.time_s) for pipeline in self.pipelines)

    @cached_property
    def kept_s(self) -> tuple[float, ...]:
        pairs = zip(self.pipelines, self.planned_s, strict=True)
        return tuple(pipeline.kept_s(planned_s, self.time_s) for pipeline, planned_s in pairs)

    def targets(self, times_s: Sequence[float]) -> tuple[Target, ...]:
        pairs = zip(self.pipelines, times_s, strict=True)
        return tuple(
            Target(
                time_s,
                pipeline.slow_stages,
                *self.limits_w,
                "straggler" if time_s > pipeline.own_s else self.reason,
            )
            for pipeline, time_s in pairs
        )

    def refusal(self, now_s: float, held: bool) -> str | None:
        """Return why no pipeline is slowed down although some could be; None to use the wanted
        times.
        """
        if self.kept_s == self.wanted_s:
            return None
        spent_j, saved_j = self._spent_and_saved_j()
        if saved_j <= _ROUNDING * spent_j:
            return _SAVES_NOTHING
        rises = zip(self.kept_s, self.wanted_s, strict=True)
        if all(wanted_s < kept_s * (1.0 + self.settings.least_rise) for kept_s, wanted_s in rises):
            return _HARDLY_LONGER
        if now_s >= self.pays_until_s():
            return _DOES_NOT_PAY
        return _HELD if held else None

    def _spent_and_saved_j(self) -> tuple[float, float]:
        """Return the energy of an iteration of all pipelines without slowing down, and what that
        would save.
        """
        spent_j = saved_j = 0.0
        for numbers, kept_s, wanted_s, count in self._alike():
            spent_j += count * numbers.bound_j(kept_s)
            saved_j += count * _saved_j(numbers, kept_s, wanted_s)
        return spent_j, saved_j

    def _alike(self) -> Iterator[tuple[Numbers, float, float, int]]:
        """Group equal pipelines, as there are many: yields numbers, kept time, wanted time and
        their count.
        """
        of_id = {id(pipeline.numbers): pipeline.numbers for pipeline in self.pipelines}
        kinds = Counter(
            zip(
                (id(pipeline.numbers) for pipeline in self.pipelines),
                self.kept_s,
                self.wanted_s,
                strict=True,
            )
        )
        return (
            (of_id[which], kept_s, wanted_s, count)
            for (which, kept_s, wanted_s), count in kinds.items()
        )

    def pays_until_s(self) -> float:
        """Return until when slowing down pays; after that, the report expires before both
        changes are paid off.
        """
        both_changes_s = 2.0 * self.settings.iterations_lost * self.time_s
        slowest = (pipeline.worst for pipeline in self.pipelines if pipeline.takes_s == self.time_s)
        expires_s = max((worst.expires_s for worst in slowest if worst), default=math.inf)
        if expires_s == math.inf and self.settings.assumed_s <= both_changes_s:
            return -math.inf
        return expires_s - both_changes_s


def _target_s(job: RegisteredJob, numbers: Numbers) -> float:
    return numbers.baseline_time_s if job.deadline_s is None else job.deadline_s


def _own_s(numbers: Numbers, target_s: float) -> float:
    return min(max(target_s, numbers.min_time_s), numbers.max_time_s)


def _saved_j(numbers: Numbers, from_s: float, to_s: float) -> float:
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


def _pipelines(job: RegisteredJob, active: Sequence[Report], numbers: Numbers) -> list[_Pipeline]:
    concerning: dict[int, list[tuple[Report, frozenset[int]]]] = {}
    for report in active:
        for pipeline, stages in parts_concerned(job, report.scope).items():
            concerning.setdefault(pipeline, []).append((report, stages))
    target_s = _target_s(job, numbers)
    calm_s = _own_s(numbers, target_s)
    calm = _Pipeline(numbers, {}, calm_s, calm_s, None)
    return [
        _reported(concerning[number], calm, target_s) if number in concerning else calm
        for number in range(job.pipelines)
    ]


def _reported(
    reports: Sequence[tuple[Report, frozenset[int]]], calm: _Pipeline, target_s: float
) -> _Pipeline:
    """Return a pipeline with its reports, each given with the stages that it concerns."""
    slow: dict[int, float] = {}
    of_stages: list[tuple[float, str, Report]] = []  # (how bad it is, key to break ties, report)
    of_all: list[tuple[float, str, Report]] = []
    for report, stages in reports:
        if report.slowdown is not None and stages and report.cause in _COMPUTING:
            slow |= {stage: max(report.slowdown, slow.get(stage, 1.0)) for stage in stages}
            of_stages.append((report.slowdown, report.key, report))
        else:
            of_all.append(
                (report.iteration_s or calm.own_s * (report.slowdown or 1.0), report.key, report)
            )
    slow = dict(sorted(slow.items()))
    numbers = calm.numbers.slowed(slow) if slow else calm.numbers
    own_s = _own_s(numbers, target_s)
    takes_s = max([own_s, *(time_s for time_s, *_ in of_all)])
    ranked = of_all if takes_s > own_s else of_stages
    worst = max(ranked, key=lambda each: each[:2])[2] if ranked else None
    return _Pipeline(numbers, slow, own_s, takes_s, worst)


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
    as_before = [target.time_s for target in targets] == [
        target.time_s for target in before.targets
    ]
    return before.since_s if as_before or not (stragglers or before.stragglers) else now_s


def _reason(
    pipelines: Sequence[_Pipeline], time_s: float, calm_s: float, refusal: str | None
) -> str:
    """Explain a decision to people, by nothing that changes while the decision does not."""
    slow = [
        (pipeline.takes_s, -number, pipeline.worst)
        for number, pipeline in enumerate(pipelines)
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
