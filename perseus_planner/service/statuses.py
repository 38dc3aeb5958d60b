"""The status of each job, made once for each change and not for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.service import transitions

if TYPE_CHECKING:
    from perseus_planner.service.answers import JobStatus
    from perseus_planner.service.state import JobState
    from perseus_planner.service.telemetry import Tally


class _Known(NamedTuple):
    """A status, and what it was made of; it holds until `until_s`."""

    state: JobState
    tally: Tally | None
    until_s: float
    status: JobStatus


class Statuses:
    """The last status of each job. It may be used from any thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def of(self, state: JobState, tally: Tally | None, now_s: float) -> JobStatus:
        """Return the status of a job: the same object until something in it changes."""
        name = state.job.name
        known = self._known.get(name)
        if (
            known is None
            or known.state is not state
            or known.tally is not tally
            or known.until_s <= now_s
        ):
            until_s = transitions.next_report_s(state, now_s)
            known = self._known[name] = _Known(
                state, tally, until_s, transitions.status_of(state, tally, now_s)
            )
        return known.status

    def forget(self, name: str) -> None:
        """Forget a job that has ended."""
        self._known.pop(name, None)
