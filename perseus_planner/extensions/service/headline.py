"""The one state of a job that everything shows: the commands, the dashboard, the metrics and the
API say the same word.

The first line that is true of a job is its state:

| state | is true if |
|---|---|
| not heard of | it neither asked for plans nor sent telemetry for its lease |
| over budget | its GPUs have drawn over 2 % more than its budgets allow, for a minute |
| late | iterations take 2 % longer than planned, or than a deadline, which no report explains |
| off plan | a rank does not follow its plan, or the plan is of another machine or model |
| beside a straggler | a report that counts makes a pipeline slow |
| not known | it is heard of and sends no telemetry, so nobody knows how it runs |
| fine | none of these is |

A job that has ended has no state: its totals say when that was. A job that was late stays so until
its telemetry has said otherwise for a minute, as times near the limit would change it with each
message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import si
from perseus_planner.extensions.service.models import Headline, JobStatus, StateName, Together
from perseus_planner.extensions.service.policy import keeps, past_least_energy_s
from perseus_planner.runs.verdict import OFF

if TYPE_CHECKING:
    from perseus_planner.extensions.service.jobs import JobState


def power_now_w(status: JobStatus) -> float:
    """Return the power of all GPUs of a job, watts: as measured of late, else by its plans."""
    sent = status.telemetry
    return status.expected.power_w if sent is None or sent.power_w is None else sent.power_w


def together(jobs: Iterable[JobStatus]) -> Together:
    """Return what jobs draw and save together: those that are heard of, as nobody knows whether
    the others run.
    """
    jobs = list(jobs)
    heard_of = [job for job in jobs if job.silent_since_s is None]
    sent = [job.telemetry for job in heard_of if job.telemetry is not None]
    # Jobs whose plan is of another machine or model have no saving; how many do is said beside the
    # sum.
    saved_w = [job.saves_w for job in heard_of if job.saves_w is not None]
    return Together(
        heard_of=len(heard_of),
        measured=sum(telemetry.power_w is not None for telemetry in sent),
        silent=len(jobs) - len(heard_of),
        power_w=sum(map(power_now_w, heard_of)),
        saves_w=sum(saved_w),
        compared=len(saved_w),
        extra_w=sum(job.expected_saving_w for job in heard_of),
    )


def state_name(state: JobState) -> StateName:
    """Return the state of a job, by the order of the table above."""
    sent = state.tally
    # The order is that of what an operator has to do first: a job that is not heard of has no later
    # figure that can be trusted.
    if state.silent_since_s is not None:
        return "not heard of"
    if state.over_budget_since_s is not None:
        return "over budget"
    if _is_late(state):
        return "late"
    if sent is not None and (sent.latest.unlike_plan or sent.off_plan_since_s is not None):
        return "off plan"
    if state.decision.stragglers:
        return "beside a straggler"
    # A straggler is known without telemetry, from its report; that all is fine is not.
    return "not known" if sent is None else "fine"


def _is_late(state: JobState) -> bool:
    """Whether iterations take longer than planned, and longer than what reports explain."""
    if state.late is None or state.tally is None:
        return False
    if not state.decision.stragglers:
        return True
    # Beside a straggler, iterations are meant to take longer; only more than that is late.
    return state.tally.iteration_s > (1.0 + OFF) * state.decision.straggler_time_s


def headline(state: JobState, status: JobStatus) -> Headline:
    """Return what an operator has to know first of a job, given its status."""
    name = state_name(state)
    # The state as it was noted, unless it is another one by now, as after the service has begun.
    noted_s = state.noted_since_s if state.noted == name else None
    since_s = state.silent_since_s or state.over_budget_since_s or noted_s
    return Headline(name, _text(name, state, status), since_s)


def _text(name: StateName, state: JobState, status: JobStatus) -> str:
    """Say in a sentence without its full stop what a state comes from."""
    decision = status.decision
    sent = status.telemetry
    reason = decision.targets[0].reason
    because = keeps(reason, past_least_energy_s(state.job, reason, state.curve))
    if name == "not heard of":
        return "it has no share of the power budget of all jobs, and its power is not known"
    if name == "over budget":
        allowed = si(status.power_limit_w or 0.0, "W")
        return f"it draws {si(power_now_w(status), 'W')}, and its budgets allow {allowed}"
    if name == "late" and state.late is not None:
        return state.late.text.rstrip(".")
    if name == "off plan" and sent is not None:
        # The verdict is a whole sentence; here it goes on behind a colon, so its full stop goes.
        off = f"{sent.ranks - sent.following} of {sent.ranks} ranks do not follow their plan"
        return (status.unlike_plan or off).rstrip(".")
    if name == "beside a straggler":
        return decision.reason
    if sent is None:
        planned = si(decision.straggler_time_s, "s", 4)
        what = "its plans are for"
        if status.promised > status.version:
            what = f"version {status.promised} of its plans is being made for"
        return f"it sends no telemetry; {what} iterations of {planned}{because}"
    if status.autopilot is not None:
        return f"{status.autopilot.name}: {status.autopilot}"
    return f"iterations take {si(sent.iteration_s, 's', 4)}{because}"
