"""What is said of a job: its status, made once for each change and not for each request, and an
event in words for each change that matters.

The newest plans also predict energy. An iteration that lasts longer than its plan waits for the
rest of the time: with `e` and `t` of the plan and `P` the power of the pipeline's GPUs while they
wait, an iteration of T seconds takes e + P * max(0, T - t) joules. The same holds for the baseline,
all clocks at maximum, so that a saving beside a straggler is not overstated.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.prefixes import si
from perseus_planner.service.answers import Event, Expected, JobStatus, JobSummary, PipelineStatus
from perseus_planner.service.reports import is_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.service.model import Report
    from perseus_planner.service.state import JobState
    from perseus_planner.service.telemetry import Tally


class _Made(NamedTuple):
    """A status, and what it was made of; it holds until `until_s`."""

    state: JobState
    tally: Tally | None
    until_s: float
    status: JobStatus


class Statuses:
    """The last status of each job. It may be used from any thread."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def of(self, state: JobState, tally: Tally | None, now_s: float) -> JobStatus:
        """Return the status of a job: the same object until something in it changes."""
        name = state.job.name
        entry = self._made.get(name)
        is_same = entry is not None and entry.state is state and entry.tally is tally
        if entry is None or not is_same or entry.until_s <= now_s:
            until_s, status = next_report_s(state, now_s), status_of(state, tally, now_s)
            entry = self._made[name] = _Made(state, tally, until_s, status)
        return entry.status

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        self._made.pop(name, None)


EVENTS = 100
"""How many events of a job are kept, the latest."""
_NAMED = 3  #: pipelines that an event names; more are counted


def with_events(before: JobState | None, after: JobState, now_s: float) -> JobState:
    """Return the state `after` with an event for what differs from `before`, if that is worth
    telling.
    """
    text = "; ".join(_changes(before, after))
    if not text:
        return after
    return replace(after, events=(*after.events, Event(now_s, text))[-EVENTS:])


def _changes(before: JobState | None, after: JobState) -> list[str]:
    job = after.job
    if before is None or before.job.pipelines != job.pipelines:  # it was started again with others
        return [
            f"registered with {_counted(job.pipelines, 'pipeline')} of "
            f"{_counted(after.curve.gpus, 'GPU')}"
        ]
    changes = []
    if job.deadline_s != before.job.deadline_s:
        changes.append(
            "deadline removed"
            if job.deadline_s is None
            else f"deadline set to {_time(job.deadline_s)}"
        )
    if job.power_w != before.job.power_w:
        changes.append(
            "power budget removed"
            if job.power_w is None
            else f"power budget {si(job.power_w, 'W')}"
        )
    if job.gpu_power_limit_w != before.job.gpu_power_limit_w:
        limit_w = job.gpu_power_limit_w
        changes.append(
            f"GPUs are limited to {si(limit_w, 'W')}"
            if limit_w
            else "no power limit is set on the GPUs any more"
        )
    if (since_s := after.silent_since_s) != before.silent_since_s:
        changes.append(
            "heard of again"
            if since_s is None
            else "not heard of for its lease: it has no share of the power budget of all jobs"
        )
    if (after.over_budget_since_s is None) != (before.over_budget_since_s is None):
        limit = f"its power budget of {si(after.power_limit_w or 0.0, 'W')}"
        over = after.over_budget_since_s is not None
        changes.append(f"over {limit} for a minute" if over else "within its power budget again")
    if after.decision is not before.decision:
        changes += _stragglers(before, after)
        if after.published.version > before.published.version and after.planned is before.planned:
            changes.append(after.decision.reason)  # planning failed
    if after.taken is not None and (
        before.taken is None or after.taken.version > before.taken.version
    ):
        changes.append(
            f"version {after.taken.version} of the plans runs from iteration "
            f"{after.taken.iteration:,}"
        )
    return changes


