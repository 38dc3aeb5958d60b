"""Telemetry of running jobs, kept in memory and written to the database a few seconds later."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.service.telemetry import Tally, add_counters

if TYPE_CHECKING:
    from perseus_planner.service.model import RegisteredJob
    from perseus_planner.service.schemas import Counters
    from perseus_planner.service.store.writer import Draft, Writer

WRITTEN_AFTER_S = 5.0
"""How long telemetry waits in memory before it is written."""
_JOBS_AT_ONCE = 64  # writing them takes some milliseconds, for which reports wait


class _Entry(NamedTuple):
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
        self._entries = {name: _Entry(jobs[name].since_s, tally) for name, tally in stored.items()}
        self._lock = threading.Lock()
        self._unwritten: dict[str, _Entry] = {}
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
                self._entries[job.name] = self._unwritten[job.name] = _Entry(job.since_s, after)

    def write(self, writer: Writer) -> None:
        """Write the tallies of a few jobs; afterwards `write_s` says when to write the next.

        Raises:
            StorageError: If they cannot be written. They are written with the job's next message.
        """
        with self._lock:
            unwritten = {
                name: self._unwritten.pop(name) for name in list(self._unwritten)[:_JOBS_AT_ONCE]
            }

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
