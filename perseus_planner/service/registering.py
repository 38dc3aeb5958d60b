"""A job that is registered: new, or known already."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from perseus_planner.errors import shown
from perseus_planner.service.checks import check_deadline, check_job, check_places
from perseus_planner.service.model import Conflict, Job
from perseus_planner.service.outcomes import PlanSet, Registered
from perseus_planner.service.planning.cache import Planning, once_each, requests_of
from perseus_planner.service.policy import decide
from perseus_planner.service.state import JobState


def checked(job: Job, frontier: bytes, now_s: float) -> Job:
    """The job with the digest of its frontier's file, registered now.

    Raises:
        UsageError: it is no job, whatever the frontier holds.
    """
    check_job(job)
    return replace(job, frontier=hashlib.sha256(frontier).hexdigest(), since_s=now_s)


def first_state(job: Job, frontier: bytes, planning: Planning) -> JobState:
    """A job with the first version of its plans; takes seconds where they have to be made.

    Raises:
        FrontierError: `frontier` is no frontier's file.
        UsageError: the job does not fit it.
        InfeasibleError: no plan keeps the job's deadline or switch budget.
    """
    curve = planning.curve(job.frontier, frontier)
    check_places(job, curve)
    check_deadline(job.deadline_s, curve)
    without_budget = replace(job, power_w=None)  # which is shared once the job is known
    decision = decide(without_budget, (), planning.numbers(job, curve), None, job.since_s)
    asked = requests_of(job, curve, decision)
    texts, of_pipeline = once_each(planning.first_plan(request, frontier) for request in asked)
    return JobState(
        registered=job,
        job=job,
        curve=curve,
        decision=decision,
        saving_w=0.0,  # it is what pipelines would do anyway
        published=PlanSet(1, texts, of_pipeline, job.since_s),
        planned=decision,
        promised=1,
    )


def known_again(state: JobState, job: Job) -> Registered:
    """The job that runs, if `job` is that.

    Raises:
        Conflict: it is another one.
    """
    if replace(job, since_s=state.registered.since_s) != state.registered:
        raise Conflict(
            f"another job {shown(job.name)} runs, with another frontier or other settings; end that one, or choose "
            "another name"
        )
    return Registered(state.job, state.published.version, is_new=False)
