"""All that the service knows of one job at one moment; frozen, so that readers never see half a change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from perseus_planner.service.model import Decision, Job, Report
    from perseus_planner.service.outcomes import PlanSet, Taken
    from perseus_planner.service.planning.curves import Curve
    from perseus_planner.service.power import Share

REMEMBERED = 256
"""How many reports of a job that no longer count are remembered, so that one delivered again is known."""


@dataclass(frozen=True)
class JobState:
    """A job that runs.

    Attributes:
        registered: as it was registered.
        job: with the deadline and the power that hold now.
        curve: of its frontier.
        decision: what its pipelines are to do.
        saving_w: what that is expected to save, as `policy.saving_w` has it, watts.
        published: the newest version of its plans.
        planned: the decision that those plans were made for.
        promised: the version that reports were told to take effect with; above `published.version` while it is planned.
        reports: key -> report, of those that count or are to count, in the order in which they came.
        past: key -> report, of those that no longer do, the latest last; at most `REMEMBERED`.
        taken: which version the job runs by; None: it has not said.
        share: of the power budgets: what its iterations are to take, and may draw; None: there are none.
    """

    registered: Job
    job: Job
    curve: Curve = field(repr=False)
    decision: Decision
    saving_w: float
    published: PlanSet
    planned: Decision
    promised: int
    reports: Mapping[str, Report] = field(default_factory=dict)
    past: Mapping[str, Report] = field(default_factory=dict)
    taken: Taken | None = None
    share: Share | None = None

    @property
    def is_planned(self) -> bool:
        """Nothing that was promised is still being planned."""
        return self.promised == self.published.version

    def keeping(self, lasting: Iterable[Report]) -> JobState:
        """The same where only `lasting` of the reports are to count; the others are past."""
        kept = {report.key for report in lasting}
        if len(kept) == len(self.reports):
            return self
        gone = {key: report for key, report in self.reports.items() if key not in kept}
        past = {**self.past, **gone}
        for key in list(past)[:-REMEMBERED]:
            del past[key]
        return replace(self, reports={key: report for key, report in self.reports.items() if key in kept}, past=past)
