"""All that the service knows of one running job, and how one state of it follows another.

A job is registered, reconciled with reports and budgets, planned, or given up: what does so takes a
`JobState` and returns another one or an answer; nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perseus_planner.base.errors import InfeasibleDeadline, shown
from perseus_planner.base.prefixes import si
from perseus_planner.extensions.service.curve import Curve, NotSolved, Slow
from perseus_planner.extensions.service.look import Look
from perseus_planner.extensions.service.models import (
    REMEMBERED,
    Answer,
    Conflict,
    Counters,
    Decision,
    Effect,
    Event,
    PlanSet,
    PowerBudget,
    PowerStep,
    Registered,
    RegisteredJob,
    Report,
    Slowing,
    StateName,
    Taken,
)
from perseus_planner.extensions.service.planning import Planning, requests_of
from perseus_planner.extensions.service.policy import (
    decide,
    past_least_energy_s,
    saving_w,
    within_deadline_s,
)
from perseus_planner.extensions.service.tally import Tally, add_counters
from perseus_planner.runs.verdict import OFF, percent

WRITTEN_AFTER_S = 5.0
"""How long telemetry waits in memory before it is written."""


@dataclass(frozen=True)
class Late:
    """Iterations that take longer than they are to."""

    text: str  #: By how much, and why, in a sentence
    seen_s: float  #: When telemetry last said so


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
    #: Key -> report, for reports that count or will count, the last that was sent or replaced last.
    reports: Mapping[str, Report] = field(default_factory=dict)
    #: Key -> report, for reports that no longer count, the latest last; at most `REMEMBERED`.
    past: Mapping[str, Report] = field(default_factory=dict)
    taken: Taken | None = None  #: The version that the job runs; None if it has not reported one
    share: Share | None = None  #: The job's share of the power budgets; None if there are none
    tally: Tally | None = None  #: Its telemetry, which counts before it is written; None without
    #: Since when its GPUs have drawn more than that; None if they do not.
    over_s: float | None = field(default=None, compare=False)
    #: What has happened to it, oldest first, as `service.Service.history` returns it.
    events: tuple[Event, ...] = ()
    #: Its own power budgets by the moment when each was set or began, oldest first
    budgets: tuple[PowerStep, ...] = ()
    silent_since_s: float | None = None  #: As in `JobStatus`
    over_budget_since_s: float | None = None  #: As in `JobStatus`
    #: Not None from when telemetry says that it is late until it has not for `_LATE_FOR_S`.
    late: Late | None = field(default=None, compare=False)
    noted: StateName | None = None  #: Its state when something was last changed
    noted_since_s: float | None = None  #: Since when it is in that state; None if not known
    look: Look | None = field(default=None, compare=False, repr=False)  #: The last one at `reports`
    #: What has to be solved before the policy can decide again: slow stages, or none of them under
    #: the power limit of the GPUs; None if nothing has to be.
    unsolved: Slow | None = field(default=None, compare=False)

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

        def moved(value: Any, *names: str) -> Any:
            return replace(value, **{name: getattr(value, name) + by_s for name in names})

        def reported(reports: Mapping[str, Report]) -> dict[str, Report]:
            times = ("observed_s", "begins_s", "expires_s")
            return {key: moved(report, *times) for key, report in reports.items()}

        return replace(
            self,
            decision=moved(self.decision, "since_s", "look_again_s"),
            reports=reported(self.reports),
            past=reported(self.past),
            # it rests on the times before they were moved
            look=None,
            taken=None if self.taken is None else moved(self.taken, "at_s"),
        )

    @property
    def power_limit_w(self) -> float | None:
        """The power that its budgets allow all its GPUs, watts; None if there are none."""
        return None if self.share is None else self.share.power_w

    def with_job(self, **settings: Any) -> JobState:
        """Return the state with these fields of its job replaced."""
        return replace(self, job=replace(self.job, **settings))

    def with_telemetry(self, sent: Counters, now_s: float) -> JobState:
        """Return the state after a run of the job has sent its counters, which also say whether it
        draws more than its budgets allow.

        Raises:
            Conflict: If they contradict what the run sent before.
        """
        version = None if self.taken is None else self.taken.version
        tally = add_counters(self.tally, sent, now_s, version)
        drawn_w = None if tally is None else tally.power_w
        limit_w = self.power_limit_w
        late = self.late
        # A message that does not count was sent before, or overtaken.
        if tally is not None and tally is not self.tally:
            text = self._why_late(tally)
            if text is not None:
                late = Late(text, now_s)
            elif late is not None and now_s - late.seen_s >= _LATE_FOR_S:
                late = None
        # One message above the budget is no news: the power has to stay above it for `_OVER_FOR_S`.
        over_s = None
        if drawn_w is not None and limit_w is not None and drawn_w > _OVER * limit_w:
            over_s = self.over_s or now_s
        is_over = over_s is not None and now_s - over_s >= _OVER_FOR_S
        since_s = (self.over_budget_since_s or over_s) if is_over else None
        return replace(self, tally=tally, late=late, over_s=over_s, over_budget_since_s=since_s)

    def _why_late(self, now: Tally) -> str | None:
        """Return by how much and why the iterations that `now` has last counted took longer than
        they were to, in a sentence; None if they did not.
        """
        verdict = now.latest.verdict
        ratio = now.latest.time_over_planned
        if verdict is not None:
            # The clients of 0.3 send the sentence alone.
            is_slower = " slower than planned" in verdict if ratio is None else ratio > 1.0
            if is_slower:
                return verdict
        # Plans are of what is inside of iterations, and a deadline is of all of them.
        deadline_s = self.job.deadline_s
        before = self.tally
        taken = self.taken
        if deadline_s is None or before is None or now.latest.autopilot is not None:
            return None
        # What was counted before the newest plans ran says nothing of these.
        if taken is not None and (
            taken.version != self.published.version or taken.at_s > before.observed_s
        ):
            return None
        planned_s = max(deadline_s, self.decision.straggler_time_s)
        over = now.iteration_s / planned_s - 1.0
        if over <= OFF:
            return None
        what = "its deadline" if planned_s == deadline_s else "what is planned"
        return (
            f"iterations take {si(now.iteration_s, 's', 4)}, {percent(over)} longer than {what} of "
            f"{si(planned_s, 's', 4)}"
        )

    def with_report(self, report: Report, now_s: float) -> JobState:
        """Return the state with a report added, or replaced."""
        look = self.look
        # A look can be continued with a report it has not seen; one that replaces another asks for
        # a new look.
        if look is not None:
            is_new = now_s < look.until_s and report.key not in self.reports
            look = look.with_reports(self.registered, [report], now_s) if is_new else None
        reports = {**self.reports}
        # Out and in again: what was replaced last stands last, where the database looks for what to
        # write.
        reports.pop(report.key, None)
        reports[report.key] = report
        return replace(self, reports=reports, look=look)

    def looked(self, look: Look) -> JobState:
        """Return the state after a look at its reports: those that are gone become past reports."""
        if not look.gone:
            return self if look is self.look else replace(self, look=look)
        reports = {**self.reports}
        past = {**self.past}
        for report in look.gone:
            past[report.key] = reports.pop(report.key)
        # Past reports are kept to recognize repeated messages, so the oldest may go.
        for key in [*past][:-REMEMBERED]:
            del past[key]
        return replace(self, reports=reports, past=past, look=replace(look, gone=()))


_LIMIT_CHANGE = 0.01
# A job that draws so much of its budget for so long is over it
_OVER = 1.02
_OVER_FOR_S = 60.0
_LATE_FOR_S = 60.0
"""After telemetry has not said for so long that a job is late, it is not: twelve messages. Chosen
by hand."""


def first_state(job: RegisteredJob, frontier: bytes, planning: Planning) -> JobState:
    """Return a new job with the first version of its plans; takes seconds if they have to be
    computed.

    Raises:
        FrontierError: If `frontier` is not a frontier file.
        UsageError: If the job does not fit it.
        InfeasibleError: If no plan meets the job's deadline or switch budget.
    """
    curve = planning.curve(job.frontier, frontier)
    job.parts.check_places(curve.stages)
    check_deadline(job.deadline_s, curve)
    numbers = planning.numbers(job, curve)
    # power is shared once the job is known
    without_budget = _within_budgets(replace(job, power_w=None), None, numbers)
    reason = _own_reason(job, None)
    decision = decide(
        without_budget,
        Look.empty(job.since_s),
        numbers,
        None,
        job.since_s,
        reason=reason,
        past_s=past_least_energy_s(job, reason, numbers),
    )
    asked, indices = requests_of(job, curve, decision)
    texts = [planning.plan(request, frontier) for request in asked]
    return JobState(
        registered=job,
        job=job,
        curve=curve,
        decision=decision,
        saving_w=0.0,  # the pipelines do what they would do anyway
        published=plan_set(1, texts, indices, decision),
        planned=decision,
        promised=1,
    )


def check_deadline(deadline_s: float | None, curve: Curve) -> None:
    """Check that a plan can meet a deadline.

    Raises:
        InfeasibleDeadline: If none can; names the least deadline.
    """
    if deadline_s is not None and deadline_s < curve.min_time_s:
        raise InfeasibleDeadline(deadline_s, curve.min_time_s)


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
    return Registered(state.job, state.published.version)


def take_over_job(state: JobState, first: JobState) -> JobState:
    """Return the job in `state` with the frontier, settings and plans of `first`, to be
    reconciled with its reports.
    """
    before = state.job
    now = first.job
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
        tally=state.tally,
        events=state.events,
        budgets=state.budgets,
    )


_KEPT_SETTINGS = ("power_w", "next_power", "power_schedule", "power_since_s", "since_s")


def reconcile(state: JobState, planning: Planning, now_s: float) -> JobState:
    """Return the job after the policy has decided again.

    If all its plans are known, they are published. Otherwise their version is promised, and the
    caller has them made with `prepare`.
    """
    look = state.look
    if look is None or look.until_s <= now_s:
        look = look_at(state, now_s)
    state = state.looked(look)
    # The policy asks for curves of slow stages. Until those are solved, the version is promised and
    # the decision stays as it is.
    try:
        decision = _decided(state, look, planning, now_s)
    except NotSolved as missing:
        return replace(state, promised=state.published.version + 1, unsolved=missing.slow)
    state = state if state.unsolved is None else replace(state, unsolved=None)
    if decision != state.decision:
        numbers = planning.numbers(state.job, state.curve)
        job = _within_budgets(state.job, state.share, numbers)
        saved_w = saving_w(job, decision, numbers)
        state = replace(state, decision=decision, saving_w=saved_w)
    # Another reason or look alone changes no plan; nor do targets beyond the end of the frontier,
    # which make the same requests.
    before = state.planned
    if state.is_planned and decision.asked == before.asked:
        return state
    asked = requests_of(state.job, state.curve, decision)
    if state.is_planned and asked == requests_of(state.job, state.curve, before):
        return state
    version = state.published.version + 1
    requests, indices = asked
    texts = [planning.text(request) for request in requests]
    # A version is published whole: pipelines of one job must not follow plans of two decisions.
    known_texts = [text for text in texts if text is not None]
    if len(known_texts) < len(texts):
        return replace(state, promised=version)
    published = plan_set(version, known_texts, indices, decision)
    return replace(state, published=published, planned=decision, promised=version)


def plan_set(
    version: int, texts: Sequence[str], indices: Sequence[int], decision: Decision
) -> PlanSet:
    """Return a version of plans, given the texts of the decision's `requests_of`, and its
    indices.
    """
    # Two requests may have led to the same plan: it is sent once.
    index_of_text = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    of_pipeline = tuple([index_of_text[texts[index]] for index in indices])
    # With an own target, `requests_of` puts its index behind those of the pipelines.
    of_own = None if decision.own is None else of_pipeline[-1]
    return PlanSet(version, tuple(index_of_text), of_pipeline[: len(decision.of_pipeline)], of_own)


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
    # Beside a straggler that has recovered, slow plans cost time, which nobody would stop if the
    # service were away: so the lease bounds it.
    return min(max(min(ends_s, default=math.inf) - now_s, 0.0), LEASE_S)


def prepare(state: JobState, planning: Planning, now_s: float) -> bool:
    """Make one of the things that `reconcile` needs to publish the state's plans; takes up to
    minutes.

    Returns:
        Whether more is needed.
    """
    try:
        decision = _decided(state, look_at(state, now_s), planning, now_s)
    except NotSolved as missing:
        planning.solve(state.job, missing.slow)
        return True
    asked, _ = requests_of(state.job, state.curve, decision)
    missing_plans = [request for request in asked if planning.text(request) is None]
    # One at a time, so that jobs that wait take turns.
    for request in missing_plans[:1]:
        planning.plan(request)
    return len(missing_plans) > 1


def give_up(state: JobState, reason: str) -> JobState:
    """Return the job after planning failed: its unchanged plans, published as the version that was
    promised.

    The next time it is reconciled, the plans are requested again.
    """
    if state.is_planned:
        return state
    published = replace(state.published, version=state.promised)
    decision = replace(
        state.decision, reason=f"the plans stay unchanged because planning failed: {reason}"
    )
    return replace(state, published=published, decision=decision)


def answer_to(
    before: JobState, after: JobState, report: Report | None = None, reason: str = ""
) -> Answer:
    """Return the answer to a change; `reason` replaces that of the decision."""
    unsolved = not after.is_planned and after.unsolved is not None
    decided = after.decision.reason
    if unsolved:
        what = "slow stages are" if after.unsolved else "the limited pipeline is"
        decided = f"{what} solved anew before it is decided"
    return Answer(
        job=after.job.name,
        report=report,
        version=after.promised,
        changed=after.promised > before.promised
        or after.decision.asked != before.decision.asked
        or (unsolved and after is not before),
        takes_effect=_effect(after),
        expected_saving_w=None if unsolved else after.saving_w,
        reason=reason or decided,
    )


def until_it_begins(state: JobState, report: Report, now_s: float) -> str:
    """Say when a report begins and what holds until then; empty if it has begun."""
    iteration = _iteration(state, now_s)
    if report.begins_iteration is None:
        left_s = report.begins_s - now_s
        waits = f"it begins in {si(left_s, 's', 3)}" if left_s > 0.0 else ""
    elif iteration is None:
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


def look_at(state: JobState, now_s: float) -> Look:
    """Return a new look at the reports of a job."""
    reports = state.reports.values()
    iteration = _iteration(state, now_s)
    return Look.empty(now_s).with_reports(state.registered, reports, now_s, iteration)


def _decided(state: JobState, look: Look, planning: Planning, now_s: float) -> Decision:
    """Decide what the job's pipelines are to do.

    Raises:
        NotSolved: If slow stages have to be solved first.
    """
    job = state.job
    share = state.share
    numbers = planning.numbers(job, state.curve)
    reason = _own_reason(job, share)
    return decide(
        _within_budgets(job, share, numbers),
        look,
        numbers,
        state.decision,
        now_s,
        reason=reason,
        past_s=past_least_energy_s(job, reason, numbers),
    )


def _own_reason(job: RegisteredJob, share: Share | None) -> Slowing | None:
    """Return why the job's own target is not the time of all clocks at maximum; None if it is."""
    if share is not None and share.reason is not None:
        return share.reason
    if job.deadline_s is not None:
        return "deadline"
    return None if job.gpu_power_limit_w is None else "GPU limit"


