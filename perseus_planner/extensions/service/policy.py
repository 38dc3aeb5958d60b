"""The policy: what the pipelines of a job are to do while something in it is slow. `look` says
which reports count. Time is an argument.

What they mean for a pipeline. `target` is the deadline of the job, but no later than the iteration
of least energy; or the time with all clocks at maximum; or the time that power budgets leave. It is
at least `min_time_s` and at most `max_time_s` of that pipeline. T' is the time of the slowest
pipeline.

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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import shown
from perseus_planner.base.prefixes import si
from perseus_planner.extensions.service.models import (
    Decision,
    RegisteredJob,
    Report,
    Slowing,
    Target,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.service.curve import Curve, Numbers, Slow
    from perseus_planner.extensions.service.look import Look, Said


_KEEPS = {
    "job budget": ", to keep the power budget of the job",
    "cluster budget": ", to keep the power budget of all jobs",
    "GPU limit": ", under the power limit of the GPUs",
    "deadline": ", as the deadline of the job allows",
}


def keeps(reason: Slowing | None, past_s: float | None = None) -> str:
    """Say why a job that waits for nobody is not planned as fast as with all clocks at maximum;
    empty if it is.

    Args:
        reason: Why.
        past_s: The deadline, if that is why and it is later than the iteration of least energy.
    """
    if past_s is not None:
        return f": the least energy, as {si(past_s, 's', 4)} would be slower and cost more"
    return _KEEPS.get(reason or "", "")


def within_deadline_s(deadline_s: float, numbers: Curve) -> float:
    """Return the iteration time that a deadline is planned for: at most that of least energy."""
    # A hair above it, as for `Frontier.least_energy_deadline_s`: a plan of exactly that time is not
    # to be refused because of a rounding error.
    return min(deadline_s, numbers.least_energy_time_s * (1.0 + 1e-9))


def past_least_energy_s(job: RegisteredJob, reason: Slowing | None, numbers: Curve) -> float | None:
    """Return the deadline of a job that is planned so for this reason, if plans stop before it, at
    the least energy; None if they do not.
    """
    if reason != "deadline" or job.deadline_s is None:
        return None
    return job.deadline_s if within_deadline_s(job.deadline_s, numbers) < job.deadline_s else None


_COMPUTING = ("compute", "thermal", "unknown")
_ROUNDING = 1e-9  #: a saving below this share of the energy is a rounding error
_SAYINGS = 2**14
"""How much of what was said of pipelines is remembered with its worst, some 500 bytes each: twice
the reports that a job may have. Chosen by hand."""


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
class _Kind:
    """Pipelines that are planned alike."""

    numbers: Curve  #: Their frontier, with their slow stages
    slow: Slow  #: Their slow stages
    own_s: float  #: Time of their plan if they wait for no other pipeline
    #: Whether an iteration takes longer than that plan, by what no plan can take into account
    is_slower: bool = False

    def wanted_s(self, straggler_time_s: float) -> float:
        """Return the wanted time of their plan beside a straggler."""
        # It is unknown where the time goes, and how slower clocks would affect it.
        if self.is_slower:
            return self.own_s
        return min(straggler_time_s, self.numbers.max_time_s)

    def kept_s(self, planned_s: float, straggler_time_s: float) -> float:
        """Return the time of their plan if they are not slowed down to save energy, after a plan
        of `planned_s`.
        """
        return min(max(planned_s, self.own_s), self.wanted_s(straggler_time_s))


class _Reported(NamedTuple):
    """Pipelines of which the same is reported."""

    kind: _Kind
    takes_s: float  #: Time of their iteration with their own plan
    worst: int | None  #: Index of the report that counts; None if none makes them slow
    members: Mapping[int, tuple[Report, ...]]  #: Each with what is reported of it

    def counting(self) -> Mapping[int, Report]:
        """Return the report that counts for each of them; empty if none makes them slow."""
        worst = self.worst
        if worst is None:
            return {}
        return {number: reports[worst] for number, reports in self.members.items()}


def decide(
    job: RegisteredJob,
    look: Look,
    numbers: Numbers,
    before: Decision | None,
    now_s: float,
    settings: PolicySettings = PolicySettings(),
    *,
    reason: Slowing | None = None,
    past_s: float | None = None,
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
        past_s: The deadline that people have set, if it is later than `job.deadline_s`, which is
            that of least energy then.
    """
    aim_s = target_s(job, numbers)
    calm_s = own_s(numbers, aim_s)
    calm = _Kind(numbers, (), calm_s)
    reported = _all_reported(look, numbers, calm, aim_s)
    # Pipelines that are planned alike are one case: thousands of pipelines are decided at the cost
    # of a few.
    members_of: dict[_Kind, list[int]] = {}
    for each in reported:
        members_of.setdefault(each.kind, []).extend(each.members)
    earlier = (0,) * job.pipelines if before is None else before.of_pipeline
    groups = _groups(calm, members_of, earlier, before)
    # The slowest pipeline sets the time of all: the others wait for it at the end of an iteration.
    takes_s = [each.takes_s for each in reported]
    if sum(map(len, members_of.values())) < job.pipelines:
        takes_s.append(calm_s)
    time_s = max(takes_s)
    # Only reports that set the time count here: when the last of them expires, slowing down ends.
    expire_s = [
        report.expires_s
        for each in reported
        if each.takes_s == time_s
        for report in each.counting().values()
    ]
    pays_until_s = _pays_until_s(time_s, max(expire_s, default=math.inf), settings)
    # The first plans of a job hold nothing up: nothing was changed for them.
    held = (
        before is not None
        and before.since_s > job.since_s
        and now_s < before.since_s + settings.holding_s
    )
    choices = [
        _Choice(group, group.kind.kept_s(group.planned_s, time_s), group.kind.wanted_s(time_s))
        for group in groups
    ]
    refusal = _refusal(choices, settings.least_rise, now_s < pays_until_s, held)
    asked_of = {
        each.group: _asked(each.group.kind, each.kept_s if refusal else each.wanted_s, reason)
        for each in choices
    }
    # Sorted by time, so that equal decisions compare equal whatever order their reports came in.
    distinct = sorted({*asked_of.values()}, key=lambda asked: (asked.time_s, asked.slow))
    targets = _targets(job, distinct)
    index_of = {
        (group.kind, group.earlier): distinct.index(asked) for group, asked in asked_of.items()
    }
    stragglers = {
        number: report.key for each in reported for number, report in each.counting().items()
    }
    since_s = job.since_s if before is None else before.since_s
    has_moved = any(asked.time_s != group.planned_s for group, asked in asked_of.items())
    # not by a deadline of the job
    if before is not None and has_moved and (stragglers or before.stragglers):
        since_s = now_s
    look_again_s = look.next_s
    # Time alone lifts this refusal, as holding ends, or makes it another, as it does not pay any
    # more.
    if refusal == _HELD:
        look_again_s = min(look_again_s, since_s + settings.holding_s, pays_until_s)
    waits = any(target.reason == "straggler" for target in targets)
    is_followed = waits or any(target.time_s == time_s for target in targets)
    return Decision(
        targets,
        _indices(earlier, calm, members_of, index_of),
        time_s,
        stragglers,
        since_s,
        look_again_s,
        _reason(reported, time_s, calm_s, refusal, keeps(reason, past_s), is_followed),
        *(_targets(job, [_asked(calm, calm_s, reason)]) if waits else ()),
    )


