"""From one state of a job to the next: registered, reconciled with reports and budgets, planned, or
given up.

Everything here takes a `JobState` and returns another one or an answer; nothing is written.

The newest plans also predict energy. An iteration that lasts longer than its plan waits for the
rest of the time: with `e` and `t` of the plan and `P` the power of the pipeline's GPUs while they
wait, an iteration of T seconds takes e + P
* max(0, T - t) joules. The same holds for the baseline, all clocks at maximum, so that a saving
  beside a straggler is
not overstated.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.base.errors import shown
from perseus_planner.base.prefixes import si
from perseus_planner.runs.straggler import of_another_machine
from perseus_planner.service.answers import (
    Answer,
    Effect,
    Expected,
    JobStatus,
    JobSummary,
    PipelineStatus,
    Registered,
)
from perseus_planner.service.checks import check_deadline, check_job, check_places
from perseus_planner.service.model import Conflict, PlanSet, RegisteredJob
from perseus_planner.service.planning.cache import Planning, deduplicated, requests_of
from perseus_planner.service.planning.curves import NotSolved
from perseus_planner.service.policy import decide, saving_w
from perseus_planner.service.reports import lasting_reports
from perseus_planner.service.state import JobState

if TYPE_CHECKING:
    from perseus_planner.service.model import Decision, Report
    from perseus_planner.service.telemetry import Tally

_FORGOTTEN_AFTER_S = 3600.0
"""For so long a report that is over still keeps earlier observations that arrive late from
counting.
"""
_KEPT = 1024
_LIMIT_CHANGE = 0.01


def checked(job: RegisteredJob, frontier: bytes, now_s: float) -> RegisteredJob:
    """Return the job with the digest of its frontier file, registered now.

    Raises:
        UsageError: If a value of the job cannot be used.
    """
    check_job(job)
    return replace(job, frontier=hashlib.sha256(frontier).hexdigest(), since_s=now_s)


def first_state(job: RegisteredJob, frontier: bytes, planning: Planning) -> JobState:
    """Return a new job with the first version of its plans; takes seconds if they have to be
    computed.

    Raises:
        FrontierError: If `frontier` is not a frontier file.
        UsageError: If the job does not fit it.
        InfeasibleError: If no plan meets the job's deadline or switch budget.
    """
    curve = planning.curve(job.frontier, frontier)
    check_places(job, curve)
    check_deadline(job.deadline_s, curve)
    without_budget = replace(job, power_w=None)  # power is shared once the job is known
    decision = decide(without_budget, (), planning.numbers(job, curve), None, job.since_s)
    asked = requests_of(job, curve, decision)
    texts, of_pipeline = deduplicated(planning.first_plan(request, frontier) for request in asked)
    return JobState(
        registered=job,
        job=job,
        curve=curve,
        decision=decision,
        saving_w=0.0,  # the pipelines do what they would do anyway
        published=PlanSet(1, texts, of_pipeline, job.since_s),
        planned=decision,
        promised=1,
    )


def is_same(state: JobState, job: RegisteredJob) -> bool:
    """Return whether a registration is the one of the job in `state`."""
    return replace(job, since_s=state.registered.since_s) == state.registered


def registered_again(state: JobState, job: RegisteredJob) -> Registered:
    """Return the answer to a repeated registration of the job in `state`.

    Raises:
        Conflict: If `job` is another job of that name.
    """
    if not is_same(state, job):
        raise Conflict(
            f"another job {shown(job.name)} runs, with another frontier or other settings; end "
            "that one, or choose another name"
        )
    return Registered(JobSummary.of(state.job), state.published.version, is_new=False)


def taken_over(state: JobState, first: JobState) -> JobState:
    """Return the job in `state` with the frontier, settings and plans of `first`, to be
    reconciled with its reports.
    """
    before, now = state.job, first.job
    if before.deadline_s != state.registered.deadline_s:  # set since then
        now = replace(now, deadline_s=before.deadline_s)
    version = state.promised + 1
    return replace(
        first,
        registered=replace(first.registered, since_s=before.since_s),
        job=replace(now, power_w=before.power_w, since_s=before.since_s),
        published=replace(first.published, version=version),
        promised=version,
        reports=state.reports,
        past=state.past,
        taken=state.taken,
    )


def reconciled(state: JobState, planning: Planning, now_s: float) -> JobState:
    """Return the job after the policy has decided again.

    If all its plans are known, they are published. Otherwise their version is promised, and the
    caller has them made with `prepare`.
    """
    state = _without_forgotten(state, now_s)
    try:
        decision = _decided(state, planning, now_s)
    except NotSolved:
        return replace(state, promised=state.published.version + 1)
    saved_w = saving_w(_within_budgets(state), decision, planning.numbers(state.job, state.curve))
    state = replace(state, decision=decision, saving_w=saved_w)
    if state.is_planned and decision.targets == state.planned.targets:
        return state
    asked = requests_of(state.job, state.curve, decision)
    if state.is_planned and asked == requests_of(state.job, state.curve, state.planned):
        return state
    version = state.published.version + 1
    texts = [planning.text(request) for request in asked]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return replace(state, promised=version)
    published = PlanSet(version, *deduplicated(known), now_s)
    return replace(state, published=published, planned=decision, promised=version)


def prepare(state: JobState, planning: Planning, now_s: float) -> bool:
    """Make one of the things that `reconciled` needs to publish the state's plans; takes up to
    minutes.

    Returns:
        Whether more is needed.
    """
    try:
        decision = _decided(state, planning, now_s)
    except NotSolved as missing:
        planning.solve(state.job, missing.slow)
        return True
    asked = dict.fromkeys(requests_of(state.job, state.curve, decision))
    missing_plans = [request for request in asked if planning.text(request) is None]
    for request in missing_plans[:1]:
        planning.plan(request)
    return len(missing_plans) > 1


def given_up(state: JobState, reason: str, now_s: float) -> JobState:
    """Return the job after planning failed: its unchanged plans, published as the version that was
    promised.

    The next time it is reconciled, the plans are requested again.
    """
    if state.is_planned:
        return state
    published = replace(state.published, version=state.promised, made_s=now_s)
    decision = replace(
        state.decision, reason=f"the plans stay unchanged because planning failed: {reason}"
    )
    return replace(state, published=published, decision=decision)


def answer_to(
    before: JobState, after: JobState, report: Report | None = None, reason: str = ""
) -> Answer:
    """Return the answer to a change; `reason` replaces that of the decision."""
    unsolved = not after.is_planned and after.decision is before.decision
    decided = (
        "slow stages are solved anew before it is decided" if unsolved else after.decision.reason
    )
    return Answer(
        job=after.job.name,
        report=report,
        version=after.promised,
        changed=after.promised > before.promised
        or after.decision.targets != before.decision.targets,
        takes_effect=_effect(after),
        expected_saving_w=None if unsolved else after.saving_w,
        reason=reason or decided,
    )


def until_it_begins(state: JobState, report: Report, now_s: float) -> str:
    """Say when a report begins and what holds until then; empty if it has begun."""
    if report.begins_iteration is None:
        left_s = report.begins_s - now_s
        waits = f"it begins in {si(left_s, 's', 3)}" if left_s > 0.0 else ""
    elif (iteration := _iteration(state, now_s)) is None:
        waits = (
            f"it begins with iteration {report.begins_iteration}, and the job has not reported "
            "its iteration yet"
        )
    else:
        left_s = (report.begins_iteration - iteration) * state.decision.straggler_time_s
        waits = (
            f"it begins with iteration {report.begins_iteration}, in about {si(left_s, 's', 3)}"
            if left_s > 0.0
            else ""
        )
    return waits and f"{waits}; until then {state.decision.reason}"


def last_moment_s(state: JobState) -> float:
    """Return the last moment at which the state has changed or heard of something, as far as it
    remembers.
    """
    taken_s = state.job.since_s if state.taken is None else state.taken.at_s
    observed_s = (report.observed_s for report in state.reports.values())
    return max(
        state.job.since_s, state.decision.since_s, state.published.made_s, taken_s, *observed_s
    )


def is_other_limit(planned_w: float | None, told_w: float | None) -> bool:
    """Return whether a power limit of the GPUs differs so much from the one planned for that it is
    planned again.

    A site may adjust its limit all the time; a difference within the error of a power sensor
    changes no clock.
    """
    if planned_w is None or told_w is None:
        return planned_w != told_w
    return abs(told_w - planned_w) > _LIMIT_CHANGE * planned_w


def next_look_s(state: JobState, now_s: float) -> float:
    """Return when time alone may change the decision; infinite for never."""
    budget_s = state.job.power_schedule[0].start_s if state.job.power_schedule else math.inf
    return min(state.decision.look_again_s, _next_beginning_s(state, now_s), budget_s)


def cleared(report: Report, now_s: float) -> Report:
    """Return the report, expired now. If it had begun, it still counts as begun and so ends its
    source's older ones.
    """
    begins_s = (
        report.begins_s
        if report.begins_s > now_s
        else min(report.begins_s, math.nextafter(now_s, 0.0))
    )
    return replace(report, begins_s=begins_s, expires_s=now_s)


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
        unlike_plan=None
        if telemetry is None
        else of_another_machine(telemetry.iteration_s, state.decision.straggler_time_s),
        gpus=state.job.pipelines * state.curve.gpus,
    )


def current_reports(state: JobState, now_s: float) -> tuple[Report, ...]:
    """Return the reports of a job that count now or will count, in order of arrival."""
    return tuple(report for report in state.reports.values() if not _is_over(report, now_s))


def next_report_s(state: JobState, now_s: float) -> float:
    """Return when one of the job's reports next begins or expires; infinite for never."""
    moments_s = [
        moment_s
        for report in state.reports.values()
        for moment_s in (report.begins_s, report.expires_s)
    ]
    return min((moment_s for moment_s in moments_s if moment_s > now_s), default=math.inf)


