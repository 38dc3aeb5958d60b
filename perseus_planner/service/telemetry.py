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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from perseus_planner.runs.account import Entry, fold
from perseus_planner.service.answers import JobTelemetry, JobTotals, Point
from perseus_planner.service.model import Conflict, RegisteredJob, shared
from perseus_planner.service.schemas import GROWING, Counters

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
    runs = () if before is None else (*before.earlier, before.latest.run)
    is_same_run = before is not None and before.latest.run == sent.run
    since = before.latest if before is not None and is_same_run else Counters(run=sent.run)
    if sent.run in runs[:-1] or sent.iterations <= since.iterations:
        return before
    for name in GROWING:
        if getattr(sent, name) < getattr(since, name):
            raise Conflict(
                f"{name}: was {getattr(since, name):g} and is {getattr(sent, name):g} after more "
                "iterations of the same run; count from the beginning of the run, and give a "
                "restarted run another name"
            )
    new = sent.since(since)
    total = new if before is None else new + before
    plans = (*(before.plans if before else ()), Entry(**vars(new), version=version))
    tally = Tally(
        **{**shared(JobTelemetry, sent), **vars(total)},
        iteration_s=new.mean_iteration_s,
        power_w=new.mean_power_w,
        observed_s=now_s,
        latest=sent,
        earlier=tuple(run for run in runs if run != sent.run)[-_RUNS:],
        plans=fold(plans, VERSIONS_APART + 1),
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
    plans = () if tally is None else tally.plans
    return JobTotals(job.name, job.pipelines, job.since_s, ended_s, tally, plans)


WRITTEN_AFTER_S = 5.0
"""How long telemetry waits in memory before it is written."""
_JOBS_AT_ONCE = 64  # writing them takes some milliseconds, for which reports wait


class JobTally(NamedTuple):
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
        self._entries = {
            name: JobTally(jobs[name].since_s, tally) for name, tally in stored.items()
        }
        self._lock = threading.Lock()
        self._unwritten: dict[str, JobTally] = {}
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
        now_s: float,
        version: int | None,
    ) -> None:
        """Add counters with `add_counters`.

        Raises:
            Conflict: If they contradict what the run sent before.
        """
        with self._lock:
            before = self.of(job)
            after = add_counters(before, sent, now_s, version)
            if after is not None and after is not before:
                if not self._unwritten:
                    self._write_s = now_s + WRITTEN_AFTER_S
                self._entries[job.name] = self._unwritten[job.name] = JobTally(job.since_s, after)

    def take_unwritten(self) -> dict[str, JobTally]:
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