class _Asked(NamedTuple):
    """What pipelines are to be planned for: the same for all that share a target."""

    time_s: float
    slow: Slow
    reason: Slowing | None


def _asked(kind: _Kind, time_s: float, reason: Slowing | None) -> _Asked:
    return _Asked(time_s, kind.slow, "straggler" if time_s > kind.own_s else reason)


def _targets(job: RegisteredJob, distinct: Iterable[_Asked]) -> tuple[Target, ...]:
    """Return a target for each, within the limits of the job."""
    power_w = None if job.power_w is None else job.power_w / job.pipelines
    return tuple(
        Target(asked.time_s, dict(asked.slow), power_w, job.gpu_power_limit_w, asked.reason)
        for asked in distinct
    )


def _indices(
    earlier: Sequence[int],
    calm: _Kind,
    members_of: Mapping[_Kind, Sequence[int]],
    index_of: Mapping[tuple[_Kind, int], int],
) -> tuple[int, ...]:
    """Return the index of the target of each pipeline.

    Args:
        earlier: The index of the target that each had before.
        calm: The kind of pipelines of which nothing is reported.
        members_of: The others of each kind.
        index_of: The index by kind and earlier index.
    """
    if not any(index_of.values()):  # thousands of pipelines mostly do the same
        return (0,) * len(earlier)
    # All start as calm ones, and those with reports follow.
    of_calm = {index: index_of.get((calm, index), 0) for index in {*earlier}}
    of_pipeline = list(map(of_calm.__getitem__, earlier))
    for kind, members in members_of.items():
        for number in members:
            of_pipeline[number] = index_of[kind, earlier[number]]
    return tuple(of_pipeline)


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


class _Group(NamedTuple):
    """Pipelines of one kind that had the same target."""

    kind: _Kind
    earlier: int  #: Index of that target
    planned_s: float  #: Its time
    size: int


class _Choice(NamedTuple):
    """What a group may be planned for."""

    group: _Group
    kept_s: float  #: If it is not slowed down to save energy
    wanted_s: float


def _groups(
    calm: _Kind,
    members_of: Mapping[_Kind, Sequence[int]],
    earlier: Sequence[int],
    before: Decision | None,
) -> list[_Group]:
    sizes_of: dict[_Kind, Counter[int]] = {calm: Counter(earlier)}
    for kind, members in members_of.items():
        if kind is calm:
            continue
        counts = Counter(map(earlier.__getitem__, members))
        # Counter drops what falls to 0, so a target that only slow pipelines had makes no calm
        # group.
        sizes_of[calm] -= counts
        sizes_of[kind] = counts
    return [
        _Group(kind, index, kind.own_s if before is None else before.targets[index].time_s, size)
        for kind, sizes in sizes_of.items()
        for index, size in sizes.items()
    ]


