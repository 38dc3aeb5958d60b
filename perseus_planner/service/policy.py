"""What the pipelines of a job are to do while something in it is slow; pure, time is an argument.

Which reports count

| a report                                          | counts                                                        |
|---------------------------------------------------|---------------------------------------------------------------|
| has not begun                                     | not yet; at its iteration, if it names one, else at its time  |
| has begun                                         | until it expires, and unless the next lines say otherwise     |
| its source has observed that scope later          | no more, once the later one has begun, also after that expires|
| expires before it begins                          | never                                                         |
| has slowdown 1                                      | no; it ends what its source said earlier of that scope        |
| others of the same pipeline say something else    | the worst one counts; slow stages each by their worst slowdown  |

What they make of a pipeline. `target` is the job's deadline, or the time with all clocks at maximum, but never less
than `min_time_s` nor more than `max_time_s` of the pipeline in question. T' is the time of the slowest one.

| known of a pipeline                               | its iteration takes     | its plan is for                       |
|---------------------------------------------------|-------------------------|---------------------------------------|
| nothing                                           | target                  | max(target, T'), at most `max_time_s` |
| stages that compute slower                        | target, so slowed       | the same, planned anew so slowed      |
| a slowdown of all of it                           | slowdown x target       | target                                |
| an iteration time above its target                | that                    | target                                |

A slow rank, GPU or node is slow in all stages that it holds. Where communication or data are slow, or the stage is not
known, the pipeline is slower as the third line has it: its computations are as fast as ever. If a pipeline has slow
stages and is slower than these explain, it is planned with them, for its target.

When plans change. A pipeline is wanted to take `min(max(its target, T'), max_time_s)`.

| before, it was planned for                        | then                                                          |
|---------------------------------------------------|---------------------------------------------------------------|
| longer than wanted                                | what is wanted, at once                                       |
| less than its own target                          | its target, at once                                           |
| less than wanted                                  | what is wanted, unless one of the following holds for all     |

1. It saves nothing.
2. Each is to take less than `least_rise` longer.
3. It does not pay: until the report of the slowest pipeline expires (or for `assumed_s`, if it does not) fewer
   iterations are left than going over and coming back cost. A change is taken to cost what `iterations_lost`
   iterations save.
4. Less than `holding_s` ago stragglers have changed how long plans take.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from perseus_planner.errors import shown
from perseus_planner.service.model import Decision, Job, Numbers, Report, Target
from perseus_planner.service.reports import active_reports, next_turn_s, parts_concerned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_COMPUTING = ("compute", "unknown")
_ROUNDING = 1e-9  #: a saving below this share of the energy is a rounding error


@dataclass(frozen=True)
class Settings:
    """How eager the policy is to slow pipelines down; it is always eager to speed them up.

    Attributes:
        least_rise: a plan that is longer by less than this share of its time is no change.
        holding_s: for so long after a change pipelines are not slowed down again, seconds.
        assumed_s: how long something is taken to stay slow if its report does not expire, seconds.
        iterations_lost: a change is taken to cost as much energy as it saves in so many iterations.
    """

    least_rise: float = 0.01
    holding_s: float = 30.0
    assumed_s: float = 3600.0
    iterations_lost: float = 1.0


@dataclass(frozen=True)
class _Pipeline:
    """What is known of a pipeline.

    Attributes:
        numbers: of it, with its slow stages.
        slow_stages: stage -> slowdown.
        own_s: what its plan takes if it waits for nobody.
        takes_s: what its iteration takes with that plan.
        worst: the report that counts; None: none does.
    """

    numbers: Numbers
    slow_stages: Mapping[int, float]
    own_s: float
    takes_s: float
    worst: Report | None

    def wanted_s(self, straggler_time_s: float) -> float:
        """What its plan is to take beside a pipeline that takes so long."""
        if self.takes_s > self.own_s:  # nobody knows where its time goes, nor what slower clocks would do to it
            return self.own_s
        return min(straggler_time_s, self.numbers.max_time_s)

    def kept_s(self, planned_s: float, straggler_time_s: float) -> float:
        """What its plan takes if it is not slowed down to save energy, after one of `planned_s`."""
        return min(max(planned_s, self.own_s), self.wanted_s(straggler_time_s))


def decide(
    job: Job,
    reports: Iterable[Report],
    numbers: Numbers,
    before: Decision | None,
    now_s: float,
    settings: Settings = Settings(),
    *,
    iteration: int | None = None,
) -> Decision:
    """What the pipelines of a job are to do now.

    Decided again on top of itself, it stays as it is until `look_again_s`, or until a report, an iteration or the
    deadline of the job is another one.

    Args:
        job: its deadline is the iteration time that is wanted; one that cannot be met becomes the least that can. Its
            power is shared alike by its pipelines; `power.shares` has chosen a deadline for which it suffices.
        reports: all that are known, in any order; `reports.lasting_reports` of them say the same.
        numbers: of a pipeline as profiled. Its `slowed` is asked again and again, so it should remember its answers.
        before: what was decided last; None: nothing yet.
        now_s: seconds since the epoch.
        settings: how eager it is to slow down.
        iteration: the first one that can still be changed; None: not known, so nothing that waits for one has begun.

    Raises:
        UsageError: a report means what the job does not have; `reports.check_scope` finds that when it comes.
    """
    reports = tuple(reports)
    pipelines = _pipelines(job, active_reports(reports, now_s, iteration), numbers)
    time_s = max(each.takes_s for each in pipelines)
    planned_s = [target.time_s for target in before.targets] if before else [each.own_s for each in pipelines]
    calm_s = _own_s(numbers, _target_s(job, numbers))
    power_w = None if job.power_w is None else job.power_w / job.pipelines
    slowing = _Slowing(pipelines, time_s, tuple(planned_s), power_w, settings)
    held = before is not None and before.since_s > job.since_s and now_s < before.since_s + settings.holding_s
    refusal = slowing.refusal(now_s, held)
    targets = slowing.targets(slowing.kept_s if refusal else slowing.wanted_s)
    stragglers = {number: each.worst.key for number, each in enumerate(pipelines) if each.worst}
    since_s = _since_s(job, before, targets, stragglers, now_s)
    turns_s = [next_turn_s(reports, now_s, iteration)]
    if refusal == _HELD:
        turns_s += [since_s + settings.holding_s, slowing.pays_until_s()]
    return Decision(targets, time_s, stragglers, since_s, min(turns_s), _reason(pipelines, time_s, calm_s, refusal))


def saving_w(job: Job, decision: Decision, numbers: Numbers) -> float:
    """Watts on average that the pipelines of `job` save by what was decided, against each planned for its own target.

    While the slowest of them takes as long as decided, and by `Numbers.bound_j`: plans come close to it, those with a
    switch budget less so.
    """
    saved_j, target_s = 0.0, _target_s(job, numbers)
    for (time_s, slow), count in Counter(
        (each.time_s, tuple(each.slow_stages.items())) for each in decision.targets
    ).items():
        own = numbers.slowed(dict(slow)) if slow else numbers
        saved_j += count * _saved_j(own, _own_s(own, target_s), time_s)
    return saved_j / decision.straggler_time_s


_SAVES_NOTHING = "that saves nothing"
_HARDLY_LONGER = "their plans would hardly be longer"
_DOES_NOT_PAY = "the report expires too soon for that to pay"
_HELD = "plans were changed a moment ago"


@dataclass(frozen=True)
class _Slowing:
    """Whether pipelines are to be slowed down, beside one that takes `time_s`, after plans of `planned_s`.

    Each of them may draw `power_w`.
    """

    pipelines: Sequence[_Pipeline]
    time_s: float
    planned_s: tuple[float, ...]
    power_w: float | None
    settings: Settings

    @cached_property
    def wanted_s(self) -> tuple[float, ...]:
        return tuple(each.wanted_s(self.time_s) for each in self.pipelines)

    @cached_property
    def kept_s(self) -> tuple[float, ...]:
        pairs = zip(self.pipelines, self.planned_s, strict=True)
        return tuple(each.kept_s(planned_s, self.time_s) for each, planned_s in pairs)

    def targets(self, times_s: Sequence[float]) -> tuple[Target, ...]:
        pairs = zip(self.pipelines, times_s, strict=True)
        return tuple(Target(time_s, each.slow_stages, self.power_w) for each, time_s in pairs)

    def refusal(self, now_s: float, held: bool) -> str | None:
        """Why no pipeline is slowed down, though some could be; None: all are as slow as wanted."""
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
        """What all spend in an iteration if they are not slowed down, and what they save if they are."""
        spent_j = saved_j = 0.0
        for numbers, kept_s, wanted_s, count in self._alike():
            spent_j += count * numbers.bound_j(kept_s)
            saved_j += count * _saved_j(numbers, kept_s, wanted_s)
        return spent_j, saved_j

    def _alike(self) -> Iterator[tuple[Numbers, float, float, int]]:
        """Pipelines that do the same, of which there are many: numbers, kept and wanted time, how many there are."""
        of_id = {id(each.numbers): each.numbers for each in self.pipelines}
        kinds = Counter(zip((id(each.numbers) for each in self.pipelines), self.kept_s, self.wanted_s, strict=True))
        return ((of_id[which], kept_s, wanted_s, count) for (which, kept_s, wanted_s), count in kinds.items())

    def pays_until_s(self) -> float:
        """Until when slowing down pays: from then on the report expires before both changes are paid."""
        both_changes_s = 2.0 * self.settings.iterations_lost * self.time_s
        slowest = (each.worst for each in self.pipelines if each.takes_s == self.time_s)
        expires_s = max((worst.expires_s for worst in slowest if worst), default=math.inf)
        if expires_s == math.inf and self.settings.assumed_s <= both_changes_s:
            return -math.inf
        return expires_s - both_changes_s


def _target_s(job: Job, numbers: Numbers) -> float:
    return numbers.baseline_time_s if job.deadline_s is None else job.deadline_s


def _own_s(numbers: Numbers, target_s: float) -> float:
    return min(max(target_s, numbers.min_time_s), numbers.max_time_s)


def _saved_j(numbers: Numbers, from_s: float, to_s: float) -> float:
    """What a plan of `to_s` saves in an iteration against one of `from_s`, if both then wait for a slower pipeline."""
    if from_s == to_s:
        return 0.0
    most_s = numbers.max_time_s
    waiting_w = (numbers.bound_j(2.0 * most_s) - numbers.bound_j(most_s)) / most_s  # beyond it a plan only waits
    return numbers.bound_j(from_s) - numbers.bound_j(to_s) + waiting_w * (to_s - from_s)


def _pipelines(job: Job, active: Sequence[Report], numbers: Numbers) -> list[_Pipeline]:
    said: dict[int, list[tuple[Report, frozenset[int]]]] = {}
    for report in active:
        for pipeline, stages in parts_concerned(job, report.scope).items():
            said.setdefault(pipeline, []).append((report, stages))
    target_s = _target_s(job, numbers)
    calm_s = _own_s(numbers, target_s)
    calm = _Pipeline(numbers, {}, calm_s, calm_s, None)
    return [_told(said[number], calm, target_s) if number in said else calm for number in range(job.pipelines)]


def _told(said: Sequence[tuple[Report, frozenset[int]]], calm: _Pipeline, target_s: float) -> _Pipeline:
    """A pipeline of which reports were made, each with the stages that it means."""
    slow: dict[int, float] = {}
    of_stages: list[tuple[float, str, Report]] = []  # in order of how bad they are; the key settles a tie
    of_all: list[tuple[float, str, Report]] = []
    for report, stages in said:
        if report.slowdown is not None and stages and report.cause in _COMPUTING:
            slow |= {stage: max(report.slowdown, slow.get(stage, 1.0)) for stage in stages}
            of_stages.append((report.slowdown, report.key, report))
        else:
            of_all.append((report.iteration_s or calm.own_s * (report.slowdown or 1.0), report.key, report))
    slow = dict(sorted(slow.items()))
    numbers = calm.numbers.slowed(slow) if slow else calm.numbers
    own_s = _own_s(numbers, target_s)
    takes_s = max([own_s, *(time_s for time_s, *_ in of_all)])
    ranked = of_all if takes_s > own_s else of_stages
    worst = max(ranked, key=lambda each: each[:2])[2] if ranked else None
    return _Pipeline(numbers, slow, own_s, takes_s, worst)


def _since_s(
    job: Job, before: Decision | None, targets: Sequence[Target], stragglers: Mapping[int, str], now_s: float
) -> float:
    """Since when plans take as long as stragglers made them; another deadline of the job is not their doing."""
    if before is None:
        return job.since_s
    as_before = [each.time_s for each in targets] == [each.time_s for each in before.targets]
    return before.since_s if as_before or not (stragglers or before.stragglers) else now_s


def _reason(pipelines: Sequence[_Pipeline], time_s: float, calm_s: float, refusal: str | None) -> str:
    """For people; it says nothing that changes while the decision does not."""
    slow = [(each.takes_s, -number, each.worst) for number, each in enumerate(pipelines) if each.worst]
    if not slow:
        return f"nothing is known to be slow: iterations take {time_s:.6g} s"
    _, number, report = max(slow, key=lambda each: each[:2])
    culprit = f"pipeline {-number} (report {shown(report.key)} of {shown(report.source)})"
    if time_s <= calm_s:
        return f"{culprit} is slow, but iterations still take {time_s:.6g} s"
    told = f"iterations take {time_s:.6g} s because of {culprit}"
    return f"{told}, and plans are for that" if refusal is None else f"{told}, but nothing is slowed down: {refusal}"
