"""What the runtime asks of a rank's part in a service, which an extension makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.verdict import StragglerDetection
    from perseus_planner.runtime.context import RankContext
    from perseus_planner.runtime.decider import ServiceExchange
    from perseus_planner.runtime.job import JobWarnings, TrainingJob
    from perseus_planner.runtime.options import Options
    from perseus_planner.runtime.switching import SwitchTo
    from perseus_planner.runtime.telemetry import Checkpoint

OnStraggling = Callable[["StragglerDetection"], None]


class Link(Protocol):
    """A rank's part in a service. No method but `check` raises, or waits long."""

    def check(self) -> None:
        """Refuse, on rank 0, a job that the service cannot be told of.

        Raises:
            PlannerError: If it cannot; ends all ranks.
        """

    def begin(
        self,
        context: RankContext,
        plan: Plan | None,
        switch_to: SwitchTo,
        exchange: ServiceExchange | None,
    ) -> None:
        """Begin to follow the service.

        Args:
            context: The rank.
            plan: What its pipeline runs by; None for none, or if it makes its own.
            switch_to: Moves all ranks to other plans.
            exchange: With a decider that makes its own plans; None for a fixed plan.
        """

    def on_straggling(self, own: OnStraggling | None) -> OnStraggling:
        """Return what is to be called when this rank's GPU turns out slow, and has recovered; it
        calls `own` too.
        """

    def counted(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Take the accounts of this rank."""

    def stop(self) -> None:
        """Training has ended: take no plan any more."""

    def close(self) -> None:
        """Tell the service that the job has ended."""


MakeLink = Callable[["Options", "TrainingJob", "JobWarnings"], Link]
"""What the offer "service link" of an extension is."""
