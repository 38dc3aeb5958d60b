"""What is said of a running job: its events, its status, its totals, and the status of each of its
pipelines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from operator import ne
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.prefixes import counted, si
from perseus_planner.extensions.service.headline import headline, power_now_w, state_name
from perseus_planner.extensions.service.look import is_over
from perseus_planner.extensions.service.models import (
    Decision,
    Event,
    Expected,
    JobStatus,
    JobTotals,
    PipelineStatus,
    PowerStep,
    Report,
    shared,
)

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
    return replace(after, events=(*after.events, Event(now_s, text))[-EVENTS:])


def _changes(before: JobState | None, after: JobState) -> Iterator[str]:
    job = after.job
    if before is None or before.job.pipelines != job.pipelines:  # it was started again with others
        yield (
            f"registered with {counted(job.pipelines, 'pipeline')} of "
            f"{counted(after.curve.gpus, 'GPU')}"
        )
        return
    if job.deadline_s != before.job.deadline_s:
        yield (
            "deadline removed"
            if job.deadline_s is None
            else f"deadline set to {_time(job.deadline_s)}"
        )
    if job.power_w != before.job.power_w:
        yield (
            "power budget removed"
            if job.power_w is None
            else f"power budget {si(job.power_w, 'W')}"
        )
    if job.gpu_power_limit_w != before.job.gpu_power_limit_w:
        limit_w = job.gpu_power_limit_w
        yield (
            f"GPUs are limited to {si(limit_w, 'W')}"
            if limit_w
            else "no power limit is set on the GPUs any more"
        )
    since_s = after.silent_since_s
    if since_s != before.silent_since_s:
        yield (
            "heard of again"
            if since_s is None
            else "not heard of for its lease: it has no share of the power budget of all jobs"
        )
    if (after.over_budget_since_s is None) != (before.over_budget_since_s is None):
        limit = f"its power budget of {si(after.power_limit_w or 0.0, 'W')}"
        over = after.over_budget_since_s is not None
        yield (f"over {limit} for a minute" if over else "within its power budget again")
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
    """Say which pipelines are slow, or not any more, and to what iteration time the others move."""
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
    for time_s, pipelines in moved.items():
        whom = (
            f"{len(pipelines)} others" if changes and len(pipelines) > 1 else _pipelines(pipelines)
        )
        changes.append(f"{whom} moved to {_time(time_s)}")
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
        f"iterations of {_time(report.iteration_s)}"
        if report.slowdown is None
        else f"{report.slowdown:.4g}x"
    )
    part = "" if report.scope.kind == "pipeline" else f"{report.scope.kind} {report.scope.value}: "
    return part, f" {measure} ({report.source})"


def _pipelines(numbers: list[int]) -> str:
    if len(numbers) > _NAMED:
        return f"{len(numbers)} pipelines"
    return f"pipeline{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def _time(time_s: float | None) -> str:
    return "-" if time_s is None else si(time_s, "s")


_KEPT = 1024


_KEPT_EVENTS = 20  #: of a job that has ended; all of those that are listed have 2 MB then


def totals_of(state: JobState, ended_s: float | None = None) -> JobTotals:
    """Return the totals of a job; `ended_s` is None if it runs."""
    job = state.job
    tally = state.tally
    plans = () if tally is None else tally.plans
    events = () if ended_s is None else state.events[-_KEPT_EVENTS:]
    return JobTotals(job.name, job.pipelines, job.since_s, ended_s, tally, plans, events)


def status_of(state: JobState, now_s: float) -> JobStatus:
    """Return the status of a job."""
    computed = {
        "version": state.published.version,
        "reports": current_reports(state, now_s),
        "expected_saving_w": state.saving_w,
        "expected": expected(state),
        "telemetry": state.tally,
        "gpus": state.job.pipelines * state.curve.gpus,
    }
    # The last message first, so that what is computed here wins over it.
    latest = {} if state.tally is None else shared(JobStatus, state.tally.latest)
    status = JobStatus(**{**latest, **shared(JobStatus, state), **computed})
    saves_w = None
    # Against iterations as long as those of which the power is known.
    if status.unlike_plan is None and status.silent_since_s is None:
        saves_w = _baseline_w_now(state, status) - power_now_w(status)
    return replace(status, saves_w=saves_w, state=headline(state, status))


def _baseline_w_now(state: JobState, status: JobStatus) -> float:
    """Return the power of all GPUs with all clocks at maximum in iterations as long as those that
    ran of late, or as those by the plans if none is known, watts.
    """
    sent = status.telemetry
    if sent is None or sent.power_w is None:
        return status.expected.baseline_power_w
    return _baseline_j(state, sent.iteration_s) / sent.iteration_s


def current_reports(state: JobState, now_s: float) -> tuple[Report, ...]:
    """Return the reports of a job that count now or will count, in order of arrival."""
    return tuple(report for report in state.reports.values() if not is_over(report, now_s))


def _baseline_j(state: JobState, iteration_s: float) -> float:
    """Return the energy of all pipelines in an iteration of that time with all clocks at
    maximum, joules.
    """
    waiting_w = state.curve.waiting_w
    # Plans of pipelines with slow stages have slower baselines, so each waits for another time.
    return math.fsum(
        count
        * (costs.baseline_energy_j + waiting_w * max(0.0, iteration_s - costs.baseline_time_s))
        for costs, count in _plans(state)
    )


def expected(state: JobState) -> Expected:
    """Return the power that the newest plans predict while the slowest pipeline takes the
    decided time.
    """
    plans = _plans(state)
    waiting_w = state.curve.waiting_w
    iteration_s = max(state.decision.straggler_time_s, *(costs.time_s for costs, _ in plans))
    energy_j = math.fsum(
        count * (costs.energy_j + waiting_w * (iteration_s - costs.time_s))
        for costs, count in plans
    )
    return Expected(
        energy_j / iteration_s, _baseline_j(state, iteration_s) / iteration_s, state.curve.origin
    )


def pipeline_statuses(state: JobState) -> tuple[PipelineStatus, ...]:
    """Return the status of each pipeline, in order."""
    decision = state.decision
    plans = [costs for costs, _ in _plans(state)]
    of_pipeline = [plans[index] for index in state.published.of_pipeline]
    return tuple(
        PipelineStatus(
            number,
            costs.time_s,
            costs.energy_j,
            target.time_s,
            target.slow_stages,
            decision.stragglers.get(number),
            target.reason,
        )
        for number, (costs, target) in enumerate(zip(of_pipeline, decision.each, strict=True))
    )


class _Costs(NamedTuple):
    """An iteration of one pipeline with its plan, and with all clocks at maximum; seconds and
    joules.
    """

    time_s: float
    energy_j: float
    baseline_time_s: float
    baseline_energy_j: float


def _plans(state: JobState) -> list[tuple[_Costs, int]]:
    """Return the distinct plans of the newest version, each with the number of pipelines that
    have it.
    """
    published = state.published
    return [
        (_costs_of(text), published.of_pipeline.count(index))
        for index, text in enumerate(published.texts)
    ]


@lru_cache(_KEPT)
def _costs_of(text: str) -> _Costs:
    """Read the costs of a plan; much faster than `Plan.loads`, which reads all of it."""
    values = json.loads(text)
    return _Costs(*(float(values[name]) for name in _Costs._fields))