def baseline_j(state: JobState, iteration_s: float) -> float:
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
        energy_j / iteration_s, baseline_j(state, iteration_s) / iteration_s, state.curve.origin
    )


def pipelines(state: JobState) -> tuple[PipelineStatus, ...]:
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


def _is_over(report: Report, now_s: float) -> bool:
    """Whether a report has expired, or says that its scope has recovered."""
    has_begun = report.begins_iteration is None and report.begins_s <= now_s
    return report.expires_s <= now_s or (report.slowdown == 1.0 and has_begun)


def _over_s(report: Report) -> float:
    return report.begins_s if report.slowdown == 1.0 else report.expires_s


def _decided(state: JobState, planning: Planning, now_s: float) -> Decision:
    """Decide what the job's pipelines are to do.

    Raises:
        NotSolved: If slow stages have to be solved first.
    """
    numbers = planning.numbers(state.job, state.curve)
    reports, iteration = state.reports.values(), _iteration(state, now_s)
    return decide(
        _within_budgets(state), reports, numbers, state.decision, now_s, iteration=iteration
    )


def _without_forgotten(state: JobState, now_s: float) -> JobState:
    lasting = lasting_reports(state.reports.values(), now_s, _iteration(state, now_s))
    oldest_s = (
        now_s - _FORGOTTEN_AFTER_S
    )  # by the service's clock: that of a source may be hours behind
    return state.keeping(
        report for report in lasting if not _is_over(report, now_s) or _over_s(report) >= oldest_s
    )


