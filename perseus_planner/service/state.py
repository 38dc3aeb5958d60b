"""All that the service knows of one running job, and how one state of it follows another:
registered, reconciled with reports and budgets, planned, or given up.

Everything here takes a `JobState` and returns another one or an answer; nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perseus_planner.base.errors import InfeasibleDeadline, UsageError, shown
from perseus_planner.base.prefixes import si
from perseus_planner.service.answers import (
    Answer,
    Effect,
    Event,
    JobSummary,
    PowerBudget,
    Registered,
)
from perseus_planner.service.curves import Curve, NotSolved
from perseus_planner.service.model import (
    REMEMBERED,
    Conflict,
    Decision,
    PlanSet,
    RegisteredJob,
    Report,
    Slowing,
    Taken,
    check_name,
)
from perseus_planner.service.planning import Planning, deduplicated, requests_of
from perseus_planner.service.policy import decide, saving_w
from perseus_planner.service.reports import (
    Look,
    check_places,
    check_scope,
    is_over,
    over_s,
)


@dataclass(frozen=True)
class Share:
    """A job's share of a budget."""

    time_s: float  #: Iteration time within the budget
    power_w: float  #: Average power of all its GPUs at that time
    reason: Slowing | None = None  #: The budget that makes it take longer; None if none does


@dataclass(frozen=True)
class JobState:
    """A running job inside the service. It is replaced as a whole, so readers never see half a
    change.
    """

    registered: RegisteredJob  #: The job as it was registered
    job: RegisteredJob  #: The job with the deadline and the power budget that hold now
    curve: Curve = field(repr=False)  #: The energy of its frontier
    decision: Decision  #: What its pipelines are to do
    #: Watts that the decision is expected to save, as `policy.saving_w` computes them.
    saving_w: float
    published: PlanSet  #: The newest version of its plans
    planned: Decision  #: The decision that those plans were made for
    #: The version named in answers; above `published.version` while that version is being planned.
    promised: int
    #: Key -> report, for reports that count or will count, in order of arrival.
    reports: Mapping[str, Report] = field(default_factory=dict)
    #: Key -> report, for reports that no longer count, the latest last; at most `REMEMBERED`.
    past: Mapping[str, Report] = field(default_factory=dict)
    taken: Taken | None = None  #: The version that the job runs; None if it has not reported one
    share: Share | None = None  #: The job's share of the power budgets; None if there are none
    events: tuple[Event, ...] = ()  #: What has happened to it, oldest first; see `history`
    silent_since_s: float | None = None  #: As in `JobStatus`
    over_budget_since_s: float | None = None  #: As in `JobStatus`

    @property
    def is_planned(self) -> bool:
        """Whether all promised plans have been published."""
        return self.promised == self.published.version

    @property
    def budget(self) -> PowerBudget:
        """The job's own power budget and its schedule."""
        return PowerBudget(self.job.power_w, self.job.power_schedule, self.job.power_since_s)

    def later(self, by_s: float) -> JobState:
        """Return the state with all that ends or is compared in time later by so much."""

        def moved(reports: Mapping[str, Report]) -> dict[str, Report]:
            names = ("observed_s", "begins_s", "expires_s")
            return {
                key: replace(each, **{name: getattr(each, name) + by_s for name in names})
                for key, each in reports.items()
            }

        decision, taken = self.decision, self.taken
        return replace(
            self,
            decision=replace(
                decision,
                since_s=decision.since_s + by_s,
                look_again_s=decision.look_again_s + by_s,
            ),
            reports=moved(self.reports),
            past=moved(self.past),
            taken=None if taken is None else replace(taken, at_s=taken.at_s + by_s),
        )

    @property
    def power_limit_w(self) -> float | None:
        """The power that its budgets allow all its GPUs, watts; None if there are none."""
        return None if self.share is None else self.share.power_w

    def with_job(self, **settings: Any) -> JobState:
        """Return the state with these fields of its job replaced."""
        return replace(self, job=replace(self.job, **settings))

    def with_report(self, report: Report) -> JobState:
        """Return the state with a report added, or replaced."""
        return replace(self, reports={**self.reports, report.key: report})

    def keeping(self, lasting: Iterable[Report]) -> JobState:
        """Return the state in which only the reports in `lasting` count; the others become past
        reports.
        """
        kept = {report.key for report in lasting}
        if len(kept) == len(self.reports):
            return self
        gone = {key: report for key, report in self.reports.items() if key not in kept}
        past = {**self.past, **gone}
        for key in list(past)[:-REMEMBERED]:
            del past[key]
        return replace(
            self,
            reports={key: report for key, report in self.reports.items() if key in kept},
            past=past,
        )


