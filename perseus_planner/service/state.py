"""All that the service knows of one running job, as one frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perseus_planner.service.model import REMEMBERED

if TYPE_CHECKING:
    from perseus_planner.service.answers import Event
    from perseus_planner.service.model import Decision, PlanSet, RegisteredJob, Report, Taken
    from perseus_planner.service.planning.curves import Curve


@dataclass(frozen=True)
class Share:
    """A job's share of a budget."""

    time_s: float  #: Iteration time within the budget
    power_w: float  #: Average power of all its GPUs at that time


@dataclass(frozen=True)
class JobState:
    """A running job inside the service. It is replaced as a whole, so readers never see half a
    change.
    """

    registered: RegisteredJob  #: The job as it was registered
    job: RegisteredJob  #: The job with the deadline and the power budget that hold now
    curve: Curve = field(repr=False)  #: The energy of its frontier
    decision: Decision  #: What its pipelines are to do
    #: Watts that the decision is expected to save, as `policy.saving_w` computes them.
    saving_w: float
    published: PlanSet  #: The newest version of its plans
    planned: Decision  #: The decision that those plans were made for
    #: The version named in answers; above `published.version` while that version is being planned.
    promised: int
    #: Key -> report, for reports that count or will count, in order of arrival.
    reports: Mapping[str, Report] = field(default_factory=dict)
    #: Key -> report, for reports that no longer count, the latest last; at most `REMEMBERED`.
    past: Mapping[str, Report] = field(default_factory=dict)
    taken: Taken | None = None  #: The version that the job runs; None if it has not reported one
    share: Share | None = None  #: The job's share of the power budgets; None if there are none
    events: tuple[Event, ...] = ()  #: What has happened to it, oldest first; see `history`

    @property
    def is_planned(self) -> bool:
        """Whether all promised plans have been published."""
        return self.promised == self.published.version

    def keeping(self, lasting: Iterable[Report]) -> JobState:
        """Return the state in which only the reports in `lasting` count; the others become past
        reports.
        """
        kept = {report.key for report in lasting}
        if len(kept) == len(self.reports):
            return self
        gone = {key: report for key, report in self.reports.items() if key not in kept}
        past = {**self.past, **gone}
        for key in list(past)[:-REMEMBERED]:
            del past[key]
        return replace(
            self,
            reports={key: report for key, report in self.reports.items() if key in kept},
            past=past,
        )