def _within_budgets(job: RegisteredJob, share: Share | None, curve: Curve) -> RegisteredJob:
    """Return the job with the iteration time and the power that budgets leave it, if there are
    any; else with a deadline no later than is of use.
    """
    if share is not None:
        return replace(job, deadline_s=share.time_s, power_w=share.power_w)
    if job.deadline_s is None:
        return job
    return replace(job, deadline_s=within_deadline_s(job.deadline_s, curve))


def _iteration(state: JobState, now_s: float) -> int | None:
    """Estimate the first iteration that can still be changed; None if the job has not reported one.

    The job is assumed to continue at the pace that was decided.
    """
    if state.taken is None:
        return None
    # One more than the one that runs now, which has begun and keeps its plans.
    return (
        state.taken.iteration
        + int(max(now_s - state.taken.at_s, 0.0) / state.decision.straggler_time_s)
        + 1
    )


def _next_beginning_s(state: JobState, now_s: float) -> float:
    """Estimate when the next iteration with which a report begins will run; infinite if that is
    unknown.
    """
    iteration = _iteration(state, now_s)
    taken = state.taken
    look = state.look
    # A look whose `until_s` is finite has no report that begins with an iteration.
    if iteration is None or taken is None or (look is not None and look.until_s > -math.inf):
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
