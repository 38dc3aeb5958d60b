"""Telemetry of running jobs: adding up what their runs count.

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

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from perseus_planner.service.answers import JobTelemetry, JobTotals, PlanTotal, Point
from perseus_planner.service.model import Conflict, Origin, RegisteredJob, shared
from perseus_planner.service.schemas import Counters

_RUNS = 16  #: earlier runs that are remembered, so that their late messages do not count
VERSIONS_APART = 16
"""How many versions of a job's plans have totals of their own; those of older ones are added up."""
POINTS = 120
"""How many points of a job's figures are kept: when there are more, every second one goes, so that
all of the job is covered and the spacing doubles."""
_GROWING = ("time_s", "metered_iterations", "metered_s", "energy_j", "late_changes")
_SUMMED = ("iterations", "time_s", "energy_j", "late_changes")


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
    is_same_run = before is not None and before.latest.run == sent.run
    since = before.latest if before is not None and is_same_run else Counters(sent.run)
    if sent.run in runs[:-1] or sent.iterations <= since.iterations:
        return before
    _check_growing(since, sent)
    new = {name: getattr(sent, name) - getattr(since, name) for name in ("iterations", *_GROWING)}
    metered, metered_s, energy_j = new["metered_iterations"], new["metered_s"], new["energy_j"]
    ran_j = metered * baseline_j(metered_s / metered) if metered else 0.0
    total = {name: new[name] + (getattr(before, name) if before else 0) for name in _SUMMED}
    total["baseline_j"] = ran_j + (before.baseline_j if before else 0.0)
    ran = PlanTotal(version, new["iterations"], new["time_s"], energy_j, ran_j - energy_j)
    now = {
        "iteration_s": new["time_s"] / new["iterations"],
        "power_w": energy_j / metered_s if metered_s > 0.0 else None,
        "saved_j": total["baseline_j"] - total["energy_j"],
        "energy_is": _origin(before.energy_is if before else None, sent.energy_is),
        "observed_s": now_s,
        "latest": sent,
        "earlier": tuple(run for run in runs if run != sent.run)[-_RUNS:],
        "plans": _by_version((*(before.plans if before else ()), ran)),
    }
    tally = Tally(**{**shared(JobTelemetry, sent), **total, **now})
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
    plans = () if tally is None else tally.plans
    return JobTotals(job.name, job.pipelines, job.since_s, ended_s, tally, plans)


def _by_version(totals: Iterable[PlanTotal]) -> tuple[PlanTotal, ...]:
    """Return the totals with one for each of the last versions, and those of older ones
    together, first.
    """
    sums: dict[int | None, PlanTotal] = {}
    for total in totals:
        before = sums.pop(total.version, None)
        sums[total.version] = total if before is None else before.plus(total)
    while len(sums) > VERSIONS_APART + 1 or (len(sums) > VERSIONS_APART and None not in sums):
        oldest = sums.pop(next(version for version in sums if version is not None))
        older = replace(oldest, version=None)
        sums = {None: sums.pop(None).plus(older) if None in sums else older, **sums}
    return tuple(sums.values())


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


WRITTEN_AFTER_S = 5.0
"""How long telemetry waits in memory before it is written."""
_JOBS_AT_ONCE = 64  # writing them takes some milliseconds, for which reports wait


class Entry(NamedTuple):
    """The tally of the job registered at `since_s`; an earlier job may have had the same name."""

    since_s: float
    tally: Tally


class TelemetryBook:
    """The telemetry of all jobs. It counts at once and is written some seconds later, for many jobs
    together.

    So no report waits for it. If the service is killed, the last seconds are missing until the job
    sends its totals again; they are lost if that run has ended too. The book may be used from any
    thread.

    Args:
        stored: Job name -> tally, as read from the database.
        jobs: Those jobs by name.
    """

    def __init__(self, stored: Mapping[str, Tally], jobs: Mapping[str, RegisteredJob]) -> None:
        self._entries = {name: Entry(jobs[name].since_s, tally) for name, tally in stored.items()}
        self._lock = threading.Lock()
        self._unwritten: dict[str, Entry] = {}
        self._write_s = math.inf  #: holds while something is unwritten

    @property
    def write_s(self) -> float:
        """When to write, seconds since the epoch; infinite if there is nothing to write."""
        return self._write_s if self._unwritten else math.inf

    def of(self, job: RegisteredJob) -> Tally | None:
        """Return the telemetry of a job; None if it has sent none."""
        entry = self._entries.get(job.name)
        return entry.tally if entry is not None and entry.since_s == job.since_s else None

    def add(
        self,
        job: RegisteredJob,
        sent: Counters,
        baseline_j: Callable[[float], float],
        now_s: float,
        version: int | None,
    ) -> None:
        """Add counters with `add_counters`.

        Raises:
            Conflict: If they contradict what the run sent before.
        """
        with self._lock:
            before = self.of(job)
            after = add_counters(before, sent, baseline_j, now_s, version)
            if after is not None and after is not before:
                if not self._unwritten:
                    self._write_s = now_s + WRITTEN_AFTER_S
                self._entries[job.name] = self._unwritten[job.name] = Entry(job.since_s, after)

    def take_unwritten(self) -> dict[str, Entry]:
        """Return the tallies of a few jobs to write now; afterwards `write_s` says when to write
        the next.
        """
        with self._lock:
            names = list(self._unwritten)[:_JOBS_AT_ONCE]
            return {name: self._unwritten.pop(name) for name in names}

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        with self._lock:
            self._entries.pop(name, None)
            self._unwritten.pop(name, None)