_FORGOTTEN_AFTER_S = 3600.0
"""For so long a report that is over still keeps earlier observations that arrive late from
counting.
"""
_LIMIT_CHANGE = 0.01


def first_state(job: RegisteredJob, frontier: bytes, planning: Planning) -> JobState:
    """Return a new job with the first version of its plans; takes seconds if they have to be
    computed.

    Raises:
        FrontierError: If `frontier` is not a frontier file.
        UsageError: If the job does not fit it.
        InfeasibleError: If no plan meets the job's deadline or switch budget.
    """
    curve = planning.curve(job.frontier, frontier)
    check_places(job, curve.stages)
    check_deadline(job.deadline_s, curve)
    without_budget = replace(job, power_w=None)  # power is shared once the job is known
    numbers = planning.numbers(job, curve)
    decision = decide(without_budget, Look.at((), job.since_s), numbers, None, job.since_s)
    asked, indices = requests_of(job, curve, decision)
    texts = [planning.first_plan(request, frontier) for request in asked]
    return JobState(
        registered=job,
        job=job,
        curve=curve,
        decision=decision,
        saving_w=0.0,  # the pipelines do what they would do anyway
        published=plan_set(1, texts, indices, decision, job.since_s),
        planned=decision,
        promised=1,
    )


def is_same(state: JobState, job: RegisteredJob) -> bool:
    """Return whether a registration is the one of the job in `state`."""
    return replace(job, since_s=state.registered.since_s) == state.registered


def recognize(state: JobState, job: RegisteredJob) -> Registered:
    """Return the answer to a repeated registration of the job in `state`.

    Raises:
        Conflict: If `job` is another job of that name.
    """
    if not is_same(state, job):
        raise Conflict(
            f"another job {shown(job.name)} runs, with another frontier or other settings; end "
            "that one, or choose another name"
        )
    return answer_registration(state, is_new=False)


def answer_registration(state: JobState, *, is_new: bool) -> Registered:
    """Return the answer to the registration of the job in `state`."""
    return Registered(JobSummary.of(state.job), state.published.version, is_new)


def take_over_job(state: JobState, first: JobState) -> JobState:
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
        job=replace(
            now,
            **{name: getattr(before, name) for name in _KEPT_SETTINGS},
        ),
        published=replace(first.published, version=version),
        promised=version,
        reports=state.reports,
        past=state.past,
        taken=state.taken,
    )


_KEPT_SETTINGS = ("power_w", "power_schedule", "power_since_s", "since_s")


def reconcile(state: JobState, planning: Planning, now_s: float) -> JobState:
    """Return the job after the policy has decided again.

    If all its plans are known, they are published. Otherwise their version is promised, and the
    caller has them made with `prepare`.
    """
    look = _look(state, now_s)
    state = _without_forgotten(state, look, now_s)
    try:
        decision = _decided(state, look, planning, now_s)
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
    requests, indices = asked
    texts = [planning.text(request) for request in requests]
    known_texts = [text for text in texts if text is not None]
    if len(known_texts) < len(texts):
        return replace(state, promised=version)
    published = plan_set(version, known_texts, indices, decision, now_s)
    return replace(state, published=published, planned=decision, promised=version)


def plan_set(
    version: int, texts: Sequence[str], indices: Sequence[int], decision: Decision, now_s: float
) -> PlanSet:
    """Return a version of plans, given the texts of the decision's `requests_of`, and its
    indices.
    """
    plans, of_text = deduplicated(texts)
    found = tuple([of_text[index] for index in indices])
    own = None if decision.own is None else found[-1]
    return PlanSet(version, plans, found[: len(decision.targets)], now_s, own)


LEASE_S = 60.0
"""How long at most plans that wait for a straggler hold after the service was last heard of."""


def lease_s(state: JobState, now_s: float) -> float | None:
    """Return for how many seconds from now the plans hold if the service is not heard of any more:
    until the first report that they rest on expires. None if they rest on none.
    """
    decision = state.decision
    if decision.own is None and state.published.own is None:
        return None
    ends_s = (
        state.reports[key].expires_s for key in decision.stragglers.values() if key in state.reports
    )
    return min(max(min(ends_s, default=math.inf) - now_s, 0.0), LEASE_S)


def prepare(state: JobState, planning: Planning, now_s: float) -> bool:
    """Make one of the things that `reconciled` needs to publish the state's plans; takes up to
    minutes.

    Returns:
        Whether more is needed.
    """
    try:
        decision = _decided(state, _look(state, now_s), planning, now_s)
    except NotSolved as missing:
        planning.solve(state.job, missing.slow)
        return True
    asked, _ = requests_of(state.job, state.curve, decision)
    missing_plans = [request for request in asked if planning.text(request) is None]
    for request in missing_plans[:1]:
        planning.plan(request)
    return len(missing_plans) > 1


