"""What power budgets make of jobs: how long the iterations of each are to take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.service.power import Demand, Share, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from perseus_planner.service.model import Job
    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.state import JobState
    from perseus_planner.service.store.writer import Draft


def share_power(draft: Draft, job: str | None, settle: Callable[[JobState], object]) -> None:
    """Share power anew: a budget of all jobs among all of them, else that of `job`, or with None of each.

    Args:
        draft: where the jobs are.
        job: the one that has changed; None: all.
        settle: is called with each job whose share is another one now.

    Raises:
        InfeasiblePower: budgets cannot be kept.
    """
    jobs = draft.jobs()
    states = jobs.values() if job is None or draft.power_w is not None else [jobs[job]]
    for state in with_shares(draft.power_w, states):
        if state.share != draft.state(state.job.name).share:
            settle(state)


def with_shares(power_w: float | None, states: Iterable[JobState]) -> list[JobState]:
    """The jobs, each to take as long as the power budgets want it to.

    Stragglers are left out: who waits for one draws less.

    Args:
        power_w: of these jobs together, watts; None: any.
        states: the jobs.

    Raises:
        InfeasiblePower: they cannot draw so little; names the least.
        InfeasibleDeadline: a job cannot be as fast as it is wanted to be.
    """
    states = list(states)
    if power_w is None and all(state.job.power_w is None for state in states):
        return [replace(state, share=None) for state in states]
    demands = [_demand(state.job, state.curve) for state in states]
    found = shares(power_w, demands)
    room = 1.0 if power_w is None else max(1.0, power_w / math.fsum(share.power_w for share in found))
    allowed = [_allowed(state.job, share, room, power_w) for state, share in zip(states, found, strict=True)]
    return [replace(state, share=share) for state, share in zip(states, allowed, strict=True)]


def _allowed(job: Job, share: Share, room: float, power_w: float | None) -> Share | None:
    """The share that plans must keep: all that nobody else needs, as plans draw a little more than the bound does."""
    limits_w = [share.power_w * room] if power_w is not None else []
    limits_w += [] if job.power_w is None else [job.power_w]
    return Share(share.time_s, min(limits_w)) if limits_w else None


def _demand(job: Job, curve: Curve) -> Demand:
    time_s = curve.baseline_time_s if job.deadline_s is None else job.deadline_s
    time_s = min(max(time_s, curve.min_time_s), curve.max_time_s)
    return Demand(curve, job.pipelines, job.pipelines * curve.gpus, time_s, job.power_w)