def _stragglers(before: JobState, after: JobState) -> list[str]:
    """Say which pipelines are slow, or not any more, and to what iteration time the others move."""
    was, now = before.decision.stragglers, after.decision.stragglers
    slow: dict[str, list[int]] = {}
    for pipeline, key in now.items():
        if was.get(pipeline) != key:
            slow.setdefault(key, []).append(pipeline)
    changes = [_slow(after.reports, key, pipelines) for key, pipelines in slow.items()]
    recovered = [pipeline for pipeline in was if pipeline not in now]
    if recovered:
        changes.append(f"{_pipelines(recovered)} not slow any more")
    moved: dict[float, list[int]] = {}
    pairs = zip(before.decision.targets, after.decision.targets, strict=True)
    for pipeline, (old, new) in enumerate(pairs):
        if new is not old and new.time_s != old.time_s and pipeline not in now:
            moved.setdefault(new.time_s, []).append(pipeline)
    for time_s, pipelines in moved.items():
        whom = (
            f"{len(pipelines)} others" if changes and len(pipelines) > 1 else _pipelines(pipelines)
        )
        changes.append(f"{whom} moved to {_time(time_s)}")
    return [", ".join(changes)] if changes else []


def _slow(reports: Mapping[str, Report], key: str, pipelines: list[int]) -> str:
    report = reports.get(key)
    if report is None:
        return f"{_pipelines(pipelines)} slow"
    measure = (
        f"iterations of {_time(report.iteration_s)}"
        if report.slowdown is None
        else f"{report.slowdown:.4g}x"
    )
    part = "" if report.scope.kind == "pipeline" else f"{report.scope.kind} {report.scope.value}: "
    return f"{part}{_pipelines(pipelines)} slow {measure} ({report.source})"


def _pipelines(numbers: list[int]) -> str:
    if len(numbers) > _NAMED:
        return f"{len(numbers)} pipelines"
    return f"pipeline{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _time(time_s: float | None) -> str:
    return "-" if time_s is None else si(time_s, "s")


_KEPT = 1024


def status_of(state: JobState, telemetry: Tally | None, now_s: float) -> JobStatus:
    """Return the status of a job."""
    return JobStatus(
        job=JobSummary.of(state.job),
        decision=state.decision,
        version=state.published.version,
        promised=state.promised,
        taken=state.taken,
        reports=current_reports(state, now_s),
        expected_saving_w=state.saving_w,
        expected=expected(state),
        telemetry=telemetry,
        autopilot=None if telemetry is None else telemetry.latest.autopilot,
        unlike_plan=None if telemetry is None else telemetry.latest.unlike_plan,
        verdict=None if telemetry is None else telemetry.latest.verdict,
        gpus=state.job.pipelines * state.curve.gpus,
        silent_since_s=state.silent_since_s,
        over_budget_since_s=state.over_budget_since_s,
    )


def current_reports(state: JobState, now_s: float) -> tuple[Report, ...]:
    """Return the reports of a job that count now or will count, in order of arrival."""
    return tuple(report for report in state.reports.values() if not is_over(report, now_s))


def next_report_s(state: JobState, now_s: float) -> float:
    """Return when one of the job's reports next begins or expires; infinite for never."""
    moments_s = [
        moment_s
        for report in state.reports.values()
        for moment_s in (report.begins_s, report.expires_s)
    ]
    return min((moment_s for moment_s in moments_s if moment_s > now_s), default=math.inf)


def _baseline_j(state: JobState, iteration_s: float) -> float:
    """Return the energy of all pipelines in an iteration of that time with all clocks at
    maximum, joules.
    """
    waiting_w = state.curve.waiting_w
    return math.fsum(
        count
        * (costs.baseline_energy_j + waiting_w * max(0.0, iteration_s - costs.baseline_time_s))
        for costs, count in _plans(state)
    )


def expected(state: JobState) -> Expected:
    """Return the power that the newest plans predict while the slowest pipeline takes the
    decided time.
    """
    plans, waiting_w = _plans(state), state.curve.waiting_w
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
    decision, plans = state.decision, [costs for costs, _ in _plans(state)]
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
        for number, (costs, target) in enumerate(zip(of_pipeline, decision.targets, strict=True))
    )


@dataclass(frozen=True)
class _Costs:
    """An iteration of one pipeline with its plan, and with all clocks at maximum; seconds and
    joules.
    """

    time_s: float
    energy_j: float
    baseline_time_s: float
    baseline_energy_j: float


_NAMES = tuple(each.name for each in fields(_Costs))


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
    return _Costs(*(float(values[name]) for name in _NAMES))
