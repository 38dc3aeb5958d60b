"""What a job's state becomes when reports, wishes or the time are others: decided, and planned if plans are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.service.foreseen import expected
from perseus_planner.service.outcomes import Answer, JobStatus, PlanSet
from perseus_planner.service.planning.cache import Planning, once_each, requests_of
from perseus_planner.service.planning.curves import NotSolved
from perseus_planner.service.policy import decide, saving_w
from perseus_planner.service.reports import lasting_reports

if TYPE_CHECKING:
    from perseus_planner.service.model import Decision, Job, Report
    from perseus_planner.service.state import JobState
    from perseus_planner.service.telemetry import JobTelemetry

_FORGOTTEN_AFTER_S = 3600.0
"""When what has expired or recovered no longer keeps earlier observations, which arrive late, from counting."""


def settled(state: JobState, planning: Planning, now_s: float) -> JobState:
    """The job after the policy has looked at it again.

    If its plans are known, they are published; else their version is promised, and someone must `prepare` the state.
    """
    state = _without_forgotten(state, now_s)
    try:
        decision = _decided(state, planning, now_s)
    except NotSolved:
        return replace(state, promised=state.published.version + 1)
    saved_w = saving_w(_wanted(state), decision, planning.numbers(state.job, state.curve))
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
    published = PlanSet(version, *once_each(known), now_s)
    return replace(state, published=published, planned=decision, promised=version)


def prepare(state: JobState, planning: Planning, now_s: float) -> None:
    """Solve and plan all that `settled` needs to publish the state's plans; takes up to minutes."""
    while True:
        try:
            decision = _decided(state, planning, now_s)
            break
        except NotSolved as missing:
            planning.solve(state.job, missing.slow)
    for request in dict.fromkeys(requests_of(state.job, state.curve, decision)):
        planning.plan(request)


def given_up(state: JobState, reason: str, now_s: float) -> JobState:
    """The job where planning failed: its plans stay as they were, under the version that was promised.

    When it is settled again, they are asked for again.
    """
    if state.is_planned:
        return state
    published = replace(state.published, version=state.promised, made_s=now_s)
    decision = replace(state.decision, reason=f"plans stay as they were, as planning failed: {reason}")
    return replace(state, published=published, decision=decision)


def answer(before: JobState, after: JobState, report: Report | None = None, reason: str = "") -> Answer:
    """What to say of a change; `reason` if that of the decision does not tell."""
    unsolved = not after.is_planned and after.decision is before.decision
    reason = reason or ("slow stages are solved anew, and then it is decided" if unsolved else after.decision.reason)
    return Answer(
        job=after.job.name,
        report=report,
        version=after.promised,
        changed=after.promised > before.promised or after.decision.targets != before.decision.targets,
        takes_effect=_takes_effect(after),
        expected_saving_w=None if unsolved else after.saving_w,
        reason=reason,
    )


def until_it_begins(state: JobState, report: Report, now_s: float) -> str:
    """What a report that does not count yet waits for, and what holds until then; empty: it has begun."""
    if report.begins_iteration is None:
        left_s = report.begins_s - now_s
        waits = f"it begins in {left_s:.3g} s" if left_s > 0.0 else ""
    elif (iteration := _iteration(state, now_s)) is None:
        waits = f"it begins with iteration {report.begins_iteration}, and the job has not said yet which one it runs"
    else:
        left_s = (report.begins_iteration - iteration) * state.decision.straggler_time_s
        waits = f"it begins with iteration {report.begins_iteration}, in about {left_s:.3g} s" if left_s > 0.0 else ""
    return waits and f"{waits}; until then {state.decision.reason}"


def next_look_s(state: JobState, now_s: float) -> float:
    """When time alone may change what is decided; infinite: never."""
    return min(state.decision.look_again_s, _next_beginning_s(state, now_s))


def cleared(report: Report, now_s: float) -> Report:
    """The report, expired now; if it had begun, it stays one that had, so that its source's older ones do not count."""
    begins_s = report.begins_s if report.begins_s > now_s else min(report.begins_s, math.nextafter(now_s, 0.0))
    return replace(report, begins_s=begins_s, expires_s=now_s)


def status_of(state: JobState, telemetry: JobTelemetry | None, now_s: float) -> JobStatus:
    """What to say of a job."""
    return JobStatus(
        job=state.job,
        decision=state.decision,
        version=state.published.version,
        promised=state.promised,
        taken=state.taken,
        reports=counting(state, now_s),
        expected_saving_w=state.saving_w,
        expected=expected(state),
        telemetry=telemetry,
    )


def counting(state: JobState, now_s: float) -> tuple[Report, ...]:
    """The reports of a job that count or are to count, in the order in which they came."""
    return tuple(each for each in state.reports.values() if not _is_over(each, now_s))


def _is_over(report: Report, now_s: float) -> bool:
    """It has expired, or says that what was slow has recovered."""
    has_begun = report.begins_iteration is None and report.begins_s <= now_s
    return report.expires_s <= now_s or (report.slowdown == 1.0 and has_begun)


def _over_s(report: Report) -> float:
    """Since when a report is over."""
    return report.begins_s if report.slowdown == 1.0 else report.expires_s


def _decided(state: JobState, planning: Planning, now_s: float) -> Decision:
    """What its pipelines are to do.

    Raises:
        NotSolved: that cannot be said yet.
    """
    numbers = planning.numbers(state.job, state.curve)
    reports, iteration = state.reports.values(), _iteration(state, now_s)
    return decide(_wanted(state), reports, numbers, state.decision, now_s, iteration=iteration)


def _without_forgotten(state: JobState, now_s: float) -> JobState:
    lasting = lasting_reports(state.reports.values(), now_s, _iteration(state, now_s))
    oldest_s = now_s - _FORGOTTEN_AFTER_S  # by our clock: that of a source may be hours behind
    return state.keeping(each for each in lasting if not _is_over(each, now_s) or _over_s(each) >= oldest_s)


def _wanted(state: JobState) -> Job:
    """The job with the iteration time and the power that budgets leave it, where there are any."""
    share = state.share
    return state.job if share is None else replace(state.job, deadline_s=share.time_s, power_w=share.power_w)


def _iteration(state: JobState, now_s: float) -> int | None:
    """The first iteration that can still be changed, as far as what the job last said lets one expect; None: nothing.

    It is taken to go on at the pace that was decided.
    """
    if state.taken is None:
        return None
    return state.taken.iteration + int(max(now_s - state.taken.at_s, 0.0) / state.decision.straggler_time_s) + 1


def _next_beginning_s(state: JobState, now_s: float) -> float:
    """When the next iteration with which a report begins is expected; infinite: nobody knows."""
    iteration, taken = _iteration(state, now_s), state.taken
    if iteration is None or taken is None:
        return math.inf
    waited = [each.begins_iteration for each in state.reports.values() if each.begins_iteration is not None]
    ahead = [number - taken.iteration - 1 for number in waited if number > iteration]
    return taken.at_s + min(ahead) * state.decision.straggler_time_s if ahead else math.inf


def _takes_effect(state: JobState) -> str:
    if not state.is_planned:
        return "planning"
    return "already" if state.taken is not None and state.taken.version >= state.promised else "next iteration"