def _within_budgets(state: JobState) -> RegisteredJob:
    """Return the job with the iteration time and the power that budgets leave it, if there are
    any.
    """
    share = state.share
    return (
        state.job
        if share is None
        else replace(state.job, deadline_s=share.time_s, power_w=share.power_w)
    )


def _iteration(state: JobState, now_s: float) -> int | None:
    """Estimate the first iteration that can still be changed; None if the job has not reported one.

    The job is assumed to continue at the pace that was decided.
    """
    if state.taken is None:
        return None
    return (
        state.taken.iteration
        + int(max(now_s - state.taken.at_s, 0.0) / state.decision.straggler_time_s)
        + 1
    )


def _next_beginning_s(state: JobState, now_s: float) -> float:
    """Estimate when the next iteration with which a report begins will run; infinite if that is
    unknown.
    """
    iteration, taken = _iteration(state, now_s), state.taken
    if iteration is None or taken is None:
        return math.inf
    waiting = [
        report.begins_iteration
        for report in state.reports.values()
        if report.begins_iteration is not None
    ]
    ahead = [number - taken.iteration - 1 for number in waiting if number > iteration]
    return taken.at_s + min(ahead) * state.decision.straggler_time_s if ahead else math.inf


def _effect(state: JobState) -> Effect:
    if not state.is_planned:
        return "planning"
    return (
        "already"
        if state.taken is not None and state.taken.version >= state.promised
        else "next iteration"
    )
