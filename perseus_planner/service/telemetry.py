"""Telemetry of running jobs: adding up what their runs count, and keeping it on disk.

A run counts from its beginning and repeatedly sends its totals, so a message that is lost loses nothing and one that
arrives twice counts once. The service adds up the runs of a job:

| received                                          | effect                                                        |
|---------------------------------------------------|---------------------------------------------------------------|
| more iterations than before, from the same run    | the difference counts                                         |
| as many iterations or fewer                       | none: the message was sent twice, or overtaken                |
| another run                                       | all of it counts: the job was restarted and counts from 0     |
| a run that another run has followed               | none: the message was overtaken                               |
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.service.answers import JobTelemetry
from perseus_planner.service.model import Conflict, Origin
from perseus_planner.service.schemas import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perseus_planner.service.model import Job
    from perseus_planner.service.store.writer import Draft, Writer

WRITTEN_AFTER_S = 5.0
"""How long telemetry waits in memory before it is written."""
_JOBS_AT_ONCE = 64  # writing them takes some milliseconds, for which reports wait
_RUNS = 16  #: earlier runs that are remembered, so that their late messages do not count
_GROWING = ("time_s", "metered_iterations", "metered_s", "energy_j", "late_changes")


@dataclass(frozen=True)
class Tally(JobTelemetry):
    """The telemetry of a job with what is needed to add to it.

    Attributes:
        latest: The last message of the run that counts now.
        earlier: Names of the runs before it, the latest last.
    """

    latest: Counters
    earlier: tuple[str, ...] = ()


def add_counters(
    before: Tally | None, sent: Counters, baseline_j: Callable[[float], float], now_s: float
) -> Tally | None:
    """Add the counters that a run has sent to the tally of its job.

    Args:
        before: The tally so far; None if there is none.
        sent: The counters of one run.
        baseline_j: Energy of an iteration of so many seconds with all clocks at maximum, joules. It is convex, so the
            baseline of the mean iteration is at most the mean baseline.
        now_s: Seconds since the epoch.

    Returns:
        The new tally; `before` if the message does not count.

    Raises:
        Conflict: If there are more iterations than before but another counter has fallen.
    """
    runs = () if before is None else (*before.earlier, before.latest.run)
    since = before.latest if before is not None and before.latest.run == sent.run else Counters(sent.run)
    if sent.run in runs[:-1] or sent.iterations <= since.iterations:
        return before
    _check_growing(since, sent)
    metered = sent.metered_iterations - since.metered_iterations
    metered_s, new_energy_j = sent.metered_s - since.metered_s, sent.energy_j - since.energy_j
    iterations, late_changes = sent.iterations - since.iterations, sent.late_changes - since.late_changes
    energy_j = new_energy_j + (before.energy_j if before else 0.0)
    base_j = metered * baseline_j(metered_s / metered) if metered else 0.0
    base_j += before.baseline_j if before else 0.0
    return Tally(
        iterations=iterations + (before.iterations if before else 0),
        iteration_s=(sent.time_s - since.time_s) / iterations,
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
    )


def _check_growing(since: Counters, sent: Counters) -> None:
    for name in _GROWING:
        if getattr(sent, name) < getattr(since, name):
            raise Conflict(
                f"{name}: was {getattr(since, name):g} and is {getattr(sent, name):g} after more iterations of the "
                "same run; count from the beginning of the run, and give a restarted run another name"
            )


def _origin(before: Origin | None, sent: Origin | None) -> Origin | None:
    return "simulated" if "simulated" in (before, sent) else before or sent


class _Entry(NamedTuple):
    """The tally of the job registered at `since_s`; an earlier job may have had the same name."""

    since_s: float
    tally: Tally


class TelemetryBook:
    """The telemetry of all jobs. It counts at once and is written some seconds later, for many jobs together.

    So no report waits for it. If the service is killed, the last seconds are missing until the job sends its totals
    again; they are lost if that run has ended too. The book may be used from any thread.

    Args:
        stored: Job name -> tally, as read from the database.
        jobs: Those jobs by name.
    """

    def __init__(self, stored: Mapping[str, Tally], jobs: Mapping[str, Job]) -> None:
        self._entries = {name: _Entry(jobs[name].since_s, tally) for name, tally in stored.items()}
        self._lock = threading.Lock()
        self._unwritten: dict[str, _Entry] = {}
        self._write_s = math.inf  #: holds while something is unwritten

    @property
    def write_s(self) -> float:
        """When to write, seconds since the epoch; infinite if there is nothing to write."""
        return self._write_s if self._unwritten else math.inf

    def of(self, job: Job) -> Tally | None:
        """Return the telemetry of a job; None if it has sent none."""
        entry = self._entries.get(job.name)
        return entry.tally if entry is not None and entry.since_s == job.since_s else None

    def add(self, job: Job, sent: Counters, baseline_j: Callable[[float], float], now_s: float) -> None:
        """Add counters with `add_counters`.

        Raises:
            Conflict: If they contradict what the run sent before.
        """
        with self._lock:
            before = self.of(job)
            after = add_counters(before, sent, baseline_j, now_s)
            if after is not None and after is not before:
                if not self._unwritten:
                    self._write_s = now_s + WRITTEN_AFTER_S
                self._entries[job.name] = self._unwritten[job.name] = _Entry(job.since_s, after)

    def write(self, writer: Writer) -> None:
        """Write the tallies of a few jobs; afterwards `write_s` says when to write the next.

        Raises:
            StorageError: If they cannot be written. They are written with the job's next message.
        """
        with self._lock:
            unwritten = {name: self._unwritten.pop(name) for name in list(self._unwritten)[:_JOBS_AT_ONCE]}

        def command(draft: Draft) -> None:
            for name, entry in unwritten.items():
                state = draft.find(name)
                if state is not None and state.job.since_s == entry.since_s:
                    draft.telemetry[name] = entry.tally

        if unwritten:
            writer.do(command)

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        with self._lock:
            self._entries.pop(name, None)
            self._unwritten.pop(name, None)