def _refusal(choices: Sequence[_Choice], least_rise: float, pays: bool, held: bool) -> str | None:
    """Return why no pipeline is slowed down although some could be; None to use the wanted
    times.
    """
    if all(each.kept_s == each.wanted_s for each in choices):
        return None
    spent_j = saved_j = 0.0  # of an iteration of all pipelines, without slowing down and with it
    for each in choices:
        numbers = each.group.kind.numbers
        spent_j += each.group.size * numbers.bound_j(each.kept_s)
        saved_j += each.group.size * _saved_j(numbers, each.kept_s, each.wanted_s)
    # The first reason that holds is the one that people are told.
    if saved_j <= _ROUNDING * spent_j:
        return _SAVES_NOTHING
    if all(each.wanted_s < each.kept_s * (1.0 + least_rise) for each in choices):
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


class _Worst(NamedTuple):
    """The worst of what is reported of a pipeline."""

    slow: Slow  #: What plans take into account
    of_stages: int | None  #: Index of the report that says the most of these; None without any
    all_s: float  #: Time of an iteration by what no plan takes into account, seconds; 0 without
    of_all: int | None  #: Index of the report that says so; None without any


@lru_cache(_SAYINGS)
def _worst(said: Said, calm_s: float) -> _Worst:
    """Return the worst of what is said of a pipeline; `calm_s` is its time if nothing is slow."""
    slow: dict[int, float] = {}
    of_stages: dict[int, float] = {}
    of_all: dict[int, float] = {}
    for index, (slowdown, iteration_s, cause, stages) in enumerate(said):
        # Slow computations of known stages can be planned around; all else only makes the iteration
        # longer.
        if slowdown is not None and stages and cause in _COMPUTING:
            slow |= {stage: max(slowdown, slow.get(stage, 1.0)) for stage in stages}
            of_stages[index] = slowdown
        else:
            of_all[index] = iteration_s or calm_s * (slowdown or 1.0)
    return _Worst(
        tuple(sorted(slow.items())),
        max(of_stages, key=of_stages.__getitem__, default=None),
        max(of_all.values(), default=0.0),
        max(of_all, key=of_all.__getitem__, default=None),
    )


def _all_reported(look: Look, profiled: Numbers, calm: _Kind, aim_s: float) -> list[_Reported]:
    """Return what is known of the pipelines of which something is reported."""
    kinds: dict[tuple[Slow, bool], _Kind] = {((), False): calm}
    reported = []
    for said, members in look.active.items():
        worst = _worst(said, calm.own_s)
        slow = worst.slow
        if (slow, False) not in kinds:
            numbers = profiled.slowed(dict(slow))
            kinds[slow, False] = _Kind(numbers, slow, own_s(numbers, aim_s))
        kind = kinds[slow, False]
        if worst.all_s <= kind.own_s:
            reported.append(_Reported(kind, kind.own_s, worst.of_stages, members))
            continue
        # What makes the pipeline slower than its own plan is named first, as the others wait for
        # that.
        if (slow, True) not in kinds:
            kinds[slow, True] = replace(kind, is_slower=True)
        reported.append(_Reported(kinds[slow, True], worst.all_s, worst.of_all, members))
    return reported


def _reason(
    reported: Sequence[_Reported],
    time_s: float,
    calm_s: float,
    refusal: str | None,
    because: str,
    is_followed: bool,
) -> str:
    """Explain a decision to people, by nothing that changes while the decision does not.

    `is_followed` says whether any plan is for the time of the slowest pipeline.
    """
    # Of the slowest pipelines the one with the lowest number, so that the text stays the same while
    # the decision does.
    slow = [each for each in reported if each.worst is not None]
    if not slow:
        return f"nothing is reported slow: iterations take {si(time_s, 's', 4)}{because}"
    slowest_s = max(each.takes_s for each in slow)
    slowest = [each for each in slow if each.takes_s == slowest_s]
    number, report = min(min(each.counting().items()) for each in slowest)
    # What is slow may be a small part of the pipeline, which is slower by less.
    scope = report.scope
    part = "" if scope.kind == "pipeline" else f"{scope.kind} {scope.value}: "
    measure = part if report.slowdown is None else f"{part}{report.slowdown:.4g}x, "
    culprit = f"pipeline {number} ({measure}reported by {shown(report.source)})"
    if time_s <= calm_s:
        return f"{culprit} is slow, but iterations still take {si(time_s, 's', 4)}{because}"
    text = f"iterations take {si(time_s, 's', 4)} because of {culprit}"
    if refusal is None and not is_followed:
        return f"{text}, and no other pipeline waits for that"
    return (
        f"{text}, and plans are for that"
        if refusal is None
        else f"{text}, but nothing is slowed down: {refusal}"
    )