def give_up(state: JobState, reason: str, now_s: float) -> JobState:
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


def is_other_limit(planned_w: float | None, told_w: float | None) -> bool:
    """Return whether a power limit of the GPUs differs so much from the one planned for that it is
    planned again.

    A site may adjust its limit all the time; a difference within the error of a power sensor
    changes no clock.
    """
    if planned_w is None or told_w is None:
        return planned_w != told_w
    return abs(told_w - planned_w) > _LIMIT_CHANGE * planned_w


def next_look_s(state: JobState, now_s: float, wall_s: float) -> float:
    """Return when time alone may change the decision; infinite for never."""
    budget_s = state.budget.next_s(now_s, wall_s)
    return min(state.decision.look_again_s, _next_beginning_s(state, now_s), budget_s)


def expire(report: Report, now_s: float) -> Report:
    """Return the report, expired now. If it had begun, it still counts as begun and so ends its
    source's older ones.
    """
    begins_s = (
        report.begins_s
        if report.begins_s > now_s
        else min(report.begins_s, math.nextafter(now_s, 0.0))
    )
    return replace(report, begins_s=begins_s, expires_s=now_s)


def _look(state: JobState, now_s: float) -> Look:
    return Look.at(state.reports.values(), now_s, _iteration(state, now_s))


def _decided(state: JobState, look: Look, planning: Planning, now_s: float) -> Decision:
    """Decide what the job's pipelines are to do.

    Raises:
        NotSolved: If slow stages have to be solved first.
    """
    return decide(
        _within_budgets(state),
        look,
        planning.numbers(state.job, state.curve),
        state.decision,
        now_s,
        reason=_own_reason(state),
    )


def _own_reason(state: JobState) -> Slowing | None:
    """Return why the job's own target is not the time of all clocks at maximum; None if it is."""
    if state.share is not None and state.share.reason is not None:
        return state.share.reason
    if state.job.deadline_s is not None:
        return "deadline"
    return None if state.job.gpu_power_limit_w is None else "GPU limit"


def _without_forgotten(state: JobState, look: Look, now_s: float) -> JobState:
    oldest_s = (
        now_s - _FORGOTTEN_AFTER_S
    )  # by the service's clock: that of a source may be hours behind
    gone = {
        report.key for report in look.idle if is_over(report, now_s) and over_s(report) < oldest_s
    }
    if not gone and len(look.lasting) == len(state.reports):
        return state
    return state.keeping(report for report in look.lasting if report.key not in gone)


def _within_budgets(state: JobState) -> RegisteredJob:
    """Return the job with the iteration time and the power that budgets leave it, if there are
    any.
    """
    share = state.share
    if share is None:
        return state.job
    return replace(state.job, deadline_s=share.time_s, power_w=share.power_w)


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
    is_taken = state.taken is not None and state.taken.version >= state.promised
    return "already" if is_taken else "next iteration"


_MOST_REPORTS = 4096


def check_deadline(deadline_s: float | None, curve: Curve) -> None:
    """Check that a plan can meet a deadline.

    Raises:
        InfeasibleDeadline: If none can; names the least deadline.
    """
    if deadline_s is not None and deadline_s < curve.min_time_s:
        raise InfeasibleDeadline(deadline_s, curve.min_time_s)


def check_report(state: JobState, report: Report) -> None:
    """Check a new report of a job.

    Raises:
        UsageError: If the job does not have the scope, or a time is not finite.
        Conflict: If the job has too many reports.
    """
    check_name("key", report.key)
    check_scope(state.job, report.scope, state.curve.stages)
    if not (math.isfinite(report.observed_s) and math.isfinite(report.begins_s)) or math.isnan(
        report.expires_s
    ):
        raise UsageError(
            f"report {shown(report.key)}: a time is not finite; give seconds since the epoch"
        )
    if len(state.reports) >= _MOST_REPORTS:
        raise Conflict(f"job {shown(state.job.name)} has {len(state.reports)} reports; clear some")


def check_same(known: Report, report: Report) -> None:
    """Check that a report with a known key is the same report. Its times may differ, as they count
    from its arrival.

    Raises:
        Conflict: If it is another report.
    """
    if any(
        getattr(known, name) != getattr(report, name)
        for name in ("source", "scope", "slowdown", "iteration_s", "cause")
    ):
        raise Conflict(
            f"report {shown(report.key)} differs from what was received with that key; give "
            "another report another key"
        )
