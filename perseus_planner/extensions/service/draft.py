"""What some commands change, before it is written.

States, and the mappings in them, are never changed but replaced as a whole. So here and in `store`,
`is` says that nothing has changed, and `is not` that something may have. Only what is a part of a
row is compared by value, by `differ`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perseus_planner.extensions.service.events import with_events
from perseus_planner.extensions.service.models import JobTotals, PowerBudget, UnknownJob
from perseus_planner.extensions.service.rows import CHANGING

if TYPE_CHECKING:
    from perseus_planner.extensions.service.curve import Curve
    from perseus_planner.extensions.service.jobs import JobState

_WRITTEN = (*CHANGING, "registered", "published", "reports", "past")
_NO_BUDGET = PowerBudget(None, ())


def differ(before: JobState | None, after: JobState | None, fields: Sequence[str]) -> bool:
    """Whether one of these fields has another value; of no state, each is None."""
    return any(getattr(before, name, None) != getattr(after, name, None) for name in fields)


@dataclass
class Draft:
    """What the service knows after some commands, before it is written: what one transaction
    changes.
    """

    stored: Mapping[str, JobState] = field(default_factory=dict)  #: The jobs that are stored
    #: Name -> state; None if the job has ended.
    changed: dict[str, JobState | None] = field(default_factory=dict)
    #: Digest -> file and curve, for frontiers that these jobs may be the first to have.
    frontiers: dict[str, tuple[bytes, Curve]] = field(default_factory=dict)
    stored_budget: PowerBudget = _NO_BUDGET
    budget: PowerBudget = _NO_BUDGET  #: The power budget of all jobs
    telemetry: set[str] = field(default_factory=set)  #: Names of jobs whose telemetry is written
    ended: list[JobTotals] = field(default_factory=list)  #: What jobs that ended ran and saved
    #: Returns a job after the policy has decided again.
    reconciled: Callable[[JobState], JobState] = lambda state: state

    def state(self, name: str) -> JobState:
        """Return the state of a job.

        Raises:
            UnknownJob: If no such job runs.
        """
        state = self.find(name)
        if state is None:
            raise unknown_job(name)
        return state

    def find(self, name: str) -> JobState | None:
        """Return the state of a job; None if no such job runs."""
        return self.changed[name] if name in self.changed else self.stored.get(name)

    def jobs(self) -> dict[str, JobState]:
        """Return the states of all jobs by name."""
        jobs = {**self.stored, **self.changed}
        return {name: state for name, state in jobs.items() if state is not None}

    def put(self, state: JobState) -> None:
        """Add a job, or replace its state."""
        self.changed[state.job.name] = state

    def reconcile(self, state: JobState) -> JobState:
        """Put and return a job after the policy has decided again."""
        after = self.reconciled(state)
        self.put(after)
        return after

    def changes(self) -> list[tuple[str, JobState | None, JobState | None]]:
        """Return the name of each job that differs, its state that is stored, and the new one. A
        job that has ended is told before another that has its name now, which has nothing of it.
        """
        changes: list[tuple[str, JobState | None, JobState | None]] = []
        ended = {totals.name for totals in self.ended}
        for name, after in self.changed.items():
            before = self.stored.get(name)
            if before is not None and after is not None and name in ended:
                changes += [(name, before, None), (name, None, after)]
            elif before is not after:
                changes.append((name, before, after))
        return changes

    @property
    def is_written(self) -> bool:
        """Whether there is something to write; telemetry alone is not written at once."""
        return (
            bool(self.telemetry or self.ended)
            or self.budget is not self.stored_budget
            or any(differ(before, after, _WRITTEN) for _, before, after in self.changes())
        )

    def note(self, earlier: Draft, now_s: float) -> None:
        """Add events for what differs from an earlier draft."""
        for name, after in self.changed.items():
            before = earlier.find(name)
            if after is not None and after is not before:
                self.changed[name] = with_events(before, after, now_s)

    def copy(self) -> Draft:
        """Return an independent copy."""
        return replace(
            self,
            changed=dict(self.changed),
            frontiers=dict(self.frontiers),
            telemetry=set(self.telemetry),
            ended=list(self.ended),
        )


def unknown_job(name: str) -> UnknownJob:
    """Return the error for a job that does not run."""
    return UnknownJob(f"no job {name!r} runs here; register it, or list the running ones")
