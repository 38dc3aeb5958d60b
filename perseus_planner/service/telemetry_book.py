"""The telemetry of all jobs: what is sent counts at once, and is written some seconds later, of all jobs together.

So no report waits for it. If the service is killed, the last seconds are not known until the job sends how far it has
come the next time; what nobody sends any more, as that run of the job has ended too, is lost.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.service.telemetry import Counters, JobTelemetry, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perseus_planner.service.model import Job
    from perseus_planner.service.store.writer import Draft, Writer

WRITTEN_AFTER_S = 5.0
"""How long what is sent waits to be written."""
_AT_ONCE = 64  # jobs: some milliseconds, in which a report waits


class _Entry(NamedTuple):
    """Of the job that was registered at `since_s`: there may have been another one of its name before."""

    since_s: float
    telemetry: JobTelemetry


class TelemetryBook:
    """From any thread.

    Args:
        stored: name -> what was written of jobs.
        jobs: those jobs, by name.
    """

    def __init__(self, stored: Mapping[str, JobTelemetry], jobs: Mapping[str, Job]) -> None:
        self._entries = {name: _Entry(jobs[name].since_s, each) for name, each in stored.items()}
        self._lock = threading.Lock()
        self._unwritten: dict[str, _Entry] = {}
        self._write_s = math.inf  #: where something is unwritten

    @property
    def write_s(self) -> float:
        """When to write, seconds since the epoch; infinite: there is nothing to write."""
        return self._write_s if self._unwritten else math.inf

    def of(self, job: Job) -> JobTelemetry | None:
        """What is known of a job; None: nothing."""
        entry = self._entries.get(job.name)
        return entry.telemetry if entry is not None and entry.since_s == job.since_s else None

    def add(self, job: Job, sent: Counters, baseline_j: Callable[[float], float], now_s: float) -> None:
        """Count what was sent, as `counted` does.

        Raises:
            Conflict: it contradicts what was sent before.
        """
        with self._lock:
            before = self.of(job)
            after = counted(before, sent, baseline_j, now_s)
            if after is not None and after is not before:
                if not self._unwritten:
                    self._write_s = now_s + WRITTEN_AFTER_S
                self._entries[job.name] = self._unwritten[job.name] = _Entry(job.since_s, after)

    def write(self, writer: Writer) -> None:
        """Write what is not written yet, of a few jobs; `write_s` says when the next are to be written.

        Raises:
            StorageError: it cannot be written; that is tried again with what is sent next.
        """
        with self._lock:
            unwritten = {name: self._unwritten.pop(name) for name in list(self._unwritten)[:_AT_ONCE]}

        def command(draft: Draft) -> None:
            for name, entry in unwritten.items():
                state = draft.find(name)
                if state is not None and state.job.since_s == entry.since_s:
                    draft.telemetry[name] = entry.telemetry

        if unwritten:
            writer.do(command)

    def forget(self, name: str) -> None:
        """The job has ended."""
        with self._lock:
            self._entries.pop(name, None)
            self._unwritten.pop(name, None)
