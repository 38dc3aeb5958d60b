"""What the runs of a job have counted, added up.

A run counts from its beginning and repeatedly sends its totals, so a message that is lost loses
nothing and one that arrives twice counts once. The service adds up the runs of a job:

| received | effect |
|---|---|
| more iterations than before, from the same run | the difference counts |
| as many iterations or fewer | none: the message was sent twice, or overtaken |
| another run | all of it counts: the job was restarted and counts from 0 |
| a run that another run has followed | none: the message was overtaken |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perseus_planner.extensions.service.models import (
    Conflict,
    Counters,
    JobTelemetry,
    Point,
    shared,
)
from perseus_planner.runs.account import GROWING, Entry, fold

_RUNS = 16  #: earlier runs that are remembered, so that their late messages do not count
VERSIONS_APART = 16
"""How many versions of a job's plans have accounts of their own; those of older ones are added
up.
"""
POINTS = 120
"""How many points of a job's figures are kept: when there are more, every second one goes, so that
all of the job is covered and the spacing doubles."""


@dataclass(frozen=True, kw_only=True)
class Tally(JobTelemetry):
    """The telemetry of a job with what is needed to add to it."""

    latest: Counters  #: The last message of the run that counts now
    earlier: tuple[str, ...] = ()  #: Names of the runs before it, the latest last
    plans: tuple[Entry, ...] = ()  #: The account by version of the plans
    points: tuple[Point, ...] = ()  #: How its figures went, oldest first; see `with_point`


def add_counters(
    before: Tally | None, sent: Counters, now_s: float, version: int | None = None
) -> Tally | None:
    """Add the counters that a run has sent to the tally of its job.

    Args:
        before: The tally so far; None if there is none.
        sent: The counters of one run.
        now_s: Seconds since the epoch.
        version: The version of its plans that the job runs, as it last reported; None if it has
            reported none.

    Returns:
        The new tally; `before` if the message does not count.

    Raises:
        Conflict: If there are more iterations than before but another counter has fallen.
    """
    # The last name is that of the run that counts now. A run before it has been followed by
    # another, so its messages were overtaken on the way.
    runs = () if before is None else (*before.earlier, before.latest.run)
    is_same_run = before is not None and before.latest.run == sent.run
    # A run counts from its own beginning, so the first message of another run counts from 0.
    since = before.latest if before is not None and is_same_run else Counters(run=sent.run)
    if sent.run in runs[:-1] or sent.iterations <= since.iterations:
        return before
    # A counter that falls while iterations grow comes from another run under the same name: its
    # difference would take back what was counted.
    for name in GROWING:
        if getattr(sent, name) < getattr(since, name):
            raise Conflict(
                f"{name}: was {getattr(since, name):g} and is {getattr(sent, name):g} after more "
                "iterations of the same run; count from the beginning of the run, and give a "
                "restarted run another name"
            )
    new = sent.since(since)
    total = new if before is None else new + before
    # `fold` adds this entry to the one of the same version, so a version appears once.
    plans = (*(before.plans if before else ()), Entry(**vars(new), version=version))
    tally = Tally(
        **{**shared(JobTelemetry, sent), **vars(total)},
        iteration_s=new.mean_iteration_s,
        power_w=new.mean_power_w,
        observed_s=now_s,
        latest=sent,
        # without `latest`, which counts now
        earlier=tuple(run for run in runs if run != sent.run)[-_RUNS:],
        # one more than the versions apart: all that are older share one entry
        plans=fold(plans, VERSIONS_APART + 1),
    )
    return replace(tally, points=with_point(before.points if before else (), tally))


def with_point(points: tuple[Point, ...], tally: Tally) -> tuple[Point, ...]:
    """Add the figures of `tally`. The last point moves along until it is far enough from the one
    before.
    """
    saved_j = tally.saved_j if tally.is_judged else None
    now = Point(tally.observed_s, tally.iteration_s, tally.power_w, saved_j)
    # The spacing is a fixed share of the time covered, so it grows with the age of the job.
    if len(points) > 1 and points[-1].at_s - points[-2].at_s < (now.at_s - points[0].at_s) / POINTS:
        return (*points[:-1], now)
    more = (*points, now)
    return more if len(more) <= POINTS else (*more[:-1:2], now)
