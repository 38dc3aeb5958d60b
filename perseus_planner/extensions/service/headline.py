"""The one state of a job that everything shows: the commands, the dashboard, the metrics and the
API say the same word.

The first line that is true of a job is its state:

| state | is true if |
|---|---|
| not heard of | it neither asked for plans nor sent telemetry for its lease |
| over budget | its GPUs have drawn over 2 % more than its budgets allow, for a minute |
| late | iterations take 2 % longer than planned, and no report explains that |
| off plan | a rank does not follow its plan, or the plan is of another machine or model |
| beside a straggler | a report that counts makes a pipeline slow |
| not known | it is heard of and sends no telemetry, so nobody knows how it runs |
| fine | none of these is |

A job that has ended has no state: its totals say when that was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from perseus_planner.base.prefixes import si
from perseus_planner.extensions.service.models import Headline, JobStatus, Together
from perseus_planner.runs.verdict import OFF

_KEEPS = {
    "job budget": ", to keep the power budget of the job",
    "cluster budget": ", to keep the power budget of all jobs",
    "GPU limit": ", under the power limit of the GPUs",
    "deadline": ", as the deadline of the job allows",
}
"""Why a job that waits for nobody is not planned as fast as with all clocks at maximum."""


def with_headline(status: JobStatus) -> JobStatus:
    """Return a status with its headline, and with what the job saves now."""
    saves_w = None
    if status.unlike_plan is None and status.silent_since_s is None:
        saves_w = status.expected.baseline_power_w - power_now_w(status)
    return replace(status, saves_w=saves_w, state=_headline(status))


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


def _headline(status: JobStatus) -> Headline:
    """Return the state of a job, by the order of the table above."""
    decision = status.decision
    sent = status.telemetry
    # The order is that of what an operator has to do first: a job that is not heard of has no later
    # figure that can be trusted.
    if status.silent_since_s is not None:
        return Headline(
            "not heard of",
            "it has no share of the power budget of all jobs, and its power is not known",
            status.silent_since_s,
        )
    if status.over_budget_since_s is not None:
        drawn = si(power_now_w(status), "W")
        allowed = si(status.power_limit_w or 0.0, "W")
        text = f"it draws {drawn}, and its budgets allow {allowed}"
        return Headline("over budget", text, status.over_budget_since_s)
    # The verdict is a whole sentence; here it goes on behind a colon, so its full stop goes.
    if sent is not None and _is_late(status, sent.iteration_s):
        return Headline("late", (status.verdict or "").rstrip("."))
    if sent is not None and status.unlike_plan is not None:
        return Headline("off plan", status.unlike_plan.rstrip("."))
    if sent is not None and sent.off_plan_since_s is not None:
        off = sent.ranks - sent.following
        text = f"{off} of {sent.ranks} ranks do not follow their plan"
        return Headline("off plan", text, sent.off_plan_since_s)
    if decision.stragglers:
        return Headline("beside a straggler", decision.reason, decision.since_s)
    keeps = _KEEPS.get(decision.targets[0].reason or "", "")
    planned = si(decision.straggler_time_s, "s", 4)
    # A straggler is known without telemetry, from its report; that all is fine is not.
    if sent is None:
        text = f"it sends no telemetry; its plans are for iterations of {planned}{keeps}"
        return Headline("not known", text)
    if status.autopilot is not None:
        return Headline("fine", f"{status.autopilot.name}: {status.autopilot}")
    return Headline("fine", f"iterations take {si(sent.iteration_s, 's', 4)}{keeps}")


def _is_late(status: JobStatus, iteration_s: float) -> bool:
    """Whether iterations take longer than planned, and longer than what reports explain."""
    if status.verdict is None:
        return False
    ratio = status.time_over_planned
    # The clients of 0.3 send the sentence alone.
    is_slower = " slower than planned" in status.verdict if ratio is None else ratio > 1.0
    if not status.decision.stragglers:
        return is_slower
    # Beside a straggler, iterations are meant to take longer; only more than that is late.
    return is_slower and iteration_s > (1.0 + OFF) * status.decision.straggler_time_s
