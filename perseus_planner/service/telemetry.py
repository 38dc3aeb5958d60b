"""Telemetry of running jobs: adding up what their runs count.

A run counts from its beginning and repeatedly sends its totals, so a message that is lost loses
nothing and one that arrives twice counts once. The service adds up the runs of a job:

| received                                          | effect
|
|---------------------------------------------------|---------------------------------------------------------------|
| more iterations than before, from the same run    | the difference counts
|
| as many iterations or fewer                       | none: the message was sent twice, or overtaken
|
| another run                                       | all of it counts: the job was restarted and
counts from 0     |
| a run that another run has followed               | none: the message was overtaken
|
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.service.answers import JobTelemetry, JobTotals, PlanTotal, Point
from perseus_planner.service.model import Conflict, Origin
from perseus_planner.service.schemas import Counters

if TYPE_CHECKING:
    from perseus_planner.service.model import RegisteredJob

_RUNS = 16  #: earlier runs that are remembered, so that their late messages do not count
VERSIONS_APART = 16
"""How many versions of a job's plans have totals of their own; those of older ones are added up."""
POINTS = 120
"""How many points of a job's figures are kept: when there are more, every second one goes, so that
all of the job is covered and the spacing doubles."""
_GROWING = ("time_s", "metered_iterations", "metered_s", "energy_j", "late_changes")


@dataclass(frozen=True)
class Tally(JobTelemetry):
    """The telemetry of a job with what is needed to add to it."""

    latest: Counters  #: The last message of the run that counts now
    earlier: tuple[str, ...] = ()  #: Names of the runs before it, the latest last
    #: The same by version of the plans, the version taken last at the end.
    plans: tuple[PlanTotal, ...] = ()
    points: tuple[Point, ...] = ()  #: How its figures went, oldest first; see `with_point`


def add_counters(
    before: Tally | None,
    sent: Counters,
    baseline_j: Callable[[float], float],
    now_s: float,
    version: int | None = None,
) -> Tally | None:
    """Add the counters that a run has sent to the tally of its job.

    Args:
        before: The tally so far; None if there is none.
        sent: The counters of one run.
        baseline_j: Energy of an iteration of so many seconds with all clocks at maximum, joules. It
            is convex, so the baseline of the mean iteration is at most the mean baseline.
        now_s: Seconds since the epoch.
        version: The version of its plans that the job runs, as it last reported; None if it has
            reported none.

    Returns:
        The new tally; `before` if the message does not count.

    Raises:
        Conflict: If there are more iterations than before but another counter has fallen.
    """
    runs = () if before is None else (*before.earlier, before.latest.run)
    since = (
        before.latest
        if before is not None and before.latest.run == sent.run
        else Counters(sent.run)
    )
    if sent.run in runs[:-1] or sent.iterations <= since.iterations:
        return before
    _check_growing(since, sent)
    metered = sent.metered_iterations - since.metered_iterations
    metered_s, new_energy_j = sent.metered_s - since.metered_s, sent.energy_j - since.energy_j
    iterations, late_changes = (
        sent.iterations - since.iterations,
        sent.late_changes - since.late_changes,
    )
    energy_j = new_energy_j + (before.energy_j if before else 0.0)
    new_base_j = metered * baseline_j(metered_s / metered) if metered else 0.0
    base_j = new_base_j + (before.baseline_j if before else 0.0)
    time_s = sent.time_s - since.time_s
    ran = PlanTotal(version, iterations, time_s, new_energy_j, new_base_j - new_energy_j)
    tally = Tally(
        iterations=iterations + (before.iterations if before else 0),
        time_s=time_s + (before.time_s if before else 0.0),
        iteration_s=time_s / iterations,
        power_w=new_energy_j / metered_s if metered_s > 0.0 else None,
        energy_j=energy_j,
        baseline_j=base_j,
        saved_j=base_j - energy_j,
        energy_is=_origin(before.energy_is if before else None, sent.energy_is),
        late_changes=late_changes + (before.late_changes if before else 0),
        set_p50_s=sent.set_p50_s,
        set_p99_s=sent.set_p99_s,
        ranks=sent.ranks,
        following=sent.following,
        off_plan_since_s=sent.off_plan_since_s,
        observed_s=now_s,
        latest=sent,
        earlier=tuple(run for run in runs if run != sent.run)[-_RUNS:],
        plans=_by_version((*(before.plans if before else ()), ran)),
    )
    return replace(tally, points=with_point(before.points if before else (), tally))


def with_point(points: tuple[Point, ...], tally: Tally) -> tuple[Point, ...]:
    """Add the figures of `tally`. The last point moves along until it is far enough from the one
    before.
    """
    saved_j = None if tally.energy_is is None else tally.saved_j
    now = Point(tally.observed_s, tally.iteration_s, tally.power_w, saved_j)
    if len(points) > 1 and points[-1].at_s - points[-2].at_s < (now.at_s - points[0].at_s) / POINTS:
        return (*points[:-1], now)
    more = (*points, now)
    return more if len(more) <= POINTS else (*more[:-1:2], now)


def totals_of(job: RegisteredJob, tally: Tally | None, ended_s: float | None = None) -> JobTotals:
    """Return the totals of a job; `ended_s` is None if it runs."""
    return JobTotals(
        job.name, job.pipelines, job.since_s, ended_s, tally, () if tally is None else tally.plans
    )


def _by_version(totals: Iterable[PlanTotal]) -> tuple[PlanTotal, ...]:
    """Return the totals with one for each of the last versions, and those of older ones
    together, first.
    """
    found: dict[int | None, PlanTotal] = {}
    for total in totals:
        known = found.pop(total.version, None)
        found[total.version] = total if known is None else known.plus(total)
    while len(found) > VERSIONS_APART + 1 or (len(found) > VERSIONS_APART and None not in found):
        oldest = found.pop(next(version for version in found if version is not None))
        older = replace(oldest, version=None)
        found = {None: found.pop(None).plus(older) if None in found else older, **found}
    return tuple(found.values())


def _check_growing(since: Counters, sent: Counters) -> None:
    for name in _GROWING:
        if getattr(sent, name) < getattr(since, name):
            raise Conflict(
                f"{name}: was {getattr(since, name):g} and is {getattr(sent, name):g} after more "
                "iterations of the same run; count from the beginning of the run, and give a "
                "restarted run another name"
            )


def _origin(before: Origin | None, sent: Origin | None) -> Origin | None:
    return "simulated" if "simulated" in (before, sent) else before or sent
