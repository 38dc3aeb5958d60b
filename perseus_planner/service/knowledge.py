"""What the service knows, for those who ask: all of it from memory, and nothing of it changes by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.service.foreseen import pipelines
from perseus_planner.service.store.writer import Writer, unknown_job
from perseus_planner.service.transitions import counting, status_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from perseus_planner.service.model import Report
    from perseus_planner.service.outcomes import JobStatus, PipelineStatus, PlanSet
    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.state import JobState
    from perseus_planner.service.telemetry_book import TelemetryBook


class Knowledge:
    """From any thread.

    Args:
        writer: knows all jobs.
        telemetry: and what they have counted.
        now_s: seconds since the epoch.
    """

    def __init__(self, writer: Writer, telemetry: TelemetryBook, now_s: Callable[[], float]) -> None:
        self._writer, self._telemetry, self._now_s = writer, telemetry, now_s

    def status(self, job: str) -> JobStatus:
        """One job.

        Raises:
            UnknownJob: there is none of that name.
        """
        return self._status(self._state(job), self._now_s())

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs that run, by name."""
        now_s = self._now_s()
        return tuple(self._status(state, now_s) for _, state in sorted(self._writer.jobs.items()))

    def reports(self, job: str) -> tuple[Report, ...]:
        """The reports of a job that count or are to count, in the order in which they came.

        Raises:
            UnknownJob: there is none of that name.
        """
        return counting(self._state(job), self._now_s())

    def curve(self, job: str) -> Curve:
        """The curve of the frontier of a job's pipelines, as profiled.

        Raises:
            UnknownJob: there is none of that name.
        """
        return self._state(job).curve

    def pipelines(self, job: str) -> tuple[int, tuple[PipelineStatus, ...]]:
        """The newest version of a job's plans, and each pipeline with its plan of that version, in order.

        Raises:
            UnknownJob: there is none of that name.
        """
        state = self._state(job)
        return state.published.version, pipelines(state)

    def plans(self, job: str, after: int) -> PlanSet | None:
        """The newest version of a job's plans; None if that is `after` or before.

        Raises:
            UnknownJob: there is none of that name.
        """
        published = self._state(job).published
        return published if published.version > after else None

    @property
    def power_w(self) -> float | None:
        """The power budget of all jobs, watts; None: any."""
        return self._writer.power_w

    def _status(self, state: JobState, now_s: float) -> JobStatus:
        return status_of(state, self._telemetry.of(state.job), now_s)

    def _state(self, name: str) -> JobState:
        state = self._writer.jobs.get(name)
        if state is None:
            raise unknown_job(name)
        return state
