"""What is told of a job: an event for each change that is worth it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import compress
from operator import attrgetter, ne
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import counted, si
from perseus_planner.extensions.service.headline import state_name
from perseus_planner.extensions.service.models import Decision, Event, PowerStep
from perseus_planner.extensions.service.policy import keeps, past_least_energy_s

if TYPE_CHECKING:
    from perseus_planner.extensions.service.jobs import JobState

EVENTS = 100
"""How many events of a job are kept, the latest."""
_NAMED = 3  #: pipelines that an event names; more are counted


def with_events(before: JobState | None, after: JobState, now_s: float) -> JobState:
    """Return the state `after` with an event for what differs from `before`, if that is worth
    telling; with its power budget, if that is another one; and since when it is in its state.
    """
    name = state_name(after)
    if name != after.noted:
        after = replace(after, noted=name, noted_since_s=now_s)
    before_w = None if before is None else before.job.power_w
    if after.job.power_w != before_w:
        budgets = (*after.budgets, PowerStep(now_s, after.job.power_w))[-EVENTS:]
        after = replace(after, budgets=budgets)
    text = "; ".join(_changes(before, after))
    if not text:
        return after
    # It is written some seconds after it was registered, when its first plans are there.
    at_s = after.job.since_s if before is None else now_s
    return replace(after, events=(*after.events, Event(at_s, text))[-EVENTS:])


def _deadline(state: JobState) -> str:
    deadline_s = state.job.deadline_s
    return "deadline removed" if deadline_s is None else f"deadline set to {si(deadline_s, 's')}"


def _budget(state: JobState) -> str:
    power_w = state.job.power_w
    return "power budget removed" if power_w is None else f"power budget {si(power_w, 'W')}"


def _gpu_limit(state: JobState) -> str:
    limit_w = state.job.gpu_power_limit_w
    if limit_w is None:
        return "no power limit is set on the GPUs any more"
    return f"GPUs are limited to {si(limit_w, 'W')}"


def _silence(state: JobState) -> str:
    if state.silent_since_s is None:
        return "heard of again"
    return "not heard of for its lease: it has no share of the power budget of all jobs"


def _over_budget(state: JobState) -> str:
    if state.over_budget_since_s is None:
        return "within its power budget again"
    return f"over its power budget of {si(state.power_limit_w or 0.0, 'W')} for a minute"


_SENTENCES: tuple[tuple[Callable[[JobState], Any], Callable[[JobState], str]], ...] = (
    (attrgetter("job.deadline_s"), _deadline),
    (attrgetter("job.power_w"), _budget),
    (attrgetter("job.gpu_power_limit_w"), _gpu_limit),
    (attrgetter("silent_since_s"), _silence),
    (attrgetter("over_budget_since_s"), _over_budget),
)
"""The fields of which a change is told, in this order, and what is said of it then."""


def _changes(before: JobState | None, after: JobState) -> Iterator[str]:
    job = after.job
    if before is None or before.job.pipelines != job.pipelines:  # it was started again with others
        yield (
            f"registered with {counted(job.pipelines, 'pipeline')} of "
            f"{counted(after.curve.gpus, 'GPU')}"
        )
        return
    for field, sentence in _SENTENCES:
        if field(before) != field(after):
            yield sentence(after)
    # Stragglers are told by the decision, not by reports: most reports change nothing.
    if after.decision is not before.decision:
        yield from _stragglers(before, after)
        if after.published.version > before.published.version and after.planned is before.planned:
            yield (after.decision.reason)  # planning failed
    if after.taken is not None and (
        before.taken is None or after.taken.version > before.taken.version
    ):
        yield (
            f"version {after.taken.version} of the plans runs from iteration "
            f"{after.taken.iteration:,}"
        )


def _stragglers(before: JobState, after: JobState) -> list[str]:
    """Say which pipelines are slow, or not any more, and what iteration time the others are to be
    planned for, and why.
    """
    was = before.decision.stragglers
    now = after.decision.stragglers
    # Pipelines that are slow for the same reason are told together. Another report that says the
    # same is no news.
    slow: dict[tuple[str, str], list[int]] = {}
    for pipeline in [number for number, key in now.items() if was.get(number) != key]:
        what = _slow(after, now[pipeline])
        old = was.get(pipeline)
        if old is None or _slow(before, old) != what:
            slow.setdefault(what, []).append(pipeline)
    changes = [f"{part}{_pipelines(those)} slow{how}" for (part, how), those in slow.items()]
    recovered = sorted(was.keys() - now.keys())
    if recovered:
        changes.append(f"{_pipelines(recovered)} not slow any more")
    # Stragglers themselves are left out: their new time is what was just told.
    moved: dict[float, list[int]] = {}
    if before.decision.asked != after.decision.asked:
        old_s, new_s = ([*_times_s(state.decision)] for state in (before, after))
        for pipeline in compress(range(len(new_s)), map(ne, old_s, new_s)):
            if pipeline not in now:
                moved.setdefault(new_s[pipeline], []).append(pipeline)
    reasons = {target.time_s: target.reason for target in after.decision.targets}
    for time_s, pipelines in moved.items():
        whom = (
            f"{len(pipelines)} others" if changes and len(pipelines) > 1 else _pipelines(pipelines)
        )
        reason = reasons[time_s]
        past_s = past_least_energy_s(after.job, reason, after.curve)
        aim = "aims" if len(pipelines) == 1 else "aim"
        # Not that they run so: their plans may have to be made first, and are then taken.
        changes.append(f"{whom} {aim} for {si(time_s, 's')}{keeps(reason, past_s)}")
    return [", ".join(changes)] if changes else []


def _times_s(decision: Decision) -> Iterable[float]:
    """Return the time that each pipeline aims for, in order."""
    times_s = [target.time_s for target in decision.targets]
    return map(times_s.__getitem__, decision.of_pipeline)


def _slow(state: JobState, key: str) -> tuple[str, str]:
    """Return what is said before and after pipelines that a report calls slow."""
    report = state.reports.get(key)
    if report is None:
        return "", ""
    measure = (
        f"iterations of {si(report.iteration_s or 0.0, 's')}"
        if report.slowdown is None
        else f"{report.slowdown:.4g}x"
    )
    part = "" if report.scope.kind == "pipeline" else f"{report.scope.kind} {report.scope.value}: "
    return part, f" {measure} ({report.source})"


def _pipelines(numbers: list[int]) -> str:
    if len(numbers) > _NAMED:
        return f"{len(numbers)} pipelines"
    return f"pipeline{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"
